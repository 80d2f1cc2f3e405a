"""How agents that share nothing but a store agree on ranks."""

from __future__ import annotations

from typing import Any

from holdfast.agent import ranks
from holdfast.agent.model import Worker, WorkerSpec


def exchange_ranks(store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
    """Everybody says what it has, rank 0 gives everybody a place."""
    mine = ranks.Member(spec.role, spec.local_world_size)
    store.set(ranks.role_info_key(group_rank), ranks.encode_member(mine, group_rank))
    if group_rank == 0:
        said = store.multi_get([ranks.role_info_key(i) for i in range(group_world_size)])
        places = ranks.assign_nodes([ranks.decode_member(data, i) for i, data in enumerate(said)])
        keys = [ranks.assigned_ranks_key(i) for i in range(group_world_size)]
        store.multi_set(keys, [ranks.encode_assignment(place) for place in places])
    place = ranks.decode_assignment(store.get(ranks.assigned_ranks_key(group_rank)), group_rank)
    return ranks.place_workers(place, spec.local_world_size)
