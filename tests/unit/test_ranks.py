"""Ranks: the worked example, and the text of the exchange with every kind of junk in it."""

from __future__ import annotations

import json

import msgspec
import pytest

from holdfast.agent import exchange, ranks
from holdfast.agent.model import Worker
from holdfast.agent.ranks import Assignment, Member

WORLD = [
    Member("ps", 4),
    Member("trainer", 1),
    Member("trainer", 2),
    Member("trainer", 3),
    Member("ps", 5),
]

ASSIGNMENTS = [
    Assignment(0, 15, 0, 9),
    Assignment(4, 15, 0, 6),
    Assignment(5, 15, 1, 6),
    Assignment(7, 15, 3, 6),
    Assignment(10, 15, 4, 9),
]


def facts(workers: list[Worker]) -> list[tuple[int, int, int, int, int]]:
    return [(w.local_rank, w.global_rank, w.role_rank, w.world_size, w.role_world_size) for w in workers]


def test_the_example_with_two_roles() -> None:
    assert ranks.assign_nodes(WORLD) == ASSIGNMENTS
    assert facts(ranks.assign_ranks(WORLD, 3)) == [(0, 7, 3, 15, 6), (1, 8, 4, 15, 6), (2, 9, 5, 15, 6)]
    assert [(worker.global_rank, worker.role_rank) for worker in ranks.assign_ranks(WORLD, 4)] == [
        (10, 4),
        (11, 5),
        (12, 6),
        (13, 7),
        (14, 8),
    ]


@pytest.mark.parametrize("group_rank", [-1, 5])
def test_a_group_rank_outside_the_world_is_refused(group_rank: int) -> None:
    with pytest.raises(ValueError, match=f"group rank {group_rank} is not in a world of 5 members"):
        ranks.assign_ranks(WORLD, group_rank)


@pytest.mark.parametrize("size", [6, 100])
def test_workers_that_do_not_fit_their_place_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} workers do not fit"):
        ranks.place_workers(Assignment(10, 15, 4, 9), size)
    with pytest.raises(ValueError, match="do not fit"):
        ranks.place_workers(Assignment(0, 15, 4, 5), 2)


# --- the exchange


def test_keys_and_texts_are_those_that_users_know() -> None:
    assert exchange.role_info_key(3) == "torchelastic/role_info/3"
    assert exchange.assigned_ranks_key(3) == "torchelastic/assigned_ranks/3"
    assert json.loads(exchange.encode_member(Member("ps", 4), 3)) == {
        "role": "ps",
        "rank": 3,
        "local_world_size": 4,
    }
    assert json.loads(msgspec.json.encode(Assignment(10, 15, 4, 9))) == [10, 15, 4, 9]


def test_the_exchange_gives_what_computing_alone_gives() -> None:
    published = [exchange.encode_member(member, rank) for rank, member in enumerate(WORLD)]
    world = [exchange.decode_member(data, rank) for rank, data in enumerate(published)]
    answers = [msgspec.json.encode(assignment) for assignment in ranks.assign_nodes(world)]
    for rank, member in enumerate(WORLD):
        placed = exchange.decode_workers(answers[rank], rank, member.local_world_size)
        assert facts(placed) == facts(ranks.assign_ranks(WORLD, rank))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2], "Expected `object`, got `array`, found b'[1, 2]'"),
        (None, "Expected `object`, got `null`, found b'null'"),
        ({}, "missing required field `role`, found b'{}'"),
        ({"role": 3, "rank": 7, "local_world_size": 1}, "Expected `str`, got `int` - at `$.role`, found"),
        ({"role": "r", "local_world_size": 1}, "missing required field `rank`"),
        ({"role": "r", "rank": 6, "local_world_size": 1}, "rank must be 7, found 6"),
        ({"role": "r", "rank": "7", "local_world_size": 1}, "Expected `int`, got `str` - at `$.rank`"),
        ({"role": "r", "rank": 7}, "missing required field `local_world_size`"),
        ({"role": "r", "rank": 7, "local_world_size": 0}, "Expected `int` >= 1 - at `$.local_world_size`"),
        ({"role": "r", "rank": 7, "local_world_size": 1.5}, "Expected `int`, got `float` - at `$.local_world_size`"),
        ({"role": "r", "rank": 7, "local_world_size": True}, "Expected `int`, got `bool` - at `$.local_world_size`"),
    ],
)
def test_a_wrong_member_is_refused_with_the_field_and_the_value(value: object, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        exchange.decode_member(json.dumps(value).encode(), 7)
    assert str(caught.value).startswith("torchelastic/role_info/7: ")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({}, "Expected `array`, got `object`"),
        ([], "Expected `array` of length 4"),
        ([0, 1, 0], "Expected `array` of length 4, found b'[0, 1, 0]'"),
        ([0, 1, 0, 1, 0], "Expected `array` of length 4"),
        ([0, 1, 0, "1"], "Expected `int`, got `str` - at `$[3]`"),
        ([0, 1, 0, True], "Expected `int`, got `bool` - at `$[3]`"),
        ([-1, 2, 0, 2], "base_global_rank=-1"),
        ([2, 2, 0, 2], "base_global_rank=2"),
        ([0, 2, -1, 2], "base_role_rank=-1"),
        ([0, 2, 2, 2], "base_role_rank=2"),
        ([0, 2, 0, 3], "role_world_size=3"),
        ([0, 0, 0, 0], "world_size=0"),
    ],
)
def test_a_wrong_assignment_is_refused_with_the_value(value: object, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        exchange.decode_workers(json.dumps(value).encode(), 7, 1)
    assert str(caught.value).startswith("torchelastic/assigned_ranks/7: ")
    assert text in str(caught.value)
