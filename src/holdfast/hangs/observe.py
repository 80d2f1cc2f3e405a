"""What the process trees of workers have used: processor time and input/output, as the kernel counts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast import procfs
from holdfast.hangs.policy import Usage


class UsageMeter:
    """What the trees of workers use. Processes that come and go within a tree count while they are seen."""

    def __init__(self, *, cpu: bool, io: bool) -> None:
        self._wants_cpu = cpu
        self._wants_io = io
        self._last: dict[int, tuple[float | None, int | None]] = {}
        self._total: dict[int, Usage] = {}

    def read(self, leaders: Iterable[int]) -> Mapping[int, Usage]:
        """By the pid of the leader, since the first reading."""
        seen: dict[int, tuple[float | None, int | None]] = {}
        totals = {leader: self._read_tree(leader, seen) for leader in leaders}
        self._last, self._total = seen, totals
        return totals

    def _read_tree(self, leader: int, seen: dict[int, tuple[float | None, int | None]]) -> Usage:
        total = self._total.get(leader, Usage())
        cpu_s, io_bytes = total.cpu_s, total.io_bytes
        for pid in (leader, *procfs.descendants_of(leader)):
            now = seen[pid] = (
                procfs.cpu_s(pid) if self._wants_cpu else 0.0,
                procfs.io_bytes(pid) if self._wants_io else 0,
            )
            before = self._last.get(pid, (0.0, 0))
            cpu_s = _added(cpu_s, before[0], now[0])
            io_bytes = _added(io_bytes, before[1], now[1])
        return Usage(cpu_s, io_bytes)


def _added(total: float | None, before: float | None, now: float | None) -> float | None:
    """One that could not be read makes the sum unknown until it can be again."""
    if now is None:
        return None
    return (total or 0) + max(0, now - (before or 0))
