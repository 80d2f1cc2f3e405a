"""The agent: owns one node's workers, and starts, watches, restarts and stops them as a unit.

The names below are resolved on first use: who only wants the data classes does not pay for the agent.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.agent.base import ElasticAgent, SimpleElasticAgent
    from holdfast.agent.local import LocalElasticAgent
    from holdfast.agent.model import (
        TORCHELASTIC_ENABLE_FILE_TIMER,
        TORCHELASTIC_TIMER_FILE,
        RunResult,
        Worker,
        WorkerGroup,
        WorkerSpec,
        WorkerState,
    )

__all__ = [
    "ElasticAgent",
    "LocalElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_TIMER_FILE",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]

_HOMES = {
    "ElasticAgent": "holdfast.agent.base",
    "SimpleElasticAgent": "holdfast.agent.base",
    "LocalElasticAgent": "holdfast.agent.local",
    "RunResult": "holdfast.agent.model",
    "TORCHELASTIC_ENABLE_FILE_TIMER": "holdfast.agent.model",
    "TORCHELASTIC_TIMER_FILE": "holdfast.agent.model",
    "Worker": "holdfast.agent.model",
    "WorkerGroup": "holdfast.agent.model",
    "WorkerSpec": "holdfast.agent.model",
    "WorkerState": "holdfast.agent.model",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast.agent' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
