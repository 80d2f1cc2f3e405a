"""A coordinator that etcd has elected, and the agents' way to it.

What a production shell must get right is here too. The coordinator asks its `Office` before it answers anything, and
tells nodes nothing that etcd has not written down. An agent that finds no leader grants a lease, creates the key, and
starts a coordinator process, which goes on renewing the lease; when the agent sees that process die it revokes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, assert_never

from holdfast.rendezvous.etcd import election
from holdfast.rendezvous.etcd.election import Candidacy, Leader, Office
from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.model import Memory
from holdfast.rendezvous.membership.protocol import RunEvent, TimePassed
from tests.sim.agent import Agent
from tests.sim.coordinator import Coordinator
from tests.sim.engine import Alarm, Violation
from tests.sim.etcd import Gateway
from tests.sim.faults import LEADER_LEASE_S
from tests.sim.host import Host
from tests.sim.network import Address, AnyWorld, Link

_LONGEST_LOOK_S = 0.5
_LEAST_PAUSE_S = 0.9


class ElectedCoordinator(Coordinator):
    """One coordinator process on a node's host, with its memory in etcd."""

    def __init__(
        self, world: AnyWorld, gateway: Gateway, address: Address, leader: Leader, lease: int, asked_at: float
    ) -> None:
        assert address.host is not None
        super().__init__(world, address.host.clock, address)
        self.host: Host = address.host
        self.gateway = gateway
        self.etcd = gateway.etcd
        self.lease = lease
        self.office = Office(leader, LEADER_LEASE_S, asked_at)
        self.has_ended: Callable[[], None] = lambda: None
        """The agent that started this process sees it end."""
        self._early: list[tuple[Link, protocol.Introduction]] = []
        self._when_written: deque[Callable[[], None]] = deque()  # In the order of the writes.
        self._office_alarm = Alarm(self.engine, self.clock, self._office_ring)

    def begin(self) -> None:
        self.engine.note(self.name, "is elected, of term", str(self.office.leader.term))
        self.host.coordinators.append(self)
        self.checks.elected(self)
        self.address.listener = self
        self._office_alarm.set(self.office.next_deadline())
        self._read_memory()

    @property
    def counts(self) -> bool:
        """An older one may hear of nodes while the next one is in office."""
        leader = self.etcd.leader
        return leader is not None and leader.token == self.office.leader.token

    def _read_memory(self) -> None:
        self.gateway.ask(self, lambda: self.etcd.memory, self._memory_read, self._read_memory)

    def _memory_read(self, memory: Memory | None) -> None:
        if not self.may_serve():
            return  # It was frozen meanwhile.
        known = memory.term if memory else 0
        self.engine.note(self.name, "starts", "with" if memory else "with no memory", memory or "")
        if known >= self.office.leader.term:
            self.raise_term(known, lambda _: self._read(memory))
        else:
            self._read(memory)

    def _read(self, memory: Memory | None) -> None:
        self._open(memory, term=self.office.leader.term)
        for link, introduction in self._early:
            if link.coordinator_open:
                self.greet(link, introduction)

    def greet(self, link: Link, introduction: protocol.Introduction) -> None:
        if self._pump is not None:
            super().greet(link, introduction)
        else:
            self._early.append((link, introduction))

    def _feed(self, event: RunEvent) -> None:
        """What happens before the memory is read, or after the end, is no concern of the run's."""
        if self._pump is not None:
            super()._feed(event)

    # The office.

    def may_serve(self) -> bool:
        if self.is_up and not self.office.may_serve(self.local_now):
            self._tell_office(TimePassed())
        return self.is_up

    def _office_ring(self) -> None:
        self.hear(self._tell_office, TimePassed())

    def _tell_office(self, event: election.Event) -> None:
        try:
            commands = self.office.step(event, self.local_now)
        except Exception as error:
            raise Violation("machines_never_raise", f"office: {type(error).__name__}: {error}") from error
        self.engine.note(self.name, event, tuple(commands))
        for command in commands:
            self._serve(command)
        self._office_alarm.set(self.office.next_deadline() if self.is_up else None)

    def _serve(self, command: election.Command) -> None:
        match command:
            case election.Renew():
                sent_at = self.local_now
                self.gateway.ask(
                    self,
                    lambda: self.etcd.renew(self.lease),
                    lambda is_alive: self._tell_office(election.RenewalAnswered(sent_at, is_alive)),
                    lambda: self._tell_office(election.RenewalFailed()),
                )
            case election.Write():
                self.gateway.ask(
                    self,
                    lambda: self.etcd.write(command),
                    self._write_answered,
                    lambda: self._tell_office(election.WriteFailed()),
                )
            case election.Acknowledge():
                self._when_written.popleft()()
            case election.Resign(reason, is_refused):
                self._resign(reason if is_refused else "")
            case _:
                assert_never(command)

    def _write_answered(self, found: Leader | str | None) -> None:
        if not isinstance(found, str):
            self._tell_office(election.WriteAnswered(found))
            return
        self._tell_office(election.WriteRefused(found))
        if self.is_up:
            raise Violation("a_refusal_ends_the_term", f"{self.name} stays in office though etcd refuses its writes")

    # The pump's storage and transport.

    def raise_term(self, heard: int, then: Callable[[int], None]) -> None:
        self._when_written.append(lambda: then(self.office.leader.term))
        self._tell_office(election.TermHeard(heard))

    def write(self, memory: Memory, then: Callable[[], None]) -> None:
        def written() -> None:
            self.last_memory = memory
            then()

        self._when_written.append(written)
        self._tell_office(election.MemoryChanged(memory))

    def _seal(self, sealed: model.Sealed) -> None:
        super()._seal(sealed)
        memory = self.etcd.memory
        if memory is None or memory.last_round < sealed.place.round:
            self.checks.data_lost()  # It was written down, and lost before this coordinator knew.

    def _send(self, link: Link, message: Any) -> None:
        self.checks.told(self, message, self.etcd.memory)
        super()._send(link, message)

    # The end.

    def _resign(self, refusal: str) -> None:
        self.engine.note(self.name, "resigns", *([refusal] if refusal else []))
        self._end(model.Resigned(refusal))

    def forget(self) -> None:
        self.gateway.ask(self, lambda: self.etcd.revoke(self.lease), lambda _: None, lambda: None)
        self._end(None)

    def _end(self, last_word: Any) -> None:
        for link in self._open_links():
            if last_word is not None:
                self.network.send_down(link, last_word)
            self.network.close_by_coordinator(link)
        self._die()
        self.has_ended()

    def crash(self) -> None:
        super().crash()
        self.has_ended()

    def _die(self) -> None:
        super()._die()
        self._office_alarm.set(None)
        if self in self.host.coordinators:
            self.host.coordinators.remove(self)


