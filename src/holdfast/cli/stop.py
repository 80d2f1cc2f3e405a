"""`holdfast stop`: end a run on all its nodes, with grace. Every agent then exits with 94: no engine starts it again.

An agent of this host is asked by its control socket, and closes the run as one of its members. By --rdzv-endpoint the
coordinator is asked, which wants the run's token for that. A run without a coordinator is ended on this host alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from holdfast import escape
from holdfast.cli import runs
from holdfast.cli.arguments.parser import PlainParser, argument
from holdfast.cli.arguments.values import duration_s
from holdfast.errors import HostError, UserError
from holdfast.observe.ask import AskedRun, LocalRun
from holdfast.text import plural

PROGRAM = "holdfast stop"

_COORDINATOR_PATIENCE_S = 2.0  # A coordinator tells its nodes at once that the run is closed.

_EPILOG = """\
The workers get SIGTERM and their grace period (--shutdown-timeout of `holdfast run`). On this host the command waits
until the agents have ended. A run without a coordinator (standalone, or static on one node) is ended on this host.
Without RUN the command asks, on a terminal, whether the only run of this host is meant; in a script RUN is required.

exit status:
  0  the run was closed, and its agents on this host have ended
  1  there is no such run, it may not be closed from here, its coordinator does not answer, or an agent has not ended
     in time
  2  wrong usage, RUN is missing, or several runs fit

examples:
  holdfast stop job7
  holdfast stop job7 --rdzv-endpoint node1:29400 --token-file token
"""


def get_parser() -> PlainParser:
    parser = runs.parser_for(PROGRAM, "End a run on all its nodes, with grace.", _EPILOG)
    parser.add_argument("--timeout", type=argument(duration_s), default=120.0, metavar="TIME", help="how long to wait "
                        "for the agents of this host to end (default: 2m)")  # fmt: skip
    parser.add_argument("--reason", default="", metavar="TEXT", help="what every node's agent says")
    return parser


def main(argv: Sequence[str]) -> int:
    return get_parser().run(argv, _stop)


def _stop(args: argparse.Namespace) -> str:
    reason = runs.reason_in(args, PROGRAM)
    run = runs.open_run(args)
    if runs.name_in(args) is None:
        if not runs.is_at_terminal():
            raise UserError(f"name the run that is to end; the only one on this host is {escape.one_line(run.name)}")
        runs.confirm(run, "End it?")
    told = _stop_here(run, reason, args.timeout) if isinstance(run, LocalRun) else _stop_there(run, reason)
    return runs.told_text(told, args)


def _stop_there(run: AskedRun, reason: str) -> dict[str, Any]:
    _, nodes = run.stop(reason)
    text = f"run {run.name} is closed; its {plural(nodes, 'node')} stop{'s' if nodes == 1 else ''} now"
    return {"run_id": run.name, "scope": "run", "nodes": nodes, "text": text}


def _stop_here(run: LocalRun, reason: str, timeout_s: float) -> dict[str, Any]:
    pids = run.pids
    scope, _ = run.stop(reason)
    left = run.await_exits(min(timeout_s, _COORDINATOR_PATIENCE_S))
    if left and scope == "run":
        _check_coordinator(run, left)
    left = run.await_exits(timeout_s - _COORDINATOR_PATIENCE_S) if left else left
    if left:
        names = ", ".join(map(str, left))
        raise HostError(f"after {timeout_s:g} s these agents still run: {names}; they are stopping their workers, or "
                        "they hang; `kill -9 PID` ends an agent and its workers at once")  # fmt: skip
    ended = f"{plural(len(pids), 'agent')} of this host {'has' if len(pids) == 1 else 'have'} ended"
    if run.is_of_one_node:
        text = f"run {run.name} has ended"
    elif scope == "run":
        text = f"run {run.name} is closed on all nodes; {ended}"
    else:
        text = f"{ended}; run {run.name} has no coordinator within reach, so nodes on other hosts were not told"
    return {"run_id": run.name, "scope": scope, "pids": pids, "text": text}


def _check_coordinator(run: LocalRun, pids: Sequence[int]) -> None:
    """The agents have passed the stop on and wait for the coordinator. HostError if it does not answer, either."""
    if {agent.status.phase for agent in run.local_agents()} <= {"stopping", "ended"}:
        return  # They have heard it.
    try:
        run.run_page(0)
    except HostError as error:
        agents = " ".join(map(str, pids))
        raise HostError(
            f"the coordinator of run {run.name} does not answer, and the run ends when it does: {error}; see whether "
            f"its process is stopped, or end the agents of this host with their workers: kill -9 {agents}"
        ) from None
