"""The timers of processes: the code that the servers for queues and for pipes share.

Deadlines. A request names its deadline in seconds since the epoch. A wall clock is set now and then, and a step of it
must neither fire a timer nor delay one. So a deadline is converted once, when its request arrives, and from then on
only the monotonic clock counts. Two clocks cannot be read at the same instant, so the distance between them is kept
until it has moved by more than a reading can explain. Deadlines that are converted without a step between them
therefore keep their order exactly.

Processes. The kernel reuses pids. A pid together with its start time names one process for as long as the host is up.
A process that reuses a pid is never signalled, nor is a group of processes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from holdfast import procfs
from holdfast.hangs import stacks
from holdfast.timer.api import TimerRequest
from holdfast.timer.table import TimerTable

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=TimerRequest)

# Steps are of milliseconds or more. Smaller corrections are slewed, which moves both clocks alike.
_STEP_S = 0.001


class ProcessTimers(Generic[R]):
    """The part of a server that keeps timers by pid. `dump_stacks(pid)` returns text for the log."""

    _unreaped: set[int]  # Could not be signalled at the last turn.

    def __init__(self, dump_stacks: Callable[[int], str] | None) -> None:
        self._dump_stacks = dump_stacks or stacks.dump_with_py_spy
        self._timers: TimerTable[R] = TimerTable()
        self._request_count = 0
        self._distance_s = time.time() - time.monotonic()

    def register_timers(self, timer_requests: list[R]) -> None:
        """Arm and release timers as the requests say, in their order."""
        distance_s = self._clock_distance_s()
        started: dict[int, int | None] = {}
        for request in timer_requests:
            pid, scope = request.worker_id, request.scope_id
            self._request_count += 1
            if request.expiration_time < 0:
                self._timers.release(pid, scope)
                continue
            if pid not in started:
                started[pid] = start_time(pid)
            self._timers.register(pid, scope, request.expiration_time - distance_s, request, started[pid])

    def clear_timers(self, worker_ids: set[int]) -> None:
        """Forget the timers of these processes and of all that have ended."""
        for pid in self._timers.pids():
            if pid in worker_ids or not self._is_same_process(pid):
                self._timers.forget(pid)

    def get_expired_timers(self, deadline: float) -> dict[int, list[R]]:
        """By pid, the timers whose expiration time is not after `deadline`, earliest first."""
        return self._timers.expired(deadline - self._clock_distance_s())

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether there is such a process. A zombie does not count."""
        return pid > 0 and start_time(pid) is not None

    def _is_same_process(self, pid: int) -> bool:
        """Whether the process that armed its timers still runs, as far as is known."""
        started = self._timers.started(pid)
        return self.is_process_running(pid) and (started is None or start_time(pid) in (None, started))

    def _is_signalled(self, pid: int, signal: int) -> bool:
        """Send the signal. False means that it should be tried again."""
        try:
            if pid <= 0:  # To the kernel that means a whole group of processes.
                raise ProcessLookupError
            os.kill(pid, signal)
        except ProcessLookupError:
            logger.info("process %d is already gone", pid)
        except OSError as error:
            level = logging.DEBUG if pid in self._unreaped else logging.ERROR
            logger.log(level, "cannot send signal %d to process %d, will try again: %s", signal, pid, error)
            return False
        return True

    def _stacks_of(self, pid: int) -> str:
        """Indented, so that no name in them can begin a line of the log."""
        return stacks.text_for(pid, self._dump_stacks).replace("\n", "\n  ")

    def _next_deadline_s(self) -> float | None:
        return self._timers.next_deadline()

    def _clock_distance_s(self) -> float:
        """Subtract this from a wall-clock time to convert it to the monotonic clock."""
        self._distance_s = held_distance_s(self._distance_s, time.monotonic(), time.time(), time.monotonic())
        return self._distance_s


def held_distance_s(held_s: float, before_s: float, wall_s: float, after_s: float) -> float:
    """The distance from monotonic to wall clock, given the one held so far and a reading between two others."""
    measured_s = wall_s - (before_s + after_s) / 2
    doubt_s = (after_s - before_s) / 2
    return measured_s if abs(measured_s - held_s) > _STEP_S + doubt_s else held_s


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it does not run."""
    status = procfs.process_status(pid)
    return None if status is None or status.state in "ZX" else status.start_time


def is_own(pid: int) -> bool:
    """Whether a signal to `pid` would hit this very process. The kernel accepts ids of threads as well."""
    return pid == os.getpid() or os.path.exists(f"/proc/self/task/{pid}")
