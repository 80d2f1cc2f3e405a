"""One client of a coordinator: the handshake, the limits, and the way in and out.

A client that sends junk, sends too much, sends nothing, or does not read what it is sent costs one connection and
nothing else:

* a stranger has `_HANDSHAKE_TIMEOUT_S` to prove itself and may send a few kilobytes until then,
* what a client sends is taken in turns with what others send (`turns`), and not faster than `limits` allows; it is not
  read from while it waits,
* a client that does not read its answers is not read from either, and is cut off if what it is sent nevertheless (that
  its round is stopped, say) piles up,
* a client that is not heard of for a long time is cut off by the coordinator's sweep; agents send heartbeats.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from asyncio import sslproto
from typing import TYPE_CHECKING, Any

from holdfast.log import Logger
from holdfast.rendezvous.coordinator.limits import Bucket
from holdfast.rendezvous.endpoints import endpoint_text
from holdfast.rendezvous.membership import frames, keys, protocol

if TYPE_CHECKING:
    from holdfast.rendezvous.coordinator.run import Run
    from holdfast.rendezvous.coordinator.server import Coordinator

logger = Logger(__name__)

_HANDSHAKE_TIMEOUT_S = 10.0
_GOODBYE_TIMEOUT_S = 5.0
_UNREAD_LIMIT_BYTES = 4 << 20
_RUN_ID_LIMIT = 1024
_BEHIND_S = 0.01
_TLS_HELLO = b"\x16\x03"
# asyncio asks for 256 KiB each time that it reads. The C library maps and unmaps pages for as much as that, which takes
# several times as long as the rest of the call.
_READ_BYTES = 1 << 16
# asyncio gives each TLS connection a buffer of that size, filled with zeros. A record has no more than 16 KiB.
sslproto.SSLProtocol.max_size = 1 << 14


class Connection(asyncio.Protocol):
    """`number` counts connections as they were accepted. `run` is that of a client that has proved itself. `node_id` is
    the node that it speaks for, `key` that node's incarnation once it has joined or returned. `lines` counts what the
    log says about it; `audited` is the key of which it says that it joined. `minor` is the version that it speaks."""

    run: Run | None = None
    key = node_id = audited = host = ""
    peer = "a client"
    heard_at = 0.0
    lines = minor = 0
    is_visitor = False
    _transport: asyncio.Transport
    _uncharged_bytes = 0
    _is_closing = False
    _is_congested = False  # The other side does not read.
    _is_waiting = False  # For its turn.
    _is_resting = False  # It was too fast.
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
        self._turns, self._share = server.turns, server.strangers.share
        self._clock, self._limits = server.clock, server.limits
        self._rate = Bucket(self._limits.bytes_a_second, self._limits.bytes_a_second, self._clock)

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # It has one if it is a socket's.
        self.heard_at = self._loop.time()
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer, self.host = endpoint_text(*name[:2]), name[0]
        self._server.connections.add(self)
        self._server.strangers.add(self, self.heard_at + _HANDSHAKE_TIMEOUT_S)
        if self._server.tls is None:
            self._greet()
        else:
            transport.pause_reading()
            self._task = self._loop.create_task(self._secure(self._server.tls.context()))

    def data_received(self, data: bytes) -> None:
        if not self._has_spoken and self._server.tls is None and data.startswith(_TLS_HELLO):
            self._refuse("speaks TLS, this coordinator does not")
            return
        self._has_spoken = True
        self._frames.feed(data)
        self._uncharged_bytes += len(data)
        if self.run is None and self._frames.held_bytes > self._limits.stranger_bytes:
            self._refuse("sent too much before it was let in")
        elif self._is_waiting or self._is_resting:
            self._note_held()
        else:
            self._offer()

    @property
    def held_bytes(self) -> int:
        return self._frames.held_bytes

    def _offer(self) -> None:
        if not self._turns.offer(self._share, self):
            self._is_waiting = True
            self._note_held()

    def take_turn(self, now: float, ends_at: float) -> None:
        """Every message that has come, until that time, and as long as the other side takes the answers."""
        count, run = 0, self.run
        self._is_waiting = False
        try:
            while not (self._is_closing or self._is_congested or (run is not None and run.is_behind)):
                if (message := self._frames.next()) is None:
                    break
                if not self._server.keeper.may_serve():
                    return
                self.heard_at = now
                if run is not None:
                    run.take(self, message)  # type: ignore[arg-type]  # the decoder lets nothing else through
                else:
                    self._take_of_stranger(message)
                    run = self.run
                count += 1
                if (now := self._clock()) >= ends_at:
                    break
        except frames.SealBroken as error:
            wrong_token = "its token is not the one of this coordinator"
            if self.run is None:
                self._note_refusal(wrong_token)
            self._refuse(f"is turned away: {wrong_token}" if self.run is None else str(error))
        except frames.Malformed as error:
            self._refuse(f"sent junk: {error}")
        except Exception:
            logger.exception("serving %s failed", self.peer)
            self.abort()
        if self._is_closing:
            return
        owed_s = self._rate.owed_s(count * self._limits.message_bytes + self._uncharged_bytes)
        self._uncharged_bytes = 0
        if run is not None and run.is_behind:
            owed_s = max(owed_s, _BEHIND_S)
        if owed_s:
            self._is_resting = True
            self._loop.call_later(owed_s, self._rested)
        elif now >= ends_at and self._frames.held_bytes and not self._is_congested:
            self._is_waiting = True
            self._turns.wait(self._share, self)
        if not self._is_reading or self._frames.held_bytes:
            self._note_held()

    def _take_of_stranger(self, message: object) -> None:
        if isinstance(message, protocol.Hello) and self._hello is None:
            self._meet(message)
        elif isinstance(message, protocol.Introduction) and self._hello is not None:
            self._admit(message, self._hello.run_id)
        else:
            self._refuse(f"sent {type(message).__name__} where a hello was expected")

    def _rested(self) -> None:
        self._is_resting = False
        self._go_on()

    def _go_on(self) -> None:
        if not self._is_closing and not self._is_waiting and not self._is_resting:
            self._offer()
            self._note_held()

    def _note_held(self) -> None:
        """It is not read from while enough waits that can be taken, or what it is sent is not read."""
        self._server.held.note(self)
        may_read = not (self._is_congested or self._is_resting) and (
            not self._is_waiting or self.held_bytes <= self._limits.waiting_bytes
        )
        if may_read != self._is_reading and not self._transport.is_closing():
            self._is_reading = may_read
            if may_read:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closing = True
        self._server.connections.discard(self)
        self._server.strangers.discard(self)
        self._server.held.drop(self)
        self._server.unsent.drop(self)
        run, self.run = self.run, None
        if self.is_visitor:
            self._server.visitor_count -= 1
        if run is not None:
            run.detach(self)

    def pause_writing(self) -> None:
        self._is_congested = True
        self._note_held()

    def resume_writing(self) -> None:
        self._is_congested = False
        self._server.unsent.note(self)
        self._go_on()

    # The handshake.

    async def _secure(self, tls: ssl.SSLContext) -> None:
        limit_s = _HANDSHAKE_TIMEOUT_S
        try:
            secured = await self._loop.start_tls(
                self._transport, self, tls, server_side=True, ssl_handshake_timeout=limit_s, ssl_shutdown_timeout=1.0
            )
        except OSError as error:
            reason = getattr(error, "reason", "") or str(error) or "it went away"
            self._refuse(f"does not get a TLS connection: {reason}")
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
        self._hello, self.minor = hello, hello.minor
        if problem := rejection_of(hello, token is not None, self._server.only_run):
            self._deny(problem)
            return
        host, port = self._transport.get_extra_info("sockname")[:2]
        own = endpoint_text(host.removeprefix("::ffff:"), port)  # An IPv4 address of a socket for both.
        if hello.endpoint not in ("", own):
            seen = f"dialled {hello.endpoint} and arrived at {own}: there is a relay or address translation between"
            self._server.complaints.add(self.peer, seen, self._loop.time())
        if token is not None:
            nonces, key = (self._nonce, hello.nonce), keys.run_token(token, hello.run_id)
            self._frames.seal(*keys.connection_keys(key, nonces, hello.run_id, hello.endpoint))
            self.send(protocol.Ready())

    def _admit(self, node: protocol.Introduction, run_id: str) -> None:
        if node.is_visitor:
            self._admit_visitor(run_id)
            return
        run = self._server.run_of(run_id)
        problem = run.rejection_of(node) if run is not None else self._server.full_of_runs
        if problem:
            self._deny(problem)
        if problem or run is None:
            return
        self._server.strangers.discard(self)
        self._share = run.share
        self._frames.expect(frames.UPWARD)
        self.run, self.node_id = run, node.node_id
        run.attach(self, node)

    def _admit_visitor(self, run_id: str) -> None:
        run = self._server.known_run(run_id)
        if run is None:
            self._deny(f"it has no run {run_id!r}")
        elif self._server.visitor_count >= self._limits.visitors:
            self.send(protocol.Denied(f"{self._limits.visitors} others are asking already", is_passing=True))
            self._refuse("is turned away: too many others are asking")
        else:
            self._server.strangers.discard(self)
            self._share = self._server.visitors_share
            self._frames.expect(frames.UPWARD)
            self.run, self.is_visitor = run, True
            self._server.visitor_count += 1
            run.receive_visitor(self)

    def _note_refusal(self, problem: str) -> None:
        """For those who ask how the run stands that the peer wants to join."""
        run = self._server.known_run(self._hello.run_id) if self._hello is not None else None
        if run is not None:
            run.note_stranger(self.peer, problem)

    def _deny(self, problem: str) -> None:
        self._note_refusal(problem)
        self.send(protocol.Denied(problem))
        self._refuse(f"is turned away: {problem}")

    def give_up(self) -> None:
        """The time for the handshake is over."""
        wants = " (this coordinator speaks TLS)" if self._server.tls is not None else ""
        silent = f"said nothing for {_HANDSHAKE_TIMEOUT_S:g} s{wants}"
        self._refuse("was too slow to say hello" if self._has_spoken else silent)

    # The way out.

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def send(self, message: Any) -> None:
        if not self._transport.is_closing():
            self._write(frames.encode(message))

    def send_frame(self, frame: bytes) -> None:
        if not self._transport.is_closing():
            self._write(frame)

    def _write(self, frame: bytes) -> None:
        self._transport.write(self._frames.sealed(frame))
        if self._is_congested:
            self._server.unsent.note(self)
            if self.unsent_bytes > _UNREAD_LIMIT_BYTES:
                self.cut_off("does not read what it is sent")

    def _refuse(self, problem: str) -> None:
        if not self._is_closing:
            self._server.complaints.add(self.peer, problem, self._loop.time())
            self.close()

    def cut_off(self, problem: str) -> None:
        self._server.complaints.add(self.peer, f"{problem}, and is cut off", self._loop.time())
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


def rejection_of(hello: protocol.Hello, wants_token: bool, only_run: str | None = None) -> str:
    """Why a client that says this hello is not let in; or nothing."""
    if hello.version != protocol.MAJOR:
        return f"it speaks version {hello.version} of the protocol, this coordinator speaks {protocol.MAJOR}"
    if not hello.run_id or len(hello.run_id) > _RUN_ID_LIMIT:
        return f"a run id has 1 to {_RUN_ID_LIMIT} characters, not {len(hello.run_id)}"
    if hello.has_token and not wants_token:
        return "it brings a token, but this coordinator was started without one"
    if wants_token and not hello.has_token:
        return "this coordinator wants a token, and it brings none"
    return "" if only_run in (None, hello.run_id) else f"this coordinator is for the run {only_run!r} alone"
