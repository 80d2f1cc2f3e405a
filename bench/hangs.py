"""What it costs to watch for hangs, and to say that one moves.

    python bench/hangs.py             about four minutes
    python bench/hangs.py --quick     few repetitions, less than a minute

Prints a Markdown table of medians with the middle half in brackets:

* a call of `holdfast.progress(step=...)`, with a watch and without one, and a loop that does nothing beside it;
* the processor time of an agent whose four workers do nothing, with and without `--hang-timeout`. The timeout is a
  minute, so that counters are looked at every 7.5 seconds; with ten minutes it would be a tenth of that;
* the tee of four busy workers, as in one_node.py, with and without a watch, and with a pattern that matches no line;
* the time from the broken bound to the end of the examination, for four workers.

Sides take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import cases
from launchers import NPROC, Launcher, find_launchers, started
from measure import Series, series, take_turns

CALLS = 1_000_000
WATCH = ("--hang-timeout", "60s")
PATTERN = ("--progress-pattern", "step [0-9]+ of", "--progress-every", "60s")


# A call.

_LOOP = """
import sys, time
sys.path.insert(0, {source!r})
from holdfast import progress_board
{prepare}
count = range({calls})
call = {call}
began = time.perf_counter()
for step in count:
    call(step)
print((time.perf_counter() - began) / {calls} * 1e9)
"""
_BOARD = "import os; board = progress_board.Board(4); os.environ[progress_board.VARIABLE] = board.address(1)"


def call_ns(prepare: str, call: str, calls: int) -> float:
    source = str(Path(__file__).parent.parent / "src")
    code = _LOOP.format(source=source, prepare=prepare, call=call, calls=calls)
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)


# An agent at rest.


def rest_us_per_s(ours: Launcher, options: Sequence[str], seconds: float) -> float:
    """Processor time of agent and spawner for each second in which nothing happens."""
    with (
        tempfile.TemporaryDirectory() as directory,
        started(ours.argv(options, "idle.py", (directory,)), expect=None) as process,
    ):
        cases._await_marks(process, directory, "began.0")
        time.sleep(cases.SETTLING_S)
        pids = [process.pid, *_children(process.pid)]
        before = sum(map(_cpu_ns, pids))
        time.sleep(seconds)
        return (sum(map(_cpu_ns, pids)) - before) / 1e3 / seconds


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _cpu_ns(pid: int) -> int:
    """Of all its threads, those that have ended included."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


# The tee.


def tee_lines_per_s(ours: Launcher, options: Sequence[str], lines: int) -> float:
    return cases._talk(Launcher(ours.name, (*ours.command, *options)), lines).lines_per_s


# The examination.

_EXAMINE = """
import json, sys, time
sys.path.insert(0, {source!r})
from holdfast.hangs import watch
workers = {{index: (index, pid) for index, pid in enumerate(json.loads(sys.argv[1]))}}
began = time.perf_counter()
watch.examine(workers, native={native})
print(time.perf_counter() - began)
"""


def examination_ms(native: bool) -> float:
    source = str(Path(__file__).parent.parent / "src")
    sleeper = [sys.executable, "-c", "print('x', flush=True); import time; time.sleep(100)"]
    workers = [subprocess.Popen(sleeper, stdout=subprocess.PIPE) for _ in range(NPROC)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.read(1)
        code = _EXAMINE.format(source=source, native=native)
        command = [sys.executable, "-c", code, json.dumps([worker.pid for worker in workers])]
        return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout) * 1e3
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            assert worker.stdout is not None
            worker.stdout.close()


# The table.


def rows(*, quick: bool) -> list[tuple[str, str, Series]]:
    ours, _ = find_launchers()
    turns, calls, rest_s, lines = (2, 200_000, 8.0, 200_000) if quick else (7, CALLS, 16.0, 1_000_000)
    measures: list[tuple[str, str, int, Callable[[], float]]] = [
        ("an empty function, called", "ns", turns, partial(call_ns, "", "lambda step: None", calls)),
        (
            "holdfast.progress(step), nobody watches",
            "ns",
            turns,
            partial(call_ns, "", "progress_board.progress", calls),
        ),
        ("holdfast.progress(step), watched", "ns", turns, partial(call_ns, _BOARD, "progress_board.progress", calls)),
        ("agent at rest, no watch", "us a second", min(turns, 3), partial(rest_us_per_s, ours, (), rest_s)),
        (
            "agent at rest, --hang-timeout 60s",
            "us a second",
            min(turns, 3),
            partial(rest_us_per_s, ours, WATCH, rest_s),
        ),
        ("tee, no watch", "lines/s", turns, partial(tee_lines_per_s, ours, (), lines)),
        ("tee, watching", "lines/s", turns, partial(tee_lines_per_s, ours, WATCH, lines)),
        ("tee, and a pattern", "lines/s", turns, partial(tee_lines_per_s, ours, (*WATCH, *PATTERN), lines)),
        ("stacks of 4 workers", "ms", turns, partial(examination_ms, native=False)),
        ("stacks of 4 workers, native frames", "ms", turns, partial(examination_ms, native=True)),
    ]
    found = []
    for group in ((0, 1, 2), (3, 4), (5, 6, 7), (8, 9)):
        chosen = [measures[index] for index in group]
        results = take_turns(chosen[0][2], [measure for *_, measure in chosen])
        found += [(what, unit, series(values)) for (what, unit, _, _), values in zip(chosen, results, strict=True)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="What it costs to watch for hangs.")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    args = parser.parse_args()
    print(f"load average at the start: {' '.join(f'{load:.2f}' for load in os.getloadavg())}\n")
    print("| measure | median | middle half | repetitions |\n|---|---|---|---|")
    for what, unit, values in rows(quick=args.quick):
        low, high = values.quartiles()
        print(
            f"| {what} | {values.median:,.4g} {unit} | {low:,.4g} to {high:,.4g} | {len(values.values)} |", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
