"""What the spawner of a fake host holds: snapshots of ranks, of which some are protected."""

from __future__ import annotations

from collections import defaultdict

from holdfast.rendezvous.membership.model import Chosen, Held, SavedSteps, SnapshotId

Order = tuple[int, int]


class Slots:
    """`ranks` are those of the present round's workers on the host. Three snapshots are pinned with all their ranks,
    also copies for other nodes: the one that is kept because of an order, the last agreed one, the last complete
    one."""

    def __init__(self) -> None:
        self.of: dict[int, list[SnapshotId]] = defaultdict(list)
        """The snapshots of each rank, oldest first."""
        self.ranks: range = range(0)
        self.kept: SnapshotId | None = None
        self.agreed: SnapshotId | None = None
        self.complete: SnapshotId | None = None
        self.stored: int | None = None
        self.failed: int | None = None
        self._chosen: SnapshotId | None = None
        self._keep_from: int | None = None

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
        self.kept = self.stored = self.failed = self._keep_from = None
        if self._chosen is not None:
            for rank, known in self.of.items():
                self.of[rank] = [each for each in known if each.order <= self._chosen.order]
            self.agreed = self._unless_newer(self.agreed, self._chosen)
            self.complete = self._unless_newer(self.complete, self._chosen)

    def _unless_newer(self, pinned: SnapshotId | None, chosen: SnapshotId) -> SnapshotId | None:
        return pinned if pinned is not None and pinned.order <= chosen.order else None

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

    def common(self) -> SnapshotId | None:
        known = [{*self.of[rank]} for rank in self.ranks]
        return max(set.intersection(*known), key=lambda each: each.order, default=None) if known else None

    def _protected(self) -> set[SnapshotId | None]:
        newest = self.common()
        is_older = self._chosen is not None and newest is not None and self._chosen.order[:2] < newest.order[:2]
        return {newest, self.kept, self.agreed, self.complete} | (set() if is_older else {self._chosen})

    # Orders of the run.

    def keep(self, round: Order, step: int) -> None:
        """An order may come again."""
        if self.kept is None or self.kept.step < step:
            self.kept, self._keep_from = None, step
            self.keep_if_due(round)

    def keep_if_due(self, round: Order) -> bool:
        common = self.common()
        if self._keep_from is None or common is None or common.order[:2] != round or common.step < self._keep_from:
            return False
        self.kept, self._keep_from = common, None
        return True

    def agree(self, step: int) -> bool:
        """False if it was agreed before, or is not kept here."""
        if self.kept is None or self.kept.step != step or self.agreed == self.kept:
            return False
        self.agreed = self.kept
        return True

    def finish(self, saved: tuple[int, int, int]) -> None:
        pinned = (self.complete, self.agreed, self.kept)
        self.complete = next((each for each in pinned if each is not None and each.order == saved), self.complete)
        if self.agreed is not None and self.agreed.order < saved:
            self.agreed = None

    def steps(self, round: Order) -> SavedSteps:
        newest, kept = [each.step if each and each.order[:2] == round else None for each in (self.common(), self.kept)]
        complete = self.complete.order if self.complete is not None else None
        return SavedSteps(newest, kept, self.stored, self.failed, complete)
