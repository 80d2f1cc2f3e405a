"""Events: what happened in a run, one JSON text each, for programs that watch it.

An event goes to a named destination. Each destination has one logger, `torchelastic-events-<destination>`,
that propagates nowhere and carries the handler registered under that name:

    null                 nowhere; recording costs next to nothing, the event is not even serialized
    console              standard error
    dynamic_rendezvous   where rendezvous events go; nowhere until somebody registers a handler for it
    file:<path>          one JSON line an event, appended to that file; several agents may share it

`register_handler` adds more. Events are emitted by the thread that records them, before `record` returns.
Their loggers stand at INFO whatever LOGLEVEL says: that variable is about log lines, and who wants quiet logs
does not thereby want no events.

Recording never harms the run. Only a destination that does not exist is an error for the caller; a handler
that fails costs one warning.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from functools import cache
from typing import TypeVar

from holdfast import stdio
from holdfast.errors import UserError

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "JsonLinesHandler",
    "NodeState",
    "RdzvEvent",
    "check_destination",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "log_handlers",
    "record",
    "record_rdzv_event",
    "register_handler",
]

EventMetadataValue = str | int | float | bool | None
HandlerOrFactory = logging.Handler | Callable[[], logging.Handler]

_FILE_PREFIX = "file:"
_RDZV_DESTINATION = "dynamic_rendezvous"
_HOSTNAME_PATIENCE_S = 1.0

_log = logging.getLogger(__name__)


class EventSource(StrEnum):
    """Who speaks."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(StrEnum):
    """Where a node stood when it recorded a rendezvous event."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass(slots=True)
class Event:
    """Something that happened to an agent or a worker.

    `timestamp` is Unix time in seconds; 0 means that the event does not say when.
    """

    name: str
    source: EventSource
    timestamp: float = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        return _dump(self)

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        if isinstance(data, Event):
            return data
        return _load(Event, data, "source", EventSource)


@dataclass(slots=True)
class RdzvEvent:
    """Something that happened to a node on its way into the world."""

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

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        return _dump(self)

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        if isinstance(data, RdzvEvent):
            return data
        return _load(RdzvEvent, data, "node_state", NodeState)


_AnyEvent = TypeVar("_AnyEvent", Event, RdzvEvent)


def _dump(event: Event | RdzvEvent) -> str:
    # A metadata value that JSON does not know (a path, a date) is worth more as text than a lost event.
    return json.dumps(asdict(event), default=str)


def _load(kind: type[_AnyEvent], text: str, enum_field: str, enum_type: type[Enum]) -> _AnyEvent:
    try:
        fields = json.loads(text)
        fields[enum_field] = enum_type[fields[enum_field]]
        return kind(**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"not a serialized {kind.__name__} ({error!r}): {str(text)[:200]!r}") from error


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at the moment of the event, which tests and notebooks replace."""

    def emit(self, record: logging.LogRecord) -> None:
        stdio.write(sys.stderr, self.format(record) + "\n")


