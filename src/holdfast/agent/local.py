"""`LocalElasticAgent`: an agent whose workers are processes of this host."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from holdfast import log
from holdfast.agent.agent import HOOKS, SimpleElasticAgent
from holdfast.agent.local_workers import LocalWorkers
from holdfast.agent.model import (
    TORCHELASTIC_ENABLE_FILE_TIMER,
    TORCHELASTIC_HEALTH_CHECK_PORT,
    TORCHELASTIC_TIMER_FILE,
    RunResult,
    WorkerGroup,
    WorkerSpec,
)
from holdfast.agent.workers import Workers
from holdfast.log import Logger
from holdfast.process import adoption
from holdfast.process.output.logs import LogsSpecs
from holdfast.process.workers.group import GroupSpec

__all__ = [
    "LocalElasticAgent", "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_HEALTH_CHECK_PORT", "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
]  # fmt: skip

logger = Logger(__name__)

TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


class LocalElasticAgent(SimpleElasticAgent):
    """Runs the workers of a `WorkerSpec` as processes, functions or programs, on this host.

    A `group` replaces what `spec` and the other arguments say about how processes are started.
    `uninterruptible_state_timeout` (seconds; also `TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`): a worker that
    stays in uninterruptible sleep for that long makes the group unhealthy.

    The hooks below are for subclasses: an agent that replaces none of them starts and stops without blocking.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = 30,
        health_check_server: Any = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        group: GroupSpec | None = None,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        log.prefix_warnings()
        adoption.announce()
        self._health_check_server = health_check_server
        self._group = group or _group_spec(spec, logs_specs, start_method, log_line_prefix_template)
        place = (self._worker_group, shutdown_timeout, stuck_timeout_s(uninterruptible_state_timeout))
        self._processes = LocalWorkers(self._group, *place, self._records.record)
        self._processes.temporary_logs = getattr(self._group.logs_specs, "temporary_dir", "")  # Plug-ins may have none.

    def _make_workers(self) -> tuple[Workers, Workers]:
        hooks = {name: getattr(self, name) for name in HOOKS}
        own = {name: hook for name, hook in hooks.items() if hook.__func__ is not getattr(LocalElasticAgent, name)}
        if not own:
            return self._processes, self._processes
        from holdfast.agent.hook_workers import HookWorkers

        return HookWorkers(self._worker_group, own, self._processes), self._processes

    def _checks_dir(self) -> str:
        make: Any = getattr(self._group.logs_specs, "make_checks_dir", None)  # Plug-ins may have none.
        return str(make(self._worker_group.spec.run_id)) if make is not None else ""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self._processes.start()

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._processes.stop()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self._processes.look()

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30, is_restart: bool = False
    ) -> None:
        self._processes.shutdown(timeout, death_sig, is_restart=is_restart)

    def _get_watchdog_progress_time(self) -> float:
        """For subclasses whose `_get_alive_time` is to mean this: when the watchdog last completed a turn; now, if
        there is no watchdog. The default is another: a watchdog that hangs must not end a healthy job."""
        server = self._processes.timer_server
        return time.time() if server is None else server.get_last_progress_time()


def _group_spec(spec: WorkerSpec, logs_specs: LogsSpecs, start_method: str, template: str | None) -> GroupSpec:
    assert spec.entrypoint is not None
    filters = (spec.duplicate_stdout_filters, spec.duplicate_stderr_filters)
    return GroupSpec(spec.role, spec.entrypoint, logs_specs, start_method, template, spec.numa_options, *filters)


def stuck_timeout_s(explicit: float | None) -> float:
    """For how long a worker may be in uninterruptible sleep; 0 is for ever."""
    text = os.environ.get(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT) or "0"
    try:
        return max(0.0, float(text) if explicit is None else explicit)
    except ValueError:
        logger.warning(
            "%s=%r is not a number of seconds and is not used", TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, text
        )
        return 0.0
