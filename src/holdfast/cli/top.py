"""`holdfast top`: a live view of a run, its nodes and workers, in the terminal.

One thread asks (`Asking`), because an answer may take its time; the main thread draws and reads keys. What is drawn is
a list of `Row`s, which a pure function makes from the same view that `holdfast status` shows. Workers that failed
stay in the list after their restart. `rich` draws; it is imported here and nowhere else.

The terminal is put back whatever happens: signals end the loop like `q`, and an error is shown after that.

With --json nothing is drawn: each view is a line, until the run ends. A coordinator that does not answer is no end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Sequence

from holdfast import escape, loop
from holdfast.cli import console, runs, status
from holdfast.cli.arguments.parser import PlainParser
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.frozen import frozen
from holdfast.observe import run_view, words
from holdfast.observe.ask import AskedRun
from holdfast.observe.run_view import RunView
from holdfast.telemetry.status import WorkerStatus

PROGRAM = "holdfast top"

_ASK_EVERY_S = 1.0
_UNREACHABLE_S = 60.0  # A coordinator that is replaced is back by then.
_DRAW_EVERY_S = 0.5  # So a new size of the terminal is seen soon.
_STACKS_LINES = 5000
_HELP = "arrows select  s stacks  q leave"
_HELP_STACKS = "arrows scroll  any other key: back"
_STYLES = {"failed": "bold red", "running": "green", "succeeded": "green", "stopped": "yellow", "not connected": "red"}
_KEYS = {
    **dict.fromkeys((b"\x1b[A", b"\x1bOA", b"k"), "up"),
    **dict.fromkeys((b"\x1b[B", b"\x1bOB", b"j"), "down"),
    **dict.fromkeys((b"q", b"Q"), "leave"),
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"s": "stacks",
}

_EPILOG = """\
With --json it needs no terminal: once a second it prints what `holdfast status --json` does, on one line, until the run
ends. While the run cannot be asked, a line on stderr says so; after a minute the command gives up.

keys:
  up, down   select a worker
  s          take the stacks of the selected worker; nothing is stopped
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
    args = get_parser().parse_args(argv)
    return console.show(PROGRAM, lambda: show(args))


def show(args: argparse.Namespace) -> str:
    """Also of `holdfast status --watch`."""
    if args.json:
        print_views(runs.open_run(args))
        return ""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
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
            console.print_out(json.dumps(view.to_json(words.sentence(view))) + "\n")
            sys.stdout.flush()
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


# What is shown. Pure.


@frozen
class Row:
    """One line. A worker has a `rank`, and the id of its node. `state` decides the colour."""

    text: str
    state: str = ""
    node_id: str = ""
    rank: int | None = None


def rows_of(view: RunView) -> list[Row]:
    """The tree: each node, below it its workers, then those that failed before."""
    found: list[Row] = []
    shown = set()
    for node in view.nodes:
        told = view.agents.get(node.node_id)
        place = "standby" if node.rank is None else f"node {node.rank}"
        state = node.state if node.is_connected else "not connected"
        name = told.status.host if told is not None and not told.status.node_id else node.node_id
        found.append(Row(f"{place} {state}  {name}  {node.address}".rstrip(), state))
        for worker in told.workers(view.now) if told is not None else ():
            rank = worker.global_rank if worker.global_rank >= 0 else None
            found.append(Row(f"  {_worker_text(worker)}", worker.state, node.node_id, rank))
            shown.add((worker.global_rank, worker.pid))
        if told is None and node.node_id in view.silent:
            found.append(Row(f"  {view.silence_of(node)}", "not connected"))
    earlier = [
        Row(f"  round {each.round}: {_worker_text(each)}", "failed")
        for told in view.agents.values()
        for each in told.status.failed
        if (each.global_rank, each.pid) not in shown
    ]
    return [*found, *([Row("failed before:")] if earlier else []), *earlier]


def _worker_text(worker: WorkerStatus) -> str:
    age, progress = words.age_text(worker.age_s), words.progress_text(worker)
    text = f"rank {words.rank_text(worker.global_rank)} {words.worker_state(worker)} {age}  {progress}".rstrip()
    return f"{text}  pid {worker.pid}" if worker.pid else text


def clipped(text: str, width: int) -> str:
    return escape.cut(escape.one_line(text), width)


