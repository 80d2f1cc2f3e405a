"""The workers of an agent that a user has written: its four hooks start, watch, stop and release them.

Such hooks were written against more than one contract: `_stop_workers` and `_shutdown` have had an argument
`is_restart`, and `_shutdown` has not always had `timeout`. A hook is given what it takes. A hook may block: the agent
then does what its author wants, and the node keeps its place.
"""

from __future__ import annotations

import inspect
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.agent.model import RunResult, WorkerGroup
from holdfast.agent.workers import Workers
from holdfast.errors import HostError
from holdfast.loop import in_hook

_NOT_HOOKED = (
    "prepare", "begin_start", "examine", "poll_stop", "unkillable", "killed_ranks", "advance", "fileno", "unsent_fds",
    "snapshots",
    "snapshot_order",
    "when_gone",
    "look_at_peers",
    "peers",
)  # fmt: skip


class HookWorkers(Workers):
    """`hooks` are methods of the agent, by their names. The `others` do what no hook replaces."""

    def __init__(
        self, group: WorkerGroup, hooks: Mapping[str, Callable[..., Any]], others: Workers | None = None
    ) -> None:
        self._group, self._hooks, self._others = group, hooks, others or Workers()
        for name in _NOT_HOOKED:
            setattr(self, name, getattr(self._others, name))

    def poll_start(self) -> Mapping[int, Any] | RunResult | None:
        if (start := self._hooks.get("_start_workers")) is None:
            return self._others.poll_start()
        try:
            ids: Mapping[int, Any] = _call(start, self._group)
            return ids
        except (OSError, HostError) as error:
            return self._others.refused(error)

    def look(self) -> RunResult:
        monitor = self._hooks.get("_monitor_workers")
        return self._others.look() if monitor is None else _call(monitor, self._group)

    def begin_stop(self, at_once: bool) -> None:
        """Hooks cannot cut a grace short. Whether a restart follows is not known yet: hooks with an argument
        `is_restart` get True, so that they keep what the next round may need. `_shutdown` follows at the end."""
        stop = self._hooks.get("_stop_workers")
        if stop is None or (at_once and self._others.context is not None):
            self._others.begin_stop(at_once)
        else:
            _call(stop, self._group, is_restart=True)

    def shutdown(self, grace_s: float, number: signal.Signals | None = None) -> None:
        if (shutdown := self._hooks.get("_shutdown")) is None:
            self._others.shutdown(grace_s, number)
        else:
            _call(shutdown, *([] if number is None else [number]), timeout=grace_s)

    def deadline(self) -> float | None:
        """A hook can only be asked again and again."""
        known = self._others.deadline()
        if "_monitor_workers" not in self._hooks:
            return known
        ask_at = time.monotonic() + self._group.spec.monitor_interval
        return ask_at if known is None else min(known, ask_at)


def _call(hook: Callable[..., Any], *args: Any, **offered: Any) -> Any:
    """Call with `args`, and with the named arguments that the hook accepts."""
    known = inspect.signature(hook).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values()):
        offered = {name: value for name, value in offered.items() if name in known}
    with in_hook():
        return hook(*args, **offered)
