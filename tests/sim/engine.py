"""Virtual time: one heap of things to come, one source of chance, and clocks that do not agree.

Nothing here waits, and nothing here knows what it is for. The time of the engine is the true time, which nobody in
the fake world can see. Every host has a `Clock` that runs at its own rate from its own offset.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.sim.transcript import Transcript

# Far more than any run needs; two machines that keep waking each other up never get further in time.
EVENT_LIMIT = 60_000

# A machine must not be woken a rounding error before its deadline.
_NUDGE_S = 1e-7


class Violation(AssertionError):  # noqa: N818
    """Something happened that must not. `checker` is the name of the rule that was broken."""

    def __init__(self, checker: str, text: str) -> None:
        super().__init__(f"{checker}: {text}")
        self.checker = checker


@dataclass(frozen=True, slots=True)
class Clock:
    """What a host takes for the time."""

    offset_s: float = 0.0
    rate: float = 1.0

    def local(self, true_s: float) -> float:
        return self.offset_s + self.rate * true_s

    def true(self, local_s: float) -> float:
        return (local_s - self.offset_s) / self.rate


class Engine:
    """Time, chance and the record of what happened."""

    def __init__(self, random: Random) -> None:
        self.now = 0.0
        self.random = random
        self.transcript = Transcript()
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay_s, call, *arguments)

    def run_until(self, limit: float, is_enough: Callable[[], bool] | None = None) -> bool:
        """Let time pass until the limit, or until it is enough, which is asked twice a virtual second."""
        heap = self._heap
        ask_at = self.now
        while heap and heap[0][0] <= limit:
            if is_enough is not None and self.now >= ask_at:
                if is_enough():
                    return True
                ask_at = self.now + 0.5
            when, number, call, arguments = heapq.heappop(heap)
            if number > EVENT_LIMIT:
                raise Violation("no_busy_loop", f"more than {EVENT_LIMIT} things have happened")
            self.now = when
            call(*arguments)
        self.now = limit
        return is_enough is not None and is_enough()

    def note(self, who: str, *what: object) -> None:
        self.transcript.add(self.now, who, what)


class Alarm:
    """Wakes its owner at one time: the last that was set."""

    __slots__ = ("_at", "_call", "_clock", "_engine", "_number")

    def __init__(self, engine: Engine, clock: Clock, call: Callable[[], None]) -> None:
        self._engine = engine
        self._clock = clock
        self._call = call
        self._at: float | None = None
        self._number = 0

    def set(self, local_s: float | None) -> None:
        """By the clock of the owner; None: not at all."""
        if local_s == self._at:
            return
        self._at = local_s
        self._number += 1
        if local_s is not None:
            self._engine.at(self._clock.true(local_s) + _NUDGE_S, self._ring, self._number)

    def _ring(self, number: int) -> None:
        if number == self._number:
            self._at = None
            self._call()
