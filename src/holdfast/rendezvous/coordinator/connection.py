"""One client of a coordinator: the handshake, the limits, and the way in and out.

A client that sends junk, sends too much, sends nothing, or does not read what it is sent costs one connection and
nothing else:

* a stranger has `_HANDSHAKE_TIMEOUT_S` to prove itself and to join,
* what a client has sent is taken for a slice of each turn of the loop, a short one for strangers and visitors, of which
  there may be thousands. A client is not read from while much of what it has sent waits,
* a client that does not read its answers is not read from either, and is cut off if what it is sent nevertheless (that
  its round is stopped, say) piles up,
* a client that is not heard of for a long time is cut off by the coordinator's sweep; agents send heartbeats,
* some descriptors stay free for files; beyond them newcomers are told that there are too many connections. The system
  gives the lowest free number, so a high one says how many there are.
"""

from __future__ import annotations

import asyncio
import os
import select
import ssl
from asyncio import sslproto
from typing import TYPE_CHECKING, Any

from holdfast.log import Logger
from holdfast.rendezvous.coordinator.log import shown
from holdfast.rendezvous.coordinator.strangers import descriptor_limit
from holdfast.rendezvous.endpoints import endpoint_text
from holdfast.rendezvous.membership import frames, keys, protocol

if TYPE_CHECKING:
    from holdfast.rendezvous.coordinator.served_run import ServedRun
    from holdfast.rendezvous.coordinator.server import Coordinator

logger = Logger(__name__)

_HANDSHAKE_TIMEOUT_S = 10.0
_GOODBYE_TIMEOUT_S = 5.0
_SLICE_S, _SHORT_SLICE_S = 0.002, 0.0001
_RUN_ID_LIMIT = 1024
_LONGEST_PROBLEM = 900  # In the log.
_TOO_MANY = "this coordinator has too many connections"
_TLS_HELLO = b"\x16\x03"
# asyncio asks for 256 KiB each time that it reads. The C library maps and unmaps pages for as much as that, which takes
# several times as long as the rest of the call.
_READ_BYTES = 1 << 16
# asyncio gives each TLS connection a buffer of that size, filled with zeros. A record has no more than 16 KiB.
sslproto.SSLProtocol.max_size = 1 << 14


