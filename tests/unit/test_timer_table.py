"""The table of armed timers: who is in it, who has run out, and which life of a pid a timer belongs to."""

from __future__ import annotations

import pytest

from holdfast.timer.table import TimerTable

PID, OTHER = 100, 200


def armed(*timers: tuple[int, str, float]) -> TimerTable:
    table = TimerTable()
    for pid, scope, deadline in timers:
        table.register(pid, scope, deadline, f"{pid}/{scope}", started=1)
    return table


@pytest.mark.parametrize(
    ("now", "expired"),
    [
        (0.9, {}),
        (1.0, {PID: ["100/a"]}),
        (2.5, {PID: ["100/a"], OTHER: ["200/b"]}),
        (9.0, {PID: ["100/a", "100/c"], OTHER: ["200/b"]}),
    ],
)
def test_a_timer_expires_at_its_deadline_and_not_before(now: float, expired: dict[int, list[str]]) -> None:
    table = armed((PID, "c", 3.0), (OTHER, "b", 2.0), (PID, "a", 1.0))
    assert table.expired(now) == expired
    assert table.expired(now) == expired, "asking does not disarm"


def test_arming_again_moves_the_deadline_both_ways() -> None:
    table = armed((PID, "a", 1.0), (PID, "a", 5.0))
    assert (len(table), table.expired(4.0), table.next_deadline()) == (1, {}, 5.0)
    table.register(PID, "a", 2.0, "sooner", started=1)
    assert (len(table), table.expired(4.0), table.next_deadline()) == (1, {PID: ["sooner"]}, 2.0)


def test_releasing_disarms_one_scope_and_forgetting_all_of_a_process() -> None:
    table = armed((PID, "a", 1.0), (PID, "b", 2.0), (OTHER, "a", 3.0))
    table.release(PID, "a")
    assert ((PID, "a") in table, (PID, "b") in table, (OTHER, "a") in table) == (False, True, True)
    assert table.next_deadline() == 2.0
    table.forget(PID)
    assert (table.pids(), len(table), table.next_deadline()) == ([OTHER], 1, 3.0)


def test_what_is_not_armed_can_be_released_and_forgotten() -> None:
    table = armed((PID, "a", 1.0))
    table.release(PID, "never")
    table.release(OTHER, "a")
    table.forget(OTHER)
    assert len(table) == 1


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (7, 7, ["a", "b"]),
        (7, 8, ["b"]),
        (7, None, ["a", "b"]),
        (None, 8, ["b"]),
        (None, None, ["a", "b"]),
    ],
)
def test_a_new_life_of_a_pid_inherits_no_timer(first: int | None, second: int | None, kept: list[str]) -> None:
    table = TimerTable()
    table.register(PID, "a", 1.0, "a", first)
    table.register(PID, "b", 2.0, "b", second)
    assert table.expired(9.0) == {PID: kept}
    assert table.started(PID) == (second if second is not None else first)


def test_an_empty_table_knows_nothing() -> None:
    table = TimerTable()
    assert (len(table), table.next_deadline(), table.expired(1e9), table.pids()) == (0, None, {}, [])
    assert table.started(PID) is None
