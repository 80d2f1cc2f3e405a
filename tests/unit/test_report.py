"""The root cause among several failures, and the words for it."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from holdfast import escape
from holdfast.failures.report import (
    CAUSE_LINE_LIMIT_CHARS,
    Evidence,
    FailureFacts,
    cause_line,
    exception_name,
    failure_block,
    folded,
    follows_from_another,
    kind_of,
    ranks_text,
    read_error,
    report,
    root_cause,
    signal_name,
    stopped_text,
)

NCCL_ABORT = """\
[rank1]:[E ProcessGroupNCCL.cpp:537] Some operations have failed or timed out.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4) ran for 1800011 ms
Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x96
frame #1: clone + 0x3f
"""

SEGFAULT_STACK = """\
Fatal Python error: Segmentation fault

Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f2 (most recent call first):
  File "/home/me/train.py", line 7 in step
  File "/home/me/train.py", line 12 in <module>
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ValueError: boom", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("KeyError: 'connection'", False),
        ("TimeoutError: the download took too long", False),
        (
            "DistNetworkError: The server socket has failed to listen: EADDRINUSE, address already in use",
            False,
        ),
        (
            "DistBackendError: NCCL watchdog thread terminated with exception: CUDA error: device assert",
            False,
        ),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("requests.exceptions.ConnectionError: HTTPConnectionPool(host='x')", True),
        ("brokenpipeerror", True),
        ("SignalException: Process 12 got signal: 15", True),
        ("RuntimeError: [/x/gloo/pair.cc:537] Read error [127.0.0.1]:27528: Connection reset by peer.", True),
        ("RuntimeError: [/x/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1", True),
        (
            "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete",
            True,
        ),
        ("RuntimeError: Gloo connectFullMesh failed with ... CONNECTION REFUSED, remote=[::1]:3", True),
        ("DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.", True),
        ("DistNetworkError: Broken pipe", True),
        ("DistStoreError: wait timeout after 6000ms, keys: /default_pg/0//x", True),
        ("DistStoreError: Timed out after 5 seconds waiting for clients. 1/2 clients joined.", True),
        ("DistNetworkError: The client socket has timed out after 4000ms while trying to connect", True),
        ("RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms", True),
        (
            "DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error",
            True,
        ),
        ("DistBackendError: NCCL error\nncclRemoteError: A call failed\nLast error:\n", True),
        ("RuntimeError: Horovod has been shut down. This was caused by an exception", True),
    ],
)
def test_an_exception_is_judged_by_its_type_and_words(text: str, expected: bool) -> None:
    assert follows_from_another(FailureFacts(1, text)) is expected


@pytest.mark.parametrize(
    ("exitcode", "text", "stderr_tail", "expected"),
    [
        pytest.param(-signal.SIGSEGV, "", "", False, id="segfault"),
        pytest.param(-signal.SIGKILL, "", "", False, id="killed"),
        pytest.param(-signal.SIGTERM, "", "", True, id="our own SIGTERM"),
        pytest.param(128 + signal.SIGTERM, "", "", True, id="SIGTERM seen through a shell"),
        pytest.param(-signal.SIGPIPE, "", "", True, id="broken pipe without an exception"),
        pytest.param(-signal.SIGTERM, "ValueError: boom", "", False, id="raised, then stopped"),
        pytest.param(-signal.SIGSEGV, "ConnectionResetError: x", "", True, id="raised, then crashed"),
        pytest.param(-signal.SIGABRT, "", NCCL_ABORT, True, id="watchdog's abort"),
        pytest.param(-signal.SIGABRT, "", "free(): invalid pointer\n", False, id="abort of its own"),
        pytest.param(-signal.SIGSEGV, "", "Connection refused\n", False, id="a signal outweighs stderr"),
        pytest.param(7, "", "", False, id="plain exit code"),
        pytest.param(1, "", "x\nRuntimeError: Connection refused\n\n", True, id="last line of stderr"),
        pytest.param(1, "", "Connection refused\nValueError: boom\n", False, id="only the last line counts"),
        pytest.param(1, "", "[rank0]: BrokenPipeError: x\n", True, id="torch's prefix"),
        pytest.param(1, "ValueError: boom", "Connection refused\n", False, id="the exception outweighs stderr"),
    ],
)
def test_an_end_is_judged_by_what_is_known(exitcode: int, text: str, stderr_tail: str, expected: bool) -> None:
    facts = FailureFacts(exitcode, text, evidence=Evidence(stderr_tail=stderr_tail))
    assert follows_from_another(facts) is expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ValueError: boom", "ValueError"),
        ("a.b.MyError", "MyError"),
        ("[rank12]: torch.distributed.DistStoreError: x", "DistStoreError"),
        ("two words: x", ""),
        ("", ""),
    ],
)
def test_exception_name(text: str, name: str) -> None:
    assert exception_name(text) == name


