"""holdfast and torchrun side by side on this machine.

    python bench/one_node.py                       everything, several minutes
    python bench/one_node.py --quick               everything with few repetitions, about a minute
    python bench/one_node.py --only tee            one case; may be given more than once

Prints the machine and a Markdown table with the median of every measure, its middle half in brackets, and the
bound it should keep. Run it with the Python of an environment that has both launchers, on a quiet machine.
A bound that is not met is shown and does not change the exit status.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from cases import CASES, Bench, Case
from launchers import BenchmarkError, Launcher, find_launchers, seconds_to_finish
from measure import Row, table


def main() -> int:
    args = _parse(sys.argv[1:])
    try:
        # Not every launcher clears away what it makes; all of it is made in here.
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as scratch:
            os.environ["TMPDIR"] = tempfile.tempdir = scratch
            return _run(args)
    except BenchmarkError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    ours, theirs = find_launchers()
    print(_machine(), flush=True)
    _warm_up(ours, theirs)
    rows = [row for name in args.only or CASES for row in _measure(name, args, ours, theirs)]
    print(f"- load average at the end: {_load()}\n\n{table(rows)}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure holdfast beside torchrun on this machine.")
    parser.add_argument("--quick", action="store_true", help="few repetitions: rough numbers in about a minute")
    parser.add_argument("--only", action="append", choices=tuple(CASES), help="measure this; may be given again")
    parser.add_argument("--repetitions", type=_positive, metavar="N", help="how often to repeat every measure")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _warm_up(*launchers: Launcher) -> None:
    """Once before anything counts: bytecode is written and files are in memory."""
    for launcher in launchers:
        _tell(f"warming up {launcher.name}")
        seconds_to_finish(launcher.argv((), "trivial.py"))


def _measure(name: str, args: argparse.Namespace, ours: Launcher, theirs: Launcher) -> list[Row]:
    case: Case = CASES[name]
    repetitions = args.repetitions or (case.quick_repetitions if args.quick else case.repetitions)
    size = case.quick_size if args.quick else case.size
    return case.measure(Bench(ours, theirs, repetitions, size, partial(_tell_turn, name)))


def _tell_turn(name: str, turn: int) -> None:
    _tell(f"{name}, turn {turn + 1}")


def _tell(text: str) -> None:
    """Progress, for somebody who watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _machine() -> str:
    facts = {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores for this process of {os.cpu_count()}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "holdfast": version("holdfast"),
        "torch": version("torch"),
        "load average at the start": _load(),
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _load() -> str:
    return " ".join(f"{load:.2f}" for load in os.getloadavg())


if __name__ == "__main__":
    sys.exit(main())
