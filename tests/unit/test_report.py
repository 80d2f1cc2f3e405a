"""Failures in words: the cause line, ranks with the same failure, blocks, and torchrun's layout."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import escape
from holdfast.failures.cause import root_of_node
from holdfast.failures.records import Evidence, Failure
from holdfast.failures.report import (
    CAUSE_LINE_LIMIT_CHARS,
    as_folded,
    described,
    failure_block,
    folded,
    group_text,
    ranked,
    ranks_text,
    signal_name,
)
from holdfast.process.errors import read_error
from tests.promises import promise, proves

ABORT = """\
[rank1]:[E ProcessGroupNCCL.cpp:537] Some operations have failed or timed out.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4) ran for 1800011 ms
frame #0: c10::Error::Error(c10::SourceLocation) + 0x96
"""

SEGFAULT_STACK = """\
Fatal Python error: Segmentation fault

Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f2 (most recent call first):
  File "/home/me/train.py", line 7 in step
  File "/home/me/train.py", line 12 in <module>
"""
LIBRARY_STACK = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f2 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/me/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751 in _wrapped_call_impl
  File "<frozen runpy>", line 88 in _run_code
  File "/home/me/train.py", line 7 in step

Thread 0x00007f1 (most recent call first):
  File "/home/me/loader.py", line 3 in read
"""

OOM = "the kernel's memory killer ended 1 process"
HUNG = {"hang": "no output for 600 s; it was at train.py:31 in save", "stack": "save (train.py:31)", "note": "see x"}


def failed(exitcode: int, message: str = "", rank: int = 5, pid: int = 1, **evidence: Any) -> Failure:
    return described(Failure(rank=rank, exitcode=exitcode, pid=pid, evidence=Evidence(message, **evidence)))


@promise("""failures.cause-line-fatal-signal: The cause line of a fatal signal names the innermost frame of the user's
    code, not that of the library below it.""")
@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (failed(1, "ValueError: boom"), "failed: ValueError: boom (exit code 1, pid 1)"),
        (failed(1, "ValueError", pid=0), "failed: ValueError (exit code 1)"),
        (failed(1, "AssertionError: "), "failed: AssertionError (exit code 1, pid 1)"),
        (failed(-15, "ValueError: two\nlines"), "failed: ValueError: two lines (SIGTERM, pid 1)"),
        (failed(1, "RuntimeError: x", memory="oom"), "failed: RuntimeError: x (exit code 1, pid 1): oom"),
        (failed(-11), "was killed by SIGSEGV (pid 1)"),
        (failed(-63), "was killed by signal 63 (pid 1)"),
        (
            failed(-11, stack=SEGFAULT_STACK, stderr_tail="epoch 3\n"),
            "was killed by SIGSEGV (pid 1): in step, /home/me/train.py line 7",
        ),
        (failed(-11, stack=LIBRARY_STACK), "was killed by SIGSEGV (pid 1): in step, /home/me/train.py line 7"),
        (
            failed(-11, stack=LIBRARY_STACK.replace("/home/me/train.py", "/usr/lib/python3/dist-packages/x.py")),
            "was killed by SIGSEGV (pid 1): in string_at, /usr/lib/python3.11/ctypes/__init__.py line 519",
        ),
        (failed(-9, memory=OOM), f"was killed by the kernel for using too much memory (SIGKILL, pid 1): {OOM}"),
        (
            failed(-9, note="its spawner was killed", stderr_tail="x\n"),
            "was killed by SIGKILL (pid 1): its spawner was killed",
        ),
        (failed(7), "exited with code 7 (pid 1)"),
        (failed(7, stderr_tail="start\n 10%\r 20%\r\nno such file\n \n"), "exited with code 7 (pid 1): no such file"),
        (failed(7, stderr_tail=" 10%\r 20%\n"), "exited with code 7 (pid 1): 20%"),
        (failed(7, stderr_tail="\x1b[31mred\x1b[0m\x07 alert\n"), "exited with code 7 (pid 1): red\\x07 alert"),
        (
            failed(-6, stderr_tail=ABORT, stack=SEGFAULT_STACK),
            "was killed by SIGABRT (pid 1): what(): [Rank 1] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=4) ran for 1800011 ms",
        ),
        (failed(-6, stderr_tail="free(): invalid pointer\n"), "was killed by SIGABRT (pid 1): free(): invalid pointer"),
        (failed(1, pid=0, refusal="no such file"), "could not be started: no such file"),
        # A hang is told as one however it was stopped.
        *((failed(code, **HUNG), f"hung: {HUNG['hang']} (pid 1)") for code in (0, -15, -9)),
    ],
)
def test_cause_line(failure: Failure, line: str) -> None:
    assert failure.text == f"rank 5 {line}"
    assert ranked(failure, 7).text == f"rank 7 {line}"
    assert failure.words == line.replace(", pid 1)", ")").replace(" (pid 1)", "")


def test_a_long_message_keeps_the_end_of_the_cause_line() -> None:
    line = failed(1, "ValueError: " + "x" * 1000).text
    assert len(line) == CAUSE_LINE_LIMIT_CHARS
    assert line.startswith("rank 5 failed: ValueError: xxx")
    assert line.endswith("x ... (exit code 1, pid 1)")


def test_a_long_message_and_a_long_detail_share_the_line() -> None:
    line = failed(1, "ValueError: " + "x" * 1000, note="y" * 1000).text
    assert len(line) == CAUSE_LINE_LIMIT_CHARS
    assert line.count("x") > 100
    assert line.count("y") > 100


