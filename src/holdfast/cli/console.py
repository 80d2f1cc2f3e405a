"""What holdfast itself says on the terminal.

Everything goes to stderr through the `holdfast` logger, one line each: `holdfast: text`. Worker output never
passes through here. `escape` makes control characters visible, and `stdio` writes the lines: whole, in order, and
without waiting for a reader.
"""

from __future__ import annotations

import logging
import os
import sys

from holdfast import escape, stdio

PREFIX = "holdfast:"
_DIM, _YELLOW, _RED, _PLAIN = "\033[2m", "\033[33m", "\033[31m", "\033[0m"
_WIDEST = 100


def write(text: str) -> None:
    """Write lines to stderr, whatever state it is in."""
    stdio.write(sys.stderr, escape.lines(text), may_drop=False)


def print_out(text: str) -> None:
    """Write what the user asked to see to stdout; a reader that has gone (`| head`) is no error."""
    stdio.write(sys.stdout, escape.lines(text), may_drop=False)


def is_unread() -> bool:
    """Whether the reader of stdout, a pipe, has gone (`| head`), so that there is no use in going on."""
    import select

    try:
        poller = select.poll()
        poller.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poller.poll(0))
    except (AttributeError, OSError, ValueError):  # Closed, or not a file.
        return False


def write_error(program: str, message: str) -> None:
    """The one line in which a command says why it did nothing."""
    colour = _RED if wants_colour() else ""
    text = f"{program}: {_paint('error:', colour)} {escape.cut(escape.one_line(message))}\n"
    stdio.write(sys.stderr, text, may_drop=False)


def wants_colour() -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # Closed.
        return False


def width() -> int:
    """How wide to make text: the terminal, but no wider than reads well."""
    from shutil import get_terminal_size

    return max(40, min(_WIDEST, get_terminal_size((_WIDEST, 24)).columns))


def _paint(text: str, colour: str) -> str:
    return f"{colour}{text}{_PLAIN}" if colour and text else text


class LineFormatter(escape.LogFormatter):
    """Puts the prefix in front of every line of a record; with `detail` also the time and the module."""

    def __init__(self, *, detail: bool, colour: bool) -> None:
        super().__init__()
        self._detail = detail
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        lead, lead_colour, colour = PREFIX, "", ""
        if self._detail:
            clock = self.formatTime(record, "%H:%M:%S")
            lead += f" {clock}.{int(record.msecs):03d} {record.name.removeprefix('holdfast.')}:"
        if self._colour:
            lead_colour = _DIM
            colour = _RED if record.levelno >= logging.ERROR else _YELLOW if record.levelno >= logging.WARNING else ""
        lead = _paint(lead, lead_colour)
        return "\n".join(f"{lead} {_paint(line, colour)}".rstrip() for line in text.split("\n"))


def set_up(*, quiet: bool = False, verbose: bool = False) -> None:
    """Let the `holdfast` logger speak on stderr. A second call replaces the first."""
    logger = logging.getLogger("holdfast")
    for old in [known for known in logger.handlers if isinstance(known, stdio.StderrHandler)]:
        logger.removeHandler(old)
    handler = stdio.StderrHandler()
    handler.setFormatter(LineFormatter(detail=verbose, colour=wants_colour()))
    logger.addHandler(handler)
    wish = os.environ.get("LOGLEVEL", "").strip() or "info"
    wished = int(wish) if wish.isdecimal() else logging.getLevelName(wish.upper())
    level = logging.ERROR if quiet else logging.DEBUG if verbose else wished
    if isinstance(level, int):
        logger.setLevel(level)
    else:
        # Other programs read that variable too, so a word that means nothing here must not end the run.
        logger.setLevel(logging.INFO)
        logger.warning("LOGLEVEL=%s is not a log level; it stays at info", wish)
