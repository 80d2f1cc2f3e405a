"""Logs, events and metrics of a node: a `Sink` gets each `Step` of the agent's machine and holds nothing of the agent.

`Records` writes the events and metrics under the names that dashboards know, `LogLines` writes the agent's log.
`journal` has the events file, `publisher` the status with the history and the spans that follow it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.agent import lifecycle
from holdfast.agent.lifecycle import WITH_WORKERS, AgentPhase, Step
from holdfast.agent.model import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from holdfast.errors import HoldfastError
from holdfast.frozen import frozen
from holdfast.log import Logger
from holdfast.process.spawner import command
from holdfast.rendezvous.api import RendezvousGracefulExitError, is_kind
from holdfast.rendezvous.membership.model import End, Ended, GoingAway, PlaceLost, Sealed, Stop
from holdfast.signals import NodeWentAway, RunClosed, SignalException
from holdfast.telemetry.metrics import put_call, put_metric
from holdfast.text import plural

if TYPE_CHECKING:
    from holdfast.agent.workers import Workers
    from holdfast.checks.gate import CheckResult
    from holdfast.failures.report import RunReport
    from holdfast.rendezvous.coordination import Coordination
    from holdfast.telemetry.events import Event

logger = Logger(__name__)


@frozen
class RunEnd:
    """How the run ended for this node: `succeeded`, `failed`, `closed`, `left` (a signal took this node away) or
    `error` (of this agent). `result` is that of the workers, unless an `error` took its place."""

    state: str
    reason: str = ""
    result: RunResult | None = None
    error: BaseException | None = None

    @property
    def report(self) -> RunReport | None:
        """What a run that has failed prints."""
        return getattr(self.error, "run_report", None) or (self.result.report if self.result is not None else None)


def end_by(error: BaseException) -> RunEnd:
    if getattr(error, "run_report", None) is not None:
        return RunEnd("failed", str(error), error=error)
    if isinstance(error, SignalException):
        if isinstance(error, RunClosed):
            return RunEnd("closed", str(error), error=error)
        return RunEnd("left", str(error) if isinstance(error, NodeWentAway) else error.sigval.name, error=error)
    if is_kind(error, RendezvousGracefulExitError):
        return RunEnd("succeeded", "this node was not needed any more", error=error)
    return RunEnd("error", str(error) if isinstance(error, HoldfastError) else _words(error), error=error)


class Sink:
    """Called by the agent's loop, which waits for it: a sink leaves what takes time to a thread."""

    def take(self, step: Step) -> None:
        """The machine has taken a step. Its commands are carried out after this."""

    def look(self) -> None:
        """The workers were looked at."""

    def refused(self, error: BaseException) -> None:
        """There is no place for this node."""

    def notice(self, going: GoingAway) -> None:
        """Nodes of the run go away at a known time, or stay after all."""

    def checked(self, results: tuple[CheckResult, ...], delay_s: float | None) -> None:
        """The checks of this node have ended. `delay_s` is until the next try, if the node stays out meanwhile."""

    def leave(self) -> None:
        """This node goes away, which is no step of its machine."""

    def end(self, end: RunEnd) -> None:
        """The run has ended for this node."""


_RENDEZVOUS, _START, _RESTART = "_rendezvous", "_initialize_workers", "_restart_workers"
_BEGUN_BY = {lifecycle.JoinRound: _RENDEZVOUS, lifecycle.StartWorkers: _START, lifecycle.StopWorkers: _RESTART}


