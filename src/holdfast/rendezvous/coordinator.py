"""The coordinator: an asyncio server around `membership`, and around the key-value store, of many runs.

It contains no policy. Messages, closed connections and deadlines become events of a run's machine; the machine's
commands become messages. What a run must not forget is written to a small file before anybody is told of it, so a
coordinator that is killed and started again goes on where it was.

A client that sends junk, sends too much, sends nothing, or does not read what it is sent costs one connection and
nothing else. A connection belongs to one incarnation of one node; if the node connects anew, the older connection
is closed and what still comes from it is dropped.

The process ends by itself when its last run is over and everybody has heard, or when nobody has been there for
`idle_timeout_s`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import ssl
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import assert_never

import msgspec

from holdfast.rendezvous import messages, vocabulary
from holdfast.rendezvous.keyvalues import KeyValues
from holdfast.rendezvous.membership import Membership
from holdfast.rendezvous.messages import PROTOCOL_VERSION, Frames, Malformed, StoreAnswer, encode
from holdfast.rendezvous.vocabulary import Memory

logger = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S = 5.0
_UNREAD_LIMIT_BYTES = 16 << 20  # A client that lets more than this pile up does not read.
_READ_BYTES = 1 << 16
_RUN_ID_LIMIT = 1024


class Connection:
    """One client. `key` is the node that speaks here, once it has said so."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.key = ""

    @property
    def peer(self) -> str:
        name = self.writer.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a client"

    def send(self, message: msgspec.Struct) -> None:
        if self.writer.is_closing():
            return
        self.writer.write(encode(message))
        transport = self.writer.transport
        if transport.get_write_buffer_size() > _UNREAD_LIMIT_BYTES:
            logger.warning("%s does not read what it is sent: its connection is closed", self.peer)
            transport.abort()

    def close(self) -> None:
        self.writer.close()


