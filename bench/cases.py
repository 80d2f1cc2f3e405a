"""What is measured: one function a case, each giving rows of the table.

Times that begin in one process and end in another are read from the monotonic clock, which all processes of a
host share. The bounds are promises about these very measures; they are shown beside the results, and judged.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from launchers import NPROC, RUN_LIMIT_S, BenchmarkError, Launcher, Unexpected, seconds_to_finish, started
from measure import Bound, Row, series, take_turns
from memory import Held, held_by, own_processes

T = TypeVar("T")

MS_PER_S = 1e3
NS_PER_S = 1e9
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Bench:
    """What a case is given: the launchers, how often to repeat, and how large to be if it has a size."""

    ours: Launcher
    theirs: Launcher
    repetitions: int
    size: int
    tell: Callable[[int], None]

    def compare(self, measure: Callable[[Launcher], T]) -> tuple[list[T], list[T]]:
        sides = [partial(measure, self.ours), partial(measure, self.theirs)]
        ours, theirs = take_turns(self.repetitions, sides, self.tell)
        return ours, theirs


@dataclass(frozen=True, slots=True)
class Case:
    """A case and how much of it makes a full run and a quick one."""

    measure: Callable[[Bench], list[Row]]
    repetitions: int
    quick_repetitions: int
    size: int = 0
    quick_size: int = 0


# --- import -----------------------------------------------------------------------------------------------------

# The import of torch takes so long that fewer repetitions tell enough.
TORCH_IMPORT_SHARE = 10


def measure_import(bench: Bench) -> list[Row]:
    ours = _import_ms("holdfast", bench.repetitions, bench.tell)
    theirs = _import_ms("torch.distributed.run", max(1, bench.repetitions // TORCH_IMPORT_SHARE), bench.tell)
    bound = Bound("value", "at most", 20)
    return [Row("import, over a bare interpreter", "ms", series(ours), series(theirs), bound)]


def _import_ms(module: str, repetitions: int, tell: Callable[[int], None]) -> list[float]:
    """What the import adds to an interpreter that does nothing, turn by turn."""
    bare = partial(seconds_to_finish, [sys.executable, "-c", "pass"])
    importing = partial(seconds_to_finish, [sys.executable, "-c", f"import {module}"])
    without_s, with_s = take_turns(repetitions, [bare, importing], tell)
    return [(more - less) * MS_PER_S for less, more in zip(without_s, with_s, strict=True)]


# --- launch -----------------------------------------------------------------------------------------------------


def measure_launch(bench: Bench) -> list[Row]:
    ours, theirs = bench.compare(lambda launcher: seconds_to_finish(launcher.argv((), "trivial.py")) * MS_PER_S)
    bound = Bound("ratio", "at most", 0.10)
    return [Row(f"trivial script, {NPROC} workers, start to end", "ms", series(ours), series(theirs), bound)]


# --- restart and stop -------------------------------------------------------------------------------------------


def measure_restart(bench: Bench) -> list[Row]:
    ours, theirs = bench.compare(_restart_ms)
    bound = Bound("ratio", "at most", 0.25)
    what = f"failure to the last of {NPROC} restarted workers, trivial script"
    return [Row(what, "ms", series(ours), series(theirs), bound)]


def _restart_ms(launcher: Launcher) -> float:
    with tempfile.TemporaryDirectory() as directory:
        seconds_to_finish(launcher.argv(("--max-restarts", "1"), "fail_once.py", (directory,)))
        return (max(_marks(directory, "began.1")) - _failure_ns(directory)) / NS_PER_MS


def measure_stop(bench: Bench) -> list[Row]:
    ours, theirs = bench.compare(_stop_ms)
    return [Row("failure to SIGTERM at the last peer", "ms", series(ours), series(theirs))]


def _stop_ms(launcher: Launcher) -> float:
    with tempfile.TemporaryDirectory() as directory:
        seconds_to_finish(launcher.argv((), "fail_among_peers.py", (directory,)), expect=1)
        return (max(_marks(directory, "stopped.0", NPROC - 1)) - _failure_ns(directory)) / NS_PER_MS


def _failure_ns(directory: str) -> int:
    return _marks(directory, "failed.0", 1)[0]


def _marks(directory: str, name: str, count: int = NPROC) -> list[int]:
    """What the workers left under a name (see workers/marks.py)."""
    found = [int(path.read_text()) for path in Path(directory).glob(f"{name}.*")]
    if len(found) != count:
        raise BenchmarkError(f"{len(found)} workers left the mark {name!r}, not {count}")
    return found


# --- memory -----------------------------------------------------------------------------------------------------

SETTLING_S = 0.5


def measure_memory(bench: Bench) -> list[Row]:
    ours, theirs = bench.compare(_memory)

    def row(what: str, read: Callable[[tuple[Held, Held]], float], limit: float | None = None) -> Row:
        bound = None if limit is None else Bound("value", "at most", limit)
        return Row(what, "MB", series(map(read, ours)), series(map(read, theirs)), bound)

    return [
        row("agent's resident memory (RSS)", lambda held: held[0].rss_mb, 40),
        row("agent's and spawner's (RSS)", lambda held: held[1].rss_mb, 60),
        row("agent's share of memory (PSS)", lambda held: held[0].pss_mb),
        row("agent's and spawner's (PSS)", lambda held: held[1].pss_mb),
    ]


def _memory(launcher: Launcher) -> tuple[Held, Held]:
    """Of the agent alone, and of it with whatever helps it, while idle workers run."""
    with (
        tempfile.TemporaryDirectory() as directory,
        started(launcher.argv((), "idle.py", (directory,)), expect=None) as process,
    ):
        _await_marks(process, directory, "began.0")
        time.sleep(SETTLING_S)
        workers = set(_marks(directory, "began.0"))
        return held_by([process.pid]), held_by(own_processes(process.pid, workers))


def _await_marks(process: subprocess.Popen[bytes], directory: str, name: str) -> None:
    deadline = time.monotonic() + RUN_LIMIT_S
    while len(list(Path(directory).glob(f"{name}.*"))) < NPROC:
        if process.poll() is not None:
            raise Unexpected(f"it ended with status {process.returncode} before all workers ran")
        if time.monotonic() > deadline:
            raise Unexpected(f"not every worker left the mark {name!r} within {RUN_LIMIT_S:g} s")
        time.sleep(0.02)


# --- tee --------------------------------------------------------------------------------------------------------

# As both launchers label the lines: role and rank in brackets. The text is that of workers/chatter.py.
LINE = re.compile(rb"\[[a-z_]*([0-3])\]: ?worker ([0-3]) line (\d{9}) of the talk")


@dataclass(frozen=True, slots=True)
class Talk:
    """How fast lines came through, and how many did not arrive whole, labelled, once and in order."""

    lines_per_s: float
    flaws: int


def measure_tee(bench: Bench) -> list[Row]:
    ours, theirs = bench.compare(partial(_talk, lines_per_worker=bench.size))
    what = f"tee of {NPROC} busy workers, {bench.size:,} lines each"
    speeds = [series(talk.lines_per_s for talk in talks) for talks in (ours, theirs)]
    flaws = [series(talk.flaws for talk in talks) for talks in (ours, theirs)]
    is_sound = not any(flaws[0].values)
    return [
        Row(what, "lines/s", speeds[0], speeds[1], Bound("ratio", "at least", 5), is_sound),
        Row(
            "lines lost, torn, doubled or mislabelled",
            "lines",
            flaws[0],
            flaws[1],
            Bound("value", "at most", 0),
            is_sound,
        ),
    ]


def _talk(launcher: Launcher, lines_per_worker: int) -> Talk:
    with tempfile.TemporaryDirectory() as directory:
        console, logs = Path(directory, "console"), Path(directory, "logs")
        argv = launcher.argv(("-t", "3", "--log-dir", str(logs)), "chatter.py", (directory, lines_per_worker))
        with console.open("wb") as stdout:
            seconds_to_finish(argv, stdout=stdout)
        took_s = (console.stat().st_mtime_ns - min(_marks(directory, "began.0"))) / NS_PER_S
        flaws = count_flaws(console.read_bytes(), lines_per_worker)
        return Talk((NPROC * lines_per_worker - flaws) / took_s, flaws)


def count_flaws(console: bytes, lines_per_worker: int) -> int:
    """How many lines are missing or torn, doubled or out of order; else, how many there are that nobody wrote."""
    last = [-1] * NPROC
    whole = misplaced = strays = 0
    for line in console.splitlines():
        match = LINE.fullmatch(line)
        if match is None:
            strays += 1
        elif match[1] == match[2] and int(match[3]) > last[int(match[1])]:
            last[int(match[1])] = int(match[3])
            whole += 1
        else:
            misplaced += 1
    return (NPROC * lines_per_worker - whole + misplaced) or strays


CASES = {
    "import": Case(measure_import, repetitions=100, quick_repetitions=20),
    "launch": Case(measure_launch, repetitions=20, quick_repetitions=3),
    "restart": Case(measure_restart, repetitions=15, quick_repetitions=2),
    "stop": Case(measure_stop, repetitions=15, quick_repetitions=2),
    "memory": Case(measure_memory, repetitions=5, quick_repetitions=1),
    "tee": Case(measure_tee, repetitions=7, quick_repetitions=2, size=1_000_000, quick_size=200_000),
}
