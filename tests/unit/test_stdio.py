"""holdfast's own text reaches every kind of stream at once, and one that takes no more text holds up no caller."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import sys
import threading
import tty
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import pytest

from holdfast import log_lines, stdio
from holdfast.telemetry import events, metrics
from tests import support
from tests.promises import promise, proves


@contextlib.contextmanager
def piped() -> Iterator[tuple[int, TextIO]]:
    """A pipe: the descriptor to read it, and the stream that writes to it."""
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        try:
            yield reader, stream
        finally:
            os.close(reader)
            stdio.flush()  # A thread that still writes finds no reader.


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "holdfast-stdio"]


def read_all(reader: int, ending: bytes) -> bytes:
    heard = b""
    while not heard.endswith(ending):
        heard += os.read(reader, 1 << 16)
    return heard


def test_a_pipe_has_the_text_at_once_and_without_a_thread() -> None:
    with piped() as (reader, stream):
        stream.write("begun, ")
        stdio.write(stream, "one\n")
        stdio.write(stream, "two\n")
        assert not writers()
        assert os.read(reader, 100) == b"begun, one\ntwo\n"


def test_a_terminal_has_the_text_at_once_and_without_a_thread() -> None:
    near, far = pty.openpty()
    tty.setraw(far)
    with open(far, "w") as stream:
        stdio.write(stream, "one\n")
        assert not writers()
        assert os.read(near, 100) == b"one\n"
    os.close(near)


def test_a_full_pipe_holds_up_no_caller_and_gets_everything_in_order() -> None:
    with piped() as (reader, stream):
        filling = support.fill(stream.fileno())
        texts = ["one\n", "x" * 200_000 + "\n", *(f"{number}\n" for number in range(100)), "end\n"]
        for text in texts:
            stdio.write(stream, text, may_drop=False)
        assert read_all(reader, b"end\n").decode() == filling * "." + "".join(texts)
        stdio.flush()
        assert not writers(), "the thread ends when all is written"


@promise("""output.unread-stderr-full-pipe: An unread stderr (a full pipe, a terminal after Ctrl-S) delays no decision:
    workers are stopped as usual, and holdfast's messages arrive whole and in order when stderr is read.""")
def test_what_the_program_has_not_flushed_holds_up_no_caller() -> None:
    """A pipe with room for a page is writable, and has no room for the program's own text."""
    with piped() as (reader, stream), ThreadPoolExecutor(1) as thread:
        filling = support.fill(stream.fileno())
        os.read(reader, 4096)
        stream.write("y" * 8000)
        written = thread.submit(stdio.write, stream, "one\n")
        try:
            written.result(support.DEADLINE_S)
        finally:
            heard = read_all(reader, b"one\n")
        assert heard == b"." * (filling - 4096) + b"one\n"
        stream.flush()


@promise("""output.own-line-tears-none: A line of holdfast's never stands in the middle of a worker's line, also if the
    console takes little at a time, and does not wait for a worker that writes without end.""")
def test_text_of_ours_waits_for_the_rest_of_a_line_and_goes_before_the_next() -> None:
    with piped() as (reader, stream), ThreadPoolExecutor(1) as thread:
        fd = stream.fileno()
        filling = support.fill(fd)
        os.read(reader, 4096)
        line = b"x" * 10_000 + b"\n"
        begun = stdio.write_part(fd, line)
        assert 0 < begun < len(line)
        stdio.write(stream, "ours\n")
        heard = os.read(reader, filling)
        assert stdio.write_part(fd, line[begun:], may_wait=True) == len(line) - begun
        assert thread.submit(stdio.write_part, fd, b"next\n", may_wait=True).result(support.DEADLINE_S) == 5
        heard += read_all(reader, b"next\n")
        assert heard.lstrip(b".") == line + b"ours\nnext\n"


def test_text_of_ours_does_not_wait_for_a_line_that_was_given_up() -> None:
    with piped() as (reader, stream):
        fd = stream.fileno()
        os.read(reader, support.fill(fd) - 4096)
        begun = stdio.write_part(fd, b"x" * 100_000)
        stdio.write(stream, "ours\n")
        stdio.give_up(fd)
        assert read_all(reader, b"ours\n").lstrip(b".") == b"x" * begun + b"\nours\n"


