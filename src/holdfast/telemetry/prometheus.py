"""The metrics that Prometheus reads: which there are, and their text, made from the statuses alone.

`AGENT` are those of one agent, from `AgentStatus`; `RUN` those of a whole run, from `RunStatus`. Their
names differ (`holdfast_agent_`, `holdfast_run_`), so that a sum over all targets counts nothing twice. A test compares
the table in docs/observability.md with these rows.

This module imports `prometheus_client`, so it is imported only by a process that was asked for a port, when the first
reader comes. The library escapes what labels contain; here it is only made valid UTF-8 and bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from holdfast import escape
from holdfast.frozen import frozen
from holdfast.telemetry.history import RESTART_CAUSES
from holdfast.telemetry.http import Page

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABEL_LIMIT = 256

Status = Mapping[str, Any]
Samples = Iterable[tuple[tuple[str, ...], float | None]]


@frozen
class Row:
    """One metric. `read` finds its values in a status, each with the values of the labels; None is not shown. A
    counter's name ends with `_total`."""

    name: str
    text: str
    read: Callable[[Status], Samples]
    labels: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


def _field(name: str) -> Callable[[Status], Samples]:
    return lambda status: [((), status[name])]


def _past(name: str) -> Callable[[Status], Samples]:
    return lambda status: [((), status["history"][name])]


def _phase(*phases: str) -> Callable[[Status], Samples]:
    return lambda status: [((each,), float(status["phase"] == each)) for each in phases]


def _world_size(status: Status) -> Samples:
    rounds = status["history"]["rounds"]
    return [((), rounds[-1]["workers"] if rounds else 0)]


def _restarts(status: Status) -> Samples:
    counts = status["history"]["restarts"]
    return [((cause.replace(" ", "_"),), counts[cause]) for cause in RESTART_CAUSES.values()]


def _phase_seconds(status: Status) -> Samples:
    return [((phase,), seconds) for phase, seconds in status["history"]["phase_s"].items()]


def _workers(status: Status) -> Samples:
    states = [each["state"] for each in status["workers"]]
    return [((state,), states.count(state)) for state in ("not started", "running", "succeeded", "failed", "stopped")]


def _of_worker(name: str) -> Callable[[Status], Samples]:
    return lambda status: [((str(each["global_rank"]),), each[name]) for each in status["workers"]]


def _output(name: str) -> Callable[[Status], Samples]:
    return lambda status: [((stream,), counts[name]) for stream, counts in status["output"].items()]


def _snapshots(name: str) -> Callable[[Status], Samples]:
    return lambda status: [((), status["snapshots"][name])] if status["snapshots"] else []


def _checks(name: str) -> Callable[[Status], Samples]:
    return lambda status: [((each["name"],), each[name]) for each in status["checks"]]


def _info(status: Status) -> Samples:
    return [((status["host"], status["node_id"], status["role"]), 1)]


def _common(subject: str) -> tuple[Row, ...]:
    """What agents and runs have alike."""
    return (
        Row(f"holdfast_{subject}_round", "Number of the last round.", _field("round")),
        Row(f"holdfast_{subject}_world_size", "Workers in the last round, on all nodes.", _world_size),
        Row(f"holdfast_{subject}_restarts_total", "New rounds after the first, by what ended the round before: "
            "failure, hang, node_lost or membership_changed.", _restarts, ("cause",)),
        Row(f"holdfast_{subject}_restarts_used", "Restarts that count against --max-restarts.",
            _field("restarts_used")),
        Row(f"holdfast_{subject}_restarts_left", "Restarts that --max-restarts still allows.", _field("restarts_left")),
        Row(f"holdfast_{subject}_phase_seconds_total", "Time spent in each phase.", _phase_seconds, ("phase",)),
        Row(f"holdfast_{subject}_wall_seconds_total", "Time that the history covers.", _past("wall_s")),
        Row(f"holdfast_{subject}_lost_seconds_total", "Time between the last useful work of a round and the start of "
            "the next.", _past("lost_s")),
        Row(f"holdfast_{subject}_productive_seconds", "Time in which rounds ran, without work that a failed round did "
            "not keep.", _past("productive_s")),
        Row(f"holdfast_{subject}_goodput_ratio", "Productive time divided by all time, 0 to 1.", _past("goodput")),
    )  # fmt: skip


