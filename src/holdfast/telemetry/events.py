"""Events: what happened in a run, one JSON text each, for programs that watch it.

An event goes to a named destination. Each destination has one logger, `torchelastic-events-<destination>`, which does
not propagate and carries the handler registered under that name:

    null                 discarded without being serialized
    console              standard error
    dynamic_rendezvous   rendezvous events; discarded until a handler is registered for it
    file:<path>          one JSON line an event, appended to that file; several agents may share it

`register_handler` adds more. An event is emitted by the thread that records it, before `record` returns. The loggers
are at level INFO whatever LOGLEVEL says: that variable is about log lines, not about events.

Events never break a run. Only a destination that does not exist is an error for the caller; a handler that fails
causes one warning.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from functools import cache
from typing import ClassVar, Self

from holdfast.errors import UserError
from holdfast.frozen import dataclass, field, fields_of
from holdfast.log import Logger
from holdfast.log_lines import StderrHandler

__all__ = [
    "Event", "EventMetadataValue", "EventSource", "JsonLinesHandler", "NodeState", "RdzvEvent", "check_destination",
    "construct_and_record_rdzv_event", "get_logging_handler", "log_handlers", "record", "record_rdzv_event",
    "register_handler",
]  # fmt: skip

EventMetadataValue = str | int | float | bool | None
HandlerOrFactory = logging.Handler | Callable[[], logging.Handler]

_FILE_PREFIX = "file:"
_LOGGER_PREFIX = "torchelastic-events-"
_RDZV_DESTINATION = "dynamic_rendezvous"
_HOSTNAME_PATIENCE_S = 1.0
_QUEUE_CHARS = 1 << 20
_PATIENCE_S = 2.0  # How long the end of a run waits for a disk that takes nothing.

_log = Logger(__name__)


class EventSource(StrEnum):
    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(StrEnum):
    """The state of a node when it recorded a rendezvous event."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class _JsonEvent:
    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        # A metadata value that JSON does not know (a path, a date) is sent as text.
        return json.dumps(fields_of(self), default=str)

    @classmethod
    def deserialize(cls, data: str | Self) -> Self:
        if isinstance(data, cls):
            return data
        enums = {"source": EventSource, "node_state": NodeState}
        try:
            values = json.loads(str(data))
            for name in enums.keys() & set(cls.__match_args__):
                values[name] = enums[name][values[name]]
            return cls(**values)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"not a serialized {cls.__name__} ({error!r}): {str(data)[:200]!r}") from error


@dataclass(slots=True)
class Event(_JsonEvent):
    """An event of an agent or a worker. `timestamp` is Unix time in seconds; 0 means unknown."""

    name: str
    source: EventSource
    timestamp: float = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)


@dataclass(slots=True)
class RdzvEvent(_JsonEvent):
    """An event of a node during its rendezvous."""

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""


class LineFile:
    """Appends lines to a file, each with one write, so that several writers never mix lines.

    The file is opened by the first line. A line that cannot be written is dropped, and its beginning is taken back; the
    first of a series of failures causes a warning.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._fd: int | None = None
        self._is_failing = False
        self._has_torn_line = False

    def append(self, text: str) -> None:
        line = (text + "\n").encode("utf-8", "backslashreplace")
        if self._has_torn_line:
            line = b"\n" + line  # Its beginning could not be taken back. End that line first.
        try:
            if self._fd is None:
                self._fd = _open_for_append(self.path)
            written = os.write(self._fd, line)
            self._has_torn_line = False
            if written < len(line):
                self._has_torn_line = not _take_back(self._fd, written)
                raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written")
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                _log.warning("events are lost: cannot write to %s: %s", self.path, error.strerror or error)
            self._is_failing = True

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _take_back(fd: int, size: int) -> bool:
    """Remove the last bytes that were written, unless another process has written behind them. False for a pipe."""
    try:
        end = os.lseek(fd, 0, os.SEEK_CUR)
        if os.fstat(fd).st_size == end:
            os.ftruncate(fd, end - size)
    except OSError:
        return False
    return True


class BackgroundFile:
    """Lines for a file, written by a thread that ends when none is left: nothing waits for the file. Lines that a full
    or failing disk does not take, or not in time, are lost, with one warning."""

    def __init__(self, path: str) -> None:
        self._file = LineFile(path)
        self._lines: deque[str] = deque()
        self._chars = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_dropped = False

    def put(self, line: str) -> None:
        with self._lock:
            if self._chars + len(line) > _QUEUE_CHARS:
                if not self._has_dropped:
                    _log.warning("events are lost: %s does not take them in time", self._file.path)
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

    def _write(self) -> None:
        while True:
            with self._lock:
                if not self._lines:
                    self._thread = None
                    return
                line = self._lines[0]
            self._file.append(line)
            with self._lock:
                self._lines.popleft()
                self._chars -= len(line)

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Wait until all lines are written, but not for long."""
        thread = self._thread
        if thread is not None:
            thread.join(patience_s)
        if self._thread is None:
            self._file.close()
        if self._lines:
            _log.warning("events are lost: %s does not take them", self._file.path)


