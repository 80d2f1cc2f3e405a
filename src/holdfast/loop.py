"""The one wait of a deciding loop: descriptors, a deadline, signals; and for how long the loop has been busy.

A loop that waits in `wait_readable` is healthy however long that takes, because any event wakes it. Anywhere else it is
busy and nothing wakes it: a hook that does not return, a plug-in's call that blocks. `BusyTime` measures that, by
thread, because one process may have several agents, each in its own thread. The loop marks the hooks of an agent, too,
which others write and which may block: the health check counts the time in them, the heartbeats of the node do not
(`stuck_for_s`).
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from holdfast import signals

T = TypeVar("T")

_LONGEST_POLL_MS = 2.0**30  # It takes no more than 24 days; a caller looks at the clock, and waits again.

_here = threading.local()


class BusyTime:
    """For how long one loop has not waited. Any thread may ask."""

    def __init__(self) -> None:
        self.since: float | None = time.monotonic()  # None while the loop waits.
        self.is_in_hook = False
        self.hook_ended_at = 0.0

    @contextmanager
    def measured_here(self) -> Iterator[None]:
        """Within this block, the waits of this thread count."""
        before = getattr(_here, "busy_time", None)
        _here.busy_time = self
        self.since = time.monotonic()
        try:
            yield
        finally:
            _here.busy_time = before

    def busy_for_s(self) -> float:
        since = self.since
        return 0.0 if since is None else time.monotonic() - since

    def stuck_for_s(self) -> float:
        """The same, but time in hooks does not count."""
        return 0.0 if self.is_in_hook else min(self.busy_for_s(), time.monotonic() - self.hook_ended_at)


def _busy_time() -> BusyTime:
    """That of this thread's loop; a new one that nothing reads if none is measured."""
    return getattr(_here, "busy_time", None) or BusyTime()


@contextmanager
def in_hook() -> Iterator[None]:
    """This thread's loop is in the hands of code that others wrote, which may block."""
    busy = _busy_time()
    was_in_hook, busy.is_in_hook = busy.is_in_hook, True
    try:
        yield
    finally:
        busy.hook_ended_at = time.monotonic()
        busy.is_in_hook = was_in_hook


def wait_readable(
    fds: Iterable[int], timeout_s: float | None, *, writable: Iterable[int] = (), new_signals_only: bool = False
) -> None:
    """Wait until a descriptor can be read, one of `writable` can be written as well, a signal has been noted, or the
    time is up (None: no limit).

    A caller that is already stopping everything passes `new_signals_only`: a signal that was noted before stays
    noted and does not cut the wait short.
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
    busy_time = _busy_time()
    busy_time.since = None
    try:
        poller.poll(None if timeout_s is None else min(max(0.0, timeout_s * 1000), _LONGEST_POLL_MS))
    finally:
        busy_time.since = time.monotonic()
    if box is not None:
        box.clear_wakeups()


def is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


class Wakeup:
    """An eventfd with which any thread wakes a loop. After `close`, `wake` does nothing."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Without the lock a late `wake` could write to another file that got the number after the close.
        self._lock = threading.Lock()
        self._closer = weakref.finalize(self, os.close, self._fd)
        self._closer.atexit = False

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        with self._lock:
            if self._closer.alive:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next `wake`."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            self._closer()


class Mailbox(Generic[T]):
    """From any thread to the one loop that takes and decides; readable when there is something to take."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[T] = []
        self._is_closed = False
        self._wakeup = Wakeup()

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def put(self, item: T) -> bool:
        """False if the loop has ended."""
        with self._lock:
            if not self._is_closed:
                self._items.append(item)
                self._wakeup.wake()
            return not self._is_closed

    def take(self) -> list[T]:
        """What was put since the last call, oldest first."""
        with self._lock:
            self._wakeup.clear()
            items, self._items = self._items, []
            return items

    def close(self) -> None:
        with self._lock:
            self._is_closed = True


_held: weakref.WeakSet[Any] = weakref.WeakSet()


def release_in_children(holder: Any) -> None:
    """Call `holder.release()` in each process that is forked: it must not keep what its parent listens on."""
    _held.add(holder)


def _release() -> None:
    for holder in list(_held):
        holder.release()


os.register_at_fork(after_in_child=_release)


def call_interruptibly(function: Callable[..., T], *args: Any, timeout_s: float | None = None) -> T:
    """Make a blocking call in a thread; a signal that comes meanwhile surfaces as a `SignalException`, and the end of
    the time as a `TimeoutError`. Then the call goes on in its thread, because it cannot be ended from outside, and its
    result is ignored."""
    done = Wakeup()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(*args))
        except BaseException as error:
            errors.append(error)
        done.wake()

    threading.Thread(target=run, name=f"holdfast-{getattr(function, '__name__', 'call')}", daemon=True).start()
    ends_at = None if timeout_s is None else time.monotonic() + timeout_s
    while not results and not errors:
        signals.inbox().raise_pending()
        left_s = None if ends_at is None else ends_at - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError
        wait_readable([done.fileno()], left_s)
    done.close()
    if errors:
        raise errors[0]
    return results[0]
