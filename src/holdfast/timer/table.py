"""Which timers are armed, and which of them have run out.

A timer's key is (pid, scope); arming the same key again moves the deadline. The kernel reuses pids, so the table keeps
the start time that each process had when it armed its timers. When another process arms a timer under the same pid, the
old timers are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R")


@dataclass(slots=True)
class _Process(Generic[R]):
    """A process, and by scope the deadline and the request of each of its timers, in the order of arming."""

    started: int | None
    timers: dict[str, tuple[float, R]] = field(default_factory=dict)


class TimerTable(Generic[R]):
    """Armed timers by (pid, scope), each with the request that armed it. A process without timers is not kept."""

    def __init__(self) -> None:
        self._processes: dict[int, _Process[R]] = {}

    def __len__(self) -> int:
        return sum(len(process.timers) for process in self._processes.values())

    def __contains__(self, key: tuple[int, str]) -> bool:
        pid, scope = key
        return pid in self._processes and scope in self._processes[pid].timers

    def register(self, pid: int, scope: str, deadline: float, request: R, started: int | None = None) -> None:
        """Arm a timer, or move its deadline. `started` is None if the start time is not known."""
        process = self._processes.get(pid)
        if process is None or started not in (None, process.started):
            process = self._processes[pid] = _Process(started)
        process.timers.pop(scope, None)
        process.timers[scope] = (deadline, request)

    def release(self, pid: int, scope: str) -> None:
        process = self._processes.get(pid)
        if process is not None:
            process.timers.pop(scope, None)
            if not process.timers:
                del self._processes[pid]

    def forget(self, pid: int) -> None:
        self._processes.pop(pid, None)

    def expired(self, now: float) -> dict[int, list[R]]:
        """The requests whose deadline is not after `now`, earliest first, by pid. They stay armed."""
        by_pid = {}
        for pid, process in self._processes.items():
            due = [timer for timer in process.timers.values() if timer[0] <= now]
            if due:
                by_pid[pid] = [request for _, request in sorted(due, key=lambda timer: timer[0])]
        return by_pid

    def next_deadline(self) -> float | None:
        timers = (timer for process in self._processes.values() for timer in process.timers.values())
        return min((deadline for deadline, _ in timers), default=None)

    def started(self, pid: int) -> int | None:
        """The start time that the process had when it armed its timers."""
        process = self._processes.get(pid)
        return None if process is None else process.started

    def pids(self) -> list[int]:
        return list(self._processes)
