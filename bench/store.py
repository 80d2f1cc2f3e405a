"""torch's store: holdfast's server beside torch's own, with the same client on plain sockets."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter

import psutil

from bench.results import Bound, of_each, row
from bench.turns import Turns
from tests import torch_wire

_OURS = """
import socket, sys
from holdfast.process import torch_store_server
torch_store_server.serve(socket.socket(fileno=int(sys.argv[1])), print)
"""
_THEIRS = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


_AT_ONCE = 512


class Server:
    """A process with one of the two, and clients that are connected to it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self._port = process, port
        self.clients: list[socket.socket] = []

    def connect(self, count: int) -> None:
        """All at once: torch's own server takes a tenth of a second for each, but for many at the same time."""
        fresh = [socket.create_connection(("127.0.0.1", self._port)) for _ in range(count)]
        for sock in fresh:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(torch_wire.VALIDATE + torch_wire.ping(7))
        for sock in fresh:
            assert len(sock.recv(4)) == 4
        self.clients += fresh

    def memory_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


@contextlib.contextmanager
def holdfasts() -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        process = subprocess.Popen([sys.executable, "-c", _OURS, str(fd)], text=True, pass_fds=[fd])
    with _ended(process):
        yield Server(process, port)


@contextlib.contextmanager
def torchs() -> Iterator[Server]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", _THEIRS], text=True, stdin=pipe, stdout=pipe)
    with _ended(process):
        assert process.stdout is not None
        yield Server(process, int(process.stdout.readline()))


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure_store(turns: Turns) -> None:
    operations, clients = turns.size((5_000, (8, 64, 512, 4096)), (200, (8, 64)))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def rates(serve: Callable[[], contextlib.AbstractContextManager[Server]]) -> dict[str, float]:
        with serve() as server:
            began, count = time.perf_counter(), min(operations, 500)
            server.connect(count)
            found = {"connect": count / (time.perf_counter() - began)}
            client = server.clients[0]
            client.sendall(torch_wire.set_("/k", b"v" * 100))
            for name, request, size in (
                ("get", torch_wire.get("/k"), 108),
                ("add", torch_wire.add("/n", 1), 8),
                ("set", torch_wire.set_("/k", b"v" * 100) + torch_wire.ping(1), 4),
            ):
                found[name] = _rate(partial(_ask, client, request, size), operations)
            return found

    sides = {"holdfast": partial(rates, holdfasts), "torchrun": partial(rates, torchs)}
    found = turns.compare("torch's store", sides)
    for name, what in (
        ("connect", "clients connected a second"),
        ("get", "`get` a second, one client"),
        ("add", "`add` a second, one client"),
        ("set", "`set` a second, one client, each confirmed by a ping"),
    ):
        bounds = [] if name == "connect" else [Bound(0.33, "torchrun", is_minimum=True)]
        turns.rows.append(row(f"store.{name}", what, "", of_each(found, itemgetter(name)), *bounds))

    for count in clients:
        meetings = {"holdfast": partial(_barrier, holdfasts, count)}
        if count <= _AT_ONCE:  # torch's server would take minutes to accept more.
            meetings["torchrun"] = partial(_barrier, torchs, count)
        met = turns.compare(f"a barrier of {count} clients", meetings)
        what = f"barrier of {count:,} light clients"
        turns.rows.append(row(f"store.barrier.{count}", what, "ms", of_each(met, itemgetter(0))))
        if count == min(clients[-1], _AT_ONCE):
            what = f"memory for each of {count:,} clients"
            turns.rows.append(row("store.memory", what, "KB", of_each(met, itemgetter(1))))


def _rate(call: Callable[[], None], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return count / (time.perf_counter() - began)


def _ask(client: socket.socket, request: bytes, size: int) -> None:
    client.sendall(request)
    while size > 0:
        size -= len(client.recv(size))


def _barrier(serve: Callable[[], contextlib.AbstractContextManager[Server]], count: int) -> tuple[float, float]:
    """How long it takes in ms, and the memory of the server for each client in KB."""
    with serve() as server:
        server.connect(1)
        before = server.memory_bytes()
        for begin in range(1, count, _AT_ONCE):
            server.connect(min(_AT_ONCE, count - begin))
        memory_kb = (server.memory_bytes() - before) / count / 1e3
        began = time.perf_counter()
        for client in server.clients:
            client.sendall(torch_wire.barrier("/b", count))
        for client in server.clients:
            assert client.recv(1) == b"\0"
        took_ms = (time.perf_counter() - began) * 1e3
        for client in server.clients:
            client.close()
        return took_ms, memory_kb
