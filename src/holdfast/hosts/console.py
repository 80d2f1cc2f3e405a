"""The console of a command that shows the output of a job on many hosts.

A thread writes it, so that a console that is not read holds up nothing else. Each host has one batch here at most: its
transport fetches the next one when this one is written.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from holdfast import stdio
from holdfast.hosts.host_agent import Batch
from holdfast.hosts.host_lines import HostLines

_PATIENCE_S = 5.0
_FDS = {"stdout": 1, "stderr": 2}


class EngineConsole:
    """`has_prefixes`: the lines of workers begin with their ranks, so a terminal can sort them."""

    def __init__(self, *, has_prefixes: bool) -> None:
        self._views = {fd: _view(fd, has_prefixes) for fd in _FDS.values()}
        if _file_behind(_FDS["stdout"]) == _file_behind(_FDS["stderr"]):  # A terminal, as a rule.
            self._views[_FDS["stderr"]] = self._views[_FDS["stdout"]]
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._unwritten: deque[Callable[[], None]] = deque()  # What to call when a batch is written.
        self._is_abandoned = False
        self._moved_at = time.monotonic()
        self._thread = threading.Thread(target=self._write_all, name="holdfast-console", daemon=True)
        self._thread.start()

    def open(self, host: str) -> None:
        self._acts.put(partial(self._views[_FDS["stderr"]].open, host))

    def write(self, host: str, batch: Batch, when_written: Callable[[], None]) -> None:
        """`when_written` is called in the console's thread."""
        if self._is_abandoned:
            when_written()
            return
        self._unwritten.append(when_written)
        self._acts.put(partial(self._show, host, batch))

    def close_host(self, host: str) -> None:
        self._acts.put(partial(self._close_host, host))

    @property
    def is_stuck(self) -> bool:
        return bool(self._unwritten) and time.monotonic() > self._moved_at + _PATIENCE_S

    def abandon(self) -> None:
        """Show no more of the hosts. What is behind output that no reader takes can be learned then."""
        self._is_abandoned = True
        self._tell_written()

    def close(self) -> None:
        """Wait for as long as something is written, and some seconds more."""
        self._acts.put(None)
        began = time.monotonic()
        while self._thread.is_alive() and (left_s := max(began, self._moved_at) + _PATIENCE_S - time.monotonic()) > 0:
            self._thread.join(left_s)

    # In the thread.

    def _write_all(self) -> None:
        while True:
            deadline = min((each for view in self._views.values() if (each := view.next_deadline())), default=None)
            try:
                act = self._acts.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._pass_time()
                continue
            if act is None:
                break
            act()
        self._pass_time(is_over=True)

    def _show(self, host: str, batch: Batch) -> None:
        for stream, lines in batch:
            self._put(_FDS[stream], partial(self._views[_FDS[stream]].add_lines, host, stream, lines))
        self._tell_written(1)

    def _close_host(self, host: str) -> None:
        for fd, view in self._views.items():
            self._put(fd, partial(view.close, host))

    def _pass_time(self, *, is_over: bool = False) -> None:
        for fd, view in self._views.items():
            self._put(fd, partial(_due, view, is_over))

    def _tell_written(self, count: int | None = None) -> None:
        """Also in the thread that abandons the console."""
        while self._unwritten and count != 0:
            count = None if count is None else count - 1
            try:
                self._unwritten.popleft()()
            except IndexError:  # The other thread was faster.
                return

    def _put(self, fd: int, lines_at: Callable[[float], bytes]) -> None:
        self._moved_at = time.monotonic()
        try:
            if not stdio.is_in_line(fd):  # Another text may have ended an open line.
                self._views[fd].lose_line()
            left = memoryview(lines_at(self._moved_at))
            while left and not self._is_abandoned:
                written = stdio.write_part(fd, left, may_wait=True)
                self._moved_at, left = time.monotonic(), left[written:]
        except OSError:
            pass  # No reader is left. The job goes on.
        finally:
            stdio.give_up(fd)


def _due(view: HostLines, is_over: bool, now: float) -> bytes:
    return view.pass_time(float("inf") if is_over else now)


def _view(fd: int, has_prefixes: bool) -> HostLines:
    can_erase = os.environ.get("TERM", "dumb") != "dumb"
    return HostLines(sorts_by_rank=has_prefixes and os.isatty(fd), can_erase=can_erase)


def _file_behind(fd: int) -> object:
    try:
        return stdio.file_behind(fd)
    except OSError:  # Closed.
        return fd
