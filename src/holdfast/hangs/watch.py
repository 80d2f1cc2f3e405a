"""The agent's watch over its worker group: looks when `hangs/policy.py` says so, and examines a group that hangs.

`HangWatch` collects the signals: output from the pump and the log files (`process/output/output_watch.py`), calls of
`holdfast.progress()` from the board (`progress.py`), and the kernel's counters of the workers' process trees.
`examine` takes the stacks of all workers and compares them; `tell` logs the result and writes a file.

An error in this module disables the watch, or loses the stacks, but never ends the job.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from holdfast import escape, procfs
from holdfast.hangs import EXAMINATION_LIMIT_S, compare, policy, stacks
from holdfast.hangs.compare import Look, Picture, WorkerLook
from holdfast.hangs.policy import HangMachine, HangPolicy, Signal, Verdict
from holdfast.hangs.progress import GroupProgress
from holdfast.log import Logger
from holdfast.process.output.output_watch import OutputWatch

if TYPE_CHECKING:
    from holdfast.process.output.logs import LogsDest

logger = Logger(__name__)

_ONE_DUMP_S = 10.0
_CHILDREN_LIMIT = 16


class UsageMeter:
    """The CPU time and I/O of the workers' process trees, as far as the policy has chosen these signals."""

    def __init__(self, chosen: Iterable[Signal]) -> None:
        counters = {Signal.CPU: procfs.cpu_s, Signal.IO: procfs.io_bytes}
        self.counters = {signal: counters[signal] for signal in chosen if signal in counters}
        self._last: dict[tuple[int, Signal], float | None] = {}

    def read(self, leaders: Iterable[int]) -> dict[int, dict[Signal, float]]:
        """By the leader's pid: the use since the last reading, infinite if a process of the tree cannot be read."""
        before, self._last = self._last, {}
        used = {leader: dict.fromkeys(self.counters, 0.0) for leader in leaders}
        for leader, sums in used.items():
            for pid in (leader, *procfs.descendants_of(leader)):
                for signal, read in self.counters.items():
                    now = self._last[pid, signal] = read(pid)
                    sums[signal] += math.inf if now is None else max(0.0, now - (before.get((pid, signal)) or 0.0))
        return used


class HangWatch:
    """One lifetime of a worker group: `begin` comes after its start."""

    def __init__(self, policy: HangPolicy, progress: GroupProgress) -> None:
        self._policy = policy
        self._machine: HangMachine | None = None
        self.output = OutputWatch(policy.pattern)
        self._progress = progress
        has_timeout = policy.hang_timeout_s is not None or policy.start_timeout_s is not None
        self._meter = UsageMeter(policy.chosen if has_timeout else ())
        self._usage_at = 0.0
        self._counters_moved_at: dict[Signal, float] = {}
        self._unreadable: set[Signal] = set()

    def begin(self) -> None:
        now = self._usage_at = time.monotonic()
        is_sampled = bool(self._meter.counters) or self.output.is_sampled
        self._machine = HangMachine(self._policy, now, is_sampled=is_sampled)

    def end(self) -> None:
        self._machine = None

    def next_deadline(self) -> float | None:
        return self._machine.next_deadline() if self._machine is not None else None

    def look(self, running: Mapping[int, int], *, is_again: bool = False) -> Verdict | None:
        """Look at the running workers (local rank -> pid) if it is time to. Returns a verdict if they hang.
        `is_again`: look at once, to see whether the last verdict still holds."""
        now = time.monotonic()
        if self._machine is None or not running or (now < self._machine.next_deadline() and not is_again):
            return None
        try:
            movements = self._movements(running, now, has_dumped=is_again)
            is_held_up = self.output.is_blind or _is_at_prompt(running.values())
            found = self._machine.step(movements, now, is_again=is_again, is_held_up=is_held_up)
        except Exception as error:
            logger.warning("hangs are not watched for any more: %s: %s", type(error).__name__, error)
            self._machine = None
            return None
        for text in (each for each in found if isinstance(each, str)):
            logger.warning("%s", text)
        return next((each for each in found if isinstance(each, Verdict)), None)

    def _movements(self, running: Mapping[int, int], now: float, *, has_dumped: bool) -> dict[Signal, float]:
        self.output.look(now)
        self._read_usage(running.values(), now, has_dumped)
        matched_at = self.output.matched_at()
        if matched_at is not None and self.output.has_given_up:
            matched_at = now  # Lines are not searched any more, so their absence must not break a bound.
        called_at = [at for rank in running if (at := self._progress.of(rank)[0]) is not None]
        found = {
            Signal.OUTPUT: self.output.moved_at(running),
            Signal.PATTERN: matched_at,
            Signal.PROGRESS: max(called_at, default=None),
            **self._counters_moved_at,
        }
        return {signal: at for signal, at in found.items() if at is not None}

    def _read_usage(self, leaders: Iterable[int], now: float, has_dumped: bool) -> None:
        for leader, used in self._meter.read(leaders).items():
            moved = policy.moved(used, now - self._usage_at, has_dumped=has_dumped)
            self._counters_moved_at.update(dict.fromkeys(moved, now))
            for signal in {signal for signal, amount in used.items() if amount == math.inf} - self._unreadable:
                self._unreadable.add(signal)
                logger.warning("the %s counters of worker %d cannot be read, so they count as moving", signal, leader)
        self._usage_at = now

    def known_of(self, local_rank: int) -> tuple[float | None, int | None]:
        """For how long that worker has written nothing, and its step."""
        written_at = self.output.moved_at([local_rank])
        return None if written_at is None else time.monotonic() - written_at, self._progress.of(local_rank)[1]


