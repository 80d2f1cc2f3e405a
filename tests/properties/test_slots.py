"""Whatever workers ask, in whatever order: the newest common snapshot of a node stays whole, and memory is counted."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from holdfast.snapshots.slots import COPY, FETCHED, Action, Ledger, Snapshot, ranges_of
from tests.promises import promise, proves

LIMIT = 40 << 10
RANKS = st.integers(0, 3)
SIZES = st.integers(1, 9000)


class Slots(RuleBasedStateMachine):
    """`content` is what the memory files hold: the part of a rank, or nothing that can be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(LIMIT)
        self.content: dict[int, tuple[Snapshot, int] | None] = {}
        self.capacity: dict[int, int] = {}
        self.given: dict[int, int] = {}  # Rank -> slot.
        self.receiving: list[int] = []
        self.committed: dict[Snapshot, set[int]] = {}
        self.base: Snapshot | None = None
        self.common: Snapshot | None = None
        self.round = 0

    def do(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            match action:
                case ("make", slot, size):
                    assert slot not in self.capacity
                    self.capacity[slot], self.content[slot] = size, None
                case ("drop", slot):
                    del self.capacity[slot], self.content[slot]
                case ("give", rank, _, slot):
                    assert all(other == rank or held != slot for other, held in self.given.items())
                    self.given[rank], self.content[slot] = slot, None
                case ("found", _, _, slot, snapshot, _):
                    held = self.content[slot]
                    assert held is not None
                    assert held[0] == snapshot == self.ledger.chosen
        return actions

    @initialize()
    def first_round(self) -> None:
        self.begin(2, 0, None)

    @rule(count=st.integers(1, 3), first=RANKS, pick=st.none() | st.integers(0, 5))
    def begin(self, count: int, first: int, pick: int | None) -> None:
        held = [*self.ledger.held()]
        chosen = held[pick % len(held)] if held and pick is not None else None
        self.base = chosen or self.common or self.base
        self.round, self.common = self.round + 1, None
        self.given, self.receiving, self.committed = {}, [], {}
        self.do(self.ledger.begin(1, self.round, 4, range(first, first + count), chosen))
        assert chosen is None or all(snapshot <= chosen for snapshot in self.ledger.held())

    @rule(rank=RANKS, size=SIZES)
    def want(self, rank: int, size: int) -> None:
        if rank in self.ledger.ranks:
            self.do(self.ledger.want(rank, 1, size))

    @rule(rank=RANKS, step=st.integers(-1, 12), size=SIZES, is_replicated=st.booleans(), lie=st.integers(0, 9))
    def commit(self, rank: int, step: int, size: int, is_replicated: bool, lie: int) -> None:
        slot = lie if lie < 3 else self.given.get(rank, -1)
        if rank not in self.ledger.ranks:
            return
        actions = self.ledger.commit(rank, 1, slot, step, size, is_replicated)
        if actions[0] == ("committed", rank, 1):
            assert self.given.pop(rank) == slot
            assert size <= self.capacity[slot]
            snapshot = (1, self.round, step, 4, is_replicated)
            assert all(snapshot[2] > old[2] for old, ranks in self.committed.items() if rank in ranks)
            self.content[slot] = (snapshot, rank)
            self.committed.setdefault(snapshot, set()).add(rank)
            if is_replicated or self.committed[snapshot] >= set(self.ledger.ranks):
                self.common = max(snapshot, self.common or snapshot)
        self.do(actions)

    @rule(rank=RANKS, wanted=RANKS)
    def load(self, rank: int, wanted: int) -> None:
        self.do(self.ledger.load(rank, 1, wanted, True))

    @rule(rank=RANKS, size=SIZES, pin=st.sampled_from([COPY, FETCHED]))
    def receive(self, rank: int, size: int, pin: str) -> None:
        slot, actions = self.ledger.receive(rank, size, pin)
        self.do(actions)
        if not isinstance(slot, str):
            self.receiving.append(slot.number)

    @rule(has_come=st.booleans(), step=st.integers(0, 12))
    def arrive(self, has_come: bool, step: int) -> None:
        number = self.receiving.pop() if self.receiving else 999
        if has_come and number in self.capacity:
            self.content[number] = ((1, self.round, step, 4, False), self.ledger.slots[number].rank)
        snapshot = (1, self.round, step, 4, False)
        self.do(self.ledger.arrived(number, snapshot, 1) if has_come else self.ledger.lost(number))

    @rule(pick=st.integers(0, 5), is_pinned=st.booleans())
    def pin(self, pick: int, is_pinned: bool) -> None:
        held = [*self.ledger.held()]
        if held and is_pinned:
            self.ledger.pin(held[pick % len(held)], "agreed")
        elif held:
            self.do(self.ledger.unpin(held[pick % len(held)], "agreed" if pick % 2 else "copy"))

    @rule(step=st.integers(0, 12))
    def keep(self, step: int) -> None:
        for kind, snapshot in self.do(self.ledger.keep_from(step)):
            assert kind == "warn" or (snapshot == self.common and snapshot[2] >= step)

    @invariant()
    def memory_is_counted(self) -> None:
        self.ledger.check()
        assert self.ledger.used == sum(self.capacity.values()) <= LIMIT
        assert self.ledger.slots.keys() == self.capacity.keys()

    @invariant()
    def held_is_what_the_files_have(self) -> None:
        parts = {each for each in self.content.values() if each is not None}
        for snapshot, ranks in self.ledger.held().items():
            for rank in ranks:
                slot = self.ledger.find(snapshot, rank)
                assert slot is not None
                assert self.content[slot.number] == (snapshot, rank)
                assert (snapshot, rank) in parts

    @invariant()
    def the_newest_common_snapshot_is_whole(self) -> None:
        assert self.ledger.newest == (self.common or self.base)
        for rank in self.committed.get(self.common, ()) if self.common is not None else ():
            if self.common is not None and not self.common[4]:
                assert self.ledger.find(self.common, rank) is not None
        if self.common is not None:
            assert self.common in self.ledger.held()


class TestSlots(Slots.TestCase):  # type: ignore[valid-type]
    settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@promise(
    "snapshots.rank-ahead-waits: A rank that is one save ahead of the other ranks of its node waits for them, so that "
    "the newest common snapshot is never overwritten."
)
def test_a_rank_that_is_ahead_waits_for_the_others() -> None:
    ledger = Ledger(1 << 20)
    ledger.begin(1, 1, 2, [0, 1], None)
    for rank in (0, 1):
        slot = ledger.want(rank, 1, 100)[-1][3]
        ledger.commit(rank, 2, slot, 5, 100)
    slot = ledger.want(0, 3, 100)[-1][3]
    assert ledger.commit(0, 4, slot, 6, 100) == [("committed", 0, 4)]
    assert ledger.want(0, 5, 100) == []  # Its other slot has step 5, and that is the one that all have.
    other = ledger.want(1, 6, 100)[-1][3]
    committed, given = ledger.commit(1, 7, other, 6, 100)
    assert committed == ("committed", 1, 7)
    assert given[:3] == ("give", 0, 5)
    assert next(iter(ledger.held().items())) == ((1, 1, 6, 2, False), {0, 1})


@promise(
    "snapshots.keeping-spares-saves: A step is kept for copies or files only if memory is left for further saves; "
    "otherwise a line says so, and the workers go on saving."
)
def test_what_is_kept_leaves_room_for_saves() -> None:
    def save(ledger: Ledger, step: int) -> list[Action]:
        return ledger.commit(0, 2, ledger.want(0, 1, 100)[-1][3], step, 100)

    for slots, kept in ((2, []), (3, [1])):
        ledger = Ledger(slots << 12)
        ledger.begin(1, 1, 1, [0], None)
        ledger.keep_from(1)
        actions = [each for step in range(1, 9) for each in save(ledger, step) if each[0] in ("kept", "warn")]
        assert [each[1][2] for each in actions if each[0] == "kept"] == kept
        said = "no step is copied or written meanwhile: that needs 12.0 KiB of memory, and --snapshot-memory is 8.0 KiB"
        assert [each[1] for each in actions if each[0] == "warn"] == [said][: not kept]


def test_a_save_that_came_to_nothing_leaves_no_second_slot() -> None:
    ledger = Ledger(1 << 20)
    ledger.begin(1, 1, 2, [0, 1], None)
    for rank in (0, 1):
        ledger.commit(rank, 2, ledger.want(rank, 1, 100)[-1][3], 5, 100, True)
    given = ledger.want(1, 3, 100)[-1][3]
    ledger.commit(0, 5, ledger.want(0, 4, 100)[-1][3], 6, 100, True)
    assert ledger.want(1, 6, 100)[-1][3] == given
    ledger.check()


def test_parts_of_other_ranks_go_when_this_round_has_a_common_snapshot() -> None:
    ledger = Ledger(1 << 20)
    ledger.begin(1, 1, 2, [0, 1], None)
    slot = ledger.want(1, 1, 100)[-1][3]
    ledger.commit(1, 2, slot, 5, 100, True)
    ledger.begin(1, 2, 1, [0], None)
    assert ("drop", slot) in ledger.commit(0, 4, ledger.want(0, 3, 100)[-1][3], 6, 100)
    ledger.check()


@promise(
    "snapshots.load-fits: A node whose memory for snapshots is full still gets the step that a round is to load: it "
    "takes the place of steps that were left."
)
def test_what_a_round_loads_takes_the_place_of_steps_that_were_left() -> None:
    ledger, chosen = Ledger(2 << 12), (0, 0, 3, 1, False)
    ledger.begin(1, 1, 1, [0], None)
    for step in (4, 5):
        ledger.commit(0, 2, ledger.want(0, 1, 100)[-1][3], step, 100)
    ledger.begin(1, 2, 1, [0], chosen, fetching=[0])
    assert "do not fit" in str(ledger.receive(0, 100, COPY)[0])
    made, actions = ledger.receive(0, 100)
    assert [each[0] for each in actions] == ["drop", "make"]
    assert not isinstance(made, str)
    ledger.arrived(made.number, chosen, 100)
    assert ledger.load(0, 1, 0)[0][0] == "found"
    assert ledger.want(0, 2, 100)[-1][0] == "give"
    assert "do not fit" in str(ledger.receive(0, 100)[0])  # One slot is given, and the other has what the round loads.
    ledger.check()


def test_a_replicated_snapshot_is_common_as_soon_as_one_rank_has_it() -> None:
    ledger = Ledger(1 << 20)
    ledger.begin(1, 1, 2, [0, 1], None)
    for step in (1, 2, 3):
        ledger.commit(0, step, ledger.want(0, 1, 100)[-1][3], step, 100, True)
        assert ledger.newest == (1, 1, step, 2, True)
    ledger.begin(1, 2, 3, [0, 1, 2], (1, 1, 3, 2, True))
    assert ledger.load(2, 1, 2)[0][0] == "found"


@pytest.mark.parametrize(
    ("given", "step", "size", "words"),
    [
        (0, 8, 10, ""),
        (0, 8, 1 << 40, "has 8192 bytes, not 1099511627776"),
        (0, 8, -1, "has 8192 bytes, not -1"),
        (0, -1, 10, "-1 is not a step"),
        (0, 1 << 60, 10, f"{1 << 60} is not a step"),
        (0, 7, 10, "step 7 is not above step 7, which rank 1 has saved in this round"),
        (0, 6, 10, "step 6 is not above step 7, which rank 1 has saved in this round"),
        (1, 8, 10, "slot 4 was not given to rank 1"),
        (-2, 8, 10, "slot 1 was not given to rank 1"),  # It has what the rank has saved.
        (-1, 8, 10, "slot 2 was not given to rank 1"),  # It is another rank's.
    ],
)
@proves("snapshots.lies-harm-own-rank")
def test_nonsense_is_refused(given: int, step: int, size: int, words: str) -> None:
    ledger = Ledger(1 << 20)
    ledger.begin(1, 1, 2, [0, 1], None)
    for rank in (1, 0):
        ledger.commit(rank, 2, ledger.want(rank, 1, 5000)[-1][3], 7, 10)
    slot = ledger.want(1, 3, 5000)[-1][3]
    answer, *_ = ledger.commit(1, 4, slot + given, step, size)
    assert answer == ("refuse", 1, 4, answer[3]) if words else answer == ("committed", 1, 4)
    assert not words or words in answer[3]


@pytest.mark.parametrize(
    ("size", "words"),
    [(-5, "a slot cannot have -5 bytes"), (0, "a slot cannot have 0 bytes"), (1 << 62, "do not fit")],
)
def test_no_slot_has_such_a_size(size: int, words: str) -> None:
    ledger = Ledger(1 << 20)
    ledger.begin(1, 1, 1, [0], None)
    [(kind, *_, text)] = ledger.want(0, 1, size)
    assert kind == "refuse"
    assert words in text


def test_ranges_of_ranks() -> None:
    assert ranges_of([5, 0, 1, 2, 7, 6]) == [(0, 3), (5, 3)]
