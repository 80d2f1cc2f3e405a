"""Runs of several real agents on this host: how fast the others hear of a failure, and go on without a lost node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import psutil

from bench.results import Bound, row
from bench.sides import (
    HOLDFAST,
    NS_PER_MS,
    NS_PER_S,
    TORCHRUN,
    Mark,
    Marks,
    Run,
    Side,
    marks_of_workers,
    started,
)
from bench.turns import Turns
from holdfast.rendezvous.etcd_server import EtcdServer
from tests.support import free_port

SETTLING_S = 1.0
LEASE_S = 5.0
TORCHRUN_LIMIT_S = 30.0
WORKER_START_S = 0.05
"""What a worker's start may take, in bounds that allow for one."""


class Job:
    """Agents of one run, each with one idle worker."""

    def __init__(self, marks: Marks, agents: list[Run]) -> None:
        self.marks, self.agents = marks, agents

    def agent_of(self, worker: Mark) -> Run:
        above = {process.pid for process in psutil.Process(worker.pid).parents()}
        return next(agent for agent in self.agents if agent.pid in above)

    def host(self) -> Run:
        """The agent that started the coordinator, on etcd."""
        return next(agent for agent in self.agents if "hosts the coordinator of run" in agent.last_words())


@contextmanager
def job(side: Side, backend: str, nodes: str, count: int, endpoint: str = "") -> Iterator[Job]:
    rendezvous = ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint or f"127.0.0.1:{free_port()}"]
    options = [*rendezvous, "--nnodes", nodes, "--rdzv-id", "bench", "--max-restarts", "3"]
    with marks_of_workers() as marks, ExitStack() as stack:
        env = {"XDG_RUNTIME_DIR": str(marks)}
        argv = side.argv(1, "idle.py", (marks,), options)
        agents = [stack.enter_context(started(argv, env=env)) for _ in range(count)]
        yield Job(marks, agents)


def measure_push(turns: Turns) -> None:
    found = turns.compare(
        "worker death to peers", {side.name: partial(_push_ms, side) for side in (HOLDFAST, TORCHRUN)}
    )
    what = "kill -9 of a worker on one node to SIGTERM at a worker on another"
    turns.rows.append(row("push", what, "ms", found, Bound(20)))


def _push_ms(side: Side) -> float:
    with job(side, side.backend, "2", 2) as running:
        running.marks.wait("ready", 0, 2)
        time.sleep(SETTLING_S)
        began_ns = time.monotonic_ns()
        os.kill(running.marks.found("ready")[0].pid, signal.SIGKILL)
        (stopped,) = running.marks.wait("stopped", 0, 1)
        return (stopped.at_ns - began_ns) / NS_PER_MS


# --- lost nodes -----------------------------------------------------------------------------------------------------


def measure_lost_nodes(turns: Turns) -> None:
    cases: list[tuple[str, str, str, Callable[[Job], None], int, float]] = [
        ("tcp", "kill -9 of an agent to the next round running, tcp", "tcp", _kill_agent, 5, 2.5),
        ("etcd", "the same on etcd, of an ordinary node", "etcd", _kill_agent, 5, 2.5),
        ("silent", "SIGSTOP of a node to the next round running, tcp", "tcp", _freeze_node, 3, LEASE_S + 0.5),
        ("host", "kill -9 of the agent and the coordinator on its host, etcd", "etcd", _kill_host, 3, 18),
    ]
    for key, what, backend, strike, repeats, limit_s in cases[: turns.size(4, 2)]:
        side = {HOLDFAST.name: partial(_loss_s, backend, strike)}
        found = turns.compare(f"lost node: {key}", side, repeats=repeats, warm_up=False)
        turns.rows.append(row(f"lost_node.{key}", what, "s", found, Bound(limit_s + WORKER_START_S)))
    if not turns.is_quick:
        turns.notes.append(_torchrun_note(turns))


def _torchrun_note(turns: Turns) -> str:
    """One try, because it is a long one."""
    turns.tell("lost node: torchrun")
    with job(TORCHRUN, TORCHRUN.backend, "1:3", 3) as running:
        running.marks.wait("ready", 0, 3)
        time.sleep(SETTLING_S)
        began_ns = time.monotonic_ns()
        os.kill(running.agent_of(running.marks.found("ready")[1]).pid, signal.SIGKILL)
        try:
            (stopped,) = running.marks.wait("stopped", 0, 1, limit_s=TORCHRUN_LIMIT_S)
        except AssertionError:
            return f"torchrun (c10d), one try: no other worker was stopped within {TORCHRUN_LIMIT_S:g} s."
        took_s = (stopped.at_ns - began_ns) / NS_PER_S
        return f"torchrun (c10d), one try: the first of the other workers was stopped after {took_s:.1f} s."


def _loss_s(backend: str, strike: Callable[[Job], None]) -> float:
    """Seconds until the others run again."""
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdServer()) if backend == "etcd" else None
        endpoint = etcd.get_endpoint() if etcd else ""
        running = stack.enter_context(job(HOLDFAST, backend, "1:3", 3, endpoint))
        running.marks.wait("ready", 0, 3)
        time.sleep(SETTLING_S)
        began_ns = time.monotonic_ns()
        strike(running)
        running.marks.wait("ready", 1, 2)
        return (running.marks.last_ns("ready", 1, 2) - began_ns) / NS_PER_S


def _kill_agent(running: Job) -> None:
    """One that did not start the coordinator."""
    workers = running.marks.found("ready")
    agents = [running.agent_of(worker) for worker in workers.values()]
    os.kill(next(agent.pid for agent in agents if not _coordinators(agent.pid)), signal.SIGKILL)


def _freeze_node(running: Job) -> None:
    agent = running.agent_of(running.marks.found("ready")[1])
    below = psutil.Process(agent.pid).children(recursive=True)
    for process in [psutil.Process(agent.pid), *(each for each in below if not _is_coordinator(each))]:
        process.suspend()


def _kill_host(running: Job) -> None:
    host, coordinators = running.host(), _coordinators(os.getpid())
    assert coordinators, "there is no coordinator"
    os.kill(host.pid, signal.SIGKILL)
    for process in coordinators:
        process.kill()


def _coordinators(below: int) -> list[psutil.Process]:
    return [process for process in psutil.Process(below).children(recursive=True) if _is_coordinator(process)]


def _is_coordinator(process: psutil.Process) -> bool:
    try:
        return any("coordinator" in word for word in process.cmdline())
    except psutil.Error:
        return False
