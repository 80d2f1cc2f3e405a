"""The restart policy: after a failure, does the run go on? Pure.

`decide` looks at the policy, at the restarts charged before (`Budget`), and at the failure. It is asked once for each
failure of the whole run, by the coordinator, or by the agent of a run that has none.

* A failure of a fatal class ends the run at once: no restart cures a syntax error, or a program that is not there.
* One of an uncounted class (preemption) is followed by a restart that costs nothing.
* Any other costs one restart of the budget. With a window, only the restarts within it count ("5 in 10 m").
* With `no_progress_limit`, so many restarts in a row may follow rounds in which the workers got no further than before
  (`Advance`). The next such failure ends the run for good: a scheduler should not start it again.
* Restarts after lost nodes have limits of their own (`losses`).
* Backoff: the first charged restart comes after `backoff_s`, each further one in a row after twice as long, up
  to `backoff_cap_s`. One that is not charged waits as long as the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.failures.cause import is_port_taken
from holdfast.failures.records import REFUSAL, Failure
from holdfast.frozen import changed, frozen
from holdfast.text import plural

if TYPE_CHECKING:
    from holdfast.rendezvous.membership import protocol as wire
    from holdfast.rendezvous.membership.model import Memory

# Errors in the program itself, which no restart cures. `--fatal-exceptions` names others.
FATAL_EXCEPTIONS = frozenset({"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"})

_NAMED_AT_MOST = 8
_REMEMBERED_AT_MOST = 10_000


@frozen
class Advance:
    """How far the workers of a node came in a round. `step` is the highest that they gave `holdfast.progress()`;
    `has_moved`: they called it without a step, or a line matched the pattern for progress. `idle_s`: how long before
    the stop of the round they made progress last."""

    step: wire.AnyInt | None = None
    has_moved: bool = False
    idle_s: wire.Seconds | None = None


@frozen
class RestartPolicy:
    max_restarts: wire.Count = 0
    window_s: wire.Seconds | None = None
    backoff_s: wire.Seconds = 0.0
    backoff_cap_s: wire.Seconds = 60.0
    fatal_exit_codes: wire.ExitCodes = frozenset()
    fatal_exceptions: wire.Names = FATAL_EXCEPTIONS
    uncounted_exit_codes: wire.ExitCodes = frozenset()
    uncounted_exceptions: wire.Names = frozenset()
    no_progress_limit: wire.Count | None = None
    loss_limit: wire.Count = 20
    loss_window_s: wire.Seconds = 3600.0


def objection_to(policy: RestartPolicy) -> str:
    """What is wrong with a policy; or nothing."""
    if policy.max_restarts < 0:
        return f"max_restarts must be non-negative, not {policy.max_restarts}"
    if policy.window_s is not None and policy.window_s <= 0:
        return f"window_s must be above 0, not {policy.window_s:g}: no restart would count, and they would never end"
    if policy.no_progress_limit is not None and policy.no_progress_limit < 0:
        return f"no_progress_limit must be non-negative, not {policy.no_progress_limit}"
    if policy.loss_limit < 0 or policy.loss_window_s <= 0:
        limits = f"{policy.loss_limit} and {policy.loss_window_s:g}"
        return f"loss_limit must be non-negative and loss_window_s above 0, not {limits}"
    if policy.backoff_s < 0 or policy.backoff_cap_s < 0:
        return (
            f"backoff_s and backoff_cap_s must be non-negative, not {policy.backoff_s:g} and {policy.backoff_cap_s:g}"
        )
    return ""


@frozen
class Restart:
    """`drops_store`: the program listens at the master port itself, so the next rounds have no store of torch there."""

    delay_s: float
    is_charged: bool
    drops_store: bool = False


@frozen
class GiveUp:
    """`is_final`: starting the run again would not help."""

    reason: str
    is_final: bool = False


Decision = Restart | GiveUp


class Budget:
    """The restarts that were charged, and the progress between them, by the clock of its owner."""

    def __init__(
        self, now: float, used: int = 0, ages_s: Sequence[float] = (), best_step: int | None = None, fruitless: int = 0
    ) -> None:
        # How many. It also rises by what nodes say: when those restarts happened is unknown, so no window counts them.
        self.used = used
        self._times = deque((now - age_s for age_s in ages_s), maxlen=_REMEMBERED_AT_MOST)  # When; at most `used`.
        self.best_step = best_step  # The highest of all rounds.
        self.fruitless = fruitless  # How many rounds in a row before the present one ended without new progress.
        self.has_advanced = False  # The present round has made some.
        self.is_without_store = False  # The program listens at the master port itself (`Restart.drops_store`).

    @classmethod
    def of(cls, now: float, memory: Memory) -> Budget:
        budget = cls(now, memory.restarts_used, memory.restart_ages_s, memory.best_step, memory.fruitless)
        budget.is_without_store = memory.is_without_store
        return budget

    def charge(self, now: float) -> None:
        self.used += 1
        self._times.append(now)

    def note(self, advance: Advance | None) -> None:
        """What a node says of the present round, if it says anything."""
        if advance is None:
            return
        if advance.step is not None and (self.best_step is None or advance.step > self.best_step):
            self.best_step, self.has_advanced = advance.step, True
        self.has_advanced |= advance.has_moved

    def fruitless_if_failed(self) -> int:
        """With the present round, should it have failed."""
        return 0 if self.has_advanced else self.fruitless + 1

    def end_round(self) -> None:
        """The present round has failed or lost a node, and another one follows."""
        self.fruitless, self.has_advanced = self.fruitless_if_failed(), False

    def go_on(self, restart: Restart, now: float) -> None:
        """The same, with what the restart costs."""
        self.end_round()
        self.is_without_store |= restart.drops_store
        if restart.is_charged:
            self.charge(now)

    def within(self, window_s: float | None, now: float) -> int:
        """How many count now. Without a window, all do."""
        if window_s is None:
            return self.used
        return sum(1 for at in self._times if now - at < window_s)

    def noted_in(self, memory: Memory, policy: RestartPolicy, now: float) -> Memory:
        """With the ages of those that a window may still count, oldest first."""
        window_s = policy.window_s
        ages_s = tuple(now - at for at in self._times if window_s is not None and now - at < window_s)
        own = {"restarts_used": self.used, "best_step": self.best_step, "fruitless": self.fruitless}
        return changed(memory, restart_ages_s=ages_s, is_without_store=self.is_without_store, **own)


def decide(
    policy: RestartPolicy, budget: Budget, failure: Failure, now: float, *, may_drop_store: bool = False
) -> Decision:
    if may_drop_store and is_port_taken(failure):
        return Restart(0.0, is_charged=False, drops_store=True)
    if failure.exitcode in policy.fatal_exit_codes:
        return GiveUp(f"exit code {failure.exitcode} is fatal, a restart would not cure it")
    if failure.exception in policy.fatal_exceptions:
        return GiveUp(f"{failure.exception} is fatal, a restart would not cure it")
    if failure.exception == REFUSAL:
        return GiveUp("workers that cannot be started on a node are fatal, a restart would not cure it")
    if reason := standstill(policy, budget):
        return GiveUp(reason, is_final=True)
    if failure.exitcode in policy.uncounted_exit_codes or failure.exception in policy.uncounted_exceptions:
        return Restart(_backoff_s(policy, 0), is_charged=False)
    counted = budget.within(policy.window_s, now)
    if counted >= policy.max_restarts:
        return GiveUp(exhausted(policy.max_restarts, policy.window_s))
    return Restart(_backoff_s(policy, counted), is_charged=True)


def announcement(decision: Restart) -> str:
    """What people would not see otherwise: that a restart is not counted, that there is a wait before it."""
    if decision.drops_store:
        return "the program listens at MASTER_PORT itself: it starts again without the store that holdfast served there"
    if not decision.is_charged:
        return "a restart that is not counted" + (f", in {decision.delay_s:g} s" if decision.delay_s else "")
    return f"a restart, in {decision.delay_s:g} s" if decision.delay_s else ""


def excuse(departed: Sequence[str], round: int) -> str:
    """Why failures that were reported first are not charged: nodes that were lost or left explain them."""
    return f"{named(departed)} (the failures of round {round} are put down to that, and not charged)"


def named(departed: Sequence[str]) -> str:
    """How nodes went away, in one line."""
    departed = [*dict.fromkeys(departed)]  # The same may be known from the connection and from another node.
    more = len(departed) - _NAMED_AT_MOST
    return "; ".join(departed[:_NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else "")


def exhausted(limit: int, window_s: float | None, which: str = "") -> str:
    if limit == 0:
        return f"no restarts{which} are allowed"
    within = f" within {window_s:g} s" if window_s is not None else ""
    return f"the {plural(limit, 'allowed restart')}{which}{within} {'is' if limit == 1 else 'are'} used up"


def standstill(policy: RestartPolicy, budget: Budget) -> str:
    """Why the run ends if the present round has failed or lost a node, because it got no further; or nothing."""
    limit, best_step = policy.no_progress_limit, budget.best_step
    if limit is None or budget.fruitless_if_failed() <= limit:
        return ""
    far = "without any progress" if best_step is None else f"without getting further than step {best_step}"
    in_a_row = "" if limit == 1 else " in a row"
    return f"{plural(limit, 'restart')}{in_a_row} {far} (--no-progress-limit {limit})"


def _backoff_s(policy: RestartPolicy, in_a_row: int) -> float:
    # The exponent is bounded: a long history must not overflow a float.
    return min(policy.backoff_cap_s, policy.backoff_s * 2.0 ** min(in_a_row, 64))
