"""Whose messages are taken next, so that no connection and no run holds up another. Pure but for the clock.

Each run has a share of the time of one turn of the event loop; strangers together have one, as if they were a run.

* While nothing waits and the share is not used up, what comes is taken at once. This is the usual case.
* What is beyond the share waits; if that is much, its connection is not read from. In the next turns each run takes its
  share, and within a run one connection after the other.
* Time is counted, not messages: a message that wakes a thousand requests costs its run what it takes. One that took
  longer than the share is paid for in the following turns.

A turn takes `_TURN_S` of time, divided between the runs that have something waiting, or `_LEAST_S` for each, and each
run may exceed that by one message. So a message waits for about two turns at most, whatever other runs do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

_TURN_S = 0.02
_LEAST_S = 0.001
_MOST_OWED_S = 1.0
_NOTED_S = 0.0005  # A share of which less was used counts as unused, so single messages need no bookkeeping.


class Job(Protocol):
    def take_turn(self, now: float, ends_at: float) -> None:
        """Work until then, at least one step. A job that has more to do calls `Turns.wait` again."""


class Share:
    """What one run has used of the present turn, and which of its connections wait."""

    __slots__ = ("is_queued", "jobs", "used_s")

    def __init__(self) -> None:
        self.used_s = 0.0
        self.jobs: deque[Job] = deque()
        self.is_queued = False


class Turns:
    """`call_soon` calls a function in the next turn of the loop."""

    def __init__(self, clock: Callable[[], float], call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._clock, self._call_soon = clock, call_soon
        self._slice_s = _TURN_S
        self._queue: deque[Share] = deque()  # Those that have jobs waiting.
        self._spent: set[Share] = set()
        self._is_called = False

    def offer(self, share: Share, job: Job) -> bool:
        """Do it now, or when it is its turn: then this is False."""
        slice_s = self._slice_s
        if self._spent:  # The more runs have used much of this turn, the less is left for one more.
            slice_s = min(slice_s, max(_LEAST_S, _TURN_S / (1 + len(self._spent))))
        if share.is_queued or share.used_s >= slice_s:
            self.wait(share, job)
            return False
        self._do(share, job, slice_s - share.used_s)
        return True

    def wait(self, share: Share, job: Job, *, is_first: bool = False) -> None:
        if is_first:
            share.jobs.appendleft(job)
        else:
            share.jobs.append(job)
        if not share.is_queued:
            share.is_queued = True
            self._queue.append(share)
        self._call_next()

    def _do(self, share: Share, job: Job, most_s: float) -> None:
        began = self._clock()
        try:
            job.take_turn(began, began + most_s)
        finally:
            share.used_s += self._clock() - began
            if share.used_s > _NOTED_S:
                self._spent.add(share)
                self._call_next()

    def _call_next(self) -> None:
        if not self._is_called:
            self._is_called = True
            self._call_soon(self._next)

    def _next(self) -> None:
        """The next turn: what was used before is forgotten but for what exceeded the share."""
        self._is_called = False
        self._slice_s = max(_LEAST_S, _TURN_S / max(1, len(self._queue)))
        for share in self._spent:
            share.used_s = max(0.0, min(share.used_s, _MOST_OWED_S) - self._slice_s)
        self._spent = {share for share in self._spent if share.used_s > _NOTED_S}
        try:
            for _ in range(len(self._queue)):
                self._serve(self._queue.popleft())
        finally:
            if self._queue or self._spent:
                self._call_next()

    def _serve(self, share: Share) -> None:
        try:
            while share.jobs and share.used_s < self._slice_s:
                most_s = (self._slice_s - share.used_s) / len(share.jobs)
                self._do(share, share.jobs.popleft(), most_s)
        finally:
            share.is_queued = bool(share.jobs)
            if share.is_queued:
                self._queue.append(share)
