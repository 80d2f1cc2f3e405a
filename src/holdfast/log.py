"""The loggers of holdfast's own modules: those of `logging`, which is imported when it is needed.

Importing `logging` takes about as long as starting Python, and a run that goes well has few lines to write. So a logger
is only a name at first. No record is lost by it: as long as nothing has imported `logging`, it has no handler that
would show a record below WARNING, except those that `add_handlers_with` announces. The command line announces besides
how it shows a record that is a text and nothing more. Such records need no `logging` until something else imports it.
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
_show: Callable[[int, str], None] | None = None


def add_handlers_with(function: Callable[[], None], lowest: int = WARNING) -> None:
    """Call it before the first record that is not below `lowest` and needs `logging`; at once if `logging` is there
    already. It must not use a logger of this module."""
    global _lowest
    with _lock:
        _lowest = min(_lowest, lowest)
        if function not in _unmade:
            _unmade.append(function)
    if "logging" in sys.modules:
        _make_handlers()


def show_texts_with(show: Callable[[int, str], None] | None) -> None:
    """Give it the level and the text of a record that has nothing else, as long as nothing has imported `logging`."""
    global _show
    _show = show


def prepare() -> None:
    """Import `logging` now, if the next record needs it: a moment when there is time for it."""
    if _unmade and _show is None:
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
        if "logging" not in sys.modules:
            if level < _lowest:
                return
            if _show is not None and not options and _is_shown(_show, level, text, args):
                return
        import logging

        if _unmade:
            _make_handlers()
        logging.getLogger(self.name).log(level, text, *args, stacklevel=3, **options)


def _is_shown(show: Callable[[int, str], None], level: int, text: str, args: tuple[object, ...]) -> bool:
    try:
        message = text % args if args else text
    except Exception:  # A mistake of the caller's. `logging` reports it, and the run goes on.
        return False
    show(level, message)
    return True
