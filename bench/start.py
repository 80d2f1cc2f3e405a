"""Starting: the import, the launch of trivial workers, and what a worker's start costs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from functools import partial
from itertools import pairwise
from operator import itemgetter

from bench.results import Bound, differences, of_each, row
from bench.sides import BARE, HOLDFAST, TORCHRUN, WORKERS, Side, finish, marks_of_workers
from bench.turns import Turns

SIDES = (HOLDFAST, TORCHRUN, BARE)

_LAUNCH = (
    "The agent is one more Python; it starts and imports its modules before it orders a worker (the stages of a launch "
    "below). Each worker costs a fork of the spawner, and is watched until it has ended."
)
_WORKER = (
    "Half of it is the fork: the spawner's child has its pages copied, and sets what ends it with the agent, which a "
    "cheaper vfork cannot. The rest is the bootstrap, which prepares the evidence of a failure."
)


def measure_import(turns: Turns) -> None:
    programs = {"bare": "pass", "holdfast": "import holdfast", "torchrun": "import torch.distributed.run"}

    def ms(program: str) -> float:
        return finish([sys.executable, "-c", program]).took_s * 1e3

    found = turns.compare("import", {name: partial(ms, program) for name, program in programs.items()})
    over = {name: differences(found[name], found["bare"]) for name in ("holdfast", "torchrun")}
    what = "import, over an interpreter that does nothing"
    turns.rows.append(row("import", what, "ms", over, Bound(20)))


def measure_launch(turns: Turns) -> None:
    sizes = turns.size((1, 4, 16, 64), (1, 4))
    cpu_ms: dict[int, dict[str, list[float]]] = {}
    for size in sizes:

        def run(side: Side, nproc: int = size) -> tuple[float, float]:
            ended = finish(side.argv(nproc, "trivial.py"))
            return ended.took_s * 1e3, ended.cpu_s * 1e3

        found = turns.compare(f"launch of {size}", {side.name: partial(run, side) for side in SIDES})
        cpu_ms[size] = of_each(found, itemgetter(1))
        bounds = [Bound(0.06, "torchrun")] if size == 4 else []
        what = f"{size} trivial worker{'s' if size > 1 else ''}, start to end"
        walls = of_each(found, itemgetter(0))
        turns.rows.append(row(f"launch.{size}", what, "ms", walls, *bounds, Bound(1.15, "bare", 60, reason=_LAUNCH)))
    least, most = sizes[0], sizes[-1]
    slopes = {
        name: [each / (most - least) for each in differences(cpu_ms[most][name], cpu_ms[least][name])]
        for name in cpu_ms[most]
    }
    what = f"CPU time of all processes for each further worker, {least} to {most} workers"
    turns.rows.append(row("launch_cpu", what, "ms", slopes))
    measure_launch_stages(turns)


# The agent of a launch, which writes down when its first line runs, when it orders the worker, and when it has ended.
_STAGES = """
import os, sys, time
times = [time.monotonic_ns()]
from holdfast.__main__ import main
from holdfast.process.spawner import client
start = client.SpawnerLink.start
def order(*args, **options):
    times.append(time.monotonic_ns())
    return start(*args, **options)
client.SpawnerLink.start = order
main()
times.append(time.monotonic_ns())
open(os.environ["BENCH_TIMES"], "w").write(" ".join(map(str, times)))
"""


def measure_launch_stages(turns: Turns) -> None:
    def stages() -> list[float]:
        with tempfile.NamedTemporaryFile() as said:
            argv = [sys.executable, "-c", _STAGES, "run", str(WORKERS / "trivial.py")]
            began_ns = finish(argv, BENCH_TIMES=said.name).began_ns
            times_ns = [began_ns, *map(int, said.read().split())]
        return [(later - earlier) / 1e6 for earlier, later in pairwise(times_ns)]

    found = turns.compare("stages of a launch", {"holdfast": stages})
    whats = (
        "1 worker: until Python runs the agent's first line",
        "1 worker: from there until the agent has imported what it needs and orders the worker",
        "1 worker: from there until the worker was started, has run, has ended, and the agent knows",
    )
    for number, what in enumerate(whats, 1):
        turns.rows.append(row(f"launch_stage.{number}", what, "ms", of_each(found, itemgetter(number - 1))))


def measure_worker_cpu(turns: Turns) -> None:
    """The median over four workers of each run."""
    nproc = 4

    def ms(side: Side) -> float:
        with marks_of_workers() as marks:
            finish(side.argv(nproc, "start.py", (marks,)))
            return statistics.median(mark.value for mark in marks.of_all("used", 0, nproc)) / 1e6

    found = turns.compare("a worker's CPU", {side.name: partial(ms, side) for side in SIDES})
    over = {name: differences(found[name], found["bare"]) for name in ("holdfast", "torchrun")}
    turns.rows += [
        row("worker_cpu", "CPU time of a worker's process up to the first line of its script", "ms", found),
        row("worker_cpu_over", "the same, over plain `python script.py`", "ms", over, Bound(2, reason=_WORKER)),
    ]


_CALLS = """
import os, time
from holdfast import progress_board
if {watched}:
    board = progress_board.Board(4)
    os.environ[progress_board.VARIABLE] = board.address(1)
call = {call}
began = time.perf_counter()
for step in range({calls}):
    call(step)
print((time.perf_counter() - began) / {calls} * 1e9)
"""


def measure_progress(turns: Turns) -> None:
    calls = turns.size(1_000_000, 10_000)

    def ns(call: str, watched: bool) -> float:
        program = _CALLS.format(call=call, watched=watched, calls=calls)
        return float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)

    ours = "progress_board.progress"
    sides = {
        "empty": partial(ns, "lambda step: None", False),
        "unwatched": partial(ns, ours, False),
        "watched": partial(ns, ours, True),
    }
    found = turns.compare("holdfast.progress", sides)
    turns.rows += [
        row("progress.empty", "a call of an empty function", "ns", {"bare": found["empty"]}),
        row("progress.unwatched", "`holdfast.progress(step=...)`, not watched", "ns", {"holdfast": found["unwatched"]}),
        row("progress.watched", "the same, with `--hang-timeout`", "ns", {"holdfast": found["watched"]}, Bound(5000)),
    ]
