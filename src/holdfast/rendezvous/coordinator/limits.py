"""What a coordinator allows its peers, in one record, and the buckets that bound how fast they may use it. Pure.

No run of 10,000 nodes meets any of these. Beyond a limit on what is kept, a peer is refused with one line that names
the limit; beyond a rate it is not read from for a moment, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.frozen import frozen

MIB = 1 << 20


@frozen
class Limits:
    """Of one coordinator process. `stranger` is a connection whose handshake is not over."""

    # What is kept for all runs together.
    runs: int = 256
    nodes: int = 131_072
    store_bytes: int = 256 * MIB
    spare_bytes: int = MIB // 4  # Of each run's store; these do not count as part of `store_bytes`.
    held_bytes: int = 64 * MIB  # What peers have sent and what was not taken yet.
    unsent_bytes: int = 64 * MIB  # What peers do not read.
    remembered_connections: int = 32_768  # Of nodes that are not connected now.
    parked_runs: int = 1024  # Deserted runs of which only the memory is left, and that may come back.
    # The store of one run. It keeps answers in case a request comes again.
    run_stored_bytes: int = 64 * MIB
    run_waiting_bytes: int = 32 * MIB
    run_remembered_bytes: int = 4 * MIB
    client_waiting_bytes: int = 8 * MIB
    # How often one run writes its memory down, and what may wait for that.
    writes_a_second: int = 100
    writes_at_once: int = 200
    waiting_commands: int = 1000
    # One connection: 64 MiB or 10,000 messages a second, or some of both. A full bucket may be emptied twice at once.
    bytes_a_second: int = 64 * MIB
    message_bytes: int = 6554  # What each message counts for besides its own bytes.
    waiting_bytes: int = 1 << 16  # A connection that waits for its turn with more than that is not read from.
    # Connections.
    strangers: int = 4096
    strangers_with_tls: int = 256  # Each costs 79 KB.
    stranger_bytes: int = 1 << 16
    spare_descriptors: int = 64
    accepted_in_a_turn: int = 64
    # Those that only ask (`queries`). They share the time of one run. What agents are asked is bounded besides.
    visitors: int = 4096
    relays_a_second: int = 50
    relays_at_once: int = 100
    relays_unanswered: int = 256
    # Lines of the log about one run: those about each of its connections, and all others.
    lines_about_connections: int = 12_000
    lines_of_a_connection: int = 4
    lines_of_a_run: int = 100
    lines_a_second: int = 20


class Bucket:
    """It is filled at a rate and holds so much. It is filled only when it is empty, so the usual case costs one
    subtraction."""

    __slots__ = ("_clock", "_filled_at", "_level", "_rate", "_size")

    def __init__(self, rate: float, size: float, clock: Callable[[], float]) -> None:
        self._rate, self._size, self._clock = rate, size, clock
        self._level, self._filled_at = size, clock()

    def owed_s(self, amount: float) -> float:
        """Take that much. Returns for how long nothing more may be taken."""
        self._level -= amount
        return 0.0 if self._level >= 0 else max(0.0, -self._fill() / self._rate)

    def gives(self, amount: float) -> bool:
        """Take that much if it is there."""
        if self._level < amount and self._fill() < amount:
            return False
        self._level -= amount
        return True

    def _fill(self) -> float:
        now = self._clock()
        self._level = min(self._size, self._level + self._rate * (now - self._filled_at))
        self._filled_at = now
        return self._level
