"""`holdfast status` and `holdfast ps`: how one run stands, and which runs there are on this host."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence

from holdfast import escape
from holdfast.cli import console, runs
from holdfast.cli.arguments.parser import PlainParser
from holdfast.observe import ask, run_view, words
from holdfast.observe.ask import FoundAgent
from holdfast.observe.run_view import RunView
from holdfast.telemetry import stragglers
from holdfast.telemetry.status import plain

PROGRAM = "holdfast status"
PROGRAM_PS = "holdfast ps"

_MOST_WORKERS = 256
_SMALL_RUN_NODES = 16
_MOST_ODD = 20

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
    parser = runs.parser_for(PROGRAM, "Show how a run stands: nodes, workers, and what it waits for.", _EPILOG)
    parser.add_argument("--watch", action="store_true", help="the live view of `holdfast top`")
    parser.add_argument("--all", action="store_true", help="all nodes and workers, also of a large run")
    return parser


def get_ps_parser() -> PlainParser:
    parser = PlainParser(PROGRAM_PS, "List the runs on this host, with their agents.", _EPILOG_PS)
    parser.add_argument("--all-users", action="store_true", help="for root: the runs of other users, too")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def main(argv: Sequence[str]) -> int:
    return get_parser().run(argv, _show)


def list_runs(argv: Sequence[str]) -> int:
    return get_ps_parser().run(argv, _list)


def _show(args: argparse.Namespace) -> str:
    if args.watch:
        from holdfast.cli import top

        return top.show(args)
    try:
        run = runs.open_run(args)
    except runs.SeveralRuns:
        console.print_out(_list(args))
        raise
    view = run_view.look(run)
    if args.json:
        return json.dumps(view.to_json(words.sentence(view)), indent=2) + "\n"
    return text_of(view, is_all=args.all)


def _list(args: argparse.Namespace) -> str:
    agents, silent = ask.find(of_all_users=args.all_users)
    agents.sort(key=lambda each: (each.status.run_id, each.pid))
    for pid, name in silent.items():
        console.write_error(PROGRAM_PS, str(runs.no_answer(pid, name)))
    if args.json:
        told = [{**plain(each.status), "socket": each.socket, "uid": each.uid} for each in agents]
        return json.dumps(told, indent=2) + "\n"
    if not agents:
        return "" if silent else f"no run is found on this host{runs.as_whom()}\n"
    return "\n".join(words.table([_PS_HEADING, *map(_ps_row, agents)])) + "\n"


_NODE_HEADING = ("NODE", "NAME", "ADDRESS", "STATE", "AGENT", "WORKERS")
_WORKER_HEADING = ("RANK", "NODE", "PID", "STATE", "AGE", "PROGRESS")
_PS_HEADING = ("RUN", "AGENT", "NODE", "PHASE", "ROUND", "WORKERS", "RESTARTS", "AGE")


def text_of(view: RunView, *, is_all: bool = True) -> str:
    return "\n".join(lines_of(view, is_all=is_all)) + "\n"


def lines_of(view: RunView, *, is_all: bool = True) -> Iterator[str]:
    """What `holdfast top` shows, too."""
    yield words.heading(view)
    yield escape.one_line(words.sentence(view))
    if notice := words.notice_line(view):
        yield escape.cut(escape.one_line(notice))
    if past := words.history_line(view.history):
        yield past
    if saved := words.snapshot_line(told.status for told in view.agents.values()):
        yield saved
    yield from stragglers.words(view.stragglers())
    if view.problem:
        yield escape.one_line(f"Only this host's agents are shown: {view.problem}.")
    if view.not_asked:
        yield f"{view.not_asked} nodes were not asked for their workers."
    yield ""
    # Of a large run the odd nodes and workers, unless all are asked for.
    yield from (_details_of if is_all or len(view.nodes) <= _SMALL_RUN_NODES else _odd_ones_of)(view)


def _odd_ones_of(view: RunView) -> Iterator[str]:
    """How many nodes and workers are in which state, and those that are not in the most common one."""
    workers = [row for _, row in sorted(_worker_rows(view))]
    tables = (("nodes", _NODE_HEADING, [*_node_rows(view)]), ("workers", _WORKER_HEADING, workers))
    for what, heading, rows in tables:
        states = Counter(row[3] for row in rows)
        if not states:
            continue
        counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
        yield f"{len(rows)} {what}: {counts}"
        usual = states.most_common(1)[0][0]
        is_silent = [what == "nodes" and row[4] == "-" for row in rows]
        odd = [row for row, silent in zip(rows, is_silent, strict=True) if row[3] != usual or silent]
        if odd:
            yield from words.table([heading, *odd[:_MOST_ODD]])
        if len(odd) > _MOST_ODD:
            yield f"... and {len(odd) - _MOST_ODD} more"
    yield from _checks_of(view, only_failed=True)
    yield from _refusals_of(view)
    yield "--all shows every node and worker."


def _details_of(view: RunView) -> Iterator[str]:
    yield from words.table([_NODE_HEADING, *_node_rows(view)])
    workers = sorted(_worker_rows(view))
    if workers:
        yield ""
        yield from words.table([_WORKER_HEADING, *(row for _, row in workers[:_MOST_WORKERS])])
        if len(workers) > _MOST_WORKERS:
            yield f"... and {len(workers) - _MOST_WORKERS} more workers; --json shows all"
    yield from _failed_before(view)
    yield from _checks_of(view)
    yield from _refusals_of(view)


def _checks_of(view: RunView, *, only_failed: bool = False) -> Iterator[str]:
    for status in (told.status for told in view.agents.values()):
        for each in status.checks:
            if each.state == "failed" or not only_failed:
                ago = words.age_text(each.age_s)
                line = f"check {each.name} of {status.node_id or status.host}: {each.state} {ago} ago: {each.text}"
                yield escape.cut(escape.one_line(line))


def _refusals_of(view: RunView) -> Iterator[str]:
    if view.status is not None:
        yield from (escape.cut(escape.one_line(each.text)) for each in view.status.held)
        for each in view.status.refused:
            line = f"refused {words.age_text(each.ago_s)} ago: {each.who}: {each.reason}"
            yield escape.cut(escape.one_line(line))


def _node_rows(view: RunView) -> Iterator[tuple[str, ...]]:
    for node in view.nodes:
        told = view.agents.get(node.node_id)
        state = node.state if node.is_connected else "not connected"
        if node.leaves_in_s is not None:
            state += f", goes in {words.age_text(node.leaves_in_s)}"
        name, pid, workers = node.node_id, "-", view.silence_of(node)
        if told is not None:
            name, pid = told.status.node_id or told.status.host, f"{told.status.pid}"
            workers = words.workers_text(told.status)
        yield words.rank_text(node.rank), name, node.address, state, pid, workers


def _worker_rows(view: RunView) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Each with its rank."""
    for worker, told in view.workers():
        place = (words.rank_text(worker.global_rank), words.rank_text(told.status.node), f"{worker.pid or '-'}")
        times = (words.age_text(worker.age_s), words.progress_text(worker))
        yield worker.global_rank, (*place, words.worker_state(worker), *times)


def _failed_before(view: RunView) -> Iterator[str]:
    """Those that failed and were started again since."""
    shown = {(worker.global_rank, worker.pid) for worker, _ in view.workers()}
    earlier = [each for told in view.agents.values() for each in told.status.failed]
    for each in earlier[:_MOST_WORKERS]:
        if (each.global_rank, each.pid) not in shown:
            who = f"rank {each.global_rank} (pid {each.pid})"
            yield escape.cut(escape.one_line(f"earlier, in round {each.round}: {who} {words.worker_state(each)}"))


def _ps_row(agent: FoundAgent) -> tuple[str, ...]:
    told = agent.status
    place = f"{told.node} of {told.nodes}" if told.node is not None and told.node >= 0 else "-"
    restarts = words.restarts_text(told.restarts_used, told.restarts_left)
    age = words.age_text(told.age_s)
    return (told.run_id, f"{agent.pid}", place, told.phase, f"{told.round}", words.workers_text(told), restarts, age)
