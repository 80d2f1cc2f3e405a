"""An agent's connection to its coordinator: one thread around a `Participant`.

The thread dials, shakes hands, sends heartbeats for as long as the agent's loop turns, and passes what the coordinator
says on to the agent's mailbox. It is the one reader and the one writer of its connection; requests to the key-value
store from other threads are numbered and answered by number. It goes on while the agent is busy stopping workers, and
it decides nothing: what a closed connection or a missing answer means is the participant's business, and where the
coordinator is a `Locator`'s.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol, cast

from holdfast.errors import HoldfastError
from holdfast.rendezvous import endpoints
from holdfast.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from holdfast.rendezvous.client import reachability
from holdfast.rendezvous.client.handshake import Silent, Target, TlsRefused
from holdfast.rendezvous.client.reachability import Obstacle, Reachability
from holdfast.rendezvous.membership import node, node_lease, protocol
from holdfast.rendezvous.membership.frames import Frames, Malformed, encode
from holdfast.rendezvous.membership.node import Participant, Standing
from holdfast.rendezvous.membership.protocol import StoreAnswer, StoreRequest

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_GOODBYE_S = 2.0
_LONGEST_WAIT_S = 1e9
_ANSWER_MARGIN_S = 1.0  # That the time is up is the coordinator's to say, if it can.

CONNECTION_CLOSED = "the connection to the coordinator is closed"


class Locator(Protocol):
    """Knows where the coordinator is, and may start one where there is none."""

    def target(self) -> Target:
        """Where to connect to now; may block. Raises OSError, `TurnedAway` or another HoldfastError."""

    def refused(self, target: Target) -> None:
        """Nothing listens there. A locator may start a coordinator."""

    def locate(self, known_term: int, is_wanted: Callable[[], bool], found: Callable[[], None]) -> None:
        """Look in the background whether a coordinator of a higher term is in office; call `found` if so. A locator
        may start one if there is none and `is_wanted` still says so."""

    def stop(self) -> None: ...


class Client:
    """The thread. `deliver` and `set_lease` are called in it; `fail` too, when it cannot go on."""

    def __init__(
        self,
        locator: Locator,
        participant: Participant,
        deliver: Callable[[node.ForAgent], None],
        set_lease: Callable[[float | None], None],
        fail: Callable[[Exception], None],
        reach: Reachability,
        stuck_for_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`stuck_for_s` says for how long the agent's loop has not turned."""
        self.reach = reach
        self._stuck_for_s = stuck_for_s
        self._locator = locator
        self._node = participant
        self._deliver = deliver
        self._set_lease = set_lease
        self._fail = fail
        self._sock: socket.socket | None = None
        self._frames: Frames | None = None
        self._target: Target | None = None  # Of the last connection.
        self._heard = 0  # Words of coordinators.
        self._outgoing = bytearray()
        self._lock = threading.Lock()
        self._inbox: collections.deque[node.AgentEvent | node_lease.LeaderMoved | StoreRequest] = collections.deque()
        self._answers: dict[int, _Answer] = {}
        self._sender = os.urandom(8)
        self._numbers = itertools.count(1)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_stopping = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="holdfast-client", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, event: node.AgentEvent) -> bool:
        """Something that the agent did; from any thread. False if the client has ended."""
        return self._put(event)

    def request(self, operation: str, keys: tuple[str, ...], timeout_s: float, **fields: object) -> StoreAnswer:
        """Ask the run's key-value store; from any thread. Survives a reconnect: what got no answer is asked again."""
        timeout_s = min(max(timeout_s, 0.0), _LONGEST_WAIT_S)
        number = next(self._numbers)
        request = StoreRequest(self._sender, number, operation, keys, timeout_s=timeout_s, **fields)  # type: ignore[arg-type]
        encode(request)  # What is too large is the caller's mistake and must not surface in the thread.
        answer = _Answer(request)
        with self._lock:
            self._answers[number] = answer
        try:
            return answer.wait(timeout_s + _ANSWER_MARGIN_S) if self._put(request) else answer.closed()
        finally:
            with self._lock:
                self._answers.pop(number, None)

    def stop(self) -> None:
        """Send what is to be sent, and end."""
        self._is_stopping = True
        if self._thread.ident is None:
            self._end()
        self._put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * _GOODBYE_S)
        self._locator.stop()

    def _put(self, item: node.AgentEvent | node_lease.LeaderMoved | StoreRequest | None) -> bool:
        """Hand something to the thread, or just wake it up; False if it has ended."""
        with self._lock:
            if self._is_over:
                return False
            if item is not None:
                self._inbox.append(item)
            os.eventfd_write(self._wake_fd, 1)
            return True

    # The thread.

    def _run(self) -> None:
        problem: Exception | None = None
        try:
            while not self._is_stopping:
                self._wait(self._next_deadline())
                self._turn()
            self._say_goodbye()
        except Exception as error:
            problem = error
        self._close()
        self._end()
        if problem is not None:  # Told last: an agent that asks again finds that this has ended.
            self._fail(problem)

    def _next_deadline(self) -> float | None:
        deadlines = (self._node.next_deadline(), self._gives_up_at())
        return min((each for each in deadlines if each is not None), default=None)

    def _gives_up_at(self) -> float | None:
        """The coordinator decides how long a round may take to form; what is bounded here is to be out of its reach."""
        return self.reach.gives_up_at() if self._node.standing is Standing.WAITING else None

    def _say_goodbye(self) -> None:
        """What the agent has said last goes out, if the coordinator can be reached at all."""
        goodbye_at = time.monotonic() + _GOODBYE_S
        self._turn()
        while self._outgoing and time.monotonic() < goodbye_at:
            self._wait(goodbye_at)
            self._flush()

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            os.close(self._wake_fd)
            unanswered = list(self._answers.values())
        for answer in unanswered:
            answer.give(answer.closed())

    def _wait(self, deadline: float | None) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        if self._sock is not None:
            poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
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
            self._step(node_lease.TimePassed(self._stuck_for_s()))
        gives_up_at = self._gives_up_at()
        if gives_up_at is not None and time.monotonic() >= gives_up_at:
            raise RendezvousTimeoutError(self.reach.surrender())
        self._flush()

    def _take_inbox(self) -> list[node.AgentEvent | node_lease.LeaderMoved | StoreRequest]:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass
        with self._lock:
            items = list(self._inbox)
            self._inbox.clear()
        return items

    def _step(self, event: node.Event) -> None:
        for command in self._node.step(event, time.monotonic()):
            match command:
                case node.Send(message):
                    self._send(message)
                case node_lease.Connect():
                    self._connect()
                case node_lease.HangUp():
                    self._close()
                    self.reach.lost(time.monotonic())
                case node_lease.SetLease(until):
                    self._set_lease(until)
                case node_lease.Locate():
                    self._locate()
                case _:
                    self._deliver(command)

    def _locate(self) -> None:
        """If a coordinator is heard of meanwhile, the run goes on there, or it may have ended:

        1. the connection of a node that was frozen is closed; it looks for the coordinator, and dials the one it knows,
        2. there it hears that the run is over; all nodes know now, so the coordinator ends, and its key is gone,
        3. the look of step 1 finds no key. It must not start a coordinator for a run that is over.
        """
        heard = self._heard
        self._locator.locate(
            self._node.term, lambda: self._heard == heard and not self._is_stopping, self._leader_moved
        )

    def _leader_moved(self) -> None:
        """In the locator's thread."""
        self._put(node_lease.LeaderMoved())

    def _connect(self) -> None:
        target = None
        try:
            target = self._locator.target()
            self._sock, self._frames, welcome = target.connect(self._node.term)
        except (OSError, HoldfastError) as error:
            self._cannot_connect(target, error)
            return
        self._target = target
        self._heard += 1
        self._say(self.reach.reached())
        self._step(node.Welcomed(welcome.term, welcome.last_round))
        with self._lock:
            unanswered = [answer.request for answer in self._answers.values()]
        for request in unanswered:
            self._send(request)

    def _cannot_connect(self, target: Target | None, error: OSError | HoldfastError) -> None:
        is_refused = target is not None and isinstance(error, ConnectionRefusedError)
        # Another coordinator's refusal says nothing about the one that this node was connected to.
        was_ours = self._target is None or (target is not None and target.address == self._target.address)
        self._say(self.reach.failed(_obstacle(error), _words(error, target, self.reach.who), time.monotonic()))
        # Before anything that takes time: a refusal may extend the lease.
        self._step(node_lease.ConnectFailed(is_refused and was_ours, random.random()))
        if is_refused and target is not None:
            self._let_one_listen(target)

    def _let_one_listen(self, target: Target) -> None:
        try:
            self._locator.refused(target)
        except (OSError, HoldfastError) as error:
            # The system may be out of something for a moment, or the name may not resolve.
            obstacle = Obstacle.CANNOT_HOST if isinstance(error, HoldfastError) else _obstacle(error)
            self._say(self.reach.failed(obstacle, _words(error, target, self.reach.who), time.monotonic()))

    def _say(self, word: reachability.Say | reachability.Abandon | None) -> None:
        if isinstance(word, reachability.Abandon):
            raise RendezvousConnectionError(word.text)
        if word is not None:
            logger.warning("%s", word.text)

    def _send(self, message: protocol.ToCoordinator) -> None:
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
                logger.warning("the coordinator at %s sent junk: %s", self._target and self._target.endpoint, error)
                self._lose_connection()
                return

    def _take_messages(self, frames: Frames) -> None:
        while (message := frames.next()) is not None:
            self._heard += 1
            if isinstance(message, StoreAnswer):
                with self._lock:
                    answer = self._answers.get(message.number)
                if answer is not None:
                    answer.give(message)
            else:
                self._step(node.Received(cast(protocol.FromCoordinator, message)))

    def _lose_connection(self) -> None:
        self._close()
        self.reach.lost(time.monotonic())
        self._step(node_lease.Disconnected(random.random()))

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

    def closed(self) -> StoreAnswer:
        return StoreAnswer(self.request.number, problem=CONNECTION_CLOSED)

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


def _obstacle(error: OSError | HoldfastError) -> Obstacle:
    match error:
        case Silent():
            return Obstacle.SILENT
        case TlsRefused():
            return Obstacle.TLS_REFUSED
        case RendezvousConnectionError():
            return Obstacle.UNREACHABLE
        case HoldfastError():
            return Obstacle.TURNED_AWAY
        case socket.gaierror():
            return Obstacle.NAME_UNKNOWN
        case ConnectionResetError() | BrokenPipeError():
            return Obstacle.HUNG_UP
    return Obstacle.UNREACHABLE


def _words(error: OSError | HoldfastError, target: Target | None, who: str) -> str:
    """What went wrong, and where if that is not `who` the user wants to reach."""
    if isinstance(error, socket.gaierror) and target is not None:
        return endpoints.unresolved(target.host, error)
    if not isinstance(error, OSError):
        return str(error) or type(error).__name__
    text = error.strerror or str(error) or type(error).__name__
    return text if target is None or target.endpoint in who else f"the coordinator at {target.endpoint}: {text}"
