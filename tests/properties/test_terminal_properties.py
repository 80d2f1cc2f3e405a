"""Whatever several ranks write, whenever: a terminal shows each rank's lines in order, whole, and loses none."""

from __future__ import annotations

import re
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.process.output.folding import FOLD_WAIT_S, Fold, LineFolder
from holdfast.process.output.terminal import TerminalView
from tests.promises import proves

RANKS = range(3)

# Who writes what after which wait. Few lines and short waits, so that many are the same at about the same time.
STEPS = st.lists(
    st.tuples(st.sampled_from(RANKS), st.sampled_from(["out", "err"]), st.sampled_from([b"x", b"y", b"z"]),
              st.sampled_from([0.0, 0.0, 0.01, 0.05, 0.2])),
    max_size=40,
)  # fmt: skip
PIECES = st.sampled_from([b"a", b"bc", b"\n", b"\n", b"d\n", b"\xff\x00", b"e\nf\n"])
WRITES = st.lists(st.tuples(st.sampled_from(RANKS), PIECES, st.sampled_from([0.0, 0.0, 0.05, 0.3])), max_size=40)


@proves("output.terminal-prefixes-line-several")
@given(STEPS)
def test_folded_lines_keep_their_order_and_none_is_lost_or_late(steps: list[tuple[int, str, bytes, float]]) -> None:
    folder, now = LineFolder(), 0.0
    for rank in RANKS:
        folder.open("out", rank)
        folder.open("err", rank)
    out: list[Fold] = []
    added_at: dict[tuple[int, int], float] = {}
    written: dict[int, list[tuple[str, bytes]]] = {rank: [] for rank in RANKS}
    for rank, stream, line, wait_s in steps:
        now += wait_s
        while (deadline := folder.next_deadline()) is not None and deadline <= now:
            out += (due := folder.take(deadline))
            assert due
        added_at[rank, len(written[rank])] = now
        written[rank].append((stream, line))
        folder.add(stream, rank, b"", line, now)
        out += folder.take(now)
        shown = Counter(each for fold in out for each in fold.ranks)
        assert all(at > now - FOLD_WAIT_S for (each, index), at in added_at.items() if index >= shown[each])
    out += folder.take(now + FOLD_WAIT_S)
    assert folder.next_deadline() is None
    assert all(len(set(fold.ranks)) == len(fold.ranks) for fold in out)
    assert {rank: [(fold.stream, fold.line) for fold in out if rank in fold.ranks] for rank in RANKS} == written


@proves("output.terminal-unfinished-line-several")
@given(WRITES, st.booleans())
def test_a_terminal_shows_every_line_whole_and_in_order(writes: list[tuple[int, bytes, float]], folds: bool) -> None:
    """What it shows of unfinished lines comes in addition: they are written again if another line came between."""
    view, now = TerminalView(folds=folds), 0.0
    sources = {rank: view.source("out", rank, b"[rank %d] " % rank) for rank in RANKS}
    written = dict.fromkeys(RANKS, b"")
    shown = b""
    for rank, piece, wait_s in writes:
        ends = now + wait_s
        while (deadline := view.next_deadline()) is not None and deadline <= ends:
            shown += view.pass_time(deadline)
        now = ends
        shown += view.add(sources[rank], piece, now)
        written[rank] += piece
    for rank in RANKS:
        shown += view.end(sources[rank], now)
    assert view.next_deadline() is None
    assert shown == b"" or shown.endswith(b"\n")
    for rank, text in written.items():
        lines = text.split(b"\n")
        assert occur_in_order(lines if lines[-1] else lines[:-1], lines_of(rank, shown))


def lines_of(rank: int, shown: bytes) -> list[bytes]:
    """The lines on the terminal that name the rank, without their labels."""
    found = (re.match(rb"\[ranks? ([\d, -]+)\] (.*)", line, re.DOTALL) for line in shown.split(b"\n"))
    return [match[2] for match in found if match and rank in numbers(match[1].decode())]


def numbers(text: str) -> set[int]:
    ends = [[int(end) for end in each.split("-")] for each in text.split(", ")]
    return {number for end in ends for number in range(end[0], end[-1] + 1)}


def occur_in_order(lines: list[bytes], shown: list[bytes]) -> bool:
    """Whether each line is there once; before it, there may be what was shown of its beginning."""
    counts = {0}  # How many lines there may have been so far.
    for each in shown:
        whole = {count + 1 for count in counts if lines[count : count + 1] == [each]}
        begun = (count for count in counts if count < len(lines) and lines[count] != each)
        counts = whole | {count for count in begun if lines[count].startswith(each)}
    return len(lines) in counts
