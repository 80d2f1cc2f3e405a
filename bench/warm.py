"""Modules that stay in memory, and those that are learned: the second start, and the restart of a training."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial

from bench.restart import tell_again
from bench.results import Bound, of_each, row
from bench.sides import HOLDFAST, KEPT, NS_PER_S, PRELOAD, TORCHRUN, Side, finish, marks_of_workers, started
from bench.turns import Turns

NPROC = 4
# For trivial workers: a module that every interpreter has.
_TRIVIAL = Side(KEPT.name, (*HOLDFAST.command, "--preload", "marshal", "--preload-keep", "10m"))


def measure_kept(turns: Turns) -> None:
    with tempfile.TemporaryDirectory() as place:
        env = {"XDG_RUNTIME_DIR": place, "XDG_CACHE_HOME": place}
        _first_all_reduce_s(KEPT, env)
        sides = {side.name: partial(_first_all_reduce_s, side, env) for side in (KEPT, TORCHRUN)}
        apart = {"XDG_RUNTIME_DIR": f"{place}/none", "XDG_CACHE_HOME": f"{place}/none"}
        sides[PRELOAD.name] = partial(_first_all_reduce_s, PRELOAD, apart)
        what = f"start to the first all-reduce, {NPROC} workers"
        found = turns.compare(what, sides)
        turns.rows.append(row("kept", what, "s", found, Bound(0.08, "torchrun", side=KEPT.name)))
        _trivial_ms(_TRIVIAL, env)
        sides = {HOLDFAST.name: partial(_trivial_ms, HOLDFAST, env), KEPT.name: partial(_trivial_ms, _TRIVIAL, env)}
        what = f"{NPROC} trivial workers, start to end"
        found = turns.compare(what, sides)
        turns.rows.append(row("kept_trivial", what, "ms", found))


def _first_all_reduce_s(side: Side, env: Mapping[str, str]) -> float:
    with marks_of_workers() as marks, started(side.argv(NPROC, "job.py", (marks, "once")), env=env) as run:
        ready = marks.wait("ready", 0, NPROC, run)
        run.succeed()
        return (max(mark.at_ns for mark in ready) - run.began_ns) / NS_PER_S


def _trivial_ms(side: Side, env: Mapping[str, str]) -> float:
    return finish(side.argv(NPROC, "trivial.py"), **env).took_s * 1e3


def measure_ddp(turns: Turns) -> None:
    sides = (HOLDFAST, PRELOAD, TORCHRUN)
    found = turns.compare("ddp", {side.name: partial(tell_again, side, NPROC, "ddp") for side in sides})
    whole = {name: [story for story in stories if story.phases] for name, stories in found.items()}
    what = f"failure to the first step of the optimizer after it, {NPROC} workers"
    times = of_each(whole, lambda story: story.restart_ms / 1e3)
    turns.rows.append(row("restart_ddp", what, "s", times, Bound(0.1, "torchrun", side=PRELOAD.name)))
