"""How `holdfast logs` reads a log file: whole characters and whole lines, whatever piece of the file was there."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.agent import inspection
from holdfast.cli.logs import Printer, Source
from holdfast.cli.runs import RunView
from holdfast.observe.dashboard.follow import Follower


class Reader:
    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._printer = capsys, Printer(None, as_json=False)
        self.source = Source(RunView(), 0, "stdout", "", str(path), None)
        self._printer.prefixes = {self.source: ""}

    def read(self, tail: int | None = None) -> str:
        self.source.read(self._printer, tail)
        return self._capsys.readouterr().out

    def finish(self) -> str:
        self.source.finish(self._printer)
        return self._capsys.readouterr().out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stdout.log"


@pytest.mark.parametrize("character", ["é", "€", "🏖"])
def test_a_character_is_not_split_between_two_looks(
    character: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, reader, shown = f"a{character}b\n".encode(), Reader(path, capsys), ""
    for end in range(len(written) + 1):
        path.write_bytes(written[:end])
        shown += reader.read()
    assert shown == f"a{character}b\n"


def test_a_character_is_not_split_between_two_pieces(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "x" + "é" * inspection.CHUNK_BYTES
    path.write_text(f"{text}\n")
    assert Reader(path, capsys).read() == f"{text}\n"


def test_a_character_that_is_never_complete_is_shown_at_the_end(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_bytes("é".encode()[:1])
    reader = Reader(path, capsys)
    assert (reader.read(), reader.finish()) == ("", "\\xc3\n")


def test_the_dashboard_goes_on_after_a_character_that_is_never_complete(path: Path) -> None:
    path.write_bytes(b"a" + "é".encode()[:1])
    follower = Follower(attempt=0)
    looks = [follower.take({**inspection.read_piece(str(path), follower.offset), "attempt": 0}) for _ in range(2)]
    assert ([each["text"] for each in looks], follower.is_at_end) == (["a", ""], True)


@pytest.mark.parametrize("line", ["x" * 99, "é" * 99, "x" * 3 * inspection.CHUNK_BYTES])
def test_the_tail_begins_with_a_whole_line(line: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(f"{line}\n" * 2000 if len(line) < 100 else f"{line}\nlast\n")
    shown = Reader(path, capsys).read(tail=100_000).splitlines()
    assert set(shown) == ({line} if len(line) < 100 else {"last"})


def test_the_tail_of_a_line_that_grows_is_not_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("x" * 2 * inspection.CHUNK_BYTES)
    reader = Reader(path, capsys)
    assert reader.read(tail=10) == ""
    with path.open("a") as file:
        file.write("end of it\nnext\nunfin")
    assert (reader.read(), reader.finish()) == ("next\n", "unfin\n")


def test_a_short_file_has_its_first_line_in_the_tail(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("a\nb\nc\n")
    assert Reader(path, capsys).read(tail=3) == "a\nb\nc\n"
