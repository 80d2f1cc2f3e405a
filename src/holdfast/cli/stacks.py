"""`holdfast stacks`: where the workers of a run on this host are right now. Nothing is stopped.

Workers are found through the roll of their agent (`agent/roll.py`). Several agents of one host may belong to one run;
then their workers are shown side by side.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from holdfast import procfs, signals
from holdfast.agent import roll
from holdfast.agent.roll import Entry
from holdfast.cli import console
from holdfast.cli.parser import PlainParser
from holdfast.errors import HoldfastError, HostError, UserError
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


def _chosen(args: argparse.Namespace) -> list[Entry]:
    if args.pid is not None:
        return [_agent(args.pid)]
    entries = roll.read_all()
    if args.run_id is not None:
        return _of_run(entries, args.run_id)
    runs = {entry.run_id for entry in entries}
    if not runs:
        raise HostError(f"no run with workers is found on this host{_as_whom()}")
    if len(runs) > 1:
        raise UserError(f"there are several runs on this host, choose one with --run-id or --pid: {_listed(entries)}")
    return _of_run(entries, *runs)


def _agent(pid: int) -> Entry:
    if pid <= 0 or not os.path.exists(f"/proc/{pid}"):
        raise UserError(f"--pid {pid}: there is no such process")
    entry = roll.read(pid)
    if entry is not None:
        return entry
    above = _agent_above(pid)
    hint = f"; its agent is {above}" if above is not None else " with workers"
    raise UserError(f"--pid {pid} is not a holdfast agent{hint}")


def _agent_above(pid: int) -> int | None:
    """The agent that owns this process, if it belongs to one."""
    while (status := procfs.process_status(pid)) is not None and status.parent > 1:
        pid = status.parent
        try:
            if roll.read(pid) is not None:
                return pid
        except HostError:
            return None
    return None


def _of_run(entries: list[Entry], run_id: str) -> list[Entry]:
    """All agents of that run. Two that claim the same ranks cannot be of one run."""
    found = [entry for entry in entries if entry.run_id == run_id]
    if not found:
        known = f"; there are {_listed(entries)}" if entries else ""
        raise UserError(f"--run-id {run_id!r} is not found on this host{_as_whom()}{known}")
    if len({entry.node for entry in found}) < len(found):
        raise UserError(f"several runs on this host are called {run_id!r}, choose one with --pid: {_listed(found)}")
    return found


def _listed(entries: list[Entry]) -> str:
    return ", ".join(f"{entry.run_id} (--pid {entry.agent})" for entry in entries)


def _as_whom() -> str:
    return "" if os.geteuid() == 0 else f" (of user {os.geteuid()}; those of others are seen by root)"


# What is shown.


def _dump(entries: list[Entry], *, native: bool, with_all: bool) -> str:
    workers = roll.running(entries)
    headings = [_heading(entry) for entry in entries]
    if not workers:
        raise HostError(f"no workers are running at the moment: {'; '.join(headings)}")
    heading = "\n".join(headings)
    finding = watch.examine(workers, heading, native=native)
    parts = [heading, compare.summary(finding.picture, frames_limit=None, groups_limit=len(workers))]
    if with_all:
        parts.append(compare.full_text(finding.looks))
    return "\n\n".join(parts) + "\n"


def _heading(entry: Entry) -> str:
    node = f", node {entry.node} of {entry.nodes}" if entry.nodes > 1 else ""
    return f"run {entry.run_id}, round {entry.round}{node}, agent {entry.agent} on {os.uname().nodename}"
