"""What an agent does with its workers: the hooks that others write, and how they are called.

The four abstract hooks of `WorkerHooks` make a whole agent. They may block. Starting and stopping are events for an
agent that can do better: `_begin_start` and `_begin_stop` return at once, and the loop asks `_poll_start` and
`_poll_stop` after each `_wait_for_change`, so that it acts on signals and pushes meanwhile.

Agents of users were written against more than one contract: `_stop_workers` and `_shutdown` have had an argument
`is_restart`, and `_shutdown` has not always had `timeout`. A hook is given what it takes (`call`).

A hook may block. Meanwhile the agent is not stuck: it does what its author wants, so the node keeps its place.
"""

from __future__ import annotations

import abc
import inspect
import signal
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast import loop
from holdfast.agent.model import RunResult, WorkerGroup

T = TypeVar("T")

DEFAULT_ROLE = "default"


class ElasticAgent(abc.ABC):
    """Owns the workers of one node."""

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to the end, through restarts and changes of membership."""

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The group of workers as it stands."""


class WorkerHooks(ElasticAgent):
    """The workers' side of an agent."""

    @abc.abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start one worker for each local rank; returns their ids."""

    @abc.abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop every worker of the group and everything they started."""

    @abc.abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """How the workers stand at this moment. Only looks."""

    @abc.abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        """Stop the workers with that signal and release everything. Called once at the end, may find nothing."""

    def _wait_for_change(self, worker_group: WorkerGroup, pushes_fd: int, timeout_s: float | None) -> None:
        """Return when it may be worth asking for the state of the workers, when the descriptor of the pushes can
        be read, or when the time is up. A signal must cut it short."""
        interval_s = worker_group.spec.monitor_interval
        loop.wait_readable([pushes_fd], interval_s if timeout_s is None else min(interval_s, timeout_s))

    def _examine_workers(self, worker_group: WorkerGroup) -> RunResult | None:
        """The run hangs: see where these workers are. The result if the cause is among them."""
        return None

    def _unkillable(self) -> tuple[int, ...]:
        """After a stop: the pids that even SIGKILL did not end."""
        return ()

    def _killed_ranks(self) -> tuple[int, ...]:
        """After a stop: the global ranks that did not end by themselves within the grace period."""
        return ()

    def _settle(self, result: RunResult) -> RunResult:
        """The result with what is known only after the workers were stopped."""
        return result

    # Starting and stopping as events; here through the hooks, which block.

    def _begin_start(self, group: WorkerGroup) -> None:
        """Begin to start the workers. The hook does it all."""

    def _poll_start(self, group: WorkerGroup) -> dict[int, Any] | None:
        """The ids of the workers once all are started; None before."""
        return call(self._start_workers, group)

    def _begin_stop(self, group: WorkerGroup, at_once: bool) -> None:
        """Begin to stop the workers, or end the grace of a stop that has begun.

        A hook cannot hurry; if this node has lost its place, the spawner kills the workers. Whether a restart follows
        is not known yet. Hooks with an argument `is_restart` get True, so that they keep what the next round may need;
        the agent calls `_shutdown` at the end in any case."""
        call(self._stop_workers, group, is_restart=True)

    def _poll_stop(self, group: WorkerGroup) -> bool:
        """Whether the workers are stopped."""
        return True


def call(hook: Callable[..., T], *args: Any, **offered: Any) -> T:
    """Call with `args`, and with those of the named arguments that the hook knows."""
    known = inspect.signature(hook).parameters if offered else {}
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    with loop.in_hook():
        return hook(*args, **{name: value for name, value in offered.items() if takes_any or name in known})
