"""The coordinator: an asyncio server around the machine and the key-value store of each of its runs.

It contains no policy. Messages, closed connections and deadlines go to the machine of a run (`membership.run`), and its
commands become messages. What a run must not forget is written down (`Keeper`) before anything that follows from it is
told, so a coordinator that is killed and started again goes on where it was.

A connection belongs to one incarnation of one node; if the node connects anew, the older connection is closed and what
still comes from it is dropped. The process ends when its last run is over and all nodes have heard of it, when it has
had no run for `idle_timeout_s`, or when it may not serve any longer (`resign`, on etcd).
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, assert_never

from holdfast.rendezvous.coordinator.connection import Complaints, Connection
from holdfast.rendezvous.coordinator.kv_store import Answers, KeyValues
from holdfast.rendezvous.coordinator.launch import PortTaken
from holdfast.rendezvous.membership import frames, keys, model, protocol
from holdfast.rendezvous.membership.protocol import From
from holdfast.rendezvous.membership.run import Membership
from holdfast.rendezvous.tls import ReloadingTls

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_SWEEP_EVERY_S = 15.0
_SILENCE_S = 60.0  # A client that says nothing for so long is gone; agents send heartbeats.
_DESERTED_S = 60.0
_GOODBYE_S = 2.0
_REMEMBERED_CONNECTIONS = 4096  # Of nodes that are not connected now.


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
        self._ticket_key = keys.ticket_key(keys.run_token(owner.token, run_id)) if owner.token else self._secret
        self.machine = Membership(self._loop.time(), memory, term=term)
        self._store = KeyValues(os.urandom(8))
        self._clients: set[Connection] = set()
        self._connections: dict[str, Connection] = {}  # Those of nodes, by their keys.
        # By node id: the key of its last incarnation, and the number of the connection on which that spoke last.
        self._newest: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._commands: deque[protocol.Command] = deque()
        self._is_writing = False
        self._timer: asyncio.TimerHandle | None = None
        self._deserted_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def silence_s(self) -> float:
        settings = self.machine.settings
        return max(_SILENCE_S, 3 * settings.lease_s if settings else 0.0)

    def rejection_of(self, node: protocol.Introduction) -> str:
        """Why a client cannot speak for this node, or nothing. A node id belongs to the node that had it first: who has
        its ticket. A coordinator that has lost its memory knows no node, and hands out new tickets."""
        is_owner = keys.is_same(node.ticket, keys.ticket(self._ticket_key, node.node_id))
        if node.node_id and not is_owner and self.machine.knows(node.node_id):
            return f"the node id {node.node_id!r} is another node's"
        if node.term > max(self.machine.term, protocol.HIGHEST_CLAIM):
            return f"it claims to know of term {node.term}, which no coordinator can have reached"
        return ""

    def attach(self, connection: Connection, node: protocol.Introduction) -> None:
        """The client has proved itself. It is welcome when this coordinator's term is higher than any it has heard."""
        self._clients.add(connection)
        if self._deserted_timer is not None:
            self._deserted_timer.cancel()

        def welcome(term: int) -> None:
            self.machine.raise_term(term - 1)
            ticket = keys.ticket(self._ticket_key, node.node_id) if node.node_id else b""
            connection.send(protocol.Welcome(self.machine.term, self.machine.round, ticket))

        if self.machine.raise_term(node.term):  # At once: rounds that are sealed meanwhile must be later, too.
            self._keeper.raise_term(node.term, welcome)
        else:
            welcome(self.machine.term)

    def detach(self, connection: Connection) -> None:
        """Members may return for a while; after that no node is left to whom the run could matter."""
        if self._is_closed:
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
            after_s = max(self._owner.idle_timeout_s or _DESERTED_S, self.silence_s)
            self._deserted_timer = self._loop.call_later(after_s, self._owner.forget, self)

    def take(self, connection: Connection, message: protocol.ToCoordinator) -> None:
        """A message from a client. One that has not joined or returned may only use the store."""
        match message:
            case protocol.StoreRequest():
                self._answer(self._store.handle(connection, message, self._loop.time()))
                self._arm()
            case protocol.Heartbeat(number):
                connection.send(protocol.HeartbeatAnswer(number))
                if connection.key:
                    self.feed(From(connection.key, message))
            case protocol.Join(facts) | protocol.Return(facts):
                if self._identify(connection, facts):
                    self.feed(From(facts.key, message))
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
        self._newest[facts.node_id] = (facts.key, connection.number)
        self._newest.move_to_end(facts.node_id)
        if self._connections.get(connection.key) is connection:
            del self._connections[connection.key]  # It may be the next incarnation of the same agent.
        if facts.key in self._connections:
            self._connections[facts.key].close()
        connection.key = facts.key
        self._connections[facts.key] = connection
        # Of nodes that are not connected, the last that spoke are remembered.
        while len(self._newest) > len(self._connections) + _REMEMBERED_CONNECTIONS:
            node_id, (key, number) = self._newest.popitem(last=False)
            if key in self._connections:
                self._newest[node_id] = (key, number)
        return True

    # The machine.

    def feed(self, event: protocol.Event) -> None:
        if self._is_closed or not self._keeper.may_serve():
            return
        is_heartbeat = isinstance(event, From) and isinstance(event.message, protocol.Heartbeat)
        try:
            self._commands += self.machine.step(event, self._loop.time())
            self._execute_all()
        finally:
            if not is_heartbeat:  # It only puts deadlines off.
                self._arm()

    def _execute_all(self) -> None:
        """Commands that follow a `Remember` wait until it is written down."""
        while self._commands and not self._is_writing and not self._is_closed:
            self._execute(self._commands.popleft())

    def _execute(self, command: protocol.Command) -> None:
        match command:
            case protocol.Tell(keys, message):
                self._log(keys, message)
                self._send(keys, message)
            case protocol.Remember(memory):
                self._is_writing = True
                self._keeper.remember(self.run_id, replace(memory, ticket_key=self._secret), self._written)
            case protocol.Expel(key, reason):
                logger.info("run %r: %s is out: %s", self.run_id, key, reason)
                self._send((key,), model.Expelled(reason))
                if key in self._connections:
                    self._connections.pop(key).close()  # No heartbeat of it is answered any more.
            case protocol.ForgetRun():
                self._owner.forget(self)
            case _:
                assert_never(command)

    def _written(self) -> None:
        self._is_writing = False
        self._execute_all()

    def _log(self, keys: tuple[str, ...], message: model.Push) -> None:
        whom = keys[0] if len(keys) == 1 else f"{len(keys)} nodes"
        match message:
            case model.Sealed(_, place) if place.rank == 0:
                nodes = "1 node" if place.node_count == 1 else f"{place.node_count} nodes"
                logger.info("run %r: round %d begins with %s", self.run_id, place.round, nodes)
            case model.Stop(round, reason):
                logger.info("run %r: round %d is stopped: %s", self.run_id, round, reason)
            case model.Refused(reason):
                logger.info("run %r: %s is refused: %s", self.run_id, whom, reason)
            case model.Notice(text) | model.StandBy(_, text):
                logger.info("run %r: to %s: %s", self.run_id, whom, text)

    def _send(self, keys: tuple[str, ...], message: model.Push) -> None:
        frame = frames.encode(message)
        for key in keys:
            if key in self._connections:
                self._connections[key].send_frame(frame)

    def _answer(self, answers: Answers) -> None:
        for connection, answer in answers:
            connection.send(answer)

    def _arm(self) -> None:
        """Wake up at the next deadline. A timer that is too early is left alone: it will look again."""
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
        for timer in (self._timer, self._deserted_timer):
            if timer is not None:
                timer.cancel()
        for connection in self._clients:
            connection.close()


