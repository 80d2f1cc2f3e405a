"""The log of one stream of one rank, piece by piece: what to read next, and what to show of it. No input or output.

A log is read in pieces of at most 64 KiB. Each begins where the last one ended (`offset`) and ends with a whole
character. `LogTail` says which piece it wants; the caller gets it from the file or from the agent of another node, and
gives it to `take`. These things happen to a log that is followed:

    the tail begins within a line     nothing is shown before the next line begins
    the worker is started again       the rest of the old log is shown first, then each later attempt from its beginning
    the file is replaced or cut       a note says so, and it is shown from its beginning
    it grows faster than it is read   if `most_behind_bytes` is given, a part is left out, with a note
    a piece cannot be had             the caller asks again: a coordinator may be restarted meanwhile
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.frozen import changed, frozen
from holdfast.process.output.log_files import CHUNK_BYTES, attempt_of
from holdfast.text import size_text
from holdfast.wire_types import Count

_Attempt = Annotated[int, Meta(ge=0, lt=1 << 31)]


@frozen
class LogPiece:
    """As an agent answers. It begins at byte `begin`, the next one begins at `offset`; `size` is that of the file.
    `file` tells it from another file of that name. `is_over`: the worker writes no more. `is_awaited`: the agent has
    the follower's newest question for the last words, and will answer it when the worker ends."""

    text: str = ""
    offset: Count = 0
    size: Count = 0
    file: str = ""
    path: str = ""
    attempt: _Attempt | None = None
    is_over: bool = False
    begin: Count | None = None
    is_awaited: bool = True


@frozen
class Part:
    """What to show of a piece: `note`, then `text`. `begins_anew`: the text before it, and its last line, are complete;
    the note says that another attempt begins, or another file. Other notes say what is left out."""

    text: str = ""
    note: str = ""
    begins_anew: bool = False


class LogTail:
    """`attempt` (None is the present one) and `offset` are what to read next; a negative offset counts from the end.
    `is_at_end`: all that there was has been taken. `is_whole`: the worker had written no more than that, and has
    ended."""

    def __init__(
        self, attempt: int | None = None, *, from_end: bool = True, most_behind_bytes: int | None = None
    ) -> None:
        self.attempt, self.offset = attempt, -CHUNK_BYTES if from_end else 0
        self.is_at_end = self.is_whole = False
        self.shown: LogPiece | None = None  # The last piece of which something was shown.
        self._follows_restarts = attempt is None
        self._most_behind_bytes = most_behind_bytes
        self._begins_within_line = False
        self._has_left = False
        self._newest: int | None = None  # The attempt to go on to when the rest of an earlier one has been read.

    def take(self, piece: LogPiece) -> Part:
        before, note, begins_anew = self.shown, "", False
        self.is_at_end = self.is_whole = False
        if before is not None and piece.path != before.path and self._follows_restarts:
            known = attempt_of(before.path)
            if not self._has_left and known is not None:
                # The rest of the last attempt's log comes first: it may say why there is another one.
                self.attempt, self._newest = known, attempt_of(piece.path)
                return Part()
            self.offset, self._has_left = 0, False
            note, begins_anew = f"attempt {piece.attempt} begins, in {piece.path}", True
        elif before is not None and (piece.file != before.file or self.offset > piece.size):
            what = "is another file now" if piece.file != before.file else "was cut"
            self.offset, self.shown = 0, piece
            return Part("", f"{piece.path} {what}; shown from its beginning", begins_anew=True)
        text = piece.text
        if self.offset < 0 and piece.size > CHUNK_BYTES:
            self._begins_within_line = True
            note = note or f"{size_text(piece.size - CHUNK_BYTES)} of the log come before this"
        if self._begins_within_line:
            _, end, text = text.partition("\n")
            self._begins_within_line = not end
        is_at_end = piece.offset in (piece.size, self.offset)  # A character of which bytes are missing may be left.
        self.offset, self.shown = piece.offset, piece
        if self._most_behind_bytes is not None and piece.size - piece.offset > self._most_behind_bytes:
            self.offset = -CHUNK_BYTES
        if is_at_end and self._follows_restarts and self.attempt is not None:
            self.go_on()
        else:
            self.is_at_end, self.is_whole = is_at_end, is_at_end and piece.is_over
        return Part(text, note, begins_anew)

    def take_last(self, piece: LogPiece) -> Part:
        """What the worker had written when it ended. A part of it may have been shown since it was sent; if something
        before it was not, nothing is shown."""
        before, begin = self.shown, piece.begin
        if before is None or begin is None:
            return self.take(piece)
        if piece.path != before.path:
            if (piece.attempt or 0) <= (before.attempt or 0) or begin > 0:
                return Part()
            self.attempt, self._has_left = None, True
        elif piece.file == before.file and self.offset >= 0:
            if begin > self.offset:
                return Part()
            data = piece.text.encode()[self.offset - begin :]
            piece = changed(piece, text=data.decode(errors="backslashreplace"))
        return self.take(piece)

    def go_on(self) -> None:
        """Leave an attempt that is over, or whose log cannot be read, for the next one."""
        if not self._follows_restarts or self.attempt is None:
            return
        following, newest = self.attempt + 1, self._newest
        self.attempt = following if newest is not None and following < newest else None
        self.offset, self._has_left = 0, True
