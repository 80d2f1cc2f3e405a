"""One agent's machine: join, start, run, stop, join again, end. Pure.

            RunRequested            Sealed               WorkersStarted
    IDLE ---------------> JOINING ------------> STARTING --------------> RUNNING
                          ^  ^ |                     |                    |  |
                          |  | | Ended               |       Stop,        |  | WorkersSucceeded
                          |  | v                     v    failed, lost    |  v
                          |  | ENDED <---------- STOPPING <---------------+ WAITING (for the other nodes)
                          |  |        Ended          |                       |
                          |  +-----------------------+                       | Stop
                          +--------------------------------------------------+

`TRANSITIONS` below is that diagram as data.

The machine owns no policy about the run: it reports what its workers did, and is told that the round was stopped, which
place it has next, or how the run ended. These are the coordinator's own messages (`membership.model`); for a run of one
node the agent makes them itself. What the machine decides:

* Workers that failed are reported and stopped at once; then the node asks for a place in the next round.
* A place that is lost leaves no time for grace: the workers are killed.
* A process that cannot be killed ends the run on this node: its successor could not own what it holds.
* Workers that all succeeded wait for the other nodes, at most `peers_timeout_s`.

Every event but the first and the last carries the round it speaks of. An event of a round that is over is dropped,
in `step`, and nowhere else. An event that cannot happen in the phase raises `InvalidTransition` with the recent
story.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from holdfast.errors import InternalError
from holdfast.frozen import frozen
from holdfast.rendezvous.membership.model import End, Ended, PlaceLost, Sealed, Stop

_STORY_LENGTH = 32


class Phase(StrEnum):
    IDLE = "IDLE"
    JOINING = "JOINING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    WAITING = "WAITING"
    ENDED = "ENDED"


WITH_WORKERS = (Phase.STARTING, Phase.RUNNING, Phase.STOPPING)

# Events: what has happened here. Those of the run are the pushes of `membership.model`.


@frozen
class RunRequested:
    pass


@frozen
class WorkersStarted:
    round: int


@frozen
class WorkersSucceeded:
    round: int


@frozen
class WorkersFailed:
    """At least one worker ended badly, or the group runs but is not healthy."""

    round: int


@frozen
class WorkersStopped:
    """Nothing of the group is left but the `unkillable` pids."""

    round: int
    unkillable: tuple[int, ...] = ()


@frozen
class TimePassed:
    """The deadline that `next_deadline` named has come."""

    round: int


_FromRun = Sealed | Stop | PlaceLost | Ended
Event = RunRequested | WorkersStarted | WorkersSucceeded | WorkersFailed | WorkersStopped | TimePassed | _FromRun


# Commands: what is to be done.


@frozen
class Join:
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


@frozen
class ReportSuccess:
    round: int


@frozen
class EndRun:
    end: End


Command = Join | StartWorkers | StopWorkers | ReportFailure | ReportSuccess | EndRun

# When, in which phase, what happened, and what was to be done.
Step = tuple[float, Phase, Event, tuple[Command, ...]]

# In which phase, what may happen, and in which phase the machine may be then.
TRANSITIONS: dict[tuple[Phase, type[Event]], set[Phase]] = {
    (phase, event): targets
    for phase, events, targets in (
        (Phase.IDLE, (RunRequested,), {Phase.JOINING}),
        (Phase.JOINING, (Sealed,), {Phase.STARTING}),
        (Phase.JOINING, (PlaceLost, Stop), {Phase.JOINING}),
        (Phase.JOINING, (Ended,), {Phase.ENDED}),
        (Phase.STARTING, (WorkersStarted,), {Phase.RUNNING}),
        (Phase.STARTING, (WorkersFailed, Stop, PlaceLost, Ended), {Phase.STOPPING}),
        (Phase.RUNNING, (WorkersSucceeded,), {Phase.WAITING}),
        (Phase.RUNNING, (WorkersFailed, Stop, PlaceLost, Ended), {Phase.STOPPING}),
        (Phase.STOPPING, (WorkersStopped,), {Phase.JOINING, Phase.ENDED}),
        (Phase.STOPPING, (PlaceLost, Ended), {Phase.STOPPING}),
        # What was on its way when the stop began changes nothing any more.
        (Phase.STOPPING, (WorkersStarted, WorkersSucceeded, WorkersFailed, Stop), {Phase.STOPPING}),
        (Phase.WAITING, (Stop, PlaceLost), {Phase.JOINING}),
        (Phase.WAITING, (Ended, TimePassed), {Phase.ENDED}),
    )
    for event in events
}


class InvalidTransition(InternalError):  # noqa: N818
    """An event came that cannot happen now."""


class Lifecycle:
    """The machine. `round` is the round of the last world; it only rises."""

    def __init__(self, peers_timeout_s: float) -> None:
        self.peers_timeout_s = peers_timeout_s
        self.phase = Phase.IDLE
        self.round = 0
        self.end: End | None = None
        self.unkillable: tuple[int, ...] = ()
        self._verdict: End | None = None
        self._deadline: float | None = None
        self._story: deque[Step] = deque(maxlen=_STORY_LENGTH)

    def next_deadline(self) -> float | None:
        return self._deadline

    def step(self, event: Event, now: float) -> list[Command]:
        ahead = self._rounds_ahead(event)
        if self.phase is Phase.ENDED or ahead < 0:
            return []
        if ahead > 0 or (self.phase, type(event)) not in TRANSITIONS:
            raise InvalidTransition(f"{event} in phase {self.phase}, round {self.round}; before: {self.story()}")
        before = self.phase
        commands = self._decide(event, now)
        self._story.append((now, before, event, tuple(commands)))
        return commands

    def _rounds_ahead(self, event: Event) -> int:
        """Below 0: the event is of a round that is over. Above 0: of one that this machine has not heard of."""
        match event:
            case RunRequested() | Ended():
                return 0
            case Sealed(_, place):
                return min(0, place.round - self.round - 1)
        return event.round - self.round

    def _decide(self, event: Event, now: float) -> list[Command]:
        has_workers = self.phase in (Phase.STARTING, Phase.RUNNING)
        match event:
            case RunRequested():
                return self._join()
            case Sealed(_, place):
                self.phase, self.round = Phase.STARTING, place.round
                return [StartWorkers(place.round)]
            case WorkersStarted() if has_workers:
                self.phase = Phase.RUNNING
            case WorkersSucceeded() if has_workers:
                self.phase, self._deadline = Phase.WAITING, now + self.peers_timeout_s
                return [ReportSuccess(self.round)]
            case WorkersFailed() if has_workers:
                return [ReportFailure(self.round), *self._stop()]
            case Stop() | PlaceLost() if has_workers:
                return self._stop(at_once=isinstance(event, PlaceLost))
            case Stop() | PlaceLost() if self.phase is Phase.WAITING:
                return self._join()
            case PlaceLost() if self.phase is Phase.STOPPING:
                return self._stop(at_once=True)
            case WorkersStopped(_, unkillable):
                self.unkillable = unkillable
                end = End.FAILED if unkillable else self._verdict
                return self._join() if end is None else self._end(end)
            case Ended(outcome):
                self._verdict = outcome.end
                if has_workers:
                    return self._stop()
                if self.phase is not Phase.STOPPING:
                    return self._end(outcome.end)
            case TimePassed():
                return self._end(End.SUCCEEDED)
        return []  # It was on its way when the stop began, or changes only the phase.

    def _join(self) -> list[Command]:
        self.phase, self._deadline = Phase.JOINING, None
        return [Join()]

    def _stop(self, *, at_once: bool = False) -> list[Command]:
        self.phase = Phase.STOPPING
        return [StopWorkers(self.round, at_once)]

    def _end(self, end: End) -> list[Command]:
        self.phase, self.end, self._deadline = Phase.ENDED, end, None
        return [EndRun(end)]

    def steps(self) -> tuple[Step, ...]:
        """The last ones, oldest first."""
        return tuple(self._story)

    def story(self) -> str:
        """The last events with what they led to, oldest first."""
        lines = (f"{phase}: {event} -> {list(commands)}" for _, phase, event, commands in self._story)
        return "; ".join(lines) or "nothing"

    def check(self) -> None:
        """The invariants; tests call this after every step."""
        assert (self.phase is Phase.ENDED) == (self.end is not None)
        assert (self.phase is Phase.WAITING) == (self._deadline is not None)
        assert self.round > 0 or self.phase in (Phase.IDLE, Phase.JOINING, Phase.ENDED)
