"""When workers wrote something, and whether a line of it matched the user's pattern.

The pump reports the bytes that it passes on to each `StreamWatch`, which costs it a time stamp. Files that workers
write themselves are checked on request (`look`), by their size; they are read only if there is a pattern. An error in
here must not reach the pump, whose streams are the user's output.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.process.output.lines import LineMatcher

if TYPE_CHECKING:
    from holdfast.process.output.pump import Pump

logger = logging.getLogger(__name__)

# After a search that takes longer the pattern is dropped: the pump, and every worker that writes, would wait for it.
_SLOW_SEARCH_S = 1.0
# If a file grew by more than this between two looks, only the last part is searched.
_SEARCHED_MAX_BYTES = 4 << 20


class StreamWatch:
    """One stream of one worker: when something came, and when a line last matched. With a path, it is a file that the
    worker writes itself."""

    __slots__ = ("_matcher", "_owner", "_path", "_size", "at", "matched_at")

    def __init__(self, owner: OutputWatch, path: str = "") -> None:
        self.at: float | None = None
        self.matched_at: float | None = None
        self._owner = owner
        self._path = path
        self._size = 0
        self._matcher = LineMatcher(owner.pattern) if owner.pattern else None

    def saw(self, data: bytes, now: float) -> None:
        """Never raises."""
        self.at = now
        if self._matcher is None:
            return
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

    def look(self, now: float) -> None:
        """Check the file."""
        try:
            size = os.stat(self._path).st_size
            if size == self._size:
                return
            data = self._new_part(size) if self._matcher is not None and size > self._size else b""
        except OSError:
            return  # Removed, or out of reach; other signs of its worker still count.
        self._size = size
        self.saw(data, now)

    def _new_part(self, size: int) -> bytes:
        with open(self._path, "rb") as file:
            file.seek(max(self._size, size - _SEARCHED_MAX_BYTES))
            return file.read(_SEARCHED_MAX_BYTES)


class OutputWatch:
    """The output of one life of a group, by local rank."""

    def __init__(self, pattern: str = "") -> None:
        self.pattern = re.compile(pattern, re.MULTILINE) if pattern else None
        self.has_given_up = False
        self.pump: Pump | None = None
        self._streams: dict[int, list[StreamWatch]] = {}
        self._files: list[StreamWatch] = []

    @property
    def is_blind(self) -> bool:
        """Whether output may be there that the pump cannot pass on."""
        return self.pump is not None and self.pump.is_blocked

    def stream(self, rank: int, path: str = "") -> StreamWatch:
        watch = StreamWatch(self, path)
        self._streams.setdefault(rank, []).append(watch)
        self._files += [watch] if path else []
        return watch

    @property
    def is_sampled(self) -> bool:
        return bool(self._files)

    def look(self, now: float) -> None:
        """Check the files."""
        for file in self._files:
            file.look(now)

    def moved_at(self, ranks: Iterable[int]) -> float | None:
        """When any of these workers wrote something."""
        return _latest(watch.at for rank in ranks for watch in self._streams.get(rank, ()))

    def matched_at(self) -> float | None:
        return _latest(watch.matched_at for watches in self._streams.values() for watch in watches)

    def give_up(self, why: str) -> None:
        """Stop using the pattern."""
        if not self.has_given_up:
            self.has_given_up = True
            assert self.pattern is not None
            logger.warning("--progress-pattern %r: %s", self.pattern.pattern, why)


def _latest(times: Iterable[float | None]) -> float | None:
    return max((at for at in times if at is not None), default=None)
