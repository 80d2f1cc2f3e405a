"""A fake etcd for the two keys of a run, `leader` and `memory`, and the way there.

It is linearizable because it is one object. What can go wrong with it is what a client of a real one can notice:

* Without a quorum nothing is carried out and no lease ends; afterwards every lease has its full length again.
* It has no space left: it refuses writes and new leases, and renews old ones.
* A lease ends early although it was renewed (etcd #15247).
* All its data is lost, and nobody is told.

Its clock is its own, so a lease may end here earlier or later than its holder thinks. A request has three ends. It is
answered; or it is given up after a while, and then its outcome is unknown: it was lost, or the answer was, or it is
still on its way and is carried out when nobody expects it any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.rendezvous.etcd.election import Leader, Write
from holdfast.rendezvous.membership.model import Memory
from tests.sim.checkers import Checks
from tests.sim.engine import Clock, Engine
from tests.sim.host import Host
from tests.sim.network import Network

_CHANCE_OF_LOSS = 0.3

REFUSED = "mvcc: database space exceeded"
"""The answer to what etcd refuses for good."""


class Etcd:
    def __init__(self, engine: Engine, clock: Clock, checks: Checks) -> None:
        self.engine = engine
        self.clock = clock
        self.checks = checks
        self.has_quorum = self.has_space = True
        self.leader: Leader | None = None
        self.memory: Memory | None = None
        self.pending: list[Callable[[], None]] = []
        self._lease_of_leader = 0
        self._leases: dict[int, tuple[float, float]] = {}  # Length, and end by the clock of etcd.
        self._granted = 0

    # What clients ask for.

    def grant(self, ttl_s: float) -> int | str:
        if not self.has_space:
            return REFUSED
        self._granted += 1
        self._extend(self._granted, ttl_s)
        self._look_later(self._granted)
        return self._granted

    def renew(self, lease: int) -> bool:
        if lease not in self._leases:
            return False
        self._extend(lease, self._leases[lease][0])
        return True

    def revoke(self, lease: int) -> None:
        if self._leases.pop(lease, None) is not None and lease == self._lease_of_leader:
            self.leader = None

    def create(self, leader: Leader, lease: int) -> Leader | None:
        """If there is no leader, and the lease exists; the leader that there is then."""
        if self.leader is None and lease in self._leases and self.has_space:
            self._put(leader)
            self._lease_of_leader = lease
        return self.leader

    def write(self, write: Write) -> Leader | str | None:
        if not self.has_space:
            return REFUSED
        if self.leader == write.before:
            self._put(write.after)
            if write.memory is not None:
                self.memory = write.memory
                self.checks.remembered(write.memory)
        return self.leader

    def _put(self, leader: Leader) -> None:
        self.leader = leader
        self.checks.leader_written(leader)

    # Leases.

    def _local_now(self) -> float:
        return self.clock.local(self.engine.now)

    def _extend(self, lease: int, ttl_s: float) -> None:
        self._leases[lease] = (ttl_s, self._local_now() + ttl_s)

    def _look_later(self, lease: int) -> None:
        self.engine.at(self.clock.true(self._leases[lease][1]) + 1e-7, self._look, lease)

    def _look(self, lease: int) -> None:
        if lease not in self._leases:
            return
        if not self.has_quorum:
            self.engine.after(0.1, self._look, lease)
        elif self._local_now() >= self._leases[lease][1]:
            if lease == self._lease_of_leader:
                self.engine.note("etcd", "the leader's lease has ended")
            self.revoke(lease)
        else:
            self._look_later(lease)

    # Trouble.

    def drop_lease(self) -> None:
        if self.leader is not None:
            self.engine.note("etcd", "ends the leader's lease early")
            self.checks.lease_dropped()
            self.revoke(self._lease_of_leader)

    def lose_quorum(self) -> None:
        self.engine.note("etcd", "loses its quorum")
        self.has_quorum = False

    def regain_quorum(self) -> None:
        if self.has_quorum:
            return
        self.engine.note("etcd", "has a quorum again")
        self.has_quorum = True
        for lease, (ttl_s, _) in self._leases.items():
            self._extend(lease, ttl_s)
        pending, self.pending = self.pending, []
        for call in pending:
            call()

    def fill(self) -> None:
        self.engine.note("etcd", "has no space left")
        self.has_space = False

    def make_space(self) -> None:
        if not self.has_space:
            self.engine.note("etcd", "has space again")
        self.has_space = True

    def wipe(self) -> None:
        self.engine.note("etcd", "loses all its data")
        self.leader = self.memory = None
        self._leases.clear()
        self.checks.data_lost()


class Asker(Protocol):
    @property
    def host(self) -> Host: ...

    def hear(self, call: Callable[..., None], *arguments: Any) -> None: ...


@dataclass(slots=True)
class Request:
    asker: Asker
    carry_out: Callable[[], Any]
    answered: Callable[[Any], None]
    is_over: bool = False


@dataclass
class Gateway:
    """Requests and answers, and what can happen to them on their way. A host that the network does not reach does not
    reach etcd; it may also be cut off from etcd alone."""

    engine: Engine
    network: Network
    etcd: Etcd
    timeout_s: float = 1.0
    blocked_up: set[Host] = field(default_factory=set)
    blocked_down: set[Host] = field(default_factory=set)
    lossy: set[Host] = field(default_factory=set)
    asked_by_agents: int = 0
    _held: list[tuple[Host, Callable[[], None]]] = field(default_factory=list)

    def ask(
        self, asker: Asker, carry_out: Callable[[], Any], answered: Callable[[Any], None], failed: Callable[[], None]
    ) -> None:
        request = Request(asker, carry_out, answered)
        self.engine.after(self.timeout_s, asker.hear, self._give_up, request, failed)
        self.engine.after(self.network.delay_s(), self._go_up, request)

    def _give_up(self, request: Request, failed: Callable[[], None]) -> None:
        if not request.is_over:
            request.is_over = True
            failed()

    def _go_up(self, request: Request) -> None:
        host = request.asker.host
        if self._is_lost(host):
            return
        if host in self.blocked_up or host in self.network.blocked_up:
            self._held.append((host, lambda: self._go_up(request)))
        elif not self.etcd.has_quorum:
            self.etcd.pending.append(lambda: self.engine.after(self._lateness_s() / 4, self._go_up, request))
        else:
            result = request.carry_out()
            if not self._is_lost(host):
                self.engine.after(self.network.delay_s(), self._go_down, request, result)
            elif not request.is_over:  # The client sends it again, and it is carried out twice.
                self.engine.after(self._lateness_s() / 4, self._go_up, request)

    def _go_down(self, request: Request, result: Any) -> None:
        host = request.asker.host
        if host in self.blocked_down or host in self.network.blocked_down:
            self._held.append((host, lambda: self._go_down(request, result)))
        else:
            request.asker.hear(self._answer, request, result)

    def _answer(self, request: Request, result: Any) -> None:
        if not request.is_over:
            request.is_over = True
            request.answered(result)

    def _lateness_s(self) -> float:
        """A client that resends does it less and less often."""
        return 0.0 if self.network.is_even else self.engine.random.random() ** 2 * 4 * self.timeout_s

    def _is_lost(self, host: Host) -> bool:
        return host.is_gone or (host in self.lossy and self.engine.random.random() < _CHANCE_OF_LOSS)

    def cut(self, host: Host, *, up: bool, down: bool) -> None:
        if up:
            self.blocked_up.add(host)
        if down:
            self.blocked_down.add(host)

    def heal(self, host: Host) -> None:
        """What was held up goes on, or was dropped long since."""
        self.blocked_up.discard(host)
        self.blocked_down.discard(host)
        held, self._held = self._held, []
        for each, go_on in held:
            if each is not host:
                self._held.append((each, go_on))
            elif self.network.is_even or self.engine.random.random() < 0.5:
                self.engine.after(self.network.delay_s() + self._lateness_s(), go_on)
