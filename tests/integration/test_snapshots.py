"""Slots between a real spawner and real workers: whatever workers do, what was committed stays whole."""

from __future__ import annotations

import os
import random
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.process import DefaultLogsSpecs, Std
from holdfast.process.spawner.client import SpawnerLink
from holdfast.process.workers.group import GroupSpec, PContext
from holdfast.process.workers.start import new_group
from holdfast.snapshots import api
from holdfast.snapshots.slots import ranges_of
from tests import entrypoints, support
from tests.integration.test_warm import HARMLESS
from tests.promises import promise, proves

PROLOGUE = """
import os, sys
import holdfast
from holdfast.snapshots import SnapshotError, api
from holdfast.snapshots.messages import *
rank = int(os.environ["RANK"])

def attempt(what, *args, **more):
    try:
        return what(*args, **more)
    except SnapshotError as error:
        return str(error)

def save(step, value, **more):
    with snapshots.save(step, **more) as out:
        out["value"] = value

def raw(kind, *numbers):
    kind, numbers, text, fds = snapshots._ask(kind, *numbers)
    return text or numbers[0]

snapshots = holdfast.snapshots.open()
"""


class Rounds:
    """One spawner and the rounds of its workers, as an agent of ranks that begin at `first` orders them."""

    def __init__(self, tmp_path: Path) -> None:
        self.link = SpawnerLink.launch()
        self.limit = 64 << 20
        self.number = 0
        self._path = tmp_path

    def begin(
        self, program: Any, ranks: int = 1, *, first: int = 0, world: int | None = None, load: bool = True, **more: Any
    ) -> PContext:
        """The group of the next round, which is given the newest snapshot that is held."""
        self.number += 1
        world = world or ranks
        held = self.link.held
        chosen = max(held) if load and held else None
        of = [*range(first, first + ranks)]
        self.order_begin(self.limit, 1, self.number, world, of, chosen, "nothing is there" * (not held))
        logs = DefaultLogsSpecs(str(self._path / f"round{self.number}"), redirects=Std.ALL)
        entrypoint, args = program, tuple[str, ...]()
        if isinstance(program, str):
            path = self._path / f"round{self.number}.py"
            path.write_text(PROLOGUE + textwrap.dedent(program))
            entrypoint, args = sys.executable, (str(path),)
        spec = GroupSpec("t", entrypoint, logs, **more)
        envs = {each: {"RANK": str(each + first), "WORLD_SIZE": str(world)} for each in range(ranks)}
        return new_group(spec, dict.fromkeys(range(ranks), args), envs, link=self.link)

    def order_begin(self, *round: Any) -> None:
        self.link.order_of_snapshots("begin", *round)

    def run(self, program: Any, ranks: int = 1, **more: Any) -> list[list[str]]:
        """The lines of each worker. All must succeed."""
        context = self.begin(program, ranks, **more)
        context.start()
        context.wait(support.DEADLINE_S)
        context.close(timeout=5)
        outs = [Path(context.stdouts[rank]).read_text().splitlines() for rank in range(ranks)]
        ends = {rank: code for rank, (code, *_) in context.ends().items()}
        assert set(ends.values()) == {0}, (ends, [Path(path).read_text() for path in context.stderrs.values()])
        return outs

    def steps(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """What is held: step and ranges of ranks."""
        return [(snapshot[2], ranges_of(ranks)) for snapshot, ranks in sorted(self.link.held.items(), reverse=True)]


@pytest.fixture
def rounds(tmp_path: Path) -> Iterator[Rounds]:
    rounds = Rounds(tmp_path)
    yield rounds
    rounds.link.close()


SHOW = """
saved = snapshots.load()
print(saved and (saved.step, saved.world_size, saved.rank, saved["value"]))
"""


@promise("snapshots.outlive-workers: What workers have saved outlives them, and the workers of the next round load it.")
def test_what_was_saved_outlives_its_workers(rounds: Rounds) -> None:
    program = SHOW + "save(5, ('of', rank)); save(6, ('still of', rank)); print(snapshots.is_kept)"
    assert rounds.run(program, 2) == [["None", "True"]] * 2
    assert rounds.steps() == [(6, [(0, 2)]), (5, [(0, 2)])]
    assert rounds.run(SHOW, 2) == [["(6, 2, 0, ('still of', 0))"], ["(6, 2, 1, ('still of', 1))"]]


@proves("snapshots.outlive-workers")
@pytest.mark.parametrize("kind", ["warm", "forkserver", "spawn"])
def test_warm_workers_and_functions_have_slots_as_well(rounds: Rounds, kind: str) -> None:
    rounds.run("save(3, 'of the first round')")
    if kind == "warm":
        assert rounds.run(SHOW, preload=(HARMLESS,)) == [["(3, 1, 0, 'of the first round')"]]
    else:
        assert rounds.run(entrypoints.show_snapshot, start_method=kind) == [["3 of the first round"]]


def test_outside_a_run_nothing_is_kept() -> None:
    snapshots = holdfast.snapshots.open()
    assert not snapshots.is_kept
    with snapshots.save(1) as out:
        out["value"] = object()
    assert snapshots.load() is None
    assert holdfast.snapshots.open() is snapshots


def test_threads_that_open_at_once_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def socket_of_round() -> None:
        asked.set()
        answer.wait(support.DEADLINE_S)

    monkeypatch.setattr(api, "_opened", None)
    monkeypatch.setattr(api, "_socket_of_round", socket_of_round)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(api.open())) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert asked.wait(support.DEADLINE_S)
    threads[1].join(0.1)  # It must not go on by itself.
    answer.set()
    for thread in threads:
        thread.join()
    assert found[0] is found[1]


