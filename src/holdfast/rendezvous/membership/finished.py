"""Runs that are over: who has to hear of the end, for how long, and what is kept of it. Pure.

A node that was cut off or frozen comes back when its run has ended and is forgotten. The coordinator of that time, or
one that is started for this node, finds the record of the end. The node must not run the whole job again alone: if it
knows of a round of that run it hears how the run ended. A node that knows of no past begins a new run. Its rounds go on
counting where the old ones ended, so that no round number is used for two worlds.
"""

from __future__ import annotations

from holdfast.frozen import changed
from holdfast.rendezvous.membership import model
from holdfast.rendezvous.membership.model import End, Memory, Notice, Outcome
from holdfast.rendezvous.membership.protocol import Command, ForgetRun, Join, Return, Tell

SUCCESS = Outcome(End.SUCCEEDED, "all workers have succeeded")


class FinishedRun:
    """`record` is its memory, with the outcome. `last_round` is 0 if no run is known to have ended. `was_told`: a node
    of it has heard of the end here."""

    def __init__(self, record: Memory | None) -> None:
        self.record = record
        self.last_round = record.last_round if record is not None else 0
        self.was_told = False

    def has(self, message: Join | Return) -> bool:
        """Whether the node had a part in it, and has not heard of its end."""
        heard_round = message.heard_round if isinstance(message, Join) else message.place.round
        return 0 < heard_round <= self.last_round

    def tell(self, key: str) -> list[Command]:
        assert self.record is not None
        assert self.record.outcome is not None
        self.was_told = True
        notice = Notice("this run ended while the node was away")
        return [Tell((key,), notice), Tell((key,), model.Ended(self.record.outcome))]

    def announce_next(self, key: str) -> list[Command]:
        """To a node of the run that begins after it."""
        if self.record is None or self.record.outcome is None:
            return []
        ended = f"an earlier run under this id has ended ({self.record.outcome.reason}); this is a new run"
        return [Tell((key,), Notice(ended))]


class Linger:
    """How long a run that has ended waits for its nodes: until all have confirmed the end. But a node that was lost may
    come back, one that was meant for the run may come late, and a closed run stays closed for a while
    (`may_more_come`). A coordinator that finds the end in the memory does not know, and waits."""

    def __init__(self) -> None:
        self.may_more_come = True
        self.ends_at: float | None = None  # None before the end, and when it is over.
        self._is_over = False

    def step(self, has_nodes: bool, linger_s: float, now: float) -> list[Command]:
        if self._is_over:
            return []
        if self.ends_at is None:
            self.ends_at = now + linger_s
        if now < self.ends_at and (has_nodes or self.may_more_come):
            return []
        self._is_over, self.ends_at = True, None
        return [ForgetRun()]

    def record(self, memory: Memory) -> Memory:
        """What is kept. If no other node may come, a new run may begin under the id at once."""
        assert memory.outcome is not None
        settings = memory.settings
        if settings is not None and not self.may_more_come:
            settings = changed(settings, close_linger_s=0.0)
        return changed(memory, settings=settings, outcome=memory.outcome.in_brief())


def finished_in(memory: Memory | None, age_s: float) -> Memory | None:
    """The memory, if it tells of a run that ended longer ago than it lingers for its nodes."""
    if memory is None or memory.outcome is None:
        return None
    linger_s = memory.settings.close_linger_s if memory.settings is not None else 0.0
    return memory if age_s > linger_s else None
