"""The fake world in which agents meet at etcd, and one of them leads."""

from __future__ import annotations

from random import Random

from holdfast.rendezvous import keyspace
from holdfast.rendezvous import world as rounds
from holdfast.rendezvous.participant import Standing
from holdfast.rendezvous.vocabulary import Settings
from holdfast.rendezvous.world import NodeFacts
from tests.sim.agent import Agent
from tests.sim.checkers import Checks
from tests.sim.engine import Engine, Violation
from tests.sim.etcd import Etcd
from tests.sim.etcd_agent import KEYS, EtcdAgent, Truth
from tests.sim.etcd_checkers import ETCD_RULES
from tests.sim.faults import ETCD_KINDS, FASTEST, SLOWEST, Misfortune, Profile, draw_clock, draw_profile
from tests.sim.host import Host
from tests.sim.wire import Wire
from tests.sim.world import FakeWorld, live

_REQUEST_LEASES = 0.4  # How much of a lease a request may take.
_ON_ITS_WAY_S = 1.0  # What a leader decides in peace is done by then.


class EtcdWorld(FakeWorld):
    def __init__(self, seed: int) -> None:
        random = Random(seed)
        profile = draw_profile(random, ETCD_KINDS)
        engine = Engine(random)
        truth = Truth(engine)
        # Leaders count by their own clocks; a rule must not count less time than any of them.
        truth.checks = Checks(profile.settings, lambda: FASTEST * truth.now, ETCD_RULES)
        super().__init__(seed, profile, engine, truth.checks)
        self.truth = truth
        self.truth.forgotten = self._forgotten
        self.etcd = Etcd(engine, draw_clock(random, is_coordinator=True))
        self.wire = Wire(engine, self.etcd, profile.max_delay_s, _REQUEST_LEASES * profile.settings.lease_s)
        self.misfortune = EtcdMisfortune(self, profile)
        self._healed_at: float | None = None
        self._quiet_until = 0.0
        self._came_at: dict[str, float] = {}

    def make_agent(self, host: Host, facts: NodeFacts, settings: Settings) -> EtcdAgent:
        self._came_at[host.name] = self.engine.now
        return EtcdAgent(
            self.engine,
            self.wire,
            self.truth,
            host,
            facts,
            settings,
            does_loop_block=self.profile.does_loop_block,
            patience_s=self.engine.random.choice((0.5, 3.0, 15.0)),
            told_at_once=self.engine.random.choice((1, 1, 2, 3)),
        )

    def is_calm(self) -> bool:
        """A claim to a rank may outlive who made it for longer than anybody waits, if leases are extended."""
        may_claim_long = {"crash_leader", "change_etcd_leader"}.issubset(self.profile.kinds)
        return super().is_calm() and not (self.profile.do_hosts_request_ranks and may_claim_long)

    def _forgotten(self) -> None:
        """Its name is free again. Whoever has not heard how it ended was out of reach for as long as a leader waits,
        and hears of it when it is back."""
        unknowing = [agent for agent in self._living() if agent.outcome is None and not agent.is_leaving]
        is_peaceful = self._healed_at is not None and self.engine.now - self._healed_at > 20.0
        settled = [agent.name for agent in unknowing if self._could_be_known(agent)]
        if settled and is_peaceful:
            raise Violation(
                "everybody_hears", f"the run is forgotten, and {', '.join(settled)} has not heard of its end"
            )
        for agent in unknowing:
            if isinstance(agent, EtcdAgent) and not agent.has_said_its_origin:
                # Nobody could know of what run it is: it begins another, which is none of ours. Nor is what it has said
                # and what is still on its way.
                agent.crash()
                if agent.elected.lease is not None:
                    self.etcd.revoke(agent.elected.lease)
        self._remove_strangers()

    def _could_be_known(self, agent: Agent) -> bool:
        """Who has come when a leader had already decided to leave is as good as one who comes when it has."""
        is_misfit = agent.participant.settings != self.profile.settings
        return not is_misfit and self.engine.now - self._came_at[agent.host.name] > _ON_ITS_WAY_S

    def _remove_strangers(self) -> None:
        """What those have said who begin another run, and dead ones who never heard of this one."""
        for _, found in self.etcd.under(KEYS.nodes):
            if keyspace.decode(keyspace.Statement, found.value).origin != self.truth.origin:
                self.etcd.revoke(found.lease)

    def open(self) -> None:
        """etcd is there before anybody else, or not quite."""
        if self.engine.random.random() < 0.2:
            self.etcd.lose_quorum()
            self.engine.after(3.0, self.etcd.regain_quorum)

    def start_agent(self, host: Host, settings: Settings | None = None) -> None:
        """Whoever comes when the run is forgotten begins another, which is none of ours. Who comes for the first time
        while old workers are alive that nothing in etcd tells of, or those who know of the run are all away, would not
        know better than to do the same."""
        is_misfit = settings is not None
        if self.engine.now < self._quiet_until and not is_misfit:
            self.engine.at(self._quiet_until, self.start_agent, host)
        elif self._is_run_known_to_nodes_only() and not is_misfit:
            self.engine.after(1.0, self.start_agent, host)
        elif self.engine.now < self._quiet_until or (is_misfit and not self.are_settings_fixed):
            pass  # It might be the first.
        elif not self.truth.is_forgotten:
            super().start_agent(host, settings)

    def lose_data(self) -> None:
        """The agents go on with what they remember. Those who have nothing to remember yet are as good as newcomers."""
        self.etcd.lose_data()
        self.truth.lose()
        self._quiet_until = self.engine.now + self.profile.settings.lease_s / SLOWEST
        for agent in self._living():
            if isinstance(agent, EtcdAgent) and not self._knows_of_the_run(agent):
                agent.crash()

    def _is_run_known_to_nodes_only(self) -> bool:
        """Since etcd has lost it, and until one of them leads."""
        is_lost = self._quiet_until > 0.0 and self.truth.snapshot is None
        return is_lost and any(isinstance(each, EtcdAgent) and self._knows_of_the_run(each) for each in self._living())

    def _knows_of_the_run(self, agent: EtcdAgent) -> bool:
        is_misfit = agent.participant.settings != self.profile.settings
        has_waited = agent.elected.lease is not None and agent.participant.standing is not Standing.OUTSIDE
        return not is_misfit and (has_waited or agent.participant.last_round > 0)

    def recover(self) -> None:
        self._healed_at = self.engine.now
        self.etcd.regain_quorum()
        self.wire.lossy.clear()

    def cut(self, host: Host, *, up: bool, down: bool) -> None:
        self.wire.partition(host, up=up, down=down)

    def heal_network(self, host: Host) -> None:
        self.wire.heal(host)

    def leader(self) -> EtcdAgent | None:
        found = self.etcd.get(KEYS.leader)
        name = found.value.decode() if found else ""
        return next((each for each in self._living() if each.name == name and isinstance(each, EtcdAgent)), None)

    @property
    def are_settings_fixed(self) -> bool:
        return self.truth.snapshot is not None and self.truth.snapshot.memory.last_round > 0

    def running_world(self) -> rounds.World | None:
        snapshot = self.truth.snapshot
        is_running = snapshot is not None and not snapshot.is_stopping and snapshot.memory.outcome is None
        return snapshot.world if snapshot is not None and is_running else None

    def _is_settled(self) -> bool:
        """Nothing lies there for somebody who is gone."""
        present = {KEYS.node_of(key) for key, _ in self.etcd.under(KEYS.nodes)}
        told = {KEYS.node_told(key) for key, _ in self.etcd.under(KEYS.told)}
        return super()._is_settled() and (not self._living() or told <= present)

    def standing(self) -> str:
        leader = self.leader()
        return f"{self.truth.snapshot}, led by {leader.name if leader else 'nobody'}"


