"""Agreeing on who is in: real handlers of both sides, then light clients for sizes that one host cannot hold otherwise,
the restart of a coordinator, and a coordinator at rest."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from bench.crowd import come_back, crowd
from bench.results import Bound, row
from bench.sides import (
    HOLDFAST,
    NS_PER_S,
    TORCHRUN,
    WORKERS,
    BenchmarkError,
    await_value,
    cpu_ns,
    environment,
    free_port,
)
from bench.turns import Turns, with_parts

_PROCESSES = (
    "Each node is a Python process that must connect, join and hear its rank, on two cores: that is what the time goes "
    "to. The coordinator's part for each node is among the light clients below."
)


@contextmanager
def coordinator(directory: str, port: int = 0) -> Iterator[tuple[int, psutil.Process]]:
    """A coordinator process, as a user starts it: its port and itself."""
    command = [HOLDFAST.command[0], "coordinator", "--listen", f"127.0.0.1:{port}"]
    said = Path(directory, f"said-{time.monotonic_ns()}")
    with said.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env=environment(XDG_RUNTIME_DIR=directory))
    try:
        found = await_value(lambda: re.search(rb"listening at \S+:(\d+)", said.read_bytes()), "a coordinator")
        yield int(found[1]), psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def _cpu_s(process: psutil.Process) -> float:
    return cpu_ns([process.pid]) / NS_PER_S


# --- real handlers ------------------------------------------------------------------------------------------------


class Handlers:
    """See workers/handlers.py."""

    def __init__(self, backend: str) -> None:
        command = [sys.executable, str(WORKERS / "handlers.py"), backend]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True
        )
        self._read()

    def form_s(self, *words: object) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError(f"the process with handlers has ended: {self._process.stderr.read()[-1500:]}")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure_rendezvous(turns: Turns) -> None:
    sizes = turns.size((2, 16, 64), (2, 4))
    ours, theirs = Handlers("tcp"), Handlers("c10d")
    try:
        for size, part in with_parts(sizes, 100):

            def form_ours(size: int = size) -> float:
                with tempfile.TemporaryDirectory() as directory, coordinator(directory) as (port, _):
                    return ours.form_s(size, "bench", f"127.0.0.1:{port}") * 1e3

            def form_theirs(size: int = size) -> float:
                return theirs.form_s(size, "bench") * 1e3

            sides = {HOLDFAST.name: form_ours, TORCHRUN.name: form_theirs}
            found = turns.compare(f"rendezvous of {size}", sides, part=part)
            bounds = [Bound(0.01, "torchrun", reason=_PROCESSES)] if size == 64 else []
            turns.rows.append(
                row(f"rendezvous.{size}", f"rendezvous of {size} nodes, a process each", "ms", found, *bounds)
            )
    finally:
        ours.close()
        theirs.close()


# --- light clients ------------------------------------------------------------------------------------------------


def measure_crowd(turns: Turns) -> None:
    sizes = turns.size((64, 1000, 4000, 10_000), (64, 200))
    walls: dict[int, list[float]] = {}
    cpus: dict[int, list[float]] = {}
    for size, part in with_parts(sizes, 1000):

        def form(size: int = size) -> tuple[float, float]:
            with tempfile.TemporaryDirectory() as directory, coordinator(directory) as (port, process):
                before_s = _cpu_s(process)
                took_s = asyncio.run(_form_s(port, size))
                return took_s, (_cpu_s(process) - before_s) / size * 1e6

        found = turns.compare(f"{size} light clients", {"holdfast": form}, warm_up=False, part=part)["holdfast"]
        walls[size], cpus[size] = [wall for wall, _ in found], [cpu for _, cpu in found]
        bounds = [Bound(0.5)] if size == 1000 else []
        what = f"rendezvous of {size:,} light clients in one process"
        turns.rows.append(row(f"crowd.{size}", what, "s", {"holdfast": walls[size]}, *bounds))
    for size in sizes:
        what = f"CPU time of the coordinator for each of {size:,}"
        turns.rows.append(row(f"crowd_cpu.{size}", what, "us", {"holdfast": cpus[size]}))
    small, large = sizes[1], sizes[-1]
    flat = [most / least for most, least in zip(cpus[large], cpus[small], strict=False)]
    what = f"the same among {large:,} over that among {small:,}"
    turns.rows.append(row("crowd_flat", what, "x", {"holdfast": flat}, Bound(1.5)))


async def _form_s(port: int, size: int) -> float:
    async with crowd(port, "bench", size) as formed:
        if formed.ranks != set(range(size)):
            raise BenchmarkError(f"{size} nodes got {len(formed.ranks)} ranks")
        return formed.formed_s


def measure_adoption(turns: Turns) -> None:
    sizes = turns.size((1000, 10_000), (100,))
    for size, part in with_parts(sizes, 1000):

        def adopt(size: int = size) -> tuple[float, float]:
            with tempfile.TemporaryDirectory() as directory:
                return asyncio.run(_adopt(directory, size))

        found = turns.compare(f"adoption of {size}", {"holdfast": adopt}, warm_up=False, part=part)["holdfast"]
        cpus, walls = [cpu for cpu, _ in found], [wall for _, wall in found]
        bounds = [Bound(2.0)] if size == 10_000 else []
        what = f"CPU time of a restarted coordinator to adopt {size:,} nodes"
        turns.rows.append(row(f"adoption.{size}", what, "s", {"holdfast": cpus}, *bounds))
        what = f"the same by the clock, light clients in one process, {size:,} nodes"
        turns.rows.append(row(f"adoption_wall.{size}", what, "s", {"holdfast": walls}))


async def _adopt(directory: str, size: int) -> tuple[float, float]:
    """The coordinator is killed, and another one started at once at the same port; CPU time and wall time until every
    node's heartbeat was answered."""
    port = free_port()
    with coordinator(directory, port) as (_, process):
        scene = crowd(port, "bench", size)
        formed = await scene.__aenter__()
        process.kill()
    try:
        with coordinator(directory, port) as (_, process):
            before_s, began = _cpu_s(process), time.perf_counter()
            await come_back(formed.clients, port)
            return _cpu_s(process) - before_s, time.perf_counter() - began
    finally:
        with suppress(ConnectionError):
            await scene.__aexit__(None, None, None)


