"""The same faults, one at a time, for holdfast and for torchrun: which each survives, and how long the job stops.

After each fault the job has a minute and a half to run on all hosts again. torchrun's store is on a host of its own, as
holdfast's coordinator is, and its nodes are lost after as many seconds of silence.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from tests.chaos.campaign import campaign
from tests.chaos.sides import TORCHRUN, Side

FAULTS = ("kill_worker", "end_agent", "kill_agent", "freeze_agent", "cut", "kill_coordinator", "late")


def compare(seed: int, times: int) -> None:
    for fault in FAULTS:
        for side in (Side("tcp"), TORCHRUN):
            with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
                print(f"{fault}: {side}: {_tried(Path(directory) / 'run', side, fault, seed, times)}", flush=True)


def _tried(home: Path, side: Side, fault: str, seed: int, times: int) -> str:
    gaps: list[float] = []
    problem = ""
    try:
        with campaign(home, side, seed) as run:
            run.start()
            for _ in range(0 if fault == "late" else times):
                gaps.append(run.suffer(getattr(run, fault)))
            run.finish(is_one_late=fault == "late")
            run.check()
    except AssertionError as error:
        first = error.__context__ if isinstance(error.__context__, AssertionError) else error
        problem = f"; not survived: {str(first).splitlines()[0][:300]}"
    stood = f", stood still for {statistics.median(gaps):.1f} s, at most {max(gaps):.1f} s" if gaps else ""
    return f"{len(gaps)} times{stood}{problem}"
