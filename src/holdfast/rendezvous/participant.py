"""What one node says to its coordinator and makes of the answers. Pure.

The participant holds the node's place in the protocol: whether it wants in, waits, is a member, or goes away. It
wraps a `Session` (connection and lease) and adds the messages. Connections come and go underneath it: whatever
the coordinator may have missed is said again after each reconnect, and saying it twice does no harm.

    OUTSIDE --join--> WAITING --Sealed--> MEMBER --stopped, join--> WAITING ...
                                             |
                                             +--place lost--> OUTSIDE (the next join is a new incarnation)

A node that is given up while it waits has nothing to stop: it becomes a new incarnation and joins again by itself.

A handler feeds it what the agent does (`JoinRequested`, `FailureReported`, ...) and passes on what it delivers
(`WorldSealed`, `RoundStopped`, ...). In the simulator the same object stands between the fake network and the
agent's lifecycle machine.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import assert_never

from holdfast.errors import InternalError
from holdfast.records import record
from holdfast.rendezvous import messages, session
from holdfast.rendezvous.outcome import Failure, Outcome
from holdfast.rendezvous.session import Line, Session
from holdfast.rendezvous.vocabulary import Settings, Stage
from holdfast.rendezvous.world import NodeFacts, Place


class Standing(StrEnum):
    OUTSIDE = "OUTSIDE"
    WAITING = "WAITING"
    MEMBER = "MEMBER"
    LEAVING = "LEAVING"
    DONE = "DONE"


# How a node's standing may change, and why. The picture in the documentation is made from this.
STANDING_CHANGES: tuple[tuple[Standing, str, Standing], ...] = (
    (Standing.OUTSIDE, "the agent joins", Standing.WAITING),
    (Standing.WAITING, "a world is sealed with it", Standing.MEMBER),
    (Standing.WAITING, "the agent joins again, or its place was given up", Standing.WAITING),
    (Standing.MEMBER, "its workers are stopped and the agent joins", Standing.WAITING),
    (Standing.MEMBER, "its place is lost", Standing.OUTSIDE),
    (Standing.OUTSIDE, "the agent leaves", Standing.LEAVING),
    (Standing.WAITING, "the agent leaves", Standing.LEAVING),
    (Standing.MEMBER, "the agent leaves", Standing.LEAVING),
    (Standing.LEAVING, "the agent leaves again", Standing.LEAVING),
    (Standing.OUTSIDE, "the run has ended", Standing.DONE),
    (Standing.WAITING, "the run has ended, or refuses it", Standing.DONE),
    (Standing.MEMBER, "the run has ended", Standing.DONE),
    (Standing.LEAVING, "the run has ended", Standing.DONE),
    (Standing.DONE, "the run has ended", Standing.DONE),
)
_ALLOWED = frozenset((before, after) for before, _, after in STANDING_CHANGES)


# Events: what the agent does.


@record
class JoinRequested:
    """The node has no workers and wants a place in the next round. `port` is a fresh one that the agent holds."""

    port: int


@record
class FailureReported:
    round: int
    failure: Failure


@record
class SuccessReported:
    round: int


@record
class LeaveRequested:
    """The node goes away; its workers are being stopped."""


@record
class LeaveCompleted:
    """Its workers are gone."""


@record
class CloseWanted:
    """The user ends the run for everybody."""

    reason: str


@record
class MessageCame:
    message: messages.FromCoordinator


AgentEvent = (
    JoinRequested | FailureReported | SuccessReported | LeaveRequested | LeaveCompleted | CloseWanted | MessageCame
)
Event = AgentEvent | session.Event


# Commands: what the shell does. Those of the session (`Connect`, `SetLease`) are passed through.


@record
class Send:
    message: messages.ToCoordinator


@record
class WorldSealed:
    place: Place


@record
class RoundStopped:
    round: int
    reason: str
    is_hang: bool = False


@record
class PlaceLost:
    """The node's workers have been or must be killed at once; it is nobody to the run until it joins again."""

    round: int
    reason: str


@record
class RunEnded:
    outcome: Outcome


@record
class JoinRefused:
    reason: str


@record
class ProgressSeen:
    joined: int
    wanted: int
    max_nodes: int
    seconds_left: float


@record
class NoticeSeen:
    text: str


