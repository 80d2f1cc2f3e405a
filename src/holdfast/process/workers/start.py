"""The ways to make a group of processes: `start_processes` for users, `new_group` for the agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.process.spec import GroupSpec
from holdfast.process.workers.group import MultiprocessContext, PContext, SubprocessContext

if TYPE_CHECKING:
    from holdfast.process.output.logs import LogsSpecs
    from holdfast.process.output.watch import OutputWatch
    from holdfast.process.spawner.client import SpawnerLink
    from holdfast.process.spawner.lease import Lease


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
    *,
    link: SpawnerLink | None = None,
    lease: Lease | None = None,
) -> PContext:
    """Start one process for each local rank: of a program (a text entry point) or of a function.

    `args` and `envs` map each local rank 0..n-1 to its arguments and its additional environment.
    """
    filters = (duplicate_stdout_filters, duplicate_stderr_filters)
    spec = GroupSpec(name, entrypoint, logs_specs, start_method, None, numa_options, *filters)
    context = new_group(spec, args, envs, log_line_prefixes, link=link, lease=lease)
    context.start()
    return context


def new_group(
    spec: GroupSpec,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    log_line_prefixes: dict[int, str] | None = None,
    *,
    link: SpawnerLink | None = None,
    lease: Lease | None = None,
    watch: OutputWatch | None = None,
) -> PContext:
    """One life of a group, before its start. A `link` to a spawner that is already there saves starting another one.
    When the `lease` expires the spawner kills the processes. A `watch` notes when they write something."""
    kind = SubprocessContext if isinstance(spec.entrypoint, str) else MultiprocessContext
    context = kind.__new__(kind)
    context.set_up(spec, args, envs, log_line_prefixes, link, lease, watch)
    return context
