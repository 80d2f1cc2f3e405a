"""Reads a worker's black box in the process that started it; the opening text of `bootstrap` has the format.

A program may write anything into its box, and has other rights than this process, perhaps. So of its box only the last
part is read, a few records at most, and its values are never touched: they are pickles. A function is trusted as its
caller is. Its box is read whole, because a value may have any size.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from holdfast.process.spawner.bootstrap import ERROR, EVIDENCE_LIMIT, MAGIC, OWN_FILE, VALUE

_MOST_RECORDS = 64  # Of a program. Usually there is one.
_READ_BYTES = 1 << 20


@dataclass(slots=True)
class BlackBox:
    """The content of a black box. `torn`: a record in it was cut short or cannot be read."""

    value: bytes | None = None
    error: dict[str, Any] | None = None
    text: str = ""
    torn: bool = False


def read_of(fd: int, *, is_function: bool) -> BlackBox:
    """Never raises. The worker can write to the box, and cut it, while it is read. That of a program costs
    milliseconds, whatever it has left."""
    if is_function:
        whole = bytearray()
        while piece := os.pread(fd, _READ_BYTES, len(whole)):
            whole += piece
        return read_blackbox(bytes(whole))
    data = os.pread(fd, EVIDENCE_LIMIT, max(0, os.fstat(fd).st_size - EVIDENCE_LIMIT))
    start = len(data)
    for _ in range(_MOST_RECORDS):
        start = max(0, data.rfind(MAGIC, 0, start))
    box = read_blackbox(data[start:])
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
        if kind == VALUE:
            box.value = data[body:unread]
        elif (error := _error_in(data[body:unread])) is not None:
            box.error = error
        else:
            box.torn = True
    tail = data[unread:]
    for cut in (MAGIC[:3], MAGIC[:2], MAGIC[:1]):
        if tail.endswith(cut):
            box.torn, tail = True, tail[: -len(cut)]
            break
    box.text, own = b"".join([*texts, tail]).decode("utf-8", "replace"), f'"{OWN_FILE}", line '
    if own in box.text:
        box.text = "\n".join(line for line in box.text.split("\n") if own not in line)
    return box


def _error_in(payload: bytes) -> dict[str, Any] | None:
    try:
        error = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return error if isinstance(error, dict) else None
