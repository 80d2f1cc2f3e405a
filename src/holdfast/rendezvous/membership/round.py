"""The round that runs or is being stopped: whose workers may be alive, what failed, which members went away. Pure."""

from __future__ import annotations

from holdfast.rendezvous.membership.model import NodeFacts, Place, World
from holdfast.rendezvous.membership.restart_policy import Failure

STOP_MARGIN_S = 15.0  # What a node may need to stop beyond its grace: stacks, the sweep, a busy machine.


class Round:
    """One life of a world.

    `owing` are the members whose workers may be alive, `unfinished` those whose workers have not succeeded. `failures`
    are in the order in which they were reported, one for each node; `departed` are members that went away, and how.
    Until `returns_until` unknown members of an adopted world may come back; by `stop_by` all must be back from a stop.
    """

    def __init__(self, world: World, returns_until: float | None = None) -> None:
        self.world = world
        self.owing = set(world.keys)
        self.unfinished = set(world.keys)
        self.failures: dict[str, Failure] = {}
        self.departed: dict[str, str] = {}
        self.returns_until = returns_until
        self.is_stopped_for_failure = False
        self.stopped_at = 0.0
        self.stop_by: float | None = None

    @property
    def has_succeeded(self) -> bool:
        return not self.unfinished and not self.world.missing

    @property
    def is_accounted_for(self) -> bool:
        """Whether no worker of it can be alive: all members have joined again, left, or are lost."""
        return not self.owing and self.returns_until is None

    def finish(self, key: str) -> None:
        self.owing.discard(key)
        self.unfinished.discard(key)

    def take_up(self, facts: NodeFacts, place: Place, now: float) -> bool:
        """A member of an adopted round is back, with its workers or without. False if it is none."""
        world = self.world
        if world.order != place.order or self.returns_until is None:
            return False
        if facts.key in world.ranks or not world.take_up(place.rank, facts):
            return False
        self.owing.add(facts.key)
        self.unfinished.add(facts.key)
        if self.stop_by is not None:  # It hears of the stop only now.
            self.stop_by = max(self.stop_by, now + facts.grace_s + STOP_MARGIN_S)
        if not world.missing:
            self.returns_until = None
        return True

    def stop(self, is_failure: bool, grace_s: float, now: float) -> None:
        self.is_stopped_for_failure = is_failure
        self.stopped_at, self.stop_by = now, now + grace_s + STOP_MARGIN_S

    def give_up_unknown(self) -> str:
        """The members of an adopted round that have not come back are lost. Returns what to say of it."""
        self.returns_until = None
        which = "1 node" if self.world.missing == 1 else f"{self.world.missing} nodes"
        reason = f"{which} of round {self.world.round} did not come back after the coordinator was replaced"
        self.departed.setdefault("", reason)
        return reason