SPEAKERS: dict[str, Callable[[], object]] = {
    "a line of the command": lambda: log_lines.StderrHandler().handle(logging.makeLogRecord({"msg": "words"})),
    "a line from Python": lambda: (log_lines.prefix_warnings(), logging.getLogger("holdfast").warning("words")),
    "an event": lambda: events.record(events.Event("words", events.EventSource.AGENT), "console"),
    "a metric": lambda: metrics.ConsoleMetricHandler().emit(metrics.MetricData(0, "group", "words", 7)),
}


@proves("output.unread-stderr-full-pipe")
@pytest.mark.parametrize("speaker", SPEAKERS)
def test_nothing_that_holdfast_says_waits_for_a_reader(speaker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("holdfast"), "handlers", [])
    with piped() as (reader, stream):
        support.fill(stream.fileno())
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        SPEAKERS[speaker]()
        assert b"words" in read_all(reader, b"\n")


@proves("output.unread-stderr-full-pipe")
def test_a_terminal_that_is_held_gets_everything_later() -> None:
    near, far = pty.openpty()
    tty.setraw(far)
    with open(far, "w") as stream:
        support.fill(far)
        stdio.write(stream, "one\n")
        stdio.write(stream, "two\n")
        assert read_all(near, b"\n").lstrip(b".") in (b"one\n", b"one\ntwo\n")
        stdio.flush()
    os.close(near)


@promise("""output.most-mib-lines-waits: At most 1 MiB of lines waits for a reader. Later lines are dropped, and their
    number is written in their place. The report is never dropped.""")
def test_lines_above_the_bound_are_counted_where_they_are_missing() -> None:
    line = "x" * 1023 + "\n"
    with piped() as (reader, stream):
        filling = support.fill(stream.fileno())
        for _ in range(1500):
            stdio.write(stream, line)
        stdio.write(stream, "the report\n", may_drop=False)
        stdio.write(stream, "late\n")
        said_again = "holdfast: 1 line dropped here, because this output was not read\n"
        heard = read_all(reader, said_again.encode()).decode()
    kept = heard.count(line)
    assert kept == (1 << 20) // len(line)
    missing = f"holdfast: {1500 - kept} lines dropped here, because this output was not read\n"
    assert heard == "." * filling + kept * line + missing + "the report\n" + said_again


def test_the_wait_for_a_reader_is_bounded() -> None:
    with piped() as (_, stream):
        support.fill(stream.fileno())
        stdio.write(stream, "one\n")
        stdio.flush(0.05)
        assert writers()


def test_a_forked_child_writes_its_own_text_only() -> None:
    """Neither the lock nor what waits is the child's, whatever its parent was doing."""
    with piped() as (reader, stream):
        filling = support.fill(stream.fileno())
        stdio.write(stream, "of the parent\n")
        ours, theirs = os.pipe()
        with stdio._queue._lock:
            child = os.fork()
        if child == 0:
            with open(theirs, "w") as own:
                stdio.write(own, "of the child\n")
                stdio.flush()
            os._exit(0)
        os.close(theirs)
        with open(ours) as told:
            assert told.read() == "of the child\n"
        assert os.waitpid(child, 0)[1] == 0
        assert read_all(reader, b"\n").decode() == "." * filling + "of the parent\n"


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_stream_that_is_not_there(stream: str | None) -> None:
    with open(os.devnull, "w") as closed:
        pass
    stdio.write(closed if stream else None, "nothing happens\n")


class NotebookStream(io.TextIOBase):
    """As in a notebook: what is written goes to the cell, but the descriptor is that of the terminal."""

    def __init__(self, terminal: TextIO) -> None:
        self.cell = ""
        self._terminal = terminal

    def write(self, text: str) -> int:
        self.cell += text
        return len(text)

    def fileno(self) -> int:
        return self._terminal.fileno()


@promise("output.notebook-lines-appear-cell: In a notebook holdfast's own lines appear in the cell.")
def test_in_a_notebook_the_text_reaches_the_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "terminal").open("w") as terminal:
        stream = NotebookStream(terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        SPEAKERS["a line of the command"]()
    assert (stream.cell, (tmp_path / "terminal").read_text()) == ("words\n", "")
