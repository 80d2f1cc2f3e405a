"""What a run of the suite found, as data: all values, their statistics, and whether bounds are met. Pure.

A results file is the JSON of one `Results`; the page, the plots and the lines in README are made from it alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bound:
    """What is promised of the median of one side: at most (or at least) `limit`, or `limit` times another side's median
    plus `plus`. `reason` says what the time goes to, for readers who find it missed."""

    limit: float
    against: str = ""
    plus: float = 0.0
    is_minimum: bool = False
    side: str = "holdfast"
    reason: str = ""

    def text(self, unit: str) -> str:
        words = "at least" if self.is_minimum else "at most"
        times = f"{self.limit:g}x {self.against}" if self.against else f"{self.limit:g} {unit}".strip()
        whose = f"{self.side.removeprefix('holdfast ')}: " if self.side != "holdfast" else ""
        return f"{whose}{words} {times}" + (f" + {self.plus:g} {unit}" if self.plus else "")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: the values of each side, in the order of the turns. `key` names it for plots and tests."""

    key: str
    what: str
    unit: str
    sides: dict[str, list[float]]
    bounds: list[Bound] = field(default_factory=list)

    def median(self, side: str) -> float | None:
        values = self.sides.get(side)
        return statistics.median(values) if values else None

    def ratio(self, side: str = "holdfast", other: str = "torchrun") -> float | None:
        mine, theirs = self.median(side), self.median(other)
        return mine / theirs if mine and theirs and mine > 0 and theirs > 0 else None

    def meets(self, bound: Bound) -> bool | None:
        """None if that was not measured."""
        value, base = self.median(bound.side), self.median(bound.against) if bound.against else 1.0
        if value is None or base is None:
            return None
        target = bound.limit * base + bound.plus
        return value >= target if bound.is_minimum else value <= target


@dataclass(frozen=True, slots=True)
class Section:
    """One measure. `how` says what was measured and how; `failure` why it could not be. `breakdowns` are phases in
    milliseconds by plot and side."""

    name: str
    title: str
    how: str
    took_s: float = 0.0
    load: float = 0.0
    failure: str = ""
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    breakdowns: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Results:
    date: str
    machine: dict[str, str]
    took_s: float
    sections: list[Section]

    def row(self, key: str) -> Row | None:
        return next((row for section in self.sections for row in section.rows if row.key == key), None)

    def breakdowns(self) -> dict[str, dict[str, dict[str, float]]]:
        return {key: bars for section in self.sections for key, bars in section.breakdowns.items()}

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> Results:
        return msgspec.json.decode(text, type=cls)


def row(key: str, what: str, unit: str, sides: Mapping[str, Iterable[float]], *bounds: Bound) -> Row:
    """Sides without a value are left out; values keep five digits."""
    kept = of_each(sides, lambda value: float(f"{value:.5g}"))
    return Row(key, what, unit, {name: values for name, values in kept.items() if values}, list(bounds))


def of_each(found: Mapping[str, Iterable[T]], value: Callable[[T], float]) -> dict[str, list[float]]:
    """One figure of what each side gave in each turn."""
    return {name: [value(each) for each in turns] for name, turns in found.items()}


def differences(more: Sequence[float], less: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(more, less, strict=False)]


def number(value: float) -> str:
    """Three digits that count, and no fraction where there are more."""
    if value and abs(value) < 0.001:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
