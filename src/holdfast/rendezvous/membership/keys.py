"""What is derived from secrets: the key of a run, the seals on frames, the tickets of nodes. Pure.

    token     what the user gives to every node, at least 16 bytes
    run key   HMAC(token, run id). `holdfast token --run ID` prints it; it opens that run and no other
    keys of a connection, one for each direction: the halves of a BLAKE2b hash over both nonces, the run id and the
              endpoint as the agent dialled it, with a key that follows from the run key
    seal      BLAKE2b with the key of the direction over the number of the frame and its body; in front of the body

The first sealed frame of each side proves that it knows the token; the coordinator sends its own first. A relay can
pass sealed frames on, but it can neither make one nor change, repeat, drop or reorder one without being noticed.

A ticket is BLAKE2b with the ticket key of the run over the node id. A node gets it when it connects for the first time
and shows it on every later connection, so no other node can speak for it. The ticket key follows from the run key, or
without a token from a random number that the coordinator writes into its memory.

HMAC takes keys of any length, so it makes the keys that all connections of a run share, once. What each connection
needs is keyed BLAKE2b, which takes a third of the time.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

SEAL_BYTES = 16
_KEY_BYTES = 32
_RUN_TOKEN = b"holdfast-run-"


def run_token(token: bytes, run_id: str) -> bytes:
    """What opens this run only. A token that is one already is returned as it is."""
    is_of_run = token.startswith(_RUN_TOKEN)
    return token if is_of_run else _RUN_TOKEN + _derive(token, b"run", run_id.encode()).hex().encode()


def connection_keys(run_key: bytes, nonces: tuple[bytes, bytes], run_id: str, endpoint: str) -> tuple[bytes, bytes]:
    """Of the way to the coordinator and of the way back. `nonces` are the coordinator's and the agent's."""
    text = _joined(*nonces, run_id.encode(), endpoint.encode())
    both = hashlib.blake2b(text, key=_derive(run_key, b"connections"), digest_size=2 * _KEY_BYTES).digest()
    return both[:_KEY_BYTES], both[_KEY_BYTES:]


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


def ticket_key(secret: bytes) -> bytes:
    """`secret` is the run key, or the run's random number."""
    return _derive(secret, b"tickets")


def ticket(key: bytes, node_id: str) -> bytes:
    return hashlib.blake2b(node_id.encode(), key=key, digest_size=_KEY_BYTES).digest()


is_same = hmac.compare_digest


@lru_cache(maxsize=512)  # Two for each run.
def _derive(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, _joined(*parts), hashlib.sha256)


def _joined(*parts: bytes) -> bytes:
    """With their lengths, so that no two lists of parts give the same text."""
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])
