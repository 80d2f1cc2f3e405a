"""The ledger of a node's slots. Pure: it takes what has happened and returns what is to be done.

A slot is one memory file with the part of one rank. It is free, given (a worker, or a transfer, writes into it), or it
holds the part of one snapshot. A slot that holds something is used again only if it is not protected:

* pinned slots, which are being copied or written to disk, or are copies for other nodes;
* the base, until the local ranks have a common snapshot of this round: the snapshot that the round was given to load,
  or the newest common one if it was given none;
* the newest common snapshot of this round: all local ranks hold it, or it is replicated and one of them does.

A rank that is one save ahead of the others of its node waits for them, so that it overwrites neither that one nor its
own newest.

A snapshot is a plain tuple, `(term, round, step, world size, is replicated)`: the spawner loads few modules, and tuples
are ordered by age and can be marshalled. The actions are tuples, too:

    make(slot, bytes)                                a memory file for this slot
    drop(slot)                                       close it; its memory goes with its last reader
    give(rank, request, slot)                        the answers to a worker
    committed(rank, request)
    found(rank, request, slot, snapshot, bytes)
    nothing(rank, request, text)
    refuse(rank, request, text)
    kept(snapshot)                                   pinned because of `keep_from`
    warn(text)
"""

from __future__ import annotations

from itertools import count

from holdfast.text import plural, size_text

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import.
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from typing import Any

Snapshot = tuple[int, int, int, int, bool]
Action = tuple["Any", ...]

MAX_STEP = 1 << 53
KEPT = "kept"  # The pin of a step that all nodes are asked to keep.
COPY = "copy"  # The pin of a part that another node has copied to this one.
FETCHED = "fetched"  # The pin of a part while it comes from another node.

_MIB = 1 << 20


class Slot:
    """`capacity` is the size of the memory file, `size` how many bytes of it the snapshot has."""

    __slots__ = ("capacity", "is_given", "number", "pins", "rank", "size", "snapshot")

    def __init__(self, number: int, rank: int, capacity: int) -> None:
        self.number, self.rank, self.capacity = number, rank, capacity
        self.is_given = True
        self.snapshot: Snapshot | None = None
        self.size = 0
        self.pins: set[str] = set()

    def clear(self) -> None:
        self.snapshot, self.size, self.is_given = None, 0, False
        self.pins.clear()


