"""What has happened to a run so far: its rounds, what ended each, and how much of the time was of use. Pure.

An agent tells the history of its node, a coordinator that of the whole run. Both feed it with what their machines do,
by their own clocks (`now`); both tell it as a `HistoryStatus` (`told`). A `History` is a value: each event makes a new
one, so that a reader in another thread takes it as a whole. It is bounded: the last rounds, and sums for those before.

Four moments of a round count:

    sealed          running                     productive until   stopped             the next round: running
    |-- starting ---|-- productive -------------|-- not kept ------|-- stop, join, start ---|
                    |-- ran_s ---------------------------------------|
                                                |-- lost_s -----------------------------------|

* A round runs from the moment at which all workers of the node have been started to its stop. The coordinator does not
  know when workers have been started: for it a round runs from its seal. A node whose workers have finished waits for
  others that still run, so that counts as running, too.
* A round is productive while it runs. If it is then stopped because of a failure, a hang or a lost node, it was
  productive only until its last progress, if its workers report any (`holdfast.progress()` or --progress-pattern): what
  came after that is not kept. A planned change of the membership gives workers time to save their work.
* Lost is the time from there to the moment at which the next round runs, or at which the run ends. A round that
  succeeded or was closed loses nothing, and neither does the wait before the first round. So wall_s is productive_s +
  lost_s + what came before the first round ran + the stop of a run that is closed.
* `goodput` is productive_s / wall_s.

The history begins with the process that tells it. That of an agent which came later, or of a coordinator which replaced
another one, does not know the rounds before (`is_whole` is false), and counts time and restarts from its own beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.frozen import changed, field, frozen

if TYPE_CHECKING:
    from holdfast import wire_types as wire

FAILED = "failed"
HUNG = "hung"
NODE_LOST = "node lost"
MEMBERSHIP_CHANGED = "membership changed"
SUCCEEDED = "succeeded"
CLOSED = "closed"

# What a restart after a round with such an end is counted as.
RESTART_CAUSES = {
    FAILED: "failure",
    HUNG: "hang",
    NODE_LOST: "node lost",
    MEMBERSHIP_CHANGED: "membership changed",
}

ROUNDS_KEPT = 64
_UNPLANNED = (FAILED, HUNG, NODE_LOST)
_CAUSE_LIMIT = 200


@frozen
class RoundStatus:
    """One round, as it is told. `end` is None while it runs."""

    round: wire.Count = 0
    nodes: wire.Count = 0
    workers: wire.Count = 0
    began_ago_s: wire.Seconds = 0.0
    ran_s: wire.Seconds = 0.0
    lost_s: wire.Seconds = 0.0
    end: str | None = None
    cause: str = ""


@frozen
class HistoryStatus:
    """All rounds, as they are told. `restarts` are by cause, `phase_s` by phase."""

    rounds: tuple[RoundStatus, ...] = ()
    round_count: wire.Count = 0
    phase_s: Mapping[str, wire.Seconds] = field(default_factory=dict)
    restarts: Mapping[str, wire.Count] = field(default_factory=dict)
    lost_s: wire.Seconds = 0.0
    productive_s: wire.Seconds = 0.0
    wall_s: wire.Seconds = 0.0
    goodput: wire.Seconds = 0.0
    detection_s: wire.Seconds | None = None
    is_whole: bool = True


@frozen
class RoundHistory:
    """One round. The times are those of the clock of the process that tells it. `idle_s`: how long before its stop its
    workers made progress last, if that is known. `resumed`: when the next round ran, or the run ended."""

    round: int
    nodes: int
    workers: int
    began: float
    running: float | None = None
    stopped: float | None = None
    resumed: float | None = None
    end: str | None = None
    cause: str = ""
    idle_s: float | None = None

    def ran_s(self, now: float) -> float:
        if self.running is None:
            return 0.0
        return (now if self.stopped is None else self.stopped) - self.running

    def productive_s(self, now: float) -> float:
        return self.ran_s(now) - self._not_kept_s()

    def lost_s(self, now: float) -> float:
        if self.stopped is None or self.end in (SUCCEEDED, CLOSED):
            return 0.0
        return (now if self.resumed is None else self.resumed) - self.stopped + self._not_kept_s()

    def _not_kept_s(self) -> float:
        if self.idle_s is None or self.stopped is None or self.end not in _UNPLANNED:
            return 0.0
        return min(self.idle_s, self.ran_s(self.stopped))

    def told(self, now: float) -> RoundStatus:
        began_ago_s, ran_s, lost_s = map(_rounded, (now - self.began, self.ran_s(now), self.lost_s(now)))
        return RoundStatus(self.round, self.nodes, self.workers, began_ago_s, ran_s, lost_s, self.end, self.cause)


@frozen
class History:
    """`phase` is the present one, since `phase_began`; `phase_s` has the seconds in those before it. `earlier` are the
    productive and the lost seconds of the rounds that are not kept. `restarts` are counted in the order of
    `RESTART_CAUSES`. `detection_s`: see `stop`. `ended` is when the run ended; then all clocks stop."""

    began: float = 0.0
    phase: str = ""
    phase_began: float = 0.0
    phase_s: tuple[tuple[str, float], ...] = ()
    rounds: tuple[RoundHistory, ...] = ()
    round_count: int = 0
    earlier: tuple[float, float] = (0.0, 0.0)
    restarts: tuple[int, ...] = (0,) * len(RESTART_CAUSES)
    detection_s: float | None = None
    ended: float | None = None
    is_whole: bool = True

    # Events.

    def enter(self, phase: str, now: float) -> History:
        """The machine is in this phase from now on."""
        if phase == self.phase or self.ended is not None:
            return self
        return changed(self, phase=phase, phase_began=now, phase_s=tuple(self._phase_seconds(now).items()))

    def begin_round(self, round: int, nodes: int, workers: int, now: float, *, is_new: bool = True) -> History:
        """A round was sealed; it is not `is_new` if a coordinator before this one did that."""
        rounds, earlier, restarts = self.rounds, self.earlier, self.restarts
        if rounds:
            cause = RESTART_CAUSES.get(rounds[-1].end or "")
            restarts = tuple(n + (cause == each) for n, each in zip(restarts, RESTART_CAUSES.values(), strict=True))
        if len(rounds) == ROUNDS_KEPT:
            oldest, *_ = rounds
            earlier = (earlier[0] + oldest.productive_s(now), earlier[1] + oldest.lost_s(now))
        return changed(
            self,
            rounds=(*rounds[-ROUNDS_KEPT + 1 :], RoundHistory(round, nodes, workers, now)),
            round_count=self.round_count + 1,
            earlier=earlier,
            restarts=restarts,
            is_whole=self.is_whole and is_new and (bool(rounds) or round == 1),
        )

    def run(self, now: float) -> History:
        """The workers of the last round run; what was lost before it ends here."""
        if not self.rounds or self.rounds[-1].running is not None:
            return self
        return changed(self, rounds=(*_resumed(self.rounds[:-1], now), changed(self.rounds[-1], running=now)))

    def stop(
        self, end: str, cause: str, now: float, idle_s: float | None = None, detection_s: float | None = None
    ) -> History:
        """The last round is being stopped; nothing happens if it is already. `detection_s` is known of a failure: how
        long its worker had been dead, or its group without a sign of life."""
        if not self.rounds or self.rounds[-1].stopped is not None:
            return self
        last = changed(self.rounds[-1], stopped=now, end=end, cause=cause[:_CAUSE_LIMIT], idle_s=idle_s)
        # A round that never ran ends the time that was lost before it; what follows is lost by it.
        before = self.rounds[:-1] if last.running is not None else _resumed(self.rounds[:-1], now)
        known = self.detection_s if detection_s is None else detection_s
        return changed(self, rounds=(*before, last), detection_s=known)

    def amend(self, end: str, cause: str, idle_s: float | None = None) -> History:
        """What is known of the end of the last round, now that its workers are gone."""
        if not self.rounds or self.rounds[-1].stopped is None:
            return self
        known = self.rounds[-1].idle_s if idle_s is None else idle_s
        last = changed(self.rounds[-1], end=end, cause=cause[:_CAUSE_LIMIT], idle_s=known)
        return changed(self, rounds=(*self.rounds[:-1], last))

    def finish(self, end: str, cause: str, now: float) -> History:
        """The run has ended; `end` is that of its last round, unless that has another one."""
        if self.ended is not None:
            return self
        stopped = self.stop(end, cause, now)
        phases = tuple(stopped._phase_seconds(now).items())
        return changed(stopped, rounds=_resumed(stopped.rounds, now), phase="", phase_s=phases, ended=now)

    # What it says.

    def _phase_seconds(self, now: float) -> dict[str, float]:
        seconds = dict(self.phase_s)
        if self.phase:
            seconds[self.phase] = seconds.get(self.phase, 0.0) + now - self.phase_began
        return seconds

    def productive_s(self, now: float) -> float:
        return self.earlier[0] + sum(each.productive_s(now) for each in self.rounds)

    def lost_s(self, now: float) -> float:
        return self.earlier[1] + sum(each.lost_s(now) for each in self.rounds)

    def wall_s(self, now: float) -> float:
        return (now if self.ended is None else self.ended) - self.began

    def told(self, now: float) -> HistoryStatus:
        productive_s, wall_s = self.productive_s(now), self.wall_s(now)
        return HistoryStatus(
            rounds=tuple(each.told(now) for each in self.rounds),
            round_count=self.round_count,
            phase_s={phase: _rounded(seconds) for phase, seconds in self._phase_seconds(now).items()},
            restarts=dict(zip(RESTART_CAUSES.values(), self.restarts, strict=True)),
            lost_s=_rounded(self.lost_s(now)),
            productive_s=_rounded(productive_s),
            wall_s=_rounded(wall_s),
            goodput=round(max(0.0, productive_s) / wall_s, 4) if wall_s > 0 else 0.0,
            detection_s=None if self.detection_s is None else round(self.detection_s, 6),
            is_whole=self.is_whole,
        )

    def check(self, now: float) -> None:
        """The invariants; tests and the simulator call this after every step."""
        assert all(each.stopped is not None for each in self.rounds[:-1])
        assert all(each.resumed is not None for each in self.rounds[:-2])
        parts = [self.productive_s(now), self.lost_s(now), *(each.productive_s(now) for each in self.rounds)]
        assert all(part >= -1e-6 for part in parts), parts
        assert parts[0] + parts[1] <= self.wall_s(now) + 1e-6


def _resumed(rounds: tuple[RoundHistory, ...], now: float) -> tuple[RoundHistory, ...]:
    """The last of them loses no more time from now on."""
    if not rounds or rounds[-1].resumed is not None:
        return rounds
    return (*rounds[:-1], changed(rounds[-1], resumed=now))


def _rounded(seconds: float) -> float:
    return round(max(0.0, seconds), 3)
