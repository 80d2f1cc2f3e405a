"""The nodes that a run's machine knows: when each was last heard of, which may soon be lost, which may join. Pure.

No question needs a look at all nodes. The nodes stand in the order in which they were last heard of, and all leases
are equally long, so the first in line is the next whose lease may end. Nodes whose connection is closed have a time of
their own, kept in a heap.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from holdfast.rendezvous.membership.model import (
    MAX_SHAPES,
    Held,
    NodeFacts,
    Notice,
    Refused,
    Settings,
    Stage,
    is_loopback,
)
from holdfast.rendezvous.membership.protocol import Command, Tell

_SILENT_HEARTBEATS = 2.5
_REFUSALS_KEPT = 8
_REFUSALS_TOLD_EVERY_S = 1.0


@dataclass(slots=True)
class Node:
    key: str  # That of `facts`.
    facts: NodeFacts
    stage: Stage
    arrival: int
    heard_at: float
    drop_at: float | None = None  # Its connection is closed, and it is lost at this time unless it returns.
    has_hung_up: bool = False  # With `drop_at`: the node's side closed the connection.
    snapshots: tuple[Held, ...] = ()  # What it held when it joined.

    @property
    def is_open(self) -> bool:
        return self.drop_at is None

    def is_silent(self, settings: Settings, now: float) -> bool:
        """Then it is not sealed into a world."""
        return now - self.heard_at > _SILENT_HEARTBEATS * settings.heartbeat_s


class NodeTable(dict[str, Node]):
    """The nodes by key; only `add` and `remove` change which. `waiting`: those that have joined and are connected.
    `held`: those that have joined and have to wait until that time, because their host was lost before. `unready`:
    those that get no place until they join again, with their reasons (`Join.unready`)."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: set[str] = set()
        self.held: dict[str, float] = {}
        self.unready: dict[str, str] = {}
        self._by_silence: OrderedDict[str, None] = OrderedDict()  # Open ones; the one that is silent longest is first.
        self._drop_times: list[tuple[float, str]] = []  # A heap, with some that are not true any more.
        self._claims: dict[int, set[str]] = {}  # Which keys requested which rank.
        self.shapes: Counter[tuple[str, int]] = Counter()
        self._incarnations: dict[str, int] = {}  # The newest of each node that is here.
        self._arrivals = 0

    def most_silent(self) -> Node | None:
        """Of those that are connected, the one that has not been heard of for the longest time."""
        key = next(iter(self._by_silence), None)
        return None if key is None else self[key]

    def open_keys(self) -> tuple[str, ...]:
        return tuple(key for key, node in self.items() if node.is_open)

    def ids_of(self, key: str) -> tuple[str, ...]:
        """The id of that node, if it is here."""
        return (self[key].facts.node_id,) if key in self else ()

    def waiting_keys(self) -> tuple[str, ...]:
        return tuple(sorted(self.waiting))

    def claimants(self, rank: int) -> list[Node]:
        return [self[key] for key in self._claims.get(rank, ())]

    def waiting_in_order(self) -> list[Node]:
        """By arrival."""
        return sorted((self[key] for key in self.waiting), key=lambda node: node.arrival)

    def names_waiting(self) -> list[str]:
        return sorted(self[key].facts.node_id for key in self.waiting)

    def earlier_self(self, facts: NodeFacts) -> str | None:
        """The key under which an earlier incarnation of this node is still known."""
        known = self._incarnations.get(facts.node_id)
        key = f"{facts.node_id}/{known}"
        return key if known is not None and known < facts.incarnation and key in self else None

    def with_id(self, node_id: str) -> Node | None:
        """The newest incarnation of that node, if it is here."""
        return self.get(f"{node_id}/{self._incarnations.get(node_id)}")

    def add(
        self, facts: NodeFacts, stage: Stage, now: float, held_until: float = 0.0, unready: str | None = None
    ) -> Node:
        """A node that is known keeps its place in the order of arrival, and the time until which it is held."""
        key = facts.key
        known = self.get(key)
        held_until = self.held.get(key, 0.0) if known else held_until
        self.remove(key)
        self._arrivals += 1
        node = self[key] = Node(key, facts, stage, known.arrival if known else self._arrivals, now)
        self._by_silence[key] = None
        self._incarnations[facts.node_id] = facts.incarnation
        self.shapes[facts.shape] += 1
        if facts.requested_rank is not None:
            self._claims.setdefault(facts.requested_rank, set()).add(key)
        if unready is not None:
            self.unready[key] = unready
        if stage is Stage.WAITING and held_until > now:
            self.held[key] = held_until
        self._await(node)
        return node

    def _await(self, node: Node) -> None:
        """If nothing is in the way of a place."""
        if node.stage is Stage.WAITING and node.is_open and node.key not in self.held and node.key not in self.unready:
            self.waiting.add(node.key)

    def remove(self, key: str) -> None:
        node = self.pop(key, None)
        if node is None:
            return
        if node.facts.requested_rank is not None:
            claims = self._claims[node.facts.requested_rank]
            claims.discard(key)
            if not claims:
                del self._claims[node.facts.requested_rank]
        self.shapes -= Counter((node.facts.shape,))
        self.waiting.discard(key)
        self.held.pop(key, None)
        self.unready.pop(key, None)
        self._by_silence.pop(key, None)
        if self._incarnations.get(node.facts.node_id) == node.facts.incarnation:
            del self._incarnations[node.facts.node_id]

    def hear(self, key: str, now: float) -> None:
        node = self.get(key)
        if node is not None:
            node.heard_at = now
            if node.is_open:
                self._by_silence[key] = None
                self._by_silence.move_to_end(key)

    def drop(self, node: Node, at: float, has_hung_up: bool = True) -> None:
        """Its connection is closed; it is lost at that time unless it returns."""
        node.drop_at, node.has_hung_up = at, has_hung_up
        self._by_silence.pop(node.key, None)
        heapq.heappush(self._drop_times, (at, node.key))
        self.waiting.discard(node.key)

    def reopen(self, node: Node, now: float) -> None:
        node.drop_at = None
        self._await(node)
        self.hear(node.key, now)

    def release(self, now: float) -> tuple[str, ...]:
        """Nodes that were held long enough wait like any other. Returns which of them can have a place."""
        if not self.held:
            return ()
        keys = sorted(key for key, until in self.held.items() if until <= now)
        for key in keys:
            del self.held[key]
            self._await(self[key])
        return tuple(key for key in keys if key in self.waiting)

    def next_release_at(self) -> float | None:
        return min(self.held.values(), default=None)

    def out_beyond(self, at: float) -> int:
        """How many cannot have a place until then: they are held for longer, or stay out. Checks that run may end."""
        held = {key for key, until in self.held.items() if until > at}
        return len(held | {key for key, reason in self.unready.items() if reason})

    @property
    def hopeful(self) -> int:
        """How many have a place to hope for without news from outside: they wait, are held, or run their checks."""
        return len(self.waiting) + len({*self.held, *self.unready} - {key for key, why in self.unready.items() if why})

    def dropped_by(self, now: float) -> list[str]:
        return sorted({key for at, key in self._drop_times if at <= now and self._is_dropped_at(at, key)})

    def next_drop_at(self) -> float | None:
        while self._drop_times and not self._is_dropped_at(*self._drop_times[0]):
            heapq.heappop(self._drop_times)
        return self._drop_times[0][0] if self._drop_times else None

    def _is_dropped_at(self, at: float, key: str) -> bool:
        node = self.get(key)
        return node is not None and node.drop_at == at

    def check(self) -> None:
        open_keys = set(self.open_keys())
        assert self.waiting == {key for key in open_keys if self[key].stage is Stage.WAITING} - self.held.keys() - (
            self.unready.keys()
        )
        assert self.unready.keys() <= self.keys()
        assert all(self[key].stage is Stage.WAITING for key in self.held)
        assert self._by_silence.keys() == open_keys
        assert {key for at, key in self._drop_times if self._is_dropped_at(at, key)} == self.keys() - open_keys


