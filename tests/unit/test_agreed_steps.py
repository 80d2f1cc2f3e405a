"""The steps that all nodes of a round keep: what they are asked, and when."""

from __future__ import annotations

import time

import pytest

from holdfast.rendezvous.membership.agreed_steps import AgreedSteps
from holdfast.rendezvous.membership.model import (
    Agreed,
    Chosen,
    Complete,
    KeepFrom,
    Place,
    SavedSteps,
    SnapshotId,
    SnapshotOrder,
)
from tests.promises import promise

ROUND = (2, 3)


def begun(
    size: int = 2, copies: int = 1, every_s: float = 0.0, loaded: tuple[int, int, int] | None = None
) -> AgreedSteps:
    steps = AgreedSteps(0.0)
    chosen = Chosen(SnapshotId(*loaded, 2)) if loaded is not None else None
    steps.begin(Place(*ROUND, 0, size, chosen=chosen), copies, every_s)
    return steps


def told(steps: AgreedSteps, reports: dict[str, SavedSteps], now: float = 0.0) -> list[SnapshotOrder]:
    return [order for key, report in reports.items() for order in steps.take(key, report, now)]


def both(**fields: int) -> dict[str, SavedSteps]:
    return dict.fromkeys("ab", SavedSteps(**fields))


def complete(step: int) -> Complete:
    return Complete(3, (*ROUND, step))


@promise("""nodes.agreed-step-kept-by-all: With `--snapshot-copies` or `--snapshot-every` all nodes keep one step until
    each has copied or written its part, also if they run on meanwhile, lose their connections, or get another
    coordinator.""")
def test_an_exchange() -> None:
    steps = begun()
    assert told(steps, {"a": SavedSteps(7), "b": SavedSteps()}) == [], "one has saved nothing yet"
    assert told(steps, {"b": SavedSteps(6)}) == [KeepFrom(3, 8)]
    assert told(steps, {"a": SavedSteps(8, 8), "b": SavedSteps(7)}) == []
    assert told(steps, {"b": SavedSteps(8, 8)}) == [Agreed(3, 8)]
    assert told(steps, {"a": SavedSteps(9, 8, 8), "b": SavedSteps(9, 8)}) == []
    assert told(steps, {"b": SavedSteps(9, 8, 8)}, now=0.9) == [complete(8)], "not more than once a second"
    assert told(steps, both(newest=12, kept=8, stored=8), now=1.0) == [KeepFrom(3, 13)]
    assert told(steps, both(newest=13, kept=13, stored=8), now=2.0) == [Agreed(3, 13)]
    assert told(steps, both(newest=13, kept=13, stored=13), now=2.0) == [complete(13), KeepFrom(3, 14)]


def test_different_answers() -> None:
    """The margin grows to more than what the fastest node was ahead, and shrinks again slowly."""
    steps = begun()
    assert told(steps, both(newest=10)) == [KeepFrom(3, 11)]
    assert told(steps, {"a": SavedSteps(11, 11), "b": SavedSteps(15, 15)}) == [KeepFrom(3, 25)]
    assert told(steps, {"a": SavedSteps(11, 11), "b": SavedSteps(24, 15)}) == [], "answers to the first question"
    assert told(steps, both(newest=26, kept=26)) == [Agreed(3, 26)]
    assert told(steps, both(newest=26, kept=26, stored=26), now=2.0) == [complete(26), KeepFrom(3, 35)]


def test_files_are_written_now_and_then() -> None:
    steps = begun(copies=0, every_s=60.0)
    assert told(steps, both(newest=5), now=59.0) == []
    assert told(steps, both(newest=6), now=60.0) == [KeepFrom(3, 7)]
    assert told(steps, both(newest=7, kept=7), now=61.0) == [Agreed(3, 7, to_disk=True)]
    assert told(steps, both(newest=7, kept=7, stored=7), now=70.0) == [complete(7)]
    assert told(steps, both(newest=9, kept=7, stored=7), now=129.0) == []
    steps.begin(Place(2, 4, 0, 2), 0, 60.0)  # The next round does not begin the time anew.
    assert told(steps, both(newest=12), now=130.0) == [KeepFrom(4, 13)]


def test_files_beside_copies() -> None:
    steps, found = begun(every_s=60.0), []
    for step in range(1, 9):
        orders = told(steps, both(newest=step, kept=step, stored=step), now=10.0 * step)
        orders += told(steps, both(newest=step, kept=step, stored=step), now=10.0 * step)
        found += [(each.step, each.to_disk) for each in orders if isinstance(each, Agreed)]
    assert found == [(2, False), (3, False), (4, False), (5, False), (6, True), (7, False), (8, False)]


def test_a_node_that_cannot_store_it() -> None:
    steps = begun()
    told(steps, both(newest=1))
    told(steps, both(newest=2, kept=2))
    assert told(steps, {"a": SavedSteps(2, 2, 2), "b": SavedSteps(2, 2, failed=2)}, now=5.0) == []
    assert told(steps, both(newest=3, kept=2, stored=2), now=14.9) == []
    assert told(steps, both(newest=3, kept=2, stored=2), now=15.0) == [KeepFrom(3, 4)]


