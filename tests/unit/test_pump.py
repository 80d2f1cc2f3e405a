"""The tee pump with real pipes, terminals and processes; and the line classes as tables."""

from __future__ import annotations

import errno
import fcntl
import gc
import io
import os
import random
import re
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from holdfast import stdio
from holdfast.errors import InternalError
from holdfast.process.output import folding, terminal
from holdfast.process.output import pump as pump_module
from holdfast.process.output.lines import HeldLine, LineFilter, LinePrefixer
from holdfast.process.output.pump import Pump, Stream, Tail, open_channel
from holdfast.process.output.terminal import TerminalView
from tests import support
from tests.promises import promise, proves

DEADLINE_S = 60.0
wait_until = partial(support.wait_until, deadline_s=DEADLINE_S)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_and_close(fd: int, data: bytes) -> None:
    write_all(fd, data)
    os.close(fd)


class Rig:
    """A pump, its warnings, and files that stand for the consoles."""

    def __init__(self, directory: Path, warn: Callable[[str], None] | None = None) -> None:
        self.directory = directory
        self.warnings: list[str] = []
        self.pump = Pump(warn or self.warnings.append)
        self.console_fd = self.create("console")
        self.processes: list[subprocess.Popen[bytes]] = []

    def create(self, name: str) -> int:
        return os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def add(
        self,
        name: str,
        prefix: bytes | None = None,
        console_fd: int | None = -1,
        file_fd: int | None = -1,
        filters: tuple[bytes, ...] = (),
        filtered_fd: int | None = None,
        tail: Tail | None = None,
        tty_fd: int | None = None,
    ) -> int:
        """Add a stream with a log file called `name` and the console as its outlets; returns the write end."""
        read_fd, write_fd = open_channel(tty_fd)
        if file_fd == -1:
            file_fd = self.create(name)
        if console_fd == -1:
            console_fd = self.console_fd
        prefixer = LinePrefixer(prefix) if prefix is not None and console_fd is not None else None
        picker = LineFilter(filters, prefix or b"") if filters else None
        self.pump.add(Stream(read_fd, name, file_fd, console_fd, tail, prefixer, picker, filtered_fd))
        return write_fd

    def spawn(self, write_fd: int, code: str, *args: str) -> subprocess.Popen[bytes]:
        """Start a writer that owns the write end."""
        command = [sys.executable, "-S", "-E", "-c", code, *args]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=write_fd)
        os.close(write_fd)
        self.processes.append(process)
        return process

    def copy(self, *streams: tuple[int, bytes]) -> None:
        """Write each text to its stream and end it. Afterwards all streams have ended and are written out."""
        for write_fd, data in streams:
            write_and_close(write_fd, data)
        assert self.pump.drain(DEADLINE_S)

    def file(self, name: str) -> bytes:
        return (self.directory / name).read_bytes()

    def console(self) -> bytes:
        return self.file("console")

    def held_bytes(self) -> int:
        """What the pump holds of unfinished lines."""
        return sum(len(stream.held) for stream in list(self.pump._streams.values()))

    def tear_down(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.pump.close()
        os.close(self.console_fd)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.pump.start()
    yield rig
    rig.tear_down()


JUNK = random.Random(1).randbytes(3_000_000)


class Assembler:
    """Pieces in, lines with the prefix out; a line that grows beyond the bound is split, as the pump does it."""

    def __init__(self, max_held_bytes: int = 1 << 30) -> None:
        self._held, self._prefixer, self._max_held_bytes = HeldLine(), LinePrefixer(b">"), max_held_bytes

    def feed(self, piece: bytes) -> bytes:
        out = self._prefixer.add(self._held.take(piece))
        return out + self._prefixer.add(self._held.release()) if len(self._held) > self._max_held_bytes else out

    def flush(self) -> bytes:
        return self._prefixer.end(self._held.flush())


class TestLines:
    # Each step is a piece and what must come out at once; then what the flush brings, and how much may be held.
    @pytest.mark.parametrize(
        ("steps", "rest", "most"),
        [
            ([], b"", 99),
            ([(b"", b"")], b"", 99),
            ([(b"one\n", b">one\n")], b"", 99),
            ([(b"one\ntwo\n", b">one\n>two\n")], b"", 99),
            ([(b"\n\n", b">\n>\n")], b"", 99),
            ([(b"on", b""), (b"e\ntw", b">one\n"), (b"o", b"")], b">two\n", 99),
            ([(b"a\r\nb\r\n", b">a\r\n>b\r\n")], b"", 99),
            ([(b"a\r", b""), (b"\nb\n", b">a\r\n>b\n")], b"", 99),
            ([(b"10%\r20%\r", b">10%\r"), (b"30%\r", b">20%\r"), (b"done\n", b">30%\r>done\n")], b"", 99),
            ([(b"\r10%", b">\r"), (b"\r20%", b">10%\r"), (b"\n", b">20%\n")], b"", 99),
            ([(b"last state\r", b"")], b">last state\r\n", 99),
            ([(b"\r", b"")], b">\r\n", 99),
            ([(b"\r", b""), (b"\r", b">\r"), (b"\r\n", b">\r>\r\n")], b"", 99),
            ([(b"\r\r\n\n\r", b">\r>\r\n>\n")], b">\r\n", 99),
            ([(b"\xff\x00\xfe\n", b">\xff\x00\xfe\n")], b"", 99),
            ([(b"\x0b\x0c\x1c\x85\n", b">\x0b\x0c\x1c\x85\n")], b"", 99),
            # A line beyond the bound goes on without a second prefix.
            ([(b"1234", b""), (b"5", b">12345"), (b"67\n8", b"67\n")], b">8\n", 4),
            ([(b"12345", b">12345"), (b"678901", b"678901"), (b"\n", b"\n"), (b"x\n", b">x\n")], b"", 4),
            ([(b"12345", b">12345")], b"\n", 4),
            ([(b"12345", b">12345"), (b"6", b"")], b"6\n", 4),
            ([(b"12345\r", b">12345"), (b"\nx", b"\r\n")], b">x\n", 4),
            ([(b"12345\r", b">12345"), (b"x\n", b"\r>x\n")], b"", 4),
            ([(b"123456789\n", b">123456789\n")], b"", 4),
        ],
    )
    def test_lines(self, steps: list[tuple[bytes, bytes]], rest: bytes, most: int) -> None:
        assembler = Assembler(most)
        assert [assembler.feed(piece) for piece, _ in steps] == [expected for _, expected in steps]
        assert assembler.flush() == rest
        assert assembler.flush() == b""

    def test_many_small_pieces_of_a_long_line(self) -> None:
        """Quadratic copying would take hours here."""
        assembler = Assembler()
        for _ in range(1_000_000):
            assert not assembler.feed(b"0123456789")
        assert assembler.feed(b"\n") == b">" + b"0123456789" * 1_000_000 + b"\n"


class TestLineFilter:
    @pytest.mark.parametrize(
        ("needles", "pieces", "expected"),
        [
            ((b"loss",), [b"loss 1\nother\nloss 2\n"], b">loss 1\n>loss 2\n"),
            ((b"loss",), [b"lo", b"ss 1", b"\nx"], b">loss 1\n"),
            ((b"a", b"b"), [b"a\nb\nc\nab\n"], b">a\n>b\n>ab\n"),
            ((b"loss",), [b"nothing\n"], b""),
            ((b"loss",), [b"\rloss 1\rloss 2\r\nloss 3"], b">loss 1\n>loss 2\r\n>loss 3\n"),
            ((b"loss",), [b"loss\r"], b">loss\n"),
            ((b"",), [b"a\n\n"], b">a\n>\n"),
            ((b"end",), [b"the end"], b">the end\n"),
        ],
    )
    def test_picks(self, needles: tuple[bytes, ...], pieces: list[bytes], expected: bytes) -> None:
        held, line_filter = HeldLine(), LineFilter(needles, b">")
        assert b"".join(map(line_filter.pick, [*map(held.take, pieces), held.flush()])) == expected


class TestTail:
    @pytest.mark.parametrize(
        ("pieces", "expected", "most_bytes", "most_lines"),
        [
            ([], "", 99, 20),
            ([b"one\ntwo\n"], "one\ntwo", 99, 20),
            ([b"one\ntw", b"o"], "one\ntwo", 99, 20),
            ([b"one\n\n\n \n"], "one", 99, 20),
            ([b"one\n\ntwo\n"], "one\n\ntwo", 99, 20),
            ([b"10%\r20%\r30%\ndone\n"], "30%\ndone", 99, 20),
            ([b"\r10%\r20%\r    \r"], "20%", 99, 20),
            ([b"windows\r\nlines\r\n"], "windows\nlines", 99, 20),
            ([b"bad \xff byte\n"], "bad \ufffd byte", 99, 20),
            ([b"01234567"], "01234567", 8, 20),
            ([b"0123456789\nabc\n"], "abc", 8, 20),
            ([b"0123456789", b"\nabc\n"], "abc", 8, 20),
            ([b"0123456789abcdef"], "89abcdef", 8, 20),
            ([b"0123456789abcdef\n"], "9abcdef", 8, 20),
            (["äöü€".encode()], "\ufffdöü€", 8, 20),
            ([b"one\ntwo\nthree\n"], "", 99, 0),
            ([b"one\ntwo\nthree\n"], "three", 99, 1),
            ([b"one\ntwo\nthree\n"], "two\nthree", 99, 2),
        ],
    )
    def test_text(self, pieces: list[bytes], expected: str, most_bytes: int, most_lines: int) -> None:
        tail = Tail(most_bytes)
        for piece in pieces:
            tail.feed(piece)
        assert tail.text(most_lines) == expected

    def test_memory_is_bounded(self) -> None:
        tail = Tail()
        for number in range(20_000):
            tail.feed(b"line %d\n" % number)
        assert tail.text().split("\n") == [f"line {number}" for number in range(19_980, 20_000)]
        tail.feed(b"x" * 1_000_000 + b"\nend\n")
        assert tail.text() == "end"
        assert len(tail._kept) == 16 * 1024


class TestCopying:
    @promise("""output.log-file-tee-stream: The log file of a tee'd stream has exactly the worker's bytes, at once. The
        console has whole lines with the prefix.""")
    def test_partial_line_is_held_but_reaches_the_file_at_once(self, rig: Rig) -> None:
        write_fd, other_fd = rig.add("log", b"[w0]:"), rig.add("other", b"[w1]:")
        write_all(write_fd, b"par")
        wait_until(lambda: rig.file("log") == b"par", "the piece is in the file")
        write_all(other_fd, b"whole\n")
        wait_until(lambda: rig.console() == b"[w1]:whole\n", "the other stream's line is on the console")
        write_all(write_fd, b"tial\n")
        wait_until(lambda: rig.console() == b"[w1]:whole\n[w0]:partial\n", "the line is on the console")
        os.close(write_fd)
        os.close(other_fd)

    @promise("""output.last-line-arrives-newline: The last line arrives without a newline, and when the worker is
        killed.""")
    @proves("output.line-10-mb-passes")
    @pytest.mark.parametrize(
        ("prefix", "text", "shown"),
        [
            (b"[w0]:", b"one\nlast", b"[w0]:one\n[w0]:last\n"),
            (None, JUNK, JUNK),
            (b"", JUNK, JUNK),
            (b"[w0]:", JUNK, b"".join(b"[w0]:" + line for line in JUNK.splitlines(keepends=True)) + b"\n"),
        ],
        ids=["a last line without newline", "junk as it comes", "junk", "junk in lines"],
    )
    def test_what_a_file_and_a_console_get(self, rig: Rig, prefix: bytes | None, text: bytes, shown: bytes) -> None:
        rig.copy((rig.add("log", prefix), text))
        assert rig.file("log") == text
        assert rig.console() == shown

    def test_without_prefix_the_console_gets_the_bytes_as_they_come(self, rig: Rig) -> None:
        write_fd = rig.add("log", None)
        write_all(write_fd, b"enter a number: ")
        wait_until(lambda: rig.console() == b"enter a number: ", "the prompt is on the console")
        rig.copy((write_fd, b""))
        assert rig.console() == rig.file("log") == b"enter a number: "

    @pytest.mark.parametrize("has_console", [False, True])
    @pytest.mark.parametrize("has_file", [False, True])
    def test_any_outlet_may_be_missing(self, rig: Rig, has_file: bool, has_console: bool) -> None:
        tail = Tail()
        outlets = (-1 if has_console else None, -1 if has_file else None)
        rig.copy((rig.add("log", b"", *outlets, tail=tail), b"text\n"))
        assert tail.text() == "text"
        assert rig.console() == (b"text\n" if has_console else b"")
        assert (rig.directory / "log").exists() == has_file

    @pytest.mark.parametrize("is_closed", [False, True])
    def test_streams_may_be_added_before_the_start(self, tmp_path: Path, is_closed: bool) -> None:
        """A pump that is never started copies when it is closed."""
        rig = Rig(tmp_path)
        write_and_close(rig.add("log", b"[w0]:"), b"early\n")
        assert not rig.pump.drain(0.01)
        if not is_closed:
            rig.pump.start()
            assert rig.pump.drain(DEADLINE_S)
        rig.tear_down()
        assert rig.pump.drain(0)
        assert rig.console() == b"[w0]:early\n"

    @promise("output.many-concurrent-writers-lose: Many concurrent writers lose no lines and mix no lines.")
    def test_many_writers(self, rig: Rig) -> None:
        """Six processes that tear their lines at random: each line arrives once, whole, and in order."""
        code = (
            "import os, random, sys\n"
            "rank = int(sys.argv[1]); rng = random.Random(rank)\n"
            "text = b''.join(b'rank %d line %d %s\\n' % (rank, i, b'.' * rng.randrange(80)) for i in range(20000))\n"
            "at = 0\n"
            "while at < len(text): at += os.write(1, text[at:at + rng.choice((1, 7, 100, 5000))])\n"
        )
        for rank in range(6):
            rig.spawn(rig.add(f"log{rank}", b"[w%d]:" % rank), code, str(rank))
        assert rig.pump.drain(DEADLINE_S)
        lines = rig.console().splitlines()
        assert len(lines) == 6 * 20_000
        for rank in range(6):
            prefix = b"[w%d]:" % rank
            mine = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
            assert b"\n".join(mine) + b"\n" == rig.file(f"log{rank}")
            pattern = re.compile(rb"rank %d line (\d+) \.*" % rank)
            numbers = [int(match[1]) for match in map(pattern.fullmatch, mine) if match]
            assert numbers == list(range(20_000))

    @promise("output.line-10-mb-passes: A line of 10 MB passes, and so does binary junk.")
    def test_line_of_ten_megabytes_is_not_torn(self, rig: Rig) -> None:
        """While it comes in, another stream writes lines all the time."""
        long_line = b"".join(b"%d," % number for number in range(1_400_000)) + b"\n"
        assert len(long_line) > 10_000_000
        filtered_fd = rig.create("filtered")
        long_fd = rig.add("long", b"[long]:", filters=(b",7,",), filtered_fd=filtered_fd)
        short_fd = rig.add("short", b"[short]:")
        half = len(long_line) // 2
        write_all(long_fd, long_line[:half])
        write_all(short_fd, b"short\n")
        rig.copy((long_fd, long_line[half:]), (short_fd, b"short\n"))
        assert rig.file("long") == long_line
        console = rig.console()
        assert console.count(b"[long]:") == 1
        assert b"[long]:" + long_line in console
        assert console.replace(b"[long]:" + long_line, b"") == b"[short]:short\n" * 2
        assert rig.file("filtered") == b"[long]:" + long_line
        assert rig.warnings == []
        os.close(filtered_fd)

    @promise("""output.limit-16-mib-applies: One limit (16 MiB) applies to the unfinished lines of all streams together.
        If a line is split because of it, holdfast says so, and the log file has the whole line.""")
    def test_the_unfinished_lines_of_all_streams_have_one_bound(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The longest is split, and it is said once. The log files have every line whole."""
        monkeypatch.setattr(pump_module, "_HELD_MAX_BYTES", 1 << 20)
        parts = {"c": b"c" * 500_000, "a": b"a" * 300_000, "b": b"b" * 400_000}
        fds = {name: rig.add(name, b"[%s]:" % name.encode()) for name in parts}

        def arrived(name: str, text: bytes) -> bool:
            return rig.file(name) == text

        for name, part in parts.items():
            write_all(fds[name], part)
            wait_until(partial(arrived, name, part), "it has arrived")
        wait_until(lambda: rig.console() != b"", "the longest line is passed on")
        wait_until(lambda: rig.held_bytes() <= 1 << 20, "what is held is within the bound")
        for name in ("a", "b"):
            write_all(fds[name], b"\n")
            wait_until(partial(arrived, name, parts[name] + b"\n"), "it has arrived")
        rig.copy((fds["c"], parts["c"] * 4 + b"\n"), (fds["a"], b""), (fds["b"], b""))
        assert rig.held_bytes() == 0
        console = rig.console()
        assert [console.count(b"[%s]:" % name.encode()) for name in parts] == [1, 1, 1]
        assert console.count(b"c") == 1 + 5 * len(parts["c"])
        assert rig.file("c") == parts["c"] * 5 + b"\n"
        (said,) = rig.warnings
        assert said.startswith("c: a line is split on the console after ")


class TestTrouble:
    @promise("""output.full-disk-loses-log: A full disk loses that log file and causes one warning. Workers and console
        continue.""")
    def test_full_disk_costs_that_file_and_one_warning(self, rig: Rig) -> None:
        full_fd = os.open("/dev/full", os.O_WRONLY)
        broken_fd, sound_fd = rig.add("rank 0 stdout", b"[w0]:", file_fd=full_fd), rig.add("log", b"[w1]:")
        for _ in range(3):
            write_all(broken_fd, b"text\n")
            write_all(sound_fd, b"text\n")
        wait_until(lambda: rig.console().count(b"\n") == 6, "all is on the console")
        rig.copy((broken_fd, b""), (sound_fd, b""))
        assert rig.file("log") == b"text\n" * 3
        (warning,) = rig.warnings
        assert "rank 0 stdout" in warning
        assert "/dev/full" in warning
        assert os.strerror(errno.ENOSPC) in warning

    def test_full_filtered_file_is_dropped_for_all_streams(self, rig: Rig) -> None:
        full_fd = os.open("/dev/full", os.O_WRONLY)
        shared = {"filters": (b"x",), "filtered_fd": full_fd}
        outlets = {"one": shared, "rank 9": {"file_fd": os.open("/dev/full", os.O_WRONLY)}, "late": shared}
        for count, (name, outlet) in enumerate(outlets.items(), start=1):
            write_fd = rig.add(name, b"", **outlet)  # type: ignore[arg-type]
            write_all(write_fd, b"x\n")
            wait_until(lambda count=count: rig.console() == b"x\n" * count, "the line is out")  # type: ignore[misc]
            os.close(write_fd)
        assert rig.pump.drain(DEADLINE_S)
        os.close(full_fd)
        assert ["filtered" in warning for warning in rig.warnings] == [True, False]

    @promise("output.console-reader-loses-console: A console without a reader loses only the console's copy.")
    def test_console_without_reader_is_dropped_quietly(self, rig: Rig) -> None:
        gone_fd, console_fd = os.pipe()
        os.close(gone_fd)
        streams = rig.add("log", b"[w0]:", console_fd), rig.add("other", b"[w1]:")
        rig.copy((streams[0], b"text\n" * 3000), (streams[1], b"text\n"))
        os.close(console_fd)
        assert rig.file("log") == b"text\n" * 3000
        assert rig.console() == b"[w1]:text\n"
        assert rig.warnings == []

    def test_full_console_is_dropped_with_a_warning(self, rig: Rig) -> None:
        full_fd = os.open("/dev/full", os.O_WRONLY)
        rig.copy((rig.add("log", b"[w0]:", full_fd), b"text\n"))
        os.close(full_fd)
        assert rig.file("log") == b"text\n"
        assert len(rig.warnings) == 1
        assert "console" in rig.warnings[0]

    def test_signals_of_failing_writes_do_not_kill(self, tmp_path: Path) -> None:
        """SIGPIPE and SIGXFSZ at their defaults, as a user's program may have set them."""
        code = (
            "import os, resource, signal, sys\n"
            "from holdfast.process.output.pump import LinePrefixer, Pump, Stream\n"
            "from holdfast.process.output.pump import open_channel\n"
            "signal.signal(signal.SIGPIPE, signal.SIG_DFL); signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
            "gone, console = os.pipe(); os.close(gone)\n"
            "warnings = []; pump = Pump(warnings.append); pump.start()\n"
            "read_fd, write_fd = open_channel(None)\n"
            "log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
            "pump.add(Stream(read_fd, 'rank 0', log, console, None, LinePrefixer(b'')))\n"
            "os.write(write_fd, b'x' * 5000 + b'\\n'); os.close(write_fd)\n"
            "print(pump.drain(60), len(warnings), warnings)\n"
            "pump.close()\n"
        )
        log = tmp_path / "log"
        done = subprocess.run([sys.executable, "-c", code, str(log)], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("True 1 ")
        assert "File too large" in done.stdout
        assert log.read_bytes() == b"x" * 1000

    def test_unexpected_error_costs_one_stream_its_extras(self, rig: Rig) -> None:
        class BrokenTail(Tail):
            def feed(self, data: bytes) -> None:
                raise ZeroDivisionError("a bug")

        broken_fd, sound_fd = rig.add("rank 0 stderr", b"[w0]:", tail=BrokenTail()), rig.add("log", b"[w1]:")
        for number in range(3):
            write_all(broken_fd, b"%d\n" % number)
            wait_until(lambda size=2 * number + 2: len(rig.file("rank 0 stderr")) == size, "it arrived")  # type: ignore[misc]
        rig.copy((broken_fd, b""), (sound_fd, b"text\n"))
        assert rig.file("rank 0 stderr") == b"0\n1\n2\n"
        assert rig.console() == b"[w1]:text\n"
        (warning,) = rig.warnings
        assert "rank 0 stderr" in warning
        assert "ZeroDivisionError: a bug" in warning

    def test_writer_never_blocks_on_a_stream_that_has_lost_every_outlet(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(fd: int, data: bytes) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(stdio, "write_some", fail)
        # Far more than the pipe holds: this returns only because somebody reads.
        rig.copy((rig.add("log", b"[w0]:"), b"x" * 5_000_000))
        assert len(rig.warnings) == 1

    def test_failing_warning_callback_does_not_stop_the_pump(self, tmp_path: Path) -> None:
        def warn(text: str) -> None:
            raise SystemExit(text)

        rig = Rig(tmp_path, warn)
        rig.pump.start()
        try:
            rig.copy((rig.add("log", b"[w0]:", file_fd=os.open("/dev/full", os.O_WRONLY)), b"text\n"))
            assert rig.console() == b"[w0]:text\n"
        finally:
            rig.tear_down()

    def test_failing_poll_is_reported_and_tried_again(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        serve, failures = Pump._serve_ready, [MemoryError("none left")]

        def flaky(self: Pump) -> None:
            serve(self)
            if failures:
                raise failures.pop()

        monkeypatch.setattr(Pump, "_serve_ready", flaky)
        rig.copy((rig.add("log"), b""), (rig.add("log"), b"after all"))
        assert rig.file("log") == b"after all"
        wait_until(lambda: bool(rig.warnings), "the failure is reported")
        assert len(rig.warnings) == 1
        assert "MemoryError: none left" in rig.warnings[0]


class BlockedConsole:
    """A pipe that is full and that nobody reads, until `read_all`."""

    def __init__(self, is_blocking: bool = True) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.filler = support.fill(self.write_fd)
        os.set_blocking(self.write_fd, is_blocking)

    def read_until(self, end: bytes) -> bytes:
        """What comes after the filler, up to `end`."""
        received = b""
        deadline = time.monotonic() + DEADLINE_S
        while not received.endswith(end) or len(received) < self.filler:
            readable, _, _ = select.select([self.read_fd], [], [], deadline - time.monotonic())
            assert readable, f"waited in vain for {end!r}"
            received += os.read(self.read_fd, 65536)
        return received[self.filler :]

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)


@pytest.mark.parametrize("is_blocking", [True, False])
class TestBlockedConsole:
    def test_drain_gives_up_and_nothing_is_lost(self, rig: Rig, is_blocking: bool) -> None:
        console = BlockedConsole(is_blocking)
        text = b"".join(b"line %d\n" % number for number in range(100_000)) + b"the end\n"
        write_fd = rig.add("log", b"[w0]:", console.write_fd)
        writer = threading.Thread(target=write_and_close, args=(write_fd, text))
        writer.start()
        wait_until(lambda: rig.file("log") != b"", "the first piece has arrived")
        assert not rig.pump.drain(0.2)
        received = console.read_until(b"[w0]:the end\n")
        assert rig.pump.drain(DEADLINE_S)
        writer.join()
        assert received == b"".join(b"[w0]:" + line for line in text.splitlines(keepends=True))
        assert rig.file("log") == text
        console.close()

    @promise("output.blocked-console-block-end: A blocked console does not block the end of the run.")
    def test_close_returns_though_the_console_is_blocked(self, rig: Rig, is_blocking: bool) -> None:
        """The files are completed, and so is the console that is not blocked."""
        console = BlockedConsole(is_blocking)
        stdout_fd, stderr_fd = rig.add("stdout", b"[out]:", console.write_fd), rig.add("stderr", b"[err]:")
        write_all(stdout_fd, b"first\n")
        wait_until(lambda: rig.pump.is_at_console, "the pump writes to the console")
        thread = rig.pump.thread
        write_all(stdout_fd, b"second\nthi")
        write_all(stderr_fd, b"the reason\nof it")
        os.close(stderr_fd)
        rig.pump.close()
        assert rig.file("stdout") == b"first\nsecond\nthi"
        assert rig.file("stderr") == b"the reason\nof it"
        assert rig.console() == b"[err]:the reason\n[err]:of it\n"
        assert rig.warnings == []
        rig.pump.close()
        assert thread is not None
        assert not thread.is_alive()
        with pytest.raises(BrokenPipeError):
            os.write(stdout_fd, b"nobody reads")
        os.close(stdout_fd)
        console.close()


@promise("""hangs.workers-write-lot-hide: Workers that write a lot do not hide a hang: only a blocked console stops the
    clock.""")
def test_a_console_holds_workers_up_only_if_it_blocks_for_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a hang would go unseen while workers write a lot, and the pump is busy at every look."""
    console = BlockedConsole()
    monkeypatch.setattr(pump_module, "_BLOCKED_AFTER_S", 3600.0)
    write_fd = rig.add("log", b"", console.write_fd)
    write_all(write_fd, b"first\n")
    wait_until(lambda: rig.pump.is_at_console, "the pump writes to the console")
    assert not rig.pump.is_blocked
    monkeypatch.setattr(pump_module, "_BLOCKED_AFTER_S", 0.01)
    wait_until(lambda: rig.pump.is_blocked, "the console counts as blocked")
    os.close(write_fd)
    console.read_until(b"")
    assert rig.pump.drain(DEADLINE_S)
    monkeypatch.setattr(pump_module, "_BLOCKED_AFTER_S", -1.0)
    assert not rig.pump.is_blocked
    console.close()


@pytest.mark.parametrize("kind", ["a socket", "a terminal", "an object"])
def test_consoles_that_are_no_pipes(rig: Rig, kind: str) -> None:
    """A socket cannot be opened once more without blocking."""
    shown, text = b"", b"".join(b"line %d\n" % number for number in range(50_000))
    if kind == "an object":
        console = io.StringIO()
        rig.copy((rig.add("log", b"", console), text))  # type: ignore[arg-type]  # as in a notebook
        assert console.getvalue().encode() == text
        return
    near, far = os.openpty() if kind == "a terminal" else (each.detach() for each in socket.socketpair())
    if kind == "a terminal":
        tty.setraw(far)
    writer = threading.Thread(target=write_and_close, args=(rig.add("log", b"", far), text))
    writer.start()
    while len(shown) < len(text):
        shown += os.read(near, 1 << 16)
    writer.join()
    assert shown == text
    assert rig.pump.drain(DEADLINE_S)
    os.close(near)
    os.close(far)


class TestDrainAndClose:
    def test_close_takes_what_is_there_from_a_stream_without_end(self, rig: Rig) -> None:
        """As when a process that outlived its worker still holds the stream."""
        write_fd = rig.add("log", b"[w0]:")
        write_all(write_fd, b"x" * 700_000 + b"\npartial")
        rig.pump.close()
        assert rig.file("log") == b"x" * 700_000 + b"\npartial"
        assert rig.console() == b"[w0]:" + b"x" * 700_000 + b"\n[w0]:partial\n"
        assert not rig.pump.drain(DEADLINE_S)
        os.close(write_fd)

    def test_close_is_not_kept_busy_by_an_endless_stream(self, rig: Rig) -> None:
        tail = Tail()
        rig.pump.add(Stream(os.open("/dev/zero", os.O_RDONLY), "endless", None, None, tail))
        wait_until(lambda: tail.text() != "", "bytes flow")
        rig.pump.close()
        thread = rig.pump.thread
        assert thread is not None
        assert not thread.is_alive()

    def test_close_leaves_no_descriptor_and_no_thread(self, tmp_path: Path) -> None:
        gc.collect()  # What tests before this one have left open and forgotten must not be closed in between.
        before = support.open_descriptors().keys()
        rig = Rig(tmp_path)
        rig.pump.start()
        ended_fd, open_fd = rig.add("ended"), rig.add("open")
        os.close(ended_fd)
        thread = rig.pump.thread
        rig.pump.close()
        rig.pump.close()
        os.close(open_fd)
        os.close(rig.console_fd)
        assert support.open_descriptors().keys() == before
        assert thread is not None
        assert not thread.is_alive()

    def test_add_after_close_leaves_the_descriptors_to_the_caller(self, rig: Rig) -> None:
        rig.pump.close()
        read_fd, write_fd = open_channel(None)
        with pytest.raises(InternalError, match="rank 7 stdout"):
            rig.pump.add(Stream(read_fd, "rank 7 stdout", None, None, None))
        os.close(read_fd)
        os.close(write_fd)

    def test_interpreter_and_forked_child_end_while_the_pump_runs(self) -> None:
        """Neither the child of a fork nor the process itself waits for the thread at its end."""
        code = (
            "import os, sys\n"
            "from holdfast.process.output.pump import LinePrefixer, Pump, Stream\n"
            "from holdfast.process.output.pump import open_channel\n"
            "pump = Pump(print); pump.start()\n"
            "read_fd, write_fd = open_channel(None)\n"
            "pump.add(Stream(read_fd, 'rank 0', None, 1, None, LinePrefixer(b'[w0]:')))\n"
            "pid = os.fork()\n"
            "if pid == 0: sys.exit(7)\n"
            "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\n"
        )
        command = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


class TestChannel:
    @pytest.fixture
    def terminal(self) -> Iterator[int]:
        """A terminal of 33 by 77 characters that nobody looks at."""
        master_fd, terminal_fd = os.openpty()
        fcntl.ioctl(terminal_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
        yield terminal_fd
        os.close(master_fd)
        os.close(terminal_fd)

    @pytest.mark.parametrize("console", ["none", "a file", "closed", "a terminal", "a terminal, and no pty left"])
    def test_channels(self, console: str, terminal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> tuple[int, int]:
            raise OSError(errno.ENOSPC, "no ptys left")

        if console.endswith("left"):
            monkeypatch.setattr(os, "openpty", refuse)
        with open(tmp_path / "file", "wb") as file:
            fds = {"none": None, "a file": file.fileno(), "closed": 1_000_000}
            read_fd, write_fd = open_channel(fds.get(console, terminal))
            assert os.isatty(write_fd) == (console == "a terminal")
            if os.isatty(write_fd):
                assert os.get_terminal_size(write_fd) == (77, 33)
            for fd in (read_fd, write_fd):
                assert not os.get_inheritable(fd)
                os.close(fd)

    @proves("output.terminal-worker-stderr-terminal")
    def test_worker_on_a_terminal(self, rig: Rig, terminal: int) -> None:
        """It sees a terminal; its bytes arrive unchanged; its end is the end of the stream, not an error."""
        code = (
            "import os, sys\n"
            "print(sys.stdout.isatty(), *os.get_terminal_size(1))\n"
            "print('\\x1b[31mred\\x1b[0m\\r\\n\\x03\\x04\\x11', end='')\n"
        )
        rig.spawn(rig.add("log", None, tty_fd=terminal), code)
        assert rig.pump.drain(DEADLINE_S)
        assert rig.file("log") == rig.console() == b"True 77 33\n\x1b[31mred\x1b[0m\r\n\x03\x04\x11"
        assert rig.warnings == []

    @proves("output.terminal-worker-stderr-terminal")
    def test_nothing_is_lost_at_the_end_of_a_terminal(self, rig: Rig, terminal: int) -> None:
        code = (
            "import os, signal\n"
            "data = b''.join(b'line %d\\n' % i for i in range(100000)); at = 0\n"
            "while at < len(data): at += os.write(1, data[at:at + 4096])\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        rig.spawn(rig.add("log", b"[w0]:", tty_fd=terminal), code)
        assert rig.pump.drain(DEADLINE_S)
        assert rig.file("log") == b"".join(b"line %d\n" % number for number in range(100_000))


class TestSharedTerminal:
    """Several streams whose console is shown as a terminal shows it. The console is a file here."""

    def add(self, rig: Rig, view: TerminalView, rank: int) -> int:
        read_fd, write_fd = open_channel(None)
        source = view.source("stdout", rank, b"[%d]:" % rank)
        rig.pump.add(Stream(read_fd, f"rank {rank}", rig.create(f"log{rank}"), rig.console_fd, None, source=source))
        return write_fd

    def test_deadlines_are_kept_without_further_output(self, rig: Rig) -> None:
        view = TerminalView()
        first, second = self.add(rig, view, 0), self.add(rig, view, 1)
        write_all(first, b"line\nprompt? ")
        wait_until(lambda: rig.console() == b"[0]:line\n[0]:prompt? ", "both are shown")
        write_all(second, b"other\n")
        wait_until(lambda: rig.console().endswith(b"prompt? \n[1]:other\n"), "the other line is shown")
        rig.copy((first, b"yes\n"), (second, b""))
        assert rig.console() == b"[0]:line\n[0]:prompt? \n[1]:other\n[0]:prompt? yes\n"
        assert rig.file("log0") == b"line\nprompt? yes\n"

    def test_close_writes_what_waits(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(folding, "FOLD_WAIT_S", 3600.0)
        monkeypatch.setattr(terminal, "PARTIAL_WAIT_S", 3600.0)
        view = TerminalView()
        writers = [self.add(rig, view, rank) for rank in range(3)]
        for write_fd in writers[:2]:
            write_all(write_fd, b"same\nand a rest")
        for rank in range(2):
            wait_until(lambda rank=rank: rig.file(f"log{rank}") != b"", "it has arrived")  # type: ignore[misc]
        rig.pump.close()
        assert rig.console() == b"[ranks 0, 1] same\n[ranks 0, 1] and a rest\n"
        for write_fd in writers:
            os.close(write_fd)
