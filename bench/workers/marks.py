"""Marks: small files by which a worker says when something happened, by the clock that all processes of a host share.

A mark is named after the event, the attempt and the rank, and holds the pid, the time of CLOCK_MONOTONIC in
nanoseconds, and one more number. It appears whole: it is written under another name first. The workers of one run share
one directory, their first argument.
"""

from __future__ import annotations

import os
import sys
import time

DIRECTORY = sys.argv[1]
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
# A round begins with each new world of holdfast, so it tells attempts apart that were not charged, too.
ATTEMPT = int(os.environ.get("HOLDFAST_ROUND", 0)) - 1
if ATTEMPT < 0:
    ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
WAIT_LIMIT_S = 100.0


def leave(name: str, at_ns: int | None = None, value: int = 0) -> None:
    at_ns = time.monotonic_ns() if at_ns is None else at_ns
    unfinished = f"{DIRECTORY}/.{name}.{ATTEMPT}.{RANK}"
    with open(unfinished, "w") as file:
        file.write(f"{os.getpid()} {at_ns} {value}")
    os.rename(unfinished, f"{DIRECTORY}/{name}.{ATTEMPT}.{RANK}")


def await_file(name: str) -> None:
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not os.path.exists(f"{DIRECTORY}/{name}"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"there was no file {name!r} within {WAIT_LIMIT_S:g} s")
        time.sleep(0.005)


def await_all(name: str) -> None:
    """Wait until every worker of this attempt has left the mark."""
    for rank in range(WORLD_SIZE):
        await_file(f"{name}.{ATTEMPT}.{rank}")


def created_ns(began_ns: int) -> int:
    """When this process was forked, by the monotonic clock.

    The kernel tells it to 10 ms. Within these, the process was created as long before its first line as it has run and
    has waited for a processor since.
    """
    with open("/proc/self/schedstat") as file:
        ran_ns, waited_ns = map(int, file.read().split()[:2])
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    tick_ns = 10**9 // os.sysconf("SC_CLK_TCK")
    offset_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    earliest_ns = ticks * tick_ns - offset_ns
    return min(max(earliest_ns, began_ns - ran_ns - waited_ns), earliest_ns + tick_ns)
