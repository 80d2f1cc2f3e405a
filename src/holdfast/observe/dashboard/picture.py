"""What the page shows of a run, made from what its coordinator and its agents say. Data in, data out.

A picture is plain data for JSON, in sections: `run` (state, the one sentence, counts), `nodes` by id with their
`order`, `rounds`, `totals` (times and goodput), `notice` and `report`. Only what has changed between two pictures is
sent to a page (`difference`), so no section grows with time alone but `notice`, which is short: a round says when it
began after the first one, not how long ago.

The workers of a node are one text with a letter for each, by local rank: R running, D done (succeeded), F failed,
S stopped by holdfast, N not started, U unknown. A small letter is a guess from the state of the node: in a large run
its agent is asked only now and then. All text comes from elsewhere. It is made one line here, and the page shows it as
text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast import escape
from holdfast.frozen import changed
from holdfast.observe import words
from holdfast.observe.ask import OVER
from holdfast.observe.log_tail import LogTail, Part
from holdfast.observe.run_view import RunView, Told
from holdfast.process.output.log_files import CHUNK_BYTES
from holdfast.telemetry.history import HistoryStatus, RoundStatus
from holdfast.telemetry.status import AgentStatus, NodeStatus, RunStatus, WorkerStatus

Picture = dict[str, Any]

_LETTERS = {"running": "R", "succeeded": "D", "failed": "F", "stopped": "S", "not started": "N"}
_GUESSES = {"running": "r", "finished": "d", "leaving": "s", "waiting": "n"}
_STATES = {letter: state for state, letter in _LETTERS.items()}
_MOST_WORKERS_OF_A_NODE = 1024
_MOST_ROUNDS = 200
_MOST_GOING = 3  # That are named; all are marked.
_MOST_BEHIND_BYTES = 4 * CHUNK_BYTES
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TEXT_LIMIT = 400
_FRESH_S = 5.0
_POINT_EVERY_S = 0.9  # The run is asked once a second.


def picture_of(view: RunView) -> Picture:
    nodes = {node.node_id: _node(view, node) for node in view.nodes if node.node_id}
    rounds, totals = _history(view)
    return {
        "run": _run(view, list(nodes.values())),
        "nodes": nodes,
        "order": list(nodes),
        "rounds": rounds,
        "totals": totals,
        "notice": _notice(view),
        "report": view.report,
    }


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Picture:
    """The sections that differ. Of the nodes only those that do; one that is gone is None."""
    found = {name: new[name] for name in new if name != "nodes" and new[name] != old.get(name)}
    before, after = old["nodes"], new["nodes"]
    nodes = {name: node for name, node in after.items() if before.get(name) != node}
    nodes |= {name: None for name in before if name not in after}
    return {**found, **({"nodes": nodes} if nodes else {})}


# The run.


def end_of(view: RunView) -> str:
    """How the run ended, or this host's part of it; empty if it has not."""
    end = view.end.end if view.end is not None else ""
    return (view.status.end if view.status is not None else None) or end


def _run(view: RunView, nodes: Sequence[Mapping[str, Any]]) -> Picture:
    status, end, record = view.status, end_of(view), _newest(view)
    return {
        "id": _line(view.run_id),
        "state": end or record.phase or "unknown",
        "is_over": bool(end),
        "sentence": _line(_sentence(view, end, nodes)),
        "note": "" if end or view.is_of_one_node else _line(view.problem),
        "round": record.round,
        "nodes_here": sum(node["is_connected"] for node in nodes),
        "min_nodes": status.min_nodes if status is not None else None,
        "max_nodes": status.max_nodes if status is not None else None,
        "restarts_used": record.restarts_used,
        "restarts_left": record.restarts_left,
        "refused": [_line(f"{each.who}: {each.reason}") for each in (status.refused if status is not None else ())],
    }