class Records(Sink):
    """The events and metrics of one agent, in all its runs, under the names that dashboards know."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._restarts_used = self._run_time_s = 0
        self._since: dict[str, float] = {}  # What has begun and is not done.

    def take(self, step: Step) -> None:
        match step.event:
            case lifecycle.RunRequested():
                self._restarts_used, self._since = 0, {"run": step.time}
            case Sealed(_, place):
                self._restarts_used = place.restarts_used
                self._put_call(_RENDEZVOUS, step.time)
                # The ranks were assigned since the event was taken.
                self.record("ASSIGN_WORKER_RANKS", duration_ms=int((time.monotonic() - step.time) * 1000))
                put_call("SimpleElasticAgent._assign_worker_ranks", step.time)
            case lifecycle.WorkersStarted() if step.phase is AgentPhase.RUNNING:
                for worker in self._group.workers:
                    self.record("START", worker)
                self._put_state()
                self._put_call(_START, step.time)
                self._put_call(_RESTART, step.time)
            case lifecycle.WorkersFailed() | lifecycle.WorkersSucceeded() if step.commands:
                self._put_state()
        for name in filter(None, (_BEGUN_BY.get(type(each)) for each in step.commands)):
            self._since.setdefault(name, step.time)
            if name == _RESTART:
                self._since.pop(_START, None)

    def end(self, end: RunEnd) -> None:
        now = time.monotonic()
        self._run_time_s = int(now - self._since.get("run", now))
        for name in (_RENDEZVOUS, _START) if end.error is not None else ():
            self._put_call(name, now, _words(end.error))
        if end.result is not None:
            self._put_result(end.result)

    def _put_call(self, name: str, now: float, raw_error: str | None = None) -> None:
        if (began := self._since.pop(name, None)) is not None:
            put_call(f"SimpleElasticAgent.{name}", began, has_failed=raw_error is not None)
            if name == _RENDEZVOUS:
                self.record("RENDEZVOUS", raw_error=raw_error, duration_ms=int((now - began) * 1000))

    def _put_result(self, result: RunResult) -> None:
        _put_run_metrics(self._group.spec, result, self._restarts_used)
        for worker in self._group.workers:
            facts: dict[str, Any] = {}
            if (failure := result.failures.get(worker.global_rank)) is not None:
                import json

                facts = {"raw_error": json.dumps(failure.error_file_data), "exit_code": failure.exitcode}
            self.record(_final_state(worker, result), worker, **facts)

    def _put_state(self) -> None:
        spec = self._group.spec
        put_metric(f"workers.{spec.role}.remaining_restarts", max(0, spec.policy.max_restarts - self._restarts_used))
        put_metric(f"workers.{spec.role}.{self._group.state.name.lower()}", 1)

    def notice(self, going: GoingAway) -> None:
        put_metric(f"workers.{self._group.spec.role}.nodes_going_away", going.node_count)
        left = {"left_s": str(going.left_s), "own_left_s": str(going.own_left_s), "reason": going.reason}
        self.record("NOTICE", details=left)

    def record(self, state: str, worker: Worker | None = None, **facts: Any) -> None:
        record(lambda: self.event(state, worker, **facts), self._group.spec.event_log_handler)

    def event(
        self,
        state: str,
        worker: Worker | None = None,
        *,
        raw_error: str | None = None,
        duration_ms: int | None = None,
        exit_code: int | None = None,
        details: Mapping[str, str] | None = None,
        watchdog_event: str = "",
    ) -> Event:
        """About one worker, or about the agent itself. One of the file timer has the timer's own name for it."""
        import json

        from holdfast.telemetry import events

        group, spec, handler = self._group, self._group.spec, self._group.spec.rdzv_handler
        inner: dict[str, Any] = {"group_world_size": group.group_world_size, "entry_point": entry_name(spec)}
        if worker is not None:
            inner |= {
                "local_rank": worker.local_rank,
                "role_rank": worker.role_rank,
                "role_world_size": worker.role_world_size,
                "exit_code": exit_code,
                "worker_pid": worker.id,
            }
        metadata: dict[str, Any] = {
            "run_id": handler.get_run_id() if handler else None,
            "global_rank": worker.global_rank if worker else None,
            "group_rank": group.group_rank,
            "worker_id": str(worker.id) if worker else None,
            "role": spec.role,
            # The full name may need a name server; do not ask one for an event that has no reader.
            "hostname": os.uname().nodename if spec.event_log_handler == "null" else events.full_hostname(),
            "state": state,
            "total_run_time": self._run_time_s,
            "rdzv_backend": handler.get_backend() if handler else None,
            "raw_error": raw_error,
            "metadata": json.dumps({**inner, **(details or {})}),
            "agent_restarts": self._restarts_used,
        }
        if not watchdog_event:
            metadata["duration_ms"] = duration_ms
        source = events.EventSource.AGENT if worker is None else events.EventSource.WORKER
        return events.Event(watchdog_event or f"torchelastic.worker.status.{state}", source, int(time.time()), metadata)


def record(make_event: Callable[[], Event], destination: str) -> None:
    """Make the event and send it there. As long as nothing has imported the module of events, no handler is registered
    in the place of "null", and neither event nor module is needed."""
    if destination != "null" or "holdfast.telemetry.events" in sys.modules:
        from holdfast.telemetry import events

        events.record(make_event(), destination)


def _words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


def _final_state(worker: Worker, result: RunResult) -> str:
    """The state in a worker's last event."""
    if worker.global_rank in result.failures:
        return "FAILED"
    if result.state is not WorkerState.SUCCEEDED:
        return "TERMINATED"
    if result.return_values and worker.global_rank not in result.return_values:
        raise ValueError(f"Unknown worker: rank {worker.global_rank} is in no part of the result")
    return "SUCCEEDED"


def _put_run_metrics(spec: WorkerSpec, result: RunResult, restarts_used: int) -> None:
    # How much of the restart budget the run needed, in percent; a failed run needed all of it.
    flakiness = 100 if result.is_failed() else int(100 * restarts_used / (spec.policy.max_restarts + 1))
    put_metric(f"workers.{spec.role}.flakiness", flakiness)
    put_metric(f"workers.{spec.role}.run_total", 1)
    outcome = "failed" if result.is_failed() else "success"
    retries = "with_retries" if restarts_used else "no_retries"
    for kind in ("success_with_retries", "success_no_retries", "failed_with_retries", "failed_no_retries"):
        put_metric(f"workers.{spec.role}.run_{kind}", int(kind == f"{outcome}_{retries}"))


