"""`holdfast notice`: announce that a node, or a whole run, goes away soon. All workers of the run are told.

An agent of this host is asked by its control socket. By --rdzv-endpoint the coordinator is asked, and by
--health-address an agent at its health port; both want the run's token, which is proved and never sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from holdfast.cli import runs
from holdfast.cli.arguments.parser import PlainParser, argument
from holdfast.cli.arguments.values import notice_time_s
from holdfast.errors import HostError, UserError
from holdfast.observe import ask
from holdfast.observe.ask import LocalRun, RemoteRun
from holdfast.text import duration, plural

PROGRAM = "holdfast notice"

_EPILOG = """\
Without --node and --whole-run, the nodes of the run on this host go away. The job can save its state meanwhile: see
docs/notice.md. A run that can go on without these nodes does; otherwise it ends, with exit code 95 on every node.
A second notice can bring the time forward; to move it back, withdraw the first one.
Without RUN the command is about the only run of this host, and asks on a terminal whether that is meant.

exit status:
  0  the nodes of the run are told
  1  there is no such run, notice may not be given from here, or no agent answers
  2  wrong usage, or several runs fit

examples:
  holdfast notice
  holdfast notice job7 --in 30s --reason maintenance
  holdfast notice job7 --node node3 --rdzv-endpoint node1:29400 --token-file token
  holdfast notice job7 --whole-run --withdraw
"""


def get_parser() -> PlainParser:
    parser = runs.parser_for(PROGRAM, "Announce that a node, or a whole run, goes away soon.", _EPILOG)
    parser.add_argument("--in", dest="in_s", type=argument(notice_time_s), default=120.0, metavar="TIME",
                        help="in how long; 0 is now (default: 2m)")  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--node", metavar="NAME,...", help="these nodes of the run: by id, host or rank")
    which.add_argument("--whole-run", action="store_true", help="all nodes of the run")
    parser.add_argument("--withdraw", action="store_true", help="take the notice back")
    parser.add_argument("--reason", default="", metavar="TEXT", help="what every node's agent says")
    parser.add_argument("--health-address", metavar="HOST:PORT", help="ask the agent at that health port "
                        "(--health-port of `holdfast run`)")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
    return get_parser().run(argv, _give)


def _give(args: argparse.Namespace) -> str:
    return runs.told_text(_by_run(args) if args.health_address is None else _by_http(args), args)


def _said(args: argparse.Namespace) -> dict[str, Any]:
    said: dict[str, Any] = {"withdraw": True} if args.withdraw else {"in_s": args.in_s}
    return {**said, "reason": runs.reason_in(args, PROGRAM)}


def _when(args: argparse.Namespace, count: int = 1) -> str:
    s, es = ("s", "es") if count == 1 else ("", "")
    return f"stay{s}: the notice is withdrawn" if args.withdraw else f"go{es} away in {duration(args.in_s)}"


def _by_run(args: argparse.Namespace) -> dict[str, Any]:
    names = [name.strip() for name in (args.node or "").split(",") if name.strip()]
    if args.node is not None and not names:
        raise UserError(f"--node {args.node!r} names no node")
    if args.rdzv_endpoint is not None and not names and not args.whole_run:
        raise UserError("--rdzv-endpoint needs --node NAME or --whole-run: this host may be no node of the run")
    run = runs.open_run(args)
    if isinstance(run, LocalRun) and runs.name_in(args) is None and not args.withdraw and runs.is_at_terminal():
        runs.confirm(run, f"Give it {duration(args.in_s)} of notice?")
    if isinstance(run, LocalRun) and (run.is_of_one_node or not (names or args.whole_run)):
        if names:
            raise UserError(f"--node: run {run.name} has one node; leave it out")
        return _by_agents(run, args)
    return _by_coordinator(run, names, args)


def _by_agents(run: LocalRun, args: argparse.Namespace) -> dict[str, Any]:
    names = [agent.name for agent in run.local_agents()]
    answers = run.ask_nodes(names, {"command": "notice", **_said(args)}, ask.COORDINATOR_LIMIT_S)
    given = {name: each for name, each in answers.items() if isinstance(each, dict)}
    if not given:
        raise next((each for each in answers.values()), HostError(f"no agent of run {run.name} answers"))
    alone = not run.is_of_one_node and any(each.get("scope") != "run" for each in given.values())
    more = "; its coordinator is out of reach, so other nodes are not told yet" if alone else ""
    if any(each.get("is_whole_run") for each in given.values()):  # Of the command of --hosts, which owns the run.
        return {"run_id": run.name, "nodes": [], "text": f"run {run.name} {_when(args)}{more}"}
    who = f"run {run.name}" if run.is_of_one_node else f"{', '.join(given)} of run {run.name}"
    return {"run_id": run.name, "nodes": [*given], "text": f"{who} {_when(args, len(given))}{more}"}


def _by_coordinator(run: LocalRun | RemoteRun, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    said = _said(args)
    request = {"command": "notice", "in_s": said.get("in_s"), "reason": said["reason"], "nodes": names or None}
    told = run.ask_coordinator(request)
    nodes = told.get("nodes", []) if isinstance(told, dict) else []
    count = told.get("node_count", 0) if isinstance(told, dict) else 0
    who = ", ".join(map(str, nodes)) if nodes else f"run {run.name}, with {plural(count, 'node')},"
    return {"run_id": run.name, "nodes": nodes, "text": f"{who} {_when(args, len(nodes) or 1)}"}


def _by_http(args: argparse.Namespace) -> dict[str, Any]:
    from holdfast.rendezvous import endpoints, settings
    from holdfast.rendezvous.membership import keys
    from holdfast.telemetry import notice_http

    if args.node is not None or args.rdzv_endpoint is not None:
        raise UserError("--health-address names the node; leave --node and --rdzv-endpoint out")
    name, token = runs.name_in(args), settings.read_token(args.token_file)
    if token is not None and not name:
        raise UserError("--health-address with a token needs the name of the run, too: RUN, as given by --rdzv-id")
    key = keys.notice_key(token, name) if token is not None and name else None
    said = {**_said(args), **({"whole_run": True} if args.whole_run else {})}
    host, port = endpoints.parse_address(args.health_address)
    notice_http.post(host, port, said, key)
    who = "the whole run" if args.whole_run else f"the node at {args.health_address}"
    return {"run_id": name or "", "nodes": [], "text": f"{who} {_when(args)}"}
