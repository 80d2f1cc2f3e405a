"""Reads a worker's black box in the process that started it; the opening text of `bootstrap` has the format."""

from __future__ import annotations

import json
from typing import Any

from holdfast.process.spawner.bootstrap import ERROR, MAGIC, OWN_FILE, VALUE


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
    lines = b"".join([*texts, tail]).decode("utf-8", "replace").split("\n")
    box.text = "\n".join(line for line in lines if f'"{OWN_FILE}", line ' not in line)
    return box
