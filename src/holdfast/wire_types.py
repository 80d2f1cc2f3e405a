"""Types of fields that cross the wire, with their limits, for the records that several layers share.

A record names them for type checkers only (`if TYPE_CHECKING: from holdfast import wire_types as wire`), so that a
standalone run does not import msgspec. `rendezvous/membership/protocol.py` gives them to the records.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_COUNT = 1 << 53  # What every peer can count to, whatever it is written in.
MAX_NAME = 256
MAX_EXCERPT = 1 << 14

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
AnyInt = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
WorkerRank = Annotated[int, Meta(ge=0, lt=1 << 32)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e10)]
PerSecond = Annotated[float, Meta(ge=0.0, le=1e15)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Line = Annotated[str, Meta(max_length=512)]
Note = Annotated[str, Meta(max_length=2048)]
Path = Annotated[str, Meta(max_length=1024)]
Excerpt = Annotated[str, Meta(max_length=MAX_EXCERPT)]
UP_TO_16 = Meta(max_length=16)
UP_TO_1024 = Meta(max_length=1024)
