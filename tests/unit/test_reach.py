"""What is made of failed attempts to reach the coordinator: told in time, rarely, and given up only at first."""

from __future__ import annotations

import pytest

from holdfast.rendezvous.reach import GiveUp, Obstacle, Reach, Say


def words(reach: Reach, obstacle: Obstacle, times: list[float]) -> list[Say | GiveUp | None]:
    return [reach.failed(obstacle, "it is down", now) for now in times]


def said(reach: Reach, obstacle: Obstacle, times: list[float]) -> list[float]:
    """When it said something."""
    return [now for now, word in zip(times, words(reach, obstacle, times), strict=True) if isinstance(word, Say)]


def test_what_lasts_is_said_once_and_then_once_a_minute() -> None:
    reach = Reach("host:1", 600.0, 100.0)
    times = [100.0 + 0.5 * step for step in range(400)]
    assert said(reach, Obstacle.UNREACHABLE, times) == [103.0, 163.0, 223.0, 283.0]


def test_what_is_said() -> None:
    reach = Reach("host:1", 600.0, 100.0)
    *_, last = words(reach, Obstacle.UNREACHABLE, [100.0, 101.0, 104.0])
    assert last == Say(
        "no coordinator can be reached at host:1: it is down (tried 3 times in 4 s, trying for 596 s more)"
    )
    assert reach.last_problem == "it is down"
    assert reach.since == 100.0


def test_that_it_is_reached_after_all_is_said_to_whoever_was_told() -> None:
    reach = Reach("host:1", 600.0, 0.0)
    assert reach.reached() is None
    reach.lost(10.0)
    words(reach, Obstacle.UNREACHABLE, [10.1, 14.0])
    assert reach.reached() == Say("the coordinator at host:1 is reached")
    assert reach.since is None
    reach.lost(20.0)
    assert reach.since == 20.0
    assert reach.reached() is None


@pytest.mark.parametrize(
    ("obstacle", "gives_up_at"),
    [
        (Obstacle.TURNED_AWAY, 0.0),
        (Obstacle.CANNOT_HOST, 0.0),
        (Obstacle.SILENT, 5.0),
        (Obstacle.TLS_REFUSED, 5.0),
        (Obstacle.NAME_UNKNOWN, 5.0),
        (Obstacle.HUNG_UP, 10.0),
        (Obstacle.UNREACHABLE, None),
    ],
)
def test_a_mistake_ends_the_first_attempt_within_seconds(obstacle: Obstacle, gives_up_at: float | None) -> None:
    times = [5.0 * step for step in range(100)]
    found = words(Reach("host:1", 600.0, 0.0), obstacle, times)
    ends = [now for now, word in zip(times, found, strict=True) if isinstance(word, GiveUp)]
    assert (ends[0] if ends else None) == gives_up_at


def test_one_silence_is_no_mistake_yet() -> None:
    reach = Reach("host:1", 600.0, 0.0)
    for start in (0.0, 100.0, 200.0):
        assert not isinstance(reach.failed(Obstacle.SILENT, "silent", start), GiveUp)
        assert not isinstance(reach.failed(Obstacle.UNREACHABLE, "refused", start + 50), GiveUp)


@pytest.mark.parametrize("obstacle", Obstacle)
def test_nothing_ends_a_later_attempt(obstacle: Obstacle) -> None:
    reach = Reach("host:1", 600.0, 0.0)
    reach.reached()
    reach.lost(100.0)
    times = [100.0 + step for step in range(200)]
    found = words(reach, obstacle, times)
    assert not [word for word in found if isinstance(word, GiveUp)]
    assert found[3] == Say("no coordinator can be reached at host:1: it is down (tried 4 times in 3 s, still trying)")


def test_a_mistake_is_told_as_it_is() -> None:
    assert Reach("host:1", 600.0, 0.0).failed(Obstacle.TURNED_AWAY, "wrong token", 0.5) == GiveUp("wrong token")
