"""One node of a run on etcd: what it says, what it is told, and, while it leads, what it decides. Pure.

Every node is a `Participant`, as with a coordinator. Instead of sending messages it keeps one key up to date, its
statement, under a lease of its own; instead of receiving them it watches the key in which the leader tells it things
(`keyspace`). Its heartbeat is the renewal of the lease. So etcd is the failure detector: a statement that vanishes
means that its node was silent for the whole lease, and by then the node's own side has killed its workers (`session`).

    FOLLOWING --nobody leads: the key is created--> LOADING --all was read--> LEADING
        ^                                              |                        |
        +----------------- the key is not its own any more ---------------------+

The leader is whoever created the key `leader`, under its lease. It runs the run's `Membership` machine on the
statements, and writes what the machine decides (`Snapshot`) in one transaction with the first of what it tells the
nodes because of that. Each of its transactions holds only if the key is still the one that it created: the revision at
which that happened is its term. Somebody who was frozen, and has lost the lease, writes nothing any more.

Nothing is lost with a leader. What it told somebody was written before or with it; what it had not written, nobody
has heard of. The next leader reads snapshot and statements and goes on from there, and no worker notices:

  1. the leader seals round 4, writes the snapshot and tells half of the members, and is killed,
  2. the next one finds round 4 and, of the other half, statements that still ask for a place after round 3,
  3. which were answered by the seal: those nodes are told of their places again, and the round runs.

Requests can end in three ways: done, refused, or nobody knows. What nobody knows is done again, which is harmless:
statements and tellings are whole, tellings are numbered, and the leader's key is created only if there is none.
"""

from __future__ import annotations

from enum import StrEnum

from holdfast.errors import InternalError
from holdfast.rendezvous import keyspace, messages, participant, session
from holdfast.rendezvous.elected_words import (
    Campaign,
    CampaignFailed,
    Command,
    Event,
    Follow,
    Followed,
    FollowFailed,
    Found,
    GrantLease,
    KeepLease,
    LeaderSeen,
    LeaseDenied,
    LeaseGone,
    LeaseGranted,
    LeaseKept,
    Load,
    Loaded,
    LoadFailed,
    NodesSeen,
    RevokeLease,
    Say,
    SayFailed,
    StatementWritten,
    StepDown,
    ToldSeen,
    WriteFailed,
    WriteRefused,
    Written,
)
from holdfast.rendezvous.keyspace import Said, Statement, Tellings
from holdfast.rendezvous.participant import Participant, Standing
from holdfast.rendezvous.reign import Reign

_RETRY_AFTER_S = 0.2
_RETRY_SPREAD_S = 0.8


class Office(StrEnum):
    FOLLOWING = "FOLLOWING"
    LOADING = "LOADING"
    LEADING = "LEADING"


# How a node's office may change, and why. The picture in the documentation is made from this.
OFFICE_CHANGES: tuple[tuple[Office, str, Office], ...] = (
    (Office.FOLLOWING, "nobody leads, and it has created the key", Office.LOADING),
    (Office.LOADING, "the run and all statements were read", Office.LEADING),
    (Office.LEADING, "the watch was interrupted, and all was read again", Office.LEADING),
    (Office.LOADING, "the key is not its own any more, or it goes", Office.FOLLOWING),
    (Office.LEADING, "the key is not its own any more, a write was refused, or it goes", Office.FOLLOWING),
)
_ALLOWED = frozenset((before, after) for before, _, after in OFFICE_CHANGES)


