"""What the page shows of a log that it follows (`observe.log_tail`)."""

from __future__ import annotations

import re

from holdfast import escape
from holdfast.observe.log_tail import LogTail, Part
from holdfast.process.output.log_files import CHUNK_BYTES

_MOST_BEHIND_BYTES = 4 * CHUNK_BYTES
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def tail_for(attempt: int | None) -> LogTail:
    """A page reads at a bounded rate: of a log that grows faster it gets the newest piece."""
    return LogTail(attempt, most_behind_bytes=_MOST_BEHIND_BYTES)


def shown(part: Part) -> dict[str, str]:
    """Colours are left out, and of a line that was written over, as progress bars are, the last state stays."""
    lines = _COLOURS.sub("", part.text).split("\n")
    text = escape.lines("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))
    return {"text": text, "note": escape.one_line(part.note)}
