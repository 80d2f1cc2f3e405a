"""`holdfast status` and `holdfast ps`: how one run stands, and which runs there are on this host."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast import escape, signals
from holdfast.cli import console, runs
from holdfast.cli.arguments.parser import PlainParser
from holdfast.cli.runs import RunView, dict_of, dicts_of, number_of, text_of
from holdfast.errors import HostError
from holdfast.frozen import fields_of
from holdfast.telemetry import stragglers
from holdfast.telemetry.stragglers import Rate

PROGRAM = "holdfast status"
PROGRAM_PS = "holdfast ps"

_MOST_WORKERS = 256
_WIDEST_CELL = 60

_EPILOG = """\
It shows the nodes and workers of the run, what it does or waits for, and who was refused. The coordinator answers for
all nodes. If there is none, or it is out of reach, the agents of this host answer for themselves.

exit status:
  0  the status was shown
  1  there is no such run, or it cannot be asked
  2  wrong usage, or several runs fit; they are listed as by `holdfast ps`

examples:
  holdfast status
  holdfast status job7 --rdzv-endpoint node1:29400 --token-file token
"""

_EPILOG_PS = """\
exit status:
  0  the runs were listed; there may be none
  2  wrong usage

example:
  holdfast ps --json
"""


def get_parser() -> PlainParser:
    return runs.parser_for(PROGRAM, "Show how a run stands: nodes, workers, and what it waits for.", _EPILOG)


def get_ps_parser() -> PlainParser:
    parser = PlainParser(PROGRAM_PS, "List the runs on this host, with their agents.", _EPILOG_PS)
    parser.add_argument("--all-users", action="store_true", help="for root: the runs of other users, too")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def main(argv: Sequence[str]) -> int:
    args = get_parser().parse_args(argv)

    def show() -> str:
        try:
            run = runs.open_run(args)
        except runs.SeveralRuns:
            list_runs([flag for flag in ("--all-users", "--json") if getattr(args, flag[2:].replace("-", "_"))])
            raise
        picture = picture_of(run)
        return json.dumps(picture, indent=2) + "\n" if args.json else "\n".join(lines_of(picture)) + "\n"

    return console.show(PROGRAM, show)


def list_runs(argv: Sequence[str]) -> int:
    args = get_ps_parser().parse_args(argv)

    def show() -> str:
        agents, silent = runs.agents_here(args.all_users)
        agents.sort(key=lambda each: (each["run_id"], each["pid"]))
        for pid, name in silent.items():
            console.write_error(PROGRAM_PS, runs.silent_text(pid, name))
        if args.json:
            return json.dumps(agents, indent=2) + "\n"
        if not agents:
            return "" if silent else f"no run is found on this host{runs.as_whom()}\n"
        return "\n".join(table([_PS_HEADING, *map(_ps_row, agents)])) + "\n"

    return console.show(PROGRAM_PS, show)


# What is known.


def picture_of(run: RunView) -> dict[str, Any]:
    """`run` is the coordinator's view, if there is one (else `problem` says why, unless the run has only one node),
    `agents` are those that answered, `silent` says by node id why others did not."""
    status, problem = None, None
    try:
        status = run.run_status()
    except HostError as error:
        if not run.local_agents():
            raise
        is_complete = run.is_of_one_node and str(error) == runs.NO_COORDINATOR
        problem = None if is_complete else str(error)
    agents, silent = run.agents(status["nodes"] if status else [])
    picture = {"run_id": run.name, "run": status, "problem": problem, "agents": agents, "silent": silent}
    slow = [fields_of(each) for each in stragglers.find(rates_of(agents))]
    return {**picture, "sentence": sentence(picture), "stragglers": slow}


def rates_of(agents: Sequence[Mapping[str, Any]]) -> dict[int, Rate]:
    """How fast the workers of all nodes are, by rank, as far as they say so."""
    found = {}
    for worker in [worker for agent in agents for worker in dicts_of(agent, "workers")]:
        rank, rate = number_of(worker, "global_rank"), dict_of(worker, "rate")
        per_s, window_s = number_of(rate, "per_s"), number_of(rate, "window_s")
        if rank is not None and per_s is not None and per_s >= 0 and window_s is not None:
            found[int(rank)] = Rate(per_s, text_of(rate, "unit"), window_s)
    return found


def sentence(picture: Mapping[str, Any]) -> str:
    """What the run does, or waits for and on whom."""
    status, agents = picture["run"], picture["agents"]
    if status is None:
        return _sentence_of_agents(agents)
    if end := text_of(status, "end"):
        return f"The run has {'been closed' if end == 'closed' else end}: {text_of(status, 'end_reason')}."
    waiting_for = text_of(status, "waiting_for")
    if waiting_for.startswith("last call"):
        return f"{waiting_for.capitalize()}."
    if waiting_for:
        return f"Waiting for {waiting_for}."
    return _sentence_of_agents(agents)


def _sentence_of_agents(agents: Sequence[Mapping[str, Any]]) -> str:
    waits = [(text_of(each, "waiting_for"), _node_name(each)) for each in agents if text_of(each, "waiting_for")]
    if waits:
        names = ", ".join(sorted({name for _, name in waits}))
        return f"{names} {'waits' if len(waits) == 1 else 'wait'} for {waits[0][0]}."
    states = [text_of(worker, "state") for each in agents for worker in dicts_of(each, "workers")]
    if not states:
        return "No worker has been started yet."
    if all(state == "running" for state in states):
        return "The worker is running." if len(states) == 1 else f"All {len(states)} workers are running."
    counts = {state: states.count(state) for state in sorted(set(states))}
    return f"Of {len(states)} workers {', '.join(f'{count} {state}' for state, count in counts.items())}."


# How it is shown.


def lines_of(picture: Mapping[str, Any]) -> Iterator[str]:
    status, agents, silent = picture["run"], picture["agents"], picture["silent"]
    yield heading(picture)
    yield escape.one_line(picture["sentence"])
    if past := history_line(_record_of(picture)):
        yield past
    yield from stragglers.words(stragglers.find(rates_of(agents)))
    if picture["problem"]:
        yield escape.one_line(f"Only this host's agents are shown: {picture['problem']}.")
    yield ""
    yield from table([_NODE_HEADING, *_node_rows(status, agents, silent)])
    workers = sorted(_worker_rows(agents))
    if workers:
        yield ""
        yield from table([_WORKER_HEADING, *(row for _, row in workers[:_MOST_WORKERS])])
        if len(workers) > _MOST_WORKERS:
            yield f"... and {len(workers) - _MOST_WORKERS} more workers; --json shows all"
    if status is not None:
        yield from (escape.cut(escape.one_line(text_of(each, "text"))) for each in dicts_of(status, "held"))
        for each in dicts_of(status, "refused"):
            ago = age_text(number_of(each, "ago_s"))
            yield escape.cut(escape.one_line(f"refused {ago} ago: {text_of(each, 'who')}: {text_of(each, 'reason')}"))


_RESTARTS = {
    "failure": ("after a failure", "after failures"),
    "hang": ("after a hang", "after hangs"),
    "node lost": ("after a node was lost", "after nodes were lost"),
    "membership changed": ("for a change of membership", "for changes of membership"),
}


def history_line(record: Mapping[str, Any]) -> str:
    """What has happened so far, from the status of a run or an agent; empty if that is nothing of interest."""
    history = dict_of(record, "history")
    rounds, lost_s = number_of(history, "round_count") or 0, number_of(history, "lost_s") or 0
    if rounds < 2 and not lost_s:
        return ""
    counts = [(number_of(dict_of(history, "restarts"), each) or 0, each) for each in _RESTARTS]
    parts = [f"{rounds:.0f} round{'' if rounds == 1 else 's'}"]
    for count, cause in counts:
        if count:
            noun = "" if len(parts) > 1 else " restart" if count == 1 else " restarts"
            parts.append(f"{count:.0f}{noun} {_RESTARTS[cause][count > 1]}")
    lost = age_text(lost_s) if lost_s >= 60 else f"{lost_s:.0f} s" if lost_s >= 10 else f"{lost_s:.2g} s"
    line = f"{', '.join(parts)}; {lost} lost, goodput {100 * (number_of(history, 'goodput') or 0):.0f} %"
    if history.get("is_whole") is False:
        line += f" (of the last {age_text(number_of(history, 'wall_s'))}, earlier rounds are not known)"
    return line


def _record_of(picture: Mapping[str, Any]) -> Mapping[str, Any]:
    """The coordinator's word about the run, else that of an agent."""
    agents: Sequence[Mapping[str, Any]] = picture["agents"]
    return picture["run"] if picture["run"] is not None else agents[0] if agents else {}


