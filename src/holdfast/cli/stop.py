"""`holdfast stop`: end a run on all its nodes, with grace. Every agent then exits with 143, as after SIGTERM.

An agent of this host is asked by its control socket, and closes the run as one of its members. By --rdzv-endpoint the
coordinator is asked, which wants the run's token for that. A run without a coordinator is ended on this host alone.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from holdfast.cli import runs, status
from holdfast.cli.options import duration_s
from holdfast.cli.parser import PlainParser
from holdfast.errors import HostError

PROGRAM = "holdfast stop"

_EPILOG = """\
The workers get SIGTERM and their grace period (--shutdown-timeout of `holdfast run`). On this host the command waits
until the agents have ended. A run without a coordinator (standalone, or static on one node) is ended on this host.

exit status:
  0  the run was closed, and its agents on this host have ended
  1  there is no such run, it may not be closed from here, or an agent has not ended in time
  2  wrong usage, or several runs fit

examples:
  holdfast stop
  holdfast stop job7 --rdzv-endpoint node1:29400 --token-file token
"""


def get_parser() -> PlainParser:
    parser = PlainParser(PROGRAM, "End a run on all its nodes, with grace.", _EPILOG)
    runs.add_arguments(parser)
    parser.add_argument("--timeout", type=duration_s, default=120.0, metavar="TIME", help="how long to wait for the "
                        "agents of this host to end (default: 2m)")  # fmt: skip
    parser.add_argument("--reason", default="", metavar="TEXT", help="what every node's agent says")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def main(argv: Sequence[str]) -> int:
    args = get_parser().parse_args(argv)

    def stop() -> str:
        reason = args.reason or f"holdfast stop, by {user_name()} on {os.uname().nodename}"
        run = runs.open_run(args)
        told = _stop_here(run, reason, args.timeout) if isinstance(run, runs.LocalRun) else _stop_there(run, reason)
        return json.dumps(told) + "\n" if args.json else f"{told['text']}\n"

    return status.shown(PROGRAM, stop)


def _stop_there(run: runs.RemoteRun, reason: str) -> dict[str, Any]:
    _, nodes = run.stop(reason)
    text = f"run {run.name} is closed; its {_count(nodes, 'node')} stop{'s' if nodes == 1 else ''} now"
    return {"run_id": run.name, "scope": "run", "nodes": nodes, "text": text}


def _stop_here(run: runs.LocalRun, reason: str, timeout_s: float) -> dict[str, Any]:
    with ExitStack() as opened:
        pids = {}
        for agent in run.local_agents():
            with suppress(OSError):  # It has just ended.
                fd = os.pidfd_open(int(agent["pid"]))
                opened.callback(os.close, fd)
                pids[fd] = int(agent["pid"])
        scope, _ = run.stop(reason)
        left = _await_end(set(pids), timeout_s)
        if left:
            names = ", ".join(str(pids[fd]) for fd in sorted(left))
            raise HostError(f"after {timeout_s:g} s these agents have not ended yet: {names}; their workers are being "
                            "stopped, or kill -9 ends agent and workers at once")  # fmt: skip
    ended = f"{_count(len(pids), 'agent')} of this host {'has' if len(pids) == 1 else 'have'} ended"
    if scope == "run":
        text = f"run {run.name} is closed on all nodes; {ended}"
    else:
        text = f"{ended}; run {run.name} has no coordinator within reach, so nodes on other hosts were not told"
    return {"run_id": run.name, "scope": scope, "pids": [*pids.values()], "text": text}


def _await_end(fds: set[int], timeout_s: float) -> set[int]:
    """Those that have not ended when the time is up."""
    ends, left = time.monotonic() + timeout_s, set(fds)
    while left and (left_s := ends - time.monotonic()) > 0:
        poller = select.poll()
        for fd in left:
            poller.register(fd, select.POLLIN)
        left -= {fd for fd, _ in poller.poll(1000 * left_s)}
    return left


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"