class JsonLinesHandler(logging.Handler):
    """Appends each event to a file as one line (`LineFile`)."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = LineFile(path)

    @property
    def path(self) -> str:
        return self._file.path

    def emit(self, record: logging.LogRecord) -> None:
        self._file.append(self.format(record))

    def close(self) -> None:
        self.acquire()
        try:
            self._file.close()
        finally:
            self.release()
        super().close()


_file_handler = cache(JsonLinesHandler)


def _open_for_append(path: str) -> int:
    # Without O_NONBLOCK, opening a FIFO without a reader would hang the agent. Regular files ignore it.
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


log_handlers: dict[str, HandlerOrFactory] = {
    "null": logging.NullHandler,
    "console": StderrHandler,
    _RDZV_DESTINATION: logging.NullHandler,
}
"""Handlers by name. The first use of a factory replaces it by the handler that it makes."""

_lock = threading.RLock()
_broken_destinations: set[str] = set()


def register_handler(name: str, factory_or_handler: HandlerOrFactory) -> None:
    """Makes `name` a destination, or replaces it, also after it was used."""
    if not name or name.startswith(_FILE_PREFIX):
        raise UserError(f"an event handler cannot be named {name!r}")
    if not isinstance(factory_or_handler, logging.Handler) and not callable(factory_or_handler):
        kind = type(factory_or_handler).__name__
        raise UserError(f"event handler {name!r} must be a logging.Handler or a function that makes one, not {kind}")
    with _lock:
        old = log_handlers.get(name)
        log_handlers[name] = factory_or_handler
        _broken_destinations.discard(name)
        if isinstance(old, logging.Handler):
            logging.getLogger(_LOGGER_PREFIX + name).removeHandler(old)


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """The handler of that name; KeyError if there is none."""
    if path := _path_of(destination):
        return _file_handler(path)
    if destination not in log_handlers:
        raise KeyError(_unknown_text(destination))
    handler = log_handlers[destination]
    if not isinstance(handler, logging.Handler):
        handler = handler()
        if not isinstance(handler, logging.Handler):
            raise UserError(f"event handler {destination!r}: its factory made {handler!r}, which is no logging.Handler")
        log_handlers[destination] = handler
    return handler


def check_destination(name: str) -> None:
    """Raises UserError if events cannot go to `name`; for use before anything is started."""
    path = _path_of(name)
    if not path:
        if name not in log_handlers:
            raise UserError(_unknown_text(name))
        return
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory):
        raise UserError(f"event handler {name!r}: there is no directory {directory}")
    if os.path.isdir(path):
        raise UserError(f"event handler {name!r}: {path} is a directory, not a file")


def record(event: Event | RdzvEvent, destination: str = "null") -> None:
    """Sends the event to the destination; KeyError if there is no such destination."""
    logger = _get_or_create_logger(destination)
    if all(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        return
    try:
        logger.info(event.serialize())
    except Exception as error:
        if destination not in _broken_destinations:
            _broken_destinations.add(destination)
            _log.warning("events are lost: handler %r failed: %r", destination, error)


def record_rdzv_event(event: RdzvEvent) -> None:
    record(event, _RDZV_DESTINATION)


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Records a rendezvous event named after the calling code, if a handler is registered for rendezvous events."""
    if isinstance(get_logging_handler(_RDZV_DESTINATION), logging.NullHandler):
        return
    import traceback

    caller = sys._getframe(1).f_code
    name = f"{os.path.basename(caller.co_filename)}:{name or caller.co_name}"
    hostname, pid = hostname or full_hostname(), os.getpid() if pid is None else pid
    trace = traceback.format_exc() if node_state is NodeState.FAILED and sys.exception() else ""
    event = RdzvEvent(name, run_id, message, hostname, pid, node_state, master_endpoint, rank, local_id, trace)
    record_rdzv_event(event)


def _get_or_create_logger(destination: str = "null") -> logging.Logger:
    logger = logging.getLogger(_LOGGER_PREFIX + destination)
    with _lock:
        handler = get_logging_handler(destination)
        if handler not in logger.handlers:
            logger.setLevel(logging.INFO)
            logger.propagate = False
            logger.addHandler(handler)
    return logger


def _path_of(destination: str) -> str:
    return destination.removeprefix(_FILE_PREFIX) if destination.startswith(_FILE_PREFIX) else ""


def _unknown_text(name: str) -> str:
    return f"unknown event handler {name!r}; known are {', '.join(sorted(log_handlers))} and file:<path>"


@cache
def full_hostname() -> str:
    """The name of this host on the network; its own name if that is `localhost`, as in many containers, or if the name
    server does not answer within a moment: it must not hold up the agent."""
    import socket

    found: list[str] = []
    look_up = threading.Thread(target=lambda: found.append(socket.getfqdn()), name="holdfast-hostname", daemon=True)
    with suppress(RuntimeError):  # A process at its limit.
        look_up.start()
        look_up.join(_HOSTNAME_PATIENCE_S)
    name = found[0] if found else "localhost"
    return os.uname().nodename if name.partition(".")[0] == "localhost" else name
