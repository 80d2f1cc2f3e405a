"""One run of a coordinator: the shell around its machine and its key-value store, and the connections of its nodes.

What nodes say, closed connections and deadlines go to the machine (`membership.run`), and its commands become messages.
What the run must not forget is written down (`Keeper`) before anything that follows from it is told. If the machine
fails, the run is closed as a whole (`Coordinator.fail`).
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, assert_never

from holdfast.rendezvous.coordinator.kv_store import Answers, KeyValues
from holdfast.rendezvous.coordinator.limits import Bucket
from holdfast.rendezvous.coordinator.log import RunLog, shown
from holdfast.rendezvous.coordinator.queries import Queries
from holdfast.rendezvous.coordinator.turns import Share, Turns
from holdfast.rendezvous.membership import frames, keys, model, protocol, status
from holdfast.rendezvous.membership.protocol import From
from holdfast.rendezvous.membership.run import Membership
from holdfast.telemetry.status import RunStatus

if TYPE_CHECKING:
    from holdfast.rendezvous.coordinator.connection import Connection
    from holdfast.rendezvous.coordinator.server import Coordinator

_SILENCE_S = 60.0  # A client that says nothing for so long is gone; agents send heartbeats.
_DESERTED_S = 60.0
_LONGEST_DESERTED_S = 300.0
_REMEMBERED_CONNECTIONS = 4096  # Of nodes of a run that are not connected now.
_SENT_AT_ONCE = 16  # Answers. More than that are sent when it is the run's turn.
_EXECUTED_AT_ONCE_S = 0.005


class Keeper(Protocol):
    """Keeps what a coordinator must not forget."""

    def may_serve(self) -> bool: ...

    def recall(self, run_id: str) -> tuple[model.Memory | None, int | None]:
        """What is known of the run, and the term of this coordinator, if it has been given one."""

    def remember(self, run_id: str, memory: model.Memory, then: Callable[[], None]) -> None:
        """Write it down, and call `then` when that is done."""

    def raise_term(self, heard: int, then: Callable[[int], None]) -> None:
        """A node knows of a coordinator of that term. `then` is called with a higher one for this coordinator."""

    def forget(self, run_id: str) -> None: ...


class Untellable(Exception):  # noqa: N818
    """A message became too large to be sent."""


class Outbox:
    """Answers of a run's store to many clients at once, sent in the turns of the run, before it takes anything else."""

    def __init__(self, turns: Turns, share: Share, clock: Callable[[], float]) -> None:
        self._turns, self._share, self._clock = turns, share, clock
        self._answers: deque[tuple[Connection, protocol.StoreAnswer]] = deque()

    def add(self, answers: Answers) -> None:
        if not self._answers and answers:
            self._turns.wait(self._share, self, is_first=True)
        self._answers += answers

    def take_turn(self, now: float, ends_at: float) -> None:
        try:
            while self._answers:
                connection, answer = self._answers.popleft()
                connection.send(answer)
                if self._clock() >= ends_at:
                    break
        finally:
            if self._answers:
                self._turns.wait(self._share, self, is_first=True)