def _notice(view: RunView) -> Picture | None:
    """Which nodes go away, in how many seconds, and why."""
    told = view.record.notice
    if told is None or end_of(view):
        return None
    text = words.going_text(changed(told, nodes=told.nodes[:_MOST_GOING]))
    return {"text": _line(text), "left_s": round(told.left_s), "reason": _line(told.reason)}


def _newest(view: RunView) -> RunStatus | AgentStatus:
    """The record to believe about the run: the coordinator's, unless the last word of an agent is of a later round."""
    records: list[RunStatus | AgentStatus | None] = [view.status, _last_status(view)]
    records += [told.status for told in view.agents.values()]
    known = [each for each in records if each is not None]
    return max(known, key=lambda record: record.round, default=AgentStatus(phase=""))


def _last_status(view: RunView) -> AgentStatus | None:
    """That of the agent which has said how the run ended."""
    return view.end.status if view.end is not None else None


def _sentence(view: RunView, end: str, nodes: Sequence[Mapping[str, Any]]) -> str:
    if end:
        return _ending(view, end)
    if view.status is None:
        return words.sentence(view)
    fresh = {name: told for name, told in view.agents.items() if view.now - told.at <= _FRESH_S}
    states = [_STATES.get(letter.upper(), "unknown") for node in nodes for letter in node["workers"]]
    return words.sentence(changed(view, agents=fresh), states)


def _ending(view: RunView, end: str) -> str:
    reason = view.end.reason if view.end is not None else ""
    reason = reason or (view.status.end_reason if view.status is not None else None) or ""
    host = "The agent of this host"
    elsewhere = "The run may go on without this host."
    return {
        "succeeded": "The run has succeeded.",
        "failed": f"The run has failed: {reason}.",
        "closed": f"The run has been closed: {reason}.",
        "left": f"{host} has left the run ({reason}). {elsewhere}",
        "unreachable": "The coordinator cannot be reached any more. The run has probably ended.",
        "error": f"{host} has ended with an error: {reason}. {elsewhere}",
    }.get(end, f"{host} is gone without a word, as after kill -9. {elsewhere}")


# Nodes and workers.


def _node(view: RunView, node: NodeStatus) -> Picture:
    told = view.agents.get(node.node_id)
    agent = told.status if told is not None else AgentStatus()
    return {
        "rank": node.rank,
        "first": node.first_rank,
        "name": _line(node.node_id),
        "address": _line(node.address),
        "host": _line(agent.host),
        "pid": agent.pid or None,
        "role": _line(node.role or agent.role),
        "state": _line(node.state) if node.is_connected else "not connected",
        "is_connected": node.is_connected,
        "is_going": node.leaves_in_s is not None,
        "workers": "".join(_letters(view, node, told)),
        "note": _line(view.silence_of(node)) if told is None and node.node_id in view.silent else "",
    }


def _letters(view: RunView, node: NodeStatus, told: Told | None) -> Iterator[str]:
    end = end_of(view)
    if told is not None and told in view.present:
        is_last = told.status is _last_status(view)
        for worker in told.status.workers[:_MOST_WORKERS_OF_A_NODE]:
            letter = _LETTERS.get(worker.state, "U")
            yield letter if is_last or not end else _after_the_end(letter, end)
        return
    guess = _GUESSES.get(node.state, "u") if node.is_connected else "u"
    letter = _after_the_end(guess, end) if end else guess
    yield from letter * min(node.local_world_size, _MOST_WORKERS_OF_A_NODE)


def _after_the_end(letter: str, end: str) -> str:
    """Of a worker that was last seen before the end."""
    if letter not in "Rr" or end not in OVER:
        return letter
    return "d" if end == "succeeded" else "s"


def node_of(picture: Mapping[str, Any], rank: int) -> str | None:
    """The id of the node that has this rank."""
    for name, node in picture["nodes"].items():
        if node["first"] is not None and 0 <= rank - node["first"] < len(node["workers"]):
            return str(name)
    return None