def window(count: int, selected: int, height: int) -> range:
    """Which of so many lines fit, with the selected one among them."""
    first = max(0, min(selected - height // 2, count - height))
    return range(first, min(count, first + max(1, height)))


class View:
    """What is selected, and what lies over the list: stacks, with how far they are scrolled."""

    def __init__(self) -> None:
        self.of_run: RunView | None = None
        self.rows: list[Row] = []
        self.selected: tuple[str, int] | None = None  # Node id and rank: rows come and go.
        self.stacks: list[str] | None = None
        self.scrolled = 0
        self.note = "asking ..."  # About the run.
        self.word = ""  # About the last key; it stays until the next one.

    def take(self, of_run: RunView) -> None:
        self.of_run, self.note = of_run, ""
        self.rows = rows_of(of_run)
        choices = self._choices()
        if choices and self.selected not in choices:
            self.selected = choices[0]

    def _choices(self) -> list[tuple[str, int]]:
        return [(row.node_id, row.rank) for row in self.rows if row.rank is not None]

    def press(self, key: str) -> tuple[str, int] | None:
        """The worker whose stacks are wanted now, if any."""
        self.word = ""
        steps = {"up": -1, "down": 1, "page up": -20, "page down": 20}.get(key)
        if self.stacks is not None:
            if steps is None:
                self.stacks = None
            else:
                self.scrolled = max(0, min(self.scrolled + steps, len(self.stacks) - 1))
            return None
        choices = self._choices()
        if steps is not None and choices:
            at = choices.index(self.selected) if self.selected in choices else 0
            self.selected = choices[max(0, min(at + steps, len(choices) - 1))]
        if key != "stacks" or self.selected is None:
            return None
        self.word = f"taking the stacks of rank {self.selected[1]} ..."
        return self.selected

    def lines(self, width: int, height: int) -> list[tuple[str, str]]:
        """Text and style of each line."""
        if self.stacks is not None:
            body = [(clipped(line, width), "") for line in self.stacks[self.scrolled : self.scrolled + height - 1]]
            return [*body, (clipped(_HELP_STACKS, width), "dim")]
        head = [*status.summary_of(self.of_run)] if self.of_run is not None else []
        top = [(clipped(line, width), "bold" if number == 0 else "") for number, line in enumerate(head)]
        foot = [(clipped(self.word or self.note or _HELP, width), "dim")]
        room = max(1, height - len(top) - len(foot))
        at = next((n for n, row in enumerate(self.rows) if (row.node_id, row.rank) == self.selected), 0)
        body = []
        for number in window(len(self.rows), at, room):
            row = self.rows[number]
            is_selected = row.rank is not None and (row.node_id, row.rank) == self.selected
            text = f">{row.text[1:]}" if is_selected else row.text
            style = _STYLES.get(row.state, "") + (" reverse" if is_selected else "")
            body.append((clipped(text, width), style.strip()))
        return [*top, *body, *foot]


# The thread that asks.


@frozen
class Trouble:
    text: str
    is_of_stacks: bool = False


class Asking:
    """Puts views, stacks and trouble into `answers`, and wakes the one that draws."""

    def __init__(self, run: AskedRun) -> None:
        self._run = run
        self._wanted: queue.Queue[tuple[str, int] | None] = queue.Queue(4)
        self.answers: queue.SimpleQueue[RunView | list[str] | Trouble] = queue.SimpleQueue()
        self.wakeup = loop.Wakeup()
        self._is_over = threading.Event()
        threading.Thread(target=self._ask, name="holdfast-top", daemon=True).start()

    def want_stacks(self, worker: tuple[str, int]) -> None:
        with contextlib.suppress(queue.Full):
            self._wanted.put_nowait(worker)

    def close(self) -> None:
        self._is_over.set()
        self.wakeup.close()

    def _ask(self) -> None:
        worker: tuple[str, int] | None = None
        while not self._is_over.is_set():
            try:
                self.answers.put(self._stacks(*worker) if worker is not None else run_view.look(self._run))
            except HoldfastError as error:
                gone = "" if worker is not None else "the run has ended or cannot be asked (q leaves): "
                self.answers.put(Trouble(f"{gone}{error}", worker is not None))
            self.wakeup.wake()
            try:
                worker = self._wanted.get(timeout=_ASK_EVERY_S)
            except queue.Empty:
                worker = None

    def _stacks(self, node_id: str, rank: int) -> list[str]:
        answer = self._run.ask_node(node_id, {"command": "stacks", "rank": rank})
        return str(answer.get("text") or "there are none").split("\n")[:_STACKS_LINES]


# The terminal.


def watch(run: AskedRun) -> str:
    """Until the user leaves; the sentence of the last view is what stays on the screen."""
    view, asking = View(), Asking(run)
    try:
        with _keys_at_once():
            _draw_until_left(view, asking)
    except (OSError, termios.error) as error:
        raise HostError(f"the terminal is gone: {error}") from None
    finally:
        asking.close()
    return f"{words.sentence(view.of_run)}\n" if view.of_run is not None else ""


def _draw_until_left(view: View, asking: Asking) -> None:
    from rich.console import Console, ConsoleDimensions, Group
    from rich.live import Live
    from rich.text import Text

    terminal = Console(highlight=False)

    def drawn() -> Group:
        # As it is now: a shell may have exported COLUMNS and LINES, which then stay what they were.
        width, height = os.get_terminal_size(1)
        terminal.size = ConsoleDimensions(width, height)
        lines = view.lines(max(10, width), max(4, height))
        return Group(*(Text(text, style, no_wrap=True, overflow="crop") for text, style in lines[:height]))

    with Live(drawn(), console=terminal, screen=True, auto_refresh=False) as live:
        while True:
            loop.wait_readable([0, asking.wakeup.fileno()], _DRAW_EVERY_S)
            asking.wakeup.clear()
            _take_answers(view, asking)
            for key in _pressed():
                if key == "leave" and view.stacks is None:
                    return
                if (wanted := view.press(key)) is not None:
                    asking.want_stacks(wanted)
            live.update(drawn(), refresh=True)


def _take_answers(view: View, asking: Asking) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            match asking.answers.get_nowait():
                case Trouble(text, True):
                    view.word = text
                case Trouble(text):
                    view.note = text
                case list(lines):
                    view.stacks, view.scrolled, view.word = lines, 0, ""
                case RunView() as of_run:
                    view.take(of_run)


def _pressed() -> list[str]:
    """The keys that were pressed since the last look. Those that mean nothing are "other"."""
    if not loop.is_readable(0):
        return []
    data = os.read(0, 1024)
    if not data:
        return ["leave"]  # The terminal is gone.
    found = []
    while data:
        known = max((each for each in _KEYS if data.startswith(each)), key=len, default=data[:1])
        found.append(_KEYS.get(known, "other"))
        data = data[len(known) :]
    return found


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """Keys come one by one and are not shown. Ctrl-Z does nothing: it would leave the screen as it is."""
    before = termios.tcgetattr(0)
    tty.setcbreak(0)
    handler = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, handler)
        termios.tcsetattr(0, termios.TCSADRAIN, before)