class Connection(asyncio.Protocol):
    """`number` counts connections as they were accepted. `run` is there once the client has introduced itself.
    `is_member`: the run's machine knows the node that speaks here. `node_id` is the node that it wants to speak for,
    `key` the incarnation that joined first."""

    run: ServedRun | None = None
    is_member = is_visitor = False
    host = node_id = key = ""
    peer = "a client"
    heard_at = 0.0
    _transport: asyncio.Transport
    _is_closing = False  # By this side.
    _has_peer_closed = False
    _is_congested = False  # The other side does not read.
    _is_waiting = False  # For its turn.
    _is_reading = True
    _has_spoken = False
    _hello: protocol.Hello | None = None
    _task: asyncio.Task[None] | None = None

    def __init__(self, server: Coordinator, number: int) -> None:
        self.number = number
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._frames = frames.Frames(frames.MAX_HANDSHAKE_BYTES)
        self._nonce = os.urandom(protocol.NONCE_BYTES)
        self._limits = server.limits

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # It has one if it is a socket's.
        self.heard_at = self._loop.time()
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer, self.host = endpoint_text(*name[:2]), name[0]
        self._server.connections[self.number] = self
        self._server.strangers.add(self, self.heard_at + _HANDSHAKE_TIMEOUT_S)
        descriptor: int = transport.get_extra_info("socket").fileno()
        if descriptor >= descriptor_limit() - self._limits.spare_descriptors:
            if self._server.tls is None:
                self.send(protocol.Denied(_TOO_MANY, is_passing=True))
            self.refuse(f"is turned away: {_TOO_MANY}")
        elif self._server.tls is None:
            self._greet()
        elif _has_left(descriptor):
            self.refuse("does not get a TLS connection: it went away")
        else:
            transport.pause_reading()
            self._task = self._loop.create_task(self._secure(self._server.tls.context()))

    def data_received(self, data: bytes) -> None:
        if not self._has_spoken and self._server.tls is None and data.startswith(_TLS_HELLO):
            self.refuse("speaks TLS, this coordinator does not")
            return
        self._has_spoken = True
        self._frames.feed(data)
        if not self._is_waiting:
            self._work()
        self._note_held()

    def eof_received(self) -> None:
        """What the peer has said before is taken, though it may not be its turn: its last word may be a leave."""
        while self._is_waiting:
            self._work()
        self._has_peer_closed = not self._is_closing

    def connection_lost(self, error: Exception | None) -> None:
        """The peer has closed it only if an end or a reset came before this side closed it. All else is doubtful."""
        by_peer = self._has_peer_closed or (isinstance(error, ConnectionResetError) and not self._is_closing)
        self._is_closing = True
        self._server.lose(self)
        run, self.run = self.run, None
        if run is not None:
            run.closed(self, by_peer=by_peer)

    def pause_writing(self) -> None:
        self._is_congested = True
        self._note_held()

    def resume_writing(self) -> None:
        self._is_congested = False
        if not self._is_closing and not self._is_waiting:
            self._work()
        self._note_held()

    @property
    def held_bytes(self) -> int:
        return self._frames.held_bytes

    def _note_held(self) -> None:
        """It is not read from while enough waits that can be taken, or what it is sent is not read."""
        if not self.is_member:
            self._server.strangers.note_held(self)
        if self._transport.is_closing():
            return
        may_read = not self._is_congested and (not self._is_waiting or self.held_bytes <= self._limits.waiting_bytes)
        if may_read != self._is_reading:
            self._is_reading = may_read
            if may_read:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _work(self) -> None:
        """Take messages, as long as the other side takes the answers, and leave the rest to the next turn."""
        self._is_waiting, clock = False, self._server.clock
        ends_at = clock() + (_SLICE_S if self.is_member else _SHORT_SLICE_S)
        try:
            while not self._is_closing and not self._is_congested and (message := self._frames.next()) is not None:
                self.heard_at = clock()
                self._take(message)
                if self._frames.held_bytes and clock() >= ends_at:
                    self._is_waiting = True
                    self._loop.call_soon(self._next_turn)
                    return
        except frames.SealBroken as error:
            wrong_token = "its token is not the one of this coordinator"
            if self.run is None:
                self._server.note_refusal(self._hello, self.peer, wrong_token)
            self.refuse(f"is turned away: {wrong_token}" if self.run is None else str(error))
        except frames.Malformed as error:
            self.refuse(f"sent junk: {error}")
        except Exception:
            logger.exception("serving %s failed", self.peer)
            self.abort()

    def _next_turn(self) -> None:
        if self._is_waiting:
            self._work()
            self._note_held()

    def _take(self, message: object) -> None:
        if self.run is not None:
            self.run.take(self, message)  # type: ignore[arg-type]  # the decoder lets nothing else through
        elif isinstance(message, protocol.Hello) and self._hello is None:
            self._meet(message)
        elif isinstance(message, protocol.Introduction) and self._hello is not None:
            self._admit(message, self._hello)
        else:
            self.refuse(f"sent {type(message).__name__} where a hello was expected")

    # The handshake.

    async def _secure(self, tls: ssl.SSLContext) -> None:
        limit_s = _HANDSHAKE_TIMEOUT_S
        try:
            secured = await self._loop.start_tls(
                self._transport, self, tls, server_side=True, ssl_handshake_timeout=limit_s, ssl_shutdown_timeout=1.0
            )
        except OSError as error:
            reason = getattr(error, "reason", "") or str(error) or "it went away"
            self.refuse(f"does not get a TLS connection: {reason}")
            secured = None
        if secured is None or self._is_closing:
            self.connection_lost(None)  # asyncio does not call this for one that was never secured.
        else:
            self._transport = secured
            self._greet()

    def _greet(self) -> None:
        wants_token = self._server.token is not None
        self.send(protocol.Challenge(protocol.MAJOR, self._nonce, wants_token, protocol.MINOR))

    def _meet(self, hello: protocol.Hello) -> None:
        token = self._server.token
        self._hello = hello
        if problem := rejection_of(hello, token is not None):
            self._server.note_refusal(hello, self.peer, problem)
            self.deny(protocol.Denied(problem))
            return
        if (token is None or keys.is_run_token(token)) and (denied := self._server.denial_of(hello.run_id)):
            self.deny(denied)
            return
        host, port = self._transport.get_extra_info("sockname")[:2]
        own = endpoint_text(host.removeprefix("::ffff:"), port)  # An IPv4 address of a socket for both.
        if hello.endpoint not in ("", own):
            seen = f"dialled {hello.endpoint} and arrived at {own}: there is a relay or address translation between"
            self._complain(seen)
        if token is not None:
            nonces, key = (self._nonce, hello.nonce), keys.run_token(token, hello.run_id)
            self._frames.seal(*keys.connection_keys(key, nonces, hello.run_id, hello.endpoint))
            self.send(protocol.Proved())

    def _admit(self, introduction: protocol.Introduction, hello: protocol.Hello) -> None:
        """The client has proved the token, if there is one, so it may be told which run is served here."""
        admitted = self._server.admit(introduction, hello.run_id, is_proved=self._server.token is not None)
        if isinstance(admitted, protocol.Denied):
            self.deny(admitted)
            return
        self._frames.expect(frames.UPWARD)
        self.run, self.node_id = admitted, introduction.node_id
        admitted.opened(self, introduction)

    def deny(self, denied: protocol.Denied) -> None:
        self.send(denied)
        self.refuse(f"is turned away: {denied.reason}")

    def give_up(self) -> None:
        """The time for the handshake and the join is over."""
        if self.run is not None:
            self.refuse(f"has not joined within {_HANDSHAKE_TIMEOUT_S:g} s")
            return
        wants = " (this coordinator speaks TLS)" if self._server.tls is not None else ""
        silent = f"said nothing for {_HANDSHAKE_TIMEOUT_S:g} s{wants}"
        self.refuse("was too slow to say hello" if self._has_spoken else silent)

    # The way out.

    def send(self, message: Any) -> None:
        if not self._transport.is_closing():
            self.send_frame(frames.encode(message))

    def send_frame(self, frame: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(self._frames.sealed(frame))
        if self._is_congested and self._transport.get_write_buffer_size() > self._limits.unread_bytes:
            self.cut_off("does not read what it is sent")

    @property
    def name(self) -> str:
        """For the log."""
        return f"{shown(self.key or self.node_id)} at {self.peer}"

    def _complain(self, problem: str) -> None:
        self._server.complaints.say(f"{self.peer} {shown(problem, _LONGEST_PROBLEM)}")

    def refuse(self, problem: str) -> None:
        if not self._is_closing:
            if problem:
                self._complain(problem)
            self.close()

    def cut_off(self, problem: str) -> None:
        self._complain(f"{problem}, and is cut off")
        self.abort()

    def close(self) -> None:
        """Send what is to be sent, if the other side still reads, and hang up."""
        self._is_closing = True
        if not self._transport.is_closing():
            has_unsent = self._transport.get_write_buffer_size() > 0
            self._transport.close()
            if has_unsent:
                self._loop.call_later(_GOODBYE_TIMEOUT_S, self._transport.abort)

    def abort(self) -> None:
        self._is_closing = True
        self._transport.abort()


def _has_left(descriptor: int) -> bool:
    """Whether the peer has closed the connection while it waited to be accepted. Strangers that come and go faster than
    they can be accepted must not cost a TLS connection each: a node that comes after them would wait for all of it."""
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    return bool(poller.poll(0))


def rejection_of(hello: protocol.Hello, wants_token: bool) -> str:
    """Why a client that says this hello is not let in; or nothing."""
    if hello.version != protocol.MAJOR:
        return f"it speaks version {hello.version} of the protocol, this coordinator speaks {protocol.MAJOR}"
    if not hello.run_id or len(hello.run_id) > _RUN_ID_LIMIT:
        return f"a run id has 1 to {_RUN_ID_LIMIT} characters, not {len(hello.run_id)}"
    if hello.has_token and not wants_token:
        return "it brings a token, but this coordinator was started without one"
    if wants_token and not hello.has_token:
        return "this coordinator wants a token, and it brings none"
    return ""
