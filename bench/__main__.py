"""The command line of the suite.

    python -m bench                             everything, in about 20 minutes; writes results and docs/benchmarks.md
    python -m bench --only launch               one measure, printed; may be given more than once
    python -m bench --only launch --quick       the same once, with small sizes
    python -m bench --page bench/results/X.json the page, its plots and the lines in README from a results file

A measure that fails is reported with its reason and does not end the run.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from bench import agent, nodes, rendezvous, restart, snapshots, start, store, warm
from bench import page as pages
from bench.results import Results, Section
from bench.sides import end_descendants, environment, own_all_processes
from bench.turns import Turns

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    title: str
    run: Callable[[Turns], None]
    repeats: int
    how: str


MEASURES = (
    Measure(
        "launch", "Launch", start.measure_launch, 5,
        "The time from the start of the command to its end, for workers that do nothing. What holdfast takes over the "
        "bare limit is one more Python, whose start and imports the stages of a launch show, and for each worker a "
        "fork in the spawner, which sets its signals, its descriptors and what ends it with the agent.",
    ),
    Measure(
        "torch", "First all-reduce and restart with torch", restart.measure_torch, 3,
        "Workers import torch, initialise gloo and all-reduce one number. Then the last rank fails, the launcher "
        "restarts all, and they do the same again. `--preload torch` is an option of holdfast with which workers are "
        "forked from a process that has imported torch. Phases of the restart: *detect* is failure to SIGTERM at the "
        "last peer, *stop* until the last worker is gone, *rendezvous* until the last new process exists, *start* "
        "until the first line of its script, *import* until torch is imported, *initialise* until the all-reduce is "
        "done. The plot shows the run with the median time. Memory is PSS, after the first all-reduce.",
    ),
    Measure(
        "snapshots", "State after a failure", snapshots.measure_snapshots, 3,
        "Workers with torch and a state of their own, an all-reduce in each step. One is killed, and the time ends "
        "when the step after the failed one is done on all ranks. holdfast has `--preload torch`, and its workers save "
        "a snapshot after each step. torchrun's write a checkpoint after every tenth step with `torch.save`, without "
        "flushing it to the disk, and read it from the page cache. The time of a save is the median of ten, after the "
        "two that allocate memory, over a copy of the same tensors to memory that is there. The time of a step that "
        "saves is the median of all steps of a run of two nodes with one worker each, all on this machine.",
    ),
    Measure(
        "kept", "The second start", warm.measure_kept, 5,
        "The same workers, which import torch, initialise gloo, all-reduce one number and end. With `--preload-keep "
        "10m` an earlier run has left the process from which they are forked. A launch of trivial workers gains little "
        "and has no bound: most of it is the agent's own start, which takes the same CPU time with it and "
        "without; what is saved is the start of the workers.",
    ),
    Measure(
        "ddp", "Restart of a training", warm.measure_ddp, 3,
        "A DDP script on gloo with model, optimizer and DataLoader. The last rank fails after the first step of the "
        "optimizer; the time until the slowest rank of the next attempt has made its first step. With `--preload "
        "torch`, the failure comes when holdfast says that it has preloaded what the workers import.",
    ),
    Measure(
        "restart", "Restart of a trivial script", restart.measure_restart, 5,
        "One of four workers fails once all run; the time until the last worker of the second attempt is at its first "
        "line. Phases as above.",
    ),
    Measure(
        "many_restarts", "Many restarts in a row", restart.measure_many_restarts, 1,
        "One worker that fails at once in each attempt. What the agent's process holds at the end, over what it held "
        "after five restarts.",
    ),
    Measure(
        "import", "Import", start.measure_import, 5,
        "`import holdfast` beside `import torch.distributed.run`, each over `python -c pass` in the same turn.",
    ),
    Measure(
        "worker_cpu", "A worker's start", start.measure_worker_cpu, 5,
        "CPU time of a worker's process up to the first line of its script; the median of four workers.",
    ),
    Measure(
        "rest", "Memory, idle CPU and stopping", agent.measure_rest, 5,
        "Four workers that wait, with default options. Memory from `/proc/PID/smaps_rollup`, CPU time from the "
        "scheduler's statistics over two seconds, then SIGTERM to the launcher.",
    ),
    Measure(
        "tee", "Tee", agent.measure_tee, 5,
        "Workers write lines as fast as they can with `--tee 3`, to log files and to the console, which is a file. The "
        "time ends with the last write to the console; only lines that arrived whole count.",
    ),
    Measure(
        "timers", "Timers", agent.measure_timers, 5,
        "A worker arms a file timer (`TORCHELASTIC_ENABLE_FILE_TIMER=1`) and overruns it, with default options. "
        "holdfast writes the stacks of the worker to the log before it kills it; torchrun does not.",
    ),
    Measure(
        "progress", "Progress calls", start.measure_progress, 5,
        "The cost of a call of `holdfast.progress`, from a loop of a million calls.",
    ),
    Measure(
        "rendezvous", "Rendezvous, like with like", rendezvous.measure_rendezvous, 5,
        "One real handler in each process, holdfast's tcp and torch's c10d, on one host. The library is imported and "
        "the server is up before the clock starts; it stops when the last node knows its rank.",
    ),
    Measure(
        "crowd", "Rendezvous of light clients", rendezvous.measure_crowd, 5,
        "For sizes that one host cannot hold otherwise: clients in one process that speak the real protocol with one "
        "real coordinator process, with a heartbeat every 10 s. The clients use more CPU time than the coordinator, so "
        "times by the clock are upper limits. There is no such client for c10d.",
    ),
    Measure(
        "adoption", "Adoption after a restart of the coordinator", rendezvous.measure_adoption, 3,
        "Light clients have formed a round; the coordinator is killed and started again, and all come back with their "
        "places, until a heartbeat of each one was answered.",
    ),
    Measure(
        "store", "torch's store", store.measure_store, 3,
        "The store at which torch's ranks meet: holdfast's server, in pure Python, beside the one of torchrun (libuv), "
        "with the same client on plain sockets. The time of a barrier includes what the one client process needs to "
        "send and to read.",
    ),
    Measure(
        "idle_coordinator", "A coordinator at rest", rendezvous.measure_idle_coordinator, 3,
        "Light clients that send a heartbeat each second.",
    ),
    Measure(
        "push", "Failure of a worker on another node", nodes.measure_push, 5,
        "Two real agents with one worker each, holdfast's on tcp and torchrun's on c10d, with default options.",
    ),
    Measure(
        "lost_nodes", "Lost nodes", nodes.measure_lost_nodes, 5,
        "Three real agents with default options, one worker each, `--nnodes 1:3`; until the workers of the other two "
        "run in the next round. The bounds allow 0.05 s for the start of a worker. The etcd is one server, which "
        "does not flush its data to the disk.",
    ),
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    if args.page:
        write_page(Results.from_json(args.page.read_bytes()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    own_all_processes()
    for name in os.environ.keys() - environment().keys():
        del os.environ[name]
    chosen = [measure for measure in MEASURES if not args.only or measure.name in args.only]
    is_whole = not (args.only or args.quick)
    # Not every launcher clears away what it makes; all of it is made in here.
    scratch = tempfile.mkdtemp(prefix="holdfast-bench-")
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    try:
        results = run_suite(chosen, args.quick)
    finally:
        end_descendants()
        shutil.rmtree(scratch, ignore_errors=True)
    path = args.json or (RESULTS / f"{results.date[:10]}.json" if is_whole else None)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(results.to_json())
    if is_whole:
        write_page(results)
        print(f"{path}, {PAGE.relative_to(ROOT)}, plots and README are written", file=sys.stderr)
    else:
        print("\n".join(pages.section_text(section, {}) for section in results.sections))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench", description="holdfast beside torchrun and the bare limit.")
    names = [measure.name for measure in MEASURES]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="one repeat, small sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="only make the page, from this results file")
    return parser.parse_args(argv)


def write_page(results: Results) -> None:
    drawn = pages.plots_of(results)
    folder = ROOT / pages.PLOTS
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.svg"):
        if path.stem not in drawn:
            path.unlink()
    for name, svg in drawn.items():
        (folder / f"{name}.svg").write_text(svg)
    PAGE.write_text(pages.page(results))
    readme = ROOT / "README.md"
    readme.write_text(pages.with_figures(readme.read_text(), results))


def run_suite(measures: Sequence[Measure], is_quick: bool) -> Results:
    began, machine, sections = time.monotonic(), _machine(), []
    for index, measure in enumerate(measures, 1):

        def tell(text: str, count: str = f"{index}/{len(measures)}") -> None:
            print(f"bench {count} after {time.monotonic() - began:4.0f} s: {text}", file=sys.stderr, flush=True)

        sections.append(run_measure(measure, Turns(measure.repeats, is_quick, tell)))
    machine["load"] += f" at the start, {_load()} at the end"
    took_s = round(time.monotonic() - began, 1)
    return Results(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", machine, took_s, sections)


def run_measure(measure: Measure, turns: Turns) -> Section:
    """Whatever happens in it becomes part of the section, and nothing that it started is left."""
    began, load, failure = time.monotonic(), os.getloadavg()[0], ""
    try:
        measure.run(turns)
    except Exception as error:
        failure = str(error) if isinstance(error, AssertionError) else traceback.format_exc(limit=-3)
        turns.tell(f"{measure.name} failed: {failure}")
    finally:
        end_descendants()
    took_s = round(time.monotonic() - began, 1)
    notes = [_without_paths(note) for note in turns.notes]
    about = (measure.name, measure.title, measure.how, took_s, round(load, 2), _without_paths(failure))
    return Section(*about, notes, turns.rows, turns.breakdowns)


def _without_paths(text: str) -> str:
    """Where this tree and the scratch directory are is of no interest to readers."""
    return text.replace(f"{ROOT}/", "").replace(f"{tempfile.gettempdir()}/", "")


def _machine() -> dict[str, str]:
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.0f} GB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "holdfast": f"{version('holdfast')}, commit {_commit()}",
        "torch": version("torch"),
        "load": _load(),
    }


def _commit() -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or "unknown"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _load() -> str:
    return f"{os.getloadavg()[0]:.2f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
