"""When workers wrote something, and whether a line of it matched the user's pattern.

The pump reports the bytes that it passes on to each `StreamWatch`, which costs it a time stamp. Files that workers
write themselves are checked on request (`look`), by their size; they are read only if there is a pattern. An error in
here must not reach the pump, whose streams are the user's output.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Container, Iterable
from itertools import islice
from typing import TYPE_CHECKING

from holdfast.log import Logger
from holdfast.process.output.lines import HeldLine

if TYPE_CHECKING:
    from holdfast.process.output.pump import Pump

logger = Logger(__name__)

# After a search that takes longer the pattern is dropped: the pump, and every worker that writes, would wait for it.
_SLOW_SEARCH_S = 1.0
# If a file grew by more than this between two looks, only the last part is searched.
_SEARCHED_MAX_BYTES = 4 << 20
# A pattern that fits between any two characters must not hold up the pump.
_COUNTED_MAX = 4096
# A longer line is searched in parts.
_LINE_MAX_BYTES = 64 * 1024


class StreamWatch:
    """One stream of one worker: when something came, when a line last matched, and how often. With a path, it is a file
    that the worker writes itself."""

    def __init__(self, owner: OutputWatch, rank: int, path: str) -> None:
        self.rank = rank
        self.path = path
        self.at: float | None = None
        self.matched_at: float | None = None
        self.matches = 0
        self._owner = owner
        self._size = 0
        self._line = HeldLine()

    def saw(self, data: bytes, now: float) -> None:
        """Never raises."""
        self.at = now
        pattern = self._owner.pattern
        if pattern is None:
            return
        began = time.monotonic()
        try:
            text = self._line.take(data)
            if len(self._line) > _LINE_MAX_BYTES:
                text += self._line.release()
            # `$` in the pattern matches only before a newline.
            lines = text.replace(b"\r", b"\n").decode("utf-8", "replace")
            matches = sum(1 for _ in islice(pattern.finditer(lines), _COUNTED_MAX)) if text else 0
            if matches:
                self.matched_at = now
                self.matches += matches
            if time.monotonic() - began > _SLOW_SEARCH_S:
                self._owner.give_up("it takes too long to search for; lines are not searched any more")
        except Exception as error:
            self._owner.give_up(f"searching for it failed: {type(error).__name__}: {error}")

    def look(self, now: float) -> None:
        """Check the file."""
        data = b""
        try:
            size = os.stat(self.path).st_size
            if size > self._size and self._owner.pattern is not None:
                with open(self.path, "rb") as file:
                    file.seek(max(self._size, size - _SEARCHED_MAX_BYTES))
                    data = file.read(_SEARCHED_MAX_BYTES)
        except OSError:
            return  # Removed, or out of reach; other signs of its worker still count.
        if size != self._size:
            self._size = size
            self.saw(data, now)


class OutputWatch:
    """The output of one life of a group, by local rank."""

    def __init__(self, pattern: str = "") -> None:
        self.pattern = re.compile(pattern, re.MULTILINE) if pattern else None
        self.has_given_up = False
        self.pump: Pump | None = None
        self._streams: list[StreamWatch] = []

    @property
    def is_blind(self) -> bool:
        """Whether output may be there that the pump cannot pass on."""
        return self.pump is not None and self.pump.is_blocked

    def stream(self, rank: int, path: str = "") -> StreamWatch:
        self._streams.append(StreamWatch(self, rank, path))
        return self._streams[-1]

    @property
    def is_sampled(self) -> bool:
        return any(stream.path for stream in self._streams)

    def look(self, now: float) -> None:
        """Check the files."""
        for stream in self._streams:
            if stream.path:
                stream.look(now)

    def moved_at(self, ranks: Container[int]) -> float | None:
        """When any of these workers wrote something."""
        return _latest(stream.at for stream in self._streams if stream.rank in ranks)

    def matched_at(self) -> float | None:
        return _latest(stream.matched_at for stream in self._streams)

    def matches_of(self, rank: int) -> tuple[float | None, int | None]:
        """When a line of that worker last matched, and how many have; None if lines are not searched."""
        streams = [stream for stream in self._streams if stream.rank == rank]
        count = None if self.pattern is None else sum(stream.matches for stream in streams)
        return _latest(stream.matched_at for stream in streams), count

    def give_up(self, why: str) -> None:
        """Stop using the pattern."""
        pattern, self.pattern = self.pattern, None
        if pattern is not None:
            self.has_given_up = True
            logger.warning("--progress-pattern %r: %s", pattern.pattern, why)


def _latest(times: Iterable[float | None]) -> float | None:
    return max((at for at in times if at is not None), default=None)
