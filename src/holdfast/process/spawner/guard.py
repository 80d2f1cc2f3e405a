"""Keeps a spawner from standing still: a thread of its agent continues one that was stopped by a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from holdfast import procfs
from holdfast.log import Logger

logger = Logger(__name__)

# How long the spawner may be stopped. A scheduler that suspends a job stops the agent within this time, too.
_STANDSTILL_S = 1.0
# A spawner that was stopped again within this time after it was continued, so many times, is killed.
_RELAPSE_S = 10.0
_MOST_RELAPSES = 3


def keep_going(pid: int, is_gone: threading.Event) -> None:
    """Keeps the spawner from standing still, in a thread.

    A worker of the same user can stop it (SIGSTOP). Then no end of a worker is reported, and no lease enforced. The
    kernel reports that to the parent, and this thread waits for it. A spawner that is stopped is continued; one that is
    stopped again and again is killed, and everything that it owns goes with it.
    """

    relapses, continued_at = 0, -_RELAPSE_S
    with contextlib.suppress(ChildProcessError):  # It was reaped.
        while _is_stopped(pid, 0, is_gone) and not is_gone.wait(_STANDSTILL_S):
            if not _is_stopped(pid, os.WNOHANG, is_gone):
                continue
            relapses = relapses + 1 if time.monotonic() < continued_at + _RELAPSE_S else 0
            continued_at = time.monotonic()
            if relapses >= _MOST_RELAPSES:
                number, text = signal.SIGKILL, "is stopped again and again by a signal; it is killed with all workers"
            else:
                number, text = signal.SIGCONT, "was stopped by a signal; it is continued"
            logger.warning("the spawner (process %d) %s", pid, text)
            procfs.kill(pid, number)


def _is_stopped(pid: int, flags: int, is_gone: threading.Event) -> bool:
    """Waits until it is stopped or has ended, unless the flags say otherwise. Its end stays for others to reap. Of a
    spawner that an earlier run has kept the kernel reports nothing here, so it is looked at."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT | flags)
        return found is not None and found.si_code == os.CLD_STOPPED
    except ChildProcessError:
        while procfs.state(pid) not in ("", "T") and not flags and not is_gone.wait(_STANDSTILL_S):
            pass
        if procfs.state(pid) == "" or is_gone.is_set():
            raise
        return procfs.state(pid) == "T"
