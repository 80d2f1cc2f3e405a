"""Coordinators and their clients for tests: as processes, in a thread with other limits, and byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from holdfast.rendezvous.api import RendezvousInfo, RendezvousParameters
from holdfast.rendezvous.client.handshake import Target
from holdfast.rendezvous.coordination import JoinFailed
from holdfast.rendezvous.coordinator import launch, state_file
from holdfast.rendezvous.coordinator.server import Coordinator
from holdfast.rendezvous.handler import CoordinatorHandler, create_tcp_handler
from holdfast.rendezvous.membership import frames, protocol
from holdfast.rendezvous.membership.frames import Frames, encode
from holdfast.rendezvous.membership.model import NodeFacts, Sealed, Settings
from tests.support import LoggedProcess

DEADLINE_S = 30.0


def default_run_id() -> str:
    """One for each test, which may share a coordinator with others."""
    return os.environ.get("PYTEST_CURRENT_TEST", "run").partition(" ")[0]


class CoordinatorProcess(LoggedProcess):
    """`holdfast coordinator` at a port of its own. What it says is in `log`, what it writes down in `home`."""

    def __init__(
        self, home: Path, *options: str, port: int = 0, address: str = "127.0.0.1", env: dict[str, str] | None = None
    ) -> None:
        said = home / f"coordinator-{time.monotonic_ns()}.err"
        self._page = 0
        command = [sys.executable, "-m", "holdfast", "coordinator", "--listen", f"{address}:{port}", *options]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(home), **(env or {})}
        with said.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=file, env=environment)
        super().__init__("the coordinator", process, said)
        try:
            self.port = int(
                super().await_line(r"listening at \S+:\d+").partition("listening at ")[2].rpartition(":")[2]
            )
        except BaseException:
            self.close()
            raise

    @property
    def log(self) -> str:
        """What it has said since the last `turn_page`."""
        return super().log[self._page :]

    def turn_page(self) -> None:
        self._page += len(self.log)

    def lines(self, words: str) -> list[str]:
        return [line for line in self.log.splitlines() if words in line]

    def await_line(self, pattern: str, deadline_s: float = 2 * DEADLINE_S) -> str:
        """The first line that has these words in it."""
        return super().await_line(re.escape(pattern), deadline_s)

    @property
    def memory_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def descriptors(self) -> int:
        return int(psutil.Process(self.process.pid).num_fds())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill()


@contextlib.contextmanager
def coordinator(home: Path, *options: str, **more: Any) -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess(home, *options, **more)
    try:
        yield process
        assert process.process.poll() is None, f"the coordinator has ended\n{process.log}"
        assert "Traceback" not in process.log, process.log
    finally:
        process.close()


@contextlib.contextmanager
def coordinator_thread(home: Path, **options: Any) -> Iterator[int]:
    """A coordinator in this process, so that a test can change its limits. Gives its port."""
    sock = launch.bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    ready = threading.Event()
    found: list[tuple[asyncio.AbstractEventLoop, Coordinator]] = []

    async def serve() -> None:
        files = state_file.StateFiles(home / "state", "127.0.0.1", port)
        server = Coordinator(sock, files, **{"idle_timeout_s": None, **options})
        found.append((asyncio.get_running_loop(), server))
        await server.serve(ready.set)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield port
    finally:
        loop, server = found[0]
        loop.call_soon_threadsafe(server.stop)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


class Peer:
    """A client that is driven message by message, or byte by byte."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.sock = socket.create_connection((host, port), DEADLINE_S)
        self._frames = Frames()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def send(self, *sent: Any) -> None:
        self.sock.sendall(b"".join(self._frames.sealed(encode(each)) for each in sent))

    def receive(self, deadline_s: float = DEADLINE_S) -> Any:
        """The next message, or None if the other side has hung up."""
        ends = time.monotonic() + deadline_s
        while (message := self._frames.next()) is None:
            self.sock.settimeout(max(0.001, ends - time.monotonic()))
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._frames.feed(data)
        return message

    def await_kind(self, kind: type) -> Any:
        while not isinstance(message := self.receive(), kind):
            assert message is not None, f"hung up before {kind.__name__} came"
        return message

    def is_hung_up(self) -> bool:
        """Waits until it is."""
        while self.receive() is not None:
            pass
        return True

    def enter(self, run_id: str = "", token: bytes | None = None, name: str = "a", secret: bytes = b"") -> Peer:
        """The handshake, as the node of that name."""
        target = Target("127.0.0.1", self.sock.getpeername()[1], run_id or default_run_id(), token)
        self.welcome = target.greet(self.sock, self._frames, protocol.Introduction(name, secret))
        self.expect_pushes()
        return self

    def expect_pushes(self) -> None:
        """The handshake is over."""
        self._frames.expect(frames.DOWNWARD)

    def join(self, name: str, settings: Settings, **facts: Any) -> Peer:
        self.send(protocol.Join(NodeFacts(name, **facts), settings))
        return self

    def ask(self, operation: str, *keys: str, **fields: Any) -> protocol.StoreAnswer:
        self.send(protocol.StoreRequest(b"peer", time.monotonic_ns(), operation, keys, **fields))
        answer = self.await_kind(protocol.StoreAnswer)
        assert isinstance(answer, protocol.StoreAnswer)
        return answer


