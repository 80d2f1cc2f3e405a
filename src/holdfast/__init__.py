"""holdfast: an elastic launcher and supervisor for distributed jobs, for any framework.

The names below are resolved on first use, so that `import holdfast` costs next to nothing in a worker that
only wants one of them.
"""

from __future__ import annotations

from holdfast import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast import snapshots as snapshots
    from holdfast.launcher import LaunchConfig as LaunchConfig
    from holdfast.launcher import elastic_launch as elastic_launch
    from holdfast.launcher import launch_agent as launch_agent
    from holdfast.notice_board import notice as notice
    from holdfast.process.errors import ChildFailedError as ChildFailedError
    from holdfast.process.errors import record as record
    from holdfast.progress_board import progress as progress
    from holdfast.signals import SignalException as SignalException
    from holdfast.stop_hooks import on_stop as on_stop

__version__ = "0.1.0"

__all__, __getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "holdfast.launcher": "LaunchConfig elastic_launch launch_agent",
        "holdfast.notice_board": "notice",
        "holdfast.process.errors": "ChildFailedError record",
        "holdfast.progress_board": "progress",
        "holdfast.signals": "SignalException",
        "holdfast.snapshots": "snapshots",
        "holdfast.stop_hooks": "on_stop",
    },
)
