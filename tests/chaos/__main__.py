"""python -m tests.chaos --seconds 900: campaigns on tcp and etcd, one after the other; prints what was survived."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.chaos.campaign import carry_out


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=900.0, help="of faults, for each backend (default: 900)")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="of the faults")
    parser.add_argument("--backend", choices=("tcp", "etcd"), action="append", help="default: both")
    chosen = parser.parse_args()
    os.environ["HOLDFAST_TEST_ALL"] = "1"
    for backend in chosen.backend or ("tcp", "etcd"):
        print(f"{backend}: seed {chosen.seed}, {chosen.seconds:g} s", flush=True)
        with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
            run = carry_out(Path(directory) / "run", backend, chosen.seed, chosen.seconds)
        kinds: dict[str, list[float]] = defaultdict(list)
        for what, gap_s in run.told:
            kinds[" ".join(word for word in what.split() if len(word) > 1)].append(gap_s)
        print(f"{backend}: survived {run.counted}")
        for kind, gaps in sorted(kinds.items(), key=lambda each: -max(each[1])):
            print(f"  {kind}: {len(gaps)} times, median {statistics.median(gaps):.1f} s, longest {max(gaps):.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
