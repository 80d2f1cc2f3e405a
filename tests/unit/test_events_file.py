"""The file of `--events-file`: whole lines, and no failure of a disk reaches the caller."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.errors import UserError
from holdfast.telemetry import background, events_file
from holdfast.telemetry.events_file import EventsFile
from tests import support
from tests.promises import promise, proves


def put(path: Path | str, *lines: str) -> None:
    """All lines are written, or lost, when it returns."""
    file = EventsFile(str(path))
    for line in lines:
        file.put(line)
    file.close()


def test_the_first_line_opens_the_file_and_the_end_closes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means the directory at the beginning."""
    path = tmp_path / "events.jsonl"
    monkeypatch.chdir(tmp_path)
    file = EventsFile("events.jsonl")
    monkeypatch.chdir("/")
    assert not path.exists()
    path.write_text("kept\n")
    for number in range(300):
        file.put(f"line {number} of ü")
    file.close()
    assert path.read_text().splitlines() == ["kept", *(f"line {number} of ü" for number in range(300))]
    assert str(path) not in support.open_descriptors().values()


WRITER = """
import sys
from holdfast.telemetry.events_file import EventsFile
file = EventsFile(sys.argv[1])
for number in range(200):
    file.put(f"{sys.argv[2]}.{number} " + "x" * 3000)
file.close()
"""


@promise("events.several-agents-share-file: Several agents can share one event file: each event is one whole line.")
def test_several_processes_share_a_file_without_mixing_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, str(writer)]) for writer in range(4)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0, 0]
    expected = sorted(f"{writer}.{number} " + "x" * 3000 for writer in range(4) for number in range(200))
    assert sorted(path.read_text().splitlines()) == expected


@proves("events.full-disk-missing-directory")
def test_a_failing_file_is_one_warning_for_each_series(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put("/dev/full", "a", "b", "c")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # Without a reader.
    put(fifo, "a", "b")
    later = tmp_path / "later" / "events.jsonl"
    file = EventsFile(str(later))
    file.put("a")
    support.wait_until(lambda: len(caplog.messages) == 3, "the line is lost")
    later.parent.mkdir()
    file.put("b")
    file.close()
    assert later.read_text() == "b\n"
    codes = [("/dev/full", errno.ENOSPC), (fifo, errno.ENXIO), (later, errno.ENOENT)]
    lines = [f"events are lost: cannot write to {path}: {os.strerror(code)}" for path, code in codes]
    assert caplog.messages == lines


@proves("failures.full-disk-reader-read", "events.full-disk-missing-directory")
@pytest.mark.parametrize("way", ["hangs", "no thread"])
def test_lines_that_nothing_takes_are_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gate = threading.Event()
    if way == "no thread":
        monkeypatch.setattr(threading.Thread, "start", fail)
    monkeypatch.setattr(EventsFile, "_write", lambda self, lines: gate.wait())
    monkeypatch.setattr(background, "_MOST_ITEMS", 2)
    monkeypatch.setattr(background, "CLOSE_LIMIT_S", 0.1)
    put("/events.jsonl", "a", "b", "c", "d")
    gate.set()
    why = "it does not take them in time" if way == "hangs" else "can't start new thread"
    [line] = caplog.messages
    assert line.endswith(f"/events.jsonl: {why}")


TORN = """
import resource, sys
from tests.unit.test_events_file import put
limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
limit(100)
for name in ("whole" * 10, "torn" * 20, "lost" * 20):
    put(sys.argv[1], name)
    with open(sys.argv[1]) as file:
        assert file.read() == "whole" * 10 + "\\n", "the beginning of a line is left"
limit(resource.RLIM_INFINITY)
put(sys.argv[1], "after")
"""


@promise("""events.full-disk-missing-directory: A full disk, a missing directory or a pipe without a reader does not
    stop the run. A line that does not fit on the disk leaves no part of it in the file.""")
def test_a_line_torn_by_a_full_disk_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    subprocess.run([sys.executable, "-c", TORN, path], check=True, timeout=60)
    assert path.read_text().splitlines() == ["whole" * 10, "after"]


def test_a_torn_line_that_stays_is_ended_before_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe cannot take bytes back."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    file = EventsFile(str(fifo))
    try:
        file.put("x" * (1 << 20))
        support.wait_until(lambda: caplog.messages, "the line is torn")
        with contextlib.suppress(BlockingIOError):
            while os.read(reader, 1 << 16):
                pass
        file.put("next")
        file.close()
        assert os.read(reader, 1 << 16) == b"\nnext\n"
    finally:
        os.close(reader)


@proves("failures.full-disk-reader-read")
@pytest.mark.parametrize(
    ("path", "problem"),
    [("events", ""), ("/dev/full", ""), ("/nowhere/at/all", "no directory /nowhere/at"), ("/dev", "is a directory")],
)
def test_paths_are_checked_early(path: str, problem: str) -> None:
    try:
        events_file.check_path(path)
        found = ""
    except UserError as error:
        found = str(error)
    assert problem in found
    assert bool(problem) == bool(found)
