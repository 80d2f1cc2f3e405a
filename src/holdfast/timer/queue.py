"""Timers over a multiprocessing queue: for workers that the watching process has started."""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import time
from collections.abc import Callable
from multiprocessing import queues
from queue import Empty
from typing import Any

from holdfast import escape
from holdfast.loop import Wakeup
from holdfast.timer import processes
from holdfast.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer

logger = logging.getLogger(__name__)


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
    behind it is polled together with a wake-up. A queue that has no pipe (a manager's proxy) gets a plain `get`."""

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
            if reader is not None and not self._is_ready(reader.fileno(), left_s):
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

    def _is_ready(self, reader_fd: int, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(reader_fd, select.POLLIN)
        poller.register(self._wakeup.fileno(), select.POLLIN)
        ready = {fd for fd, _ in poller.poll(timeout_s * 1000)}
        self._wakeup.clear()
        return reader_fd in ready


class LocalTimerServer(processes.ProcessTimers[TimerRequest], TimerServer):
    """Kills the processes that overrun a timer, and logs their stacks: what `dump_stacks(pid)` returns, or py-spy."""

    def __init__(
        self,
        mp_queue: queues.Queue[TimerRequest],
        max_interval: float = 60,
        daemon: bool = True,
        *,
        dump_stacks: Callable[[int], str] | None = None,
    ) -> None:
        processes.ProcessTimers.__init__(self, dump_stacks)
        TimerServer.__init__(self, MultiprocessingRequestQueue(mp_queue), max_interval, daemon)

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        for junk in (each for each in timer_requests if not _is_request(each)):
            logger.warning("skipped %.80r, which is not a timer request", junk)
        super().register_timers([each for each in timer_requests if _is_request(each)])

    def _reap_worker(self, worker_id: int) -> bool:
        if not self._is_same_process(worker_id):
            return True
        if processes.is_own(worker_id):
            logger.error("process %d has overrun a timer, but it is the watchdog's own and is not killed", worker_id)
            return True
        if worker_id not in self._unreaped:
            logger.warning("killing process %d\n  %s", worker_id, self._stacks_of(worker_id), extra=escape.HAS_LINES)
        return self._is_signalled(worker_id, signal.SIGKILL)

    def _fetch(self, wait_s: float) -> list[TimerRequest]:
        """Wait for one request, then take the others that are there. The queue's size may be too high: a client that
        dies between counting a request and sending it leaves it so for good."""
        requests = self._request_queue.get(1, wait_s)
        if requests:
            requests += self._request_queue.get(self._request_queue.size(), 0.0)
        return requests


def _is_request(candidate: Any) -> bool:
    """Whether it has the fields of a request; other libraries use the same three names."""
    pid, scope, end = (getattr(candidate, name, None) for name in ("worker_id", "scope_id", "expiration_time"))
    return type(pid) is int and isinstance(scope, str) and isinstance(end, int | float) and not math.isnan(end)
