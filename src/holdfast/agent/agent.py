"""Agents as users know them: the contract, and the one whose four hooks make a whole agent.

What an agent does is in its parts: `loop` drives the machine of `lifecycle`, `workers` are what it drives, and `sinks`
are told of each step. The classes here put them together for one run.
"""

from __future__ import annotations

import abc
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from holdfast import signals
from holdfast.agent import causes
from holdfast.agent.loop import AgentLoop
from holdfast.agent.model import RunResult, WorkerGroup, WorkerSpec, WorkerState
from holdfast.agent.notice import NodeNotice
from holdfast.agent.publisher import Publisher
from holdfast.agent.sinks import LogLines, Records, Sink
from holdfast.agent.workers import Workers
from holdfast.errors import UserError
from holdfast.loop import BusyTime
from holdfast.rendezvous.coordination import Coordination
from holdfast.rendezvous.solo import SoloCoordination
from holdfast.telemetry.metrics import prof
from holdfast.telemetry.status import AgentStatus

if TYPE_CHECKING:
    from holdfast.agent.node_checks import NodeChecks
    from holdfast.telemetry.events import Event

__all__ = ["DEFAULT_ROLE", "ElasticAgent", "SimpleElasticAgent"]

DEFAULT_ROLE = "default"
HOOKS = ("_start_workers", "_stop_workers", "_monitor_workers", "_shutdown")


class ElasticAgent(abc.ABC):
    """Owns the workers of one node."""

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to the end, through restarts and changes of membership."""

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The group of workers as it stands."""


class SimpleElasticAgent(ElasticAgent):
    """An agent for workers of one role. A subclass that implements the four abstract hooks is a whole agent: it is
    asked for the state of its workers every `monitor_interval`, and each of its hooks may block."""

    def __init__(self, spec: WorkerSpec, exit_barrier_timeout: float = 300, shutdown_timeout: float = 30) -> None:
        self._worker_group = WorkerGroup(spec)
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._health_check_server: Any = None
        self._records = Records(self._worker_group)
        self._publisher: Publisher | None = None
        self._result = RunResult(WorkerState.INIT)
        self._busy_time = BusyTime()

    @abc.abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start one worker for each local rank; returns their ids."""

    @abc.abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop every worker of the group and everything they started."""

    @abc.abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """How the workers stand at this moment. Only looks."""

    @abc.abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        """Stop the workers with that signal and release everything. Called once at the end, may find nothing."""

    def _get_alive_time(self) -> float:
        """For the health check: when this agent was last known to be alive, in seconds since the epoch. A loop that
        waits is alive now, whatever it waits for. A subclass may give it another meaning."""
        return time.time() - self._busy_time.busy_for_s()

    def _make_workers(self) -> tuple[Workers, Workers]:
        """What the loop drives, and what is known of the processes behind it."""
        from holdfast.agent.hook_workers import HookWorkers

        workers = HookWorkers(self._worker_group, {name: getattr(self, name) for name in HOOKS})
        return workers, workers

    # What others see.

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    @property
    def status(self) -> AgentStatus:
        """How this agent stands. Any thread may ask."""
        return self._publisher.status if self._publisher is not None else AgentStatus()

    def get_event_succeeded(self) -> Event:
        return self._records.event("SUCCEEDED")

    def get_event_failed(self) -> Event:
        """Of the exception that is being handled, or of workers that failed."""
        import traceback

        is_raised = sys.exc_info()[0] is not None
        cause = traceback.format_exc() if is_raised else causes.failure_of(self._result, 0).text
        return self._records.event("FAILED", raw_error=cause)

    def _checks(self, run: Coordination, publisher: Publisher, told: list[Sink]) -> NodeChecks | None:
        plan = self._worker_group.spec.checks
        if plan is None:
            return None
        from holdfast.agent.node_checks import NodeChecks

        checks = NodeChecks(plan, run, tuple(told), self._checks_dir, lambda: publisher.control_path)
        publisher.readable |= checks.commands
        publisher.unready_words = checks.waiting_for
        told.append(checks)
        return checks

    def _checks_dir(self) -> str:
        """Where the output of checks is kept; empty if nowhere."""
        return ""

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        group, spec, handler = self._worker_group, self._worker_group.spec, self._worker_group.spec.rdzv_handler
        if handler is None:
            raise UserError("the worker spec has no rendezvous handler")
        run = handler if isinstance(handler, Coordination) else SoloCoordination(handler, spec.monitor_interval)
        workers, processes = self._make_workers()
        self._publisher = publisher = Publisher(group, processes, run, self._get_alive_time)
        told: list[Sink] = [LogLines(group, processes, run, self._exit_barrier_timeout), self._records, publisher]
        if spec.events_file:
            from holdfast.agent.journal import Journal

            told.append(Journal(group, processes))
        notice = NodeNotice(spec.notice, processes, run, self._shutdown_timeout, told)
        publisher.notice_status = notice.status
        checks = self._checks(run, publisher, told)
        limits_s = (self._exit_barrier_timeout, self._shutdown_timeout)
        loop = AgentLoop(group, workers, run, *limits_s, told, checks, notice)
        run.watch_loop(self._busy_time.stuck_for_s)
        run.answer_with(publisher.answer)
        with self._busy_time.measured_here(), publisher.served(self._health_check_server), signals.deferred():
            self._result = loop.run()
        return self._result
