"""The run's machine: join, last call, seal, lease, admit, end. Pure.

One `Membership` is one run. The coordinator turns messages, closed connections and time into events and the
commands into messages; in the simulator a fake world does the same.

                     everybody has joined, or the last call is over
        +---------- FORMING -------------------------------------> RUNNING
        |              ^                                            |   |
        | too few      |  everybody is accounted for, and           |   | every member's workers
        | in time      |  the run goes on                           |   | have succeeded
        v              +------------------ STOPPING <---------------+   v
      ENDED <-----------------------------------+    a failure, a lost  ENDED
                 the policy gives up                 or leaving member,
                                                     a newcomer to admit

Nodes. A node is WAITING when it has joined and none of its workers are alive; RUNNING, FINISHED or LEAVING when
it is a member of the current round. A connection that closes makes it suspect: it may return within
`drop_timeout_s`. A node that is not heard of for `lease_s`, or does not return, is lost; by then its own side
has killed its workers (`client.Session`), which is what makes it safe to give its place away.

First stop, then judge. The first word of a failure stops the round at once. What it means is decided when every
member of the round is accounted for: it has joined again, left, or is lost. If one was lost, the failures around
it are its consequence and cost nothing. This order matters:

  1. node A is killed; B's collective fails at once, and B's report is here before A's connection is closed,
  2. the round stops; B and C stop their workers and join again,
  3. A is still unaccounted for, so nothing is decided, until it is lost after `drop_timeout_s`,
  4. the next round is formed without A, uncharged, although `max_restarts` may be 0.

A coordinator that was restarted knows nothing but what it wrote down (`Memory`: the last round, restarts used, the
outcome). It seals nothing until a lease has passed, because members of the old round may still be running.
A member that returns says which world it is in; the highest round is adopted, and its other members have a lease
to return. If all do, nobody notices anything.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import assert_never

from holdfast.errors import InternalError
from holdfast.rendezvous import restart
from holdfast.rendezvous.restart import Failure, RestartPolicy
from holdfast.rendezvous.world import NodeFacts, World, arrange

_STORY_LENGTH = 40
_NAMED_AT_MOST = 8
_SILENT_HEARTBEATS = 2.5  # This many heartbeats without a word make a node suspect.


class Admit(StrEnum):
    """What a newcomer below max does to a round that runs."""

    NOW = "now"
    ON_RESTART = "on-restart"


@dataclass(frozen=True, slots=True)
class Settings:
    """What all nodes of a run must agree on; the first to join fixes it."""

    min_nodes: int = 1
    max_nodes: int = 1
    join_timeout_s: float = 600.0
    last_call_s: float = 5.0
    heartbeat_s: float = 1.0
    lease_s: float = 5.0
    drop_timeout_s: float = 2.0
    close_linger_s: float = 10.0
    admit: Admit = Admit.NOW
    policy: RestartPolicy = field(default_factory=RestartPolicy)


class Phase(StrEnum):
    FORMING = "FORMING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    ENDED = "ENDED"


class Stage(StrEnum):
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    LEAVING = "LEAVING"


class End(StrEnum):
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CLOSED = "CLOSED"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, the same on every node. `cause` is the failure that it ended of, if one did."""

    end: End
    reason: str
    cause: Failure | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """What survives the coordinator process. `last_round` is 0 if no round was ever sealed."""

    last_round: int = 0
    restarts_used: int = 0
    outcome: Outcome | None = None


# Events.


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node asks for a place in the next round; none of its workers are alive.

    `last_round` is the highest round that it has seen. `replaces` is the incarnation that it gave up, or empty.
    """

    facts: NodeFacts
    settings: Settings
    last_round: int = 0
    replaces: str = ""


@dataclass(frozen=True, slots=True)
class NodeReturned:
    """A node is connected again and has not given up its place."""

    facts: NodeFacts
    settings: Settings
    world: World
    stage: Stage


@dataclass(frozen=True, slots=True)
class NodeHeard:
    """A heartbeat."""

    key: str


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    key: str


@dataclass(frozen=True, slots=True)
class WorkersFailed:
    key: str
    round: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class WorkersSucceeded:
    key: str
    round: int


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """A member is going away and stopping its workers."""

    key: str


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """It is gone, and so are its workers."""

    key: str


@dataclass(frozen=True, slots=True)
class CloseRequested:
    reason: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The deadline that `next_deadline` named has come."""


