"""What one node says to its coordinator and makes of the answers. Pure.

A `Participant` knows where its node stands in the run: it waits for a place, has one, or goes away. It wraps a
`NodeLease` (connection and lease) and adds the messages. Connections come and go underneath it: what the coordinator
may have missed is said again after each reconnect, and saying it twice does no harm.

    OUTSIDE --join--> WAITING --Sealed--> MEMBER --stopped, join--> WAITING ...
                                             |
                                             +--place lost--> OUTSIDE (the next join is a new incarnation)

A node that is expelled while it waits has nothing to stop: it becomes a new incarnation and joins again by itself.

The handler tells it what the agent does (`JoinRequested`, else the message for the coordinator) and passes on what it
gives: messages for the coordinator, and pushes for the agent, which are the coordinator's messages. In the simulator
the same object stands between the fake network and the agent's lifecycle machine.
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

from holdfast.errors import InternalError
from holdfast.failures.records import Failure, Folded
from holdfast.frozen import changed, frozen
from holdfast.rendezvous.membership import model, node_lease, notice_records, protocol
from holdfast.rendezvous.membership.model import (
    Ended,
    GoingAway,
    NodeFacts,
    Notice,
    Place,
    PlaceLost,
    Progress,
    Refused,
    Sealed,
    Settings,
    SnapshotOrder,
    Stage,
    StandBy,
    Stop,
)
from holdfast.rendezvous.membership.node_lease import Line, NodeLease
from holdfast.rendezvous.membership.protocol import (
    Close,
    Failed,
    FromNode,
    GiveNotice,
    Join,
    Leaving,
    Left,
    Return,
    SnapshotReport,
    Succeeded,
)
from holdfast.rendezvous.membership.restart_policy import Advance

_REPORT_EVERY_S = 1.0
_ON_ITS_WAY_S = 1.0


class Standing(StrEnum):
    OUTSIDE = "OUTSIDE"
    WAITING = "WAITING"
    MEMBER = "MEMBER"
    LEAVING = "LEAVING"
    DONE = "DONE"


# How a node's standing may change, and why. The diagram in the documentation is made from this.
STANDING_CHANGES: tuple[tuple[Standing, str, Standing], ...] = (
    (Standing.OUTSIDE, "the agent joins", Standing.WAITING),
    (Standing.WAITING, "a world is sealed with it", Standing.MEMBER),
    (Standing.WAITING, "the agent joins again, or it was expelled", Standing.WAITING),
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


@frozen
class JoinRequested:
    """The node has no workers and wants a place in the next round. The agent holds both ports, new ones each time.
    `failure` is the one that was reported in the last round, with its evidence; `advance` is of that round, too.
    `held` are the snapshots that the node has, `snapshot_port` is where it serves them. `unready` and `peers` as in
    `Join`."""

    port: int
    failure: Failure | None = None
    advance: Advance | None = None
    free_port: int = 0
    held: tuple[model.Held, ...] = ()
    snapshot_port: int = 0
    unready: str | None = None
    peers: tuple[Folded, ...] = ()


@frozen
class RequestChanged:
    """While the node waits: it is ready for a place, or not ready any more (`Join.unready`), or holds other snapshots.
    If it has been given a place meanwhile, of which the agent may not have heard, this comes too late."""

    unready: str | None
    held: tuple[model.Held, ...]


@frozen
class Pushed:
    message: protocol.FromCoordinator


@frozen
class Welcomed:
    """There is a connection to a coordinator of this term, which knows of so many rounds and charged restarts."""

    term: int
    last_round: int
    restarts_used: int = 0


_Reported = Failed | Succeeded | SnapshotReport | Leaving | Left | Close | GiveNotice
AgentEvent = JoinRequested | RequestChanged | _Reported | Pushed
Event = AgentEvent | Welcomed | node_lease.Event


ForAgent = Sealed | StandBy | Stop | PlaceLost | Ended | Refused | Progress | Notice | SnapshotOrder | GoingAway
Command = FromNode | ForAgent | node_lease.Connect | node_lease.SetLease | node_lease.HangUp | node_lease.Locate


class Participant:
    """One node's part in one run."""

    def __init__(self, facts: NodeFacts, settings: Settings, lease: NodeLease) -> None:
        self.facts, self.settings = facts, settings  # The incarnation of `facts` rises with each place that is lost.
        self.standing = Standing.OUTSIDE
        self.place: Place | None = None  # While MEMBER, and LEAVING as a member.
        self.term = self._heard_round = self._heard_restarts = 0  # The highest that this node has heard of.
        self._lease = lease
        self._stage, self._has_agreed = Stage.RUNNING, False  # Of `place`.
        self._asked_at = 0.0  # When this node said last that it wants a place, or has one.
        # What a join says of the last place: which it was, whether it was lost, and how the round ended for this node.
        self._last_place: Place | None = None
        self._has_lost_place = False
        self._failure: Failed | None = None
        self._stop: Stop | None = None
        self._request = JoinRequested(0)  # The agent's last.
        self._reported: SnapshotReport | None = None  # Of `place`: the last, and when one was sent.
        self._reported_at = 0.0
        self._has_left = False  # While LEAVING: the workers are gone.
        self._close_reason = ""  # Of the user, to be said on every connection.
        self._notices = _OwnNotices()
        self._end: Ended | Refused | None = None  # If and only if DONE.

    @property
    def is_connected(self) -> bool:
        return self._lease.line is Line.OPEN

    def next_deadline(self) -> float | None:
        return None if self.standing is Standing.DONE else self._lease.next_deadline()

    def step(self, event: Event, now: float) -> list[Command]:
        if self._lease.has_lapsed(now) and isinstance(event, AgentEvent):
            # First of all: workers that the spawner has killed by now have neither failed nor succeeded.
            return [*self._step_lease(protocol.TimePassed(), now), *self.step(event, now)]
        match event:
            case JoinRequested(port, failure):
                self._request = event
                if failure is not None and self._failure is not None:
                    self._failure = Failed(self._failure.round, failure)
                others = {"free_port": event.free_port, "snapshot_port": event.snapshot_port}
                self.facts = changed(self.facts, port=port, **others)
                return self._join(now)
            case RequestChanged(unready, held):
                return self._change_request(unready, held)
            case Failed(round) | Succeeded(round) | SnapshotReport(round) if not self._is_in(round):
                return []
            case Failed():
                self._failure = event
            case Succeeded(_, has_agreed):
                self._stage, self._has_agreed = Stage.FINISHED, has_agreed
            case SnapshotReport():
                return self._report(event, now)
            case Leaving():
                if self.standing is Standing.DONE:
                    return []
                self._stand(Standing.LEAVING)
            case Left():
                return self._complete_leave(now)
            case Close(reason):
                self._close_reason = reason
            case GiveNotice(request):
                return self._give_notice(request, now)
            case Pushed(message):
                return self._take(message, now)
            case Welcomed():
                return self._welcomed(event, now)
            case _:
                return self._step_lease(event, now)
        return self._say(event)

    def _step_lease(self, event: node_lease.Event, now: float) -> list[Command]:
        commands: list[Command] = []
        for command in self._lease.step(event, now):
            match command:
                case PlaceLost(_, reason):
                    commands += self._lose_place(reason, now)
                case node_lease.Locate() if self.standing is Standing.DONE or self._has_left:
                    pass
                case _:
                    commands.append(command)
        return commands

    # What the agent does.

    def _join(self, now: float) -> list[Command]:
        if self._end is not None:
            return [self._end]
        commands = self._step_lease(node_lease.PlaceGivenUp(), now)
        self._stand(Standing.WAITING)
        self.place, self._stage, self._has_agreed, self._asked_at = None, Stage.RUNNING, False, now
        return commands + self._say(self._join_message())

    def _join_message(self) -> Join:
        """With what was said of the last round: it may have met a closed connection, or a coordinator that is gone."""
        asked, failure = self._request, self._failure.failure if self._failure else None
        last = (self._last_place, self._heard_round, self._has_lost_place, failure, self._stop, asked.advance)
        now = (self._heard_restarts, asked.held, asked.unready, asked.peers)
        return Join(self.facts, self.settings, *last, *now)

    def _change_request(self, unready: str | None, held: tuple[model.Held, ...]) -> list[Command]:
        """Never a join: the agent, whose loop has not taken its place in yet, would start workers without a lease."""
        if self.standing is not Standing.WAITING:
            return []
        self._request = changed(self._request, unready=unready, held=held)
        return self._say(self._join_message())

    def _report(self, report: SnapshotReport, now: float) -> list[Command]:
        """A newer step is said once a second, everything else at once. A coordinator that agrees on no steps may not
        know the message."""
        if self.place is None or not self.place.agrees_on_steps:
            return []
        before, self._reported = self._reported, report
        answers = zip(_answers(report), _answers(before), strict=True) if before is not None else ()
        is_news = before is None or any(new is not None and new != old for new, old in answers)
        if not is_news and now < self._reported_at + _REPORT_EVERY_S:
            return []
        self._reported_at = now
        return self._say(report)

    def _give_notice(self, request: model.NoticeRequest, now: float) -> list[Command]:
        """If no coordinator can be told, this node acts alone, and tells the next one."""
        self._notices.give(request, now)
        if self.is_connected:
            return [GiveNotice(request)]
        return [notice_records.alone(request, self.facts.node_id)] if self.standing is not Standing.DONE else []

    def _is_in(self, round: int) -> bool:
        return self.standing is Standing.MEMBER and self.place is not None and self.place.round == round

    def _complete_leave(self, now: float) -> list[Command]:
        if self.standing is not Standing.LEAVING:
            return []
        self._has_left = True
        return [*self._step_lease(node_lease.PlaceGivenUp(), now), *self._say(Left())]

    # What the coordinator says.

    def _welcomed(self, welcome: Welcomed, now: float) -> list[Command]:
        """Never accept a coordinator that another one has replaced."""
        if welcome.term < self.term:
            return [node_lease.HangUp(), *self._step_lease(node_lease.ConnectFailed(was_refused=False), now)]
        is_another = welcome.term > self.term
        self.term = welcome.term
        self._heard_round = max(self._heard_round, welcome.last_round)
        self._heard_restarts = max(self._heard_restarts, welcome.restarts_used)
        commands = self._step_lease(node_lease.Connected(), now)
        notices = self._notices.unheard(now, is_another=is_another)
        is_here = self.standing in (Standing.WAITING, Standing.MEMBER, Standing.LEAVING)
        return [*self._introduce(now), *(map(GiveNotice, notices) if is_here else ()), *commands]

    def _take(self, message: protocol.FromCoordinator, now: float) -> list[Command]:
        match message:
            case protocol.HeartbeatAnswer() | model.Resigned():
                return self._step_lease(message, now)
            case Sealed():
                return self._sealed(message, now)
            case StandBy(round):
                self._heard_round = max(self._heard_round, round)
                return [message] if self.standing is Standing.WAITING else []
            case Stop(round):
                self._stop = message if self._is_in(round) else self._stop
                return [message] if self._is_in(round) else []
            case model.Expelled(reason):
                return self._lose_place(reason, now)
            case Refused():
                return self._finish(message, now)
            case Ended():
                # The coordinator may forget the run when all nodes have confirmed its end.
                return [*self._say(Left()), *self._finish(message, now)]
            case Progress():
                return [message] if self.standing is Standing.WAITING else []
            case Notice():
                return [message]
            case model.KeepFrom(round) | model.Agreed(round) | model.Complete(round):
                return [message] if self._is_in(round) else []
            case GoingAway():
                self._notices.hear(message, now)
                return [message]
        assert_never(message)

    def _sealed(self, sealed: Sealed, now: float) -> list[Command]:
        """A place that comes too late, for a join that was taken back or a round that is over, is not ours."""
        key, place = sealed.key, sealed.place
        last_round = self._last_place.round if self._last_place is not None else 0
        if key != self.facts.key or self.standing is not Standing.WAITING or place.round <= last_round:
            return []
        commands = self._step_lease(node_lease.PlaceTaken(place.round, self._asked_at), now)
        if key != self.facts.key:
            return commands  # It was so late that the place is lost already.
        self._stand(Standing.MEMBER)
        self.place = self._last_place = place
        self._heard_round = max(self._heard_round, place.round)
        self._has_lost_place, self._failure, self._stop, self._reported = False, None, None, None
        return [*commands, sealed]

    def _lose_place(self, reason: str, now: float) -> list[Command]:
        """Become a stranger: nothing that was meant for the lost incarnation can reach the next one."""
        match self.standing:
            case Standing.WAITING:
                self._become_stranger()
                return self._join(now)
            case Standing.MEMBER:
                assert self.place is not None
                lost = PlaceLost(self.place.round, reason)
                self._become_stranger()
                self._has_lost_place, self._failure, self._stop = True, None, None
                self._stand(Standing.OUTSIDE)
                self.place = None
                return [*self._step_lease(model.Expelled(reason), now), lost]
            case Standing.LEAVING:
                return self._step_lease(model.Expelled(reason), now)
        return []

    def _become_stranger(self) -> None:
        self.facts = changed(self.facts, incarnation=self.facts.incarnation + 1)

    def _finish(self, end: Ended | Refused, now: float) -> list[Command]:
        """No place is given away after the end, so workers that are being stopped may take their time."""
        self._stand(Standing.DONE)
        self._end = end
        return [*self._step_lease(node_lease.PlaceGivenUp(), now), end]

    def _stand(self, standing: Standing) -> None:
        if (self.standing, standing) not in _ALLOWED:
            raise InternalError(f"node {self.facts.key} cannot go from {self.standing} to {standing}")
        self.standing = standing

    def _say(self, message: FromNode) -> list[Command]:
        return [message] if self.is_connected else []

    def _introduce(self, now: float) -> list[FromNode]:
        """On a new connection: say where this node stands, and everything that may have got lost."""
        self._asked_at = now
        said: list[FromNode] = []
        if self.standing is Standing.WAITING:
            said.append(self._join_message())
        if self.standing in (Standing.MEMBER, Standing.LEAVING) and self.place is not None:
            said.append(Return(self.facts, self.settings, self.place, self._stage, self._has_agreed))
            said += [each for each in (self._failure, self._reported) if each is not None]
        if self.standing in (Standing.LEAVING, Standing.DONE):
            said.append(Left() if self._has_left or self.standing is Standing.DONE else Leaving())
        if self._close_reason:
            said.append(Close(self._close_reason))
        return said


