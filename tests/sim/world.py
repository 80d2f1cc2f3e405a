"""A fake world for one seed, and the two phases of its life.

Phase one: faults strike, and the rules (`checkers`) hold at every step. Phase two: the faults stop and everything
heals. Now progress is demanded, within a bound of virtual time: the run ends, or every node that is alive runs in
one round; then its workers are given an end, and the run must end, and everybody must hear of it.

What the agents meet at is left open here: a coordinator (`tcp_world`), or etcd (`etcd_world`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from holdfast.agent import lifecycle
from holdfast.rendezvous import participant
from holdfast.rendezvous import world as rounds
from holdfast.rendezvous.vocabulary import Admit, Settings
from holdfast.rendezvous.world import NodeFacts
from tests.sim.agent import Agent
from tests.sim.checkers import Checks
from tests.sim.engine import Engine, Violation
from tests.sim.faults import Misfortune, Profile, Workload, draw_clock
from tests.sim.host import Host, Society


class FakeWorld(ABC):
    """Everything that there is for one run."""

    misfortune: Misfortune

    def __init__(self, seed: int, profile: Profile, engine: Engine, checks: Checks) -> None:
        self.seed = seed
        self.profile = profile
        self.engine = engine
        self.checks = checks
        if self.is_calm():
            checks.be_calm()
        self.society = Society(engine, checks)
        self.workload = Workload(engine.random, profile)
        self.hosts: list[Host] = []
        self.agents: list[Agent] = []

    def is_calm(self) -> bool:
        """Whether nobody is ever out of reach."""
        return self.profile.is_calm

    # What the agents meet at.

    @abstractmethod
    def make_agent(self, host: Host, facts: NodeFacts, settings: Settings) -> Agent: ...

    @abstractmethod
    def open(self) -> None:
        """Whatever the agents meet at is started."""

    @abstractmethod
    def recover(self) -> None:
        """Whatever is wrong with it is over."""

    @abstractmethod
    def cut(self, host: Host, *, up: bool, down: bool) -> None:
        """What goes up from the host, or down to it, does not get through."""

    @abstractmethod
    def heal_network(self, host: Host) -> None: ...

    @abstractmethod
    def running_world(self) -> rounds.World | None:
        """That of the round that runs and is not being stopped."""

    @abstractmethod
    def standing(self) -> str:
        """What became of the run, for whoever wonders why it goes no further."""

    @property
    @abstractmethod
    def are_settings_fixed(self) -> bool:
        """Whether other settings are refused for sure. Before the first round all may leave, and free them."""

    # Hosts and agents.

    def add_host(self) -> Host:
        clock = draw_clock(self.engine.random)
        host = Host(self.engine, f"h{len(self.hosts)}", clock, self.society, self.workload)
        host.grace_s = self.profile.grace_s
        self.hosts.append(host)
        return host

    def start_agent(self, host: Host, settings: Settings | None = None) -> None:
        """A new process on the host, with a name that nobody has had before; perhaps with settings of its own."""
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
        )
        agent = self.make_agent(host, facts, settings or self.profile.settings)
        self.agents.append(agent)
        agent.start()

    def heal(self, host: Host) -> None:
        self.engine.note("network", "heals for", host.name)
        self.heal_network(host)

    def thaw(self, host: Host) -> None:
        if host.is_frozen and host.agent is not None:
            host.agent.thaw()

    def close_run(self, host: Host) -> None:
        if host.agent is not None:
            host.agent.hear(host.agent.tell, participant.CloseWanted("closed by the user"))

    # The two phases.

    def run(self) -> None:
        self._set_out()
        self.misfortune.begin()
        self.engine.run_until(self.profile.faults_for_s)
        self._heal_everything()
        self._demand("settles", self._is_settled)
        self.workload.is_short = True
        self.society.give_an_end(within_s=2.0)
        self._demand("ends_and_everybody_knows", self._is_over)

    def _set_out(self) -> None:
        self.open()
        for _ in range(self.profile.host_count):
            spread_s = self.engine.random.choice((0.0, 0.5, 8.0, 30.0))
            self.engine.at(self.engine.random.random() * spread_s, self.start_agent, self.add_host())

    def _heal_everything(self) -> None:
        self.engine.note("world", "the faults are over")
        self.society.is_peaceful = self.workload.is_peaceful = True
        self.misfortune.end()
        self.recover()
        for host in self.hosts:
            self.heal_network(host)
            self.thaw(host)
            if host.agent is not None:
                host.agent.loop_paused_until = 0.0

    def _demand(self, what: str, is_so: Callable[[], bool]) -> None:
        settings = self.profile.settings
        once_s = self.profile.grace_s + settings.lease_s + settings.last_call_s + settings.drop_timeout_s
        bound_s = 1.1 * (settings.join_timeout_s + 3 * once_s + settings.policy.backoff_cap_s + 20.0)
        if not self.engine.run_until(self.engine.now + bound_s, is_so):
            raise Violation(what, f"not within {bound_s:.1f} s after the faults were over; {self._standing()}")

    def _standing(self) -> str:
        phases = ", ".join(f"{agent.name} {agent.machine.phase}" for agent in self._living())
        return f"the run is {self.standing()}, {phases or 'nobody is alive'}"

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
        is_open = len(world.members) < settings.max_nodes and settings.admit is Admit.NOW
        if len(members) < len(living) and is_open:
            return False
        present = {agent.participant.facts.key for agent in members}
        finished = self.society.succeeded[world.round]
        is_complete = all(key in present or rank in finished for rank, key in enumerate(world.keys))
        return is_complete and all(_is_running(agent, world.round) for agent in members)


def _is_running(agent: Agent, round: int) -> bool:
    phases = (lifecycle.Phase.RUNNING, lifecycle.Phase.WAITING)
    return agent.machine.round == round and agent.machine.phase in phases and not agent.is_leaving


def live(world: FakeWorld) -> FakeWorld:
    """Live through one seed. Raises `Violation` when a rule is broken; the world is in its `world`."""
    try:
        world.run()
    except Violation as violation:
        violation.world = world  # type: ignore[attr-defined]  # for whoever prints the story
        raise
    return world