class RunHost:
    """One run: its machine, its store, and the connections of its nodes."""

    def __init__(self, run_id: str, owner: Coordinator, now: float) -> None:
        self.run_id = run_id
        self._owner = owner
        self._machine = Membership(now, owner.recall(run_id))
        self._store = KeyValues()
        self._connections: dict[str, Connection] = {}
        self._anonymous: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def is_deserted(self) -> bool:
        return not self._connections and not self._anonymous

    def attach(self, connection: Connection) -> None:
        self._anonymous.add(connection)

    def detach(self, connection: Connection) -> None:
        self._anonymous.discard(connection)
        self._store.drop_client(str(id(connection)))
        if self._connections.get(connection.key) is connection:
            del self._connections[connection.key]
            self.feed(vocabulary.ConnectionClosed(connection.key))
        else:
            self._arm()

    def take(self, connection: Connection, message: messages.ToCoordinator) -> None:
        """A message from a client. Before it has joined or returned it is nobody, and may only use the store."""
        key = connection.key
        match message:
            case messages.StoreRequest():
                self._answer(self._store.handle(str(id(connection)), message, self._loop.time()))
                self._arm()
            case messages.Join(facts, settings, last_round, replaces):
                self._identify(connection, facts.key)
                self.feed(vocabulary.NodeJoined(facts, settings, last_round, replaces))
            case messages.Return(facts, settings, place, stage):
                self._identify(connection, facts.key)
                self.feed(vocabulary.NodeReturned(facts, settings, place, stage))
            case messages.Heartbeat(number):
                connection.send(messages.HeartbeatAnswer(number))
                if key:
                    self.feed(vocabulary.NodeHeard(key))
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

    def _identify(self, connection: Connection, key: str) -> None:
        if connection.key and connection.key != key and self._connections.get(connection.key) is connection:
            del self._connections[connection.key]  # The same agent, as its next incarnation.
        older = self._connections.get(key)
        connection.key = key
        self._connections[key] = connection
        self._anonymous.discard(connection)
        if older is not None and older is not connection:
            older.key = ""
            older.close()

    def feed(self, event: vocabulary.Event) -> None:
        for command in self._machine.step(event, self._loop.time()):
            self._execute(command)
        self._arm()

    def _execute(self, command: vocabulary.Command) -> None:
        match command:
            case vocabulary.SealWorld(world):
                logger.info("run %s: round %d sealed with %d nodes", self.run_id, world.round, len(world.members))
                for key, place in zip(world.keys, world.places(), strict=True):
                    self._send([key], messages.Sealed(key, place))
            case vocabulary.StopRound(keys, round, reason):
                logger.info("run %s: round %d is stopped: %s", self.run_id, round, reason)
                self._send(keys, messages.Stop(round, reason))
            case vocabulary.Refuse(key, reason):
                logger.info("run %s: %s is refused: %s", self.run_id, key, reason)
                self._send([key], messages.Refused(reason))
            case vocabulary.Expel(key, reason):
                logger.info("run %s: %s is out: %s", self.run_id, key, reason)
                self._send([key], messages.Expelled(reason))
            case vocabulary.TellOutcome(keys, outcome):
                self._send(keys, messages.Ended(outcome))
            case vocabulary.ShowProgress(keys, joined, wanted, max_nodes, seconds_left):
                self._send(keys, messages.Progress(joined, wanted, max_nodes, seconds_left))
            case vocabulary.Remember(memory):
                self._owner.remember(self.run_id, memory)
            case vocabulary.ForgetRun():
                self._owner.forget(self.run_id)
            case _:
                assert_never(command)

    def _send(self, keys: Iterable[str], message: messages.FromCoordinator) -> None:
        for key in keys:
            connection = self._connections.get(key)
            if connection is not None:
                connection.send(message)

    def _answer(self, answers: list[tuple[str, StoreAnswer]]) -> None:
        if not answers:
            return
        clients = {str(id(each)): each for each in (*self._connections.values(), *self._anonymous)}
        for client, answer in answers:
            if client in clients:
                clients[client].send(answer)

    def _arm(self) -> None:
        """Wake up at the next deadline of the machine or the store."""
        deadlines = [self._machine.next_deadline(), self._store.next_deadline()]
        at = min((each for each in deadlines if each is not None), default=None)
        if self._timer is not None:
            if at is not None and self._timer.when() == at and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer = self._loop.call_at(at, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        self._answer(self._store.expire(self._loop.time()))
        self.feed(vocabulary.TimePassed())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for connection in (*self._connections.values(), *self._anonymous):
            connection.close()


class Coordinator:
    """The server. `serve` returns when there is nothing left to do."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        token: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        idle_timeout_s: float | None = 60.0,
        state_directory: Path | None = None,
    ) -> None:
        self._sock = sock
        self._token = token
        self._tls = tls
        self._idle_timeout_s = idle_timeout_s
        self._port = sock.getsockname()[1]
        self._states = state_directory or default_state_directory()
        self._runs: dict[str, RunHost] = {}
        self._over = asyncio.Event()
        self._has_served = False
        self._idle_timer: asyncio.TimerHandle | None = None

    async def serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._sock, ssl=self._tls, backlog=4096)
        self._watch_idleness()
        async with server:
            await self._over.wait()
        for run in list(self._runs.values()):
            run.close()

    def stop(self) -> None:
        self._over.set()

    # Connections.

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        run: RunHost | None = None
        try:
            frames = Frames(messages.Handshake)
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                run = await self._shake_hands(reader, connection, frames)
            if run is not None:
                await self._listen(reader, connection, frames, run)
        except Malformed as error:
            logger.warning("%s sent junk and is disconnected: %s", connection.peer, error)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ssl.SSLError):
            pass  # It went away, or never said a word.
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("serving %s failed", connection.peer)
        finally:
            if run is not None:
                run.detach(connection)
            connection.close()
            self._watch_idleness()

    async def _shake_hands(
        self, reader: asyncio.StreamReader, connection: Connection, frames: Frames
    ) -> RunHost | None:
        nonce = os.urandom(32)
        connection.send(messages.Challenge(PROTOCOL_VERSION, nonce, self._token is not None))
        hello = await self._next_message(reader, frames)
        if not isinstance(hello, messages.Hello):
            return None
        problem = self._objection(hello, nonce)
        if problem:
            logger.warning("%s is turned away: %s", connection.peer, problem)
            connection.send(messages.Denied(problem))
            await connection.writer.drain()
            return None
        proof = b""
        if self._token is not None:
            proof = messages.prove(self._token, b"coordinator", hello.run_id, hello.nonce, nonce)
        connection.send(messages.Welcome(proof))
        frames.expect(messages.ToCoordinator)
        run = self._run(hello.run_id)
        run.attach(connection)
        return run

    def _objection(self, hello: messages.Hello, nonce: bytes) -> str:
        if hello.version != PROTOCOL_VERSION:
            return f"it speaks version {hello.version} of the protocol, this coordinator speaks {PROTOCOL_VERSION}"
        if not hello.run_id or len(hello.run_id) > _RUN_ID_LIMIT:
            return f"a run id has 1 to {_RUN_ID_LIMIT} characters, not {len(hello.run_id)}"
        if self._token is None:
            return "it brings a token, but this coordinator was started without one" if hello.proof else ""
        if not hello.proof:
            return "this coordinator wants a token, and it brings none"
        expected = messages.prove(self._token, b"agent", hello.run_id, nonce, hello.nonce)
        return "" if messages.is_proof(hello.proof, expected) else "its token is not the one of this coordinator"

    async def _next_message(self, reader: asyncio.StreamReader, frames: Frames) -> object | None:
        while (message := frames.next()) is None:
            data = await reader.read(_READ_BYTES)
            if not data:
                return None
            frames.feed(data)
        return message

    async def _listen(self, reader: asyncio.StreamReader, connection: Connection, frames: Frames, run: RunHost) -> None:
        while (message := await self._next_message(reader, frames)) is not None:
            run.take(connection, message)  # type: ignore[arg-type]  # the decoder lets nothing else through

    # Runs.

    def _run(self, run_id: str) -> RunHost:
        self._has_served = True
        if run_id not in self._runs:
            self._runs[run_id] = RunHost(run_id, self, asyncio.get_running_loop().time())
        return self._runs[run_id]

    def _state_file(self, run_id: str) -> Path:
        return self._states / f"{self._port}-{hashlib.sha256(run_id.encode()).hexdigest()[:16]}.json"

    def recall(self, run_id: str) -> Memory | None:
        """What an earlier coordinator on this port wrote down about the run."""
        try:
            data = self._state_file(run_id).read_bytes()
            return msgspec.json.decode(data, type=Memory)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("what was written down about run %s cannot be read: %s", run_id, error)
            return Memory()

    def remember(self, run_id: str, memory: Memory) -> None:
        path = self._state_file(run_id)
        try:
            self._states.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(msgspec.json.encode(memory))
            temporary.replace(path)
        except OSError as error:
            logger.warning("cannot write down the state of run %s (%s): %s", run_id, path, error)

    def forget(self, run_id: str) -> None:
        run = self._runs.pop(run_id, None)
        if run is not None:
            run.close()
        self._state_file(run_id).unlink(missing_ok=True)
        if not self._runs and self._idle_timeout_s is not None:
            self._over.set()

    def _watch_idleness(self) -> None:
        """If nobody is there for a while, end. A run that everybody has left is over."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        is_deserted = all(run.is_deserted for run in self._runs.values())
        if is_deserted and self._idle_timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(self._idle_timeout_s, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if all(run.is_deserted for run in self._runs.values()):
            for run_id in list(self._runs):
                self.forget(run_id)
            self._over.set()


def default_state_directory() -> Path:
    """Private to the user, on the host where the coordinator runs; it need not survive a reboot."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"holdfast-{os.getuid()}"
