"""Timers: a worker says by when a block of code will be done, and is stopped if it is not.

A worker arms a timer on entering a block (`expires`) and releases it on leaving. A server outside the worker
keeps the table of armed timers and signals the processes whose deadlines have passed, so that a hang becomes a
failure that can be explained and restarted. Requests travel through a multiprocessing queue (`LocalTimer*`) or
through a named pipe (`FileTimer*`); the pipe's format is the one that torch's clients and servers speak.

The names below are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.timer.api import TimerClient, TimerRequest, TimerServer, configure, expires
    from holdfast.timer.file import FileTimerClient, FileTimerRequest, FileTimerServer
    from holdfast.timer.local import LocalTimerClient, LocalTimerServer

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]

_HOMES = {
    **dict.fromkeys(("TimerClient", "TimerRequest", "TimerServer", "configure", "expires"), "api"),
    **dict.fromkeys(("FileTimerClient", "FileTimerRequest", "FileTimerServer"), "file"),
    **dict.fromkeys(("LocalTimerClient", "LocalTimerServer"), "local"),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast.timer' has no attribute {name!r}")
    value = getattr(import_module(f"holdfast.timer.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
