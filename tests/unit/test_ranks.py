"""Ranks: the worked example, and the text of the exchange with every kind of junk in it."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from holdfast.agent import exchange, ranks
from holdfast.agent.model import Worker, WorkerSpec
from holdfast.agent.ranks import Assignment, Member
from holdfast.rendezvous.store import InProcessStore

WORLD = [Member("ps", 4), Member("trainer", 1), Member("trainer", 2), Member("trainer", 3), Member("ps", 5)]

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

KNOWN = '{"role": "r", "rank": 1, "local_world_size": 1}'


class Published(InProcessStore):
    """A store in which the other nodes have published these texts already."""

    def __init__(self, values: dict[str, str]) -> None:
        super().__init__(timedelta(seconds=5))
        for key, value in values.items():
            self.set(key, value.encode())


def exchanged(group_rank: int, **values: str) -> list[Worker]:
    store = Published({f"torchelastic/{key}": value for key, value in values.items()})
    return exchange.exchange_ranks(store, group_rank, 2, WorkerSpec("r", 1, None, entrypoint="true"))


def test_keys_and_texts_are_those_that_users_know() -> None:
    store = Published({"torchelastic/role_info/1": KNOWN})
    exchange.exchange_ranks(store, 0, 2, WorkerSpec("ps", 4, None, entrypoint="true"))
    assert json.loads(store.get("torchelastic/role_info/0")) == {"role": "ps", "rank": 0, "local_world_size": 4}
    assert json.loads(store.get("torchelastic/assigned_ranks/1")) == [4, 5, 0, 1]


@pytest.mark.parametrize(
    ("published", "text"),
    [
        ("7" * 10, "Expected `object`, got `int`, found b'7777777777'"),
        (KNOWN.replace('"r"', "3"), "Expected `str`, got `int` - at `$.role`, found"),
        (KNOWN.replace(": 1,", ": 6,"), "rank must be 1, found 6"),
        (KNOWN.replace(": 1}", ": 0}"), "Expected `int` >= 1 - at `$.local_world_size`"),
    ],
)
def test_a_wrong_member_is_refused_with_the_field_and_the_value(published: str, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        exchanged(0, **{"role_info/1": published})
    assert str(caught.value).startswith(f"torchelastic/role_info/1: {text}")


@pytest.mark.parametrize(
    ("published", "text"),
    [
        ("[0, 1, 0]", "Expected `array` of length 4, found b'[0, 1, 0]'"),
        ('[0, 1, 0, "1"]', "Expected `int`, got `str` - at `$[3]`"),
        ("[-1, 2, 0, 2]", "1 workers do not fit into Assignment(base_global_rank=-1"),
        ("[0, 0, 0, 0]", "1 workers do not fit into Assignment(base_global_rank=0, world_size=0"),
    ],
)
def test_a_wrong_assignment_is_refused_with_the_value(published: str, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        exchanged(1, **{"assigned_ranks/1": published})
    assert str(caught.value).startswith(f"torchelastic/assigned_ranks/1: {text}")