def test_what_a_node_may_have_missed_is_said_again() -> None:
    steps = begun()
    assert steps.repeated() == []
    told(steps, both(newest=1))
    assert steps.repeated() == [KeepFrom(3, 2)]
    told(steps, both(newest=2, kept=2))
    assert steps.repeated() == [Agreed(3, 2)]
    told(steps, both(newest=2, kept=2, stored=2), now=1.0)
    assert steps.repeated() == [complete(2), KeepFrom(3, 3)]


def test_a_complete_step_of_an_earlier_round_is_told_to_all_before_they_are_asked() -> None:
    """One of them may have missed that it is complete."""
    steps, before = begun(), Complete(3, (2, 1, 90))
    known = {"a": SavedSteps(5, complete=(2, 1, 80)), "b": SavedSteps(5, complete=(2, 1, 90))}
    assert told(steps, known) == [before, KeepFrom(3, 6)]
    assert told(steps, both(newest=6, kept=6)) == [Agreed(3, 6)]
    assert told(steps, both(newest=6, kept=6, stored=6)) == [complete(6)]


class Runner:
    """A node that makes steps all the time, reports once a second, and answers at once."""

    def __init__(self, pace: float, lag_s: float) -> None:
        self._pace, self._lag_s = pace, lag_s
        self._asked: int | None = None
        self._kept: int | None = None

    def hear(self, order: KeepFrom) -> None:
        self._asked, self._kept = order.step, None

    def report(self, tick: int) -> SavedSteps | None:
        newest = int(self._pace * max(0.0, tick / 100 - self._lag_s))
        if self._asked is not None and newest >= self._asked:
            self._asked, self._kept = None, newest
            return SavedSteps(newest, self._kept)
        return SavedSteps(newest, self._kept) if tick % 100 == 0 else None


@pytest.mark.parametrize(
    ("loaded", "known", "told_of"),
    [((2, 2, 95), (2, 2, 90), True), ((2, 2, 90), (2, 2, 90), True), ((2, 2, 85), (2, 2, 90), False)]
    + [((2, 2, 85), (2, 3, 4), True), (None, (2, 2, 90), True)],
)
def test_a_complete_step_that_was_given_up(
    loaded: tuple[int, int, int] | None, known: tuple[int, int, int], told_of: bool
) -> None:
    """Nodes discard what is newer than what they load: it must not make them let go what is older."""
    orders = told(begun(loaded=loaded), dict.fromkeys("ab", SavedSteps(5, complete=known)))
    assert orders == [*([Complete(3, known)] if told_of else []), KeepFrom(3, 6)]


@pytest.mark.parametrize("pace", [0.5, 7, 100, 5000])
def test_nodes_that_are_fast_are_soon_asked_far_enough_ahead(pace: float) -> None:
    """A report and an order take 50 ms each, and one node is 20 ms behind: together they are seldom asked in time."""
    steps, nodes = begun(), {"a": Runner(pace, 0.0), "b": Runner(pace, 0.02)}
    reports: dict[int, list[tuple[str, SavedSteps]]] = {}
    orders: dict[int, list[SnapshotOrder]] = {}
    asked = 0
    for tick in range(3000):
        for key, node in nodes.items():
            if (report := node.report(tick)) is not None:
                reports.setdefault(tick + 5, []).append((key, report))
        for key, report in reports.pop(tick, []):
            orders.setdefault(tick + 5, []).extend(steps.take(key, report, tick / 100))
        for order in orders.pop(tick, []):
            if isinstance(order, Agreed):
                assert asked <= 4
                return
            assert isinstance(order, KeepFrom)
            asked += 1
            for node in nodes.values():
                node.hear(order)
    pytest.fail(f"they do not agree, asked {asked} times")


def test_nothing_is_asked_if_nothing_is_wanted() -> None:
    steps = begun(copies=0)
    assert told(steps, both(newest=7)) == []
    assert steps.repeated() == []


def test_very_many_nodes() -> None:
    """Next to nothing, and far more than 2 s if each report costs as much as there are nodes."""
    many = 4000
    steps, began = begun(many), time.thread_time()
    for report in (SavedSteps(1), SavedSteps(2, 2), SavedSteps(2, 2, 2)):
        orders = told(steps, dict.fromkeys(map(str, range(many)), report), now=0.0)
    assert orders == [complete(2)]
    assert time.thread_time() - began < 2.0


@pytest.mark.parametrize(("loaded", "is_told"), [((*ROUND, 9), True), ((*ROUND, 7), False), (None, False)])
def test_a_complete_step_that_all_members_may_have_missed_is_told_in_the_next_round(
    loaded: tuple[int, int, int] | None, is_told: bool
) -> None:
    """Unless the next round has gone back behind it."""
    steps = begun()
    for reports in (both(newest=7), both(newest=8, kept=8), both(newest=9, kept=8, stored=8)):
        told(steps, reports)
    chosen = Chosen(SnapshotId(*loaded, 2)) if loaded is not None else None
    steps.begin(Place(2, 4, 0, 2, chosen=chosen), 1, 0.0)
    again = [Complete(4, (*ROUND, 8))] if is_told else []
    assert told(steps, both(newest=10)) == [*again, KeepFrom(4, 11)]
