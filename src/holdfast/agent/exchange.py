"""How agents that share only a key-value store agree on ranks: nodes publish role and size, group rank 0 publishes
every node's `Assignment`. The values come from other processes, so they are checked; a ValueError names the key.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from holdfast.agent import ranks
from holdfast.agent.model import Worker, WorkerSpec

T = TypeVar("T")


class _RoleInfo(msgspec.Struct):
    role: str
    rank: int
    local_world_size: Annotated[int, msgspec.Meta(ge=1)]


def exchange_ranks(store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
    """The workers of this node, by local rank."""
    mine = ranks.Member(spec.role, spec.local_world_size)
    store.set(role_info_key(group_rank), encode_member(mine, group_rank))
    if group_rank == 0:
        published = store.multi_get([role_info_key(i) for i in range(group_world_size)])
        assignments = ranks.assign_nodes([decode_member(data, i) for i, data in enumerate(published)])
        keys = [assigned_ranks_key(i) for i in range(group_world_size)]
        store.multi_set(keys, [msgspec.json.encode(each) for each in assignments])
    return decode_workers(store.get(assigned_ranks_key(group_rank)), group_rank, spec.local_world_size)


def role_info_key(group_rank: int) -> str:
    """Where the node with that group rank publishes its member."""
    return f"torchelastic/role_info/{group_rank}"


def assigned_ranks_key(group_rank: int) -> str:
    """Where the node with that group rank finds its assignment."""
    return f"torchelastic/assigned_ranks/{group_rank}"


def encode_member(member: ranks.Member, group_rank: int) -> bytes:
    return msgspec.json.encode(_RoleInfo(member.role, group_rank, member.local_world_size))


def decode_member(data: bytes | str, group_rank: int) -> ranks.Member:
    key = role_info_key(group_rank)
    info = _decode(data, _RoleInfo, key)
    if info.rank != group_rank:
        raise ValueError(f"{key}: rank must be {group_rank}, found {info.rank}")
    return ranks.Member(info.role, info.local_world_size)


def decode_workers(data: bytes | str, group_rank: int, local_world_size: int) -> list[Worker]:
    """The workers of a node of that size, from its assignment."""
    key = assigned_ranks_key(group_rank)
    assignment = _decode(data, ranks.Assignment, key)
    try:
        return ranks.place_workers(assignment, local_world_size)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _decode(data: bytes | str, kind: type[T], key: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key}: {error}, found {data!r:.100}") from None
