"""Agreeing on who is in: real handlers of both sides, then light clients for sizes that one host cannot hold otherwise,
the restart of a coordinator, and a coordinator at rest."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path

from bench.crowd import come_back, crowd
from bench.results import Bound, of_each, row
from bench.sides import HOLDFAST, NS_PER_S, TORCHRUN, WORKERS, cpu_ns, environment
from bench.turns import Turns
from tests.coordinators import CoordinatorProcess, coordinator
from tests.support import free_port

_PROCESSES = (
    "Each node is a Python process that must connect, join and hear its rank, on two cores: that is what the time goes "
    "to. The coordinator's part for each node is among the light clients below."
)


@contextmanager
def fresh_coordinator() -> Iterator[CoordinatorProcess]:
    with tempfile.TemporaryDirectory() as directory, coordinator(Path(directory)) as process:
        yield process


def _cpu_s(server: CoordinatorProcess) -> float:
    return cpu_ns([server.process.pid]) / NS_PER_S


# --- real handlers ------------------------------------------------------------------------------------------------


@contextmanager
def handlers(backend: str) -> Iterator[Callable[..., float]]:
    """See workers/handlers.py: gives the seconds that so many nodes took."""
    command = [sys.executable, str(WORKERS / "handlers.py"), backend]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None

        def form_s(*words: object) -> float:
            print(*words, file=process.stdin, flush=True)
            line = process.stdout.readline()
            assert line, f"the process with handlers has ended: {process.stderr.read()[-1500:]}"
            return float(line)

        try:
            form_s(0)  # Returns when its library is imported.
            yield form_s
        finally:
            process.kill()


def measure_rendezvous(turns: Turns) -> None:
    with handlers("tcp") as ours, handlers("c10d") as theirs:
        for size in turns.size((2, 16, 64), (2, 4)):

            def form_ours(size: int = size) -> float:
                with fresh_coordinator() as server:
                    return ours(size, f"127.0.0.1:{server.port}") * 1e3

            def form_theirs(size: int = size) -> float:
                return theirs(size, f"127.0.0.1:{free_port()}") * 1e3

            found = turns.compare(f"rendezvous of {size}", {HOLDFAST.name: form_ours, TORCHRUN.name: form_theirs})
            bounds = [Bound(0.05, "torchrun", reason=_PROCESSES)] if size == 64 else []
            what = f"rendezvous of {size} nodes, a process each"
            turns.rows.append(row(f"rendezvous.{size}", what, "ms", found, *bounds))


# --- light clients ------------------------------------------------------------------------------------------------


def measure_crowd(turns: Turns) -> None:
    sizes = turns.size((64, 1000, 4000, 10_000), (64, 200))
    cpus: dict[int, list[float]] = {}
    for size in sizes:

        def form(size: int = size) -> tuple[float, float]:
            with fresh_coordinator() as server:
                before_s = _cpu_s(server)
                took_s = asyncio.run(_form_s(server.port, size))
                return took_s, (_cpu_s(server) - before_s) / size * 1e6

        found = turns.compare(f"{size} light clients", {"holdfast": form}, warm_up=False)
        cpus[size] = of_each(found, itemgetter(1))["holdfast"]
        bounds = [Bound(0.5)] if size == 1000 else []
        what = f"rendezvous of {size:,} light clients in one process"
        turns.rows.append(row(f"crowd.{size}", what, "s", of_each(found, itemgetter(0)), *bounds))
    for size in sizes:
        what = f"CPU time of the coordinator for each of {size:,}"
        turns.rows.append(row(f"crowd_cpu.{size}", what, "us", {"holdfast": cpus[size]}))
    small, large = sizes[1], sizes[-1]
    flat = [most / least for most, least in zip(cpus[large], cpus[small], strict=False)]
    what = f"the same among {large:,} over that among {small:,}"
    turns.rows.append(row("crowd_flat", what, "x", {"holdfast": flat}, Bound(1.5)))


async def _form_s(port: int, size: int) -> float:
    """From the first attempt to connect until the last client knows its rank."""
    began = time.perf_counter()
    async with crowd(port, "bench", size) as clients:
        took_s = time.perf_counter() - began
        ranks = {client.place.rank for client in clients if client.place}
        assert ranks == set(range(size)), f"{size} nodes got {len(ranks)} ranks"
        return took_s


def measure_adoption(turns: Turns) -> None:
    for size in turns.size((1000, 10_000), (100,)):

        def adopt(size: int = size) -> tuple[float, float]:
            with tempfile.TemporaryDirectory() as directory:
                return asyncio.run(_adopt(Path(directory), size))

        found = turns.compare(f"adoption of {size}", {"holdfast": adopt}, warm_up=False)
        bounds = [Bound(2.0)] if size == 10_000 else []
        what = f"CPU time of a restarted coordinator to adopt {size:,} nodes"
        turns.rows.append(row(f"adoption.{size}", what, "s", of_each(found, itemgetter(0)), *bounds))
        what = f"the same by the clock, light clients in one process, {size:,} nodes"
        turns.rows.append(row(f"adoption_wall.{size}", what, "s", of_each(found, itemgetter(1))))


async def _adopt(directory: Path, size: int) -> tuple[float, float]:
    """The coordinator is killed, and another one started at once at the same port; CPU time and wall time until every
    node's heartbeat was answered."""
    first = CoordinatorProcess(directory, port=free_port())
    with suppress(ConnectionError):
        async with crowd(first.port, "bench", size) as clients:
            first.kill()
            with coordinator(directory, port=first.port) as second:
                before_s, began = _cpu_s(second), time.perf_counter()
                await come_back(clients, first.port)
                return _cpu_s(second) - before_s, time.perf_counter() - began
    raise AssertionError("the nodes did not come back")


# --- at rest ------------------------------------------------------------------------------------------------------


def measure_idle_coordinator(turns: Turns) -> None:
    nodes, rest_s = turns.size((1000, 8.0), (50, 1.0))

    def rest() -> tuple[float, float, float]:
        with fresh_coordinator() as server:
            empty = server.memory_bytes
            percent = asyncio.run(_idle_percent(server, nodes, rest_s))
            return percent, server.memory_bytes / 1e6, empty / 1e6

    found = turns.compare("idle coordinator", {"holdfast": rest}, warm_up=False)
    for index, (key, what, unit) in enumerate((
        ("coordinator_cpu", f"CPU of a coordinator with {nodes:,} idle nodes", "% of a core"),
        ("coordinator_memory", f"resident memory of a coordinator with {nodes:,} nodes", "MB"),
        ("coordinator_empty", "resident memory of a coordinator with none", "MB"),
    )):  # fmt: skip
        turns.rows.append(row(key, what, unit, of_each(found, itemgetter(index))))


async def _idle_percent(server: CoordinatorProcess, nodes: int, rest_s: float) -> float:
    async with crowd(server.port, "bench", nodes, heartbeat_s=1.0) as clients:
        before = sum(client.answers for client in clients)
        began, used_s = time.monotonic(), _cpu_s(server)
        await asyncio.sleep(rest_s)
        took_s, used_s = time.monotonic() - began, _cpu_s(server) - used_s
        answered = sum(client.answers for client in clients) - before
        assert answered >= 0.7 * nodes * (rest_s - 1), f"only {answered} heartbeats were answered in {took_s:.0f} s"
        return 100 * used_s / took_s
