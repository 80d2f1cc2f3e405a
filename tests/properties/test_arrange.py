"""Whoever comes and goes: the order of a world keeps its promises."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.rendezvous.membership.formation import arrange
from holdfast.rendezvous.membership.model import NodeFacts, World
from tests.promises import promise, proves

NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True)
MAX_NODES = st.integers(1, 8)
Round = tuple[dict[str, int], list[NodeFacts], int]


@st.composite
def rounds(draw: st.DrawFn, with_requests: bool = True) -> Round:
    """The ranks of the round before, those who are there now, and how many may be. Nobody shares a requested rank."""
    max_nodes = draw(MAX_NODES)
    previous = {NodeFacts(name).key: rank for rank, name in enumerate(draw(NAMES)[:max_nodes])}
    nodes = [NodeFacts(name, draw(st.integers(0, 1))) for name in draw(NAMES)]
    ranks: list[int | None] = [None] * len(nodes)
    if with_requests:
        asked = draw(st.permutations(range(8)))
        ranks = [asked[at] if draw(st.booleans()) else None for at in range(len(nodes))]
    return previous, [replace(node, requested_rank=rank) for node, rank in zip(nodes, ranks, strict=True)], max_nodes


@given(rounds())
def test_members_are_unique_candidates_and_as_many_as_may_be(case: Round) -> None:
    previous, candidates, max_nodes = case
    members = arrange(previous, candidates, max_nodes)
    assert len(members) == min(max_nodes, len(candidates))
    assert len({member.key for member in members}) == len(members)
    assert set(members) <= set(candidates)
    assert members == arrange(previous, iter(candidates), max_nodes), "the same input gives the same world"


@proves("nodes.world-survivors-keep-order")
@given(rounds())
def test_no_survivor_makes_room_for_a_newcomer(case: Round) -> None:
    previous, candidates, max_nodes = case
    members = arrange(previous, candidates, max_nodes)
    left_out = [node for node in candidates if node not in members]
    assert not [node for node in left_out if node.key in previous]
    newcomers = [node for node in candidates if node.key not in previous]
    admitted = [node for node in newcomers if node in members]
    assert admitted == newcomers[: len(admitted)], "who has waited longest goes first"


@promise("""nodes.world-survivors-keep-order: In every world survivors keep their order and never make room for
    newcomers, and nodes get the ranks that they requested where possible.""")
@given(rounds(with_requests=False))
def test_survivors_keep_their_order_and_newcomers_theirs(case: Round) -> None:
    previous, candidates, max_nodes = case
    keys = [member.key for member in arrange(previous, candidates, max_nodes)]
    survivors = [key for key in keys if key in previous]
    assert survivors == [key for key in previous if key in keys]
    newcomers = [key for key in keys if key not in previous]
    assert newcomers == [node.key for node in candidates if node.key in newcomers]
    if len(keys) >= len(previous):
        assert [keys.index(key) for key in survivors] == [previous[key] for key in survivors], (
            "when every hole is filled nobody changes its rank"
        )


@proves("nodes.world-survivors-keep-order")
@given(rounds())
def test_requested_ranks_are_honoured(case: Round) -> None:
    members = arrange(*case)
    for rank, member in enumerate(members):
        asked = member.requested_rank
        if asked is not None and asked < len(members):
            assert rank == asked
    free = [member.key for member in members if member.requested_rank is None and member.key in case[0]]
    assert free == [key for key in case[0] if key in free], "the others keep their order around them"


@given(st.lists(st.tuples(st.sampled_from("rs"), st.integers(1, 3)), min_size=1, max_size=8))
def test_a_place_tells_the_shape_of_every_member(shapes: list[tuple[str, int]]) -> None:
    members = [NodeFacts(str(at), role=role, local_world_size=size) for at, (role, size) in enumerate(shapes)]
    world = World.of(1, 1, members)
    for rank, member in enumerate(members):
        place = world.place_of(member.key)
        assert (place.rank, place.shape_of_each()) == (rank, shapes)
