"""What a run's history says after some events: times, ends, restarts, goodput; and the line that people read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.failures.records import HANG
from holdfast.observe.words import history_line
from holdfast.rendezvous.membership.model import CloseRequested, Memory, Place
from holdfast.rendezvous.membership.phases import Membership
from holdfast.rendezvous.membership.protocol import ConnectionClosed, TimePassed
from holdfast.rendezvous.membership.restart_policy import Advance
from holdfast.telemetry import history
from holdfast.telemetry.history import History
from holdfast.telemetry.status import plain
from tests.promises import promise, proves
from tests.unit.test_phases import PAIR, RETRY, UP_TO_2, failed, joined, left, returned, succeeded

Change = Callable[[History], History]


def begin(round: int, now: float) -> Change:
    return lambda told: told.begin_round(round, 2, 4, now)


def run(now: float) -> Change:
    return lambda told: told.run(now)


def stop(end: str, now: float, idle_s: float | None = None, detection_s: float | None = None) -> Change:
    return lambda told: told.stop(end, f"it {end}", now, idle_s, detection_s)


def amend(end: str, idle_s: float | None = None) -> Change:
    return lambda told: told.amend(end, f"it {end}", idle_s)


def finish(end: str, now: float) -> Change:
    return lambda told: told.finish(end, "the end", now)


FIRST = (begin(1, 10.0), run(12.0))
SECOND = (begin(2, 55.0), run(60.0))

# Events; the time of the look; ran_s, lost_s and end of each round; productive_s, lost_s and wall_s of the run.
Row = tuple[tuple[Change, ...], float, list[tuple[float, float, str | None]], tuple[float, float, float]]
TABLE: dict[str, Row] = {
    "nothing has happened": ((), 5.0, [], (0.0, 0.0, 5.0)),
    "not even time": ((), 0.0, [], (0.0, 0.0, 0.0)),
    "the first round starts: that loses nothing": ((begin(1, 10.0),), 11.0, [(0.0, 0.0, None)], (0.0, 0.0, 11.0)),
    "it runs": (FIRST, 32.0, [(20.0, 0.0, None)], (20.0, 0.0, 32.0)),
    "it begins to run once": ((*FIRST, run(20.0)), 32.0, [(20.0, 0.0, None)], (20.0, 0.0, 32.0)),
    "it failed": ((*FIRST, stop("failed", 50.0)), 53.0, [(38.0, 3.0, "failed")], (38.0, 3.0, 53.0)),
    "the next one starts": (
        (*FIRST, stop("failed", 50.0), begin(2, 55.0)), 57.0,
        [(38.0, 7.0, "failed"), (0.0, 0.0, None)], (38.0, 7.0, 57.0),
    ),
    "the next one runs": (
        (*FIRST, stop("failed", 50.0), *SECOND), 100.0,
        [(38.0, 10.0, "failed"), (40.0, 0.0, None)], (78.0, 10.0, 100.0),
    ),
    "work after the last progress is lost": (
        (*FIRST, stop("failed", 50.0, 8.0), *SECOND), 100.0,
        [(38.0, 18.0, "failed"), (40.0, 0.0, None)], (70.0, 18.0, 100.0),
    ),
    "so it is in a round that hung": (
        (*FIRST, stop("hung", 50.0, 30.0), *SECOND), 60.0, [(38.0, 40.0, "hung"), (0.0, 0.0, None)], (8.0, 40.0, 60.0)
    ),
    "but not more than the round ran": (
        (*FIRST, stop("node lost", 50.0, 500.0)), 50.0, [(38.0, 38.0, "node lost")], (0.0, 38.0, 50.0)
    ),
    "and not if the change was planned": (
        (*FIRST, stop("membership changed", 50.0, 8.0), *SECOND), 60.0,
        [(38.0, 10.0, "membership changed"), (0.0, 0.0, None)], (38.0, 10.0, 60.0),
    ),
    "the last progress is known later": (
        (*FIRST, stop("failed", 50.0), amend("node lost", 8.0), *SECOND), 60.0,
        [(38.0, 18.0, "node lost"), (0.0, 0.0, None)], (30.0, 18.0, 60.0),
    ),
    "also of a later round": (
        (*FIRST, stop("failed", 50.0), *SECOND, stop("failed", 90.0), amend("hung", 5.0)), 91.0,
        [(38.0, 10.0, "failed"), (30.0, 6.0, "hung")], (63.0, 16.0, 91.0),
    ),
    "only the first stop counts": (
        (*FIRST, stop("failed", 50.0), stop("closed", 52.0)), 53.0, [(38.0, 3.0, "failed")], (38.0, 3.0, 53.0)
    ),
    "one that never ran loses the time after its own stop": (
        (*FIRST, stop("failed", 50.0), begin(2, 55.0), stop("failed", 56.0), begin(3, 57.0), run(60.0)), 61.0,
        [(38.0, 6.0, "failed"), (0.0, 4.0, "failed"), (1.0, 0.0, None)], (39.0, 10.0, 61.0),
    ),
    "success loses nothing": (
        (*FIRST, finish("succeeded", 50.0)), 99.0, [(38.0, 0.0, "succeeded")], (38.0, 0.0, 50.0)
    ),
    "nor does a run that is closed": (
        (*FIRST, stop("closed", 50.0), finish("closed", 55.0)), 99.0, [(38.0, 0.0, "closed")], (38.0, 0.0, 55.0)
    ),
    "a run that fails loses time until its end": (
        (*FIRST, stop("failed", 50.0, 1.0), finish("failed", 55.0)), 99.0, [(38.0, 6.0, "failed")], (37.0, 6.0, 55.0)
    ),
    "after the end nothing changes": (
        (*FIRST, finish("succeeded", 50.0), finish("failed", 60.0), lambda told: told.enter("x", 70.0)), 99.0,
        [(38.0, 0.0, "succeeded")], (38.0, 0.0, 50.0),
    ),
}  # fmt: skip


def told_of(changes: tuple[Change, ...], now: float) -> History:
    told = History()
    for change in changes:
        told = change(told)
    told.check(now)
    return told


@proves("steering.status-history-run-node")
@pytest.mark.parametrize("name", TABLE)
def test_times(name: str) -> None:
    changes, now, rounds, sums = TABLE[name]
    shown = plain(told_of(changes, now).told(now))
    assert [(each["ran_s"], each["lost_s"], each["end"]) for each in shown["rounds"]] == rounds
    assert (shown["productive_s"], shown["lost_s"], shown["wall_s"]) == sums
    assert shown["goodput"] == (round(sums[0] / sums[2], 4) if sums[2] else 0.0)


def test_the_json_form() -> None:
    changes = (
        lambda told: told.enter("joining", 0.0), *FIRST, lambda told: told.enter("running", 12.0),
        stop("failed", 50.0, 8.0, 0.0041), lambda told: told.enter("joining", 51.0), *SECOND,
    )  # fmt: skip
    assert json.loads(json.dumps(plain(told_of(changes, 61.0).told(61.0)))) == {
        "rounds": [
            {"round": 1, "nodes": 2, "workers": 4, "began_ago_s": 51.0, "ran_s": 38.0, "lost_s": 18.0,
             "end": "failed", "cause": "it failed"},
            {"round": 2, "nodes": 2, "workers": 4, "began_ago_s": 6.0, "ran_s": 1.0, "lost_s": 0.0, "end": None,
             "cause": ""},
        ],
        "round_count": 2,
        "phase_s": {"joining": 22.0, "running": 39.0},
        "restarts": {"failure": 1, "hang": 0, "node lost": 0, "membership changed": 0},
        "lost_s": 18.0,
        "productive_s": 31.0,
        "wall_s": 61.0,
        "goodput": 0.5082,
        "detection_s": 0.0041,
        "is_whole": True,
    }  # fmt: skip


@proves("steering.status-history-run-node")
def test_it_is_bounded_and_sums_stay_right() -> None:
    told, now = History(), 0.0
    for round in range(1, 301):
        told = told.begin_round(round, 1, 1, now).run(now + 1).stop("failed", "x" * 1000, now + 4)
        now += 5.0
    shown = plain(told.told(now))
    assert (len(shown["rounds"]), shown["round_count"], shown["rounds"][0]["round"]) == (64, 300, 237)
    # Each runs for 3 s and loses 2 s, but the last one, which is not followed by another yet, 1 s.
    assert (shown["productive_s"], shown["lost_s"], shown["restarts"]["failure"]) == (900.0, 599.0, 299)
    assert len(json.dumps(shown)) < 64 * 400
    told.check(now)


ENDS = st.sampled_from([*history.RESTART_CAUSES])
STEPS = st.lists(st.tuples(st.sampled_from(["begin", "run", "stop", "amend"]), st.floats(0, 9), ENDS), max_size=40)


@proves("steering.status-history-run-node")
@given(STEPS, st.booleans())
def test_parts_are_never_more_than_the_whole(steps: list[tuple[str, float, str]], has_ended: bool) -> None:
    told, now, round = History(), 0.0, 0
    for what, wait_s, end in steps:
        now += wait_s
        match what:
            case "begin" if round == 0 or told.rounds[-1].stopped is not None:
                round += 1
                told = told.begin_round(round, 1, 1, now)
            case "run" if round and told.rounds[-1].stopped is None:
                told = told.run(now)
            case "stop":
                told = told.stop(end, "", now, wait_s)
            case "amend":
                told = told.amend(end, "", wait_s)
        told.check(now)
    told = told.finish("failed", "", now) if has_ended else told
    told.check(now + 5)
    assert sum(plain(told.told(now))["restarts"].values()) == max(0, round - 1)


# The coordinator's. Events with their times, then: number and end of each round, restarts by cause, cause of the first.
RUNS = [(0.0, joined("a", RETRY, local_world_size=2)), (1.0, joined("b", RETRY))]
AGAIN = [(12.0, joined("a", RETRY, 1)), (13.0, joined("b", RETRY, 1))]
HISTORIES: dict[str, tuple[list[tuple[float, Any]], list[tuple[int, str | None]], dict[str, int], str]] = {
    "it runs": (RUNS, [(1, None)], {}, ""),
    "a failure": ([*RUNS, (9.0, failed("a")), *AGAIN], [(1, "failed"), (2, None)], {"failure": 1}, "a broke"),
    "a hang": (
        [*RUNS, (9.0, failed("a", exception=HANG)), *AGAIN], [(1, "hung"), (2, None)], {"hang": 1}, "a broke"
    ),
    "a failure, and then a node is lost": (
        [*RUNS, (9.0, failed("a")), (9.0, ConnectionClosed("b/0")), (15.0, joined("a", RETRY, 1)),
         (29.0, TimePassed()), (29.1, joined("c", RETRY))],
        [(1, "node lost"), (2, None)], {"node lost": 1},
        "b is lost: its connection closed and it was not back within 20 s",
    ),
    "a node leaves": (
        [*RUNS, (9.0, left("b")), (10.0, joined("a", RETRY, 1)), (11.0, joined("c", RETRY))],
        [(1, "membership changed"), (2, None)], {"membership changed": 1}, "b left",
    ),
    "a newcomer": (
        [(0.0, joined("a", UP_TO_2)), (6.0, TimePassed()), (7.0, joined("b", UP_TO_2)), (8.0, joined("a", UP_TO_2, 1))],
        [(1, "membership changed"), (2, None)], {"membership changed": 1}, "b joins",
    ),
    "success": (
        [*RUNS, (9.0, succeeded("a")), (10.0, succeeded("b"))], [(1, "succeeded")], {}, "all workers have succeeded"
    ),
    "closed": ([*RUNS, (9.0, CloseRequested("enough"))], [(1, "closed")], {}, "enough"),
}  # fmt: skip


@proves("steering.status-history-run-node")
@pytest.mark.parametrize("name", HISTORIES)
def test_the_history_of_a_run(name: str) -> None:
    events, rounds, restarts, cause = HISTORIES[name]
    machine = Membership(0.0)
    for at, event in events:
        machine.step(event, at)
        machine.check()
    shown = plain(machine.history.told(events[-1][0]))
    assert [(each["round"], each["end"]) for each in shown["rounds"]] == rounds
    assert {cause: count for cause, count in shown["restarts"].items() if count} == restarts
    assert (shown["rounds"][0]["cause"], shown["is_whole"]) == (cause, True)


@promise("""steering.workers-report-progress-failed: If workers report progress, what a failed round did after the last
    of it counts as lost.""")
def test_what_nodes_say_of_their_last_progress_counts() -> None:
    """It is a number of seconds before the stop: no clock of a node is compared with another. The last progress of any
    node is that of the round."""
    machine = Membership(0.0)
    for at, event in RUNS:
        machine.step(event, at)
    machine.step(failed("a"), 61.0)
    machine.step(joined("a", RETRY, 1, advance=Advance(5, idle_s=20.0)), 62.0)
    machine.step(joined("b", RETRY, 1, advance=Advance(5, idle_s=4.0)), 63.0)
    shown = plain(machine.history.told(63.0))
    assert (shown["rounds"][0]["ran_s"], shown["rounds"][0]["lost_s"], shown["productive_s"]) == (60.0, 6.0, 56.0)
    assert (shown["rounds"][0]["nodes"], shown["rounds"][0]["workers"]) == (2, 3)
    assert shown["phase_s"] == {"forming": 1.0, "running": 60.0, "stopping": 2.0}


@promise("steering.coordinator-took-over-begins: A coordinator that took over begins its history anew, and says so.")
def test_a_coordinator_that_took_over_begins_anew() -> None:
    machine = Membership(100.0, Memory(last_round=3, members=("a/0", "b/0"), restarts_used=1, settings=PAIR))
    place = Place(1, 3, 0, 2, (("default", 1),))
    machine.step(returned("a", PAIR, place), 101.0)
    shown = plain(machine.history.told(111.0))
    assert [(each["round"], each["ran_s"]) for each in shown["rounds"]] == [(3, 10.0)]
    assert (shown["is_whole"], shown["wall_s"], shown["restarts"]["failure"]) == (False, 11.0, 0)
    # An agent that came later does not know the first rounds, either.
    assert not History().begin_round(2, 1, 1, 0.0).is_whole
    assert History().begin_round(1, 1, 1, 0.0).is_whole


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (told_of(FIRST, 50.0), ""),
        (
            told_of((*FIRST, stop("failed", 50.0), *SECOND), 100.0),
            "2 rounds, 1 restart after a failure; 10 s lost, goodput 78 %",
        ),
        (
            told_of((*FIRST, stop("hung", 20.0), begin(2, 21.0), run(22.0), stop("hung", 23.0), begin(3, 24.0),
                     stop("node lost", 97.0), begin(4, 98.0), run(99.0)), 100.0),
            "4 rounds, 2 restarts after hangs, 1 after a node was lost; 1m18s lost, goodput 10 %",
        ),
        (
            told_of((begin(7, 10.0), run(12.0), stop("failed", 40.0)), 100.0),
            "1 round; 1m00s lost, goodput 28 % (of the last 1m40s, earlier rounds are not known)",
        ),
    ],
)  # fmt: skip
def test_the_line_for_people(told: History, line: str) -> None:
    assert history_line(told.told(100.0)) == line
