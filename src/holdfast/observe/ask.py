"""Questions to a run. `find` finds the agents of this host; `LocalRun` asks a run through its agents here, `RemoteRun`
by its coordinator's endpoint. Both give the same answers: decoded records, or HostError.

All questions have a limit. An agent of this host is asked on its control socket (`agent.control`), several at the same
time; questions to the coordinator and to other nodes are passed on by an agent, or go over one connection of a visitor.
"""

from __future__ import annotations

import _socket
import errno
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, get_type_hints

import msgspec

from holdfast import loop, wire_types
from holdfast.agent import control
from holdfast.errors import HostError
from holdfast.frozen import changed, frozen
from holdfast.rendezvous.client import visitor
from holdfast.rendezvous.client.visitor import Visitor
from holdfast.rendezvous.membership.model import Outcome
from holdfast.telemetry import history, status, stragglers
from holdfast.telemetry.status import AgentStatus, RunStatus

T = TypeVar("T")

MOST_NODES = 1024
NO_COORDINATOR = "this run has no coordinator that could be asked"  # As an agent says (`Coordination.ask`).
COORDINATOR_LIMIT_S = 5.0
NODE_LIMIT_S = 0.7  # For a status. With the search for the agents of this host, a view takes less than 2 s.
LONG_LIMIT_S = 20.0  # For stacks, which take their time.
_COORDINATOR_HERE_LIMIT_S = 1.0  # For the coordinator, if an agent of this host asks it.
_MARGIN_S = 0.1  # The agent or coordinator that passes a question on reports a missing answer first.
_NODES_A_PAGE = 64  # As many as an agent passes on at once.
_KEEP_ALIVE_S = 20.0  # A coordinator hangs up on a client that says nothing for a minute.
_ANSWER_LIMIT_BYTES = 4 << 20
_ANSWER_OF_OTHERS_LIMIT_BYTES = 1 << 20
_ASK_LIMIT_S = 2.0
_OWN_LIMIT_S = 1.0  # For up to `_ASKED_AT_ONCE` agents of this user together.
_ASKED_AT_ONCE = 64
_OTHERS_LIMIT_S = 5.0

# The records were defined without msgspec, which agents that no one asks do not import.
for _kind in [each for module in (history, stragglers, status) for each in vars(module).values()]:
    if isinstance(_kind, type) and "wire." in str(getattr(_kind, "__annotations__", "")):
        _kind.__annotations__ = get_type_hints(_kind, localns={"wire": wire_types}, include_extras=True)


