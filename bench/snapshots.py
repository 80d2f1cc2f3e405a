"""State after a failure: how long until the next step is done, and what saving costs.

`workers/steps.py` fails once. The time is from the failure to the end of the step after the failed one, on the last
rank: the restart, what is read back, and the steps that are computed again.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from bench.results import Bound, of_each, row
from bench.sides import NS_PER_S, PRELOAD, TORCHRUN, Side, environment, marks_of_workers, started
from bench.turns import Turns
from tests.support import free_port

NPROC = 4
RESTART_LIMIT_S = 100.0
_SHM = "/dev/shm"

# In a worker of holdfast's, with the size in MiB: the time of a save over that of a plain copy of the same bytes. The
# first saves allocate memory.
_SAVE = """
import sys, time
import torch
import holdfast

torch.set_num_threads(1)
state = {str(each): torch.rand((int(sys.argv[1]) << 20) // 64) for each in range(16)}
other = {name: tensor.clone() for name, tensor in state.items()}
snapshots = holdfast.snapshots.open()

def took(what):
    began = time.perf_counter()
    what()
    return time.perf_counter() - began

def copy():
    for name, tensor in state.items():
        other[name].copy_(tensor)

def save(step):
    with snapshots.save(step) as out:
        out["state"] = state

save(0), save(1)
pairs = [(took(lambda: save(step)), took(copy)) for step in range(2, 12)]
print(sorted(saved / copied for saved, copied in pairs)[len(pairs) // 2])
"""


# In one worker of each of two nodes, with the size in MiB and the number of steps: the median time of a step that
# computes, adds up over both and saves.
_STEPS = """
import sys, time
import torch
import torch.distributed as dist
import holdfast

torch.set_num_threads(1)
dist.init_process_group("gloo")
state = {str(each): torch.rand((int(sys.argv[1]) << 20) // 64) for each in range(16)}
matrix = torch.rand(1024, 1024)
snapshots = holdfast.snapshots.open()
times = []
for step in range(int(sys.argv[2])):
    began = time.perf_counter()
    for _ in range(2):
        matrix = torch.tanh(matrix @ matrix)
    dist.all_reduce(matrix[0])
    with snapshots.save(step) as out:
        out["state"] = state
    times.append(time.perf_counter() - began)
if dist.get_rank() == 0:
    print(1000 * sorted(times)[len(times) // 2])
"""


def next_step(side: Side, mib: int, place: str) -> tuple[float, float, float, float]:
    """Seconds until the step is done, the steps that were computed again, and seconds until the last worker has
    imported torch, and has its state. `place` is where checkpoints go; without one: snapshots. A restart of torchrun
    that fails is tried again with the setting that spares it the usual cause."""
    with tempfile.TemporaryDirectory(dir=place or None) as checkpoints, marks_of_workers() as marks:
        args = (marks, checkpoints if place else "snapshots", mib)
        argv = side.argv(NPROC, "steps.py", args, ("--max-restarts", "1"))
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if side is TORCHRUN else {}
        with started(argv, env=env) as run:
            done = marks.wait("done", 1, NPROC, run, RESTART_LIMIT_S)
            begun, loaded = (marks.wait(name, 1, NPROC, run, RESTART_LIMIT_S) for name in ("begun", "loaded"))
            failed_ns = next(iter(marks.found("failed").values())).at_ns
            last = [(max(mark.at_ns for mark in each) - failed_ns) / NS_PER_S for each in (done, begun, loaded)]
            return last[0], max(mark.value for mark in done), last[1], last[2]


def save_ratio(mib: int) -> float:
    with _program(_SAVE) as program:
        told = subprocess.run(
            [*PRELOAD.command, program, str(mib)], env=environment(), capture_output=True, text=True, check=False
        )
    assert told.returncode == 0, told.stderr[-2000:]
    return float(told.stdout)


@contextmanager
def _program(text: str) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(text)
        program.flush()
        yield program.name


def step_ms(mib: int, steps: int, *options: str) -> float:
    """Of two nodes on this host, with one worker each."""
    place = ["--nnodes", "2", "--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    with tempfile.TemporaryDirectory() as directory, _program(_STEPS) as program, ExitStack() as stack:
        env = {"HOLDFAST_TOKEN": os.urandom(16).hex(), "XDG_RUNTIME_DIR": directory}
        own = [f"{option}={directory}" if option == "--snapshot-dir" else option for option in options]
        argv = [*PRELOAD.command, *place, "--rdzv-id", "bench", *own, program, str(mib), str(steps)]
        with open(f"{directory}/out", "w+b") as out:
            nodes = [stack.enter_context(started(argv, stdout=out, env=env)) for _ in range(2)]
            for node in nodes:
                node.succeed()
            out.seek(0)
            return float(out.read().split()[-1])


def measure_snapshots(turns: Turns) -> None:
    for mib in turns.size((64, 512), (8,)):
        what = f"failure to the end of the next step, {NPROC} workers with {mib} MiB of state each"
        disk = tempfile.gettempdir()
        sides = {
            PRELOAD.name: partial(next_step, PRELOAD, mib, ""),
            TORCHRUN.name: partial(next_step, TORCHRUN, mib, disk),
        }
        found = turns.compare(f"snapshots, {mib} MiB", sides, warm_up=False)
        in_files = {side.name: partial(next_step, side, mib, disk) for side in (PRELOAD,)}
        shm = {side.name: partial(next_step, side, mib, _SHM) for side in (PRELOAD, TORCHRUN)}
        found_disk = turns.compare(f"checkpoints on disk, {mib} MiB", in_files, warm_up=False)
        found_shm = turns.compare(f"checkpoints in {_SHM}, {mib} MiB", shm, warm_up=False)
        ratios = turns.compare(f"save, {mib} MiB", {PRELOAD.name: partial(save_ratio, mib)}, warm_up=False)
        reason = (
            "With 64 MiB almost half is the restart: four processes with torch end, and a process with torch is forked "
            "five times, for about 5 ms each. The rest, and most with 512 MiB, is memory that two cores handle page by "
            "page: the kernel takes back that of the old workers, the program allocates its state anew (20 ms for 64 "
            "MiB), copies the snapshot back and makes two steps, with a save after each."
        )
        bound = Bound(0.1, TORCHRUN.name, side=PRELOAD.name, reason=reason)
        turns.rows += [
            row(f"next_step.{mib}", f"{what}: snapshots; torchrun: a checkpoint on disk every tenth step", "s",
                of_each(found, lambda each: each[0]), bound),
            row(f"begun.{mib}", "of which: until the last worker has imported torch", "s",
                of_each(found, lambda each: each[2])),
            row(f"loaded.{mib}", "of which: from there until the last worker has its state", "s",
                of_each(found, lambda each: each[3] - each[2])),
            row(f"steps_again.{mib}", "steps computed again", "", of_each(found, lambda each: each[1])),
            row(f"next_step_disk.{mib}", "the same with checkpoints on disk", "s",
                of_each(found_disk, lambda each: each[0])),
            row(f"next_step_shm.{mib}", f"the same with checkpoints in {_SHM}", "s",
                of_each(found_shm, lambda each: each[0])),
            row(f"save.{mib}", f"save of {mib} MiB over a plain copy", "x", ratios, Bound(1.3, side=PRELOAD.name)),
        ]  # fmt: skip
    _measure_background(turns)


def _measure_background(turns: Turns) -> None:
    """What copies to another node and files cost the training that goes on meanwhile. The sides take turns."""
    mib, steps = turns.size((64, 100), (8, 30))
    sides = {
        "that save": partial(step_ms, mib, steps),
        "that save and copy to each other": partial(step_ms, mib, steps, "--snapshot-copies", "1"),
        "that save and write files every second": partial(
            step_ms, mib, steps, "--snapshot-dir", "--snapshot-every", "1s"
        ),
    }
    found = turns.compare(f"step time, {mib} MiB", sides, warm_up=False)
    for number, (name, values) in enumerate(found.items()):
        what = f"a step of two nodes {name}, {mib} MiB each"
        turns.rows.append(row(f"step_time.{number}", what, "ms", {PRELOAD.name: values}))
