"""Events: what happened in a run, one JSON text each, for programs that watch it.

An event goes to a named destination. Each destination has one logger, `torchelastic-events-<destination>`, which does
not propagate and carries the handler registered under that name:

    null                 discarded without being serialized
    console              standard error
    dynamic_rendezvous   rendezvous events; discarded until a handler is registered for it

`register_handler` adds more. An event is emitted by the thread that records it, before `record` returns. The loggers
are at level INFO whatever LOGLEVEL says: that variable is about log lines, not about events.

Events never break a run. Only a destination that does not exist is an error for the caller; a handler that fails
causes one warning. The file of `--events-file` has events of its own (`agent/journal.py`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import cache
from typing import ClassVar, Self

from holdfast.errors import UserError
from holdfast.frozen import dataclass, field, fields_of
from holdfast.log import Logger
from holdfast.log_lines import StderrHandler

__all__ = [
    "Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent", "check_destination",
    "construct_and_record_rdzv_event", "get_logging_handler", "log_handlers", "record", "record_rdzv_event",
    "register_handler",
]  # fmt: skip

EventMetadataValue = str | int | float | bool | None
HandlerOrFactory = logging.Handler | Callable[[], logging.Handler]

_LOGGER_PREFIX = "torchelastic-events-"
_RDZV_DESTINATION = "dynamic_rendezvous"
_HOSTNAME_PATIENCE_S = 1.0

_log = Logger(__name__)


class EventSource(str, Enum):  # noqa: UP042  (`str()` gives `EventSource.AGENT`, which users know)
    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):  # noqa: UP042
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
    if not name:
        raise UserError("an event handler needs a name")
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
    if name not in log_handlers:
        raise UserError(_unknown_text(name))


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


def _unknown_text(name: str) -> str:
    return f"unknown event handler {name!r}; known are {', '.join(sorted(log_handlers))}"


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