def decoded(answer: object, kind: type[T], whose: str) -> T:
    try:
        return msgspec.convert(answer, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise HostError(f"{whose} sent an answer that makes no sense: {error}") from None


# The agents of this host.


@frozen
class FoundAgent:
    """An agent of this host: where it is asked, whose it is, and what it said last."""

    socket: str
    pid: int
    uid: int
    status: AgentStatus

    @property
    def name(self) -> str:
        return name_of(self.status)


def name_of(agent: AgentStatus) -> str:
    """Its node id, or for an agent without one a name that no other agent of this host has."""
    return agent.node_id or f"agent {agent.pid}"


def find(*, of_all_users: bool = False, pids: Collection[int] | None = None) -> tuple[list[FoundAgent], dict[int, str]]:
    """Every agent of this user on this host, wherever its socket is, and the pids of agents that did not answer in
    time, with the names of their runs (`control.name_in_path`). Stale sockets are removed. This user's agents are asked
    at the same time. Root may ask the agents of all users; those of others have a bounded time for all of them
    together. `pids`: only these agents."""
    found, silent = [], {}
    paths = {path: who for path, who in control.paths().items() if pids is None or who[1] in pids}
    own = sorted(filter(control.is_own, paths))
    until = time.monotonic() + _OTHERS_LIMIT_S
    batches = [own[first : first + _ASKED_AT_ONCE] for first in range(0, len(own), _ASKED_AT_ONCE)]
    for batch in [*batches, *([path] for path in sorted(paths.keys() - {*own}) if of_all_users)]:
        limit_s = _OWN_LIMIT_S if batch in batches else min(_ASK_LIMIT_S, max(0.01, until - time.monotonic()))
        for path, answer in _statuses(batch, limit_s).items():
            name, pid = paths[path]
            if isinstance(answer, FoundAgent):
                found.append(answer)
            elif isinstance(answer, ConnectionRefusedError):
                control.remove_stale(path)
            elif isinstance(answer, TimeoutError | BlockingIOError):  # The latter if its queue is full.
                silent[pid] = name
    return found, silent


def _statuses(sockets: Sequence[str], limit_s: float) -> dict[str, FoundAgent | Exception]:
    """What the agents at these sockets say of themselves."""
    found: dict[str, FoundAgent | Exception] = {}
    for path, answer in _exchange(sockets, {"command": "status"}, limit_s).items():
        try:
            if isinstance(answer, Exception):
                raise answer
            question, told = answer
            agent = decoded(told.get("result"), AgentStatus, path)
            # Root asks every user's agents, and believes only what a process says of itself.
            if agent.pid != question.pid:
                raise ValueError(f"another process speaks for {agent.pid}")
            found[path] = FoundAgent(path, question.pid, question.uid, agent)
        except (OSError, ValueError, RecursionError, HostError) as error:
            found[path] = error
    return found


def _exchange(
    sockets: Sequence[str], request: Mapping[str, Any], limit_s: float
) -> dict[str, tuple[Question, dict[str, Any]] | Exception]:
    """What the agents at these sockets answer. All are asked at the same time."""
    ends = time.monotonic() + limit_s
    sent: dict[str, Question] = {}
    answers: dict[str, tuple[Question, dict[str, Any]] | Exception] = {}
    for path in sockets:
        try:
            sent[path] = Question(path, request, limit_s)
        except OSError as error:
            answers[path] = error
    for path, question in sent.items():
        try:
            answers[path] = question, question.answer(max(0.01, ends - time.monotonic()))
        except (OSError, ValueError, RecursionError) as error:
            answers[path] = error
    return answers


class Question:
    """A question to an agent of this host that has been sent. `fileno` can be read when there is an answer, or none
    will come."""

    def __init__(self, path: str, request: Mapping[str, Any], timeout_s: float = _ASK_LIMIT_S) -> None:
        owner = os.lstat(path).st_uid
        if owner != os.geteuid() != 0:
            raise PermissionError(errno.EPERM, "it belongs to another user", path)
        self._path = path
        self._limit_bytes = _ANSWER_LIMIT_BYTES if owner == os.geteuid() else _ANSWER_OF_OTHERS_LIMIT_BYTES
        self._sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            self._sock.settimeout(timeout_s)
            self._sock.connect(path)
            self.pid, self.uid = control.peer_of(self._sock)
            if self.uid != owner:
                raise PermissionError(errno.EPERM, f"user {self.uid} serves the socket of user {owner}", path)
            self._sock.sendall(json.dumps(request).encode() + b"\n")
        except BaseException:
            self._sock.close()
            raise

    def fileno(self) -> int:
        return self._sock.fileno()

    def answer(self, timeout_s: float = _ASK_LIMIT_S) -> dict[str, Any]:
        """OSError if there is none, ValueError for nonsense."""
        try:
            answer = json.loads(control.read_line(self._sock, self._limit_bytes, time.monotonic() + timeout_s))
        finally:
            self.close()
        if not isinstance(answer, dict):
            raise ValueError(f"{self._path} does not answer with an object")
        return answer

    def close(self) -> None:
        self._sock.close()


# Runs.

# The run's own end. The others are of an agent of this host.
OVER = ("succeeded", "failed", "closed")


@frozen
class LastWord:
    """How a run ended: in the words of an agent of this host, or of the coordinator (`outcome`). `end` is `succeeded`,
    `failed` or `closed`; `left`, `error` or `gone` are about the agent alone."""

    end: str = "gone"
    reason: str = ""
    report: str | None = None
    status: AgentStatus | None = None
    outcome: Outcome | None = None


class AskedRun:
    """A run that can be asked. `name` is its id. Errors are of `HoldfastError`."""

    name = ""

    def ask_coordinator(self, request: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def ask_nodes(
        self, names: Sequence[str], request: Mapping[str, Any], timeout_s: float = NODE_LIMIT_S
    ) -> dict[str, Any]:
        """By name (`name_of`) what each agent answers, or a HostError. All are asked at the same time."""
        raise NotImplementedError

    def ask_each(
        self, names: Sequence[str], request: Mapping[str, Any], kind: type[T], timeout_s: float = NODE_LIMIT_S
    ) -> tuple[dict[str, T], dict[str, HostError]]:
        """By name what each agent answers, and why the others have no answer."""
        answers: dict[str, T] = {}
        problems: dict[str, HostError] = {}
        for name, answer in self.ask_nodes(names, request, timeout_s).items():
            try:
                if isinstance(answer, HostError):
                    raise answer
                answers[name] = decoded(answer, kind, f"node {name}")
            except HostError as error:
                problems[name] = error
        return answers, problems

    def ask_node(self, name: str, request: Mapping[str, Any], kind: type[T], timeout_s: float = LONG_LIMIT_S) -> T:
        answers, problems = self.ask_each([name], request, kind, timeout_s)
        if problems:
            raise problems[name]
        return answers[name]

    def local_agents(self) -> list[FoundAgent]:
        """The agents of the run on this host as they are now, if they were looked for."""
        return []

    def stop(self, reason: str) -> tuple[str, int]:
        """End it, with grace. How far that reaches (`run`, or `host` if there is no coordinator), and how many nodes
        the coordinator has told, if it was asked."""
        raise NotImplementedError

    def await_end(self, timeout_s: float) -> LastWord | None:
        """None if the run has not ended by then. Raises HostError if that cannot be said."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what is needed for asking."""

    def run_page(self, first: int) -> RunStatus:
        """How the run stands, with the nodes from that number on."""
        return decoded(self.ask_coordinator({"command": "status", "first": first}), RunStatus, "the coordinator")

    def run_status(self) -> RunStatus:
        """With all nodes, up to a bound."""
        told = page = self.run_page(0)
        nodes = [*told.nodes]
        while page.next_page is not None and page.nodes and len(nodes) < MOST_NODES:
            page = self.run_page(page.next_page)
            nodes += page.nodes
        return changed(told, nodes=tuple(nodes[:MOST_NODES]))


class LocalRun(AskedRun):
    """A run with agents on this host."""

    def __init__(self, agents: Sequence[FoundAgent]) -> None:
        self._agents = [*agents]
        self.name = agents[0].status.run_id
        self._ends: dict[str, Question] = {}  # By socket.
        self._processes: dict[int, int] = {}  # Descriptors, by pid.

    @property
    def is_of_one_node(self) -> bool:
        return {agent.status.nodes for agent in self._agents} == {1}

    @property
    def pids(self) -> list[int]:
        return [agent.pid for agent in self._agents]

    def local_agents(self) -> list[FoundAgent]:
        answers = _statuses([agent.socket for agent in self._agents], NODE_LIMIT_S)
        return [each for each in answers.values() if isinstance(each, FoundAgent)]

    def ask_coordinator(self, request: Mapping[str, Any]) -> Any:
        limit_s = _COORDINATOR_HERE_LIMIT_S
        return self._ask_any({"command": "query", "request": request, "timeout_s": limit_s}, limit_s + _MARGIN_S)

    def ask_nodes(
        self, names: Sequence[str], request: Mapping[str, Any], timeout_s: float = NODE_LIMIT_S
    ) -> dict[str, Any]:
        here = [agent for agent in self._agents if agent.name in names]
        ends, answers = time.monotonic() + timeout_s, self._results(here, request, timeout_s)
        others = [name for name in names if name not in answers]
        for first in range(0, len(others), _NODES_A_PAGE):
            left_s = round(min(timeout_s, max(NODE_LIMIT_S, ends - time.monotonic())), 1)
            answers |= self._passed_on(others[first : first + _NODES_A_PAGE], request, left_s)
        return answers

    def _passed_on(self, names: Sequence[str], request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        query = {"command": "query", "request": request, "timeout_s": limit_s}
        try:
            if len(names) == 1:
                return {names[0]: self._ask_any({**query, "node": names[0]}, limit_s + _MARGIN_S)}
            answer = self._ask_any({**query, "nodes": names}, limit_s + _MARGIN_S)
            told = decoded(answer, dict[str, Any], "an agent of this host")
            return {name: _result_in(told.get(name), f"node {name}") for name in names}
        except HostError as error:
            return dict.fromkeys(names, error)

    def _ask_any(self, request: Mapping[str, Any], timeout_s: float) -> Any:
        began, trouble = time.monotonic(), HostError("no agent of the run answers")
        for agent in self._agents:
            [answer] = self._results([agent], request, timeout_s).values()
            if not isinstance(answer, HostError):
                return answer
            trouble = answer
            if time.monotonic() > began + timeout_s / 2:
                break  # The one that is asked is silent for the other agents, too.
        raise trouble

    def _results(self, agents: Sequence[FoundAgent], request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """By name of the agent, or a HostError."""
        answers = _exchange([agent.socket for agent in agents], request, timeout_s)
        told = {path: answer if isinstance(answer, Exception) else answer[1] for path, answer in answers.items()}
        return {agent.name: _result_in(told[agent.socket], f"agent {agent.pid}") for agent in agents}

    def stop(self, reason: str) -> tuple[str, int]:
        scopes = set()
        for agent in self._agents:
            [answer] = self._results([agent], {"command": "stop", "reason": reason}, COORDINATOR_LIMIT_S).values()
            if isinstance(answer, dict):  # Otherwise the agent has ended, as one of a run that was closed just now.
                scopes.add(answer.get("scope"))
            if "run" in scopes:
                return "run", 0  # One member closes it for all.
        if not scopes:
            raise HostError(f"no agent of run {self.name} can be asked any more")
        return "host", 0

    def await_end(self, timeout_s: float) -> LastWord | None:
        """The word of an agent, or that all agents of this host are gone."""
        for agent in filter(self._is_there, self._agents):
            if agent.socket not in self._ends:
                with suppress(OSError):
                    self._ends[agent.socket] = Question(agent.socket, {"command": control.END})
        loop.wait_readable([*(each.fileno() for each in self._ends.values()), *self._processes.values()], timeout_s)
        word: LastWord | None = None
        for path, question in [*self._ends.items()]:
            if loop.is_readable(question.fileno()):
                del self._ends[path]
                # Without an answer the agent is gone, or too many wait for its end. Then it is asked again.
                with suppress(OSError, ValueError, RecursionError, HostError):
                    word = decoded(question.answer().get("result"), LastWord, path)
        if word is not None and word.end in OVER:
            return word
        return None if any(map(self._is_there, self._agents)) else word or LastWord()

    def await_exits(self, timeout_s: float) -> list[int]:
        """The pids of the agents whose processes have not ended when the time is up."""
        ends = time.monotonic() + timeout_s
        while (left := [*filter(self._is_there, self._agents)]) and (left_s := ends - time.monotonic()) > 0:
            loop.wait_readable([self._processes[agent.pid] for agent in left], left_s)
        return sorted({agent.pid for agent in left})

    def _is_there(self, agent: FoundAgent) -> bool:
        """A process that is frozen is, too."""
        if agent.pid not in self._processes:
            with suppress(OSError):
                self._processes[agent.pid] = os.pidfd_open(agent.pid)
        fd = self._processes.get(agent.pid)
        return fd is not None and not loop.is_readable(fd)

    def close(self) -> None:
        for question in self._ends.values():
            question.close()
        for fd in self._processes.values():
            os.close(fd)
        self._ends, self._processes = {}, {}


def _result_in(answer: object, whose: str) -> Any:
    """The result in an answer, or a HostError."""
    if isinstance(answer, TimeoutError):
        return HostError(f"{whose} does not answer; it may be stopped")
    if isinstance(answer, Exception):
        return HostError(f"{whose} cannot be asked: {answer}")
    if not isinstance(answer, dict) or "result" not in answer:
        problem = answer.get("error") if isinstance(answer, dict) else None
        return HostError(str(problem) if problem else f"{whose} sent an answer that makes no sense")
    return answer["result"]


class RemoteRun(AskedRun):
    """A run that is asked by its coordinator's endpoint. Questions at the same time have a connection each, which are
    kept for later ones. If a connection breaks, the next question makes another one: the coordinator may have been
    restarted, or replaced."""

    def __init__(self, name: str, connect: Callable[[], Visitor]) -> None:
        self.name, self._connect = name, connect
        self._idle: list[Visitor] = [connect()]
        self._end: _EndQuestion | None = None

    def _asked(self, ask: Callable[[Visitor], T]) -> T:
        try:
            chosen = self._idle.pop()
        except IndexError:
            chosen = self._connect()
        try:
            answer = ask(chosen)
        except visitor.ConnectionBroken:
            for each in (chosen, *self._idle):
                each.close()
            self._idle = []
            raise
        except HostError:  # Such as an answer that did not come. The connection is good.
            self._idle.append(chosen)
            raise
        self._idle.append(chosen)
        return answer

    def ask_coordinator(self, request: Mapping[str, Any]) -> Any:
        return self._asked(lambda asked: asked.ask(request, "", COORDINATOR_LIMIT_S))

    def ask_nodes(
        self, names: Sequence[str], request: Mapping[str, Any], timeout_s: float = NODE_LIMIT_S
    ) -> dict[str, Any]:
        try:
            return self._asked(lambda asked: asked.ask_nodes(names, request, timeout_s))
        except HostError as error:
            return dict.fromkeys(names, error)

    def stop(self, reason: str) -> tuple[str, int]:
        told = self.ask_coordinator({"command": "stop", "reason": reason})
        return "run", decoded(told, Stopped, "the coordinator").nodes

    def await_end(self, timeout_s: float) -> LastWord | None:
        """With the evidence if the token was proved. The question stays open between two calls: the answer comes a
        moment before the coordinator ends."""
        try:
            if self._end is None:
                self._end = _EndQuestion(self._connect())
            answer = self._end.answer(timeout_s)
        except HostError:
            self._close_end()
            raise
        if answer is None:
            return None
        outcome = decoded(answer, Outcome, "the coordinator")
        return LastWord(outcome.end.lower(), outcome.reason, outcome=outcome)

    def _close_end(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end.close()

    def close(self) -> None:
        self._close_end()
        idle, self._idle = self._idle, []
        for each in idle:
            each.close()


class _EndQuestion:
    """The question for the outcome, on a connection of its own."""

    def __init__(self, asked: Visitor) -> None:
        self._asked, self._sent_at = asked, time.monotonic()
        self._number = asked.send({"command": "outcome"})

    def answer(self, timeout_s: float) -> Any:
        if self._asked.answers[self._number] is None:
            self._asked.receive(timeout_s)
        told = self._asked.answers[self._number]
        if told is not None:
            answer = _result_in(told, "the coordinator")
            if isinstance(answer, HostError):
                raise answer
            return answer
        if time.monotonic() > self._sent_at + _KEEP_ALIVE_S:
            del self._asked.answers[self._number]
            self._number, self._sent_at = self._asked.send({"command": "outcome"}), time.monotonic()
        return None

    def close(self) -> None:
        self._asked.close()


@frozen
class Stopped:
    """What a coordinator says that was asked to end the run."""

    nodes: int = 0
