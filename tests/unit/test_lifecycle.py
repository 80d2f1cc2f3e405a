"""Every pair of phase and event: what follows from it, or that it cannot happen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from holdfast.agent import lifecycle
from holdfast.agent.lifecycle import (
    AwaitPeers,
    EndRun,
    InvalidTransition,
    Join,
    Lifecycle,
    NodesWaiting,
    Outcome,
    PeersFinished,
    Phase,
    RunRequested,
    StartWorkers,
    StopWorkers,
    TimePassed,
    WorkersFailed,
    WorkersStarted,
    WorkersStopped,
    WorkersSucceeded,
    WorldSealed,
)
from holdfast.errors import InternalError

NOW = 1000.0
PEERS_TIMEOUT_S = 300.0

# The way into each phase, for a world of two nodes.
WAY: dict[Phase, list[Any]] = {
    Phase.IDLE: [],
    Phase.JOINING: [RunRequested()],
    Phase.STARTING: [RunRequested(), WorldSealed(1, 2)],
    Phase.RUNNING: [RunRequested(), WorldSealed(1, 2), WorkersStarted(1)],
    Phase.STOPPING: [RunRequested(), WorldSealed(1, 2), WorkersStarted(1), WorkersFailed(1)],
    Phase.WAITING: [RunRequested(), WorldSealed(1, 2), WorkersStarted(1), WorkersSucceeded(1)],
    Phase.ENDED: [
        RunRequested(),
        WorldSealed(1, 2),
        WorkersStarted(1),
        WorkersSucceeded(1),
        PeersFinished(1),
    ],
}
EVENTS: list[Any] = [
    RunRequested(1),
    WorldSealed(1, 2),
    WorkersStarted(1),
    WorkersSucceeded(1),
    WorkersFailed(1),
    NodesWaiting(1),
    WorkersStopped(1),
    PeersFinished(1),
    TimePassed(1),
]
# What may happen, and what it leads to, with two restarts to spend; everything else may not.
FOLLOWS: dict[tuple[Phase, type], tuple[Phase, list[Any]]] = {
    (Phase.IDLE, RunRequested): (Phase.JOINING, [Join(1)]),
    (Phase.JOINING, WorldSealed): (Phase.STARTING, [StartWorkers(1)]),
    (Phase.STARTING, WorkersStarted): (Phase.RUNNING, []),
    (Phase.RUNNING, WorkersSucceeded): (Phase.WAITING, [AwaitPeers(1)]),
    (Phase.RUNNING, WorkersFailed): (Phase.STOPPING, [StopWorkers(1, will_restart=True)]),
    (Phase.RUNNING, NodesWaiting): (Phase.STOPPING, [StopWorkers(1, will_restart=True)]),
    (Phase.STOPPING, WorkersStopped): (Phase.JOINING, [Join(2)]),
    (Phase.WAITING, PeersFinished): (Phase.ENDED, [EndRun(Outcome.SUCCEEDED)]),
    (Phase.WAITING, TimePassed): (Phase.ENDED, [EndRun(Outcome.SUCCEEDED)]),
}


def machine_in(phase: Phase, max_restarts: int = 2) -> Lifecycle:
    machine = Lifecycle(max_restarts, PEERS_TIMEOUT_S)
    for event in WAY[phase]:
        machine.step(event, NOW)
        machine.check()
    assert machine.phase is phase
    return machine


def in_round(event: Any, machine: Lifecycle) -> Any:
    return replace(event, round=machine.round)


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("phase", list(Phase))
def test_every_pair(phase: Phase, event: Any) -> None:
    machine = machine_in(phase)
    story = machine.story()
    event = in_round(event, machine)
    expected = FOLLOWS.get((phase, type(event)))
    if expected is None:
        with pytest.raises(InvalidTransition) as caught:
            machine.step(event, NOW)
        assert machine.phase is phase, "an impossible event changes nothing"
        assert type(event).__name__ in str(caught.value)
        assert phase.value in str(caught.value)
        assert story in str(caught.value)
    else:
        assert (machine.step(event, NOW), machine.phase) == (expected[1], expected[0])
    machine.check()


def test_the_table_in_the_module_says_the_same() -> None:
    assert lifecycle.TRANSITIONS.keys() == FOLLOWS.keys()
    for pair, (phase, _) in FOLLOWS.items():
        assert phase in lifecycle.TRANSITIONS[pair]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.IDLE])
def test_what_speaks_of_a_round_that_is_over_is_dropped(phase: Phase, event: Any) -> None:
    machine = machine_in(phase)
    before = (machine.phase, machine.round, machine.restarts_used, machine.outcome, machine.story())
    assert machine.step(replace(event, round=machine.round - 1), NOW) == []
    assert (machine.phase, machine.round, machine.restarts_used, machine.outcome, machine.story()) == before


@pytest.mark.parametrize("phase", list(Phase))
def test_what_speaks_of_a_round_to_come_is_impossible(phase: Phase) -> None:
    machine = machine_in(phase)
    with pytest.raises(InvalidTransition, match=f"round={machine.round + 1}"):
        machine.step(WorkersFailed(machine.round + 1), NOW)


@dataclass(frozen=True)
class Life:
    """What happens to the workers once they run, and what is known afterwards."""

    name: str
    max_restarts: int
    happenings: tuple[Any, ...]
    phase: Phase
    restarts_used: int
    rounds: int
    last: list[Any]
    outcome: Outcome | None = None
    node_count: int = 1


FAILED, SUCCEEDED, NEWCOMER = WorkersFailed(0), WorkersSucceeded(0), NodesWaiting(0)
LIVES = [
    Life("success alone ends at once", 0, (SUCCEEDED,), Phase.ENDED, 0, 1, [EndRun(Outcome.SUCCEEDED)],
         Outcome.SUCCEEDED),
    Life("success waits for peers", 0, (SUCCEEDED,), Phase.WAITING, 0, 1, [AwaitPeers(1)], None, 2),
    Life("no budget", 0, (FAILED,), Phase.ENDED, 0, 1, [EndRun(Outcome.FAILED)], Outcome.FAILED),
    Life("one restart", 1, (FAILED,), Phase.RUNNING, 1, 2, []),
    Life("one too many", 1, (FAILED, FAILED), Phase.ENDED, 1, 2, [EndRun(Outcome.FAILED)], Outcome.FAILED),
    Life("success after failures", 3, (FAILED, FAILED, SUCCEEDED), Phase.ENDED, 2, 3, [EndRun(Outcome.SUCCEEDED)],
         Outcome.SUCCEEDED),
    Life("newcomers are free", 0, (NEWCOMER, NEWCOMER, NEWCOMER), Phase.RUNNING, 0, 4, []),
    Life("newcomers leave the budget", 1, (NEWCOMER, FAILED, NEWCOMER), Phase.RUNNING, 1, 4, []),
]  # fmt: skip


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
def test_lives(life: Life) -> None:
    machine = Lifecycle(life.max_restarts, PEERS_TIMEOUT_S)
    commands = machine.step(RunRequested(), NOW)
    happenings = list(life.happenings)
    while commands and machine.phase is not Phase.WAITING:
        event: Any
        match commands[0]:
            case Join(round):
                event = WorldSealed(round, life.node_count)
            case StartWorkers(round):
                event = WorkersStarted(round)
            case StopWorkers(round, _):
                event = WorkersStopped(round)
            case _:
                break
        commands = machine.step(event, NOW)
        machine.check()
        if machine.phase is Phase.RUNNING and happenings:
            commands = machine.step(in_round(happenings.pop(0), machine), NOW)
            machine.check()
    assert not happenings
    assert (machine.phase, machine.restarts_used, machine.round) == (life.phase, life.restarts_used, life.rounds)
    assert (commands, machine.outcome) == (life.last, life.outcome)
    assert machine.remaining_restarts == life.max_restarts - life.restarts_used


@pytest.mark.parametrize("cause", [WorkersFailed(1), NodesWaiting(1)], ids=lambda e: type(e).__name__)
def test_a_process_that_cannot_be_killed_ends_the_run(cause: Any) -> None:
    machine = machine_in(Phase.RUNNING, max_restarts=5)
    assert machine.step(cause, NOW) == [StopWorkers(1, will_restart=True)]
    assert machine.step(WorkersStopped(1, unkillable=(4711,)), NOW) == [EndRun(Outcome.FAILED)]
    assert machine.unkillable == (4711,)
    machine.check()


def test_the_only_deadline_is_for_the_peers() -> None:
    for phase in Phase:
        deadline = machine_in(phase).next_deadline()
        assert deadline == (NOW + PEERS_TIMEOUT_S if phase is Phase.WAITING else None)


def test_the_story_is_bounded_and_keeps_the_latest() -> None:
    machine = machine_in(Phase.RUNNING, max_restarts=0)
    for _ in range(100):
        machine.step(NodesWaiting(machine.round), NOW)
        machine.step(WorkersStopped(machine.round), NOW)
        machine.step(WorldSealed(machine.round, 2), NOW)
        machine.step(WorkersStarted(machine.round), NOW)
    with pytest.raises(InvalidTransition) as caught:
        machine.step(WorkersStarted(machine.round), NOW)
    assert len(str(caught.value)) < 10_000
    assert f"WorldSealed(round={machine.round}, node_count=2)" in str(caught.value)
    assert "RunRequested" not in str(caught.value)
    assert isinstance(caught.value, InternalError)


def test_the_story_of_a_machine_to_which_nothing_happened() -> None:
    with pytest.raises(InvalidTransition, match="before: nothing"):
        Lifecycle(0, 1.0).step(WorkersFailed(0), NOW)
