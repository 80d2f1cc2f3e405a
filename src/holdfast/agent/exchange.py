"""How agents that share only a key-value store agree on ranks: nodes publish role and size, group rank 0 publishes
every node's `Assignment`. The values come from other processes, so they are checked; a ValueError names the key.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from holdfast.agent import ranks
from holdfast.agent.model import Worker, WorkerSpec

ROLE_INFO = "torchelastic/role_info/{}"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/{}"

T = TypeVar("T")


class RoleInfo(msgspec.Struct):
    role: str
    rank: int
    local_world_size: Annotated[int, msgspec.Meta(ge=1)]


def exchange_ranks(store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
    """The workers of this node, by local rank."""
    mine = RoleInfo(spec.role, group_rank, spec.local_world_size)
    store.set(ROLE_INFO.format(group_rank), msgspec.json.encode(mine))
    if group_rank == 0:
        infos, answers = ([key.format(i) for i in range(group_world_size)] for key in (ROLE_INFO, ASSIGNED_RANKS))
        members = [_member(data, rank) for rank, data in enumerate(store.multi_get(infos))]
        store.multi_set(answers, [msgspec.json.encode(each) for each in ranks.assign_nodes(members)])
    key = ASSIGNED_RANKS.format(group_rank)
    assignment = _decode(store.get(key), ranks.Assignment, key)
    try:
        return ranks.place_workers(assignment, spec.local_world_size)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _member(data: bytes | str, group_rank: int) -> ranks.Member:
    key = ROLE_INFO.format(group_rank)
    info = _decode(data, RoleInfo, key)
    if info.rank != group_rank:
        raise ValueError(f"{key}: rank must be {group_rank}, found {info.rank}")
    return ranks.Member(info.role, info.local_world_size)


def _decode(data: bytes | str, kind: type[T], key: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key}: {error}, found {data!r:.100}") from None
