"""State that outlives a worker: `holdfast.snapshots.open()`. docs/snapshots.md is the page for users."""

from __future__ import annotations

from holdfast import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.snapshots.api import Saved as Saved
    from holdfast.snapshots.api import SnapshotError as SnapshotError
    from holdfast.snapshots.api import Snapshots as Snapshots
    from holdfast.snapshots.api import open as open  # noqa: A004

__all__, __getattr__, __dir__ = lazy.exports(__name__, {"holdfast.snapshots.api": "Saved SnapshotError Snapshots open"})
