"""However a stream is cut into pieces, the same bytes and lines come out of the pump."""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.process.output.lines import HeldLine, LineFilter, LinePrefixer
from holdfast.process.output.pump import Pump, Stream, Tail, open_channel
from tests.promises import promise

# Line ends and needles are rare in random bytes, so most texts are made of interesting pieces.
TEXTS = st.one_of(
    st.binary(max_size=200),
    st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\x00\xff", b">"]), max_size=40).map(b"".join),
)
PREFIXES = st.sampled_from([b"", b">", b"[default0]:"])


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A text, and the same text in pieces (some of them empty)."""
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    edges = [0, *cuts, len(text)]
    return text, [text[start:end] for start, end in pairwise(edges)]


def expected_lines(text: bytes, prefix: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    newline = b"" if not prefix or not lines or lines[-1].endswith(b"\n") else b"\n"
    return b"".join(prefix + line for line in lines) + newline


def prefixed(pieces: list[bytes], prefix: bytes, max_held_bytes: int = 1 << 30) -> list[bytes]:
    held, prefixer = HeldLine(), LinePrefixer(prefix)
    found = []
    for piece in pieces:
        found.append(prefixer.add(held.take(piece)))
        if len(held) > max_held_bytes:
            found.append(prefixer.add(held.release()))
    return [*found, prefixer.end(held.flush())]


@given(cut_texts(), PREFIXES)
def test_every_line_has_the_prefix_once(cut: tuple[bytes, list[bytes]], prefix: bytes) -> None:
    text, pieces = cut
    assert b"".join(prefixed(pieces, prefix)) == expected_lines(text, prefix)


@given(cut_texts())
def test_whole_lines_only(cut: tuple[bytes, list[bytes]]) -> None:
    _, pieces = cut
    for out in prefixed(pieces, b">"):
        assert out == b"" or (out.startswith(b">") and out.endswith((b"\n", b"\r")))


@given(cut_texts(), PREFIXES, st.integers(0, 5))
def test_a_bound_on_held_bytes_changes_nothing_in_sum(
    cut: tuple[bytes, list[bytes]], prefix: bytes, max_held_bytes: int
) -> None:
    text, pieces = cut
    assert b"".join(prefixed(pieces, prefix, max_held_bytes)) == expected_lines(text, prefix)


@given(cut_texts(), st.lists(st.sampled_from([b"a", b"bc", b"\xff"]), min_size=1).map(tuple))
def test_filter_picks_the_lines_that_match(cut: tuple[bytes, list[bytes]], needles: tuple[bytes, ...]) -> None:
    text, pieces = cut
    matching = [line for line in text.splitlines() if any(needle in line for needle in needles)]
    held, line_filter = HeldLine(), LineFilter(needles, b"")
    found = b"".join(map(line_filter.pick, [*map(held.take, pieces), held.flush()]))
    assert found.replace(b"\r\n", b"\n") == b"".join(line + b"\n" for line in matching)


@given(cut_texts(), st.integers(1, 50))
def test_tail_does_not_depend_on_the_cuts(cut: tuple[bytes, list[bytes]], max_bytes: int) -> None:
    text, pieces = cut
    whole, piecewise = Tail(max_bytes), Tail(max_bytes)
    whole.feed(text)
    for piece in pieces:
        piecewise.feed(piece)
    assert piecewise.text() == whole.text()


@promise("output.line-torn-wherever-stream: No line is torn, wherever the stream is cut.")
@given(st.lists(cut_texts(), min_size=1, max_size=4))
@settings(max_examples=40)
def test_through_real_pipes(cuts: list[tuple[bytes, list[bytes]]]) -> None:
    """Several streams, written piece by piece in turn: files are exact, each stream's console lines too."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        consoles = [directory / f"console{number}" for number in range(len(cuts))]
        warnings: list[str] = []
        pump = Pump(warnings.append)
        pump.start()
        writers, console_fds = [], []
        for number, console in enumerate(consoles):
            read_fd, write_fd = open_channel(None)
            file_fd = os.open(directory / f"log{number}", os.O_WRONLY | os.O_CREAT)
            console_fds.append(os.open(console, os.O_WRONLY | os.O_CREAT))
            pump.add(Stream(read_fd, f"rank {number}", file_fd, console_fds[-1], None, LinePrefixer(b"[w]:")))
            writers.append(write_fd)
        for turn in range(max(len(pieces) for _, pieces in cuts)):
            for write_fd, (_, pieces) in zip(writers, cuts, strict=True):
                if turn < len(pieces) and pieces[turn]:
                    os.write(write_fd, pieces[turn])
        for write_fd in writers:
            os.close(write_fd)
        assert pump.drain(60)
        pump.close()
        for fd in console_fds:
            os.close(fd)
        for number, (text, _) in enumerate(cuts):
            assert (directory / f"log{number}").read_bytes() == text
            assert consoles[number].read_bytes() == expected_lines(text, b"[w]:")
        assert warnings == []
