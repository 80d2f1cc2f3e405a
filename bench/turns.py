"""Repeats: the sides take turns, so that all see the same load."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from bench.results import Row

T = TypeVar("T")


@dataclass(slots=True)
class Turns:
    """What a measure is given. It adds its rows, notes and breakdowns."""

    repeats: int
    is_quick: bool
    tell: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    breakdowns: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def compare(
        self, what: str, sides: Mapping[str, Callable[[], T]], *, repeats: int = 0, warm_up: bool = True
    ) -> dict[str, list[T]]:
        """Call every side once a turn; what each gave. The warm-up is a turn that does not count. A side that fails is
        noted and misses that turn."""
        found: dict[str, list[T]] = {name: [] for name in sides}
        turns = range(1, 2 if self.is_quick else 1 + (repeats or self.repeats))
        for turn in [0, *turns] if warm_up and not self.is_quick else turns:
            self.tell(f"{what}, turn {turn} of {len(turns)}" if turn else f"{what}, warm-up")
            for name, side in sides.items():
                try:
                    value = side()
                    found[name] += [value] if turn else []
                except (AssertionError, OSError, subprocess.SubprocessError, psutil.Error) as error:
                    self.notes.append(f"{what}, {name}: a turn failed: {' '.join(str(error).split())[-600:]}")
        if not any(found.values()):
            raise AssertionError(f"{what}: {self.notes[-1]}")
        return found

    def size(self, full: T, quick: T) -> T:
        return quick if self.is_quick else full
