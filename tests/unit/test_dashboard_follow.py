"""Following a log, piece by piece, through restarts and floods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.observe.dashboard.follow import Follower
from holdfast.process.output import log_files
from holdfast.process.output.log_files import CHUNK_BYTES


def read(follower: Follower, *paths: Path) -> dict[str, Any]:
    """One path for each attempt."""
    attempt = len(paths) - 1 if follower.attempt is None else follower.attempt
    return follower.take({**log_files.read_piece(str(paths[attempt]), follower.offset), "attempt": attempt})


def test_what_is_there_and_what_comes(tmp_path: Path) -> None:
    log, follower = tmp_path / "log", Follower()
    log.write_text("one\ntwo\n")
    assert read(follower, log) == {"text": "one\ntwo\n", "note": ""}
    assert read(follower, log) == {"text": "", "note": ""}
    with log.open("a") as file:
        file.write("thr")
    assert read(follower, log)["text"] == "thr", "an unfinished line is shown, too"


def test_a_long_log_begins_near_its_end(tmp_path: Path) -> None:
    log, follower = tmp_path / "log", Follower()
    log.write_text("".join(f"line {n:08d}\n" for n in range(100_000)))
    shown = read(follower, log)
    assert shown["text"].startswith("line 000")
    assert shown["text"].endswith("line 00099999\n")
    assert len(shown["text"]) <= CHUNK_BYTES
    assert shown["note"].endswith("MB of the log come before this")


def test_a_flood_is_not_read_to_the_end(tmp_path: Path) -> None:
    log, follower = tmp_path / "log", Follower()
    log.write_text("begin\n")
    read(follower, log)
    with log.open("a") as file:
        file.write("x" * 79 + "\n" + ("y" * 79 + "\n") * 20_000)
    read(follower, log)
    shown = read(follower, log)
    assert "of the log come before this" in shown["note"]
    assert read(follower, log) == {"text": "", "note": ""}, "it is at the end"


def test_a_restart_has_another_log(tmp_path: Path) -> None:
    first, second, follower = tmp_path / "first", tmp_path / "second", Follower()
    first.write_text("old\n")
    second.write_text("new\n")
    read(follower, first)
    first.write_text("old\nits last words\n")
    assert read(follower, first, second) == {"text": "", "note": ""}
    assert read(follower, first, second) == {"text": "its last words\n", "note": ""}
    assert not follower.is_at_end
    assert read(follower, first, second) == {"text": "new\n", "note": "attempt 1 begins"}
    assert follower.is_at_end
    # One whose attempt was chosen stays there, and one that cannot be read any more is left.
    fixed = Follower(0)
    for _ in range(2):
        assert read(fixed, first, second)["note"] == ""
    read(follower, first, second, second)
    follower.go_on()
    assert read(follower, first, second, second) == {"text": "new\n", "note": "attempt 2 begins"}


def test_a_log_that_was_cut_or_replaced(tmp_path: Path) -> None:
    log, follower = tmp_path / "log", Follower()
    log.write_text("a long line\n")
    read(follower, log)
    log.write_text("short\n")
    assert read(follower, log)["note"] == "the log was cut; from its beginning"
    assert read(follower, log)["text"] == "short\n"
    fresh = tmp_path / "fresh"
    fresh.write_text("other\n")
    fresh.replace(log)
    assert read(follower, log)["note"] == "the log is another file now"
    assert read(follower, log)["text"] == "other\n"


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
def test_what_is_shown_of_it(text: str, shown: str) -> None:
    piece = {"text": text, "offset": len(text.encode()), "size": len(text.encode()), "file": "1:2"}
    assert Follower().take(piece)["text"] == shown


@pytest.mark.parametrize(
    "piece", [{}, {"text": 5, "offset": "x", "size": [], "file": 7}, {"attempt": "x", "file": "1"}]
)
def test_junk_is_nothing(piece: dict[str, Any]) -> None:
    follower = Follower()
    follower.take({"text": "a", "offset": 1, "size": 1, "file": "0"})
    for _ in range(3):
        assert follower.take(piece)["text"] == ""
