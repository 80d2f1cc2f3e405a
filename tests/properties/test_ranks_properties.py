"""Ranks in any world: dense, unique, contiguous, and the same whoever computes them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.agent import exchange, ranks
from holdfast.agent.model import Worker
from holdfast.agent.ranks import Member

members = st.builds(Member, role=st.sampled_from(["ps", "trainer", "", "ü"]), local_world_size=st.integers(1, 9))
worlds = st.lists(members, min_size=1, max_size=12)

EXAMPLE = [Member("ps", 4), Member("trainer", 1), Member("trainer", 2), Member("trainer", 3), Member("ps", 5)]


def nodes_of(world: list[Member]) -> list[list[Worker]]:
    """Every node's own view of its workers, each computed apart from the others."""
    return [ranks.assign_ranks(world, group_rank) for group_rank in range(len(world))]


def facts(workers: list[Worker]) -> list[tuple[int, int, int, int, int]]:
    return [(w.local_rank, w.global_rank, w.role_rank, w.world_size, w.role_world_size) for w in workers]


@given(worlds)
@example(EXAMPLE)
def test_global_ranks_are_dense_unique_and_in_group_order(world: list[Member]) -> None:
    global_ranks = [worker.global_rank for node in nodes_of(world) for worker in node]
    assert global_ranks == list(range(sum(member.local_world_size for member in world)))


@given(worlds)
@example(EXAMPLE)
def test_role_ranks_are_dense_unique_and_in_group_order_in_each_role(world: list[Member]) -> None:
    by_role: dict[str, list[int]] = defaultdict(list)
    for member, node in zip(world, nodes_of(world), strict=True):
        by_role[member.role] += [worker.role_rank for worker in node]
    for role, role_ranks in by_role.items():
        size = sum(member.local_world_size for member in world if member.role == role)
        assert role_ranks == list(range(size))


@given(worlds)
@example(EXAMPLE)
def test_all_nodes_agree_on_the_sizes(world: list[Member]) -> None:
    world_size = sum(member.local_world_size for member in world)
    for member, node in zip(world, nodes_of(world), strict=True):
        role_size = sum(other.local_world_size for other in world if other.role == member.role)
        assert [worker.local_rank for worker in node] == list(range(member.local_world_size))
        assert {worker.world_size for worker in node} == {world_size}
        assert {worker.role_world_size for worker in node} == {role_size}


@given(worlds, st.data())
def test_a_later_member_never_moves_an_earlier_one(world: list[Member], data: st.DataObject) -> None:
    group_rank = data.draw(st.integers(0, len(world) - 1))
    before = ranks.assign_ranks(world[: group_rank + 1], group_rank)
    after = ranks.assign_ranks(world, group_rank)
    assert [(w.global_rank, w.role_rank) for w in before] == [(w.global_rank, w.role_rank) for w in after]


@given(worlds)
def test_the_exchange_through_a_store_gives_the_same_ranks(world: list[Member]) -> None:
    store = {exchange.role_info_key(rank): exchange.encode_member(member, rank) for rank, member in enumerate(world)}
    heard = [exchange.decode_member(store[exchange.role_info_key(rank)], rank) for rank in range(len(world))]
    assert heard == world
    for rank, assignment in enumerate(ranks.assign_nodes(heard)):
        store[exchange.assigned_ranks_key(rank)] = msgspec.json.encode(assignment)
    for rank, member in enumerate(world):
        placed = exchange.decode_workers(store[exchange.assigned_ranks_key(rank)], rank, member.local_world_size)
        assert facts(placed) == facts(ranks.assign_ranks(world, rank))


@given(st.text(), st.integers(1, 9), st.integers(1, 20), st.data())
def test_an_identical_world_needs_no_walk(role: str, size: int, nodes: int, data: st.DataObject) -> None:
    group_rank = data.draw(st.integers(0, nodes - 1))
    for worker in ranks.assign_ranks([Member(role, size)] * nodes, group_rank):
        assert worker.global_rank == worker.role_rank == group_rank * size + worker.local_rank
        assert worker.world_size == worker.role_world_size == nodes * size


@given(st.text(), st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_member_survives_its_text(role: str, size: int, group_rank: int) -> None:
    member = Member(role, size)
    assert exchange.decode_member(exchange.encode_member(member, group_rank), group_rank) == member


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=8,
)
member_like = st.fixed_dictionaries(
    {}, optional={"role": json_values, "rank": json_values, "local_world_size": json_values}
)


def outcome(decode: Callable[[bytes | str, int], object], data: bytes | str) -> object:
    try:
        return decode(data, 0)
    except ValueError as error:
        return str(error)


@given(st.binary() | st.text() | (json_values | member_like).map(json.dumps))
def test_junk_in_the_store_is_a_value_error_that_names_the_key(data: bytes | str) -> None:
    for decode, kind in (
        (exchange.decode_member, Member),
        (partial(exchange.decode_workers, local_world_size=1), list),
    ):
        result = outcome(decode, data)
        assert isinstance(result, kind) or str(result).startswith("torchelastic/")


def test_the_example() -> None:
    nodes = nodes_of(EXAMPLE)
    assert {worker.world_size for node in nodes for worker in node} == {15}
    assert {worker.role_world_size for worker in nodes[0]} == {9}
    assert {worker.role_world_size for worker in nodes[1]} == {6}
    assert [worker.global_rank for worker in nodes[4]] == [10, 11, 12, 13, 14]
    assert [worker.role_rank for worker in nodes[4]] == [4, 5, 6, 7, 8]