class Refusals(deque[tuple[float, str, str]]):
    """The last nodes that were turned away: when, which, and why."""

    def __init__(self, now: float) -> None:
        super().__init__(maxlen=_REFUSALS_KEPT)
        self._told_from = now  # The nodes that wait hear of the next one, but not before then.

    def add(self, facts: NodeFacts, problem: str, nodes: NodeTable, now: float) -> list[Command]:
        """The nodes that wait hear of it too, once a second at most: they may be waiting for this one."""
        self.append((now, facts.node_id, problem))
        refused = Tell((facts.key,), Refused(problem))
        others = tuple(key for key in nodes.waiting_keys() if key != facts.key) if now >= self._told_from else ()
        if not others:
            return [refused]
        self._told_from = now + _REFUSALS_TOLD_EVERY_S
        return [refused, Tell(others, Notice(f"node {facts.node_id} was turned away: {problem}"))]


def rejection_of(facts: NodeFacts, settings: Settings, ours: Settings, nodes: NodeTable, now: float) -> str:
    """Why a node cannot take part in the run, in the words that its user typed; or nothing."""
    difference = ours.difference(settings)
    if difference:
        empty = "none of its nodes is here now; the run is forgotten when no node has come for a minute"
        return difference if nodes else f"{difference} ({empty})"
    if facts.shape not in nodes.shapes and len(nodes.shapes) >= MAX_SHAPES:
        return f"the nodes of this run have {MAX_SHAPES} different roles and numbers of processes already"
    other = next(iter(nodes.values()), None)
    unreachable = _unreachable_between_hosts(facts, other.facts) if other else ""
    return unreachable or _rejection_of_rank(facts, ours, nodes, now)


def _rejection_of_rank(facts: NodeFacts, ours: Settings, nodes: NodeTable, now: float) -> str:
    """A node that is closed or silent claims no rank: it may be an earlier agent of this node."""
    rank, max_nodes = facts.requested_rank, ours.max_nodes
    if rank is None:
        return ""
    if not 0 <= rank < max_nodes:
        return f"--node-rank {rank}, but this run has at most {max_nodes} nodes"
    others = (node for node in nodes.claimants(rank) if node.facts.node_id != facts.node_id)
    names = sorted(node.facts.node_id for node in others if node.is_open and not node.is_silent(ours, now))
    if not names:
        return ""
    free = next((other for other in range(max_nodes) if not nodes.claimants(other)), None)
    hint = "" if free is None else f"; give --node-rank {free}"
    return f"this node has rank {rank} (--node-rank, or 0 if it was not given), and {names[0]} has it already{hint}"


def _unreachable_between_hosts(newcomer: NodeFacts, member: NodeFacts) -> str:
    """What is wrong if one of the two has an address that only its own host can reach, and the other has not."""
    if not newcomer.address or not member.address or is_loopback(newcomer.address) == is_loopback(member.address):
        return ""
    here, there = f"its address is {newcomer.address}", f"{member.node_id} is at {member.address}"
    alone, hint = "where no other host can reach it", "an address with --local-addr"
    if is_loopback(newcomer.address):
        return f"{here}, {alone}, and {there}; give this node {hint}"
    return f"{here}, but {there}, {alone}; give {member.node_id} {hint}"
