"""How records of `logging` become lines on stderr: made safe by `escape`, written by `stdio`."""

from __future__ import annotations

import logging
import os
import sys

from holdfast import escape, stdio


class LogFormatter(logging.Formatter):
    """A record is one line of bounded length. The lines of a traceback follow, indented, so that none of them looks
    like a record. A record that is logged with `extra=HAS_LINES` has lines of its own, which must not begin with text
    from elsewhere."""

    def format(self, record: logging.LogRecord) -> str:
        message, keeps_lines = record.getMessage(), getattr(record, "has_lines", False)
        if message.isprintable() and not (record.exc_info or record.exc_text or record.stack_info):
            return escape.cut(super().format(record))  # The usual case, and thousands of nodes may join at once.
        shown = escape.lines(message) if keeps_lines else escape.one_line(message)
        plain = logging.makeLogRecord({**record.__dict__, "msg": shown, "args": None})
        first, *others = escape.lines(super().format(plain)).split("\n")
        return "\n".join(map(escape.cut, [first, *(others if keeps_lines else [f"  {line}" for line in others])]))


class _LineFormatter(LogFormatter):
    """Puts the prefix in front of every line of a record; with `detail` also the time and the module."""

    def __init__(self, *, detail: bool, colour: bool) -> None:
        super().__init__()
        self._detail = detail
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        text, detail = super().format(record), ""
        if self._detail:
            clock = self.formatTime(record, "%H:%M:%S")
            detail = f" {clock}.{int(record.msecs):03d} {record.name.removeprefix('holdfast.')}:"
        return escape.with_prefix(text, record.levelno, is_coloured=self._colour, detail=detail)


class StderrHandler(logging.Handler):
    """Writes to whatever stderr is at the moment: tests and notebooks replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            stdio.write(sys.stderr, text + "\n")


def show_on_stderr(*, quiet: bool, verbose: bool, colour: bool) -> None:
    """Let the `holdfast` logger speak on stderr. A second call replaces the first."""
    logger = logging.getLogger("holdfast")
    for old in [known for known in logger.handlers if isinstance(known, StderrHandler)]:
        logger.removeHandler(old)
    handler = StderrHandler()
    handler.setFormatter(_LineFormatter(detail=verbose, colour=colour))
    logger.addHandler(handler)
    wish = os.environ.get("LOGLEVEL", "").strip() or "info"
    wished = int(wish) if wish.isdecimal() else logging.getLevelName(wish.upper())
    level = logging.ERROR if quiet else logging.DEBUG if verbose else wished
    if isinstance(level, int):
        logger.setLevel(level)
    else:
        # Other programs read that variable too, so a value that is unknown here must not end the run.
        logger.setLevel(logging.INFO)
        logger.warning("LOGLEVEL=%s is not a log level; it stays at info", wish)


def prefix_warnings() -> None:
    """Let warnings begin with `holdfast:` in a program that has not configured logging. Python prints those bare, and a
    user cannot tell who speaks. A program with handlers of its own sees no difference, nor does the command line."""
    logger = logging.getLogger("holdfast")
    if not any(isinstance(each, StderrHandler) for each in logger.handlers):
        handler = StderrHandler(logging.WARNING)
        handler.setFormatter(LogFormatter(f"{escape.PREFIX} %(message)s"))
        handler.addFilter(
            lambda _: logging.lastResort is not None and logger.handlers + logger.root.handlers == [handler]
        )
        logger.addHandler(handler)
