"""The named pipe that a file timer server reads, and the requests in it.

Requests. One JSON object a line. Many processes write to one pipe. A write of up to PIPE_BUF bytes is never mixed with
another, so a request is one line of at most that size, newline included. Other programs may still write anything to the
pipe, so the reader checks each line alone and keeps an unfinished one only up to a bound.

The pipe. It is opened for reading and writing and without blocking. So opening never waits for a client, and the pipe
never ends because the last client has closed it. A path is only taken if nothing is there, or a pipe of the same user
that has no reader any more. Anything else at the path is left alone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import stat
import time
import weakref
from dataclasses import dataclass
from operator import itemgetter
from select import PIPE_BUF
from signal import NSIG
from typing import ClassVar

from holdfast.errors import HostError, UserError
from holdfast.timer.api import TimerRequest

logger = logging.getLogger(__name__)

# Every request begins with these bytes and cannot contain them: within a JSON string the quote is escaped.
_REQUEST_BEGINS = b'{"version"'
_KEYS = ("version", "pid", "scope_id", "expiration_time", "signal")
_values_of = itemgetter(*_KEYS)
_parse = json.JSONDecoder().raw_decode
_TYPES = ((int, int, str, float, int), (int, int, str, int, int))

# The largest buffer that the kernel gives to every user. Clients do not wait for room in a full one for long.
_BUFFER_BYTES = 1 << 20
_SECONDS_BETWEEN_WARNINGS = 10.0


@dataclass(frozen=True, slots=True, eq=False, init=False)
class FileTimerRequest(TimerRequest):
    """A request that also says with which signal to end the worker; zero or less means: only report it."""

    version: ClassVar[int] = 1
    signal: int

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        TimerRequest.__init__(self, worker_pid, scope_id, expiration_time)
        object.__setattr__(self, "signal", signal)

    @property
    def worker_pid(self) -> int:
        return int(self.worker_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileTimerRequest) and TimerRequest.__eq__(self, other) and self.signal == other.signal

    __hash__ = TimerRequest.__hash__

    def to_json(self) -> str:
        values = (self.version, self.worker_pid, self.scope_id, self.expiration_time, self.signal)
        return json.dumps(dict(zip(_KEYS, values, strict=True)))


def encode(request: FileTimerRequest) -> bytes:
    """The request as a line that can be written in one piece."""
    if not isinstance(request.scope_id, str):
        raise UserError(f"a timer's scope is a string, not {request.scope_id!r}")
    line = request.to_json().encode() + b"\n"
    if len(line) > PIPE_BUF:
        what = f"a timer request with a scope that begins with {request.scope_id[:40]!r}"
        raise RuntimeError(f"{what} has {len(line)} bytes, more than the {PIPE_BUF} that a pipe takes in one piece")
    return line


def decode(line: bytes) -> FileTimerRequest:
    """The request in a line, or ValueError with what is wrong with it."""
    try:
        fields, end = _parse(text := line.decode().strip())
        values = _values_of(fields)
    except RecursionError:
        raise ValueError("nested too deeply")
    except (KeyError, TypeError):
        raise ValueError(f"not a JSON object with {', '.join(_KEYS)}")
    if end != len(text):
        raise ValueError("more than one JSON object")
    if tuple(map(type, values)) not in _TYPES:
        raise ValueError("a field has the wrong type")
    version, pid, scope, expiration_time, signal = values
    if version != FileTimerRequest.version:
        raise ValueError(f"version {version} is not known")
    if abs(pid) >= 2**31 or signal >= NSIG:
        raise ValueError(f"pid {pid} or signal {signal} is out of range")
    return FileTimerRequest(pid, scope, checked_time(expiration_time), signal)


def checked_time(expiration_time: float) -> float:
    """A time that can be compared. One that is too large for a float never comes."""
    try:
        time_s = float(expiration_time)
    except OverflowError:
        return math.inf if expiration_time > 0 else -math.inf
    if math.isnan(time_s):
        raise ValueError("expiration_time is not a number")
    return time_s


def request_in(junk: bytes) -> bytes:
    """The last request that a line of junk may end with: a torn line swallows the newline of the next."""
    begin = junk.rfind(_REQUEST_BEGINS)
    return junk[begin:] if begin > 0 else b""


def split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """The complete lines, and the unfinished one. Of a line that is too long only the end is kept: it is junk, but a
    request may follow it."""
    *lines, rest = data.split(b"\n")
    return lines, rest[-PIPE_BUF:]


class RequestPipe:
    """The server's end of the pipe."""

    def __init__(self, path: str) -> None:
        self.path = path
        _make_way(path)
        self._fd = _make(path)
        self._closer = weakref.finalize(self, os.close, self._fd)
        self._closer.atexit = False
        self._rest = b""
        self._junk_lines = 0
        self._next_warning_s = 0.0

    def fileno(self) -> int:
        return self._fd

    def read(self) -> list[FileTimerRequest]:
        try:
            data = os.read(self._fd, _BUFFER_BYTES)
        except BlockingIOError:
            return []
        lines, self._rest = split_lines(self._rest + data)
        requests = []
        for line in lines:
            try:
                requests.append(decode(line))
            except ValueError as error:
                requests += self._salvage(line, error)
        return requests

    def _salvage(self, line: bytes, error: ValueError) -> list[FileTimerRequest]:
        """The request that a junk line has swallowed, if any. Junk is reported at most every few seconds."""
        now_s = time.monotonic()
        self._junk_lines += bool(line)
        if line and now_s >= self._next_warning_s:
            self._next_warning_s = now_s + _SECONDS_BETWEEN_WARNINGS
            what = f"a line in the timer pipe {self.path} that is not a request ({self._junk_lines} so far)"
            logger.warning("skipped %s: %r: %s", what, line[:80], error)
        try:
            return [decode(request_in(line))]
        except ValueError:
            return []

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


def _make_way(path: str) -> None:
    """Remove this user's pipe if it has no reader; refuse to touch anything else."""
    try:
        found = os.lstat(path)
        if not stat.S_ISFIFO(found.st_mode):
            raise UserError(f"the timer file {path} exists and is not a named pipe; it is left alone")
        if found.st_uid != os.geteuid():
            raise UserError(f"the timer pipe {path} belongs to user {found.st_uid}; it is left alone")
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW))
            raise UserError(f"the timer pipe {path} is in use by another timer server")
        except OSError as error:
            if error.errno != errno.ENXIO:  # It has no reader.
                raise
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise HostError(f"the timer file {path} cannot be used: {error.strerror}")


def _make(path: str) -> int:
    try:
        os.mkfifo(path, 0o600)
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise HostError(f"the timer pipe {path} cannot be made: {error.strerror}")
    found = os.fstat(fd)
    if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise HostError(f"the timer pipe {path} was replaced by another program while it was made")
    try:
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _BUFFER_BYTES)
    except OSError:
        logger.debug("the timer pipe keeps the default size: the user's limit for pipe buffers is used up")
    return fd