def failure(text: str = "", order: int | None = None, timestamp: float = 0, exitcode: int = 1) -> FailureFacts:
    return FailureFacts(exitcode, text, order, timestamp)


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        pytest.param({3: failure()}, 3, id="the only one"),
        pytest.param({0: failure(exitcode=-15)}, 0, id="the only one, even if a consequence"),
        pytest.param(
            {0: failure("BrokenPipeError: x", 0, 1), 1: failure("ValueError: x", 9, 9)},
            1,
            id="speaks for itself",
        ),
        pytest.param({0: failure(order=2, timestamp=1), 1: failure(order=1, timestamp=5)}, 1, id="order"),
        pytest.param({0: failure(order=2, timestamp=5), 1: failure(timestamp=3)}, 1, id="time without order"),
        pytest.param({0: failure(timestamp=5), 1: failure(timestamp=3)}, 1, id="time"),
        pytest.param({4: failure(timestamp=3), 1: failure(timestamp=3)}, 4, id="tie"),
        pytest.param(
            # Compared in pairs these form a circle: 0 before 1 and 1 before 2 by time, 2 before 0 by order.
            {0: failure(order=1, timestamp=1), 1: failure(timestamp=2), 2: failure(order=0, timestamp=3)},
            1,
            id="circle",
        ),
        pytest.param(
            {
                0: FailureFacts(-6, order=0, evidence=Evidence(stderr_tail=NCCL_ABORT)),
                1: FailureFacts(-9, order=1, evidence=Evidence(memory="the kernel did it")),
            },
            1,
            id="out of memory outranks a watchdog's abort",
        ),
    ],
)
def test_root_cause(failures: dict[int, FailureFacts], expected: int) -> None:
    assert root_cause(failures) == expected


@pytest.mark.parametrize(
    ("rank", "facts", "line"),
    [
        (
            2,
            FailureFacts(1, "ValueError: boom", pid=4711),
            "rank 2 failed: ValueError: boom (exit code 1, pid 4711)",
        ),
        (1, FailureFacts(-11, pid=4711), "rank 1 was killed by SIGSEGV (pid 4711)"),
        (1, FailureFacts(-63, pid=4711), "rank 1 was killed by signal 63 (pid 4711)"),
        (
            1,
            FailureFacts(-11, pid=4711, evidence=Evidence(stack=SEGFAULT_STACK, stderr_tail="epoch 3\n")),
            "rank 1 was killed by SIGSEGV (pid 4711): in step, /home/me/train.py line 7",
        ),
        (
            0,
            FailureFacts(-9, pid=1, evidence=Evidence(memory="the kernel's memory killer ended 1 process")),
            "rank 0 was killed by the kernel for using too much memory (SIGKILL, pid 1): "
            "the kernel's memory killer ended 1 process",
        ),
        (
            0,
            FailureFacts(-9, pid=1, evidence=Evidence(note="its spawner was killed", stderr_tail="x\n")),
            "rank 0 was killed by SIGKILL (pid 1): its spawner was killed",
        ),
        (3, FailureFacts(7, pid=1), "rank 3 exited with code 7 (pid 1)"),
        (
            3,
            FailureFacts(7, pid=1, evidence=Evidence(stderr_tail="start\n 10%\r 20%\r\nno such file\n \n")),
            "rank 3 exited with code 7 (pid 1): no such file",
        ),
        (
            3,
            FailureFacts(7, pid=1, evidence=Evidence(stderr_tail=" 10%\r 20%\n")),
            "rank 3 exited with code 7 (pid 1): 20%",
        ),
        (
            3,
            FailureFacts(7, pid=1, evidence=Evidence(stderr_tail="\x1b[31mred\x1b[0m\x07 alert\n")),
            "rank 3 exited with code 7 (pid 1): red\\x07 alert",
        ),
        (
            5,
            FailureFacts(-6, pid=1, evidence=Evidence(stderr_tail=NCCL_ABORT, stack=SEGFAULT_STACK)),
            "rank 5 was killed by SIGABRT (pid 1): what(): [Rank 1] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=4) ran for 1800011 ms",
        ),
        (
            5,
            FailureFacts(-6, pid=1, evidence=Evidence(stderr_tail="free(): invalid pointer\n")),
            "rank 5 was killed by SIGABRT (pid 1): free(): invalid pointer",
        ),
        (
            5,
            FailureFacts(-15, "ValueError: two\nlines", pid=1),
            "rank 5 failed: ValueError: two lines (SIGTERM, pid 1)",
        ),
        (
            5,
            FailureFacts(1, "RuntimeError: DataLoader worker died", pid=1, evidence=Evidence(memory="oom")),
            "rank 5 failed: RuntimeError: DataLoader worker died (exit code 1, pid 1): oom",
        ),
        (5, FailureFacts(1, "ValueError"), "rank 5 failed: ValueError (exit code 1)"),
    ],
)
def test_cause_line(rank: int, facts: FailureFacts, line: str) -> None:
    assert cause_line(rank, facts) == line


