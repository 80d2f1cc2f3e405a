"""Text that holdfast shows and has not written itself, made safe for terminals and logs.

Peers, workers and files may say anything: escape sequences that rewrite the screen, line breaks that forge lines of
holdfast's, marks that reverse the order of letters. Such characters are made visible where lines are written, as
`\\x1b` or `\\n`. All other characters stay, of whatever script. Escaping a text again changes nothing.

The output of workers (tee, redirects) does not pass through here. JSON escapes by itself.
"""

from __future__ import annotations

from functools import cache

PREFIX = "holdfast:"  # Of every line that holdfast writes.
LINE_LIMIT_CHARS = 4000
REASON_LIMIT_CHARS = 300
_DIM, _YELLOW, _RED, _PLAIN = "\033[2m", "\033[33m", "\033[31m", "\033[0m"
_WARNING, _ERROR = 30, 40  # As in `logging`.
_CUT = " ..."
_CUT_MIDDLE = "\n... (cut) ...\n"

# C0, DEL and C1, the Arabic letter mark, the other bidirectional marks and controls, the line and paragraph separators,
# and halves of surrogate pairs. `str.isprintable` accepts none of them.
_UNSAFE = (
    (0, 0x20),
    (0x7F, 0xA0),
    (0x61C, 0x61D),
    (0x200E, 0x2010),
    (0x2028, 0x202F),
    (0x2066, 0x206A),
    (0xD800, 0xE000),
)


def one_line(text: str) -> str:
    """For a text that is one line, or a part of one."""
    return text if text.isprintable() else text.translate(_tables()[0])


def lines(text: str) -> str:
    """For a text that has lines of its own: line feeds and tabs stay."""
    return text if text.isprintable() else text.translate(_tables()[1])


@cache
def _tables() -> tuple[dict[int, str], dict[int, str]]:
    codes = [code for first, end in _UNSAFE for code in range(first, end)]
    visible = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in codes}
    kept = {ord("\n"): "\n", ord("\t"): "\t"}
    visible |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
    return visible, visible | kept


def encodable(text: str) -> str:
    """File names, arguments and JSON may have halves of characters, which no message can have. They become visible."""
    return text.encode("utf-8", "backslashreplace").decode()


def reason(said: object, otherwise: str = "") -> str:
    """What a user gives as a reason, as much as a message takes."""
    return encodable(str(said or otherwise))[:REASON_LIMIT_CHARS]


def cut(text: str, limit: int = LINE_LIMIT_CHARS) -> str:
    """Not longer than that; what was cut shows it."""
    return text if len(text) <= limit else text[: max(0, limit - len(_CUT))] + _CUT


def cut_middle(text: str, limit: int) -> str:
    """Not longer than that. Keep the beginning, which says where it happened, and the end, which says what."""
    kept = limit - len(_CUT_MIDDLE)
    return text if len(text) <= limit else f"{text[: kept // 4]}{_CUT_MIDDLE}{text[len(text) - kept * 3 // 4 :]}"


def with_prefix(text: str, level: int, *, is_coloured: bool, detail: str = "") -> str:
    """Put the prefix, and the detail after it, in front of every line. The level is one of `logging`."""
    lead, start, end = PREFIX + detail, "", ""
    if is_coloured:
        lead = f"{_DIM}{lead}{_PLAIN}"
        start = _RED if level >= _ERROR else _YELLOW if level >= _WARNING else ""
        end = _PLAIN if start else ""
    return "\n".join(f"{lead} {start}{line}{end}" if line else lead for line in text.split("\n"))


HAS_LINES = {"has_lines": True}  # For `extra=` of a record that has lines of its own.
