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

from holdfast.rendezvous.membership import keys, protocol
from holdfast.rendezvous.membership.model import Push

MAX_MESSAGE_BYTES = 1 << 20
MAX_HANDSHAKE_BYTES = 1 << 14
_LENGTH = struct.Struct("!I")


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
        self._buffer = bytearray()
        self._decoder, self._limit_bytes = HANDSHAKE, limit_bytes
        self._reading: keys.Seal | None = None
        self._writing: keys.Seal | None = None
        self.peer_minor = 0  # As far as the handshake has said it.

    def seal(self, reading: bytes, writing: bytes) -> None:
        """From the next frame of each direction on, with these keys."""
        self._reading, self._writing = keys.Seal(reading), keys.Seal(writing)

    def sealed(self, frame: bytes) -> bytes:
        """The frame as this connection carries it."""
        if self._writing is None:
            return frame
        body = frame[_LENGTH.size :]
        return _LENGTH.pack(len(body) + keys.SEAL_BYTES) + self._writing.of(body) + body

    def expect(self, decoder: Decoder[Any]) -> None:
        """From the next message on."""
        self._decoder, self._limit_bytes = decoder, MAX_MESSAGE_BYTES

    def feed(self, data: bytes) -> None:
        self._buffer += data

    @property
    def held_bytes(self) -> int:
        """What was fed and not given out yet."""
        return len(self._buffer)

    def next(self) -> object | None:
        """The next message that has arrived completely, if there is one."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._limit_bytes + (keys.SEAL_BYTES if self._reading else 0):
            raise Malformed(f"a message of {length} bytes is longer than the {self._limit_bytes} that are allowed")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        if self._reading is not None:
            seal, message = body[: keys.SEAL_BYTES], body[keys.SEAL_BYTES :]
            if not keys.is_same(seal, self._reading.of(message)):
                raise SealBroken(body)
            body = message
        return decode(self._decoder, body)


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
        values = (getattr(message, name) for name in sent_as.__struct_fields__)
        message = sent_as(*(protocol.clipped_text(each) if isinstance(each, str) else each for each in values))
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} has {len(body)} bytes, at most {MAX_MESSAGE_BYTES} can be sent")
    return _LENGTH.pack(len(body)) + body