Event = (
    NodeJoined
    | NodeReturned
    | NodeHeard
    | ConnectionClosed
    | WorkersFailed
    | WorkersSucceeded
    | NodeLeaving
    | NodeLeft
    | CloseRequested
    | TimePassed
)


# Commands.


@dataclass(frozen=True, slots=True)
class SealWorld:
    """Tell every member of the world."""

    world: World


@dataclass(frozen=True, slots=True)
class StopRound:
    """Tell these nodes to stop their workers of this round and join again."""

    keys: tuple[str, ...]
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell this node that it cannot join, and why. Nothing else will change that."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Expel:
    """Tell this node that its place was given up: it kills its workers and joins as a stranger."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class TellOutcome:
    keys: tuple[str, ...]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class ShowProgress:
    """Tell those who wait how far the round is. `seconds_left` is until the join timeout."""

    keys: tuple[str, ...]
    joined: int
    wanted: int
    max_nodes: int
    seconds_left: float


@dataclass(frozen=True, slots=True)
class Remember:
    """Write this down before any command that follows is carried out."""

    memory: Memory


@dataclass(frozen=True, slots=True)
class ForgetRun:
    """The run is over and everybody has heard, or nobody is left to hear."""


Command = SealWorld | StopRound | Refuse | Expel | TellOutcome | ShowProgress | Remember | ForgetRun


class InvalidEvent(InternalError):  # noqa: N818
    """Something happened that cannot."""


@dataclass(slots=True)
class _Node:
    facts: NodeFacts
    stage: Stage
    arrival: int
    heard_at: float
    closed_at: float | None = None
    """Since when its connection is closed."""
    drop_at: float | None = None
    """When it is lost unless it returns."""

    @property
    def key(self) -> str:
        return self.facts.key


class Membership:
    """One run. `step` takes what happened and returns what is to be done."""

    def __init__(self, now: float, memory: Memory | None = None) -> None:
        """`memory` is what an earlier coordinator process of this run has written down, if one did."""
        self.settings: Settings | None = None
        self.phase = Phase.FORMING
        self.world: World | None = None
        self.round = memory.last_round if memory else 0
        self.restarts_used = memory.restarts_used if memory else 0
        self.outcome: Outcome | None = None
        self._is_recovering = memory is not None
        self._started_at = now
        # In the order in which they were last heard of: the first is the next whose lease may end.
        self._nodes: OrderedDict[str, _Node] = OrderedDict()
        self._arrivals = 0
        self._charged_at: list[float] = [now] * self.restarts_used
        self._failures: list[Failure] = []
        self._departed: list[str] = []
        self._is_planned_change = False
        self._finished_and_gone: set[str] = set()
        self._previous: tuple[str, ...] = ()
        self._not_before = now
        self._forming_since: float | None = None
        self._enough_since: float | None = None
        self._progress_due: float | None = None
        self._progress_shown: tuple[int, int] | None = None
        self._forget_at: float | None = None
        self._story: deque[tuple[float, Event, tuple[Command, ...]]] = deque(maxlen=_STORY_LENGTH)
        if memory and memory.outcome:
            self.phase, self.outcome = Phase.ENDED, memory.outcome

    # What the shell calls.

    def step(self, event: Event, now: float) -> list[Command]:
        commands = self._react(event, now)
        commands += self._advance(now)
        if not isinstance(event, NodeHeard) or commands:
            self._story.append((now, event, tuple(commands)))
        return commands

    def next_deadline(self) -> float | None:
        """When `TimePassed` is due unless something happens before."""
        if self.phase is Phase.ENDED:
            return self._forget_at
        candidates = [self._next_loss_at(), self._progress_due]
        if self.phase is Phase.FORMING and self._nodes:
            candidates.append(self._next_forming_deadline())
        return min((each for each in candidates if each is not None), default=None)

    def story(self) -> str:
        return "\n".join(f"{at:.3f} {event} -> {list(commands)}" for at, event, commands in self._story)

    @property
    def node_count(self) -> int:
        return len(self._nodes)

    # Events.

    def _react(self, event: Event, now: float) -> list[Command]:
        if self.phase is Phase.ENDED:
            return self._react_after_end(event, now)
        match event:
            case NodeJoined():
                return self._joined(event, now)
            case NodeReturned():
                return self._returned(event, now)
            case NodeHeard(key):
                self._hear(key, now)
                return []
            case ConnectionClosed(key):
                return self._closed(key, now)
            case WorkersFailed(key, round, failure):
                return self._failed(key, round, failure)
            case WorkersSucceeded(key, round):
                return self._succeeded(key, round)
            case NodeLeaving(key):
                return self._leaving(key)
            case NodeLeft(key):
                return self._gone(key, "left")
            case CloseRequested(reason):
                return self._end(Outcome(End.CLOSED, reason), now)
            case TimePassed():
                return self._lose_silent(now)
        assert_never(event)

    def _react_after_end(self, event: Event, now: float) -> list[Command]:
        assert self.outcome is not None
        match event:
            case NodeJoined(facts) | NodeReturned(facts):
                self.settings = self.settings or event.settings
                self._add(facts, Stage.WAITING, now)
                return [TellOutcome((facts.key,), self.outcome)]
            case ConnectionClosed(key) | NodeLeft(key):
                self._nodes.pop(key, None)
        return []

    def _joined(self, event: NodeJoined, now: float) -> list[Command]:
        facts = event.facts
        problem = self._objection(facts, event.settings)
        if problem:
            return [Refuse(facts.key, problem)]
        self.settings = self.settings or event.settings
        self.round = max(self.round, event.last_round)
        commands: list[Command] = []
        if event.replaces:
            commands += self._gone(event.replaces, "lost its place")
        known = self._nodes.get(facts.key)
        if known is not None and known.stage is not Stage.WAITING and self.phase is Phase.RUNNING:
            # A member whose workers are gone although nobody stopped the round.
            commands += self._stop(f"{facts.node_id} has left the round", departed=facts.key)
        self._add(facts, Stage.WAITING, now)
        return commands + self._maybe_admit(facts)

    def _objection(self, facts: NodeFacts, settings: Settings) -> str:
        """Why this node cannot take part in this run, or nothing."""
        ours = self.settings or settings
        for each in fields(Settings):
            mine, theirs = getattr(ours, each.name), getattr(settings, each.name)
            if mine != theirs:
                return f"the run has {each.name}={_plain(mine)}, this node has {each.name}={_plain(theirs)}"
        rank = facts.requested_rank
        if rank is None:
            return ""
        if not 0 <= rank < ours.max_nodes:
            return f"rank {rank} was asked for, but the run has at most {ours.max_nodes} nodes"
        taken_by = [
            node.facts.node_id
            for node in self._nodes.values()
            if node.facts.requested_rank == rank and node.key != facts.key and node.closed_at is None
        ]
        return f"rank {rank} was asked for, but {taken_by[0]} has asked for it before" if taken_by else ""

    def _maybe_admit(self, facts: NodeFacts) -> list[Command]:
        assert self.settings is not None
        has_room = self.world is not None and len(self.world.members) < self.settings.max_nodes
        if self.phase is not Phase.RUNNING or self.settings.admit is not Admit.NOW or not has_room:
            return []
        self._is_planned_change = True
        return self._stop(f"{facts.node_id} joins")

    def _returned(self, event: NodeReturned, now: float) -> list[Command]:
        key, world = event.facts.key, event.world
        self.settings = self.settings or event.settings
        known = self._nodes.get(key)
        if known is not None and known.stage is Stage.WAITING:
            return [Expel(key, "it had joined the next round")]
        if known is not None and self.world is not None and world.round == self.world.round:
            self._connect(known, event.stage, now)
            return self._catch_up(known)
        if known is None and world.round > self.round or (world.round == self.round and self.world is None):
            if self.world is None and self._may_adopt():
                self._adopt(world, now)
                self._connect(self._nodes[key], event.stage, now)
                return []
        self.round = max(self.round, world.round)
        return [Expel(key, f"round {world.round} is over")]

    def _may_adopt(self) -> bool:
        return self.phase is Phase.FORMING

    def _adopt(self, world: World, now: float) -> None:
        """Go on with a round that another coordinator process has sealed."""
        assert self.settings is not None
        self.phase = Phase.RUNNING
        self.world, self.round = world, world.round
        self.restarts_used = max(self.restarts_used, world.restarts_used)
        self._charged_at = [now] * self.restarts_used
        self._begin_round()
        for facts in world.members:
            node = self._add(facts, Stage.RUNNING, now)
            node.closed_at = now
            node.drop_at = now + self.settings.lease_s

    def _connect(self, node: _Node, stage: Stage, now: float) -> None:
        node.closed_at = node.drop_at = None
        if node.stage is Stage.RUNNING:
            node.stage = stage
        self._hear(node.key, now)

    def _catch_up(self, node: _Node) -> list[Command]:
        """It may have missed that the round was stopped."""
        if self.phase is Phase.STOPPING:
            assert self.world is not None
            return [StopRound((node.key,), self.world.round, "the round was stopped meanwhile")]
        return []

    def _hear(self, key: str, now: float) -> None:
        node = self._nodes.get(key)
        if node is not None:
            node.heard_at = now
            self._nodes.move_to_end(key)

    def _closed(self, key: str, now: float) -> list[Command]:
        node = self._nodes.get(key)
        if node is None:
            return []
        assert self.settings is not None
        if node.stage is Stage.WAITING and key not in self._owed():
            return self._gone(key, "closed its connection")
        node.closed_at = now
        node.drop_at = now + self.settings.drop_timeout_s
        return []

    def _failed(self, key: str, round: int, failure: Failure) -> list[Command]:
        if not self._is_current(key, round):
            return []
        self._failures.append(failure)
        return self._stop(failure.text) if self.phase is Phase.RUNNING else []

    def _succeeded(self, key: str, round: int) -> list[Command]:
        if self._is_current(key, round) and self._nodes[key].stage is Stage.RUNNING:
            self._nodes[key].stage = Stage.FINISHED
        return []

    def _leaving(self, key: str) -> list[Command]:
        node = self._nodes.get(key)
        if node is None or node.stage is Stage.WAITING:
            return []
        was_running = node.stage is Stage.RUNNING
        node.stage = Stage.LEAVING
        if not was_running:
            self._finished_and_gone.add(key)
            return []
        return self._stop(f"{node.facts.node_id} leaves", departed=key)

    def _is_current(self, key: str, round: int) -> bool:
        """Whether somebody speaks of the present round and is a member of it. The only place that drops the stale."""
        node = self._nodes.get(key)
        is_member = node is not None and node.stage is not Stage.WAITING
        return is_member and self.world is not None and round == self.world.round

    # Losing nodes.

    def _lose_silent(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for node in list(self._nodes.values()):
            lost_at = self._lost_at(node)
            if lost_at <= now:
                reason = "did not come back" if node.closed_at is not None else "was not heard of"
                commands += self._gone(node.key, f"is lost: it {reason}")
        return commands

    def _lost_at(self, node: _Node) -> float:
        assert self.settings is not None
        return node.drop_at if node.drop_at is not None else node.heard_at + self.settings.lease_s

    def _next_loss_at(self) -> float | None:
        """The next time at which somebody may be lost. All leases are equally long, so the first in line tells."""
        if not self._nodes:
            return None
        oldest = next(iter(self._nodes.values()))
        dropped = [node.drop_at for node in self._nodes.values() if node.drop_at is not None] if self._any_closed() else []
        return min([self._lost_at(oldest), *dropped])

    def _any_closed(self) -> bool:
        return any(node.closed_at is not None for node in self._nodes.values())

    def _gone(self, key: str, how: str) -> list[Command]:
        """A node is out, and none of its workers can be alive."""
        node = self._nodes.pop(key, None)
        if node is None or self.world is None or key not in self.world.keys or node.stage is Stage.WAITING:
            return []
        if node.stage is Stage.FINISHED or key in self._finished_and_gone:
            self._finished_and_gone.add(key)
            return []
        if self.phase is Phase.RUNNING:
            return self._stop(f"{node.facts.node_id} {how}", departed=key)
        self._departed.append(node.facts.node_id)
        return []

    # Rounds.

    def _begin_round(self) -> None:
        self._failures, self._departed = [], []
        self._is_planned_change = False
        self._finished_and_gone = set()
        self._forming_since = self._enough_since = self._progress_due = None
        self._progress_shown = None

    def _stop(self, reason: str, departed: str = "") -> list[Command]:
        """Stop the round for everybody. Whether the run goes on is decided when all are accounted for."""
        assert self.world is not None
        if departed:
            self._departed.append(departed.rpartition("/")[0])
        if self.phase is not Phase.RUNNING:
            return []
        self.phase = Phase.STOPPING
        keys = tuple(key for key in self.world.keys if key in self._nodes and key != departed)
        return [StopRound(keys, self.world.round, reason)]

    def _owed(self) -> list[str]:
        """Members of the stopped round whose workers may still be alive."""
        if self.world is None:
            return []
        return [key for key in self.world.keys if key in self._nodes and self._nodes[key].stage is not Stage.WAITING]

    def _advance(self, now: float) -> list[Command]:
        """Whatever is due now that the event has been taken in."""
        commands: list[Command] = []
        if self.phase is Phase.RUNNING and self._have_all_succeeded():
            return self._end(Outcome(End.SUCCEEDED, "all workers have succeeded"), now)
        if self.phase is Phase.STOPPING and not self._owed():
            commands += self._judge(now)
        if self.phase is Phase.FORMING:
            commands += self._form(now)
        if self.phase is Phase.ENDED:
            commands += self._maybe_forget(now)
        return commands

    def _have_all_succeeded(self) -> bool:
        assert self.world is not None
        return all(self._has_succeeded(key) for key in self.world.keys)

    def _has_succeeded(self, key: str) -> bool:
        node = self._nodes.get(key)
        return key in self._finished_and_gone or (node is not None and node.stage is Stage.FINISHED)

    def _judge(self, now: float) -> list[Command]:
        """Everybody of the stopped round is accounted for: what was it, and does the run go on?"""
        assert self.settings is not None and self.world is not None
        commands: list[Command] = []
        self._not_before = now
        if self._failures and not self._departed:
            cause = restart.root_cause(self._failures)
            decision = restart.decide(self.settings.policy, self._charged_at, cause, now)
            if isinstance(decision, restart.GiveUp):
                return self._end(Outcome(End.FAILED, decision.reason, cause), now)
            self._not_before = now + decision.delay_s
            if decision.is_charged:
                self._charged_at.append(now)
                self.restarts_used += 1
                commands.append(Remember(self._memory()))
        self._previous = self.world.keys
        self.world = None
        self.phase = Phase.FORMING
        self._begin_round()
        return commands

    def _form(self, now: float) -> list[Command]:
        if not self._nodes or self.settings is None:
            self._forming_since = self._enough_since = None
            return []
        if self._forming_since is None:
            self._forming_since = now
        ready = self._ready(now)
        if len(ready) < self.settings.min_nodes:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        if self._is_time_to_seal(ready, now):
            return self._seal(ready)
        if len(ready) < self.settings.min_nodes and now >= self._forming_since + self.settings.join_timeout_s:
            return self._end(Outcome(End.FAILED, self._too_few(ready)), now)
        return self._maybe_show_progress(ready, now)

    def _ready(self, now: float) -> list[_Node]:
        """Who can be sealed into a world, in order of arrival."""
        waiting = [node for node in self._nodes.values() if node.stage is Stage.WAITING]
        return sorted((node for node in waiting if not self._is_suspect(node, now)), key=lambda node: node.arrival)

    def _is_suspect(self, node: _Node, now: float) -> bool:
        assert self.settings is not None
        silent_s = now - node.heard_at
        return node.closed_at is not None or silent_s > _SILENT_HEARTBEATS * self.settings.heartbeat_s

    def _is_time_to_seal(self, ready: list[_Node], now: float) -> bool:
        assert self.settings is not None
        if now < self._sealing_allowed_at() or len(ready) < self.settings.min_nodes:
            return False
        if len(ready) >= self.settings.max_nodes:
            return True
        is_first = self.round == 0
        if not is_first and len(ready) == len(self._nodes):
            return True
        assert self._enough_since is not None
        return now >= self._enough_since + self.settings.last_call_s

    def _sealing_allowed_at(self) -> float:
        """After a restart of the coordinator members of a round that it never saw may run for another lease."""
        assert self.settings is not None
        quiet_until = self._started_at + self.settings.lease_s if self._is_recovering else self._started_at
        return max(quiet_until, self._not_before)

    def _seal(self, ready: list[_Node]) -> list[Command]:
        assert self.settings is not None
        members = arrange(self._previous, (node.facts for node in ready), self.settings.max_nodes)
        self.round += 1
        self.world = World(self.round, members, self.restarts_used)
        self.phase = Phase.RUNNING
        self._begin_round()
        for facts in members:
            self._nodes[facts.key].stage = Stage.RUNNING
        return [Remember(self._memory()), SealWorld(self.world)]

    def _next_forming_deadline(self) -> float | None:
        assert self.settings is not None
        if self._forming_since is None:
            return None
        if self._enough_since is None:
            return self._forming_since + self.settings.join_timeout_s
        last_call_ends = self._enough_since + self.settings.last_call_s
        allowed_at = self._sealing_allowed_at()
        # A round that could be sealed but for the backoff or the quiet time after a restart is due then.
        return max(allowed_at, min(last_call_ends, allowed_at) if allowed_at > self._enough_since else last_call_ends)

    def _too_few(self, ready: list[_Node]) -> str:
        assert self.settings is not None
        missing = self.settings.min_nodes - len(ready)
        names = [node.facts.node_id for node in ready]
        who = ", ".join(names[:_NAMED_AT_MOST]) + (", ..." if len(names) > _NAMED_AT_MOST else "") or "nobody"
        return (
            f"only {len(ready)} of at least {self.settings.min_nodes} nodes joined within "
            f"{self.settings.join_timeout_s:g} s ({missing} missing); joined: {who}"
        )

    def _maybe_show_progress(self, ready: list[_Node], now: float) -> list[Command]:
        """At most once a second, so that a large world costs each node a few messages and not one for each other."""
        assert self.settings is not None and self._forming_since is not None
        shown = (len(ready), self.round)
        if shown == self._progress_shown:
            self._progress_due = None
            return []
        if self._progress_due is None:
            self._progress_due = now + 1.0
        if now < self._progress_due:
            return []
        self._progress_shown, self._progress_due = shown, None
        left_s = self._forming_since + self.settings.join_timeout_s - now
        keys = tuple(node.key for node in ready)
        return [ShowProgress(keys, len(ready), self.settings.min_nodes, self.settings.max_nodes, max(0.0, left_s))]

    # The end.

    def _end(self, outcome: Outcome, now: float) -> list[Command]:
        self.phase = Phase.ENDED
        self.outcome = outcome
        keys = tuple(key for key, node in self._nodes.items() if node.closed_at is None)
        commands: list[Command] = [Remember(self._memory())]
        if keys:
            commands.append(TellOutcome(keys, outcome))
        return commands

    def _maybe_forget(self, now: float) -> list[Command]:
        if self._forget_at is None:
            linger_s = self.settings.close_linger_s if self.settings else 0.0
            self._forget_at = now + linger_s
        return [ForgetRun()] if now >= self._forget_at else []

    def _memory(self) -> Memory:
        return Memory(self.round, self.restarts_used, self.outcome)

    def _add(self, facts: NodeFacts, stage: Stage, now: float) -> _Node:
        known = self._nodes.pop(facts.key, None)
        arrival = known.arrival if known else self._arrivals
        self._arrivals += 1
        node = self._nodes[facts.key] = _Node(facts, stage, arrival, now)
        return node

    def check(self) -> None:
        """The invariants; tests and the simulator call this after every step."""
        keys = self.world.keys if self.world else ()
        assert len(set(keys)) == len(keys)
        assert (self.phase in (Phase.RUNNING, Phase.STOPPING)) <= (self.world is not None)
        assert (self.phase is Phase.ENDED) == (self.outcome is not None)
        assert self.world is None or self.world.round == self.round or self.phase is Phase.ENDED
        if self.settings and self.world:
            assert self.settings.min_nodes <= len(keys) <= self.settings.max_nodes
            assert self.settings.policy.window_s or self.restarts_used <= self.settings.policy.max_restarts
        if self.phase is Phase.RUNNING:
            for key in keys:
                assert key in self._finished_and_gone or self._nodes[key].stage is not Stage.WAITING


def _plain(value: object) -> str:
    return str(value.value) if isinstance(value, StrEnum) else repr(value)


def describe_nodes(nodes: Iterable[NodeFacts]) -> str:
    return ", ".join(node.node_id for node in nodes)
