"""Which run a command is about: the options that all of these commands have, and how the run is found."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from holdfast import escape
from holdfast.agent import control
from holdfast.cli import console
from holdfast.cli.arguments.parser import PlainParser
from holdfast.errors import HostError, UserError
from holdfast.observe import ask
from holdfast.observe.ask import FoundAgent, LocalRun, RemoteRun
from holdfast.rendezvous.client.visitor import Visitor
from holdfast.rendezvous.client.visitor import find as find_coordinator
from holdfast.text import plural


def parser_for(program: str, description: str, epilog: str, json_help: str = "print JSON, for programs") -> PlainParser:
    """The parser of a command about one run, with the options that all of them have. Without `json_help` the command
    has no --json."""
    parser = PlainParser(program, description, epilog)
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run, as given by --rdzv-id, or the pid of one of "
                        "its agents; may be left out if there is only one on this host")  # fmt: skip
    parser.add_argument("--rdzv-id", metavar="RUN", help="the same as RUN")
    parser.add_argument("--all-users", action="store_true", help="for root: look at the runs of other users, too")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="ask the coordinator there, from any host; with "
                        "--rdzv-backend etcd, the one that etcd knows")  # fmt: skip
    parser.add_argument("--rdzv-backend", default="tcp", metavar="NAME", help="tcp (the default), static or etcd")
    parser.add_argument("--rdzv-conf", default="", metavar="KEY=VALUE,...", help="as for `holdfast run`: tls_ca, "
                        "prefix, user, and others that are needed to get a connection")  # fmt: skip
    parser.add_argument("--token-file", default="", metavar="FILE", help="the run's token (or the environment "
                        "variable HOLDFAST_TOKEN)")  # fmt: skip
    if json_help:
        parser.add_argument("--json", action="store_true", help=json_help)
    return parser


def name_in(args: argparse.Namespace) -> str | None:
    """RUN or --rdzv-id."""
    if args.run is not None and args.rdzv_id is not None and args.run != args.rdzv_id:
        raise UserError(f"RUN is {args.run!r} and --rdzv-id {args.rdzv_id!r}; give one of them")
    name: str | None = args.run if args.run is not None else args.rdzv_id
    return name


class SeveralRuns(UserError):  # noqa: N818
    """The user has to say which."""


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    from holdfast.cli.run import check_brackets
    from holdfast.rendezvous.settings import parse_rendezvous_config

    for place in args.rdzv_endpoint.split(","):
        check_brackets("--rdzv-endpoint", place.strip().rpartition("://")[2], 29400)
    try:
        config: dict[str, Any] = dict(parse_rendezvous_config(args.rdzv_conf))
    except ValueError as error:
        raise UserError(f"--rdzv-conf: {error}") from None
    return {**config, **({"token_file": args.token_file} if args.token_file else {})}


def open_run(args: argparse.Namespace) -> LocalRun | RemoteRun:
    """The run that the user means. UserError if that is not clear, HostError if there is none."""
    name = name_in(args)
    if args.rdzv_endpoint is not None:
        if not name:
            raise UserError("--rdzv-endpoint needs the name of the run, too: RUN, as given by --rdzv-id")
        config = config_of(args)
        return RemoteRun(name, lambda: Visitor(find_coordinator(args.rdzv_backend, args.rdzv_endpoint, name, config)))
    if args.token_file or args.rdzv_conf or args.rdzv_backend != "tcp":
        raise UserError("--token-file, --rdzv-backend and --rdzv-conf are for --rdzv-endpoint")
    agents, silent = ask.find(of_all_users=args.all_users)
    if name is not None:
        return LocalRun(_told_apart(_of_name(agents, silent, name)))
    names = {agent.status.run_id for agent in agents}
    # A run whose agents do not answer is one, too: `holdfast stop` must not take the other one for the only one.
    names |= {name for name in silent.values() if name not in map(control.name_in_path, names)}
    if len(names) > 1:
        raise SeveralRuns(f"there are several runs on this host, name one: {', '.join(sorted(names))}")
    if not agents and silent:
        raise no_answer(*next(iter(silent.items())))
    if not agents:
        raise HostError(f"no run is found on this host{as_whom()}; ask another host's with --rdzv-endpoint")
    return LocalRun(_told_apart(agents))


def _told_apart(agents: list[FoundAgent]) -> list[FoundAgent]:
    """Several runs of one node may have the same name."""
    alone = [agent for agent in agents if agent.status.nodes == 1]
    if len(alone) > 1:
        pids = ", ".join(str(agent.pid) for agent in alone)
        name = alone[0].status.run_id
        raise SeveralRuns(f"several runs on this host are called {name!r}, name one by the pid of its agent: {pids}")
    return agents


def _of_name(agents: list[FoundAgent], silent: Mapping[int, str], name: str) -> list[FoundAgent]:
    found = [agent for agent in agents if agent.status.run_id == name]
    if not found and name.isdecimal():
        found = [agent for agent in agents if agent.pid == int(name)]
    if found:
        return found
    if meant := {pid: run for pid, run in silent.items() if run == control.name_in_path(name) or name == str(pid)}:
        raise no_answer(*next(iter(meant.items())))
    known = ", ".join(sorted({agent.status.run_id for agent in agents}))
    raise HostError(f"run {name!r} is not found on this host{as_whom()}{f'; there are {known}' if known else ''}")


def no_answer(pid: int, run: str) -> HostError:
    return HostError(f"agent {pid} of run {run} does not answer; it may be stopped: `kill -CONT {pid}` continues it, "
                     f"`kill -9 {pid}` ends it and its workers")  # fmt: skip


def is_at_terminal() -> bool:
    return bool(sys.stdin) and sys.stdin.isatty()


def confirm(run: LocalRun | RemoteRun, question: str) -> None:
    """The only run of this host was not named: is it the one that is meant? On a terminal."""
    name, agents = escape.one_line(run.name), run.local_agents()
    workers = sum(len(agent.status.workers) for agent in agents)
    pids = ", ".join(str(agent.pid) for agent in agents)
    console.write(f"run {name}, with {plural(workers, 'worker')} on this host (agent {pids}). {question} [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise HostError(f"run {name} goes on")


def reason_in(args: argparse.Namespace, program: str) -> str:
    """--reason, or who gave the command."""
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = f"user {os.geteuid()}"
    return escape.reason(args.reason, f"{program}, by {user} on {os.uname().nodename}")


def told_text(told: Mapping[str, Any], args: argparse.Namespace) -> str:
    """What a command has done: its `text`, one line, for people, and all of it for programs."""
    return json.dumps(told) + "\n" if args.json else f"{escape.one_line(told['text'])}\n"


def as_whom() -> str:
    whose = "root sees those of others with --all-users"
    return f" ({whose})" if os.geteuid() == 0 else f" (of user {os.geteuid()}; {whose})"
