"""What the page shows of a run, made from what its coordinator and its agents say. Data in, data out.

A picture is plain data for JSON, in sections: `run` (state, the one sentence, counts), `nodes` by id with their
`order`, `rounds`, `totals` (times and goodput) and `report`. Only what has changed between two pictures is sent to a
page (`difference`), so nothing in it grows with time alone: a round says when it began after the first one, not how
long ago.

The workers of a node are one text with a letter for each, by local rank: R running, D done (succeeded), F failed,
S stopped by holdfast, N not started, U unknown. A small letter is a guess from the state of the node: in a large run
its agent is asked only now and then. All text comes from elsewhere. It is made one line here, and the page shows it as
text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast import escape
from holdfast.cli import status as words
from holdfast.cli.runs import dict_of, dicts_of, number_of, text_of
from holdfast.frozen import frozen

Picture = dict[str, Any]

# The run's own end. A `left`, `error` or `gone` is of this host's agent, and `unreachable` of the coordinator.
OVER = ("succeeded", "failed", "closed")

_LETTERS = {"running": "R", "succeeded": "D", "failed": "F", "stopped": "S", "not started": "N"}
_GUESSES = {"running": "r", "finished": "d", "leaving": "s", "waiting": "n"}
_STATES = {letter: state for state, letter in _LETTERS.items()}
_MOST_WORKERS_OF_A_NODE = 1024
_MOST_ROUNDS = 200
_TEXT_LIMIT = 400
_FRESH_S = 5.0
_POINT_EVERY_S = 0.9  # The run is asked once a second.


@frozen
class Told:
    """The status of an agent, when it came, and whether the agent is one of this host that was asked directly."""

    status: Mapping[str, Any]
    at: float
    is_here: bool = False


@frozen
class Known:
    """`status` is the coordinator's; without it `problem` says why. `agents` and `silent` (why one does not answer) go
    by node id. `end` is what an agent of this host has said last, if its run is over."""

    run_id: str
    now: float
    status: Mapping[str, Any] | None
    problem: str
    agents: Mapping[str, Told]
    silent: Mapping[str, str]
    end: Mapping[str, Any] | None = None
    report: str | None = None


def picture_of(known: Known) -> Picture:
    nodes = {text_of(node, "node_id"): _node(known, node) for node in _nodes(known)}
    rounds, totals = _history(known)
    return {
        "run": _run(known, list(nodes.values())),
        "nodes": nodes,
        "order": list(nodes),
        "rounds": rounds,
        "totals": totals,
        "report": known.report,
    }


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Picture:
    """The sections that differ. Of the nodes only those that do; one that is gone is None."""
    found = {name: new[name] for name in new if name != "nodes" and new[name] != old.get(name)}
    before, after = old["nodes"], new["nodes"]
    nodes = {name: node for name, node in after.items() if before.get(name) != node}
    nodes |= {name: None for name in before if name not in after}
    return {**found, **({"nodes": nodes} if nodes else {})}


# The run.


def end_of(known: Known) -> str:
    """How the run ended, or this host's part of it; empty if it has not."""
    end = text_of(known.end, "end") if known.end is not None else ""
    return (text_of(known.status, "end") if known.status is not None else "") or end


def _run(known: Known, nodes: Sequence[Mapping[str, Any]]) -> Picture:
    status, end = known.status, end_of(known)
    record = _newest(known)
    phase = text_of(record, "phase")
    return {
        "id": _line(known.run_id),
        "state": end or phase or "unknown",
        "is_over": bool(end),
        "sentence": _line(_sentence(known, end, nodes)),
        "note": "" if end or _is_alone(known) else _line(known.problem),
        "round": number_of(record, "round") or 0,
        "nodes_here": sum(node["is_connected"] for node in nodes),
        "min_nodes": number_of(status, "min_nodes") if status is not None else None,
        "max_nodes": number_of(status, "max_nodes") if status is not None else None,
        "restarts_used": number_of(record, "restarts_used") or 0,
        "restarts_left": number_of(record, "restarts_left") or 0,
        "refused": [
            _line(f"{text_of(each, 'who')}: {text_of(each, 'reason')}")
            for each in (dicts_of(status, "refused") if status is not None else ())
        ],
    }