AGENT = (
    Row("holdfast_agent_info", "Always 1; the labels say which agent it is.", _info, ("host", "node_id", "role")),
    Row("holdfast_agent_phase", "1 for the phase that the agent is in, else 0.",
        _phase("idle", "joining", "starting", "running", "stopping", "finished", "ended"), ("phase",)),
    Row("holdfast_agent_nodes", "Nodes in the last round.",
        lambda status: [((), status["nodes"] or 0)]),
    *_common("agent"),
    Row("holdfast_agent_start_time_seconds", "When the agent started, in seconds since 1970.", _field("started")),
    Row("holdfast_agent_detection_seconds", "For the last failure on this node: from the end of the worker to the stop "
        "of the round. Absent before a failure.", _past("detection_s")),
    Row("holdfast_agent_workers", "Workers of this node by state.", _workers, ("state",)),
    Row("holdfast_agent_worker_step", "Last step that a worker gave holdfast.progress().", _of_worker("step"),
        ("rank",)),
    Row("holdfast_agent_worker_progress_age_seconds", "Time since a worker called holdfast.progress().",
        _of_worker("progress_age_s"), ("rank",)),
    Row("holdfast_agent_log_lines_total", "Lines of the workers that holdfast copied.", _output("lines"), ("stream",)),
    Row("holdfast_agent_log_bytes_total", "Bytes of the workers that holdfast copied.", _output("bytes"), ("stream",)),
    Row("holdfast_agent_notice_seconds", "Time until this node goes away. Absent without a notice for it.",
        lambda status: [((), status["notice"]["own_left_s"])] if status["notice"] else []),
    Row("holdfast_agent_snapshot_step", "The newest step that all workers of this node have saved.",
        _snapshots("step")),
    Row("holdfast_agent_snapshot_age_seconds", "Time since that step was saved.", _snapshots("age_s")),
    Row("holdfast_agent_snapshot_bytes", "Memory of this node's snapshots.", _snapshots("used_bytes")),
    Row("holdfast_agent_check_failures_total", "How often a check of this node (--check) has failed.",
        _checks("failures"), ("check",)),
    Row("holdfast_agent_check_seconds", "How long a check of this node took, the last time.", _checks("seconds"),
        ("check",)),
)  # fmt: skip

RUN = (
    Row("holdfast_run_phase", "1 for the phase that the run is in, else 0.",
        _phase("forming", "running", "stopping", "ended"), ("phase",)),
    Row("holdfast_run_nodes", "Nodes with a place in the present round.", _field("members")),
    Row("holdfast_run_nodes_present", "Nodes that the coordinator knows of, standbys included.", _field("node_count")),
    Row("holdfast_run_nodes_going_away", "Nodes that go away after a notice.",
        lambda status: [((), status["notice"]["node_count"] if status["notice"] else 0)]),
    Row("holdfast_run_nodes_min", "Fewest nodes of a round (--nnodes).", _field("min_nodes")),
    Row("holdfast_run_nodes_max", "Most nodes of a round (--nnodes).", _field("max_nodes")),
    *_common("run"),
)  # fmt: skip

COORDINATOR_RUNS = ("holdfast_coordinator_runs", "Runs that this coordinator serves: 0 or 1.")


def agent_page(status: Status) -> Page:
    """An empty status is that of an agent which does not exist yet."""
    return _page(AGENT, status)


def run_page(status: Status) -> Page:
    """Of a coordinator. An empty status means that it serves no run yet."""
    count = GaugeMetricFamily(*COORDINATOR_RUNS, value=float(bool(status)))
    return _page(RUN, status, count)


class _Families(list[Metric]):
    """In the form that `generate_latest` takes."""

    def collect(self) -> Iterable[Metric]:
        return self


def _page(rows: Iterable[Row], status: Status, *more: Metric) -> Page:
    families = _Families([*more, *(_family(row, status) for row in rows)])
    return Page(200, generate_latest(families), CONTENT_TYPE)


def _family(row: Row, status: Status) -> Metric:
    kind = CounterMetricFamily if row.is_counter else GaugeMetricFamily
    family = kind(row.name, row.text, labels=("run_id", *row.labels))
    for labels, value in row.read(status) if status else ():
        if value is not None:
            family.add_metric([*map(_label, (status["run_id"], *labels))], value)
    return family


def _label(text: str) -> str:
    return escape.encodable(text[:_LABEL_LIMIT])
