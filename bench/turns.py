"""Repeats: the sides take turns, so that all see the same load, as often as planned or as the time allows."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from bench.results import Row
from bench.sides import BenchmarkError

T = TypeVar("T")


def with_parts(sizes: Sequence[int], base: int) -> Iterator[tuple[int, float]]:
    """Each size with the part of the time that is left which it may use, if a size costs so much more than `base`."""
    for index, size in enumerate(sizes):
        yield size, (base + size) / sum(base + other for other in sizes[index:])


@dataclass(slots=True)
class Turns:
    """What a measure is given. It adds its rows, notes and breakdowns. `made` is the least number of repeats of any
    part, and `aimed` what was planned for that part."""

    planned: int
    is_quick: bool
    ends: float
    """By the monotonic clock. The turn that would end later is not begun, but one of each part is always made."""
    tell: Callable[[str], None]
    made: int = 0
    aimed: int = 0
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    breakdowns: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def repeat(self, what: str, planned: int | None = None, part: float = 1.0) -> Iterator[int]:
        """The numbers of the turns of one part of the measure, which may use that part of the time that is left."""
        planned = 1 if self.is_quick else planned or self.planned
        ends = time.monotonic() + part * max(0.0, self.ends - time.monotonic())
        longest_s = 0.0
        done = 0
        for turn in range(planned):
            began = time.monotonic()
            if turn and began + longest_s > ends:
                self.notes.append(f"{what}: {turn} of {planned} repeats, because the time was up.")
                break
            self.tell(f"{what}, turn {turn + 1} of {planned}")
            yield turn
            done = turn + 1
            longest_s = max(longest_s, time.monotonic() - began)
        if not self.aimed or done < self.made:
            self.made, self.aimed = done, planned

    def compare(
        self,
        what: str,
        sides: Mapping[str, Callable[[], T]],
        *,
        planned: int | None = None,
        warm_up: bool = True,
        part: float = 1.0,
    ) -> dict[str, list[T]]:
        """Call every side once a turn; what each gave. The warm-up is a turn that does not count. A side that fails is
        noted and misses that turn."""
        found: dict[str, list[T]] = {name: [] for name in sides}

        def call(name: str) -> list[T]:
            try:
                return [sides[name]()]
            except (BenchmarkError, OSError, subprocess.SubprocessError, psutil.Error) as error:
                self.notes.append(f"{what}, {name}: a turn failed: {' '.join(str(error).split())[-600:]}")
                return []

        if warm_up and not self.is_quick and time.monotonic() < self.ends:
            self.tell(f"{what}, warm-up")
            for name in sides:
                call(name)
        for _ in self.repeat(what, planned, part):
            for name in sides:
                found[name] += call(name)
        if not any(found.values()):
            raise BenchmarkError(f"{what}: {self.notes[-1]}")
        return found

    def size(self, full: T, quick: T) -> T:
        return quick if self.is_quick else full
