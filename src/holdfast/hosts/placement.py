"""Which nodes of a cluster get an agent, when the job is over, and how it ended. Pure.

    step(event, now) -> commands,   next_deadline(),   outcome

The cluster decides which nodes there are, and may add and lose some at any time. Each node has at most one agent:

    none       the node was not needed yet, or its agent is gone
    STARTING   ordered; the cluster may make it wait for resources that others hold
    RUNNING    the agent runs, and joins the run by itself

The phases of the job:

    RUNNING    each node that suits gets an agent, up to the maximum. Whether these are enough nodes is the business of
               the run: its agents wait for others, for `join_timeout_s`. Only while no agent runs is it counted here.
    ENDING     no agent is started. After a success, those that are left end by themselves. After a failure they have
               a bounded time for that, then they get SIGTERM and their grace, then they are cut off.
    OVER       no agent is left.

Cases:

    an agent ends with a report         that is the outcome of the run, the same on every node. So is the exit code of a
                                        run that was closed (`RUN_CLOSED`).
    an agent ends with 0                so do the others, as a rule within a moment. An agent that is still there has
                                        workers for which the first did not wait any longer
                                        (`--exit-barrier-timeout`). If it fails, so has the job.
    an agent ends with another code     something is wrong with its node (no script there, a wrong version). The node
                                        is not used again. The others go on. If there are none, it is the outcome.
    an agent is killed, or lost         it is started again if its node is still there, a few times
    a node is lost                      its agent is lost. If it comes back, or another comes, that one gets an agent.
    the user's signal                   passed on to all agents, each time. A second Ctrl-C shortens the wait.
    the cluster is lost                 as SIGTERM of the user, but the outcome is that error
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from enum import StrEnum

from holdfast.errors import RUN_CLOSED
from holdfast.frozen import frozen

_MOST_STARTS = 3  # Of one node, if its agents are killed or lost.
_KILLED = 128 + signal.SIGKILL
_END_BY_THEMSELVES_S = 30.0
_END_TOGETHER_S = 5.0  # The agents of a run that has succeeded.
_MARGIN_S = 15.0  # On top of the grace of the workers. An agent's own kill ladder takes less.
_HASTE_S = 10.0
_SAY_AFTER_S = 5.0


@frozen
class Node:
    """`lacks` says what a node that does not suit has too little of."""

    node_id: str
    name: str
    lacks: str = ""


@frozen
class NodesSeen:
    """All nodes that the cluster has."""

    nodes: tuple[Node, ...]


@frozen
class Started:
    node_id: str


@frozen
class Lost:
    """The agent could not be started, or nothing more will be heard of it. `is_final`: trying again will not help."""

    node_id: str
    reason: str
    is_final: bool = False


@frozen
class Ended:
    node_id: str
    code: int
    report: str = ""


@frozen
class Interrupted:
    number: int


@frozen
class ClusterLost:
    reason: str


Event = NodesSeen | Started | Lost | Ended | Interrupted | ClusterLost


@frozen
class Start:
    node: Node


@frozen
class Pass:
    """Send a signal to the agent."""

    node_id: str
    number: int


@frozen
class Cut:
    """Kill the agent, or forget the order to start it."""

    node_id: str


@frozen
class Say:
    text: str
    is_warning: bool = False


Command = Start | Pass | Cut | Say


@frozen
class Outcome:
    """`error` is for jobs that the engine could not bring to an end of their own."""

    code: int
    report: str = ""
    error: str = ""


class Phase(StrEnum):
    RUNNING = "RUNNING"
    ENDING = "ENDING"
    OVER = "OVER"


class State(StrEnum):
    STARTING = "STARTING"
    RUNNING = "RUNNING"


class _Agent:
    def __init__(self, node: Node, now: float) -> None:
        self.node, self.state = node, State.STARTING
        self.say_at: float | None = now + _SAY_AFTER_S


class Placement:
    def __init__(self, min_nodes: int, max_nodes: int, join_timeout_s: float, grace_s: float, now: float) -> None:
        self._min, self._max, self._join_timeout_s, self._grace_s = min_nodes, max_nodes, join_timeout_s, grace_s
        self.phase, self.outcome = Phase.RUNNING, Outcome(1)
        self._nodes: dict[str, Node] = {}
        self._has_seen = False
        self._agents: dict[str, _Agent] = {}
        self._starts: dict[str, int] = {}  # How often each node got an agent.
        self._first_end: Ended | None = None
        self._idle_since: float | None = now  # None while an agent runs.
        self._ends_at: float | None = None
        self._succeeded_at: float | None = None
        self._is_last_call = False
        self._said = ""

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    def next_deadline(self) -> float | None:
        if self.phase is Phase.ENDING:
            return self._ends_at
        say_at = [agent.say_at for agent in self._agents.values() if agent.say_at is not None]
        return min([*say_at, *([self._idle_since + self._join_timeout_s] if self._idle_since is not None else [])],
                   default=None)  # fmt: skip

    def step(self, event: Event | None, now: float) -> list[Command]:
        """None: time has passed."""
        commands = [*self._take(event, now), *self._pass_time(now)]
        if self.phase is Phase.RUNNING:
            commands += [*self._fill(now), *self._wait_for_nodes()]
        elif not self._agents:
            self.phase = Phase.OVER
        return commands

    def _take(self, event: Event | None, now: float) -> Iterator[Command]:
        match event:
            case NodesSeen(nodes):
                self._nodes, self._has_seen = {node.node_id: node for node in nodes}, True
                for node_id in [node_id for node_id in self._agents if node_id not in self._nodes]:
                    yield Cut(node_id)
                    yield from self._lose(node_id, "the cluster has lost the node", now)
            case Started(node_id) if node_id in self._agents:
                self._agents[node_id].state, self._agents[node_id].say_at = State.RUNNING, None
                self._idle_since = None
            case Lost(node_id, reason, is_final) if node_id in self._agents:
                if is_final:
                    self._starts[node_id] = _MOST_STARTS
                yield Cut(node_id)
                yield from self._lose(node_id, reason, now)
            case Ended(node_id) if node_id in self._agents:
                yield from self._end(event, now)
            case Interrupted(number):
                yield from self._interrupt(number, now)
            case ClusterLost(reason) if self._goes_on:
                self.outcome = Outcome(1, error=reason)
                yield from self._stop(signal.SIGTERM, now)

    def _lose(self, node_id: str, reason: str, now: float) -> Iterator[Command]:
        agent = self._forget(node_id, now)
        if self.phase is Phase.RUNNING:
            yield Say(f"{agent.node.name}: {reason}", is_warning=True)
            if self._is_stuck:
                self.outcome = Outcome(1, error="no node is left that can run an agent")
                yield from self._stop(signal.SIGTERM, now)
        else:
            self._fail_late(Outcome(1, error=f"{agent.node.name}: {reason}"), now)

    def _end(self, ended: Ended, now: float) -> Iterator[Command]:
        agent = self._forget(ended.node_id, now)
        if self.phase is not Phase.RUNNING:
            if ended.code:
                killed = f"{agent.node.name}: the agent was killed" if ended.code == _KILLED else ""
                self._fail_late(Outcome(ended.code, ended.report, error=killed), now)
            return
        if ended.code in (0, RUN_CLOSED) or ended.report:
            self.outcome, self.phase = Outcome(ended.code, ended.report), Phase.ENDING
            if ended.code == 0:
                self._succeeded_at = now
            else:
                self._ends_at = now + _END_BY_THEMSELVES_S
            yield from self._cut_starting()
            return
        if ended.code == _KILLED:
            yield Say(f"{agent.node.name}: the agent was killed", is_warning=True)
        else:
            self._starts[ended.node_id] = _MOST_STARTS
            self._first_end = self._first_end or ended
            if self._agents:
                yield Say(f"{agent.node.name}: the agent ended with exit code {ended.code}", is_warning=True)
        if self._is_stuck:
            self.outcome = Outcome((self._first_end or ended).code)
            yield from self._stop(signal.SIGTERM, now)

    def _fail_late(self, outcome: Outcome, now: float) -> None:
        """An agent that fails some time after another has succeeded was still at work."""
        if self._succeeded_at is not None and self._goes_on and now > self._succeeded_at + _END_TOGETHER_S:
            self.outcome = outcome

    def _interrupt(self, number: int, now: float) -> Iterator[Command]:
        if self._goes_on:
            self.outcome = Outcome(128 + number)
            yield from self._stop(number, now)
        elif self.phase is Phase.ENDING:
            yield from self._pass(number)
            self._is_last_call, self._ends_at = True, min(self._ends_at or now, now + _HASTE_S)

    def _stop(self, number: int, now: float) -> Iterator[Command]:
        self.phase, self._is_last_call = Phase.ENDING, True
        self._ends_at = now + self._grace_s + _MARGIN_S
        yield from self._cut_starting()
        yield from self._pass(number)

    def _pass_time(self, now: float) -> Iterator[Command]:
        if self.phase is Phase.ENDING and self._ends_at is not None and now >= self._ends_at:
            if not self._is_last_call:
                yield from self._stop(signal.SIGTERM, now)
                return
            for node_id in list(self._agents):
                name = self._forget(node_id, now).node.name
                yield Say(f"{name}: the agent did not end in time, and is killed", is_warning=True)
                yield Cut(node_id)
        if self.phase is not Phase.RUNNING:
            return
        for agent in self._agents.values():
            if agent.say_at is not None and now >= agent.say_at:
                agent.say_at = None
                yield Say(f"{agent.node.name}: waiting for the resources that the agent is to have")
        if self._idle_since is not None and now >= self._idle_since + self._join_timeout_s:
            waited = f"no agent could be started within {self._join_timeout_s:g} s (--join-timeout)"
            self.outcome = Outcome(1, error=f"{waited}: {self._missing()}")
            yield from self._stop(signal.SIGTERM, now)

    def _fill(self, now: float) -> Iterator[Command]:
        """Give an agent to nodes that suit, in the order in which the cluster names them."""
        for node in self._suitable():
            if len(self._agents) < self._max and node.node_id not in self._agents:
                self._starts[node.node_id] = self._starts.get(node.node_id, 0) + 1
                self._agents[node.node_id] = _Agent(node, now)
                yield Start(node)

    def _wait_for_nodes(self) -> Iterator[Command]:
        """Say what is missing whenever that changes."""
        text = self._missing() if self._has_seen and len(self._agents) < self._min else ""
        if text and text != self._said:
            yield Say(text)
        self._said = text

    def _missing(self) -> str:
        there = f"{len(self._agents)} of {self._min} nodes are there" if self._nodes else "the cluster has no node yet"
        lacking = [f"{node.name} lacks {node.lacks}" for node in self._nodes.values() if node.lacks]
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        unsuitable = f" ({', '.join(lacking[:3])}{more})" if lacking else ""
        return f"{there}, waiting for {max(1, self._min - len(self._agents))} more{unsuitable}"

    def _suitable(self) -> Sequence[Node]:
        nodes = self._nodes.values()
        return [node for node in nodes if not node.lacks and self._starts.get(node.node_id, 0) < _MOST_STARTS]

    @property
    def _goes_on(self) -> bool:
        """Workers may be at work, and nothing was done to end them."""
        return self.phase is Phase.RUNNING or (self.phase is Phase.ENDING and self._ends_at is None)

    @property
    def _is_stuck(self) -> bool:
        """No agent is left, and none of the nodes can be used again."""
        used = [node for node in self._nodes if node in self._starts]
        return not self._agents and not self._suitable() and bool(used)

    def _pass(self, number: int) -> Iterator[Command]:
        for node_id in self._agents:
            yield Pass(node_id, number)

    def _cut_starting(self) -> Iterator[Command]:
        for node_id in [each for each, agent in self._agents.items() if agent.state is State.STARTING]:
            del self._agents[node_id]
            yield Cut(node_id)

    def _forget(self, node_id: str, now: float) -> _Agent:
        agent = self._agents.pop(node_id)
        if self._idle_since is None and not any(each.state is State.RUNNING for each in self._agents.values()):
            self._idle_since = now
        return agent
