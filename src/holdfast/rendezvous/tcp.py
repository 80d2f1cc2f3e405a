"""The `tcp` backend (also known as `c10d`): a run whose nodes meet at a coordinator over TCP.

Whoever finds nobody at the endpoint, and is on its host, starts a coordinator there (`hosting`).
"""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from datetime import timedelta

from holdfast.errors import UserError
from holdfast.rendezvous import endpoints, hosting
from holdfast.rendezvous.api import RendezvousParameters, RendezvousStoreInfo
from holdfast.rendezvous.coordinated import CoordinatedHandler
from holdfast.rendezvous.dial import Dial
from holdfast.rendezvous.legacy_client import Client
from holdfast.rendezvous.participant import Participant
from holdfast.rendezvous.remote_store import RemoteStore
from holdfast.rendezvous.session import Session
from holdfast.rendezvous.store import Store
from holdfast.rendezvous.tcp_options import TcpOptions
from holdfast.rendezvous.world import Place

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29400


class TcpRendezvousHandler(CoordinatedHandler):
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
        super().__init__(backend, run_id, options)
        self._host, self._port = host, port
        self._options = options
        self._master = master
        self._client: Client | None = None

    def _start_link(self) -> Client:
        if self._port == 0:
            self._host_somewhere()
        self._describe([(self._host, self._port)])
        dial = Dial(self._host, self._port, self._run_id, self._options.token, self._options.client_tls())
        session = Session(self._options.session, may_outlive_lease=self._options.continue_when_isolated)
        node = Participant(self._facts, self._options.settings(self._policy), session)
        patience_s = self._options.join_timeout_s
        self._client = Client(dial, node, self._deliver, self._lease, self._fail, self._maybe_host, patience_s)
        self._client.start()
        return self._client

    def _open_store(self) -> Store:
        assert self._client is not None
        return RemoteStore(self._client, timedelta(seconds=self._options.read_timeout_s))

    @property
    def _endpoint(self) -> str:
        return endpoints.endpoint_text(self._host, self._port)

    def _unreached(self) -> str:
        return f"no coordinator could be reached at {self._endpoint}"

    def _master_of(self, place: Place) -> RendezvousStoreInfo:
        return self._master or super()._master_of(place)

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
                f"the endpoint {self._endpoint} names no port, so {self._options.max_nodes} nodes cannot meet there"
            )
        with hosting.bind(self._host, 0) as sock:
            self._port = sock.getsockname()[1]
            self._start_coordinator(sock)

    def _start_coordinator(self, sock: socket.socket) -> None:
        if self._options.speaks_tls and not self._options.tls_cert:
            raise UserError(
                f"nobody listens at {self._endpoint}, and without tls_cert this node cannot start a "
                "coordinator that speaks TLS"
            )
        if hosting.host_at(sock, self._options.coordinator_options()):
            logger.debug("started a coordinator at %s", self._endpoint)


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
