"""The loggers of holdfast's own modules: those of `logging`, which is imported when there is something to log.

Importing `logging` takes about as long as starting Python, and a run has nothing to say before its workers are started.
So a logger is only a name until then. No record is lost by it: as long as nothing has imported `logging`, it has no
handler that would show a record below WARNING, except those that `add_handlers_with` announces.
"""

from __future__ import annotations

import sys
from _thread import RLock
from collections.abc import Callable
from typing import Any

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40  # As in `logging`.

_lock = RLock()
_lowest = WARNING
_unmade: list[Callable[[], None]] = []


def add_handlers_with(function: Callable[[], None], lowest: int = WARNING) -> None:
    """Call it before the first record that is not below `lowest`; at once if `logging` is there already. It must not
    use a logger of this module."""
    global _lowest
    with _lock:
        _lowest = min(_lowest, lowest)
        if function not in _unmade:
            _unmade.append(function)
    if "logging" in sys.modules:
        _make_handlers()


def prepare() -> None:
    """Import `logging` now, if a handler waits for it: a moment when there is time for it."""
    if _unmade:
        import logging  # noqa: F401

        _make_handlers()


def _make_handlers() -> None:
    with _lock:
        while _unmade:
            _unmade[0]()  # It stays in the list meanwhile, so that other threads wait for it.
            del _unmade[0]


def prefix_warnings() -> None:
    """Of a program that has not configured `logging`; see log_lines.py."""
    add_handlers_with(_add_prefixing_handler)


def _add_prefixing_handler() -> None:
    from holdfast import log_lines

    log_lines.prefix_warnings()


class Logger:
    """`logging.getLogger(name)`, with those of its methods that make records."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def debug(self, text: str, *args: object, **options: Any) -> None:
        self._make_record(DEBUG, text, args, options)

    def info(self, text: str, *args: object, **options: Any) -> None:
        self._make_record(INFO, text, args, options)

    def warning(self, text: str, *args: object, **options: Any) -> None:
        self._make_record(WARNING, text, args, options)

    def error(self, text: str, *args: object, **options: Any) -> None:
        self._make_record(ERROR, text, args, options)

    def exception(self, text: str, *args: object) -> None:
        self._make_record(ERROR, text, args, {"exc_info": True})

    def log(self, level: int, text: str, *args: object, **options: Any) -> None:
        self._make_record(level, text, args, options)

    def _make_record(self, level: int, text: str, args: tuple[object, ...], options: dict[str, Any]) -> None:
        if level < _lowest and "logging" not in sys.modules:
            return
        import logging

        if _unmade:
            _make_handlers()
        logging.getLogger(self.name).log(level, text, *args, stacklevel=3, **options)
