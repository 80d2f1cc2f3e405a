"""Lines in a stream of bytes that arrives in arbitrary pieces. PURE: bytes in, bytes out.

A line ends with `\\n`, with `\\r\\n`, or with a `\\r` that no `\\n` follows, so that each state of a progress
bar is one. A `\\r` at the end of a piece may be half of a `\\r\\n`; it waits for the next byte. What comes out
does not depend on how the input was cut (tests/properties/test_pump_properties.py).

Workers can write millions of lines a second, so nothing here loops over lines in Python unless a filter asks
for it.
"""

from __future__ import annotations

TAIL_BYTES = 16 * 1024


class Copied:
    """How much of a stream was copied. The pump writes it, any thread may read it."""

    def __init__(self) -> None:
        self.lines = self.size_bytes = 0

    def add(self, data: bytes) -> None:
        self.lines += data.count(b"\n")
        self.size_bytes += len(data)


class Tail:
    """The last bytes of a stream. The pump writes it, any thread may read it."""

    def __init__(self, max_bytes: int = TAIL_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept = b""
        self._is_cut = False

    def feed(self, data: bytes) -> None:
        self._is_cut = self._is_cut or len(self._kept) + len(data) > self._max_bytes
        self._kept = (self._kept + data[-self._max_bytes :])[-self._max_bytes :]

    def text(self, max_lines: int = 20) -> str:
        """The last whole lines, without blank ones at the end. A progress bar shows as its last state."""
        # Without the line that was cut at its start, unless there is no other.
        whole = self._kept.partition(b"\n")[2] if self._is_cut else b""
        text = (whole if whole.strip() else self._kept).decode("utf-8", "replace")
        states = ([state for state in line.split("\r") if state.strip()] for line in text.split("\n"))
        lines = [line[-1] if line else "" for line in states]
        while lines and not lines[-1]:
            lines.pop()
        return "\n".join(lines[-max_lines:]) if max_lines > 0 else ""


class HeldLine:
    """Holds the start of a line until its end comes."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._held_cr = False

    def __len__(self) -> int:
        return len(self._held)

    def take(self, data: bytes) -> bytes:
        """Add a piece; returns the lines that are complete with it."""
        if self._held_cr:
            data = b"\r" + data
        self._held_cr = data.endswith(b"\r")
        if self._held_cr:
            data = data[:-1]
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end:
            self._held += data
            return b""
        whole = b"".join((self._held, memoryview(data)[:end])) if self._held else data[:end]
        self._held = bytearray(data[end:])
        return whole

    def release(self) -> bytes:
        """Release the held part of a line, though more of it is to come."""
        piece, self._held = bytes(self._held), bytearray()
        return piece

    def flush(self) -> bytes:
        """Release everything at the end of the stream."""
        rest = self.release() + (b"\r" if self._held_cr else b"")
        self._held_cr = False
        return rest


class LinePrefixer:
    """Puts the prefix before every line of a text that comes in whole lines, or in pieces of a line that was split."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._in_line = False

    def add(self, text: bytes) -> bytes:
        """Both ways work in bulk; the second is faster but handles only `\\n`."""
        if not text:
            return b""
        if not self._prefix:
            return text
        first = b"" if self._in_line else self._prefix
        self._in_line = not text.endswith((b"\n", b"\r"))
        if b"\r" in text:
            return first + self._prefix.join(text.splitlines(keepends=True))
        spread = text.replace(b"\n", b"\n" + self._prefix)
        # No line begins after the last end. Removing that prefix again is cheaper than counting the lines first.
        surplus = 0 if self._in_line else len(self._prefix)
        return b"".join((first, memoryview(spread)[: len(spread) - surplus]))

    def end(self, rest: bytes) -> bytes:
        """The last line, with the newline that it lacks; without a prefix, the bytes as they are."""
        last = self.add(rest)
        ended = last + b"\n" if self._prefix and (last or self._in_line) else last
        self._in_line = False
        return ended


class LineFilter:
    """Picks the lines that contain any needle, with the prefix. The pieces of a split line count one by one."""

    def __init__(self, needles: tuple[bytes, ...], prefix: bytes) -> None:
        self._needles = needles
        self._prefix = prefix

    def pick(self, text: bytes) -> bytes:
        if not self._matches(text):
            return b""
        found = filter(self._matches, text.splitlines(keepends=True))
        ended = (line if line.endswith(b"\n") else line.removesuffix(b"\r") + b"\n" for line in found)
        return b"".join(self._prefix + line for line in ended)

    def _matches(self, text: bytes) -> bool:
        return any(needle in text for needle in self._needles)
