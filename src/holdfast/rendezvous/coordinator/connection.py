"""One client of a coordinator: the handshake, the limits, and the way in and out.

A client that sends junk, sends too much, sends nothing, or does not read what it is sent costs one connection and
nothing else:

* a stranger has `_HANDSHAKE_TIMEOUT_S` to prove itself and may send a few kilobytes until then,
* a client that does not read its answers is not read from either, and is cut off if what it is sent nevertheless (that
  its round is stopped, say) piles up,
* a client that is not heard of for a long time is cut off by the coordinator's sweep; agents send heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.rendezvous.endpoints import endpoint_text
from holdfast.rendezvous.membership import frames, protocol
from holdfast.rendezvous.membership.frames import Frames, Malformed, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.rendezvous.tls import ReloadingTls

logger = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S = 10.0
_GOODBYE_TIMEOUT_S = 5.0
_UNREAD_LIMIT_BYTES = 4 << 20
_RUN_ID_LIMIT = 1024
_TLS_HELLO = b"\x16\x03"


class Run(Protocol):
    """The run that a client takes part in."""

    def take(self, connection: Connection, message: protocol.ToCoordinator) -> None: ...

    def detach(self, connection: Connection) -> None: ...


class Server(Protocol):
    """The coordinator, as a connection sees it."""

    token: bytes | None
    tls: ReloadingTls | None

    def may_serve(self) -> bool:
        """Whether this coordinator may still say anything. Asked before every answer."""

    def rejection_of(self, run_id: str) -> str:
        """Why the run cannot be served here; or nothing."""

    def enter(self, connection: Connection, hello: protocol.Hello, welcome: Callable[[int, int], None]) -> Run:
        """The client has proved itself. `welcome` is called with the term and the last round of its run."""

    def complain(self, about: str, problem: str) -> None: ...

    def came(self, connection: Connection) -> None: ...

    def gone(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """`key` is the node that speaks here, once it has said so; `number` counts connections as they were accepted."""

    def __init__(self, server: Server, number: int) -> None:
        self.number = number
        self.name = f"connection {number}"
        self.key = ""
        self.heard_at = 0.0
        self.peer = "a client"
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = Frames(frames.MAX_HANDSHAKE_BYTES)
        self._nonce = os.urandom(protocol.NONCE_BYTES)
        self._run: Run | None = None
        self._is_closing = False
        self._is_congested = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_spoken = False

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.peer = _peer_of(transport)
        self.heard_at = self._loop.time()
        _send_at_once(transport)
        self._server.came(self)
        self._timer = self._loop.call_later(_HANDSHAKE_TIMEOUT_S, self._too_slow)
        if self._server.tls is None:
            self._greet()
        else:
            transport.pause_reading()
            self._task = self._loop.create_task(self._secure(transport, self._server.tls.context()))

    def data_received(self, data: bytes) -> None:
        if not self._has_spoken and self._server.tls is None and data.startswith(_TLS_HELLO):
            self._refuse("speaks TLS, this coordinator does not")
            return
        self._has_spoken = True
        self._frames.feed(data)
        self._take_all()

    def _take_all(self) -> None:
        """Every message that has come, as long as the other side takes the answers."""
        try:
            while not self._is_closing and not self._is_congested and (message := self._frames.next()) is not None:
                if not self._server.may_serve():
                    return
                self._take(message)
        except Malformed as error:
            self._refuse(f"sent junk: {error}")
        except Exception:
            logger.exception("serving %s failed", self.peer)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        run, self._run = self._run, None
        self._server.gone(self)
        if run is not None:
            run.detach(self)

    def pause_writing(self) -> None:
        self._is_congested = True
        if self._transport is not None and not self._is_closing:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_congested = False
        if self._transport is not None and not self._is_closing:
            self._transport.resume_reading()
            self._take_all()

    # The handshake.

    async def _secure(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        limit_s = _HANDSHAKE_TIMEOUT_S
        try:
            secured = await self._loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=limit_s, ssl_shutdown_timeout=1.0
            )
        except OSError as error:
            reason = getattr(error, "reason", "") or str(error) or "it went away"
            self._refuse(f"does not get a TLS connection: {reason}")
            self.connection_lost(error)  # asyncio does not call this for one that was never secured.
        else:
            if secured is None or self._is_closing:
                self.connection_lost(None)
                return
            self._transport = secured
            self._greet()

    def _greet(self) -> None:
        wants_token = self._server.token is not None
        self.send(protocol.Challenge(protocol.MAJOR, self._nonce, wants_token, protocol.MINOR))

    def _take(self, message: object) -> None:
        self.heard_at = self._loop.time()
        if self._run is not None:
            self._run.take(self, message)  # type: ignore[arg-type]  # the decoder lets nothing else through
        elif isinstance(message, protocol.Hello):
            self._meet(message)
        else:
            self._refuse(f"sent {type(message).__name__} where a hello was expected")

    def _meet(self, hello: protocol.Hello) -> None:
        token = self._server.token
        problem = rejection_of(hello, token, self._nonce) or self._server.rejection_of(hello.run_id)
        if problem:
            self.send(protocol.Denied(problem))
            self._refuse(f"is turned away: {problem}")
            return
        if self._timer is not None:
            self._timer.cancel()
        proof = b"" if token is None else frames.prove(token, b"coordinator", hello.run_id, hello.nonce, self._nonce)
        self._frames.expect(frames.UPWARD)
        self._run = self._server.enter(
            self, hello, lambda term, last_round: self.send(protocol.Welcome(proof, term, last_round))
        )

    def _too_slow(self) -> None:
        wants = " (this coordinator speaks TLS)" if self._server.tls is not None else ""
        is_silent = not self._has_spoken
        said = f"said nothing for {_HANDSHAKE_TIMEOUT_S:g} s{wants}" if is_silent else "was too slow to say hello"
        self._refuse(said)

    def _refuse(self, problem: str) -> None:
        if not self._is_closing:
            self._server.complain(self.peer, problem)
            self.close()

    # The way out.

    def send(self, message: Any) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(frame)
        if transport.get_write_buffer_size() > _UNREAD_LIMIT_BYTES:
            self._server.complain(self.peer, "does not read what it is sent, and is cut off")
            self.abort()

    def close(self) -> None:
        """Send what is to be sent, if the other side still reads, and hang up."""
        self._is_closing = True
        transport = self._transport
        if transport is not None and not transport.is_closing():
            has_unsent = transport.get_write_buffer_size() > 0
            transport.close()
            if has_unsent:
                self._loop.call_later(_GOODBYE_TIMEOUT_S, transport.abort)

    def abort(self) -> None:
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()


def rejection_of(hello: protocol.Hello, token: bytes | None, nonce: bytes) -> str:
    """Why a client that says this hello, after it was sent this nonce, is not let in; or nothing."""
    if hello.version != protocol.MAJOR:
        return f"it speaks version {hello.version} of the protocol, this coordinator speaks {protocol.MAJOR}"
    if not hello.run_id or len(hello.run_id) > _RUN_ID_LIMIT:
        return f"a run id has 1 to {_RUN_ID_LIMIT} characters, not {len(hello.run_id)}"
    if token is None:
        return "it brings a token, but this coordinator was started without one" if hello.proof else ""
    if not hello.proof:
        return "this coordinator wants a token, and it brings none"
    expected = frames.prove(token, b"agent", hello.run_id, nonce, hello.nonce)
    return "" if frames.is_proof(hello.proof, expected) else "its token is not the one of this coordinator"


def _send_at_once(transport: asyncio.Transport) -> None:
    """Small messages are not kept back for others. asyncio would see to it, but not for a socket that it was handed."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _peer_of(transport: asyncio.Transport) -> str:
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return "a client"
    return endpoint_text(*name[:2])


class Complaints:
    """What is said about strangers: the same about the same host once a minute, and not too much about all."""

    def __init__(self, say: Callable[[str], None], most_in_a_minute: int = 30) -> None:
        self._say = say
        self._most = most_in_a_minute
        self._minute = -1
        self._said: set[tuple[str, str]] = set()
        self._unsaid = 0

    def add(self, about: str, problem: str, now: float) -> None:
        minute = int(now // 60)
        if minute != self._minute:
            if self._unsaid:
                self._say(f"{self._unsaid} more connections were closed for such reasons")
            self._minute, self._unsaid = minute, 0
            self._said.clear()
        what = (about.rpartition(":")[0], problem)
        if what in self._said or len(self._said) >= self._most:
            self._unsaid += 1
            return
        self._said.add(what)
        self._say(f"{about} {problem}")
