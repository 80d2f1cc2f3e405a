"""A group of processes that call a function."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from holdfast.errors import UserError
from holdfast.process.spawner import command
from holdfast.process.spawner.client import SpawnerLink
from holdfast.process.spawner.wire import Peers, memory_file
from holdfast.process.workers.group import PContext


class MultiprocessContext(PContext):
    """Processes that call a function and hand back what it returns."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        *others: Any,
        **more: Any,
    ) -> None:
        if start_method not in ("spawn", "fork", "forkserver"):
            raise UserError(f"unknown start method {start_method!r}; known methods: spawn, fork, forkserver")
        self._is_fork = start_method == "fork"
        self._calls = {rank: (entrypoint, tuple(values)) for rank, values in args.items()}
        self._payloads = {} if self._is_fork else {rank: command.pickled_call(*self._calls[rank]) for rank in args}
        if self._is_fork:  # A spawner that is older than this call does not hold the function.
            more["link"] = None
        super().__init__(name, entrypoint, args, envs, *others, start_method=start_method, **more)
        self._peers = Peers()
        self._resources.callback(self._peers.close)

    def _make_link(self) -> SpawnerLink:
        return SpawnerLink.fork(self._calls) if self._is_fork else super()._make_link()

    def _describe(self, rank: int, fds: dict[str, int]) -> tuple[str, tuple[str, ...]]:
        fds["HOLDFAST_BLACKBOX"] = os.dup(self._slots[rank].blackbox_fd)
        if self.nprocs > 1:
            fds |= self._peers.descriptors(is_last=rank == self.nprocs - 1)
        if self._is_fork:
            return "memory", ()
        fds["HOLDFAST_PAYLOAD"] = memory_file(self._payloads[rank])
        return "exec" if self._template is None else "warm", command.function_command()

    def _dismiss_returned(self) -> None:
        self._peers.dismiss()
