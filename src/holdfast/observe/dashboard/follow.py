"""Following the log of a worker: what to read next, and what the page shows of it. Data in, data out.

A log is read in pieces from its end on, at a bounded rate. If it grows faster, the page gets the newest piece and a
note of what was left out. A restart gives the worker another log, which the agent names from then on; the rest of the
one before is read first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from holdfast import escape
from holdfast.cli.runs import number_of, text_of
from holdfast.process.output.log_files import CHUNK_BYTES

_MOST_BEHIND_BYTES = 4 * CHUNK_BYTES
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Follower:
    """One stream of one rank. `attempt` (None is the present one) and `offset` are what to read next. `is_at_end`: all
    that there was has been taken."""

    def __init__(self, attempt: int | None = None) -> None:
        self.attempt, self.offset, self.is_at_end = attempt, -CHUNK_BYTES, False
        self._follows_restarts = attempt is None
        self._file = ""
        self._shown_attempt: int | None = None

    def take(self, piece: Mapping[str, Any]) -> dict[str, Any]:
        """What to show of a piece that was read from `offset` on: `text`, and a `note` that comes before it."""
        self.is_at_end, note = False, ""
        file, size = text_of(piece, "file"), int(number_of(piece, "size") or 0)
        number = number_of(piece, "attempt")
        attempt = None if number is None else int(number)
        before, self._file = self._file, file
        if self._shown_attempt is not None and attempt not in (None, self._shown_attempt):
            if before and self.attempt is None:  # The rest of the last attempt's log comes first: it may say why.
                self.attempt, self._file = self._shown_attempt, before
                return {"text": "", "note": ""}
            note = f"attempt {attempt} begins"
        elif before and before != file:
            self.offset = 0
            return {"text": "", "note": "the log is another file now"}
        elif before and self.offset > size:
            self.offset = 0
            return {"text": "", "note": "the log was cut; from its beginning"}
        self._shown_attempt = attempt
        text, end = piece.get("text"), int(number_of(piece, "offset") or 0)
        shown = text if isinstance(text, str) else ""
        if self.offset < 0 and end > CHUNK_BYTES:
            note = f"{_amount(end - len(shown.encode()))} of the log come before this"
            shown = shown.partition("\n")[2]
        is_at_end = end in (size, self.offset)  # A character of which bytes are missing may be left.
        self.offset = end if size - end <= _MOST_BEHIND_BYTES else -CHUNK_BYTES
        if is_at_end and self.attempt is not None and self._follows_restarts:
            self.go_on()
        else:
            self.is_at_end = is_at_end
        return {"text": _plain(shown), "note": note}

    def go_on(self) -> None:
        """Leave an attempt that is over, or whose log cannot be read, for the present one."""
        if self._follows_restarts and self.attempt is not None:
            self.attempt, self.offset, self._file = None, 0, ""


def _plain(text: str) -> str:
    """Colours are left out, and of a line that was written over, as progress bars are, the last state stays."""
    lines = _COLOURS.sub("", text).split("\n")
    return escape.lines("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))


def _amount(count: int) -> str:
    return f"{count} bytes" if count < 10_000 else f"{count / 1e6:.1f} MB"
