"""Calls that block, made in a thread so that the deciding loop can still be woken by a signal."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from holdfast import loop, signals

T = TypeVar("T")


class _Call(Generic[T]):
    """The descriptor becomes readable when the call has ended, well or badly."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._result: T
        self._error: BaseException | None = None
        self.done_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        os.eventfd_write(self.done_fd, 1)  # Last: whoever reads it closes it.

    def has_ended(self) -> bool:
        try:
            return os.eventfd_read(self.done_fd) > 0
        except BlockingIOError:
            return False

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result


def call_interruptibly(function: Callable[..., T], *args: Any, timeout_s: float | None = None) -> T:
    """What the function returns or raises; a signal that comes meanwhile surfaces as a `SignalException`.

    After a signal, or when the time is up (a TimeoutError), the call is left to itself: it cannot be ended from
    outside, and nobody looks at its result any more.
    """
    call = _Call(lambda: function(*args))
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    threading.Thread(target=call.run, name=f"holdfast-{_name(function)}", daemon=True).start()
    while not call.has_ended():
        signals.inbox().raise_pending()
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError(f"{_name(function)} took more than {timeout_s:g} s")
        loop.wait_readable([call.done_fd], left_s)
    os.close(call.done_fd)
    return call.result()


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", "call"))
