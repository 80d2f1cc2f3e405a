"""Text that holdfast shows and has not written itself, made safe for terminals and logs.

Peers, workers and files may say anything: escape sequences that rewrite the screen, line breaks that forge lines of
holdfast's, marks that reverse the order of letters. Such characters are made visible where lines are written, as
`\\x1b` or `\\n`. All other characters stay, of whatever script. Escaping a text again changes nothing.

The output of workers (tee, redirects) does not pass through here. JSON escapes by itself.
"""

from __future__ import annotations

import logging
import re

LINE_LIMIT_CHARS = 4000
_CUT = " ..."

# C0 and C1 with DEL, the Arabic letter mark, the other bidirectional marks and controls, the line and paragraph
# separators, and halves of surrogate pairs. Each of them is a character that `str.isprintable` does not accept.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_UNSAFE_IN_LINES = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def one_line(text: str) -> str:
    """For a text that is one line, or a part of one."""
    return text if text.isprintable() else _UNSAFE.sub(_visible, text)


def lines(text: str) -> str:
    """For a text that has lines of its own: line feeds and tabs stay."""
    return text if text.isprintable() else _UNSAFE_IN_LINES.sub(_visible, text)


def _visible(found: re.Match[str]) -> str:
    char, code = found[0], ord(found[0])
    return _SHORT.get(char) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def cut(line: str) -> str:
    return line if len(line) <= LINE_LIMIT_CHARS else line[: LINE_LIMIT_CHARS - len(_CUT)] + _CUT


class LogFormatter(logging.Formatter):
    """A record is one line of bounded length. The lines of a traceback follow, indented, so that none of them looks
    like a record. A record that is logged with `extra=HAS_LINES` has lines of its own, which must not begin with text
    from elsewhere."""

    def format(self, record: logging.LogRecord) -> str:
        message, keeps_lines = record.getMessage(), getattr(record, "has_lines", False)
        shown = lines(message) if keeps_lines else one_line(message)
        plain = logging.makeLogRecord({**record.__dict__, "msg": shown, "args": None})
        first, *others = lines(super().format(plain)).split("\n")
        return "\n".join(map(cut, [first, *(others if keeps_lines else [f"  {line}" for line in others])]))


HAS_LINES = {"has_lines": True}
