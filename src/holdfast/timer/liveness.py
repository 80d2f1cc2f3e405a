"""Is the process that armed a timer still there, is it still the same one, and may it be signalled?

The kernel hands pids out again. A pid together with the start time in /proc/<pid>/stat names one process for as
long as the host is up.
"""

from __future__ import annotations

import os
from collections.abc import Callable

# Position of the fields after the command's name, which ends with the last parenthesis: see proc(5).
_STATE, _START_TIME = 0, 19


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none or it has already died."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) <= _START_TIME or fields[_STATE] in (b"Z", b"X"):
        return None
    return int(fields[_START_TIME])


def is_running(pid: int) -> bool:
    """Whether there is such a process. One that is dead and only waits for its parent does not count."""
    return pid > 0 and start_time(pid) is not None


def is_same_process(pid: int, started: int | None, is_running: Callable[[int], bool]) -> bool:
    """Whether `pid` is running and, where that can be told, is the process that started at `started`."""
    return is_running(pid) and (started is None or start_time(pid) in (None, started))


def is_own(pid: int) -> bool:
    """Whether a signal to `pid` would hit this very process. The kernel accepts ids of threads as well."""
    return pid == os.getpid() or os.path.exists(f"/proc/self/task/{pid}")


def send_signal(pid: int, signal: int) -> None:
    """`os.kill`, for one process only: to the kernel a pid of zero or less means a whole group of processes."""
    if pid <= 0:
        raise ProcessLookupError(f"{pid} is not the id of a process")
    os.kill(pid, signal)
