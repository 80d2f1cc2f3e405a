"""Timers over a named pipe: for any process of the host that knows the pipe's path.

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
import io
import json
import math
import os
import select
import signal as signals
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from select import PIPE_BUF
from typing import Any, ClassVar

from holdfast.errors import HostError, UserError
from holdfast.log import DEBUG, WARNING, Logger
from holdfast.loop import Wakeup
from holdfast.timer import debug_info_logging
from holdfast.timer.api import RequestQueue, TimerClient, TimerRequest
from holdfast.timer.processes import ProcessTimerServer

logger = Logger(__name__)

# Every request begins with these bytes and cannot contain them: within a JSON string the quote is escaped.
_REQUEST_BEGINS = b'{"version"'
_KEYS = ("version", "pid", "scope_id", "expiration_time", "signal")
_values_of = itemgetter(*_KEYS)
_TYPES = ((int, int, str, float, int), (int, int, str, int, int))

# The largest buffer that the kernel gives to every user. Clients do not wait for room in a full one for long.
_BUFFER_BYTES = 1 << 20

# Long enough for a server that is being replaced, short enough not to hold up a worker whose server is gone.
_CLIENT_PAUSES_S = (0.02, 0.04, 0.08, None)
_PASSING_ERRORS = (errno.ENOENT, errno.ENXIO, errno.EAGAIN, errno.EPIPE)
# The kernel's own texts for these are misleading here: "no such device", "resource temporarily unavailable".
_REASONS = {errno.ENXIO: "the pipe has no reader", errno.EAGAIN: "the pipe stays full"}


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

    def _values(self) -> tuple[Any, ...]:
        return self.version, self.worker_pid, self.scope_id, self.expiration_time, self.signal

    def to_json(self) -> str:
        return json.dumps(dict(zip(_KEYS, self._values(), strict=True)))


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
        values = _values_of(json.loads(line.decode()))
    except RecursionError:
        raise ValueError("nested too deeply")
    except (KeyError, TypeError):
        raise ValueError(f"not a JSON object with {', '.join(_KEYS)}")
    if tuple(map(type, values)) not in _TYPES:
        raise ValueError("a field has the wrong type")
    version, pid, scope, expiration_time, signal = values
    if version != FileTimerRequest.version:
        raise ValueError(f"version {version} is not known")
    if abs(pid) >= 2**31 or signal >= signals.NSIG:
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


class FileTimerClient(TimerClient):
    """Sends requests for the calling process. `signal` is what the server sends to this process if it overruns; zero
    or less means: only report it."""

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        if signal >= signals.NSIG:
            raise UserError(f"there is no signal {signal}")
        self._file_path = os.fspath(file_path)
        self._signal = int(signal)

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, checked_time(expiration_time), self._signal))

    def release(self, scope_id: str) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, -1))

    def _send(self, request: FileTimerRequest) -> None:
        line = encode(request)
        # If no server took the last request of `expires`, this one does not wait for a server again.
        for pause_s in (None,) if self.is_unserved else _CLIENT_PAUSES_S:
            try:
                _write(self._file_path, line)
                return
            except OSError as error:
                if pause_s is None or error.errno not in _PASSING_ERRORS:
                    why = _REASONS.get(error.errno or 0) or error.strerror or str(error)
                    raise BrokenPipeError(errno.EPIPE, f"no timer server takes requests ({why})", self._file_path)
            time.sleep(pause_s)


def _write(path: str, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a named pipe")
        os.write(fd, line)
    finally:
        os.close(fd)


class RequestPipe(RequestQueue):
    """The server's end of the pipe."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = io.FileIO(_make(path))
        self._wakeup = Wakeup()
        self._poll = select.poll()
        for each in (self._file, self._wakeup):
            self._poll.register(each, select.POLLIN)
        self._rest = b""
        self._has_met_junk = False

    def fileno(self) -> int:
        return self._file.fileno()

    def size(self) -> int:
        return 1  # A pipe does not tell.

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """All requests in the pipe, whatever `size` says."""
        self._poll.poll(max(0.0, timeout) * 1000)
        self._wakeup.clear()
        data = self._file.read(_BUFFER_BYTES) or b""  # None if there is nothing.
        lines, self._rest = split_lines(self._rest + data)
        requests: list[TimerRequest] = []
        for line in lines:
            try:
                requests.append(decode(line))
            except ValueError as error:
                requests += self._salvage(line, error)
        return requests

    def _salvage(self, line: bytes, error: ValueError) -> list[FileTimerRequest]:
        """The request that a junk line has swallowed, if any. Only the first junk line causes a warning."""
        if line:
            level = DEBUG if self._has_met_junk else WARNING
            self._has_met_junk = True
            logger.log(level, "skipped a line in %s that is not a request: %r: %s", self.path, line[:80], error)
        try:
            return [decode(request_in(line))]
        except ValueError:
            return []

    def remove(self) -> None:
        """Remove the pipe, unless the path leads to another one by now."""
        try:
            if os.path.samestat(os.lstat(self.path), os.fstat(self.fileno())):
                os.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("cannot remove the timer pipe %s: %s", self.path, error)

    def wake(self) -> None:
        self._wakeup.wake()

    def close(self) -> None:
        self._wakeup.close()
        self._file.close()


def _make(path: str) -> int:
    try:
        _remove_stale(path)
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


def _remove_stale(path: str) -> None:
    """Remove this user's pipe if it has no reader; refuse to touch anything else."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
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


class FileTimerServer(ProcessTimerServer):
    """Signals the processes that overrun a timer. Calls `log_event(name, request)` for "watchdog started", "watchdog
    stopped", "timer expired" and "kill worker process". `dump_stacks(pid)` returns text for the log (from py-spy)."""

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
        *,
        dump_stacks: Callable[[int], str] | None = None,
    ) -> None:
        self._run_id = run_id
        self._log_event = log_event or (lambda name, request: None)
        self._is_closed = False
        self._pipe = RequestPipe(os.fspath(file_path))
        super().__init__(self._pipe, max_interval, daemon, dump_stacks)

    def start(self) -> None:
        super().start()
        self._tell("watchdog started", None)

    def stop(self) -> None:
        """End the thread at once and remove the pipe; the server cannot be started again."""
        super().stop()
        if not self._is_closed:
            self._is_closed = True
            self._pipe.remove()
            self._tell("watchdog stopped", None)
        if self._watchdog_thread is None:  # One that is stuck in a listener keeps the descriptors until it is done.
            self._pipe.close()

    def run_once(self) -> None:
        """Let the thread finish its turn, if there is one, then take what is in the pipe, do one more, and stop."""
        self._end_thread(None)
        if not self._is_closed:
            self._fetch(0.0)
            self._reap_expired()
        self.stop()

    def get_last_progress_time(self) -> int:
        """When the last turn ended, in whole seconds since the epoch; now, if there is no thread to take turns."""
        idle_s = 0.0 if self._watchdog_thread is None else time.monotonic() - self._turn_ended_s
        return int(time.time() - idle_s)

    def _condemned(self, expired: dict[int, list[Any]]) -> Iterator[int]:
        as_json = {pid: [timer.to_json() for timer in timers] for pid, timers in expired.items()}
        debug_info_logging.log_debug_info_for_expired_timers(self._run_id, as_json)
        return super()._condemned(expired)

    def _tell(self, name: str, request: FileTimerRequest | None) -> None:
        """An error in the listener does not end the watch."""
        try:
            self._log_event(name, request)
        except Exception:
            logger.exception("the listener for timer events failed at %r", name)
