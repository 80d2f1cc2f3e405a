"""What an agent shows of itself: its status, on its control socket and to its health check.

The agent calls `publish` from its loop, after each step of its machine and each look at its workers. It assigns a new
record and waits for no reader. What serves readers runs in threads of its own and only reads.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from holdfast.agent import causes, control, lifecycle
from holdfast.agent.lifecycle import Phase
from holdfast.agent.model import TORCHELASTIC_HEALTH_CHECK_PORT, Worker
from holdfast.errors import HostError, UserError
from holdfast.frozen import changed
from holdfast.process.output.lines import Copied
from holdfast.rendezvous.membership.model import End, Ended, PlaceLost, Sealed, Stop
from holdfast.rendezvous.membership.restart_policy import HANG, Failure
from holdfast.signals import RunClosed, SignalException
from holdfast.telemetry import history
from holdfast.telemetry.history import History
from holdfast.telemetry.status import AgentStatus, WorkerStatus

if TYPE_CHECKING:
    from holdfast.agent.agent import SimpleElasticAgent
    from holdfast.process.workers.group import PContext
    from holdfast.rendezvous.coordination import Coordination
    from holdfast.telemetry.spans import Tracing

_REASON_LIMIT = 300
_FAILED_KEPT = 16
_QUERY_LIMIT_BYTES = 4096  # That of the wire (`protocol`).
_REPORT_LIMIT_CHARS = 200_000
_COORDINATOR_LIMIT_S = 3.0
_NODE_LIMIT_S = 20.0  # Stacks take their time.
_KUBEFLOW_URLS = ("KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_STATUS_URL")


class Publisher:
    """Of one agent."""

    def __init__(self, agent: SimpleElasticAgent) -> None:
        self._agent = agent
        self._has_dashboard = False
        self.status = AgentStatus()
        self.copied = {"stdout": Copied(), "stderr": Copied()}
        self._place: tuple[int, int | None] | None = None  # The slowest worker's step, and of how many.
        self._tracing: Tracing | None = None

    @contextmanager
    def served(self) -> Iterator[None]:
        """Within this block, a run of the agent, others can ask."""
        spec = self._agent.get_worker_group().spec
        run_id = str(spec.rdzv_handler.get_run_id()) if spec.rdzv_handler is not None else ""
        node_id = getattr(spec.rdzv_handler, "node_id", "")
        now = time.time(), time.monotonic()
        who = (run_id, spec.role, os.uname().nodename, os.getpid())
        self.status = AgentStatus(*who, *now, node_id=node_id, history=History(now[1]))
        commands = {**self._readable, "stop": self._request_stop, "query": self._query}
        serve = control.served(run_id, commands, slow=("query", "stacks"))
        with self._traced() as self._tracing, self._health_served(), self._progress_posted(), serve as served:
            ended_by: BaseException | None = None
            try:
                yield
            except BaseException as error:
                ended_by = error
                raise
            finally:
                if served is not None:
                    served.tell_end(lambda: self._last_word(ended_by))

    def _serve_dashboard(self) -> None:
        """If this node is to, in a process of its own. Waits for nothing."""
        group = self._agent.get_worker_group()
        if group.spec.dashboard and group.group_rank == 0 and not self._has_dashboard:
            from holdfast.agent import dashboard

            self._has_dashboard = True
            dashboard.start(group.spec, self.status.run_id)

    def _last_word(self, error: BaseException | None) -> dict[str, Any]:
        """For those that wait for the end: `end` is `succeeded`, `failed`, `closed`, `left` (this node alone) or
        `error` (of this agent). `report` is what a run that has failed prints."""
        result, machine_end = self._agent._result, self._agent._machine.end
        report = getattr(error, "run_report", None) or (result.report if machine_end is End.FAILED else None)
        end, reason = _end_of_run(error)
        if machine_end is End.FAILED:
            end, reason = "failed", reason or causes.cause_of(result)
        text = None
        if report is not None:
            from holdfast.failures import run_report

            end, reason, text = "failed", report.cause, run_report.text(report).strip("\n")[:_REPORT_LIMIT_CHARS]
        return {"end": end, "reason": reason, "report": text, "status": self._describe({})}

    def answer(self, request: bytes) -> bytes:
        """What others ask this node through the coordinator: they only read."""
        return control.answer_to(request, self._readable)

    def step(self, event: lifecycle.Event) -> None:
        """The machine has taken an event."""
        steps, now = self._agent._machine.steps(), time.monotonic()
        if steps and steps[-1][2] is event:  # Else it dropped it.
            self._tell(self._history_after(event, now))
        self.publish()
        if isinstance(event, Sealed):
            self._serve_dashboard()
        if self.posts_progress:
            self._look_at_progress()

    def failed(self, failure: Failure) -> None:
        """What the workers of this node have failed of; the machine has taken the fact before."""
        end = history.HUNG if failure.exception == HANG else history.FAILED
        self._tell(self.status.history.amend(end, failure.text))

    def _tell(self, told: History) -> None:
        if self._tracing is not None:
            self._tracing.follow(self.status.history, told)
        self.status = changed(self.status, history=told)

    def _history_after(self, event: lifecycle.Event, now: float) -> History:
        agent, machine, told = self._agent, self._agent._machine, self.status.history
        outcome = agent._run_outcome
        if machine.end is not None:
            return told.finish(machine.end.lower(), outcome.reason if outcome is not None else "", now)
        told = told.enter(machine.phase.lower(), now)
        match event:
            case Sealed():
                group = agent._worker_group
                workers = group.workers[0].world_size if group.workers else 0
                return told.begin_round(machine.round, group.group_world_size or 1, workers, now)
            case lifecycle.WorkersStarted() if machine.phase is Phase.RUNNING:
                return told.run(now)
            case lifecycle.WorkersFailed():
                return told.stop(history.FAILED, "", now, self._idle_s(), self._detection_s(now))
            case Stop(_, reason):
                return told.stop(_end_of(event), reason, now, self._idle_s())
            case PlaceLost(_, reason):
                return told.stop(history.NODE_LOST, reason, now, self._idle_s())
            case Ended(ending):
                return told.stop(ending.end.lower(), ending.reason, now)
        return told

    def _idle_s(self) -> float | None:
        advance = self._agent._advance()
        return advance.idle_s if advance is not None else None

    def _detection_s(self, now: float) -> float | None:
        ends = self._agent._context.ends().values() if self._agent._context is not None else ()
        return max((now - at for code, was_stopped, at in ends if code and not was_stopped and at), default=None)

    def publish(self) -> None:
        agent = self._agent
        machine, group, context = agent._machine, agent._worker_group, agent._context
        is_leaving = agent._is_stopping and machine.phase is not Phase.ENDED
        if is_leaving:  # Which is no step of the machine.
            now, told = time.monotonic(), self.status.history
            self._tell(told.enter("stopping", now).stop(history.MEMBERSHIP_CHANGED, "this node leaves", now))
        before = self.status
        known = {each.local_rank: each for each in before.workers}
        ends = context.ends() if context is not None else {}
        workers = tuple(_worker_status(known.get(each.local_rank), each, ends, context) for each in group.workers)
        failed = [
            changed(each, round=machine.round)
            for each in workers
            if each.state == "failed" and known.get(each.local_rank) is not each
        ]
        self.status = changed(
            before,
            phase=(Phase.STOPPING if is_leaving else machine.phase).lower(),
            round=machine.round,
            node=group.group_rank,
            nodes=group.group_world_size,
            restarts_used=agent._restarts_used,
            restarts_left=agent._remaining_restarts,
            workers=workers,
            failed=(*before.failed, *failed)[-_FAILED_KEPT:] if failed else before.failed,
            story=machine.steps(),
        )

    @property
    def _readable(self) -> dict[str, control.Command]:
        return {"status": self._describe, **dict.fromkeys(("logs", "stacks", "config", "events"), self._inspect)}

    def _inspect(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from holdfast.agent import inspection

        context = self._agent._context
        logs_dir = context.logs_dir if context is not None else ""
        return inspection.answer(request, self.status, self._agent.get_worker_group().spec, logs_dir)

    def _request_stop(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The loop does it, when it is its turn."""
        run = self._run
        scope = "run" if run.reaches_all_nodes else "node"
        run.request_close(str(request.get("reason") or "closed by the user")[:_REASON_LIMIT])
        return {"scope": scope, "pid": os.getpid()}

    def _query(self, request: Mapping[str, Any]) -> Any:
        """Ask the coordinator, or the agent of another node."""
        import json

        body = json.dumps(request["request"]).encode()
        if len(body) > _QUERY_LIMIT_BYTES:
            raise UserError(f"a request of {len(body)} bytes is too long")
        node_id = str(request.get("node", ""))
        answer = json.loads(self._run.ask(body, node_id, _NODE_LIMIT_S if node_id else _COORDINATOR_LIMIT_S))
        if "error" in answer:
            raise HostError(str(answer["error"]))
        return answer["result"]

    @property
    def _run(self) -> Coordination:
        run = self._agent._coordination
        if run is None:
            raise HostError("this agent is still starting")
        return run

    def _describe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        run, progress = self._agent._coordination, self._agent._progress
        joined = run.joined if run is not None else None
        readers = (progress.of, progress.rate_of) if progress is not None else ()
        shown = self.status.to_dict(time.monotonic(), joined, *readers)
        shown["output"] = {name: {"lines": each.lines, "bytes": each.size_bytes} for name, each in self.copied.items()}
        return shown

    def _traced(self) -> AbstractContextManager[Tracing | None]:
        if "opentelemetry.sdk.trace" not in sys.modules and not any(each.startswith("OTEL_") for each in os.environ):
            return nullcontext()
        from holdfast.telemetry import spans

        told = self.status
        return spans.traced({"run_id": told.run_id, "role": told.role, "host": told.host, "node_id": told.node_id})

    def _health_served(self) -> Any:
        agent = self._agent
        if agent._health_check_server is None and not os.environ.get(TORCHELASTIC_HEALTH_CHECK_PORT):
            return nullcontext()
        from holdfast.telemetry import health

        if agent._health_check_server is None:
            agent._health_check_server = health.server_at(health.chosen_port())
        health.introduce(
            agent._health_check_server, agent._get_alive_time, lambda: self.status, lambda: self._describe({})
        )
        return health.served(agent._health_check_server)

    @property
    def posts_progress(self) -> bool:
        """Whether what the workers say of their progress is to be told to Kubeflow."""
        return any(os.environ.get(name) for name in _KUBEFLOW_URLS)

    def _progress_posted(self) -> Any:
        if not self.posts_progress:
            return nullcontext()
        from holdfast.telemetry import kubeflow

        def look() -> dict[str, Any] | None:
            place = self._look_at_progress()
            return kubeflow.report(self.status, *place) if place is not None else None

        return kubeflow.posted(os.environ, look)

    def _look_at_progress(self) -> tuple[int, int | None] | None:
        """The last place stays when the workers are gone, and the board with them."""
        progress = self._agent._progress
        self._place = (progress.slowest() if progress is not None else None) or self._place
        return self._place


