"""What nodes say of snapshots, and what they are told of them. Data only; `model` exports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.frozen import frozen

if TYPE_CHECKING:
    from holdfast.rendezvous.membership import protocol as wire

MAX_HELD = 64  # Snapshots that a node says it holds, and ranges of ranks of each.
MAX_SOURCES = 1024  # From which one member fetches ranks of a snapshot.


@frozen
class SnapshotId:
    """The state of all ranks of one world at one step. Those from a disk have term 0 and round 0. `is_replicated`:
    every rank has the same state."""

    term: wire.Count
    round: wire.Count
    step: wire.Count
    world_size: wire.WorldSize
    is_replicated: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """Which of two snapshots is the newer one."""
        return (self.term, self.round, self.step)


@frozen
class Held:
    """A node has these ranks of a snapshot: ranges of the first rank and the number of ranks."""

    snapshot: SnapshotId
    ranks: wire.RankRanges


@frozen
class Source:
    """Where the transfer process of another member serves a range of ranks."""

    ranks: wire.RankRange
    address: wire.Name
    port: wire.Port


@frozen
class Chosen:
    """The snapshot that all ranks of a round load, or None with the reason (`problem`). `sources` are of the ranks that
    this member lacks. `needs_reshard`: it was saved by a world of another size, and each rank needs all its parts."""

    snapshot: SnapshotId | None
    sources: wire.Sources = ()
    problem: wire.Text = ""
    needs_reshard: bool = False
