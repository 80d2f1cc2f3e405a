"""A node's side of its place in the run: the connection, the lease, and when to give the place up. Pure.

The coordinator gives a node's place away only when its workers must be gone. This machine is the other half of that
promise. It knows until when the workers may live (`workers_may_live_until`), and the shell hands that time to the
spawner, which kills them when it passes. Three things move it:

* An answered heartbeat: 0.9 of the lease, counted from when the heartbeat was *sent*. The coordinator counts the
  whole lease from when it received it, so clocks that differ by a tenth do no harm.
* A connection that is found closed: the agent has `reconnect_grace_s` to be back. It notices at the latest with
  its next heartbeat, and the coordinator waits `drop_timeout_s`, which is longer than both together.
* A refused connection: the coordinator process is down, no place can have been given away, and the next one waits a
  whole lease before it seals a world. So the lease counts anew from the refused attempt. On etcd another host may start
  the next coordinator: there a refusal proves only that the connection was not closed to give the place away, and the
  node has the rest of its lease to find the next one. The same goes for a coordinator that resigns or was replaced.

Heartbeats say that the agent decides, not only that its client's thread lives. If its loop has not turned for a whole
lease (less would cost healthy nodes their places on a busy host) they stop until it turns again.

When the time passes the place is lost (`PlaceLost`): the node comes back as a new incarnation, a stranger. The time
itself stays in the past until the workers are known to be gone: a spawner that is told late must still find it passed.

Where coordinators may move (`locate_after_s`), the node looks for the present one (`Locate`) when its connection breaks
or its heartbeats stay unanswered. If the shell finds one of a higher term it says so (`LeaderMoved`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from holdfast.frozen import frozen
from holdfast.rendezvous.membership.model import Expelled, Notice, PlaceLost, Resigned
from holdfast.rendezvous.membership.protocol import Heartbeat, HeartbeatAnswer, TimePassed

_LEASE_SHARE = 0.9
_LOCATE_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    heartbeat_s: float = 1.0
    lease_s: float = 5.0
    reconnect_grace_s: float = 0.5
    does_refusal_renew: bool = True
    locate_after_s: float | None = None
    backoff_first_s: float = 0.05
    backoff_cap_s: float = 1.0


class Line(StrEnum):
    """How the connection stands."""

    CLOSED = "CLOSED"
    CONNECTING = "CONNECTING"
    OPEN = "OPEN"


@frozen
class Connected: ...


@frozen
class ConnectFailed:
    """`was_refused`: nothing listens where the coordinator was. `jitter` is a random number from 0 to 1."""

    was_refused: bool
    jitter: float = 0.0


@frozen
class Disconnected:
    jitter: float = 0.0


@frozen
class PlaceTaken:
    """The node is a member of that round, for a join that was sent at `asked_at`: it has been heard of since."""

    round: int
    asked_at: float


@frozen
class PlaceGivenUp:
    """The node has no workers any more, or those that it has belong to a run that is over."""


@frozen
class LeaderMoved:
    """Another coordinator has replaced the one that the node was connected to, which can write nothing any more."""


@frozen
class LoopSeen:
    """For how long the agent's loop has not turned."""

    stuck_for_s: float


_LineEvent = Connected | ConnectFailed | Disconnected | LeaderMoved | HeartbeatAnswer | Resigned
Event = _LineEvent | PlaceTaken | Expelled | PlaceGivenUp | LoopSeen | TimePassed


@frozen
class Connect: ...


@frozen
class SetLease:
    """The workers may live until then. None means no limit."""

    until: float | None


@frozen
class HangUp:
    """Close the connection: it is open, but nothing comes through any more."""


@frozen
class Locate:
    """Find out, without hanging up, who coordinates now."""


Command = Connect | Heartbeat | Notice | SetLease | HangUp | PlaceLost | Locate


