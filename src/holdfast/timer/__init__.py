"""Timers: a worker sets a deadline for a block of code, and is stopped if it overruns.

A worker arms a timer on entering a block (`expires`) and releases it on leaving. A server outside the worker
keeps the table of armed timers and signals the processes whose deadlines have passed, so that a hang becomes a
failure that can be explained and restarted. Requests travel through a multiprocessing queue (`LocalTimer*`) or
through a named pipe (`FileTimer*`); the pipe's format is the one that torch's clients and servers speak.

The names below are resolved on first use.
"""

from __future__ import annotations

from holdfast import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.timer.client import FileTimerClient as FileTimerClient
    from holdfast.timer.client import FileTimerRequest as FileTimerRequest
    from holdfast.timer.client import LocalTimerClient as LocalTimerClient
    from holdfast.timer.client import TimerClient as TimerClient
    from holdfast.timer.client import TimerRequest as TimerRequest
    from holdfast.timer.client import configure as configure
    from holdfast.timer.client import expires as expires
    from holdfast.timer.server import FileTimerServer as FileTimerServer
    from holdfast.timer.server import LocalTimerServer as LocalTimerServer
    from holdfast.timer.server import MultiprocessingRequestQueue as MultiprocessingRequestQueue
    from holdfast.timer.server import RequestQueue as RequestQueue
    from holdfast.timer.server import TimerServer as TimerServer

__all__, __getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "holdfast.timer.client": "FileTimerClient FileTimerRequest LocalTimerClient "
        "TimerClient TimerRequest configure expires",
        "holdfast.timer.server": "FileTimerServer LocalTimerServer MultiprocessingRequestQueue "
        "RequestQueue TimerServer",
    },
)
