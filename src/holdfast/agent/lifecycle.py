"""One agent's machine: join, start, run, stop, join again, end. Pure.

`TRANSITIONS` has the phases and what leads from one to another; docs/architecture.md shows it as a diagram.

The machine owns no policy about the run: it reports what its workers did, and is told that the round was stopped, which
place it has next, or how the run ended. These are the coordinator's own messages (`membership.model`); for a run of one
node the agent makes them itself. What the machine decides:

* Workers that failed are reported and stopped at once; then the node asks for a place in the next round.
* A place that is lost leaves no time for grace: the workers are killed.
* A process that cannot be killed ends the run on this node: its successor could not own what it holds.
* Workers that all succeeded wait for the other nodes, at most `peers_timeout_s`. If they have ended because of a notice
  the run is not done: the next round follows, or the run ends as closed.

Every event but the first and the last carries the round it speaks of. An event of a round that is over is dropped
(`is_stale`); there is no other such rule. An event that cannot happen in the phase raises `InvalidTransition` with the
recent story.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from holdfast.errors import InternalError
from holdfast.failures.records import Failure
from holdfast.frozen import frozen
from holdfast.rendezvous.membership.model import End, Ended, PlaceLost, Sealed, Stop

_STORY_LENGTH = 32


class AgentPhase(StrEnum):
    IDLE = "IDLE"
    JOINING = "JOINING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    FINISHED = "FINISHED"
    ENDED = "ENDED"


WITH_WORKERS = (AgentPhase.STARTING, AgentPhase.RUNNING, AgentPhase.STOPPING)

# Events: what has happened here. Those of the run are the pushes of `membership.model`.


@frozen
class RunRequested:
    pass


@frozen
class WorkersStarted:
    round: int


@frozen
class WorkersSucceeded:
    """`has_agreed`: some have ended because of a notice, and are not done."""

    round: int
    has_agreed: bool = False


@frozen
class WorkersFailed:
    """At least one worker ended badly, or the group runs but is not healthy."""

    round: int
    failure: Failure | None = None


@frozen
class WorkersStopped:
    """Nothing of the group is left but the `unkillable` pids. `stopped`: how workers were stopped, and which ranks."""

    round: int
    unkillable: tuple[int, ...] = ()
    stopped: tuple[tuple[str, tuple[int, ...]], ...] = ()


@frozen
class PeersTimedOut:
    """The deadline that `next_deadline` named has come."""

    round: int


_FromRun = Sealed | Stop | PlaceLost | Ended
_FromWorkers = WorkersStarted | WorkersSucceeded | WorkersFailed | WorkersStopped
Event = RunRequested | _FromWorkers | PeersTimedOut | _FromRun


# Commands: what is to be done.


@frozen
class JoinRound:
    """Ask for a place in the next round; the answer is `Sealed` or `Ended`."""


@frozen
class StartWorkers:
    round: int


@frozen
class StopWorkers:
    """`at_once`: without grace. May come a second time, to cut the grace of the first short."""

    round: int
    at_once: bool = False


@frozen
class ReportFailure:
    round: int
    failure: Failure | None = None


@frozen
class ReportSuccess:
    round: int
    has_agreed: bool = False


@frozen
class EndRun:
    end: End


Command = JoinRound | StartWorkers | StopWorkers | ReportFailure | ReportSuccess | EndRun


@frozen
class Step:
    """When, in which phase, what happened, what is to be done, and how the machine stands after it."""

    time: float
    before: AgentPhase
    event: Event
    commands: tuple[Command, ...]
    phase: AgentPhase
    round: int
    end: End | None = None


# In which phase, what may happen, and in which phase the machine may be then.
TRANSITIONS: dict[tuple[AgentPhase, type[Event]], set[AgentPhase]] = {
    (phase, event): targets
    for phase, events, targets in (
        (AgentPhase.IDLE, (RunRequested,), {AgentPhase.JOINING}),
        (AgentPhase.JOINING, (Sealed,), {AgentPhase.STARTING}),
        (AgentPhase.JOINING, (PlaceLost, Stop), {AgentPhase.JOINING}),
        (AgentPhase.JOINING, (Ended,), {AgentPhase.ENDED}),
        (AgentPhase.STARTING, (WorkersStarted,), {AgentPhase.RUNNING}),
        (AgentPhase.STARTING, (WorkersFailed, Stop, PlaceLost, Ended), {AgentPhase.STOPPING}),
        (AgentPhase.RUNNING, (WorkersSucceeded,), {AgentPhase.FINISHED}),
        (AgentPhase.RUNNING, (WorkersFailed, Stop, PlaceLost, Ended), {AgentPhase.STOPPING}),
        (AgentPhase.STOPPING, (WorkersStopped,), {AgentPhase.JOINING, AgentPhase.ENDED}),
        (AgentPhase.STOPPING, (PlaceLost, Ended), {AgentPhase.STOPPING}),
        # What was on its way when the stop began changes nothing any more.
        (AgentPhase.STOPPING, (WorkersStarted, WorkersSucceeded, WorkersFailed, Stop), {AgentPhase.STOPPING}),
        (AgentPhase.FINISHED, (Stop, PlaceLost), {AgentPhase.JOINING}),
        (AgentPhase.FINISHED, (Ended, PeersTimedOut), {AgentPhase.ENDED}),
    )
    for event in events
}


class InvalidTransition(InternalError):  # noqa: N818
    """An event came that cannot happen now."""


class Lifecycle:
    """The machine. `round` is the round of the last world; it only rises."""

    def __init__(self, peers_timeout_s: float) -> None:
        self.peers_timeout_s = peers_timeout_s
        self.phase = AgentPhase.IDLE
        self.round = 0
        self.end: End | None = None
        self.unkillable: tuple[int, ...] = ()
        self._verdict: End | None = None
        self._deadline: float | None = None
        self._has_agreed = False  # While FINISHED.
        self._story: deque[Step] = deque(maxlen=_STORY_LENGTH)

    def next_deadline(self) -> float | None:
        return self._deadline

    def is_stale(self, event: Event) -> bool:
        """Whether it changes nothing any more: it is of a round that is over, or the run has ended."""
        return self.phase is AgentPhase.ENDED or self._rounds_ahead(event) < 0

    def step(self, event: Event, now: float) -> Step | None:
        """None if the event is stale."""
        if self.is_stale(event):
            return None
        before = self.phase
        if self._rounds_ahead(event) > 0 or (before, type(event)) not in TRANSITIONS:
            raise InvalidTransition(f"{event} in phase {before}, round {self.round}; before: {self.story()}")
        commands = tuple(self._decide(event, now))
        self._story.append(Step(now, before, event, commands, self.phase, self.round, self.end))
        return self._story[-1]

    def _rounds_ahead(self, event: Event) -> int:
        """Below 0: the event is of a round that is over. Above 0: of one that this machine has not heard of."""
        match event:
            case RunRequested() | Ended():
                return 0
            case Sealed(_, place):
                return min(0, place.round - self.round - 1)
        return event.round - self.round

    def _decide(self, event: Event, now: float) -> list[Command]:
        has_workers = self.phase in (AgentPhase.STARTING, AgentPhase.RUNNING)
        match event:
            case RunRequested():
                return self._join()
            case Sealed(_, place):
                self.phase, self.round = AgentPhase.STARTING, place.round
                return [StartWorkers(place.round)]
            case WorkersStarted() if has_workers:
                self.phase = AgentPhase.RUNNING
            case WorkersSucceeded(_, has_agreed) if has_workers:
                self.phase, self._deadline = AgentPhase.FINISHED, now + self.peers_timeout_s
                self._has_agreed = has_agreed
                return [ReportSuccess(self.round, has_agreed)]
            case WorkersFailed(_, failure) if has_workers:
                return [ReportFailure(self.round, failure), *self._stop()]
            case Stop() | PlaceLost() if has_workers:
                return self._stop(at_once=isinstance(event, PlaceLost))
            case Stop() | PlaceLost() if self.phase is AgentPhase.FINISHED:
                return self._join()
            case PlaceLost() if self.phase is AgentPhase.STOPPING:
                return self._stop(at_once=True)
            case WorkersStopped(_, unkillable):
                self.unkillable = unkillable
                end = End.FAILED if unkillable else self._verdict
                return self._join() if end is None else self._end(end)
            case Ended(outcome):
                self._verdict = outcome.end
                if has_workers:
                    return self._stop()
                if self.phase is not AgentPhase.STOPPING:
                    return self._end(outcome.end)
            case PeersTimedOut():
                return self._end(End.CLOSED if self._has_agreed else End.SUCCEEDED)
        return []  # It was on its way when the stop began, or changes only the phase.

    def _join(self) -> list[Command]:
        self.phase, self._deadline = AgentPhase.JOINING, None
        return [JoinRound()]

    def _stop(self, *, at_once: bool = False) -> list[Command]:
        self.phase = AgentPhase.STOPPING
        return [StopWorkers(self.round, at_once)]

    def _end(self, end: End) -> list[Command]:
        self.phase, self.end, self._deadline = AgentPhase.ENDED, end, None
        return [EndRun(end)]

    def story(self) -> str:
        """The last events with what they led to, oldest first."""
        lines = (f"{each.before}: {each.event} -> {list(each.commands)}" for each in self._story)
        return "; ".join(lines) or "nothing"

    def check(self) -> None:
        """The invariants; tests call this after every step."""
        assert (self.phase is AgentPhase.ENDED) == (self.end is not None)
        assert (self.phase is AgentPhase.FINISHED) == (self._deadline is not None)
        assert self.round > 0 or self.phase in (AgentPhase.IDLE, AgentPhase.JOINING, AgentPhase.ENDED)
