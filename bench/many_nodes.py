"""Runs of many nodes on this machine: how fast they form, and how fast they hear of what went wrong.

    python bench/many_nodes.py                     everything, several minutes
    python bench/many_nodes.py --quick             everything with few repetitions
    python bench/many_nodes.py --only push         one case; may be given more than once

The nodes of `rendezvous` and `idle` are light clients in one process, which speak the real protocol with one real
coordinator process; torch's c10d handlers stand beside them in the same run, as processes that share one import, as
long as that is bearable. The nodes of the other cases are real agents with real workers and default settings.

Prints the machine and a Markdown table, as `one_node.py` does. A bound that is not met is shown and does not change
the exit status.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from crowd import crowd
from launchers import WORKERS, BenchmarkError, environment
from measure import Bound, Row, series, table
from one_node import _load, _machine, _tell

import holdfast

T = TypeVar("T")

SIZES = (2, 16, 64, 128, 1000, 4000)
C10D_SIZES = (2, 16, 64)
C10D_BUDGET_S = 300.0
LEASE_S = 5.0
WAIT_LIMIT_S = 60.0
IDLE_NODES = 1000
IDLE_S = 20.0
NS_PER_MS = 1e6
NS_PER_S = 1e9
MB = 1e6


def main() -> int:
    return run_cases("Measure runs of many nodes on this machine.", CASES)


def run_cases(description: str, cases: Mapping[str, Case], sides: tuple[str, str] = ("holdfast", "torchrun")) -> int:
    """The command line of a benchmark that is made of such cases."""
    args = _parse(description, cases)
    _raise_descriptor_limit()
    try:
        print(_machine(), flush=True)
        rows = [row for name in args.only or cases for row in _measure(cases[name], args.quick)]
    except BenchmarkError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(f"- load average at the end: {_load()}\n\n{table(rows, sides)}")
    return 0


def _parse(description: str, cases: Mapping[str, Case]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--only", action="append", choices=tuple(cases), help="measure this; may be given again")
    return parser.parse_args()


def _measure(case: Case, quick: bool) -> list[Row]:
    return case.measure(case.quick_repetitions if quick else case.repetitions)


def _raise_descriptor_limit() -> None:
    """A connection is a descriptor on each side."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _our_environment() -> dict[str, str]:
    """So that every process has the holdfast that this one has."""
    return {**environment(), "PYTHONPATH": str(Path(holdfast.__file__).parents[1])}


# --- one coordinator, light clients -----------------------------------------------------------------------------


@contextmanager
def _coordinator(directory: str) -> Iterator[tuple[int, psutil.Process]]:
    """A coordinator process: its port and itself."""
    command = [sys.executable, "-m", "holdfast", "coordinator", "--listen", "127.0.0.1:0"]
    env = {**_our_environment(), "XDG_RUNTIME_DIR": directory}
    with Path(directory, "said").open("w+b") as said:
        process = subprocess.Popen(command, stderr=said, env=env)
        try:
            found = _await(lambda: re.search(rb"listening at \S+:(\d+)", Path(said.name).read_bytes()), "a coordinator")
            yield int(found[1]), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def measure_rendezvous(repetitions: int) -> list[Row]:
    sizes = [size for size in SIZES if size + 200 < resource.getrlimit(resource.RLIMIT_NOFILE)[0]]
    theirs: dict[int, list[float]] = {size: [] for size in C10D_SIZES}
    budget_ends = time.monotonic() + C10D_BUDGET_S
    ours: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(repetitions):
        # A fresh one each turn: the last has thousands of lost nodes to see off.
        with tempfile.TemporaryDirectory() as directory, _coordinator(directory) as (port, _):
            for size in sizes:
                _tell(f"rendezvous of {size} nodes, turn {turn + 1}")
                ours[size].append(asyncio.run(_form(port, f"{size}-{turn}", size)))
                if size in theirs and turn < 2 and time.monotonic() < budget_ends:
                    theirs[size].append(_form_c10d(size))
    return [_rendezvous_row(size, ours[size], theirs.get(size)) for size in sizes] + _flatness(ours)


async def _form(port: int, run_id: str, size: int) -> float:
    async with crowd("127.0.0.1", port, run_id, size) as formed:
        if formed.ranks != set(range(size)):
            raise BenchmarkError(f"{size} nodes got {len(formed.ranks)} ranks")
        return formed.formed_s


def _form_c10d(size: int) -> float:
    _tell(f"rendezvous of {size} nodes with c10d")
    command = [sys.executable, str(WORKERS / "c10d_crowd.py"), str(size), str(int(C10D_BUDGET_S))]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=2 * C10D_BUDGET_S, check=False
    )
    if ended.returncode != 0:
        raise BenchmarkError(f"c10d with {size} nodes: {ended.stderr[-2000:]}")
    return float(ended.stdout.split()[-1])


