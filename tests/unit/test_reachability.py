"""What is made of failed attempts to reach the coordinator: told in time, rarely, and given up only at first."""

from __future__ import annotations

import pytest

from holdfast.rendezvous.client.reachability import Obstacle, Reachability, Say


def attempt(now: float = 0.0, resolve_timeout_s: float = 5.0) -> Reachability:
    return Reachability("host:1", 600.0, 60.0, resolve_timeout_s, now)


def words(reach: Reachability, obstacle: Obstacle, times: list[float]) -> list[Say | None]:
    return [reach.failed(obstacle, "it is down", now) for now in times]


def said(reach: Reachability, obstacle: Obstacle, times: list[float]) -> list[float]:
    """When it said something."""
    return [now for now, word in zip(times, words(reach, obstacle, times), strict=True) if word and not word.gives_up]


def test_what_lasts_is_said_once_and_then_once_a_minute() -> None:
    reach = attempt(100.0)
    times = [100.0 + 0.5 * step for step in range(400)]
    assert said(reach, Obstacle.UNREACHABLE, times) == [103.0, 163.0, 223.0, 283.0]


def test_what_is_said() -> None:
    reach = attempt(100.0)
    *_, last = words(reach, Obstacle.UNREACHABLE, [100.0, 101.0, 104.0])
    assert last == Say("cannot reach host:1: it is down (tried 3 times in 4 s, trying for 596 s more)")
    assert reach.last_problem == "it is down"
    assert reach.since == 100.0


def test_that_it_is_reached_after_all_is_said_to_whoever_was_told() -> None:
    reach = attempt()
    assert reach.reached() is None
    reach.lost(10.0)
    words(reach, Obstacle.UNREACHABLE, [10.1, 14.0])
    assert reach.reached() == Say("reached host:1")
    assert reach.since is None
    reach.lost(20.0)
    assert reach.since == 20.0
    assert reach.reached() is None


@pytest.mark.parametrize(
    ("obstacle", "gives_up_at"),
    [
        (Obstacle.TURNED_AWAY, 0.0),
        (Obstacle.TLS_REFUSED, 5.0),
        (Obstacle.NAME_UNKNOWN, 5.0),
        (Obstacle.HUNG_UP, 10.0),
        (Obstacle.UNREACHABLE, None),
    ],
)
def test_a_mistake_ends_the_first_attempt_within_seconds(obstacle: Obstacle, gives_up_at: float | None) -> None:
    times = [5.0 * step for step in range(100)]
    found = words(attempt(), obstacle, times)
    ends = [now for now, word in zip(times, found, strict=True) if word and word.gives_up]
    assert (ends[0] if ends else None) == gives_up_at


def test_a_name_that_appears_late_is_waited_for() -> None:
    reach = attempt(resolve_timeout_s=300.0)
    times = [5.0 * step for step in range(100)]
    found = words(reach, Obstacle.NAME_UNKNOWN, times)
    assert next(now for now, word in zip(times, found, strict=True) if word and word.gives_up) == 300.0
    assert found[1] == Say("cannot reach host:1: it is down (tried 2 times in 5 s, trying for 595 s more)")


def test_a_mistake_counts_from_its_own_beginning() -> None:
    reach = attempt()
    for start in (0.0, 100.0, 200.0):
        for obstacle, now in ((Obstacle.HUNG_UP, start), (Obstacle.UNREACHABLE, start + 50)):
            word = reach.failed(obstacle, "no answer", now)
            assert word is None or not word.gives_up


def test_a_frozen_coordinator_is_waited_for_as_long_as_the_line_says() -> None:
    reach = attempt()
    times = [5.0 * step for step in range(120)]
    found = words(reach, Obstacle.UNREACHABLE, times)
    assert found[1] == Say("cannot reach host:1: it is down (tried 2 times in 5 s, trying for 595 s more)")
    assert not [word for word in found if word and word.gives_up]
    assert reach.gives_up_at() == 600.0
    assert reach.surrender() == "could not reach host:1 within 600 s; the last attempt: it is down"


def test_when_a_node_that_waits_gives_up() -> None:
    reach = attempt(100.0)
    assert (reach.gives_up_at(), reach.surrender()) == (700.0, "could not reach host:1 within 600 s")
    reach.reached()
    assert reach.gives_up_at() is None
    reach.lost(200.0)
    assert (reach.gives_up_at(), reach.surrender()) == (260.0, "could not reach host:1 within 60 s")


@pytest.mark.parametrize("obstacle", Obstacle)
def test_nothing_ends_a_later_attempt(obstacle: Obstacle) -> None:
    reach = attempt()
    reach.reached()
    reach.lost(100.0)
    times = [100.0 + step for step in range(200)]
    found = words(reach, obstacle, times)
    assert not [word for word in found if word and word.gives_up]
    assert found[3] == Say("cannot reach host:1: it is down (tried 4 times in 3 s, still trying)")


def test_a_mistake_is_told_as_it_is() -> None:
    assert attempt().failed(Obstacle.TURNED_AWAY, "wrong token", 0.5) == Say("wrong token", gives_up=True)


def test_the_time_without_a_connection_begins_with_its_loss_alone() -> None:
    reach = attempt()
    reach.reached()
    reach.lost(10.0)
    reach.lost(50.0)  # A connection that never came about is closed, too.
    assert reach.gives_up_at() == 70.0