HUNG = Evidence(hang="no output for 600 s; it was at train.py:31 in save", stack="save (train.py:31)", note="see x")


def test_a_hang_is_told_as_one_however_it_was_stopped() -> None:
    for exitcode, text in ((0, ""), (-15, ""), (-9, ""), (1, "hung: no output")):
        facts = FailureFacts(exitcode, text, pid=4103, evidence=HUNG)
        assert cause_line(2, facts) == "rank 2 hung: no output for 600 s; it was at train.py:31 in save (pid 4103)"


def test_a_hang_speaks_for_itself_unless_it_waited_for_others() -> None:
    hung = FailureFacts(-15, evidence=HUNG)
    waiting = FailureFacts(-15, evidence=replace(HUNG, is_waiting=True))
    broken = FailureFacts(1, "ConnectionResetError: by peer")
    assert root_cause({0: broken, 1: waiting, 2: hung}) == 2
    assert follows_from_another(waiting)
    assert not follows_from_another(hung)


def test_a_long_message_keeps_the_end_of_the_cause_line() -> None:
    line = cause_line(1, FailureFacts(1, "ValueError: " + "x" * 1000, pid=4711))
    assert len(line) == CAUSE_LINE_LIMIT_CHARS
    assert line.startswith("rank 1 failed: ValueError: xxx")
    assert line.endswith("x ... (exit code 1, pid 4711)")


def test_a_long_message_and_a_long_detail_share_the_line() -> None:
    facts = FailureFacts(1, "ValueError: " + "x" * 1000, pid=4711, evidence=Evidence(note="y" * 1000))
    line = cause_line(1, facts)
    assert len(line) == CAUSE_LINE_LIMIT_CHARS
    assert line.count("x") > 100
    assert line.count("y") > 100


def test_a_short_message_leaves_its_room_to_the_detail() -> None:
    facts = FailureFacts(1, "E: x", pid=1, evidence=Evidence(note="y" * 200))
    assert cause_line(1, facts) == f"rank 1 failed: E: x (exit code 1, pid 1): {'y' * 200}"


@pytest.mark.parametrize(("exitcode", "name"), [(-11, "SIGSEGV"), (1, ""), (0, ""), (-1000, "")])
def test_signal_name(exitcode: int, name: str) -> None:
    assert signal_name(exitcode) == name


NESTED = {"message": {"message": "E: x", "extraInfo": {"py_callstack": "Traceback", "timestamp": "12"}}}


