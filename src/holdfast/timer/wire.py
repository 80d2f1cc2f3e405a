"""What crosses the named pipe: one JSON object a line, no line longer than the kernel writes in one piece.

Many processes write to one pipe. A write of up to PIPE_BUF bytes is never mixed with another, so a request is one
line of at most that size, newline included. Others may still write what they like to the pipe: a reader takes
lines one by one, judges each alone, and keeps an unfinished one only up to a bound.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from operator import itemgetter
from select import PIPE_BUF
from signal import NSIG

from holdfast.errors import UserError
from holdfast.timer.api import TimerRequest

VERSION = 1
# Every request begins with these bytes, and none has them inside: within a JSON string the quote is escaped.
_REQUEST_BEGINS = b'{"version"'
_KEYS = ("version", "pid", "scope_id", "expiration_time", "signal")
_values_of = itemgetter(*_KEYS)
_parse = json.JSONDecoder().raw_decode
_TYPES = ((int, int, str, float, int), (int, int, str, int, int))
_LARGEST_PID = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False, init=False)
class FileTimerRequest(TimerRequest):
    """A request that also says with which signal to end the worker; zero or less means: only report it."""

    signal: int
    version: int

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        TimerRequest.__init__(self, worker_pid, scope_id, expiration_time)
        object.__setattr__(self, "signal", signal)
        object.__setattr__(self, "version", VERSION)

    @property
    def worker_pid(self) -> int:
        pid: int = self.worker_id
        return pid

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FileTimerRequest):
            return False
        return TimerRequest.__eq__(self, other) and (self.version, self.signal) == (other.version, other.signal)

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
        raise RuntimeError(
            f"a timer request is {len(line)} bytes long, more than the {PIPE_BUF} that a pipe takes in one piece; "
            f"its scope begins with {request.scope_id[:40]!r}"
        )
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
    if version != VERSION:
        raise ValueError(f"version {version} is not known")
    if abs(pid) > _LARGEST_PID or signal >= NSIG:
        raise ValueError(f"pid {pid} or signal {signal} is out of range")
    return FileTimerRequest(pid, scope, checked_time(expiration_time), signal)


def checked_time(expiration_time: float) -> float:
    """A time that can be compared; what is too large for a clock never comes."""
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


class LineSplitter:
    """Cuts a stream of bytes into lines and keeps what has no end yet."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now, without their newlines.

        Of a line that is too long only the end is kept: it is junk, but a request may follow it.
        """
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-PIPE_BUF:]
        return lines
