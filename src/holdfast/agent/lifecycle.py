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
from typing import assert_never

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


Event = (
    RunRequested
    | WorkersStarted
    | WorkersSucceeded
    | WorkersFailed
    | WorkersStopped
    | TimePassed
    | Sealed
    | Stop
    | PlaceLost
    | Ended
)


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


def _to(*phases: Phase) -> frozenset[Phase]:
    return frozenset(phases)


TRANSITIONS: dict[tuple[Phase, type[Event]], frozenset[Phase]] = {
    (Phase.IDLE, RunRequested): _to(Phase.JOINING),
    (Phase.JOINING, Sealed): _to(Phase.STARTING),
    (Phase.JOINING, PlaceLost): _to(Phase.JOINING),
    (Phase.JOINING, Stop): _to(Phase.JOINING),
    (Phase.JOINING, Ended): _to(Phase.ENDED),
    (Phase.STARTING, WorkersStarted): _to(Phase.RUNNING),
    (Phase.STARTING, WorkersFailed): _to(Phase.STOPPING),
    (Phase.STARTING, Stop): _to(Phase.STOPPING),
    (Phase.STARTING, PlaceLost): _to(Phase.STOPPING),
    (Phase.STARTING, Ended): _to(Phase.STOPPING),
    (Phase.RUNNING, WorkersSucceeded): _to(Phase.WAITING),
    (Phase.RUNNING, WorkersFailed): _to(Phase.STOPPING),
    (Phase.RUNNING, Stop): _to(Phase.STOPPING),
    (Phase.RUNNING, PlaceLost): _to(Phase.STOPPING),
    (Phase.RUNNING, Ended): _to(Phase.STOPPING),
    (Phase.STOPPING, WorkersStopped): _to(Phase.JOINING, Phase.ENDED),
    (Phase.STOPPING, PlaceLost): _to(Phase.STOPPING),
    (Phase.STOPPING, Ended): _to(Phase.STOPPING),
    # What was on its way when the stop began changes nothing any more.
    (Phase.STOPPING, WorkersStarted): _to(Phase.STOPPING),
    (Phase.STOPPING, WorkersSucceeded): _to(Phase.STOPPING),
    (Phase.STOPPING, WorkersFailed): _to(Phase.STOPPING),
    (Phase.STOPPING, Stop): _to(Phase.STOPPING),
    (Phase.WAITING, Stop): _to(Phase.JOINING),
    (Phase.WAITING, PlaceLost): _to(Phase.JOINING),
    (Phase.WAITING, Ended): _to(Phase.ENDED),
    (Phase.WAITING, TimePassed): _to(Phase.ENDED),
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
        if self.phase is Phase.ENDED or self._is_stale(event):
            return []
        if not self._is_possible(event):
            raise InvalidTransition(f"{event} in phase {self.phase}, round {self.round}; before: {self.story()}")
        before = self.phase
        commands = self._decide(event, now)
        self._story.append((now, before, event, tuple(commands)))
        return commands

    def _is_stale(self, event: Event) -> bool:
        match event:
            case RunRequested() | Ended():
                return False
            case Sealed(_, place):
                return place.round <= self.round
        return event.round < self.round

    def _is_possible(self, event: Event) -> bool:
        is_of_this_round = isinstance(event, (RunRequested, Ended, Sealed)) or event.round == self.round
        return is_of_this_round and (self.phase, type(event)) in TRANSITIONS

    def _decide(self, event: Event, now: float) -> list[Command]:
        match event:
            case RunRequested():
                return self._join()
            case Sealed(_, place):
                self.phase, self.round = Phase.STARTING, place.round
                return [StartWorkers(place.round)]
            case WorkersStarted():
                return self._started()
            case WorkersSucceeded():
                return self._succeeded(now)
            case WorkersFailed():
                return self._failed()
            case WorkersStopped(_, unkillable):
                return self._stopped(unkillable)
            case Stop():
                return self._interrupted(at_once=False)
            case PlaceLost():
                return self._interrupted(at_once=True)
            case Ended(outcome):
                return self._told_outcome(outcome.end)
            case TimePassed():
                return self._end(End.SUCCEEDED)
        assert_never(event)

    def _join(self) -> list[Command]:
        self.phase = Phase.JOINING
        self._deadline = None
        return [Join()]

    def _started(self) -> list[Command]:
        if self.phase is Phase.STARTING:
            self.phase = Phase.RUNNING
        return []

    def _succeeded(self, now: float) -> list[Command]:
        if self.phase is not Phase.RUNNING:
            return []
        self.phase = Phase.WAITING
        self._deadline = now + self.peers_timeout_s
        return [ReportSuccess(self.round)]

    def _failed(self) -> list[Command]:
        if self.phase not in (Phase.STARTING, Phase.RUNNING):
            return []
        return [ReportFailure(self.round), *self._stop(at_once=False)]

    def _interrupted(self, *, at_once: bool) -> list[Command]:
        match self.phase:
            case Phase.STARTING | Phase.RUNNING:
                return self._stop(at_once=at_once)
            case Phase.STOPPING:
                return [StopWorkers(self.round, at_once=True)] if at_once else []
            case Phase.JOINING:
                return []  # That place was given up with the join.
        return self._join()

    def _told_outcome(self, end: End) -> list[Command]:
        self._verdict = end
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            return self._stop(at_once=False)
        return [] if self.phase is Phase.STOPPING else self._end(end)

    def _stop(self, *, at_once: bool) -> list[Command]:
        self.phase = Phase.STOPPING
        return [StopWorkers(self.round, at_once)]

    def _stopped(self, unkillable: tuple[int, ...]) -> list[Command]:
        self.unkillable = unkillable
        if unkillable:
            return self._end(End.FAILED)
        return self._join() if self._verdict is None else self._end(self._verdict)

    def _end(self, end: End) -> list[Command]:
        self.phase = Phase.ENDED
        self.end = end
        self._deadline = None
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
