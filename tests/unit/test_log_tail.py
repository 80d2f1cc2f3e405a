"""Following a log, piece by piece: whole characters and lines, restarts, floods, files that change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.logs import Printer, Source
from holdfast.errors import HostError
from holdfast.observe.ask import AskedRun
from holdfast.observe.dashboard import picture
from holdfast.observe.log_tail import LogPiece, LogTail, Part
from holdfast.process.output import log_files
from holdfast.process.output.log_files import CHUNK_BYTES
from tests.promises import promise, proves


class Log:
    """The log of a rank, as the files of its attempts."""

    def __init__(self, directory: Path) -> None:
        self.paths = [directory / f"attempt_{number}" / "0" / "stdout.log" for number in range(4)]
        self.newest = -1
        self.is_over = False
        self.begin("")

    @property
    def path(self) -> Path:
        return self.paths[self.newest]

    def begin(self, text: str) -> None:
        self.newest += 1
        self.path.parent.mkdir(parents=True)
        self.path.write_text(text)

    def append(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)

    def piece(self, attempt: int | None, offset: int) -> LogPiece:
        path = str(self.path if attempt is None else self.paths[attempt])
        is_over = self.is_over or path != str(self.path)
        read = log_files.read_piece(path, offset)
        return LogPiece(**read, path=path, attempt=log_files.attempt_of(path), is_over=is_over)

    def look(self, tail: LogTail) -> Part:
        return tail.take(self.piece(tail.attempt, tail.offset))


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_what_is_there_and_what_comes(log: Log) -> None:
    tail = LogTail()
    log.append("one\ntwo\n")
    assert [log.look(tail) for _ in range(2)] == [Part("one\ntwo\n"), Part()]
    log.append("thr")
    assert log.look(tail) == Part("thr"), "an unfinished line, too"
    assert (tail.is_at_end, tail.is_whole) == (True, False)
    log.is_over = True
    log.look(tail)
    assert tail.is_whole


def test_a_long_log_begins_near_its_end_with_a_whole_line(log: Log) -> None:
    log.append("".join(f"line {n:08d}\n" for n in range(100_000)))
    part = log.look(LogTail())
    assert part.text.startswith("line 000")
    assert part.text.endswith("line 00099999\n")
    assert len(part.text) <= CHUNK_BYTES
    assert (part.note.endswith("MiB of the log come before this"), part.begins_anew) == (True, False)


@proves("dashboard.follows-log-chosen-rank")
def test_a_flood_is_not_read_to_the_end(log: Log) -> None:
    tail = picture.tail_for(None)
    log.append("begin\n")
    log.look(tail)
    log.append(("y" * 79 + "\n") * 20_000)
    log.look(tail)
    assert "of the log come before this" in log.look(tail).note
    assert (log.look(tail), tail.is_at_end) == (Part(), True)


@promise("""dashboard.follows-log-chosen-rank: It follows the log of a chosen rank through restarts and to its last
    line, shows earlier attempts, and takes stacks. A log that grows too fast is not read whole.""")
def test_every_attempt_is_read_to_its_end(log: Log) -> None:
    tail = LogTail()
    log.append("old\n")
    log.look(tail)
    log.append("its last words\n")
    log.begin("in between\n")
    log.begin("new\n")
    parts: list[Part] = []
    while not tail.is_at_end or not parts:
        parts.append(log.look(tail))
    notes = ["", "", *(f"attempt {number} begins, in {log.paths[number]}" for number in (1, 2))]
    assert [part.text for part in parts] == ["", "its last words\n", "in between\n", "new\n"]
    assert [part.note for part in parts] == notes
    # An attempt that was chosen is not left.
    fixed = LogTail(0)
    assert [log.look(fixed).text for _ in range(2)] == ["old\nits last words\n", ""]


def test_an_attempt_that_cannot_be_read_any_more_is_left(log: Log) -> None:
    tail = LogTail()
    log.look(tail)
    log.begin("new\n")
    log.look(tail)
    assert tail.attempt == 0
    tail.go_on()
    assert log.look(tail).text == "new\n"


def test_a_log_that_was_cut_or_replaced(log: Log) -> None:
    tail = LogTail()
    log.append("a long line\n")
    log.look(tail)
    log.path.write_text("short\n")
    assert "was cut; shown from its beginning" in log.look(tail).note
    assert log.look(tail).text == "short\n"
    fresh = log.path.with_name("fresh")
    fresh.write_text("other\n")
    fresh.replace(log.path)
    assert "is another file now" in log.look(tail).note
    assert log.look(tail).text == "other\n"


@proves("steering.logs-endpoint-shows-last")
def test_last_words_are_shown_once_and_only_after_all_before_them(log: Log) -> None:
    log.append("one\n")
    tail, late = LogTail(), LogTail()
    log.look(tail)
    held = tail.offset
    log.append("two\n")
    log.look(late)
    log.append("three\n")
    log.is_over = True
    last = log.piece(None, held)
    assert (tail.take_last(last).text, tail.is_whole) == ("two\nthree\n", True)
    assert (late.take_last(last).text, late.is_whole) == ("three\n", True), "a part was shown meanwhile"
    behind = LogTail(from_end=False)
    behind.take(LogPiece("", 0, 14, last.file, last.path, 0))
    assert (behind.take_last(last).text, behind.is_whole) == ("", False), "what is before them is missing"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m\n", "red\n"),
        (" 10%\r 20%\r 30%\r\ndone\n", " 30%\ndone\n"),
        (" 10%\r 20%\r", " 20%"),
        ("\x1b[2Jgone\n", "\\x1b[2Jgone\n"),
        ("<script>alert(1)</script>\n", "<script>alert(1)</script>\n"),
        ("\u202egnp.exe\n", "\\u202egnp.exe\n"),
    ],
)
def test_what_a_page_shows_of_it(text: str, shown: str) -> None:
    assert picture.shown_of_log(Part(text))["text"] == shown


class Reader:
    def __init__(self, log: Log, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._printer = capsys, Printer(None, as_json=False)
        self.source = Source(AskedRun(), 0, "stdout", "", str(log.path), None)
        self._printer.prefixes = {self.source: ""}

    def read(self, tail: int | None = None) -> str:
        self.source.read(self._printer, tail)
        return self._capsys.readouterr().out

    def finish(self) -> str:
        self.source.finish(self._printer)
        return self._capsys.readouterr().out


@promise("""steering.logs-splits-character-log: `holdfast logs` splits no character of a log that grows, and `--tail`
    begins with a whole line.""")
@pytest.mark.parametrize("character", ["é", "€", "🏖"])
def test_a_character_is_not_split_between_two_looks(
    character: str, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    written, reader, shown = f"a{character}b\n".encode(), Reader(log, capsys), ""
    for end in range(len(written) + 1):
        log.path.write_bytes(written[:end])
        shown += reader.read()
    assert shown == f"a{character}b\n"


@proves("steering.logs-splits-character-log")
def test_a_character_is_not_split_between_two_pieces(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    text = "x" + "é" * CHUNK_BYTES
    log.append(f"{text}\n")
    assert Reader(log, capsys).read() == f"{text}\n"


def test_a_character_that_is_never_complete_is_shown_at_the_end(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.path.write_bytes("é".encode()[:1])
    reader = Reader(log, capsys)
    assert (reader.read(), reader.finish()) == ("", "\\xc3\n")


@proves("steering.logs-splits-character-log")
@pytest.mark.parametrize("line", ["x" * 99, "é" * 99, "x" * 3 * CHUNK_BYTES])
def test_the_tail_begins_with_a_whole_line(line: str, log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.append(f"{line}\n" * 2000 if len(line) < 100 else f"{line}\nlast\n")
    shown = Reader(log, capsys).read(tail=100_000).splitlines()
    assert set(shown) == ({line} if len(line) < 100 else {"last"})


@proves("steering.logs-splits-character-log")
def test_the_tail_of_a_line_that_grows_is_not_shown(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.append("x" * 2 * CHUNK_BYTES)
    reader = Reader(log, capsys)
    assert reader.read(tail=10) == ""
    log.append("end of it\nnext\nunfin")
    assert (reader.read(), reader.finish()) == ("next\n", "unfin\n")
    short = Log(log.paths[0].parent / "short")
    short.append("a\nb\nc\n")
    assert Reader(short, capsys).read(tail=3) == "a\nb\nc\n"


class AgentElsewhere(AskedRun):
    """Has a line to show, and knows the questions for last words that the coordinator passed on."""

    def __init__(self) -> None:
        self.questions = [0]

    def ask_nodes(
        self, names: Sequence[str], request: Mapping[str, Any], timeout_s: float = 0.0
    ) -> dict[str, dict[str, Any]]:
        if request["command"] == "last_words":
            raise HostError("the coordinator is restarted")
        is_awaited = request["question"] in self.questions
        return {names[0]: {"text": "a line\n"[request["offset"] :], "offset": 7, "size": 7, "is_awaited": is_awaited}}


@proves("steering.logs-endpoint-shows-last")
def test_lines_wait_until_the_last_words_are_awaited(capsys: pytest.CaptureFixture[str]) -> None:
    agent, printer = AgentElsewhere(), Printer(None, as_json=False)
    source = Source(agent, 1, "stdout", "node", "/logs", None)
    printer.prefixes[source] = ""
    with pytest.raises(HostError):
        source.last_words()
    source.follow(printer)
    assert (source.is_held, capsys.readouterr().out) == (True, ""), "the run could end before the question arrives"
    agent.questions.append(1)
    source.follow(printer)
    assert (source.is_held, capsys.readouterr().out) == (False, "a line\n")