def heading(picture: Mapping[str, Any]) -> str:
    status, record = picture["run"], _record_of(picture)
    used, left = number_of(record, "restarts_used") or 0, number_of(record, "restarts_left") or 0
    parts = [text_of(record, "phase") or "unknown", f"round {number_of(record, 'round') or 0:.0f}"]
    if status is not None:
        low, high = number_of(status, "min_nodes") or 0, number_of(status, "max_nodes") or 0
        wanted = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
        parts.append(f"{number_of(status, 'node_count') or 0:.0f} of {wanted} nodes here")
    parts.append(f"{used:.0f} of {used + left:.0f} restarts used")
    return escape.cut(escape.one_line(f"run {picture['run_id']}: {', '.join(parts)}"))


_NODE_HEADING = ("NODE", "NAME", "ADDRESS", "STATE", "AGENT", "WORKERS")
_WORKER_HEADING = ("RANK", "NODE", "PID", "STATE", "AGE", "PROGRESS")
_PS_HEADING = ("RUN", "AGENT", "NODE", "PHASE", "ROUND", "WORKERS", "RESTARTS", "AGE")


def _node_rows(
    status: Mapping[str, Any] | None, agents: Sequence[Mapping[str, Any]], silent: Mapping[str, str]
) -> Iterator[tuple[str, ...]]:
    told = {runs.name_of(each): each for each in agents}
    if status is None:
        for agent in agents:
            yield (rank_text(agent, "node"), _node_name(agent), "", text_of(agent, "phase"), _pid_text(agent),
                   _workers_text(agent))  # fmt: skip
        return
    for node in dicts_of(status, "nodes"):
        node_id = text_of(node, "node_id")
        agent = told.get(node_id, {})
        state = text_of(node, "state") if node.get("is_connected") else "not connected"
        workers = _workers_text(agent) if agent else silent.get(node_id, "not asked")
        yield (rank_text(node, "rank"), node_id, text_of(node, "address"), state, _pid_text(agent), workers)


