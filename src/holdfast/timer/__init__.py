"""Timers: a worker says by when a block of code will be done, and is stopped if it is not.

A worker arms a timer on entering a block (`expires`) and releases it on leaving. A server outside the worker
keeps the table of armed timers and signals the processes whose deadlines have passed, so that a hang becomes a
failure that can be explained and restarted. Requests travel through a multiprocessing queue (`LocalTimer*`) or
through a named pipe (`FileTimer*`); the pipe's format is the one that torch's clients and servers speak.

The names below are resolved on first use.
"""

from typing import TYPE_CHECKING

from holdfast import lazy

if TYPE_CHECKING:
    from holdfast.timer.api import TimerClient, TimerRequest, TimerServer, configure, expires
    from holdfast.timer.fifo import FileTimerClient, FileTimerServer
    from holdfast.timer.pipe import FileTimerRequest
    from holdfast.timer.queue import LocalTimerClient, LocalTimerServer

__all__ = [
    "FileTimerClient", "FileTimerRequest", "FileTimerServer", "LocalTimerClient", "LocalTimerServer", "TimerClient",
    "TimerRequest", "TimerServer", "configure", "expires",
]  # fmt: skip

_HOMES = {"FileTimerRequest": "pipe", **dict.fromkeys(("FileTimerClient", "FileTimerServer"), "fifo")}
_HOMES |= dict.fromkeys(("LocalTimerClient", "LocalTimerServer"), "queue")
__getattr__, __dir__ = lazy.exports(__name__, dict.fromkeys(__all__, "api") | _HOMES)
