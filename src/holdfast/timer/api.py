"""The parts that all kinds of timer share: the request, client and server, and `expires`, which most people use.

A client in the worker sends requests: "scope S ends by time T", or that S has ended. A server in another process
takes them from a queue, turn by turn, and reaps the workers whose deadlines have passed. Times in requests are
seconds since the epoch; a negative one is a release. A turn waits for requests, for the earliest deadline if the
server knows it, or for `max_interval`, whichever comes first.
"""

from __future__ import annotations

import abc
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import _GeneratorContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast.errors import UserError
from holdfast.log import Logger

logger = Logger(__name__)

# Turns begin at least this far apart: registering a timer is not urgent, and each turn costs CPU time.
_TURN_GAP_S = 0.005
# The pause before the next attempt, after a worker could not be reaped or a turn failed.
RETRY_DELAY_S = 0.1
_STOP_MARGIN_S = 5.0  # `stop` may take this much longer than the longest wait for requests.


@dataclass(frozen=True, slots=True, eq=False)
class TimerRequest:
    """Arms the timer of a scope, or releases it if the expiration time is negative."""

    worker_id: Any
    scope_id: str
    expiration_time: float

    def _values(self) -> tuple[Any, ...]:
        return self.worker_id, self.scope_id, self.expiration_time

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TimerRequest) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())


class TimerClient(abc.ABC):
    """The worker's end."""

    is_unserved = False  # No server took the last request.

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Arm the timer of `scope_id`; if it is armed already, move its deadline."""

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """Disarm the timer of `scope_id`; harmless if it is not armed."""


class RequestQueue(abc.ABC):
    """Where a server takes requests from."""

    @abc.abstractmethod
    def size(self) -> int:
        """About how many requests are waiting."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests; waits `timeout` seconds at most for them to come."""

    def wake(self) -> None:  # noqa: B027
        """End a `get` that is waiting, if the queue can: called when the server is to stop."""


