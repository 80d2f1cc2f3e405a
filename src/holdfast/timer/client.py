"""The worker's end of timers: requests, the clients that send them, and `expires`, which most programs use.

A client sends "scope S ends by time T", or that S has ended. Times in requests are seconds since the epoch; a negative
one is a release.

The format on a named pipe: one JSON object a line. Many processes write to one pipe. A write of up to PIPE_BUF bytes is
never mixed with another, so a request is one line of at most that size, newline included.
"""

from __future__ import annotations

import abc
import errno
import json
import os
import signal as signals
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager, contextmanager
from dataclasses import astuple, dataclass
from select import PIPE_BUF
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast.errors import UserError
from holdfast.log import Logger

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

logger = Logger(__name__)

_KEYS = ("version", "pid", "scope_id", "expiration_time", "signal")
# Long enough for a server that is being replaced, short enough not to hold up a worker whose server is gone.
_CLIENT_PAUSES_S = (0.02, 0.04, 0.08, None)
_PASSING_ERRORS = (errno.ENOENT, errno.ENXIO, errno.EAGAIN, errno.EPIPE)
# The kernel's own texts for these are misleading here: "no such device", "resource temporarily unavailable".
_REASONS = {errno.ENXIO: "the pipe has no reader", errno.EAGAIN: "the pipe stays full"}


@dataclass(frozen=True, slots=True, eq=False)
class TimerRequest:
    """Arms the timer of a scope, or releases it if the expiration time is negative."""

    worker_id: Any
    scope_id: str
    expiration_time: float

    def __eq__(self, other: object) -> bool:
        """Also with a request of a subclass."""
        return isinstance(other, TimerRequest) and astuple(self) == astuple(other)

    def __hash__(self) -> int:
        return hash(astuple(self))


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

    def to_json(self) -> str:
        return json.dumps(dict(zip(_KEYS, (self.version, *astuple(self)), strict=True)))


def encode(request: FileTimerRequest) -> bytes:
    """The request as a line that can be written in one piece."""
    if not isinstance(request.scope_id, str):
        raise UserError(f"a timer's scope is a string, not {request.scope_id!r}")
    line = request.to_json().encode() + b"\n"
    if len(line) > PIPE_BUF:
        what = f"a timer request with a scope that begins with {request.scope_id[:40]!r}"
        raise RuntimeError(f"{what} has {len(line)} bytes, more than the {PIPE_BUF} that a pipe takes in one piece")
    return line


class TimerClient(abc.ABC):
    """The worker's end."""

    is_unserved = False  # No server took the last request.

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Arm the timer of `scope_id`; if it is armed already, move its deadline."""

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """Disarm the timer of `scope_id`; harmless if it is not armed."""


class LocalTimerClient(TimerClient):
    """Sends requests for the calling process through a multiprocessing queue."""

    def __init__(self, mp_queue: Queue[TimerRequest]) -> None:
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class FileTimerClient(TimerClient):
    """Sends requests for the calling process through a named pipe. `signal` is what the server sends to this process if
    it overruns; zero or less means: only report it."""

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        if signal >= signals.NSIG:
            raise UserError(f"there is no signal {signal}")
        self._file_path = os.fspath(file_path)
        self._signal = int(signal)

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, expiration_time, self._signal))

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


_timer_client: TimerClient | None = None


def configure(timer_client: TimerClient | None) -> None:
    """Set the client that `expires` uses when it is given none; None takes it away again."""
    global _timer_client
    _timer_client = timer_client


def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> _GeneratorContextManager[None]:
    """A block (or, as a decorator, a function) that must end within `after` seconds. By default the scope is named for
    the line that calls `expires`. Entering a scope again, as recursion does, moves its deadline; leaving disarms it."""
    if scope is None:
        caller = sys._getframe(1)
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    return _expires(after, scope, client)


@contextmanager
def _expires(after: float, scope: str, client: TimerClient | None) -> Iterator[None]:
    client = client or _timer_client
    if client is None:
        raise RuntimeError("no timer client: call holdfast.timer.configure() first, or pass client= to expires()")
    is_armed = _is_sent(client, lambda: client.acquire(scope, time.time() + after))
    try:
        yield
    finally:
        if is_armed:
            _is_sent(client, lambda: client.release(scope))


def _is_sent(client: TimerClient, send: Callable[[], None]) -> bool:
    """A missing server does not end the work. It causes one warning for each client, and another one after requests
    have arrived in between."""
    was_unserved = getattr(client, "is_unserved", False)
    try:
        send()
    except BrokenPipeError as error:
        client.is_unserved = True
        if not was_unserved:
            logger.warning("timers are not watched: %s", error)
        return False
    client.is_unserved = False
    return True
