"""Making a group of processes: the kind of `PContext` for an entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.process.output.logs import LogsSpecs
from holdfast.process.workers.group import GroupSpec, PContext, SubprocessContext


def new_group(
    spec: GroupSpec,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    log_line_prefixes: dict[int, str] | None = None,
    **more: Any,
) -> PContext:
    """One life of a group, before its start. `more` are the `link`, `lease`, `watch` and `copied` of `PContext`."""
    entrypoint, rest = spec.entrypoint, (spec.logs_specs, log_line_prefixes)
    if isinstance(entrypoint, str):
        return SubprocessContext(spec.role, entrypoint, args, envs, *rest, spec=spec, **more)
    from holdfast.process.workers.functions import MultiprocessContext

    return MultiprocessContext(spec.role, entrypoint, args, envs, spec.start_method, *rest, spec=spec, **more)


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
