"""Ranks in any world: dense, unique, contiguous, and the same whoever computes them."""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import timedelta

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.agent import exchange, ranks
from holdfast.agent.model import Worker, WorkerSpec
from holdfast.agent.ranks import Member
from holdfast.rendezvous.store import InProcessStore
from tests.promises import promise, proves

members = st.builds(Member, role=st.sampled_from(["ps", "trainer", "", "ü"]), local_world_size=st.integers(1, 9))
worlds = st.lists(members, min_size=1, max_size=12)

EXAMPLE = [Member("ps", 4), Member("trainer", 1), Member("trainer", 2), Member("trainer", 3), Member("ps", 5)]


def nodes_of(world: list[Member]) -> list[list[Worker]]:
    """Every node's own view of its workers, each computed apart from the others."""
    return [ranks.assign_ranks(world, group_rank) for group_rank in range(len(world))]


def facts(workers: list[Worker]) -> list[tuple[int, int, int, int, int]]:
    return [(w.local_rank, w.global_rank, w.role_rank, w.world_size, w.role_world_size) for w in workers]


@promise("""ranks.global-dense-unique-order: Global ranks are dense, unique and in the order of the nodes. So are role
    ranks within each role, whatever the sizes of the nodes.""")
@given(worlds)
@example(EXAMPLE)
def test_global_ranks_are_dense_unique_and_in_group_order(world: list[Member]) -> None:
    global_ranks = [worker.global_rank for node in nodes_of(world) for worker in node]
    assert global_ranks == list(range(sum(member.local_world_size for member in world)))


@proves("ranks.global-dense-unique-order")
@given(worlds)
@example(EXAMPLE)
def test_role_ranks_are_dense_unique_and_in_group_order_in_each_role(world: list[Member]) -> None:
    by_role: dict[str, list[int]] = defaultdict(list)
    for member, node in zip(world, nodes_of(world), strict=True):
        by_role[member.role] += [worker.role_rank for worker in node]
    for role, role_ranks in by_role.items():
        size = sum(member.local_world_size for member in world if member.role == role)
        assert role_ranks == list(range(size))


@promise("ranks.nodes-compute-sizes: All nodes compute the same sizes.")
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
    store = InProcessStore(timedelta(seconds=5))
    for rank, member in enumerate(world):
        info = exchange.RoleInfo(member.role, rank, member.local_world_size)
        store.set(exchange.ROLE_INFO.format(rank), msgspec.json.encode(info))
    for rank, member in enumerate(world):
        spec = WorkerSpec(member.role, member.local_world_size, None, entrypoint="true")
        assert facts(exchange.exchange_ranks(store, rank, len(world), spec)) == facts(ranks.assign_ranks(world, rank))


@given(st.text(), st.integers(1, 9), st.integers(1, 20), st.data())
def test_an_identical_world_needs_no_walk(role: str, size: int, nodes: int, data: st.DataObject) -> None:
    group_rank = data.draw(st.integers(0, nodes - 1))
    for worker in ranks.assign_ranks([Member(role, size)] * nodes, group_rank):
        assert worker.global_rank == worker.role_rank == group_rank * size + worker.local_rank
        assert worker.world_size == worker.role_world_size == nodes * size


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=8,
)
member_like = st.fixed_dictionaries(
    {}, optional={"role": json_values, "rank": json_values, "local_world_size": json_values}
)


@given(st.sampled_from([0, 1]), st.binary() | st.text() | (json_values | member_like).map(json.dumps))
def test_junk_in_the_store_is_a_value_error_that_names_the_key(group_rank: int, data: bytes | str) -> None:
    """Group rank 0 reads what the other node has published, and group rank 1 the answer."""
    store = InProcessStore(timedelta(seconds=5))
    for key in (exchange.ROLE_INFO, exchange.ASSIGNED_RANKS):
        store.set(key.format(1), data.encode(errors="surrogatepass") if isinstance(data, str) else data)
    error = ""
    try:
        exchange.exchange_ranks(store, group_rank, 2, WorkerSpec("r", 1, None, entrypoint="true"))
    except ValueError as raised:
        error = str(raised)
    assert not error or error.startswith("torchelastic/")


def test_the_example() -> None:
    nodes = nodes_of(EXAMPLE)
    assert {worker.world_size for node in nodes for worker in node} == {15}
    assert {worker.role_world_size for worker in nodes[0]} == {9}
    assert {worker.role_world_size for worker in nodes[1]} == {6}
    assert [worker.global_rank for worker in nodes[4]] == [10, 11, 12, 13, 14]
    assert [worker.role_rank for worker in nodes[4]] == [4, 5, 6, 7, 8]
