"""What holdfast itself says on the terminal.

Everything goes to stderr through the `holdfast` logger, one line each: `holdfast: text`. Worker output never
passes through here. `escape` makes control characters visible, and `stdio` writes the lines: whole, in order, and
without waiting for a reader.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast import escape, log, signals, stdio
from holdfast.errors import HoldfastError, HostError, UserError

_RED, _PLAIN = "\033[31m", "\033[0m"
_WIDEST = 100


def write(text: str) -> None:
    """Write lines to stderr, whatever state it is in."""
    stdio.write(sys.stderr, escape.lines(text), may_drop=False)


def print_out(text: str) -> None:
    """Write text to stdout; one that is closed or full loses only the text."""
    stdio.write(sys.stdout, escape.lines(text), may_drop=False)


def deliver(text: str) -> None:
    """Write to stdout what the command is for. A reader that has gone (`| head`) is no error, a full disk is."""
    problem = stdio.write(sys.stdout, escape.lines(text), may_drop=False)
    if problem is not None and not isinstance(problem, BrokenPipeError):
        raise HostError(f"cannot write to the standard output: {problem.strerror}")


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
    error = f"{_RED}error:{_PLAIN}" if wants_colour() else "error:"
    text = f"{program}: {error} {escape.cut(escape.one_line(message))}\n"
    stdio.write(sys.stderr, text, may_drop=False)


def show(program: str, make_text: Callable[[], str]) -> int:
    """Run a command: print the text that the function returns. An error is one line, and the exit code says whose it
    is. A signal ends the command at once, wherever it is, but through its `finally` blocks."""
    try:
        with _signals_raised():
            text = make_text()
        deliver(text)
        return 0
    except HoldfastError as error:
        write_error(program, str(error))
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:
        write_error(program, _words_of(error))
        return 1
    except (KeyboardInterrupt, signals.SignalException) as error:
        return 128 + getattr(error, "sigval", signal.SIGINT)


def _words_of(error: OSError) -> str:
    if isinstance(error.filename, str | bytes):
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    try:
        os.getcwd()
    except OSError as reason:
        return f"the working directory cannot be used ({reason.strerror}); change to another one"
    return error.strerror or str(error) or type(error).__name__


class _Interrupt(KeyboardInterrupt):
    """Another signal than that of Ctrl-C. No `except Exception` catches it."""

    sigval = signal.SIGTERM


@contextmanager
def _signals_raised() -> Iterator[None]:
    def leave(number: int, frame: object) -> None:
        interrupt = _Interrupt()
        interrupt.sigval = signal.Signals(number)
        raise interrupt

    box = signals.inbox()
    box.raise_pending()
    box.handle(())
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
               if signal.getsignal(each) == signal.SIG_DFL]  # fmt: skip
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


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


def set_up(*, quiet: bool = False, verbose: bool = False) -> None:
    """Let the `holdfast` logger speak on stderr. A second call replaces the first."""

    def add_handler() -> None:
        from holdfast import log_lines

        log_lines.show_on_stderr(quiet=quiet, verbose=verbose, colour=colour)

    def show(level: int, message: str) -> None:
        if level >= lowest:
            line = escape.with_prefix(escape.cut(escape.one_line(message)), level, is_coloured=colour)
            stdio.write(sys.stderr, f"{line}\n")

    colour = wants_colour()
    is_plain = not verbose and not os.environ.get("LOGLEVEL")
    lowest = log.DEBUG if not is_plain else log.ERROR if quiet else log.INFO
    log.show_texts_with(show if is_plain else None)
    log.add_handlers_with(add_handler, lowest)
