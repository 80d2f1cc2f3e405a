"""The one wait of a deciding loop: descriptors, a deadline, signals; and for how long the loop has been busy.

A loop that waits in `wait_readable` is healthy however long that takes, because any event wakes it. Anywhere else it is
busy and nothing wakes it: a hook that does not return, a plug-in's call that blocks.
`BusyTime` knows since when. The loop marks each wait, which costs nothing more; no thread has to wake it to find out.
It marks the hooks of an agent, too, which others write and which may block: the health check counts the time in them,
the heartbeats of the node do not (`stuck_for_s`).
Busy time is measured by thread, because one process may have several agents, each in its own thread.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from holdfast import signals

_here = threading.local()


class BusyTime:
    """For how long one loop has not waited. Any thread may ask."""

    def __init__(self) -> None:
        self._busy_since: float | None = time.monotonic()
        self._is_in_hook = False
        self._hook_ended_at = 0.0

    @contextmanager
    def measured_here(self) -> Iterator[None]:
        """Within this block, the waits of this thread count."""
        before = getattr(_here, "busy_time", None)
        _here.busy_time = self
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            _here.busy_time = before

    def busy_for_s(self) -> float:
        """How long the loop has not come to wait; 0 while it waits."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def stuck_for_s(self) -> float:
        """The same, but time in hooks does not count."""
        if self._is_in_hook:
            return 0.0
        return min(self.busy_for_s(), time.monotonic() - self._hook_ended_at)

    @contextmanager
    def _in_hook(self) -> Iterator[None]:
        was_in_hook, self._is_in_hook = self._is_in_hook, True
        try:
            yield
        finally:
            self._hook_ended_at = time.monotonic()
            self._is_in_hook = was_in_hook

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._busy_since = None
        try:
            yield
        finally:
            self._busy_since = time.monotonic()


def _waiting() -> AbstractContextManager[None]:
    """This thread waits: any event wakes it."""
    busy: BusyTime | None = getattr(_here, "busy_time", None)
    return nullcontext() if busy is None else busy._waiting()


def in_hook() -> AbstractContextManager[None]:
    """This thread's loop is in the hands of code that others wrote, which may block."""
    busy: BusyTime | None = getattr(_here, "busy_time", None)
    return nullcontext() if busy is None else busy._in_hook()


def wait_readable(
    fds: Iterable[int], timeout_s: float | None, *, writable: Iterable[int] = (), new_signals_only: bool = False
) -> None:
    """Wait until a descriptor can be read, one of `writable` can be written as well, a signal has been noted, or the
    time is up (None: no limit).

    Whoever is already stopping everything passes `new_signals_only`: a signal that was noted before stays
    noted for later and does not cut the wait short.
    """
    # Other threads leave the inbox alone: a wake-up that they took would be missing in the main thread.
    box = signals.inbox() if signals.in_main_thread() else None
    if box is not None and box.has_pending and not new_signals_only:
        return
    poller = select.poll()
    for fd in (*fds, *([box.fileno()] if box else [])):
        poller.register(fd, select.POLLIN)
    for fd in writable:
        poller.register(fd, select.POLLIN | select.POLLOUT)
    with _waiting():
        poller.poll(None if timeout_s is None else max(0.0, timeout_s * 1000))
    if box is not None:
        box.clear_wakeups()


def is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


class Wakeup:
    """An eventfd by which any thread wakes a loop. Ringing it after it was closed does nothing."""

    def __init__(self) -> None:
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._fd = fd
        # Without the lock a late ringer could write to whatever file was given the number after the close.
        self._lock = threading.Lock()
        self._closer = weakref.finalize(self, os.close, fd)
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
