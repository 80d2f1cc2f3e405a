"""When a run that is over can be forgotten, so that its name is free again. Pure."""

from __future__ import annotations

from holdfast.rendezvous.membership.model import End, Outcome, Settings


class Ending:
    """At once if all nodes have confirmed the end. A node that was lost may still come back, one that was meant for the
    run may come late, and a closed run stays closed: then the run is remembered for `close_linger_s`."""

    def __init__(self) -> None:
        self.has_lost_nodes = False
        self.forget_at: float | None = None
        self._had_room = False
        self._is_told = False
        self._is_forgotten = False

    def tell(self, had_room: bool) -> None:
        """The nodes are being told how the run ended. `had_room`: its last round was below max nodes."""
        self._had_room, self._is_told = had_room, True

    def next_deadline(self) -> float | None:
        return None if self._is_forgotten else self.forget_at

    def should_forget(self, outcome: Outcome, settings: Settings | None, is_empty: bool, now: float) -> bool:
        """True once. `is_empty`: no node is left that has not confirmed the end."""
        if self.forget_at is None:
            self.forget_at = now + (settings.close_linger_s if settings else 0.0)
        may_more_come = outcome.end is End.CLOSED or self.has_lost_nodes or self._had_room
        is_time = now >= self.forget_at or (self._is_told and is_empty and not may_more_come)
        if self._is_forgotten or not is_time:
            return False
        self._is_forgotten = True
        return True
