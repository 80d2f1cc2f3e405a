"""The named pipe that a file timer server reads: making it, reading it, and taking it away again.

It is opened for reading and writing and without blocking. So opening never waits for a client, and the pipe never
ends because the last client has closed it.

A path is only taken if nothing is there, or a pipe of the same user that nobody reads from any more. Whatever else
is found there belongs to somebody and is left alone.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
import weakref

from holdfast.errors import HostError, UserError
from holdfast.timer import wire
from holdfast.timer.wire import FileTimerRequest

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
# The largest buffer that the kernel gives to everybody. Clients do not wait for room in a full one for long.
_BUFFER_BYTES = 1 << 20
_SECONDS_BETWEEN_WARNINGS = 10.0


class RequestPipe:
    """A named pipe of our own, and the requests that come out of it."""

    def __init__(self, path: str) -> None:
        self.path = path
        _make_way(path)
        self._fd = _make(path)
        self._closer = weakref.finalize(self, os.close, self._fd)
        self._closer.atexit = False
        self._splitter = wire.LineSplitter()
        self._junk_lines = 0
        self._next_warning_s = 0.0

    def fileno(self) -> int:
        return self._fd

    def read(self) -> list[FileTimerRequest]:
        """The requests that are in the pipe, up to a bufferful of them."""
        requests: list[FileTimerRequest] = []
        for _ in range(_BUFFER_BYTES // _READ_BYTES):
            data = self._read_some()
            if not data:
                break
            for line in self._splitter.feed(data):
                try:
                    requests.append(wire.decode(line))
                except ValueError as error:
                    requests += self._salvage(line, error)
        return requests

    def remove(self) -> None:
        """Remove the pipe, unless the path leads to another one by now."""
        try:
            if os.path.samestat(os.lstat(self.path), os.fstat(self._fd)):
                os.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("cannot remove the timer pipe %s: %s", self.path, error)

    def close(self) -> None:
        self._closer()

    def _read_some(self) -> bytes:
        try:
            return os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return b""

    def _salvage(self, line: bytes, error: ValueError) -> list[FileTimerRequest]:
        """A line of junk is reported, but if it has swallowed a request, that one counts."""
        if line:
            self._warn(line, error)
        try:
            return [wire.decode(wire.request_in(line))]
        except ValueError:
            return []

    def _warn(self, line: bytes, error: ValueError) -> None:
        self._junk_lines += 1
        now_s = time.monotonic()
        if now_s >= self._next_warning_s:
            self._next_warning_s = now_s + _SECONDS_BETWEEN_WARNINGS
            logger.warning(
                "skipped a line in the timer pipe %s that is not a request (%d so far): %r: %s",
                self.path, self._junk_lines, line[:80], error,
            )  # fmt: skip


def _make_way(path: str) -> None:
    """Remove a pipe of ours that nobody reads from; refuse to touch anything else."""
    try:
        found = os.lstat(path)
        if not stat.S_ISFIFO(found.st_mode):
            raise UserError(f"the timer file {path} exists and is not a named pipe; it is left alone")
        if found.st_uid != os.geteuid():
            raise UserError(f"the timer pipe {path} belongs to user {found.st_uid}; it is left alone")
        if _has_reader(path):
            raise UserError(f"the timer pipe {path} is in use by another timer server")
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise HostError(f"the timer file {path} cannot be used: {error.strerror}")


def _has_reader(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        raise
    return True


def _make(path: str) -> int:
    try:
        os.mkfifo(path, 0o600)
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise HostError(f"the timer pipe {path} cannot be made: {error.strerror}")
    found = os.fstat(fd)
    if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise HostError(f"the timer pipe {path} was replaced by somebody else while it was made")
    _enlarge(fd)
    return fd


def _enlarge(fd: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _BUFFER_BYTES)
    except OSError:
        logger.debug("the timer pipe keeps the usual size; the user's share of pipe buffers is used up")
