"""Decides whether a worker group is hung. Pure.

A group is hung when none of its chosen signals has moved for longer than the user allows. The signals need no change
to the program, except the last:

    output      bytes on stdout or stderr of any worker
    pattern     a line of output that matches the user's pattern
    io          bytes read and written by a worker's process tree, as the kernel counts them
    cpu         processor time of a worker's process tree
    progress    a call of `holdfast.progress()`

The signals of all running workers count together: once the other workers wait for a stuck one, or have ended, the
whole group stands still. `cpu` is not a default: a collective that waits for a missing peer often spins. `io` is:
collectives do not use the system calls that the kernel counts there, and a job that loads a checkpoint for an hour
does. Background activity of a hung process (a metrics thread, a timer) stays below the floors for each worker.

There are three bounds. `started` is the start of the group, `moved` the last movement of any chosen signal, `matched`
the last match. A *mark* is a match or a call of `holdfast.progress()`: it shows that the start phase is over.

    start-timeout     started + start_timeout                          if nothing has moved since the start
                      moved + start_timeout                            in the start phase: no output, no mark, and
                                                                       nothing since started + start_timeout
    hang-timeout      moved + hang_timeout                             without a start-timeout
                      max(that, started + start_timeout)               before a mark: imports take time
                      max(that, first mark + hang_timeout)             after a mark
    progress-every    matched + progress_every                         after the first match, whatever else moves

Reads alone do not end the start phase: the loader of any program reads, and so does an import that hangs. A movement
later than `start_timeout` after the start ends it, because some nodes never write any output.

A pattern that has never matched breaks no bound: it may be wrong, or only rank 0 of another node writes these lines.
The user gets one warning.

Errors of observation must not end a healthy job:

* Sampled signals (`io`, `cpu`, files that workers write themselves) are read `LOOKS_A_BOUND` times within the shortest
  bound, and once more before a verdict. A counter that cannot be read counts as moving.
* A look that comes much later than it was due means that the agent was frozen (SIGSTOP, a suspended virtual machine),
  and with it the output of its workers: all bounds restart.
* While the agent's own output is blocked (Ctrl-S, a pipe without a reader), workers that write must wait. While a
  worker is at a prompt of the terminal (`breakpoint()`), the others wait for it. The bounds count from the end of that.
* After a verdict the agent takes stacks and asks again; a group that has moved meanwhile continues. The cost of writing
  its own stacks does not count as movement of a worker: otherwise no hang would be acted on without py-spy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.errors import UserError
from holdfast.frozen import frozen

CPU_FLOOR_SHARE = 0.05
IO_FLOOR_BYTES_A_S = 1024
# The cost of writing its own stacks (a hundred threads, a hundred frames each), for a worker that py-spy cannot read.
DUMP_CPU_S = 0.1
DUMP_BYTES = 1 << 20
LOOKS_A_BOUND = 8

# A look that is late by more than this, and by this share of the shortest bound, is not due to a slow machine.
_LATE_S = 1.0
_LATE_SHARE = 0.25


class Signal(StrEnum):
    OUTPUT = "output"
    PATTERN = "pattern"
    CPU = "cpu"
    IO = "io"
    PROGRESS = "progress"


DEFAULT_SIGNALS = frozenset({Signal.OUTPUT, Signal.PATTERN, Signal.IO, Signal.PROGRESS})


class Bound(StrEnum):
    START = "start-timeout"
    SILENCE = "hang-timeout"
    CADENCE = "progress-every"


@dataclass(frozen=True, slots=True)
class HangPolicy:
    """When a worker group counts as hung. A bound that is None is off.

    `signals` are those that count as movement for the two timeouts; None means `DEFAULT_SIGNALS`. `pattern` is a
    regular expression that is searched for in every line of output; `progress_every_s` is how often a line must match.
    """

    hang_timeout_s: float | None = None
    start_timeout_s: float | None = None
    pattern: str = ""
    progress_every_s: float | None = None
    signals: frozenset[Signal] | None = None

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise UserError(problem)

    @property
    def limits(self) -> dict[Bound, float]:
        limits = {
            Bound.SILENCE: self.hang_timeout_s,
            Bound.START: self.start_timeout_s,
            Bound.CADENCE: self.progress_every_s,
        }
        return {bound: limit_s for bound, limit_s in limits.items() if limit_s is not None}

    @property
    def is_on(self) -> bool:
        return bool(self.limits)

    @property
    def chosen(self) -> frozenset[Signal]:
        return DEFAULT_SIGNALS if self.signals is None else self.signals

    @property
    def quoted_pattern(self) -> str:
        """As for a shell, on one line; `repr` alone would double every backslash."""
        return repr(self.pattern).replace("\\\\", "\\")

    def _problems(self) -> Iterator[str]:
        for bound, limit_s in self.limits.items():
            if not 0 < limit_s < float("inf"):
                yield f"--{bound} {limit_s:g} is not a time above 0"
        pattern = f"--progress-pattern {self.quoted_pattern}"
        if not self.pattern and self.progress_every_s is not None:
            yield "--progress-every says how often --progress-pattern should match, and no pattern is given"
        if self.pattern and not self.limits:
            yield f"{pattern} has no effect without --progress-every or --hang-timeout"
        try:
            if self.pattern and re.compile(self.pattern).search("") is not None:
                yield f"{pattern} matches every line, also an empty one"
        except (re.error, RecursionError, OverflowError) as error:
            yield f"{pattern} is not a regular expression: {error}"
        if self.signals is None:
            return
        names = ",".join(sorted(self.signals))
        if self.hang_timeout_s is None and self.start_timeout_s is None:
            yield f"--progress-signals {names} have no effect without --hang-timeout or --start-timeout"
        if not self.signals:
            yield "--progress-signals names no signal"
        if Signal.PATTERN in self.signals and not self.pattern:
            yield f"--progress-signals {names} has pattern, and no --progress-pattern is given"


def parse_signals(text: str) -> frozenset[Signal]:
    """`output,cpu` as signals."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in set(Signal):
            raise UserError(f"unknown progress signal {name!r}; known signals: {', '.join(Signal)}")
    return frozenset(map(Signal, names))