class Ledger:
    """All slots of a node. `limit` is how many bytes they may have together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.slots: dict[int, Slot] = {}
        self.term = self.round = self.world_size = 0
        self.ranks: tuple[int, ...] = ()
        self.chosen: Snapshot | None = None
        self.problem = ""
        self._base: Snapshot | None = None
        self._common: Snapshot | None = None
        self._newest: dict[int, Snapshot] = {}  # Of each rank, in this round.
        self._numbers = count(1)
        self._wants: dict[int, tuple[int, int]] = {}  # Rank -> request and bytes, of those that wait.
        self._loads: dict[int, tuple[int, int]] = {}  # Rank -> request and the rank whose part it waits for.
        self._fetching: set[int] = set()
        self._unfetched: dict[int, str] = {}  # Why these ranks did not come.
        self._keep_from: int | None = None
        self._has_warned = False  # That there is no memory for what is asked for with `keep_from`.

    # What is known.

    @property
    def used(self) -> int:
        return sum(slot.capacity for slot in self.slots.values())

    def find(self, snapshot: Snapshot, rank: int) -> Slot | None:
        """The slot with the part of that rank."""
        return next((s for s in self.slots.values() if s.snapshot == snapshot and s.rank == rank), None)

    def held(self) -> dict[Snapshot, set[int]]:
        """The snapshots of which this node holds parts, newest first, with their ranks."""
        held: dict[Snapshot, set[int]] = {}
        for slot in self.slots.values():
            if slot.snapshot is not None:
                held.setdefault(slot.snapshot, set()).add(slot.rank)
        return dict(sorted(held.items(), reverse=True))

    @property
    def newest(self) -> Snapshot | None:
        """What a restart would load, as far as this node knows: the newest common snapshot, or the base."""
        return self._common or self._base

    def is_protected(self, slot: Slot) -> bool:
        if slot.is_given or slot.pins:
            return True
        return slot.snapshot is not None and slot.snapshot == self.newest

    # Rounds.

    def begin(
        self,
        term: int,
        round: int,
        world_size: int,
        ranks: Iterable[int],
        chosen: Snapshot | None,
        problem: str = "",
        fetching: Collection[int] = (),
    ) -> list[Action]:
        """The workers of the last round are gone. `chosen` is the snapshot to load, `problem` why there is none,
        `fetching` the ranks whose parts are on their way to this node."""
        self._base = chosen or self.newest
        self.term, self.round, self.world_size, self.ranks = term, round, world_size, tuple(ranks)
        self.chosen, self.problem = chosen, problem
        self._common, self._newest = None, {}
        self._wants, self._loads, self._fetching, self._keep_from = {}, {}, set(fetching), None
        self._unfetched = {}
        actions: list[Action] = []
        for slot in [*self.slots.values()]:
            is_abandoned = chosen is not None and slot.snapshot is not None and slot.snapshot > chosen
            if slot.pins and (is_abandoned or slot.is_given):
                actions += self._drop(slot)  # A transfer may use it, so it cannot be given to a worker.
            elif is_abandoned or slot.is_given:
                slot.clear()
        return actions + self._tidy()

    def _tidy(self) -> list[Action]:
        """Of ranks that are not of this node, only protected slots stay."""
        others = [slot for slot in self.slots.values() if slot.rank not in self.ranks]
        return [each for slot in others if not self.is_protected(slot) for each in self._drop(slot)]

    def _drop(self, slot: Slot) -> list[Action]:
        del self.slots[slot.number]
        return [("drop", slot.number)]

    # What workers ask.

    def want(self, rank: int, request: int, size: int) -> list[Action]:
        if size <= 0:
            return [("refuse", rank, request, f"a slot cannot have {size} bytes")]
        newest = self._newest.get(rank)
        if newest is not None and (self._common is None or newest > self._common):
            self._wants[rank] = (request, size)
            return []
        actions: list[Action] = []
        own = [slot for slot in self.slots.values() if slot.rank == rank and not slot.pins]
        # One that was given for a save that came to nothing is used first: a rank has one at a time.
        for slot in sorted(own, key=lambda each: (not each.is_given, each.capacity)):
            if slot.is_given or not self.is_protected(slot):
                if slot.capacity >= size:
                    slot.clear()
                    slot.is_given = True
                    return [*actions, ("give", rank, request, slot.number)]
                actions += self._drop(slot)
        made = self._make(rank, size)
        if isinstance(made, str):
            return [*actions, ("refuse", rank, request, made)]
        return [*actions, ("make", made.number, made.capacity), ("give", rank, request, made.number)]

    def _make(self, rank: int, size: int) -> Slot | str:
        """A given slot, or why there is none."""
        capacity = _capacity_for(size)
        if self.used + capacity > self.limit:
            used, limit = size_text(self.used), size_text(self.limit)
            return f"{size_text(size)} more do not fit: {used} of --snapshot-memory {limit} are in use"
        slot = Slot(next(self._numbers), rank, capacity)
        self.slots[slot.number] = slot
        return slot

    def commit(
        self, rank: int, request: int, number: int, step: int, size: int, is_replicated: bool = False
    ) -> list[Action]:
        slot, newest = self.slots.get(number), self._newest.get(rank)
        problem = ""
        if slot is None or slot.rank != rank or not slot.is_given or slot.pins:
            problem = f"slot {number} was not given to rank {rank}"
        elif not 0 < size <= slot.capacity:
            problem = f"slot {number} has {slot.capacity} bytes, not {size}"
        elif not 0 <= step < MAX_STEP:
            problem = f"{step} is not a step"
        elif newest is not None and step <= newest[2]:
            problem = f"step {step} is not above step {newest[2]}, which rank {rank} has saved in this round"
        if slot is None or problem:
            return [("refuse", rank, request, problem)]
        snapshot = (self.term, self.round, step, self.world_size, is_replicated)
        slot.snapshot, slot.size, slot.is_given = snapshot, size, False
        self._newest[rank] = snapshot
        if is_replicated or self.held()[snapshot].issuperset(self.ranks):
            self._common = max(snapshot, self._common or snapshot)
        return [("committed", rank, request), *self._keep(), *self._tidy(), *self._serve_wants()]

    def _serve_wants(self) -> list[Action]:
        wants, self._wants = self._wants, {}
        return [each for rank, (request, size) in wants.items() for each in self.want(rank, request, size)]

    def load(self, rank: int, request: int, wanted: int, can_reshard: bool = False) -> list[Action]:
        """`wanted` is the rank whose part is asked for. A rank that the world which saved did not have gets that of
        rank 0, if it can reshard."""
        chosen = self.chosen
        if chosen is None:
            return [("nothing", rank, request, self.problem)]
        _, _, step, world_size, is_replicated = chosen
        if world_size != self.world_size and not is_replicated and not can_reshard:
            text = (
                f"step {step} was saved by {plural(world_size, 'worker')}, and this world has {self.world_size}: it "
                "loads only with reshard=... or if it was saved with replicated=True"
            )
            return [("nothing", rank, request, text)]
        if can_reshard and wanted >= world_size:
            wanted = 0
        slot = self.find(chosen, wanted)
        if slot is None and is_replicated:
            slot = next((each for each in self.slots.values() if each.snapshot == chosen), None)
        if slot is not None:
            return [("found", rank, request, slot.number, chosen, slot.size)]
        if self._fetching and (is_replicated or wanted in self._fetching):
            self._loads[rank] = (request, wanted)
            return []
        problem = self._unfetched.get(wanted) or next(iter(self._unfetched.values()), "")
        text = f"rank {wanted} of step {step} is not on this node and cannot be fetched{problem and f': {problem}'}"
        return [("refuse", rank, request, text)]

    def cancel(self, rank: int) -> None:
        """That worker is gone: what it waits for is not to be answered."""
        self._wants.pop(rank, None)
        self._loads.pop(rank, None)

    # Parts of other ranks, and steps that are kept.

    def receive(self, rank: int, size: int, pin: str = FETCHED) -> tuple[Slot | str, list[Action]]:
        """A slot for a part that comes from another node or from disk, or why there is none. A part of a rank that is
        not of this node stays while it is pinned by another name than `FETCHED`, or is the base. What the round is to
        load may take the place of slots that are not protected, such as those of steps that were left."""
        actions = self._make_room(_capacity_for(size)) if pin == FETCHED else []
        made = self._make(rank, size)
        if isinstance(made, str):
            return made, actions
        made.pins.add(pin)
        return made, [*actions, ("make", made.number, made.capacity)]

    def _make_room(self, capacity: int) -> list[Action]:
        """The oldest go first, and none if that would not be enough."""
        lacking = self.used + capacity - self.limit
        free = sorted(
            (s for s in self.slots.values() if not self.is_protected(s)), key=lambda each: each.snapshot or ()
        )
        actions: list[Action] = []
        for slot in free if lacking <= sum(slot.capacity for slot in free) else ():
            if lacking > 0:
                lacking -= slot.capacity
                actions += self._drop(slot)
        return actions

    def arrived(self, number: int, snapshot: Snapshot, size: int) -> list[Action]:
        """All of it is in the slot."""
        if (slot := self.slots.get(number)) is None:
            return []
        slot.snapshot, slot.size, slot.is_given = snapshot, size, False
        slot.pins.discard(FETCHED)
        if snapshot == self.chosen:
            self._fetching.discard(slot.rank)
        return [*self._tidy(), *self._serve_loads()]

    def fetch_failed(self, ranks: Iterable[int], text: str) -> list[Action]:
        self._unfetched.update(dict.fromkeys(ranks, text))
        self._fetching.difference_update(self._unfetched)
        return self._serve_loads()

    def _serve_loads(self) -> list[Action]:
        loads, self._loads = self._loads, {}
        actions: list[Action] = []
        for rank, (request, wanted) in loads.items():
            actions += self.load(rank, request, wanted, can_reshard=True)
        return actions

    def lost(self, number: int) -> list[Action]:
        """A slot cannot be made, or what should come into it will not."""
        return self._drop(self.slots[number]) if number in self.slots else []

    def pin(self, snapshot: Snapshot, name: str) -> list[Slot]:
        """Keep every part of it that is here; returns them."""
        slots = [slot for slot in self.slots.values() if slot.snapshot == snapshot]
        for slot in slots:
            slot.pins.add(name)
        return slots

    def unpin(self, snapshot: Snapshot, name: str) -> list[Action]:
        for slot in self.slots.values():
            if slot.snapshot == snapshot:
                slot.pins.discard(name)
        return [*self._tidy(), *self._serve_wants()]

    def keep_from(self, step: int) -> list[Action]:
        """Pin the first common snapshot of this round at or above that step, if ranks can still save beside it."""
        self._keep_from = step
        return self._keep()

    def _keep(self) -> list[Action]:
        if self._keep_from is None or self._common is None or self._common[2] < self._keep_from:
            return []
        if lacking := self._lacking_beside(self._common):
            text = f"no step is copied or written meanwhile: that needs {size_text(self.limit + lacking)} of memory"
            has_warned, self._has_warned = self._has_warned, True
            return [] if has_warned else [("warn", f"{text}, and --snapshot-memory is {size_text(self.limit)}")]
        self._keep_from = None
        self.pin(self._common, KEPT)
        return [("kept", self._common)]

    def _lacking_beside(self, kept: Snapshot) -> int:
        """How many bytes are missing for two slots of each rank besides those of this snapshot. A save that finds no
        slot is an error in the worker, so a step is kept only if that cannot happen."""
        more = 0
        for slot in [slot for slot in self.slots.values() if slot.snapshot == kept and slot.rank in self.ranks]:
            others = [s for s in self.slots.values() if s.rank == slot.rank and s.snapshot != kept and not s.pins]
            more += max(0, 2 - len(others)) * slot.capacity
        return max(0, self.used + more - self.limit)

    def check(self) -> None:
        """The invariants; tests call this after every step."""
        assert self.used <= self.limit
        for slot in self.slots.values():
            assert (slot.snapshot is None) == (slot.size == 0)
            assert slot.size <= slot.capacity
            assert not (slot.is_given and slot.snapshot is not None)
            assert slot.rank in self.ranks or self.is_protected(slot)
        given = [slot.rank for slot in self.slots.values() if slot.is_given and not slot.pins]
        assert len(given) == len(set(given))


def _capacity_for(size: int) -> int:
    """Some room to grow saves making a new slot for a few bytes more."""
    return (size + _MIB - 1) // _MIB * _MIB if size > _MIB else 1 << max(12, (size - 1).bit_length())


def ranges_of(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Sorted ranks as ranges: the first, and how many."""
    found: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if found and rank == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((rank, 1))
    return found
