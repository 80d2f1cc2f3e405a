"""Evidence that crosses the wire: complete, bounded, and never trusted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from holdfast.failures import report
from holdfast.failures.report import Evidence, Fold, SentFailure
from holdfast.process.errors import ChildFailedError, ProcessFailure
from holdfast.rendezvous.membership import protocol
from holdfast.telemetry.stragglers import LINES, STEPS, Straggler

CALLSTACK = 'Traceback (most recent call last):\n  File "t.py", line 1, in main\nValueError: boom\n'
ERROR: dict[str, Any] = {
    "message": {"message": "ValueError: boom", "extraInfo": {"py_callstack": CALLSTACK, "timestamp": "1700000000"}}
}
SLOW = (Straggler(5, 0.5, 2.0, STEPS, 4), Straggler(7, 0.0, 1.0, LINES, 2))
EVIDENCE = Evidence(
    ERROR, stack="Fatal", stderr_tail="last words", memory="killed", note="noted", is_waiting=True, stragglers=SLOW
)


def test_another_node_shows_what_the_node_itself_shows() -> None:
    here = ProcessFailure(1, 4711, 1, "", EVIDENCE)
    there = ProcessFailure.on_another_node("b", 1, "rank 5 failed", here.encoded())
    assert (there.local_rank, there.pid, there.node, there.timestamp) == (1, 4711, "b", 1700000000)
    assert (there.evidence, there.traceback_text()) == (EVIDENCE, CALLSTACK)
    block_here, block_there = (str(ChildFailedError("t.py", {5: each})) for each in (replace(here, node="b"), there))
    assert block_there == block_here


def test_a_failure_without_an_exception_keeps_its_signal_and_stack() -> None:
    here = ProcessFailure(0, 12, -11, "", Evidence(stack="Fatal Python error"))
    there = ProcessFailure.on_another_node("b", -11, "rank 0 was killed by SIGSEGV", here.encoded())
    assert there.message == here.message
    assert there.evidence == here.evidence


@pytest.mark.parametrize(
    "sent",
    [
        "x", {"a": 1}, [1], [[]], [[1, 2.0, 1.0, "steps", 4]], [[-1, 0.5, 2.0, "steps", 4]], [[1, 0.5, 2.0, "\x1b", 4]],
        [[1, -0.5, 2.0, "steps", 4]], [["1", 0.5, 2.0, "steps", 4]], [[1, 0.5, 1e300, "steps", 4]],
        [[1, 0.5, 2.0, "steps", 1 << 60]], [[1 << 60, 0.5, 2.0, "steps", 1]],
    ],
)  # fmt: skip
def test_stragglers_that_make_no_sense_are_left_out(sent: object) -> None:
    found = report.decode_evidence(json.dumps({"stragglers": sent}))
    assert found is not None
    assert found.evidence.stragglers == ()


def test_only_some_stragglers_are_sent() -> None:
    many = Evidence(stragglers=tuple(Straggler(rank, 0.5, 2.0, STEPS, 4000) for rank in range(2000)))
    sent = report.decode_evidence(ProcessFailure(0, 1, 1, "", many).encoded())
    assert sent is not None
    assert sent.evidence.stragglers == many.stragglers[:16]


@pytest.mark.parametrize("filler", ["x", "\0", "é", "\U0001f600", '"'])
def test_evidence_is_bounded(filler: str) -> None:
    huge = filler * 1_000_000
    error = {"message": {"message": huge, "extraInfo": {"py_callstack": f"begin {huge} end"}}}
    sent = ProcessFailure(0, 1, 1, "", Evidence(error, huge, huge, huge, huge)).encoded()
    assert 0 < len(sent) <= report.EVIDENCE_LIMIT_CHARS <= protocol.MAX_EVIDENCE
    assert sent.isascii()
    shown = ProcessFailure.on_another_node("b", 1, "", sent).traceback_text()
    assert shown.startswith("begin ")
    assert shown.endswith(" end")
    assert "... (cut) ..." in shown


@pytest.mark.parametrize("sent", ["", "junk", "[]", "null", "[" * 60_000, '{"pid": 1' + " " * 70_000 + "}"])
def test_what_cannot_be_read_is_said_to_be_missing(sent: str) -> None:
    failure = ProcessFailure.on_another_node("b", 3, "rank 5 exited with code 3", sent)
    assert failure.traceback_text() == "rank 5 exited with code 3"
    assert failure.evidence is not None
    assert failure.evidence.note == "node b did not send its evidence of this failure"


def test_fields_of_another_type_count_as_absent_and_no_control_character_passes() -> None:
    sent = json.dumps(
        {"pid": "1", "local_rank": 1 << 80, "stack": 7, "note": "\x1b]0;title\x07\x1b[31ma\nb", "is_waiting": 1}
    )
    assert report.decode_evidence(sent) == SentFailure(-1, -1, "", Evidence(note="\\x1b]0;title\\x07a\nb"))


def test_the_other_failures_of_the_node_travel_along() -> None:
    also = (
        Fold((0, 1, 2, 7), "exception", "failed: OSError: x (exit code 1)"),
        Fold((5,), "exit code", "exited with 3"),
    )
    sent = report.decode_evidence(ProcessFailure(1, 4711, 1, "", EVIDENCE).encoded(4, also))
    assert sent is not None
    assert (sent.round, sent.also) == (4, also)


@pytest.mark.parametrize(
    "junk",
    [
        7, [7], [["k", "w"]], [["k", "w", []]], [["k", "w", [[0, 1 << 60]]]], [["k", "w", [[3, 2]]]],
        [["k", "w", [[-1, 0]]]], [["k", "w", [["a", 1]]]], [["k", 1, [[0, 1]]]], [["k", "w", [[0, 40000], [0, 40000]]]],
    ],
)  # fmt: skip
def test_other_failures_that_make_no_sense_are_left_out(junk: object) -> None:
    sent = report.decode_evidence(json.dumps({"pid": 1, "also": junk, "round": -3}))
    assert sent is not None
    assert (sent.also, sent.round) == ((), 0)
