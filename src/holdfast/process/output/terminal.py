"""What a terminal shows of the output of several workers. PURE: bytes in with the time, bytes for the terminal out.

Whole lines go out with the prefix of their worker, the same line of several ranks once (see `folding`). A line without
its end is shown too, after `PARTIAL_WAIT_S`: a prompt, a line that grows. So the terminal may stand in the middle of a
line. That line is *open*, and only its own worker can continue it. Before anything else is written,

    an open line gets a newline. If more of it comes, it is written once more, whole, when its end has come.
    an open progress bar is erased, and drawn again below.

A progress bar is an unfinished line with a `\\r` in it. A terminal shows its last state, so that alone is kept. Of all
bars the one of the lowest rank is on the terminal, and changes once in `PARTIAL_WAIT_S` at most; the others are shown
when their newline comes. So all bars together take one line, and the lines of other workers stand above it.

Nothing is escaped: the output is the worker's own.
"""

from __future__ import annotations

from holdfast.failures.report import ranks_text
from holdfast.process.output.folding import Fold, LineFolder

PARTIAL_WAIT_S = 0.2

# A line that is longer goes out in parts, though its end has not come.
_HELD_MAX_BYTES = 64 * 1024

_ERASE_TO_END = b"\x1b[K"


class Source:
    """One stream of one worker, and its unfinished line."""

    def __init__(self, view: TerminalView, stream: str, rank: int, prefix: bytes) -> None:
        self.view = view
        self.stream = stream
        self.rank = rank
        self.prefix = prefix
        self.held = bytearray()
        self.is_bar = False
        self.show_at: float | None = None
        self.left_bytes = 0  # How much of it was shown when another line was written.

    @property
    def state(self) -> bytes:
        """The unfinished line with its prefix, as the terminal shows it."""
        return self.prefix + self.held.removesuffix(b"\r")

    @property
    def has_bar(self) -> bool:
        """Whether there is a progress bar to be seen. One that has been overwritten with spaces is gone."""
        return self.is_bar and bool(self.held.strip())

    def hold(self, rest: bytes | bytearray) -> None:
        self.held = bytearray(rest)
        self.is_bar = (self.is_bar or b"\r" in rest) and len(rest) <= _HELD_MAX_BYTES
        if self.is_bar:
            self.held = bytearray(_last_state(rest) + (b"\r" if rest.endswith(b"\r") else b""))

    def forget(self) -> None:
        self.held.clear()
        self.is_bar, self.show_at, self.left_bytes = False, None, 0


