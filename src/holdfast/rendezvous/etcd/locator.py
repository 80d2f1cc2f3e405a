"""Finds the coordinator of a run on etcd, and starts one if there is none.

The key `leader` says where the coordinator is. An agent that finds no such key tries to become the host of the next
coordinator. It binds a port at its own address, gets a lease, and creates the key under it, in one transaction that
holds only if there is none. If that succeeds it starts the coordinator process, hands it the socket and the lease, and
has no more to do with either, but for one thing: if it sees that process die it revokes the lease at once, so that the
next coordinator need not wait for its end.

The agent dials the address that it knows at once when its connection breaks. It looks at the key at the same time, in a
thread of its own (`locate`), and goes where a higher term is.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.frozen import frozen
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.client.handshake import Target
from holdfast.rendezvous.coordinator import launch
from holdfast.rendezvous.coordinator.memory import boot_id
from holdfast.rendezvous.endpoints import endpoint_text
from holdfast.rendezvous.etcd import election
from holdfast.rendezvous.etcd.election import Leader
from holdfast.rendezvous.etcd.gateway import EtcdError, EtcdRefused, Gateway, Get, Put, is_missing, parse_etcd_endpoint
from holdfast.rendezvous.etcd.memory import Appointment, decode_leader, encode_leader, keys_of
from holdfast.rendezvous.etcd.options import EtcdOptions
from holdfast.rendezvous.handler import CoordinatorHandler
from holdfast.rendezvous.membership.model import NodeFacts, is_loopback

logger = logging.getLogger(__name__)

_LONGEST_REQUEST_S = 5.0
_MEMORY_LEASE_S = 60  # And twice the time for which workers may live on after the last coordinator.


@frozen
class Appointed:
    """A leader key that this node created, its lease, and the time before the lease was asked for."""

    leader: Leader
    lease: int
    sent_at: float


class _Hosted:
    """A coordinator process that this agent has started: if it dies, its lease is revoked at once."""

    def __init__(self, life: socket.socket, when_dead: Callable[[], None]) -> None:
        """The process holds the other end of `life`, and never writes to it."""
        self.is_over = False
        self._life = life
        self._when_dead = when_dead
        self._let_go = os.eventfd(0, os.EFD_CLOEXEC)
        threading.Thread(target=self._watch, name="holdfast-coordinator-watch", daemon=True).start()

    def _watch(self) -> None:
        poller = select.poll()
        for each in (self._life.fileno(), self._let_go):
            poller.register(each, select.POLLIN)
        if self._let_go not in dict(poller.poll()):
            self._when_dead()
        self.is_over = True
        self._life.close()
        os.close(self._let_go)

    def let_go(self) -> None:
        """The process outlives this agent."""
        if not self.is_over:
            os.eventfd_write(self._let_go, 1)


class EtcdLocator:
    """One node's view of who coordinates its run."""

    def __init__(self, run_id: str, options: EtcdOptions, facts: NodeFacts) -> None:
        self._run_id = run_id
        self._options = options
        self._address = facts.address
        self._leader_key, self._memory_key = keys_of(options.prefix, run_id)
        self._gateway = gateway_to(
            options, min(_LONGEST_REQUEST_S, options.leader_lease_s / 3, options.join_timeout_s / 2)
        )
        self._tls = options.client_tls()
        self._lock = threading.Lock()  # One search at a time.
        self._leader: Leader | None = None
        self._refused: tuple[str, int] | None = None  # Where nothing listens any more.
        self._problem = ""  # Why the last look at etcd did not tell who coordinates.
        self._hosted: list[_Hosted] = []
        self._unrevoked: deque[int] = deque()  # Leases of coordinators that ended while etcd was out of reach.
        self._is_version_checked = False
        self._is_stopped = False

    # What the client's thread calls.

    def target(self) -> Target:
        """The coordinator that is known. If none is, look for one."""
        leader = self._leader
        if leader is None:
            with self._lock:
                leader = self._search(0, lambda: not self._is_stopped)
        if self._problem and (leader.host, leader.port) == self._refused:
            raise ConnectionError(errno.EHOSTUNREACH, self._problem)
        return Target(leader.host, leader.port, self._run_id, self._options.token, self._tls)

    def refused(self, target: Target) -> None:
        """Another coordinator may be in office: `locate` finds out."""
        self._refused = target.address

    def locate(self, known_term: int, is_wanted: Callable[[], bool], found: Callable[[], None]) -> None:
        if not self._lock.locked():
            look = partial(self._look, known_term, is_wanted, found)
            threading.Thread(target=look, name="holdfast-locate", daemon=True).start()

    def stop(self) -> None:
        self._is_stopped = True
        for hosted in self._hosted:
            hosted.let_go()
        self._gateway.close()

    # Looking.

    def _look(self, known_term: int, is_wanted: Callable[[], bool], found: Callable[[], None]) -> None:
        with self._lock:
            before = self._leader
            try:
                leader = self._search(known_term, is_wanted)
            except (HoldfastError, OSError) as error:
                self._problem = (isinstance(error, OSError) and error.strerror) or str(error)
                return
            self._problem = ""
        if election.is_newer(leader, known_term) and leader != before:
            found()

    def _search(self, known_term: int, is_wanted: Callable[[], bool]) -> Leader:
        """The coordinator in office; this node's own, if there was none. Raises OSError if there is none yet."""
        try:
            self._check_version()
            self._revoke_rest()
            leader = decode_leader(self._gateway.get(self._leader_key))
            if leader is None:
                leader = self._campaign(known_term, is_wanted)
        except EtcdRefused:
            raise
        except EtcdError as error:
            raise ConnectionError(errno.EHOSTUNREACH, str(error)) from None
        self._check_reachable(leader)
        self._leader = leader
        return leader

    def _check_version(self) -> None:
        if not self._is_version_checked:
            self._gateway.check_version()
            self._is_version_checked = True

    def _check_reachable(self, leader: Leader) -> None:
        """A loopback address is another host on every host."""
        if is_loopback(leader.host) and leader.boot_id != boot_id():
            raise UserError(
                f"the coordinator of run {self._run_id!r} is at {leader.host} on another host, where this node cannot "
                "reach it; give the nodes addresses with --local-addr"
            )

    # Becoming the host of the next coordinator.

    def _campaign(self, known_term: int, is_wanted: Callable[[], bool]) -> Leader:
        if not self._options.may_host:
            problem = "no coordinator is in office, and this node may not start one (is_host=false)"
            raise ConnectionError(errno.EAGAIN, problem)
        try:
            return self._host_or_find(known_term, is_wanted)
        except HostError as error:
            # Another node may be able to. A port may be held by a coordinator that is about to step down.
            problem = f"no coordinator is in office, and this node cannot start one: {error}"
            raise ConnectionError(errno.EAGAIN, problem) from None

    def _host_or_find(self, known_term: int, is_wanted: Callable[[], bool]) -> Leader:
        with self._bind() as sock:
            sent_at = time.monotonic()
            lease = self._gateway.grant_lease(self._options.leader_lease_s)
            host, port = self._address, int(sock.getsockname()[1])
            mine = Leader(host, port, secrets.token_hex(16), known_term + 1, boot_id=boot_id())
            try:
                leader = self._create(mine, lease) if is_wanted() else None
                if leader == mine and is_wanted():
                    self._host(sock, Appointed(mine, lease, sent_at))
                    return mine
            except BaseException:
                self._revoke(lease)
                raise
        self._revoke(lease)
        if leader is None or leader == mine:
            raise ConnectionError(errno.EAGAIN, "no coordinator is in office")
        return leader

    def _bind(self) -> socket.socket:
        try:
            return launch.bind(self._address, self._options.coordinator_port)
        except launch.NotThisHost:
            if not self._options.local_addr:
                raise
            # The user says that others reach this node there, which may be so although no interface has the address.
            return launch.bind("", self._options.coordinator_port)

    def _create(self, mine: Leader, lease: int) -> Leader | None:
        """The leader key as it is afterwards."""
        try:
            done = self._gateway.transact(
                [is_missing(self._leader_key)],
                [Put(self._leader_key, encode_leader(mine), lease)],
                [Get(self._leader_key)],
            )
            return mine if done.succeeded else decode_leader(done.values[0])
        except EtcdError:
            # It may have been carried out all the same, or may yet be: the lease is revoked if it was not.
            return decode_leader(self._gateway.get(self._leader_key))

    def _host(self, sock: socket.socket, appointed: Appointed) -> None:
        options = self._options
        appointment = Appointment(
            self._run_id,
            options.prefix,
            options.endpoints,
            options.user or "",
            options.password_file,
            (options.etcd_tls.cert, options.etcd_tls.key, options.etcd_tls.ca),
            appointed.leader,
            appointed.lease,
            options.leader_lease_s,
            appointed.sent_at,
            _MEMORY_LEASE_S + 2 * math.ceil(options.leader_lease_s + options.lease.lease_s),
        )
        ours, theirs = socket.socketpair()
        try:
            office = ["--office", msgspec.json.encode(appointment).decode()]
            launch.start_coordinator(sock, theirs, [*options.coordinator_options(), *office])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        where = endpoint_text(appointed.leader.host, appointed.leader.port)
        logger.info("this node hosts the coordinator of run %r at %s", self._run_id, where)
        self._hosted = [hosted for hosted in self._hosted if not hosted.is_over]
        self._hosted.append(_Hosted(ours, lambda: self._revoke(appointed.lease)))

    def _revoke(self, lease: int) -> None:
        try:
            self._gateway.revoke_lease(lease)
        except EtcdError:
            self._unrevoked.append(lease)

    def _revoke_rest(self) -> None:
        """An etcd that is back gives all leases their whole time again, for which no other coordinator could begin."""
        while self._unrevoked:
            self._gateway.revoke_lease(self._unrevoked[0])
            self._unrevoked.popleft()


def gateway_to(options: EtcdOptions, request_timeout_s: float) -> Gateway:
    return Gateway(
        options.endpoints,
        user=options.user,
        password=options.password,
        tls=options.etcd_tls,
        request_timeout_s=request_timeout_s,
    )


def create_handler(params: RendezvousParameters) -> CoordinatorHandler:
    """The backend `etcd` (also `etcd-v3`)."""
    options = EtcdOptions.from_parameters(params)
    return CoordinatorHandler(
        params,
        options,
        f"etcd {','.join(options.endpoints)}",
        lambda facts: EtcdLocator(params.run_id, options, facts),
        [parse_etcd_endpoint(each, is_secure=False)[1:] for each in options.endpoints],
    )
