"""Until when the workers may live, as the spawner knows it.

A node that the run can no longer reach must lose its workers in time, whatever its agent is doing: stopping other
workers, hanging, or frozen. So the time is held by the spawner, which kills everything below it when the time
passes. The agent's client thread writes each new time into a pipe that the spawner reads; both are on one host and
read the same monotonic clock.
"""

from __future__ import annotations

import math
import os
import struct
import threading

from holdfast.process.spawner.wire import Pipe

TIME = struct.Struct("=d")


class Lease(Pipe):
    """The writing end. `set` may be called from any thread."""

    def __init__(self) -> None:
        super().__init__(os.O_NONBLOCK)
        self._lock = threading.Lock()
        self._until = math.inf

    def set(self, until: float | None) -> None:
        """None means no expiry."""
        with self._lock:
            self._until = math.inf if until is None else until
            self._write()

    def _write(self) -> None:
        try:
            os.write(self._write_fd, TIME.pack(self._until))
        except BlockingIOError:
            pass  # Thousands are unread: the spawner is gone or stuck, and holds an older, earlier time.

    def descriptor_for_spawner(self) -> int:
        """For a spawner that has just been started; it is told at once what holds now."""
        with self._lock:
            drain(self._read_fd)
            self._write()
            return os.dup(self._read_fd)


def drain(read_fd: int) -> float | None:
    """The last time that was written, if any was since the last look."""
    last = None
    try:
        while data := os.read(read_fd, TIME.size * 512):
            (last,) = TIME.unpack(data[-TIME.size :])
    except BlockingIOError:
        pass
    return last
