"""Is this worker group hung? Pure.

A group is hung when, for longer than the user allows, nothing of it has moved. What can move, without a change to
the program, are these signals:

    output      bytes on stdout or stderr of any worker
    pattern     a line of output that matches the user's pattern
    io          bytes read and written by a worker's tree, as the kernel counts them
    cpu         processor time of a worker's tree
    progress    a call of `holdfast.progress()`, the one line of code for those who want it

Signals of one group count together, and only those of workers that still run: a group in which one worker stands
still stands still as a whole as soon as the others wait for it or have ended. `cpu` is not among the defaults: a
collective that waits for a peer that never comes often spins, and a job that hangs would look busy. `io` is: no
collective reads or writes through the calls that the kernel counts there, while a job that loads a checkpoint for an
hour without a word does. What a hung process does beside (a thread that reports metrics, a timer) is below the
floors, `CPU_FLOOR_SHARE` and `IO_FLOOR_BYTES_A_S`, for each worker, and does not count.

Three bounds can be broken. `started` is the group's start, `moved` the last moment at which any chosen signal moved,
`matched` the last match; a *mark* is a match or a call of `holdfast.progress()`: the job is past its beginning.

    start-timeout     started + start_timeout                          if nothing has moved since the start
                      moved + start_timeout                            in the beginning: no output, no mark, and
                                                                       nothing since started + start_timeout
    hang-timeout      moved + hang_timeout                             without a start-timeout
                      max(that, started + start_timeout)               before a mark: imports take their time
                      max(that, first mark + hang_timeout)             once there is one
    progress-every    matched + progress_every                         once a line has matched, whatever else moves

The beginning is not over because something was read: the loader of any program reads, and so does an import that
hangs. What moves later than `start_timeout` after the start ends it, for some nodes never write a word.

A pattern that has never matched judges nobody: it may be wrong, or the lines be written by another node's rank 0. It
is complained about, once.

No mistake of the watch may end a healthy job:

* What is sampled (`io`, `cpu`, files that workers write themselves) is looked at `LOOKS_A_BOUND` times within the
  shortest bound, and always once more before a verdict.
* A look that comes much later than it was due means that the agent itself was frozen (SIGSTOP, a suspended virtual
  machine), and everybody's output with it: all bounds count anew from then.
* While the agent's own output is blocked (Ctrl-S, a pipe that nobody reads), workers that write wait for the reader:
  the bounds count from its end.
* A counter that cannot be read counts as moving.
* After a verdict stacks are taken, and the machine is asked again; a group that has moved meanwhile goes on. What a
  worker uses to write its own stacks is no movement: otherwise a hang would never be acted on without py-spy.

The shell (`hangs/watch.py`) looks when `next_deadline` says so, and tells what it saw in `Looked`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.errors import UserError
from holdfast.frozen import frozen

CPU_FLOOR_SHARE = 0.05
IO_FLOOR_BYTES_A_S = 1024
# What a worker may use to write its own stacks (a hundred threads, a hundred frames each), where py-spy may not look.
DUMP_CPU_S = 0.1
DUMP_BYTES = 1 << 20
LOOKS_A_BOUND = 8

# A look this much later than it was due, and by this part of the shortest bound, is not a slow machine.
_LATE_S = 1.0
_LATE_SHARE = 0.25


class Signal(StrEnum):
    OUTPUT = "output"
    PATTERN = "pattern"
    CPU = "cpu"
    IO = "io"
    PROGRESS = "progress"


DEFAULT_SIGNALS = frozenset({Signal.OUTPUT, Signal.PATTERN, Signal.IO, Signal.PROGRESS})
_MARKS = (Signal.PATTERN, Signal.PROGRESS)


class Bound(StrEnum):
    START = "start-timeout"
    SILENCE = "hang-timeout"
    CADENCE = "progress-every"


@dataclass(frozen=True, slots=True)
class HangPolicy:
    """When a worker group counts as hung; what is None is not watched for.

    `signals` says what counts as progress for the two timeouts; None is `DEFAULT_SIGNALS`. `pattern` is a regular
    expression that is searched for in every line of output, and `progress_every_s` how often a line should match.
    """

    hang_timeout_s: float | None = None
    start_timeout_s: float | None = None
    pattern: str = ""
    progress_every_s: float | None = None
    signals: frozenset[Signal] | None = None

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise UserError(problem)

    @property
    def is_on(self) -> bool:
        return any(each is not None for each in (self.hang_timeout_s, self.start_timeout_s, self.progress_every_s))

    @property
    def chosen(self) -> frozenset[Signal]:
        return DEFAULT_SIGNALS if self.signals is None else self.signals

    @property
    def quoted_pattern(self) -> str:
        """As a shell wants it, and still one line; `repr` alone would double every backslash."""
        return repr(self.pattern).replace("\\\\", "\\")

    def _problem(self) -> str:
        for name, value in (
            ("--hang-timeout", self.hang_timeout_s),
            ("--start-timeout", self.start_timeout_s),
            ("--progress-every", self.progress_every_s),
        ):
            if value is not None and not 0 < value < float("inf"):
                return f"{name} {value:g} is not a time above 0"
        return self._pattern_problem() or self._signals_problem()

    def _pattern_problem(self) -> str:
        if not self.pattern:
            is_alone = self.progress_every_s is not None
            return "--progress-every says how often --progress-pattern should match, and no pattern is given" * is_alone
        if not self.is_on:
            return f"--progress-pattern {self.quoted_pattern} has no effect without --progress-every or --hang-timeout"
        try:
            matches_nothing = re.compile(self.pattern).search("") is not None
        except (re.error, RecursionError, OverflowError) as error:
            return f"--progress-pattern {self.quoted_pattern} is not a regular expression: {error}"
        return f"--progress-pattern {self.quoted_pattern} matches every line, also an empty one" * matches_nothing

    def _signals_problem(self) -> str:
        if self.signals is None:
            return ""
        names = ",".join(sorted(self.signals))
        if self.hang_timeout_s is None and self.start_timeout_s is None:
            return f"--progress-signals {names} have no effect without --hang-timeout or --start-timeout"
        if not self.signals:
            return "--progress-signals names no signal"
        if Signal.PATTERN in self.signals and not self.pattern:
            return f"--progress-signals {names} has pattern, and no --progress-pattern is given"
        return ""


def parse_signals(text: str) -> frozenset[Signal]:
    """`output,cpu` as signals."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in set(Signal):
            raise UserError(f"{name!r} is no progress signal; there are {', '.join(Signal)}")
    return frozenset(map(Signal, names))


