"""Which snapshot the ranks of a round load, and where each member gets what it lacks: a row for each case."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from holdfast.rendezvous.membership import snapshots
from holdfast.rendezvous.membership.frames import DOWNWARD, Frames, encode
from holdfast.rendezvous.membership.model import (
    MAX_HELD,
    Chosen,
    Held,
    NodeFacts,
    Sealed,
    SnapshotId,
    SnapshotPlan,
    Source,
    World,
)
from holdfast.rendezvous.membership.snapshots import Member, choose
from tests.promises import promise, proves

OLD, NEW = SnapshotId(1, 3, 110, 4), SnapshotId(1, 3, 120, 4)
SAME, LATER_ROUND = SnapshotId(1, 3, 120, 4, is_replicated=True), SnapshotId(1, 4, 7, 4)
DISK = SnapshotId(0, 0, 900, 4)


def member(name: str, *held: tuple[SnapshotId, int, int], workers: int = 2, port: int = 1) -> Member:
    """Of each snapshot, the first rank and the number of ranks."""
    return Member(workers, tuple(Held(snapshot, ((first, count),)) for snapshot, first, count in held), name, port)


def source(name: str, first: int, count: int) -> Source:
    return Source((first, count), name, 1)


Case = tuple[list[Member], SnapshotId | str | None, dict[int, tuple[Source, ...]]]
CASES: dict[str, Case] = {
    "nothing is held": ([member("a"), member("b")], None, {}),
    "each has its own": ([member("a", (NEW, 0, 2)), member("b", (NEW, 2, 2))], NEW, {}),
    "one is a step ahead": (
        [member("a", (OLD, 0, 2), (NEW, 0, 2)), member("b", (OLD, 2, 2), (NEW, 2, 1))], OLD, {},
    ),
    "a later round is newer, whatever its step": (
        [member("a", (NEW, 0, 2), (LATER_ROUND, 0, 2)), member("b", (NEW, 2, 2), (LATER_ROUND, 2, 2))], LATER_ROUND, {},
    ),
    "the disk is the oldest": ([member("a", (DISK, 0, 4), (OLD, 0, 4)), member("b", (DISK, 0, 4))], OLD, {
        1: (source("a", 2, 2),),
    }),
    "they have changed places": ([member("b", (NEW, 2, 2)), member("a", (NEW, 0, 2))], NEW, {
        0: (source("a", 0, 2),), 1: (source("b", 2, 2),),
    }),
    "a standby in the place of a node whose copy is elsewhere": (
        [member("a", (NEW, 0, 2), (NEW, 2, 2)), member("c")], NEW, {1: (source("a", 2, 2),)},
    ),
    "from two nodes": ([member("a", (NEW, 0, 3)), member("c", workers=1), member("d", (NEW, 3, 1), workers=1)], NEW, {
        1: (source("a", 2, 1),),
    }),
    "a node is lost": ([member("a", (NEW, 0, 2)), member("c")], "no node has ranks 2 to 3 of step 120 (round 3)", {}),
    "a rank of the disk is missing": (
        [member("a", (DISK, 0, 3)), member("c")], "no node has rank 3 of step 900 (from disk)", {},
    ),
    "the newest that is not there is named": (
        [member("a", (OLD, 0, 1), (NEW, 0, 2)), member("c")], "no node has ranks 2 to 3 of step 120 (round 3)", {},
    ),
    "replicated, from any": ([member("a", (SAME, 0, 2)), member("c"), member("d", (SAME, 2, 2)), member("e")], SAME, {
        1: (source("d", 2, 1),), 3: (source("d", 2, 1),),
    }),
    "replicated, a world of another size": ([member("a", (SAME, 0, 1), workers=9)], SAME, {}),
    "another size, a node has all": ([member("a", (NEW, 0, 4), workers=3)], NEW, {}),
    "another size, all from all": ([member("a", (NEW, 0, 2)), member("b", (NEW, 2, 2), workers=1)], NEW, {
        0: (source("b", 2, 2),), 1: (source("a", 0, 2),),
    }),
    "no port, own ranks": ([member("a", (NEW, 0, 2), port=0), member("b", (NEW, 2, 2), port=0)], NEW, {}),
    "no port, a shared disk": (
        [member("a", (DISK, 0, 4), port=0, workers=1), member("b", (DISK, 0, 4), port=0, workers=1)], DISK, {},
    ),
    "no port, and they have changed places": (
        [member("b", (NEW, 2, 2), port=0), member("a", (NEW, 0, 2), port=0)], "ranks 0 to 3 of step 120 (round 3) "
        "would have to move, and there is no token, so ranks cannot move between nodes", {},
    ),
    "no port, replicated, and one has nothing": (
        [member("b", (SAME, 2, 2), port=0), member("a")], "ranks 0 to 3 of step 120 (round 3) would have to move, and "
        "there is no token, so ranks cannot move between nodes", {},
    ),
    "no port, but the older one need not move": (
        [member("a", (OLD, 0, 2), (NEW, 2, 2), port=0), member("b", (OLD, 2, 2), (NEW, 0, 2), port=0)], OLD, {},
    ),
}  # fmt: skip


@promise("""nodes.newest-snapshot-all-can-load: All ranks of a round load the same snapshot: the newest of which the
    nodes have every rank, or any rank if it is replicated. Ranks that have moved are fetched from the nodes that have
    them. If there are snapshots and none can be loaded, the nodes are told why.""")
@pytest.mark.parametrize("name", CASES)
def test_the_choice(name: str) -> None:
    members, expected, fetched = CASES[name]
    chosen, fetching = choose(members)
    assert {rank: each.sources for rank, each in fetching.items()} == fetched
    assert {each.snapshot for each in fetching.values()} <= {expected}
    if chosen is None or chosen.snapshot is None:
        assert (chosen.problem if chosen else None) == expected
    else:
        assert (chosen.snapshot, chosen.problem, chosen.sources) == (expected, "", ())
        assert chosen.needs_reshard == name.startswith("another size") or name == "no port, a shared disk"


def test_more_sources_than_a_node_can_have() -> None:
    many = [Member(1, (Held(SnapshotId(1, 1, 5, 1500), ((rank, 1),)),), str(rank), 1) for rank in range(1500)]
    (chosen, fetching) = choose(many[1:] + [Member(9, many[0].held, "0", 1)])
    assert chosen == Chosen(None, problem="step 5 (round 1) is on more nodes than one node can fetch from (1024)")
    assert not fetching


@proves("nodes.newest-snapshot-all-can-load")
def test_a_node_that_decides_alone() -> None:
    held = (Held(NEW, ((0, 4),)),)
    assert snapshots.choose_alone(4, held, 1) == Chosen(NEW)
    assert snapshots.choose_alone(4, (), 1) is None
    assert snapshots.choose_alone(4, (), 2) is None
    alone = snapshots.choose_alone(4, held, 2)
    assert alone is not None
    assert (alone.snapshot, "do not know each other's" in alone.problem) == (None, True)


def test_of_very_much_the_newest_is_said() -> None:
    many = [Held(SnapshotId(1, 1, step, 500), tuple((rank, 1) for rank in range(200))) for step in range(100)]
    said = snapshots.limited(many)
    assert [each.snapshot.step for each in said] == [*range(99, 99 - MAX_HELD, -1)]
    assert {len(each.ranks) for each in said} == {MAX_HELD}


MANY, WORKERS = 4000, 8


def _none(rank: int) -> tuple[Held, ...]:
    return ()


def _own(rank: int) -> tuple[Held, ...]:
    steps = [SnapshotId(1, 9, step, MANY * WORKERS) for step in (5, 6)]
    return tuple(Held(each, ((rank * WORKERS, WORKERS - (each.step == 6 and rank == 7)),)) for each in steps)


def _moved(rank: int) -> tuple[Held, ...]:
    return _own((rank * 7) % MANY)


def _alone(rank: int) -> tuple[Held, ...]:
    return tuple(Held(SnapshotId(1, rank, step, MANY), ((rank, 1),)) for step in range(4))


@promise("nodes.snapshot-of-thousands: The choice of a snapshot for 4,000 nodes costs time and bytes in proportion.")
@pytest.mark.parametrize(("held", "step"), [(_none, None), (_own, 5), (_moved, 5), (_alone, None)])
def test_very_many_members(held: Callable[[int], tuple[Held, ...]], step: int | None) -> None:
    """Of this thread's time: next to nothing, and far more than 2 s if each member costs as much as there are."""
    members = [Member(WORKERS, held(rank), f"host{rank}", 1) for rank in range(MANY)]
    began = time.thread_time()
    chosen, fetching = choose(members)
    facts = [NodeFacts(str(rank), local_world_size=WORKERS) for rank in range(MANY)]
    world = World.of(1, 10, facts, plan=SnapshotPlan(chosen, fetching))
    sealed = [Sealed(key, world.place_of(key)) for key in world.keys]
    frames = [encode(each) for each in sealed]
    assert time.thread_time() - began < 2.0
    snapshot = chosen.snapshot if chosen is not None else None
    assert (snapshot.step if snapshot else None) == step
    assert max(map(len, frames)) < 700
    assert len(fetching) == (MANY - 2 if held is _moved else 0)
    reader = Frames()
    reader.expect(DOWNWARD)
    reader.feed(frames[-1])
    assert reader.next() == sealed[-1]