Delivery = WorldSealed | RoundStopped | PlaceLost | RunEnded | JoinRefused | ProgressSeen | NoticeSeen
Command = Send | Delivery | session.Connect | session.SetLease | session.HangUp


class Participant:
    """One node's part in one run."""

    def __init__(self, facts: NodeFacts, settings: Settings, link: Session) -> None:
        self.facts = facts
        self.settings = settings
        self.standing = Standing.OUTSIDE
        self.place: Place | None = None
        self.last_round = 0
        self._restarts_used = 0
        self._session = link
        self._replaces = ""
        self._asked_at = 0.0
        self._stage = Stage.RUNNING
        self._failure: FailureReported | None = None
        self._close_reason = ""
        self._has_left = False
        self._end: RunEnded | JoinRefused | None = None

    @property
    def has_left(self) -> bool:
        return self._has_left

    @property
    def may_outlive_lease(self) -> bool:
        return self._session.may_outlive_lease

    @property
    def is_connected(self) -> bool:
        return self._session.line is Line.OPEN

    def next_deadline(self) -> float | None:
        return None if self.standing is Standing.DONE else self._session.next_deadline()

    def next_renewal(self) -> float | None:
        """The same for one that has reasons to be heard of although the run is over for it."""
        return self._session.next_deadline()

    def step(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, AgentEvent) and self._session.has_lapsed(now):
            # First of all: workers that the spawner has killed by now have neither failed nor succeeded.
            return [*self._step_session(session.TimePassed(), now), *self.step(event, now)]
        match event:
            case JoinRequested(port):
                commands = self._join(port, now)
            case FailureReported():
                commands = self._report_failure(event)
            case SuccessReported(round):
                commands = self._report_success(round)
            case LeaveRequested():
                commands = self._leave()
            case LeaveCompleted():
                commands = self._complete_leave(now)
            case CloseWanted(reason):
                self._close_reason = reason
                commands = self._say(messages.Close(reason))
            case MessageCame(message):
                commands = self._take(message, now)
            case _:
                return self._step_session(event, now)
        return commands

    def _step_session(self, event: session.Event, now: float) -> list[Command]:
        commands: list[Command] = []
        for command in self._session.step(event, now):
            match command:
                case session.SendHeartbeat(number):
                    commands.append(Send(messages.Heartbeat(number)))
                case session.LosePlace():
                    commands += self._lose_place("the coordinator was out of reach for too long", now)
                case session.Connect() | session.SetLease() | session.HangUp():
                    commands.append(command)
                case _:
                    assert_never(command)
        if isinstance(event, session.Connected):
            commands = [*self._introduce(now), *commands]
        return commands

    # What the agent does.

    def _join(self, port: int, now: float) -> list[Command]:
        if self._end is not None:
            return [self._end]
        commands = self._step_session(session.PlaceGivenUp(), now)
        self.facts = replace(self.facts, port=port)
        self._stand(Standing.WAITING)
        self.place, self._stage = None, Stage.RUNNING
        self._asked_at = now
        return commands + self._say(self._join_message())

    def _join_message(self) -> messages.Join:
        """With the failure of the round before: the report of it may have met a closed connection."""
        failure = self._failure.failure if self._failure else None
        return messages.Join(self.facts, self.settings, self.last_round, self._replaces, failure, self._restarts_used)

    def _report_failure(self, report: FailureReported) -> list[Command]:
        if not self._is_in(report.round):
            return []
        self._failure = report
        return self._say(messages.Failed(report.round, report.failure))

    def _report_success(self, round: int) -> list[Command]:
        if not self._is_in(round):
            return []
        self._stage = Stage.FINISHED
        return self._say(messages.Succeeded(round))

    def _is_in(self, round: int) -> bool:
        return self.standing is Standing.MEMBER and self.place is not None and self.place.round == round

    def _leave(self) -> list[Command]:
        if self.standing is Standing.DONE:
            return []
        self._stand(Standing.LEAVING)
        return self._say(messages.Leaving())

    def _complete_leave(self, now: float) -> list[Command]:
        if self.standing is not Standing.LEAVING:
            return []
        self._has_left = True
        commands = self._step_session(session.PlaceGivenUp(), now)
        return commands + self._say(messages.Left())

    # What the coordinator says.

    def _take(self, message: messages.FromCoordinator, now: float) -> list[Command]:
        match message:
            case messages.HeartbeatAnswer(number):
                return self._step_session(session.HeartbeatAnswered(number), now)
            case messages.Sealed(key, place):
                return self._sealed(key, place, now)
            case messages.Stop(round, reason, is_hang):
                return [RoundStopped(round, reason, is_hang)] if self._is_in(round) else []
            case messages.Expelled(reason):
                return self._lose_place(reason, now)
            case messages.Refused(reason):
                return self._finish(JoinRefused(reason), now)
            case messages.Ended(outcome):
                # The coordinator may forget the run when everybody has confirmed its end.
                return [*self._say(messages.Left()), *self._finish(RunEnded(outcome), now)]
            case messages.Progress(joined, wanted, max_nodes, seconds_left):
                is_waiting = self.standing is Standing.WAITING
                return [ProgressSeen(joined, wanted, max_nodes, seconds_left)] if is_waiting else []
            case messages.Notice(text):
                return [NoticeSeen(text)]
        assert_never(message)

    def _sealed(self, key: str, place: Place, now: float) -> list[Command]:
        """A place that comes too late, for a join that was taken back or a round that is over, is not ours."""
        is_ours = key == self.facts.key and self.standing is Standing.WAITING
        if not is_ours or place.round <= self.last_round:
            return []
        commands = self._step_session(session.PlaceTaken(self._asked_at), now)
        if key != self.facts.key:
            return commands  # It was so late that the place is lost already.
        self._stand(Standing.MEMBER)
        self.place, self.last_round, self._restarts_used = place, place.round, place.restarts_used
        self._replaces, self._failure = "", None
        return [*commands, WorldSealed(place)]

    def _lose_place(self, reason: str, now: float) -> list[Command]:
        """Become somebody new: what the coordinator still knows of us is a ghost, and we say so when we join."""
        match self.standing:
            case Standing.WAITING:
                self._be_reborn()
                return self._join(self.facts.port, now)
            case Standing.MEMBER:
                assert self.place is not None
                lost = PlaceLost(self.place.round, reason)
                self._be_reborn()
                self._stand(Standing.OUTSIDE)
                self.place = None
                return [*self._step_session(session.PlaceRevoked(), now), lost]
            case Standing.LEAVING:
                return self._step_session(session.PlaceRevoked(), now)
        return []

    def _be_reborn(self) -> None:
        self._replaces, self._failure = self.facts.key, None
        self.facts = replace(self.facts, incarnation=self.facts.incarnation + 1)

    def _finish(self, end: RunEnded | JoinRefused, now: float) -> list[Command]:
        """Nobody is given anything after the end, so workers that are being stopped may take their time."""
        self._stand(Standing.DONE)
        self._end = end
        return [*self._step_session(session.PlaceGivenUp(), now), end]

    def _stand(self, standing: Standing) -> None:
        if (self.standing, standing) not in _ALLOWED:
            raise InternalError(f"node {self.facts.key} cannot go from {self.standing} to {standing}")
        self.standing = standing

    # Saying things.

    def _say(self, message: messages.ToCoordinator) -> list[Command]:
        return [Send(message)] if self.is_connected else []

    def _introduce(self, now: float) -> list[Command]:
        """On a fresh connection: say where we stand, and everything that may have got lost."""
        self._asked_at = now
        return [Send(message) for message in self.statement()]

    def statement(self) -> tuple[messages.ToCoordinator, ...]:
        """All that somebody who knows nothing of this node must be told of it."""
        said: list[messages.ToCoordinator] = []
        if self.standing is Standing.WAITING:
            said.append(self._join_message())
        if self.standing in (Standing.MEMBER, Standing.LEAVING) and self.place is not None:
            said.append(messages.Return(self.facts, self.settings, self.place, self._stage))
            if self._failure is not None:
                said.append(messages.Failed(self._failure.round, self._failure.failure))
        if self.standing is Standing.LEAVING:
            said.append(messages.Left() if self._has_left else messages.Leaving())
        if self.standing is Standing.DONE:
            said.append(messages.Left())
        if self._close_reason:
            said.append(messages.Close(self._close_reason))
        return tuple(said)