class Run:
    """One run: its machine, its store, and the connections of its nodes."""

    def __init__(self, run_id: str, owner: Coordinator) -> None:
        self.run_id = run_id
        self._owner = owner
        self._keeper = owner.keeper
        self._loop = asyncio.get_running_loop()
        memory, term = self._keeper.recall(run_id)
        # Without a token tickets are made with a key of the run's own, which is written down.
        self._secret = (memory.ticket_key if memory else b"") or os.urandom(protocol.NONCE_BYTES)
        self._ticket_key = keys.ticket_key(keys.run_token(owner.token, run_id) if owner.token else self._secret)
        self.machine = Membership(self._loop.time(), memory, term=term)
        self.share = Share()
        self._outbox = Outbox(owner.turns, self.share, owner.clock)
        self._store = KeyValues(os.urandom(8), owner.limits, owner.room)
        self._lines = RunLog(run_id, owner.limits, self._loop.time, self._loop.call_soon)
        self._queries = Queries(self, owner.limits, owner.clock, has_token=owner.token is not None)
        self._node_count = 0
        self._visitors: set[Connection] = set()
        self._clients: set[Connection] = set()
        self._connections: dict[str, Connection] = {}  # Those of nodes, by their keys.
        # By node id: the key of its last incarnation, and the number of the connection on which that spoke last.
        self._newest: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._commands: deque[protocol.Command] = deque()
        self._writes = Bucket(owner.limits.writes_a_second, owner.limits.writes_at_once, owner.clock)
        self._is_writing = False
        self._is_waiting = False  # For its turn.
        self._is_armed_soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._deserted_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def silence_s(self) -> float:
        settings = self.machine.settings
        return max(_SILENCE_S, 3 * settings.lease_s if settings else 0.0)

    @property
    def deserted_s(self) -> float:
        """How long the run is kept when no client is there: three leases, and a few minutes at most. But while a lease
        of a round lasts, that round may have workers."""
        lease_s = self.machine.settings.lease_s if self.machine.settings else 0.0
        usual_s = max(self._owner.idle_timeout_s or _DESERTED_S, _SILENCE_S, min(3 * lease_s, _LONGEST_DESERTED_S))
        return max(usual_s, lease_s if self.machine.round else 0.0)

    @property
    def is_behind(self) -> bool:
        """Whether the run has to do what it has decided, or to write its memory down, before it takes any more."""
        return self._is_waiting or len(self._commands) >= self._owner.limits.waiting_commands

    # Connections.

    def rejection_of(self, node: protocol.Introduction) -> str:
        """Why a client cannot speak for this node, or nothing. A node id belongs to the node that joined with it first
        and has its ticket. Before that nothing but the node knows its id, so a node that was cut off in the handshake
        gets its ticket once more. A coordinator that has lost its memory knows no node, and hands out new tickets."""
        is_known = bool(node.node_id) and self.machine.knows(node.node_id)
        if is_known and not keys.is_same(node.ticket, keys.ticket(self._ticket_key, node.node_id)):
            return f"the node id {node.node_id!r} is another node's"
        if node.term > max(self.machine.term, protocol.HIGHEST_CLAIM):
            return f"it claims to know of term {node.term}, which no coordinator can have reached"
        return ""

    def attach(self, connection: Connection, node: protocol.Introduction) -> None:
        """The client has proved itself. It is welcome when this coordinator's term is higher than any it has heard."""
        self._clients.add(connection)
        if self._deserted_timer is not None:
            self._owner.deserted.pop(self, None)
            self._deserted_timer.cancel()
            self._deserted_timer = None
        if self.machine.raise_term(node.term):  # At once: rounds that are sealed meanwhile must be later, too.
            self._keeper.raise_term(node.term, lambda term: self._welcome(connection, node.node_id, term))
        else:
            self._welcome(connection, node.node_id, self.machine.term)

    def _welcome(self, connection: Connection, node_id: str, term: int) -> None:
        self.machine.raise_term(term - 1)
        ticket = keys.ticket(self._ticket_key, node_id) if node_id else b""
        connection.send(protocol.Welcome(self.machine.term, self.machine.round, ticket))

    def receive_visitor(self, connection: Connection) -> None:
        """It asks, and does not keep the run."""
        self._visitors.add(connection)
        connection.send(protocol.Welcome(self.machine.term, self.machine.round))

    def status_in_brief(self) -> RunStatus:
        """Without the nodes."""
        return status.run_status(self.run_id, self.machine, self._loop.time(), page=0)

    def note_stranger(self, peer: str, problem: str) -> None:
        self._queries.note_stranger(peer, problem)

    def connection_of(self, node_id: str) -> Connection | None:
        """On which that node speaks now."""
        key, _ = self._newest.get(node_id, ("", 0))
        return self._connections.get(key)

    def detach(self, connection: Connection) -> None:
        """Members may return for a while; after that no node is left to whom the run could matter."""
        if self._is_closed:
            return
        self._queries.drop_client(connection)
        if connection.is_visitor:
            self._visitors.discard(connection)
            return
        self._clients.discard(connection)
        self._store.drop_client(connection)
        if self._connections.get(connection.key) is connection:
            del self._connections[connection.key]
            self.feed(protocol.ConnectionClosed(connection.key))
        if self._clients or self._is_closed:
            return
        if self.machine.is_blank and self._store.is_empty:
            self._owner.drop(self)
        else:
            self._owner.deserted[self] = None
            self._deserted_timer = self._loop.call_later(self.deserted_s, self._owner.forget, self)

    def take(self, connection: Connection, message: protocol.ToCoordinator) -> None:
        """A message from a client. One that has not joined or returned may only ask and use the store."""
        match message:
            case protocol.Heartbeat(number) if not connection.is_visitor:
                connection.send(protocol.HeartbeatAnswer(number))
                if connection.key:
                    self.feed(From(connection.key, message))
            case protocol.Query():
                self._queries.ask(connection, message, self._loop.time())
            case protocol.Answer():
                self._queries.answered(connection, message)
            case _ if connection.is_visitor:
                connection.cut_off(f"is a visitor and sent {type(message).__name__}")
            case protocol.StoreRequest():
                self._answer(self._store.handle(connection, message, self._loop.time()))
                self._arm()
            case protocol.Join(facts) | protocol.Return(facts):
                earlier = connection.key
                if self._identify(connection, facts):
                    self.feed(From(facts.key, message))
                    if earlier not in ("", facts.key):  # The machine has forgotten it, unless it turned the node away.
                        self.feed(protocol.ConnectionClosed(earlier))
            case _ if connection.key:
                self.feed(From(connection.key, message))

    def _identify(self, connection: Connection, facts: model.NodeFacts) -> bool:
        """Which node speaks here; False if it has spoken on a newer connection, and this is what it had said before.

        1. The network swallows a node's join; the node hangs up and joins on a new connection,
        2. it is sealed into a world and starts its workers,
        3. the join of step 1 arrives. It says that the node has no workers, which was true then.
        """
        if facts.node_id != connection.node_id:
            connection.cut_off(f"speaks for {facts.node_id!r}, which is another node")
            return False
        if connection.number < self._newest.get(facts.node_id, ("", 0))[1]:
            connection.close()
            return False
        if facts.node_id not in self._newest and (problem := self._owner.full_of_nodes):
            self._audit(connection, f"is refused: {problem}")
            connection.send(model.Refused(problem))
            return False
        key = facts.key
        self._newest[facts.node_id] = (key, connection.number)
        self._newest.move_to_end(facts.node_id)
        if self._connections.get(connection.key) is connection:
            del self._connections[connection.key]  # It may be the next incarnation of the same agent.
        if key in self._connections:
            self._connections[key].close()
        connection.key = key
        self._connections[key] = connection
        if len(self._newest) > len(self._connections):
            self._forget_connections()
        return True

    def _forget_connections(self) -> None:
        """Of nodes that are not connected, the last that spoke are remembered."""
        remembered = min(_REMEMBERED_CONNECTIONS, self._owner.remembered_of_a_run)
        while len(self._newest) > len(self._connections) + remembered:
            node_id, (key, number) = self._newest.popitem(last=False)
            if key in self._connections:
                self._newest[node_id] = (key, number)

    # The machine.

    def feed(self, event: protocol.Event) -> None:
        """If the machine fails the run is closed; other runs do not notice."""
        if self._is_closed or not self._keeper.may_serve():
            return
        is_heartbeat = isinstance(event, From) and isinstance(event.message, protocol.Heartbeat)
        try:
            commands = self.machine.step(event, self._loop.time())
            if not is_heartbeat:
                self._audit_event(event, commands)
                self._count_nodes()
            self._commands += commands
            if self.machine.outcome is not None:
                self._queries.tell_outcome()  # Before the run is forgotten.
        except Exception as error:
            self._owner.fail(self, error)
            return
        if self._commands:
            self._execute_all()
        if not is_heartbeat:  # It only puts deadlines off.
            self._arm()

    def _execute_all(self) -> None:
        """Commands that follow a `Remember` wait until it is written down. If there are many, such as a place for each
        of thousands of nodes, they are executed in the turns of the run, before it takes anything else."""
        if not self._is_waiting:
            self.take_turn(0.0, self._owner.clock() + _EXECUTED_AT_ONCE_S)

    def take_turn(self, now: float, ends_at: float) -> None:
        self._is_waiting = False
        try:
            while self._commands and not self._is_writing and not self._is_closed:
                self._execute(self._commands.popleft())
                if self._owner.clock() >= ends_at:
                    break
        except Exception as error:
            self._owner.fail(self, error)
        if self._commands and not self._is_writing and not self._is_closed:
            self._is_waiting = True
            self._owner.turns.wait(self.share, self, is_first=True)

    def _count_nodes(self) -> None:
        count = 0 if self._is_closed else len(self.machine.nodes)
        self._owner.node_count += count - self._node_count
        self._node_count = count

    def _execute(self, command: protocol.Command) -> None:
        match command:
            case protocol.Tell(keys, message):
                self._log(keys, message)
                self._send(keys, message)
            case protocol.Remember(memory):
                self._is_writing = True
                if owed_s := self._writes.owed_s(1):
                    self._loop.call_later(owed_s, self._write, memory)
                else:
                    self._write(memory)
            case protocol.Expel(key, reason):
                self._audit(self._connections.get(key), f"is expelled: {shown(reason, 800)}", key)
                self._send((key,), model.Expelled(reason))
                if key in self._connections:
                    self._connections.pop(key).close()  # No heartbeat of it is answered any more.
            case protocol.ForgetRun():
                self._owner.forget(self)
            case _:
                assert_never(command)

    def _write(self, memory: model.Memory) -> None:
        """If the machine has gone on meanwhile, its newest memory: it contains what the ones before it say."""
        if self._is_closed:
            return
        if newer := [each.memory for each in self._commands if isinstance(each, protocol.Remember)]:
            memory = newer[-1]
            self._commands = deque(each for each in self._commands if not isinstance(each, protocol.Remember))
        self._keeper.remember(self.run_id, replace(memory, ticket_key=self._secret), self._written)

    def _written(self) -> None:
        self._is_writing = False
        self._execute_all()

    def _audit_event(self, event: protocol.Event, commands: list[protocol.Command]) -> None:
        """One line for what a node has caused. A node that joins again in each round is in the log once."""
        match event:
            case From(key, protocol.Join() | protocol.Return() as message):
                said, is_new = ("joined" if isinstance(message, protocol.Join) else "returned"), True
                for command in commands:
                    match command:
                        case protocol.Tell((told,), model.Refused()) | protocol.Expel(told) if told == key:
                            is_new = False  # Which has a line of its own.
                connection = self._connections.get(key)
                if is_new and connection is not None and connection.audited != key:
                    connection.audited = key
                    self._audit_deed(connection, said, key)
            case From(key, protocol.Leaving()):
                self._audit(self._connections.get(key), "leaves", key)
            case From(key, protocol.Left()):
                self._audit_deed(self._connections.get(key), "left", key)
            case From(key, protocol.Close(reason)) if self.machine.outcome is not None and commands:
                self._audit(self._connections.get(key), f"closed the run: {shown(reason, 800)}", key)
            case model.CloseRequested(reason) if commands:
                self._lines.say(f"was closed: {shown(reason, 800)}")

    def _audit(self, connection: Connection | None, text: str, key: str = "") -> None:
        """A line about one node, with its address."""
        if connection is None:
            self._lines.say(f"{shown(key)} {text}")
            return
        name = shown(key or connection.key or connection.node_id)
        self._lines.say(f"{name} at {connection.peer} {text}", is_of_connection=self._is_one_of_few(connection))

    def _audit_deed(self, connection: Connection | None, deed: str, key: str) -> None:
        if connection is None:
            self._lines.say_of(shown(key), deed)
            return
        name = f"{shown(key)} at {connection.peer}"
        self._lines.say_of(name, deed, is_of_connection=self._is_one_of_few(connection))

    def _is_one_of_few(self, connection: Connection) -> bool:
        """Whether the next line is one of the first about this connection."""
        connection.lines += 1
        return connection.lines <= self._owner.limits.lines_of_a_connection

    def _log(self, keys: tuple[str, ...], message: model.Push) -> None:
        match message:
            case model.Sealed(_, place) if place.rank == 0:
                nodes = "1 node" if place.node_count == 1 else f"{place.node_count} nodes"
                self._lines.say(f"round {place.round} begins with {nodes}")
            case model.Stop(round, reason):
                self._lines.say(f"round {round} is stopped: {shown(reason, 800)}")
            case model.Refused(reason):
                self._audit(self._connections.get(keys[0]), f"is refused: {shown(reason, 800)}", keys[0])
            case model.Notice(text) | model.StandBy(_, text):
                whom = shown(keys[0]) if len(keys) == 1 else f"{len(keys)} nodes"
                self._lines.say(f"to {whom}: {shown(text, 800)}")

    def _send(self, keys: tuple[str, ...], message: model.Push) -> None:
        try:
            frame = frames.encode(message)
        except ValueError as error:
            raise Untellable(str(error)) from None
        for key in keys:
            if key in self._connections:
                self._connections[key].send_frame(frame)

    def _answer(self, answers: Answers) -> None:
        for connection, answer in answers[:_SENT_AT_ONCE]:
            connection.send(answer)
        self._outbox.add(answers[_SENT_AT_ONCE:])

    def _arm(self) -> None:
        """Wake up at the next deadline, which is looked for once for all events of a turn of the loop."""
        if not self._is_armed_soon:
            self._is_armed_soon = True
            self._loop.call_soon(self._arm_now)

    def _arm_now(self) -> None:
        """A timer that is too early is left alone: it will look again."""
        self._is_armed_soon = False
        if self._is_closed:
            return
        deadlines = [self.machine.next_deadline(), self._store.next_deadline()]
        at = min((each for each in deadlines if each is not None), default=None)
        if at is None or (self._timer is not None and self._timer.when() <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        if self._keeper.may_serve():
            self._answer(self._store.expire(self._loop.time()))
            self.feed(protocol.TimePassed())

    def close(self) -> None:
        self._is_closed = True
        self._lines.flush()
        self._count_nodes()
        self._store.close()
        for timer in (self._timer, self._deserted_timer):
            if timer is not None:
                timer.cancel()
        for connection in (*self._clients, *self._visitors):
            connection.close()
