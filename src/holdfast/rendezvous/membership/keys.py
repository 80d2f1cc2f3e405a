"""What is derived from secrets: the key of a run, the seals on frames, the hashes of nodes' secrets. Pure.

    token     what the user gives to every node, at least 16 bytes. `holdfast token` makes one of 32 random bytes and a
              checksum. Any other works, too. But a client can try tokens on the proof that a coordinator has sent it,
              offline, and finds one that a person has made up
    run key   HMAC(token, run id). `holdfast token --run ID` prints it; it opens that run and no other
    keys of a connection, one for each direction: the halves of a BLAKE2b hash over both nonces, the run id and the
              endpoint as the agent dialled it, with a key that follows from the run key
    key of snapshots  HMAC(run key): transfer processes of the run derive the keys of their connections from it
    seal      BLAKE2b with the key of the direction over the number of the frame and its body; in front of the body

The first sealed frame of each side proves that it knows the token; the coordinator sends its own first. A relay can
pass sealed frames on, but it can neither make one nor change, repeat, drop or reorder one without being noticed.

A node makes up a secret and shows it on every connection, after the proof. The coordinator keeps its hash, so no other
node can speak for it. No key is shared.

HMAC takes keys of any length, so it makes the keys that all connections of a run share, once. What each connection
needs is keyed BLAKE2b, which takes a third of the time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import zlib
from functools import lru_cache

SEAL_BYTES = 16
_KEY_BYTES = 32
_RUN_TOKEN = b"holdfast-run-"


def is_run_token(token: bytes) -> bool:
    """Whether it opens one run only."""
    return token.startswith(_RUN_TOKEN)


def made_token(random: bytes) -> str:
    """`random` are 32 bytes."""
    return f"holdfast-{random.hex()}-{zlib.crc32(random):08x}"


def is_made(token: bytes) -> bool:
    """Whether it was made by `made_token`, or derived from another one by `run_token`."""
    found = re.fullmatch(rb"holdfast-([0-9a-f]{64})-[0-9a-f]{8}", token)
    if found is None:
        return re.fullmatch(_RUN_TOKEN + rb"[0-9a-f]{64}", token) is not None
    return token == made_token(bytes.fromhex(found[1].decode())).encode()


def run_token(token: bytes, run_id: str) -> bytes:
    """What opens this run only. A token that is one already is returned as it is."""
    return token if is_run_token(token) else _RUN_TOKEN + _derive(token, b"run", run_id.encode()).hex().encode()


def connection_keys(run_key: bytes, nonces: tuple[bytes, bytes], run_id: str, endpoint: str) -> tuple[bytes, bytes]:
    """Of the way to the coordinator and of the way back. `nonces` are the coordinator's and the agent's."""
    text = _joined(*nonces, run_id.encode(), endpoint.encode())
    both = hashlib.blake2b(text, key=_derive(run_key, b"connections"), digest_size=2 * _KEY_BYTES).digest()
    return both[:_KEY_BYTES], both[_KEY_BYTES:]


def snapshot_key(token: bytes, run_id: str) -> bytes:
    return _derive(run_token(token, run_id), b"snapshots")


def notice_key(token: bytes, run_id: str) -> bytes:
    return _derive(run_token(token, run_id), b"notices")


class Seal:
    """One direction of a connection. Both sides count the frames."""

    def __init__(self, key: bytes) -> None:
        self._keyed, self._number = hashlib.blake2b(key=key, digest_size=SEAL_BYTES), 0

    def of(self, body: bytes) -> bytes:
        """The seal of the next frame."""
        seal = self._keyed.copy()
        seal.update(self._number.to_bytes(8, "big") + body)
        self._number += 1
        return seal.digest()


def hash_of_secret(secret: bytes) -> bytes:
    """Empty for a node that shows none."""
    return hashlib.blake2b(secret, digest_size=_KEY_BYTES).digest() if secret else b""


is_same = hmac.compare_digest


@lru_cache(maxsize=512)  # Two for each run.
def _derive(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, _joined(*parts), hashlib.sha256)


def _joined(*parts: bytes) -> bytes:
    """With their lengths, so that no two lists of parts give the same text."""
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])
