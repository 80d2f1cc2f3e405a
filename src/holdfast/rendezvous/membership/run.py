"""The machine of one run: identity, term, and the order of writing and telling. Pure.

A coordinator's shell numbers its connections and knows nothing else about them. This machine takes what happens on
connections (`Opened`, `Received`, `Closed`), the term that the storage has raised (`TermRaised`) and time, and answers
each with one `Ready`. It knows which connection speaks for which incarnation of which node, and passes what nodes say
on to `Membership`, which decides about rounds.

Identity. A node id belongs to the node that joined with it first. Each node shows a secret of its own on every
connection; the machine keeps its hash, and the hashes of a round's members are written down with the round. A node is
known when `Membership` has accepted its join or its return, and not before: a handshake fixes nothing. The newest
connection of a node speaks for it:

  1. the network swallows a node's join; the node hangs up and joins on a new connection,
  2. the node is sealed into a world and starts its workers,
  3. the join of step 1 arrives on the old connection. It says that the node has no workers, which was true then. The
     machine closes the old connection and ignores the join.

When a newer incarnation of a node is accepted, the older connection is expelled. Heartbeats are answered only on the
connection that speaks for a node of the run.

Term. A node may know of a coordinator of a higher term than this one's. The storage raises the term first; the node is
welcomed after that.

Order. Nothing that follows from a change is told before the change is durable: see `Ready`.

A run without any connection of a node is deserted. Its nodes may come back for a while; then it is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import NamedTuple, assert_never

from holdfast.frozen import changed
from holdfast.rendezvous.membership import keys, model, protocol
from holdfast.rendezvous.membership.model import Memory, NodeFacts
from holdfast.rendezvous.membership.phases import Membership
from holdfast.rendezvous.membership.protocol import (
    Closed,
    Expel,
    ForgetRun,
    From,
    Introduction,
    Join,
    Opened,
    Ready,
    Received,
    Remember,
    Return,
    RunEvent,
    Tell,
    TermRaised,
)

_DESERTED_S = 60.0
_LONGEST_DESERTED_S = 300.0
_REMEMBERED_NODES = 4096  # Of which no connection is open.
_OUTDATED = "a newer incarnation of this node has joined"


class Access(StrEnum):
    """What a connection may do. A stranger may only introduce itself and join."""

    STRANGER = "STRANGER"
    VISITOR = "VISITOR"
    MEMBER = "MEMBER"


class _Peer:
    """One connection. `key` is the incarnation that joined or returned on it, `secret` the hash of its secret."""

    __slots__ = ("introduction", "key", "secret")

    def __init__(self, introduction: Introduction) -> None:
        self.introduction, self.key = introduction, ""
        self.secret = keys.hash_of_secret(introduction.secret)


class _Known(NamedTuple):
    """A node that has joined: its last incarnation, the connection on which that spoke last (0 for none), and the hash
    of its secret (empty if the coordinator before this one did not write it down)."""

    key: str
    conn: int
    secret: bytes


class Run:
    """One run."""

    def __init__(
        self, now: float, memory: Memory | None = None, *, term: int | None = None, age_s: float = 0.0
    ) -> None:
        """`memory` is what an earlier coordinator of this run wrote down, `age_s` ago. `term` is that of this
        coordinator, higher than any before it; without one, the next after the memory's."""
        self.membership = Membership(now, memory, term=term, age_s=age_s)  # Who is in, and the rounds.
        self.decided: list[protocol.Command] = []  # The membership's commands of the last step, for the log.
        self._peers: dict[int, _Peer] = {}  # The open connections, by number. One that the machine closes leaves it.
        # Nodes that have joined, by node id. `_known[id].conn` is the one connection that speaks for the node:
        # `_peers[conn].key == _known[id].key` if that connection is open.
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._unwelcome: list[int] = []  # The part of `_peers` that is welcomed when the storage has raised the term.
        self._clients = 0  # How many of `_peers` are no visitors.
        self._alone_at: float | None = now  # When the last of these was closed; None while there is one.
        self._has_forgotten = False  # `Ready.forget` was said, which is said once.
        if memory is not None and memory.secrets:
            for key, secret in zip(memory.members, memory.secrets, strict=False):
                self._known[key.rpartition("/")[0]] = _Known(key, 0, secret)

    # What the shell asks.

    def next_deadline(self) -> float | None:
        """When `TimePassed` is due unless something happens before."""
        deserted_at = self._deserted_at()
        at = self.membership.next_deadline()
        return at if deserted_at is None else deserted_at if at is None else min(at, deserted_at)

    def access_of(self, conn: int) -> Access:
        peer = self._peers.get(conn)
        if peer is None:
            return Access.STRANGER
        if peer.introduction.is_visitor:
            return Access.VISITOR
        return Access.MEMBER if self.speaker(conn) is not None else Access.STRANGER

    def speaker(self, conn: int) -> str | None:
        """The key of the node that speaks on this connection, if the run knows it."""
        peer = self._peers.get(conn)
        if peer is None or peer.key not in self.membership.nodes:
            return None
        known = self._known.get(peer.introduction.node_id)
        return peer.key if known is not None and known.conn == conn else None

    def conn_of(self, node_id: str) -> int | None:
        """The connection that speaks for the node now."""
        known = self._known.get(node_id)
        return known.conn if known is not None and known.conn in self._peers else None

    def passing_s(self, now: float) -> float | None:
        """How long a node of another run has to wait until it can take this run's place; None if this run goes on. A
        run that has ended waits for nodes that have not heard of it, a deserted one until the leases are over."""
        if self.membership.outcome is not None:
            at = self.membership.next_deadline() if self.membership.nodes else None
        elif self._alone_at is not None:
            settings = self.membership.settings
            at = self._alone_at + (settings.lease_s if settings is not None else 0.0)
        else:
            return None
        return 0.0 if at is None else max(0.0, at - now)

    # Events.

    def step(self, event: RunEvent, now: float) -> Ready:
        ready = Ready()
        self.decided = []
        match event:
            case Received(conn, protocol.Heartbeat(number) as message):
                if (key := self.speaker(conn)) is None:
                    return ready
                ready.send_now.append(((conn,), protocol.HeartbeatAnswer(number)))
                if not (commands := self.membership.step(From(key, message), now)):
                    return ready
                self._carry_out(commands, ready)
            case Received(conn, message):
                if conn in self._peers:
                    self._received(conn, self._peers[conn], message, now, ready)
            case Opened(conn, introduction):
                self._opened(conn, introduction, ready)
            case Closed(conn, by_peer):
                self._closed(conn, by_peer, now, ready)
            case TermRaised(term):
                self.membership.term = max(self.membership.term, term)
                for conn in self._unwelcome:
                    self._welcome(conn, ready)
                self._unwelcome.clear()
            case model.CloseRequested() | protocol.NoticeRequested() | protocol.TimePassed():
                self._pass_on(event, now, ready)
            case _:
                assert_never(event)
        done = 0
        while done < len(ready.close):  # If one of them spoke for a node, the membership hears of it.
            self._closed(ready.close[done][0], False, now, ready)
            done += 1
        if (deserted_at := self._deserted_at()) is not None and now >= deserted_at:
            ready.forget = True
        ready.forget = ready.forget and not self._has_forgotten
        self._has_forgotten |= ready.forget
        return ready

    # Connections.

    def _opened(self, conn: int, introduction: Introduction, ready: Ready) -> None:
        peer = self._peers[conn] = _Peer(introduction)
        if not introduction.is_visitor:
            self._clients += 1
            self._alone_at = None
        if problem := self._objection_to(introduction, peer):
            ready.tell((conn,), protocol.Denied(problem))
            ready.close.append((conn, f"is turned away: {problem}"))
        elif not introduction.is_visitor and self._raise_term(introduction.term):
            ready.raise_term = introduction.term
            self._unwelcome.append(conn)
        elif self._unwelcome:
            self._unwelcome.append(conn)
        else:
            self._welcome(conn, ready)

    def _raise_term(self, heard: int) -> bool:
        """A node knows of a coordinator of that term. Rounds that are sealed from now on must be later, also while the
        storage raises the term. True if the term was too low."""
        if heard <= self.membership.term:
            return False
        self.membership.term = heard + 1
        return True

    def _objection_to(self, introduction: Introduction, peer: _Peer) -> str:
        known = self._known.get(introduction.node_id)
        if known is not None and known.secret and not keys.is_same(known.secret, peer.secret):
            return f"the node id {introduction.node_id!r} is another node's"
        if introduction.term > max(self.membership.term, protocol.HIGHEST_CLAIM):
            return f"it claims to know of term {introduction.term}, which no coordinator can have reached"
        return ""

    def _welcome(self, conn: int, ready: Ready) -> None:
        run = self.membership
        if conn in self._peers:
            ready.tell((conn,), protocol.Welcome(run.term, run.told_round, run.restarts_at_seal))

    def _closed(self, conn: int, by_peer: bool, now: float, ready: Ready) -> None:
        key = self.speaker(conn)
        peer = self._peers.pop(conn, None)
        if peer is None:
            return
        if conn in self._unwelcome:
            self._unwelcome.remove(conn)
        if not peer.introduction.is_visitor:
            self._clients -= 1
            self._alone_at = now if self._clients == 0 else None
        if key is not None:
            self._pass_on(protocol.ConnectionClosed(key, by_peer), now, ready)

    def _deserted_at(self) -> float | None:
        """When the run is forgotten if no node comes back: three leases, and a few minutes at most. But while a lease
        of a round lasts, that round may have workers. At once if nodes came only to hear how an earlier run ended."""
        if self._alone_at is None or self._has_forgotten:
            return None
        if self.membership.finished.was_told and self.membership.is_blank:
            return self._alone_at
        settings = self.membership.settings
        lease_s = settings.lease_s if settings is not None else 0.0
        usual_s = max(_DESERTED_S, min(3 * lease_s, _LONGEST_DESERTED_S))
        return self._alone_at + max(usual_s, lease_s if self.membership.round else 0.0)

    # What nodes say.

    def _received(self, conn: int, peer: _Peer, message: protocol.FromNode, now: float, ready: Ready) -> None:
        if peer.introduction.is_visitor:
            ready.close.append((conn, f"is a visitor and sent {type(message).__name__}"))
        elif isinstance(message, Join | Return):
            self._joined(conn, peer, message, now, ready)
        elif (key := self.speaker(conn) or self._gone_speaker(conn, peer, message)) is not None:
            self._pass_on(From(key, message), now, ready)

    def _gone_speaker(self, conn: int, peer: _Peer, message: protocol.FromNode) -> str | None:
        """A node that is done says so on a new connection, on which it does not join."""
        known = self._known.get(peer.introduction.node_id)
        is_its_word = isinstance(message, protocol.Left) and known is not None and conn > known.conn
        return known.key if is_its_word and known is not None and known.secret == peer.secret else None

    def _joined(self, conn: int, peer: _Peer, message: Join | Return, now: float, ready: Ready) -> None:
        """The connection speaks for the node if the membership accepts what it says, else it is told why and closed."""
        facts = message.facts
        known = self._known.get(facts.node_id)
        if facts.node_id != peer.introduction.node_id:
            ready.close.append((conn, f"speaks for {facts.node_id!r}, which is another node"))
            return
        if known is not None and (conn < known.conn or (known.secret and known.secret != peer.secret)):
            ready.close.append((conn, ""))
            return
        if known is not None and facts.incarnation < int(known.key.rpartition("/")[2]):
            ready.tell((conn,), model.Expelled(_OUTDATED))
            ready.close.append((conn, f"is expelled: {_OUTDATED}"))
            return
        before = self.speaker(conn)
        commands = self.membership.step(From(facts.key, message), now)
        if facts.key in self.membership.nodes and not _is_turned_away(facts.key, commands):
            self._speaks(conn, peer, facts, ready)
        self._carry_out(commands, ready, (facts.key, conn))
        if before is not None and before != facts.key:  # The next incarnation of the same agent.
            self._pass_on(protocol.ConnectionClosed(before), now, ready)

    def _speaks(self, conn: int, peer: _Peer, facts: NodeFacts, ready: Ready) -> None:
        """From now on the connection speaks for the node, and an older one does not."""
        known = self._known.get(facts.node_id)
        if known is not None and known.conn != conn and known.conn in self._peers:
            if known.key != facts.key:
                ready.tell((known.conn,), model.Expelled(_OUTDATED))
            ready.close.append((known.conn, ""))
        peer.key = facts.key
        self._known[facts.node_id] = _Known(facts.key, conn, peer.secret)
        self._known.move_to_end(facts.node_id)
        if len(self._known) > len(self._peers) + _REMEMBERED_NODES:
            self._forget_nodes()

    def _forget_nodes(self) -> None:
        """Of nodes that are not connected, the last that spoke are remembered."""
        away = [node_id for node_id, known in self._known.items() if known.conn not in self._peers]
        for node_id in away[: len(self._known) - len(self._peers) - _REMEMBERED_NODES // 2]:
            del self._known[node_id]

    # What the membership decides.

    def _pass_on(self, event: protocol.Event, now: float, ready: Ready) -> None:
        self._carry_out(self.membership.step(event, now), ready)

    def _carry_out(self, commands: list[protocol.Command], ready: Ready, asking: tuple[str, int] | None = None) -> None:
        """`asking` is the node whose join or return is being answered, and its connection."""
        self.decided += commands
        for command in commands:
            match command:
                case Tell(told, message):
                    conns = self._conns_of(told, asking)
                    ready.tell(conns, message)
                    if isinstance(message, model.Refused):
                        ready.close += [(conn, f"is refused: {message.reason}") for conn in conns]
                case Remember(memory):
                    ready.persist = changed(memory, secrets=self._secrets_of(memory.members))
                case Expel(key, reason):
                    conns = self._conns_of((key,), asking)
                    ready.tell(conns, model.Expelled(reason))
                    ready.close += [(conn, f"is expelled: {reason}") for conn in conns]
                case ForgetRun():
                    ready.forget = True
                case _:
                    assert_never(command)

    def _conns_of(self, told: tuple[str, ...], asking: tuple[str, int] | None) -> tuple[int, ...]:
        if asking is not None and told == asking[:1]:
            return asking[1:]
        found = []
        for key in told:
            known = self._known.get(key.rpartition("/")[0])
            if known is not None and known.key == key and known.conn in self._peers:
                found.append(known.conn)
        return tuple(found)

    def _secrets_of(self, members: tuple[str, ...]) -> tuple[bytes, ...]:
        known = (self._known.get(key.rpartition("/")[0]) for key in members)
        return tuple(each.secret if each is not None else b"" for each in known)

    def check(self) -> None:
        """The invariants; tests and the simulator call this after every step."""
        self.membership.check()
        assert all(conn in self._peers for conn in self._unwelcome)
        for node_id, known in self._known.items():
            peer = self._peers.get(known.conn)
            assert peer is None or (peer.key == known.key and peer.introduction.node_id == node_id)


def _is_turned_away(key: str, commands: list[protocol.Command]) -> bool:
    for command in commands:
        match command:
            case Tell((told,), model.Refused()) | Expel(told) if told == key:
                return True
    return False
