"""An agent at work and at rest: memory, idle CPU, stopping, the tee, and timers."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial
from operator import itemgetter

from bench.results import Bound, of_each, row
from bench.sides import (
    BARE,
    HOLDFAST,
    NS_PER_MS,
    NS_PER_S,
    TORCHRUN,
    Side,
    cpu_ns,
    gone_ns,
    helpers_of,
    marks_of_workers,
    memory_mb,
    started,
)
from bench.turns import Turns

NPROC = 4
SETTLING_S = 0.5

# --- at rest ------------------------------------------------------------------------------------------------------


def measure_rest(turns: Turns) -> None:
    idle_s = turns.size(2.0, 0.5)
    found = turns.compare("at rest", {side.name: partial(_rest, side, idle_s) for side in (HOLDFAST, TORCHRUN, BARE)})
    for key, what, unit, has_bare, bounds in (
        ("memory.agent_rss", "resident memory of the agent (RSS)", "MB", False, [Bound(25)]),
        ("memory.all_rss", "the same, spawner included", "MB", False, [Bound(40)]),
        ("memory.agent", "memory of the agent (PSS)", "MB", False, []),
        ("memory.spawner", "memory of its helper processes: the spawner (PSS)", "MB", False, []),
        ("memory.worker", "memory of a worker that does nothing (PSS)", "MB", True, []),
        ("idle_cpu", "CPU time of agent and helpers at rest, each second", "us", False, []),
        ("stop", f"SIGTERM to the end of the launcher, {NPROC} workers", "ms", True, []),
    ):
        values = of_each(found, itemgetter(key))
        shown = {side: values[side] for side in values if has_bare or side != "bare"}
        turns.rows.append(row(key, what, unit, shown, *bounds))


def _rest(side: Side, idle_s: float) -> dict[str, float]:
    """By the keys of the rows."""
    with marks_of_workers() as marks, started(side.argv(NPROC, "idle.py", (marks,))) as run:
        workers = marks.wait("ready", 0, NPROC, run)
        time.sleep(SETTLING_S)
        helpers = helpers_of(run, workers)
        own = [run.pid, *helpers]
        before_ns, began = cpu_ns(own), time.monotonic()
        time.sleep(idle_s)
        cpu_us_per_s = (cpu_ns(own) - before_ns) / 1e3 / (time.monotonic() - began)
        held = {
            "memory.agent_rss": memory_mb([run.pid], "Rss"),
            "memory.all_rss": memory_mb(own, "Rss"),
            "memory.agent": memory_mb([run.pid]),
            "memory.spawner": memory_mb(helpers),
            "memory.worker": memory_mb([mark.pid for mark in workers]) / NPROC,
        }
        told_ns = time.monotonic_ns()
        os.kill(run.pid, signal.SIGTERM)
        run.wait()
        return {**held, "idle_cpu": cpu_us_per_s, "stop": (run.ended_ns - told_ns) / NS_PER_MS}


# --- tee ----------------------------------------------------------------------------------------------------------

# As both launchers label the lines: role and rank in brackets. The text is that of workers/chatter.py.
LINE = re.compile(rb"\[[a-z_]*([0-3])\]: ?worker ([0-3]) line (\d{9}) of the talk")


def measure_tee(turns: Turns) -> None:
    lines = turns.size(1_000_000, 10_000)
    found = turns.compare(
        "tee", {side.name: partial(_talk, side, lines) for side in (HOLDFAST, TORCHRUN)}, warm_up=False
    )
    rates = of_each(found, lambda talk: talk[0] / 1e6)
    flaws = of_each(found, lambda talk: 100 * talk[1] / (NPROC * lines))
    what = f"tee of {NPROC} busy workers, {lines:,} lines each"
    turns.rows += [
        row("tee", what, "million lines/s", rates, Bound(5, "torchrun", is_minimum=True)),
        row("tee_flaws", "of these lost, torn, doubled, mislabelled or out of order", "%", flaws, Bound(0)),
    ]


def _talk(side: Side, lines_per_worker: int) -> tuple[float, int]:
    """How many lines came through each second, and how many did not arrive whole, labelled, once and in order."""
    with marks_of_workers() as marks:
        console, logs = marks.directory / "console", marks.directory / "logs"
        argv = side.argv(NPROC, "chatter.py", (marks, lines_per_worker), ("--tee", "3", "--log-dir", str(logs)))
        with console.open("wb") as stdout, started(argv, stdout) as run:
            run.succeed()
        began_ns = min(mark.value for mark in marks.of_all("began", 0, NPROC))
        took_s = (console.stat().st_mtime_ns - began_ns) / NS_PER_S
        flaws = count_flaws(console.read_bytes(), lines_per_worker)
        return (NPROC * lines_per_worker - flaws) / took_s, flaws


def count_flaws(console: bytes, lines_per_worker: int) -> int:
    """How many lines are missing or torn, doubled or out of order; else, how many there are that no worker wrote."""
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


# --- timers -------------------------------------------------------------------------------------------------------


def measure_timers(turns: Turns) -> None:
    found = turns.compare("timers", {side.name: partial(_overrun_ms, side) for side in (HOLDFAST, TORCHRUN)})
    turns.rows.append(row("timers", "a timer's deadline to the end of the worker that overran it", "ms", found))


def _overrun_ms(side: Side) -> float:
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    with marks_of_workers() as marks, started(side.argv(1, "timer.py", (marks,)), env=env) as run:
        (armed,) = marks.wait("armed", 0, 1, run)
        ended_ns = gone_ns([armed.pid])[armed.pid]
        ended_ns += time.time_ns() - time.monotonic_ns()  # The deadline is by the real-time clock.
        assert run.wait() != 0, f"{side.name} did not kill a worker that overran its timer"
        return (ended_ns - armed.value) / NS_PER_MS
