"""What moves: when workers wrote something, whether a line of it matched, and what their trees have used.

The pump tells each `StreamWatch` of the bytes that it passes on, which costs it a time stamp. Files that workers write
themselves are looked at when somebody asks (`look`), by their size; only if there is a pattern are they read. A mistake
in here must not reach the pump, whose streams are the user's output.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping

from holdfast.diagnosis.hang import Usage
from holdfast.process import stop
from holdfast.process.lines import LineMatcher

logger = logging.getLogger(__name__)

# A search that takes longer is given up: the pump, and with it every worker that writes, would wait for it.
_SLOW_SEARCH_S = 1.0
# Of a file that grew by more than this between two looks, the rest is not searched.
_SEARCHED_MAX_BYTES = 4 << 20
_TICKS_A_S = os.sysconf("SC_CLK_TCK")


class StreamWatch:
    """One stream of one worker: when something came, and when a line last matched."""

    __slots__ = ("_matcher", "_owner", "at", "matched_at")

    def __init__(self, owner: OutputWatch) -> None:
        self.at: float | None = None
        self.matched_at: float | None = None
        self._owner = owner
        self._matcher = LineMatcher(owner.pattern) if owner.pattern else None

    def saw(self, data: bytes, now: float) -> None:
        """Called by whoever passes the bytes on. Never raises."""
        self.at = now
        if self._matcher is not None:
            self._search(data, now)

    def _search(self, data: bytes, now: float) -> None:
        assert self._matcher is not None
        began = time.monotonic()
        try:
            if self._owner.has_given_up:
                self._matcher = None
            elif self._matcher.feed(data):
                self.matched_at = now
            if time.monotonic() - began > _SLOW_SEARCH_S:
                self._owner.give_up("it takes too long to search for; lines are not searched any more")
        except Exception as error:
            self._owner.give_up(f"searching for it failed: {type(error).__name__}: {error}")


class _Followed:
    """A file that a worker writes by itself."""

    def __init__(self, path: str, watch: StreamWatch, has_pattern: bool) -> None:
        self._path = path
        self._watch = watch
        self._has_pattern = has_pattern
        self._size = 0

    def look(self, now: float) -> None:
        try:
            size = os.stat(self._path).st_size
            if size == self._size:
                return
            data = self._new_part(size) if self._has_pattern and size > self._size else b""
        except OSError:
            return  # Removed, or out of reach; its worker is seen by what else it does.
        self._size = size
        self._watch.saw(data, now)

    def _new_part(self, size: int) -> bytes:
        with open(self._path, "rb") as file:
            file.seek(max(self._size, size - _SEARCHED_MAX_BYTES))
            return file.read(_SEARCHED_MAX_BYTES)


class OutputWatch:
    """The output of one life of a group, by local rank."""

    def __init__(self, pattern: str = "") -> None:
        self.pattern = re.compile(pattern, re.MULTILINE) if pattern else None
        self.has_given_up = False
        self._is_held_up: Callable[[], bool] = lambda: False
        self._streams: dict[int, list[StreamWatch]] = {}
        self._files: list[_Followed] = []

    def attach(self, is_held_up: Callable[[], bool]) -> None:
        """Whom to ask whether output is on its way at all."""
        self._is_held_up = is_held_up

    @property
    def is_blind(self) -> bool:
        return self._is_held_up()

    def stream(self, rank: int) -> StreamWatch:
        """A stream that the pump will tell about."""
        watch = StreamWatch(self)
        self._streams.setdefault(rank, []).append(watch)
        return watch

    def follow(self, rank: int, path: str) -> None:
        self._files.append(_Followed(path, self.stream(rank), self.pattern is not None))

    @property
    def is_sampled(self) -> bool:
        return bool(self._files)

    def look(self, now: float) -> None:
        """Find out about the files."""
        for file in self._files:
            file.look(now)

    def moved_at(self, ranks: Iterable[int]) -> float | None:
        """When any of these workers wrote something."""
        return _latest(watch.at for rank in ranks for watch in self._streams.get(rank, ()))

    def matched_at(self) -> float | None:
        return _latest(watch.matched_at for watches in self._streams.values() for watch in watches)

    def give_up(self, why: str) -> None:
        """The pattern cannot be used any more; nobody is judged by it from here on."""
        if not self.has_given_up:
            self.has_given_up = True
            assert self.pattern is not None
            logger.warning("--progress-pattern %r: %s", self.pattern.pattern, why)


def _latest(times: Iterable[float | None]) -> float | None:
    return max((at for at in times if at is not None), default=None)


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
        for pid in (leader, *stop.descendants_of(leader)):
            now = seen[pid] = (
                process_cpu_s(pid) if self._wants_cpu else 0.0,
                process_io_bytes(pid) if self._wants_io else 0,
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


def process_cpu_s(pid: int) -> float | None:
    """None if the process is there but may not be asked; one that is gone has used nothing."""
    text = _read(f"/proc/{pid}/stat")
    if not text:
        return None if text is None else 0.0
    fields = text[text.rindex(b")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_S


def process_io_bytes(pid: int) -> int | None:
    """What it has read and written through the system's calls, from disks or not."""
    text = _read(f"/proc/{pid}/io")
    if not text:
        return None if text is None else 0
    counts = dict(line.split(b": ") for line in text.splitlines())
    return int(counts[b"rchar"]) + int(counts[b"wchar"])


def _read(path: str) -> bytes | None:
    """Nothing if the process is gone, None if it is not ours to read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""
    except OSError:
        return None
