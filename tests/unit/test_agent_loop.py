"""The agent's loop between workers and a run that only note what is asked of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.agent.lifecycle import AgentPhase, JoinRound, Step, StopWorkers
from holdfast.agent.loop import AgentLoop
from holdfast.agent.model import RunResult, WorkerGroup, WorkerSpec, WorkerState
from holdfast.agent.sinks import LogLines, RunEnd, Sink
from holdfast.agent.workers import Workers
from holdfast.failures.records import Evidence, Failure
from holdfast.process.errors import ProcessFailure
from holdfast.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
from holdfast.rendezvous.coordination import AgentPush, Coordination, JoinFailed
from holdfast.rendezvous.membership.model import (
    Agreed,
    CloseRequested,
    Complete,
    End,
    Ended,
    KeepFrom,
    Outcome,
    Place,
    PlaceLost,
    Sealed,
    SnapshotOrder,
    Stop,
)
from holdfast.signals import RunClosed
from tests.promises import promise

SUCCEEDED = Ended(Outcome(End.SUCCEEDED, "all workers have succeeded"))
HANGS = Stop(1, "rank 3 hangs", is_failure=True, is_hang=True)


def sealed(round: int) -> Sealed:
    return Sealed("a/0", Place(1, round, 0, 2, (("r", 1),)))


def failed(**evidence: str) -> RunResult:
    failure = Failure(evidence=Evidence(**evidence))  # type: ignore[arg-type]  # texts of it
    return RunResult(WorkerState.FAILED, failures={0: ProcessFailure(0, 17, 1, "", failure)})


class Notes(list[Any]):
    """What happened, in order."""


class Run(Coordination):
    """Pushes what a list says, one at a time, when this node joins, has finished, or was looked at and is healthy."""

    has_leases = True

    def __init__(self, notes: Notes, *pushes: AgentPush) -> None:
        super().__init__()
        self._notes, self._pushes = notes, [*pushes]

    def introduce(self, *facts: Any) -> None:
        pass

    def join(self, failure: Failure | None = None) -> None:
        self._notes.append("join")
        self.push_next()

    def found(self, sealed: Sealed) -> RendezvousInfo:
        return RendezvousInfo(None, sealed.place.rank, 2, RendezvousStoreInfo("host", 1))

    def report_failure(self, round: int, failure: Failure) -> None:
        self._notes.append(f"report {failure.exception or 'failure'}")

    def report_success(self, round: int, timeout_s: float) -> None:
        self._notes.append("success")
        self.push_next()

    def push_next(self) -> None:
        if self._pushes:
            self._mailbox.put(self._pushes.pop(0))


class FakeWorkers(Workers):
    """They are healthy, unless a list says something else."""

    def __init__(self, notes: Notes, *looks: RunResult, examined: RunResult | None = None) -> None:
        self._notes, self._looks, self._examined = notes, [*looks], examined

    def prepare(self, run: Coordination) -> None:
        assert isinstance(run, Run)
        self._run = run

    def begin_start(self, place: Place) -> None:
        self._notes.append(f"start {place.round}")

    def poll_start(self) -> Mapping[int, Any]:
        return {0: 17}

    def look(self) -> RunResult:
        if self._looks:
            return self._looks.pop(0)
        self._run.push_next()
        return RunResult(WorkerState.HEALTHY)

    def deadline(self) -> float:
        return 0.0

    def examine(self) -> RunResult | None:
        self._notes.append("examine")
        return self._examined

    def snapshot_order(self, order: SnapshotOrder) -> None:
        self._notes.append(order)

    def begin_stop(self, at_once: bool) -> None:
        self._notes.append("kill" if at_once else "stop")

    def shutdown(self, *how: Any) -> None:
        self._notes.append("shutdown")


class Teller(Sink):
    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self.end_told: RunEnd | None = None

    def take(self, step: Step) -> None:
        self._notes.append(step.event)

    def refused(self, error: BaseException) -> None:
        self._notes.append(error)

    def end(self, end: RunEnd) -> None:
        self.end_told = end


def run(notes: Notes, workers: FakeWorkers, *pushes: AgentPush) -> tuple[RunResult, RunEnd]:
    group = WorkerGroup(WorkerSpec("r", 1, None, entrypoint="-", max_restarts=1))
    teller = Teller(notes)
    try:
        result = AgentLoop(group, workers, Run(notes, *pushes), 60.0, 5.0, [teller]).run()
    except Exception:
        result = RunResult(WorkerState.UNKNOWN)
    assert teller.end_told is not None
    return result, teller.end_told


def words(notes: Notes) -> str:
    """Steps as the names of their events, and what the parts were asked to do."""
    return " ".join(each if isinstance(each, str) else type(each).__name__ for each in notes)


def test_a_step_is_told_before_its_commands_are_carried_out() -> None:
    notes = Notes()
    workers = FakeWorkers(notes, failed(), RunResult(WorkerState.SUCCEEDED, {0: "value"}))
    result, end = run(notes, workers, sealed(1), sealed(2), SUCCEEDED)
    assert words(notes) == (
        "RunRequested join Sealed start 1 WorkersStarted WorkersFailed report failure stop WorkersStopped join "
        "Sealed start 2 WorkersStarted WorkersSucceeded success Ended shutdown"
    )
    assert (result.return_values, end.state, end.reason) == ({0: "value"}, "succeeded", "all workers have succeeded")


@promise("""restarts.run-hangs-node-takes: If the run hangs, a node takes stacks before it stops its workers, and
    reports the hang as its own failure if the cause is there.""")
@pytest.mark.parametrize(
    ("examined", "told"), [(None, "Stop stop"), (failed(hang="for 10 s in read"), "WorkersFailed report hang stop")]
)
def test_workers_are_examined_before_a_hanging_run_is_stopped(examined: RunResult | None, told: str) -> None:
    """What is pushed twice, or for a round that is over, examines nothing."""
    notes = Notes()
    workers = FakeWorkers(notes, examined=examined)
    run(notes, workers, sealed(1), HANGS, sealed(2), HANGS, PlaceLost(1, "old"), SUCCEEDED)
    begin, _, rest = words(notes).partition("examine ")
    assert begin == "RunRequested join Sealed start 1 WorkersStarted "
    assert rest == f"{told} WorkersStopped join Sealed start 2 WorkersStarted Ended stop WorkersStopped shutdown"


@pytest.mark.parametrize(
    ("push", "state", "reason"),
    [
        (JoinFailed(ValueError("no place")), "error", "ValueError: no place"),
        (Ended(Outcome(End.CLOSED, "by ann")), "closed", "by ann"),
    ],
)
def test_an_end_without_a_round(push: AgentPush, state: str, reason: str) -> None:
    notes = Notes()
    _, end = run(notes, FakeWorkers(notes), push)
    assert (end.state, end.reason, end.result, notes[-1]) == (state, reason, None, "shutdown")


def test_an_order_about_snapshots_goes_to_the_workers_of_its_round() -> None:
    notes, orders = Notes(), (KeepFrom(1, 7), Agreed(2, 7), Complete(1, (1, 1, 7)))
    run(notes, FakeWorkers(notes), sealed(1), *orders, SUCCEEDED)
    assert words(notes) == (
        "RunRequested join Sealed start 1 WorkersStarted KeepFrom Complete Ended stop WorkersStopped shutdown"
    )


def test_a_wish_to_close_the_run_is_passed_on() -> None:
    notes = Notes()
    _, end = run(notes, FakeWorkers(notes), sealed(1), CloseRequested("enough"))
    assert (end.state, end.reason) == ("closed", "enough")
    assert isinstance(end.error, RunClosed)
    assert words(notes).endswith("Ended stop WorkersStopped shutdown")


def test_a_node_that_has_finished_has_no_workers_to_be_killed(caplog: pytest.LogCaptureFixture) -> None:
    group = WorkerGroup(WorkerSpec("r", 1, None, entrypoint="-"))
    lines, lost = LogLines(group, Workers(), Run(Notes()), 60.0), PlaceLost(1, "out of reach")
    lines.take(Step(0.0, AgentPhase.FINISHED, lost, (JoinRound(),), AgentPhase.JOINING, 1))
    lines.take(Step(0.0, AgentPhase.RUNNING, lost, (StopWorkers(2, at_once=True),), AgentPhase.STOPPING, 2))
    assert caplog.messages == [
        "this node has lost its place: out of reach",
        "this node has lost its place, its workers are killed: out of reach",
    ]
