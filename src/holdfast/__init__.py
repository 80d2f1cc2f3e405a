"""holdfast: an elastic launcher and supervisor for distributed jobs, for any framework.

The names below are resolved on first use, so that `import holdfast` costs next to nothing in a worker that
only wants one of them.
"""

from __future__ import annotations

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import.
if TYPE_CHECKING:
    from typing import Any

    from holdfast.launcher import LaunchConfig, elastic_launch, launch_agent
    from holdfast.process.errors import ChildFailedError, record
    from holdfast.process.signals import SignalException
    from holdfast.steps import progress

__version__ = "0.1.0"

__all__ = [
    "ChildFailedError",
    "LaunchConfig",
    "SignalException",
    "elastic_launch",
    "launch_agent",
    "progress",
    "record",
]

_HOMES = {
    "LaunchConfig": "holdfast.launcher",
    "elastic_launch": "holdfast.launcher",
    "launch_agent": "holdfast.launcher",
    "ChildFailedError": "holdfast.process.errors",
    "record": "holdfast.process.errors",
    "SignalException": "holdfast.process.signals",
    "progress": "holdfast.steps",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
