"""A thread that handles items in their order, so that the loop which puts them never waits for a disk or a network."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST_ITEMS = 1024
CLOSE_LIMIT_S = 2.0


class Background(Generic[T]):
    """`handle` gets an iterator over the items, which ends with `close`. It is called in a daemon thread."""

    def __init__(self, name: str, handle: Callable[[Iterator[T]], None]) -> None:
        self._items: queue.Queue[T | None] = queue.Queue(_MOST_ITEMS)
        items = iter(self._items.get, None)
        self._thread = threading.Thread(target=handle, args=(items,), name=f"holdfast-{name}", daemon=True)
        self.problem = ""
        try:
            self._thread.start()
        except RuntimeError as error:  # The process has reached a limit.
            self.problem = str(error)

    def put(self, item: T) -> bool:
        """False if the item is lost: the thread hangs, has ended or could not be started."""
        try:
            self._items.put_nowait(item)
        except queue.Full:
            return False
        return self._thread.is_alive()

    def close(self) -> bool:
        """Wait for the thread, but not for long. False if it has not handled all items."""
        until = time.monotonic() + CLOSE_LIMIT_S
        try:
            if self._thread.is_alive():
                self._items.put(None, timeout=CLOSE_LIMIT_S)
                self._thread.join(max(0.0, until - time.monotonic()))
        except queue.Full:
            return False
        return not self._thread.is_alive()
