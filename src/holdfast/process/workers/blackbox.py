"""Reads a worker's black box in the process that started it; the opening text of `bootstrap` has the format.

A program may write anything into its box, and has other rights than this process, perhaps. So of its box only the last
part is read, a few records at most, and its values are never touched: they are pickles. A function is trusted as its
caller is. Its box is read whole, because a value may have any size.
"""

from __future__ import annotations

import json
import os
from typing import Any

from holdfast.process.spawner.bootstrap import ERROR, EVIDENCE_LIMIT, MAGIC, OWN_FILE, VALUE

_MOST_RECORDS = 64  # Of a program. Usually there is one.
_READ_BYTES = 1 << 20


class BlackBox:
    """The content of a black box. `torn`: a record in it was cut short or cannot be read."""

    def __init__(self) -> None:
        self.value: bytes | None = None
        self.error: dict[str, Any] | None = None
        self.text = ""
        self.torn = False

    def take(self, kind: bytes, payload: bytes) -> None:
        if kind == VALUE:
            self.value = payload
            return
        try:
            error = json.loads(payload)
        except (ValueError, RecursionError):
            error = None
        self.error, self.torn = (error, self.torn) if isinstance(error, dict) else (self.error, True)


def read_of_function(fd: int) -> BlackBox:
    """Never raises. The worker can write to the box, and cut it, while it is read."""
    data = bytearray()
    while piece := os.pread(fd, _READ_BYTES, len(data)):
        data += piece
    return read_blackbox(bytes(data))


def read_of_program(fd: int) -> BlackBox:
    """Never raises. Costs milliseconds, whatever the program has left."""
    data = os.pread(fd, EVIDENCE_LIMIT, max(0, os.fstat(fd).st_size - EVIDENCE_LIMIT))
    start = len(data)
    for _ in range(_MOST_RECORDS):
        if (start := data.rfind(MAGIC, 0, start)) < 0:
            return _without_value(read_blackbox(data))
    return _without_value(read_blackbox(data[start:]))


def _without_value(box: BlackBox) -> BlackBox:
    box.value = None
    return box


def read_blackbox(data: bytes) -> BlackBox:
    """Never raises. Of several records of a kind the last one counts."""
    box = BlackBox()
    texts = []
    unread = search = 0
    while (start := data.find(MAGIC, search)) >= 0:
        body = start + len(MAGIC) + 9
        kind = data[start + len(MAGIC) : body - 8]
        if kind not in (VALUE, ERROR, b""):
            search = start + 1
            continue
        texts.append(data[unread:start])
        unread = search = body + int.from_bytes(data[body - 8 : body], "big")
        if max(body, unread) > len(data):
            box.torn = True
            break
        box.take(kind, data[body:unread])
    tail = data[unread:]
    for cut in (MAGIC[:3], MAGIC[:2], MAGIC[:1]):
        if tail.endswith(cut):
            box.torn, tail = True, tail[: -len(cut)]
            break
    box.text, own = b"".join([*texts, tail]).decode("utf-8", "replace"), f'"{OWN_FILE}", line '
    if own in box.text:
        box.text = "\n".join(line for line in box.text.split("\n") if own not in line)
    return box
