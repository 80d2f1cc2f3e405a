"""`holdfast stacks`: where the workers of a run are right now, on all its nodes. Nothing is stopped."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from holdfast import escape
from holdfast.cli import console, runs
from holdfast.cli.arguments.parser import PlainParser
from holdfast.errors import HostError
from holdfast.observe import run_view, stacks
from holdfast.observe.run_view import RunView, Told
from holdfast.telemetry.status import plain

PROGRAM = "holdfast stacks"

_EPILOG = """\
Workers at the same place are shown once; those that stand out come first. The agents take the stacks, on whatever host
they are; nodes that do not answer are named.

exit status:
  0  the stacks were taken, or the output says for each worker why not
  1  there is no such run, it may not be looked at, or no worker is running
  2  wrong usage, no such rank, or more than one run fits

examples:
  holdfast stacks
  holdfast stacks job7 --rank 3 --native --all
"""


def get_parser() -> PlainParser:
    parser = runs.parser_for(PROGRAM, "Show the stacks of the workers of a run, grouped. Nothing is stopped.", _EPILOG)
    parser.add_argument("--rank", type=int, metavar="RANK", help="only this global rank, with all its threads")
    parser.add_argument("--native", action="store_true", help="with native frames; pauses the workers for longer")
    parser.add_argument("--all", action="store_true", help="every thread of every process, too")
    return parser


def main(argv: Sequence[str]) -> int:
    return get_parser().run(argv, _taken)


def _taken(args: argparse.Namespace) -> str:
    run = runs.open_run(args)
    view = run_view.look(run)
    nodes = stacks.chosen(view, args.rank)
    for node in view.nodes if args.rank is None else ():
        if node.node_id in view.silent:
            console.write_error(PROGRAM, f"node {node.node_id} is left out: {view.silence_of(node)}")
    taken = stacks.take(run, view, args.rank, {"native": args.native, "all": args.all})
    for name, each in taken.items():
        if each.problem:
            console.write_error(PROGRAM, f"{name}: {each.problem}")
    if all(each.problem for each in taken.values()):
        headings = "; ".join(_heading(view, told) for told in (nodes or view.agents).values())
        problem = "no stacks could be taken" if taken else "no workers are running at the moment"
        raise HostError(f"{problem}: {headings}")
    if args.json:
        told = {name: {"looks": plain(each.looks), "text": each.text} for name, each in taken.items()}
        return json.dumps({"run_id": view.run_id, "nodes": told}, indent=2) + "\n"
    headings = "\n".join(_heading(view, nodes[name]) for name, each in taken.items() if not each.problem)
    paragraphs = stacks.text_of(taken, with_all=args.all or args.rank is not None)
    return "\n\n".join([headings, *paragraphs]) + "\n"


def _heading(view: RunView, told: Told) -> str:
    agent = told.status
    place = f", node {agent.node} of {agent.nodes}" if agent.nodes is not None and agent.nodes > 1 else ""
    return escape.one_line(f"run {view.run_id}, round {agent.round}{place}, agent {agent.pid} on {agent.host}")
