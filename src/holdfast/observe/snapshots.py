"""Which snapshots the nodes of a run have between them, or a directory has. The agents say what each has; here it is
put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.failures.report import ranks_text
from holdfast.frozen import frozen
from holdfast.telemetry.status import HeldParts, SnapshotList

Key = tuple[int, int, int, int, bool]


@frozen
class Listed:
    """One snapshot. `places` says where its parts are: `memory`, `copy` or `disk`, and on which nodes. `missing` are
    ranks that no one has, without which it cannot be loaded."""

    key: Key
    bytes: int
    age_s: float
    places: Mapping[str, tuple[str, ...]]
    missing: tuple[int, ...]

    @property
    def step(self) -> int:
        return self.key[2]

    def rank_words(self) -> str:
        words = f"{self.key[3]}, replicated" if self.key[4] else str(self.key[3])
        return f"{words}, {ranks_text(self.missing)} missing" if self.missing else words


def listed(nodes: Mapping[str, SnapshotList]) -> list[Listed]:
    """Newest first. Files of snapshots have no round, and come after what is in memory."""
    parts_of: dict[Key, list[tuple[str, HeldParts]]] = {}
    for name, node in nodes.items():
        for parts in node.parts:
            key = (parts.term, parts.round, parts.step, parts.world_size, parts.is_replicated)
            parts_of.setdefault(key, []).append((name, parts))
    return [_listed(key, parts_of[key]) for key in sorted(parts_of, reverse=True)]


def _listed(key: Key, held: Sequence[tuple[str, HeldParts]]) -> Listed:
    ranks = {rank for _, parts in held for first, count in parts.ranks for rank in range(first, first + count)}
    missing = () if key[4] and ranks else tuple(rank for rank in range(key[3]) if rank not in ranks)
    places: dict[str, tuple[str, ...]] = {}
    for name, parts in held:
        places[parts.where] = (*places.get(parts.where, ()), name)
    age_s = min(parts.age_s for _, parts in held)
    return Listed(key, sum(parts.bytes for _, parts in held), age_s, places, missing)