class _OwnNotices:
    """The notices that this node has given or heard of, for a coordinator that does not know them: one that did not get
    the message, or the next one. Kept by whether they are for the whole run, each with its time."""

    def __init__(self) -> None:
        self._given: dict[bool, tuple[float, model.NoticeRequest]] = {}  # No push has shown it.
        self._heard: dict[bool, tuple[float, model.NoticeRequest]] = {}
        self._said_at = 0.0

    def give(self, request: model.NoticeRequest, now: float) -> None:
        self._given[request.is_whole_run], self._said_at = (now + (request.left_s or 0.0), request), now

    def hear(self, going: GoingAway, now: float) -> None:
        """A push that does not show what was just given may have been sent before that arrived."""
        shown = {True: going.is_whole_run, False: going.own_left_s is not None}
        self._given = {
            is_whole: (at, request)
            for is_whole, (at, request) in self._given.items()
            if shown[is_whole] != (request.left_s is not None) and now < self._said_at + _ON_ITS_WAY_S
        }
        self._heard.clear()
        if going.own_left_s is not None:
            request = model.NoticeRequest(going.own_left_s, going.reason, going.is_whole_run)
            self._heard[going.is_whole_run] = (now + going.own_left_s, request)

    def unheard(self, now: float, *, is_another: bool) -> list[model.NoticeRequest]:
        """On a new connection. `is_another`: to a coordinator that was not there before."""
        known, self._said_at = {**(self._heard if is_another else {}), **self._given}, now
        return [
            changed(request, left_s=None if request.left_s is None else notice_records.left_s(at, now))
            for at, request in known.values()
        ]


def _answers(report: SnapshotReport) -> tuple[int | None, ...]:
    return report.steps.kept, report.steps.stored, report.steps.failed
