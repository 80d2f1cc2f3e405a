"""`holdfast stacks`: where the workers of a run on this host are right now. Nothing is stopped.

Agents are found by their control sockets and name their workers. Several agents of one host may belong to one run;
then their workers are shown side by side.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast import procfs, signals
from holdfast.agent import control
from holdfast.cli import console, runs
from holdfast.cli.parser import PlainParser
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.frozen import frozen
from holdfast.hangs import compare, watch

PROGRAM = "holdfast stacks"

_MAX_NAME = 1024

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
    try:
        with signals.deferred() as inbox:
            text = _dump(_chosen(args), native=args.native, with_all=args.all)
            inbox.raise_pending()
    except HoldfastError as error:
        console.write_error(PROGRAM, str(error))
        return 2 if isinstance(error, UserError) else 1
    except signals.SignalException as received:
        return 128 + received.sigval
    console.print_out(text)
    sys.stdout.flush()
    return 0


# Which agents.


@frozen
class Agent:
    """`workers` are the global rank and the pid of each that was started."""

    pid: int
    run_id: str
    round: int
    node: int
    nodes: int
    workers: tuple[tuple[int, int], ...]


def _chosen(args: argparse.Namespace) -> list[Agent]:
    statuses, silent = control.find(of_all_users=args.all_users or args.pid is not None)
    for pid in silent:
        console.write_error(PROGRAM, f"agent {pid} does not answer; it may be stopped")
    agents = [agent for status in statuses if (agent := _agent_from(status)) is not None]
    if args.pid is not None:
        agents = _at_pid(agents, args.pid)
    elif args.run_id is not None:
        known = f"; there are {_listed(agents)}" if agents else ""
        agents = [agent for agent in agents if agent.run_id == args.run_id]
        if not agents:
            raise UserError(f"--run-id {args.run_id!r} is not found on this host{runs.as_whom()}{known}")
    # One that has no workers yet is shown only if there is nothing else to show.
    agents = [agent for agent in agents if agent.workers] or agents
    if not agents:
        raise HostError(f"no run is found on this host{runs.as_whom()}")
    if len({agent.run_id for agent in agents}) > 1:
        raise UserError(f"there are several runs on this host, choose one with --run-id or --pid: {_listed(agents)}")
    if len({agent.node for agent in agents}) < len(agents):
        name = agents[0].run_id
        raise UserError(f"several runs on this host are called {name!r}, choose one with --pid: {_listed(agents)}")
    return agents


def _agent_from(status: Mapping[str, Any]) -> Agent | None:
    """Root asks every user's agents, so what they answer may be anything."""
    try:
        workers = [(_number(each["global_rank"]), _number(each["pid"])) for each in status["workers"] if each["pid"]]
        run_id = str(status["run_id"])[:_MAX_NAME]
        round, node, nodes = (_number(status[name] or 0) for name in ("round", "node", "nodes"))
        name = run_id if run_id.isprintable() else repr(run_id)
        return Agent(_number(status["pid"]), name, round, node, nodes, tuple(workers))
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return None


def _number(value: Any) -> int:
    if isinstance(value, int) and 0 <= value < 1 << 53:
        return value
    raise ValueError(f"{value!r:.40} is no number")


def _at_pid(agents: list[Agent], pid: int) -> list[Agent]:
    if pid <= 0 or not os.path.exists(f"/proc/{pid}"):
        raise UserError(f"--pid {pid}: there is no such process")
    found = [agent for agent in agents if agent.pid == pid]
    if not found:
        above = _parents_of(pid) & {agent.pid for agent in agents}
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
    return ", ".join(f"{agent.run_id} (--pid {agent.pid})" for agent in agents)


# What is shown.


def _dump(agents: list[Agent], *, native: bool, with_all: bool) -> str:
    workers = _running(agents)
    headings = [_heading(agent) for agent in agents]
    if not workers:
        raise HostError(f"no workers are running at the moment: {'; '.join(headings)}")
    heading = "\n".join(headings)
    picture = watch.examine(workers, native=native)
    parts = [heading, compare.summary(picture, is_short=False)]
    if with_all:
        parts.append(compare.full_text(picture))
    return "\n\n".join(parts) + "\n"


def _running(agents: list[Agent]) -> dict[int, tuple[int, int]]:
    """A number -> global rank and pid of each worker that is still there. The pid of one that has ended may belong to
    another process by now."""
    found = []
    for agent in agents:
        below = set(procfs.descendants_of(agent.pid))
        found += [worker for worker in agent.workers if worker[1] in below and procfs.state(worker[1]) not in ("", "Z")]
    return dict(enumerate(sorted(found)))


def _heading(agent: Agent) -> str:
    node = f", node {agent.node} of {agent.nodes}" if agent.nodes > 1 else ""
    return f"run {agent.run_id}, round {agent.round}{node}, agent {agent.pid} on {os.uname().nodename}"
