"""What can happen to connections, and to a coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.faults import Misfortune, Profile
from tests.sim.host import Host

if TYPE_CHECKING:
    from tests.sim.tcp_world import TcpWorld


class TcpMisfortune(Misfortune):
    def __init__(self, world: TcpWorld, profile: Profile) -> None:
        super().__init__(world, profile)
        self._tcp = world

    def _is_touchable(self, host: Host) -> bool:
        return not self._tcp.network.is_discovery_pending(host)

    def _lose_connection(self) -> None:
        host, network = self._host(), self._tcp.network
        is_reachable = host not in network.blocked_up and host not in network.blocked_down
        if host.agent is None or host.is_frozen or not is_reachable:
            return
        for link in [link for link in network.links if link.host is host and not link.is_lost]:
            if link.agent_open and link.coordinator_open and link is link.agent.link and link.agent is host.agent:
                self._engine.note("network", "loses the connection of", host.name)
                network.lose(link)

    def _lose_connection_for_good(self) -> None:
        """When the agent has found out, it cannot connect again for a while."""
        self._lose_connection()
        assert self._victim is not None
        self._cut_when_discovered(self._victim)

    def _cut_when_discovered(self, host: Host) -> None:
        if self._is_touchable(host):
            self._cut(host, up=True, down=True)
        elif not self._is_over:
            self._engine.after(0.02, self._cut_when_discovered, host)

    def _crash_coordinator(self) -> None:
        if self._tcp.coordinator.is_up:
            self._tcp.coordinator.crash()
            down_for_s = self._random.random() ** 2 * 15
            self._engine.after(down_for_s, self._tcp.start_coordinator)
            if self._random.random() < 0.5:
                self._engine.after(self._random.random() * down_for_s, self._join_late)

    def _freeze_coordinator(self) -> None:
        coordinator = self._tcp.coordinator
        if coordinator.is_up and not coordinator.is_frozen:
            coordinator.freeze()
            self._engine.after(self._how_long_s(), self._tcp.thaw_coordinator)
