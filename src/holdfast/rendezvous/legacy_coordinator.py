"""The coordinator: an asyncio server around `membership`, and around the key-value store, of many runs.

It contains no policy. Messages, closed connections and deadlines become events of a run's machine; the machine's
commands become messages. What a run must not forget is written to a small file before anybody is told of it
(`statefiles`), so a coordinator that is killed and started again goes on where it was.

A connection belongs to one incarnation of one node; if the node connects anew, the older connection is closed and
what still comes from it is dropped. What a client can do to the others, nothing, is the matter of `connections`.

The process ends by itself when its last run is over and everybody has heard, or when nobody has been there for
`idle_timeout_s`. A run that everybody has left is over, too.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import assert_never

from holdfast.rendezvous import messages, statefiles, vocabulary
from holdfast.rendezvous.connections import Complaints, Connection
from holdfast.rendezvous.hosting import PortTaken
from holdfast.rendezvous.keyvalues import Answers, KeyValues
from holdfast.rendezvous.legacy_membership import Membership
from holdfast.rendezvous.messages import encode
from holdfast.rendezvous.statefiles import StateFiles
from holdfast.rendezvous.tls import ReloadingTls
from holdfast.rendezvous.world import NodeFacts

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_SWEEP_EVERY_S = 15.0
_SILENCE_S = 60.0  # Whoever is connected and says nothing for that long is gone; agents send heartbeats.
_DESERTED_S = 60.0
_GOODBYE_S = 2.0


class RunHost:
    """One run: its machine, its store, and the connections of its nodes."""

    def __init__(self, run_id: str, owner: Coordinator) -> None:
        self.run_id = run_id
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._machine = Membership(self._loop.time(), owner.files.recall(run_id))
        self._store = KeyValues(os.urandom(8))
        self._clients: dict[str, Connection] = {}  # Everybody, by the connection's name.
        self._connections: dict[str, Connection] = {}  # Nodes, by their keys.
        self._newest: dict[str, int] = {}  # The number of the connection on which each node spoke last.
        self._timer: asyncio.TimerHandle | None = None
        self._deserted_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def silence_s(self) -> float:
        settings = self._machine.settings
        return max(_SILENCE_S, 3 * settings.lease_s if settings else 0.0)

    @property
    def is_blank(self) -> bool:
        """Whether nothing would be lost if it were forgotten."""
        machine = self._machine
        return machine.round == 0 and machine.outcome is None and not machine.node_count and self._store.is_empty

    @property
    def ending(self) -> str:
        outcome = self._machine.outcome
        return outcome.reason if outcome else "nobody is there any more"

    # Connections.

    def attach(self, connection: Connection) -> None:
        self._clients[connection.name] = connection
        if self._deserted_timer is not None:
            self._deserted_timer.cancel()
            self._deserted_timer = None

    def detach(self, connection: Connection) -> None:
        if self._is_closed:
            return
        self._clients.pop(connection.name, None)
        self._store.drop_client(connection.name)
        if self._connections.get(connection.key) is connection:
            del self._connections[connection.key]
            self.feed(vocabulary.ConnectionClosed(connection.key))
        if not self._clients and not self._is_closed:
            self._be_deserted()

    def _be_deserted(self) -> None:
        """Members may return for a while; after that there is nobody whom the run could matter to."""
        if self.is_blank:
            self._owner.drop(self)
            return
        after_s = max(self._owner.deserted_s, self.silence_s)
        self._deserted_timer = self._loop.call_later(after_s, self._owner.forget, self)

    def take(self, connection: Connection, message: messages.ToCoordinator) -> None:
        """A message from a client. Before it has joined or returned it is nobody, and may only use the store."""
        key = connection.key
        match message:
            case messages.Heartbeat(number):
                connection.send(messages.HeartbeatAnswer(number))
                if key:
                    self.feed(vocabulary.NodeHeard(key))
            case messages.StoreRequest():
                self._answer(self._store.handle(connection.name, message, self._loop.time()))
                self._arm()
            case messages.Join(facts, settings, last_round, replaces, failure, used):
                if self._identify(connection, facts):
                    self.feed(vocabulary.NodeJoined(facts, settings, last_round, replaces, failure, used))
            case messages.Return(facts, settings, place, stage):
                if self._identify(connection, facts):
                    self.feed(vocabulary.NodeReturned(facts, settings, place, stage))
            case messages.Failed(round, failure):
                self.feed(vocabulary.WorkersFailed(key, round, failure))
            case messages.Succeeded(round):
                self.feed(vocabulary.WorkersSucceeded(key, round))
            case messages.Leaving():
                self.feed(vocabulary.NodeLeaving(key))
            case messages.Left():
                self.feed(vocabulary.NodeLeft(key))
            case messages.Close(reason):
                self.feed(vocabulary.CloseRequested(reason))
            case _:
                assert_never(message)

    def _identify(self, connection: Connection, facts: NodeFacts) -> bool:
        """Who speaks here; False if the node has spoken on a newer connection, and this is what it had said before.

        1. The network swallows a node's join; the node hangs up and joins on a new connection,
        2. it is sealed into a world and starts its workers,
        3. the join of step 1 arrives. It says that the node has no workers, which was true then.
        """
        key = facts.key
        if connection.number < self._newest.get(facts.node_id, 0):
            connection.close()
            return False
        self._newest[facts.node_id] = connection.number
        if connection.key and connection.key != key and self._connections.get(connection.key) is connection:
            del self._connections[connection.key]  # The same agent, as its next incarnation.
        older = self._connections.get(key)
        connection.key = key
        self._connections[key] = connection
        if older is not None and older is not connection:
            older.key = ""
            older.close()
        return True

    # The machine.

    def feed(self, event: vocabulary.Event) -> None:
        if self._is_closed:
            return
        try:
            for command in self._machine.step(event, self._loop.time()):
                self._execute(command)
        finally:
            if not isinstance(event, vocabulary.NodeHeard):  # It only puts deadlines off.
                self._arm()

    def _execute(self, command: vocabulary.Command) -> None:
        match command:
            case vocabulary.SealWorld(world):
                logger.info("run %r: round %d sealed with %d nodes", self.run_id, world.round, len(world.members))
                for key, place in zip(world.keys, world.places(), strict=True):
                    self._send([key], messages.Sealed(key, place))
            case vocabulary.TellPlace(key, place):
                self._send([key], messages.Sealed(key, place))
            case vocabulary.StopRound(keys, round, reason, is_hang):
                logger.info("run %r: round %d is stopped: %s", self.run_id, round, reason)
                self._send(keys, messages.Stop(round, reason, is_hang))
            case vocabulary.Refuse(key, reason):
                logger.info("run %r: %s is refused: %s", self.run_id, key, reason)
                self._send([key], messages.Refused(reason))
            case vocabulary.Expel(key, reason):
                logger.info("run %r: %s is out: %s", self.run_id, key, reason)
                self._send([key], messages.Expelled(reason))
            case vocabulary.TellOutcome(keys, outcome):
                self._send(keys, messages.Ended(outcome))
            case vocabulary.ShowProgress(keys, joined, wanted, max_nodes, seconds_left):
                self._send(keys, messages.Progress(joined, wanted, max_nodes, seconds_left))
            case vocabulary.Announce(keys, text):
                whom = f"{keys[0]} is" if len(keys) == 1 else f"{len(keys)} nodes are"
                logger.info("run %r: %s told: %s", self.run_id, whom, text)
                self._send(keys, messages.Notice(text))
            case vocabulary.Remember(memory):
                self._owner.files.remember(self.run_id, memory)
            case vocabulary.ForgetRun():
                self._owner.forget(self)
            case _:
                assert_never(command)

    def _send(self, keys: Iterable[str], message: messages.FromCoordinator) -> None:
        frame = encode(message)
        for key in keys:
            connection = self._connections.get(key)
            if connection is not None:
                connection.send_frame(frame)

    def _answer(self, answers: Answers) -> None:
        for client, answer in answers:
            connection = self._clients.get(client)
            if connection is not None:
                connection.send(answer)

    # Time.

    def _arm(self) -> None:
        """Wake up at the next deadline. A timer that is too early is left alone: it will look again."""
        if self._is_closed:
            return
        deadlines = [self._machine.next_deadline(), self._store.next_deadline()]
        at = min((each for each in deadlines if each is not None), default=None)
        if at is None or (self._timer is not None and self._timer.when() <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        self._answer(self._store.expire(self._loop.time()))
        self.feed(vocabulary.TimePassed())

    def close(self) -> None:
        self._is_closed = True
        for timer in (self._timer, self._deserted_timer):
            if timer is not None:
                timer.cancel()
        for connection in list(self._clients.values()):
            connection.close()


class Coordinator:
    """The server. `serve` returns when there is nothing left to do."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        token: bytes | None = None,
        tls: ReloadingTls | None = None,
        idle_timeout_s: float | None = 60.0,
        state_directory: Path | None = None,
    ) -> None:
        """The socket need not listen yet. With no `idle_timeout_s` it serves until it is stopped."""
        self.token = token
        self.tls = tls
        self.files = StateFiles(state_directory or statefiles.default_directory(), *sock.getsockname()[:2])
        self._sock = sock
        self._idle_timeout_s = idle_timeout_s
        self._runs: dict[str, RunHost] = {}
        self._connections: dict[str, tuple[Connection, RunHost | None]] = {}
        self._numbers = itertools.count(1)
        self._over = asyncio.Event()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._complaints = Complaints(logger.warning)

    @property
    def deserted_s(self) -> float:
        return self._idle_timeout_s or _DESERTED_S

    async def serve(self, when_ready: Callable[[], None] = lambda: None) -> None:
        """Raises PortTaken if somebody else began to listen since the socket was bound."""
        loop = asyncio.get_running_loop()
        server = await self._listen()
        sweeping = loop.create_task(self._sweep())
        self._watch_idleness()
        when_ready()
        try:
            await self._over.wait()
        finally:
            sweeping.cancel()
            server.close()
            await self._hang_up()

    async def _listen(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        try:
            return await loop.create_server(self._connect, sock=self._sock, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortTaken(*self._sock.getsockname()[:2]) from None

    def stop(self) -> None:
        self._over.set()

    async def _hang_up(self) -> None:
        """Close every connection; what is on its way to somebody who reads arrives."""
        for run in list(self._runs.values()):
            run.close()
        for connection, _ in list(self._connections.values()):
            connection.close()
        ends = asyncio.get_running_loop().time() + _GOODBYE_S
        while self._connections and asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(0.01)

    # What connections need.

    def _connect(self) -> Connection:
        return Connection(self, next(self._numbers))

    def came(self, connection: Connection) -> None:
        self._connections[connection.name] = (connection, None)

    def gone(self, connection: Connection) -> None:
        self._connections.pop(connection.name, None)

    def complain(self, about: str, problem: str) -> None:
        self._complaints.add(about, problem, asyncio.get_running_loop().time())

    def enter(self, connection: Connection, run_id: str) -> RunHost:
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = RunHost(run_id, self)
            self._watch_idleness()
        self._connections[connection.name] = (connection, run)
        run.attach(connection)
        return run

    async def _sweep(self) -> None:
        """Cut off whoever was connected and has fallen silent; its machine may be gone without a word."""
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            now = asyncio.get_running_loop().time()
            for connection, run in list(self._connections.values()):
                if run is not None and now - connection.heard_at > run.silence_s:
                    self.complain(connection.peer, f"was not heard of for {run.silence_s:g} s, and is cut off")
                    connection.abort()

    # Runs.

    def drop(self, run: RunHost) -> None:
        """Somebody looked in, and nothing came of it."""
        if self._runs.get(run.run_id) is run:
            del self._runs[run.run_id]
        run.close()
        self._watch_idleness()

    def forget(self, run: RunHost) -> None:
        """The run is over. Unless it serves until it is stopped, the coordinator ends with its last run."""
        logger.info("run %r is over: %s", run.run_id, run.ending)
        self.files.forget(run.run_id)
        self.drop(run)
        if not self._runs and self._idle_timeout_s is not None:
            self._over.set()

    def _watch_idleness(self) -> None:
        """With no run for a while, end."""
        if self._runs or self._idle_timeout_s is None:
            if self._idle_timer is not None:
                self._idle_timer.cancel()
            self._idle_timer = None
        elif self._idle_timer is None:
            self._idle_timer = asyncio.get_running_loop().call_later(self._idle_timeout_s, self._over.set)