class LogLines(Sink):
    """The lines of the agent's log."""

    def __init__(self, group: WorkerGroup, workers: Workers, run: Coordination, peers_timeout_s: float) -> None:
        self._group, self._workers, self._run = group, workers, run
        self._peers_timeout_s = peers_timeout_s
        self._restarts_used: int | None = None

    def checked(self, results: tuple[CheckResult, ...], delay_s: float | None) -> None:
        """What passes is told if the user wants to know more."""
        failed = [each for each in results if each.state == "failed"]
        for each in results:
            logger.debug("check %s: %s in %.1f s: %s", each.name, each.state, each.seconds, each.text)
        for each in failed:
            logger.warning("check %s failed: %s", each.name, each.text)
        if delay_s is not None:
            logger.warning("this node stays out of the run; its checks run again in %.0f s", delay_s)
        elif failed:
            logger.warning("this node takes part all the same (--check-action log)")

    def take(self, step: Step) -> None:
        group, policy = self._group, self._group.spec.policy
        match step.event:
            case Sealed(_, place):
                before, self._restarts_used = self._restarts_used, place.restarts_used
                if before is not None and place.restarts_used > before and self._run.verdict is None:
                    logger.warning("restart %d of %d", place.restarts_used, policy.max_restarts)
            case lifecycle.WorkersStarted() if step.phase is AgentPhase.RUNNING:
                context = self._workers.context
                logger.info("%s", start_line(group, context.logs_dir if context is not None else ""))
                where = (step.round, group.master_addr, group.master_port, group.workers[0])
                logger.debug("round %d: master %s:%s, first worker %s", *where)
            case lifecycle.WorkersSucceeded(_, has_agreed) if step.commands and (group.group_world_size or 1) > 1:
                saved = "the workers of this node have saved their state, waiting for the other nodes"
                done = "the workers of this node have finished, waiting for the other nodes"
                logger.info("%s", saved if has_agreed else done)
            case Stop(_, reason) if step.commands:
                logger.warning("the round is stopped: %s", reason)
            case PlaceLost(_, reason) if step.commands and step.before is not AgentPhase.STOPPING:
                text = "this node has lost its place, its workers are killed: %s"
                logger.warning(text if step.before in WITH_WORKERS else "this node has lost its place: %s", reason)
            case Ended(outcome):
                if outcome.end is End.CLOSED and step.before in WITH_WORKERS:
                    logger.warning("the run is closed, stopping the workers: %s", outcome.reason)
                if outcome.cause is not None and policy.max_restarts and self._run.verdict is None:
                    logger.warning("no restart: %s", outcome.reason)
            case lifecycle.PeersTimedOut():
                logger.warning("timed out after %g s waiting for other nodes to finish", self._peers_timeout_s)


def start_line(group: WorkerGroup, logs_dir: str = "") -> str:
    count, nodes = len(group.workers), group.group_world_size or 1
    ids = ", ".join(str(worker.id) for worker in group.workers[:8]) + (", ..." if count > 8 else "")
    who, pids = plural(count, "worker"), f"{'pid' if count == 1 else 'pids'} {ids}"
    place = f", node {group.group_rank} of {nodes}" if nodes > 1 else ""
    return f"started {who} of {entry_name(group.spec)} ({pids}){place}{f', logs in {logs_dir}' if logs_dir else ''}"


def finish_line(group: WorkerGroup, restarts: int, steps_lost: int | None = None) -> str:
    """A node has finished only if all nodes have, so the line is about the workers of the run. `steps_lost` is known if
    workers have loaded a snapshot."""
    count = group.workers[0].world_size if (group.group_world_size or 1) > 1 else len(group.workers)
    who = f"all {count} workers" if count > 1 else "the worker"
    after = f" after {plural(restarts, 'restart')}" if restarts else ""
    steps = "" if steps_lost is None else f"; {plural(steps_lost, 'step')} computed again"
    return f"{who} finished{after}{steps}"


def stop_words(phase: AgentPhase, number: signal.Signals, grace_s: float) -> str:
    """What a signal does to the workers; empty if there are none."""
    if phase not in WITH_WORKERS:
        return ""
    hurry = "; Ctrl-C again kills them" if number == signal.SIGINT else ""
    if phase is AgentPhase.STOPPING:
        return f", the workers are being stopped{hurry}"
    return f", stopping the workers (up to {grace_s:g} s{hurry})" if grace_s else ", killing the workers"


def entry_name(spec: WorkerSpec) -> str:
    """The script if there is one, else the program or the function."""
    name = command.program_name(spec.entrypoint, spec.args)
    return os.path.basename(name.rstrip("/")) or spec.get_entrypoint_name()
