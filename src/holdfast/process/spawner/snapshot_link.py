"""What an agent orders of its spawner about snapshots, and what it knows of them: a part of the link to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.process.spawner.wire import Channel, Message

REPORTS = ("held", "parts", "kept_step", "transferred")


class SnapshotLink:
    """`held` are the snapshots of which the node has parts, with ranges of ranks; `common_step` is the step that a
    restart would load, and has been since `common_at`; all slots have `snapshot_bytes`. `parts` are all parts in
    memory: snapshot, rank, bytes, whether the rank is of this node, and since when it is known. `has_peers`: the
    spawner knows how to move slots. What it says of that goes to `hear_of_snapshots`."""

    _channel: Channel

    def __init__(self) -> None:
        self.forget_snapshots()
        self.common_at = 0.0
        self.has_peers = False
        self.hear_of_snapshots: Callable[[Message], None] = lambda report: None

    def forget_snapshots(self) -> None:
        self.held: list[tuple[Any, ...]] = []
        self.parts: list[tuple[Any, ...]] = []
        self.common_step: int | None = None
        self.snapshot_bytes = 0

    def begin_snapshots(self, *round: Any) -> None:
        """Workers that are started from now on may save: how many bytes together, and the round as the ledger of the
        slots wants it (`snapshots.slots`)."""
        self._channel.send(("snapshots", "begin", *round))

    def order_of_snapshots(self, *order: Any, fds: tuple[int, ...] = ()) -> None:
        """See `snapshots`. The descriptors become the link's to close."""
        self._channel.send(("snapshots", *order), fds)

    def note_snapshots(self, report: Message) -> None:
        """One of `REPORTS`."""
        match report:
            case ("held", held, step, used):
                if step != self.common_step:
                    self.common_at = time.monotonic()
                self.held, self.common_step, self.snapshot_bytes = held, step, used
            case ("parts", parts):
                at = {(snapshot, rank): at for snapshot, rank, _, _, at in self.parts}
                self.parts = [(*part, at.get(part[:2], time.monotonic())) for part in parts]
        self.hear_of_snapshots(report)
