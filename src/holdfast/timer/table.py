"""Which timers are armed, and which of them have run out.

A timer's key is (pid, scope); arming the same key again moves the deadline. The kernel reuses pids, so the table keeps
the start time that each process had when it armed its timers. When another process arms a timer under the same pid, the
old timers are dropped.
"""

from __future__ import annotations

from typing import Any


class TimerTable:
    """Armed timers by (pid, scope), each with the request that armed it. A process without timers is not kept."""

    def __init__(self) -> None:
        # By pid: by scope, in the order of arming, the deadline and the request; and when the process had started.
        self._timers: dict[int, dict[str, tuple[float, Any]]] = {}
        self._started: dict[int, int | None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._timers.values()))

    def __contains__(self, key: tuple[int, str]) -> bool:
        pid, scope = key
        return scope in self._timers.get(pid, ())

    def register(self, pid: int, scope: str, deadline: float, request: Any, started: int | None = None) -> None:
        """Arm a timer, or move its deadline. `started` is None if the start time is not known."""
        if pid not in self._timers or started not in (None, self._started[pid]):
            self._timers[pid], self._started[pid] = {}, started
        self._timers[pid].pop(scope, None)
        self._timers[pid][scope] = (deadline, request)

    def release(self, pid: int, scope: str) -> None:
        if (pid, scope) in self:
            del self._timers[pid][scope]
            if not self._timers[pid]:
                self.forget(pid)

    def forget(self, pid: int) -> None:
        self._timers.pop(pid, None)
        self._started.pop(pid, None)

    def expired(self, now: float) -> dict[int, list[Any]]:
        """The requests whose deadline is not after `now`, earliest first, by pid. They stay armed."""
        by_pid = {}
        for pid, timers in self._timers.items():
            if due := [timer for timer in timers.values() if timer[0] <= now]:
                by_pid[pid] = [request for _, request in sorted(due, key=lambda timer: timer[0])]
        return by_pid

    def next_deadline(self) -> float | None:
        return min((deadline for timers in self._timers.values() for deadline, _ in timers.values()), default=None)

    def started(self, pid: int) -> int | None:
        """The start time that the process had when it armed its timers."""
        return self._started.get(pid)

    def pids(self) -> list[int]:
        return list(self._timers)
