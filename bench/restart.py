"""A job that fails and is restarted: how long each phase takes, with torch and without, and what many restarts leave.

One run of workers/job.py gives everything: the time to the first all-reduce, the memory while it runs, and the phases
from the failure to the first all-reduce after it:

    detect        failure to SIGTERM at the last peer
    stop          to the end of the last worker
    rendezvous    to the creation of the last new process: whatever the launcher does in between
    start         to the first line of its script
    import        to the end of `import torch`
    initialise    to the end of the first all-reduce

Each ends with the last worker, so the phases add up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path

from bench.results import Bound, of_each, row
from bench.sides import (
    BARE,
    HOLDFAST,
    NS_PER_MS,
    PRELOAD,
    TORCHRUN,
    Marks,
    Run,
    Side,
    gone_ns,
    helpers_of,
    marks_of_workers,
    memory_mb,
    started,
)
from bench.turns import Turns
from tests.support import wait_until

SETTLING_S = 0.3
LEARNED = "preloaded what the workers import"  # holdfast's line.
RESTART_LIMIT_S = 20.0  # A restart that takes longer counts as failed; each worker adds to it.
WORKER_LIMIT_S = 5.0
_START = "Most of it is the last phase: Python starts four times on two cores, for torchrun as well."


@dataclass(slots=True)
class Story:
    """One run. Times are in milliseconds; `phases` is empty if there was no restart."""

    first_ms: float
    workers_mb: float
    launcher_mb: float
    phases: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def restart_ms(self) -> float:
        return sum(self.phases.values())


def tell_story(side: Side, nproc: int, kind: str, **env: str) -> Story:
    with (
        marks_of_workers() as marks,
        started(side.argv(nproc, "job.py", (marks, kind), ("--max-restarts", "1")), env=env) as run,
    ):
        workers = marks.wait("ready", 0, nproc, run)
        pids = [mark.pid for mark in workers]
        if kind == "ddp" and side is PRELOAD:
            wait_until(lambda: LEARNED in run.last_words(), "the modules that the workers import are learned", 60)
        time.sleep(SETTLING_S)
        story = Story(
            (max(mark.at_ns for mark in workers) - run.began_ns) / NS_PER_MS,
            memory_mb(pids),
            memory_mb([run.pid, *helpers_of(run, workers)]),
        )
        if side is not BARE:
            _restart(story, run, marks, nproc, pids)
        return story


def tell_again(side: Side, nproc: int, kind: str) -> Story:
    """If the restart failed, the story of another run, with the setting that spares torchrun the usual cause: its
    workers meet at a store that still has the addresses of the attempt before. So the failure is counted, and there is
    a time."""
    story = tell_story(side, nproc, kind)
    if not story.failure:
        return story
    return replace(tell_story(side, nproc, kind, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"), failure=story.failure)


def _restart(story: Story, run: Run, marks: Marks, nproc: int, pids: Sequence[int]) -> None:
    """A restart that fails is part of the story, not an error."""
    Path(marks.directory, "go").touch()
    try:
        limit_s = RESTART_LIMIT_S + WORKER_LIMIT_S * nproc
        gone = gone_ns(pids, limit_s)
        marks.wait("ready", 1, nproc, run, limit_s)
    except AssertionError as error:
        story.failure = _cause(run.last_words(100_000)) if run.has_ended() else str(error)
        return
    failed_ns = next(iter(marks.found("failed").values())).at_ns
    began = marks.of_all("began", 1, nproc)
    ends_ns = {
        "detect": marks.last_ns("stopped", 0, nproc - 1),
        "stop": max(gone.values()),
        "rendezvous": max(mark.value for mark in began),
        "start": max(mark.at_ns for mark in began),
    }
    if imported := marks.found("imported", 1):
        ends_ns |= {
            "import": max(mark.at_ns for mark in imported.values()),
            "initialise": marks.last_ns("ready", 1, nproc),
        }
    story.phases = _phases(failed_ns, ends_ns)


def _cause(text: str) -> str:
    """The last line that names an error and says something of it."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    found = next((line for line in lines if "Error: " in line and not line.endswith(":")), "no error message was found")
    return found[:300]


def _phases(began_ns: int, ends_ns: dict[str, int]) -> dict[str, float]:
    """How long each took in milliseconds. One that ended before the phase before it took nothing."""
    phases, last_ns = {}, began_ns
    for name, end_ns in ends_ns.items():
        phases[name] = max(0, end_ns - last_ns) / NS_PER_MS
        last_ns = max(last_ns, end_ns)
    return phases