def _newest(known: Known) -> Mapping[str, Any]:
    """The record to believe about the run: the coordinator's, unless the last word of an agent is of a later round."""
    records = [known.status, _last_status(known), *(told.status for told in known.agents.values())]
    return max(filter(None, records), key=lambda record: number_of(record, "round") or 0, default={})


def _last_status(known: Known) -> Mapping[str, Any]:
    """That of the agent which has said how the run ended."""
    return dict_of(known.end, "status") if known.end is not None else {}


def _is_alone(known: Known) -> bool:
    """A run of one node needs no coordinator."""
    return known.status is None and {number_of(told.status, "nodes") for told in known.agents.values()} == {1}


def _sentence(known: Known, end: str, nodes: Sequence[Mapping[str, Any]]) -> str:
    if end:
        return _ending(known, end)
    if known.status is None:
        return words.sentence({"run": None, "agents": [told.status for told in known.agents.values()]})
    fresh = [told.status for told in known.agents.values() if known.now - told.at <= _FRESH_S]
    waits = [{**agent, "workers": []} for agent in fresh]
    states = [_STATES.get(letter.upper(), "unknown") for node in nodes for letter in node["workers"]]
    return words.sentence({"run": known.status, "agents": [*waits, {"workers": [{"state": each} for each in states]}]})


def _ending(known: Known, end: str) -> str:
    reason = text_of(known.end, "reason") if known.end is not None else ""
    reason = reason or (text_of(known.status, "end_reason") if known.status is not None else "")
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


def _nodes(known: Known) -> list[Mapping[str, Any]]:
    """As the coordinator has them, else as the agents say."""
    if known.status is not None:
        return [node for node in dicts_of(known.status, "nodes") if text_of(node, "node_id")]
    found: list[Mapping[str, Any]] = []
    for name, told in known.agents.items():
        ranks = [rank for worker in dicts_of(told.status, "workers") if (rank := _rank(worker)) is not None]
        found.append(
            {
                "node_id": name,
                "rank": told.status.get("node"),
                "first_rank": min(ranks, default=None),
                "local_world_size": len(dicts_of(told.status, "workers")),
                "state": text_of(told.status, "phase"),
                "is_connected": True,
            }
        )
    return found


def _node(known: Known, node: Mapping[str, Any]) -> Picture:
    name = text_of(node, "node_id")
    told = known.agents.get(name)
    is_connected = node.get("is_connected") is True
    agent = told.status if told is not None else {}
    return {
        "rank": number_of(node, "rank"),
        "first": number_of(node, "first_rank"),
        "name": _line(name),
        "address": _line(text_of(node, "address")),
        "host": _line(text_of(agent, "host")),
        "pid": number_of(agent, "pid"),
        "role": _line(text_of(node, "role") or text_of(agent, "role")),
        "state": _line(text_of(node, "state")) if is_connected else "not connected",
        "is_connected": is_connected,
        "workers": "".join(_letters(known, node, told)),
        "note": _line(known.silent.get(name, "")) if told is None else "",
    }


def _letters(known: Known, node: Mapping[str, Any], told: Told | None) -> Iterator[str]:
    round = number_of(known.status, "round") if known.status is not None else None
    end = end_of(known)
    if told is not None and (round is None or number_of(told.status, "round") == round):
        is_last = known.end is not None and told.status is known.end.get("status")
        for worker in dicts_of(told.status, "workers")[:_MOST_WORKERS_OF_A_NODE]:
            letter = _LETTERS.get(text_of(worker, "state"), "U")
            yield letter if is_last or not end else _after_the_end(letter, end)
        return
    guess = _GUESSES.get(text_of(node, "state"), "u") if node.get("is_connected") is True else "u"
    letter = _after_the_end(guess, end) if end else guess
    yield from letter * min(int(number_of(node, "local_world_size") or 0), _MOST_WORKERS_OF_A_NODE)


def _after_the_end(letter: str, end: str) -> str:
    """Of a worker that was last seen before the end."""
    if letter not in "Rr" or end not in OVER:
        return letter
    return "d" if end == "succeeded" else "s"


def _rank(worker: Mapping[str, Any]) -> int | None:
    rank = number_of(worker, "global_rank")
    return None if rank is None else int(rank)


