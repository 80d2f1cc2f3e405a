"""What transfer processes say to each other, and how each frame is authenticated. Pure.

    client -> server    MAGIC and a nonce
    server -> client    a nonce
    frames from here on, in both directions: length of the body (4 bytes), seal (16 bytes), body (at most 1 MiB)

    client              GET(part) or PUT(part, bytes)
    server              YES(bytes), HELD (PUT: it is here already), or NO(text)
    the one with data   DATA(bytes) as often as needed, END(CRC-32 of all data)
    server of a PUT     HELD, when the checksum of what it has written is right

A seal is BLAKE2b over the number of the frame and its body, with a key for this direction of this connection, which
follows from the key of the run and both nonces. So the first frame of each side proves that it knows the key, and no
frame can be made, changed, repeated or left out by others. Nothing is encrypted. Numbers are fixed structures; the only
text is that of NO.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from holdfast.errors import HoldfastError
from holdfast.frozen import frozen
from holdfast.snapshots.slots import Snapshot

MAGIC = b"HFsnap1\n"
NONCE_BYTES = 32
FRAME_BYTES = 1 << 20
SEAL_BYTES = 16
HEADER = struct.Struct(f"!I{SEAL_BYTES}s")
DATA_BYTES = FRAME_BYTES - 1

GET, PUT, YES, HELD, NO, DATA, END = b"G", b"P", b"Y", b"H", b"N", b"D", b"E"

_PART = struct.Struct("!QQQI?IQ")
_BYTES = struct.Struct("!Q")
_CHECKSUM = struct.Struct("!I")
_TEXT_LIMIT_BYTES = 300
_MOST_BYTES = 1 << 48


class FrameError(HoldfastError):
    """What a peer sent is no frame of this protocol, or not authentic."""


@frozen
class Part:
    """What one rank has saved of a snapshot. `bytes` is 0 if the size is not known yet."""

    snapshot: Snapshot
    rank: int
    bytes: int = 0

    @property
    def name(self) -> str:
        return f"rank {self.rank} of step {self.snapshot[2]}"


class Seals:
    """One direction of a connection. Both sides count the frames."""

    def __init__(self, key: bytes) -> None:
        self._keyed, self._number = hashlib.blake2b(key=key, digest_size=SEAL_BYTES), 0

    def next(self, *pieces: bytes | memoryview) -> bytes:
        seal = self._keyed.copy()
        seal.update(self._number.to_bytes(8, "big"))
        for piece in pieces:
            seal.update(piece)
        self._number += 1
        return seal.digest()

    def header(self, kind: bytes, body: bytes | memoryview) -> bytes:
        """Of the frame `kind + body`, with the kind."""
        return HEADER.pack(1 + len(body), self.next(kind, body)) + kind

    def check(self, seal: bytes, body: bytes | memoryview) -> None:
        if not hmac.compare_digest(seal, self.next(body)):
            raise FrameError("sent a frame that was not made with this run's token")


def seals_of(key: bytes, client_nonce: bytes, server_nonce: bytes, certificate: bytes = b"") -> tuple[Seals, Seals]:
    """Of the way to the server and of the way back. With TLS they depend on the server's certificate as each side knows
    it: a peer between the two, which has another one, cannot pass frames on."""
    both = hashlib.blake2b(MAGIC + client_nonce + server_nonce + certificate, key=key, digest_size=64).digest()
    return Seals(both[:32]), Seals(both[32:])


def length_in(header: bytes) -> tuple[int, bytes]:
    """The length of the body that follows, and its seal."""
    length, seal = HEADER.unpack(header)
    if not 1 <= length <= FRAME_BYTES:
        raise FrameError(f"announced a frame of {length} bytes")
    return length, seal


def request(kind: bytes, part: Part) -> bytes:
    term, round, step, world_size, is_replicated = part.snapshot
    return kind + _PART.pack(term, round, step, world_size, is_replicated, part.rank, part.bytes)


def part_in(body: bytes) -> Part:
    """Of a GET or PUT."""
    if body[:1] not in (GET, PUT) or len(body) != 1 + _PART.size:
        raise FrameError("sent something other than a request")
    *snapshot, rank, size = _PART.unpack(body[1:])
    if rank >= snapshot[3] or size > _MOST_BYTES or max(snapshot[:3]) >= 1 << 63:
        raise FrameError("sent a request with impossible numbers")
    term, round, step, world_size, is_replicated = snapshot
    return Part((term, round, step, world_size, is_replicated), rank, size)


def yes(size: int) -> bytes:
    return YES + _BYTES.pack(size)


def no(why: str) -> bytes:
    return NO + why.encode()[:_TEXT_LIMIT_BYTES]


def end(checksum: int) -> bytes:
    return END + _CHECKSUM.pack(checksum)


def size_in(body: bytes) -> int | None:
    """Of a YES; None for HELD. A NO is raised."""
    if body[:1] == NO:
        raise FrameError("refused: " + body[1 : 1 + _TEXT_LIMIT_BYTES].decode(errors="replace"))
    if body == HELD:
        return None
    if body[:1] != YES or len(body) != 1 + _BYTES.size or (size := _BYTES.unpack(body[1:])[0]) > _MOST_BYTES:
        raise FrameError("sent something other than an answer")
    return int(size)


def checksum_in(body: bytes) -> int:
    if body[:1] != END or len(body) != 1 + _CHECKSUM.size:
        raise FrameError("sent something other than the end of the data")
    return int(_CHECKSUM.unpack(body[1:])[0])


class Pace:
    """At most so many bytes a second together, with bursts of an eighth of a second; 0 means no limit."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s, self._free_at = bytes_per_s, 0.0
        self.piece_bytes = min(DATA_BYTES, max(1 << 12, bytes_per_s // 8)) if bytes_per_s else DATA_BYTES

    def delay_s(self, size: int, now: float) -> float:
        """How long to wait before so many bytes are sent."""
        if not self._bytes_per_s:
            return 0.0
        start = max(now - 0.125, self._free_at)
        self._free_at = start + size / self._bytes_per_s
        return max(0.0, start - now)
