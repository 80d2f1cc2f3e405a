"""When workers wrote something, and whether a line of it matched the user's pattern.

The pump tells each `StreamWatch` of the bytes that it passes on, which costs it a time stamp. Files that workers write
themselves are looked at on request (`look`), by their size; they are read only if there is a pattern. An error in
here must not reach the pump, whose streams are the user's output.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable

from holdfast.process.output.lines import LineMatcher

logger = logging.getLogger(__name__)

# A search that takes longer is given up: the pump, and with it every worker that writes, would wait for it.
_SLOW_SEARCH_S = 1.0
# Of a file that grew by more than this between two looks, the rest is not searched.
_SEARCHED_MAX_BYTES = 4 << 20


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
