"""The world: the sealed, ordered list of members of a round, and how the order is found. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

_STAND_IN = "unknown node of rank "


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node brings when it joins.

    `node_id` stays the same for as long as the agent lives, `incarnation` rises each time it has lost its place
    and comes back as a stranger. `port` is bound and held by the agent on `address`: the master port of the
    round, should the node get rank 0. It is a new one for every join.
    """

    node_id: str
    incarnation: int = 0
    address: str = ""
    port: int = 0
    role: str = "default"
    local_world_size: int = 1
    requested_rank: int | None = None

    @property
    def key(self) -> str:
        """Who this is, to the coordinator: an incarnation of a node is somebody new."""
        return f"{self.node_id}/{self.incarnation}"


@dataclass(frozen=True, slots=True)
class World:
    """One agreed membership. The position of a member is its group rank.

    Everything that a worker is told about its round comes from here, so all nodes tell the same.
    """

    round: int
    members: tuple[NodeFacts, ...]
    restarts_used: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(member.key for member in self.members)

    def places(self) -> list[Place]:
        """What each member is told, in rank order."""
        runs = _runs(self.members)
        master = self.members[0]
        return [
            Place(self.round, rank, len(self.members), runs, master.address, master.port, self.restarts_used)
            for rank in range(len(self.members))
        ]

    def place_of(self, key: str) -> Place:
        return self.places()[self.keys.index(key)]

    def with_member(self, rank: int, member: NodeFacts) -> World:
        """The same with somebody else at that rank."""
        members = (*self.members[:rank], member, *self.members[rank + 1 :])
        return World(self.round, members, self.restarts_used)

    @property
    def description(self) -> str:
        count = len(self.members)
        return f"round {self.round} runs with {'1 node' if count == 1 else f'{count} nodes'}"


@dataclass(frozen=True, slots=True)
class Run:
    """Members that stand next to each other and are alike."""

    role: str
    local_world_size: int
    count: int


@dataclass(frozen=True, slots=True)
class Place:
    """A world as one of its members needs to know it: enough to compute every rank, and no longer in a large world
    than in a small one as long as its members are alike."""

    round: int
    rank: int
    node_count: int
    runs: tuple[Run, ...]
    master_address: str
    master_port: int
    restarts_used: int = 0

    def shapes(self) -> list[tuple[str, int]]:
        """The role and the local world size of each member, in rank order."""
        return [(run.role, run.local_world_size) for run in self.runs for _ in range(run.count)]


def _runs(members: Sequence[NodeFacts]) -> tuple[Run, ...]:
    groups = groupby(members, key=lambda node: (node.role, node.local_world_size))
    return tuple(Run(role, size, sum(1 for _ in group)) for (role, size), group in groups)


def stand_ins(place: Place) -> tuple[NodeFacts, ...]:
    """The members of a world as far as one of its places tells: as many, and of the same shapes, but unknown."""
    shapes = enumerate(place.shapes())
    return tuple(NodeFacts(f"{_STAND_IN}{rank}", 0, "", 0, role, size) for rank, (role, size) in shapes)


def is_stand_in(key: str) -> bool:
    return key.startswith(_STAND_IN)


def is_loopback(address: str) -> bool:
    """Whether an address means the host itself, on every host another one. Names other than `localhost` do not."""
    if address.startswith("127.") and address.count(".") == 3:
        return True
    return address in ("::1", "localhost") or address.startswith("::ffff:127.")


def unreachable_between_hosts(newcomer: NodeFacts, member: NodeFacts) -> str:
    """What is wrong if one of them is where only its own host can reach it, and the other is not; or nothing."""
    if not newcomer.address or not member.address or is_loopback(newcomer.address) == is_loopback(member.address):
        return ""
    if is_loopback(newcomer.address):
        return (
            f"its address is {newcomer.address}, where no other host can reach it, and {member.node_id} is at "
            f"{member.address}; give this node an address with --local-addr"
        )
    return (
        f"its address is {newcomer.address}, but {member.node_id} is at {member.address}, where no other host can "
        f"reach it; give {member.node_id} an address with --local-addr"
    )


def arrange(previous: Sequence[str], candidates: Iterable[NodeFacts], max_nodes: int) -> tuple[NodeFacts, ...]:
    """The members of the next round, in order.

    `previous` are the keys of the last world in rank order, `candidates` the nodes that are there, in the order in
    which they arrived. Survivors come first when there are more candidates than places; then whoever has waited
    longest. Requested ranks are honoured. Survivors keep their order, newcomers fill the holes that the lost have
    left, and the rest is appended.
    """
    chosen = _choose(previous, list(candidates), max_nodes)
    return _place(_line_up(previous, chosen))


def _choose(previous: Sequence[str], candidates: list[NodeFacts], max_nodes: int) -> list[NodeFacts]:
    survivors = set(previous)
    ranked = sorted(candidates, key=lambda node: node.key not in survivors)
    return ranked[:max_nodes]


def _line_up(previous: Sequence[str], chosen: list[NodeFacts]) -> list[NodeFacts]:
    """Survivors in their old order with newcomers in the holes between them."""
    by_key = {node.key: node for node in chosen}
    survivors = set(previous)
    newcomers = deque(node for node in chosen if node.key not in survivors)
    line = []
    for key in previous:
        if key in by_key:
            line.append(by_key[key])
        elif newcomers:
            line.append(newcomers.popleft())
    return [*line, *newcomers]


def _place(line: list[NodeFacts]) -> tuple[NodeFacts, ...]:
    """Put those who asked for a rank at it; the others take the remaining places in their order."""
    places: dict[int, NodeFacts] = {}
    rest = []
    for node in line:
        rank = node.requested_rank
        if rank is not None and rank < len(line) and rank not in places:
            places[rank] = node
        else:
            rest.append(node)
    # One that asked for a rank beyond this world's end goes as far back as it can, in the order of what was asked.
    rest.sort(key=lambda node: -1 if node.requested_rank is None else node.requested_rank)
    queue = iter(rest)
    return tuple(places[rank] if rank in places else next(queue) for rank in range(len(line)))
