"""Starting, watching and stopping processes; their logs and their errors.

Public names are resolved on first use: the spawner and every worker import this package, and want little of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.process.errors import ProcessFailure
    from holdfast.process.logs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, get_std_cm, to_map
    from holdfast.process.signals import SignalException
    from holdfast.process.start import (
        MultiprocessContext,
        PContext,
        RunProcsResult,
        SubprocessContext,
        start_processes,
    )

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "get_std_cm",
    "start_processes",
    "to_map",
]

_HOMES = {
    "ProcessFailure": "errors",
    "SignalException": "signals",
    **dict.fromkeys(("DefaultLogsSpecs", "LogsDest", "LogsSpecs", "Std", "get_std_cm", "to_map"), "logs"),
    **dict.fromkeys(
        ("MultiprocessContext", "PContext", "RunProcsResult", "SubprocessContext", "start_processes"), "start"
    ),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast.process' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.process.{home}"), name)
