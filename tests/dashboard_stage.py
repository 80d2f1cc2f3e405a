"""A dashboard of a run that never was, of any size. The view of the run (`RunView`) is a stand-in, all else is real."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast import loop
from holdfast.errors import HostError
from holdfast.observe.ask import LastWord, RemoteRun, decoded
from holdfast.observe.dashboard import web_server
from holdfast.observe.dashboard.access import Access
from holdfast.observe.dashboard.run_watcher import Watch
from holdfast.telemetry.status import RunStatus

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip


class StandIn(RemoteRun):
    """Its nodes run, fail and come back as the test says: `letters` are the states of all workers, by node."""

    def __init__(self, nodes: int, workers: int, name: str = "node-{}") -> None:
        self.name = "stage"
        self.workers_of_a_node = workers
        self.node_names = [name.format(number) for number in range(nodes)]
        self.states = [["running"] * workers for _ in range(nodes)]
        self.round, self.causes, self.log = 1, [""], "a line\n"
        self.asked = {"status": 0, "agents": 0, "logs": 0}
        self.began = time.monotonic()
        self.is_gone = False
        self.notice: dict[str, Any] | None = None

    def run_status(self) -> RunStatus:
        self._count("status")
        size, ago_s = self.workers_of_a_node, time.monotonic() - self.began
        nodes = [
            {"node_id": name, "address": "10.0.0.1", "rank": number, "first_rank": number * size, "role": "default",
             "local_world_size": size, "state": "running", "is_connected": True, "heard_ago_s": 0.1,
             "leaves_in_s": 100.0 if self.notice and name in self.notice["nodes"] else None}
            for number, name in enumerate(self.node_names)
        ]  # fmt: skip
        rounds = [
            {"round": number, "nodes": len(nodes), "workers": len(nodes) * size, "began_ago_s": ago_s - number + 1,
             "ran_s": 1.0, "lost_s": 0.2, "end": "failed" if number < self.round else None, "cause": cause}
            for number, cause in enumerate(self.causes, 1)
        ]  # fmt: skip
        history = {"rounds": rounds, "wall_s": ago_s, "lost_s": 0.2, "goodput": 0.9, "restarts": {"failure": 1}}
        counts = {"node_count": len(nodes), "members": len(nodes), "min_nodes": len(nodes), "max_nodes": len(nodes)}
        told = {
            "run_id": self.name, "phase": "running", "round": self.round, **counts, "restarts_used": self.round - 1,
            "restarts_left": 3, "waiting_for": None, "nodes": nodes, "refused": [], "end": None, "history": history,
            "notice": self.notice,
        }  # fmt: skip
        return decoded(told, RunStatus, "the stage")

    def ask_nodes(self, names: Sequence[str], request: Mapping[str, Any], timeout_s: float = 1.0) -> dict[str, Any]:
        return {name: self._answer(name, request) for name in names}

    def _answer(self, node_id: str, request: Mapping[str, Any]) -> Any:
        number = self.node_names.index(node_id)
        if request["command"] == "logs":
            self._count("logs")
            size = len(self.log.encode())
            text = self.log.encode()[request["offset"] :].decode() if request["offset"] >= 0 else self.log
            return {"text": text, "offset": size, "size": size, "file": "1:1", "attempt": 0, "path": "/log"}
        self._count("agents")
        first = number * self.workers_of_a_node
        workers = [
            {"local_rank": n, "global_rank": first + n, "pid": 1000 + n, "state": state, "age_s": 5.0, "step": 7}
            for n, state in enumerate(self.states[number])
        ]
        return {"node_id": node_id, "host": node_id, "pid": 1, "round": self.round, "workers": workers, "node": number}

    def await_end(self, timeout_s: float) -> LastWord | None:
        threading.Event().wait(timeout_s)
        return None

    def close(self) -> None:
        pass

    def _count(self, what: str) -> None:
        self.asked[what] += 1
        if self.is_gone:
            raise HostError("no coordinator answers")


class Stage:
    """The web server in a thread of this process. It may end and begin again at the same address, with the same key."""

    def __init__(self, run: StandIn, *, may_stop: bool = False, port: int = 0) -> None:
        self.run = run
        self.guard = Access.for_names([])
        self._may_stop = may_stop
        self.port = port
        self.begin()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/?key={self.guard.key}"

    def begin(self) -> None:
        sock = socket.create_server(("127.0.0.1", self.port))
        self.port = sock.getsockname()[1]
        self.dashboard = web_server.Dashboard(self.guard, may_stop=self._may_stop, facts=web_server.facts_of(300.0))
        self.watch = Watch(self.run, lambda: self.run, self.dashboard.publish, lambda: None, may_read_files=False)
        self.dashboard.watch = self.watch
        self._web = web_server.server_for(self.dashboard.app())
        self._thread = threading.Thread(target=self.dashboard.serve, args=(self._web, sock, loop.Wakeup()), daemon=True)
        self._thread.start()
        self.watch.start()

    def end(self) -> None:
        self.watch.close()
        self._web.should_exit = True
        self._thread.join(10)


@contextlib.contextmanager
def stage(run: StandIn, **options: Any) -> Iterator[Stage]:
    made = Stage(run, **options)
    try:
        yield made
    finally:
        made.end()


@contextlib.contextmanager
def browser(**context: Any) -> Iterator[Any]:
    """A page of chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        try:
            yield chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **context}).new_page()
        finally:
            chromium.close()
