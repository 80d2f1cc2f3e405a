"""Following the log of a worker: what to read next, and what the page shows of it. Data in, data out.

A log is read in pieces from its end on, at a bounded rate. If it grows faster, the page gets the newest piece and a
note of what was left out. A restart gives the worker another log, which the agent names from then on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from holdfast import escape
from holdfast.agent.inspection import CHUNK_BYTES
from holdfast.cli.runs import number_of, text_of

_MOST_BEHIND_BYTES = 4 * CHUNK_BYTES
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Follower:
    """One stream of one rank."""

    def __init__(self) -> None:
        self.offset = -CHUNK_BYTES
        self._file = ""
        self._attempt: float | None = None

    def take(self, piece: Mapping[str, Any]) -> dict[str, Any]:
        """What to show of a piece that was read from `offset` on: `text`, and a `note` that comes before it."""
        file, size = text_of(piece, "file"), int(number_of(piece, "size") or 0)
        before, self._file = self._file, file
        if before and before != file:
            attempt = number_of(piece, "attempt")
            is_next = attempt is not None and attempt != self._attempt
            self._attempt = attempt
            self.offset = 0
            return {"text": "", "note": f"attempt {attempt:.0f} begins" if is_next else "the log is another file now"}
        if before and self.offset > size:
            self.offset = 0
            return {"text": "", "note": "the log was cut; from its beginning"}
        self._attempt = number_of(piece, "attempt")
        text, end = piece.get("text"), int(number_of(piece, "offset") or 0)
        shown, note = text if isinstance(text, str) else "", ""
        if self.offset < 0 and end > CHUNK_BYTES:
            note = f"{_amount(end - len(shown.encode()))} of the log come before this"
            shown = shown.partition("\n")[2]
        self.offset = end
        if size - end > _MOST_BEHIND_BYTES:
            self.offset = -CHUNK_BYTES
        return {"text": _plain(shown), "note": note}


def _plain(text: str) -> str:
    """Colours are left out, and of a line that was written over, as progress bars are, the last state stays."""
    lines = _COLOURS.sub("", text).split("\n")
    return escape.lines("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))


def _amount(count: int) -> str:
    return f"{count} bytes" if count < 10_000 else f"{count / 1e6:.1f} MB"
