"""From the world to ranks. Pure.

The members of a world are in group-rank order. Walking them in that order, with one running offset for all
workers and one for each role, gives every node a contiguous block of global ranks and one of role ranks:

    group rank   member       global ranks   role ranks
    0            ps x 4       0..3           0..3
    1            trainer x 1  4              0
    2            trainer x 2  5..6           1..2
    3            ps x 5       7..11          4..8

Whoever knows the world computes all ranks alone (`assign_ranks`). Agents that share nothing but a key-value
store exchange them there: each publishes its member, group rank 0 publishes every node's `Assignment`
(`assign_nodes`), and each reads its own and places its workers (`place_workers`). The lower half of this file
is the text of that exchange. What is read there was written by another process, so all of it is checked; what
is wrong is a ValueError that names the key and what was found.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from holdfast.agent.model import Worker

__all__ = [
    "Assignment",
    "Member",
    "assign_nodes",
    "assign_ranks",
    "assigned_ranks_key",
    "decode_assignment",
    "decode_member",
    "encode_assignment",
    "encode_member",
    "identical_world",
    "place_workers",
    "role_info_key",
]


@dataclass(frozen=True, slots=True)
class Member:
    """What a node brings into the world."""

    role: str
    local_world_size: int

    def __post_init__(self) -> None:
        if self.local_world_size < 1:
            raise ValueError(f"a member needs at least 1 worker, not {self.local_world_size}")


@dataclass(frozen=True, slots=True)
class Assignment:
    """A node's place: its first worker's ranks, and how many workers there are, in all and of its role."""

    base_global_rank: int
    world_size: int
    base_role_rank: int
    role_world_size: int

    def __post_init__(self) -> None:
        in_world = 0 <= self.base_global_rank < self.world_size
        in_role = 0 <= self.base_role_rank < self.role_world_size <= self.world_size
        if not (in_world and in_role):
            raise ValueError(f"no world has a place like {self}")


def identical_world(role: str, local_world_size: int, group_world_size: int) -> list[Member]:
    """The world in which every node is like this one, for runs that promise it and so need no exchange."""
    return [Member(role, local_world_size)] * group_world_size


def assign_nodes(members: Sequence[Member]) -> list[Assignment]:
    """Every node's place, in group-rank order."""
    role_sizes = _sizes_by_role(members)
    world_size = role_sizes.total()
    assignments = []
    next_global_rank = 0
    next_role_rank: Counter[str] = Counter()
    for member in members:
        assignments.append(
            Assignment(next_global_rank, world_size, next_role_rank[member.role], role_sizes[member.role])
        )
        next_global_rank += member.local_world_size
        next_role_rank[member.role] += member.local_world_size
    return assignments


def assign_ranks(members: Sequence[Member], group_rank: int) -> list[Worker]:
    """The workers of the node with that group rank, by local rank."""
    if not 0 <= group_rank < len(members):
        raise ValueError(f"group rank {group_rank} is not in a world of {len(members)} members")
    return place_workers(assign_nodes(members)[group_rank], members[group_rank].local_world_size)


def place_workers(assignment: Assignment, local_world_size: int) -> list[Worker]:
    """The workers of a node that has this place and this size, by local rank."""
    a = assignment
    if a.base_global_rank + local_world_size > a.world_size or a.base_role_rank + local_world_size > a.role_world_size:
        raise ValueError(f"{local_world_size} workers do not fit into {assignment}")
    return [
        Worker(
            local_rank=local_rank,
            global_rank=a.base_global_rank + local_rank,
            role_rank=a.base_role_rank + local_rank,
            world_size=a.world_size,
            role_world_size=a.role_world_size,
        )
        for local_rank in range(local_world_size)
    ]


def _sizes_by_role(members: Sequence[Member]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for member in members:
        sizes[member.role] += member.local_world_size
    return sizes


def role_info_key(group_rank: int) -> str:
    """Where the node with that group rank publishes its member."""
    return f"torchelastic/role_info/{group_rank}"


def assigned_ranks_key(group_rank: int) -> str:
    """Where the node with that group rank finds its assignment."""
    return f"torchelastic/assigned_ranks/{group_rank}"


def encode_member(member: Member, group_rank: int) -> bytes:
    fields = {"role": member.role, "rank": group_rank, "local_world_size": member.local_world_size}
    return json.dumps(fields).encode()


def decode_member(data: bytes | str, group_rank: int) -> Member:
    """The member that the node with that group rank published."""
    what = role_info_key(group_rank)
    fields = _decode_json(data, what)
    if not isinstance(fields, dict):
        raise ValueError(f"{what}: expected a JSON object, found {_excerpt(data)}")
    role: Any = fields.get("role")
    rank: Any = fields.get("rank")
    size: Any = fields.get("local_world_size")
    if not isinstance(role, str):
        raise ValueError(f"{what}: role must be text, found {_excerpt(role)}")
    if not _is_int(rank) or rank != group_rank:
        raise ValueError(f"{what}: rank must be {group_rank}, found {_excerpt(rank)}")
    if not _is_int(size) or size < 1:
        raise ValueError(f"{what}: local_world_size must be a number from 1 up, found {_excerpt(size)}")
    return Member(role, size)


def encode_assignment(assignment: Assignment) -> bytes:
    return json.dumps(astuple(assignment)).encode()


def decode_assignment(data: bytes | str, group_rank: int) -> Assignment:
    """The place that group rank 0 published for the node with that group rank."""
    what = assigned_ranks_key(group_rank)
    numbers = _decode_json(data, what)
    if not isinstance(numbers, list) or len(numbers) != 4 or not all(map(_is_int, numbers)):
        raise ValueError(f"{what}: expected a JSON list of 4 whole numbers, found {_excerpt(data)}")
    try:
        return Assignment(*numbers)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _decode_json(data: bytes | str, what: str) -> Any:
    try:
        return json.loads(data)
    # Deep nesting ends in a RecursionError; everything else that is not JSON or not UTF-8 is a ValueError.
    except (ValueError, RecursionError):
        raise ValueError(f"{what}: expected JSON, found {_excerpt(data)}") from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
