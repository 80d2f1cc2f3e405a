"""Which run a command is about, and how to ask it.

A run is found on this host by the control sockets of its agents, which pass questions on to the coordinator and to the
agents of other hosts. With --rdzv-endpoint the coordinator is asked directly. Both give the same answers, as plain
data from JSON: what comes from elsewhere is read with care (`text_of`, `number_of`) and shown through `escape`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from holdfast import loop
from holdfast.agent import control
from holdfast.cli.arguments.parser import PlainParser
from holdfast.errors import HostError, UserError

if TYPE_CHECKING:
    from holdfast.rendezvous.client.visitor import Visitor
    from holdfast.rendezvous.membership.model import Outcome

MOST_NODES = 1024
NO_COORDINATOR = "this run has no coordinator that could be asked"  # As an agent says (`Coordination.ask`).
_MOST_ASKED = 64  # Agents of other hosts, for their workers.
_COORDINATOR_LIMIT_S = 5.0
_ASKED_HERE_LIMIT_S = 1.0  # For the coordinator, if an agent of this host asks it.
_ASK_LIMIT_S = 25.0  # An agent waits 20 s for another one.
# For the status of each node, and of all of them. With the search for the agents of this host, 2 s are not exceeded.
_NODE_STATUS_LIMIT_S = 0.7
_ALL_STATUSES_LIMIT_S = 0.8  # After that no further node is asked.
_ASKED_AT_ONCE = 6  # An agent passes 8 questions on at a time.
_MARGIN_S = 0.1  # The agent or coordinator that passes a question on reports a missing answer first.
_MAX_NAME = 1024


def parser_for(program: str, description: str, epilog: str, json_help: str = "print JSON, for programs") -> PlainParser:
    """The parser of a command about one run, with the options that all of them have. Without `json_help` the command
    has no --json."""
    parser = PlainParser(program, description, epilog)
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run, as given by --rdzv-id, or the pid of one of "
                        "its agents; may be left out if there is only one on this host")  # fmt: skip
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


class SeveralRuns(UserError):  # noqa: N818
    """The user has to say which."""


class RunView:
    """One run, as a command sees it. `name` is its id. Every answer is an object; errors are of `HoldfastError`."""

    name = ""

    def ask_coordinator(self, request: Mapping[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def ask_node(self, name: str, request: Mapping[str, Any], timeout_s: float = _ASK_LIMIT_S) -> dict[str, Any]:
        """What the agent of that name (`name_of`) answers. May be called from several threads."""
        raise NotImplementedError

    def local_agents(self, timeout_s: float = _ASK_LIMIT_S) -> list[dict[str, Any]]:
        """The agents of the run on this host (`AgentStatus.to_dict`), as far as they were looked for. Each has that
        time to answer."""
        return []

    @contextmanager
    def pidfds(self) -> Iterator[dict[int, int]]:
        """A descriptor for each agent of this host, and its pid; see `await_ends`."""
        found = {}
        try:
            for pid in [int(agent["pid"]) for agent in self.local_agents()]:
                with suppress(OSError):  # It has just ended.
                    found[os.pidfd_open(pid)] = pid
            yield found
        finally:
            for fd in found:
                os.close(fd)

    @property
    def is_of_one_node(self) -> bool:
        """Whether the agents of this host say that there are no other nodes."""
        return False

    def stop(self, reason: str) -> tuple[str, int]:
        """End it, with grace. How far that reaches (`run`, or `host` if there is no coordinator), and how many nodes
        the coordinator has told, if it was asked."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what is needed for asking."""

    def run_page(self, first: int) -> dict[str, Any]:
        """How the run stands (`RunStatus.to_dict`), with the nodes from that number on."""
        return self.ask_coordinator({"command": "status", "first": first})

    def run_status(self) -> dict[str, Any]:
        """With all nodes, up to a bound."""
        status = self.run_page(0)
        nodes, following = dicts_of(status, "nodes"), status.get("next_page")
        while type(following) is int and len(nodes) < MOST_NODES:
            page = self.run_page(following)
            more, following = dicts_of(page, "nodes"), page.get("next_page")
            if not more:
                break
            nodes += more
        return {**status, "nodes": nodes[:MOST_NODES]}

    def agents(self, nodes: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The status of each agent, and by node id why some did not tell theirs. Several are asked at a time."""
        from concurrent.futures import ThreadPoolExecutor

        ends = time.monotonic() + _ALL_STATUSES_LIMIT_S

        def status_of(node_id: str) -> dict[str, Any] | str:
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return f"not asked: other nodes took {_ALL_STATUSES_LIMIT_S:g} s"
            try:
                limit_s = min(left_s, _NODE_STATUS_LIMIT_S)
                return {**self.ask_node(node_id, {"command": "status"}, limit_s), "node_id": node_id}
            except HostError as error:
                return f"silent: {error}"

        found = {name_of(each): each for each in self.local_agents(_NODE_STATUS_LIMIT_S)}
        others = [node_id for node_id in (text_of(node, "node_id") for node in nodes) if node_id not in found]
        del others[max(0, _MOST_ASKED - len(found)) :]
        problems: dict[str, str] = {}
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            for node_id, answer in zip(others, pool.map(status_of, others), strict=True):
                if isinstance(answer, str):
                    problems[node_id] = answer
                else:
                    found[node_id] = answer
        return [*found.values()], problems


class LocalRun(RunView):
    """Its agents on this host, each with the path of its `socket`."""

    def __init__(self, agents: list[dict[str, Any]]) -> None:
        self._agents = agents
        self.name = text_of(agents[0], "run_id")

    @property
    def is_of_one_node(self) -> bool:
        return {number_of(agent, "nodes") for agent in self._agents} == {1}

    def local_agents(self, timeout_s: float = _ASK_LIMIT_S) -> list[dict[str, Any]]:
        """As they are now; those that have ended are left out."""
        found = []
        for agent in self._agents:
            with suppress(HostError):
                known = {name: agent.get(name) for name in ("socket", "uid", "pid")}
                found.append({**self._ask(agent, {"command": "status"}, timeout_s), **known})
        return found

    def ask_coordinator(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask_any({"command": "query", "request": request, "timeout_s": _ASKED_HERE_LIMIT_S})

    def ask_node(self, name: str, request: Mapping[str, Any], timeout_s: float = _ASK_LIMIT_S) -> dict[str, Any]:
        for agent in self._agents:
            if name == name_of(agent):
                return self._ask(agent, request, timeout_s)
        query = {"command": "query", "node": name, "request": request, "timeout_s": timeout_s}
        return self._ask_any(query, timeout_s + _MARGIN_S)

    def _ask_any(self, request: Mapping[str, Any], timeout_s: float = _ASK_LIMIT_S) -> dict[str, Any]:
        trouble = HostError("no agent of the run answers")
        for agent in self._agents:
            try:
                return self._ask(agent, request, timeout_s)
            except HostError as error:
                trouble = error
        raise trouble

    def stop(self, reason: str) -> tuple[str, int]:
        scopes = set()
        for agent in self._agents:
            with suppress(HostError):  # It has ended meanwhile, as a node of a run that was closed just now.
                scopes.add(text_of(self._ask(agent, {"command": "stop", "reason": reason}), "scope"))
            if "run" in scopes:
                return "run", 0  # One member closes it for all.
        if not scopes:
            raise HostError(f"no agent of run {self.name} can be asked any more")
        return "host", 0

    def send_to_all(self, request: Mapping[str, Any]) -> list[control.Question]:
        """The request to each agent that is there; the answers may come much later."""
        sent = []
        for agent in self._agents:
            with suppress(OSError):
                sent.append(control.Question(str(agent["socket"]), request))
        return sent

    def _ask(
        self, agent: Mapping[str, Any], request: Mapping[str, Any], timeout_s: float = _ASK_LIMIT_S
    ) -> dict[str, Any]:
        try:
            answer, _ = control.ask(str(agent["socket"]), request, timeout_s)
        except TimeoutError:
            raise HostError(f"agent {agent.get('pid')} does not answer; it may be stopped") from None
        except (OSError, ValueError, RecursionError) as error:
            raise HostError(f"agent {agent.get('pid')} cannot be asked: {error}") from None
        if "result" not in answer:
            raise HostError(str(answer.get("error", "it sent an answer that makes no sense")))
        return _object(answer["result"], f"agent {agent.get('pid')}")


def await_ends(pidfds: set[int], timeout_s: float) -> set[int]:
    """Those whose processes have not ended when the time is up."""
    ends, left = time.monotonic() + timeout_s, set(pidfds)
    while left and (left_s := ends - time.monotonic()) > 0:
        loop.wait_readable(left, left_s)
        left = {fd for fd in left if not loop.is_readable(fd)}
    return left


class RemoteRun(RunView):
    """Its coordinator, asked over the network. Questions at the same time have a connection each, which are kept for
    later ones. If a connection breaks, the next question makes another one: the coordinator may have been restarted, or
    replaced."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.name = args.run
        self._args, self._config = args, config_of(args)
        self._idle: list[Visitor] = [self._connected()]

    def _connected(self) -> Visitor:
        from holdfast.rendezvous.client import visitor

        return visitor.Visitor(visitor.find(self._args.rdzv_backend, self._args.rdzv_endpoint, self.name, self._config))

    def _ask(self, request: Mapping[str, Any], node_id: str = "", timeout_s: float = _COORDINATOR_LIMIT_S) -> Any:
        from holdfast.rendezvous.client import visitor

        try:
            chosen = self._idle.pop()
        except IndexError:
            chosen = self._connected()
        try:
            answer = chosen.ask(request, node_id, timeout_s)
        except visitor.ConnectionBroken:
            chosen.close()
            self.close()
            raise
        except HostError:  # Such as an answer that did not come. The connection is good.
            self._idle.append(chosen)
            raise
        self._idle.append(chosen)
        return answer

    def ask_coordinator(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return _object(self._ask(request), "the coordinator")

    def ask_node(self, name: str, request: Mapping[str, Any], timeout_s: float = _ASK_LIMIT_S) -> dict[str, Any]:
        return _object(self._ask(request, name, timeout_s), f"node {name}")

    def stop(self, reason: str) -> tuple[str, int]:
        told = self.ask_coordinator({"command": "stop", "reason": reason})
        return "run", int(number_of(told, "nodes") or 0)

    def await_outcome(self, timeout_s: float) -> Outcome | None:
        """How the run ended, with the evidence if the token was proved; None if it has not ended by then."""
        import msgspec

        from holdfast.rendezvous.client import visitor
        from holdfast.rendezvous.membership.model import Outcome

        try:
            return msgspec.convert(self._ask({"command": "outcome"}, "", timeout_s), Outcome)
        except visitor.NoAnswer:
            return None
        except msgspec.ValidationError as error:
            raise HostError(f"the coordinator sent an answer that makes no sense: {error}") from None

    def close(self) -> None:
        idle, self._idle = self._idle, []
        for each in idle:
            each.close()


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
    if args.rdzv_endpoint is not None:
        if not args.run:
            raise UserError("--rdzv-endpoint needs the name of the run, too: RUN, as given by --rdzv-id")
        return RemoteRun(args)
    if args.token_file or args.rdzv_conf or args.rdzv_backend != "tcp":
        raise UserError("--token-file, --rdzv-backend and --rdzv-conf are for --rdzv-endpoint")
    agents, silent = agents_here(args.all_users)
    if args.run is not None:
        return LocalRun(_of_name(agents, silent, args.run))
    names = {text_of(agent, "run_id") for agent in agents}
    # A run whose agents do not answer is one, too: `holdfast stop` must not take the other one for the only one.
    names |= {name for name in silent.values() if name not in map(control.name_in_path, names)}
    if len(names) > 1:
        raise SeveralRuns(f"there are several runs on this host, name one: {', '.join(sorted(names))}")
    if not agents and silent:
        raise _no_answer(silent)
    if not agents:
        raise HostError(f"no run is found on this host{as_whom()}; ask another host's with --rdzv-endpoint")
    return LocalRun(agents)


def _of_name(agents: list[dict[str, Any]], silent: Mapping[int, str], name: str) -> list[dict[str, Any]]:
    found = [agent for agent in agents if agent["run_id"] == name]
    if not found and name.isdecimal():
        found = [agent for agent in agents if agent["pid"] == int(name)]
    if found:
        return found
    if meant := {pid: run for pid, run in silent.items() if run == control.name_in_path(name) or name == str(pid)}:
        raise _no_answer(meant)
    known = ", ".join(sorted({text_of(agent, "run_id") for agent in agents}))
    raise UserError(f"run {name!r} is not found on this host{as_whom()}{f'; there are {known}' if known else ''}")


def _no_answer(silent: Mapping[int, str]) -> HostError:
    return HostError(silent_text(*next(iter(silent.items()))))


def silent_text(pid: int, run: str) -> str:
    return f"agent {pid} does not answer; it may be stopped (run {run})"


def agents_here(of_all_users: bool = False) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """All agents that answer, whole enough to be shown. Of the others the pids, with the names of their runs as far as
    the paths of their sockets tell them."""
    statuses, silent = control.find(of_all_users=of_all_users)
    found = [each for each in statuses if isinstance(each.get("run_id"), str) and isinstance(each.get("workers"), list)]
    return found, silent


def as_whom() -> str:
    whose = "root sees those of others with --all-users"
    return f" ({whose})" if os.geteuid() == 0 else f" (of user {os.geteuid()}; {whose})"


# Reading what others say.


def _object(answer: object, whose: str) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise HostError(f"{whose} sent an answer that makes no sense")
    return answer


def name_of(agent: Mapping[str, Any]) -> str:
    """Its node id, or for one that has none a name that no other agent of this host has."""
    return text_of(agent, "node_id") or f"agent {number_of(agent, 'pid') or 0:.0f}"


def dicts_of(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = record.get(name)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def dict_of(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def text_of(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    return value[:_MAX_NAME] if isinstance(value, str) else ""


def number_of(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 53
    return value if is_number else None