@contextlib.contextmanager
def node(port: int, nodes: str = "1", run_id: str = "", **config: Any) -> Iterator[CoordinatorHandler]:
    """A handler as an agent has it. It hosts nothing unless it is told to."""
    low, _, high = nodes.partition(":")
    settings = {"is_host": False, "last_call": 0.2, "join_timeout": 30, "close_linger": 0.3, **config}
    endpoint = str(settings.pop("endpoint", f"127.0.0.1:{port}"))
    local_addr = settings.pop("local_addr", None)
    handler = create_tcp_handler(
        RendezvousParameters(
            "tcp", endpoint, run_id or default_run_id(), int(low), int(high or low), local_addr, **settings
        )
    )
    try:
        yield handler
    finally:
        handler.shutdown()


class Caller(threading.Thread):
    """A call that may take its time, in a thread of its own."""

    def __init__(self, call: Any, *args: Any) -> None:
        super().__init__(daemon=True)
        self._call, self._args = call, args
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._call(*self._args)
        except BaseException as error:
            self._error = error

    def result(self, deadline_s: float = DEADLINE_S) -> Any:
        self.join(deadline_s)
        assert not self.is_alive(), f"{self._call} has not returned after {deadline_s:g} s"
        if self._error is not None:
            raise self._error
        return self._result


@dataclass(frozen=True)
class Round:
    number: int
    found: RendezvousInfo


def form(*handlers: CoordinatorHandler) -> list[Round]:
    """The rounds that the handlers get a place in, in their order."""
    for each in handlers:
        each.join()
    sealed = [await_push(each, Sealed) for each in handlers]
    return [Round(push.place.round, each.found(push)) for each, push in zip(handlers, sealed, strict=True)]


def await_push(handler: CoordinatorHandler, kind: type) -> Any:
    """The next push of that kind; what comes with it and before it is dropped. An error that is pushed is raised."""
    poller = select.poll()  # Which takes descriptors above 1,023, too.
    poller.register(handler, select.POLLIN)
    while True:
        assert poller.poll(DEADLINE_S * 1000), f"no {kind.__name__} after {DEADLINE_S:g} s"
        for push in handler.take():
            if isinstance(push, kind):
                return push
            if isinstance(push, JoinFailed):
                raise push.error


@contextlib.contextmanager
def listener(says: bytes = b"", *, hangs_up: bool = False) -> Iterator[int]:
    """A port where something else listens: it says so much to everybody, and perhaps hangs up."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with contextlib.suppress(OSError):  # A caller who has hung up already is not the last one.
                        client.sendall(says)
                    if hangs_up:
                        client.close()
                    else:
                        held.append(client)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        thread.join(DEADLINE_S)
    for client in held:
        client.close()