def _rendezvous_row(size: int, ours: list[float], theirs: list[float] | None) -> Row:
    bound = {64: Bound("ratio", "at most", 0.02), 1000: Bound("value", "at most", 2.0)}.get(size)
    return Row(f"rendezvous of {size:,} nodes", "s", series(ours), series(theirs) if theirs else None, bound)


def _flatness(ours: dict[int, list[float]]) -> list[Row]:
    """What one node costs in the largest world, compared with a world of a thousand."""
    if 4000 not in ours or 1000 not in ours:
        return []
    per_node = [large / 4000 / (small / 1000) for large, small in zip(ours[4000], ours[1000], strict=True)]
    bound = Bound("value", "at most", 1.5)
    return [Row("cost of a node among 4,000, over that among 1,000", "x", series(per_node), None, bound)]


def measure_idle(repetitions: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as directory, _coordinator(directory) as (port, process):
        empty_mb = process.memory_info().rss / MB
        cpus, held = zip(*(asyncio.run(_idle(port, turn, process)) for turn in range(repetitions)), strict=True)
    return [
        Row(f"coordinator's CPU with {IDLE_NODES:,} idle nodes, {IDLE_S:g} s", "%", series(cpus)),
        Row(f"coordinator's resident memory with {IDLE_NODES:,} idle nodes", "MB", series(held)),
        Row("coordinator's resident memory with none", "MB", series([empty_mb])),
    ]


async def _idle(port: int, turn: int, process: psutil.Process) -> tuple[float, float]:
    async with crowd("127.0.0.1", port, f"idle-{turn}", IDLE_NODES) as formed:
        _tell(f"{IDLE_NODES} idle nodes, turn {turn + 1}")
        answers = sum(client.answers for client in formed.clients)
        began, used = time.monotonic(), _cpu_s(process)
        await asyncio.sleep(IDLE_S)
        took_s, used = time.monotonic() - began, _cpu_s(process) - used
        answered = sum(client.answers for client in formed.clients) - answers
        if answered < 0.8 * IDLE_NODES * IDLE_S:
            raise BenchmarkError(f"only {answered} heartbeats were answered in {took_s:.0f} s")
        return 100 * used / took_s, process.memory_info().rss / MB


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# --- real agents ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Note:
    pid: int
    at_ns: int


class Scene:
    """A few agents of one run on this host, each with one worker that takes notes."""

    def __init__(
        self, directory: str, nodes: str, count: int, rendezvous: tuple[str, str] | None = None, run_id: str = "bench"
    ) -> None:
        """`rendezvous` is a backend and an endpoint; by default a coordinator that the agents start."""
        self._directory = directory
        self._port = _free_port()
        self._run_id = run_id
        self._rendezvous = rendezvous or ("tcp", f"127.0.0.1:{self._port}")
        self.agents = [self._start(nodes, number) for number in range(count)]

    def _start(self, nodes: str, number: int) -> subprocess.Popen[bytes]:
        backend, endpoint = self._rendezvous
        command = [sys.executable, "-m", "holdfast", "run", "--rdzv-backend", backend, "--nnodes", nodes]
        command += ["--rdzv-endpoint", endpoint, "--rdzv-id", self._run_id, "--max-restarts", "3"]
        env = {**_our_environment(), "XDG_RUNTIME_DIR": self._directory}
        with Path(self._directory, f"agent-{number}.err").open("wb") as said:
            return subprocess.Popen(
                [*command, str(WORKERS / "witness.py"), self._directory],
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=env,
                start_new_session=True,
            )

    def notes(self, what: str, round: int) -> dict[int, Note]:
        """By rank."""
        found = {}
        for path in Path(self._directory).glob(f"{what}.{round}.*"):
            pid, at_ns = path.read_text().split()
            found[int(path.suffix[1:])] = Note(int(pid), int(at_ns))
        return found

    def await_notes(self, what: str, round: int, count: int) -> dict[int, Note]:
        def enough() -> dict[int, Note] | None:
            found = self.notes(what, round)
            return found if len(found) >= count else None

        return _await(enough, f"{count} workers of round {round} that {what}")

    def said(self) -> list[str]:
        """What each agent has written so far."""
        return [Path(self._directory, f"agent-{number}.err").read_text() for number in range(len(self.agents))]

    def agent_of(self, worker: Note) -> psutil.Process:
        pids = {agent.pid for agent in self.agents}
        return next(each for each in psutil.Process(worker.pid).parents() if each.pid in pids)

    def close(self) -> None:
        """Everything that was started here, frozen or not, and the coordinator."""
        for agent in self.agents:
            for process in _tree(agent.pid):
                _kill(process)
            agent.wait()
        for process in _listening(self._port):
            _kill(process)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass


def _listening(port: int) -> list[psutil.Process]:
    pids = {each.pid for each in psutil.net_connections("tcp") if each.laddr.port == port and each.status == "LISTEN"}
    return [psutil.Process(pid) for pid in pids if pid is not None]


def _free_port() -> int:
    """One that is free now; the coordinator binds it a moment later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _scene(nodes: str, count: int, rendezvous: tuple[str, str] | None = None, run_id: str = "bench") -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as directory:
        scene = Scene(directory, nodes, count, rendezvous, run_id)
        try:
            yield scene
        except BenchmarkError as error:
            said = "\n".join(text[-1000:] for text in scene.said())
            raise BenchmarkError(f"{error}\n{said}") from None
        finally:
            scene.close()


def measure_push(repetitions: int) -> list[Row]:
    values = [_push_ms(turn) for turn in range(repetitions)]
    bound = Bound("value", "at most", 50)
    return [Row("kill -9 of a worker on one node to SIGTERM at a worker on another", "ms", series(values), None, bound)]


def _push_ms(turn: int) -> float:
    _tell(f"push, turn {turn + 1}")
    with _scene("2", 2) as scene:
        workers = scene.await_notes("began", 1, 2)
        time.sleep(0.5)
        began_ns = time.monotonic_ns()
        os.kill(workers[0].pid, signal.SIGKILL)
        stopped = scene.await_notes("stopped", 1, 1)
        return (stopped[1].at_ns - began_ns) / NS_PER_MS


def measure_recovery(repetitions: int) -> list[Row]:
    start_s = [_worker_start_s() for _ in range(max(3, repetitions))]
    typical_s = series(start_s).median
    dead = [_recovery_s(turn, _kill_agent) for turn in range(repetitions)]
    silent = [_recovery_s(turn, _freeze_node) for turn in range(repetitions)]
    return [
        Row("start of a worker by itself", "s", series(start_s)),
        Row("kill -9 of an agent to the next round running", "s", series(dead), None, _within(2.5 + typical_s)),
        Row(
            "SIGSTOP of a node to the next round running", "s", series(silent), None, _within(LEASE_S + 0.5 + typical_s)
        ),
    ]


def _within(limit_s: float) -> Bound:
    return Bound("value", "at most", round(limit_s, 2))


def _recovery_s(turn: int, strike: Callable[[Scene, Note], None]) -> float:
    _tell(f"recovery, turn {turn + 1}")
    with _scene("1:3", 3) as scene:
        victim = scene.await_notes("began", 1, 3)[1]
        time.sleep(1.0)
        began_ns = time.monotonic_ns()
        strike(scene, victim)
        after = scene.await_notes("began", 2, 2)
        return (max(note.at_ns for note in after.values()) - began_ns) / NS_PER_S


def _kill_agent(scene: Scene, victim: Note) -> None:
    scene.agent_of(victim).kill()


def _freeze_node(scene: Scene, victim: Note) -> None:
    for process in reversed(_tree(scene.agent_of(victim).pid)):
        process.suspend()


def _worker_start_s() -> float:
    """What the interpreter needs until the worker's first line, without a launcher."""
    with tempfile.TemporaryDirectory() as directory:
        env = {**environment(), "HOLDFAST_ROUND": "0", "RANK": "0"}
        began_ns = time.monotonic_ns()
        process = subprocess.Popen([sys.executable, str(WORKERS / "witness.py"), directory], env=env)
        try:
            note = Path(directory, "began.0.0")
            _await(note.exists, "a worker")
            return (int(note.read_text().split()[1]) - began_ns) / NS_PER_S
        finally:
            process.kill()
            process.wait()


def _await(condition: Callable[[], T | None], what: str) -> T:
    ends = time.monotonic() + WAIT_LIMIT_S
    while not (value := condition()):
        if time.monotonic() > ends:
            raise BenchmarkError(f"after {WAIT_LIMIT_S:g} s there was still not {what}")
        time.sleep(0.005)
    return value


@dataclass(frozen=True, slots=True)
class Case:
    measure: Callable[[int], list[Row]]
    repetitions: int
    quick_repetitions: int


CASES = {
    "rendezvous": Case(measure_rendezvous, 5, 1),
    "push": Case(measure_push, 15, 3),
    "recovery": Case(measure_recovery, 5, 1),
    "idle": Case(measure_idle, 3, 1),
}

if __name__ == "__main__":
    sys.exit(main())