def node_of(picture: Mapping[str, Any], rank: int) -> str | None:
    """The id of the node that has this rank."""
    for name, node in picture["nodes"].items():
        if node["first"] is not None and 0 <= rank - node["first"] < len(node["workers"]):
            return str(name)
    return None


def worker_of(known: Known, rank: int) -> tuple[Mapping[str, Any], Told] | None:
    """The record of that worker, and of its agent, if that has said it."""
    pairs = ((worker, told) for told in known.agents.values() for worker in dicts_of(told.status, "workers"))
    return next((pair for pair in pairs if _rank(pair[0]) == rank), None)


def worker_facts(worker: Mapping[str, Any], age_s: float) -> Picture:
    """For the page. The record is that old."""
    ages = {name: number_of(worker, name) for name in ("age_s", "progress_age_s")}
    aged = {name: value + age_s for name, value in ages.items() if value is not None}
    return {
        "state": words.worker_state(worker),
        "pid": number_of(worker, "pid"),
        "local_rank": number_of(worker, "local_rank"),
        "age": words.age_text(aged.get("age_s")),
        "progress": words.progress_text({**worker, **aged}),
        "has_log": {stream: bool(text_of(worker, stream)) for stream in ("stdout", "stderr")},
    }


# Rounds and times.


def _history(known: Known) -> tuple[list[Picture], Picture]:
    """Of the coordinator, and of the last word of an agent, which knows of the end."""
    sources = [known.status or {}, _last_status(known)]
    if known.status is None:
        sources += [told.status for told in known.agents.values()]
    histories = [dict_of(record, "history") for record in sources]
    rounds: dict[float, Mapping[str, Any]] = {}
    for history in histories:
        rounds |= {number_of(each, "round") or 0: each for each in dicts_of(history, "rounds")}
    totals = max(histories, key=lambda each: number_of(each, "wall_s") or 0, default={})
    shown = [rounds[number] for number in sorted(rounds)][-_MOST_ROUNDS:]
    began_s = max((number_of(each, "began_ago_s") or 0 for each in shown), default=0)
    return _timeline(shown, began_s), {**_totals(totals), "rounds_s": began_s}


def _timeline(rounds: Sequence[Mapping[str, Any]], began_s: float) -> list[Picture]:
    found = []
    for each in rounds:
        end = text_of(each, "end")
        found.append(
            {
                "round": number_of(each, "round") or 0,
                "nodes": number_of(each, "nodes") or 0,
                "workers": number_of(each, "workers") or 0,
                "start_s": round(began_s - (number_of(each, "began_ago_s") or 0), 1),
                "ran_s": number_of(each, "ran_s") if end else None,
                "lost_s": number_of(each, "lost_s"),
                "end": _line(end),
                "cause": _line(text_of(each, "cause")),
            }
        )
    return found


def _totals(history: Mapping[str, Any]) -> Picture:
    names = ("wall_s", "productive_s", "lost_s", "goodput", "detection_s")
    counts = dict_of(history, "restarts")
    return {
        **{name: number_of(history, name) for name in names},
        "restarts": {_line(str(cause)): number_of(counts, cause) or 0 for cause in [*counts][:16]},
    }


def _line(text: str) -> str:
    plain = escape.one_line(text)
    return plain if len(plain) <= _TEXT_LIMIT else f"{plain[:_TEXT_LIMIT]} ..."


# Plots.


class Series:
    """Points of a plot, over all the time that it is watched. If there are too many, every other one is dropped, and
    later ones are taken half as often."""

    def __init__(self, most: int = 480) -> None:
        self.points: list[list[float | None]] = []
        self._most, self._step_s = most, _POINT_EVERY_S

    def add(self, known: Known, totals: Mapping[str, Any], at_s: float) -> list[float | None] | None:
        """Time, the step of the slowest and of the fastest worker, and the goodput. None if it is not the time yet."""
        if self.points and at_s - (self.points[-1][0] or 0) < self._step_s:
            return None
        steps = [
            step
            for told in known.agents.values()
            if known.now - told.at <= _FRESH_S
            for worker in dicts_of(told.status, "workers")
            if (step := number_of(worker, "step")) is not None
        ]
        point = [round(at_s, 1), min(steps, default=None), max(steps, default=None), number_of(totals, "goodput")]
        self.points.append(point)
        if len(self.points) > self._most:
            self.points = self.points[::2]
            self._step_s *= 2
        return point
