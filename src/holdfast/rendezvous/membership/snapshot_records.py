"""What nodes say of snapshots, and what they are told of them. Data only; `model` exports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.frozen import field, frozen

if TYPE_CHECKING:
    from holdfast.rendezvous.membership import protocol as wire

MAX_HELD = 64  # Snapshots that a node says it holds, and ranges of ranks of each.
MAX_SOURCES = 1024  # From which one member fetches ranks of a snapshot.
MAX_COPIES = 8


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


@frozen
class SnapshotPlan:
    """What the members of a new world are told: the snapshot that all load, the same with the sources for members that
    lack ranks of it, by rank, and where each member sends copies. `agrees`: steps are agreed on in this round."""

    chosen: Chosen | None = None
    fetching: Mapping[int, Chosen] = field(default_factory=dict)
    copy_to: Mapping[int, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    agrees: bool = False


# Steps that all nodes of a round keep (`agreed_steps`).


@frozen
class SavedSteps:
    """How far a node is in the present round. `newest` is its newest common step. `kept` is the step that it keeps
    because it was asked to (`KeepFrom`); `stored` the agreed step that it has copied and written as it was told,
    `failed` the one with which that was not possible. `complete` is the last complete one that the node has heard of,
    of this round or an earlier one: `SnapshotId.order`."""

    newest: wire.Count | None = None
    kept: wire.Count | None = None
    stored: wire.Count | None = None
    failed: wire.Count | None = None
    complete: wire.SavedOrder | None = None


@frozen
class KeepFrom:
    """Keep the first common step at or above this one. Let the step go that was kept because of an earlier order,
    unless it was agreed. A node that keeps such a step already has heard the order before."""

    round: wire.Count
    step: wire.Count


@frozen
class Agreed:
    """All nodes keep this step: copy it to other nodes, and with `to_disk` write it, too. Let the step go that was
    agreed before, unless it is the last complete one."""

    round: wire.Count
    step: wire.Count
    to_disk: bool = False


@frozen
class Complete:
    """All nodes have stored this snapshot, of this round or an earlier one: keep it, and let everything older go that
    was kept, agreed or complete, and copies of it. `saved` is `SnapshotId.order`."""

    round: wire.Count
    saved: wire.SavedOrder


SnapshotOrder = KeepFrom | Agreed | Complete
