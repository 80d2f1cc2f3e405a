"""The shell around the machine of a run: events go in, and what the machine answers is done. It contains no rule.

The coordinator's server runs it over sockets, and the simulator over a fake network, a fake storage and virtual time.
What it needs of them is in `Transport` and `Storage`.

Messages leave in the order in which the machine gave them, when the writes that they follow from are durable. Messages
that wait for nothing (`Ready.send_now`) leave at once. A world of thousands of nodes is told in several turns of the
loop, so that heartbeats are answered in between. The machine is asked for its next deadline once a turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import Memory
from holdfast.rendezvous.membership.protocol import Ready, RunEvent, TermRaised
from holdfast.rendezvous.membership.run import Run

_SENT_IN_A_TURN = 256


class Storage(Protocol):
    """Keeps what a coordinator must not forget. Writes are carried out in order; `then` is called when one is durable,
    perhaps before the call returns."""

    def may_serve(self) -> bool:
        """Whether this coordinator is still in office; asked before anything is answered."""

    def raise_term(self, heard: int, then: Callable[[int], None]) -> None:
        """A node knows of a coordinator of that term. `then` is called with a higher one for this coordinator."""

    def write(self, memory: Memory, then: Callable[[], None]) -> None: ...


class Transport(Protocol):
    """Connections by their numbers. Those that are closed are ignored."""

    def send(self, conns: tuple[int, ...], message: protocol.ToClient) -> None: ...

    def close(self, conn: int, reason: str) -> None: ...

    def forget(self) -> None:
        """The run is over: delete its memory and end."""

    def fail(self, error: Exception) -> None:
        """The machine has failed, which must not happen."""


class Pump:
    """`clock` and `wake_at` are the machine's time, `soon` calls a function in the next turn of the loop, `observe` is
    told of every step before anything is done."""

    def __init__(
        self,
        run: Run,
        storage: Storage,
        transport: Transport,
        clock: Callable[[], float],
        wake_at: Callable[[float | None], None],
        soon: Callable[[Callable[[], None]], object],
        observe: Callable[[RunEvent, Ready], None],
    ) -> None:
        self.run = run
        self._storage, self._transport = storage, transport
        self._clock, self._wake_at, self._soon, self._observe = clock, wake_at, soon, observe
        self._events: deque[RunEvent] = deque()
        self._held: deque[tuple[int, Ready]] = deque()  # After how many writes; what waits for them, or for its turn.
        self._asked = self._durable = 0  # Writes.
        self._sent = 0  # Of what was held, in this turn of the loop.
        self._is_busy = self._is_called = self._is_closed = False

    def feed(self, event: RunEvent) -> None:
        """Events that come of carrying one out are taken after it."""
        self._events.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._events and not self._is_closed and self._storage.may_serve():
                self._step(self._events.popleft())
        except Exception as error:
            self._transport.fail(error)
        finally:
            self._is_busy = False

    def close(self) -> None:
        """Nothing is done any more."""
        self._is_closed = True
        self._events.clear()
        self._held.clear()

    def _step(self, event: RunEvent) -> None:
        ready = self.run.step(event, self._clock())
        self._observe(event, ready)
        for conns, message in ready.send_now:
            self._transport.send(conns, message)
        if ready.raise_term is not None:
            self._asked += 1
            self._storage.raise_term(ready.raise_term, partial(self._raised, self._asked))
        if ready.persist is not None:
            self._asked += 1
            self._storage.write(ready.persist, partial(self._written, self._asked))
        if ready.send_after_persist or ready.close or ready.forget:
            self._held.append((self._asked, ready))
            self._release()
        elif ready.send_now and ready.persist is None:
            return  # A heartbeat only puts deadlines off.
        self._call_next_turn()

    def _raised(self, number: int, term: int) -> None:
        self.feed(TermRaised(term))
        self._written(number)

    def _written(self, number: int) -> None:
        self._durable = max(self._durable, number)
        self._release()

    def _release(self) -> None:
        """A bounded number of messages in a turn of the loop."""
        while self._held and self._held[0][0] <= self._durable and self._storage.may_serve():
            ready = self._held[0][1]
            for done, (conns, message) in enumerate(ready.send_after_persist):
                if self._sent >= _SENT_IN_A_TURN:
                    del ready.send_after_persist[:done]
                    self._call_next_turn()
                    return
                self._sent += len(conns)
                self._transport.send(conns, message)
            self._held.popleft()
            for conn, reason in ready.close:
                self._transport.close(conn, reason)
            if ready.forget:
                self._transport.forget()

    def _call_next_turn(self) -> None:
        if not self._is_called and not self._is_closed:
            self._is_called = True
            self._soon(self._turn)

    def _turn(self) -> None:
        self._is_called, self._sent = False, 0
        try:
            self._release()
            if not self._is_closed:
                self._wake_at(self.run.next_deadline())
        except Exception as error:
            self._transport.fail(error)
