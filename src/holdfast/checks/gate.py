"""When a node runs its checks, and whether it may have a place in the next round. Pure.

              a place is wanted, no results
    IDLE ---------------------------------> CHECKING ------ passed, or failures are only logged ------> OPEN
      ^        (the run is told: not ready)    ^   |                                          (the run is told: ready)
      |                                        |   +------- failed, and failures exclude -------------> SHUT
      |  a round begins with this node         |                                        (the run is told why)
      +----------------------------------------+------- the delay is over <---------------------------- SHUT
                                               +------- the results are old, and the node still waits - OPEN

Results hold for `HOLD_S`, so an ordinary restart asks for its place at once. A loss of this node's place, or a failure
that is blamed on the node, ends them (`Suspected`). A node that waits for a place as a standby checks again when they
are old, and stays ready meanwhile. The delay after a failure is that of lost hosts: 10 s, doubled each time up to 10
minutes. A check without evidence counts as passed.

A coordinator ends a run that has too few nodes. A node without one gives up by itself (`GiveUp`) if it stays out for
the join timeout: `patience_s`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

from holdfast.checks.plan import CheckPlan
from holdfast.frozen import frozen

HOLD_S = 600.0
FIRST_DELAY_S, LONGEST_DELAY_S = 10.0, 600.0
_NEVER, _FOREVER = float("-inf"), float("inf")

PASSED, FAILED, UNKNOWN = "passed", "failed", "unknown"


@frozen
class CheckResult:
    """`state` is PASSED, FAILED, or UNKNOWN if there is no evidence. `text` says in a line what was found, `output` has
    the last lines of the check. `stuck` is a process of it that no signal ends: its pid and its start time."""

    name: str
    state: str
    text: str = ""
    seconds: float = 0.0
    output: str = ""
    stuck: tuple[int, int] | None = None


class GateState(StrEnum):
    IDLE = "IDLE"
    CHECKING = "CHECKING"
    OPEN = "OPEN"
    SHUT = "SHUT"


# Events.


@frozen
class PlaceWanted:
    pass


@frozen
class Suspected:
    """The last results say nothing about the node any more."""


@frozen
class ChecksEnded:
    results: tuple[CheckResult, ...]


@frozen
class RoundBegun:
    """This node has a place in it."""


@frozen
class TimePassed:
    pass


Event = PlaceWanted | Suspected | ChecksEnded | RoundBegun | TimePassed


# Commands.


@frozen
class StartChecks:
    pass


@frozen
class StopChecks:
    pass


@frozen
class Report:
    """`delay_s` is until the next try, if the node stays out; `left_s` is until it gives up, if it does."""

    results: tuple[CheckResult, ...]
    delay_s: float | None = None
    left_s: float | None = None


@frozen
class GiveUp:
    """The node has stayed out for the join timeout."""

    reason: str


Command = StartChecks | StopChecks | Report | GiveUp


class Gate:
    """Of one agent. `unready` is what the run is to know: None if this node is ready for a place, empty while its first
    checks run, else why it is not ready."""

    def __init__(self, plan: CheckPlan, patience_s: float = _FOREVER) -> None:
        self._excludes = plan.excludes
        self._patience_s = patience_s
        self._give_up_at = _FOREVER  # While the node is not ready.
        self.state = GateState.IDLE
        self.unready: str | None = None
        self._fresh_until = _NEVER
        self._retry_at = 0.0  # While SHUT.
        self._failures = 0  # In a row, with a node that stays out.

    def next_deadline(self) -> float | None:
        due = {GateState.SHUT: self._retry_at, GateState.OPEN: self._fresh_until}.get(self.state, _FOREVER)
        due = min(due, self._give_up_at) if self.unready else due
        return due if due < _FOREVER else None

    def step(self, event: Event, now: float) -> list[Command]:
        match event:
            case Suspected():
                self._fresh_until = _NEVER
                return []
            case PlaceWanted():
                return self._wanted(now)
            case ChecksEnded(results):
                return self._ended(results, now) if self.state is GateState.CHECKING else []
            case RoundBegun():
                self._be_ready()
                return self._rest()
            case TimePassed() if self.unready and now >= self._give_up_at:
                self._give_up_at = _FOREVER
                return [*self._rest(), GiveUp(self.unready)]
            case TimePassed():
                deadline = self.next_deadline()
                if deadline is None or now < deadline:
                    return []
                self.state = GateState.CHECKING
                return [StartChecks()]
        assert_never(event)

    def _wanted(self, now: float) -> list[Command]:
        if self.state is GateState.SHUT and now < self._retry_at:
            return []
        if now < self._fresh_until:
            self.state = GateState.OPEN
            self._be_ready()
            return []
        self._be_unready("", now)
        was_checking, self.state = self.state is GateState.CHECKING, GateState.CHECKING
        return [] if was_checking else [StartChecks()]

    def _ended(self, results: tuple[CheckResult, ...], now: float) -> list[Command]:
        failed = [each for each in results if each.state == FAILED]
        if not failed or not self._excludes:
            self.state, self._fresh_until, self._failures = GateState.OPEN, now + HOLD_S, 0
            self._be_ready()
            return [Report(results)]
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self._failures, 10))
        self._failures += 1
        self.state, self._fresh_until, self._retry_at = GateState.SHUT, _NEVER, now + delay_s
        more = f" ({len(failed) - 1} more failed)" if len(failed) > 1 else ""
        self._be_unready(f"its check {failed[0].name} failed: {failed[0].text}{more}", now)
        left_s = max(0.0, self._give_up_at - now) if self._give_up_at < _FOREVER else None
        return [Report(results, delay_s, left_s)]

    def _rest(self) -> list[Command]:
        was_checking, self.state = self.state is GateState.CHECKING, GateState.IDLE
        return [StopChecks()] if was_checking else []

    def _be_ready(self) -> None:
        self.unready, self._give_up_at = None, _FOREVER

    def _be_unready(self, why: str, now: float) -> None:
        """The time until it gives up counts from when it was ready last."""
        if self.unready is None:
            self._give_up_at = now + self._patience_s
        self.unready = why

    def check(self) -> None:
        """The invariants; tests call this after every step."""
        assert (self.state is GateState.SHUT) <= bool(self.unready)
        assert (self.state is GateState.OPEN) <= (self.unready is None)
        assert self._excludes or not self.unready