def _is_at_prompt(leaders: Iterable[int]) -> bool:
    """Whether a worker waits for a person, as at `breakpoint()`."""
    return any(procfs.is_at_prompt(pid) for leader in leaders for pid in (leader, *procfs.descendants_of(leader)))


def examine(workers: Mapping[int, tuple[int, int]], watch: HangWatch | None = None, *, native: bool = True) -> Picture:
    """Take the stacks of these workers: local rank -> global rank and pid. A signal to the agent cuts it short."""
    trees = {pid: procfs.descendants_of(pid)[:_CHILDREN_LIMIT] for _, pid in workers.values()}
    look_at = partial(stacks.look_at, native=native, timeout_s=_ONE_DUMP_S)
    dumped = stacks.dump_all([*trees, *itertools.chain(*trees.values())], look_at, EXAMINATION_LIMIT_S)
    found = {pid: each if isinstance(each, Look) else Look(pid, trouble=str(each)) for pid, each in dumped}
    looks = []
    for local_rank, (rank, pid) in workers.items():
        # Of the descendants, only Python processes have stacks to show.
        others = tuple(found[each] for each in trees[pid] if found[each].threads)
        known = watch.known_of(local_rank) if watch is not None else ()
        looks.append(WorkerLook(rank, found[pid], others, *known))
    return compare.picture(looks)


def tell(picture: Picture, destinations: LogsDest, heading: str) -> str:
    """Log the groups and keep everything in a file. Returns its path, if any."""
    path, trouble = keep(picture, destinations, heading)
    why = trouble or "nothing is kept under /dev/null"
    where = f"every thread of every worker: {path}" if path else f"the stacks are in no file: {why}"
    # Without a file, the log is the only place for the stacks.
    shown = compare.summary(picture) if path else compare.full_text(picture)
    logger.warning("%s\n%s", shown, escape.one_line(where), extra=escape.HAS_LINES)
    return path


def keep(picture: Picture, destinations: LogsDest, heading: str) -> tuple[str, str]:
    """Write a file beside the logs of this attempt. Its path, and why there is none; both are empty if nothing is kept
    of this attempt."""
    paths = (destinations.filtered_stdout, destinations.filtered_stderr, *destinations.error_files.values())
    kept = (os.path.dirname(path) for path in paths if path and path != os.devnull)
    directory = next(filter(os.path.isdir, kept), "")
    try:
        return (write_file(picture, directory, heading), "") if directory else ("", "")
    except OSError as error:
        return "", f"{error.strerror} ({directory})"


def write_file(picture: Picture, directory: str, heading: str) -> str:
    """Write `stacks.txt` in that directory, or `stacks_1.txt` and so on if it exists."""
    text = "\n\n".join([heading, compare.summary(picture, is_short=False), compare.full_text(picture)])
    path = os.path.join(directory, "stacks.txt")
    for number in itertools.count(1):
        try:
            with open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(escape.lines(text) + "\n")
                break
        except FileExistsError:
            path = os.path.join(directory, f"stacks_{number}.txt")
    return path
