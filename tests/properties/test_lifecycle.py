"""Whatever happens to an agent, in whatever order: its machine keeps its promises."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.agent.lifecycle import (
    TRANSITIONS,
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

EVENT_TYPES: list[Any] = [
    RunRequested, WorkersStarted, WorkersSucceeded, WorkersFailed, NodesWaiting, WorkersStopped, PeersFinished,
    TimePassed,
]  # fmt: skip
nodes = st.integers(1, 4)


def event_of(kind: Any, round: int, node_count: int = 1) -> Any:
    return WorldSealed(round, node_count) if kind is WorldSealed else kind(round)


def snapshot(machine: Lifecycle) -> dict[str, Any]:
    return {**vars(machine), "_story": machine.story()}


class AgentLife(RuleBasedStateMachine):
    """Plays the shell: it carries commands out, in its own time, and lets things happen to the workers."""

    @initialize(max_restarts=st.integers(0, 3))
    def begin(self, max_restarts: int) -> None:
        self.machine = Lifecycle(max_restarts, 10.0)
        self.now = 0.0
        self.failures = 0
        self.rounds = [0]
        self.has_killed_all = True
        self.todo: list[Any] = []
        self.take(RunRequested())

    def take(self, event: Any) -> None:
        self.now += 1.0
        was = self.machine.phase
        commands = self.machine.step(event, self.now)
        assert self.machine.phase in TRANSITIONS[was, type(event)]
        assert len(commands) <= 1, "one thing at a time"
        self.todo = commands
        self.rounds.append(self.machine.round)

    def is_asked_for(self, kind: type) -> bool:
        return bool(self.todo) and isinstance(self.todo[0], kind)

    @precondition(lambda self: self.is_asked_for(Join))
    @rule(node_count=nodes)
    def seal(self, node_count: int) -> None:
        self.node_count = node_count
        self.take(WorldSealed(self.machine.round, node_count))

    @precondition(lambda self: self.is_asked_for(StartWorkers))
    @rule()
    def start(self) -> None:
        self.take(WorkersStarted(self.machine.round))

    @precondition(lambda self: self.is_asked_for(StopWorkers))
    @rule(unkillable=st.sampled_from([(), (), (), (7,)]))
    def stop(self, unkillable: tuple[int, ...]) -> None:
        will_restart = self.todo[0].will_restart
        self.has_killed_all = not unkillable
        self.take(WorkersStopped(self.machine.round, unkillable))
        assert self.is_asked_for(Join) == (will_restart and not unkillable)

    @precondition(lambda self: self.is_asked_for(AwaitPeers))
    @rule(in_time=st.booleans())
    def meet_peers(self, in_time: bool) -> None:
        assert self.machine.next_deadline() is not None
        kind = PeersFinished if in_time else TimePassed
        self.take(kind(self.machine.round))
        assert self.machine.outcome is Outcome.SUCCEEDED

    @precondition(lambda self: self.machine.phase is Phase.RUNNING)
    @rule()
    def fail(self) -> None:
        had_budget = self.failures < self.machine.max_restarts
        self.failures += had_budget
        self.take(WorkersFailed(self.machine.round))
        assert self.todo == [StopWorkers(self.machine.round, will_restart=had_budget)]

    @precondition(lambda self: self.machine.phase is Phase.RUNNING)
    @rule()
    def newcomer(self) -> None:
        self.take(NodesWaiting(self.machine.round))
        assert self.todo == [StopWorkers(self.machine.round, will_restart=True)]

    @precondition(lambda self: self.machine.phase is Phase.RUNNING)
    @rule()
    def succeed(self) -> None:
        self.take(WorkersSucceeded(self.machine.round))
        assert self.is_asked_for(EndRun if self.node_count == 1 else AwaitPeers)

    @precondition(lambda self: self.machine.round > 0)
    @rule(kind=st.sampled_from([*EVENT_TYPES, WorldSealed]), age=st.integers(1, 5))
    def old_news(self, kind: Any, age: int) -> None:
        before = snapshot(self.machine)
        assert self.machine.step(event_of(kind, self.machine.round - age), self.now) == []
        assert snapshot(self.machine) == before

    @rule(kind=st.sampled_from([*EVENT_TYPES, WorldSealed]))
    def impossible(self, kind: Any) -> None:
        if (self.machine.phase, kind) in TRANSITIONS:
            return
        before = snapshot(self.machine)
        with pytest.raises(InvalidTransition):
            self.machine.step(event_of(kind, self.machine.round), self.now)
        assert snapshot(self.machine) == before

    @invariant()
    def keeps_its_promises(self) -> None:
        machine = self.machine
        machine.check()
        assert machine.restarts_used == self.failures <= machine.max_restarts
        assert self.rounds == sorted(self.rounds), "rounds only rise"
        if machine.phase is Phase.ENDED:
            assert self.todo == [EndRun(machine.outcome)]  # type: ignore[arg-type]  # ended, so it is not None
            assert not any(phase is Phase.ENDED for phase, _ in TRANSITIONS), "ended stays ended"
        if not self.has_killed_all:
            assert machine.outcome is Outcome.FAILED


TestAgentLife = AgentLife.TestCase
TestAgentLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
