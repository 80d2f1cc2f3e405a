"""The words of a run: what its nodes agree on, what can happen to it, and what can be done about it. Data only.

`membership` is the machine that takes the events and gives the commands.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

from holdfast.records import record
from holdfast.rendezvous.outcome import Failure, Outcome
from holdfast.rendezvous.restart import RestartPolicy
from holdfast.rendezvous.world import NodeFacts, Place, World


class Admit(StrEnum):
    """What a newcomer below max does to a round that runs."""

    NOW = "now"
    ON_RESTART = "on-restart"


@dataclass(frozen=True, slots=True)
class Settings:
    """What all nodes of a run must agree on; the first to join fixes it."""

    min_nodes: int = 1
    max_nodes: int = 1
    join_timeout_s: float = 600.0
    last_call_s: float = 5.0
    heartbeat_s: float = 1.0
    lease_s: float = 5.0
    drop_timeout_s: float = 2.0
    close_linger_s: float = 10.0
    admit: Admit = Admit.NOW
    policy: RestartPolicy = field(default_factory=RestartPolicy)

    def difference(self, other: Settings) -> str:
        """The first thing in which a node's settings differ from these of the run, in words; or nothing."""
        return _difference(self, other)


class Stage(StrEnum):
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    LEAVING = "LEAVING"


class Phase(StrEnum):
    FORMING = "FORMING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    ENDED = "ENDED"


# How a run may go from phase to phase, and why. The picture in the documentation is made from this.
PHASE_CHANGES: tuple[tuple[Phase, str, Phase], ...] = (
    (Phase.FORMING, "everybody has joined, or the last call is over", Phase.RUNNING),
    (Phase.FORMING, "a member of an earlier round returns", Phase.RUNNING),
    (Phase.FORMING, "too few in time, or closed", Phase.ENDED),
    (Phase.RUNNING, "a failure, a lost or leaving member, a newcomer to admit", Phase.STOPPING),
    (Phase.RUNNING, "all workers have succeeded, or closed", Phase.ENDED),
    (Phase.STOPPING, "everybody is accounted for, and the run goes on", Phase.FORMING),
    (Phase.STOPPING, "the policy gives up, or closed", Phase.ENDED),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """What survives the coordinator process. `last_round` is 0 if no round was ever sealed.

    `settings` are those that the first node has fixed: whoever is the first after a restart must not fix others.
    """

    last_round: int = 0
    restarts_used: int = 0
    outcome: Outcome | None = None
    settings: Settings | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What somebody needs who goes on with the run in the place of another, besides what the nodes say themselves.

    `previous` is the order of the world before. `finished` are the members whose workers have succeeded; they may be
    gone by now. In a round that is being stopped, `failures` and `departed` are what is known about it so far: the
    first to be known has decided how those that follow are taken. `is_recovering`: what was written of the run
    before is lost, and somebody may still have workers of a round that nobody here knows of. `has_lost_nodes`: somebody
    may come back who does not know how the run ended.
    """

    memory: Memory
    world: World | None = None
    is_stopping: bool = False
    failures: tuple[tuple[str, Failure], ...] = ()
    departed: tuple[tuple[str, str], ...] = ()
    previous: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    is_recovering: bool = False
    has_lost_nodes: bool = False


# Events.


@record
class NodeJoined:
    """A node asks for a place in the next round; none of its workers are alive.

    `last_round` is the highest round that it has seen, and `restarts_used` what it was told then. `replaces` is the
    incarnation that it gave up, or empty. `failure` is what its workers of that round failed of, in case that the
    report of it got lost.
    """

    facts: NodeFacts
    settings: Settings
    last_round: int = 0
    replaces: str = ""
    failure: Failure | None = None
    restarts_used: int = 0


@record
class NodeReturned:
    """A node is connected again and has not given up its place."""

    facts: NodeFacts
    settings: Settings
    place: Place
    stage: Stage


@record
class LeaseExpired:
    """Somebody else keeps the leases of this run, and says that this node's has ended."""

    key: str


@record
class NodeHeard:
    """A heartbeat."""

    key: str


@record
class ConnectionClosed:
    key: str


@record
class WorkersFailed:
    key: str
    round: int
    failure: Failure


@record
class WorkersSucceeded:
    key: str
    round: int


@record
class NodeLeaving:
    """A member is going away and stopping its workers."""

    key: str


@record
class NodeLeft:
    """It is gone, and so are its workers."""

    key: str


@record
class CloseRequested:
    reason: str


@record
class TimePassed:
    """The deadline that `next_deadline` named has come."""


Event = (
    NodeJoined
    | NodeReturned
    | LeaseExpired
    | NodeHeard
    | ConnectionClosed
    | WorkersFailed
    | WorkersSucceeded
    | NodeLeaving
    | NodeLeft
    | CloseRequested
    | TimePassed
)


# Commands.


@record
class SealWorld:
    """Tell every member of the world."""

    world: World


@record
class TellPlace:
    """Tell one member once more: what it was told has not reached it."""

    key: str
    place: Place


@record
class StopRound:
    """Tell these nodes to stop their workers of this round and join again.

    `is_hang`: the run hangs, and each node should see where its workers are before it stops them.
    """

    keys: tuple[str, ...]
    round: int
    reason: str
    is_hang: bool = False


@record
class Refuse:
    """Tell this node that it cannot join, and why. Nothing else will change that."""

    key: str
    reason: str


@record
class Expel:
    """Tell this node that its place was given up: it kills its workers and joins as a stranger."""

    key: str
    reason: str


@record
class TellOutcome:
    keys: tuple[str, ...]
    outcome: Outcome


@record
class ShowProgress:
    """Tell those who wait how far the round is. `seconds_left` is until the join timeout."""

    keys: tuple[str, ...]
    joined: int
    wanted: int
    max_nodes: int
    seconds_left: float


@record
class Announce:
    """Tell these nodes something that a person wants to read in their logs, and nobody else acts on."""

    keys: tuple[str, ...]
    text: str


@record
class Remember:
    """Write this down before any command that follows is carried out."""

    memory: Memory


@record
class ForgetRun:
    """The run is over and everybody has heard, or nobody is left to hear."""


Command = (
    SealWorld | TellPlace | StopRound | Refuse | Expel | TellOutcome | ShowProgress | Announce | Remember | ForgetRun
)


def _difference(ours: Any, theirs: Any) -> str:
    for each in fields(ours):
        mine, other = getattr(ours, each.name), getattr(theirs, each.name)
        if mine == other:
            continue
        if is_dataclass(mine):
            return _difference(mine, other)
        setting = each.name.removesuffix("_s")  # As users write it.
        return f"the run has {setting}={_plain(mine)}, this node has {setting}={_plain(other)}"
    return ""


def _plain(value: object) -> str:
    if isinstance(value, frozenset):
        return ",".join(sorted(map(str, value))) or "nothing"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value.value) if isinstance(value, StrEnum) else repr(value)
