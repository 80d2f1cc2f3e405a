"""Finds the coordinator of a run on etcd, and starts one if there is none.

The key `leader` says where the coordinator is. An agent that finds no such key binds a port at its own address, gets a
lease, and creates the key under it if there still is none. If that succeeds it starts the coordinator process and hands
it the socket and the lease. If it sees that process die it revokes the lease at once, so that the next coordinator need
not wait for its end.

When its connection breaks the agent dials the address that it knows. It looks at the key at the same time, in a thread
of its own (`locate`), and goes where a higher term is. Not all nodes campaign at once: `election.Candidacy` gives each
its turn, and a node whose turn comes looks again first.
"""

from __future__ import annotations

import contextlib
import math
import random
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.log import Logger
from holdfast.rendezvous import settings
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.client.handshake import Target
from holdfast.rendezvous.client.thread import Locator
from holdfast.rendezvous.coordinator import launch
from holdfast.rendezvous.coordinator.state_file import boot_id
from holdfast.rendezvous.endpoints import endpoint_text
from holdfast.rendezvous.etcd import gateway, keeper
from holdfast.rendezvous.etcd.election import Candidacy, Leader
from holdfast.rendezvous.handler import CoordinatorHandler
from holdfast.rendezvous.membership.model import NodeFacts, is_loopback
from holdfast.rendezvous.settings import NodeSettings

logger = Logger(__name__)

_LONGEST_REQUEST_S = 5.0
_LONGEST_LOOK_S = 0.5
_VACANT = "no coordinator is in office"
_MEMORY_LEASE_S = 60  # Added to twice the time for which workers may live on after the last coordinator.