def moved(used: Mapping[Signal, float], elapsed_s: float, *, has_dumped: bool = False) -> set[Signal]:
    """The counters that show that one worker works; `has_dumped`: it may have written its stacks."""
    floors = {
        Signal.CPU: CPU_FLOOR_SHARE * elapsed_s + DUMP_CPU_S * has_dumped,
        Signal.IO: IO_FLOOR_BYTES_A_S * elapsed_s + DUMP_BYTES * has_dumped,
    }
    return {signal for signal, amount in used.items() if amount > floors[signal]}


@frozen
class Verdict:
    """The group is hung: which bound it broke, for how long it was silent, and which signals have ever moved."""

    bound: Bound
    limit_s: float
    silent_s: float
    moved: frozenset[Signal]


class HangMachine:
    """One lifetime of one worker group. `is_sampled`: some signals are only seen by reading them regularly."""

    def __init__(self, policy: HangPolicy, now: float, *, is_sampled: bool = False) -> None:
        self.policy = policy
        self._started_at = now
        self._counts_from = now
        self._moved_at: dict[Signal, float] = {}
        self._marked_at: float | None = None
        self._has_warned = False
        self._shortest_s = min(policy.limits.values())
        # Without samples, one look within the shortest bound is enough to notice a first match or mark in time.
        self._look_every_s = self._shortest_s / LOOKS_A_BOUND if is_sampled else self._shortest_s
        self._looked_at = now
        self._broken: Bound | None = None
        self._was_held_up = False

    def next_deadline(self) -> float:
        """When to look next."""
        return min([self._looked_at + self._look_every_s, *(at for at, _, _ in self._bounds())])

    def step(
        self, moved_at: Mapping[Signal, float], now: float, *, is_again: bool = False, is_held_up: bool = False
    ) -> list[Verdict | str]:
        """A verdict if the group hangs, and warnings for the user.

        `moved_at` says when each signal last moved; a signal that never moved is absent. `is_again`: this look follows
        a verdict and may be late. `is_held_up`: workers wait for a person: at a prompt, or for a reader of the agent's
        output.
        """
        is_late = not is_again and now - self.next_deadline() > max(_LATE_S, _LATE_SHARE * self._shortest_s)
        # Workers stand still while their stacks are taken, so a movement since the verdict counts as one of now.
        counted = {Signal.PATTERN} if self._broken is Bound.CADENCE else self.policy.chosen
        has_moved = any(at > self._looked_at for signal, at in moved_at.items() if signal in counted)
        if is_held_up or self._was_held_up or is_late or (is_again and has_moved):
            self._counts_from = now  # The time at which a prompt ended is not known, so it is the first look after it.
        self._was_held_up = is_held_up
        self._looked_at = now
        for signal, at in moved_at.items():
            self._moved_at[signal] = min(now, max(at, self._moved_at.get(signal, self._started_at)))
        if self._marked_at is None:
            marks = (Signal.PATTERN, Signal.PROGRESS)
            self._marked_at = min((self._moved_at[mark] for mark in marks if mark in self._moved_at), default=None)
        found: list[Verdict | str] = [*self._warnings(now)]
        for at, bound, limit_s in self._bounds()[:1]:
            if at <= now:
                self._broken = bound
                last = self._moved_at[Signal.PATTERN] if bound is Bound.CADENCE else self._last_movement()
                silent_s = now - (self._started_at if last is None else last)
                found.append(Verdict(bound, limit_s, silent_s, frozenset(self._moved_at)))
        return found

    def _bounds(self) -> list[tuple[float, Bound, float]]:
        """The time at which each bound that applies now breaks if nothing moves; the earliest comes first."""
        start_s, hang_s, every_s = self.policy.start_timeout_s, self.policy.hang_timeout_s, self.policy.progress_every_s
        moved_at, matched_at = self._last_movement(), self._moved_at.get(Signal.PATTERN)
        counts_from = max(moved_at or 0.0, self._counts_from)
        has_begun = self._marked_at is not None or Signal.OUTPUT in self.policy.chosen & self._moved_at.keys()
        found = []
        if start_s is not None and (moved_at is None or (not has_begun and moved_at <= self._started_at + start_s)):
            found.append((counts_from + start_s, Bound.START, start_s))
        if hang_s is not None and (moved_at is not None or start_s is None):
            at = counts_from + hang_s
            if start_s is not None:
                # A mark need not be a chosen signal: the silence before it was allowed.
                at = max(at, self._started_at + start_s if self._marked_at is None else self._marked_at + hang_s)
            found.append((at, Bound.SILENCE, hang_s))
        if every_s is not None and matched_at is not None:
            found.append((max(matched_at, self._counts_from) + every_s, Bound.CADENCE, every_s))
        return sorted(found, key=lambda each: each[0])

    def _last_movement(self) -> float | None:
        return max((at for signal, at in self._moved_at.items() if signal in self.policy.chosen), default=None)

    def _warnings(self, now: float) -> Iterator[str]:
        """Once, when the longest bound has passed without a match."""
        age_s = now - self._started_at
        has_matched = not self.policy.pattern or Signal.PATTERN in self._moved_at
        if has_matched or self._has_warned or age_s < max(self.policy.limits.values()):
            return
        self._has_warned = True
        yield (
            f"{age_s:.0f} s after the start, no output line of this node's workers has matched --progress-pattern "
            f"{self.policy.quoted_pattern}; the pattern is ignored until one does"
        )


