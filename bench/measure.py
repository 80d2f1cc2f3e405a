"""Numbers and the table made of them: repeated measurements of two sides, a bound, and whether it is met.

Load on the machine comes and goes, so the sides take turns (`take_turns`): both see the same weather. What is
compared is medians. The spread is the middle half of the values.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Series:
    """What repeated measurements of one thing gave."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def quartiles(self) -> tuple[float, float]:
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True, slots=True)
class Bound:
    """What is promised: of holdfast's median, or of its ratio to torchrun's."""

    of: Literal["value", "ratio"]
    relation: Literal["at most", "at least"]
    limit: float

    def is_met(self, value: float, ratio: float | None) -> bool:
        seen = value if self.of == "value" else ratio
        if seen is None:
            return False
        return seen <= self.limit if self.relation == "at most" else seen >= self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. A row that is not sound (a line was lost, say) meets no bound."""

    what: str
    unit: str
    ours: Series
    theirs: Series | None = None
    bound: Bound | None = None
    is_sound: bool = True

    @property
    def ratio(self) -> float | None:
        if self.theirs is None or self.theirs.median <= 0:
            return None
        return self.ours.median / self.theirs.median

    @property
    def is_met(self) -> bool | None:
        if self.bound is None:
            return None
        return self.is_sound and self.bound.is_met(self.ours.median, self.ratio)


def take_turns(
    repetitions: int, sides: Sequence[Callable[[], T]], tell: Callable[[int], None] = lambda _: None
) -> list[list[T]]:
    """Call every side once a turn, in order; the results of each side."""
    results: list[list[T]] = [[] for _ in sides]
    for turn in range(repetitions):
        tell(turn)
        for side, found in zip(sides, results, strict=True):
            found.append(side())
    return results


def series(values: Iterable[float]) -> Series:
    return Series(tuple(values))


def table(rows: Sequence[Row], sides: tuple[str, str] = ("holdfast", "torchrun")) -> str:
    header = ("measure", *sides, " / ".join(sides), "bound", "met", "repetitions")
    lines = [header, ("---",) * len(header), *(_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: Row) -> tuple[str, ...]:
    counts = [len(side.values) for side in (row.ours, row.theirs) if side is not None]
    return (
        row.what,
        _side(row.ours, row.unit),
        _side(row.theirs, row.unit) if row.theirs is not None else "",
        f"{row.ratio:.3g}x" if row.ratio is not None else "",
        _bound_text(row),
        {None: "", True: "yes", False: "**no**"}[row.is_met],
        " / ".join(map(str, dict.fromkeys(counts))),
    )


def _side(side: Series, unit: str) -> str:
    low, high = side.quartiles()
    return f"{_number(side.median)} {unit} ({_number(low)} to {_number(high)})"


def _bound_text(row: Row) -> str:
    if row.bound is None:
        return ""
    unit = "x" if row.bound.of == "ratio" else f" {row.unit}"
    return f"{row.bound.relation} {row.bound.limit:g}{unit}"


def _number(value: float) -> str:
    """Three digits that count, and no fraction where there are more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
