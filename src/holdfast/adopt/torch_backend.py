"""`torchrun --rdzv-backend holdfast`: torch's own agent, whose nodes meet at holdfast's coordinator.

torch finds `backend` as an entry point. Its agent asks at every turn whether nodes wait (`num_nodes_waiting`) and then
restarts its workers. Here the answer is yes as soon as the coordinator has stopped the round: a node was lost or has
joined, or the workers of another node have failed. Restarts are counted by torch's agents, each for itself, so the
coordinator's policy allows any number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from holdfast import loop
from holdfast.failures.records import Failure
from holdfast.rendezvous import api
from holdfast.rendezvous.handler import CoordinatorHandler, create_tcp_handler
from holdfast.rendezvous.membership import model
from holdfast.rendezvous.membership.restart_policy import RestartPolicy

NAME = "holdfast"

_ANY_NUMBER = 1_000_000
_CLOSE_PATIENCE_S = 5.0


def backend() -> Callable[[Any], Any]:
    """What torch calls to get the function that creates handlers."""
    return create_handler


def create_handler(params: Any) -> Any:
    torchs: Any = import_module("torch.distributed.elastic.rendezvous")  # Of the torchrun that calls this.
    own = api.RendezvousParameters(
        "tcp", params.endpoint, params.run_id, params.min_nodes, params.max_nodes, params.local_addr, **params.config
    )
    inner = create_tcp_handler(own)
    inner.introduce("default", 1, RestartPolicy(_ANY_NUMBER))

    class Handler(TorchHandler, torchs.RendezvousHandler):  # type: ignore[misc]  # torch has no types here
        pass

    return Handler(inner, torchs)


class TorchHandler:
    """With the methods that torch's agent calls. `torchs` is torch's package of that name, whose errors it expects."""

    def __init__(self, inner: CoordinatorHandler, torchs: Any) -> None:
        self._inner, self._torchs = inner, torchs
        self._round = 0
        self._is_round_over = True

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> Any:
        if not self.num_nodes_waiting() and self._round:
            # The agent begins anew by itself: its workers have failed.
            failed = Failure(self._inner.node_id[:64], text="the workers of this node failed", round=self._round)
            self._inner.report_failure(self._round, failed)
        try:
            found = self._inner.next_rendezvous()
        except api.RendezvousError as error:
            raise getattr(self._torchs, type(error).__name__, self._torchs.RendezvousError)(str(error)) from error
        self._round, self._is_round_over = self._inner.last_round, False
        where = found.bootstrap_store_info
        master = self._torchs.RendezvousStoreInfo(where.master_addr, where.master_port)
        return self._torchs.RendezvousInfo(found.store, found.rank, found.world_size, master)

    def num_nodes_waiting(self) -> int:
        for push in self._inner.take():
            self._is_round_over |= isinstance(push, model.Stop | model.PlaceLost | model.Ended)
        return int(self._is_round_over)

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def shutdown(self) -> bool:
        """torch's agent calls this when its part is over, whether well or badly, and not after a signal. The run is
        closed, as torch's own backends do: a node that fails for good takes the others with it."""
        self._inner.set_closed()
        deadline = time.monotonic() + _CLOSE_PATIENCE_S
        while not self._inner.is_closed() and time.monotonic() < deadline:
            loop.wait_readable([self._inner.fileno()], deadline - time.monotonic(), new_signals_only=True)
            self.num_nodes_waiting()
        return self._inner.shutdown()
