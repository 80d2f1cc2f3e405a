"""A fake world in which nothing is left to chance: a script says what happens when, and what workers do.

Every message takes ten milliseconds, every clock is right unless the script says otherwise, and workers run for ever
unless they are told to do something else.
"""

from __future__ import annotations

from random import Random
from typing import Any

from holdfast.failures.records import Failure
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import NodeFacts, Settings
from holdfast.rendezvous.membership.node_lease import LeaseSettings
from tests.sim.agent import Agent, Fixed
from tests.sim.checkers import RULES, Checks, OnlyMisfitsAreRefused
from tests.sim.coordinator import Coordinator, Disk
from tests.sim.elected import Candidate
from tests.sim.engine import Clock, Engine
from tests.sim.etcd import Etcd, Gateway
from tests.sim.faults import LEADER_LEASE_S
from tests.sim.host import Host, Plan, Society
from tests.sim.network import Address, Network
from tests.sim.snapshots import Saving

DELAY_S = 0.01
FOR_EVER = Plan(None)


def failing(after_s: float, text: str = "ValueError: no such thing", **facts: Any) -> Plan:
    return Plan(after_s, Failure(text=text, **facts))


def succeeding(after_s: float) -> Plan:
    return Plan(after_s)


class Script:
    """`a`, `b`, `c`, ... are nodes, each on a host of the same name. Newcomers are admitted at once, unless the script
    says otherwise."""

    def __init__(self, *, grace_s: float = 5.0, stop_margin_s: float = 15.0, **settings: Any) -> None:
        self.settings = Settings(**{"admit_delay_s": 0.0, **settings})
        self.engine = Engine(Random(0))
        self.checks = self._make_checks()
        self.society = Society(self.engine, self.checks)
        self.society.saving = self._saving = Saving(self.engine, self.checks, Random(0))
        self._saving.has_token = self._saving.is_over = True  # Workers save when the script says so.
        self.hosts: dict[str, Host] = {}
        self._times = {"grace_s": grace_s, "stop_margin_s": stop_margin_s}
        self._plans: dict[tuple[str, int], Plan] = {}
        self._open()

    def _make_checks(self) -> Checks:
        rules = tuple(rule for rule in RULES if rule is not OnlyMisfitsAreRefused)  # Scripts have other misfits, too.
        return Checks(self.settings, lambda: self.engine.now, rules)

    def _open(self) -> None:
        self.network = Network(self.engine, DELAY_S, is_even=True)
        self.address, self.disk = Address(), Disk()
        self.engine.at(0.0, self._start_coordinator)

    def _start_coordinator(self) -> None:
        Coordinator(self, Clock(), self.address).start(self.disk)

    def _make_agent(self, host: Host, facts: NodeFacts) -> Agent:
        lease = LeaseSettings(self.settings.heartbeat_s, self.settings.lease_s)
        where = Fixed(self.address)
        return Agent(self, host, facts, self.settings, lease, where)

    def plan(self, host: Host, round: int, restarts_used: int) -> Plan:
        return self._plans.get((host.name, round), FOR_EVER)

    def work(self, name: str, round: int, plan: Plan) -> None:
        """What the workers of a node do in a round."""
        self._plans[name, round] = plan

    # What happens, and when.

    def node(self, name: str, at: float = 0.0, *, clock: Clock | None = None, rank: int | None = None) -> None:
        """An agent is started on the host of that name; it may have had others before."""
        self.engine.at(at, self._start, name, clock or Clock(), rank)

    def nodes(self, names: str, at: float = 0.0) -> None:
        for index, name in enumerate(names):
            self.node(name, at + index * 0.1)

    def _start(self, name: str, clock: Clock, rank: int | None) -> None:
        host = self.hosts.get(name)
        if host is None:
            host = self.hosts[name] = Host(self.engine, name, clock, self.society, self)
            host.grace_s = self._times["grace_s"]
            self._saving.hosts[name] = host
        host.agents_started += 1
        node_id = name + "'" * (host.agents_started - 1)
        facts = NodeFacts(node_id, address=name, requested_rank=rank, host=name, **self._times)
        self._make_agent(host, facts).start()

    def kill(self, name: str, at: float) -> None:
        self.engine.at(at, lambda: self._agent(name).crash())

    def lose(self, name: str, at: float) -> None:
        """The host is gone without a word."""
        self.engine.at(at, lambda: self.hosts[name].lose_power())

    def terminate(self, name: str, at: float) -> None:
        self.engine.at(at, lambda: self._agent(name).leave())

    def freeze(self, name: str, at: float, for_s: float) -> None:
        self.engine.at(at, lambda: self._agent(name).freeze())
        self.engine.at(at + for_s, lambda: self._agent(name).thaw())

    def slow_down(self, name: str, at: float, for_s: float) -> None:
        self.engine.at(at, lambda: self._agent(name).pause_loop(for_s))

    def kill_workers(self, name: str, at: float) -> None:
        self.engine.at(at, self._kill_workers, name)

    def _kill_workers(self, name: str) -> None:
        group = self.hosts[name].group
        assert group is not None
        self.hosts[name].kill(group, "by the kernel")

    def save(self, names: str, at: float, step: int) -> None:
        """The workers of these nodes, one each, commit that step."""
        for name in names:
            self.engine.at(at, self._save, name, step)

    def _save(self, name: str, step: int) -> None:
        agent = self._agent(name)
        assert agent.place is not None
        self.engine.note(name, "saves step", str(step))
        self._saving.commit(agent.host, agent.place, agent.place.rank, step)

    def close(self, name: str, at: float) -> None:
        self.engine.at(at, lambda: self._agent(name).tell(protocol.Close("closed by the user")))

    def cut(self, name: str, at: float, for_s: float) -> None:
        """The network does not reach the host."""
        self.engine.at(at, self._cut, name, for_s)

    def _cut(self, name: str, for_s: float) -> None:
        self.engine.note("network", "is cut for", name)
        self.network.partition(self.hosts[name], up=True, down=True)
        self.engine.after(for_s, self._heal, name)

    def _heal(self, name: str) -> None:
        self.engine.note("network", "heals for", name)
        self.network.heal(self.hosts[name])

    def reset(self, name: str, at: float) -> None:
        """The connection is closed under both its ends, and both find out at once."""
        self.engine.at(at, self._reset, name)

    def _reset(self, name: str) -> None:
        link = next(link for link in self.network.links if link.agent is self._agent(name) and not link.is_lost)
        self.engine.note("network", "loses the connection of", name)
        self.network.break_off(link)

    def kill_coordinator(self, at: float, for_s: float, *, with_its_memory: bool = False) -> None:
        self.engine.at(at, self._kill_coordinator, with_its_memory)
        self.engine.at(at + for_s, self._start_coordinator)

    def _kill_coordinator(self, with_its_memory: bool) -> None:
        assert self.address.listener is not None
        self.address.listener.crash()
        if with_its_memory:
            self.disk.memory = None
            self.checks.data_lost()

    def _agent(self, name: str) -> Agent:
        agent = self.hosts[name].agent
        assert agent is not None, f"no agent on {name} at {self.engine.now}"
        return agent

    # The story.

    def tell(self, until: float) -> str:
        self.engine.run_until(until)
        return self.engine.transcript.story()


