"""What the command and a remote agent say to each other. PURE.

hello    one line on stdout: a mark and JSON. The host says it first. The mark is a random text that the command has
         made up for this run, so that noise of the host's shell is not taken for a hello.
order    one line on stdin: JSON. The bytes of an archive may follow.
words    later lines on stdin: `signal N`, which stops the agent; `pass N`, a signal that ends nothing; `ask N
         QUESTION`, a question to the control socket of the agent; an empty line is a ping.
frame    later on stdout: a letter, the length of what follows (4 bytes), and that many bytes. `o` and `e` are whole
         lines of the agent's stdout and stderr, `a` is the number of a question, a space and the answer, `x` is JSON
         about the agent's end. The end of the stream without it means that the host is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from holdfast.frozen import frozen
from holdfast.hosts.job import AgentOrder
from holdfast.hosts.own_lines import names_text
from holdfast.rendezvous.membership.model import is_loopback

PROTOCOL = 4
MARK_START = "\x1e"
_HELLO_BYTES = 1 << 14
FRAME_BYTES = 1 << 22
_HEAD_BYTES = 5
_STREAMS = {b"o": "stdout", b"e": "stderr"}


class Hello(msgspec.Struct, frozen=True):
    """`address` is where ssh reached the host, empty if it is not known; `port` is free there, and held. `machine` is
    the same for two hosts that share their network interfaces."""

    protocol: int
    version: str
    address: str
    port: int
    machine: str


class Place(msgspec.Struct, frozen=True):
    """The port at which the nodes meet, and the settings that it takes to ask the coordinator there."""

    endpoint: str
    run_id: str
    settings: dict[str, str] = {}


class Order(msgspec.Struct, frozen=True):
    """What the host is to run. `place` is there if the nodes meet at the port that this host holds. `archive_bytes`
    follow the order; None: nothing is copied."""

    agent: AgentOrder
    place: Place | None = None
    archive_bytes: int | None = None


class End(msgspec.Struct, frozen=True):
    """How the agent ended, with its last words."""

    code: int
    words: str = ""


@frozen
class Lines:
    stream: str
    lines: bytes


@frozen
class Answer:
    """To a question: one line of JSON."""

    number: int
    line: bytes


def hello_line(mark: str, hello: Hello) -> bytes:
    """Begins with a newline: noise need not end with one."""
    return b"\n" + f"{MARK_START}{mark}".encode() + msgspec.json.encode(hello) + b"\n"


def find_hello(mark: str, said: bytes) -> tuple[Hello, bytes] | None:
    """The hello in what a host has said so far, if it is complete, and what follows it. ValueError if it makes no
    sense."""
    _, found, rest = said.partition(f"{MARK_START}{mark}".encode())
    line, newline, after = rest.partition(b"\n")
    if not found or not newline:
        if found and len(rest) > _HELLO_BYTES:
            raise ValueError("its hello does not end")
        return None
    try:
        return msgspec.json.decode(line, type=Hello), after
    except (msgspec.MsgspecError, RecursionError):
        raise ValueError("its hello makes no sense") from None


def objection_to(hello: Hello, version: str, python: str) -> str:
    """Why this command cannot work with the holdfast of that host, or nothing."""
    if hello.protocol != PROTOCOL or hello.version != version:
        theirs, ours = f"holdfast {hello.version[:40]}", f"holdfast {version}"
        return f"it has {theirs} (of {python}), and this host {ours}; install the same version on both"
    return ""


def problem_of_first(hellos: Mapping[str, Hello]) -> str:
    """Why these hosts, by their names, cannot meet at the first of them, where it was reached from here; or nothing."""
    name, first = next(iter(hellos.items()))
    remedy = "say where the nodes meet, with --rdzv-endpoint HOST:PORT"
    if not first.address:
        return f"{name} does not know at which address it was reached (SSH_CONNECTION is not set there); {remedy}"
    apart = [each for each, hello in hellos.items() if hello.machine != first.machine]
    if is_loopback(first.address) and apart:
        where = f"{name} was reached at {first.address}, where {names_text(apart, len(hellos))} cannot reach it"
        return f"{where}; give its name or address in the network, or {remedy}"
    return ""


def order_line(order: Order) -> bytes:
    """Arguments need not be UTF-8, which the standard library can write and msgspec cannot."""
    return json.dumps(msgspec.to_builtins(order)).encode() + b"\n"


def read_order(line: bytes) -> Order:
    """Comes from the command that started this process."""
    return msgspec.convert(json.loads(line), Order)


def lines_frame(stream: str, lines: bytes) -> bytes:
    return _frame(b"o" if stream == "stdout" else b"e", lines)


def answer_frame(answer: Answer) -> bytes:
    return _frame(b"a", b"%d %b" % (answer.number, answer.line))


def end_frame(end: End) -> bytes:
    return _frame(b"x", msgspec.json.encode(end))


def _frame(kind: bytes, content: bytes) -> bytes:
    return kind + len(content).to_bytes(4) + content


class FrameReader:
    """Takes the frames out of a stream that arrives in arbitrary pieces."""

    def __init__(self) -> None:
        self._held = bytearray()

    def take(self, data: bytes) -> list[Lines | Answer | End]:
        """The frames that are complete with this piece. ValueError if they make no sense."""
        self._held += data
        found: list[Lines | Answer | End] = []
        while len(self._held) >= _HEAD_BYTES:
            kind, size = bytes(self._held[:1]), int.from_bytes(self._held[1:_HEAD_BYTES])
            if size > FRAME_BYTES or kind not in b"aoex":
                raise ValueError("its output makes no sense")
            if len(self._held) < _HEAD_BYTES + size:
                break
            content = bytes(self._held[_HEAD_BYTES : _HEAD_BYTES + size])
            del self._held[: _HEAD_BYTES + size]
            if kind == b"a":
                number, _, line = content.partition(b" ")
                found.append(Answer(int(number), line))
            else:
                found.append(_end_of(content) if kind == b"x" else Lines(_STREAMS[kind], content))
        return found


def _end_of(content: bytes) -> End:
    try:
        return msgspec.json.decode(content, type=End)
    except (msgspec.MsgspecError, RecursionError):
        raise ValueError("its end makes no sense") from None
