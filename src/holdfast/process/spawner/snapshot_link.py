"""What an agent orders of its spawner about snapshots, and what it knows of them: a part of the link to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.process.spawner.wire import Channel, Message

REPORTS = ("held", "kept_step", "transferred")


class SnapshotLink:
    """`parts` are all parts in memory: snapshot, rank, bytes, whether the rank is of this node, and since when it is
    known; all slots have `snapshot_bytes`. `common_step` is the step that a restart would load, and has been since
    `common_at`. `has_peers`: the spawner knows how to move slots. `hear_of_snapshots` gets its reports."""

    _channel: Channel

    def __init__(self) -> None:
        self.forget_snapshots()
        self.common_at = 0.0
        self.has_peers = False
        self.hear_of_snapshots: Callable[[Message], None] = lambda report: None

    def forget_snapshots(self) -> None:
        self.parts: list[tuple[Any, ...]] = []
        self.common_step: int | None = None
        self.snapshot_bytes = 0

    @property
    def held(self) -> dict[Any, list[int]]:
        """The ranks of each snapshot in memory."""
        held: dict[Any, list[int]] = {}
        for snapshot, rank, *_ in self.parts:
            held.setdefault(snapshot, []).append(rank)
        return held

    def order_of_snapshots(self, *order: Any, fds: tuple[int, ...] = ()) -> None:
        """See `snapshots`. The descriptors become the link's to close."""
        self._channel.send(("snapshots", *order), fds)

    def note_snapshots(self, report: Message) -> None:
        """One of `REPORTS`."""
        match report:
            case ("held", parts, step, used):
                now = time.monotonic()
                if step != self.common_step:
                    self.common_at = now
                known = {(snapshot, rank): at for snapshot, rank, _, _, at in self.parts}
                self.parts = [(*part, known.get(part[:2], now)) for part in parts]
                self.common_step, self.snapshot_bytes = step, used
        self.hear_of_snapshots(report)