class TerminalView:
    """One terminal. Without `folds` every line goes out at once; without `can_erase` bars are left where they are."""

    def __init__(self, *, folds: bool = True, can_erase: bool = True) -> None:
        self._folder = LineFolder() if folds else None
        self._erase = _ERASE_TO_END if can_erase else b""
        self._sources: list[Source] = []
        self._open: Source | None = None
        self._is_open_bar = False

    def source(self, stream: str, rank: int, prefix: bytes) -> Source:
        source = Source(self, stream, rank, prefix)
        self._sources.append(source)
        if self._folder is not None:
            self._folder.open(stream, rank)
        return source

    def add(self, source: Source, data: bytes, now: float) -> bytes:
        """A piece of the source's output."""
        out = b""
        if source is self._open and not self._is_open_bar and b"\r" not in (head := data.partition(b"\n"))[0]:
            out, data = head[0] + head[1], head[2]
            if head[1]:
                self._open = None
                source.forget()
            else:
                source.held += out
        if data:
            out += self._add_lines(source, data, now)
        if len(source.held) > _HELD_MAX_BYTES:
            out += b"" if source is self._open and not self._is_open_bar else self._show(source)
            source.forget()
        return out

    def end(self, source: Source, now: float) -> bytes:
        """The source has ended; its last line may lack its end."""
        if source not in self._sources:
            return b""
        out, is_open = b"", source is self._open and not self._is_open_bar
        if is_open:
            self._open = None
            out = b"\n"
        elif len(source.held) > source.left_bytes:
            out = self._finish(source, bytes(source.held), now)
        source.forget()
        self._sources.remove(source)
        if self._folder is not None:
            self._folder.close(source.stream, source.rank)
            out += self._write(self._folder.take(now))
        return out + self._leave() if not self._sources else out

    def pass_time(self, now: float) -> bytes:
        """What is due."""
        out = self._write(self._folder.take(now)) if self._folder is not None else b""
        for source in self._sources:
            if source.show_at is not None and source.show_at <= now:
                source.show_at = None
                if not self._is_behind_another_bar(source):
                    out += self._show(source)
        return out

    def next_deadline(self) -> float | None:
        deadlines = [source.show_at for source in self._sources if source.show_at is not None]
        if self._folder is not None and (deadline := self._folder.next_deadline()) is not None:
            deadlines.append(deadline)
        return min(deadlines, default=None)

    def lose_line(self) -> None:
        """Other text has ended the open line."""
        self._leave()

    def _add_lines(self, source: Source, data: bytes, now: float) -> bytes:
        if b"\n" not in data and b"\r" not in data and not source.is_bar:
            source.held += data
            out = b""
        else:
            *lines, rest = (source.held + data).split(b"\n")
            if lines:
                is_shown = bool(lines[0]) and len(lines[0]) == source.left_bytes
                source.forget()
                lines = lines[is_shown:]
            out = b"".join([self._finish(source, line, now) for line in lines])
            source.hold(rest)
            if self._folder is not None:
                out += self._write(self._folder.take(now))
        if source.held and source.show_at is None:
            source.show_at = now + PARTIAL_WAIT_S
        return out

    def _finish(self, source: Source, line: bytes | bytearray, now: float) -> bytes:
        """A line whose newline has come."""
        shown = bytes(line) + b"\n"
        if b"\r" in shown:
            shown = _last_state(line) + (b"\r\n" if line.endswith(b"\r") else b"\n")
        if self._folder is None:
            return self._apart(source.prefix + shown)
        self._folder.add(source.stream, source.rank, source.prefix, shown, now)
        return b""

    def _write(self, folds: list[Fold]) -> bytes:
        return self._apart(b"".join([_label(fold) + fold.line for fold in folds]))

    def _apart(self, lines: bytes) -> bytes:
        """Whole lines, which begin where no other line is open. The bar that they push down is drawn again."""
        if not lines:
            return b""
        bar = self._open if self._is_open_bar else None
        out = self._leave() + lines
        return out + self._show(bar) if bar is not None and bar.has_bar else out

    def _leave(self) -> bytes:
        """Go to the beginning of a line."""
        if self._open is None:
            return b""
        if not self._is_open_bar:
            self._open.left_bytes = len(self._open.held)
        self._open = None
        return b"\r" + self._erase if self._is_open_bar and self._erase else b"\n"

    def _is_behind_another_bar(self, source: Source) -> bool:
        return source.is_bar and any(other.has_bar and other.rank < source.rank for other in self._sources)

    def _show(self, source: Source) -> bytes:
        """Show an unfinished line."""
        out = self._write(self._folder.take_lines_of(source.rank)) if self._folder is not None else b""
        if source.is_bar and not source.has_bar:
            return out + self._leave() if self._open is source else out
        if self._open is source:
            out += b"\r" + source.state + self._erase
        else:
            out += self._leave() + source.state
        self._open, self._is_open_bar = source, source.is_bar
        return out


def _last_state(line: bytes | bytearray) -> bytes:
    """The last state of a progress bar that shows something."""
    return next((bytes(state) for state in reversed(line.split(b"\r")) if state), b"")


def _label(fold: Fold) -> bytes:
    if len(fold.ranks) == 1:
        return fold.prefix
    # The usual prefix may have the host's name in it.
    before, usual, _ = fold.prefix.partition(f"rank {fold.ranks[0]}] ".encode())
    return (before if usual else b"[") + f"{ranks_text(fold.ranks)}] ".encode()
