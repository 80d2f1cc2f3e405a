"""Who is where, and who stands out."""

from __future__ import annotations

import pytest

from holdfast.hangs import stacks
from holdfast.hangs.compare import (
    Frame,
    Look,
    Thread,
    WorkerLook,
    folded,
    found,
    full_text,
    picture,
    place,
    stack_lines,
    summary,
)
from tests.promises import promise

USER = "/home/me/train.py"
TORCH = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"

LOCK = (Frame("save", USER, 31, source="lock.acquire()"), Frame("<module>", USER, 90))
COMPUTE = (Frame("forward", USER, 44), Frame("<module>", USER, 90))
OTHER = (Frame("backward", USER, 45), Frame("<module>", USER, 90))
COLLECTIVE = (Frame("all_reduce", TORCH, 2810), Frame("step", USER, 55), Frame("<module>", USER, 90))
FALLEN_BEHIND = (Frame("all_reduce", TORCH, 2810), Frame("step", USER, 54), Frame("<module>", USER, 90))


def worker(
    rank: int, frames: tuple[Frame, ...] = (), state: str = "S", step: int | None = None, **facts: str
) -> WorkerLook:
    threads = (Thread("loader", COMPUTE), Thread("MainThread", frames, is_main=True)) if frames else ()
    return WorkerLook(rank, Look(100 + rank, state, threads, **facts), step=step)


PICTURES: dict[str, tuple[list[WorkerLook], list[int]]] = {
    "all at one place": ([worker(rank, LOCK) for rank in range(4)], []),
    "one against three": ([worker(rank, LOCK if rank == 2 else COMPUTE) for rank in range(4)], [2]),
    "a lock against a collective": ([worker(0, COLLECTIVE), worker(1, LOCK)], [1]),
    "many wait for one": ([worker(rank, LOCK if rank == 3 else COLLECTIVE) for rank in range(8)], [3]),
    "one waits for many": ([worker(rank, COLLECTIVE if rank == 3 else LOCK) for rank in range(4)], [0, 1, 2]),
    "all wait, one at another line": ([worker(r, FALLEN_BEHIND if r == 1 else COLLECTIVE) for r in range(4)], [1]),
    "a stopped one": ([worker(rank, LOCK, "T" if rank == 1 else "S") for rank in range(2)], [1]),
    "stopped ones at two places": (
        [worker(0, COMPUTE, "T"), worker(1, LOCK, "T"), worker(2, LOCK, "T"), worker(3, OTHER)],
        [0, 1, 2],
    ),
    "a stopped one among many places": ([worker(0, COMPUTE), worker(1, OTHER), worker(2, LOCK, "T")], [2]),
    "one in the kernel": ([worker(0, LOCK), worker(1, (), "D", trouble="no luck")], [1]),
    "two places, nothing tells": ([worker(0, COMPUTE), worker(1, OTHER)], []),
    "the lower step": ([worker(0, COMPUTE, step=8), worker(1, OTHER, step=7)], [1]),
    "two odd ones at two places": (
        [worker(0, LOCK), worker(1, OTHER), *(worker(r, COLLECTIVE) for r in (2, 3))],
        [0, 1],
    ),
    "no stacks at all": ([worker(rank, trouble="py-spy is not installed") for rank in range(3)], []),
    "one without stacks": ([worker(0, trouble="gone"), *(worker(r, COMPUTE) for r in (1, 2))], [0]),
    "a worker alone": ([worker(0, LOCK)], []),
}


@promise("""hangs.worker-stands-run-collective: The worker that stands out is the one that cannot run, is not in a
    collective, is in the smaller group, or is behind, in this order.""")
@pytest.mark.parametrize(("looks", "expected"), PICTURES.values(), ids=PICTURES)
def test_who_is_odd(looks: list[WorkerLook], expected: list[int]) -> None:
    seen = picture(reversed(looks))
    assert sorted(rank for group in seen.odd for rank in group.ranks) == expected
    assert sorted(rank for group in seen.groups for rank in group.ranks) == sorted(look.rank for look in looks)
    assert seen.groups[: len(seen.odd)] == seen.odd, "they come first"
    for look in looks:
        assert found(seen, look.rank).startswith("it was ")


def test_native_frames_do_not_divide() -> None:
    poll, recv = (Frame(name, "/lib/libc.so.6", 0, is_native=True) for name in ("poll", "recv"))
    assert len(picture([worker(0, (poll, *LOCK)), worker(1, (recv, *LOCK))]).groups) == 1


