"""What crosses the wire between an agent and its coordinator: typed, size-limited, nothing that is executed.

A message is a tagged msgpack map, checked field by field on the way in by `msgspec`, and its values by `bounds`. A
frame is its length in four bytes and the message. Anything longer than `MAX_MESSAGE_BYTES`, and anything that is not
exactly one of the kinds below, costs its sender the connection. Before both sides know each other the limit is
`MAX_HANDSHAKE_BYTES`, so that strangers cannot make a coordinator keep much.

The first frames are the handshake (`Challenge`, `Hello`, `Welcome` or `Denied`), in which both sides prove that they
know the token if there is one. After it come messages of the run, and requests to its key-value store, which are
answered by their number.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec

from holdfast.rendezvous import bounds
from holdfast.rendezvous.decoding import msgpack_decoder
from holdfast.rendezvous.outcome import Failure, Outcome
from holdfast.rendezvous.vocabulary import Settings, Stage
from holdfast.rendezvous.world import NodeFacts, Place

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20
MAX_HANDSHAKE_BYTES = 1 << 14
NONCE_BYTES = 32
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
    """`operation` is one of set, get, add, compare_set, wait, check, delete. `timeout_s` is for those that wait.

    `sender` and `number` together name the request: one that comes a second time, because the connection was lost
    before the answer came, is answered again and not carried out again. `generation` is that of the store which the
    client knows, empty if it knows none yet.
    """

    sender: bytes
    number: int
    operation: str
    keys: tuple[str, ...]
    values: tuple[bytes, ...] = ()
    amount: int = 0
    timeout_s: float = 0.0
    generation: bytes = b""


class StoreAnswer(msgspec.Struct, frozen=True, tag=True):
    """`problem` is empty when it went well, `timeout` when the time was up (`values` then names some of the missing
    keys), `generation` when the store is not the one that the client knows, else what is wrong.

    `values` may be fewer than the keys of a `get`: those that fit, at least one. `generation` names the store.
    """

    number: int
    values: tuple[bytes, ...] = ()
    amount: int = 0
    problem: str = ""
    generation: bytes = b""


# From an agent.


class Join(msgspec.Struct, frozen=True, tag=True):
    facts: NodeFacts
    settings: Settings
    last_round: int = 0
    replaces: str = ""
    failure: Failure | None = None
    restarts_used: int = 0


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
    is_hang: bool = False


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


class Notice(msgspec.Struct, frozen=True, tag=True):
    text: str


FromCoordinator = HeartbeatAnswer | Sealed | Stop | Refused | Expelled | Ended | Progress | Notice
Answer = FromCoordinator | StoreAnswer


class Malformed(ValueError):  # noqa: N818
    """A peer sent something that is no message."""


class Frames:
    """Cuts a stream of bytes into messages of one of the given kinds."""

    def __init__(self, kinds: object, limit_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._buffer = bytearray()
        self.expect(kinds, limit_bytes)

    def expect(self, kinds: object, limit_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """From the next message on other kinds are expected."""
        self._decoder = msgpack_decoder(kinds)
        self._limit_bytes = limit_bytes

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> object | None:
        """The next message that has come completely, if there is one."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._limit_bytes:
            raise Malformed(f"a message of {length} bytes is longer than the {self._limit_bytes} that are allowed")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return self._decode(body)

    def _decode(self, body: bytes) -> object:
        try:
            message: object = self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Malformed(f"not a message: {error}") from None
        problem = problem_of(message)
        if problem:
            raise Malformed(f"{type(message).__name__} makes no sense: {problem}")
        return message


def problem_of(message: object) -> str:
    """What is wrong with the values of a message that has the right shape, or nothing."""
    match message:
        case Hello(version=version, nonce=nonce) | Challenge(version=version, nonce=nonce):
            # Another version is refused as such; what its nonces are like is its own business.
            is_sound = version != PROTOCOL_VERSION or len(nonce) == NONCE_BYTES
            return "" if is_sound else f"a nonce of {len(nonce)} bytes"
        case Join(facts, settings, last_round, replaces, failure, used):
            is_sound = bounds.is_round(last_round) and len(replaces) <= 2 * bounds.MAX_NAME
            problem = bounds.facts_problem(facts) or bounds.settings_problem(settings)
            problem = problem or bounds.failure_problem(failure) or bounds.restarts_problem(used)
            return problem or ("" if is_sound else f"last round {last_round}")
        case Return(facts, settings, place, _):
            problem = bounds.facts_problem(facts) or bounds.settings_problem(settings)
            return problem or bounds.place_problem(place)
        case StoreRequest(sender, timeout_s=seconds, generation=generation):
            is_sound = bounds.is_time(seconds) and max(len(sender), len(generation)) <= NONCE_BYTES
            sizes = f"its sender has {len(sender)} bytes and its generation {len(generation)}"
            return "" if is_sound else f"timeout_s is {seconds}, {sizes}"
        case Failed(_, failure):
            return bounds.failure_problem(failure)
        case Close(reason):
            return bounds.text_problem(reason)
        case Sealed(_, place):
            return bounds.place_problem(place)
        case Ended(outcome):
            return bounds.outcome_problem(outcome)
    return ""


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """A frame. Refuses what no receiver would take."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} has {len(body)} bytes, at most {MAX_MESSAGE_BYTES} can be sent")
    return _LENGTH.pack(len(body)) + body


def prove(token: bytes, side: bytes, run_id: str, challenge: bytes, own_nonce: bytes) -> bytes:
    """That this side knows the token, for these two nonces, this run and this direction."""
    parts = (b"holdfast", side, run_id.encode(), challenge, own_nonce)
    # With their lengths, so that no two lists of parts give the same text.
    text = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.new(token, text, hashlib.sha256).digest()


def is_proof(given: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(given, expected)
