"""The `tcp` backend (also known as `c10d`): a run whose nodes meet at a coordinator over TCP.

The handler is a `Coordination`: it reports what this node's workers do and passes on what the run decides. All of
that happens in `Client`'s thread; what is here turns the agent's calls into events for it, waits for rounds, and
holds the master port.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from holdfast.errors import HostError, UserError
from holdfast.rendezvous import bounds, endpoints, hosting, participant
from holdfast.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from holdfast.rendezvous.client import Client
from holdfast.rendezvous.coordination import (
    Coordination,
    Mailbox,
    PlaceLost,
    Push,
    Round,
    RoundStopped,
    RunEnded,
    RunOver,
)
from holdfast.rendezvous.dial import Dial
from holdfast.rendezvous.options import TcpOptions
from holdfast.rendezvous.outcome import Failure, Outcome
from holdfast.rendezvous.participant import Participant
from holdfast.rendezvous.remote_store import RemoteStore
from holdfast.rendezvous.restart import RestartPolicy
from holdfast.rendezvous.session import Session
from holdfast.rendezvous.store import PrefixStore
from holdfast.rendezvous.world import NodeFacts, Place, is_loopback

if TYPE_CHECKING:
    from holdfast.rendezvous.participant import Delivery

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29400
_RESOLVE_PATIENCE_S = 5.0

_Arrival = participant.WorldSealed | participant.RunEnded | participant.JoinRefused | Exception


class TcpRendezvousHandler(RendezvousHandler, Coordination):
    """One node of a run on a coordinator."""

    def __init__(
        self,
        backend: str,
        host: str,
        port: int,
        run_id: str,
        options: TcpOptions,
        master: RendezvousStoreInfo | None = None,
    ) -> None:
        """`master` is where the workers meet if the user has fixed it; else it is the node of rank 0."""
        self._master = master
        self._backend = backend
        self._host, self._port = host, port
        self._run_id = run_id
        self._options = options
        self._mailbox = Mailbox()
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._client: Client | None = None
        self._facts = NodeFacts(_node_id())
        self._policy = RestartPolicy()
        self._outcome: Outcome | None = None
        self._held: socket.socket | None = None
        self._last_round = 0
        self._lease_until: float | None = None
        self._lease_sink: Callable[[float | None], None] = lambda until: None

    # The contract that users know.

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        return self.next_round().found

    def is_closed(self) -> bool:
        return self._outcome is not None

    def set_closed(self) -> None:
        self._post(participant.CloseWanted("closed by the user"))

    def num_nodes_waiting(self) -> int:
        return 0  # Whoever waits is announced by a push.

    def shutdown(self) -> bool:
        """Let go of everything. The run ends only with an outcome; without one, this node leaves it."""
        if self._client is not None:
            if self._outcome is None:
                self._post(participant.LeaveRequested())
                self._post(participant.LeaveCompleted())
            self._client.stop()
            self._client = None
        if self._held is not None:
            self._held.close()
            self._held = None
        self._arrivals.put(RendezvousConnectionError(f"the rendezvous of run {self._run_id!r} was shut down"))
        return True

    # What the agent needs.

    def introduce(self, role: str, local_world_size: int, policy: RestartPolicy) -> None:
        self._policy = policy
        self._facts = NodeFacts(
            node_id=self._facts.node_id,
            role=role,
            local_world_size=local_world_size,
            requested_rank=self._options.requested_rank,
        )

    def next_round(self) -> Round:
        if self._outcome is not None:
            raise RunOver(self._outcome)
        client = self._client or self._connect()
        self._drop_stale_arrivals()
        self._hold_port()
        client.post(participant.JoinRequested(self._held_port()))
        return self._await_round(client)

    @property
    def outcome(self) -> Outcome | None:
        return self._outcome

    def report_failure(self, round: int, failure: Failure) -> None:
        self._post(participant.FailureReported(round, bounds.clipped(failure)))

    def report_success(self, round: int, timeout_s: float) -> None:
        self._post(participant.SuccessReported(round))

    def leaving(self) -> None:
        self._post(participant.LeaveRequested())

    def left(self) -> None:
        self._post(participant.LeaveCompleted())
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

    def _connect(self) -> Client:
        if self._port == 0:
            self._host_somewhere()
        self._facts = self._described(self._facts)
        dial = Dial(self._host, self._port, self._run_id, self._options.token, self._options.client_tls())
        session = Session(self._options.session, may_outlive_lease=self._options.continue_when_isolated)
        node = Participant(self._facts, self._options.settings(self._policy), session)
        patience_s = self._options.join_timeout_s
        self._client = Client(dial, node, self._deliver, self._lease, self._fail, self._maybe_host, patience_s)
        self._client.start()
        return self._client

    def _described(self, facts: NodeFacts) -> NodeFacts:
        address = self._options.local_addr or self._find_address()
        return NodeFacts(facts.node_id, 0, address, 0, facts.role, facts.local_world_size, facts.requested_rank)

    def _find_address(self) -> str:
        """The address that reaches the endpoint. A name that does not resolve is given some seconds, not minutes."""
        deadline = time.monotonic() + _RESOLVE_PATIENCE_S
        while True:
            try:
                address = hosting.own_address(self._host, self._port)
                self._warn_of_loopback(address)
                return address
            except socket.gaierror as error:
                problem = f"the name {self._host!r} does not resolve ({error.strerror})"
            except OSError as error:
                problem = f"there is no way to {self._host!r} from this host ({error.strerror})"
            if time.monotonic() >= deadline:
                tried = f"tried for {_RESOLVE_PATIENCE_S:g} s"
                raise RendezvousConnectionError(f"the endpoint {self._host}:{self._port}: {problem}; {tried}")
            time.sleep(0.5)

    def _warn_of_loopback(self, address: str) -> None:
        """Many hosts know themselves by a name that only they take for a loopback address."""
        means_loopback = is_loopback(self._host)
        if is_loopback(address) and not means_loopback and self._options.max_nodes > 1:
            logger.warning(
                "on this host the endpoint's name %r means %s, where no other host can reach it; "
                "if there are others, give an address instead of the name",
                self._host,
                address,
            )

    def _hold_port(self) -> None:
        """A fresh master port for every round, bound and held, so that no round meets what another has left."""
        if self._held is not None:
            self._held.close()
            self._held = None
        try:
            self._held = endpoints.bind_port(self._facts.address)
        except HostError:
            if not self._options.local_addr:
                raise
            # The user says that others reach this node there, which may be so although no interface has the address.
            self._held = endpoints.bind_port("")

    def _held_port(self) -> int:
        assert self._held is not None
        return int(self._held.getsockname()[1])

    def _maybe_host(self) -> None:
        """Nobody listens at the endpoint: if it is ours, start a coordinator."""
        if self._options.is_host is False:
            return
        try:
            with hosting.bind(self._host, self._port) as sock:
                self._start_coordinator(sock)
        except hosting.PortTaken:
            pass  # Somebody was faster.
        except hosting.NotThisHost as error:
            if self._options.is_host:
                raise UserError(f"is_host is true, but this node {error}") from None

    def _host_somewhere(self) -> None:
        """Port 0 is any free port of this host, which nobody else can know: good for one node."""
        if self._options.max_nodes > 1:
            raise UserError(
                f"the endpoint {self._host}:0 names no port, so {self._options.max_nodes} nodes cannot meet there"
            )
        with hosting.bind(self._host, 0) as sock:
            self._port = sock.getsockname()[1]
            self._start_coordinator(sock)

    def _start_coordinator(self, sock: socket.socket) -> None:
        if self._options.speaks_tls and not self._options.tls_cert:
            raise UserError(
                f"nobody listens at {self._host}:{self._port}, and without tls_cert this node cannot start a "
                "coordinator that speaks TLS"
            )
        if hosting.host_at(sock, self._options.coordinator_options()):
            logger.debug("started a coordinator at %s:%d", self._host, self._port)

    def _drop_stale_arrivals(self) -> None:
        """What came before this join, and was not waited for, is about rounds that are over."""
        while not self._arrivals.empty():
            arrival = self._arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival

    def _await_round(self, client: Client) -> Round:
        """The coordinator decides how long a round may take to form; what is bounded here is to be out of its reach."""
        deadline = time.monotonic() + self._options.join_timeout_s
        while True:
            try:
                arrival = self._arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                deadline = self._patience_ends(client)
                continue
            match arrival:
                case participant.WorldSealed(place):
                    return self._as_round(client, place)
                case participant.RunEnded(outcome):
                    raise RunOver(outcome)
                case participant.JoinRefused(reason):
                    raise UserError(f"run {self._run_id!r} does not take this node: {reason}")
                case Exception():
                    raise arrival

    def _patience_ends(self, client: Client) -> float:
        """When to give up unless the coordinator is reached before. Raises if that time has come."""
        now = time.monotonic()
        since = client.reach.since
        if since is None:
            return now + self._options.join_timeout_s
        deadline = since + self._options.join_timeout_s
        if now < deadline:
            return deadline
        raise RendezvousTimeoutError(
            f"no coordinator could be reached at {self._host}:{self._port} within {self._options.join_timeout_s:g} s"
            f"{client.reach.last_problem and f'; the last attempt: {client.reach.last_problem}'}"
        )

    def _as_round(self, client: Client, place: Place) -> Round:
        remote = RemoteStore(client, timedelta(seconds=self._options.read_timeout_s))
        self._last_round = place.round
        store = PrefixStore(f"round/{place.round}", remote)
        master = self._master or RendezvousStoreInfo(place.master_address, place.master_port)
        found = RendezvousInfo(store, place.rank, place.node_count, master)
        return Round(place.round, place.restarts_used, found, place)

    # In the client's thread.

    def _post(self, event: participant.AgentEvent) -> None:
        if self._client is not None:
            self._client.post(event)

    def _lease(self, until: float | None) -> None:
        self._lease_until = until
        self._lease_sink(until)

    def _fail(self, error: Exception) -> None:
        """The client cannot go on. Whoever runs a round stops, and finds out why when it asks for the next."""
        self._arrivals.put(error)
        self._mailbox.put(PlaceLost(self._last_round, str(error)))

    def _deliver(self, delivery: Delivery) -> None:
        match delivery:
            case participant.WorldSealed() | participant.JoinRefused():
                self._arrivals.put(delivery)
            case participant.RoundStopped(round, reason, is_hang):
                self._mailbox.put(RoundStopped(round, reason, is_hang))
            case participant.PlaceLost(round, reason):
                self._mailbox.put(PlaceLost(round, reason))
            case participant.RunEnded(outcome):
                self._outcome = outcome
                self._arrivals.put(delivery)
                self._mailbox.put(RunEnded(outcome))
            case participant.ProgressSeen(joined, wanted, max_nodes, seconds_left):
                self._show_progress(joined, wanted, max_nodes, seconds_left)
            case participant.NoticeSeen(text):
                logger.info("%s", text)

    def _show_progress(self, joined: int, wanted: int, max_nodes: int, seconds_left: float) -> None:
        if joined >= wanted:
            logger.info("%d/%d joined, last call for %d more", joined, max_nodes, max_nodes - joined)
            return
        left = _short(seconds_left)
        logger.info("%d/%d joined, waiting for %d (timeout in %s)", joined, wanted, wanted - joined, left)


def _short(seconds: float) -> str:
    return f"{seconds / 60:.0f} m" if seconds >= 90 else f"{seconds:.0f} s"


def _node_id() -> str:
    return f"{os.uname().nodename}-{os.getpid()}-{os.urandom(2).hex()}"


def create_handler(params: RendezvousParameters) -> TcpRendezvousHandler:
    host, port = endpoints.parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    options = TcpOptions.from_parameters(params)
    return TcpRendezvousHandler(params.backend, host, port, params.run_id, options)


def create_static_handler(
    params: RendezvousParameters, master_addr: str, master_port: int, coordinator_port: int
) -> TcpRendezvousHandler:
    """Nodes whose number and ranks the user has fixed, who share failures, restarts and the outcome."""
    options = replace(TcpOptions.from_parameters(params), min_nodes=params.max_nodes)
    master = RendezvousStoreInfo(master_addr, master_port)
    return TcpRendezvousHandler("static", master_addr, coordinator_port, params.run_id, options, master)
