"""Runs tests while random processes of theirs stand still for random short times.

A test, or what it tests, may count on an order of events between processes that the kernel does not promise. On most
machines the order is nearly always the same, and the fault shows in one run of a thousand. Here it shows soon: every
process that the tests start, and those that run the tests, is in one of a few control groups, and one group at a time
is frozen. The frozen do not notice; from outside they look as if they were in uninterruptible sleep, and tests of what
is said about a hung worker take it amiss if that lasts for half a second.

    python -m tests.frost tests/e2e/test_cli.py                   all options but this one are pytest's
    python -m tests.frost --most-ms 400 -n 3 tests/integration

It needs the freezer of version 1 of the control groups, and the right to make groups.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

FREEZER = Path("/sys/fs/cgroup/freezer")
GROUPS = 8
MOVED_SHARE = 0.3
LONGEST_PAUSE_S = 0.03


@contextlib.contextmanager
def groups() -> Iterator[list[Path]]:
    made = [FREEZER / f"holdfast-frost-{os.getpid()}-{number}" for number in range(GROUPS)]
    try:
        for group in made:
            group.mkdir()
        yield made
    finally:
        for group in made:
            with contextlib.suppress(FileNotFoundError):
                disband(group)


def disband(group: Path) -> None:
    (group / "freezer.state").write_text("THAWED")
    while pids := (group / "cgroup.procs").read_text().split():
        for pid in pids:
            move(int(pid), FREEZER)
    group.rmdir()


def move(pid: int, group: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(pid))


def group_of(pid: int) -> str:
    """The name of its group; empty if it is in none, or gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            if ":freezer:" in line:
                return line.rpartition("/")[2]
    return ""


def spread(root: psutil.Process, among: list[Path]) -> None:
    """Those that a test has put into a group of its own stay there."""
    ours = {group.name for group in among}
    for process in root.children(recursive=True):
        name = group_of(process.pid)
        if not name or (name in ours and random.random() < MOVED_SHARE):
            move(process.pid, random.choice(among))


def strike(group: Path, most_s: float) -> None:
    """Short times more often than long ones."""
    state = group / "freezer.state"
    state.write_text("FROZEN")
    time.sleep(random.random() ** 2 * most_s)  # How long they stand still.
    state.write_text("THAWED")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frost", description="Run pytest under frost.")
    parser.add_argument("--most-ms", type=float, default=150, help="for how long processes stand still at most")
    args, rest = parser.parse_known_args()
    with groups() as made, subprocess.Popen([sys.executable, "-m", "pytest", *rest]) as tests:
        while tests.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                spread(psutil.Process(tests.pid), made)
            strike(random.choice(made), args.most_ms / 1000)
            time.sleep(random.random() * LONGEST_PAUSE_S)  # Between two strikes all of them run.
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
