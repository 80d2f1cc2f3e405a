"""From the world to ranks. Pure.

The members of a world are in group-rank order. Walking them in that order, with one running offset for all
workers and one for each role, gives every node a contiguous block of global ranks and one of role ranks:

    group rank   member       global ranks   role ranks
    0            ps x 4       0..3           0..3
    1            trainer x 1  4              0
    2            trainer x 2  5..6           1..2
    3            ps x 5       7..11          4..8

A node that knows the world computes all ranks alone (`assign_ranks`); `exchange` is for agents that do not.
"""

# No `from __future__ import annotations`: a NamedTuple would compile each of the texts, at the cost of milliseconds.

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.agent.model import Worker


class Member(NamedTuple):
    """What a node brings into the world."""

    role: str
    local_world_size: int


class Assignment(NamedTuple):
    """A node's place: its first worker's ranks, and how many workers there are, in all and of its role."""

    base_global_rank: int
    world_size: int
    base_role_rank: int
    role_world_size: int


def assign_nodes(members: Sequence[Member]) -> list[Assignment]:
    """Every node's place, in group-rank order."""
    role_sizes: Counter[str] = Counter()
    for member in members:
        role_sizes[member.role] += member.local_world_size
    assignments = []
    next_global_rank = 0
    next_role_rank: Counter[str] = Counter()
    for member in members:
        role = member.role
        assignments.append(Assignment(next_global_rank, role_sizes.total(), next_role_rank[role], role_sizes[role]))
        next_global_rank += member.local_world_size
        next_role_rank[role] += member.local_world_size
    return assignments


def assign_ranks(members: Sequence[Member], group_rank: int) -> list[Worker]:
    """The workers of the node with that group rank, by local rank."""
    if not 0 <= group_rank < len(members):
        raise ValueError(f"group rank {group_rank} is not in a world of {len(members)} members")
    return place_workers(assign_nodes(members)[group_rank], members[group_rank].local_world_size)


def place_workers(assignment: Assignment, local_world_size: int) -> list[Worker]:
    """The workers of a node that has this place and this size, by local rank."""
    base, world_size, base_in_role, role_size = assignment
    fits_world = 0 <= base <= world_size - local_world_size
    fits_role = 0 <= base_in_role <= role_size - local_world_size <= world_size - local_world_size
    if not (fits_world and fits_role):
        raise ValueError(f"{local_world_size} workers do not fit into {assignment}")
    return [Worker(rank, base + rank, base_in_role + rank, world_size, role_size) for rank in range(local_world_size)]
