"""The timers of processes: the server that both queues and pipes feed.

Deadlines. A request names its deadline in seconds since the epoch. A wall clock is set now and then, and a step of it
must neither fire a timer nor delay one. So a deadline is converted once, when its request arrives, and from then on
only the monotonic clock counts.

Processes. The kernel reuses pids. A pid together with its start time names one process for as long as the host is up.
A process that reuses a pid is never signalled, nor is a group of processes, nor the server's own process.

Stacks. They are taken before the signal: afterwards there are none. But a process gets its signal as soon as its own
stacks are there, and after `STACKS_TIMEOUT_S` in any case, whatever becomes of them. Requests are read meanwhile, so
that no client meets a full pipe. The stacks are logged after the signal, which therefore waits for no reader of the
log. A timer that expires while stacks are taken has to wait for them first, so the bound between a deadline and the
signal is twice that time.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from holdfast import escape, procfs
from holdfast.hangs import stacks
from holdfast.log import DEBUG, ERROR, Logger
from holdfast.signals import signal_name
from holdfast.timer.api import RequestQueue, TimerRequest, TimerServer
from holdfast.timer.table import TimerTable

logger = Logger(__name__)

# How long the signal may wait for stacks. py-spy needs about 20 ms on a calm machine.
STACKS_TIMEOUT_S = 0.5


class ProcessTimerServer(TimerServer):
    """Signals the processes that overrun a timer. `dump_stacks(pid)` returns text for the log (from py-spy)."""

    def __init__(
        self, request_queue: RequestQueue, max_interval: float, daemon: bool, dump_stacks: Callable[[int], str] | None
    ) -> None:
        super().__init__(request_queue, max_interval, daemon)
        self._dump_stacks = dump_stacks or (lambda pid: stacks.dump_with_py_spy(pid, STACKS_TIMEOUT_S))
        self._timers = TimerTable()
        self._fatal: dict[int, Any] = {}  # By pid, the timer whose signal to send at this turn.
        self._request_count = 0

    def register_timers(self, timer_requests: list[Any]) -> None:
        """Arm and release timers as the requests say, in their order."""
        wall_s = time.time()
        now_s = time.monotonic()  # Read later, so that a pause between the two delays a timer rather than fires it.
        started: dict[int, int | None] = {}
        for request in timer_requests:
            pid, scope = request.worker_id, request.scope_id
            self._request_count += 1
            if request.expiration_time < 0:
                self._timers.release(pid, scope)
                continue
            if pid not in started:
                started[pid] = start_time(pid)
            deadline_s = now_s + (request.expiration_time - wall_s)
            self._timers.register(pid, scope, deadline_s, request, started[pid])

    def clear_timers(self, worker_ids: set[int]) -> None:
        """Forget the timers of these processes and of all that have ended."""
        for pid in self._timers.pids():
            if pid in worker_ids or not self._is_same_process(pid):
                self._timers.forget(pid)

    def get_expired_timers(self, deadline: float) -> dict[int, list[Any]]:
        """By pid, the timers whose expiration time is not after `deadline`, earliest first."""
        by_pid = self._timers.expired(math.inf)
        due = {pid: [each for each in by_pid[pid] if each.expiration_time <= deadline] for pid in by_pid}
        return {pid: timers for pid, timers in due.items() if timers}

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether there is such a process. A zombie does not count."""
        return pid > 0 and start_time(pid) is not None

    def _is_same_process(self, pid: int) -> bool:
        """Whether the process that armed its timers still runs, as far as is known."""
        started = self._timers.started(pid)
        return self.is_process_running(pid) and (started is None or start_time(pid) in (None, started))

    def _next_deadline_s(self) -> float | None:
        return self._timers.next_deadline()

    def _expired_now(self) -> dict[int, list[Any]]:
        return self._timers.expired(time.monotonic())

    def _condemned(self, expired: dict[int, list[Any]]) -> Iterator[int]:
        """Each is reaped before the next one is asked for. Those of an earlier turn had their stacks taken then."""
        found = {pid: self._examine(pid, timers) for pid, timers in expired.items()}
        self._fatal = {pid: timer for pid, timer in found.items() if timer is not None}
        dumps = stacks.Dumps(self._fatal.keys() - self._unreaped, self._dump_stacks, self._request_queue.wake)
        until_s = time.monotonic() + STACKS_TIMEOUT_S
        yield from self._fatal.keys() & self._unreaped
        texts: dict[int, str | Exception] = {}
        is_over = False
        while not is_over and not self._is_stopping:
            is_over = dumps.are_complete() or time.monotonic() >= until_s
            found = dumps.finish() if is_over else dumps.found()
            fresh = {pid: found[pid] for pid in found.keys() - texts.keys()}
            texts |= fresh
            yield from fresh
            if not is_over:
                self._fetch(max(0.0, until_s - time.monotonic()))
        self._log_stacks(texts)

    def _examine(self, pid: int, timers: list[Any]) -> Any:
        """Report the timers that a process has overrun. Returns the timer whose signal to send, if any."""
        reported, fatal = verdict(timers)
        if not self._is_same_process(pid):
            return None
        if pid in self._unreaped:
            return fatal
        scopes = ", ".join(timer.scope_id for timer in timers)
        for timer in reported:
            self._tell("timer expired", timer)
        if fatal is None:
            logger.info("process %d has overrun %s; no signal was asked for, so it is only reported", pid, scopes)
            return None
        if is_own(pid):
            logger.error("process %d has overrun %s, but it is the watchdog's own and gets no signal", pid, scopes)
            return None
        logger.warning("process %d has overrun %s and will get %s", pid, scopes, signal_name(signal_of(fatal)))
        return fatal

    def _log_stacks(self, texts: dict[int, str | Exception]) -> None:
        for pid, found in texts.items():
            text = found if isinstance(found, str) else f"no stacks of process {pid}: {found}"
            if text:  # Indented, so that no name in it can begin a line of the log.
                logger.warning("%s", text.replace("\n", "\n  "), extra=escape.HAS_LINES)

    def _reap_worker(self, worker_id: int) -> bool:
        """Signal a process, which may have ended while its stacks were taken. False means: try again."""
        if worker_id <= 0 or not self._is_same_process(worker_id):  # To the kernel, 0 and less are groups of processes.
            return True
        timer = self._fatal[worker_id]
        try:
            os.kill(worker_id, signal_of(timer))
        except ProcessLookupError:
            logger.info("process %d is already gone", worker_id)
        except OSError as error:
            level = DEBUG if worker_id in self._unreaped else ERROR
            logger.log(level, "cannot signal process %d, will try again: %s", worker_id, error)
            return False
        self._tell("kill worker process", timer)
        return True

    def _tell(self, name: str, request: Any) -> None:
        """For listeners to the events of this server."""


def signal_of(timer: TimerRequest) -> int:
    """A request without a signal of its own means SIGKILL."""
    return getattr(timer, "signal", signal.SIGKILL)


def verdict(timers: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """Of one process's expired timers, earliest first: those to report, and the one whose signal it gets."""
    for position, timer in enumerate(timers):
        if signal_of(timer) > 0:
            return timers[: position + 1], timer
    return timers, None


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it does not run."""
    status = procfs.process_status(pid)
    return None if status is None or status.state in "ZX" else status.start_time


def is_own(pid: int) -> bool:
    """Whether a signal to `pid` would hit this very process. The kernel accepts ids of threads as well."""
    return pid == os.getpid() or os.path.exists(f"/proc/self/task/{pid}")
