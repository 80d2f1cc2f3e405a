"""Whatever nodes hold: the choice is that of a model which tries every rank of every snapshot."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.rendezvous.membership.model import Held, SnapshotId
from holdfast.rendezvous.membership.snapshots import Member, choose
from tests.promises import proves
from tests.snapshot_model import newest_loadable, shortage

IDS = st.builds(SnapshotId, st.integers(0, 1), st.integers(0, 1), st.integers(1, 2), st.integers(1, 5), st.booleans())


@st.composite
def worlds(draw: st.DrawFn) -> list[Member]:
    known = draw(st.lists(IDS, min_size=1, max_size=3, unique=True))
    members = []
    for number in range(draw(st.integers(1, 4))):
        held = []
        for snapshot in draw(st.lists(st.sampled_from(known), max_size=4)):
            first = draw(st.integers(0, snapshot.world_size - 1))
            held.append(Held(snapshot, ((first, draw(st.integers(1, snapshot.world_size - first))),)))
        workers, port = draw(st.integers(1, 3)), draw(st.sampled_from((0, 1, 1)))
        members.append(Member(workers, tuple(held), f"n{number}", port))
    return members


@proves("nodes.newest-snapshot-all-can-load")
@settings(max_examples=300)
@given(worlds())
def test_the_choice_is_the_newest_that_all_can_load(members: list[Member]) -> None:
    chosen, fetching = choose(members)
    expected = newest_loadable(members)
    assert (chosen.snapshot if chosen else None) == expected
    assert (chosen is None) == (not any(member.held for member in members))
    if chosen is None or chosen.snapshot is None:
        assert chosen is None or chosen.problem
        return
    for rank in range(len(members)):
        mine = fetching.get(rank, chosen)
        assert (mine.snapshot, mine.problem) == (expected, "")
        assert shortage(members, rank, chosen.snapshot, mine.sources) == ""