class EtcdMisfortune(Misfortune):
    """What can happen to etcd, to the way there, and to whoever leads."""

    def __init__(self, world: EtcdWorld, profile: Profile) -> None:
        super().__init__(world, profile)
        self._etcd_world = world
        self._etcd = world.etcd
        self._wire = world.wire

    def _crash_leader(self) -> None:
        leader = self._etcd_world.leader()
        if leader is not None:
            leader.crash()
            self._maybe_come_back(leader.host)

    def _crash_leader_between_rounds(self) -> None:
        """When one is over and the next not sealed, all that is known of the order is what the leader has written. That
        is often a moment only, so this one waits for it."""
        self._etcd_world.truth.between_rounds = self._crash_leader_now

    def _crash_leader_now(self) -> None:
        self._etcd_world.truth.between_rounds = lambda: None
        if not self._is_over:
            self._crash_leader()

    def _freeze_leader(self) -> None:
        """Past its lease, mostly: what it does when it goes on must come to nothing."""
        leader = self._etcd_world.leader()
        if leader is not None and not leader.host.is_frozen:
            leader.freeze()
            for_s = self._profile.settings.lease_s * self._random.choice((0.5, 1.0, 1.5, 2.5))
            self._engine.after(for_s, self._world.thaw, leader.host)

    def _cut_leader(self) -> None:
        leader = self._etcd_world.leader()
        if leader is not None:
            up = self._random.random() < 0.7
            self._cut(leader.host, up=up, down=not up or self._random.random() < 0.5)

    def _flap(self) -> None:
        """Cut off for most of a lease, back for a moment, and cut off again for longer than what is left of it. At
        first only what comes back is missing: the lease is renewed, and nobody knows."""
        host, settings = self._host(), self._profile.settings
        down_for_s = settings.lease_s * self._random.uniform(0.4, 0.8)
        self._engine.note("network", "flaps for", host.name)
        self._wire.partition(host, up=False, down=True)
        self._engine.after(settings.heartbeat_s * self._random.random(), self._wire.blocked_up.add, host)
        self._engine.after(down_for_s, self._world.heal, host)
        self._engine.after(down_for_s + self._random.random() ** 2 * 0.3, self._cut_again, host)

    def _cut_again(self, host: Host) -> None:
        if not self._is_over:
            self._cut(host, up=True, down=True)

    def _lose_quorum(self) -> None:
        if self._etcd.has_quorum:
            self._etcd.lose_quorum()
            self._engine.after(self._how_long_s(), self._etcd.regain_quorum)

    def _lose_requests(self) -> None:
        host = self._host()
        self._engine.note("network", "loses requests of", host.name)
        self._wire.lossy.add(host)
        self._engine.after(self._how_long_s(), self._wire.lossy.discard, host)

    def _break_watch(self) -> None:
        host = self._host()
        told_after_s = self._random.choice((0.0, self._random.random(), self._how_long_s()))
        self._engine.note("network", "breaks the watches of", host.name)
        self._wire.break_watches(host, told_after_s)

    def _compact(self) -> None:
        """Now, and when those whose watches break at this moment want to go on."""
        self._etcd.compact()
        if self._random.random() < 0.5:
            self._break_watch()
            self._engine.after(self._random.random(), self._etcd.compact)

    def _lose_data(self) -> None:
        """Not when the run is over: who has not heard of its end by then would begin anew."""
        snapshot = self._etcd_world.truth.snapshot
        is_over = snapshot is not None and snapshot.memory.outcome is not None
        if self._random.random() < 0.3 and not is_over and not self._etcd_world.truth.is_forgotten:
            self._etcd_world.lose_data()

    def _change_etcd_leader(self) -> None:
        self._engine.note("etcd", "changes its own leader")
        self._etcd.extend_leases()


def simulate(seed: int) -> EtcdWorld:
    world = EtcdWorld(seed)
    live(world)
    return world
