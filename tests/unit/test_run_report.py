"""The report of a failed run, from its facts, and the files that dead workers have left."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent import causes
from holdfast.agent.model import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from holdfast.failures import leftovers
from holdfast.failures.records import Evidence, Failure, Folded
from holdfast.failures.report import EarlierRound, RunReport, cascade_of, described, run_dict, run_text
from holdfast.frozen import changed
from holdfast.process.errors import ProcessFailure
from holdfast.rendezvous.membership.model import End, Outcome, Place, RoundEnd
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.telemetry.stragglers import STEPS, Straggler
from tests.promises import promise, proves

HOST = os.uname().nodename
RAISED = Evidence("ValueError: x 1", traceback="T\nV: x")
FIRST = described(Failure("node1", 2, evidence=RAISED, local_rank=2, pid=7, round=3))
REPORT = RunReport("train.py", "job7", 1, FIRST, "rank 2 failed", 0, not_again="no restarts are allowed")


def with_evidence(**known: Any) -> RunReport:
    return changed(REPORT, first=changed(FIRST, evidence=Evidence(**known)))


def lines_of(report: RunReport) -> list[str]:
    return run_text(report).splitlines()


def test_the_cause_is_the_last_line_and_whole() -> None:
    cause = "rank 2 failed: " + "very long words " * 20
    assert lines_of(changed(REPORT, cause=cause))[-1] == f"Cause: {cause}"


@promise("failures.report-words-fit-80: The report's own words fit into 80 columns.")
def test_our_own_words_fit_into_80_columns() -> None:
    earlier = tuple(EarlierRound(number, "rank 2 failed: " + "word " * 50, is_charged=True) for number in range(1, 4))
    cascade = (Folded(tuple(range(0, 400, 2)), "signal", "was killed by SIGSEGV"),)
    shown = lines_of(changed(REPORT, earlier=earlier, cascade=cascade, not_again="because " * 30, run_id="long " * 40))
    assert max(len(line) for line in shown[:-1]) <= 80


def test_ranks_with_the_error_of_the_first_are_folded() -> None:
    cascade = (
        Folded((0, 1, 3, 4, 5, 6), "exception", "failed: ValueError: x 99 (exit code 1)"),
        Folded((8,), "signal", "was killed by SIGSEGV"),
    )
    shown = lines_of(changed(REPORT, cascade=cascade))
    start = shown.index("Other failures, in order:")
    assert shown[start + 1 : start + 3] == ["  ranks 0, 1, 3-6: same error", "  rank 8: was killed by SIGSEGV"]


@proves("steering.status-top-json-report")
def test_workers_that_were_behind_are_named() -> None:
    slow = tuple(Straggler(rank, 0.25, 2.0, STEPS, 400) for rank in range(100, 116))
    report = with_evidence(stragglers=slow)
    shown = lines_of(report)
    start = next(
        number for number, line in enumerate(shown) if line.startswith("Behind the median of 400 ranks on node1")
    )
    assert shown[start].startswith("Behind the median of 400 ranks on node1 (2 steps/s): rank 100 (0.25), rank")
    assert max(map(len, shown)) <= 80
    assert run_dict(report)["stragglers"][0] == {
        "rank": 100, "per_s": 0.25, "median_per_s": 2.0, "unit": "steps", "compared": 400,
    }  # fmt: skip
    assert run_dict(REPORT)["stragglers"] == []


def test_more_errors_than_are_shown_are_counted() -> None:
    cascade = tuple(Folded((rank,), "exit code", f"exited {'a' * rank}") for rank in range(20))
    assert "  ... and ranks 16-19, with other errors" in lines_of(changed(REPORT, cascade=cascade))


def test_what_was_tried_before() -> None:
    earlier = (EarlierRound(1, "rank 0 failed: A", is_charged=True), EarlierRound(2, "b is lost", is_charged=False))
    shown = lines_of(changed(REPORT, earlier=earlier, restarts_used=1, restarts_allowed=1, not_again="used up"))
    start = shown.index("Restarts: 1 of 1 used; not restarted: used up")
    assert shown[start + 1 : start + 3] == [
        "  round 1 ended: rank 0 failed: A",
        "  round 2 ended (not counted): b is lost",
    ]


def test_files_are_named_with_their_host() -> None:
    shown = lines_of(changed(with_evidence(logs="/logs/a", left=("/tmp/core.7",)), nodes=2))
    assert shown[-4:-2] == ["Logs: /logs/a (on node1)", "Left behind: /tmp/core.7 (on node1)"]


NASTY = "\x1b]0;owned\x07\nCause: forged\n\r\x9b31m\u202e"


@promise("""failures.text-workers-peers-report: Text of workers and peers in the report is escaped, and none of its
    lines begins where a line of the report does. Colours are left out.""")
def test_nothing_from_elsewhere_reaches_the_terminal_or_begins_a_line() -> None:
    of_worker = (
        "message",
        "traceback",
        "stack",
        "stderr_tail",
        "memory",
        "note",
        "hang",
        "refusal",
        "error_file",
        "logs",
    )
    evidence = Evidence(**dict.fromkeys(of_worker, NASTY), left=(NASTY,), others=(Folded((2,), NASTY, NASTY),))
    facts = dict.fromkeys(("node", "exception", "text", "kind", "words"), NASTY)
    report = RunReport(
        name=NASTY,
        run_id=NASTY,
        nodes=2,
        first=changed(FIRST, evidence=evidence, **facts),
        cause=NASTY,
        time=NASTY,
        cascade=(Folded((1,), NASTY, NASTY),),
        stopped=((NASTY, (3,)),),
        not_again=NASTY,
        earlier=(EarlierRound(1, NASTY, is_charged=True),),
    )
    shown = run_text(report)
    assert not {char for char in shown if not char.isprintable()} - {"\n"}
    assert [line for line in shown.splitlines() if line.startswith("Cause: ")] == [shown.splitlines()[-1]]
    assert not [line for line in shown.splitlines()[:-1] if line.startswith("Cause: forged")]


@promise("""failures.report-json-log-directory: `report.json` in the log directory has the same facts, with a version;
    `latest/report.json` leads to it. If it cannot be written, that costs a warning.""")
def test_json_has_the_same_facts() -> None:
    report = changed(
        with_evidence(stderr_tail="a\nb\n", memory="m", logs="/logs", left=("/core",)),
        cascade=(Folded((0, 1), "signal", "was killed by SIGSEGV"),),
        stopped=(("SIGTERM", (3,)), ("", (4,))),
        earlier=(EarlierRound(1, "why", is_charged=True),),
    )
    kept = json.loads(json.dumps(run_dict(report)))
    assert kept["version"] == 1
    assert {name: kept["first_failure"][name] for name in ("kind", "host", "node", "rank", "pid", "round")} == {
        "kind": "exception", "host": "node1", "node": 0, "rank": 2, "pid": 7, "round": 3,
    }  # fmt: skip
    assert (kept["first_failure"]["stderr"], kept["first_failure"]["memory"]) == (["a", "b"], "m")
    assert kept["cascade"] == [{"ranks": [0, 1], "kind": "signal", "words": "was killed by SIGSEGV"}]
    assert kept["stopped"] == [{"how": "SIGTERM", "ranks": [3]}, {"how": None, "ranks": [4]}]
    assert kept["restarts"]["earlier_rounds"] == [{"round": 1, "reason": "why", "is_charged": True}]
    assert (kept["logs"], kept["left"]) == ("/logs", ["/core"])


def test_failures_of_several_nodes_become_one_list() -> None:
    also = (Folded((0, 2), "exception", "x 1"), Folded((9,), "signal", "s"))
    first = Failure(rank=2, evidence=Evidence(others=also))
    second = Failure(
        rank=5, kind="exception", words="x 22", evidence=Evidence(others=(Folded((4,), "exception", "x 3"),))
    )
    assert cascade_of([first, second]) == (Folded((0, 4, 5), "exception", "x 1"), Folded((9,), "signal", "s"))
    assert cascade_of([first, Failure(rank=7, text="no evidence")])[-1] == Folded((7,), "", "no evidence")
    assert cascade_of([Failure(rank=2)]) == ()


def group_of(nodes: int) -> WorkerGroup:
    group = WorkerGroup(WorkerSpec("trainer", 2, None, entrypoint="/bin/job"))
    group.group_world_size, group.group_rank = nodes, 0
    group.workers = [Worker(0, 0), Worker(1, 1)]
    return group


def sent(rank: int, text: str) -> Failure:
    also = (Folded((rank + 1,), "exception", "failed: OSError: y (exit code 1)"),)
    evidence = Evidence(text, f"Traceback\n{text}", logs="/logs/x", left=("/a", "/b"), others=also)
    return described(Failure("far", rank, 1, evidence=evidence, local_rank=rank % 2, pid=99, round=4))


def seen(rank: int, exitcode: int, order: int | None = None, **evidence: Any) -> ProcessFailure:
    return ProcessFailure(rank, 5 + rank, exitcode, "", Failure(order=order, evidence=Evidence(**evidence)))


def report_of(outcome: Outcome | None, nodes: int = 2, **result: Any) -> RunReport | None:
    place = Place(1, 4, 0, nodes, (("trainer", 2),), restarts_used=1)
    settled = RunResult(WorkerState.FAILED, **result)
    return causes.report_of(settled, outcome, group_of(nodes), RestartPolicy(3), 4, place)


@proves("failures.traceback-folded-log-directory")
def test_of_several_nodes_only_what_all_know_counts() -> None:
    earlier = (RoundEnd(1, "rank 0 failed", 1), RoundEnd(2, "b is lost", 1, has_departed=True))
    outcome = Outcome(End.FAILED, "used up", sent(2, "ValueError: x"), (sent(4, "OSError: y"),), earlier)
    here = {0: seen(0, -9, note="known here alone")}
    report = report_of(outcome, 3, failures=here, stopped={1: "SIGTERM"})
    assert report is not None
    assert report == report_of(outcome, 3)
    assert (report.first, report.node) == (outcome.cause, 1)
    assert [fold.ranks for fold in report.cascade] == [(3, 4, 5)]
    assert report.stopped == (("", (0, 1)),)
    assert [(each.round, each.is_charged) for each in report.earlier] == [(1, True), (2, False)]
    assert (report.restarts_used, report.restarts_allowed, report.not_again) == (1, 3, "used up")
    assert report.cause == "rank 2 failed: ValueError: x (exit code 1, pid 99), on node far"


def test_of_a_node_alone_all_that_it_knows_counts() -> None:
    failures = {0: seen(0, 1, 0, stderr_tail="ConnectionResetError: x"), 1: seen(1, -11, 1)}
    cause = Failure(HOST, 1, -11, text="rank 1 was killed by SIGSEGV")
    report = report_of(Outcome(End.FAILED, "used up", cause), 1, failures=failures)
    assert report is not None
    assert (report.first.kind, report.first.node, report.first.rank, report.node) == ("signal", HOST, 1, 0)
    assert [fold.ranks for fold in report.cascade] == [(0,)]
    assert report.cause == "rank 1 was killed by SIGSEGV (pid 6)"


@promise("""failures.run-ends-nodes-lost: A run that ends because nodes were lost names them, and not the workers that
    failed around them.""")
def test_a_lost_node_explains_what_failed_around_it() -> None:
    earlier = (RoundEnd(3, "b-1 is lost: it was silent for 5 s", 0, has_departed=True),)
    here = {0: seen(0, 1, stderr_tail="ConnectionResetError: x")}
    report = report_of(Outcome(End.FAILED, "only 1 of at least 2 nodes", earlier=earlier), failures=here)
    assert report is not None
    assert (report.first.kind, report.first.node, report.first.round) == ("lost node", "b-1", 3)
    assert run_dict(report)["first_failure"]["exitcode"] is None
    assert report.cause == "b-1 is lost: it was silent for 5 s; then only 1 of at least 2 nodes"
    assert report.stopped == ()


@pytest.mark.parametrize("outcome", [None, Outcome(End.FAILED, "only 1 of at least 2 nodes joined")])
def test_without_a_failure_there_is_no_report(outcome: Outcome | None) -> None:
    assert report_of(outcome) is None


@proves("failures.report-names-core-files")
def test_dumps_of_the_flight_recorder(tmp_path: Path) -> None:
    names = ("a_1", "b_2", "cache/torch/comm_lib_trace_rank_3")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    environments = {
        1: {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/a_", "XDG_CACHE_HOME": f"{tmp_path}/cache"},
        2: {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/b_"},
        3: {"XDG_CACHE_HOME": f"{tmp_path}/cache"},
        4: {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/a_"},
    }
    assert leftovers.left_by(environments, (), 0.0) == [str(tmp_path / name) for name in names]
    os.utime(tmp_path / "a_1", (1.0, 1.0))
    assert leftovers.left_by(environments, (), 1000.0) == [str(tmp_path / name) for name in names[1:]]


@promise("""failures.report-names-core-files: The report names core files and dumps of torch's Flight Recorder that were
    written since the workers started.""")
@pytest.mark.parametrize(
    ("pattern", "uses_pid", "made", "is_found"),
    [
        ("{}/core.%e.%p.%t", "0", "core.python3.77.1700000000", True),
        ("{}/core.%e.%p.%t", "0", "core.python3.78.1700000000", False),
        ("{}/core", "1", "core.77", True),
        ("{}/core", "0", "core", True),
        ("{}/%%[core]-%p", "0", "%[core]-77", True),
        ("|{}/collect %p", "0", "collect 77", False),
        ("", "0", "core", False),
    ],
)
def test_core_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, uses_pid: str, made: str, is_found: bool
) -> None:
    kernel, place = tmp_path / "root/proc/sys/kernel", tmp_path / "cores"
    kernel.mkdir(parents=True)
    place.mkdir()
    (kernel / "core_pattern").write_text(pattern.format(place) + "\n")
    (kernel / "core_uses_pid").write_text(uses_pid + "\n")
    (place / made).write_text("")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (0, resource.RLIM_INFINITY))
    found = leftovers.left_by({}, (77,), 0.0, str(tmp_path / "root"))
    assert found == ([str(place / made)] if is_found else [])
    monkeypatch.setattr(resource, "getrlimit", lambda which: (0, 0))
    assert leftovers.left_by({}, (77,), 0.0, str(tmp_path / "root")) == []
