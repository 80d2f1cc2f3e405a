"""Ends a coordinator whose loop stands still, so that hosting replaces it.

The loop resets a counter every `_TICK_S`. A thread counts its own ticks; when there were too many since the last reset
it writes one line and all stacks to the log and kills the process. The agents of the host start another coordinator; on
etcd the agent that had started this one gives its lease back.

Ticks are counted because no clock tells the difference between a loop that stands still and a process that did: one
that was frozen as a whole (SIGSTOP, a cgroup freezer, a suspended machine) has not counted meanwhile, and goes on.
A call that never returns and never releases the interpreter lock stops the thread, too, and is not noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable

_TICK_S = 0.5
_TELLING_S = 2.0


class Watchdog:
    """To be made in the loop. `limit_s` says how long the loop may stand still, and is asked in it."""

    def __init__(self, limit_s: Callable[[], float]) -> None:
        self._ask_limit_s = limit_s
        self._limit_s = limit_s()
        self._ticks = 0
        self._is_over = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._reset()
        threading.Thread(target=self._watch, name="holdfast-watchdog", daemon=True).start()

    def _reset(self) -> None:
        self._ticks = 0
        self._limit_s = self._ask_limit_s()
        self._timer = self._loop.call_later(_TICK_S, self._reset)

    def _watch(self) -> None:
        while not self._is_over.wait(_TICK_S):
            self._ticks += 1
            if self._ticks * _TICK_S > self._limit_s:
                # The log may be what the loop waits for, so writing to it has a time limit.
                telling = threading.Thread(target=self._tell, daemon=True)
                telling.start()
                telling.join(_TELLING_S)
                os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            stood_s = self._ticks * _TICK_S
            line = f"the loop of this coordinator has stood still for {stood_s:g} s: it kills itself; its stacks:\n"
            os.write(sys.stderr.fileno(), line.encode())
            faulthandler.dump_traceback(sys.stderr.fileno())

    def close(self) -> None:
        self._timer.cancel()
        self._is_over.set()
