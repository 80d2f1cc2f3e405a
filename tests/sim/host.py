"""A fake host: its clock, its spawner, and the workers that run on it.

The spawner is a process of its own. It kills the workers when their lease ends by the host's clock, whatever the
agent does then, and when the agent dies. A `Group` is all workers of one round on one host; what it is going to do
is in its `Plan`, which the scenario draws when the group starts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from holdfast.failures.records import Failure
from holdfast.rendezvous.membership.restart_policy import Advance
from tests.sim.checkers import Checks
from tests.sim.engine import Alarm, Clock, Engine
from tests.sim.slots import Slots

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.coordinator import Coordinator
    from tests.sim.notices import Announcements
    from tests.sim.snapshots import Saving

AGENT_DEATH_TO_WORKERS_DEATH_S = 0.2
SPAWNER_LATENESS_S = 0.002


@dataclass(frozen=True, slots=True)
class Plan:
    """What the workers of a group will do. `ends_after_s` None: they hang."""

    ends_after_s: float | None
    failure: Failure | None = None
    heeds_sigterm: bool = True
    stops_after_s: float = 0.05
    stacks_s: float = 0.0
    """How long their agent takes their stacks before it stops them."""
    feels_peers_after_s: float | None = None
    """How long after the death of a peer of the round they fail of it; None: they do not notice."""
    consequence: Failure = field(default=Failure(text="connection closed by peer", is_consequence=True))
    advance: Advance | None = None


class Planner(Protocol):
    def plan(self, host: Host, round: int, restarts_used: int) -> Plan: ...


class Group:
    """The workers of one round on one host."""

    def __init__(self, host: Host, node: str, round: int, rank: int, plan: Plan) -> None:
        self.host = host
        self.node = node
        self.round = round
        self.rank = rank
        self.plan = plan
        self.is_alive = True
        self.is_stopping = False
        self.has_succeeded = self.has_agreed = False
        self.failure: Failure | None = None

    def __repr__(self) -> str:
        return f"workers of round {self.round} on {self.host.name}"


class Society:
    """All groups that are alive anywhere, and what they do to each other."""

    def __init__(self, engine: Engine, checks: Checks) -> None:
        self.engine = engine
        self.checks = checks
        self.alive: list[Group] = []
        self.succeeded: dict[int, set[int]] = defaultdict(set)
        """The ranks of a round whose workers have succeeded."""
        self.is_peaceful = False
        """From now on nobody fails of itself or hangs."""
        self.saving: Saving | None = None
        """Without it no worker saves anything."""
        self.announcements: Announcements | None = None
        """Without it no worker ends because of a notice."""

    def born(self, group: Group) -> None:
        self.alive.append(group)
        self.checks.workers_started(group)
        if group.plan.ends_after_s is not None:
            self.engine.after(group.plan.ends_after_s, self._end, group, group.plan.failure)

    def _end(self, group: Group, failure: Failure | None) -> None:
        if group.is_alive and not group.is_stopping:
            self.die(group, None if self.is_peaceful else failure)

    def give_an_end(self, within_s: float) -> None:
        """Everybody who lives will succeed soon."""
        for group in self.alive:
            self.engine.after(self.engine.random.random() * within_s, self._end, group, None)

    def die(self, group: Group, failure: Failure | None) -> None:
        """The workers are gone, of themselves (None: they have succeeded) or because somebody killed them."""
        group.is_alive = False
        group.failure = failure
        group.has_succeeded = failure is None
        self.alive.remove(group)
        if group.has_succeeded:
            self.succeeded[group.round].add(group.rank)
        self.checks.workers_gone(group)
        self.engine.note(group.host.name, "workers of round", str(group.round), "end:", failure or "success")
        if failure is not None:
            self._upset_peers(group)
        group.host.exited(group)

    def _upset_peers(self, dead: Group) -> None:
        for peer in self.alive:
            delay_s = peer.plan.feels_peers_after_s
            if peer.round == dead.round and delay_s is not None:
                self.engine.after(delay_s, self._suffer, peer)

    def _suffer(self, peer: Group) -> None:
        if peer.is_alive and not peer.is_stopping:
            self.die(peer, peer.plan.consequence)


class Host:
    """One machine. It outlives the agents that run on it."""

    def __init__(self, engine: Engine, name: str, clock: Clock, society: Society, planner: Planner) -> None:
        self.engine = engine
        self.name = name
        self.clock = clock
        self.society = society
        self.planner = planner
        self.agent: Agent | None = None
        self.agents_started = 0
        self.is_frozen = False
        self.is_gone = False
        """The power is off."""
        self.coordinators: list[Coordinator] = []
        """Processes of agents here, dead or alive, that were elected."""
        self.group: Group | None = None
        self.grace_s = 5.0
        self.slots = Slots()
        """The snapshots that the spawner of the present agent holds."""
        self._lease_until: float | None = None
        self._lease = Alarm(engine, clock, self._lease_ended)

    @property
    def local_now(self) -> float:
        return self.clock.local(self.engine.now)

    # The spawner.

    def set_lease(self, until: float | None) -> None:
        self._lease_until = until
        self._lease.set(None if until is None else until + SPAWNER_LATENESS_S)

    def start(self, node: str, round: int, rank: int, restarts_used: int) -> Group:
        """A spawner whose lease has ended starts nothing: to the agent it looks as if the workers were killed."""
        group = Group(self, node, round, rank, self.planner.plan(self, round, restarts_used))
        self.group = group
        if self._is_lease_over():
            group.is_alive = False
            group.failure = _killed(group, "the lease has ended")
        else:
            self.engine.note(self.name, "starts workers of round", str(round))
            self.society.born(group)
        return group

    def _is_lease_over(self) -> bool:
        return self._lease_until is not None and self.local_now >= self._lease_until

    def _lease_ended(self) -> None:
        if self.group is not None and self.group.is_alive:
            self.society.checks.lease_ended(self.group)
            self.kill(self.group, "the lease has ended")

    def terminate(self, group: Group) -> None:
        """SIGTERM, and SIGKILL after the grace period."""
        if group.is_alive and not group.is_stopping:
            group.is_stopping = True
            plan = group.plan
            self.engine.after(plan.stacks_s + self.grace_s, self.kill, group, "the grace is over")
            if plan.heeds_sigterm:
                stops_after_s = min(plan.stops_after_s, self.grace_s)
                self.engine.after(plan.stacks_s + stops_after_s, self.kill, group, "SIGTERM")

    def kill(self, group: Group, why: str) -> None:
        if group.is_alive:
            self.society.die(group, _killed(group, why))

    def exited(self, group: Group) -> None:
        if self.agent is not None and self.group is group:
            self.agent.hear(self.agent.workers_exited, group)

    def lose_power(self) -> None:
        """Nothing is left that could close a connection."""
        self.is_gone = True
        for coordinator in [*self.coordinators]:
            coordinator.vanish()
        if self.agent is not None:
            self.agent.vanish()

    # The agent's life.

    def agent_died(self) -> None:
        self.agent = None
        self.is_frozen = False
        self.slots = Slots()
        group, self.group = self.group, None
        if group is not None:
            delay_s = self.engine.random.random() * AGENT_DEATH_TO_WORKERS_DEATH_S
            self.engine.after(min(delay_s, self._lease_left_s()), self.kill, group, "the agent died")
        self.set_lease(None)

    def _lease_left_s(self) -> float:
        """The spawner is slow to notice that its agent died, but it still holds the lease."""
        if self._lease_until is None:
            return math.inf
        return max(0.0, self.clock.true(self._lease_until + SPAWNER_LATENESS_S) - self.engine.now)


def _killed(group: Group, why: str) -> Failure:
    text = f"rank {group.rank} on {group.node} was killed: {why}"
    return Failure(group.node, group.rank, -9, "", text, is_consequence=why == "SIGTERM")
