"""The output of a job on the console of the command that started it.

A thread writes it, so that a console that is not read holds up nothing else. `NodeOutput` has the lines of many nodes,
which come in batches. Each node has one batch here at most: the next one is asked for when this one is written.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable

from holdfast import escape, stdio

_PATIENCE_S = 5.0

Batch = list[tuple[str, bytes]]  # "stdout" or "stderr", and whole lines.


class ConsoleThread:
    """A subclass says what is written (`write_all`), and how that comes to an end."""

    def __init__(self) -> None:
        self._wrote_at = time.monotonic()
        self._thread = threading.Thread(target=self.write_all, name="holdfast-console", daemon=True)
        self._thread.start()

    def write_all(self) -> None:
        raise NotImplementedError

    def join(self) -> None:
        """Wait for as long as something is written, and some seconds more."""
        began = time.monotonic()
        while self._thread.is_alive() and (left_s := max(began, self._wrote_at) + _PATIENCE_S - time.monotonic()) > 0:
            self._thread.join(left_s)

    def put(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                written = stdio.write_some(fd, view[:65536])
                stdio.note_written(fd, view[:written])
                self._wrote_at, view = time.monotonic(), view[written:]
        except OSError:
            pass  # No reader is left. The job goes on.


class NodeOutput(ConsoleThread):
    def __init__(self, has_names: bool) -> None:
        self._has_names = has_names
        self._waiting: queue.Queue[tuple[str, Batch, Callable[[], None]] | None] = queue.Queue()
        super().__init__()

    def write(self, name: str, batch: Batch, when_written: Callable[[], None]) -> None:
        self._waiting.put((name, batch, when_written))

    def close(self) -> None:
        self._waiting.put(None)
        self.join()

    def write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            name, batch, when_written = item
            for stream, lines in batch:
                self.put(1 if stream == "stdout" else 2, with_name(lines, name) if self._has_names else lines)
            when_written()


_OWN_LINE = re.compile(rb"(?m)^(holdfast(?: run: error)?: )")


def with_name(lines: bytes, name: str) -> bytes:
    """`[node1] text` for the lines of workers, `holdfast: node1: text` for those of the agent."""
    label = escape.one_line(name).encode()
    return b"".join(
        _OWN_LINE.sub(lambda found: found[1] + label + b": ", line)
        if _OWN_LINE.match(line)
        else b"[" + label + b"] " + line
        for line in lines.splitlines(keepends=True)
    )