def _breakdown(stories: Sequence[Story]) -> dict[str, float]:
    """The phases of the run whose restart took the median time, so that they add up to it."""
    ordered = sorted((story for story in stories if story.phases), key=lambda story: story.restart_ms)
    return {name: round(ms, 3) for name, ms in ordered[(len(ordered) - 1) // 2].phases.items()} if ordered else {}


def _add_failed(turns: Turns, key: str, what: str, found: dict[str, list[Story]]) -> None:
    """Failed restarts are counted apart."""
    shares = {}
    for name, stories in found.items():
        failures = [story.failure for story in stories if story.failure]
        shares[name] = [100 * len(failures) / max(len(stories), 1)] if name != "bare" else []
        if failures:
            count = f"{len(failures)} of {len(stories)} restarts failed"
            again = "the time is that of another run, with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`"
            turns.notes.append(f"{name}, {what}: {count}, the last one with `{failures[-1]}`; {again}.")
    turns.rows.append(row(key, f"restarts that failed, {what}", "%", shares))


# --- with torch -----------------------------------------------------------------------------------------------------


def _restarts(found: dict[str, list[Story]], figure: Callable[[Story], float]) -> dict[str, list[float]]:
    """Of the restarts that there were."""
    whole = {name: [story for story in stories if story.phases] for name, stories in found.items() if name != "bare"}
    return of_each(whole, figure)


def measure_torch(turns: Turns) -> None:
    sizes = turns.size((2, 4, 8), (2,))
    for size in sizes:
        # The first size is the warm-up of the others.
        sides = (HOLDFAST, PRELOAD, TORCHRUN, BARE)
        tellers = {side.name: partial(tell_again, side, size, "torch") for side in sides}
        found = turns.compare(f"torch, {size} workers", tellers, warm_up=size == 2)
        first = of_each(found, lambda story: story.first_ms / 1e3)
        again = _restarts(found, lambda story: story.restart_ms / 1e3)
        bounds = [Bound(0.05, "torchrun", side=PRELOAD.name)] if size == 4 else []
        what = f"failure to the first all-reduce after it, {size} workers"
        turns.rows += [
            row(f"first_all_reduce.{size}", f"start to the first all-reduce, {size} workers", "s", first),
            row(f"restart_torch.{size}", what, "s", again, *bounds),
        ]
        _add_failed(turns, f"failed_restarts.{size}", f"{size} workers", found)
        turns.breakdowns[f"torch.{size}"] = {name: _breakdown(found[name]) for name in again if again[name]}
    _add_memory(turns, sizes[-1], found)


def _add_memory(turns: Turns, size: int, found: dict[str, list[Story]]) -> None:
    workers = of_each(found, lambda story: story.workers_mb)
    launcher = of_each(found, lambda story: story.launcher_mb)
    both = of_each(found, lambda story: story.workers_mb + story.launcher_mb)
    of_launchers = {name: values for name, values in launcher.items() if name != "bare"}
    turns.rows += [
        row("memory_torch.workers", f"memory of {size} workers with torch (PSS)", "MB", workers),
        row("memory_torch.launcher", "memory of the launcher meanwhile, spawner included (PSS)", "MB", of_launchers),
        row("memory_torch.all", "both together", "MB", both),
    ]
    turns.breakdowns["memory"] = {
        name: {"workers": _median(workers[name]), "launcher": _median(of_launchers.get(name, [0.0]))}
        for name in workers
        if workers[name]
    }


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


# --- without ----------------------------------------------------------------------------------------------------------


def measure_restart(turns: Turns) -> None:
    nproc = 4
    found = turns.compare(
        "restart", {side.name: partial(tell_again, side, nproc, "plain") for side in (HOLDFAST, TORCHRUN)}
    )
    totals = _restarts(found, lambda story: story.restart_ms)
    detected = _restarts(found, lambda story: story.phases["detect"])
    what = f"failure to the last of {nproc} restarted workers, trivial script"
    turns.rows += [
        row("restart", what, "ms", totals, Bound(0.20, "torchrun", reason=_START)),
        row("detect", "of which: failure to SIGTERM at the last peer", "ms", detected),
    ]
    _add_failed(turns, "restart_failed", "trivial script", found)
    turns.breakdowns["restart"] = {name: _breakdown(stories) for name, stories in found.items()}


# --- many restarts --------------------------------------------------------------------------------------------------


def measure_many_restarts(turns: Turns) -> None:
    """One run of each side: the agent after 5 restarts, and after the last one."""
    counts = {HOLDFAST: turns.size(200, 12), TORCHRUN: turns.size(100, 7)}
    sides = {side.name: partial(_many, side, count) for side, count in counts.items()}
    found = turns.compare("many restarts", sides, warm_up=False)
    words = " and ".join(f"{count} ({side.name})" for side, count in counts.items())
    more = f"more after {words} restarts than after 5"
    for key, what, unit, bounds in (
        ("descriptors", f"descriptors of the agent: {more}", "", [Bound(0)]),
        ("threads", f"threads of the agent: {more}", "", [Bound(0)]),
        ("pss_mb", f"memory of the agent (PSS): {more}", "MB", []),
        ("ms", "time of each restart among these, one worker that fails at once", "ms", []),
    ):
        turns.rows.append(row(f"many_restarts.{key}", what, unit, of_each(found, itemgetter(key)), *bounds))


def _many(side: Side, count: int) -> dict[str, float]:
    """What the agent has more of after so many restarts than after 5, and the time of each."""
    argv = partial(side.argv, 1, "fail.py", options=("--max-restarts", str(count)))
    with marks_of_workers() as marks, started(argv(args=(marks, count))) as run:
        marks.wait("ready", 5, 1, run)
        time.sleep(SETTLING_S)
        before, began = _agent(run.pid), time.monotonic()
        Path(marks.directory, "go").touch()
        marks.wait("ready", count, 1, run, limit_s=100)
        took_s = time.monotonic() - began
        time.sleep(SETTLING_S)
        after = _agent(run.pid)
        return {**{key: after[key] - before[key] for key in after}, "ms": took_s * 1e3 / (count - 5)}


def _agent(pid: int) -> dict[str, float]:
    descriptors = float(len(list(Path(f"/proc/{pid}/fd").iterdir())))
    threads = float(len(list(Path(f"/proc/{pid}/task").iterdir())))
    return {"descriptors": descriptors, "threads": threads, "pss_mb": memory_mb([pid])}
