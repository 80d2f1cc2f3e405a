"""An event that a polling thread can wait for together with its other file descriptors."""

from __future__ import annotations

import os
import threading
import weakref


class Wakeup:
    """An eventfd that may be rung from any thread, and still be rung when it is closed."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Without the lock a late ringer could write to whatever file was given the number after the close.
        self._lock = threading.Lock()
        self._closer = weakref.finalize(self, os.close, self._fd)
        self._closer.atexit = False

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        with self._lock:
            if self._closer.alive:
                os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        """Be silent until the next ring."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass

    def close(self) -> None:
        with self._lock:
            self._closer()
