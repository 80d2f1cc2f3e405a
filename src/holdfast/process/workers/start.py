"""The ways to make a group of processes: `start_processes` for users, `new_group` for the agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.frozen import frozen
from holdfast.process.workers.group import MultiprocessContext, PContext, SubprocessContext

if TYPE_CHECKING:
    from holdfast.process.output.logs import LogsSpecs


@frozen
class GroupSpec:
    """The settings of a group that stay the same in every life of it.

    `entrypoint` is a function or the program to execute; `start_method` is for functions. In
    `log_line_prefix_template`, `${role_name}`, `${rank}` and `${local_rank}` are filled in. The launcher fills these
    fields from those of `LaunchConfig` that have the same names.
    """

    role: str
    entrypoint: Callable[..., Any] | str
    logs_specs: LogsSpecs
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    numa_options: Any = None
    duplicate_stdout_filters: Sequence[str] | None = None
    duplicate_stderr_filters: Sequence[str] | None = None


def new_group(
    spec: GroupSpec,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    log_line_prefixes: dict[int, str] | None = None,
    **more: Any,
) -> PContext:
    """One life of a group, before its start. `more` are the `link`, `lease` and `watch` of `PContext`."""
    logs = (spec.logs_specs, log_line_prefixes, spec.duplicate_stdout_filters, spec.duplicate_stderr_filters)
    more["numa_options"] = spec.numa_options
    if isinstance(spec.entrypoint, str):
        return SubprocessContext(spec.role, spec.entrypoint, args, envs, *logs, **more)
    return MultiprocessContext(spec.role, spec.entrypoint, args, envs, spec.start_method, *logs, **more)


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: Any = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
    **more: Any,
) -> PContext:
    """Start one process for each local rank: of a program (a text entry point) or of a function.

    `args` and `envs` map each local rank 0..n-1 to its arguments and its additional environment.
    """
    filters = (duplicate_stdout_filters, duplicate_stderr_filters)
    spec = GroupSpec(name, entrypoint, logs_specs, start_method, None, numa_options, *filters)
    context = new_group(spec, args, envs, log_line_prefixes, **more)
    context.start()
    return context
