"""Counts, sizes and last lines in words: the same everywhere."""

from __future__ import annotations


def plural(count: int, noun: str, many: str = "") -> str:
    """`1 node`, `2 nodes`. `many` is for a noun that needs more than an s."""
    return f"{count} {noun if count == 1 else many or f'{noun}s'}"


def size_text(size_bytes: float) -> str:
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def duration(seconds: float) -> str:
    """`90 s`, `10 min`."""
    return f"{seconds:g} s" if seconds < 60 or seconds % 60 else f"{seconds / 60:g} min"


def lines_of(text: str) -> list[str]:
    """The lines as a terminal shows them: of a progress bar redrawn in place, only the last state."""
    return [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]


def last_line(text: str) -> str:
    """The last line that is not blank."""
    return next((line for line in reversed(lines_of(text)) if line.strip()), "")
