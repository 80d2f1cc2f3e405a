"""The agent's part in snapshots: what this node may keep, what it holds, and what the workers of a round are to load.

The slots are the spawner's (`process.spawner.snapshots`). The agent tells it of each round, and tells the run what is
held.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from holdfast.failures import oom
from holdfast.rendezvous.membership.model import Chosen, Held, Place, SnapshotId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.agent.model import Worker
    from holdfast.agent.snapshot_transfers import Listing, SnapshotTransfers
    from holdfast.process.spawner.client import SpawnerLink
    from holdfast.rendezvous.coordination import Coordination
    from holdfast.snapshots.slots import Snapshot
    from holdfast.telemetry.status import SnapshotList, SnapshotStatus

_SHARE = 4  # A quarter of the memory, unless the user says otherwise.


class NodeSnapshots:
    """Of one agent. `limit_bytes` is for all slots together; None: a share of this node's memory. `directory` is where
    snapshots are written, if they are; `bandwidth` how many bytes a second are sent to other nodes, 0: no limit."""

    def __init__(self, limit_bytes: int | None, directory: str = "", bandwidth: int = 0, run_id: str = "") -> None:
        self._limit_bytes, self._directory, self._bandwidth, self._run_id = limit_bytes, directory, bandwidth, run_id
        self._link: SpawnerLink | None = None
        self._run: Coordination | None = None
        self._made: SnapshotTransfers | None = None
        self._on_disk: dict[Snapshot, list[int]] = {}  # At the last join: snapshots in the directory, and their ranks.
        self.is_over = False  # The run has succeeded: what is held is not needed any more.
        self.steps_lost: int | None = None  # Steps that were computed again, if that is known.
        self._is_counting = True  # Until workers went on without a snapshot.

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
        chosen, ranks = place.chosen or Chosen(None), [worker.global_rank for worker in workers]
        snapshot = plain(chosen.snapshot)
        if snapshot is not None and not chosen.needs_reshard:
            if reached is not None:
                self.steps_lost = (self.steps_lost or 0) + max(0, reached - snapshot[2])
        elif (self.steps_lost, reached) != (None, None):
            self._is_counting = False  # They may begin anew, or with a checkpoint or a `reshard` of their own.
        self.steps_lost = self.steps_lost if self._is_counting else None
        world_size = next((worker.world_size for worker in workers), 0)
        begin = ("begin", self._limit_bytes, place.term, place.round, world_size, ranks, snapshot, chosen.problem)
        run = self._run
        if run is not None and (self._directory or self._made or run.snapshot_port or place.agrees_on_steps):
            self.transfers.begin(link, run, place, ranks, begin)
        else:
            link.order_of_snapshots(*begin)

    @property
    def transfers(self) -> SnapshotTransfers:
        """Made when it is first needed: most runs move nothing."""
        if self._made is None:
            from holdfast.agent.snapshot_transfers import SnapshotTransfers

            self._made = SnapshotTransfers(self._directory, self._bandwidth, self._run_id)
        return self._made

    def begin_listing(self) -> Listing | None:
        """Before this node joins, look at the directory if there is one. `tell` follows when that is over."""
        return self.transfers.begin_listing() if self._directory and self._limit_bytes != 0 else None

    def tell(self, run: Coordination, listing: Listing | None) -> None:
        """Before this node joins: what it holds, in memory and as the listing says."""
        self._run = run
        if self._limit_bytes == 0:
            return
        run.has_snapshots = True
        self._on_disk = self.transfers.end_listing() if listing is not None else {}
        run.held = self._held()

    def _held(self) -> tuple[Held, ...]:
        held = self._link.held if self._link is not None else {}
        for snapshot, ranks in self._on_disk.items():
            held.setdefault(snapshot, []).extend(ranks)
        if not held:
            return ()
        from holdfast.snapshots.slots import ranges_of

        return tuple(Held(SnapshotId(*key), tuple(ranges_of({*ranks}))) for key, ranks in held.items())

    # While this node waits for a place, copies may come that other nodes had begun to send.

    def fds(self) -> list[int]:
        """Readable when `poll` may have news."""
        link = self._link
        return [link.fileno()] if link is not None and link.has_peers and not link.is_gone else []

    def poll(self, run: Coordination) -> bool:
        """Whether the run is to be told that this node holds others than before."""
        if not self.fds():
            return False
        assert self._link is not None
        self._link.reports()
        before, run.held = run.held, self._held()
        return run.held != before

    def begin_last_files(self) -> None:
        """The run ends, or this node leaves it: have its newest steps written, if there is a directory for them."""
        if self._made is not None and not self.is_over:
            self._made.begin_last_files()

    def await_last_files(self, until: float) -> None:
        if self._made is not None and not self.is_over:
            self._made.begin_last_files()  # The last steps of workers that have ended by now.
            self._made.await_last_files(until)

    def export(self, snapshot: Snapshot, directory: str, then: Callable[[list[str]], None]) -> None:
        """Write this node's parts as files. `then` gets the problems."""
        if self._link is None or self._run is None:
            then(["this node has no snapshots"])
            return
        self.transfers.attach(self._link, self._run)
        self.transfers.export(snapshot, directory, then)

    def told(self) -> SnapshotList:
        """All that this node has. Any thread may ask."""
        from holdfast.agent.snapshot_transfers import parts_in_memory
        from holdfast.telemetry.status import SnapshotList

        found = parts_in_memory([*self._link.parts], time.monotonic()) if self._link is not None else []
        on_disk = self._made.told() if self._made is not None else []
        used = self._link.snapshot_bytes if self._link is not None else 0
        return SnapshotList(used, self._limit_bytes or 0, self._directory, (*found, *on_disk))

    def status(self) -> SnapshotStatus | None:
        """None if no worker has saved anything. Any thread may ask."""
        link = self._link
        if link is None or not link.snapshot_bytes:
            return None
        from holdfast.telemetry.status import SnapshotStatus

        age_s = None if link.common_step is None else round(max(0.0, time.monotonic() - link.common_at), 3)
        return SnapshotStatus(link.common_step, age_s, link.snapshot_bytes, self._limit_bytes or 0, self.steps_lost)


def plain(snapshot: SnapshotId | None) -> Snapshot | None:
    """The snapshot as the spawner knows it."""
    return None if snapshot is None else (*snapshot.order, snapshot.world_size, snapshot.is_replicated)


def memory_bytes() -> int:
    """The memory of this host, or of the smallest control group above this process."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = oom.memory_killer_counter()
    return min(total, group.limit_bytes) if group is not None and group.limit_bytes else total
