"""The kill ladder, rung by rung."""

from __future__ import annotations

from signal import SIGTERM

from holdfast import procfs
from holdfast.process.workers.ladder import ANSWER_PATIENCE_S, Action, Ladder
from tests.promises import promise, proves


@promise("""ownership.kill-ladder-reason-stop: The kill ladder is the same for every reason to stop: signal, grace
    period, kill, check that all are gone. A second Ctrl-C only shortens the grace period.""")
def test_nothing_is_killed_before_the_grace_is_over() -> None:
    ladder = Ladder(SIGTERM, 30.0, 100.0)
    assert (ladder.is_killed, ladder.deadline) == (False, 130.0)
    assert ladder.climb(129.9, has_leaders=True, is_swept=False) is None
    assert ladder.climb(130.0, has_leaders=True, is_swept=False) is Action.KILL_TREES
    assert (ladder.is_killed, ladder.deadline) == (True, 130.0 + ANSWER_PATIENCE_S)


def test_the_trees_are_killed_as_soon_as_no_leader_is_left() -> None:
    ladder = Ladder(SIGTERM, 30.0, 100.0)
    assert ladder.climb(101.0, has_leaders=False, is_swept=False) is Action.KILL_TREES
    assert ladder.climb(102.0, has_leaders=False, is_swept=False) is None, "once"
    assert ladder.climb(103.0, has_leaders=False, is_swept=True) is None
    assert (ladder.is_killed, ladder.deadline) == (True, None)


@proves("ownership.kill-ladder-reason-stop")
def test_haste_only_shortens_the_grace() -> None:
    ladder = Ladder(SIGTERM, 30.0, 100.0)
    ladder.hurry(60.0, 101.0)
    assert ladder.deadline == 130.0
    ladder.hurry(0.0, 102.0)
    assert ladder.climb(102.0, has_leaders=True, is_swept=False) is Action.KILL_TREES
    ladder.hurry(0.0, 103.0)
    assert ladder.deadline == 102.0 + ANSWER_PATIENCE_S, "the spawner keeps its time to answer"


@proves("ownership.kill-ladder-reason-stop", "workers.on-stop-grace")
def test_functions_have_half_of_the_grace() -> None:
    ladder = Ladder(SIGTERM, 30.0, 100.0, has_hooked=True)
    assert ladder.deadline == 115.0
    assert ladder.climb(114.9, has_leaders=True, is_swept=False) is None
    assert ladder.climb(115.0, has_leaders=True, is_swept=False) is Action.SIGNAL_HOOKED
    assert (ladder.is_killed, ladder.deadline) == (False, 130.0)
    assert ladder.climb(130.0, has_leaders=True, is_swept=False) is Action.KILL_TREES


@proves("workers.on-stop-grace")
def test_haste_cuts_the_functions_short() -> None:
    ladder = Ladder(SIGTERM, 30.0, 100.0, has_hooked=True)
    ladder.hurry(5.0, 101.0)
    assert ladder.climb(103.5, has_leaders=True, is_swept=False) is Action.SIGNAL_HOOKED
    assert ladder.climb(106.0, has_leaders=True, is_swept=False) is Action.KILL_TREES
    ladder = Ladder(SIGTERM, 30.0, 100.0, has_hooked=True)
    assert ladder.climb(101.0, has_leaders=False, is_swept=False) is Action.KILL_TREES, "none is left"


@proves("ownership.kill-ladder-reason-stop")
def test_a_spawner_that_does_not_answer_is_killed_once() -> None:
    assert ANSWER_PATIENCE_S > procfs.KILL_PATIENCE_S, "it names what it cannot kill"
    ladder = Ladder(SIGTERM, 0.0, 100.0)
    assert ladder.climb(100.0, has_leaders=True, is_swept=False) is Action.KILL_TREES
    assert ladder.climb(100.0 + ANSWER_PATIENCE_S, has_leaders=True, is_swept=False) is Action.KILL_SPAWNER
    assert ladder.climb(200.0, has_leaders=True, is_swept=False) is None
    assert (ladder.is_killed, ladder.deadline) == (True, None)


def test_a_spawner_that_is_gone_leaves_nothing_to_kill() -> None:
    ladder = Ladder(SIGTERM, 30.0, 100.0)
    assert ladder.climb(101.0, has_leaders=False, is_swept=True) is None
    assert (ladder.is_killed, ladder.deadline) == (False, None)
