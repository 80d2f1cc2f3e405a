"""Starting, watching and stopping processes; their logs and their errors.

Public names are resolved on first use: the spawner and every worker import this package, and want little of it.
"""

from __future__ import annotations

from holdfast import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.process.errors import ProcessFailure as ProcessFailure
    from holdfast.process.output.logs import DefaultLogsSpecs as DefaultLogsSpecs
    from holdfast.process.output.logs import LogsDest as LogsDest
    from holdfast.process.output.logs import LogsSpecs as LogsSpecs
    from holdfast.process.output.logs import Std as Std
    from holdfast.process.output.logs import get_std_cm as get_std_cm
    from holdfast.process.output.logs import to_map as to_map
    from holdfast.process.workers.functions import MultiprocessContext as MultiprocessContext
    from holdfast.process.workers.group import PContext as PContext
    from holdfast.process.workers.group import SubprocessContext as SubprocessContext
    from holdfast.process.workers.start import start_processes as start_processes
    from holdfast.process.workers.worker import RunProcsResult as RunProcsResult
    from holdfast.signals import SignalException as SignalException

__all__, __getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "holdfast.process.errors": "ProcessFailure",
        "holdfast.process.output.logs": "DefaultLogsSpecs LogsDest LogsSpecs Std get_std_cm to_map",
        "holdfast.process.workers.functions": "MultiprocessContext",
        "holdfast.process.workers.group": "PContext SubprocessContext",
        "holdfast.process.workers.start": "start_processes",
        "holdfast.process.workers.worker": "RunProcsResult",
        "holdfast.signals": "SignalException",
    },
)
