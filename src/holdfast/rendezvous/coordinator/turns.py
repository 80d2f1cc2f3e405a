"""Whose messages are taken next, so that no connection holds up another. Pure but for the clock.

What comes is taken at once while the present turn of the event loop has time left, which is the usual case. A
connection that has more than its slice waits for the next turn, and if much of it waits, it is not read from. In each
turn members come first, each with a slice; strangers and visitors share what a turn has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

_TURN_S = 0.02
_SLICE_S = 0.002


class Job(Protocol):
    is_member: bool

    def take_turn(self, ends_at: float) -> bool:
        """Work until then, at least one step. Whether there is more to do."""


class Turns:
    """`call_soon` calls a function in the next turn of the loop."""

    def __init__(self, clock: Callable[[], float], call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._clock, self._call_soon = clock, call_soon
        self._members: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._used_s = 0.0
        self._is_called = False

    def offer(self, job: Job) -> bool:
        """Do it now, or in the next turn: then this is False. A job that waits must not be offered again."""
        if self._used_s >= _TURN_S:
            self._wait(job)
            return False
        return self._do(job)

    def _do(self, job: Job) -> bool:
        began = self._clock()
        has_more = job.take_turn(began + _SLICE_S)
        self._used_s += self._clock() - began
        if has_more:
            self._wait(job)
        elif not self._is_called:
            self._call_next()
        return not has_more

    def _wait(self, job: Job) -> None:
        (self._members if job.is_member else self._others).append(job)
        self._call_next()

    def _call_next(self) -> None:
        if not self._is_called:
            self._is_called = True
            self._call_soon(self._next)

    def _next(self) -> None:
        self._is_called, self._used_s = False, 0.0
        for _ in range(len(self._members)):
            self._do(self._members.popleft())
        shared_until = self._used_s + _TURN_S
        for _ in range(len(self._others)):
            if self._used_s >= shared_until:
                self._call_next()
                break
            self._do(self._others.popleft())
