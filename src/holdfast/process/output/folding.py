"""Which lines of several workers are one line, shown once. PURE: lines in with rank and time, lines out.

Workers of one program write the same lines at about the same time. A line waits for the same line of other ranks until
all ranks that still write have written it, for `FOLD_WAIT_S` at most. Then it goes out once, with all of these ranks.
Lines are the same if all their bytes are, and if they belong to the same stream.

The lines that wait are a queue. A rank's line may join one that stands behind the rank's last line. It may also join
the newest of the same lines if no rank of that one has a later line. That one goes to the end of the queue then. So
each rank's lines keep their order:

    rank 0 writes     a, x          the queue: a of 0, x of 0
    rank 1 writes     b, x          the queue: a of 0, b of 1, x of 0 and 1

The queue is bounded: lines above the bound go out without waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from operator import attrgetter

FOLD_WAIT_S = 0.1

# A terminal shows no more than this in the time that a line waits, and a person reads less.
_WAITING_MAX_LINES = 4000
_WAITING_MAX_BYTES = 1 << 20

_position = attrgetter("position")


@dataclass(slots=True, eq=False)
class Fold:
    """One line and the ranks that have written it."""

    line: bytes
    stream: str
    prefix: bytes  # That of the first rank.
    ranks: list[int]
    deadline: float
    position: int  # Rises in the queue.


class LineFolder:
    """The lines that wait, in the order in which they go out."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Fold, None] = OrderedDict()
        self._waiting_bytes = 0
        self._by_age: deque[Fold] = deque()  # The oldest first. Some may have gone out.
        self._alike: dict[tuple[str, bytes], list[Fold]] = {}
        self._last_of: dict[int, int] = {}  # The position of each rank's last line.
        self._last_position = 0
        self._writers: defaultdict[str, set[int]] = defaultdict(set)

    def open(self, stream: str, rank: int) -> None:
        """The rank writes to the stream."""
        self._writers[stream].add(rank)

    def close(self, stream: str, rank: int) -> None:
        """The rank writes no more."""
        self._writers[stream].discard(rank)

    def add(self, stream: str, rank: int, prefix: bytes, line: bytes, now: float) -> None:
        alike = self._alike.setdefault((stream, line), [])
        at = bisect_right(alike, self._last_of.get(rank, 0), key=_position)
        if at < len(alike):
            fold = alike[at]
        elif alike and self._may_move(alike[-1], rank):
            fold = alike[-1]
            self._move_to_end(fold)
        else:
            self._last_position += 1
            fold = Fold(line, stream, prefix, [], now + FOLD_WAIT_S, self._last_position)
            alike.append(fold)
            self._by_age.append(fold)
            self._waiting[fold] = None
            self._waiting_bytes += len(line)
        fold.ranks.append(rank)
        self._last_of[rank] = fold.position

    def take(self, now: float) -> list[Fold]:
        """The lines that go out now, in order."""
        taken = []
        while self._waiting and self._is_ready(next(iter(self._waiting))):
            taken.append(self._pop())
        while (oldest := self._oldest()) is not None and oldest.deadline <= now:
            taken.append(self._pop())
        return taken

    def take_lines_of(self, rank: int) -> list[Fold]:
        """All lines of that rank, and those that stand before them."""
        taken = []
        while self._waiting and next(iter(self._waiting)).position <= self._last_of.get(rank, 0):
            taken.append(self._pop())
        return taken

    def next_deadline(self) -> float | None:
        oldest = self._oldest()
        return None if oldest is None else oldest.deadline

    def _may_move(self, fold: Fold, rank: int) -> bool:
        return rank not in fold.ranks and all(self._last_of[each] == fold.position for each in fold.ranks)

    def _move_to_end(self, fold: Fold) -> None:
        self._last_position += 1
        fold.position = self._last_position
        self._waiting.move_to_end(fold)
        for rank in fold.ranks:
            self._last_of[rank] = fold.position

    def _oldest(self) -> Fold | None:
        while self._by_age and self._by_age[0] not in self._waiting:
            self._by_age.popleft()
        return self._by_age[0] if self._by_age else None

    def _is_ready(self, fold: Fold) -> bool:
        writers = self._writers[fold.stream]
        is_whole = len(fold.ranks) >= len(writers) and writers.issubset(fold.ranks)
        return is_whole or len(self._waiting) > _WAITING_MAX_LINES or self._waiting_bytes > _WAITING_MAX_BYTES

    def _pop(self) -> Fold:
        fold, _ = self._waiting.popitem(last=False)
        self._waiting_bytes -= len(fold.line)
        alike = self._alike[fold.stream, fold.line]
        del alike[0]
        if not alike:
            del self._alike[fold.stream, fold.line]
        return fold