# --- at rest ------------------------------------------------------------------------------------------------------


def measure_idle_coordinator(turns: Turns) -> None:
    nodes, rest_s = turns.size((1000, 8.0), (50, 1.0))
    cpus, held, empty = [], [], []
    for _ in turns.repeat("idle coordinator", planned=3):
        with tempfile.TemporaryDirectory() as directory, coordinator(directory) as (port, process):
            empty.append(process.memory_info().rss / 1e6)
            cpus.append(asyncio.run(_idle_percent(port, nodes, rest_s, process)))
            held.append(process.memory_info().rss / 1e6)
    turns.rows += [
        row("coordinator_cpu", f"CPU of a coordinator with {nodes:,} idle nodes", "% of a core", {"holdfast": cpus}),
        row("coordinator_memory", f"resident memory of a coordinator with {nodes:,} nodes", "MB", {"holdfast": held}),
        row("coordinator_empty", "resident memory of a coordinator with none", "MB", {"holdfast": empty}),
    ]


async def _idle_percent(port: int, nodes: int, rest_s: float, process: psutil.Process) -> float:
    async with crowd(port, "bench", nodes, heartbeat_s=1.0) as formed:
        before = sum(client.answers for client in formed.clients)
        began, used_s = time.monotonic(), _cpu_s(process)
        await asyncio.sleep(rest_s)
        took_s, used_s = time.monotonic() - began, _cpu_s(process) - used_s
        answered = sum(client.answers for client in formed.clients) - before
        if answered < 0.7 * nodes * (rest_s - 1):
            raise BenchmarkError(f"only {answered} heartbeats were answered in {took_s:.0f} s")
        return 100 * used_s / took_s
