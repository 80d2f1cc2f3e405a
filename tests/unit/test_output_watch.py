"""What moves: output, matching lines, files, and the counters of a tree."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import procfs
from holdfast.hangs.policy import Signal
from holdfast.hangs.watch import UsageMeter
from holdfast.process.output import output_watch
from holdfast.process.output.output_watch import OutputWatch
from tests.promises import proves
from tests.support import wait_until


def test_what_the_pump_saw() -> None:
    watch = OutputWatch()
    first, second = watch.stream(0), watch.stream(1)
    assert watch.moved_at([0, 1]) is None
    first.saw(b"hello", 5.0)
    second.saw(b"x", 7.0)
    assert (watch.moved_at([0]), watch.moved_at([1]), watch.moved_at([0, 1])) == (5.0, 7.0, 7.0)
    assert watch.moved_at([]) is None, "of those that have ended nobody asks"
    assert watch.matched_at() is None


@pytest.mark.parametrize(
    ("pattern", "pieces", "matches"),
    [
        (r"step \d+", [b"step 1\n"], [True]),
        (r"step \d+", [b"st", b"ep ", b"1", b"2\nx"], [False, False, False, True]),
        (r"step \d+", [b"step 1"], [False]),
        (r"^step \d+$", [b"a\nstep 1\nb\n"], [True]),
        (r"^step \d+$", [b"step 1\r\n", b"\rstep 2\r", b"\r"], [True, False, True]),
        (r"^step \d+$", [b"a step 1\n"], [False]),
        ("Schritt \u00fc", ["Schritt \u00fc\n".encode()], [True]),
        ("step", [b"\xff\xfe step\n"], [True]),
        ("b", [b"a" * 70_000, b"b" * 70_000], [False, True]),
    ],
)
def test_lines_that_match(pattern: str, pieces: list[bytes], matches: list[bool]) -> None:
    watch = OutputWatch(pattern)
    stream = watch.stream(0)
    found = []
    for index, piece in enumerate(pieces):
        stream.saw(piece, float(index))
        found.append(stream.matched_at == float(index))
    assert found == matches


def test_matching_lines_are_counted_by_worker() -> None:
    watch = OutputWatch(r"step \d+")
    out, err, other = watch.stream(0), watch.stream(0), watch.stream(1)
    out.saw(b"step 1\nstep 2\nloss\nstep", 1.0)
    err.saw(b"step 3\n", 2.0)
    out.saw(b" 4\n", 3.0)
    other.saw(b"loss\n", 4.0)
    assert watch.matches_of(0) == (3.0, 4)
    assert watch.matches_of(1) == (None, 0)
    watch.give_up("it is only a test")
    assert watch.matches_of(0) == (3.0, None)
    assert OutputWatch("").matches_of(0) == (None, None)
    everywhere = OutputWatch("x*")
    everywhere.stream(0).saw(b"abc" * 100_000 + b"\n", 1.0)
    assert everywhere.matches_of(0) == (1.0, output_watch._COUNTED_MAX)


@proves("hangs.failure-watch-ends-healthy")
def test_a_pattern_that_takes_too_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(output_watch, "_SLOW_SEARCH_S", -1.0)
    watch = OutputWatch("step")
    stream = watch.stream(0)
    stream.saw(b"step 1\n", 0.0)
    assert watch.has_given_up
    assert "takes too long" in caplog.text
    stream.saw(b"step 2\n", 9.0)
    assert (stream.at, stream.matched_at) == (9.0, 0.0)
    assert len(caplog.records) == 1


def test_a_mistake_in_the_search_does_not_reach_the_pump(caplog: pytest.LogCaptureFixture) -> None:
    watch = OutputWatch("step")
    stream = watch.stream(0)
    stream._line = object()  # type: ignore[assignment]
    stream.saw(b"step 1\n", 0.0)
    assert "searching for it failed" in caplog.text


def test_a_file_that_a_worker_writes_is_seen_to_grow(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.touch()
    watch = OutputWatch(r"step \d+")
    watch.stream(0, str(path))
    assert watch.is_sampled
    seen = []
    for now, text in enumerate(["", "loading\n", "", "step 1\nst", "ep 2\n", ""]):
        with path.open("a") as file:
            file.write(text)
        watch.look(float(now))
        seen.append((watch.moved_at([0]), watch.matched_at()))
    assert seen == [(None, None), (1.0, None), (1.0, None), (3.0, 3.0), (4.0, 4.0), (4.0, 4.0)]


def test_a_file_that_is_cut_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_text("x" * 100)
    watch = OutputWatch("y")
    watch.stream(0, str(path))
    watch.look(1.0)
    path.write_text("y\n")
    watch.look(2.0)
    assert watch.moved_at([0]) == 2.0
    path.unlink()
    watch.look(3.0)
    assert watch.moved_at([0]) == 2.0


def test_of_a_file_that_grew_fast_the_end_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_watch, "_SEARCHED_MAX_BYTES", 100)
    path = tmp_path / "stdout.log"
    watch = OutputWatch("step")
    watch.stream(0, str(path))
    path.write_text("x\n" * 1000 + "step 1\n")
    watch.look(1.0)
    assert watch.matched_at() == 1.0


BUSY = """
import sys
print("x", flush=True)
if sys.argv[1] == "cpu":
    while True:
        pass
with open("/dev/zero", "rb") as file:
    while True:
        file.read(1 << 16)
"""


@pytest.mark.parametrize("what", ["cpu", "io"])
def test_what_a_tree_uses_is_counted_also_below_the_leader(what: str) -> None:
    shell = subprocess.Popen(["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", BUSY, what], stdout=subprocess.PIPE)
    assert shell.stdout is not None
    shell.stdout.read(1)
    try:
        meter = UsageMeter([Signal(what)])

        def used() -> float:
            return meter.read([shell.pid])[shell.pid][Signal(what)]

        used()
        wait_until(lambda: used() > 0, f"its {what} counts")
    finally:
        for pid in procfs.descendants_of(shell.pid):
            os.kill(pid, 9)
        shell.wait()
        shell.stdout.close()


def test_a_process_that_is_gone_has_used_nothing_more() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert UsageMeter(Signal).read([child.pid]) == {child.pid: {Signal.CPU: 0.0, Signal.IO: 0.0}}


def test_counters_that_may_not_be_read_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "_read", lambda path: None)
    assert UsageMeter(Signal).read([os.getpid()]) == {os.getpid(): {Signal.CPU: math.inf, Signal.IO: math.inf}}
