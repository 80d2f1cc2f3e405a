"""The agent: owns one node's workers, and starts, watches, restarts and stops them as a unit.

The names below are resolved on first use: who only wants the data classes does not pay for the agent.
"""

from __future__ import annotations

from holdfast import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.agent.agent import ElasticAgent as ElasticAgent
    from holdfast.agent.agent import SimpleElasticAgent as SimpleElasticAgent
    from holdfast.agent.local import LocalElasticAgent as LocalElasticAgent
    from holdfast.agent.model import TORCHELASTIC_ENABLE_FILE_TIMER as TORCHELASTIC_ENABLE_FILE_TIMER
    from holdfast.agent.model import TORCHELASTIC_TIMER_FILE as TORCHELASTIC_TIMER_FILE
    from holdfast.agent.model import RunResult as RunResult
    from holdfast.agent.model import Worker as Worker
    from holdfast.agent.model import WorkerGroup as WorkerGroup
    from holdfast.agent.model import WorkerSpec as WorkerSpec
    from holdfast.agent.model import WorkerState as WorkerState

__all__, __getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "holdfast.agent.agent": "ElasticAgent SimpleElasticAgent",
        "holdfast.agent.local": "LocalElasticAgent",
        "holdfast.agent.model": (
            "TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE RunResult Worker WorkerGroup WorkerSpec WorkerState"
        ),
    },
)
