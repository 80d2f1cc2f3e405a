"""Every pair of phase and event: what follows from it, or that it cannot happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.agent.lifecycle import (
    TRANSITIONS,
    AgentPhase,
    EndRun,
    InvalidTransition,
    JoinRound,
    Lifecycle,
    PeersTimedOut,
    ReportFailure,
    ReportSuccess,
    RunRequested,
    StartWorkers,
    StopWorkers,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
)
from holdfast.errors import InternalError
from holdfast.rendezvous.membership.model import End, Ended, Outcome, Place, PlaceLost, Sealed, Stop
from tests.promises import promise

NOW = 1000.0
PEERS_TIMEOUT_S = 300.0
FAILED, SUCCEEDED = End.FAILED, End.SUCCEEDED


def sealed(round: int) -> Sealed:
    return Sealed("a/0", Place(1, round, 0, 1))


def stopped(round: int) -> Stop:
    return Stop(round, "a failure elsewhere")


def lost(round: int) -> PlaceLost:
    return PlaceLost(round, "out of reach")


def ended(end: End) -> Ended:
    return Ended(Outcome(end, "it is over"))


# The way into each phase. JOINING is that after a first round, so that there is a round to speak of.
_RUNNING: list[Any] = [RunRequested(), sealed(1), WorkersStarted(1)]
WAY: dict[AgentPhase, list[Any]] = {
    AgentPhase.IDLE: [],
    AgentPhase.JOINING: [*_RUNNING, WorkersFailed(1), WorkersStopped(1)],
    AgentPhase.STARTING: _RUNNING[:2],
    AgentPhase.RUNNING: _RUNNING,
    AgentPhase.STOPPING: [*_RUNNING, WorkersFailed(1)],
    AgentPhase.FINISHED: [*_RUNNING, WorkersSucceeded(1)],
    AgentPhase.ENDED: [*_RUNNING, WorkersSucceeded(1), ended(SUCCEEDED)],
}
# Every kind of event as it may come in a round; a world is that of the next.
EVENTS: dict[type, Callable[[int], Any]] = {
    RunRequested: lambda _: RunRequested(),
    Sealed: lambda round: sealed(round + 1),
    WorkersStarted: WorkersStarted,
    WorkersSucceeded: WorkersSucceeded,
    WorkersFailed: WorkersFailed,
    WorkersStopped: WorkersStopped,
    Stop: stopped,
    PlaceLost: lost,
    Ended: lambda _: ended(SUCCEEDED),
    PeersTimedOut: PeersTimedOut,
}
IN_A_ROUND = [kind for kind in EVENTS if kind not in (RunRequested, Ended)]
GRACE, AT_ONCE = StopWorkers(1), StopWorkers(1, at_once=True)
# What may happen, and what it leads to; everything else may not.
FOLLOWS: dict[tuple[AgentPhase, type], tuple[AgentPhase, list[Any]]] = {
    (AgentPhase.IDLE, RunRequested): (AgentPhase.JOINING, [JoinRound()]),
    (AgentPhase.JOINING, Sealed): (AgentPhase.STARTING, [StartWorkers(2)]),
    (AgentPhase.JOINING, PlaceLost): (AgentPhase.JOINING, []),
    (AgentPhase.JOINING, Stop): (AgentPhase.JOINING, []),
    (AgentPhase.JOINING, Ended): (AgentPhase.ENDED, [EndRun(SUCCEEDED)]),
    (AgentPhase.STARTING, WorkersStarted): (AgentPhase.RUNNING, []),
    (AgentPhase.STARTING, WorkersFailed): (AgentPhase.STOPPING, [ReportFailure(1), GRACE]),
    (AgentPhase.STARTING, Stop): (AgentPhase.STOPPING, [GRACE]),
    (AgentPhase.STARTING, PlaceLost): (AgentPhase.STOPPING, [AT_ONCE]),
    (AgentPhase.STARTING, Ended): (AgentPhase.STOPPING, [GRACE]),
    (AgentPhase.RUNNING, WorkersSucceeded): (AgentPhase.FINISHED, [ReportSuccess(1)]),
    (AgentPhase.RUNNING, WorkersFailed): (AgentPhase.STOPPING, [ReportFailure(1), GRACE]),
    (AgentPhase.RUNNING, Stop): (AgentPhase.STOPPING, [GRACE]),
    (AgentPhase.RUNNING, PlaceLost): (AgentPhase.STOPPING, [AT_ONCE]),
    (AgentPhase.RUNNING, Ended): (AgentPhase.STOPPING, [GRACE]),
    (AgentPhase.STOPPING, WorkersStopped): (AgentPhase.JOINING, [JoinRound()]),
    (AgentPhase.STOPPING, PlaceLost): (AgentPhase.STOPPING, [AT_ONCE]),
    (AgentPhase.STOPPING, Ended): (AgentPhase.STOPPING, []),
    (AgentPhase.STOPPING, WorkersStarted): (AgentPhase.STOPPING, []),
    (AgentPhase.STOPPING, WorkersSucceeded): (AgentPhase.STOPPING, []),
    (AgentPhase.STOPPING, WorkersFailed): (AgentPhase.STOPPING, []),
    (AgentPhase.STOPPING, Stop): (AgentPhase.STOPPING, []),
    (AgentPhase.FINISHED, Stop): (AgentPhase.JOINING, [JoinRound()]),
    (AgentPhase.FINISHED, PlaceLost): (AgentPhase.JOINING, [JoinRound()]),
    (AgentPhase.FINISHED, Ended): (AgentPhase.ENDED, [EndRun(SUCCEEDED)]),
    (AgentPhase.FINISHED, PeersTimedOut): (AgentPhase.ENDED, [EndRun(SUCCEEDED)]),
}


def machine_in(phase: AgentPhase) -> Lifecycle:
    machine = Lifecycle(PEERS_TIMEOUT_S)
    take(machine, *WAY[phase])
    assert machine.phase is phase
    return machine


def take(machine: Lifecycle, *events: Any) -> list[Any]:
    """The commands of the last event."""
    step = None
    for event in events:
        is_stale = machine.is_stale(event)
        step = machine.step(event, NOW)
        machine.check()
        assert (step is None) == is_stale
        if step is not None:
            assert (step.time, step.event, step.round) == (NOW, event, machine.round)
            assert (step.phase, step.end) == (machine.phase, machine.end)
    return [] if step is None else [*step.commands]


def state(machine: Lifecycle) -> tuple[Any, ...]:
    return machine.phase, machine.round, machine.end, machine.next_deadline(), machine.story()


def name(value: Any) -> str:
    return str(getattr(value, "__name__", value))


@pytest.mark.parametrize("kind", EVENTS, ids=name)
@pytest.mark.parametrize("phase", [phase for phase in AgentPhase if phase is not AgentPhase.ENDED])
def test_every_pair(phase: AgentPhase, kind: type) -> None:
    machine = machine_in(phase)
    before = state(machine)
    event = EVENTS[kind](machine.round)
    if (phase, kind) in FOLLOWS:
        commands = take(machine, event)
        assert (machine.phase, commands) == FOLLOWS[phase, kind]
        return
    with pytest.raises(InvalidTransition) as caught:
        machine.step(event, NOW)
    assert state(machine) == before, "an impossible event changes nothing"
    assert repr(event) in str(caught.value)
    assert f"in phase {phase}, round {machine.round}; before: {machine.story()}" in str(caught.value)


def test_the_table_in_the_module_says_the_same() -> None:
    assert TRANSITIONS.keys() == FOLLOWS.keys()
    for pair, (phase, _) in FOLLOWS.items():
        assert phase in TRANSITIONS[pair]


@pytest.mark.parametrize("kind", EVENTS, ids=name)
def test_ended_stays_ended(kind: type) -> None:
    machine = machine_in(AgentPhase.ENDED)
    before = state(machine)
    assert take(machine, EVENTS[kind](1)) == take(machine, EVENTS[kind](7)) == []
    assert state(machine) == before


@promise("restarts.events-round-over-dropped: Events of a round that is over are dropped.")
@pytest.mark.parametrize("kind", IN_A_ROUND, ids=name)
@pytest.mark.parametrize("phase", [phase for phase in AgentPhase if phase is not AgentPhase.IDLE])
def test_what_speaks_of_a_round_that_is_over_is_dropped(phase: AgentPhase, kind: type) -> None:
    machine = machine_in(phase)
    before = state(machine)
    assert take(machine, EVENTS[kind](machine.round - 1)) == []
    assert state(machine) == before


@pytest.mark.parametrize("kind", [kind for kind in IN_A_ROUND if kind is not Sealed], ids=name)
@pytest.mark.parametrize("phase", [phase for phase in AgentPhase if phase is not AgentPhase.ENDED])
def test_what_speaks_of_a_round_to_come_is_impossible(phase: AgentPhase, kind: type) -> None:
    machine = machine_in(phase)
    with pytest.raises(InvalidTransition, match=f"round={machine.round + 1}"):
        machine.step(EVENTS[kind](machine.round + 1), NOW)


STOPPED = WorkersStopped(1)
UNKILLABLE = WorkersStopped(1, unkillable=(4711,))
# From RUNNING: what happens, the last commands, and how the run ended for this node, if it did.
ENDINGS: dict[str, tuple[list[Any], list[Any], End | None]] = {
    "workers failed, the run goes on": ([WorkersFailed(1), STOPPED], [JoinRound()], None),
    "workers failed, the run ends": ([WorkersFailed(1), ended(FAILED), STOPPED], [EndRun(FAILED)], FAILED),
    "told of the end after stopping": ([WorkersFailed(1), STOPPED, ended(FAILED)], [EndRun(FAILED)], FAILED),
    "ended while running": ([ended(FAILED), STOPPED], [EndRun(FAILED)], FAILED),
    "ended well while running": ([ended(SUCCEEDED), STOPPED], [EndRun(SUCCEEDED)], SUCCEEDED),
    "stopped elsewhere": ([stopped(1), STOPPED], [JoinRound()], None),
    "stopped twice": ([stopped(1), stopped(1), STOPPED], [JoinRound()], None),
    "stopped, then ended": ([stopped(1), ended(FAILED), STOPPED], [EndRun(FAILED)], FAILED),
    "place lost, then ended": ([lost(1), ended(FAILED), STOPPED], [EndRun(FAILED)], FAILED),
    "failed on the way down": ([stopped(1), WorkersFailed(1), STOPPED], [JoinRound()], None),
    "succeeded on the way down": ([stopped(1), WorkersSucceeded(1), STOPPED], [JoinRound()], None),
    "succeeded, peers too": ([WorkersSucceeded(1), ended(SUCCEEDED)], [EndRun(SUCCEEDED)], SUCCEEDED),
    "succeeded, a peer failed": ([WorkersSucceeded(1), ended(FAILED)], [EndRun(FAILED)], FAILED),
    "succeeded, waited long enough": ([WorkersSucceeded(1), PeersTimedOut(1)], [EndRun(SUCCEEDED)], SUCCEEDED),
    "succeeded, goes again": ([WorkersSucceeded(1), stopped(1)], [JoinRound()], None),
    "unkillable": ([WorkersFailed(1), UNKILLABLE], [EndRun(FAILED)], FAILED),
    "unkillable after a change of membership": ([stopped(1), UNKILLABLE], [EndRun(FAILED)], FAILED),
    "unkillable in a run that succeeded": ([ended(SUCCEEDED), UNKILLABLE], [EndRun(FAILED)], FAILED),
}


@pytest.mark.parametrize("life", ENDINGS)
def test_endings(life: str) -> None:
    events, commands, outcome = ENDINGS[life]
    machine = machine_in(AgentPhase.RUNNING)
    assert take(machine, *events) == commands
    assert machine.end is outcome
    assert machine.phase is (AgentPhase.JOINING if outcome is None else AgentPhase.ENDED)
    assert machine.unkillable == ((4711,) if UNKILLABLE in events else ())


@promise("restarts.lost-place-cuts-grace: A lost place cuts the grace period of workers that are being stopped short.")
def test_a_lost_place_cuts_the_grace_short() -> None:
    machine = machine_in(AgentPhase.RUNNING)
    assert take(machine, stopped(1)) == [StopWorkers(1, at_once=False)]
    assert take(machine, lost(1)) == [StopWorkers(1, at_once=True)]
    assert take(machine, stopped(1)) == [], "and nothing makes it longer again"


def test_the_only_deadline_is_for_the_peers() -> None:
    for phase in AgentPhase:
        deadline = machine_in(phase).next_deadline()
        assert deadline == (NOW + PEERS_TIMEOUT_S if phase is AgentPhase.FINISHED else None)


def test_the_story_is_bounded_and_keeps_the_latest() -> None:
    machine = machine_in(AgentPhase.RUNNING)
    for round in range(1, 101):
        take(machine, stopped(round), WorkersStopped(round), sealed(round + 1), WorkersStarted(round + 1))
    with pytest.raises(InvalidTransition) as caught:
        machine.step(WorkersStarted(101), NOW)
    assert len(str(caught.value)) < 10_000
    assert f"JOINING: {sealed(101)} -> [StartWorkers(round=101)]" in str(caught.value)
    assert "RunRequested" not in str(caught.value)
    assert isinstance(caught.value, InternalError)


@pytest.mark.parametrize(("phase", "changes"), [(AgentPhase.RUNNING, {"round": 0}), (AgentPhase.ENDED, {"end": None})])
def test_the_invariants_are_looked_at(phase: AgentPhase, changes: dict[str, Any]) -> None:
    machine = machine_in(phase)
    machine.check()
    for name, value in changes.items():
        setattr(machine, name, value)
    with pytest.raises(AssertionError):
        machine.check()
