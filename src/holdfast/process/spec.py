"""What to start: the settings of a worker group that stay the same in every life of it.

The launcher makes one `GroupSpec` from a `LaunchConfig`, by the names of the fields. The agent and `PContext` take it
whole, so a new setting is a field here and the code that uses it. What changes from one life to the next (arguments,
environments, labels of log lines) is given to `new_group` beside it. `start_processes`, the classes of
contexts and `LocalElasticAgent` keep the signatures that users know, and make a `GroupSpec` from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.frozen import frozen

if TYPE_CHECKING:
    from holdfast.process.output.logs import LogsSpecs


@frozen
class GroupSpec:
    """`entrypoint` is a function or the program to execute; `start_method` is for functions. In
    `log_line_prefix_template`, `${role_name}`, `${rank}` and `${local_rank}` are filled in."""

    role: str
    entrypoint: Callable[..., Any] | str
    logs_specs: LogsSpecs
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    numa_options: Any = None
    duplicate_stdout_filters: Sequence[str] | None = None
    duplicate_stderr_filters: Sequence[str] | None = None
