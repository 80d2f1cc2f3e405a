"""The contract between rendezvous backends and agents.

A backend is a creator function, registered under a name, that turns `RendezvousParameters` into a
`RendezvousHandler`. The agent asks the handler for one round after another; each answer, a `RendezvousInfo`,
says which rank this node has, how many nodes there are, and where the workers find each other.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast.errors import UserError
from holdfast.frozen import dataclass, frozen
from holdfast.rendezvous import endpoints

if TYPE_CHECKING:
    from holdfast.rendezvous.store import Store


class RendezvousError(Exception):
    """Base of all errors of a rendezvous. `run_report` is the agent's report of a run that the error has ended."""

    run_report: Any = None


class RendezvousClosedError(RendezvousError):
    """The run is over: there are no further rounds."""


class RendezvousTimeoutError(RendezvousError):
    """A round did not form in time."""


class RendezvousConnectionError(RendezvousError):
    """The backend cannot be reached."""


class RendezvousStateError(RendezvousError):
    """The data that the backend has stored cannot be read."""


class RendezvousGracefulExitError(RendezvousError):
    """This node is not needed and is asked to leave; that is not a failure."""


def is_kind(error: BaseException, kind: type[RendezvousError]) -> bool:
    """Whether the error is of that kind, or torch's of the same name. torch is not imported for that."""
    return any(each.__name__ == kind.__name__ for each in type(error).__mro__)


class DefaultTimeout(int):
    """The `timeout` that `LaunchConfig` adds if the user gave none. A plain int is the user's own."""


_TRUTH = dict.fromkeys(("1", "true", "t", "yes", "y"), True) | dict.fromkeys(("0", "false", "f", "no", "n"), False)


def truth_of(value: Any) -> bool:
    """The truth of True, 1, "yes" and the like. Raises KeyError for any other value."""
    return _TRUTH[str(value).lower() if isinstance(value, int | str) else ""]


class RendezvousParameters:
    """The input of a creator: which run meets where, how many nodes it has, and the backend's own settings. These come
    from the command line as text or from a program as values; `get_as_bool` and `get_as_int` accept both."""

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise UserError(f"the rendezvous backend has no name: {backend!r}")
        if min_nodes < 1:
            raise UserError(f"min_nodes is {min_nodes}, but must be at least 1")
        if max_nodes < min_nodes:
            raise UserError(f"max_nodes is {max_nodes}, but must be at least min_nodes, which is {min_nodes}")
        self.backend, self.endpoint, self.run_id = backend, endpoint, run_id
        self.min_nodes, self.max_nodes, self.local_addr = min_nodes, max_nodes, local_addr
        self.config = kwargs

    def get(self, key: str, default: Any = None) -> Any:
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """The setting as a truth value; None stays None."""
        value = self.get(key, default)
        try:
            return None if value is None else truth_of(value)
        except KeyError:
            raise UserError(f"rendezvous setting {key!r} is {value!r}, which is neither true nor false") from None

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """The setting as a whole number; None stays None."""
        value = self.get(key, default)
        try:
            return None if value is None else int(value)
        except ValueError:
            raise UserError(f"rendezvous setting {key!r} is {value!r}, which is not a whole number") from None


@dataclass(slots=True, weakref_slot=True)
class RendezvousStoreInfo:
    """Where the workers of a round find each other: what becomes MASTER_ADDR and MASTER_PORT."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"

    master_addr: str
    master_port: int

    @staticmethod
    def build(rank: int, store: Store, local_addr: str | None, server_port: int | None = None) -> RendezvousStoreInfo:
        """Rank 0 publishes its address and port in the round's store; every rank reads them there. Without a port rank
        0 picks a free one and holds it, bound but not listening, for as long as the object that it gets back lives: a
        port that is released before the workers use it may be lost."""
        addr_key, port_key = RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY
        held = None
        if rank == 0:
            import socket

            if server_port is None:
                held = endpoints.bind_port()
                server_port = held.getsockname()[1]
            store.set(addr_key, local_addr or socket.getfqdn())
            store.set(port_key, str(server_port))
        built = RendezvousStoreInfo(store.get(addr_key).decode(), int(store.get(port_key)))
        if held is not None:
            weakref.finalize(built, held.close)
        return built


@frozen
class RendezvousInfo:
    """One round as this node sees it. `store` is for its agents, `bootstrap_store_info` for its workers."""

    store: Store
    rank: int
    world_size: int
    bootstrap_store_info: RendezvousStoreInfo


class RendezvousHandler(ABC):
    """An agent's view of one run's rendezvous."""

    @abstractmethod
    def get_backend(self) -> str:
        """The name that this handler's backend is registered under."""

    @abstractmethod
    def get_run_id(self) -> str:
        """The run that this handler belongs to."""

    @property
    def use_agent_store(self) -> bool:
        """Whether the agents host a store at MASTER_ADDR:MASTER_PORT that workers connect to as clients."""
        return False

    @property
    def has_fixed_world(self) -> bool:
        """Whether the world is known from the start, its nodes alike, and nothing is shared at run time: then no agent
        asks whether nodes are waiting, and no node can wait for another."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Block until this node is a member of a new round, or raise a `RendezvousError`."""

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the run is over. Other nodes may learn of it later: do not use it to synchronize."""

    @abstractmethod
    def set_closed(self) -> None:
        """End the run: there will be no further rounds."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """How many nodes ask to be let in; if any, the agent should ask for the next round."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Close everything that the handler holds; True if that went well."""


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Which backend name belongs to which creator."""

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._creators

    def names(self) -> list[str]:
        return sorted(self._creators)

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Make `creator` the backend of that name; a name never changes hands."""
        if not backend:
            raise UserError(f"a rendezvous backend needs a name, not {backend!r}")
        taken_by = self._creators.setdefault(backend, creator)
        if taken_by != creator:
            raise UserError(f"rendezvous backend {backend!r} is taken by {taken_by!r}; {creator!r} needs another name")

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        creator = self._creators.get(params.backend)
        if creator is None:
            available = ", ".join(self.names()) or "none"
            raise UserError(f"unknown rendezvous backend {params.backend!r}; available: {available}")
        handler = creator(params)
        if handler.get_backend() != params.backend:
            calls_itself = f"created a handler that calls itself {handler.get_backend()!r}"
            raise RuntimeError(f"rendezvous backend {params.backend!r} {calls_itself}")
        return handler


rendezvous_handler_registry = RendezvousHandlerRegistry()
