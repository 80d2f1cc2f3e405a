"""What the command and a remote agent say to each other. Pure.

A mark is a random text that the command makes up for one run. It is in every line that is not the output of workers,
so that noise of the host's shell and lines of workers are never taken for one. The mark of the hello is in the command
line of the host. That of the frames is in the order, because workers must not know it.

    hello    one line on stdout: the mark and JSON. The host says it first.
    order    one line on stdin: JSON. The bytes of an archive may follow.
    words    later lines on stdin: `signal N`; an empty line is a ping.
    frame    on stderr: the mark, `+` or `.`, a part of JSON, a newline. `+` says that the next frame continues it. A
             frame is short enough for the kernel to write it in one piece. It may stand in the middle of a line of
             workers, which goes on behind it.
"""

from __future__ import annotations

import json
from typing import Any

from holdfast.frozen import fields_of, frozen

PROTOCOL = 1
MARK_START = "\x1e"
_FRAME_BYTES = 4000  # Less than PIPE_BUF with the mark.
_MESSAGE_BYTES = 1 << 20
_HELLO_BYTES = 1 << 14


@frozen
class Hello:
    """`address` is where ssh reached the host, empty if it is not known; `port` is free there, and held. `machine` is
    the same for two hosts that share their network interfaces."""

    protocol: int
    version: str
    address: str
    port: int
    machine: str


@frozen
class Order:
    """`mark` is that of the frames, `label` the host's name in front of its lines. `holds_place`: the nodes meet at the
    port that this host holds. `archive_bytes` follow the order; None: nothing is copied."""

    token: str
    mark: str
    label: str
    directory: str
    arguments: tuple[str, ...]
    grace_s: float
    environment: tuple[tuple[str, str], ...] = ()
    holds_place: bool = False
    archive_bytes: int | None = None


def hello_line(mark: str, hello: Hello) -> bytes:
    """Begins with a newline: noise need not end with one."""
    return f"\n{MARK_START}{mark}{json.dumps(fields_of(hello))}\n".encode()


def find_hello(mark: str, said: bytes) -> Hello | None:
    """The hello in what a host has said so far, if it is complete. ValueError if it makes no sense."""
    _, found, rest = said.partition(f"{MARK_START}{mark}".encode())
    line, newline, _ = rest.partition(b"\n")
    if not found or not newline:
        if found and len(rest) > _HELLO_BYTES:
            raise ValueError("its hello does not end")
        return None
    try:
        values = json.loads(line)
    except RecursionError:
        values = None
    kinds = {"protocol": int, "version": str, "address": str, "port": int, "machine": str}
    if not isinstance(values, dict) or any(type(values.get(name)) is not kind for name, kind in kinds.items()):
        raise ValueError("its hello makes no sense")
    return Hello(**{name: values[name] for name in kinds})


def objection_to(hello: Hello, version: str, python: str) -> str:
    """Why this command cannot work with the holdfast of that host, or nothing."""
    if hello.protocol != PROTOCOL or hello.version != version:
        theirs, ours = f"holdfast {hello.version[:40]}", f"holdfast {version}"
        return f"it has {theirs} (of {python}), and this host {ours}; install the same version on both"
    return ""


def order_line(order: Order) -> bytes:
    return json.dumps(fields_of(order)).encode() + b"\n"


def read_order(line: bytes) -> Order:
    """Comes from the command that started this process."""
    values = json.loads(line)
    values["arguments"] = tuple(values["arguments"])
    values["environment"] = tuple((name, value) for name, value in values["environment"])
    return Order(**values)


def frames(mark: str, message: dict[str, Any]) -> list[str]:
    text = json.dumps(message)
    parts = [text[at : at + _FRAME_BYTES] for at in range(0, len(text), _FRAME_BYTES)]
    kinds = ["+"] * (len(parts) - 1) + ["."]
    return [f"{MARK_START}{mark}{kind}{part}\n" for kind, part in zip(kinds, parts, strict=True)]


class FrameReader:
    """Takes the frames out of a stream that arrives in arbitrary pieces. What is not a frame comes out unchanged."""

    def __init__(self, mark: str) -> None:
        self._start = f"{MARK_START}{mark}".encode()
        self._held = b""
        self._parts: list[bytes] = []

    def take(self, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """The output of workers in the piece, and the messages that are complete with it."""
        data, self._held = self._held + data, b""
        output: list[bytes] = []
        messages: list[dict[str, Any]] = []
        while (at := data.find(self._start)) >= 0:
            output.append(data[:at])
            line, newline, rest = data[at + len(self._start) :].partition(b"\n")
            if not newline and len(line) <= 2 * _FRAME_BYTES:
                self._held = data[at:]
                return b"".join(output), messages
            messages += self._message(line)
            data = rest
        held = self._length_of_beginning(data)
        self._held = data[len(data) - held :]
        output.append(data[: len(data) - held])
        return b"".join(output), messages

    def flush(self) -> bytes:
        """The stream has ended: what looked like the beginning of a frame was none."""
        rest, self._held = self._held, b""
        return rest

    def _length_of_beginning(self, data: bytes) -> int:
        """How many bytes at the end may be the beginning of a mark."""
        at = data.rfind(self._start[:1], max(0, len(data) - len(self._start)))
        return len(data) - at if at >= 0 and self._start.startswith(data[at:]) else 0

    def _message(self, line: bytes) -> list[dict[str, Any]]:
        """Ignore a message that cannot be decoded."""
        if sum(map(len, self._parts)) + len(line) > _MESSAGE_BYTES:
            self._parts.clear()
            return []
        self._parts.append(line[1:])
        if line[:1] == b"+":
            return []
        text = b"".join(self._parts)
        self._parts.clear()
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            return []
        return [message] if isinstance(message, dict) else []
