"""Rendezvous for worlds that are known from the start: no node is waited for, and no other is let in.

`standalone` is one node that picks its own master port, a fresh one for each round. `static` has its ranks
from the user, and its master address and port are given to the workers exactly as the user wrote them, so
nothing here binds or listens there.

Every round has a store of its own: what one life of the workers has left behind is not seen by the next.

Neither handler opens a connection. Several static nodes share failures, restarts and the outcome through a
coordinator: then the handler is the tcp backend's, with a fixed world. Without one they run side by side, if the
user asks for that (`coordinator_port=off`).
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Iterable
from datetime import timedelta

from holdfast.errors import UserError
from holdfast.rendezvous import endpoints
from holdfast.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from holdfast.rendezvous.store import InProcessStore

__all__ = [
    "StandaloneRendezvous",
    "StaticTCPRendezvous",
    "create_rdzv_handler",
    "create_standalone_handler",
]

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 600

_LOOPBACK = "127.0.0.1"

_SETTINGS = frozenset({"rank", "timeout", "coordinator_port"})


class _KnownWorldRendezvous(RendezvousHandler):
    """Rounds in a world whose size and ranks never change.

    The agent may ask for a round in one thread while another shuts the handler down: one lock covers both.
    """

    backend: str

    def __init__(self, run_id: str, rank: int, world_size: int, timeout_s: float) -> None:
        self._run_id = run_id
        self._rank = rank
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._is_closed = False
        self._round = 0

    @abstractmethod
    def _next_master(self) -> RendezvousStoreInfo:
        """Where the workers of the round that is about to begin find each other."""

    def _release(self) -> None:
        """Give back what the current round holds, if it holds anything."""

    def get_backend(self) -> str:
        return self.backend

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def has_fixed_world(self) -> bool:
        return True

    @property
    def round(self) -> int:
        """The number of the current round; 0 before the first."""
        return self._round

    def next_rendezvous(self) -> RendezvousInfo:
        with self._lock:
            if self._is_closed:
                raise RendezvousClosedError(
                    f"rendezvous {self._run_id!r} ({self.backend}) is closed after round {self._round}"
                )
            master = self._next_master()
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
        with self._lock:
            self._is_closed = True
            self._release()
        return True


class StandaloneRendezvous(_KnownWorldRendezvous):
    """One node on its own.

    Its master port is held, bound but not listening, until the next round or shutdown.
    """

    backend = "standalone"

    def __init__(self, run_id: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(run_id, rank=0, world_size=1, timeout_s=timeout_s)
        self._held = endpoints.HeldPort()

    def _next_master(self) -> RendezvousStoreInfo:
        self._held.renew(_LOOPBACK)
        return RendezvousStoreInfo(_LOOPBACK, self._held.number)

    def _release(self) -> None:
        self._held.release()


class StaticTCPRendezvous(_KnownWorldRendezvous):
    """A node with a fixed rank among a fixed number of nodes.

    With more than one node nothing is shared between them: each agent restarts its own workers, counts its
    own restarts, and learns of another node's failure only when its own workers do.
    """

    backend = "static"

    def __init__(
        self,
        master_addr: str,
        master_port: int,
        rank: int,
        world_size: int,
        run_id: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(run_id, rank, world_size, timeout_s)
        self._master = RendezvousStoreInfo(master_addr, master_port)

    def _next_master(self) -> RendezvousStoreInfo:
        return self._master


def create_standalone_handler(params: RendezvousParameters) -> StandaloneRendezvous:
    """The backend `standalone`. It meets no other node, so it needs no endpoint and does not look at one."""
    _check_settings(params)
    if params.max_nodes != 1:
        raise UserError(f"backend 'standalone' is for one node, not for max_nodes {params.max_nodes}")
    _goes_without_coordinator(params)
    if params.get("rank") is not None:
        _rank(params)
    return StandaloneRendezvous(params.run_id, _timeout_s(params))


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The backend `static`: `max_nodes` nodes, this one with the rank of the setting `rank`.

    The agents of several nodes meet at a coordinator on the master's host, so that failures, restarts and the
    outcome are shared. `coordinator_port` is its port; the default is the master port + 1. With `off` each agent
    runs its own node with its fixed rank, and nothing is shared. One node needs no coordinator.
    """
    rank = _rank(params)
    master_addr, master_port = _master(params)
    if not _goes_without_coordinator(params) and params.max_nodes > 1:
        from holdfast.rendezvous import handler

        port = int(params.get("coordinator_port") or master_port + 1)
        if port > 65535:
            raise UserError(f"there is no port after {master_port} for the coordinator; set coordinator_port")
        return handler.create_static_handler(params, master_addr, master_port, port)
    _check_settings(params)
    return StaticTCPRendezvous(master_addr, master_port, rank, params.max_nodes, params.run_id, _timeout_s(params))


def _check_settings(params: RendezvousParameters) -> None:
    """People keep settings in scripts and environments that serve several backends, so those of others are no mistake
    here, but they have nothing to act on."""
    others = params.config.keys() - _SETTINGS
    if not others:
        return
    unknown = others - _settings_of_others()
    if unknown:
        raise UserError(f"unknown rendezvous setting {_listed(unknown)}; backend {params.backend!r} has no such thing")
    log.warning("backend %r makes no use of setting %s", params.backend, _listed(others))


def _settings_of_others() -> frozenset[str]:
    from holdfast.rendezvous import options
    from holdfast.rendezvous.etcd import options as etcd_options

    tables = (options.KEYS, etcd_options.KEYS)
    return frozenset(name for keys in tables for key, aliases in keys.items() for name in (key, *aliases))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def _rank(params: RendezvousParameters) -> int:
    rank = params.get_as_int("rank")
    if rank is None:
        raise UserError(f"backend {params.backend!r} needs the rank of this node (setting 'rank')")
    if not 0 <= rank < params.max_nodes:
        raise UserError(
            f"rank {rank} is out of range: with max_nodes {params.max_nodes} it must be "
            f"from 0 to {params.max_nodes - 1}"
        )
    return rank


def _timeout_s(params: RendezvousParameters) -> int:
    timeout_s = params.get_as_int("timeout", DEFAULT_TIMEOUT_S)
    if timeout_s is None:
        return DEFAULT_TIMEOUT_S
    if timeout_s <= 0:
        raise UserError(f"rendezvous setting 'timeout' is {timeout_s} s, but must be above 0")
    return timeout_s


def _master(params: RendezvousParameters) -> tuple[str, int]:
    endpoint = (params.endpoint or "").strip()
    if not endpoint:
        raise UserError(f"backend {params.backend!r} needs an endpoint host:port, but it is empty")
    host, port = endpoints.parse_rendezvous_endpoint(endpoint, -1)
    if port == -1:
        raise UserError(f"rendezvous endpoint {endpoint!r} has no port; write host:port")
    if port == 0:
        raise UserError(f"rendezvous endpoint {endpoint!r}: workers cannot meet at port 0; name a real one")
    return host, port


def _goes_without_coordinator(params: RendezvousParameters) -> bool:
    value = params.get("coordinator_port")
    if value is None or value == "off":
        return value is not None
    if not endpoints.try_parse_port(str(value)):
        raise UserError(
            f"rendezvous setting 'coordinator_port' is {value!r}, but must be a port from 1 to 65535, or off"
        )
    return False
