"""Whatever happens to an agent, in whatever order: its machine keeps its promises."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
from holdfast.rendezvous.membership.model import End, Ended, Outcome, Place, PlaceLost, Sealed, Stop
from tests.promises import promise


def sealed(round: int) -> Sealed:
    return Sealed("a/0", Place(1, round, 0, 1))


def stopped(round: int) -> Stop:
    return Stop(round, "a failure elsewhere")


def lost(round: int) -> PlaceLost:
    return PlaceLost(round, "out of reach")


def ended(end: End) -> Ended:
    return Ended(Outcome(end, "it is over"))


IN_A_ROUND: list[Any] = [
    sealed, WorkersStarted, WorkersSucceeded, WorkersFailed, WorkersStopped, stopped, lost, PeersTimedOut,
]  # fmt: skip
PEERS_TIMEOUT_S = 10.0
AGES = st.integers(1, 5)
ENDS = st.sampled_from(End)
UNKILLABLE = st.sampled_from([(), (), (), (7,)])


def snapshot(machine: Lifecycle) -> dict[str, Any]:
    return {**vars(machine), "_story": machine.story()}


def when(**expected: Any) -> Any:
    """A precondition on what the shell has in hand."""
    return precondition(lambda self: all(getattr(self, name) == value for name, value in expected.items()))


@promise("""restarts.order-events-rounds-rise: In any order of events, rounds only rise, and a run that has ended stays
    ended.""")
class AgentLife(RuleBasedStateMachine):
    """Plays the shell: it carries commands out, in its own time, and lets things happen to the workers."""

    @initialize()
    def begin(self) -> None:
        self.machine = Lifecycle(PEERS_TIMEOUT_S)
        self.now = 0.0
        self.is_joining = False
        self.is_starting = False
        self.is_stopping = False
        self.is_over = False
        self.workers: int | None = None  # The round whose workers may be alive.
        self.told: End | None = None
        self.unkillable: tuple[int, ...] = ()
        self.take(RunRequested())

    def take(self, event: Any) -> None:
        self.now += 1.0
        was, round = self.machine.phase, self.machine.round
        step = self.machine.step(event, self.now)
        assert step is not None
        assert self.machine.phase in TRANSITIONS[was, type(event)]
        assert self.machine.round >= round, "rounds only rise"
        for command in step.commands:
            self.carry_out(command)

    def carry_out(self, command: Any) -> None:
        match command:
            case JoinRound():
                assert self.workers is None, "a node that joins has no workers"
                self.is_joining = True
            case StartWorkers(round):
                assert self.workers is None, "one life of workers at a time"
                self.workers, self.is_starting = round, True
            case StopWorkers(round):
                assert self.workers == round
                self.is_stopping = True
            case ReportFailure(round):
                assert round == self.machine.round == self.workers
            case ReportSuccess(round):
                assert round == self.machine.round
            case EndRun(end):
                assert self.workers is None or self.unkillable
                assert end is self.machine.end
                self.is_over, self.is_joining = True, False
            case _:
                raise AssertionError(command)

    @when(is_joining=True)
    @rule(by=AGES)
    def seal(self, by: int) -> None:
        self.is_joining = False
        self.take(sealed(self.machine.round + by))

    @when(is_starting=True)
    @rule()
    def start(self) -> None:
        self.is_starting = False
        self.take(WorkersStarted(self.machine.round))

    @precondition(lambda self: self.workers and not self.is_over)
    @rule()
    def fail(self) -> None:
        """Also while others are being started."""
        self.take(WorkersFailed(self.machine.round))

    @precondition(lambda self: self.workers and not self.is_starting and not self.is_over)
    @rule()
    def succeed(self) -> None:
        """They are gone, except to one who is stopping them already and will say so."""
        if not self.is_stopping:
            self.workers = None
        self.take(WorkersSucceeded(self.machine.round))

    @when(is_stopping=True, is_over=False)
    @rule(unkillable=UNKILLABLE)
    def stop(self, unkillable: tuple[int, ...]) -> None:
        self.is_stopping = self.is_starting = False
        self.unkillable = unkillable
        self.workers = None if not unkillable else self.workers
        self.take(WorkersStopped(self.machine.round, unkillable))

    @when(is_over=False)
    @rule(kind=st.sampled_from([stopped, lost]))
    def pushed(self, kind: Any) -> None:
        self.take(kind(self.machine.round))
        assert self.machine.phase in (AgentPhase.STOPPING, AgentPhase.JOINING)

    @when(told=None, is_over=False)
    @rule(end=ENDS)
    def told_of_the_end(self, end: End) -> None:
        self.told = end
        self.take(ended(end))

    @when(is_over=True)
    @rule(kind=st.sampled_from(IN_A_ROUND), ahead=st.integers(-1, 2), end=ENDS)
    def after_the_end(self, kind: Any, ahead: int, end: End) -> None:
        before = snapshot(self.machine)
        for event in (kind(self.machine.round + ahead), ended(end), RunRequested()):
            assert self.machine.step(event, self.now) is None
        assert snapshot(self.machine) == before

    @precondition(lambda self: self.machine.next_deadline() is not None)
    @rule()
    def waited_long_enough(self) -> None:
        self.now += PEERS_TIMEOUT_S
        self.take(PeersTimedOut(self.machine.round))
        assert self.machine.end is End.SUCCEEDED

    @precondition(lambda self: self.machine.round > 0)
    @rule(kind=st.sampled_from(IN_A_ROUND), age=AGES)
    def old_news(self, kind: Any, age: int) -> None:
        before = snapshot(self.machine)
        assert self.machine.step(kind(self.machine.round - age), self.now) is None
        assert snapshot(self.machine) == before

    @when(is_over=False)
    @rule(kind=st.sampled_from([kind for kind in IN_A_ROUND if kind is not sealed]), ahead=st.integers(0, 2))
    def impossible(self, kind: Any, ahead: int) -> None:
        event = kind(self.machine.round + ahead)
        if not ahead and (self.machine.phase, type(event)) in TRANSITIONS:
            return
        before = snapshot(self.machine)
        with pytest.raises(InvalidTransition):
            self.machine.step(event, self.now)
        assert snapshot(self.machine) == before

    @invariant()
    def keeps_its_promises(self) -> None:
        machine = self.machine
        machine.check()
        assert (machine.phase is AgentPhase.ENDED) == self.is_over, "ended stays ended, and is said once"
        assert self.is_joining <= (machine.phase is AgentPhase.JOINING)
        if machine.phase is AgentPhase.ENDED and self.unkillable:
            assert machine.end is End.FAILED
        elif machine.phase is AgentPhase.ENDED and self.told:
            assert machine.end is self.told
        if machine.phase in (AgentPhase.STARTING, AgentPhase.RUNNING):
            assert self.told is None, "nothing runs after the end"


TestAgentLife = AgentLife.TestCase
TestAgentLife.settings = settings(max_examples=40, stateful_step_count=40)
