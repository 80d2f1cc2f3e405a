"""How fast workers are, and which of them are behind: samples in, findings out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.telemetry import stragglers
from holdfast.telemetry.stragglers import FACTOR, LINES, STEPS, WINDOW_S, Rate, Straggler, Track, find, words
from tests.promises import promise, proves


def track_of(*samples: tuple[float, int]) -> Track:
    track = Track(STEPS)
    for at, count in samples:
        track = track.added(at, count)
    return track


def per_s(track: Track, now: float) -> float:
    rate = track.rate(now)
    assert rate is not None
    return round(rate.per_s, 6)


def test_a_rate_is_steps_over_time() -> None:
    track = track_of((10.0, 0), (15.0, 10), (20.0, 20))
    assert per_s(track, 20.0) == per_s(track, 24.9) == 2.0
    assert track.rate(24.0) == Rate(2.0, STEPS, 14.0)


def test_two_samples_are_needed() -> None:
    assert Track(STEPS).rate(5.0) is None
    assert track_of((10.0, 0)).rate(1000.0) is None


@proves("steering.worker-steps-take-long")
def test_one_that_stands_still_becomes_slow() -> None:
    """The step that it works on counts as done."""
    track = track_of((0.0, 0), (10.0, 1), (20.0, 2))
    assert per_s(track, 30.0) == 0.1
    assert per_s(track, 60.0) == 0.05
    assert per_s(track, 300.0) == 0.01


@promise("""steering.worker-steps-take-long: A worker whose steps take long is not slow while it takes one; one that
    stands still becomes slow.""")
def test_steps_that_take_long_are_not_slow_meanwhile() -> None:
    """Each call of the worker reports a hundred steps, every 50 s."""
    track = track_of((0.0, 0), (50.0, 100), (100.0, 200))
    assert per_s(track, 100.0) == per_s(track, 149.0) == 2.0


def test_only_the_last_minute_counts_or_the_last_steps_if_they_take_longer() -> None:
    slow_then_fast = track_of(*((float(at), at) for at in range(0, 600, 5)))
    for at in range(600, 665, 5):
        slow_then_fast = slow_then_fast.added(float(at), 600 + (at - 600) * 10)
    assert per_s(slow_then_fast, 660.0) > 9.0
    assert len(slow_then_fast.samples) <= 2 + WINDOW_S / 5
    long_steps = track_of(*((300.0 * number, number) for number in range(10)))
    assert len(long_steps.samples) == 5
    assert per_s(long_steps, 2700.0) == round(1 / 300, 6)


def test_a_count_that_falls_begins_anew() -> None:
    track = track_of((0.0, 0), (10.0, 100), (20.0, 3))
    assert track.samples == ((20.0, 3),)


def test_the_same_call_is_no_sample() -> None:
    track = track_of((0.0, 0), (10.0, 100))
    assert track.added(10.0, 100) is track
    assert track.added(9.0, 100) is track


def rates(*values: float, unit: str = STEPS, window_s: float = 60.0) -> dict[int, Rate]:
    return {rank: Rate(value, unit, window_s) for rank, value in enumerate(values)}


@proves("steering.status-top-json-report")
@pytest.mark.parametrize(
    ("known", "slow"),
    [
        ({}, []),
        (rates(1.0), []),
        (rates(1.0, 1.0, 1.0, 0.7), []),
        (rates(1.0, 1.0, 1.0, 0.6), [3]),
        (rates(0.1, 1.0, 1.0, 0.5, 1.0), [0, 3]),
        (rates(1.0, 0.4), [1]),
        (rates(1.0, 0.6), []),  # The median of two lies between them.
        (rates(1.0, 1.0, 1.0, 0.0), [3]),
        (rates(0.0, 0.0), []),
        (rates(1.0, 1.0, 1.0, 0.1, window_s=stragglers.LEAST_WINDOW_S - 1), []),
        ({**rates(100.0, 100.0, unit=LINES), 7: Rate(1.0, STEPS, 60.0)}, []),
    ],
)
def test_who_is_behind(known: dict[int, Rate], slow: list[int]) -> None:
    assert [each.rank for each in find(known)] == slow


def test_words() -> None:
    found = find(rates(2.0, 2.0, 2.0, 0.51, 1.0))
    assert found[0] == Straggler(3, 0.51, 2.0, STEPS, 5)
    assert words(found) == ["Behind the median of 5 ranks (2 steps/s): rank 3 (0.51), rank 4 (1)"]
    assert words(found, " on node2") == ["Behind the median of 5 ranks on node2 (2 steps/s): rank 3 (0.51), rank 4 (1)"]
    assert words([]) == []
    many = find(rates(*([1.0] * 4000), *([0.1] * 20)))
    assert words(many)[0].endswith("rank 4007 (0.1), 12 more")
    assert len(words(many)[0]) < 250


@given(st.lists(st.floats(0, 1e6, allow_nan=False), max_size=50))
def test_findings_hold(values: list[float]) -> None:
    found = find(rates(*values))
    assert len(found) <= len(values) / 2
    for each in found:
        assert each.per_s == values[each.rank]
        assert each.per_s * FACTOR < each.median_per_s


@given(st.lists(st.tuples(st.floats(0, 1e5), st.integers(-(1 << 60), 1 << 60)), max_size=200), st.floats(0, 1e6))
def test_any_samples(samples: list[tuple[float, int]], now: float) -> None:
    track = track_of(*samples)
    assert len(track.samples) <= 64
    rate = track.rate(now)
    assert rate is None or (rate.per_s >= 0 and rate.window_s > 0)
