"""After a failure: restart, when, and at whose cost."""

from __future__ import annotations

import pytest

from holdfast.failures.records import REFUSAL, Failure
from holdfast.rendezvous.membership.model import Memory
from holdfast.rendezvous.membership.restart_policy import (
    FATAL_EXCEPTIONS,
    Advance,
    Budget,
    Decision,
    GiveUp,
    Restart,
    RestartPolicy,
    announcement,
    decide,
    excuse,
    objection_to,
)
from tests.promises import promise, proves

NOW = 1000.0
PLAIN = Failure(exitcode=1)


def ages_s(budget: Budget, window_s: float | None, now: float) -> tuple[float, ...]:
    """As they are written down."""
    return budget.noted_in(Memory(), RestartPolicy(window_s=window_s), now).restart_ages_s


def error(exception: str) -> Failure:
    return Failure(exitcode=1, exception=exception)


BACKOFF = RestartPolicy(20, backoff_s=1.0, backoff_cap_s=10.0)
WINDOW = RestartPolicy(2, window_s=10.0, backoff_s=1.0)
CLASSES = RestartPolicy(
    1,
    fatal_exit_codes=frozenset({2}),
    fatal_exceptions=frozenset({"BadData"}),
    uncounted_exit_codes=frozenset({-15}),
    uncounted_exceptions=frozenset({"Preempted", "BadData"}),
)
FREE = Restart(0.0, is_charged=False)

DECISIONS: dict[str, tuple[RestartPolicy, list[float], Failure, Decision]] = {
    "none allowed": (RestartPolicy(0), [], PLAIN, GiveUp("no restarts are allowed")),
    "the first of one": (RestartPolicy(1), [], PLAIN, Restart(0.0, is_charged=True)),
    "one used up": (RestartPolicy(1), [0.0], PLAIN, GiveUp("the 1 allowed restart is used up")),
    "the last of three": (RestartPolicy(3), [0.0, 1.0], PLAIN, Restart(0.0, is_charged=True)),
    "three used up": (RestartPolicy(3), [0.0] * 3, PLAIN, GiveUp("the 3 allowed restarts are used up")),
    "more used than allowed": (RestartPolicy(1), [0.0] * 3, PLAIN, GiveUp("the 1 allowed restart is used up")),
    "those before the window do not count": (WINDOW, [1.0, 2.0, NOW - 10.0], PLAIN, Restart(1.0, is_charged=True)),
    "those within the window do": (WINDOW, [1.0, NOW - 9.9], PLAIN, Restart(2.0, is_charged=True)),
    "too many within the window": (
        WINDOW, [NOW - 9.9, NOW], PLAIN, GiveUp("the 2 allowed restarts within 10 s are used up")
    ),
    "backoff, first": (BACKOFF, [], PLAIN, Restart(1.0, is_charged=True)),
    "backoff, second": (BACKOFF, [0.0], PLAIN, Restart(2.0, is_charged=True)),
    "backoff, fourth": (BACKOFF, [0.0] * 3, PLAIN, Restart(8.0, is_charged=True)),
    "backoff, capped": (BACKOFF, [0.0] * 4, PLAIN, Restart(10.0, is_charged=True)),
    "backoff, after very many": (
        RestartPolicy(10**6, backoff_s=1.0), [0.0] * 5000, PLAIN, Restart(60.0, is_charged=True)
    ),
    "no backoff, after very many": (RestartPolicy(10**6), [0.0] * 5000, PLAIN, Restart(0.0, is_charged=True)),
    "fatal exit code": (
        CLASSES, [], Failure(exitcode=2), GiveUp("exit code 2 is fatal, a restart would not cure it")
    ),
    "fatal before uncounted": (
        CLASSES, [], error("BadData"), GiveUp("BadData is fatal, a restart would not cure it")
    ),
    "a program that cannot be started": (
        RestartPolicy(3), [], error(REFUSAL),
        GiveUp("workers that cannot be started on a node are fatal, a restart would not cure it"),
    ),
    "uncounted exit code": (CLASSES, [], Failure(exitcode=-15), FREE),
    "uncounted exit code, used up": (CLASSES, [0.0], Failure(exitcode=-15), FREE),
    "uncounted, backoff does not grow": (
        RestartPolicy(9, backoff_s=1.0, uncounted_exit_codes=frozenset({-15})), [0.0] * 4, Failure(exitcode=-15),
        Restart(1.0, is_charged=False),
    ),
    "uncounted exception, used up": (CLASSES, [0.0], error("Preempted"), FREE),
    "of no class": (CLASSES, [], error("OSError"), Restart(0.0, is_charged=True)),
    "classes that were named replace the usual": (CLASSES, [], error("ImportError"), Restart(0.0, is_charged=True)),
}  # fmt: skip


