"""Where the workers of this node are, seen before they are stopped: when they hang, and when one has failed of a peer.

After a hang `found` holds the picture of all workers, and one of them is blamed. After a failure that points at a peer
(`--peer-stacks`) it holds that of the workers that still ran. Either way the report of the failure has their places
(`peers`), and a file beside the logs has their stacks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.agent.model import WorkerGroup
from holdfast.failures.records import Folded
from holdfast.log import Logger
from holdfast.telemetry.metrics import put_metric

if TYPE_CHECKING:
    from holdfast.hangs.compare import Picture
    from holdfast.hangs.progress import GroupProgress
    from holdfast.hangs.watch import HangWatch
    from holdfast.process.workers.group import PContext

logger = Logger(__name__)

AUTO, ON, OFF = "auto", "on", "off"


class Examination:
    """`peer_stacks` is one of the words above: `AUTO` for failures that point at a peer, `ON` for all."""

    def __init__(self, group: WorkerGroup, peer_stacks: str, record: Callable[..., None]) -> None:
        self._group, self._mode, self._record = group, peer_stacks, record
        self._round = 0
        self._unwritten: Picture | None = None
        self.peers: tuple[Folded, ...] = ()

    def peers_of(self, rank: int) -> tuple[Folded, ...]:
        """Where the workers other than that one were."""
        if not self.peers:
            return ()
        from holdfast.failures import peers

        return peers.merged(self.peers, [rank])

    def begin(self, round: int) -> None:
        """Another life of the group."""
        self._round, self._unwritten, self.peers = round, None, ()

    def hung(self, context: PContext, watching: HangWatch | None, reason: str) -> tuple[Picture, str]:
        """Where the workers are, and the file that says it."""
        from holdfast.hangs import compare, watch

        running, group = context.running(), self._group
        workers = {
            w.local_rank: (w.global_rank, running[w.local_rank]) for w in group.workers if w.local_rank in running
        }
        picture = watch.examine(workers, watching)
        path = watch.tell(picture, context.destinations, f"{self._heading()}\n{reason}")
        odd_ranks = ",".join(str(rank) for group in picture.odd for rank in group.ranks)
        self._record("HUNG", details={"reason": reason, "odd_ranks": odd_ranks, "stacks": path})
        put_metric(f"workers.{group.spec.role}.hung", 1)
        self.peers = compare.folded(picture)
        return picture, path

    def failed(self, context: PContext, progress: GroupProgress | None, *, blames_peer: bool) -> None:
        """A worker has failed, here or elsewhere: where are the others? Takes a second at most."""
        running = context.running()
        ranks = {w.global_rank: w.local_rank for w in self._group.workers if w.local_rank in running}
        if not ranks or self._mode == OFF or not (blames_peer or self._mode == ON):
            return
        from holdfast.failures import peers
        from holdfast.hangs import compare
        from holdfast.hangs import peers as stacks

        steps = {rank: progress.of(local)[1] for rank, local in ranks.items()} if progress is not None else {}
        try:
            picture = stacks.look({rank: running[local] for rank, local in ranks.items()}, steps)
            self._unwritten, self.peers = picture, peers.merged(compare.folded(picture))
        except Exception as error:  # Evidence is no reason to keep a stop waiting.
            logger.warning("the other workers were not looked at: %s: %s", type(error).__name__, error)
        if self.peers:
            logger.warning("the other workers of this node, before they are stopped: %s", peers.line(self.peers))

    def kept_file(self, context: PContext) -> str:
        """The stacks of the last `failed`, in a file beside the logs; its path, if there is one. After the stop."""
        picture, self._unwritten = self._unwritten, None
        if picture is None or not picture.groups:
            return ""
        from holdfast.hangs import watch

        heading = f"{self._heading()}\nthe main threads of the workers that ran when another one had failed"
        path, trouble = watch.keep(picture, context.destinations, heading)
        if trouble:
            logger.warning("the stacks are in no file: %s", trouble)
        return path

    def _heading(self) -> str:
        where = f"run {self._group.spec.run_id}, round {self._round}, host {os.uname().nodename}"
        return f"{where}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
