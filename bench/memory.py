"""How much memory processes hold, as the kernel counts it, and which processes are whose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_KIB = 1024
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Held:
    """Resident memory, with shared pages counted fully (rss) and by share (pss)."""

    rss_mb: float
    pss_mb: float


def held_by(pids: Iterable[int]) -> Held:
    counts = [_counts(pid) for pid in pids]
    return Held(sum(c["Rss"] for c in counts) * _KIB / _MB, sum(c["Pss"] for c in counts) * _KIB / _MB)


def _counts(pid: int) -> dict[str, int]:
    """The counts of /proc/PID/smaps_rollup in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def own_processes(launcher: int, workers: set[int]) -> list[int]:
    """The launcher and every process below it that is not a worker."""
    found, unseen = [], [launcher]
    while unseen:
        pid = unseen.pop()
        found.append(pid)
        unseen.extend(_children(pid) - workers)
    return found


def _children(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}