@pytest.mark.parametrize(
    ("looks", "all_wait", "is_here"),
    [
        ([worker(0, COLLECTIVE), worker(1, COLLECTIVE)], True, False),
        ([worker(0, COLLECTIVE), worker(1, FALLEN_BEHIND, step=3)], True, True),
        ([worker(0, COLLECTIVE), worker(1, LOCK)], False, True),
        ([worker(0, LOCK), worker(1, LOCK)], False, True),
    ],
)
def test_the_cause_is_here_unless_all_wait_and_none_stands_out(
    looks: list[WorkerLook], all_wait: bool, is_here: bool
) -> None:
    assert (picture(looks).is_all_in_collective, picture(looks).is_cause_here) == (all_wait, is_here)


@pytest.mark.parametrize(("odd", "pids"), [((1, 3), [101, 103]), ((), [100])])
def test_every_odd_worker_is_blamed_or_the_first_of_all(odd: tuple[int, ...], pids: list[int]) -> None:
    looks = [worker(rank, LOCK if rank in odd or not odd else COLLECTIVE) for rank in range(5)]
    blamed = list(picture(looks).blamed("no output for 9 s"))
    assert [pid for pid, _, _ in blamed] == pids
    for _, words, stack in blamed:
        assert words.startswith("no output for 9 s; it was at train.py:31 in save")
        assert stack.splitlines() == [f"save ({USER}:31)   lock.acquire()", f"<module> ({USER}:90)"]


RECORD = Frame("wrapper", TORCH.replace("distributed_c10d", "elastic/multiprocessing/errors/__init__"), 356)
FSDP = Frame("forward", TORCH.replace("distributed_c10d", "fsdp/fully_sharded_data_parallel"), 850)
GLOO = Frame("gloo::transport::tcp::UnboundBuffer::waitRecv", "libtorch_cpu.so", 0, is_native=True)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ((*LOCK, RECORD), False),
        ((*COMPUTE, FSDP, RECORD), False),
        ((Frame("forward", "/env/lib/python3.11/site-packages/torch/nn/linear.py", 12), FSDP, *LOCK), False),
        ((Frame("save", "/home/me/nccl-tests/MPI_run/train.py", 3),), False),
        ((Frame("wait", TORCH, 3), *LOCK), True),
        ((Frame("recv", "/home/me/net.py", 3), *LOCK), False),
        ((Frame("barrier", "/home/me/net.py", 3), *LOCK), True),
        ((GLOO, *LOCK), True),
    ],
)
def test_what_is_a_collective(frames: tuple[Frame, ...], expected: bool) -> None:
    assert bool(worker(0, frames).collective) == expected


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (worker(0, LOCK), "at train.py:31 in save `lock.acquire()`"),
        (worker(0, COLLECTIVE), "at train.py:55 in step"),
        (worker(0, (Frame("wait", "/usr/lib/python3.11/threading.py", 320),)), "at threading.py:320 in wait"),
        (worker(0, waits_in="nfs_wait_bit_killable"), "in the kernel's nfs_wait_bit_killable"),
        (worker(0), "at an unknown place"),
        (
            WorkerLook(0, Look(1), (Look(2, threads=(Thread("", LOCK, True),)),)),
            "at train.py:31 in save `lock.acquire()`",
        ),
    ],
)
def test_places(look: WorkerLook, expected: str) -> None:
    assert place(look) == expected


def test_a_worker_that_did_not_answer_does_not_stand_out_in_the_report() -> None:
    seen = picture([worker(0, trouble="no answer in time"), *(worker(rank, COLLECTIVE) for rank in (1, 2))])
    assert [each.ranks for each in folded(seen)] == [(1, 2)]


SHELL = WorkerLook(2, Look(1, "S", trouble="no Python"), (Look(2, "T", (Thread("MainThread", LOCK, True),)),))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (
            worker(2, LOCK),
            "it was at train.py:31 in save `lock.acquire()`, while ranks 0, 1, 3 were at train.py:55 in step",
        ),
        (worker(2, LOCK, "T"), "it was stopped by a signal such as SIGSTOP, at train.py:31 in save"),
        (SHELL, "it was stopped by a signal such as SIGSTOP, at train.py:31 in save"),
        (worker(2, COLLECTIVE), "it was at train.py:55 in step; all 4 workers of this node waited for peers"),
    ],
)
def test_the_sentence_about_a_worker(odd: WorkerLook, words: str) -> None:
    assert found(picture([odd, *(worker(rank, COLLECTIVE) for rank in (0, 1, 3))]), 2).startswith(words)


