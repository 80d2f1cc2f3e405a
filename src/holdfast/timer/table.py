"""Which timers are armed, and which of them have run out.

A timer is one promise of one process: this scope ends by then. Its key is (pid, scope); arming the same key
again moves the deadline. A pid means little by itself, since the kernel hands it out again, so each process in
the table carries the start time that was seen when it armed its timers. Timers of another life of the pid are
dropped the moment the new life arms one.

Beside the table stands a heap of deadlines. Arming pushes an entry; releasing and re-arming leave the old entry
where it is, to be recognised by its serial number as stale. When stale entries outnumber live ones the heap is
rebuilt, so that a loop that arms and releases for days does not grow it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

R = TypeVar("R")

# Below this size a heap is not worth rebuilding.
_SMALL_HEAP = 64


class _Due(NamedTuple):
    """An entry of the heap. The serial is unique, so entries are never compared beyond it."""

    deadline: float
    serial: int
    pid: int
    scope: str


@dataclass(slots=True)
class _Process(Generic[R]):
    """The timers of one life of a pid, each with its entry in the heap."""

    started: int | None
    timers: dict[str, tuple[_Due, R]] = field(default_factory=dict)


class TimerTable(Generic[R]):
    """Armed timers by (pid, scope), each with the request that armed it."""

    def __init__(self) -> None:
        self._processes: dict[int, _Process[R]] = {}
        self._heap: list[_Due] = []
        self._armed = 0
        self._last_serial = 0

    def __len__(self) -> int:
        return self._armed

    def __contains__(self, key: tuple[int, str]) -> bool:
        pid, scope = key
        process = self._processes.get(pid)
        return process is not None and scope in process.timers

    def register(self, pid: int, scope: str, deadline: float, request: R, started: int | None = None) -> None:
        """Arm a timer, or move the deadline of one that is armed. `started` is None when nobody could tell."""
        process = self._processes.get(pid)
        if process is not None and started not in (None, process.started):
            self.forget(pid)
            process = None
        if process is None:
            process = self._processes[pid] = _Process(started)
        self._last_serial += 1
        due = _Due(deadline, self._last_serial, pid, scope)
        self._armed += scope not in process.timers
        process.timers[scope] = (due, request)
        heappush(self._heap, due)
        self._drop_stale()

    def release(self, pid: int, scope: str) -> None:
        """Disarm a timer; one that is not armed is none of our business."""
        process = self._processes.get(pid)
        if process is None or scope not in process.timers:
            return
        del process.timers[scope]
        self._armed -= 1
        if not process.timers:
            del self._processes[pid]
        self._drop_stale()

    def forget(self, pid: int) -> None:
        """Disarm every timer of a process."""
        process = self._processes.pop(pid, None)
        if process is not None:
            self._armed -= len(process.timers)
            self._drop_stale()

    def expired(self, now: float) -> dict[int, list[R]]:
        """The requests whose deadline is not after `now`, earliest first, by pid. They stay armed."""
        due = []
        while self._heap and self._heap[0].deadline <= now:
            entry = heappop(self._heap)
            if self._is_live(entry):
                due.append(entry)
        by_pid: dict[int, list[R]] = {}
        for entry in due:
            heappush(self._heap, entry)
            by_pid.setdefault(entry.pid, []).append(self._processes[entry.pid].timers[entry.scope][1])
        return by_pid

    def next_deadline(self) -> float | None:
        """The earliest deadline of an armed timer."""
        while self._heap and not self._is_live(self._heap[0]):
            heappop(self._heap)
        return self._heap[0].deadline if self._heap else None

    def started(self, pid: int) -> int | None:
        """The start time that the process had when it armed its timers."""
        process = self._processes.get(pid)
        return None if process is None else process.started

    def pids(self) -> list[int]:
        return list(self._processes)

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        timers = [due for process in self._processes.values() for due, _ in process.timers.values()]
        assert self._armed == len(timers), f"counted {self._armed} timers, hold {len(timers)}"
        assert all(process.timers for process in self._processes.values()), "a process without timers is kept"
        live = [entry for entry in self._heap if self._is_live(entry)]
        assert sorted(live) == sorted(timers), "an armed timer has no entry in the heap, or two"
        assert len(self._heap) <= self._heap_limit(), f"{len(self._heap)} entries for {self._armed} timers"

    def _is_live(self, entry: _Due) -> bool:
        process = self._processes.get(entry.pid)
        timer = None if process is None else process.timers.get(entry.scope)
        return timer is not None and timer[0].serial == entry.serial

    def _heap_limit(self) -> int:
        return 2 * self._armed + _SMALL_HEAP

    def _drop_stale(self) -> None:
        if len(self._heap) > self._heap_limit():
            self._heap = [due for process in self._processes.values() for due, _ in process.timers.values()]
            heapify(self._heap)
