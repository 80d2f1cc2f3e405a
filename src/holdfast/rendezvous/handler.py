"""The handler of backends with a coordinator (`tcp`, `static` with several nodes, `etcd`).

Such a handler is a `Coordination`: it reports what this node's workers do and passes on what the run decides. All of
that happens in the client's thread; what is here turns the agent's calls into events for it, and holds the master port.
The backends differ only in how they find the coordinator (`Locator`): `FixedEndpoint` here, `etcd.locator`.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

from holdfast.errors import HostError, UserError
from holdfast.rendezvous import endpoints
from holdfast.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from holdfast.rendezvous.client.handshake import Target
from holdfast.rendezvous.client.reachability import Reachability
from holdfast.rendezvous.client.remote_store import RemoteStore
from holdfast.rendezvous.client.thread import Client, Locator
from holdfast.rendezvous.coordination import Coordination, JoinFailed, Mailbox, Push
from holdfast.rendezvous.coordinator import launch
from holdfast.rendezvous.membership import node, protocol
from holdfast.rendezvous.membership.model import (
    Ended,
    NodeFacts,
    Notice,
    Outcome,
    PlaceLost,
    Progress,
    Refused,
    Sealed,
    StandBy,
    Stop,
    is_loopback,
)
from holdfast.rendezvous.membership.node import Participant
from holdfast.rendezvous.membership.node_lease import NodeLease
from holdfast.rendezvous.membership.restart_policy import Failure, RestartPolicy
from holdfast.rendezvous.options import Options
from holdfast.rendezvous.store import PrefixStore

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29400
_RESOLVE_PATIENCE_S = 5.0


class CoordinatorHandler(RendezvousHandler, Coordination):
    """One node of a run that has a coordinator."""

    def __init__(
        self,
        backend: str,
        run_id: str,
        options: Options,
        where: str,
        locator: Callable[[NodeFacts], Locator],
        addresses: Sequence[tuple[str, int]],
        master: RendezvousStoreInfo | None = None,
    ) -> None:
        """`where` names what the nodes meet at, for messages; this node's address is the one that reaches one of
        `addresses`. `master` is where the workers meet if the user has fixed it; else it is the node of rank 0."""
        self._backend = backend
        self._run_id = run_id
        self._options = options
        self._where = where
        self._make_locator = locator
        self._addresses = addresses
        self._master = master
        self._mailbox = Mailbox()
        self._client: Client | None = None
        self._lock = threading.Lock()
        self._is_shut_down = False
        self._facts = NodeFacts(_node_id())
        self._policy = RestartPolicy()
        self._outcome: Outcome | None = None
        self._error: Exception | None = None
        self._held = endpoints.HeldPort()
        self._last_round = 0
        self._lease_until: float | None = None
        self._lease_sink: Callable[[float | None], None] = lambda until: None

    # The contract that users know.

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """For users who call the handler themselves: join, and block until there is a place."""
        self.join()
        poller = select.poll()  # Unlike select, for any number of descriptors.
        poller.register(self._mailbox, select.POLLIN)
        while True:
            for push in self._mailbox.take():
                match push:
                    case Sealed():
                        return self.found(push)
                    case Ended(outcome):
                        raise RendezvousClosedError(outcome.reason)
                    case Refused(reason):
                        raise UserError(f"run {self._run_id!r} rejected this node: {reason}")
                    case JoinFailed(error):
                        raise error
            poller.poll()

    def is_closed(self) -> bool:
        return self._outcome is not None

    def set_closed(self) -> None:
        self._post(node.CloseRequested("closed by the user"))

    def num_nodes_waiting(self) -> int:
        return 0  # Nodes that wait are announced by a push.

    def shutdown(self) -> bool:
        """Let go of everything. The run ends only with an outcome; without one, this node leaves it."""
        with self._lock:
            self._is_shut_down = True
        if self._client is not None:
            if self._outcome is None:
                self._post(node.LeaveRequested())
                self._post(node.LeaveCompleted())
            self._client.stop()
            self._client = None
        self._held.release()
        self._fail(self._shut_down_error())
        return True

    def _shut_down_error(self) -> RendezvousConnectionError:
        return RendezvousConnectionError(f"the rendezvous of run {self._run_id!r} was shut down")

    # What the agent needs.

    def introduce(self, role: str, local_world_size: int, policy: RestartPolicy, grace_s: float = 30.0) -> None:
        self._policy = policy
        self._facts = NodeFacts(
            node_id=self._facts.node_id,
            role=role,
            local_world_size=local_world_size,
            requested_rank=self._options.requested_rank,
            grace_s=grace_s,
        )

    def join(self) -> None:
        """The first time in a thread: names are looked up, and a coordinator may have to be started."""
        self.joined = None
        if self._is_shut_down:
            self._fail(self._shut_down_error())
        elif self._client is None:
            threading.Thread(target=self._begin, name="holdfast-begin", daemon=True).start()
        else:
            self._ask(self._client)

    def _begin(self) -> None:
        try:
            client = self._make_client()
            with self._lock:
                if self._is_shut_down:
                    client.stop()
                    return
                self._client = client
                client.start()
            self._ask(client)
        except Exception as error:
            self._fail(error)

    def _ask(self, client: Client) -> None:
        try:
            self._hold_port()
        except HostError as error:
            self._fail(error)
        else:
            if not client.post(node.JoinRequested(self._held.number)):
                self._fail(self._error or self._shut_down_error())

    def _make_client(self) -> Client:
        options = self._options
        self._facts = replace(self._facts, address=options.local_addr or self._find_address())
        locator = self._make_locator(self._facts)
        lease = NodeLease(options.lease, may_outlive_lease=options.continue_when_isolated)
        participant = Participant(self._facts, options.settings(self._policy), lease)
        reach = Reachability(self._where, options.join_timeout_s, options.outage_timeout_s, time.monotonic())
        return Client(locator, participant, self._deliver, self._lease, self._fail, reach)

    def found(self, sealed: Sealed) -> RendezvousInfo:
        assert self._client is not None
        place = sealed.place
        store = RemoteStore(self._client, timedelta(seconds=self._options.read_timeout_s))
        master = self._master or RendezvousStoreInfo(place.master_address, place.master_port)
        return RendezvousInfo(PrefixStore(f"round/{place.round}", store), place.rank, place.node_count, master)

    def report_failure(self, round: int, failure: Failure) -> None:
        self._post(node.FailureReported(round, protocol.clipped(failure)))

    @property
    def outcome(self) -> Outcome | None:
        return self._outcome

    def report_success(self, round: int, timeout_s: float) -> None:
        self._post(node.SuccessReported(round))

    def leaving(self) -> None:
        self._post(node.LeaveRequested())

    def left(self) -> None:
        self._post(node.LeaveCompleted())
        if self._client is not None:
            self._client.stop()

    def fileno(self) -> int:
        return self._mailbox.fileno()

    def take(self) -> list[Push]:
        return self._mailbox.take()

    @property
    def has_leases(self) -> bool:
        return True

    @property
    def has_lapsed(self) -> bool:
        until = self._lease_until
        return until is not None and time.monotonic() >= until

    def set_lease_sink(self, sink: Callable[[float | None], None]) -> None:
        """Who is told until when this node's workers may live; called at once with what holds now."""
        self._lease_sink = sink
        sink(self._lease_until)

    # Joining.

    def _find_address(self) -> str:
        """The address at which others reach this node: the one that reaches the endpoint. A name that does not resolve
        is given some seconds, not minutes."""
        deadline = time.monotonic() + _RESOLVE_PATIENCE_S
        while True:
            problems = []
            for host, port in self._addresses:
                try:
                    address = endpoints.own_address(host, port)
                    self._warn_of_loopback(host, address)
                    return address
                except socket.gaierror as error:
                    problem = endpoints.unresolved(host, error)
                except OSError as error:
                    problem = f"there is no way to {host!r} from this host ({error.strerror})"
                problems.append(f"the endpoint {endpoints.endpoint_text(host, port)}: {problem}")
            if time.monotonic() >= deadline:
                raise RendezvousConnectionError(f"{'; '.join(problems)}; tried for {_RESOLVE_PATIENCE_S:g} s")
            time.sleep(0.5)

    def _warn_of_loopback(self, host: str, address: str) -> None:
        """Many hosts resolve their own name to a loopback address."""
        if is_loopback(address) and not is_loopback(host) and self._options.max_nodes > 1:
            logger.warning(
                "on this host the endpoint's name %r means %s, where no other host can reach it; "
                "if there are others, give an address instead of the name",
                host,
                address,
            )

    def _hold_port(self) -> None:
        """A fresh master port for every round, bound and held, so that no round meets what another has left."""
        try:
            self._held.renew(self._facts.address)
        except HostError:
            if not self._options.local_addr:
                raise
            # The user says that others reach this node there, which may be so although no interface has the address.
            self._held.renew("")

    # In the client's thread.

    def _post(self, event: node.AgentEvent) -> None:
        if self._client is not None:
            self._client.post(event)

    def _lease(self, until: float | None) -> None:
        self._lease_until = until
        self._lease_sink(until)

    def _fail(self, error: Exception) -> None:
        """The client cannot go on. An agent that runs a round stops, and finds out why when it joins again."""
        self._error = error
        if self._last_round:
            self._mailbox.put(PlaceLost(self._last_round, str(error)))
        self._mailbox.put(JoinFailed(error))

    def _deliver(self, push: node.ForAgent) -> None:
        match push:
            case Progress():
                self._log_progress(push)
            case Notice(text):
                logger.info("%s", text)
            case StandBy(_, text):
                self.joined = text
                logger.info("%s", text)
            case Ended(outcome):
                self._outcome = outcome
                if not self._last_round:
                    logger.warning(
                        "run %r has ended before this node had a place in it: %s; a new run needs another --rdzv-id",
                        self._run_id,
                        outcome.reason,
                    )
                self._mailbox.put(push)
            case Sealed(_, place):
                self._last_round = place.round
                self._mailbox.put(push)
            case Stop() | PlaceLost() | Refused():
                self._mailbox.put(push)

    def _log_progress(self, progress: Progress) -> None:
        joined, wanted, most = progress.joined, progress.wanted, progress.max_nodes
        what = f"run {self._run_id!r} at {self._where}"
        if joined < wanted:
            self.joined = f"{joined} of {wanted} nodes joined, waiting for {wanted - joined}"
            logger.info("%s: %s (timeout in %s)", what, self.joined, _short(progress.seconds_left))
        elif joined < most:
            self.joined = f"{joined} of {most} nodes joined, last call for {most - joined} more"
            logger.info("%s: %s", what, self.joined)