class NodeLease:
    """One node and its coordinator. `may_outlive_lease` is for users who prefer running on to being safe."""

    def __init__(self, settings: LeaseSettings, *, may_outlive_lease: bool = False) -> None:
        self.settings, self.may_outlive_lease = settings, may_outlive_lease
        self.line = Line.CLOSED
        self.is_agent_stuck = False  # Its loop has not turned for a lease.
        self._round: int | None = None  # That the node has a place in, until its workers are gone.
        self._lease_from = 0.0  # When the last heartbeat was sent that was answered, or what counts like one.
        self._closed_at: float | None = None  # When the connection was found closed, and not since proved harmless.
        self._lost_at: float | None = None  # When the place was lost; the workers are being killed.
        self._told: float | None = None  # What the last `SetLease` said.
        self._number = 0  # Of the last heartbeat.
        self._sent_at: dict[int, float] = {}  # The heartbeats of this connection that are not answered, by number.
        self._has_resigned = False  # The coordinator said that it steps down; its close gives nothing away.
        self._failures = 0  # Of attempts to connect, in a row.
        self._attempted_at = 0.0  # The last attempt to connect.
        self._connect_at = self._next_heartbeat_at = self._next_locate_at = 0.0  # Not before then.

    def step(self, event: Event, now: float) -> list[Command]:
        # Before and after: what comes when the time has passed cannot bring back workers that the spawner has killed.
        lost = self._lose_place_if_due(now)
        commands = self._react(event, now)
        lost += self._lose_place_if_due(now)
        told, self._told = self._told, self.workers_may_live_until()
        return [*commands, *([] if self._told == told else [SetLease(self._told)]), *lost]

    def next_deadline(self) -> float | None:
        candidates = [self.workers_may_live_until() if self._lost_at is None else None]
        if self.line is Line.OPEN:
            candidates += [self._next_heartbeat_at, self._locate_at()]
        if self.line is Line.CLOSED:
            candidates.append(self._connect_at)
        return min((each for each in candidates if each is not None), default=None)

    def workers_may_live_until(self) -> float | None:
        if self._round is None or self.may_outlive_lease:
            return None
        if self._lost_at is not None:
            return self._lost_at
        until = self._lease_from + _LEASE_SHARE * self.settings.lease_s
        if self._closed_at is not None:
            until = min(until, self._closed_at + self.settings.reconnect_grace_s)
        return until

    def _react(self, event: Event, now: float) -> list[Command]:
        match event:
            case Connected():
                self.line, self._failures, self._has_resigned = Line.OPEN, 0, False
                self._sent_at.clear()
                return self._heartbeat(now)  # At once: only its answer proves that the lease is alive.
            case ConnectFailed(was_refused, jitter):
                return self._connect_failed(was_refused, jitter, now)
            case Disconnected(jitter):
                return self._disconnected(jitter, now)
            case LeaderMoved():
                return self._move(now)
            case TimePassed():
                return self._due(now)
            case LoopSeen(stuck_for_s):
                was_stuck, self.is_agent_stuck = self.is_agent_stuck, stuck_for_s >= self.settings.lease_s
                text = f"the agent's loop has not turned for {stuck_for_s:.1f} s, so its heartbeats stop"
                return [Notice(text)] if self.is_agent_stuck and not was_stuck else []
            case HeartbeatAnswer(number):
                self._answered(number)
            case Resigned():
                self._has_resigned = True
            case PlaceTaken(round, asked_at):
                self._round, self._lost_at = round, None
                self._lease_from = max(self._lease_from, asked_at)
                if self._closed_at is not None and self._closed_at <= asked_at:
                    self._closed_at = None
            case Expelled():
                self._lost_at = now if self._lost_at is None else self._lost_at
            case PlaceGivenUp():
                self._round, self._lost_at = None, None
            case _:
                assert_never(event)
        return []

    def _heartbeat(self, now: float) -> list[Command]:
        self._next_heartbeat_at = now + self.settings.heartbeat_s
        if self.is_agent_stuck:
            return []
        self._number += 1
        self._sent_at[self._number] = now
        return [Heartbeat(self._number)]

    def _answered(self, number: int) -> None:
        sent_at = self._sent_at.pop(number, None)
        if sent_at is None:
            return  # It belongs to a connection before this one.
        self._lease_from, self._closed_at = max(self._lease_from, sent_at), None
        self._sent_at = {each: at for each, at in self._sent_at.items() if each > number}

    def _connect_failed(self, was_refused: bool, jitter: float, now: float) -> list[Command]:
        if was_refused:
            self._closed_at = None
            if self.settings.does_refusal_renew:
                self._lease_from = max(self._lease_from, self._attempted_at)
        return self._retreat(jitter, now)

    def _disconnected(self, jitter: float, now: float) -> list[Command]:
        if self._closed_at is None and not self._has_resigned:
            self._closed_at = now
        self._sent_at.clear()
        return self._retreat(jitter, now)

    def _move(self, now: float) -> list[Command]:
        """Go to the present coordinator at once. The one before it can give nothing away any more."""
        commands = self._hang_up(now) if self.line is Line.OPEN else []
        self.line, self._connect_at, self._closed_at = Line.CLOSED, now, None
        return commands

    def _locate_at(self) -> float | None:
        """When a silence has lasted so long that another node may coordinate."""
        if self.settings.locate_after_s is None or not self._sent_at:
            return None
        return max(min(self._sent_at.values()) + self.settings.locate_after_s, self._next_locate_at)

    def _locate(self, now: float) -> list[Command]:
        if self.settings.locate_after_s is None or now < self._next_locate_at:
            return []
        self._next_locate_at = now + _LOCATE_EVERY_S
        return [Locate()]

    def _retreat(self, jitter: float, now: float) -> list[Command]:
        """Try again soon, then less and less often; never all nodes at the same moment."""
        self.line = Line.CLOSED
        wait_s = min(self.settings.backoff_cap_s, self.settings.backoff_first_s * 2.0 ** min(self._failures, 16))
        self._connect_at = now + wait_s * (0.5 + 0.5 * jitter)
        self._failures += 1
        return self._locate(now)

    def _due(self, now: float) -> list[Command]:
        if self.line is Line.CLOSED and now >= self._connect_at:
            self.line, self._attempted_at = Line.CONNECTING, now
            return [Connect()]
        if self.line is Line.OPEN and now >= self._next_heartbeat_at:
            # A host that vanished closes no connection, and the system would go on sending to it for minutes.
            is_mute = now - min(self._sent_at.values(), default=now) >= self.settings.lease_s
            return self._hang_up(now) if is_mute else self._heartbeat(now)
        locate_at = self._locate_at() if self.line is Line.OPEN else None
        return self._locate(now) if locate_at is not None and now >= locate_at else []

    def _hang_up(self, now: float) -> list[Command]:
        return [HangUp(), *self._disconnected(0.0, now)]

    def has_lapsed(self, now: float) -> bool:
        """Whether the workers may not live any longer, and the place is not yet given up."""
        until = self.workers_may_live_until()
        return until is not None and now >= until and self._lost_at is None

    def _lose_place_if_due(self, now: float) -> list[Command]:
        if self._round is None or not self.has_lapsed(now):
            return []
        self._lost_at = self.workers_may_live_until()
        stuck, away = "the agent's loop did not turn for too long", "the coordinator was out of reach for too long"
        return [PlaceLost(self._round, stuck if self.is_agent_stuck else away)]
