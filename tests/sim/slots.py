"""What the spawner of a fake host holds: snapshots of ranks, of which some are protected."""

from __future__ import annotations

from collections import defaultdict

from holdfast.rendezvous.membership.model import Chosen, Held, SnapshotId


class Slots:
    """What the spawner of one host holds. `ranks` are those of the present round's workers on the host."""

    def __init__(self) -> None:
        self.of: dict[int, list[SnapshotId]] = defaultdict(list)
        """The snapshots of each rank, oldest first."""
        self.ranks: range = range(0)
        self._chosen: SnapshotId | None = None

    def held(self) -> tuple[Held, ...]:
        known: dict[SnapshotId, list[tuple[int, int]]] = {}
        for rank in sorted(self.of):
            for snapshot in self.of[rank]:
                ranges = known.setdefault(snapshot, [])
                if ranges and sum(ranges[-1]) == rank:
                    ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
                else:
                    ranges.append((rank, 1))
        return tuple(Held(snapshot, tuple(ranges)) for snapshot, ranges in known.items())

    def begin(self, ranks: range, chosen: Chosen | None) -> None:
        """A round begins: what is newer than the chosen snapshot is discarded."""
        self.ranks, self._chosen = ranks, chosen.snapshot if chosen is not None else None
        if self._chosen is not None:
            for rank, known in self.of.items():
                self.of[rank] = [each for each in known if each.order <= self._chosen.order]

    def put(self, rank: int, snapshot: SnapshotId) -> None:
        if snapshot not in self.of[rank]:
            self.of[rank] = sorted([*self.of[rank], snapshot], key=lambda each: each.order)

    def save(self, rank: int, snapshot: SnapshotId) -> None:
        """In the oldest slot of the rank that is not protected, if it has two or more, else in a new one."""
        kept, own = self._protected(), self.of[rank]
        free = [each for each in own[:-1] if each not in kept]
        if len(own) >= 2 and free:
            own.remove(free[0])
        for other in self.of.keys() - {*self.ranks}:  # Those that have moved, or were fetched for others.
            self.of[other] = [each for each in self.of[other] if each in kept]
        self.put(rank, snapshot)

    def _protected(self) -> set[SnapshotId]:
        known = [{*self.of[rank]} for rank in self.ranks]
        newest = max(set.intersection(*known), key=lambda each: each.order, default=None) if known else None
        kept = {newest} if newest is not None else set()
        is_older = self._chosen is not None and newest is not None and self._chosen.order[:2] < newest.order[:2]
        return kept if self._chosen is None or is_older else kept | {self._chosen}
