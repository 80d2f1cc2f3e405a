"""Timers over a multiprocessing queue: for workers that the watching process has started."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from multiprocessing import connection, queues
from queue import Empty
from typing import Any

from holdfast.log import Logger
from holdfast.loop import Wakeup
from holdfast.timer.api import RequestQueue, TimerClient, TimerRequest
from holdfast.timer.processes import ProcessTimerServer

logger = Logger(__name__)

_PLAIN_GET_S = 0.5


class LocalTimerClient(TimerClient):
    """Sends requests for the calling process."""

    def __init__(self, mp_queue: queues.Queue[TimerRequest]) -> None:
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """A multiprocessing queue as a source of requests. A plain `get` on such a queue cannot be interrupted, so the pipe
    behind it is polled together with a wake-up. A queue that has no pipe (a manager's proxy) gets short plain ones."""

    def __init__(self, mp_queue: queues.Queue[TimerRequest]) -> None:
        self._mp_queue = mp_queue
        self._wakeup = Wakeup()

    def size(self) -> int:
        return self._mp_queue.qsize()

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        until_s = time.monotonic() + timeout
        requests: list[TimerRequest] = []
        for _ in range(size):
            left_s = max(0.0, until_s - time.monotonic())
            reader = getattr(self._mp_queue, "_reader", None)
            if reader is None:
                left_s = min(left_s, _PLAIN_GET_S)
            else:
                ready = connection.wait([reader, self._wakeup.fileno()], left_s)
                self._wakeup.clear()
                if reader not in ready:
                    break
            try:
                requests.append(self._mp_queue.get(timeout=left_s))
            except Empty:
                break
            except Exception as error:
                # An item that cannot be unpickled has left the queue; the others still count.
                logger.warning("skipped a timer request that cannot be read: %s", error)
        return requests

    def wake(self) -> None:
        self._wakeup.wake()


class LocalTimerServer(ProcessTimerServer):
    """Kills the processes that overrun a timer, and logs their stacks: what `dump_stacks(pid)` returns, or py-spy."""

    def __init__(
        self,
        mp_queue: queues.Queue[TimerRequest],
        max_interval: float = 60,
        daemon: bool = True,
        *,
        dump_stacks: Callable[[int], str] | None = None,
    ) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon, dump_stacks)

    def register_timers(self, timer_requests: list[Any]) -> None:
        for junk in (each for each in timer_requests if not _is_request(each)):
            logger.warning("skipped %.80r, which is not a timer request", junk)
        super().register_timers([each for each in timer_requests if _is_request(each)])

    def _fetch(self, timeout_s: float) -> None:
        """Wait for one request, then take the others that are there. The queue's size may be too high: a client that
        dies between counting a request and sending it leaves it so for good."""
        requests = self._request_queue.get(1, timeout_s)
        if requests:
            requests += self._request_queue.get(self._request_queue.size(), 0.0)
        self.register_timers(requests)


def _is_request(candidate: Any) -> bool:
    """Whether it has the fields of a request; other libraries use the same three names."""
    pid, scope, end = (getattr(candidate, name, None) for name in ("worker_id", "scope_id", "expiration_time"))
    return type(pid) is int and isinstance(scope, str) and isinstance(end, int | float) and not math.isnan(end)