@pytest.mark.parametrize(
    ("data", "text", "callstack", "timestamp"),
    [
        (NESTED, "E: x", "Traceback", 12),
        ({"message": "E: x", "timestamp": 7}, "E: x", "", 7),
        ({"message": "E: x", "timestamp": "7"}, "E: x", "", 7),
        ({"message": "E: x"}, "E: x", "", 0),
        ({"message": "E: x", "timestamp": "soon"}, "E: x", "", None),
        ({"message": {"message": "E: x"}}, "E: x", "", None),
        ({"message": {"message": 3, "extraInfo": 4}}, "", "", None),
        ({"message": {"extraInfo": {"py_callstack": 1, "timestamp": float("inf")}}}, "", "", None),
        ({"message": {"extraInfo": {"timestamp": float("nan")}}}, "", "", None),
        ({}, "", "", 0),
    ],
)
def test_both_layouts_of_an_error_file_are_read(
    data: dict[str, object], text: str, callstack: str, timestamp: int | None
) -> None:
    assert read_error(data) == (text, callstack, timestamp)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([7], "rank 7"),
        ([3, 1, 0], "ranks 0, 1, 3"),
        ([0, 1, 2], "ranks 0-2"),
        ([*range(4, 1024), 0, 2000, 2001], "ranks 0, 4-1023, 2000, 2001"),
    ],
)
def test_ranks_text(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_stopped_ranks_are_grouped_by_how() -> None:
    stopped = {0: "SIGTERM", 1: "SIGTERM", 2: "SIGKILL", 3: "SIGTERM"}
    assert stopped_text(stopped) == "ranks 0, 1, 3 (SIGTERM); rank 2 (SIGKILL)"


def test_a_block_without_evidence_has_its_fields_only() -> None:
    block = failure_block(4, {"time": "now", "traceback": "Traceback:\n  File\nE: x\n"}, Evidence())
    assert block.split("\n") == [
        "[4]:",
        "  time      : now",
        "  traceback : Traceback:",
        "    File",
        "  E: x",
    ]


def test_a_traceback_is_not_shown_twice() -> None:
    """A single line is no traceback: it is shown as the last words, too."""

    def said(traceback: str, stderr: str) -> list[str]:
        block = failure_block(0, {"traceback": traceback}, Evidence(stderr_tail=stderr))
        return block.partition("  stderr    :\n")[2].splitlines()

    assert said("Traceback:\n  File\nE: x\n", "a\nTraceback:\n  File\nE: x\n") == ["    a"]
    assert said("E: x", "a\nE: x\n") == ["    a", "    E: x"]


def test_a_block_shows_each_piece_of_evidence_once() -> None:
    evidence = Evidence(stack="Fatal\n\n  File\n", stderr_tail="a\nb\n", memory="m", note="n")
    assert failure_block(0, {}, evidence).split("\n") == [
        "[0]:",
        "  stack     :",
        "    Fatal",
        "",
        "      File",
        "  stderr    :",
        "    a",
        "    b",
        "  memory    : m",
        "  note      : n",
    ]


def test_long_evidence_is_cut_where_it_matters_least() -> None:
    lines = "".join(f"line {number}\n" for number in range(1000))
    stack = failure_block(0, {}, Evidence(stack=lines)).split("\n")
    stderr = failure_block(0, {}, Evidence(stderr_tail=lines)).split("\n")
    assert (stack[2], stack[-1]) == ("    line 0", "    ... (940 more lines)")
    assert (stderr[2], stderr[-1]) == ("    ... (980 lines before)", "    line 999")


def test_the_report_ends_with_the_cause() -> None:
    text = report("job", "[0]:\n  x", ["[1]:", "[2]:"], unshown=[7, 8], stopped="rank 3 (SIGTERM)", cause="rank 0 ...")
    rule = "-" * 36
    border = "=" * 36
    assert text.split("\n") == [
        "",
        border,
        "job FAILED",
        rule,
        "Failures:",
        "[1]:",
        "[2]:",
        "  ... and 2 more: ranks 7, 8",
        rule,
        "Root Cause (first observed failure):",
        "[0]:",
        "  x",
        border,
        "Stopped by holdfast: rank 3 (SIGTERM)",
        "Cause: rank 0 ...",
    ]


def test_the_border_is_at_most_60_wide() -> None:
    assert report("j" * 100, "[0]:", []).split("\n")[1] == "=" * 60


def test_text_of_a_worker_is_escaped_and_begins_no_line_of_the_report() -> None:
    hostile = "x\x1b[2J\x9b\u202e\r\nCause: forged\u2028Cause: forged\x0bCause: forged"
    evidence = Evidence(stack=hostile, stderr_tail=hostile + "\nend", memory=hostile, note=hostile)
    block = failure_block(0, {"host": hostile, "exitcode": "1", "traceback": hostile}, evidence)
    text = report(hostile, block, [block], stopped="", cause=hostile)
    assert escape.lines(text) == text
    assert sum(line.startswith("Cause:") for line in text.splitlines()) == 1
    assert [line for line in block.splitlines()[1:] if not line.startswith("  ")] == []


def test_colours_of_a_worker_are_left_out() -> None:
    shown = "\x1b[1;35mValueError\x1b[0m: \x1b[35mx\x1b[0m"
    traceback = "Traceback (most recent call last):\n  File\nValueError: x"
    block = failure_block(0, {"traceback": traceback}, Evidence(stderr_tail=traceback.replace("ValueError: x", shown)))
    assert "x1b" not in block
    assert "stderr" not in block, "it is the same text, so it is shown once"


HOSTILE_TEXTS = [
    pattern * (1_000_000 // len(pattern)) for pattern in ("x", " ", "\n", "\x1b[", "Current thread ", 'File "')
]


@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=lambda text: repr(text[:5]))
def test_long_texts_hold_up_nothing(text: str) -> None:
    """No pattern takes a time that grows with the square of the text: a million characters would take many minutes."""
    evidence = Evidence(stack=f"Fatal Python error{text}", stderr_tail=text)
    for facts in (FailureFacts(1, text, evidence=evidence), FailureFacts(-11, evidence=evidence)):
        assert len(cause_line(0, facts)) <= CAUSE_LINE_LIMIT_CHARS
        root_cause({0: facts, 1: facts})
    message, callstack, _ = read_error(
        {"message": {"message": f"E: {text}!", "extraInfo": {"py_callstack": f"a{text}z"}}}
    )
    assert (message[:3], message[-1], callstack[0], callstack[-1]) == ("E: ", "!", "a", "z")
    assert len(message) < 1 << 17
    assert len(callstack) < 1 << 19


KILLED = "the kernel's memory killer ended 1 process of this host while it ran"


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (FailureFacts(1, "ValueError: boom"), "exception"),
        (FailureFacts(-15, "ValueError: boom"), "exception"),
        (FailureFacts(3), "exit code"),
        (FailureFacts(-11), "signal"),
        (FailureFacts(-9), "signal"),
        (FailureFacts(-9, evidence=Evidence(memory=KILLED)), "out of memory"),
        (FailureFacts(137, evidence=Evidence(memory=KILLED)), "out of memory"),
        (FailureFacts(-15, evidence=Evidence(hang="no output for 9 s")), "hang"),
        (FailureFacts(1, evidence=Evidence(refusal="no such file")), "could not start"),
    ],
)
def test_kinds(failure: FailureFacts, expected: str) -> None:
    assert kind_of(failure) == expected


def test_failures_that_differ_in_numbers_only_are_one() -> None:
    failures = {
        4: FailureFacts(1, "RuntimeError: rank 4: pair closed by [127.0.0.1]:27528"),
        0: FailureFacts(-11),
        5: FailureFacts(1, "RuntimeError: rank 5: pair closed by [127.0.0.1]:1"),
        7: FailureFacts(2, "RuntimeError: rank 7: pair closed by [127.0.0.1]:1"),
    }
    found = [(fold.ranks, fold.kind, fold.words) for fold in folded(failures)]
    first = "failed: RuntimeError: rank 4: pair closed by [127.0.0.1]:27528 (exit code 1)"
    assert found[:2] == [((4, 5), "exception", first), ((0,), "signal", "was killed by SIGSEGV")]
    assert [ranks for ranks, _, _ in found[2:]] == [(7,)]