_NAMES = {
    Signal.OUTPUT: "output",
    Signal.PATTERN: "line that matches the pattern",
    Signal.IO: "I/O",
    Signal.CPU: "CPU time",
    Signal.PROGRESS: "call of holdfast.progress()",
}


def words(verdict: Verdict, policy: HangPolicy) -> str:
    """What has not moved, and for how long."""
    silent = f"{verdict.silent_s:.0f} s"
    if verdict.bound is Bound.CADENCE:
        expected = f"one was expected every {verdict.limit_s:g} s"
        return f"no line has matched {policy.quoted_pattern} for {silent}, and {expected}"
    chosen = [signal for signal in Signal if signal in policy.chosen]
    # Some signals add nothing: lines are output, and not every job calls progress().
    redundant = {Signal.PATTERN} if Signal.OUTPUT in chosen or not policy.pattern else set()
    if Signal.PROGRESS not in verdict.moved and len(chosen) > 1:
        redundant.add(Signal.PROGRESS)
    *most, last = (_NAMES[each] for each in [signal for signal in chosen if signal not in redundant] or chosen)
    missed = f"{', '.join(most)} or {last}" if most else last
    if verdict.bound is not Bound.START:
        return f"no {missed} for {silent}"
    if verdict.moved & policy.chosen:
        return f"no {missed} for {silent}, in the start phase"
    return f"no {missed} since the start {silent} ago"
