"""An agent's connection to its coordinator: one thread around a `Participant`.

The thread is the one reader and the one writer of its connection, and passes what the coordinator says on to the
agent's mailbox. Requests to the key-value store from other threads are numbered and answered by number. It goes on
while the agent is busy stopping workers, and it decides nothing: what a closed connection or a missing answer means is
the participant's business, and where the coordinator is a `Locator`'s.

Finding the coordinator, connecting to it and starting one take time, and are done in other threads: heartbeats and the
lease wait for none of them. The result comes through the inbox. An attempt to connect is given up at once when another
one begins, because the coordinator has moved; the thread of the old one ends by its own limits. What others ask this
node (`protocol.Query`) is answered in threads, too, one question at a time. A few may wait; to further ones the answer
is at once that the agent is busy.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import queue
import random
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from holdfast.errors import HoldfastError, HostError
from holdfast.log import Logger
from holdfast.loop import Mailbox
from holdfast.rendezvous import endpoints
from holdfast.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from holdfast.rendezvous.client.handshake import OpenConnection, Target, obstacle_of
from holdfast.rendezvous.client.reachability import Reachability, Say
from holdfast.rendezvous.coordination import Answering
from holdfast.rendezvous.membership import model, node, node_lease, protocol
from holdfast.rendezvous.membership.frames import Frames, Malformed, encode
from holdfast.rendezvous.membership.node import Participant, Standing
from holdfast.rendezvous.membership.protocol import Answer, Query, StoreAnswer, StoreRequest

logger = Logger(__name__)

_READ_BYTES = 1 << 16
_GOODBYE_S = 2.0
_LONGEST_WAIT_S = 1e9
_QUERIES_AT_MOST = 8
_ANSWER_MARGIN_S = 1.0  # That the time is up is the coordinator's to say, if it can.

_ToSend = StoreRequest | Query | Answer  # By threads of this process; the participant has no part in it.

CONNECTION_CLOSED = "the connection to the coordinator is closed"


class Locator(ABC):
    """Knows where the coordinator is, and may start one where there is none."""

    @abstractmethod
    def target(self) -> Target:
        """Where to connect to now; may block. Raises OSError, `TurnedAway` or another HoldfastError."""

    @abstractmethod
    def refused(self, target: Target) -> bool:
        """Nothing listens there. Whether a coordinator was started, and serves; may block."""

    def locate(  # noqa: B027
        self, known_term: int, node_count: int, is_wanted: Callable[[], bool], found: Callable[[], object]
    ) -> None:
        """Look in the background whether a coordinator of a higher term is in office; call `found` if so. A locator
        may start one if there is none and `is_wanted` still says so; `node_count` nodes look for it at the same time.
        By default there is no other place to look at."""

    def resigned(self) -> None:  # noqa: B027
        """The coordinator steps down because etcd refuses its writes: another one will not do better at once."""

    def stop(self) -> None:  # noqa: B027
        """Let go of everything. By default there is nothing."""


class Client:
    """To be made and run in a thread of its own. `deliver` and `set_lease` are called in it; `fail` too, when it cannot
    go on. `stuck_for_s` says for how long the agent's loop has not turned. `answer` answers others."""

    def __init__(
        self,
        locator: Locator,
        participant: Participant,
        deliver: Callable[[node.ForAgent], None],
        set_lease: Callable[[float | None], None],
        fail: Callable[[Exception], None],
        reach: Reachability,
        stuck_for_s: Callable[[], float],
        answer: Answering,
    ) -> None:
        self.reach, self._locator, self._node = reach, locator, participant
        self._deliver, self._set_lease, self._fail = deliver, set_lease, fail
        self._stuck_for_s = stuck_for_s
        self._sock: socket.socket | None = None
        self._frames: Frames | None = None
        self._target: Target | None = None  # Of the last connection.
        self._secret = os.urandom(protocol.NONCE_BYTES)  # It proves that later connections are this node's.
        self._dial: object = None  # The present attempt to connect. The results of all others are dropped.
        self._has_joined = False  # Said on this connection that this node wants a place, or has one.
        self._heard = 0  # Words of coordinators.
        self._node_count = 1  # In the last round.
        self._outgoing = bytearray()
        # What the agent did, what threads send, and what other threads have done for this one.
        self._inbox: Mailbox[node.AgentEvent | _ToSend | Callable[[], None] | None] = Mailbox()
        self._answer, self._query_turn = answer, threading.Lock()
        self._query_places = threading.Semaphore(_QUERIES_AT_MOST)
        # Requests to the store and queries, by number, and where their threads wait for the answers.
        self._unanswered: dict[int, tuple[StoreRequest | Query, queue.SimpleQueue[Any]]] = {}
        self._sender = os.urandom(8)
        self._numbers = itertools.count(1)
        self._is_stopping = False
        self._thread = threading.current_thread()

    def post(self, event: node.AgentEvent) -> bool:
        """Something that the agent did; from any thread. False if the client has ended."""
        return self._inbox.put(event)

    def request(self, operation: str, keys: tuple[str, ...], timeout_s: float, **fields: object) -> StoreAnswer:
        """Ask the run's key-value store; from any thread. Survives a reconnect: what got no answer is asked again."""
        timeout_s = min(max(timeout_s, 0.0), _LONGEST_WAIT_S)
        number = next(self._numbers)
        request = StoreRequest(self._sender, number, operation, keys, timeout_s=timeout_s, **fields)  # type: ignore[arg-type]
        # What is too large is the caller's mistake and must not surface in the thread.
        if len(keys) > protocol.MAX_STORE_KEYS:
            raise ValueError(
                f"{len(keys)} keys in one request to the store, at most {protocol.MAX_STORE_KEYS} are possible"
            )
        encode(request)
        try:
            answer: StoreAnswer | None = self._exchange(request, timeout_s + _ANSWER_MARGIN_S)
        except queue.Empty:
            return StoreAnswer(number, problem="timeout")
        return answer or StoreAnswer(number, problem=CONNECTION_CLOSED)

    def ask(self, request: bytes, node_id: str, timeout_s: float) -> bytes:
        """Ask the coordinator, or the agent of that node; from any thread. Raises HostError if no answer comes."""
        if not self._has_joined:
            raise HostError(f"{self.reach.who} is out of reach at the moment")
        try:
            answer: Answer | None = self._exchange(Query(next(self._numbers), request, node_id), timeout_s)
        except queue.Empty:
            who = f"node {node_id}" if node_id else self.reach.who
            raise HostError(f"{who} did not answer within {timeout_s:g} s") from None
        if answer is None:
            raise HostError(CONNECTION_CLOSED)
        return answer.body

    def _exchange(self, message: StoreRequest | Query, timeout_s: float) -> Any:
        """The answer, or None if the client has ended. Raises queue.Empty when the time is up."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._unanswered[message.number] = (message, answer)
        try:
            return answer.get(timeout=timeout_s) if self._inbox.put(message) else None
        finally:
            del self._unanswered[message.number]

    @property
    def is_connected(self) -> bool:
        return self._sock is not None

    def stop(self) -> None:
        """Send what is to be sent, and end."""
        self._is_stopping = True
        self._inbox.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _GOODBYE_S)
        self._locator.stop()

    # The thread.

    def run(self) -> None:
        """Until `stop` is called, or it cannot go on."""
        problem: Exception | None = None
        try:
            while not self._is_stopping:
                self._wait(self._node.next_deadline(), self._gives_up_at())
                self._turn()
            goodbye_at = time.monotonic() + _GOODBYE_S
            self._turn()
            while self._outgoing and time.monotonic() < goodbye_at:
                self._wait(goodbye_at)
                self._flush()
        except Exception as error:
            problem = error
        self._close()
        self._inbox.close()
        self._dial = None
        for item in self._inbox.take():
            if isinstance(item, partial) and item.func == self._connected:
                item()  # Closes the connection.
        for _, answer in self._unanswered.copy().values():
            answer.put(None)
        if problem is not None:  # Told last: an agent that asks again finds that this has ended.
            self._fail(problem)

    def _gives_up_at(self) -> float | None:
        """The coordinator decides how long a round may take to form; what is bounded here is to be out of its reach."""
        return self.reach.gives_up_at() if self._node.standing is Standing.WAITING else None

    def _wait(self, *deadlines: float | None) -> None:
        """Until something comes in, can go out, or is due."""
        poller = select.poll()
        poller.register(self._inbox, select.POLLIN)
        if self._sock is not None:
            poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        due_at = min((each for each in deadlines if each is not None), default=None)
        poller.poll(None if due_at is None else 1000 * max(0.0, due_at - time.monotonic()))

    def _turn(self) -> None:
        for item in self._inbox.take():
            if isinstance(item, _ToSend):
                if self._has_joined:
                    self._send(item)
            elif callable(item):
                item()
            elif item is not None:
                self._step(item)
        self._read()
        deadline = self._node.next_deadline()
        if deadline is not None and time.monotonic() >= deadline:
            self._step(node_lease.LoopSeen(self._stuck_for_s()))
            self._step(protocol.TimePassed())  # Among others: a heartbeat is due.
        gives_up_at = self._gives_up_at()
        if gives_up_at is not None and time.monotonic() >= gives_up_at:
            raise RendezvousTimeoutError(self.reach.surrender())
        self._flush()

    def _step(self, event: node.Event) -> None:
        for command in self._node.step(event, time.monotonic()):
            if isinstance(command, protocol.FromNode):
                self._send(command)
                if isinstance(command, protocol.Join | protocol.Return):
                    self._joined()
                continue
            match command:
                case node_lease.Connect():
                    self._connect()
                case node_lease.HangUp():
                    self._flush()
                    self._close()
                case node_lease.SetLease(until):
                    self._set_lease(until)
                case node_lease.Locate():
                    self._locate()
                case _:
                    if isinstance(command, model.Sealed):
                        self._node_count = command.place.node_count
                        self.reach.placed()
                    self._deliver(command)

    def _locate(self) -> None:
        """If a coordinator is heard of meanwhile, the run goes on there, or it may have ended:

        1. the connection of a node that was frozen is closed; it looks for the coordinator, and dials the one it knows,
        2. there it hears that the run is over; all nodes know now, so the coordinator ends, and its key is gone,
        3. the look of step 1 finds no key. It must not start a coordinator for a run that is over.
        """
        heard = self._heard

        def is_wanted() -> bool:
            return self._heard == heard and not self._is_stopping

        self._locator.locate(self._node.term, self._node_count, is_wanted, lambda: self._inbox.put(self._move))

    def _move(self) -> None:
        """To the coordinator that the locator knows of by now."""
        self._dial = None
        self._step(node_lease.LeaderMoved())

    # Connecting.

    def _connect(self) -> None:
        self._dial = dial = object()
        who = protocol.Introduction(self._node.facts.node_id, self._secret, self._node.term)
        try:
            threading.Thread(target=self._reach, args=(dial, who), name="holdfast-dial", daemon=True).start()
        except RuntimeError as error:  # There are too many threads.
            self._cannot_connect(dial, None, OSError(errno.EAGAIN, str(error)))

    def _reach(self, dial: object, who: protocol.Introduction) -> None:
        """In a thread of its own."""
        target = None
        try:
            target = self._locator.target()
            connection = target.connect(who)
            if not self._inbox.put(partial(self._connected, dial, target, connection)):
                connection[0].close()
        except Exception as error:
            # Before anything that takes time: a refusal may extend the lease.
            self._inbox.put(partial(self._cannot_connect, dial, target, error))
            # This thread may be late: another agent has started one, and the run may be over by now.
            is_wanted = self._sock is None and not self._is_stopping
            if target is not None and isinstance(error, ConnectionRefusedError) and is_wanted:
                try:
                    if self._locator.refused(target):
                        self._inbox.put(self._started)
                except Exception as why:
                    self._inbox.put(partial(self._tell, why, target))

    def _started(self) -> None:
        if self._sock is None and self._dial is None:
            self._move()  # Without the rest of the pause.

    def _connected(self, dial: object, target: Target, connection: OpenConnection) -> None:
        sock, frames, welcome = connection
        if dial is not self._dial:
            sock.close()
            return
        self._dial = None
        self._sock, self._frames, self._target = sock, frames, target
        self._heard += 1
        self._say(self.reach.reached(time.monotonic()))
        self._step(node.Welcomed(welcome.term, welcome.last_round, welcome.restarts_used))

    def _joined(self) -> None:
        """The coordinator answers members alone, and hangs up on others that ask: requests to the store wait for it."""
        if self._sock is not None and not self._has_joined:
            self._has_joined = True
            for request, _ in self._unanswered.copy().values():
                if isinstance(request, StoreRequest):
                    self._send(request)

    def _cannot_connect(self, dial: object, target: Target | None, error: Exception) -> None:
        if dial is not self._dial:
            return
        self._dial = None
        is_refused = target is not None and isinstance(error, ConnectionRefusedError)
        # Another coordinator's refusal says nothing about the one that this node was connected to.
        was_ours = self._target is None or (target is not None and target.address == self._target.address)
        self._tell(error, target)
        self._step(node_lease.ConnectFailed(is_refused and was_ours, random.random()))

    def _tell(self, error: Exception, target: Target | None) -> None:
        if not isinstance(error, OSError | HoldfastError):
            raise error
        is_waiting = self._node.standing is Standing.WAITING
        words = _words(error, target, self.reach.who)
        self._say(self.reach.failed(obstacle_of(error), words, time.monotonic(), is_waiting=is_waiting))

    def _say(self, word: Say | None) -> None:
        if word is not None and word.gives_up:
            raise RendezvousConnectionError(word.text)
        if word is not None:
            logger.warning("%s", word.text)

    # The connection.

    def _send(self, message: protocol.ToCoordinator) -> None:
        """At the end of the turn, with what else is sent in it: a join and its first heartbeat, say."""
        if self._sock is not None and self._frames is not None:
            self._outgoing += self._frames.sealed(encode(message))

    def _flush(self) -> None:
        try:
            while self._outgoing and self._sock is not None:
                del self._outgoing[: self._sock.send(self._outgoing)]
        except OSError as error:
            if not _would_block(error):
                self._lose_connection()

    def _read(self) -> None:
        while self._sock is not None and self._frames is not None:
            try:
                data = self._sock.recv(_READ_BYTES)
            except OSError as error:
                if _would_block(error):
                    return
                data = b""
            if not data:
                self._lose_connection()
                return
            self._frames.feed(data)
            try:
                while self._frames is not None and (message := self._frames.next()) is not None:
                    self._heard += 1
                    self._take(message)
            except Malformed as error:
                logger.warning("the coordinator at %s sent junk: %s", self._target and self._target.endpoint, error)
                self._lose_connection()
            if len(data) < _READ_BYTES and self._target is not None and self._target.tls is None:
                return  # That was all. With TLS there may be more than the kernel knows of.

    def _take(self, message: Any) -> None:
        match message:
            case StoreAnswer(number) | Answer(number):
                if (asked := self._unanswered.get(number)) is not None:
                    asked[1].put(message)
            case Query():
                self._take_query(message)
            case _:
                if isinstance(message, model.Resigned) and message.refusal:
                    self._say(self.reach.refused(message.refusal, time.monotonic()))
                    self._locator.resigned()
                self._step(node.Pushed(message))

    def _take_query(self, query: Query) -> None:
        if self._query_places.acquire(blocking=False):
            try:
                threading.Thread(target=self._reply, args=(query,), name="holdfast-answers", daemon=True).start()
                return
            except RuntimeError:  # There are too many threads.
                self._query_places.release()
        self._send(Answer(query.number, _error("this agent is busy with other questions; try again")))

    def _reply(self, query: Query) -> None:
        def reply(body: bytes) -> None:
            if len(body) > protocol.MAX_ANSWER_BYTES:
                body = _error(f"the answer has {len(body)} bytes, at most {protocol.MAX_ANSWER_BYTES} can be sent")
            self._inbox.put(Answer(query.number, body))

        with self._query_turn:
            try:
                self._answer(query.body, reply)
            except Exception as error:
                logger.debug("a question could not be answered", exc_info=True)
                reply(_error(f"{type(error).__name__}: {error}"[:1000]))
        self._query_places.release()

    def _lose_connection(self) -> None:
        self._close()
        self._step(node_lease.Disconnected(random.random()))

    def _close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = self._frames = None
        self._has_joined = False
        self._outgoing.clear()
        self.reach.lost(time.monotonic())


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


def _would_block(error: OSError) -> bool:
    """TLS has its own words for it, and is imported only where it is spoken."""
    return type(error).__name__ in ("BlockingIOError", "SSLWantReadError", "SSLWantWriteError")


def _words(error: OSError | HoldfastError, target: Target | None, who: str) -> str:
    """What went wrong, and where if that is not `who` the user wants to reach."""
    if isinstance(error, socket.gaierror) and target is not None:
        return endpoints.unresolved(target.host, error)
    if not isinstance(error, OSError):
        return str(error) or type(error).__name__
    text = error.strerror or str(error) or type(error).__name__
    return text if target is None or target.endpoint in who else f"the coordinator at {target.endpoint}: {text}"
