"""What a coordinator allows its peers, in one record, and the buckets that bound how fast they may use it. Pure.

No run of 10,000 nodes meets any of these. Beyond a limit a peer is refused with one line that names the limit.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.frozen import frozen

MIB = 1 << 20


@frozen
class Limits:
    """Of one coordinator process. A `stranger` is a connection that has not joined the run and is no visitor."""

    strangers: int = 4096
    strangers_with_tls: int = 256  # Each costs 79 KB.
    held_bytes: int = 64 * MIB  # What strangers and visitors have sent and what was not taken yet, all together.
    unread_bytes: int = 4 * MIB  # What one connection is sent and does not read.
    waiting_bytes: int = 1 << 16  # A connection that waits for its turn with more than that is not read from.
    spare_descriptors: int = 64
    store_bytes: int = 64 * MIB
    # Those that only ask (`queries`).
    visitors: int = 4096
    relays_a_second: int = 500
    relays_at_once: int = 1000
    relays_unanswered: int = 1024
    # The log.
    lines_at_once: int = 1000
    lines_a_second: int = 20


class Bucket:
    """It is filled at a rate and holds so much."""

    __slots__ = ("_clock", "_filled_at", "_level", "_rate", "_size")

    def __init__(self, rate: float, size: float, clock: Callable[[], float]) -> None:
        self._rate, self._size, self._clock = rate, size, clock
        self._level, self._filled_at = size, clock()

    def gives(self, amount: float) -> bool:
        """Take that much if it is there."""
        if self._fill() < amount:
            return False
        self._level -= amount
        return True

    def owed_s(self, amount: float) -> float:
        """Take that much. Returns for how long nothing more may be taken."""
        self._level = self._fill() - amount
        return max(0.0, -self._level / self._rate)

    def _fill(self) -> float:
        now = self._clock()
        self._level = min(self._size, self._level + self._rate * (now - self._filled_at))
        self._filled_at = now
        return self._level
