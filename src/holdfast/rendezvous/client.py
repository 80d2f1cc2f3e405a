"""An agent's connection to its coordinator: one thread around a `Participant`.

The thread dials, shakes hands, sends heartbeats, and turns messages into deliveries for the agent's mailbox. It is
the one reader and the one writer of its connection; requests to the key-value store from other threads are numbered
and answered by number. It keeps beating while the agent is busy stopping workers, and it decides nothing: what a
closed connection or a missing answer means is the participant's business.
"""

from __future__ import annotations

import collections
import errno
import itertools
import logging
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from holdfast.errors import HoldfastError
from holdfast.rendezvous import messages, participant, session
from holdfast.rendezvous.messages import PROTOCOL_VERSION, Frames, Malformed, StoreAnswer, StoreRequest, encode
from holdfast.rendezvous.participant import Participant

if TYPE_CHECKING:
    import ssl

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_HANDSHAKE_TIMEOUT_S = 5.0
_GOODBYE_S = 2.0
_BEFORE_COMPLAINT_S = 3.0


class TurnedAway(HoldfastError):  # noqa: N818
    """The coordinator does not want to talk to us, or is not one. Trying again would not help."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Where the coordinator is and how to speak to it."""

    host: str
    port: int
    run_id: str
    token: bytes | None = None
    tls: ssl.SSLContext | None = None
    timeout_s: float = 2.0

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def connect(self) -> tuple[socket.socket, Frames]:
        """A connection on which both sides have proved who they are. Raises OSError or `TurnedAway`."""
        sock = socket.create_connection((self.host, self.port), self.timeout_s)
        try:
            if sock.getsockname() == sock.getpeername():  # On one host the kernel may connect a socket to itself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(_HANDSHAKE_TIMEOUT_S)
            if self.tls is not None:
                sock = self._wrap(sock)
            frames = self._shake_hands(sock)
            sock.setblocking(False)
            return sock, frames
        except BaseException:
            sock.close()
            raise

    def _wrap(self, sock: socket.socket) -> socket.socket:
        import ssl

        assert self.tls is not None
        try:
            return self.tls.wrap_socket(sock, server_hostname=self.host)
        except ssl.SSLCertVerificationError as error:
            raise TurnedAway(f"the certificate of {self.endpoint} is not accepted: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise TurnedAway(f"no TLS connection to {self.endpoint}: {error.reason or error}") from None

    def _shake_hands(self, sock: socket.socket) -> Frames:
        frames = Frames(messages.Handshake)
        challenge = self._read(sock, frames)
        if not isinstance(challenge, messages.Challenge):
            raise TurnedAway(f"{self.endpoint} answers, but it is not a holdfast coordinator")
        if challenge.version != PROTOCOL_VERSION:
            raise TurnedAway(
                f"the coordinator at {self.endpoint} speaks version {challenge.version} of the protocol, "
                f"this agent speaks {PROTOCOL_VERSION}"
            )
        if self.token is not None and not challenge.wants_token:
            raise TurnedAway(f"this agent has a token, but the coordinator at {self.endpoint} was started without one")
        nonce = os.urandom(32)
        proof = b""
        if self.token is not None:
            proof = messages.prove(self.token, b"agent", self.run_id, challenge.nonce, nonce)
        sock.sendall(encode(messages.Hello(PROTOCOL_VERSION, self.run_id, nonce, proof)))
        self._check(self._read(sock, frames), nonce, challenge.nonce)
        frames.expect(messages.Answer)
        return frames

    def _check(self, answer: object, nonce: bytes, challenge: bytes) -> None:
        if isinstance(answer, messages.Denied):
            raise TurnedAway(f"the coordinator at {self.endpoint} turned this agent away: {answer.reason}")
        if not isinstance(answer, messages.Welcome):
            raise ConnectionResetError(f"{self.endpoint} closed the connection")
        if self.token is None:
            return
        expected = messages.prove(self.token, b"coordinator", self.run_id, nonce, challenge)
        if not messages.is_proof(answer.proof, expected):
            raise TurnedAway(f"the coordinator at {self.endpoint} does not know this agent's token")

    def _read(self, sock: socket.socket, frames: Frames) -> object | None:
        try:
            while (message := frames.next()) is None:
                data = sock.recv(_READ_BYTES)
                if not data:
                    return None
                frames.feed(data)
            return message
        except Malformed:
            raise TurnedAway(f"{self.endpoint} answers, but it is not a holdfast coordinator") from None
        except TimeoutError:
            raise TurnedAway(f"{self.endpoint} accepts connections but says nothing; is it a coordinator?") from None


class Client:
    """The thread. `deliver` and `set_lease` are called in it; `fail` too, when it cannot go on."""

    def __init__(
        self,
        dial: Dial,
        node: Participant,
        deliver: Callable[[participant.Delivery], None],
        set_lease: Callable[[float | None], None],
        fail: Callable[[Exception], None],
        before_dialling: Callable[[], None] = lambda: None,
    ) -> None:
        self._dial = dial
        self._node = node
        self._deliver = deliver
        self._set_lease = set_lease
        self._fail = fail
        self._before_dialling = before_dialling
        self._sock: socket.socket | None = None
        self._frames: Frames | None = None
        self._outgoing = bytearray()
        self._lock = threading.Lock()
        self._inbox: collections.deque[participant.AgentEvent | StoreRequest] = collections.deque()
        self._answers: dict[int, _Answer] = {}
        self._sender = os.urandom(8)
        self._numbers = itertools.count(1)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_stopping = False
        self._has_been_welcome = False
        self.out_of_reach_since: float | None = time.monotonic()
        """Since when there is no connection; None while there is one."""
        self.last_problem = ""
        """Why the last attempt to connect failed."""
        self._told_problem = ""
        self._thread = threading.Thread(target=self._run, name="holdfast-client", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, event: participant.AgentEvent) -> None:
        """Something that the agent did; from any thread."""
        self._put(event)

    def request(self, operation: str, keys: tuple[str, ...], timeout_s: float, **fields: object) -> StoreAnswer:
        """Ask the run's key-value store; from any thread. Survives a reconnect: what got no answer is asked again."""
        number = next(self._numbers)
        request = StoreRequest(self._sender, number, operation, keys, timeout_s=timeout_s, **fields)  # type: ignore[arg-type]
        answer = _Answer(request)
        with self._lock:
            self._answers[number] = answer
        self._put(request)
        try:
            return answer.wait(timeout_s + _HANDSHAKE_TIMEOUT_S)
        finally:
            with self._lock:
                self._answers.pop(number, None)

    def stop(self) -> None:
        """Send what is to be sent, and end."""
        self._is_stopping = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_GOODBYE_S + self._dial.timeout_s)

    def _put(self, item: participant.AgentEvent | StoreRequest) -> None:
        with self._lock:
            self._inbox.append(item)
        os.eventfd_write(self._wake_fd, 1)

    # The thread.

    def _run(self) -> None:
        try:
            goodbye_at: float | None = None
            while goodbye_at is None or (self._outgoing and time.monotonic() < goodbye_at):
                if self._is_stopping and goodbye_at is None:
                    goodbye_at = time.monotonic() + _GOODBYE_S
                self._wait(goodbye_at)
                self._turn()
        except Exception as error:
            self._fail(error)
        finally:
            self._close()

    def _wait(self, goodbye_at: float | None) -> None:
        deadlines = [each for each in (self._node.next_deadline(), goodbye_at) if each is not None]
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        if self._sock is not None:
            poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        left_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        poller.poll(None if left_s is None else left_s * 1000)

    def _turn(self) -> None:
        for event in self._take_inbox():
            if isinstance(event, StoreRequest):
                self._send(event)
            else:
                self._step(event)
        self._read()
        deadline = self._node.next_deadline()
        if deadline is not None and time.monotonic() >= deadline:
            self._step(session.TimePassed())
        self._flush()

    def _take_inbox(self) -> list[participant.AgentEvent | StoreRequest]:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass
        with self._lock:
            items = list(self._inbox)
            self._inbox.clear()
        return items

    def _step(self, event: participant.Event) -> None:
        for command in self._node.step(event, time.monotonic()):
            match command:
                case participant.Send(message):
                    self._send(message)
                case session.Connect():
                    self._connect()
                case session.SetLease(until):
                    self._set_lease(until)
                case _:
                    self._deliver(command)

    def _connect(self) -> None:
        try:
            self._before_dialling()
            self._sock, self._frames = self._dial.connect()
        except (OSError, TurnedAway) as error:
            self._cannot_connect(error)
            return
        self._has_been_welcome, self.out_of_reach_since, self._told_problem = True, None, ""
        self._step(session.Connected())
        with self._lock:
            unanswered = [answer.request for answer in self._answers.values()]
        for request in unanswered:
            self._send(request)

    def _cannot_connect(self, error: OSError | TurnedAway) -> None:
        """To be turned away at first is a mistake that somebody must correct. Whoever turns away a node that was
        welcome before may be gone the next moment, and the right one be back."""
        if isinstance(error, TurnedAway) and not self._has_been_welcome:
            raise error
        self._tell_problem(str(error))
        self._step(session.ConnectFailed(isinstance(error, ConnectionRefusedError), random.random()))

    def _tell_problem(self, problem: str) -> None:
        """Once, and not before it has lasted: a coordinator that is being started refuses connections, too."""
        self.last_problem = problem
        has_lasted = time.monotonic() - (self.out_of_reach_since or 0.0) > _BEFORE_COMPLAINT_S
        if has_lasted and problem != self._told_problem:
            self._told_problem = problem
            logger.warning("no coordinator can be reached at %s (%s), still trying", self._dial.endpoint, problem)

    def _send(self, message: messages.ToCoordinator) -> None:
        if self._sock is not None:
            self._outgoing += encode(message)
            self._flush()

    def _flush(self) -> None:
        while self._outgoing and self._sock is not None:
            try:
                sent = self._sock.send(self._outgoing)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if _would_block(error):
                    return
                self._lose_connection()
                return
            del self._outgoing[:sent]

    def _read(self) -> None:
        while self._sock is not None and self._frames is not None:
            try:
                data = self._sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if _would_block(error):
                    return
                data = b""
            if not data:
                self._lose_connection()
                return
            self._frames.feed(data)
            try:
                self._take_messages(self._frames)
            except Malformed as error:
                logger.warning("the coordinator at %s sent junk: %s", self._dial.endpoint, error)
                self._lose_connection()
                return

    def _take_messages(self, frames: Frames) -> None:
        while (message := frames.next()) is not None:
            if isinstance(message, StoreAnswer):
                with self._lock:
                    answer = self._answers.get(message.number)
                if answer is not None:
                    answer.give(message)
            else:
                self._step(participant.MessageCame(cast(messages.FromCoordinator, message)))

    def _lose_connection(self) -> None:
        self._close()
        self.out_of_reach_since = time.monotonic()
        self._step(session.Disconnected(random.random()))

    def _close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = self._frames = None
        self._outgoing.clear()


class _Answer:
    """A place for the answer to one request."""

    def __init__(self, request: StoreRequest) -> None:
        self.request = request
        self._came = threading.Event()
        self._answer: StoreAnswer | None = None

    def give(self, answer: StoreAnswer) -> None:
        self._answer = answer
        self._came.set()

    def wait(self, timeout_s: float) -> StoreAnswer:
        if not self._came.wait(timeout_s):
            return StoreAnswer(self.request.number, problem="timeout")
        assert self._answer is not None
        return self._answer


def _would_block(error: OSError) -> bool:
    """TLS has its own words for it."""
    return type(error).__name__ in ("SSLWantReadError", "SSLWantWriteError")