class Coordinator:
    """The server. `serve` returns when there is nothing left to do."""

    def __init__(
        self,
        sock: socket.socket,
        keeper: Keeper,
        *,
        token: bytes | None = None,
        tls: ReloadingTls | None = None,
        idle_timeout_s: float | None = 60.0,
        only_run: str | None = None,
    ) -> None:
        """The socket need not listen yet. Without `idle_timeout_s` it serves until it is stopped."""
        self.keeper, self.token, self.tls = keeper, token, tls
        self.idle_timeout_s, self.only_run = idle_timeout_s, only_run
        self.connections: set[Connection] = set()
        self.complaints = Complaints(logger.warning)
        self._sock = sock
        self._runs: dict[str, Run] = {}
        self._over = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    async def serve(self, when_ready: Callable[[], None] = lambda: None) -> None:
        """Raises PortTaken if another process began to listen since the socket was bound."""
        loop = asyncio.get_running_loop()
        numbers = itertools.count(1)
        try:
            self._server = await loop.create_server(
                lambda: Connection(self, next(numbers)), sock=self._sock, backlog=_BACKLOG
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortTaken(*self._sock.getsockname()[:2]) from None
        sweeping = loop.create_task(self._sweep())
        self._watch_idleness()
        when_ready()
        try:
            await self._over.wait()
        finally:
            sweeping.cancel()
            self._server.close()
            for run in self._runs.values():
                run.close()
            for connection in self.connections:
                connection.close()
            ends = loop.time() + _GOODBYE_S  # What is on its way to a client that reads arrives.
            while self.connections and loop.time() < ends:
                await asyncio.sleep(0.01)

    def stop(self) -> None:
        self._over.set()

    def resign(self, reason: str) -> None:
        """Another coordinator may be in office soon: stop listening, tell the nodes, hang up, end."""
        logger.warning("this coordinator steps down: %s", reason)
        if self._server is not None:
            self._server.close()
        for connection in self.connections:
            if connection.run is not None:
                connection.send(model.Resigned())
        self._over.set()

    async def _sweep(self) -> None:
        """Cut off clients that have fallen silent; their machine may be gone without a word."""
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            now = asyncio.get_running_loop().time()
            for connection in self.connections:
                run = connection.run
                if run is not None and now - connection.heard_at > run.silence_s:
                    connection.cut_off(f"was not heard of for {run.silence_s:g} s")

    def run_of(self, run_id: str) -> Run:
        if run_id not in self._runs:
            self._runs[run_id] = Run(run_id, self)
            self._watch_idleness()
        return self._runs[run_id]

    def drop(self, run: Run) -> None:
        """A client looked in, and nothing came of it."""
        del self._runs[run.run_id]
        run.close()
        self._watch_idleness()

    def forget(self, run: Run) -> None:
        """The run is over. Unless it serves until it is stopped, the coordinator ends with its last run."""
        outcome = run.machine.outcome
        logger.info("run %r is over: %s", run.run_id, outcome.reason if outcome else "no node is there any more")
        self.keeper.forget(run.run_id)
        self.drop(run)
        if not self._runs and self.idle_timeout_s is not None:
            self._over.set()

    def _watch_idleness(self) -> None:
        """With no run for a while, end."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if not self._runs and self.idle_timeout_s is not None:
            self._idle_timer = asyncio.get_running_loop().call_later(self.idle_timeout_s, self._over.set)