def test_a_short_message_leaves_its_room_to_the_detail() -> None:
    assert failed(1, "E: x", note="y" * 200).text == f"rank 5 failed: E: x (exit code 1, pid 1): {'y' * 200}"


@pytest.mark.parametrize(("exitcode", "name"), [(-11, "SIGSEGV"), (1, ""), (0, ""), (-1000, "")])
def test_signal_name(exitcode: int, name: str) -> None:
    assert signal_name(exitcode) == name


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


def test_a_block_without_evidence_has_its_fields_only() -> None:
    block = failure_block(4, {"time": "now", "traceback": "Traceback:\n  File\nE: x\n"}, Evidence())
    assert block.split("\n") == ["[4]:", "  time      : now", "  traceback : Traceback:", "    File", "  E: x"]


@promise("""failures.report-shows-traceback-once: The report shows a traceback once: not again as the end of stderr,
    also if torch put the rank before its lines. A failure that ends the run is not told in a line of its own before the
    report.""")
def test_a_traceback_is_not_shown_twice() -> None:
    """A single line is no traceback: it is shown as the last words, too."""

    def said(traceback: str, stderr: str) -> list[str]:
        block = failure_block(0, {"traceback": traceback}, Evidence(stderr_tail=stderr))
        return block.partition("  stderr    :\n")[2].splitlines()

    traceback = "Traceback:\n  File\n\nE: x\n"
    prefixed = "".join(f"[rank13]: {line}\n" for line in traceback.splitlines())
    for shown in (traceback, prefixed):  # torch puts the rank before each line.
        assert said(traceback, shown) == []
        assert said(traceback, f"a\n\n{shown}\n") == ["    a"]
        assert said(traceback, f"a\n{shown}[rank13]:[W1118] a warning at exit\n")[1:] == [
            "    [rank13]:[W1118] a warning at exit"
        ]
    assert said(traceback, traceback.replace("File", "Other"))[0] == "    Traceback:"
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


def test_the_border_is_at_most_60_wide() -> None:
    assert group_text("j" * 100, "[0]:", []).split("\n")[1] == "=" * 60


@proves("failures.text-workers-peers-report")
def test_text_of_a_worker_is_escaped_and_begins_no_line_of_the_report() -> None:
    hostile = "x\x1b[2J\x9b\u202e\r\nCause: forged\u2028Cause: forged\x0bCause: forged"
    evidence = Evidence(stack=hostile, stderr_tail=hostile + "\nend", memory=hostile, note=hostile)
    block = failure_block(0, {"host": hostile, "exitcode": "1", "traceback": hostile}, evidence)
    text = group_text(hostile, block, [block], stopped="", cause=hostile)
    assert escape.lines(text) == text
    assert sum(line.startswith("Cause:") for line in text.splitlines()) == 1
    assert [line for line in block.splitlines()[1:] if not line.startswith("  ")] == []


@proves("failures.text-workers-peers-report")
def test_colours_of_a_worker_are_left_out() -> None:
    shown = "\x1b[1;35mValueError\x1b[0m: \x1b[35mx\x1b[0m"
    traceback = "Traceback (most recent call last):\n  File\nValueError: x"
    block = failure_block(0, {"traceback": traceback}, Evidence(stderr_tail=traceback.replace("ValueError: x", shown)))
    assert "x1b" not in block
    assert "stderr" not in block, "it is the same text, so it is shown once"


HOSTILE_TEXTS = [
    pattern * (1_000_000 // len(pattern)) for pattern in ("x", " ", "\n", "\x1b[", "Current thread ", 'File "')
]


@promise("""failures.long-texts-worker-hold: Long texts of a worker do not hold up its agent: each is cut before it is
    searched or shown, and keeps its beginning and its end.""")
@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=lambda text: repr(text[:5]))
def test_long_texts_hold_up_nothing(text: str) -> None:
    """No pattern takes a time that grows with the square of the text: a million characters would take many minutes."""
    evidence = {"stack": f"Fatal Python error{text}", "stderr_tail": text}
    for failure in (failed(1, text, **evidence), failed(-11, **evidence)):
        assert len(failure.text) <= CAUSE_LINE_LIMIT_CHARS
        root_of_node({0: failure, 1: failure})
    message, callstack, _ = read_error(
        {"message": {"message": f"E: {text}!", "extraInfo": {"py_callstack": f"a{text}z"}}}
    )
    assert (message[:3], message[-1], callstack[0], callstack[-1]) == ("E: ", "!", "a", "z")
    assert len(message) < 1 << 17
    assert len(callstack) < 1 << 19


def test_failures_that_differ_in_numbers_only_are_one() -> None:
    failures = [
        failed(1, "RuntimeError: rank4: pair closed by [127.0.0.1]:27528", rank=4),
        failed(-11, rank=0),
        failed(1, "RuntimeError: rank5: pair closed by [127.0.0.1]:1", rank=5),
        failed(2, "RuntimeError: rank7: pair closed by [127.0.0.1]:1", rank=7),
        *(failed(code, rank=rank) for rank, code in ((8, 3), (9, 4), (10, 3), (11, -60), (12, -61))),
    ]
    found = [(each.ranks, each.kind, each.words) for each in folded(map(as_folded, failures))]
    first = "failed: RuntimeError: rank4: pair closed by [127.0.0.1]:27528 (exit code 1)"
    assert found[:2] == [((4, 5), "exception", first), ((0,), "signal", "was killed by SIGSEGV")]
    assert [ranks for ranks, _, _ in found[2:]] == [(7,), (8, 10), (9,), (11,), (12,)]