@promise("snapshots.raise-saves-nothing: A block of `save` that raises saves nothing.")
def test_a_block_that_raises_saves_nothing(rounds: Rounds) -> None:
    program = """
    save(1, "kept")
    try:
        with snapshots.save(2) as out:
            out["value"] = "half"
            raise KeyError
    except KeyError:
        pass
    try:
        save(3, object())
    except holdfast.snapshots.api.layout.LayoutError as error:
        print(error)
    """
    assert rounds.run(program) == [["value: a builtins.object cannot be kept"]]
    assert rounds.steps() == [(1, [(0, 1)])]


def test_a_child_of_a_worker_has_no_part_in_it(rounds: Rounds) -> None:
    program = """
    if (child := os.fork()) == 0:
        save(9, "of a child")
        os._exit(snapshots.is_kept)
    print(os.waitpid(child, 0)[1], VARIABLE in os.environ)
    save(1, "of the worker")
    """
    assert rounds.run(program) == [["0 False"]]
    assert rounds.steps() == [(1, [(0, 1)])]


@proves("snapshots.rank-ahead-waits")
def test_a_rank_that_is_ahead_waits_and_then_gives_up_with_a_clear_error(rounds: Rounds) -> None:
    program = """
    api._WANT_PATIENCE_S = 0.2
    if rank == 0:
        save(1, "first")
        print(attempt(save, 2, "second"))
    """
    late = "step 2 cannot be saved: other ranks of this node have not saved the step before it (waited 0.2 s)"
    assert rounds.run(program, 2) == [[late], []]
    assert rounds.steps() == [(1, [(0, 1)])]


@promise("snapshots.memory-limit: What does not fit into `--snapshot-memory` is refused, and older snapshots stay.")
def test_what_does_not_fit_is_refused_and_nothing_is_lost(rounds: Rounds) -> None:
    rounds.limit = 4 << 20
    program = """
    save(1, bytearray(2 << 20))
    print(attempt(save, 2, bytearray(2 << 20)))
    save(3, bytearray(100))
    """
    said = "2.0 MiB more do not fit: 3.0 MiB of --snapshot-memory 4.0 MiB are in use"
    assert rounds.run(program) == [[said]]
    assert rounds.steps() == [(3, [(0, 1)]), (1, [(0, 1)])]
    assert rounds.link.snapshot_bytes <= rounds.limit


