"""From messages to bytes and back: frames of four bytes of length and one msgpack message each. Pure.

Anything longer than `MAX_MESSAGE_BYTES`, and anything that is not exactly one of the expected messages, is `Malformed`.
Before both sides know each other the limit is `MAX_HANDSHAKE_BYTES`, so that strangers cannot make a coordinator keep
much. Nothing that is read is executed. Where a token is used each frame has a seal between length and message (`keys`).
"""

from __future__ import annotations

import struct
from typing import Any, Union, cast, get_args, get_type_hints

import msgspec
from msgspec.msgpack import Decoder, Encoder

from holdfast import escape
from holdfast.rendezvous.membership import keys, protocol
from holdfast.rendezvous.membership.model import Push

MAX_MESSAGE_BYTES = 1 << 20
MAX_HANDSHAKE_BYTES = 1 << 14
_LENGTH = struct.Struct("!I")
_LENGTH_BYTES, _pack_length, _unpack_length = _LENGTH.size, _LENGTH.pack, _LENGTH.unpack_from


class Malformed(ValueError):  # noqa: N818
    """A peer sent something that is no message."""


class SealBroken(Malformed):
    """A frame was not sealed by the peer, or it is not the next one. `body` is what it carries."""

    def __init__(self, body: bytes) -> None:
        super().__init__("a frame whose seal is wrong")
        self.body = body


def _wire_form(kind: Any) -> type[msgspec.Struct]:
    """The struct as which a push crosses the wire: msgspec cannot tag plain records."""
    hints = get_type_hints(kind, include_extras=True)
    return msgspec.defstruct(kind.__name__, [(name, hints[name]) for name in kind.__match_args__], tag=True)


_SENT_AS = {kind: _wire_form(kind) for kind in get_args(Push)}
_READ_AS = {sent: kind for kind, sent in _SENT_AS.items()}

# Made once, here: two threads must not make msgspec look at the same type at the same time.
_encoder = Encoder()
HANDSHAKE: Decoder[Any] = Decoder(protocol.Handshake)
UPWARD: Decoder[Any] = Decoder(protocol.ToCoordinator)
DOWNWARD: Decoder[Any] = Decoder(
    Union[(*_READ_AS, protocol.HeartbeatAnswer, protocol.StoreAnswer, protocol.Query, protocol.Answer)]
)


class Frames:
    """One side of a connection. Cuts a stream of bytes into messages: those of `HANDSHAKE`, then what `expect` says."""

    def __init__(self, limit_bytes: int = MAX_MESSAGE_BYTES) -> None:
        # What was fed, of which the first `_at` bytes were given out: as it came, or a bytearray if a part had to wait
        # for the rest. As a rule a message arrives alone and whole, and nothing is copied.
        self._buffer: bytes | bytearray = b""
        self._at = 0
        self._decoder, self._limit_bytes = HANDSHAKE, limit_bytes
        self._reading: keys.Seal | None = None
        self._writing: keys.Seal | None = None

    def seal(self, reading: bytes, writing: bytes) -> None:
        """From the next frame of each direction on, with these keys."""
        self._reading, self._writing = keys.Seal(reading), keys.Seal(writing)

    def sealed(self, frame: bytes) -> bytes:
        """The frame as this connection carries it."""
        if self._writing is None:
            return frame
        body = frame[_LENGTH_BYTES:]
        return _pack_length(len(body) + keys.SEAL_BYTES) + self._writing.of(body) + body

    def expect(self, decoder: Decoder[Any]) -> None:
        """From the next message on."""
        self._decoder, self._limit_bytes = decoder, MAX_MESSAGE_BYTES

    def feed(self, data: bytes) -> None:
        if self._at == len(self._buffer):
            self._buffer, self._at = data, 0
        else:
            self._let_go()
            if isinstance(self._buffer, bytes):
                self._buffer = bytearray(self._buffer)
            self._buffer += data

    @property
    def held_bytes(self) -> int:
        """What is kept of what was fed: none of it if all messages were given out."""
        return len(self._buffer)

    def next(self) -> object | None:
        """The next message that has arrived completely, if there is one."""
        if not self._buffer:
            return None
        begin = self._at + _LENGTH_BYTES
        if len(self._buffer) < begin:
            self._let_go()
            return None
        (length,) = _unpack_length(self._buffer, self._at)
        if length > self._limit_bytes and length > self._limit_bytes + (keys.SEAL_BYTES if self._reading else 0):
            raise Malformed(f"a message of {length} bytes is longer than the {self._limit_bytes} that are allowed")
        end = begin + length
        if len(self._buffer) < end:
            self._let_go()
            return None
        body = bytes(self._buffer[begin:end])
        self._at = end
        if end == len(self._buffer):
            self._buffer, self._at = b"", 0
        if self._reading is not None:
            message = body[keys.SEAL_BYTES :]
            if not keys.is_same(body[: keys.SEAL_BYTES], self._reading.of(message)):
                raise SealBroken(body)
            body = message
        return decode(self._decoder, body)

    def _let_go(self) -> None:
        """Keep only what was not given out."""
        if self._at:
            self._buffer, self._at = bytearray(self._buffer[self._at :]), 0


def decode(decoder: Decoder[Any], body: bytes) -> object:
    try:
        message: Any = decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not a message: {error}") from None
    if kind := _READ_AS.get(type(message)):
        message = kind(*(getattr(message, name) for name in kind.__match_args__))
    if problem := protocol.problem_of(message):
        raise Malformed(f"{type(message).__name__} makes no sense: {problem}")
    return cast(object, message)


def encode(message: Any) -> bytes:
    """A frame. Refuses what no receiver would take."""
    if sent_as := _SENT_AS.get(type(message)):
        # A text of a push is made of what other nodes say, and may have become too long for its receiver.
        values = [getattr(message, name) for name in sent_as.__struct_fields__]
        message = sent_as(*[escape.cut(each, protocol.MAX_TEXT) if isinstance(each, str) else each for each in values])
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} has {len(body)} bytes, at most {MAX_MESSAGE_BYTES} can be sent")
    return _pack_length(len(body)) + body