@promise("""restarts.follow-policy-many-time: Restarts follow the policy: how many, within which time, after which
    delay, and which exit codes and exceptions end the run at once or do not count.""")
@proves("failures.node-program-started-missing")
@pytest.mark.parametrize("case", DECISIONS)
def test_decide(case: str) -> None:
    policy, charged_at, failure, expected = DECISIONS[case]
    budget = Budget(0.0)
    for at in charged_at:
        budget.charge(at)
    assert decide(policy, budget, failure, NOW) == expected
    again = Budget(7.0, budget.used, ages_s(budget, policy.window_s, NOW))
    assert decide(policy, again, failure, 7.0) == expected, "whoever goes on with it decides the same"


@proves("coordinator.restart-earlier-charged")
def test_a_budget_remembers_how_long_ago_restarts_were() -> None:
    budget = Budget(100.0, used=7, ages_s=(50.0, 1.0))
    assert [budget.within(window_s, 100.0) for window_s in (None, 60.0, 50.0, 1.0)] == [7, 2, 1, 0]
    budget.charge(110.0)
    assert (budget.used, ages_s(budget, 20.0, 115.0), ages_s(budget, None, 115.0)) == (8, (16.0, 5.0), ())
    assert budget.within(20.0, 118.0) == 2


def test_a_number_of_restarts_sizes_nothing() -> None:
    """A count that a node sends says nothing of when they were, so no window counts them."""
    budget = Budget(0.0, used=50_000_000)
    assert (budget.within(600.0, 1.0), budget.within(None, 1.0), ages_s(budget, 600.0, 1.0)) == (0, 50_000_000, ())


def test_no_more_restarts_are_remembered_than_one_can_write_down() -> None:
    budget = Budget(0.0)
    for _ in range(20_000):
        budget.charge(0.0)
    assert (budget.used, budget.within(None, 1.0), len(ages_s(budget, 9.0, 1.0))) == (20_000, 20_000, 10_000)


@promise("""restarts.logs-cause-delay-whether: holdfast logs every restart with its cause, its delay, and whether it is
    not counted, on one node and between nodes. A run that succeeds after a restart says so.""")
@pytest.mark.parametrize(
    ("delay_s", "is_charged", "words"),
    [
        (0.0, True, ""),  # The new count is told with the new round.
        (8.0, True, "a restart, in 8 s"),
        (0.0, False, "a restart that is not counted"),
        (0.5, False, "a restart that is not counted, in 0.5 s"),
    ],
)
def test_what_is_told_of_a_restart_before_it(delay_s: float, is_charged: bool, words: str) -> None:
    assert announcement(Restart(delay_s, is_charged)) == words


@promise("""restarts.program-error-fix-syntaxerror: A program error that a restart cannot fix (`SyntaxError`,
    `ImportError` and similar) ends the run at once.""")
@pytest.mark.parametrize("name", sorted(FATAL_EXCEPTIONS))
def test_errors_in_the_program_are_fatal_by_default(name: str) -> None:
    assert decide(RestartPolicy(9), Budget(0.0), error(name), NOW) == GiveUp(
        f"{name} is fatal, a restart would not cure it"
    )


@promise("""restarts.policy-makes-sense-example: A policy that makes no sense, for example one with endless restarts, is
    refused.""")
