"""The health check of real agents: alive in every phase, however long it lasts, and stuck when the loop is.

The limit is short here, and every phase is held for longer than that: an agent that is alive only because it was
seen to do something lately would be called stuck.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import pytest

from holdfast.agent import LocalElasticAgent, RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from holdfast.agent.model import TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_HEALTH_CHECK_PORT
from holdfast.launcher import LaunchConfig, elastic_launch
from holdfast.process import DefaultLogsSpecs
from holdfast.rendezvous.api import rendezvous_handler_registry
from holdfast.rendezvous.static import StandaloneRendezvous
from holdfast.telemetry.health import AgentAlive, HealthCheckServer, create_healthcheck_server
from holdfast.timer import FileTimerServer
from tests import support
from tests.integration.test_agent import Meeting, PluginHandler
from tests.promises import promise, proves

LIMIT_S = 0.3

WORKER = """
import os, signal, sys
if "stubborn" in sys.argv[2:]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1] + os.environ["RANK"]) as gate:
    sys.exit(int(gate.read()))
"""


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Gates:
    """Workers wait at them, each at its own, until they are told how to end."""

    def __init__(self, directory: Path) -> None:
        self.prefix = f"{directory}/gate"
        self.script = support.write_script(directory / "worker.py", WORKER)
        for rank in range(2):
            os.mkfifo(f"{self.prefix}{rank}")

    def open(self, rank: int, exit_code: int = 0) -> None:
        with self.await_at(rank) as gate:
            gate.write(str(exit_code))

    def await_at(self, rank: int) -> TextIO:
        """The gate, with the worker waiting at it."""
        return open(f"{self.prefix}{rank}", "w")


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path)


def await_phase(port: int, phase: str, status: int = 200) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found, told = support.get_json(port)
        return told if (found, told.get("phase")) == (status, phase) else None

    told = support.wait_until(look, f"{status} and phase {phase}")
    assert told is not None
    return told


def assert_stays_alive(port: int, phase: str) -> dict[str, Any]:
    """Past the limit it is alive, or at least is again as soon as the machine lets its loop turn: one that is called
    stuck because nothing happens stays stuck for as long as the phase lasts."""
    await_phase(port, phase)
    time.sleep(2 * LIMIT_S)
    told = await_phase(port, phase)
    assert told["status"] == "alive"
    return told


def short_server() -> HealthCheckServer:
    return create_healthcheck_server(AgentAlive(), support.free_port(), LIMIT_S)


def make_agent(
    server: HealthCheckServer, entrypoint: Any, *args: Any, handler: Any = None, local_world_size: int = 1
) -> LocalElasticAgent:
    spec = WorkerSpec(
        role="trainer",
        local_world_size=local_world_size,
        entrypoint=entrypoint,
        args=args,
        rdzv_handler=handler or StandaloneRendezvous("run"),
        max_restarts=0,
        monitor_interval=0.02,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs("/dev/null"), health_check_server=server)


@promise("""health.agent-alive-200-phase: The agent is alive (200) in every phase, however long it lasts: joining,
    running, stopping a stubborn worker, waiting for other nodes.""")
def test_alive_while_joining_running_and_waiting_for_others(gates: Gates, threads: ThreadPoolExecutor) -> None:
    meeting = Meeting(2)
    servers = [short_server(), short_server()]
    agents = [
        make_agent(server, sys.executable, gates.script, gates.prefix, handler=PluginHandler(meeting, name))
        for server, name in zip(servers, "ab", strict=True)
    ]
    runs = [threads.submit(agents[0].run)]
    assert assert_stays_alive(servers[0].port, "joining")["round"] == 0
    runs.append(threads.submit(agents[1].run))
    assert assert_stays_alive(servers[0].port, "running") == {
        "status": "alive",
        "phase": "running",
        "round": 1,
        "restarts": 0,
    }
    gates.open(0)
    assert_stays_alive(servers[0].port, "finished")
    assert_stays_alive(servers[1].port, "running")
    gates.open(1)
    assert [run.result(support.DEADLINE_S).state for run in runs] == [WorkerState.SUCCEEDED] * 2
    assert [support.get_json(server.port)[0] for server in servers] == [0, 0]


@proves("health.agent-alive-200-phase")
def test_alive_while_a_stubborn_worker_is_in_its_grace_period(gates: Gates, threads: ThreadPoolExecutor) -> None:
    server = short_server()
    agent = make_agent(server, sys.executable, gates.script, gates.prefix, "stubborn", local_world_size=2)
    run = threads.submit(agent.run)
    with gates.await_at(0) as gate:  # It does not end by SIGTERM any more.
        await_phase(server.port, "running")
        gates.open(1, 3)
        assert_stays_alive(server.port, "stopping")
        gate.write("0")
    assert run.result(support.DEADLINE_S).is_failed()


class Hanging(SimpleElasticAgent):
    """Each of its hooks returns when it is allowed to."""

    def __init__(self, spec: WorkerSpec, server: HealthCheckServer) -> None:
        super().__init__(spec)
        self._health_check_server = server
        self.may = {name: threading.Event() for name in ("start", "succeed", "shut down")}

    def _await(self, name: str) -> None:
        assert self.may[name].wait(support.DEADLINE_S)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._await("start")
        return {worker.local_rank: worker.local_rank for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        pass

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(WorkerState.SUCCEEDED if self.may["succeed"].is_set() else WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        self._await("shut down")


@promise("""health.agent-loop-turn-stuck: An agent whose loop does not turn is stuck (503), with the reason, until it
    continues.""")
def test_a_loop_that_hangs_is_stuck_until_it_goes_on(threads: ThreadPoolExecutor) -> None:
    server = short_server()
    spec = WorkerSpec("trainer", 1, StandaloneRendezvous("run"), entrypoint="true", monitor_interval=0.02)
    agent = Hanging(spec, server)
    run: Future[RunResult] = threads.submit(agent.run)
    told = await_phase(server.port, "starting", 503)
    assert told["status"] == "stuck"
    assert told["reason"].startswith("no sign of life for ")
    assert told["reason"].endswith(f" s in phase starting, the limit is {LIMIT_S:g} s")
    agent.may["start"].set()
    assert_stays_alive(server.port, "running")
    agent.may["succeed"].set()
    await_phase(server.port, "ended", 503)
    agent.may["shut down"].set()
    assert run.result(support.DEADLINE_S).state is WorkerState.SUCCEEDED


class LivesByItsWatchdog(LocalElasticAgent):
    def _get_alive_time(self) -> float:
        return self._get_watchdog_progress_time()


@promise("""health.watchdog-hangs-make-agent: A watchdog that hangs does not make the agent look dead, unless a subclass
    says so.""")
@pytest.mark.parametrize(("kind", "status"), [(LocalElasticAgent, 200), (LivesByItsWatchdog, 503)])
def test_a_watchdog_that_hangs_harms_only_who_asked_for_that(
    kind: type[LocalElasticAgent],
    status: int,
    gates: Gates,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TORCHELASTIC_ENABLE_FILE_TIMER, "1")
    monkeypatch.setattr(FileTimerServer, "get_last_progress_time", lambda self: 0)
    server = short_server()
    agent = make_agent(server, sys.executable, gates.script, gates.prefix)
    agent.__class__ = kind
    run = threads.submit(agent.run)
    await_phase(server.port, "running", status)
    gates.open(0)
    assert run.result(support.DEADLINE_S).state is WorkerState.SUCCEEDED


def config(nproc: int = 1, **more: Any) -> LaunchConfig:
    settings = {"rdzv_backend": "standalone", "logs_specs": DefaultLogsSpecs("/dev/null"), "max_restarts": 0}
    return LaunchConfig(1, 1, nproc, **{**settings, **more})


def ask_until_running(port: int, fail_first: bool = False) -> dict[str, Any]:
    """In a worker: what its agent says of itself."""
    if fail_first and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(3)
    return await_phase(port, "running")


@promise("health.answer-phase-round-restarts: The answer has the phase, the round and the restarts.")
@promise("""health.check-works-command-line: The health check works from the command line, from `LaunchConfig`, from the
    environment, with a server that the caller made, and with an agent alone. The port is released at the end.""")
@pytest.mark.parametrize("way", ["config", "environment", "server"])
def test_ways_to_ask_for_it(way: str, monkeypatch: pytest.MonkeyPatch, no_descriptor_leak: None) -> None:
    """Twice in one process, on the same port: it is released at the end. Of two ports the more special one counts."""
    port = support.free_port()
    given = {"health_port": port} if way == "config" else {}
    if way != "server":
        monkeypatch.setenv(TORCHELASTIC_HEALTH_CHECK_PORT, str(port) if way == "environment" else "1")
    for _ in range(2):
        server = create_healthcheck_server(time.time, port, 60) if way == "server" else None
        launch = elastic_launch(config(max_restarts=1, **given), ask_until_running, server)
        assert launch(port, True) == {0: {"status": "alive", "phase": "running", "round": 2, "restarts": 1}}
        assert support.get_json(port)[0] == 0


@proves("health.check-works-command-line")
def test_an_agent_alone_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    port = support.free_port()
    monkeypatch.setenv(TORCHELASTIC_HEALTH_CHECK_PORT, str(port))
    spec = WorkerSpec("trainer", 1, StandaloneRendezvous("run"), entrypoint=ask_until_running, args=(port,))
    result = LocalElasticAgent(spec, DefaultLogsSpecs("/dev/null")).run()
    assert result.return_values[0]["status"] == "alive"
    assert support.get_json(port)[0] == 0


class AskingHandler(StandaloneRendezvous):
    """Asks how the agent is, while the handler is being made and while it is being shut down."""

    def __init__(self, run_id: str, port: int, told: list[Any]) -> None:
        super().__init__(run_id)
        self._ask = lambda: told.append(support.get_json(port))
        self._ask()

    def get_backend(self) -> str:
        return "asking"

    def shutdown(self) -> bool:
        self._ask()
        return super().shutdown()


@promise("""health.check-answers-agent-reached: The health check also answers before the agent has reached the
    rendezvous and after it has left it.""")
def test_it_is_there_before_the_rendezvous_and_after_it() -> None:
    port = support.free_port()
    told: list[tuple[int, dict[str, Any]]] = []
    rendezvous_handler_registry.register("asking", lambda found: AskingHandler(found.run_id, port, told))
    assert elastic_launch(config(health_port=port, rdzv_backend="asking"), "true")() == {0: None}
    assert told == [
        (200, {"status": "alive", "phase": "idle", "round": 0, "restarts": 0}),
        (200, {"status": "alive", "phase": "ended", "round": 1, "restarts": 0}),
    ]


def listening_ports() -> list[int]:
    """In a worker: the ports at which somebody could call it."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with sock:
            is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(sock.getsockname()[1])
    return found


@promise("health.worker-forked-process-keeps: No worker, and no other forked process, keeps the port.")
@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_workers_do_not_have_the_port(start_method: str) -> None:
    """A forked one may have other sockets of this process."""
    port = support.free_port()
    launch = elastic_launch(config(health_port=port, start_method=start_method), listening_ports)
    assert port not in launch()[0]