def test_memory_that_the_host_does_not_have_is_an_error(rounds: Rounds) -> None:
    rounds.limit = 1 << 60
    program = """
    save(1, "small")
    print(attempt(raw, WANT, 1 << 50))
    save(2, "small again")
    """
    (said,) = rounds.run(program)[0]
    assert said == f"{1 << 50} bytes of memory are not to be had on this host: Cannot allocate memory"
    assert rounds.steps() == [(2, [(0, 1)]), (1, [(0, 1)])]


def test_slots_grow_and_are_used_again(rounds: Rounds) -> None:
    program = """
    for step in range(20):
        save(step, bytes([step]) * (100_000 * (1 + step // 5)))
    print(len(snapshots._memory))
    """
    assert rounds.run(program) == [["2"]]
    assert rounds.link.snapshot_bytes == 2 << 19
    assert rounds.run("print(set(snapshots.load()['value']))") == [["{19}"]]


@promise(
    "snapshots.other-world-size: A world of another size loads replicated state from any rank, and sharded state with "
    "`reshard`; without it there is nothing to load, and the log says why."
)
def test_a_world_of_another_size(rounds: Rounds) -> None:
    rounds.run("save(4, [rank], replicated=True)", 2)
    assert rounds.run(SHOW, 3)[2] in (["(4, 2, 0, [0])"], ["(4, 2, 1, [1])"])
    rounds.run("save(5, [rank])", 2)
    assert rounds.run("print(snapshots.load())") == [["None"]]
    log = (rounds._path / "round4").rglob("stderr.log")
    assert "step 5 was saved by 2 workers, and this world has 1: it loads only with reshard=" in next(log).read_text()
    joined = "saved = snapshots.load(reshard=lambda parts: {'value': [part['value'] for part in parts]}); "
    assert rounds.run(joined + "print(saved.step, saved['value'])", 3) == [["5 [[0], [1]]"]] * 3
    assert rounds.run(joined + "print(saved.step, saved['value'])", 2) == [["5 [0]"], ["5 [1]"]]


def test_a_part_that_is_not_on_this_node_is_an_error_and_not_a_new_start(rounds: Rounds) -> None:
    rounds.run("save(1, rank)", 2, world=4)
    assert rounds.run("print(attempt(snapshots.load))", 2, first=2, world=4) == [
        [f"rank {rank} of step 1 is not on this node and cannot be fetched"] for rank in (2, 3)
    ]


@promise(
    "snapshots.stays: Arrays that `load` and `stage` return can be written without a change to the snapshot, and no "
    "later save changes them, nor in a forked child."
)
def test_what_is_loaded_or_staged_stays_as_it_was(rounds: Rounds) -> None:
    rounds.run("save(1, bytearray([1]) * 10_000)")
    program = """
    loaded, again = (snapshots.load()["value"] for _ in range(2))
    loaded[0] = 99
    staged = [snapshots.stage(step, {"value": bytearray([step]) * 10_000})["value"] for step in range(2, 7)]
    staged[-1][0] = 99
    print([set(each) for each in (loaded, again, *staged)])
    read, write = os.pipe()
    if not os.fork():
        os.read(read, 1)
        os._exit(set(staged[-1]) != {6, 99})
    for step in (7, 8, 9):
        save(step, bytearray([step]) * 10_000)
    os.write(write, b"x")
    print(os.wait()[1])
    """
    assert rounds.run(program) == [["[{1, 99}, {1}, {2}, {3}, {4}, {5}, {99, 6}]", "0"]]
    assert rounds.run("print(set(snapshots.load()['value']))") == [["{9}"]]


def test_mappings_go_with_their_arrays(rounds: Rounds) -> None:
    program = """
    staged = snapshots.stage(1, {"value": bytearray(10_000)})
    print(len(snapshots._shown))
    del staged
    print(len(snapshots._shown))
    """
    assert rounds.run(program) == [["1", "0"]]


