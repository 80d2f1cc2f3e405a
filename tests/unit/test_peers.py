"""Where the peers of a failed worker were: put together for a run, and in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.failures.peers import CANNOT_RUN, ELSEWHERE, IN_COLLECTIVE, line, merged, odd, sentences
from holdfast.failures.records import Evidence, Failure, Folded
from holdfast.failures.report import RunReport, described, run_dict, run_text
from holdfast.failures.verdict import _ABOUT_PEERS, RULES, is_about_peers
from tests.promises import proves

REDUCE = "in all_reduce, at train.py:31 in step"
LOAD = "at data.py:12 in load_batch"


def group(kind: str, words: str, *ranks: int) -> Folded:
    return Folded(ranks, kind, words)


NODE_A = (group(IN_COLLECTIVE, REDUCE, 0, 1, 2),)
NODE_B = (group(ELSEWHERE, LOAD, 5), group(IN_COLLECTIVE, REDUCE, 4, 6, 7))


@proves("failures.peers-places")
def test_the_groups_of_all_nodes_are_put_together() -> None:
    found = merged([*NODE_A, *NODE_B], besides=[4])
    assert found == (group(ELSEWHERE, LOAD, 5), group(IN_COLLECTIVE, REDUCE, 0, 1, 2, 6, 7))
    assert odd(found) == found[:1]
    assert sentences(found) == [f"rank 5 stands out: {LOAD}", f"ranks 0-2, 6, 7 were {REDUCE}"]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], []),
        ([group(IN_COLLECTIVE, "a", 0, 1)], []),
        ([group(ELSEWHERE, "a", 0), group(ELSEWHERE, "b", 1)], []),
        ([group(ELSEWHERE, "a", 0, 2), group(ELSEWHERE, "b", 1)], ["b"]),
        ([group(ELSEWHERE, "a", 0, 2), group(IN_COLLECTIVE, "b", 1)], ["a"]),
        ([group(ELSEWHERE, "a", 0), group(CANNOT_RUN, "b", 1, 2)], ["b"]),
        ([group(ELSEWHERE, "a", 0), group(CANNOT_RUN, "b", 1, 2), group(CANNOT_RUN, "c", 3)], ["b", "c"]),
        ([group(ELSEWHERE, "a", 0), group(ELSEWHERE, "b", 1), group(IN_COLLECTIVE, "c", 2)], ["a", "b"]),
    ],
)
def test_who_stands_out(groups: list[Folded], expected: list[str]) -> None:
    assert [each.words for each in odd(merged(groups))] == expected


def test_what_many_nodes_say_is_bounded() -> None:
    many = [group(ELSEWHERE, f"at x.py:{number}", number) for number in range(5000)]
    found = merged([*many, group(IN_COLLECTIVE, REDUCE, *range(5000, 9000)), group("a kind that is not ours", "x", 1)])
    assert len(found) == 16
    assert found[-1] == group(IN_COLLECTIVE, REDUCE, *range(5000, 6024)), "the crowd is always there"
    assert len(line(found)) <= 700


@pytest.mark.parametrize(
    ("exitcode", "evidence", "expected"),
    [
        (1, Evidence(message="RuntimeError: Timed out waiting 1800000ms for recv operation to complete"), True),
        (1, Evidence(message="ConnectionResetError: [Errno 104] Connection reset by peer"), True),
        (1, Evidence(message="RuntimeError: [../gloo/transport/tcp/pair.cc] Connection closed by peer [::1]"), True),
        (-6, Evidence(stderr_tail="Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n"), True),
        (1, Evidence(message="torch.distributed.DistBackendError: ncclRemoteError: remote process exited"), True),
        (0, Evidence(hang="no output for 600 s; it was at x.py:1", is_waiting=True), True),
        (-9, Evidence(note="its timer step had expired"), True),
        (1, Evidence(message="ValueError: the data of step 7 is broken"), False),
        (1, Evidence(message="ModuleNotFoundError: No module named 'x'"), False),
        (1, Evidence(message="torch.OutOfMemoryError: CUDA out of memory."), False),
        (-9, Evidence(memory="the kernel's memory killer ended 1 process"), False),
        (-15, Evidence(), False),
        (-11, Evidence(stack="Fatal Python error: Segmentation fault"), False),
        (3, Evidence(), False),
    ],
)
def test_which_failures_point_at_a_peer(exitcode: int, evidence: Evidence, expected: bool) -> None:
    assert is_about_peers(described(Failure("a", 0, exitcode, evidence=evidence))) is expected


def test_the_rules_that_point_at_a_peer_exist_and_are_in_the_document() -> None:
    assert {rule.name for rule in RULES} >= _ABOUT_PEERS
    text = (Path(__file__).parents[2] / "docs" / "hangs.md").read_text()
    assert [name for name in _ABOUT_PEERS - {"hang"} if f"`{name}`" not in text] == []


@proves("failures.peers-places")
def test_the_report_has_the_places() -> None:
    evidence = Evidence(message="RuntimeError: Timed out waiting", peers=merged([*NODE_A, *NODE_B]))
    first = described(Failure("a", 3, 1, evidence=evidence))
    report = RunReport("train.py", "job", 2, first, first.text)
    assert f"The others, when it failed:\n  rank 5 stands out: {LOAD}\n  ranks 0-2, 4, 6, 7 were {REDUCE}" in run_text(
        report
    )
    assert run_dict(report)["peers"] == [
        {"ranks": [5], "kind": ELSEWHERE, "place": LOAD, "stands_out": True},
        {"ranks": [0, 1, 2, 4, 6, 7], "kind": IN_COLLECTIVE, "place": REDUCE, "stands_out": False},
    ]
