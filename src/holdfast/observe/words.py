"""The sentences and cells in which people read a `RunView`. Pure. Text of peers is escaped when it is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from holdfast import escape, signals
from holdfast.frozen import changed
from holdfast.observe.run_view import RunView
from holdfast.telemetry.history import HistoryStatus
from holdfast.telemetry.status import AgentStatus, NoticeStatus, SnapshotStatus, WorkerStatus
from holdfast.text import plural, size_text

_WIDEST_CELL = 60
_RESTARTS = {
    "failure": ("after a failure", "after failures"),
    "hang": ("after a hang", "after hangs"),
    "node lost": ("after a node was lost", "after nodes were lost"),
    "membership changed": ("for a change of membership", "for changes of membership"),
}


def sentence(view: RunView, states: Sequence[str] | None = None) -> str:
    """What the run does, or waits for and on whom. `states` are those of the workers, if they are known better."""
    status = view.status
    if status is not None and status.end:
        return f"The run has {'been closed' if status.end == 'closed' else status.end}: {status.end_reason or ''}."
    if status is not None and status.waiting_for:
        wait = status.waiting_for
        return f"{wait.capitalize()}." if wait.startswith("last call") else f"Waiting for {wait}."
    present = [told.status for told in view.present]
    waits = [(each.waiting_for, each.node_id or each.host) for each in present if each.waiting_for]
    if waits:
        names = ", ".join(sorted({name for _, name in waits}))
        return f"{names} {'waits' if len(waits) == 1 else 'wait'} for {waits[0][0]}."
    if states is None:
        states = [worker.state for each in present for worker in each.workers]
    if not states and view.agents and not present:
        return f"Round {view.record.round} begins; its workers have not been seen yet."
    if not states:
        return "No worker has been started yet."
    if all(state == "running" for state in states):
        return "The worker is running." if len(states) == 1 else f"All {len(states)} workers are running."
    return f"Of {len(states)} workers {_counted(sorted(states))}."


def _counted(states: Sequence[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())


def heading(view: RunView) -> str:
    status, record = view.status, view.record
    parts = [record.phase or "unknown", f"round {record.round}"]
    if status is not None:
        low, high = status.min_nodes, status.max_nodes
        parts.append(f"{status.node_count} of {low if low == high else f'{low} to {high}'} nodes here")
    parts.append(restarts_text(record.restarts_used, record.restarts_left) + " restarts used")
    return escape.cut(escape.one_line(f"run {view.run_id}: {', '.join(parts)}"))


def restarts_text(used: int, left: int) -> str:
    return f"{used} of {used + left}"


def history_line(history: HistoryStatus) -> str:
    """What has happened so far; empty if that is nothing of interest."""
    rounds, lost_s = history.round_count, history.lost_s
    if rounds < 2 and not lost_s:
        return ""
    parts = [plural(rounds, "round")]
    for cause, words in _RESTARTS.items():
        if count := history.restarts.get(cause, 0):
            parts.append(f"{count if len(parts) > 1 else plural(count, 'restart')} {words[count > 1]}")
    lost = age_text(lost_s) if lost_s >= 60 else f"{lost_s:.0f} s" if lost_s >= 10 else f"{lost_s:.2g} s"
    line = f"{', '.join(parts)}; {lost} lost, goodput {100 * history.goodput:.0f} %"
    if not history.is_whole:
        line += f" (of the last {age_text(history.wall_s)}, earlier rounds are not known)"
    return line


def last_snapshot(agents: Iterable[AgentStatus]) -> SnapshotStatus | None:
    """The newest step that all of these nodes have, with the memory of all; None if a node has none."""
    told = [agent.snapshots for agent in agents if agent.workers]
    known = [each for each in told if each is not None and each.step is not None]
    if not known or len(known) < len(told):
        return None
    return changed(min(known, key=lambda each: each.step or 0), used_bytes=sum(each.used_bytes for each in known))


def snapshot_line(agents: Iterable[AgentStatus]) -> str:
    last = last_snapshot(agents)
    if last is None:
        return ""
    return f"snapshot of step {last.step}, saved {age_text(last.age_s)} ago ({size_text(last.used_bytes)} in memory)"


def notice_line(view: RunView) -> str:
    """Which nodes go away, and when; empty if none does."""
    told = view.record.notice
    if told is None:
        return ""
    why = f": {told.reason}" if told.reason else ""
    return f"{going_text(told)} in {age_text(told.left_s)}{why}"


def going_text(told: NoticeStatus) -> str:
    """`a, b and 3 more go away`."""
    names = ", ".join(told.nodes)
    more = f" and {told.node_count - len(told.nodes)} more" if told.node_count > len(told.nodes) else ""
    who = "the whole run" if told.is_whole_run else f"{names}{more}" if names else "this node"
    return f"{who} {'goes' if told.is_whole_run or told.node_count == 1 else 'go'} away"


def rank_text(rank: int | None) -> str:
    """A worker has no rank, -1, before its first round."""
    return "-" if rank is None or rank < 0 else f"{rank}"


def workers_text(agent: AgentStatus) -> str:
    return _counted([worker.state for worker in agent.workers]) or "none yet"


def worker_state(worker: WorkerStatus) -> str:
    code = worker.exit_code
    if not code:
        return worker.state
    return f"{worker.state} ({signals.signal_name(-code)})" if code < 0 else f"{worker.state} (exit code {code})"


def progress_text(worker: WorkerStatus) -> str:
    parts = [f"step {worker.step}"] if worker.step is not None else []
    parts += [f"{age_text(worker.progress_age_s)} ago"] if worker.progress_age_s is not None else []
    parts += [f"{worker.rate.per_s:.3g} {worker.rate.unit}/s"] if worker.rate is not None else []
    return ", ".join(parts)


def age_text(seconds: float | None) -> str:
    """`5s`, `3m20s`, `2h05m`, `3d04h`."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows under a heading. A cell that is too long is cut."""
    cells = [[escape.cut(escape.one_line(text), _WIDEST_CELL) for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
