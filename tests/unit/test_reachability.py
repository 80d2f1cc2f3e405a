"""What is made of failed attempts to reach the coordinator: told in time, rarely, and given up only at first."""

from __future__ import annotations

import pytest

from holdfast.rendezvous.client.reachability import Obstacle, Reachability, Say
from tests.promises import promise, proves

STEPS = [5.0 * step for step in range(100)]


def attempt(now: float = 0.0, resolve_timeout_s: float = 5.0, *, is_fixed: bool = True) -> Reachability:
    """`join_timeout` is 600 s, `outage_timeout` 60 s."""
    return Reachability("host:1", 600.0, 60.0, resolve_timeout_s, now, is_fixed=is_fixed)


def away(now: float, *, is_fixed: bool = True) -> Reachability:
    """One whose connection breaks at `now`, after the node has had a place."""
    reach = attempt(is_fixed=is_fixed)
    reach.reached(0.0)
    reach.placed()
    reach.lost(now)
    return reach


def words(reach: Reachability, times: list[float], obstacle: Obstacle = Obstacle.PASSING) -> dict[float, Say]:
    """All that it says, and when."""
    found = {now: reach.failed(obstacle, "it is down", now) for now in times}
    return {now: word for now, word in found.items() if word}


@promise("""coordinator.nothing-listens-answers-yet: If nothing listens or answers yet, the node reports it after
    seconds, after a minute and then once an hour, with the time that is left. Once a node was part of the run, this
    does not end it.""")
@proves("etcd-runs.longer-outage-longer-join")
def test_an_outage_is_said_after_seconds_after_a_minute_and_then_once_an_hour() -> None:
    found = words(away(100.0), [100.0 + 0.5 * step for step in range(30_000)])
    assert list(found) == [103.0, 160.0, 3760.0, 7360.0, 10960.0, 14560.0]


def test_what_is_said() -> None:
    found = words(attempt(100.0), [100.0, 101.0, 104.0, 200.0])
    assert list(found.values()) == [
        Say("cannot reach host:1: it is down (tried 3 times in 4 s); this node tries for 596 s more (join_timeout)"),
        Say("cannot reach host:1: it is down (tried 4 times in 100 s); this node tries for 500 s more (join_timeout)"),
    ]


@promise("""coordinator.host-tcp-stays-away: If the coordinator's host on tcp stays away for a minute, each node says
    once that this host had the coordinator, how long the node waits, and that a run on etcd survives the loss.""")
@pytest.mark.parametrize("is_fixed", [True, False])
def test_the_loss_of_the_coordinators_host_is_explained_once(is_fixed: bool) -> None:
    """With the time that is left, and what would have helped; not where any host can have the next coordinator."""
    reach = away(100.0, is_fixed=is_fixed)
    before, *later = words(reach, [float(step) for step in range(100, 10_000)]).values()
    assert before.text.endswith("this node tries for 57 s more (outage_timeout)")
    advice = (
        "; that host had the coordinator, and no other can take over: start an agent or `holdfast coordinator` there; "
        "with --rdzv-backend etcd a run survives the loss of any host"
    )
    assert [each.text.endswith(advice) for each in later] == [is_fixed, False, False]


@proves("coordinator.host-tcp-stays-away")
def test_a_node_with_workers_waits_while_they_run() -> None:
    word = away(100.0).failed(Obstacle.PASSING, "refused", 104.0, is_waiting=False)
    assert word == Say("cannot reach host:1: refused (tried once in 4 s); this node tries while its workers run")


def test_the_end_of_an_outage_is_said_if_the_outage_was() -> None:
    reach = attempt()
    assert reach.reached(0.1) is None
    reach.lost(10.0)
    words(reach, [10.1, 14.0])
    assert reach.reached(15.0) == Say("reached host:1")
    assert reach.since is None
    reach.lost(20.0)
    assert reach.since == 20.0
    assert reach.reached(20.1) is None


@promise("""coordinator.name-nothing-knows-ends: A name that nothing knows ends the start of a node after
    `--resolve-timeout`, 5 s if left out.""")
@promise("""coordinator.wrong-endpoint-ends-first: A wrong endpoint ends the first attempt within seconds and in one
    line: a name that does not resolve, another program at the port, a coordinator or an agent of another major
    version.""")
