"""One agent's machine: join, start, run, stop, restart, end. Pure.

            RunRequested          WorldSealed            WorkersStarted
    IDLE ---------------> JOINING ------------> STARTING --------------> RUNNING
                             ^                                            |  |
                             |   WorkersStopped (and the run goes on)     |  | WorkersSucceeded
                             +------------------- STOPPING <--------------+  v
                                                     |      failed,       WAITING (for the other nodes)
                                                     |      unhealthy,       |
                                     WorkersStopped  v      nodes waiting    | PeersFinished, or the deadline
                                  (it does not)    ENDED <-------------------+

`TRANSITIONS` below is that picture as data. The decisions:

* A group that failed or is unhealthy is stopped at once. Whether the run goes on is a matter of the budget:
  `max_restarts` restarts after failures, counted here because nobody else counts for a node without a
  coordinator.
* Nodes that wait to join make the group stop and join again. That is free.
* A process that cannot be killed ends the run on this node: its successor could not own what it holds.
* Workers that all succeeded wait for the other nodes, at most `peers_timeout_s`.

Every event carries the round it speaks of. An event of a round that is over is dropped, in `step`, and nowhere
else. An event that cannot happen in the state raises `InvalidTransition` with the recent story.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from holdfast.errors import InternalError

_STORY_LENGTH = 32


class Phase(StrEnum):
    IDLE = "IDLE"
    JOINING = "JOINING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    WAITING = "WAITING"
    ENDED = "ENDED"


class Outcome(StrEnum):
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


# Events: what has happened.


@dataclass(frozen=True, slots=True)
class RunRequested:
    round: int = 0


@dataclass(frozen=True, slots=True)
class WorldSealed:
    round: int
    node_count: int


@dataclass(frozen=True, slots=True)
class WorkersStarted:
    round: int


@dataclass(frozen=True, slots=True)
class WorkersSucceeded:
    round: int


@dataclass(frozen=True, slots=True)
class WorkersFailed:
    """At least one worker ended badly, or the group runs but is not healthy."""

    round: int


@dataclass(frozen=True, slots=True)
class NodesWaiting:
    round: int


@dataclass(frozen=True, slots=True)
class WorkersStopped:
    """Nothing of the group is left but the `unkillable` pids."""

    round: int
    unkillable: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PeersFinished:
    round: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The deadline that `next_deadline` named has come."""

    round: int


Event = (
    RunRequested
    | WorldSealed
    | WorkersStarted
    | WorkersSucceeded
    | WorkersFailed
    | NodesWaiting
    | WorkersStopped
    | PeersFinished
    | TimePassed
)


# Commands: what is to be done.


@dataclass(frozen=True, slots=True)
class Join:
    round: int


@dataclass(frozen=True, slots=True)
class StartWorkers:
    round: int


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """`will_restart` is for whoever tells the user; the shell stops in the same way for every reason."""

    round: int
    will_restart: bool


@dataclass(frozen=True, slots=True)
class AwaitPeers:
    round: int


@dataclass(frozen=True, slots=True)
class EndRun:
    outcome: Outcome


Command = Join | StartWorkers | StopWorkers | AwaitPeers | EndRun

TRANSITIONS: dict[tuple[Phase, type[Event]], frozenset[Phase]] = {
    (Phase.IDLE, RunRequested): frozenset({Phase.JOINING}),
    (Phase.JOINING, WorldSealed): frozenset({Phase.STARTING}),
    (Phase.STARTING, WorkersStarted): frozenset({Phase.RUNNING}),
    (Phase.RUNNING, WorkersSucceeded): frozenset({Phase.WAITING, Phase.ENDED}),
    (Phase.RUNNING, WorkersFailed): frozenset({Phase.STOPPING}),
    (Phase.RUNNING, NodesWaiting): frozenset({Phase.STOPPING}),
    (Phase.STOPPING, WorkersStopped): frozenset({Phase.JOINING, Phase.ENDED}),
    (Phase.WAITING, PeersFinished): frozenset({Phase.ENDED}),
    (Phase.WAITING, TimePassed): frozenset({Phase.ENDED}),
}