def test_the_summary_has_odd_ones_first_with_what_is_known() -> None:
    looks = [worker(rank, LOCK if rank == 2 else COLLECTIVE, step=41 if rank == 2 else 42) for rank in range(4)]
    lines = summary(picture(looks)).splitlines()
    assert lines[0] == "rank 2 (pid 102) stands out, step 41:"
    assert lines[1] == "    save (train.py:31)   lock.acquire()"
    assert lines[3] == "ranks 0, 1, 3 (3 workers) are here, step 42:"
    assert lines[4] == "    all_reduce (torch/distributed/distributed_c10d.py:2810)"


def test_a_summary_of_many_places_and_deep_stacks_is_bounded() -> None:
    looks = [worker(rank, tuple(Frame(f"f{n}", USER, rank) for n in range(100))) for rank in range(100)]
    text = summary(picture(looks))
    assert "... and 95 more places" in text
    assert "... (91 more)" in text
    assert len(text.splitlines()) < 70


def test_without_stacks_the_reason_stands_there() -> None:
    text = summary(picture([worker(0, trouble="py-spy is not installed", waits_in="futex_wait")]))
    assert "no stack: py-spy is not installed" in text
    assert "futex_wait" in text


def test_long_native_names_lose_their_templates() -> None:
    name = "pybind11::cpp_function::initialize<a<b>, c (*)(int)>(x const&)::{lambda(y)#1}::_FUN"
    [line] = stack_lines([Frame(name, "/x/libtorch_python.so", 0, is_native=True)])
    assert line == "pybind11::cpp_function::initialize::{lambda#1}::_FUN (libtorch_python.so)"


@pytest.mark.parametrize("name", ["<lambda>", "operator<", "a>b", "(", "<<<<", ")))", ""])
def test_odd_names_are_survived(name: str) -> None:
    assert stack_lines([Frame(name, "x.so", 0, is_native=True)])[0].endswith(" (x.so)")


def test_what_is_ours_or_has_no_name_is_left_out() -> None:
    own = Frame("<module>", "/x/holdfast/process/spawner/bootstrap.py", 500)
    nameless = Frame("0x7f00", "libc.so.6", 0, is_native=True)
    assert stack_lines([nameless, *LOCK, own]) == ["save (train.py:31)   lock.acquire()", "<module> (train.py:90)"]


def test_the_full_text_has_every_thread_of_every_process() -> None:
    child = Look(500, "S", (Thread("MainThread", OTHER, True),), how="py-spy", command="python loader.py")
    stuck = WorkerLook(1, Look(101, "D", (), trouble="no luck", waits_in="nfs"), (child,), 3.2, 7)
    text = full_text(picture([stuck, worker(0, LOCK)]))
    for piece in (
        "rank 0",
        "thread loader (waiting)",
        "rank 1, step 7, last output 3 s ago",
        "no stacks: no luck",
        "in uninterruptible sleep in the kernel",
        "process 500 (by py-spy): python loader.py",
        f"backward ({USER}:45)",
    ):
        assert piece in text
    assert text.index("rank 0") < text.index("rank 1")


@promise("""output.names-functions-files-stacks: The names of functions and files in stacks are escaped, and stay on
    their line.""")
def test_names_that_a_program_has_chosen_stay_on_their_line() -> None:
    hostile = "f\nrank 9 stands out:\x1b[2J"
    frames = '  File "a\x1b.py", line 3 in f\x1b\n', f'  File "b", line {"9" * 5000} in g\n'
    (thread,) = stacks.parse_faulthandler(f"Current thread 0x01 (most recent call first):\n{''.join(frames)}")
    assert [(frame.name, frame.file) for frame in thread.frames] == [("f\\x1b", "a\\x1b.py")]
    said = {"thread_name": hostile, "os_thread_id": 1, "active": True}
    frame = {"name": hostile, "filename": hostile, "line": 1, "module": None}
    thread = stacks._thread_of({**said, "frames": [frame]}, 1)
    look = Look(1, threads=(thread,))
    shown = full_text(picture([WorkerLook(0, look)]))
    assert "\x1b" not in shown
    assert not [line for line in shown.splitlines() if line.startswith("rank 9")]