class FixedEndpoint:
    """The coordinator is where the user says. If nothing listens there, and it is this host, start one."""

    def __init__(self, host: str, port: int, run_id: str, options: Options) -> None:
        self._options = options
        if port == 0:
            port = self._host_somewhere(host)
        self._target = Target(host, port, run_id, options.token, options.client_tls())

    def target(self) -> Target:
        return self._target

    def locate(self, known_term: int, is_wanted: Callable[[], bool], found: Callable[[], None]) -> None:
        """There is no other place to look at."""

    def stop(self) -> None:
        pass

    def refused(self, target: Target) -> None:
        if self._options.is_host is False:
            return
        try:
            with launch.bind(target.host, target.port) as sock:
                self._start_coordinator(sock)
        except launch.PortTaken:
            pass  # Another agent was faster.
        except launch.NotThisHost as error:
            if self._options.is_host:
                raise UserError(f"is_host is true, but this node {error}") from None

    def _host_somewhere(self, host: str) -> int:
        """Port 0 is any free port of this host, which no other node can know: good for one node."""
        if self._options.max_nodes > 1:
            raise UserError(
                f"the endpoint {endpoints.endpoint_text(host, 0)} names no port, so {self._options.max_nodes} nodes "
                "cannot meet there"
            )
        with launch.bind(host, 0) as sock:
            port = int(sock.getsockname()[1])
            self._start_coordinator(sock)
        return port

    def _start_coordinator(self, sock: socket.socket) -> None:
        where = endpoints.endpoint_text(*sock.getsockname()[:2])
        if self._options.speaks_tls and not self._options.tls_cert:
            raise UserError(
                f"nothing listens at {where}, and without tls_cert this node cannot start a coordinator that speaks TLS"
            )
        if launch.host_at(sock, self._options.coordinator_options()):
            logger.debug("started a coordinator at %s", where)


def create_tcp_handler(params: RendezvousParameters) -> CoordinatorHandler:
    """The backend `tcp` (also `c10d`)."""
    host, port = endpoints.parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    return _at(params, host, port, Options.from_parameters(params))


def create_static_handler(
    params: RendezvousParameters, master_addr: str, master_port: int, coordinator_port: int
) -> CoordinatorHandler:
    """Nodes whose number and ranks the user has fixed, and that share failures, restarts and the outcome."""
    options = replace(Options.from_parameters(params), min_nodes=params.max_nodes)
    return _at(params, master_addr, coordinator_port, options, RendezvousStoreInfo(master_addr, master_port))


def _at(
    params: RendezvousParameters, host: str, port: int, options: Options, master: RendezvousStoreInfo | None = None
) -> CoordinatorHandler:
    return CoordinatorHandler(
        params.backend,
        params.run_id,
        options,
        endpoints.endpoint_text(host, port),
        lambda facts: FixedEndpoint(host, port, params.run_id, options),
        [(host, port)],
        master,
    )


def _short(seconds: float) -> str:
    return f"{seconds / 60:.0f} m" if seconds >= 90 else f"{seconds:.0f} s"


def _node_id() -> str:
    return f"{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}"
