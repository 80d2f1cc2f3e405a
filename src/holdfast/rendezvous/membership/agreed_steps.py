"""Steps that all nodes of a round keep, so that they can be copied to other nodes or written to disk. Pure.

    the run                                          a node
    KeepFrom(step)                    -->            keeps its first common step at or above it
                                      <--            `kept`
    all keep the same: Agreed(step)   -->            copies or writes its part of it
                                      <--            `stored`, or `failed`
    all have stored it: Complete      -->            lets everything older go

Nodes run on while they are asked, so the run asks for a step that none of them has reached: a margin above all that it
has heard of. If a node was faster than that, the nodes keep different steps; the margin grows, and the run asks again.

A node may miss that a step is complete, and others have let the one before it go by then:

  1. step 100 is complete. Nodes A and C hear of it; B does not, and a new coordinator or a new round begins,
  2. if B let step 100 go now, the copies that B has would be missing should C be lost.

So a node lets an agreed step go only for a later agreed one, and nodes say which complete step they know: it is told to
all before they are asked for the next one, and so is the last one that this coordinator knows. Nothing else of this
must survive a round or a coordinator. Whether a snapshot can be loaded follows from what nodes hold when they join,
never from this exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.rendezvous.membership.snapshot_records import Agreed, Complete, KeepFrom, SavedSteps, SnapshotOrder

if TYPE_CHECKING:
    from holdfast.rendezvous.membership.model import Place

_RETRY_S = 10.0  # After a node could not store an agreed step.
_MAX_MARGIN = 1 << 20
_NODES_A_SECOND = 500  # Of a large world less is asked.


class AgreedSteps:
    """What the members of the present round are asked to keep."""

    def __init__(self, now: float) -> None:
        self._margin = 1
        self._written_at = now  # When a step was agreed last that went to the disk.
        self._copies, self._every_s = 0, 0.0
        self._complete: Complete | None = None  # The last one, and whether all members were told of it.

    def begin(self, place: Place, copies: int, every_s: float) -> None:
        """A round begins, or is adopted; `place` is that of any member. Steps are copied to `copies` nodes each, and
        written to disk every `every_s`; 0: not at all."""
        self._order, self._size, self._copies, self._every_s = place.order, place.node_count, copies, every_s
        self._loaded = place.chosen.snapshot if place.chosen is not None else None
        self._reported: set[str] = set()  # The nodes that have a common step.
        self._highest = -1  # Of all steps that nodes have told of.
        self._asked: KeepFrom | None = None  # Until all have answered;
        self._kept: dict[str, int] = {}  # those that have.
        self._agreed: Agreed | None = None  # Until all have stored it;
        self._stored: set[str] = set()  # those that have.
        last, self._complete, self._is_complete_told = self._complete, None, True
        if last is not None and self._loaded is not None:  # All members of the last round may have missed it.
            self._hear_complete(last.saved)
        self._not_before = 0.0  # It is not asked more often than this allows.

    def take(self, key: str, steps: SavedSteps, now: float) -> list[SnapshotOrder]:
        """What a member says of its steps. Returns what to tell all members."""
        if not self._copies and not self._every_s:
            return []
        if steps.newest is not None:
            self._reported.add(key)
        self._highest = max(self._highest, *(each for each in (steps.newest, steps.kept) if each is not None), -1)
        if steps.complete is not None:
            self._hear_complete(steps.complete)
        if self._agreed is not None:
            return self._take_stored(key, steps, self._agreed, now)
        if self._asked is not None:
            return self._take_kept(key, steps, self._asked, now)
        return self._ask(now) if self._is_due(now) else []

    def repeated(self) -> list[SnapshotOrder]:
        """For a member that may have missed it."""
        return [each for each in (self._complete, self._asked, self._agreed) if each is not None]

    def _hear_complete(self, saved: tuple[int, int, int]) -> None:
        """Snapshots that are newer than the one that the round has loaded, and not of this round, were discarded."""
        is_there = saved[:2] == self._order or self._loaded is None or saved <= self._loaded.order
        if is_there and (self._complete is None or saved > self._complete.saved):
            self._complete, self._is_complete_told = Complete(self._order[1], saved), False

    def _is_due(self, now: float) -> bool:
        is_wanted = self._copies > 0 or self._is_disk_due(now)
        return is_wanted and len(self._reported) == self._size and now >= self._not_before

    def _is_disk_due(self, now: float) -> bool:
        return self._every_s > 0 and now >= self._written_at + self._every_s

    def _ask(self, now: float) -> list[SnapshotOrder]:
        self._not_before = now + max(1.0, self._size / _NODES_A_SECOND)
        self._asked = KeepFrom(self._order[1], self._highest + self._margin)
        self._kept.clear()
        is_told, self._is_complete_told = self._is_complete_told, True
        return [self._asked] if is_told or self._complete is None else [self._complete, self._asked]

    def _take_kept(self, key: str, steps: SavedSteps, asked: KeepFrom, now: float) -> list[SnapshotOrder]:
        if steps.kept is None or steps.kept < asked.step:  # What it was asked for before.
            return []
        self._kept[key] = steps.kept
        if len(self._kept) < self._size:
            return []
        most = max(self._kept.values())
        if most != min(self._kept.values()):
            self._margin = min(2 * max(self._margin, most - asked.step + 1), _MAX_MARGIN)
            return self._ask(now)
        self._margin -= self._margin // 8
        self._asked, self._agreed = None, Agreed(self._order[1], most, self._is_disk_due(now))
        self._stored.clear()
        return [self._agreed]

    def _take_stored(self, key: str, steps: SavedSteps, agreed: Agreed, now: float) -> list[SnapshotOrder]:
        if steps.failed == agreed.step:
            self._agreed, self._not_before = None, now + _RETRY_S
            return []
        if steps.stored != agreed.step:
            return []
        self._stored.add(key)
        if len(self._stored) < self._size:
            return []
        self._agreed, self._complete = None, Complete(self._order[1], (*self._order, agreed.step))
        if agreed.to_disk:
            self._written_at = now
        return [self._complete, *(self._ask(now) if self._is_due(now) else [])]