class JsonLinesHandler(logging.Handler):
    """Appends each event to a file as one line, with one write, so that several writers never mix lines.

    The file is opened by the first event. A write that fails is dropped; the first of a series of failures is
    reported as a warning, and the series ends with the next write that succeeds.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = os.path.abspath(path)
        self._fd: int | None = None
        self._is_failing = False
        self._has_torn_line = False

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record) + "\n"
        try:
            self._append(line.encode("utf-8", "backslashreplace"))
            self._is_failing = False
        except OSError as error:
            self._report(error)

    def close(self) -> None:
        self.acquire()
        try:
            fd, self._fd = self._fd, None
        finally:
            self.release()
        if fd is not None:
            os.close(fd)
        super().close()

    def _append(self, line: bytes) -> None:
        if self._fd is None:
            self._fd = _open_for_append(self.path)
        if self._has_torn_line:
            # The disk filled up in the middle of an earlier line. Ending that one first saves this one.
            line = b"\n" + line
        written = os.write(self._fd, line)
        self._has_torn_line = written < len(line)
        if self._has_torn_line:
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written")

    def _report(self, error: OSError) -> None:
        if not self._is_failing:
            _log.warning("events are lost: cannot write to %s: %s", self.path, error.strerror or error)
        self._is_failing = True


def _open_for_append(path: str) -> int:
    # Without O_NONBLOCK, opening a FIFO that nobody reads would hang the agent. Regular files ignore it.
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


log_handlers: dict[str, HandlerOrFactory] = {
    "null": logging.NullHandler,
    "console": _StderrHandler,
    _RDZV_DESTINATION: logging.NullHandler,
}
"""Handlers by name. A factory stands for the handler until the first use puts the handler in its place."""

_routes: dict[str, tuple[logging.Logger, logging.Handler]] = {}
_routes_lock = threading.RLock()
_broken_destinations: set[str] = set()


def register_handler(name: str, factory_or_handler: HandlerOrFactory) -> None:
    """Makes `name` a destination. A name that exists already is replaced, also if it was used before."""
    if not name or name.startswith(_FILE_PREFIX):
        raise UserError(f"an event handler cannot be named {name!r}")
    if not isinstance(factory_or_handler, logging.Handler) and not callable(factory_or_handler):
        raise UserError(
            f"event handler {name!r} must be a logging.Handler or a function that makes one, "
            f"not {type(factory_or_handler).__name__}"
        )
    with _routes_lock:
        log_handlers[name] = factory_or_handler
        _broken_destinations.discard(name)
        if name in _routes:
            logger, old_handler = _routes.pop(name)
            logger.removeHandler(old_handler)


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """The handler of that name; KeyError if there is none."""
    path = _path_of(destination)
    if path is not None:
        return _file_handler(path)
    if destination not in log_handlers:
        raise KeyError(_unknown_text(destination))
    handler = log_handlers[destination]
    if not isinstance(handler, logging.Handler):
        handler = log_handlers[destination] = _made_by(handler, destination)
    return handler


def check_destination(name: str) -> None:
    """Raises UserError if events cannot go to `name`; for telling the user before anything is started."""
    path = _path_of(name)
    if path is None:
        if name not in log_handlers:
            raise UserError(_unknown_text(name))
        return
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory):
        raise UserError(f"event handler {name!r}: there is no directory {directory}")
    if os.path.isdir(path):
        raise UserError(f"event handler {name!r}: {path} is a directory, not a file")


def record(event: Event, destination: str = "null") -> None:
    """Sends the event to the destination; KeyError if there is no such destination."""
    _send(event, destination)


def record_rdzv_event(event: RdzvEvent) -> None:
    _send(event, _RDZV_DESTINATION)


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
    """Records a rendezvous event named after the code that calls this.

    Does nothing, at the cost of one look-up, unless somebody registered a handler for rendezvous events.
    """
    if isinstance(get_logging_handler(_RDZV_DESTINATION), logging.NullHandler):
        return
    caller = sys._getframe(1).f_code
    record_rdzv_event(
        RdzvEvent(
            name=f"{os.path.basename(caller.co_filename)}:{name or caller.co_name}",
            run_id=run_id,
            message=message,
            hostname=hostname or full_hostname(),
            pid=os.getpid() if pid is None else pid,
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=_current_traceback() if node_state is NodeState.FAILED else "",
        )
    )


def _send(event: Event | RdzvEvent, destination: str) -> None:
    logger = _get_or_create_logger(destination)
    if all(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        return
    try:
        logger.info(event.serialize())
    except Exception as error:
        if destination not in _broken_destinations:
            _broken_destinations.add(destination)
            _log.warning("events are lost: handler %r failed: %r", destination, error)


def _get_or_create_logger(destination: str = "null") -> logging.Logger:
    route = _routes.get(destination)
    if route is None:
        with _routes_lock:
            route = _routes.get(destination) or _new_route(destination)
            _routes[destination] = route
    return route[0]


def _new_route(destination: str) -> tuple[logging.Logger, logging.Handler]:
    handler = get_logging_handler(destination)
    logger = logging.getLogger(f"torchelastic-events-{destination}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    return logger, handler


def _path_of(destination: str) -> str | None:
    return destination.removeprefix(_FILE_PREFIX) or None if destination.startswith(_FILE_PREFIX) else None


@cache
def _file_handler(path: str) -> JsonLinesHandler:
    return JsonLinesHandler(path)


def _made_by(factory: Callable[[], logging.Handler], name: str) -> logging.Handler:
    handler = factory()
    if not isinstance(handler, logging.Handler):
        raise UserError(f"event handler {name!r}: its factory made {handler!r}, which is no logging.Handler")
    return handler


def _unknown_text(name: str) -> str:
    return f"unknown event handler {name!r}; known are {', '.join(sorted(log_handlers))} and file:<path>"


@cache
def full_hostname() -> str:
    """The name by which others know this host. A name that means every host, as in many containers, tells nothing.

    A name server that does not answer must not hold up the agent: after a moment the short name has to do.
    """
    import socket

    found: list[str] = []
    look_up = threading.Thread(target=lambda: found.append(socket.getfqdn()), name="holdfast-hostname", daemon=True)
    look_up.start()
    look_up.join(_HOSTNAME_PATIENCE_S)
    name = found[0] if found else "localhost"
    return os.uname().nodename if name.partition(".")[0] == "localhost" else name


def _current_traceback() -> str:
    import traceback

    return traceback.format_exc() if sys.exception() else ""