CHECKPOINT = """
    import threading
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from holdfast.snapshots.torch import Stager

    class LateWriter(dcp.FileSystemWriter):
        def write_data(self, *args):
            assert is_time.wait(60)
            return super().write_data(*args)

    is_time, state = threading.Event(), {"weights": torch.full((10_000,), 1.0), "note": 1}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    files = LateWriter(sys.argv[0] + ".files")
    written = dcp.async_save(state, storage_writer=files, async_stager=Stager(snapshots, 1))
    for step in range(2, 6):
        state["weights"].fill_(step), state.update(note=step)
        Stager(snapshots, step).stage(state)
    is_time.set(), written.result()
    loaded = {"weights": torch.zeros(10_000), "note": 0}
    dcp.load(loaded, checkpoint_id=sys.argv[0] + ".files")
    print(set(loaded["weights"].tolist()), loaded["note"])
"""


@promise(
    "snapshots.stager: `torch.distributed.checkpoint.async_save` with a `Stager` writes the state of its step from the "
    "memory of the snapshot, even if later steps are saved meanwhile."
)
def test_a_checkpoint_that_is_written_late_is_of_its_step(rounds: Rounds) -> None:
    support.need_module("torch")
    assert rounds.run(CHECKPOINT) == [["{1.0} 1"]]
    program = """
    import torch
    from holdfast.snapshots.torch import load_into
    weights = torch.zeros(10_000)
    into = {"weights": weights, "note": 0}
    load_into(into, snapshots.load())
    print(set(weights.tolist()), into["note"])
    """
    assert rounds.run(program) == [["{5.0} 5"]]


@promise("snapshots.checksum: With `checksum=True` a load detects bytes that have changed.")
def test_bytes_that_have_changed_are_detected(rounds: Rounds) -> None:
    rounds.run("""
    save(1, bytearray(1000), checksum=True)
    (memory,) = snapshots._memory.values()
    memory[800] = 1  # It lies in the array.
    """)
    said = "step 1 of rank 0 cannot be read: the checksum of an array of 1000 bytes is wrong"
    assert rounds.run("print(attempt(snapshots.load))") == [[said]]


# Workers that die, and workers that lie.

SAVES = """
saved = snapshots.load()
if saved is not None:
    values = saved["value"]
    assert len(set(values)) == 1 and values[0] == saved.step % 251, (saved.step, set(values))
    assert saved["size"] == len(values)
step = saved.step + 1 if saved is not None else 0
while True:
    size = 300_000 + step % 7
    with snapshots.save(step) as out:
        out["value"], out["size"] = bytes([step % 251]) * size, size
    step += 1
"""


@promise("snapshots.commit-atomic: A worker that is killed at any byte of a save leaves the last snapshot whole.")
@pytest.mark.parametrize("ranks", [1, 3])
def test_workers_killed_at_any_byte_leave_the_last_snapshot_whole(rounds: Rounds, ranks: int) -> None:
    chance = random.Random(ranks)
    last = -1
    for _ in range(100 if support.is_test_all() else 8):
        context = rounds.begin(SAVES.replace("step += 1", "step += 1 # all save, or none is common"), ranks)
        context.start()
        pids = [*context.pids().values()]
        before = rounds.link.common_step
        support.wait_until(lambda b=before: rounds.link.reports() == [] and rounds.link.common_step != b, "it saves")  # type: ignore[misc]
        time.sleep(chance.random() * 0.05)
        for pid in chance.sample(pids, chance.randint(1, ranks)):
            os.kill(pid, signal.SIGKILL)
        result = context.wait(support.DEADLINE_S)
        context.close(timeout=0)
        assert result is not None
        assert {failure.exitcode for failure in result.failures.values()} == {-signal.SIGKILL}, result.failures
        whole = [step for step, ranges in rounds.steps() if ranges == [(0, ranks)]]
        assert whole, rounds.steps()
        assert whole[0] > last
        assert rounds.link.common_step == whole[0]
        # The next round must have a step that every rank has.
        rounds.link.parts = [each for each in rounds.link.parts if len(rounds.link.held[each[0]]) == ranks]
        last = whole[0]


def test_a_spawner_that_is_killed_takes_its_slots_with_it(rounds: Rounds) -> None:
    rounds.run("save(1, 'gone soon')")
    os.kill(rounds.link.pid, signal.SIGKILL)
    support.wait_until(lambda: rounds.link.reports() and True, "its end is noticed")
    assert (rounds.link.held, rounds.link.common_step, rounds.link.snapshot_bytes) == ({}, None, 0)


