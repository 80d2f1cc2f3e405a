"""Live through seeds: `python -m tests.sim 17 --verbose` for one, `python -m tests.sim --seeds 10000` for many."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, islice

from tests.sim.engine import Violation
from tests.sim.etcd_world import make_world, simulate
from tests.sim.world import FakeWorld

_CHUNK = 50
_SHOWN = 60


def failure_of(seed: int) -> str:
    """What went wrong with a seed, with the last of its story and how to see it again; empty if nothing did."""
    try:
        simulate(seed)
    except Violation as violation:
        world: FakeWorld = violation.world  # type: ignore[attr-defined]  # `simulate` has put it there
        story = world.engine.transcript.text(last=_SHOWN)
        return f"seed {seed}\n{story}\n{violation}\nreplay: python -m tests.sim {seed} --verbose"
    return ""


def _failures_among(seeds: range) -> list[str]:
    gc.set_threshold(200_000)  # What a world leaves behind is collected between worlds, mostly.
    return [failure for seed in seeds if (failure := failure_of(seed))]


def show(world: FakeWorld, *, verbose: bool, with_routine: bool) -> int:
    verdict = "nothing went wrong"
    try:
        world.run()
    except Violation as violation:
        verdict = str(violation)
    text = world.engine.transcript.text(last=None if verbose else _SHOWN, with_routine=with_routine)
    print(f"{world.profile}\n{text}\n{verdict}")
    return int(verdict != "nothing went wrong")


def search(first: int, count: int, jobs: int, most: int) -> int:
    """Look for seeds that fail, and tell each as it is found, up to so many."""
    began = time.monotonic()
    chunks = [range(at, min(at + _CHUNK, first + count)) for at in range(first, first + count, _CHUNK)]
    failed = 0
    with ProcessPoolExecutor(jobs) as pool:
        for failure in islice(chain.from_iterable(pool.map(_failures_among, chunks)), most):
            failed += 1
            print(failure, end="\n\n", flush=True)
        pool.shutdown(cancel_futures=True)
    print(f"{count} seeds from {first}: {failed or 'none'} failed, {time.monotonic() - began:.0f} s")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="live through this one and tell its story")
    parser.add_argument("--verbose", action="store_true", help="the whole story, not its end")
    parser.add_argument("--heartbeats", action="store_true", help="with the lines of routine")
    parser.add_argument("--seeds", type=int, default=300, help="how many")
    parser.add_argument("--first", type=int, default=0, help="from which on")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--most", type=int, default=3, help="stop after this many failures")
    options = parser.parse_args()
    if options.seed is not None:
        return show(make_world(options.seed), verbose=options.verbose, with_routine=options.heartbeats)
    return search(options.first, options.seeds, options.jobs, options.most)


if __name__ == "__main__":
    sys.exit(main())