def _worker_rows(agents: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, tuple[str, ...]]]:
    """Each with its rank."""
    for agent in agents:
        for worker in dicts_of(agent, "workers"):
            rank = number_of(worker, "global_rank")
            if rank is not None:
                yield rank, (rank_text(worker, "global_rank"), rank_text(agent, "node"), _pid_text(worker),
                             worker_state(worker), age_text(number_of(worker, "age_s")),
                             progress_text(worker))  # fmt: skip


def _ps_row(agent: Mapping[str, Any]) -> tuple[str, ...]:
    node, nodes = number_of(agent, "node"), number_of(agent, "nodes")
    place = f"{node:.0f} of {nodes:.0f}" if node is not None and nodes is not None else "-"
    used, left = number_of(agent, "restarts_used") or 0, number_of(agent, "restarts_left") or 0
    return (
        text_of(agent, "run_id"),
        _pid_text(agent),
        place,
        text_of(agent, "phase"),
        f"{number_of(agent, 'round') or 0:.0f}",
        _workers_text(agent),
        f"{used:.0f} of {used + left:.0f}",
        age_text(number_of(agent, "age_s")),
    )


def _node_name(agent: Mapping[str, Any]) -> str:
    return text_of(agent, "node_id") or text_of(agent, "host")


def rank_text(record: Mapping[str, Any], name: str) -> str:
    """A worker has no rank, -1, before its first round."""
    rank = number_of(record, name)
    return "-" if rank is None or rank < 0 else f"{rank:.0f}"


def _pid_text(record: Mapping[str, Any]) -> str:
    pid = number_of(record, "pid")
    return f"{pid:.0f}" if pid else "-"


def _workers_text(agent: Mapping[str, Any]) -> str:
    states = [text_of(worker, "state") for worker in dicts_of(agent, "workers")]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none yet"


def worker_state(worker: Mapping[str, Any]) -> str:
    state, code = text_of(worker, "state"), number_of(worker, "exit_code")
    if not code:
        return state
    return f"{state} ({signals.signal_name(int(-code))})" if code < 0 else f"{state} (exit code {code:.0f})"


def progress_text(worker: Mapping[str, Any]) -> str:
    ago_s, step = number_of(worker, "progress_age_s"), number_of(worker, "step")
    rate = number_of(dict_of(worker, "rate"), "per_s")
    parts = [f"step {step:.0f}"] if step is not None else []
    parts += [f"{age_text(ago_s)} ago"] if ago_s is not None else []
    parts += [f"{rate:.3g} {text_of(dict_of(worker, 'rate'), 'unit')}/s"] if rate is not None else []
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
    """Rows under a heading. What is too long for a column is cut."""
    cells = [[escape.cut(escape.one_line(text), _WIDEST_CELL) for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
