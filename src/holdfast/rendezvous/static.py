"""Rendezvous for worlds that are known from the start: no node is waited for, and no other is let in.

`standalone` is one node that picks its own master port. `static` has its ranks from the user, and its workers get the
master address and port exactly as the user wrote them, so nothing here binds or listens there. Every round has a store
of its own.

Neither handler opens a connection. Several static nodes share failures, restarts and the outcome through a coordinator
on the master's host, at `coordinator_port` (the master port + 1, unless it is given): then the handler is the tcp
backend's, with a fixed world. With `coordinator_port=off` they run side by side, as one node alone does.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from holdfast.errors import UserError
from holdfast.rendezvous import api, endpoints
from holdfast.rendezvous.api import DefaultTimeout, RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from holdfast.rendezvous.membership.model import AgentStore
from holdfast.rendezvous.store import InProcessStore

JOIN_TIMEOUT_S = 600.0  # If none is given.


class StaticTCPRendezvous(api.RendezvousHandler):
    """A node with a fixed rank among a fixed number of nodes. With master port 0 each round gets a fresh one, which is
    held, bound but not listening, until the next round or shutdown. Several nodes share nothing: each agent restarts
    its own workers, counts its own restarts, and learns of another node's failure only when its own workers do. The
    agent may ask for a round in one thread while another shuts the handler down: one lock covers both."""

    backend = "static"
    snapshot_every_s = 0.0  # How often a step is written to disk, on one node; 0: never.

    def __init__(
        self, master_addr: str, master_port: int, rank: int, world_size: int, run_id: str,
        timeout: float = JOIN_TIMEOUT_S,
    ) -> None:  # fmt: skip
        self._master = RendezvousStoreInfo(master_addr, master_port)
        self._run_id = run_id
        self._rank, self._world_size = rank, world_size
        self._timeout = timedelta(seconds=timeout)
        # How long the node may wait for its own checks. The default of LaunchConfig is about stores.
        self.join_timeout_s = JOIN_TIMEOUT_S if type(timeout) is DefaultTimeout else float(timeout)
        self._lock = threading.Lock()
        self._held, self._held_free = endpoints.HeldPort(), endpoints.HeldPort()
        self._is_closed = False
        self._round = 0

    def get_backend(self) -> str:
        return self.backend

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def has_fixed_world(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        with self._lock:
            if self._is_closed:
                what = f"rendezvous {self._run_id!r} ({self.backend})"
                raise api.RendezvousClosedError(f"{what} is closed after round {self._round}")
            master = self._master
            if not master.master_port:
                for each in (self._held, self._held_free):
                    each.renew(master.master_addr)
                master = RendezvousStoreInfo(master.master_addr, self._held.number)
            self._round += 1
            return RendezvousInfo(InProcessStore(self._timeout), self._rank, self._world_size, master)

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        with self._lock:
            self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self.set_closed()
        for each in (self._held, self._held_free):
            each.release()
        return True


class StandaloneRendezvous(StaticTCPRendezvous):
    """One node on its own. `agent_store` says whether its agent serves torch's store at the master port."""

    backend = "standalone"

    def __init__(
        self, run_id: str, timeout_s: float = JOIN_TIMEOUT_S, agent_store: AgentStore = AgentStore.AUTO
    ) -> None:
        super().__init__("127.0.0.1", 0, 0, 1, run_id, timeout_s)
        self.agent_store = agent_store

    @property
    def free_port(self) -> int:
        """Of the present round."""
        return self._held_free.number

    def listen_at_master(self) -> int:
        return self._held.listen()


def create_standalone_handler(params: RendezvousParameters) -> StandaloneRendezvous:
    """The backend `standalone`. It meets no other node, so it needs no endpoint and does not look at one."""
    given = _settings_alone(params)
    if params.max_nodes != 1:
        raise UserError(f"backend 'standalone' is for one node, not for max_nodes {params.max_nodes}")
    _check_rank(params, given.get("rank", 0))
    made = StandaloneRendezvous(params.run_id, given["join_timeout"], given.get("agent_store", AgentStore.AUTO))
    made.snapshot_every_s = given.get("snapshot_every", 0.0)
    return made


def create_rdzv_handler(params: RendezvousParameters) -> api.RendezvousHandler:
    """The backend `static`: `max_nodes` nodes, this one with the rank of the setting `rank`."""
    from holdfast.rendezvous import settings

    rows = settings.rows_of("static")
    rank = _check_rank(params, rows["rank"].read(params.config))
    master = RendezvousStoreInfo(*master_of(params))
    if rows["coordinator_port"].read(params.config) != "off" and params.max_nodes > 1:
        from holdfast.rendezvous import handler

        return handler.create_handler_at(params, *coordinator_address(params), master)
    given, address, port = _settings_alone(params), master.master_addr, master.master_port
    made = StaticTCPRendezvous(address, port, rank, params.max_nodes, params.run_id, given["join_timeout"])
    made.snapshot_every_s = given.get("snapshot_every", 0.0)
    return made


def coordinator_address(params: RendezvousParameters) -> tuple[str, int]:
    """Where the nodes of a static run meet."""
    from holdfast.rendezvous import settings

    host, master_port = master_of(params)
    port = settings.rows_of("static")["coordinator_port"].read(params.config)
    if port == "off":
        raise UserError("coordinator_port=off: this static run has no coordinator")
    if port is None and master_port == 65535:
        raise UserError(f"there is no port after {master_port} for the coordinator; set coordinator_port")
    return host, port or master_port + 1


def _settings_alone(params: RendezvousParameters) -> dict[str, Any]:
    """Of a node that meets no other. A run on one machine, which is given none as a rule, does not import the table."""
    usual = {
        "join_timeout": next((each for each in params.config.values() if type(each) is DefaultTimeout), JOIN_TIMEOUT_S)
    }
    if all(type(each) is DefaultTimeout for each in params.config.values()):
        return usual
    from holdfast.rendezvous import settings

    return usual | settings.given_alone(params.backend, params.config)


def _check_rank(params: RendezvousParameters, rank: int | None) -> int:
    nodes = params.max_nodes
    if rank is None:
        raise UserError(f"backend {params.backend!r} needs the rank of this node (setting 'rank')")
    if not 0 <= rank < nodes:
        raise UserError(f"rank {rank} is out of range: with max_nodes {nodes} it must be from 0 to {nodes - 1}")
    return rank


def master_of(params: RendezvousParameters) -> tuple[str, int]:
    endpoint = (params.endpoint or "").strip()
    if not endpoint:
        raise UserError(f"backend {params.backend!r} needs an endpoint host:port, but it is empty")
    host, port = endpoints.parse_rendezvous_endpoint(endpoint, -1)
    if port == -1:
        raise UserError(f"rendezvous endpoint {endpoint!r} has no port; write host:port")
    if port == 0:
        raise UserError(f"rendezvous endpoint {endpoint!r}: workers cannot meet at port 0; name a real one")
    return host, port
