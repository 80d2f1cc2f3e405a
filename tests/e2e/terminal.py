"""A terminal for the command: what it writes there, what is typed, and what a person sees in the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.e2e.command import DEADLINE_S, Ended, Holdfast


class Terminal:
    """The near end of a terminal whose far end is the command's."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read_until(self, text: str) -> str:
        """All that is written until this text is there."""
        ends, shown = time.monotonic() + DEADLINE_S, b""
        while text.encode() not in shown:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"{text!r} was not shown: {shown!r}"
            shown += os.read(self.fd, 1 << 16)
        return shown.decode()

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def read_to_end(self) -> str:
        """All that is written until nobody has the far end open any more."""
        ends, text = time.monotonic() + DEADLINE_S, b""
        while True:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"the terminal was not let go of: {text!r}"
            try:
                piece = os.read(self.fd, 1 << 16)
            except OSError:
                return text.decode()
            if not piece:
                return text.decode()
            text += piece


@contextmanager
def terminal(rows: int = 33, columns: int = 101) -> Iterator[tuple[Terminal, int]]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
    try:
        yield Terminal(ours), theirs
    finally:
        os.close(ours)


def on_terminal(
    holdfast: Holdfast, *args: str, env: dict[str, str] | None = None, streams: str = "stdin stdout stderr"
) -> tuple[Ended, str]:
    with terminal() as (near, far):
        given: dict[str, Any] = dict.fromkeys(streams.split(), far)
        running = holdfast.start(*args, env={"TERM": "xterm", **(env or {})}, **given)
        os.close(far)
        shown = near.read_to_end()
        return running.wait(), shown


def seen(shown: str) -> list[str]:
    """The lines that a person sees after all of it: `\\r` goes back, new text replaces old text, ESC [K erases."""
    lines = []
    for line in shown.split("\n"):
        cells: list[str] = []
        at = 0
        for part in re.findall(r"\x1b\[K|\r|.", line):
            if part == "\r":
                at = 0
            elif part == "\x1b[K":
                del cells[at:]
            else:
                cells[at : at + 1] = [part]
                at += 1
        lines.append("".join(cells))
    return lines
