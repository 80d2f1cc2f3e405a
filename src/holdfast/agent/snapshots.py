"""The agent's part in snapshots: what this node may keep, what it holds, and what the workers of a round are to load.

The slots are the spawner's (`process.spawner.snapshots`). The agent tells it of each round, and tells the run what is
held.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from holdfast.failures import oom
from holdfast.frozen import fields_of
from holdfast.rendezvous.membership.model import Held, Place, SnapshotId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.agent.model import Worker
    from holdfast.process.spawner.client import SpawnerLink
    from holdfast.telemetry.status import SnapshotStatus

_SHARE = 4  # A quarter of the memory, unless the user says otherwise.


class NodeSnapshots:
    """Of one agent. `limit_bytes` is for all slots together; None: a share of this node's memory."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._link: SpawnerLink | None = None
        self.steps_lost: int | None = None  # Steps that were computed again, as far as that is known.

    def begin(
        self,
        link: SpawnerLink | None,
        place: Place,
        workers: Sequence[Worker],
        envs: dict[int, dict[str, str]],
        reached: int | None,
    ) -> None:
        """Before the workers of a round are ordered. Without a link each start has a spawner of its own. `reached` is
        the step that all workers of the last round had reported."""
        self._link = link
        if self._limit_bytes == 0:
            return
        if link is None:
            from holdfast.snapshots.messages import VARIABLE

            for env in envs.values():
                env[VARIABLE] = "the start method is fork"
            return
        if self._limit_bytes is None:
            self._limit_bytes = memory_bytes() // _SHARE
        chosen, ranks = place.chosen, [worker.global_rank for worker in workers]
        snapshot = chosen.snapshot if chosen is not None else None
        if snapshot is not None:
            self.steps_lost = (self.steps_lost or 0) + max(0, (reached or 0) - snapshot.step)
        world_size = next((worker.world_size for worker in workers), 0)
        known = (*fields_of(snapshot).values(),) if snapshot is not None else None
        problem = chosen.problem if chosen is not None else ""
        link.begin_snapshots(self._limit_bytes, place.term, place.round, world_size, ranks, known, problem)

    def held(self) -> tuple[Held, ...]:
        """What this node holds, to say when it joins."""
        found = self._link.held if self._link is not None else ()
        return tuple(Held(SnapshotId(*snapshot), tuple(map(tuple, ranks))) for snapshot, ranks in found)

    def status(self) -> SnapshotStatus | None:
        """None if no worker has saved anything. Any thread may ask."""
        link = self._link
        if link is None or not link.snapshot_bytes:
            return None
        from holdfast.telemetry.status import SnapshotStatus

        age_s = None if link.common_step is None else round(max(0.0, time.monotonic() - link.common_at), 3)
        return SnapshotStatus(link.common_step, age_s, link.snapshot_bytes, self._limit_bytes or 0, self.steps_lost)


def memory_bytes() -> int:
    """The memory of this host, or of the smallest control group above this process."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = oom.memory_killer_counter()
    return min(total, group.limit_bytes) if group is not None and group.limit_bytes else total