class InvalidTransition(InternalError):  # noqa: N818
    """An event came that cannot happen now."""


class Lifecycle:
    """The machine. `restarts_used` counts restarts after failures; `round` rises with every join."""

    def __init__(self, max_restarts: int, peers_timeout_s: float) -> None:
        self.max_restarts = max_restarts
        self.peers_timeout_s = peers_timeout_s
        self.phase = Phase.IDLE
        self.round = 0
        self.restarts_used = 0
        self.outcome: Outcome | None = None
        self.unkillable: tuple[int, ...] = ()
        self._node_count = 0
        self._will_restart = False
        self._deadline: float | None = None
        self._story: deque[tuple[Phase, Event, tuple[Command, ...]]] = deque(maxlen=_STORY_LENGTH)

    @property
    def remaining_restarts(self) -> int:
        return self.max_restarts - self.restarts_used

    def next_deadline(self) -> float | None:
        return self._deadline

    def step(self, event: Event, now: float) -> list[Command]:
        if event.round < self.round:
            return []  # It speaks of a round that is over.
        if event.round > self.round or (self.phase, type(event)) not in TRANSITIONS:
            raise InvalidTransition(f"{event} in phase {self.phase}, round {self.round}; before: {self.story()}")
        before = self.phase
        commands = self._decide(event, now)
        self._story.append((before, event, tuple(commands)))
        return commands

    def _decide(self, event: Event, now: float) -> list[Command]:
        match event:
            case RunRequested():
                return self._join()
            case WorldSealed(_, node_count):
                self._node_count = node_count
                self.phase = Phase.STARTING
                return [StartWorkers(self.round)]
            case WorkersStarted():
                self.phase = Phase.RUNNING
                return []
            case WorkersSucceeded():
                return self._finish(now)
            case WorkersFailed():
                return self._stop(will_restart=self.remaining_restarts > 0, charged=True)
            case NodesWaiting():
                return self._stop(will_restart=True, charged=False)
            case WorkersStopped(_, unkillable):
                self.unkillable = unkillable
                return self._join() if self._will_restart and not unkillable else self._end(Outcome.FAILED)
            case PeersFinished() | TimePassed():
                return self._end(Outcome.SUCCEEDED)
        assert_never(event)

    def _join(self) -> list[Command]:
        self.phase = Phase.JOINING
        self.round += 1
        return [Join(self.round)]

    def _stop(self, *, will_restart: bool, charged: bool) -> list[Command]:
        self.phase = Phase.STOPPING
        self._will_restart = will_restart
        if will_restart and charged:
            self.restarts_used += 1
        return [StopWorkers(self.round, will_restart)]

    def _finish(self, now: float) -> list[Command]:
        if self._node_count == 1:
            return self._end(Outcome.SUCCEEDED)
        self.phase = Phase.WAITING
        self._deadline = now + self.peers_timeout_s
        return [AwaitPeers(self.round)]

    def _end(self, outcome: Outcome) -> list[Command]:
        self.phase = Phase.ENDED
        self.outcome = outcome
        self._deadline = None
        return [EndRun(outcome)]

    def story(self) -> str:
        """The last events with what they led to, oldest first."""
        lines = (f"{phase}: {event} -> {list(commands)}" for phase, event, commands in self._story)
        return "; ".join(lines) or "nothing"

    def check(self) -> None:
        """The invariants; tests call this after every step."""
        assert 0 <= self.restarts_used <= self.max_restarts
        assert (self.phase is Phase.ENDED) == (self.outcome is not None)
        assert (self.phase is Phase.WAITING) == (self._deadline is not None)
        assert (self.phase is Phase.IDLE) == (self.round == 0)
        assert self.round >= self.restarts_used
