"""`holdfast stacks`: where the workers of a run on this host are right now. Nothing is stopped.

Agents are found by their control sockets and name their workers. Several agents of one host may belong to one run;
then their workers are shown side by side.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from holdfast import escape, procfs, signals
from holdfast.cli import console, runs
from holdfast.cli.arguments.parser import PlainParser
from holdfast.cli.runs import dicts_of, number_of, text_of
from holdfast.errors import HostError, UserError
from holdfast.hangs import compare, watch

PROGRAM = "holdfast stacks"

_EPILOG = """\
Workers at the same place are shown once; those that stand out come first. With neither --pid nor --run-id it is the
only run on this host; if there are several, they are listed.

exit status:
  0  the stacks were taken, or it is said for each worker why not
  1  there is no run, or it may not be looked at
  2  wrong usage, or more than one run fits

examples:
  holdfast stacks
  holdfast stacks --run-id job7 --native --all
"""


def get_parser() -> PlainParser:
    description = "Show the stacks of the workers of a run on this host, grouped. Nothing is stopped."
    parser = PlainParser(PROGRAM, description, _EPILOG)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pid", type=int, metavar="PID", help="the agent, that is the `holdfast run` process")
    which.add_argument("--run-id", metavar="ID", help="the run, as given by --rdzv-id")
    parser.add_argument("--all-users", action="store_true", help="for root: look at the runs of other users, too")
    parser.add_argument("--native", action="store_true", help="with native frames; pauses the workers for longer")
    parser.add_argument("--all", action="store_true", help="every thread of every process, too")
    return parser


def main(argv: Sequence[str]) -> int:
    args = get_parser().parse_args(argv)

    def show() -> str:
        with signals.deferred() as inbox:  # A worker is paused while its stack is read.
            text = _dump(_chosen(args), native=args.native, with_all=args.all)
            inbox.raise_pending()
        return text

    return console.show(PROGRAM, show)


# Which agents.

Agent = dict[str, Any]  # As `runs.agents_here` returns it.


def _chosen(args: argparse.Namespace) -> list[Agent]:
    agents, silent = runs.agents_here(args.all_users or args.pid is not None)
    for pid, name in silent.items():
        console.write_error(PROGRAM, runs.silent_text(pid, name))
    if args.pid is not None:
        agents = _at_pid(agents, args.pid)
    elif args.run_id is not None:
        known = f"; there are {_listed(agents)}" if agents else ""
        agents = [agent for agent in agents if agent["run_id"] == args.run_id]
        if not agents:
            raise UserError(f"--run-id {args.run_id!r} is not found on this host{runs.as_whom()}{known}")
    # One that has no workers yet is shown only if there is nothing else to show.
    agents = [agent for agent in agents if _workers_of(agent)] or agents
    if not agents:
        raise HostError(f"no run is found on this host{runs.as_whom()}")
    if len({agent["run_id"] for agent in agents}) > 1:
        raise UserError(f"there are several runs on this host, choose one with --run-id or --pid: {_listed(agents)}")
    if len({number_of(agent, "node") for agent in agents}) < len(agents):
        name = text_of(agents[0], "run_id")
        raise UserError(f"several runs on this host are called {name!r}, choose one with --pid: {_listed(agents)}")
    return agents


def _workers_of(agent: Agent) -> list[tuple[int, int]]:
    """The global rank and the pid of each that was started."""
    pairs = [(number_of(each, "global_rank"), number_of(each, "pid")) for each in dicts_of(agent, "workers")]
    return [(int(rank), int(pid)) for rank, pid in pairs if rank is not None and pid]


def _at_pid(agents: list[Agent], pid: int) -> list[Agent]:
    if pid <= 0 or not os.path.exists(f"/proc/{pid}"):
        raise UserError(f"--pid {pid}: there is no such process")
    found = [agent for agent in agents if agent["pid"] == pid]
    if not found:
        above = _parents_of(pid) & {agent["pid"] for agent in agents}
        hint = f"; its agent is {above.pop()}" if above else runs.as_whom()
        raise UserError(f"--pid {pid} is not a holdfast agent{hint}")
    return found


def _parents_of(pid: int) -> set[int]:
    found: set[int] = set()
    while (status := procfs.process_status(pid)) is not None and status.parent > 1:
        pid = status.parent
        found.add(pid)
    return found


def _listed(agents: list[Agent]) -> str:
    return ", ".join(f"{text_of(agent, 'run_id')} (--pid {agent['pid']})" for agent in agents)


# What is shown.


def _dump(agents: list[Agent], *, native: bool, with_all: bool) -> str:
    workers = _running(agents)
    headings = [_heading(agent) for agent in agents]
    if not workers:
        raise HostError(f"no workers are running at the moment: {'; '.join(headings)}")
    picture = watch.examine(workers, native=native)
    parts = ["\n".join(headings), compare.summary(picture, is_short=False)]
    if with_all:
        parts.append(compare.full_text(picture))
    return "\n\n".join(parts) + "\n"


def _running(agents: list[Agent]) -> dict[int, tuple[int, int]]:
    """A number -> global rank and pid of each worker that is still there. The pid of one that has ended may belong to
    another process by now."""
    found = []
    for agent in agents:
        below = set(procfs.descendants_of(agent["pid"]))
        found += [each for each in _workers_of(agent) if each[1] in below and procfs.state(each[1]) not in ("", "Z")]
    return dict(enumerate(sorted(found)))


def _heading(agent: Agent) -> str:
    name = escape.one_line(text_of(agent, "run_id"))
    round, node, nodes = (int(number_of(agent, each) or 0) for each in ("round", "node", "nodes"))
    place = f", node {node} of {nodes}" if nodes > 1 else ""
    return f"run {name}, round {round}{place}, agent {agent['pid']} on {os.uname().nodename}"