@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (RestartPolicy(), ""),
        (RestartPolicy(3, window_s=0.1, backoff_s=0.0, backoff_cap_s=0.0), ""),
        (RestartPolicy(-1), "max_restarts must be non-negative, not -1"),
        (RestartPolicy(1, window_s=0.0), "window_s must be above 0, not 0: "),
        (RestartPolicy(1, window_s=-5.0), "window_s must be above 0, not -5: "),
        (RestartPolicy(loss_limit=-1), "loss_limit must be non-negative and loss_window_s above 0, not -1 and 3600"),
        (RestartPolicy(loss_window_s=0.0), "loss_limit must be non-negative and loss_window_s above 0, not 20 and 0"),
        (RestartPolicy(1, backoff_s=-1.0), "backoff_s and backoff_cap_s must be non-negative, not -1 and 60"),
    ],
)
def test_policies_that_make_no_sense(policy: RestartPolicy, words: str) -> None:
    problem = objection_to(policy)
    assert problem.startswith(words)
    assert bool(problem) == bool(words)


@pytest.mark.parametrize(
    ("count", "who"),
    [(1, "n0"), (8, "n0; n1; n2; n3; n4; n5; n6; n7"), (9, "n0; n1; n2; n3; n4; n5; n6; n7; and 1 more")],
)
def test_a_round_that_nodes_have_left_names_a_few_of_them(count: int, who: str) -> None:
    departed = [f"n{number}" for number in range(count)]
    assert excuse(departed, 3) == f"{who} (the failures of round 3 are put down to that, and not charged)"


LIMITED = RestartPolicy(9, no_progress_limit=2, uncounted_exit_codes=frozenset({-15}))
LOST = Failure(exitcode=-15)
AT = Advance


@promise("""cli.progress-limit-restarts-row: With `--no-progress-limit N`, N restarts in a row may follow rounds in
    which no worker of any node got further (a higher step in `holdfast.progress`, a call without a step, a line that
    matches `--progress-pattern`). The next such failure ends the run on all nodes with exit code 93: do not start it
    again. Rounds from which nodes were lost count, too. The count survives the coordinator.""")
@pytest.mark.parametrize(
    ("rounds", "reason"),
    [
        pytest.param(
            [[], [], []], "2 restarts in a row without any progress (--no-progress-limit 2)", id="none at all"
        ),
        pytest.param([[], []], "", id="as many restarts as allowed"),
        pytest.param(
            [[AT(5)], [AT(5)], [AT(4)], [AT(3), AT(5)]],
            "2 restarts in a row without getting further than step 5 (--no-progress-limit 2)",
            id="the same steps again",
        ),
        pytest.param([[], [], [AT(1)], [], []], "", id="a step begins the count anew"),
        pytest.param([[], [], [AT(1), AT()], [AT(), AT(2)], [], []], "", id="one node is enough"),
        pytest.param([[], [], [AT(has_moved=True)], [], []], "", id="a call without a step"),
        pytest.param([[AT(-3)], [], []], "", id="steps may be negative"),
    ],
)
@pytest.mark.parametrize("failure", [PLAIN, LOST])
def test_restarts_without_progress(rounds: list[list[Advance]], reason: str, failure: Failure) -> None:
    """Whether the restarts are counted or not."""
    budget = Budget(0.0)
    for number, advances in enumerate(rounds):
        for advance in advances:
            budget.note(advance)
        decision = decide(LIMITED, budget, failure, NOW)
        is_last = number == len(rounds) - 1
        assert isinstance(decision, GiveUp) is (is_last and bool(reason)), (number, decision)
        budget.end_round()
        budget = Budget(0.0, budget.used, (), budget.best_step, budget.fruitless)  # The coordinator may be replaced.
    if reason:
        assert decision == GiveUp(reason, is_final=True)


def test_a_fatal_failure_is_not_final() -> None:
    """A program that was corrected may be started again."""
    assert decide(LIMITED, Budget(0.0, fruitless=9), error("ImportError"), NOW) == GiveUp(
        "ImportError is fatal, a restart would not cure it"
    )


def test_a_negative_limit_makes_no_sense() -> None:
    assert "no_progress_limit must be non-negative" in objection_to(RestartPolicy(no_progress_limit=-1))