class TimerServer(abc.ABC):
    """A thread that takes turns until it is stopped. The subclass defines what a worker is and how to reap it."""

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        if not 0 < max_interval < threading.TIMEOUT_MAX:
            raise UserError(f"max_interval must be a positive number of seconds, not {max_interval!r}")
        self._request_queue = request_queue
        self._max_interval, self._daemon = max_interval, daemon
        self._watchdog_thread: threading.Thread | None = None
        self._is_ending = threading.Event()
        self._is_stopping = False  # Unlike `_is_ending`, this cuts a long turn short.
        self._turn_ended_s = time.monotonic()
        self._unreaped: set[Any] = set()  # Could not be reaped at the last turn.

    @abc.abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Arm and release timers as the requests say, in their order."""

    @abc.abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget every timer of these workers. Called once a turn, often with an empty set."""

    @abc.abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """By worker, the timers whose expiration time is not after `deadline`."""

    @abc.abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End a worker. False means that it should be tried again."""

    def start(self) -> None:
        if self._is_ending.is_set():
            raise UserError("this timer server has been stopped; make a new one")
        if self._watchdog_thread is not None:
            raise UserError("this timer server has already been started")
        self._watchdog_thread = threading.Thread(target=self._watchdog_loop, name="holdfast-timer", daemon=self._daemon)
        self._watchdog_thread.start()

    def stop(self) -> None:
        """Let the thread finish its turn and wait for it; the server cannot be started again."""
        self._is_stopping = True
        self._end_thread(self._max_interval + _STOP_MARGIN_S)

    def _end_thread(self, timeout_s: float | None) -> None:
        """Wait for the thread, unless this is that thread, and forget it if it has ended."""
        self._is_ending.set()
        self._request_queue.wake()
        thread = self._watchdog_thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout_s)
        if thread.is_alive():
            logger.warning("the timer server's thread has not ended in %s s and goes on in the background", timeout_s)
        else:
            self._watchdog_thread = None

    def _watchdog_loop(self) -> None:
        while not self._is_ending.is_set():
            begun_s = time.monotonic()
            try:
                self._run_watchdog()
                pause_s = min(_TURN_GAP_S, self._max_interval)
            except Exception:
                logger.exception("a turn of the timer server failed; it goes on")
                pause_s = RETRY_DELAY_S
            self._is_ending.wait(max(0.0, begun_s + pause_s - time.monotonic()))

    def _run_watchdog(self) -> None:
        """One turn: wait until there is something to do, then do it."""
        shortest_s = RETRY_DELAY_S if self._unreaped else 0.0
        self._fetch(wait_s(self._next_deadline_s(), time.monotonic(), self._max_interval, shortest_s))
        if not self._is_ending.is_set():
            self._reap_expired()

    def _fetch(self, timeout_s: float) -> None:
        self.register_timers(self._request_queue.get(max(1, self._request_queue.size()), timeout_s))

    def _reap_expired(self) -> None:
        expired = self._expired_now()
        unreaped = {worker_id for worker_id in self._condemned(expired) if not self._is_reaped(worker_id)}
        for worker_id in unreaped - self._unreaped:
            logger.error("worker %s could not be reaped; it will be tried again at every turn", worker_id)
        self._unreaped = unreaped
        self.clear_timers(expired.keys() - unreaped)
        self._turn_ended_s = time.monotonic()

    def _is_reaped(self, worker_id: Any) -> bool:
        """A reaper that raises would raise again at every turn, so its worker is not given to it twice."""
        try:
            return self._reap_worker(worker_id)
        except Exception:
            logger.exception("reaping worker %s failed", worker_id)
            return True

    # What a server may know better.

    def _next_deadline_s(self) -> float | None:
        """When the earliest timer runs out, by the monotonic clock; None if the server cannot tell."""
        return None

    def _expired_now(self) -> dict[Any, list[TimerRequest]]:
        return self.get_expired_timers(time.time())

    def _condemned(self, expired: dict[Any, list[TimerRequest]]) -> Iterable[Any]:
        """Report the workers that have overrun. Returns those to reap."""
        for worker_id in expired.keys() - self._unreaped:
            scopes = ", ".join(timer.scope_id for timer in expired[worker_id])
            logger.warning("timers of worker %s have run out: %s", worker_id, scopes)
        return expired


def wait_s(deadline_s: float | None, now_s: float, longest_s: float, shortest_s: float = 0.0) -> float:
    """How long a turn may wait for requests. `shortest_s` gives way to `longest_s`."""
    return longest_s if deadline_s is None else min(longest_s, max(shortest_s, deadline_s - now_s))


_timer_client: TimerClient | None = None


def configure(timer_client: TimerClient | None) -> None:
    """Set the client that `expires` uses when it is given none; None takes it away again."""
    global _timer_client
    _timer_client = timer_client


def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> _GeneratorContextManager[None]:
    """A block (or, as a decorator, a function) that must end within `after` seconds. By default the scope is named for
    the line that calls `expires`. Entering a scope again, as recursion does, moves its deadline; leaving disarms it."""
    if scope is None:
        caller = sys._getframe(1)
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    return _expires(after, scope, client)


@contextmanager
def _expires(after: float, scope: str, client: TimerClient | None) -> Iterator[None]:
    client = client or _timer_client
    if client is None:
        raise RuntimeError("no timer client: call holdfast.timer.configure() first, or pass client= to expires()")
    is_armed = _is_sent(client, lambda: client.acquire(scope, time.time() + after))
    try:
        yield
    finally:
        if is_armed:
            _is_sent(client, lambda: client.release(scope))


def _is_sent(client: TimerClient, send: Callable[[], None]) -> bool:
    """A missing server does not end the work. It causes one warning for each client, and another one after requests
    have arrived in between."""
    was_unserved = getattr(client, "is_unserved", False)
    try:
        send()
    except BrokenPipeError as error:
        client.is_unserved = True
        if not was_unserved:
            logger.warning("timers are not watched: %s", error)
        return False
    client.is_unserved = False
    return True
