"""Which snapshot all ranks of a new round load, and where each member gets the ranks that it lacks. Pure.

Of the snapshots that the members of the new world hold, the newest is chosen that every rank can load. A rank can load
a snapshot if its member holds the part that it needs, or can fetch it from a member that has a transfer process:

    the world has as many workers as the one that saved it     its own rank
    the snapshot is replicated                                 any rank
    the world has another number of workers (`needs_reshard`)  all ranks

The cost is that of sorting what the members hold, whatever they hold: there may be thousands of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from holdfast.rendezvous.membership.snapshot_records import (
    MAX_HELD,
    MAX_SOURCES,
    Chosen,
    Held,
    SnapshotId,
    SnapshotPlan,
    Source,
)

if TYPE_CHECKING:
    from holdfast.rendezvous.membership.model import NodeFacts, Settings
    from holdfast.rendezvous.membership.nodes import Node

_NEAR_BY = 32

Pieces = list[tuple[int, int, int]]  # The first rank, the one after the last, and the member that has them.


class Member(NamedTuple):
    """A member of the new world: how many workers it has, and what it holds. Without a port it passes no rank on."""

    workers: int
    held: tuple[Held, ...] = ()
    address: str = ""
    port: int = 0


def _member_of(node: Node) -> Member:
    facts = node.facts
    return Member(facts.local_world_size, node.snapshots, facts.address, facts.snapshot_port)


def choose(members: Sequence[Member]) -> tuple[Chosen | None, dict[int, Chosen]]:
    """For all members, in rank order; and for those that lack ranks, by rank, with their sources. None if no member
    holds anything."""
    holders: dict[SnapshotId, dict[int, Pieces]] = {}
    for rank, member in enumerate(members):
        for held in member.held:
            pieces = holders.setdefault(held.snapshot, {}).setdefault(rank, [])
            pieces += [(first, first + count, rank) for first, count in held.ranks]
    if not holders:
        return None, {}
    first_problem, ends = "", [*accumulate(member.workers for member in members)]
    for snapshot in sorted(holders, key=_newness, reverse=True):
        candidate = _Candidate(snapshot, holders[snapshot], members, ends)
        if not (problem := candidate.problem()):
            fetching = {rank: sources for rank, sources in candidate.sources() if sources}
            if max(map(len, fetching.values()), default=0) <= MAX_SOURCES:
                chosen = Chosen(snapshot, needs_reshard=candidate.needs_reshard)
                return chosen, {
                    rank: Chosen(snapshot, each, "", chosen.needs_reshard) for rank, each in fetching.items()
                }
            problem = candidate.too_many()
        first_problem = first_problem or problem
    return Chosen(None, problem=first_problem), {}


def plan(nodes: Sequence[Node], settings: Settings) -> SnapshotPlan:
    """For the members of a new world, in rank order."""
    agrees = any(settings.agreed_steps)
    copy_to = (
        _copy_targets([node.facts for node in nodes], settings.snapshot_copies) if settings.snapshot_copies else {}
    )
    return SnapshotPlan(*choose([_member_of(node) for node in nodes]), copy_to, agrees)


def _copy_targets(members: Sequence[NodeFacts], copies: int) -> dict[int, tuple[tuple[str, int], ...]]:
    """The next nodes in rank order, of other hosts if there are any near by: a host takes all its nodes with it."""
    found, count = {}, len(members)
    for rank, own in enumerate(members):
        next_ones = [members[(rank + at) % count] for at in range(1, min(count, _NEAR_BY + copies))]
        able = sorted((each for each in next_ones if each.snapshot_port), key=lambda each: each.host == own.host)
        found[rank] = tuple([(each.address, each.snapshot_port) for each in able[:copies]])
    return found


def choose_alone(workers: int, held: tuple[Held, ...], node_count: int) -> Chosen | None:
    """For a node that decides for itself. It does not know what other nodes hold, so with others it loads nothing:
    never two steps in one world."""
    if node_count > 1:
        return Chosen(None, problem="the nodes of this backend do not know each other's snapshots") if held else None
    return choose([Member(workers, held)])[0]


def limited(held: Iterable[Held]) -> tuple[Held, ...]:
    """As much as may be said in a join: the newest."""
    newest = sorted(held, key=lambda each: _newness(each.snapshot), reverse=True)
    return tuple([Held(each.snapshot, each.ranks[:MAX_HELD]) for each in newest[:MAX_HELD]])


def _newness(snapshot: SnapshotId) -> tuple[tuple[int, int, int], bool, int]:
    return snapshot.order, snapshot.is_replicated, snapshot.world_size


class _Candidate:
    """One snapshot: which members hold which ranks of it, and which ranks can be fetched. `ends` are the global ranks
    at which the workers of each member end."""

    def __init__(
        self, snapshot: SnapshotId, holders: dict[int, Pieces], members: Sequence[Member], ends: list[int]
    ) -> None:
        self._snapshot, self._holders, self._members, self._ends = snapshot, holders, members, ends
        self.needs_reshard = ends[-1] != snapshot.world_size and not snapshot.is_replicated
        self._served = _in_order(piece for rank, own in holders.items() if members[rank].port for piece in own)

    def problem(self) -> str:
        """Why not every rank can load it, or nothing."""
        if self._snapshot.is_replicated:
            stuck = not self._served and len(self._holders) < len(self._members)
            return self._immovable((0, self._snapshot.world_size)) if stuck else ""
        if missing := self._gap(piece for own in self._holders.values() for piece in own):
            return f"no node has {_ranks(missing)} of {_step(self._snapshot)}"
        if self.needs_reshard and len(self._served) > MAX_SOURCES:
            return self.too_many()
        if not (stuck_at := self._gap(self._served)):
            return ""
        if not self.needs_reshard:
            own = (piece for rank, each in self._holders.items() for piece in self._part_of(rank, each))
            stuck_at = self._gap([*self._served, *own])
        elif len(self._holders) == len(self._members):
            gaps = (self._gap([*self._served, *own]) for own in self._holders.values())
            stuck_at = next((gap for gap in gaps if gap), None)
        return self._immovable(stuck_at) if stuck_at else ""

    def too_many(self) -> str:
        return f"{_step(self._snapshot)} is on more nodes than one node can fetch from ({MAX_SOURCES})"

    def sources(self) -> Iterator[tuple[int, tuple[Source, ...]]]:
        """What each member fetches, if every rank can load the snapshot."""
        whole = [self._source(*piece) for piece in self._served]
        servers = [piece for at, piece in enumerate(self._served) if not at or self._served[at - 1][2] != piece[2]]
        for rank in range(len(self._members)):
            own = self._holders.get(rank, [])
            if not self._snapshot.is_replicated:
                yield rank, tuple(self._fetched(self._lacking(rank, own), whole))
            elif not own:
                first, _, holder = servers[rank % len(servers)]  # All of them share the work.
                yield rank, (self._source(first, first + 1, holder),)

    def _lacking(self, rank: int, own: Pieces) -> Iterator[tuple[int, int]]:
        first, last = (0, self._snapshot.world_size) if self.needs_reshard else self._ranks_of(rank)
        yield from _gaps(_in_order(own), first, last)

    def _fetched(self, lacking: Iterable[tuple[int, int]], whole: list[Source]) -> Iterator[Source]:
        for first, last in lacking:
            at = bisect_right(self._served, (first, self._snapshot.world_size + 1, 0)) - 1
            while at < len(whole) and self._served[at][0] < last:
                begin, end, holder = self._served[at]
                is_whole = first <= begin and end <= last
                yield whole[at] if is_whole else self._source(max(begin, first), min(end, last), holder)
                at += 1

    def _source(self, first: int, last: int, holder: int) -> Source:
        return Source((first, last - first), self._members[holder].address, self._members[holder].port)

    def _ranks_of(self, rank: int) -> tuple[int, int]:
        """The global ranks of a member's workers in the new world."""
        return self._ends[rank] - self._members[rank].workers, self._ends[rank]

    def _part_of(self, rank: int, own: Pieces) -> Pieces:
        """Of the ranks that a member holds, those that its own workers need."""
        first, last = self._ranks_of(rank)
        return [(max(begin, first), min(end, last), rank) for begin, end, _ in own if begin < last and end > first]

    def _gap(self, pieces: Iterable[tuple[int, int, int]]) -> tuple[int, int] | None:
        return next(_gaps(_in_order(pieces), 0, self._snapshot.world_size), None)

    def _immovable(self, ranks: tuple[int, int]) -> str:
        which = f"{_ranks(ranks)} of {_step(self._snapshot)}"
        return f"{which} would have to move, and there is no token, so ranks cannot move between nodes"


def _in_order(pieces: Iterable[tuple[int, int, int]]) -> Pieces:
    """Each rank once, in order."""
    found, end_before = [], 0
    for begin, end, holder in sorted(pieces):
        if end > end_before:
            found.append((max(begin, end_before), end, holder))
            end_before = end
    return found


def _gaps(pieces: Pieces, first: int, last: int) -> Iterator[tuple[int, int]]:
    """What is missing between two ranks."""
    for begin, end, _ in pieces:
        if begin > first:
            yield first, min(begin, last)
        first = max(first, end)
        if first >= last:
            return
    if first < last:
        yield first, last


def _ranks(ranks: tuple[int, int]) -> str:
    first, last = ranks[0], ranks[1] - 1
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def _step(snapshot: SnapshotId) -> str:
    return f"step {snapshot.step} ({f'round {snapshot.round}' if snapshot.round else 'from disk'})"
