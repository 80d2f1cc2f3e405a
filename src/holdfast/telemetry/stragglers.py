"""Ranks that are behind the others: how fast each worker is, and whose rate is far below the median. Pure.

A worker counts its steps (`holdfast.progress(step)`), or holdfast counts the lines of its output that match
`--progress-pattern`. `Track` keeps a few samples of that count for one worker, each with the time of the step by the
clock of its host, and makes a `Rate` of them: steps a second over the last minute, or over the last four samples if
these take longer. Rates of several hosts can be compared, times cannot, so agents publish rates.

    rate = the lower of   steps between the first and the last sample / time between them
                          the same with one step more / time from the first sample until now

The second is for a worker that stands still: the step that it works on now counts as done, so a worker whose steps
take long is not slow while it takes one.

`find` names the workers that are slower than the median by more than `FACTOR`. A factor of 1.5 is above what steps
differ by on equal hosts (caches, input, neighbours), and below 2, which is what a device that is throttled, or shared
with another job, costs. Nothing follows from it but words. Where every step ends in a collective, all ranks have the
rate of the slowest, and none is behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from holdfast.frozen import frozen

if TYPE_CHECKING:
    from holdfast import wire_types as wire

FACTOR = 1.5
WINDOW_S = 60.0
LEAST_WINDOW_S = 20.0
_LEAST_SAMPLES = 5
_MOST_SAMPLES = 64
_NAMED_AT_MOST = 8

Unit = Literal["steps", "lines"]
STEPS: Unit = "steps"
LINES: Unit = "lines"


@frozen
class Rate:
    """`unit` is what was counted, `STEPS` or `LINES`; rates of different units are not compared."""

    per_s: wire.PerSecond = 0.0
    unit: str = ""
    window_s: wire.Seconds = 0.0


@frozen
class Straggler:
    """A rank that is behind the median of so many `compared` ranks."""

    rank: wire.WorkerRank
    per_s: wire.PerSecond
    median_per_s: wire.PerSecond
    unit: Unit
    compared: wire.Count


@frozen
class Track:
    """One worker. `samples` are the time and the count, oldest first."""

    unit: str
    samples: tuple[tuple[float, int], ...] = ()

    def added(self, at: float, count: int) -> Track:
        """With one sample more, if there was a step since the last. A count that falls begins anew."""
        samples = self.samples
        if samples and count < samples[-1][1]:
            samples = ()
        if samples and at <= samples[-1][0]:
            return self
        samples = (*samples, (at, count))
        while len(samples) > _MOST_SAMPLES or (len(samples) > _LEAST_SAMPLES and samples[1][0] <= at - WINDOW_S):
            samples = samples[1:]
        return Track(self.unit, samples)

    def rate(self, now: float) -> Rate | None:
        """None before there are two samples: the time before the first one is no step's."""
        if len(self.samples) < 2:
            return None
        (began, first), (_, before), (at, last) = (self.samples[number] for number in (0, -2, -1))
        whole_s = max(now, at) - began
        per_s = min((last - first) / (at - began), (last - first + last - before) / whole_s)
        return Rate(per_s, self.unit, whole_s)


def find(rates: Mapping[int, Rate]) -> list[Straggler]:
    """Those that are behind, the slowest first. By global rank."""
    found = []
    for unit in (STEPS, LINES):
        known = {rank: rate for rank, rate in rates.items() if rate.unit == unit}
        if len(known) > 1:
            median = _median([rate.per_s for rate in known.values()])
            found += [
                Straggler(rank, rate.per_s, median, unit, len(known))
                for rank, rate in known.items()
                if rate.window_s >= LEAST_WINDOW_S and rate.per_s * FACTOR < median
            ]
    return sorted(found, key=lambda each: (each.per_s / each.median_per_s, each.rank))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def words(found: Sequence[Straggler], where: str = "") -> list[str]:
    """A line for each unit: `Behind the median of 4 ranks (2.00 steps/s): rank 3 (0.51)`."""
    lines = []
    for unit in dict.fromkeys(each.unit for each in found):
        slow = [each for each in found if each.unit == unit]
        names = [f"rank {each.rank} ({each.per_s:.3g})" for each in slow[:_NAMED_AT_MOST]]
        names += [f"{len(slow) - _NAMED_AT_MOST} more"] if len(slow) > _NAMED_AT_MOST else []
        median = f"the median of {slow[0].compared} ranks{where} ({slow[0].median_per_s:.3g} {unit}/s)"
        lines.append(f"Behind {median}: {', '.join(names)}")
    return lines
