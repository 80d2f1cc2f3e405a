"""What crosses the wire between an agent and its coordinator: typed, size-limited, nothing that is executed.

The kinds are plain data classes; `msgspec` turns them into tagged msgpack and back and checks every field on the
way in. The pure machines use the classes alone, so `msgspec` is loaded by the first who encodes or decodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.rendezvous.restart import Failure
from holdfast.rendezvous.vocabulary import Outcome, Settings, Stage
from holdfast.rendezvous.world import NodeFacts, Place

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20


# From an agent.


@dataclass(frozen=True, slots=True)
class Join:
    facts: NodeFacts
    settings: Settings
    last_round: int = 0
    replaces: str = ""


@dataclass(frozen=True, slots=True)
class Return:
    facts: NodeFacts
    settings: Settings
    place: Place
    stage: Stage


@dataclass(frozen=True, slots=True)
class Heartbeat:
    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    round: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Succeeded:
    round: int


@dataclass(frozen=True, slots=True)
class Leaving:
    pass


@dataclass(frozen=True, slots=True)
class Left:
    pass


@dataclass(frozen=True, slots=True)
class Close:
    reason: str


ToCoordinator = Join | Return | Heartbeat | Failed | Succeeded | Leaving | Left | Close


# From the coordinator.


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    number: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """`key` is whom it is for: an answer to an incarnation that was given up must not reach the next."""

    key: str
    place: Place


@dataclass(frozen=True, slots=True)
class Stop:
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str


@dataclass(frozen=True, slots=True)
class Expelled:
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Progress:
    joined: int
    wanted: int
    max_nodes: int
    seconds_left: float


FromCoordinator = HeartbeatAnswer | Sealed | Stop | Refused | Expelled | Ended | Progress
