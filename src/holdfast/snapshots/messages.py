"""What a worker and its spawner say to each other about slots. Pure.

Each message is one packet on a socket of its round: a kind, the number of the request, and five numbers. An answer may
have a text, and the descriptor of a slot.

    WANT(bytes)                        SLOT(slot), with its descriptor; REFUSED(text)
    COMMIT(slot, step, bytes, flags)   COMMITTED(); REFUSED(text)
    LOAD(rank, flags)                  FOUND(step, world size, bytes, rank, flags), with a descriptor that can only be
                                       read; NOTHING(text); REFUSED(text)
"""

from __future__ import annotations

import struct

VARIABLE = "HOLDFAST_SNAPSHOTS"

WANT, COMMIT, LOAD, SLOT, COMMITTED, FOUND, NOTHING, REFUSED = range(1, 9)
REPLICATED = 1  # A flag of COMMIT and FOUND.
RESHARD = 1  # A flag of LOAD.

MOST_TEXT_BYTES = 1024
HEAD = struct.Struct("=BIqqqqq")


def packed(kind: int, request: int, *numbers: int, text: str = "") -> bytes:
    padded = (*numbers, 0, 0, 0, 0, 0)[:5]
    return HEAD.pack(kind, request, *padded) + text.encode(errors="replace")[:MOST_TEXT_BYTES]
