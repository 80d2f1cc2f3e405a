"""Whether the loop that decides is turning.

That loop sleeps until something happens, so nothing would be proved by how long ago it last did something. What is
proved by the place in which it stands: while it waits (`signals.wait_readable`), any event wakes it, and it is well
however long that takes. Everywhere else it is busy, and nothing wakes it: a hook that does not return, a plug-in's
call that blocks, a standard error that nobody reads. So a loop has a pulse, which knows since when it is busy.

The loop marks each wait, and that is all it costs: nobody has to wake it to find out. A pulse belongs to the
thread that took it, because there may be several agents in one process, each in a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


class Pulse:
    """The pulse of one loop. Any thread may ask for it."""

    def __init__(self) -> None:
        self._busy_since: float | None = time.monotonic()

    @contextmanager
    def taken_here(self) -> Iterator[None]:
        """Within this block the thread's waits are this pulse's."""
        before = getattr(_here, "pulse", None)
        _here.pulse = self
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            _here.pulse = before

    def busy_for_s(self) -> float:
        """How long the loop has not come to wait; 0 while it waits."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @contextmanager
    def _resting(self) -> Iterator[None]:
        self._busy_since = None
        try:
            yield
        finally:
            self._busy_since = time.monotonic()


@contextmanager
def resting() -> Iterator[None]:
    """The thread waits for whatever may happen."""
    pulse: Pulse | None = getattr(_here, "pulse", None)
    if pulse is None:
        yield
        return
    with pulse._resting():
        yield