class EtcdLocator(Locator):
    """One node's view of who coordinates its run."""

    def __init__(self, run_id: str, options: NodeSettings, facts: NodeFacts) -> None:
        self._run_id = run_id
        self._options = options
        self._address = facts.address
        self._leader_key = keeper.keys_of(options.prefix, run_id)[0]
        request_timeout_s = min(_LONGEST_REQUEST_S, options.leader_lease_s / 3, options.join_timeout_s / 2)
        self._gateway = options.access.gateway(request_timeout_s)
        self._tls = options.tls.load()
        self._lock = threading.Lock()  # One search at a time.
        self._leader: Leader | None = None
        self._candidacy = Candidacy()
        self._no_coordinator = _VACANT
        self._refused: tuple[str, int] | None = None  # The last address where nothing listened.
        self._problem = ""  # Why the last look at etcd did not tell who coordinates.
        self._lives: list[socket.socket] = []  # Of coordinator processes that this node has started.
        self._unrevoked: deque[int] = deque()  # Leases of coordinators that ended while etcd was out of reach.
        self._is_version_checked = False
        self._stopped = threading.Event()

    def target(self) -> Target:
        """The coordinator that is known. If none is, look for one."""
        leader = self._leader
        if leader is None:
            with self._lock:
                leader = self._search(0, 1, lambda: not self._stopped.is_set())
        if self._problem and (leader.host, leader.port) == self._refused:
            raise ConnectionError(self._problem)
        return Target(leader.host, leader.port, self._run_id, self._options.token, self._tls)

    def refused(self, target: Target) -> bool:
        """Another coordinator may be in office: `locate` finds out."""
        self._refused = target.address
        return False

    def resigned(self) -> None:
        self._candidacy.refused(time.monotonic())

    def locate(
        self, known_term: int, node_count: int, is_wanted: Callable[[], bool], found: Callable[[], object]
    ) -> None:
        if self._leader is not None and not self._lock.locked():  # The first search is `target`'s.
            look = (known_term, node_count, is_wanted, found)
            threading.Thread(target=self._look, args=look, name="holdfast-locate", daemon=True).start()

    def stop(self) -> None:
        """Coordinators that this node has started outlive it."""
        self._stopped.set()
        for life in self._lives:
            with contextlib.suppress(OSError):  # That process has ended.
                life.shutdown(socket.SHUT_RD)
        self._gateway.close()

    def _look(
        self, known_term: int, node_count: int, is_wanted: Callable[[], bool], found: Callable[[], object]
    ) -> None:
        with self._lock:
            before = self._leader
            try:
                leader = self._search(known_term, node_count, is_wanted)
            except (HoldfastError, OSError) as error:
                self._problem = str(error)
                return
            self._problem = ""
        if leader.term > known_term and leader != before:
            found()

    def _search(self, known_term: int, node_count: int, is_wanted: Callable[[], bool]) -> Leader:
        """The coordinator in office. If there is none and it is this node's turn, this node starts one. Raises OSError
        if there is none yet."""
        ends = time.monotonic() + _LONGEST_LOOK_S
        try:
            if not self._is_version_checked:
                self._gateway.check_version()
                self._is_version_checked = True
            # An etcd that is back gives all leases their whole time again, for which no other coordinator could begin.
            while self._unrevoked:
                self._gateway.revoke_lease(self._unrevoked[0])
                self._unrevoked.popleft()
            while (leader := self._read_leader()) is None:
                now = time.monotonic()
                turn_at = self._candidacy.turn_at(node_count, random.random(), now)
                if turn_at > ends:
                    raise ConnectionError(self._no_coordinator)
                if turn_at <= now:
                    leader = self._campaign(known_term, is_wanted)
                    break
                self._stopped.wait(turn_at - now)
        except (gateway.Unavailable, gateway.LeaseGone) as error:
            raise ConnectionError(str(error)) from None
        if is_loopback(leader.host) and leader.boot_id != boot_id():
            raise UserError(
                f"the coordinator of run {self._run_id!r} is at {leader.host} on another host, where this node cannot "
                "reach it; give the nodes addresses with --local-addr"
            )
        self._candidacy.settle()
        self._leader, self._no_coordinator = leader, _VACANT
        return leader

    def _read_leader(self) -> Leader | None:
        return keeper.decode_leader(self._gateway.get(self._leader_key))

    # Becoming the host of the next coordinator.

    def _campaign(self, known_term: int, is_wanted: Callable[[], bool]) -> Leader:
        if self._options.is_host is False:
            raise ConnectionError("no coordinator is in office, and this node may not start one (is_host=false)")
        try:
            with self._bind() as sock:
                return self._host_or_find(sock, known_term, is_wanted)
        except (HostError, gateway.EtcdRefused) as error:
            # Another node may be able to start one. The port may be held by a coordinator that is about to step down.
            self._no_coordinator = f"no coordinator is in office, and this node cannot start one: {error}"
            self._candidacy.refused(time.monotonic())
            if isinstance(error, gateway.EtcdRefused):
                raise
            raise ConnectionError(self._no_coordinator) from None

    def _bind(self) -> socket.socket:
        try:
            return launch.bind(self._address, self._options.coordinator_port)
        except launch.NotThisHost:
            if not self._options.local_addr:
                raise
            # An address that the user has given need not be one of this host's: others may reach it through NAT.
            return launch.bind("", self._options.coordinator_port)

    def _host_or_find(self, sock: socket.socket, known_term: int, is_wanted: Callable[[], bool]) -> Leader:
        sent_at = time.monotonic()
        lease = self._gateway.grant_lease(self._options.leader_lease_s)
        mine = Leader(self._address, sock.getsockname()[1], secrets.token_hex(16), known_term + 1, boot_id=boot_id())
        with contextlib.ExitStack() as unless_hosted:
            unless_hosted.callback(self._revoke, lease)
            leader = self._create(mine, lease) if is_wanted() else None
            if leader is None or (leader == mine and not is_wanted()):
                raise ConnectionError(_VACANT)
            if leader == mine:
                self._host(sock, mine, lease, sent_at)
                unless_hosted.pop_all()
            return leader

    def _create(self, mine: Leader, lease: int) -> Leader | None:
        """The leader key as it is afterwards. If etcd does not answer, the lease is revoked: a request that is carried
        out later creates nothing."""
        key = self._leader_key
        put = gateway.put(key, keeper.encode_leader(mine), lease)
        is_created, found = self._gateway.transact(gateway.is_missing(key), [put], key)
        return mine if is_created else keeper.decode_leader(found)

    def _host(self, sock: socket.socket, leader: Leader, lease: int, sent_at: float) -> None:
        options = self._options
        memory_lease_s = _MEMORY_LEASE_S + 2 * math.ceil(options.leader_lease_s + options.lease_s)
        appointment = keeper.Appointment(
            self._run_id, options.prefix, options.access, leader, lease, options.leader_lease_s, sent_at, memory_lease_s
        )
        # The process holds the other end for as long as it lives, and never writes to it.
        life, theirs = socket.socketpair()
        try:
            launch.start_coordinator(sock, theirs, options, self._run_id, appointment)
        except BaseException:
            life.close()
            theirs.close()
            raise
        where = endpoint_text(leader.host, leader.port)
        logger.info("this node hosts the coordinator of run %r at %s", self._run_id, where)
        self._lives = [each for each in self._lives if each.fileno() >= 0] + [life]
        watch = partial(self._watch, life, lease)
        threading.Thread(target=watch, name="holdfast-coordinator-watch", daemon=True).start()

    def _watch(self, life: socket.socket, lease: int) -> None:
        with life:
            life.recv(1)
        if not self._stopped.is_set():
            self._revoke(lease)

    def _revoke(self, lease: int) -> None:
        try:
            self._gateway.revoke_lease(lease)
        except gateway.EtcdError:
            self._unrevoked.append(lease)


def create_handler(params: RendezvousParameters) -> CoordinatorHandler:
    """The backend `etcd` (also `etcd-v3`)."""
    options = settings.read(params)
    where = f"etcd {','.join(options.access.endpoints)}"
    places = [gateway.parse_etcd_endpoint(each, is_secure=False)[1:] for each in options.access.endpoints]
    return CoordinatorHandler(params, options, where, partial(EtcdLocator, params.run_id, options), places)
