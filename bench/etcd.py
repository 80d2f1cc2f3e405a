"""Runs on etcd on this machine, beside runs with a coordinator (the tcp backend) in the same minutes.

    python bench/etcd.py                           everything, about six minutes
    python bench/etcd.py --quick                   everything with few repetitions
    python bench/etcd.py --only losses             one case; may be given more than once

One etcd of one member, with its data flushed to the disk as in earnest. The nodes of `rendezvous` and `rest` are
rendezvous handlers without workers, all the threads of an agent included, in as many processes as there are cores;
those of `losses` and `cost` are real agents with default settings. What was asked of etcd is read from its own metrics.

Prints the machine and a Markdown table, as `one_node.py` does.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from urllib.request import urlopen

import psutil
from launchers import WORKERS, BenchmarkError, environment
from many_nodes import (
    NS_PER_S,
    Case,
    _coordinator,
    _cpu_s,
    _free_port,
    _our_environment,
    _scene,
    _within,
    run_cases,
)
from measure import Row, series
from memory import held_by
from one_node import _tell

from holdfast.rendezvous.etcd.election import Leader
from holdfast.rendezvous.etcd.gateway import Gateway
from holdfast.rendezvous.etcd.memory import decode_leader, keys_of
from holdfast.testing.etcd_server import find_etcd_binary

SIZES = (2, 16, 64, 256)
REST_SIZES = (16, 256)
REST_S = 60.0
QUICK_REST_S = 10.0
SETTLE_S = 3.0
LONGEST_S = 5.0 + 6.0 + 5.0  # Leader's lease, node's lease, leader's lease.
WAIT_LIMIT_S = 120.0
MS_PER_S = 1e3


def main() -> int:
    return run_cases("Measure runs on etcd on this machine.", CASES, ("etcd", "tcp"))


# --- what etcd was asked ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Etcd:
    endpoint: str
    pid: int

    def client(self) -> Gateway:
        return Gateway([self.endpoint], request_timeout_s=30.0)


@dataclass(frozen=True, slots=True)
class Load:
    """What etcd has done since it was started, by its own count.

    `requests`: every call and every renewal of a lease; `writes`: keys put or deleted; `steps`: states that it went
    through, one for each transaction that wrote something, which is what it agrees about and flushes to the disk.
    """

    requests: float
    writes: float
    steps: float

    def __sub__(self, before: Load) -> Load:
        return Load(self.requests - before.requests, self.writes - before.writes, self.steps - before.steps)


def _load_of(server: Etcd) -> Load:
    with urlopen(f"http://{server.endpoint}/metrics", timeout=10) as answer:
        text = answer.read().decode()

    def total(pattern: str) -> float:
        return sum(map(float, re.findall(rf"^{pattern}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)))

    return Load(
        total("grpc_server_started_total"),
        total("etcd_mvcc_put_total") + total("etcd_mvcc_delete_total"),
        total("etcd_debugging_mvcc_current_revision"),
    )


@contextmanager
def _etcd() -> Iterator[Etcd]:
    """Not an `EtcdServer`: that one does not flush its data."""
    with tempfile.TemporaryDirectory() as directory:
        url, peer_url = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
        command = [find_etcd_binary(), "--log-level=error", f"--data-dir={directory}/data"]
        command += [f"--listen-client-urls={url}", f"--advertise-client-urls={url}", f"--listen-peer-urls={peer_url}"]
        command += [f"--initial-advertise-peer-urls={peer_url}", f"--initial-cluster=default={peer_url}"]
        process = subprocess.Popen(command, env=environment())
        try:
            server = Etcd(url.partition("://")[2], process.pid)
            with server.client() as client:
                client.put(b"ready", b"yes")
            yield server
        finally:
            process.kill()
            process.wait()


# --- handlers without workers -----------------------------------------------------------------------------------


class Nodes:
    """So many nodes of one run, in a few processes."""

    def __init__(self, backend: str, endpoint: str, run_id: str, size: int) -> None:
        self._cleanup = ExitStack()
        shares = [size // _PROCESSES + (number < size % _PROCESSES) for number in range(_PROCESSES)]
        words = [backend, endpoint, run_id]
        self._processes = [self._start([*words, str(share), str(size)]) for share in shares if share]
        for process in self._processes:
            self._read(process)

    def _start(self, words: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, str(WORKERS / "handlers.py"), *words]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_our_environment(), text=True
        )
        self._cleanup.callback(process.wait)
        self._cleanup.callback(process.kill)
        return process

    def _read(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise BenchmarkError(f"a process with handlers has ended: exit status {process.wait()}")
        return line

    def form_s(self) -> float:
        """From the request for a round to the moment when the last node has it."""
        began_ns = time.monotonic_ns()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return (max(int(self._read(process)) for process in self._processes) - began_ns) / NS_PER_S

    def cpu_s(self) -> float:
        return sum(_cpu_s(psutil.Process(process.pid)) for process in self._processes)

    def close(self) -> None:
        self._cleanup.close()


_PROCESSES = len(os.sched_getaffinity(0))


@contextmanager
def _nodes(backend: str, endpoint: str, run_id: str, size: int) -> Iterator[Nodes]:
    nodes = Nodes(backend, endpoint, run_id, size)
    try:
        yield nodes
    finally:
        nodes.close()


@dataclass(frozen=True, slots=True)
class Formed:
    """The first round of a run and the second, for which everybody asks again: how long it took, what CPU time the
    nodes needed, and what etcd was asked."""

    first_s: float
    later_s: float
    first_cpu_s: float
    later_cpu_s: float
    first: Load | None = None
    later: Load | None = None


def measure_rendezvous(repetitions: int) -> list[Row]:
    found: dict[int, list[tuple[Formed, Formed]]] = {size: [] for size in SIZES}
    for turn in range(repetitions):
        for size in SIZES:
            _tell(f"rendezvous of {size} nodes, turn {turn + 1}")
            found[size].append((_form_on_etcd(size), _form_with_coordinator(size)))
    times = [row for size in SIZES for row in _time_rows(size, found[size])]
    return times + [row for size in SIZES for row in _load_rows(size, [etcd for etcd, _ in found[size]])]


def _form_on_etcd(size: int) -> Formed:
    with _etcd() as server, _nodes("etcd", server.endpoint, "bench", size) as nodes:
        before = _load_of(server)
        first_s, first_cpu_s = _form(nodes)
        between = _load_of(server)
        later_s, later_cpu_s = _form(nodes)
        return Formed(first_s, later_s, first_cpu_s, later_cpu_s, between - before, _load_of(server) - between)


def _form_with_coordinator(size: int) -> Formed:
    with (
        tempfile.TemporaryDirectory() as directory,
        _coordinator(directory) as (port, _),
        _nodes("tcp", f"127.0.0.1:{port}", "bench", size) as nodes,
    ):
        first_s, first_cpu_s = _form(nodes)
        later_s, later_cpu_s = _form(nodes)
        return Formed(first_s, later_s, first_cpu_s, later_cpu_s)


def _form(nodes: Nodes) -> tuple[float, float]:
    """Seconds until the last one has its place, and seconds of CPU time of all."""
    before_s = nodes.cpu_s()
    took_s = nodes.form_s()
    return took_s, nodes.cpu_s() - before_s


def _time_rows(size: int, found: list[tuple[Formed, Formed]]) -> list[Row]:
    etcd, tcp = zip(*found, strict=True)
    first = [series(each.first_s for each in side) for side in (etcd, tcp)]
    later = [series(each.later_s for each in side) for side in (etcd, tcp)]
    first_cpu = [series(each.first_cpu_s / size * MS_PER_S for each in side) for side in (etcd, tcp)]
    later_cpu = [series(each.later_cpu_s / size * MS_PER_S for each in side) for side in (etcd, tcp)]
    return [
        Row(f"first round of {size} nodes", "s", *first),
        Row(f"CPU time of a node, first round of {size}", "ms", *first_cpu),
        Row(f"a later round of {size} nodes", "s", *later),
        Row(f"CPU time of a node, a later round of {size}", "ms", *later_cpu),
    ]


def _load_rows(size: int, found: list[Formed]) -> list[Row]:
    rows = []
    for name, loads in (("first", [each.first for each in found]), ("a later", [each.later for each in found])):
        known = [each for each in loads if each is not None]
        rows += [
            Row(f"requests to etcd a node, {name} round of {size}", "", series(each.requests / size for each in known)),
            Row(f"keys written a node, {name} round of {size}", "", series(each.writes / size for each in known)),
            Row(f"transactions that write, {name} round of {size}", "", series(each.steps for each in known)),
        ]
    return rows


def measure_rest(repetitions: int) -> list[Row]:
    rest_s = REST_S if repetitions > 1 else QUICK_REST_S
    return [row for size in REST_SIZES for row in _rest_rows(size, rest_s)]


def _rest_rows(size: int, rest_s: float) -> list[Row]:
    """What a round costs in which nothing happens."""
    _tell(f"{size} nodes at rest for {rest_s:g} s")
    with _etcd() as server, _nodes("etcd", server.endpoint, "bench", size) as nodes:
        nodes.form_s()
        time.sleep(SETTLE_S)  # Everybody says that it has its place.
        process = psutil.Process(server.pid)
        before, etcd_s, nodes_s, began = _load_of(server), _cpu_s(process), nodes.cpu_s(), time.monotonic()
        time.sleep(rest_s)
        took_s = time.monotonic() - began
        done = _load_of(server) - before
        etcd_s, nodes_s = _cpu_s(process) - etcd_s, nodes.cpu_s() - nodes_s
    minutes = took_s / 60
    what = f"of {size} at rest"
    return [
        Row(f"keys written a minute, {what}", "", series([done.writes / minutes])),
        Row(f"requests to etcd a minute, {what}", "", series([done.requests / minutes])),
        Row(f"etcd's CPU, {what}", "%", series([100 * etcd_s / took_s])),
        Row(f"a node's CPU, {what}", "%", series([100 * nodes_s / took_s / size])),
    ]


# --- real agents ------------------------------------------------------------------------------------------------


def measure_losses(repetitions: int) -> list[Row]:
    turns = range(repetitions)
    return [
        Row("kill -9 of a member to the next round running", "s", series(_lose(turn, "member") for turn in turns)),
        Row("kill -9 of the agent that started the coordinator", "s", series(_lose(turn, "host") for turn in turns)),
        Row(
            "kill -9 of that agent and the coordinator",
            "s",
            series(_lose(turn, "both") for turn in turns),
            None,
            _within(LONGEST_S + 2),
        ),
        Row(
            "kill -9 of the coordinator to the next one that listens", "s", series(_succession(turn) for turn in turns)
        ),
    ]


def _lose(turn: int, what: str) -> float:
    """Seconds until the others run again."""
    _tell(f"kill -9: {what}, turn {turn + 1}")
    with _etcd() as server, _scene("1:3", 3, ("etcd", server.endpoint)) as scene, server.client() as client:
        scene.await_notes("began", 1, 3)
        time.sleep(1.0)
        line = f"hosts the coordinator of run 'bench' at 127.0.0.1:{_leader(client).port}"
        host = next(agent for agent, said in zip(scene.agents, scene.said(), strict=True) if line in said)
        victim = host if what != "member" else next(agent for agent in scene.agents if agent is not host)
        began_ns = time.monotonic_ns()
        os.kill(victim.pid, signal.SIGKILL)
        if what == "both":
            _coordinator_of(_leader(client)).kill()
        after = scene.await_notes("began", 2, 2)
        return (max(note.at_ns for note in after.values()) - began_ns) / NS_PER_S


def _succession(turn: int) -> float:
    """Seconds until another coordinator is in office. The workers run on."""
    _tell(f"kill -9: coordinator, turn {turn + 1}")
    with _etcd() as server, _scene("1:3", 3, ("etcd", server.endpoint)) as scene, server.client() as client:
        scene.await_notes("began", 1, 3)
        time.sleep(1.0)
        before = _leader(client)
        began = time.monotonic()
        _coordinator_of(before).kill()
        led_s = _await_leader(client, before.term) - began
        time.sleep(SETTLE_S)
        if any("stopped" in said for said in scene.said()):
            raise BenchmarkError("the workers were stopped")
        return led_s


def _is_open(leader: Leader) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((leader.host, leader.port)) == 0


def _coordinator_of(leader: Leader) -> psutil.Process:
    for process in psutil.process_iter():
        try:
            if leader.token in " ".join(process.cmdline()):
                return process
        except psutil.Error:
            pass
    raise BenchmarkError("there is no coordinator")


def _leader(client: Gateway) -> Leader:
    found = decode_leader(client.get(keys_of("/holdfast", "bench")[0]))
    if found is None:
        raise BenchmarkError("no coordinator is in office")
    return found


def _await_leader(client: Gateway, term: int) -> float:
    """When a coordinator of a later term accepts connections, by the monotonic clock."""
    ends = time.monotonic() + WAIT_LIMIT_S
    while time.monotonic() < ends:
        found = decode_leader(client.get(keys_of("/holdfast", "bench")[0]))
        if found is not None and found.term > term and _is_open(found):
            return time.monotonic()
        time.sleep(0.005)
    raise BenchmarkError(f"after {WAIT_LIMIT_S:g} s there was no other coordinator")


def measure_cost(repetitions: int) -> list[Row]:
    """What an agent costs that has nothing to do, and a run that has next to nothing to do."""
    with _etcd() as server, tempfile.TemporaryDirectory() as directory, _coordinator(directory) as (port, _):
        sides = {"etcd": ("etcd", server.endpoint), "tcp": ("tcp", f"127.0.0.1:{port}")}
        took = {name: [] for name in sides}
        held = {name: [] for name in sides}
        for turn in range(repetitions):
            for name, rendezvous in sides.items():
                _tell(f"cost of {name}, turn {turn + 1}")
                took[name].append(_trivial_s(rendezvous, f"{name}-{turn}") * MS_PER_S)
                held[name].append(_held_mb(rendezvous, f"{name}-idle-{turn}"))
    return [
        Row("one node, one trivial worker, start to end", "ms", *(series(took[name]) for name in sides)),
        Row("agent's resident memory", "MB", *(series(held[name]) for name in sides)),
    ]


def _trivial_s(rendezvous: tuple[str, str], run_id: str) -> float:
    backend, endpoint = rendezvous
    command = [sys.executable, "-m", "holdfast", "run", "--rdzv-backend", backend, "--rdzv-endpoint", endpoint]
    command += ["--nnodes", "1", "--rdzv-id", run_id, str(WORKERS / "trivial.py")]
    began = time.perf_counter()
    ended = subprocess.run(command, env=_our_environment(), capture_output=True, timeout=WAIT_LIMIT_S, check=False)
    if ended.returncode != 0:
        raise BenchmarkError(f"a trivial run with {backend} failed: {ended.stderr.decode()[-2000:]}")
    return time.perf_counter() - began


def _held_mb(rendezvous: tuple[str, str], run_id: str) -> float:
    with _scene("1", 1, rendezvous, run_id) as scene:
        scene.await_notes("began", 1, 1)
        time.sleep(1.0)
        return held_by([scene.agents[0].pid]).rss_mb


CASES = {
    "rendezvous": Case(measure_rendezvous, 5, 1),
    "rest": Case(measure_rest, 2, 1),
    "losses": Case(measure_losses, 5, 1),
    "cost": Case(measure_cost, 7, 2),
}

if __name__ == "__main__":
    sys.exit(main())
