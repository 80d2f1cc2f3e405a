"""Who is there: the nodes that a run's machine knows, when each was last heard of, and who may soon be lost. Pure.

Every question is answered without looking at all nodes. The nodes stand in the order in which they were last heard
of, and all leases are equally long, so the first in line is the next whose lease may end. Closed connections have a
time of their own, kept in a heap.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.rendezvous.vocabulary import Stage
from holdfast.rendezvous.world import NodeFacts


@dataclass(slots=True)
class Node:
    facts: NodeFacts
    stage: Stage
    arrival: int
    heard_at: float
    drop_at: float | None = None
    """Its connection is closed, and it is lost at this time unless it returns."""

    @property
    def key(self) -> str:
        return self.facts.key

    @property
    def is_open(self) -> bool:
        return self.drop_at is None


class Roster:
    """`waiting` are the keys of those that have joined, are connected, and have no workers."""

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        self._nodes: OrderedDict[str, Node] = OrderedDict()
        self._dropping: set[str] = set()
        self._drop_times: list[tuple[float, str]] = []  # A heap, with some that are not true any more.
        self._claims: dict[int, set[str]] = {}  # Who has asked for which rank.
        self._incarnations: dict[str, int] = {}  # The newest of each node that was ever here.
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def __getitem__(self, key: str) -> Node:
        return self._nodes[key]

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, key: str) -> Node | None:
        return self._nodes.get(key)

    def first(self) -> Node | None:
        """The one that has not been heard of for the longest time."""
        return next(iter(self._nodes.values()), None)

    def open_keys(self) -> tuple[str, ...]:
        return tuple(key for key, node in self._nodes.items() if node.is_open)

    def claimants(self, rank: int) -> list[Node]:
        return [self._nodes[key] for key in self._claims.get(rank, ())]

    def in_order_of_arrival(self) -> list[Node]:
        """Those that wait."""
        return sorted((self._nodes[key] for key in self.waiting), key=lambda node: node.arrival)

    def names_waiting(self) -> list[str]:
        return sorted(self._nodes[key].facts.node_id for key in self.waiting)

    def is_outdated(self, facts: NodeFacts) -> bool:
        """Whether the node has come as somebody newer. Connections do not wait for each other, so the last words of an
        incarnation that was given up may be here after the first of the next."""
        return facts.incarnation < self._incarnations.get(facts.node_id, 0)

    def add(self, facts: NodeFacts, stage: Stage, now: float) -> Node:
        """A node that is known keeps its place in the order of arrival."""
        known = self._nodes.get(facts.key)
        self.remove(facts.key)
        self._arrivals += 1
        node = self._nodes[facts.key] = Node(facts, stage, known.arrival if known else self._arrivals, now)
        self._incarnations[facts.node_id] = max(facts.incarnation, self._incarnations.get(facts.node_id, 0))
        if facts.requested_rank is not None:
            self._claims.setdefault(facts.requested_rank, set()).add(facts.key)
        if stage is Stage.WAITING:
            self.waiting.add(facts.key)
        return node

    def remove(self, key: str) -> None:
        node = self._nodes.pop(key, None)
        if node is not None and node.facts.requested_rank is not None:
            self._claims[node.facts.requested_rank].discard(key)
        self.waiting.discard(key)
        self._dropping.discard(key)

    def hear(self, key: str, now: float) -> None:
        node = self._nodes.get(key)
        if node is not None:
            node.heard_at = now
            self._nodes.move_to_end(key)

    def drop(self, node: Node, at: float) -> None:
        """Its connection is closed; it is lost at that time unless it returns."""
        node.drop_at = at
        self._dropping.add(node.key)
        heapq.heappush(self._drop_times, (at, node.key))
        self.waiting.discard(node.key)

    def reopen(self, node: Node, now: float) -> None:
        node.drop_at = None
        self._dropping.discard(node.key)
        self.hear(node.key, now)

    def dropped_by(self, now: float) -> list[str]:
        return sorted(key for key in self._dropping if (self._nodes[key].drop_at or 0.0) <= now)

    def next_drop_at(self) -> float | None:
        while self._drop_times and not self._is_dropped_at(*self._drop_times[0]):
            heapq.heappop(self._drop_times)
        return self._drop_times[0][0] if self._drop_times else None

    def _is_dropped_at(self, at: float, key: str) -> bool:
        node = self._nodes.get(key)
        return node is not None and node.drop_at == at

    def check(self) -> None:
        assert self.waiting <= self._nodes.keys()
        assert self._dropping <= self._nodes.keys()
        assert self._dropping == {key for key, node in self._nodes.items() if not node.is_open}
