"""The fake world in which agents meet at a coordinator."""

from __future__ import annotations

from random import Random

from holdfast.rendezvous import world as rounds
from holdfast.rendezvous.legacy_membership import Phase
from holdfast.rendezvous.vocabulary import Settings
from holdfast.rendezvous.world import NodeFacts
from tests.sim.checkers import Checks
from tests.sim.coordinator import Coordinator
from tests.sim.engine import Engine
from tests.sim.faults import draw_clock, draw_profile
from tests.sim.host import Host
from tests.sim.network import Network
from tests.sim.tcp_agent import TcpAgent
from tests.sim.tcp_faults import TcpMisfortune
from tests.sim.world import FakeWorld, live


class TcpWorld(FakeWorld):
    def __init__(self, seed: int) -> None:
        random = Random(seed)
        profile = draw_profile(random)
        engine = Engine(random)
        clock = draw_clock(random, is_coordinator=True)
        checks = Checks(profile.settings, lambda: clock.local(engine.now))
        super().__init__(seed, profile, engine, checks)
        self.network = Network(engine, profile.max_delay_s)
        self.coordinator = Coordinator(engine, self.network, clock, checks)
        self.coordinator.does_hang_up = profile.does_coordinator_hang_up
        self.misfortune = TcpMisfortune(self, profile)

    def make_agent(self, host: Host, facts: NodeFacts, settings: Settings) -> TcpAgent:
        return TcpAgent(
            self.engine,
            self.network,
            self.checks,
            host,
            facts,
            settings,
            self.profile.reconnect_grace_s,
            does_loop_block=self.profile.does_loop_block,
        )

    def open(self) -> None:
        self.engine.after(self.engine.random.choice((0.0, 0.0, 3.0)), self.start_coordinator)

    def recover(self) -> None:
        self.start_coordinator()
        self.thaw_coordinator()

    def cut(self, host: Host, *, up: bool, down: bool) -> None:
        self.network.partition(host, up=up, down=down)

    def heal_network(self, host: Host) -> None:
        self.network.heal(host)

    def start_coordinator(self) -> None:
        if not self.coordinator.is_up:
            self.coordinator.start()

    def thaw_coordinator(self) -> None:
        if self.coordinator.is_frozen:
            self.coordinator.thaw()

    @property
    def are_settings_fixed(self) -> bool:
        return self.coordinator.disk is not None and self.coordinator.disk.last_round > 0

    def running_world(self) -> rounds.World | None:
        machine = self.coordinator.machine
        return machine.world if machine is not None and machine.phase is Phase.RUNNING else None

    def standing(self) -> str:
        machine = self.coordinator.machine
        return machine.phase if machine else "forgotten"


def simulate(seed: int) -> TcpWorld:
    world = TcpWorld(seed)
    live(world)
    return world