# Counters.


@frozen
class Usage:
    """What a worker's tree has used since it was first looked at. None: it cannot be told."""

    cpu_s: float | None = 0.0
    io_bytes: float | None = 0


def moved(before: Usage, after: Usage, elapsed_s: float, *, has_dumped: bool = False) -> frozenset[Signal]:
    """Which counters of one worker show that it works. `has_dumped`: it may have been told to write its stacks."""
    found = set()
    if _is_above(before.cpu_s, after.cpu_s, CPU_FLOOR_SHARE * elapsed_s + DUMP_CPU_S * has_dumped):
        found.add(Signal.CPU)
    if _is_above(before.io_bytes, after.io_bytes, IO_FLOOR_BYTES_A_S * elapsed_s + DUMP_BYTES * has_dumped):
        found.add(Signal.IO)
    return frozenset(found)


def _is_above(before: float | None, after: float | None, floor: float) -> bool:
    return before is None or after is None or after - before > floor


# The machine.


@frozen
class Looked:
    """When each signal is known to have moved last. One that never moved is not in it.

    `is_again`: after a verdict, and however long it took to find out what it means. `is_blind`: the agent's own output
    is blocked, so that workers may wait for nobody but the reader of it.
    """

    moved_at: Mapping[Signal, float]
    is_again: bool = False
    is_blind: bool = False


@frozen
class Verdict:
    """The group is hung: which bound it broke, by how much, and how long ago each signal moved."""

    bound: Bound
    limit_s: float
    silent_s: float
    moved_ago_s: Mapping[Signal, float]


@frozen
class DeclareHung:
    verdict: Verdict


@frozen
class Complain:
    """Tell the user something about the watch that is not as it should be."""

    text: str


Command = DeclareHung | Complain


