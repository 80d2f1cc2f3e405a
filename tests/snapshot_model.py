"""Which snapshot a round must load, found by trying every rank of every snapshot: for tests to compare with."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.rendezvous.membership.model import SnapshotId, Source
from holdfast.rendezvous.membership.snapshots import Member


def needs_of(members: Sequence[Member], rank: int, snapshot: SnapshotId) -> set[int]:
    """The ranks of the snapshot that the member's workers need; of one that is replicated, any of them."""
    first = sum(member.workers for member in members[:rank])
    if sum(member.workers for member in members) != snapshot.world_size or snapshot.is_replicated:
        return {*range(snapshot.world_size)}
    return {*range(first, first + members[rank].workers)}


def can_load(member: Member, snapshot: SnapshotId, ranks: set[int]) -> bool:
    """Whether the member holds these ranks itself."""
    own = {
        rank
        for held in member.held
        if held.snapshot == snapshot
        for first, count in held.ranks
        for rank in range(first, first + count)
    }
    return ranks <= own


def is_loadable(members: Sequence[Member], snapshot: SnapshotId) -> bool:
    for rank, member in enumerate(members):
        need = needs_of(members, rank, snapshot)
        reachable = {
            each
            for each in need
            if any(can_load(other, snapshot, {each}) for other in members if other is member or other.port)
        }
        if not (reachable if snapshot.is_replicated else reachable == need):
            return False
    return True


def newest_loadable(members: Sequence[Member]) -> SnapshotId | None:
    known = {held.snapshot for member in members for held in member.held}
    loadable = [each for each in known if is_loadable(members, each)]
    return max(loadable, key=lambda each: (each.order, each.is_replicated, each.world_size), default=None)


def shortage(members: Sequence[Member], rank: int, snapshot: SnapshotId, sources: tuple[Source, ...]) -> str:
    """Why the member cannot load the snapshot with its sources, or is sent for something in vain; or nothing."""
    fetched = [each for source in sources for each in range(source.ranks[0], sum(source.ranks))]
    for source in sources:
        ranks = {*range(source.ranks[0], sum(source.ranks))}
        holders = [each for each in members if (each.address, each.port) == (source.address, source.port)]
        if not source.port or not any(can_load(each, snapshot, ranks) for each in holders):
            return f"{source} does not have it"
    need = needs_of(members, rank, snapshot)
    own = {each for each in need if can_load(members[rank], snapshot, {each})}
    if snapshot.is_replicated:
        return "" if len(fetched) == (0 if own else 1) else f"it has {own} and fetches {fetched}"
    return "" if sorted([*own, *fetched]) == sorted(need) else f"it needs {need}, has {own}, fetches {fetched}"
