"""The fake world in which etcd elects the coordinator: it may be anywhere, and move."""

from __future__ import annotations

from holdfast.rendezvous.membership.model import Memory, NodeFacts, Settings
from holdfast.rendezvous.membership.node_lease import LeaseSettings
from tests.sim.agent import Agent
from tests.sim.coordinator import Coordinator
from tests.sim.elected import Candidate
from tests.sim.engine import Violation
from tests.sim.etcd import Etcd, Gateway
from tests.sim.faults import CALM, ETCD_KINDS, ETCD_TIMINGS, FASTEST, LEADER_LEASE_S, SLOWEST, Misfortune, draw_clock
from tests.sim.host import Host
from tests.sim.network import Address
from tests.sim.world import FakeWorld

_REST_S = 6.0
LOCATE_AFTER_S = 2.0


class EtcdWorld(FakeWorld):
    kinds = ETCD_KINDS
    timings = ETCD_TIMINGS
    slowness = 1.5
    calm = CALM - {"crash_coordinator"}  # Two of them in a row may take longer than a node has.

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.etcd = Etcd(self.engine, draw_clock(self.engine.random, is_coordinator=True), self.checks)
        self.gateway = Gateway(self.engine, self.network, self.etcd)
        self.addresses: list[Address] = []
        self._quiet_until = 0.0

    def _make_misfortune(self) -> Misfortune:
        return EtcdMisfortune(self, self.profile)

    def _time_of_rules(self) -> float:
        """Coordinators count by their own clocks; a rule must not count less time than any of them."""
        return FASTEST * self.engine.now

    def _make_agent(self, host: Host, facts: NodeFacts, settings: Settings) -> Agent:
        lease = LeaseSettings(
            settings.heartbeat_s,
            settings.lease_s,
            self.profile.reconnect_grace_s,
            does_refusal_renew=False,
            locate_after_s=LOCATE_AFTER_S,
        )
        where = Candidate(self.gateway, self.addresses, does_hang_up=self.profile.does_coordinator_hang_up)
        return Agent(self, host, facts, settings, lease, where)

    # The coordinator.

    @property
    def coordinator(self) -> Coordinator | None:
        """The one in office."""
        leader = self.etcd.leader
        return self.addresses[leader.port].listener if leader is not None else None

    @property
    def memory(self) -> Memory | None:
        return self.etcd.memory

    def start_coordinator(self) -> None:
        """The agents do."""

    def lose_memory(self) -> None:
        self.etcd.wipe()
        self._quiet_until = self.engine.now + (LEADER_LEASE_S + self.profile.settings.lease_s) / SLOWEST
        self._take_away_those_who_know_nothing()

    def _must_be_quiet(self) -> bool:
        """While the run is known to nodes only."""
        if not self._was_memory_lost or self.are_settings_fixed:
            return False
        return self.engine.now < self._quiet_until or any(map(self._knows_of_the_run, self._living()))

    # The two phases.

    def _open(self) -> None:
        """etcd is there before the agents, or not quite."""
        if self.engine.random.random() < 0.2:
            self.etcd.lose_quorum()
            self.engine.after(3.0, self.etcd.regain_quorum)

    def _recover(self) -> None:
        self.etcd.regain_quorum()
        self.etcd.make_space()
        self.gateway.lossy.clear()
        for address in self.addresses:
            if address.listener is not None:
                address.listener.thaw()

    def heal_network(self, host: Host) -> None:
        super().heal_network(host)
        self.gateway.heal(host)

    def _has_found_it(self, agent: Agent) -> bool:
        """A connection to an earlier coordinator may be open for a while, and mute."""
        node, newest = agent.participant, self.coordinator
        return newest is not None and node.is_connected and newest.hears(node.facts.key)

    def _rest(self) -> None:
        """At rest only the coordinator talks to etcd."""
        self.engine.run_until(self.engine.now + 2.0)  # What is on its way arrives.
        world, agents, asked = self.running_world(), len(self.agents), self.gateway.asked_by_agents
        have_all_found_it = all(self._has_found_it(agent) for agent in self.agents if agent.is_alive)
        self.engine.run_until(self.engine.now + _REST_S)
        is_at_rest = have_all_found_it and self.running_world() is world and len(self.agents) == agents
        if world is not None and is_at_rest and self.gateway.asked_by_agents > asked:
            raise Violation("agents_leave_etcd_alone", f"{self.gateway.asked_by_agents - asked} requests at rest")


class EtcdMisfortune(Misfortune):
    """What can happen to etcd, to the way there, and to a coordinator that is elected."""

    _world: EtcdWorld

    def _freeze_coordinator(self) -> None:
        """Past its lease, mostly: what it does when it goes on must come to nothing. Perhaps with its agent."""
        coordinator = self._world.coordinator
        if coordinator is None or coordinator.is_frozen:
            return
        for_s = LEADER_LEASE_S * self._random.choice((0.5, 1.0, 1.5, 2.5))
        coordinator.freeze()
        self._engine.after(for_s, coordinator.thaw)
        host = coordinator.address.host
        if self._random.random() < 0.3 and host and host.agent and not host.is_frozen and self._is_touchable(host):
            host.agent.freeze()
            self._engine.after(for_s, self._world.thaw, host)

    def _lose_coordinators_host(self) -> None:
        coordinator = self._world.coordinator
        if coordinator is not None and coordinator.address.host is not None:
            self._victim = coordinator.address.host
            self._victim.lose_power()
            self._maybe_come_back(self._victim, 3 * self._profile.settings.heartbeat_s)

    def _cut_from_etcd(self) -> None:
        self._cut_off(self._host())

    def _cut_coordinator_from_etcd(self) -> None:
        coordinator = self._world.coordinator
        if coordinator is not None and coordinator.address.host is not None:
            self._cut_off(coordinator.address.host)

    def _cut_off(self, host: Host) -> None:
        up = self._random.random() < 0.7
        down = not up or self._random.random() < 0.5
        self._engine.note("network", "is cut between etcd and", host.name, "both ways" if up and down else "one way")
        self._world.gateway.cut(host, up=up, down=down)
        self._engine.after(self._how_long_s(), self._world.heal, host)

    def _lose_quorum(self) -> None:
        if self._world.etcd.has_quorum:
            self._world.etcd.lose_quorum()
            self._engine.after(self._how_long_s(), self._world.etcd.regain_quorum)

    def _refuse_writes(self) -> None:
        if self._world.etcd.has_space:
            self._world.etcd.fill()
            self._engine.after(self._how_long_s(), self._world.etcd.make_space)

    def _lose_requests(self) -> None:
        host = self._host()
        self._engine.note("network", "loses requests of", host.name)
        self._world.gateway.lossy.add(host)
        self._engine.after(self._how_long_s(), self._world.gateway.lossy.discard, host)

    def _drop_lease(self) -> None:
        if self._world.etcd.has_quorum:
            self._world.etcd.drop_lease()


def make_world(seed: int) -> FakeWorld:
    """Every other seed is on etcd."""
    return EtcdWorld(seed) if seed % 2 else FakeWorld(seed)


def simulate(seed: int) -> FakeWorld:
    """Live through one seed. Raises `Violation` when a rule is broken; the world is in its `world`."""
    world = make_world(seed)
    try:
        world.run()
    except Violation as violation:
        violation.world = world  # type: ignore[attr-defined]  # to print the story
        raise
    return world
