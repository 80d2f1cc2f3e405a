"""What is made visible before it is shown, and what stays."""

from __future__ import annotations

import logging
import sys
import unicodedata

import pytest

from holdfast import escape, log_lines
from tests.promises import promise, proves


@promise(r"""output.lines-show-control-characters: holdfast's own lines show control characters, line separators,
    bidirectional marks and unpaired surrogates as `\x1b`, `\n` and so on, wherever the text comes from. All other
    characters stay.""")
@pytest.mark.parametrize(
    ("text", "as_line", "as_lines"),
    [
        ("", "", ""),
        ("plain", "plain", "plain"),
        ("a\\nb", "a\\nb", "a\\nb"),
        ("a\nb\tc", r"a\nb\tc", "a\nb\tc"),
        ("a\r\nb", r"a\r\nb", "a\\r\nb"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x00\x0b\x0c\x7f\x85\x9b", r"\x00\x0b\x0c\x7f\x85\x9b", r"\x00\x0b\x0c\x7f\x85\x9b"),
        ("\u2028\u2029", r"\u2028\u2029", r"\u2028\u2029"),
        ("\u202a\u202e\u2066\u2069\u200e\u200f\u061c", *[r"\u202a\u202e\u2066\u2069\u200e\u200f\u061c"] * 2),
        ("\ud800\udfff", r"\ud800\udfff", r"\ud800\udfff"),
        ("Grüße, 你好, العربية, 👩\u200d🚀, \xa0", *["Grüße, 你好, العربية, 👩\u200d🚀, \xa0"] * 2),
    ],
)
def test_escaping(text: str, as_line: str, as_lines: str) -> None:
    assert (escape.one_line(text), escape.lines(text)) == (as_line, as_lines)
    assert (escape.one_line(as_line), escape.lines(as_lines)) == (as_line, as_lines)


@proves("output.lines-show-control-characters")
def test_every_character_that_breaks_or_controls_a_line() -> None:
    """No character that a terminal or `splitlines` acts on passes, whichever it is."""
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        kind, direction = unicodedata.category(char), unicodedata.bidirectional(char)
        marks = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        if kind in ("Cc", "Zl", "Zp", "Cs") or direction in marks or len(f"a{char}a".splitlines()) > 1:
            assert escape.one_line(char) != char
            assert escape.one_line(char).isascii()
            assert (escape.lines(char) == char) == (char in "\n\t")


def record(message: str, *args: object, **more: object) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": message, "args": args, "levelno": logging.INFO, **more})


FORMATTER = log_lines.LogFormatter("us: %(message)s")


@promise("""output.log-record-line-most: A log record is one line of at most 4,000 characters. The lines of a traceback
    follow, indented, so that none of them looks like a record.""")
@pytest.mark.parametrize(
    ("one", "shown"),
    [
        (record("it said %s", "a\nus: b"), r"us: it said a\nus: b"),
        (record("100%"), "us: 100%"),
        (record("a\n%s", "b\x1b", has_lines=True), "us: a\nb\\x1b"),
        (record("x" * 5000), "us: " + "x" * 3992 + " ..."),
        (record("failed", exc_info=(ValueError, ValueError("a\nus: b\x1b"), None)), None),
    ],
)
def test_records(one: logging.LogRecord, shown: str | None) -> None:
    expected = shown or "us: failed\n  ValueError: a\n  us: b\\x1b"
    assert FORMATTER.format(one) == expected
    assert FORMATTER.format(one) == expected, "the record itself is as before"


def test_other_handlers_see_the_record_as_it_was() -> None:
    one = record("it said %s", "\x1b")
    FORMATTER.format(one)
    assert one.getMessage() == "it said \x1b"


def test_a_reason_fits_into_a_message() -> None:
    """One that is longer than a request may be, or no UTF-8."""
    assert escape.reason("\udcff" + "x" * 5000) == "\\udcff" + "x" * 294
    assert escape.reason("", "closed by the user") == "closed by the user"