def _end_of(stop: Stop) -> str:
    if stop.is_failure:
        return history.HUNG if stop.is_hang else history.FAILED
    return history.NODE_LOST if stop.is_loss else history.MEMBERSHIP_CHANGED


def _end_of_run(error: BaseException | None) -> tuple[str, str]:
    if isinstance(error, RunClosed):
        return "closed", str(error)
    if isinstance(error, SignalException):
        return "left", error.sigval.name
    return ("error", str(error) or type(error).__name__) if error is not None else ("succeeded", "")


def _worker_status(
    old: WorkerStatus | None,
    worker: Worker,
    ends: Mapping[int, tuple[int, bool, float | None]],
    context: PContext | None,
) -> WorkerStatus:
    """The record of a worker that has not changed stays."""
    rank, global_rank, has_started = worker.local_rank, worker.global_rank, worker.id is not None
    pid = worker.id if isinstance(worker.id, int) else None
    if old is None or (old.global_rank, old.pid, old.started is not None) != (global_rank, pid, has_started):
        if not has_started:
            return WorkerStatus(rank, global_rank)
        logs = (context.stdouts, context.stderrs, context.error_files) if context is not None else ({}, {}, {})
        stdout, stderr, error_file = (each.get(rank, "") for each in logs)
        now = time.time(), time.monotonic()
        old = WorkerStatus(rank, global_rank, pid, "running", *now, None, stdout, stderr, error_file)
    if not has_started or rank not in ends or old.exit_code is not None:
        return old
    code, was_stopped, _ = ends[rank]
    return changed(old, state="stopped" if was_stopped else "failed" if code else "succeeded", exit_code=code)
