"""Connections that have not joined: how many there may be, and for how long.

There is a limit to the number of strangers; beyond it the oldest one of the address that has most of them is cut off.
They never have more than a quarter of the descriptors.
"""

from __future__ import annotations

import asyncio
import resource
from typing import TYPE_CHECKING

from holdfast.rendezvous.coordinator.limits import Limits

if TYPE_CHECKING:
    from holdfast.rendezvous.coordinator.connection import Connection


def descriptor_limit() -> int:
    """The soft one, as it is now."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Strangers:
    """Connections that have not joined, by the address of the peer and in the order of arrival. Each has the same time
    for that, so one timer is enough for all of them."""

    def __init__(self, limits: Limits, *, has_tls: bool) -> None:
        self._most = limits.strangers_with_tls if has_tls else limits.strangers
        self._loop = asyncio.get_running_loop()
        self._by_address: dict[str, dict[Connection, None]] = {}
        self._deadlines: dict[Connection, float] = {}
        self._timer: asyncio.TimerHandle | None = None

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
        if self._deadlines.pop(connection, None) is None:
            return
        crowd = self._by_address[connection.host]
        del crowd[connection]
        if not crowd:
            del self._by_address[connection.host]

    def _time_passed(self) -> None:
        self._timer = None
        now = self._loop.time()
        for connection in [each for each, deadline in self._deadlines.items() if deadline <= now]:
            self.discard(connection)
            connection.give_up()
        if self._deadlines:
            self._timer = self._loop.call_at(next(iter(self._deadlines.values())), self._time_passed)