@promise(
    "snapshots.lies-harm-own-rank: A worker that asks for nonsense gets an error, and one that sends junk loses its "
    "snapshots for this round. Other ranks notice nothing."
)
def test_a_worker_that_asks_for_nonsense_gets_errors(rounds: Rounds) -> None:
    program = """
    if rank == 1:
        print(attempt(raw, COMMIT, 77, 1, 10))
        raw(COMMIT, raw(WANT, 5000), 7, 10)
        print(attempt(raw, LOAD, 1 << 40))
    else:
        save(7, "honest")
    """
    assert rounds.run(program, 2) == [[], ["slot 77 was not given to rank 1", "nothing is there"]]
    assert rounds.steps() == [(7, [(0, 2)])]
    honest, lying = rounds.run("print(attempt(snapshots.load))", 2)
    assert "value" in honest[0]
    assert lying[0].startswith("step 7 of rank 1 cannot be read: ")


JUNK = {
    "short": "snapshots._sock.send(b'x')",
    "long": "snapshots._sock.send(b'x' * 5000)",
    "unknown kind": "snapshots._sock.send(packed(99, 1))",
    "an answer": "snapshots._sock.send(packed(SLOT, 1, 1))",
    "descriptors": "import socket; socket.send_fds(snapshots._sock, [b'x'], [0, 1, 2])",
    "flood": """
        snapshots._sock.settimeout(5)
        try:
            while True:
                snapshots._sock.send(packed(LOAD, 1, 0))
        except ConnectionError:
            pass
        """,
}


@proves("snapshots.lies-harm-own-rank")
@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_junk_costs_the_worker_its_socket_and_nobody_else(
    rounds: Rounds, junk: str, caplog: pytest.LogCaptureFixture
) -> None:
    rounds.run("save(1, 'x', replicated=True)", 2)
    lines = textwrap.indent(textwrap.dedent(junk).strip(), "    ")
    program = f"""
save(2, 'saved', replicated=True)
if rank == 1:
{lines}
    print(attempt(save, 3, 'not saved'))
else:
    save(3, 'saved', replicated=True)
"""
    _, (said,) = rounds.run(program, 2)
    assert said.startswith("this worker has no connection to its spawner any more")
    assert rounds.steps()[0] == (3, [(0, 1)])
    warned = [
        record.getMessage() for record in caplog.records if "can save no snapshots any more" in record.getMessage()
    ]
    assert len(warned) == 1
    assert warned[0].startswith("rank 1 can save no snapshots any more in this round: ")
    assert rounds.run(SHOW, 2)[1] == ["(3, 2, 0, 'saved')"]  # The next round has a new socket.


def test_a_worker_that_has_closed_its_descriptors_gets_an_error(rounds: Rounds) -> None:
    """As programs do that become daemons."""
    program = "import os; os.close(snapshots._sock.fileno())"
    [said] = rounds.run(f"{program}; print(attempt(save, 1, 'x')); print(attempt(snapshots.load))", 1)
    assert said == ["this worker has no connection to its spawner any more: [Errno 9] Bad file descriptor"] * 2


def test_a_worker_of_an_older_round_can_commit_nothing(rounds: Rounds, tmp_path: Path) -> None:
    """It is killed with its round; here its socket is looked at, which it might have left to another process."""
    context = rounds.begin("save(1, 'x'); print('saved', flush=True); import time; time.sleep(600)")
    context.start()
    support.wait_until(lambda: "saved" in Path(context.stdouts[0]).read_text(), "it has saved")
    (pid,) = context.pids().values()
    fds = Path(f"/proc/{rounds.link.pid}/fd")
    sockets = {os.readlink(each) for each in fds.iterdir() if os.readlink(each).startswith("socket:")}
    assert len(sockets) == 2  # The agent's and the worker's.
    context.close(signal.SIGKILL, 0)
    rounds.run("save(2, 'y')")
    assert len([each for each in fds.iterdir() if os.readlink(each) in sockets]) == 1
    assert not support.alive(pid)
