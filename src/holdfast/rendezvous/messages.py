"""What crosses the wire between an agent and its coordinator: typed, size-limited, nothing that is executed.

A message is a tagged msgpack map, checked field by field on the way in by `msgspec`. A frame is its length in four
bytes and the message. Anything longer than `MAX_MESSAGE_BYTES`, and anything that is not exactly one of the kinds
below, costs its sender the connection.

The first frames are the handshake (`Challenge`, `Hello`, `Welcome` or `Denied`), in which both sides prove that they
know the token if there is one. After it come messages of the run, and requests to its key-value store, which are
answered by their number.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec

from holdfast.rendezvous.outcome import Failure, Outcome
from holdfast.rendezvous.vocabulary import Settings, Stage
from holdfast.rendezvous.world import NodeFacts, Place

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20
_LENGTH = struct.Struct("!I")


# The handshake.


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The coordinator's first word."""

    version: int
    nonce: bytes
    wants_token: bool


class Hello(msgspec.Struct, frozen=True, tag=True):
    version: int
    run_id: str
    nonce: bytes
    proof: bytes = b""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    proof: bytes = b""


class Denied(msgspec.Struct, frozen=True, tag=True):
    reason: str


Handshake = Challenge | Hello | Welcome | Denied


# The key-value store.


class StoreRequest(msgspec.Struct, frozen=True, tag=True):
    """`operation` is one of set, get, add, compare_set, wait, check, delete. `timeout_s` is for those that wait."""

    number: int
    operation: str
    keys: tuple[str, ...]
    values: tuple[bytes, ...] = ()
    amount: int = 0
    timeout_s: float = 0.0


class StoreAnswer(msgspec.Struct, frozen=True, tag=True):
    """`problem` is empty when it went well, `timeout` when the time was up, else what is wrong."""

    number: int
    values: tuple[bytes, ...] = ()
    amount: int = 0
    problem: str = ""


# From an agent.


class Join(msgspec.Struct, frozen=True, tag=True):
    facts: NodeFacts
    settings: Settings
    last_round: int = 0
    replaces: str = ""


class Return(msgspec.Struct, frozen=True, tag=True):
    facts: NodeFacts
    settings: Settings
    place: Place
    stage: Stage


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    number: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    round: int
    failure: Failure


class Succeeded(msgspec.Struct, frozen=True, tag=True):
    round: int


class Leaving(msgspec.Struct, frozen=True, tag=True):
    pass


class Left(msgspec.Struct, frozen=True, tag=True):
    pass


class Close(msgspec.Struct, frozen=True, tag=True):
    reason: str


ToCoordinator = Join | Return | Heartbeat | Failed | Succeeded | Leaving | Left | Close | StoreRequest


# From the coordinator.


class HeartbeatAnswer(msgspec.Struct, frozen=True, tag=True):
    number: int


class Sealed(msgspec.Struct, frozen=True, tag=True):
    """`key` is whom it is for: an answer to an incarnation that was given up must not reach the next."""

    key: str
    place: Place


class Stop(msgspec.Struct, frozen=True, tag=True):
    round: int
    reason: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Expelled(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    outcome: Outcome


class Progress(msgspec.Struct, frozen=True, tag=True):
    joined: int
    wanted: int
    max_nodes: int
    seconds_left: float


FromCoordinator = HeartbeatAnswer | Sealed | Stop | Refused | Expelled | Ended | Progress
Answer = FromCoordinator | StoreAnswer


class Malformed(ValueError):  # noqa: N818
    """A peer sent something that is no message."""


class Frames:
    """Cuts a stream of bytes into messages of one of the given kinds."""

    def __init__(self, kinds: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def expect(self, kinds: object) -> None:
        """From the next message on other kinds are expected."""
        self._decoder = msgspec.msgpack.Decoder(kinds)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> object | None:
        """The next message that has come completely, if there is one."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_MESSAGE_BYTES:
            raise Malformed(f"a message of {length} bytes is longer than the {MAX_MESSAGE_BYTES} that are allowed")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            message: object = self._decoder.decode(body)
            return message
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Malformed(f"not a message: {error}") from None


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """A frame. Refuses what no receiver would take."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} has {len(body)} bytes, at most {MAX_MESSAGE_BYTES} can be sent")
    return _LENGTH.pack(len(body)) + body


def prove(token: bytes, side: bytes, run_id: str, challenge: bytes, own_nonce: bytes) -> bytes:
    """That this side knows the token, for these two nonces, this run and this direction."""
    text = b"|".join((b"holdfast", side, run_id.encode(), challenge, own_nonce))
    return hmac.new(token, text, hashlib.sha256).digest()


def is_proof(given: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(given, expected)
