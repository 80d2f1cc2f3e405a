"""Connections that have not joined: how many there may be, for how long, and what they may hold.

There is a limit to the number of strangers; beyond it the oldest one of the address that has most of them is cut off.
They never have more than a quarter of the descriptors.
"""

from __future__ import annotations

import asyncio
import resource
from typing import TYPE_CHECKING

from holdfast.rendezvous.coordinator.limits import MIB, Limits

if TYPE_CHECKING:
    from holdfast.rendezvous.coordinator.connection import Connection


def descriptor_limit() -> int:
    """The soft one, as it is now."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Strangers:
    """Connections that have not joined, by the address of the peer and in the order of arrival. Each has the same time
    for that, so one timer is enough for all of them. What strangers and visitors have sent, and what was not taken
    because a message is incomplete or has to wait, is bounded for all of them together."""

    def __init__(self, limits: Limits, *, has_tls: bool) -> None:
        self._most = limits.strangers_with_tls if has_tls else limits.strangers
        self._loop = asyncio.get_running_loop()
        self._by_address: dict[str, dict[Connection, None]] = {}
        self._deadlines: dict[Connection, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._held_limit_bytes = limits.held_bytes
        self._held: dict[Connection, int] = {}
        self._held_bytes = 0

    def add(self, connection: Connection, deadline: float) -> None:
        self._by_address.setdefault(connection.host, {})[connection] = None
        self._deadlines[connection] = deadline
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._time_passed)
        if len(self._deadlines) > min(self._most, max(1, descriptor_limit() // 4)):
            crowd = max(self._by_address.values(), key=len)
            oldest = next(iter(crowd))
            self.discard(oldest)
            oldest.cut_off("has not joined while others wait")

    def discard(self, connection: Connection) -> None:
        """It is gone, or no stranger any more."""
        self._held_bytes -= self._held.pop(connection, 0)
        if self._deadlines.pop(connection, None) is None:
            return
        crowd = self._by_address[connection.host]
        del crowd[connection]
        if not crowd:
            del self._by_address[connection.host]

    def note_held(self, connection: Connection) -> None:
        """It may have become more or less. If all hold too much, the one that holds most is cut off."""
        held = connection.held_bytes
        self._held_bytes += held - self._held.pop(connection, 0)
        if held:
            self._held[connection] = held
        while self._held_bytes > self._held_limit_bytes:
            greediest = max(self._held, key=lambda each: self._held[each])
            self._held_bytes -= self._held.pop(greediest)
            greediest.cut_off(f"has sent more than can be taken ({self._held_limit_bytes // MIB} MiB of all strangers)")

    def _time_passed(self) -> None:
        self._timer = None
        now = self._loop.time()
        for connection in [each for each, deadline in self._deadlines.items() if deadline <= now]:
            self.discard(connection)
            connection.give_up()
        if self._deadlines:
            self._timer = self._loop.call_at(next(iter(self._deadlines.values())), self._time_passed)
