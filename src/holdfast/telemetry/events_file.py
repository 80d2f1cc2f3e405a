"""The file of `--events-file`: lines that a thread appends.

Each line is one write, so several agents may share the file. A line that the disk does not take, or not in time, is
lost. The first loss of a series causes a warning: events never break a run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from holdfast.errors import UserError
from holdfast.log import Logger
from holdfast.telemetry.background import Background

logger = Logger(__name__)

_LATE = "it does not take them in time"


def check_path(path: str) -> None:
    """Raises UserError if there can be no such file; for use before anything is started."""
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory):
        raise UserError(f"there is no directory {directory}")
    if os.path.isdir(path):
        raise UserError(f"{path} is a directory, not a file")


class EventsFile:
    """The first line opens the file, or makes it."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._background: Background[str] = Background("events", self._write)
        self._has_dropped = False

    def put(self, line: str) -> None:
        if not self._background.put(line) and not self._has_dropped:
            self._has_dropped = True
            self._warn(self._background.problem or _LATE)

    def close(self) -> None:
        """Wait until all lines are written, but not for long."""
        if not self._background.close() and not self._has_dropped:
            self._warn(_LATE)

    def _warn(self, why: str) -> None:
        logger.warning("events are lost: cannot write to %s: %s", self.path, why)

    def _write(self, lines: Iterator[str]) -> None:
        """In the thread."""
        file, is_failing = _LineFile(self.path), False
        for line in lines:
            try:
                file.append(line)
                is_failing = False
            except OSError as error:
                if not is_failing:
                    self._warn(error.strerror or str(error))
                is_failing = True
        file.close()


class _LineFile:
    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None
        self._has_torn_line = False

    def append(self, text: str) -> None:
        line = (text + "\n").encode("utf-8", "backslashreplace")
        if self._has_torn_line:
            line = b"\n" + line  # The beginning of a lost line could not be taken back. End that line first.
        if self._fd is None:
            # Without O_NONBLOCK, opening a FIFO without a reader would block. Regular files ignore it.
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        written = os.write(self._fd, line)
        self._has_torn_line = written < len(line) and not _take_back(self._fd, written)
        if written < len(line):
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


def _take_back(fd: int, size: int) -> bool:
    """Remove the last bytes that were written, unless another process has written behind them. False for a pipe."""
    try:
        end = os.lseek(fd, 0, os.SEEK_CUR)
        if os.fstat(fd).st_size == end:
            os.ftruncate(fd, end - size)
    except OSError:
        return False
    return True