@proves("coordinator.newcomer-waits-frozen-join")
@pytest.mark.parametrize(
    ("obstacle", "resolve_timeout_s", "gives_up_at"),
    [
        (Obstacle.MISTAKE, 5.0, 0.0),
        (Obstacle.DOUBTFUL, 5.0, 10.0),
        (Obstacle.DOUBTFUL, 300.0, 300.0),
        (Obstacle.PASSING, 5.0, None),
    ],
)
def test_a_mistake_ends_the_first_attempt_within_seconds(
    obstacle: Obstacle, resolve_timeout_s: float, gives_up_at: float | None
) -> None:
    found = words(attempt(resolve_timeout_s=resolve_timeout_s), STEPS, obstacle)
    assert next((now for now, word in found.items() if word.gives_up), None) == gives_up_at


def test_a_mistake_is_told_as_it_is() -> None:
    assert attempt().failed(Obstacle.MISTAKE, "wrong token", 0.5) == Say("wrong token", gives_up=True)


def test_doubt_counts_from_its_own_beginning() -> None:
    reach = attempt()
    for start in (0.0, 100.0, 200.0):
        for obstacle, now in ((Obstacle.DOUBTFUL, start), (Obstacle.PASSING, start + 50)):
            word = reach.failed(obstacle, "no answer", now)
            assert word is None or not word.gives_up


@proves("coordinator.nothing-listens-answers-yet")
@pytest.mark.parametrize("obstacle", Obstacle)
def test_nothing_ends_a_later_attempt(obstacle: Obstacle) -> None:
    assert not [word for word in words(away(100.0), STEPS[20:], obstacle).values() if word.gives_up]


@promise("""coordinator.node-workers-waits: A node without workers waits for an unreachable coordinator for
    `join_timeout`, and once it has had a place for `outage_timeout`.""")
def test_when_a_node_that_waits_gives_up() -> None:
    """`join_timeout` counts until it has had a place, however often it was welcome, and `outage_timeout` after that."""
    reach = attempt(100.0)
    assert (reach.gives_up_at(), reach.surrender()) == (700.0, "could not reach host:1 within 600 s")
    reach.reached(150.0)
    assert reach.gives_up_at() is None
    reach.lost(200.0)
    assert reach.gives_up_at() == 800.0
    reach.reached(210.0)
    reach.placed()
    reach.lost(300.0)
    reach.lost(350.0)  # A connection that never came about is closed, too.
    reach.failed(Obstacle.PASSING, "it is down", 301.0)
    said = "could not reach host:1 within 60 s; the last attempt: it is down"
    assert (reach.gives_up_at(), reach.surrender()) == (360.0, said)


FULL = "etcd at e:1: mvcc: database space exceeded"


def refuse(reach: Reachability, reached_at: float, refused_at: float) -> Say | None:
    reach.reached(reached_at)
    word = reach.refused(FULL, refused_at)
    reach.lost(refused_at + 0.1)
    return word


@proves("etcd-runs.etcd-refuses-coordinator")
def test_coordinators_that_cannot_write_do_not_count_as_reached() -> None:
    """It is said once, and the node gives up when the time that began with the first of them is over."""
    reach = away(100.0)
    assert refuse(reach, 101.0, 110.0) == Say(f"the coordinator steps down: {FULL}")
    assert reach.gives_up_at() == 160.0
    assert words(reach, [111.0, 114.0])
    assert refuse(reach, 120.0, 121.0) is None
    assert reach.gives_up_at() == 160.0
    assert not words(reach, [121.5, 140.0])
    assert reach.surrender() == f"no coordinator could go on within 60 s: {FULL}"


def test_a_refusal_counts_no_more_when_a_coordinator_could_write() -> None:
    reach = away(100.0)
    refuse(reach, 101.0, 110.0)
    reach.reached(120.0)
    reach.placed()
    reach.lost(130.0)
    assert (reach.gives_up_at(), reach.surrender()) == (190.0, "could not reach host:1 within 60 s")


def test_a_refusal_after_a_long_connection_begins_anew() -> None:
    reach = away(100.0)
    refuse(reach, 101.0, 110.0)
    refuse(reach, 120.0, 5000.0)
    assert reach.gives_up_at() == 5060.0
