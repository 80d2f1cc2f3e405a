"""python -m tests.chaos --seconds 450: campaigns on tcp and etcd, without snapshots and with, one after the other."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.chaos import beside
from tests.chaos.campaign import carry_out
from tests.chaos.sides import SIDES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=450.0, help="of faults, for each side (default: 450)")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="of the faults")
    parser.add_argument("--side", choices=[*map(str, SIDES)], action="append", help="default: all")
    parser.add_argument("--beside", type=int, metavar="TIMES", help="each fault so often, for holdfast and torchrun")
    chosen = parser.parse_args()
    os.environ["HOLDFAST_TEST_ALL"] = "1"
    if chosen.beside:
        beside.compare(chosen.seed, chosen.beside)
        return 0
    for side in SIDES:
        if str(side) not in (chosen.side or map(str, SIDES)):
            continue
        print(f"{side}: seed {chosen.seed}, {chosen.seconds:g} s", flush=True)
        with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
            run = carry_out(Path(directory) / "run", side, chosen.seed, chosen.seconds)
        kinds: dict[str, list[float]] = defaultdict(list)
        for what, gap_s in run.told:
            kinds[" ".join(word for word in what.split() if len(word) > 1)].append(gap_s)
        print(f"{side}: survived {run.counted}")
        for kind, gaps in sorted(kinds.items(), key=lambda each: -max(each[1])):
            print(f"  {kind}: {len(gaps)} times, median {statistics.median(gaps):.1f} s, longest {max(gaps):.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