class Candidate:
    """One agent's way to the coordinator. `address` is where the present one is, as far as it knows."""

    def __init__(self, gateway: Gateway, addresses: list[Address], *, does_hang_up: bool = True) -> None:
        self.address: Address | None = None
        self._gateway = gateway
        self._etcd = gateway.etcd
        self._addresses = addresses
        self._does_hang_up = does_hang_up
        self._is_busy = False
        self._candidacy = Candidacy()
        self._refused_at = -1e9

    def resigned(self, agent: Agent) -> None:
        self._candidacy.refused(agent.host.local_now)

    def _ask(self, agent: Agent, carry_out: Any, answered: Any, failed: Any) -> None:
        self._gateway.asked_by_agents += 1
        self._gateway.ask(agent, carry_out, answered, failed)

    def locate(self, agent: Agent) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._read(agent, lambda leader: self._found(agent, leader))

    def _read(self, agent: Agent, found: Callable[[Leader | None], None]) -> None:
        self._ask(agent, lambda: self._etcd.leader, found, lambda: self._give_up(agent))

    def _give_up(self, agent: Agent) -> None:
        self._is_busy = False
        agent.found_none()

    def _found(self, agent: Agent, leader: Leader | None) -> None:
        if leader is not None:
            self._settle(agent, leader)
            return
        now, engine = agent.host.local_now, agent.engine
        draw = 0.0 if agent.network.is_even else engine.random.random()
        wait_s = self._candidacy.turn_at(agent.place.node_count if agent.place else 1, draw, now) - now
        if wait_s > _LONGEST_LOOK_S:
            self._give_up(agent)
        elif wait_s > 0:
            look_again = (agent, lambda leader: self._found(agent, leader))
            engine.at(agent.host.clock.true(now + wait_s) + 1e-7, agent.hear, self._read, *look_again)
        else:
            self._campaign(agent)

    def _settle(self, agent: Agent, leader: Leader) -> None:
        """A node that has a connection leaves it for a higher term only. One that has none tries whatever there is: if
        its term is lower, it hears of that."""
        self._is_busy = False
        self._candidacy.settle()
        address = self._addresses[leader.port]
        is_news = address is not self.address
        if is_news and (not agent.participant.is_connected or leader.term > agent.participant.term):
            self.address = address
            agent.found_leader()
        else:
            agent.found_none()

    # Becoming the one.

    def _campaign(self, agent: Agent) -> None:
        asked_at = agent.host.local_now
        self._ask(
            agent,
            lambda: self._etcd.grant(LEADER_LEASE_S),
            lambda lease: self._granted(agent, lease, asked_at),
            lambda: self._give_up(agent),
        )

    def _granted(self, agent: Agent, lease: int | str, asked_at: float) -> None:
        if isinstance(lease, str):
            self._refuse(agent)
            return
        address = Address(f"coordinator{len(self._addresses)}", agent.host)
        self._addresses.append(address)
        port = len(self._addresses) - 1
        leader = Leader(agent.host.name, port, f"token{port}", agent.participant.term + 1)

        def created(found: Leader | None) -> None:
            if found is not None and found.token == leader.token:
                self._win(agent, address, leader, lease, asked_at)
            else:
                self._revoke(agent, lease)
                self._found_other(agent, found)

        def unanswered() -> None:
            self._revoke(agent, lease)
            self._give_up(agent)

        self._ask(agent, lambda: self._etcd.create(leader, lease), created, unanswered)

    def _refuse(self, agent: Agent) -> None:
        """etcd takes no coordinator. It must not be asked again and again."""
        now = agent.host.local_now
        if now - self._refused_at < _LEAST_PAUSE_S:
            raise Violation("candidates_pause", f"{agent.name} campaigns again {now - self._refused_at:.2f} s later")
        self._refused_at = now
        self._candidacy.refused(now)
        self._give_up(agent)

    def _found_other(self, agent: Agent, found: Leader | None) -> None:
        if found is not None:
            self._settle(agent, found)
        else:
            self._give_up(agent)

    def _win(self, agent: Agent, address: Address, leader: Leader, lease: int, asked_at: float) -> None:
        process = ElectedCoordinator(agent, self._gateway, address, leader, lease, asked_at)
        process.does_hang_up = self._does_hang_up
        process.has_ended = lambda: agent.hear(self._revoke, agent, lease)
        process.begin()
        self._settle(agent, leader)

    def _revoke(self, agent: Agent, lease: int) -> None:
        self._ask(agent, lambda: self._etcd.revoke(lease), lambda _: None, lambda: None)
