"""Which lines of several ranks go out as one: tables of lines with rank and time."""

from __future__ import annotations

import pytest

from holdfast.process.output import folding
from holdfast.process.output.folding import FOLD_WAIT_S, Fold, LineFolder
from tests.promises import promise, proves


class Folded:
    """A folder for the stdout of some ranks; what comes out of it is written as `01:line`."""

    def __init__(self, ranks: int = 2) -> None:
        self.folder = LineFolder()
        for rank in range(ranks):
            self.folder.open("stdout", rank)

    def add(self, rank: int, line: str, now: float = 0.0, stream: str = "stdout") -> list[str]:
        self.folder.add(stream, rank, b"", line.encode(), now)
        return self.take(now)

    def take(self, now: float) -> list[str]:
        return [written(fold) for fold in self.folder.take(now)]


def written(fold: Fold) -> str:
    return "".join(map(str, fold.ranks)) + ":" + fold.line.decode()


# Lines as they are written at one moment, `0a` by rank 0; what goes out at once; what goes out when the wait is over.
@promise("""output.terminal-prefixes-line-several: On a terminal with prefixes, the same line of several ranks is shown
    once, as `[ranks 0-3] ...`. It waits for 100 ms at most. Every rank's lines keep their order, and none is lost.
    Lines that differ in a byte are not the same. In files and pipes nothing is folded.""")
@pytest.mark.parametrize(
    ("ranks", "lines", "at_once", "later"),
    [
        (1, "0a 0b 0a", "0:a 0:b 0:a", ""),
        (2, "0a", "", "0:a"),
        (2, "0a 1a", "01:a", ""),
        (2, "1a 0a", "10:a", ""),
        (3, "0a 2a", "", "02:a"),
        (2, "0a 1A", "", "0:a 1:A"),
        (2, "0a 0b 1a 1b", "01:a 01:b", ""),
        (2, "0a 0a 1a 1a", "01:a 01:a", ""),
        (2, "0a 0a", "", "0:a 0:a"),
        (2, "0a 0b 1b 1a", "", "0:a 01:b 1:a"),
        (2, "0a 0x 1b 1x", "", "0:a 1:b 01:x"),
        (3, "0a 0x 1b 1x 2c 2x", "", "0:a 1:b 2:c 012:x"),
        (2, "0x 0a 1b 1x", "", "0:x 0:a 1:b 1:x"),
        (2, "0a 0x 1b 1x 0x 1x", "", "0:a 1:b 01:x 01:x"),
        (2, "0a 1b 1a 0b", "", "1:b 01:a 0:b"),
    ],
)
def test_lines_of_one_moment(ranks: int, lines: str, at_once: str, later: str) -> None:
    folded = Folded(ranks)
    out = [text for each in lines.split() for text in folded.add(int(each[0]), each[1:])]
    assert out == at_once.split()
    assert folded.take(FOLD_WAIT_S) == later.split()
    assert folded.folder.next_deadline() is None


@proves("output.terminal-prefixes-line-several")
def test_a_line_waits_for_a_bounded_time() -> None:
    folded = Folded()
    assert folded.folder.next_deadline() is None
    assert folded.add(0, "a", now=5.0) == []
    assert folded.folder.next_deadline() == 5.0 + FOLD_WAIT_S
    assert folded.take(5.0 + FOLD_WAIT_S - 0.001) == []
    assert folded.take(5.0 + FOLD_WAIT_S) == ["0:a"]
    assert folded.add(1, "a", now=5.2) == []


def test_a_line_that_has_moved_back_is_not_late() -> None:
    """It takes those before it along, though they could wait for longer."""
    folded = Folded(3)
    assert folded.add(0, "x", now=0.0) == []
    assert folded.add(1, "b", now=0.05) == []
    assert folded.add(1, "x", now=0.06) == []
    assert folded.folder.next_deadline() == FOLD_WAIT_S
    assert folded.take(FOLD_WAIT_S) == ["1:b", "01:x"]


def test_streams_are_told_apart() -> None:
    folded = Folded()
    folded.folder.open("stderr", 0)
    folded.folder.open("stderr", 1)
    assert folded.add(0, "a") == []
    assert folded.add(1, "a", stream="stderr") == []
    assert folded.take(FOLD_WAIT_S) == ["0:a", "1:a"]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    folded = Folded(3)
    assert folded.add(0, "a") == []
    folded.folder.close("stdout", 0)
    assert folded.take(0.0) == [], "two others may still write it"
    assert folded.add(1, "a") == []
    folded.folder.close("stdout", 2)
    assert folded.take(0.0) == ["01:a"]


def test_lines_of_a_rank_can_be_had_at_once() -> None:
    folded = Folded(3)
    for each in ("1a", "0b", "1c", "0d"):
        folded.add(int(each[0]), each[1:])
    assert folded.folder.take_lines_of(2) == [], "it has written nothing"
    assert [written(fold) for fold in folded.folder.take_lines_of(1)] == ["1:a", "0:b", "1:c"]


@pytest.mark.parametrize(("limit", "value"), [("_WAITING_MAX_LINES", 3), ("_WAITING_MAX_BYTES", 12)])
def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(folding, limit, value)
    folded = Folded()
    assert [folded.add(0, f"{number:04}") for number in range(5)] == [[], [], [], ["0:0000"], ["0:0001"]]
