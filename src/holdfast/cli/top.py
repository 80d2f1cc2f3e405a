"""`holdfast top`: `holdfast status`, live in the terminal. An ANSI terminal is all that it needs.

The terminal is put back whatever happens: signals end the loop like `q`, and an error is shown after that.

With --json nothing is drawn: each view is a line, until the run ends. A coordinator that does not answer is no end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import termios
import time
import tty
from collections.abc import Iterator, Sequence

from holdfast import escape, loop
from holdfast.cli import console, runs, status
from holdfast.cli.arguments.parser import PlainParser
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.observe import run_view, words
from holdfast.observe.ask import AskedRun
from holdfast.observe.run_view import RunView

PROGRAM = "holdfast top"

_ASK_EVERY_S = 1.0
_UNREACHABLE_S = 60.0  # A coordinator that is replaced is back by then.
_HELP = "arrows scroll  q leave"
_BAD = re.compile(r"\b(failed|not connected|silent|refused)\b")
_BOLD, _DIM, _RED, _PLAIN = "\033[1m", "\033[2m", "\033[31m", "\033[0m"
# The second screen, without a cursor, where a line that is too long does not go on in the next; and back.
_OPEN, _CLOSE = "\033[?1049h\033[?25l\033[?7l", "\033[?7h\033[?25h\033[?1049l"
KEYS = re.compile(
    rb"(?P<up>\x1b[\[O]A|k)|(?P<down>\x1b[\[O]B|j)|(?P<page_up>\x1b\[5~)|(?P<page_down>\x1b\[6~)|(?P<leave>[qQ])"
)

_EPILOG = """\
With --json it needs no terminal: once a second it prints what `holdfast status --json` does, on one line, until the run
ends. While the run cannot be asked, a line on stderr says so; after a minute the command gives up.

keys:
  up, down   scroll
  q          leave; the run goes on

exit status:
  0  the view was left with q; with --json, the run has ended
  1  there is no such run, it cannot be asked, or this terminal cannot show a live view
  2  wrong usage, or several runs fit

example:
  holdfast top job7
"""


def get_parser() -> PlainParser:
    json_help = "for programs: one JSON object a second, each on a line"
    return runs.parser_for(PROGRAM, "Watch a run: its nodes and workers, live.", _EPILOG, json_help)


def main(argv: Sequence[str]) -> int:
    return get_parser().run(argv, show)


def show(args: argparse.Namespace) -> str:
    """Also of `holdfast status --watch`."""
    if args.json:
        print_views(runs.open_run(args))
        return ""
    if not (os.isatty(0) and os.isatty(1)):
        raise UserError("this needs a terminal; `holdfast status` prints the same once, `holdfast top --json` once "
                        "a second")  # fmt: skip
    if os.environ.get("TERM", "") in ("", "dumb"):
        raise HostError("this terminal (TERM) cannot show a live view; `holdfast status` prints the same once")
    return watch(runs.open_run(args))


def print_views(run: AskedRun) -> None:
    """Until the run has ended. HostError if that is not known: the run cannot be asked at first, or for too long."""
    view: RunView | None = run_view.look(run)
    asked_at, problem = time.monotonic(), ""
    while not console.is_unread():
        if view is not None:
            console.deliver(json.dumps(view.to_json(words.sentence(view))) + "\n")
        if (view is not None and view.status is not None and view.status.end) or _has_ended(run):
            return
        try:
            view, asked_at, problem = run_view.look(run), time.monotonic(), ""
        except HostError as error:
            if time.monotonic() > asked_at + _UNREACHABLE_S:
                raise HostError(f"the run cannot be asked any more, and may go on: {error}") from None
            if not problem:
                console.write(f"{PROGRAM}: {error}; asking again\n")
            view, problem = None, str(error)


def _has_ended(run: AskedRun) -> bool:
    """Waits a second for it."""
    try:
        return run.await_end(_ASK_EVERY_S) is not None
    except HostError:
        loop.wait_readable([], _ASK_EVERY_S)
        return False


# The terminal.


class Screen:
    """What is shown: the last view that there was, what is wrong, and how far it is scrolled."""

    def __init__(self) -> None:
        self.of_run: RunView | None = None
        self.note = ""
        self._first = 0

    def press(self, key: str, height: int) -> None:
        page = max(1, height // 2)
        self._first += {"up": -1, "down": 1, "page_up": -page, "page_down": page}[key]

    def lines(self, width: int, height: int) -> list[tuple[str, str]]:
        """Text and colour of each line. The first one and the last stay where they are."""
        lines = list(status.lines_of(self.of_run)) if self.of_run is not None else [""]
        room = max(1, height - 2)
        self._first = max(0, min(self._first, len(lines) - 1 - room))
        body = [(line, _RED if _BAD.search(line) else "") for line in lines[1:][self._first :][:room]]
        shown = [(lines[0], _BOLD), *body, (self.note or _HELP, _DIM)]
        return [(escape.cut(escape.one_line(line), width), style) for line, style in shown]


def watch(run: AskedRun) -> str:
    """Until the user leaves; the sentence of the last view is what stays on the screen."""
    screen = Screen()
    try:
        with _keys_at_once():
            while _draw_and_read_keys(screen, run):
                pass
    except (OSError, termios.error) as error:
        raise HostError(f"the terminal is gone: {error}") from None
    return f"{words.sentence(screen.of_run)}\n" if screen.of_run is not None else ""


def _draw_and_read_keys(screen: Screen, run: AskedRun) -> bool:
    """Whether the user stays."""
    try:
        screen.of_run, screen.note = run_view.look(run), ""
    except HoldfastError as error:
        screen.note = f"the run has ended or cannot be asked (q leaves): {error}"
    end = time.monotonic() + _ASK_EVERY_S
    while (left_s := end - time.monotonic()) > 0:
        # As it is now: a shell may have exported COLUMNS and LINES, which then stay what they were.
        width, height = os.get_terminal_size(1)
        _draw(screen.lines(max(10, width), max(4, height))[: max(1, height)])
        loop.wait_readable([0], left_s)
        if not loop.is_readable(0):
            continue
        data = os.read(0, 1024)
        for key in [match.lastgroup or "" for match in KEYS.finditer(data)] if data else ["leave"]:
            if key == "leave":
                return False
            screen.press(key, height)
    return True


def _draw(lines: Sequence[tuple[str, str]]) -> None:
    has_colours = not os.environ.get("NO_COLOR")
    *above, last = [f"{style}{text}{_PLAIN}" if style and has_colours else text for text, style in lines]
    _write("\033[H" + "".join(f"\033[K{text}\n" for text in above) + f"\033[J{last}")


def _write(text: str) -> None:
    data = text.encode(errors="backslashreplace")
    while data:
        data = data[os.write(1, data) :]


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """Keys come one by one and are not shown. Ctrl-Z does nothing: it would leave the screen as it is."""
    before = termios.tcgetattr(0)
    tty.setcbreak(0)
    handler = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        _write(_OPEN)
        yield
    finally:
        signal.signal(signal.SIGTSTP, handler)
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        _write(_CLOSE)
