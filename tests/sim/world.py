"""A fake world for one seed, and the two phases of its life.

Phase one: faults strike, and the rules (`checkers`) hold at every step. Phase two: the faults stop and everything
heals. Now progress is demanded, within a bound of virtual time: the run ends, or every node that is alive runs in
one round; then its workers are given an end, and the run must end, and everybody must hear of it.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from holdfast.agent import lifecycle
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.losses import LONGEST_DELAY_S
from holdfast.rendezvous.membership.model import Admit, Memory, NodeFacts, Settings, World
from holdfast.rendezvous.membership.node_lease import LeaseSettings
from holdfast.rendezvous.membership.phases import Membership, Phase
from tests.sim.agent import Agent, Fixed
from tests.sim.checkers import Checks
from tests.sim.coordinator import Coordinator, Disk
from tests.sim.engine import Engine, Violation
from tests.sim.faults import (
    CALM,
    KINDS,
    SLOWEST,
    TIMINGS,
    Misfortune,
    Workload,
    draw_clock,
    draw_profile,
    with_snapshots,
)
from tests.sim.host import Host, Society
from tests.sim.network import Address, Network
from tests.sim.notices import Announcements
from tests.sim.snapshots import Saving


class FakeWorld:
    """Everything that there is for one run. The coordinator is always at the same address, and has a disk."""

    kinds: tuple[str, ...] = KINDS
    timings = TIMINGS
    calm = CALM
    slowness = 1.1

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        self.seed = seed
        chance = Random(f"snapshots of {seed}")
        self.profile = with_snapshots(draw_profile(random, self.kinds, self.timings), chance)
        self.engine = Engine(random)
        self.clock = draw_clock(random, is_coordinator=True)
        self.checks = Checks(self.profile.settings, self._time_of_rules)
        if self.calm.issuperset(self.profile.kinds):
            self.checks.be_calm()
        self.network = Network(self.engine, self.profile.max_delay_s)
        self.society = Society(self.engine, self.checks)
        self.society.saving = self.saving = Saving(self.engine, self.checks, chance)
        self.society.announcements = Announcements(self, Random(f"notices of {seed}"))
        self.workload = Workload(random, self.profile)
        self.misfortune = self._make_misfortune()
        self.hosts: list[Host] = []
        self.agents: list[Agent] = []
        self.address = Address()
        self.disk = Disk()
        self._was_memory_lost = False
        self._is_quiet = False
        self._have_checks = Random(f"checks of {seed}").random() < 0.25

    def _make_misfortune(self) -> Misfortune:
        return Misfortune(self, self.profile)

    def _time_of_rules(self) -> float:
        """The coordinator's."""
        return self.clock.local(self.engine.now)

    # The coordinator.

    @property
    def coordinator(self) -> Coordinator | None:
        return self.address.listener

    @property
    def machine(self) -> Membership | None:
        return self.coordinator.machine if self.coordinator else None

    @property
    def memory(self) -> Memory | None:
        """What is written down."""
        return self.disk.memory

    def start_coordinator(self) -> None:
        if self.coordinator is not None:
            return
        coordinator = Coordinator(self, self.clock, self.address)
        coordinator.does_hang_up = self.profile.does_coordinator_hang_up
        coordinator.start(self.disk)
        self.engine.after(self.profile.settings.lease_s / SLOWEST, self._end_quiet, coordinator)

    def _end_quiet(self, coordinator: Coordinator) -> None:
        """A coordinator that has waited for a lease knows of every node whose workers may be alive."""
        self._is_quiet = self._is_quiet and self.coordinator is not coordinator

    def may_lose_memory(self) -> bool:
        """Not when the run is over: a node that has not heard of its end by then would begin anew."""
        memory = self.memory
        return memory is not None and memory.last_round > 0 and memory.outcome is None

    def lose_memory(self) -> None:
        """The nodes go on with what they know. Those that know nothing are as good as newcomers, who would begin anew
        beside workers that nobody has told them of: for so long they stay away. The documentation says so."""
        self.misfortune.crash_coordinator()
        self.engine.note("coordinator", "has lost its memory")
        self.disk.memory = None
        self.checks.data_lost()
        self._is_quiet = True
        self._take_away_those_who_know_nothing()

    def _take_away_those_who_know_nothing(self) -> None:
        self._was_memory_lost = True
        for agent in self._living():
            if not self._knows_of_the_run(agent):
                agent.crash()

    def _knows_of_the_run(self, agent: Agent) -> bool:
        return agent.participant.settings == self.profile.settings and agent.participant._heard_round > 0

    @property
    def are_settings_fixed(self) -> bool:
        """Whether other settings are refused for sure. Before the first round all may leave, and free them."""
        return self.memory is not None and self.memory.last_round > 0

    def running_world(self) -> World | None:
        """That of the round that runs and is not being stopped."""
        return self.machine.world if self.machine is not None and self.machine.phase is Phase.RUNNING else None

    # Hosts and agents.

    def add_host(self) -> Host:
        clock = draw_clock(self.engine.random)
        host = Host(self.engine, f"h{len(self.hosts)}", clock, self.society, self.workload)
        host.grace_s = self.profile.grace_s
        self.hosts.append(host)
        self.saving.hosts[host.name] = host
        return host

    def start_agent(self, host: Host, settings: Settings | None = None) -> None:
        """A new process on the host, with a name that nobody has had before; perhaps with settings of its own."""
        if self._must_be_quiet():
            if settings is None:
                self.engine.after(1.0, self.start_agent, host)
            return
        if host.agent is not None:
            return
        host.agents_started += 1
        number = self.hosts.index(host)
        name = f"n{number}" + "'" * (host.agents_started - 1)
        has_rank = self.profile.do_hosts_request_ranks and number < self.profile.settings.max_nodes
        facts = NodeFacts(
            node_id=name,
            address=host.name,
            role="trainer" if number % 3 else "reader",
            local_world_size=1 + number % 2,
            requested_rank=number if has_rank else None,
            grace_s=self.profile.grace_s,
            stop_margin_s=self.profile.stop_margin_s,
            host=host.name,
        )
        agent = self._make_agent(host, facts, settings or self.profile.settings)
        self.agents.append(agent)
        if self._have_checks:
            agent.readiness = Random(f"checks of {name} of {self.seed}")
        agent.start()

    def _must_be_quiet(self) -> bool:
        return self._is_quiet and self.memory is None

    def _make_agent(self, host: Host, facts: NodeFacts, settings: Settings) -> Agent:
        lease = LeaseSettings(settings.heartbeat_s, settings.lease_s, self.profile.reconnect_grace_s)
        where = Fixed(self.address)
        return Agent(self, host, facts, settings, lease, where)

    def cut(self, host: Host, *, up: bool, down: bool) -> None:
        """What goes up from the host, or down to it, does not get through."""
        self.network.partition(host, up=up, down=down)

    def heal(self, host: Host) -> None:
        self.engine.note("network", "heals for", host.name)
        self.heal_network(host)

    def heal_network(self, host: Host) -> None:
        self.network.heal(host)

    def thaw(self, host: Host) -> None:
        if host.is_frozen and host.agent is not None:
            host.agent.thaw()

    def close_run(self, host: Host) -> None:
        if host.agent is not None:
            host.agent.hear(host.agent.tell, protocol.Close("closed by the user"))

    # The two phases.

    def run(self) -> None:
        self._set_out()
        self.misfortune.begin()
        if self.society.announcements is not None:
            self.society.announcements.begin(self.profile.faults_for_s)
        self.engine.run_until(self.profile.faults_for_s)
        self._heal_everything()
        self._demand("settles", self._is_settled)
        self._rest()
        self.workload.is_short = True
        self.society.give_an_end(within_s=2.0)
        self._demand("ends_and_everybody_knows", self._is_over)

    def _set_out(self) -> None:
        self._open()
        for _ in range(self.profile.host_count):
            spread_s = self.engine.random.choice((0.0, 0.5, 8.0, 30.0))
            self.engine.at(self.engine.random.random() * spread_s, self.start_agent, self.add_host())

    def _open(self) -> None:
        self.engine.after(self.engine.random.choice((0.0, 0.0, 3.0)), self.start_coordinator)

    def _recover(self) -> None:
        self.start_coordinator()
        if self.coordinator is not None:
            self.coordinator.thaw()

    def _heal_everything(self) -> None:
        self.engine.note("world", "the faults are over")
        self.society.is_peaceful = self.workload.is_peaceful = self.saving.is_over = True
        self.misfortune.end()
        self._recover()
        for host in self.hosts:
            self.heal_network(host)
            self.thaw(host)
            if host.agent is not None:
                host.agent.resume_loop()

    def _rest(self) -> None:
        """A while in which nothing happens."""

    def _demand(self, what: str, is_so: Callable[[], bool]) -> None:
        settings = self.profile.settings
        once_s = self.profile.grace_s + settings.lease_s + settings.last_call_s + settings.drop_timeout_s
        once_s += settings.admit_delay_s
        more_s = settings.policy.backoff_cap_s + self.profile.stop_margin_s + LONGEST_DELAY_S + 20.0
        bound_s = self.slowness * (settings.join_timeout_s + 3 * once_s + more_s)
        if not self.engine.run_until(self.engine.now + bound_s, is_so):
            raise Violation(what, f"not within {bound_s:.1f} s after the faults were over; {self._standing()}")

    def _standing(self) -> str:
        phases = ", ".join(f"{agent.name} {agent.machine.phase}" for agent in self._living())
        phase = self.machine.phase if self.machine else "forgotten"
        return f"the run is {phase}, {phases or 'nobody is alive'}"

    def _living(self) -> list[Agent]:
        return [host.agent for host in self.hosts if host.agent is not None]

    def _is_over(self) -> bool:
        return not self._living()

    def _is_settled(self) -> bool:
        """Everybody who is alive runs in one round, or stands by with reason; or nobody is left."""
        living = self._living()
        if not living:
            return True
        world, settings = self.running_world(), self.profile.settings
        if world is None:
            return False
        members = [agent for agent in living if agent.participant.facts.key in world.keys]
        is_open = world.size < settings.max_nodes and settings.admit is Admit.NOW
        if len(members) < len(living) and is_open:
            return False
        present = {agent.participant.facts.key for agent in members}
        finished = self.society.succeeded[world.round]
        is_complete = all(key in present or rank in finished for rank, key in enumerate(world.keys))
        return is_complete and all(_is_running(agent, world.round) for agent in members)


def _is_running(agent: Agent, round: int) -> bool:
    phases = (lifecycle.AgentPhase.RUNNING, lifecycle.AgentPhase.FINISHED)
    return agent.machine.round == round and agent.machine.phase in phases and not agent.is_leaving