class HangMachine:
    """One life of one worker group. `is_sampled`: something can only be seen by looking again and again."""

    def __init__(self, policy: HangPolicy, now: float, *, is_sampled: bool = False) -> None:
        self.policy = policy
        self._started_at = now
        self._counts_from = now
        self._moved_at: dict[Signal, float] = {}
        self._began_at: float | None = None
        self._has_complained = False
        limits = (policy.hang_timeout_s, policy.start_timeout_s, policy.progress_every_s)
        self._shortest_s = min(limit for limit in limits if limit is not None)
        # Once within the shortest bound is enough to learn in time of whatever begins one: a match, a mark.
        self._look_every_s = self._shortest_s / LOOKS_A_BOUND if is_sampled else self._shortest_s
        self._looked_at = now
        self._broken: Bound | None = None

    def next_deadline(self) -> float:
        """When to look next."""
        return min([self._looked_at + self._look_every_s, *(at for at, _, _ in self._bounds())])

    def step(self, event: Looked, now: float) -> list[Command]:
        if event.is_blind:
            self._counts_from = now
        elif not event.is_again:
            self._forgive_if_late(now)
        elif self._has_moved_since_verdict(event.moved_at):
            self._counts_from = now  # Workers stand still while their stacks are taken.
        self._looked_at = now
        for signal, at in event.moved_at.items():
            self._moved_at[signal] = min(now, max(at, self._moved_at.get(signal, self._started_at)))
        if self._began_at is None:
            self._began_at = min((self._moved_at[mark] for mark in _MARKS if mark in self._moved_at), default=None)
        commands: list[Command] = [*self._complaints(now)]
        broken = [(bound, limit_s) for at, bound, limit_s in self._bounds() if at <= now]
        if broken:
            self._broken = broken[0][0]
            commands.append(DeclareHung(self._verdict(*broken[0], now)))
        return commands

    def _has_moved_since_verdict(self, moved_at: Mapping[Signal, float]) -> bool:
        counted = {Signal.PATTERN} if self._broken is Bound.CADENCE else self.policy.chosen
        return any(at > self._looked_at for signal, at in moved_at.items() if signal in counted)

    def _forgive_if_late(self, now: float) -> None:
        if now - self.next_deadline() > max(_LATE_S, _LATE_SHARE * self._shortest_s):
            self._counts_from = now

    def _bounds(self) -> list[tuple[float, Bound, float]]:
        """When each bound that holds now will be broken, if nothing moves; the first comes first."""
        found = [bound for bound in (self._start_bound(), self._silence_bound()) if bound is not None]
        every_s, matched_at = self.policy.progress_every_s, self._moved_at.get(Signal.PATTERN)
        if every_s is not None and matched_at is not None:
            found.append((max(matched_at, self._counts_from) + every_s, Bound.CADENCE, every_s))
        return sorted(found, key=lambda each: each[0])

    def _start_bound(self) -> tuple[float, Bound, float] | None:
        start_s, moved_at = self.policy.start_timeout_s, self._last_movement()
        if start_s is None or (moved_at is not None and self._is_past_beginning(moved_at, start_s)):
            return None
        return max(moved_at or 0.0, self._counts_from) + start_s, Bound.START, start_s

    def _is_past_beginning(self, moved_at: float, start_s: float) -> bool:
        has_written = Signal.OUTPUT in self._moved_at and Signal.OUTPUT in self.policy.chosen
        return has_written or self._began_at is not None or moved_at > self._started_at + start_s

    def _silence_bound(self) -> tuple[float, Bound, float] | None:
        start_s, hang_s = self.policy.start_timeout_s, self.policy.hang_timeout_s
        moved_at = self._last_movement()
        if hang_s is None or (moved_at is None and start_s is not None):
            return None
        at = max(moved_at or 0.0, self._counts_from) + hang_s
        if start_s is not None:
            # A mark need not be a signal that was chosen: what stood still before it was within its rights until then.
            at = max(at, self._started_at + start_s if self._began_at is None else self._began_at + hang_s)
        return at, Bound.SILENCE, hang_s

    def _last_movement(self) -> float | None:
        chosen = self.policy.chosen
        return max((at for signal, at in self._moved_at.items() if signal in chosen), default=None)

    def _verdict(self, bound: Bound, limit_s: float, now: float) -> Verdict:
        last = self._moved_at[Signal.PATTERN] if bound is Bound.CADENCE else self._last_movement()
        silent_s = now - (self._started_at if last is None else last)
        return Verdict(bound, limit_s, silent_s, {signal: now - at for signal, at in self._moved_at.items()})

    def _complaint_due(self) -> float | None:
        """When a pattern that has not matched yet should have."""
        if not self.policy.pattern or Signal.PATTERN in self._moved_at:
            return None
        limits = (self.policy.start_timeout_s, self.policy.hang_timeout_s, self.policy.progress_every_s)
        return self._started_at + max(limit for limit in limits if limit is not None)

    def _complaints(self, now: float) -> list[Complain]:
        due = self._complaint_due()
        if self._has_complained or due is None or now < due:
            return []
        self._has_complained = True
        since = f"{now - self._started_at:.0f} s after the start"
        return [
            Complain(
                f"{since} no line of this node's workers has matched --progress-pattern {self.policy.quoted_pattern}; "
                "they are not judged by it until one does"
            )
        ]


# Words.

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
    missed = _listed(_NAMES[signal] for signal in _missed(verdict, policy))
    if verdict.bound is not Bound.START:
        return f"no {missed} for {silent}"
    has_moved = any(signal in policy.chosen for signal in verdict.moved_ago_s)
    return f"no {missed} for {silent}, in the beginning" if has_moved else f"no {missed} since the start {silent} ago"


def _missed(verdict: Verdict, policy: HangPolicy) -> list[Signal]:
    """The chosen signals, but for those that say nothing new: lines are output, and not everybody makes calls."""
    chosen = [signal for signal in Signal if signal in policy.chosen]
    told = [
        signal
        for signal in chosen
        if not (signal is Signal.PATTERN and (Signal.OUTPUT in chosen or not policy.pattern))
        and not (signal is Signal.PROGRESS and signal not in verdict.moved_ago_s and len(chosen) > 1)
    ]
    return told or chosen


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