def worker_facts(worker: WorkerStatus) -> Picture:
    """For the page."""
    return {
        "state": words.worker_state(worker),
        "pid": worker.pid,
        "local_rank": worker.local_rank,
        "age": words.age_text(worker.age_s),
        "progress": words.progress_text(worker),
        "has_log": {"stdout": bool(worker.stdout), "stderr": bool(worker.stderr)},
    }


# Rounds and times.


def _history(view: RunView) -> tuple[list[Picture], Picture]:
    """Of the coordinator, and of the last word of an agent, which knows of the end."""
    sources = [view.status, _last_status(view)]
    if view.status is None:
        sources += [told.status for told in view.agents.values()]
    histories = [record.history for record in sources if record is not None]
    rounds = {each.round: each for history in histories for each in history.rounds}
    shown = [rounds[number] for number in sorted(rounds)][-_MOST_ROUNDS:]
    began_s = max((each.began_ago_s for each in shown), default=0)
    totals = max(histories, key=lambda each: each.wall_s, default=HistoryStatus())
    more = {"rounds_s": began_s, "snapshot": _snapshot(view)}
    return [_round(each, began_s) for each in shown], {**_totals(totals), **more}


def _snapshot(view: RunView) -> Picture | None:
    """The last step that all nodes have, and its age."""
    last = words.last_snapshot(told.status for told in view.agents.values())
    return None if last is None else {"step": last.step, "age": words.age_text(last.age_s)}


def _round(each: RoundStatus, began_s: float) -> Picture:
    return {
        "round": each.round,
        "nodes": each.nodes,
        "workers": each.workers,
        "start_s": round(began_s - each.began_ago_s, 1),
        "ran_s": each.ran_s if each.end else None,
        "lost_s": each.lost_s,
        "end": _line(each.end or ""),
        "cause": _line(each.cause),
    }


def _totals(history: HistoryStatus) -> Picture:
    names = ("wall_s", "productive_s", "lost_s", "goodput", "detection_s")
    restarts = {_line(cause): count for cause, count in [*history.restarts.items()][:16]}
    return {**{name: getattr(history, name) for name in names}, "restarts": restarts}


def _line(text: str) -> str:
    plain = escape.one_line(text)
    return plain if len(plain) <= _TEXT_LIMIT else f"{plain[:_TEXT_LIMIT]} ..."


# Logs.


def tail_for(attempt: int | None) -> LogTail:
    """A page reads at a bounded rate: of a log that grows faster it gets the newest piece."""
    return LogTail(attempt, most_behind_bytes=_MOST_BEHIND_BYTES)


def shown_of_log(part: Part) -> dict[str, str]:
    """Colours are left out, and of a line that was written over, as progress bars are, the last state stays."""
    lines = _COLOURS.sub("", part.text).split("\n")
    text = escape.lines("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))
    return {"text": text, "note": escape.one_line(part.note)}


# Plots.


class Series:
    """Points of a plot, over all the time that it is watched. If there are too many, every other one is dropped, and
    later ones are taken half as often."""

    def __init__(self, most: int = 480) -> None:
        self.points: list[list[float | None]] = []
        self._most, self._step_s = most, _POINT_EVERY_S

    def add(self, view: RunView, goodput: float | None, at_s: float) -> list[float | None] | None:
        """Time, the step of the slowest and of the fastest worker, and the goodput. None if it is not the time yet."""
        if self.points and at_s - (self.points[-1][0] or 0) < self._step_s:
            return None
        fresh = [told for told in view.agents.values() if view.now - told.at <= _FRESH_S]
        steps = [worker.step for told in fresh for worker in told.status.workers if worker.step is not None]
        point = [round(at_s, 1), min(steps, default=None), max(steps, default=None), goodput]
        self.points.append(point)
        if len(self.points) > self._most:
            self.points = self.points[::2]
            self._step_s *= 2
        return point