class EtcdScript(Script):
    """The same with a coordinator that etcd elects. The first node starts it, unless the script says otherwise."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"lease_s": 6.0, "leader_lease_s": LEADER_LEASE_S, **settings})

    def _open(self) -> None:
        self.network = Network(self.engine, DELAY_S, is_even=True)
        self.etcd = Etcd(self.engine, Clock(), self.checks)
        self.gateway = Gateway(self.engine, self.network, self.etcd)
        self.addresses: list[Address] = []

    def _make_agent(self, host: Host, facts: NodeFacts) -> Agent:
        lease = LeaseSettings(lease_s=self.settings.lease_s, does_refusal_renew=False, locate_after_s=2.0)
        where = Candidate(self.gateway, self.addresses)
        return Agent(self, host, facts, self.settings, lease, where)

    def _coordinator(self) -> Coordinator:
        assert self.etcd.leader is not None
        coordinator = self.addresses[self.etcd.leader.port].listener
        assert coordinator is not None
        return coordinator

    def kill_process(self, at: float) -> None:
        self.engine.at(at, lambda: self._coordinator().crash())

    def freeze_process(self, at: float, for_s: float) -> None:
        self.engine.at(at, self._freeze_process, for_s)

    def _freeze_process(self, for_s: float) -> None:
        coordinator = self._coordinator()
        coordinator.freeze()
        self.engine.after(for_s, coordinator.thaw)

    def cut_from_etcd(self, name: str, at: float, for_s: float, *, up: bool = True) -> None:
        """Not `up`: requests get there, and the answers do not come back."""
        self.engine.at(at, self._cut_from_etcd, name, for_s, up)

    def _cut_from_etcd(self, name: str, for_s: float, up: bool) -> None:
        self.engine.note("network", "is cut between etcd and", name, "" if up else "for answers")
        self.gateway.cut(self.hosts[name], up=up, down=True)
        self.engine.after(for_s, self.gateway.heal, self.hosts[name])

    def lose_quorum(self, at: float, for_s: float) -> None:
        self.engine.at(at, self.etcd.lose_quorum)
        self.engine.at(at + for_s, self.etcd.regain_quorum)

    def fill(self, at: float, for_s: float) -> None:
        self.engine.at(at, self.etcd.fill)
        self.engine.at(at + for_s, self.etcd.make_space)

    def wipe(self, at: float) -> None:
        self.engine.at(at, self.etcd.wipe)

    def end_lease_early(self, at: float) -> None:
        self.engine.at(at, self.etcd.drop_lease)
