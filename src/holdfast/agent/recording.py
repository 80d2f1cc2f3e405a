"""The status events and the final metrics of a run, under the names that dashboards know, and its lines in the log."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.agent.lifecycle import WITH_WORKERS, Phase
from holdfast.agent.model import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from holdfast.process.spawner import command
from holdfast.telemetry.metrics import put_metric

if TYPE_CHECKING:
    from holdfast.process.errors import ProcessFailure
    from holdfast.telemetry.events import Event

_EVENTS = "holdfast.telemetry.events"


def record(make_event: Callable[[], Event], destination: str) -> None:
    """Make the event and send it there. As long as nothing has imported the module of events, no handler is registered
    in the place of "null", and neither event nor module is needed."""
    if destination != "null" or _EVENTS in sys.modules:
        from holdfast.telemetry import events

        events.record(make_event(), destination)


def status_event(
    group: WorkerGroup,
    state: str,
    restarts_used: int,
    run_time_s: int,
    worker: Worker | None = None,
    *,
    raw_error: str | None = None,
    duration_ms: int | None = None,
    exit_code: int | None = None,
    details: Mapping[str, str] | None = None,
    watchdog_event: str = "",
) -> Event:
    """An event about one worker, or about the agent itself. One of the watchdog has the watchdog's own name for it."""
    import json

    from holdfast.telemetry import events

    spec, handler = group.spec, group.spec.rdzv_handler
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
        "total_run_time": run_time_s,
        "rdzv_backend": handler.get_backend() if handler else None,
        "raw_error": raw_error,
        "metadata": json.dumps({**inner, **(details or {})}),
        "agent_restarts": restarts_used,
    }
    if not watchdog_event:
        metadata["duration_ms"] = duration_ms
    source = events.EventSource.AGENT if worker is None else events.EventSource.WORKER
    return events.Event(watchdog_event or f"torchelastic.worker.status.{state}", source, int(time.time()), metadata)


def facts_of_failure(failure: ProcessFailure) -> dict[str, Any]:
    import json

    return {"raw_error": json.dumps(failure.error_file_data), "exit_code": failure.exitcode}


def start_line(group: WorkerGroup, logs_dir: str = "") -> str:
    count = len(group.workers)
    who = f"{count} workers" if count > 1 else "1 worker"
    ids = ("pids " if count > 1 else "pid ") + ", ".join(str(worker.id) for worker in group.workers[:8])
    ids += ", ..." if count > 8 else ""
    place = f", node {group.group_rank} of {group.group_world_size}" if (group.group_world_size or 1) > 1 else ""
    logs = f", logs in {logs_dir}" if logs_dir else ""
    return f"started {who} of {entry_name(group.spec)} ({ids}){place}{logs}"


def finish_line(group: WorkerGroup, restarts: int) -> str:
    count = len(group.workers)
    who = f"all {count} workers" if count > 1 else "the worker"
    after = {0: "", 1: " after 1 restart"}.get(restarts, f" after {restarts} restarts")
    return f"{who} finished{after}"


def stop_words(phase: Phase, number: signal.Signals, grace_s: float) -> str:
    """What a signal does to the workers; empty if there are none."""
    if phase not in WITH_WORKERS:
        return ""
    hurry = "; Ctrl-C again kills them" if number == signal.SIGINT else ""
    if phase is Phase.STOPPING:
        return f", the workers are being stopped{hurry}"
    return f", stopping the workers (up to {grace_s:g} s{hurry})" if grace_s else ", killing the workers"


def entry_name(spec: WorkerSpec) -> str:
    """The script if there is one, else the program or the function."""
    name = command.program_name(spec.entrypoint, spec.args)
    return os.path.basename(name.rstrip("/")) or spec.get_entrypoint_name()


def final_state(worker: Worker, result: RunResult) -> str:
    """The state in a worker's last event."""
    if worker.global_rank in result.failures:
        return "FAILED"
    if result.state is not WorkerState.SUCCEEDED:
        return "TERMINATED"
    if result.return_values and worker.global_rank not in result.return_values:
        raise ValueError(f"Unknown worker: rank {worker.global_rank} is in no part of the result")
    return "SUCCEEDED"


def put_run_metrics(role: str, result: RunResult, restarts_used: int, max_restarts: int) -> None:
    # How much of the restart budget the run needed, in percent; a failed run needed all of it.
    flakiness = 100 if result.is_failed() else int(100 * restarts_used / (max_restarts + 1))
    put_metric(f"workers.{role}.flakiness", flakiness)
    put_metric(f"workers.{role}.run_total", 1)
    outcome = "failed" if result.is_failed() else "success"
    retries = "with_retries" if restarts_used else "no_retries"
    for kind in ("success_with_retries", "success_no_retries", "failed_with_retries", "failed_no_retries"):
        put_metric(f"workers.{role}.run_{kind}", int(kind == f"{outcome}_{retries}"))
