"""A program that launches workers as a user's would, for tests that send signals to it or kill it.

    launch.py '{"nproc": 2, "entry": ["python", "worker.py", ...], ...}'

It tells the mailbox what its rendezvous is doing, and prints at the end, as one line of JSON, how the launch ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from datetime import timedelta
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import msgspec

from holdfast.agent import exchange
from holdfast.launcher import LaunchConfig, elastic_launch
from holdfast.process.output.logs import DefaultLogsSpecs
from holdfast.rendezvous.api import RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry
from holdfast.rendezvous.store import InProcessStore
from tests import entrypoints

ORDER: dict[str, Any] = json.loads(sys.argv[1])


def tell(text: str) -> None:
    entrypoints.tell(ORDER["mailbox"], text)


class TellingStore(InProcessStore):
    def add(self, key: str, amount: int) -> int:
        if amount and "terminal_state" in key:
            tell("at the barrier")
        return super().add(key, amount)


class Handler:
    """Written for no launcher in particular: it has the methods that agents call, and derives from nothing."""

    def __init__(self) -> None:
        self.shutdowns = 0
        self.joins = 0
        self.is_asked = False

    def get_backend(self) -> str:
        return "told"

    def get_run_id(self) -> str:
        return "told-run"

    def next_rendezvous(self) -> RendezvousInfo:
        self.joins += 1
        if self.joins == ORDER.get("block_in_join"):
            tell("joining")
            threading.Event().wait()
        store = TellingStore(timedelta(seconds=60))
        if ORDER.get("nodes", 1) == 2:  # The other node is somewhere else, and never finishes.
            store.set(exchange.ROLE_INFO.format(1), msgspec.json.encode(exchange.RoleInfo("default_role", 1, 1)))
        return RendezvousInfo(store, 0, ORDER.get("nodes", 1), RendezvousStoreInfo("127.0.0.1", 29511))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        """Agents ask as soon as all workers run."""
        if ORDER.get("tell_running") and not self.is_asked:
            self.is_asked = True
            tell("running - 0")
        path = ORDER.get("newcomer")
        return int(bool(path and self.joins == 1 and os.path.exists(path)))

    def shutdown(self) -> bool:
        self.shutdowns += 1
        return True


def own_handler(number: int, frame: Any) -> None:
    """The program's handler, which must be there again afterwards."""


def main() -> None:
    handler = Handler()
    rendezvous_handler_registry.register("told", lambda parameters: handler)  # type: ignore[return-value]
    for name in ORDER.get("ignored", []):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    for name in ORDER.get("handled", []):
        signal.signal(signal.Signals[name], own_handler)
    entry = ORDER["entry"]
    entrypoint = getattr(entrypoints, entry[0][1:]) if entry[0].startswith("@") else entry[0]
    config = LaunchConfig(
        1,
        ORDER.get("nodes", 1),
        ORDER.get("nproc", 1),
        rdzv_backend=ORDER.get("backend", "told"),
        max_restarts=ORDER.get("max_restarts", 0),
        shutdown_timeout=ORDER.get("shutdown_timeout", 60),
        start_method=ORDER.get("start_method", "spawn"),
        logs_specs=DefaultLogsSpecs("/dev/null"),
        monitor_interval=0.02,
        **({"signals_to_handle": ORDER["signals_to_handle"]} if "signals_to_handle" in ORDER else {}),
    )
    outcome: dict[str, Any] = {"how": "success"}
    try:
        elastic_launch(config, entrypoint)(*entry[1:])
    except Exception as error:
        number = getattr(error, "sigval", None)
        outcome = {"how": type(error).__name__, "text": str(error), "signal": number.name if number else None}
    outcome["shutdowns"] = handler.shutdowns
    outcome["joins"] = handler.joins
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
    outcome["restored"] = [name for name in names if signal.getsignal(signal.Signals[name]) is own_handler]
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
