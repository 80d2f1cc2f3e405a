"""The file of `--events-file`: lines that a thread appends, so that the agent never waits for a disk.

Each line is one write, so several agents may share the file. A line that the disk does not take, or not in time, is
lost. The first loss of a series causes a warning: events never break a run.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque

from holdfast.errors import UserError
from holdfast.log import Logger

logger = Logger(__name__)

_QUEUE_CHARS = 1 << 20
_CLOSE_LIMIT_S = 2.0


def check_path(path: str) -> None:
    """Raises UserError if there can be no such file; for use before anything is started."""
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory):
        raise UserError(f"there is no directory {directory}")
    if os.path.isdir(path):
        raise UserError(f"{path} is a directory, not a file")


class EventsFile:
    """The first line opens the file, and starts a thread that ends when all lines are written."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._lines: deque[str] = deque()
        self._chars = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._fd: int | None = None
        self._has_dropped = False  # The queue was full.
        self._is_failing = False  # The last write failed.
        self._has_torn_line = False

    def put(self, line: str) -> None:
        with self._lock:
            if self._chars + len(line) > _QUEUE_CHARS:
                if not self._has_dropped:
                    self._warn("it does not take them in time")
                self._has_dropped = True
                return
            self._lines.append(line)
            self._chars += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="holdfast-events", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # A process at its limit; the next line tries again.
                    self._thread = None

    def close(self) -> None:
        """Wait until all lines are written, but not for long."""
        thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_LIMIT_S)
        if self._lines:
            self._warn("it does not take them in time")
        if self._thread is None and self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _warn(self, why: str) -> None:
        logger.warning("events are lost: cannot write to %s: %s", self.path, why)

    # In the thread.

    def _write(self) -> None:
        while True:
            with self._lock:
                if not self._lines:
                    self._thread = None
                    return
                line = self._lines[0]
            try:
                self._append(line)
                self._is_failing = False
            except OSError as error:
                if not self._is_failing:
                    self._warn(error.strerror or str(error))
                self._is_failing = True
            with self._lock:
                self._lines.popleft()
                self._chars -= len(line)

    def _append(self, text: str) -> None:
        line = (text + "\n").encode("utf-8", "backslashreplace")
        if self._has_torn_line:
            line = b"\n" + line  # The beginning of a lost line could not be taken back. End that line first.
        if self._fd is None:
            # Without O_NONBLOCK, opening a FIFO without a reader would block. Regular files ignore it.
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        written = os.write(self._fd, line)
        self._has_torn_line = written < len(line) and not _take_back(self._fd, written)
        if written < len(line):
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written")


def _take_back(fd: int, size: int) -> bool:
    """Remove the last bytes that were written, unless another process has written behind them. False for a pipe."""
    try:
        end = os.lseek(fd, 0, os.SEEK_CUR)
        if os.fstat(fd).st_size == end:
            os.ftruncate(fd, end - size)
    except OSError:
        return False
    return True
