"""The agent's watch over its worker group: looks when `hangs/policy.py` says so, and examines a group that hangs.

`HangWatch` collects what moves: the pump and the log files (`process/output/watch.py`), the board on which workers note
their progress (`progress_board.py`), and the counters of their trees. `examine` takes the stacks of all workers, and
`Finding` is what the agent makes of them: which ranks to blame, in which words, and a file with everything.

Whatever goes wrong in here costs the watch, or the stacks, and never the job.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from holdfast import loop, procfs, progress_board, signals
from holdfast.frozen import frozen
from holdfast.hangs import compare, policy, stacks
from holdfast.hangs.compare import Look, Picture, WorkerLook
from holdfast.hangs.observe import UsageMeter
from holdfast.hangs.policy import Complain, HangMachine, HangPolicy, Looked, Signal, Usage, Verdict
from holdfast.loop import Wakeup
from holdfast.process.output.watch import OutputWatch

if TYPE_CHECKING:
    from holdfast.process.output.logs import LogsDest

logger = logging.getLogger(__name__)

# All stacks of a group, native frames included, take a second or two. Nobody waits longer than this for them.
EXAMINATION_LIMIT_S = 20.0
_ONE_DUMP_S = 10.0
_MOST_OTHERS = 16


class HangWatch:
    """One for each life of a group: `prepare` before its start, `begin` after it."""

    def __init__(self, policy: HangPolicy) -> None:
        self._policy = policy
        self._machine: HangMachine | None = None
        self._output = OutputWatch(policy.pattern)
        self._board: progress_board.Board | None = None
        chosen = policy.chosen
        self._meter = UsageMeter(cpu=Signal.CPU in chosen, io=Signal.IO in chosen)
        self._wants_usage = bool(chosen & {Signal.CPU, Signal.IO}) and self._has_timeout
        self._usage: Mapping[int, Usage] = {}
        self._usage_at = 0.0
        self._counters_moved_at: dict[Signal, float] = {}
        self._unreadable: set[Signal] = set()

    @property
    def _has_timeout(self) -> bool:
        return self._policy.hang_timeout_s is not None or self._policy.start_timeout_s is not None

    def prepare(self, envs: Mapping[int, dict[str, str]]) -> OutputWatch:
        """Tell each worker its place on the board; returns who wants to hear of their output."""
        try:
            self._board = progress_board.Board(len(envs))
        except OSError as error:
            logger.warning("calls of holdfast.progress() will not be seen: %s", error.strerror)
            return self._output
        for rank, env in envs.items():
            env[progress_board.VARIABLE] = self._board.address(rank)
        return self._output

    def begin(self) -> None:
        now = time.monotonic()
        self._usage_at = now
        self._machine = HangMachine(self._policy, now, is_sampled=self._wants_usage or self._output.is_sampled)

    def end(self) -> None:
        self._machine = None
        if self._board is not None:
            self._board.close()
            self._board = None

    def next_deadline(self) -> float | None:
        return self._machine.next_deadline() if self._machine is not None else None

    def look(self, running: Mapping[int, int]) -> Verdict | None:
        """Look if it is time to: at those that run, local rank -> pid. A verdict if they hang."""
        due = self.next_deadline()
        return self._look(running, is_again=False) if due is not None and time.monotonic() >= due else None

    def look_again(self, running: Mapping[int, int]) -> Verdict | None:
        """Whether a verdict still holds."""
        return self._look(running, is_again=True)

    def _look(self, running: Mapping[int, int], *, is_again: bool) -> Verdict | None:
        if self._machine is None or not running:
            return None
        try:
            now = time.monotonic()
            looked = Looked(self._movements(running, now, has_dumped=is_again), is_again, self._output.is_blind)
            commands = self._machine.step(looked, now)
        except Exception as error:
            logger.warning("hangs are not watched for any more: %s: %s", type(error).__name__, error)
            self._machine = None
            return None
        verdict = None
        for command in commands:
            if isinstance(command, Complain):
                logger.warning("%s", command.text)
            else:
                verdict = command.verdict
        return verdict

    def _movements(self, running: Mapping[int, int], now: float, *, has_dumped: bool) -> dict[Signal, float]:
        self._output.look(now)
        if self._wants_usage:
            self._read_usage(running.values(), now, has_dumped)
        matched_at = self._output.matched_at()
        if matched_at is not None and self._output.has_given_up:
            matched_at = now  # Nobody knows; so nobody is judged by it.
        found = {
            Signal.OUTPUT: self._output.moved_at(running),
            Signal.PATTERN: matched_at,
            Signal.PROGRESS: self._progress_at(running),
            **self._counters_moved_at,
        }
        return {signal: at for signal, at in found.items() if at is not None}

    def _read_usage(self, leaders: Iterable[int], now: float, has_dumped: bool) -> None:
        usage = self._meter.read(leaders)
        elapsed_s = now - self._usage_at
        for leader, after in usage.items():
            for signal in policy.moved(self._usage.get(leader, Usage()), after, elapsed_s, has_dumped=has_dumped):
                self._counters_moved_at[signal] = now
            self._tell_unreadable(leader, after)
        self._usage, self._usage_at = usage, now

    def _tell_unreadable(self, leader: int, usage: Usage) -> None:
        values = {Signal.CPU: usage.cpu_s, Signal.IO: usage.io_bytes}
        for signal in (signal for signal, value in values.items() if value is None and signal not in self._unreadable):
            self._unreadable.add(signal)
            logger.warning("the %s counters of worker %d cannot be read, so they count as moving", signal, leader)

    def _progress_at(self, running: Iterable[int]) -> float | None:
        if self._board is None:
            return None
        return max((at for rank in running if (at := self._board.read(rank)[0]) is not None), default=None)

    def knowledge(self, local_rank: int) -> tuple[float | None, int | None]:
        """For how long that worker has been quiet, and its last step."""
        said_at = self._output.moved_at([local_rank])
        step = self._board.read(local_rank)[1] if self._board is not None else None
        return (None if said_at is None else time.monotonic() - said_at), step


# The examination.


@frozen
class Finding:
    """What was found; `reason` is why anybody looked, `path` the file with all of it."""

    looks: tuple[WorkerLook, ...]
    picture: Picture
    reason: str
    path: str = ""

    @property
    def is_cause_here(self) -> bool:
        """Whether somebody of this node stands out, or at least does not wait for a peer."""
        return bool(self.picture.odd) or not self.picture.is_all_in_collective

    @property
    def odd_ranks(self) -> list[int]:
        return [rank for group in self.picture.odd for rank in group.ranks]

    def blamed(self) -> dict[int, str]:
        """By global rank, in which words: everybody who is odd; if nobody is, one stands for all."""
        ranks = self.odd_ranks or [self.picture.groups[0].ranks[0]]
        return {rank: f"{self.reason}; {compare.found(self.picture, rank)}" for rank in ranks}

    def stack_of(self, rank: int) -> str:
        look = next(each for each in self.looks if each.rank == rank)
        return "\n".join(compare.stack_lines(look.main, full_paths=True, is_short=True))

    def pid_of(self, rank: int) -> int:
        return next(each.leader.pid for each in self.looks if each.rank == rank)


def examine(
    workers: Mapping[int, tuple[int, int]], reason: str, watch: HangWatch | None = None, *, native: bool = True
) -> Finding:
    """Take the stacks of these workers: local rank -> global rank and pid. A signal to the agent cuts it short."""
    trees = {pid: _others(pid) for _, pid in workers.values()}
    found = look_at_all([*trees, *(pid for others in trees.values() for pid in others)], native=native)
    looks = []
    for local_rank, (rank, pid) in workers.items():
        quiet_s, step = watch.knowledge(local_rank) if watch is not None else (None, None)
        looks.append(WorkerLook(rank, found[pid], _telling([found[each] for each in trees[pid]]), quiet_s, step))
    return Finding(tuple(looks), compare.picture(looks), reason)


def _others(pid: int) -> list[int]:
    return procfs.descendants_of(pid)[:_MOST_OTHERS]


def _telling(others: Iterable[Look]) -> tuple[Look, ...]:
    """Of what a worker has started, those that are Python: of a shell or a compiler nothing is seen anyway."""
    return tuple(look for look in others if look.threads)


def look_at_all(pids: Iterable[int], *, native: bool) -> dict[int, Look]:
    wakeup = Wakeup()
    until = time.monotonic() + EXAMINATION_LIMIT_S
    dumps = stacks.Dumps(pids, lambda pid: stacks.look_at(pid, native=native, timeout_s=_ONE_DUMP_S), wakeup.wake)
    while not dumps.are_complete() and not signals.inbox().has_pending and (left_s := until - time.monotonic()) > 0:
        loop.wait_readable([wakeup.fileno()], left_s)
        wakeup.clear()
    wakeup.close()
    return dumps.finish(stacks.late)


# Telling.


def tell(finding: Finding, directory: str, heading: str) -> Finding:
    """The groups into the log, everything into a file."""
    path, trouble = "", "nothing is kept under /dev/null"
    if directory:
        try:
            path = write_file(finding, directory, heading)
        except OSError as error:
            trouble = f"{error.strerror} ({directory})"
    where = f"every thread of every worker: {path}" if path else f"the stacks are in no file: {trouble}"
    # Without a file this is all that will ever be seen of them.
    shown = compare.summary(finding.picture) if path else compare.full_text(finding.looks)
    logger.warning("%s\n%s", shown, where)
    return Finding(finding.looks, finding.picture, finding.reason, path)


def write_file(finding: Finding, directory: str, heading: str) -> str:
    """`stacks.txt` in that directory, or the next name that is free."""
    text = "\n\n".join(
        [
            f"{heading}\n{finding.reason}",
            compare.summary(finding.picture, frames_limit=None, groups_limit=len(finding.looks)),
            compare.full_text(finding.looks),
        ]
    )
    for number in itertools.count():
        path = os.path.join(directory, f"stacks_{number}.txt" if number else "stacks.txt")
        try:
            with open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text + "\n")
            return path
        except FileExistsError:
            continue
    raise AssertionError("there is always another number")


def directory_of(destinations: LogsDest) -> str:
    """Where this attempt keeps its files; empty if it keeps none."""
    paths = (destinations.filtered_stdout, destinations.filtered_stderr, *destinations.error_files.values())
    kept = (os.path.dirname(path) for path in paths if path and path != os.devnull)
    return next((directory for directory in kept if os.path.isdir(directory)), "")