class Elected:
    """One node's part in one run on etcd."""

    def __init__(self, node: Participant) -> None:
        self.node = node
        self.office = Office.FOLLOWING
        self.reign: Reign | None = None
        self._lease: int | None = None
        self._abandoned: int | None = None
        self._leader: Found | None = None
        self._leader_revision = 0
        self._reign_number = 0
        self._heard = (0, 0)
        self._origin = 0
        self._said = b""
        self._saying: bytes | None = None
        self._say_number = 0
        self._is_revoked = False
        self._retry_at: dict[str, float] = {}

    # What the shell calls.

    def step(self, event: Event, now: float) -> list[Command]:
        commands = self._react(event, now)
        return [*commands, *self._speak(now), *self._reign_on(now), *self._say_farewell()]

    def next_deadline(self) -> float | None:
        if self._is_revoked:
            return None
        candidates = [self._node_deadline(), *self._retry_at.values()]
        if self.reign is not None:
            candidates.append(self.reign.next_deadline())
        return min((each for each in candidates if each is not None), default=None)

    @property
    def lease(self) -> int | None:
        """Of this node, and of the leader's key if that is its own."""
        return self._lease

    @property
    def origin(self) -> int:
        """Of the run that it was told something of last; 0 if it never was."""
        return self._origin

    @property
    def has_duties(self) -> bool:
        """Whether others wait for what this node would do next as their leader."""
        return self.reign is not None and self.reign.is_ending

    @property
    def is_gone(self) -> bool:
        """Whether it has said its last word, or never had one."""
        return self._is_revoked or self._lease is None

    def resign(self) -> list[Command]:
        """Go, whatever is left to do; another node will do it."""
        if self._is_revoked or self._lease is None:
            return []
        self._is_revoked = True
        return [*self._step_down(), RevokeLease(self._lease)]

    def check(self) -> None:
        """The invariants; tests and the simulator call this after every step."""
        assert (self.reign is None) == (self.office is Office.FOLLOWING)
        assert self.reign is None or self._lease is not None
        assert not self._is_revoked or self.reign is None
        if self.reign is not None and self.reign.machine is not None:
            self.reign.machine.check()

    def _react(self, event: Event, now: float) -> list[Command]:
        if self._is_revoked and not isinstance(event, participant.AgentEvent):
            return []
        match event:
            case session.TimePassed():
                return self._time_passed(now)
            case LeaseGranted(lease):
                return self._granted(lease, now)
            case LeaseDenied(jitter):
                return self._step_node(session.ConnectFailed(False, jitter), now)
            case LeaseKept(number):
                return self._step_node(session.HeartbeatAnswered(number), now)
            case LeaseGone(lease):
                return self._lose_lease(now) if lease == self._lease else []
            case Followed(revision, leader, told):
                heard = self._hear(told.value, now) if told is not None else []
                return [*heard, *self._see_leader(revision, leader)]
            case FollowFailed(jitter):
                self._retry("follow", jitter, now)
                return []
            case LeaderSeen(revision, leader):
                return self._see_leader(revision, leader)
            case CampaignFailed(jitter):
                self._retry("campaign", jitter, now)
                return []
            case ToldSeen(value):
                return self._hear(value, now)
            case StatementWritten(number):
                self._was_said(number)
                return []
            case SayFailed(number, jitter):
                if number == self._say_number:
                    self._retry("say", jitter, now)
                return []
            case Loaded() | LoadFailed() | NodesSeen() | Written() | WriteRefused() | WriteFailed():
                return self._react_as_leader(event, now)
            case _:
                return self._step_node(event, now)

    def _react_as_leader(
        self, event: Loaded | LoadFailed | NodesSeen | Written | WriteRefused | WriteFailed, now: float
    ) -> list[Command]:
        reign = self.reign
        if reign is None:
            return []
        match event:
            case Loaded(term, run, nodes, told, ended) if term == reign.term:
                self._hold(Office.LEADING)
                reign.load(run, nodes, now, told, ended)
            case LoadFailed(term, jitter) if term == reign.term:
                self._retry("load", jitter, now)
            case NodesSeen(term, changes) if term == reign.term:
                reign.see(changes, now)
            case Written(number):
                reign.was_written(number, now)
            case WriteRefused(number) if number == reign.writing:
                return self._step_down()
            case WriteFailed(number, jitter) if number == reign.writing:
                self._retry("write", jitter, now)
        return []

    def _retry(self, what: str, jitter: float, now: float) -> None:
        self._retry_at[what] = now + _RETRY_AFTER_S + _RETRY_SPREAD_S * jitter

    def _time_passed(self, now: float) -> list[Command]:
        due = [what for what, at in self._retry_at.items() if now >= at]
        for what in due:
            del self._retry_at[what]
        commands: list[Command] = []
        deadline = self._node_deadline()
        if deadline is not None and now >= deadline:
            commands += self._step_node(session.TimePassed(), now)
        if "follow" in due and not self._is_revoked:
            commands.append(Follow())
        if "campaign" in due and self._leader is None:
            commands += self._campaign()
        if "say" in due:
            self._saying = None
        if self.reign is not None:
            commands += self.reign.time_passed(due, now)
        return commands

    # The node.

    def _node_deadline(self) -> float | None:
        """A leader keeps its lease for as long as it has duties, also when the run is over for its own node."""
        return self.node.next_renewal() if self.has_duties else self.node.next_deadline()

    def _step_node(self, event: participant.Event, now: float) -> list[Command]:
        commands: list[Command] = []
        for command in self.node.step(event, now):
            match command:
                case participant.Send(messages.Heartbeat(number)):
                    assert self._lease is not None
                    commands.append(KeepLease(number, self._lease))
                case participant.Send():
                    pass  # It is in the statement.
                case session.Connect():
                    commands.append(GrantLease())
                case session.HangUp():
                    self._abandoned = None if self.node.may_outlive_lease else self._lease
                    commands += self._give_up_lease(now)
                case _:
                    commands.append(command)
        return commands

    def _granted(self, lease: int, now: float) -> list[Command]:
        """Everything is read anew. etcd may have lost its data, and with it the lease before this one; then its
        revisions begin again, and whoever waits for what comes after the last that it saw waits for ever."""
        self._lease = lease
        self._said, self._saying = b"", None
        self._leader, self._leader_revision, self._heard = None, 0, (0, 0)
        for what in ("follow", "campaign", "say"):
            self._retry_at.pop(what, None)
        return [*self._end_abandoned(), *self._step_node(session.Connected(), now), Follow()]

    def _end_abandoned(self) -> list[Command]:
        """Its workers were killed before it was given up, so nobody needs to wait until it ends by itself; least of all
        if it was the leader's."""
        lease, self._abandoned = self._abandoned, None
        return [RevokeLease(lease)] if lease is not None else []

    def _lose_lease(self, now: float) -> list[Command]:
        """Nobody but etcd can have ended it: the node was not heard of for too long."""
        return [*self._give_up_lease(now), *self._step_node(session.Disconnected(), now)]

    def _give_up_lease(self, now: float) -> list[Command]:
        """Who has another lease is somebody else, also if it was only waiting:

          1. it waits for a place, is given one, and does not hear of it, because etcd is out of its reach,
          2. its lease ends, so the place is given away,
          3. it is back with another lease and says that it waits, and only now reads what it was told before.

        If it took that place, there would be two worlds. One that prefers running on to being safe says again where it
        stands, and may find that its place is still there.
        """
        commands = self._step_down()
        self._lease = None
        if self.node.may_outlive_lease:
            return commands
        return commands + self._step_node(participant.MessageCame(messages.Expelled("its lease has ended")), now)

    def _speak(self, now: float) -> list[Command]:
        """Bring the statement up to date. One at a time, so that an older one never overwrites a newer."""
        if self._lease is None or self._saying is not None or "say" in self._retry_at or self._is_revoked:
            return []
        said = tuple(each for each in self.node.statement() if isinstance(each, Said))
        statement = keyspace.encode(Statement(keyspace.VERSION, said, self._origin))
        if not said or statement == self._said:
            return []
        self._saying = statement
        self._say_number += 1
        return [Say(self._say_number, self._lease, statement)]

    def _was_said(self, number: int) -> None:
        if number == self._say_number and self._saying is not None:
            self._said, self._saying = self._saying, None

    def _hear(self, value: bytes, now: float) -> list[Command]:
        commands: list[Command] = []
        tellings = keyspace.decode(Tellings, value)
        for telling in tellings.items:
            if (telling.term, telling.number) <= self._heard:
                continue
            self._heard, self._origin = (telling.term, telling.number), tellings.origin
            if telling.key == self.node.facts.key or isinstance(telling.message, messages.Ended):
                commands += self._step_node(participant.MessageCame(telling.message), now)
        return commands

    def _say_farewell(self) -> list[Command]:
        """With the lease the statement goes, and the leader's key if it is ours: a leader has duties first."""
        is_speaking = self._saying is not None or "say" in self._retry_at
        if not self._has_left or is_speaking or self.has_duties or self.is_gone:
            return []
        return [*(self.reign.leave(self.node.facts.key) if self.reign is not None else []), *self.resign()]

    @property
    def _has_left(self) -> bool:
        return self.node.standing is Standing.DONE or self.node.has_left

    # The leader.

    def _see_leader(self, revision: int, leader: Found | None) -> list[Command]:
        if revision < self._leader_revision:
            return []
        self._leader_revision, self._leader = revision, leader
        if leader is None:
            return [*self._step_down(), *self._campaign()]
        if leader.lease != self._lease:
            return self._step_down()
        if self.reign is not None and self.reign.term == leader.created_at:
            return []
        commands = self._step_down()
        self.reign = self._begin_reign(leader.created_at, self._reign_number)
        self._hold(Office.LOADING)
        return [*commands, Load(leader.created_at)]

    def _hold(self, office: Office) -> None:
        if (self.office, office) not in _ALLOWED:
            raise InternalError(f"node {self.node.facts.key} cannot go from {self.office} to {office}")
        self.office = office

    def _begin_reign(self, term: int, number: int) -> Reign:
        return Reign(term, number)

    def _campaign(self) -> list[Command]:
        return [] if self._lease is None or self._has_left or self._is_revoked else [Campaign(self._lease)]

    def _step_down(self) -> list[Command]:
        if self.reign is None:
            return []
        self._reign_number = self.reign.number
        self.reign = None
        self._hold(Office.FOLLOWING)
        for what in ("load", "write"):
            self._retry_at.pop(what, None)
        return [StepDown()]

    def _reign_on(self, now: float) -> list[Command]:
        if self.reign is None or "write" in self._retry_at:
            return []
        return [*self.reign.write(now)]
