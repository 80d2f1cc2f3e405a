"""How connections come in, and what they may hold before they are known and while their messages are incomplete.

Neither strangers nor descriptors run out:

* a turn of the loop accepts a few connections, so that those which are there are served, too; it turns away many more,
* there is a limit to the number of strangers; beyond it the oldest one of the address that has most of them is cut off,
* some descriptors stay free, for files and for the next connections; beyond that newcomers are told that there are too
  many connections. The system gives the lowest free number, so a high one says how many there are.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.rendezvous.coordinator.limits import MIB, Limits
from holdfast.rendezvous.endpoints import endpoint_text
from holdfast.rendezvous.membership import frames, protocol

if TYPE_CHECKING:
    from holdfast.rendezvous.coordinator.connection import Connection
    from holdfast.rendezvous.coordinator.log import Complaints

_BACKLOG = 4096
_RETRY_S = 0.1
_TURN_S = 0.01
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_TOO_MANY = "this coordinator has too many connections"


def descriptor_limit() -> int:
    """The soft one, as it is now."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Door:
    """Accepts connections until it is closed."""

    def __init__(
        self,
        sock: socket.socket,
        limits: Limits,
        connection: Callable[[], Connection],
        strangers: Strangers,
        complaints: Complaints,
        *,
        has_tls: bool,
    ) -> None:
        """Raises OSError if the socket cannot listen."""
        self._sock, self._limits, self._connection, self._complaints = sock, limits, connection, complaints
        self._strangers, self._has_tls = strangers, has_tls
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        # Small messages are not kept back for others. The connections inherit this from the socket that listens.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.listen(_BACKLOG)
        self._loop.add_reader(sock, self._accept_some)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def _accept_some(self) -> None:
        limit = descriptor_limit()
        self._strangers.adapt_to(limit)
        highest = limit - self._limits.spare_descriptors
        # Those of this turn must not use up what is left beside strangers before the oldest ones are cut off.
        most = min(self._limits.accepted_in_a_turn, max(1, limit // 32))
        served, ends_at = 0, self._loop.time() + _TURN_S
        while served < most and self._loop.time() < ends_at:
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._complaints.add("this host", f"has no room for another connection: {error}", self._loop.time())
                self._loop.remove_reader(self._sock)
                self._loop.call_later(_RETRY_S, self._open_again)
                return
            sock.setblocking(False)
            if sock.fileno() >= highest:
                self._turn_away(sock, address)
            else:
                served += 1
                task = self._loop.create_task(self._serve(sock))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._connection, sock)
        except OSError:
            sock.close()

    def _open_again(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock, self._accept_some)

    def _turn_away(self, sock: socket.socket, address: tuple[str, int]) -> None:
        with sock:
            self._complaints.add(endpoint_text(*address[:2]), f"is turned away: {_TOO_MANY}", self._loop.time())
            if not self._has_tls:
                try:
                    sock.send(frames.encode(protocol.Denied(_TOO_MANY, is_passing=True)))
                except OSError:
                    pass  # It has gone already.


class Strangers:
    """Connections that have not joined, by the address of the peer and in the order of arrival. Each has the same time
    for that, so one timer is enough for all of them. What strangers and visitors have sent, and what was not taken
    because a message is incomplete or has to wait, is bounded for all of them together."""

    def __init__(self, limits: Limits, *, has_tls: bool) -> None:
        self._most_of_limits = limits.strangers_with_tls if has_tls else limits.strangers
        self._loop = asyncio.get_running_loop()
        self._by_address: dict[str, dict[Connection, None]] = {}
        self._deadlines: dict[Connection, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._held_limit_bytes = limits.held_bytes
        self._held: dict[Connection, int] = {}
        self._held_bytes = 0
        self.adapt_to(descriptor_limit())

    def adapt_to(self, descriptors: int) -> None:
        """They may have a quarter of the descriptors."""
        self._most = min(self._most_of_limits, max(1, descriptors // 4))

    def add(self, connection: Connection, deadline: float) -> None:
        self._by_address.setdefault(connection.host, {})[connection] = None
        self._deadlines[connection] = deadline
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._time_passed)
        if len(self._deadlines) > self._most:
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
