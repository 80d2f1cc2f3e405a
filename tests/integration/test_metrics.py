"""Metrics of real runs: as a Prometheus server scrapes them, as text, and when a port cannot be had."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.parse
import uuid
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.rendezvous.coordinator import monitoring
from holdfast.rendezvous.etcd_server import EtcdServer
from tests import nodes, support
from tests.coordinators import coordinator
from tests.nodes import Scene
from tests.promises import promise, proves


class Prometheus:
    """A real server that scrapes these ports several times a second."""

    def __init__(self, home: Path, ports: list[int]) -> None:
        targets = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
        config = home / "prometheus.yml"
        config.write_text(
            "scrape_configs:\n  - job_name: holdfast\n    scrape_interval: 300ms\n    scrape_timeout: 300ms\n"
            f"    static_configs:\n      - targets: [{targets}]\n"
        )
        self._port, self._log = support.free_port(), home / "prometheus.log"
        with self._log.open("wb") as log, support.unmarked():  # It is no part of the run.
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={home / 'tsdb'}",
                 f"--web.listen-address=127.0.0.1:{self._port}", "--log.level=warn"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        support.wait_until(self._is_ready, "that Prometheus is ready")

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        with contextlib.suppress(OSError, AssertionError):
            return bool(support.get_page(self._port, "/-/ready"))
        return False

    def ask(self, path: str, **parameters: str) -> Any:
        answer = json.loads(support.get_page(self._port, f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, query: str) -> list[float]:
        return [float(each["value"][1]) for each in self.ask("query", query=query)["result"]]

    def await_value(self, query: str, expected: float) -> None:
        support.wait_until(lambda: self.values(query) == [expected], f"{query} to be {expected}")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(support.DEADLINE_S)


@promise("""health.real-prometheus-server-scrapes: A real Prometheus server scrapes agents and coordinator through a
    failure and a restart.""")
def test_a_prometheus_server_scrapes_a_run_with_a_failure(scene: Scene, tmp_path: Path) -> None:
    support.need_tools("prometheus", "promtool")
    run_port, *agent_ports = (support.free_port() for _ in range(3))
    with contextlib.closing(Prometheus(tmp_path, [run_port, *agent_ports])) as prometheus:
        for name, port in zip("ab", agent_ports, strict=True):
            options = ("--http", str(run_port), "--health-port", str(port), "--max-restarts", "3")
            scene.start(name, "2", "--nproc-per-node", "2", *options)
        scene.await_world(4)
        here = f'{{run_id="{scene.run_id}"}}'
        prometheus.await_value("sum(up)", 3)
        prometheus.await_value(f"holdfast_run_world_size{here}", 4)
        prometheus.await_value("sum(holdfast_run_restarts_total)", 0)
        scene.order("raise it broke", rank=2, round=1)
        scene.await_world(4, after=1)

        prometheus.await_value('holdfast_run_restarts_total{cause="failure"}', 1)
        prometheus.await_value('sum(holdfast_agent_workers{state="running"})', 4)
        prometheus.await_value('sum(holdfast_agent_restarts_total{cause="failure"})', 2)
        prometheus.await_value('holdfast_run_phase{phase="running"}', 1)
        prometheus.await_value("holdfast_run_round", 2)
        prometheus.await_value("count(holdfast_agent_detection_seconds)", 1)  # Of the node of the failure.
        assert prometheus.values("holdfast_run_goodput_ratio > 0 and holdfast_run_goodput_ratio < 1") != []
        assert prometheus.values("holdfast_run_lost_seconds_total > 0") != []
        assert prometheus.values('sum(holdfast_agent_log_lines_total{stream="stderr"}) > 0') != []  # The traceback.
        phases = "sum by (run_id) (holdfast_run_phase_seconds_total) / on (run_id) holdfast_run_wall_seconds_total"
        assert prometheus.values(phases) == [pytest.approx(1, abs=0.01)]
        # It has understood what each of them is.
        kinds = {each["metric"]: each["type"] for each in prometheus.ask("targets/metadata", limit="1000")}
        assert kinds["holdfast_run_restarts_total"] == "counter"
        assert kinds["holdfast_agent_goodput_ratio"] == "gauge"
        for port in (run_port, *agent_ports):
            page = support.get_page(port, "/metrics")
            checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True)
            assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
        scene.order("exit 0")
        assert scene.ended() == {"a": 0, "b": 0}
        # What was scraped stays, and the counters never fell.
        assert prometheus.values("sum(resets(holdfast_run_lost_seconds_total[10m]))") in ([0], [])


def value(port: int, name: str, **labels: str) -> float | None:
    found = [
        each.value
        for family in text_string_to_metric_families(support.get_page(port, "/metrics"))
        for each in family.samples
        if each.name == name and labels.items() <= each.labels.items()
    ]
    return found[0] if found else None


TALKER = """
import os, sys, time
import holdfast

holdfast.progress(41)
for number in range(5):
    print("line", number, flush=True)
print("oh", file=sys.stderr, flush=True)
while not os.path.exists(os.path.join(sys.argv[1], "go")):
    time.sleep(0.01)
sys.exit(int(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"))
"""


@promise("""health.port-agent-metrics-metrics: The health port has the agent's metrics at `/metrics`; every other path
    is the probe. They are counted through restarts.""")
@proves("health.check-works-command-line")
def test_lines_steps_and_the_probe_of_one_node(scene: Scene) -> None:
    """What was copied is counted through restarts. Any other path is the probe, as before."""
    port = support.free_port()
    script = support.write_script(scene.home / "talker.py", TALKER)
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--health-port", str(port))
    node = scene.start_standalone("a", *options, script=script)
    try:
        await_lines(port, 10)
        assert value(port, "holdfast_agent_log_bytes_total", stream="stdout") == 10 * len("line 0\n")
        assert value(port, "holdfast_agent_log_lines_total", stream="stderr") == 2
        assert value(port, "holdfast_agent_worker_step", rank="1") == 41
        assert value(port, "holdfast_agent_restarts_total", cause="failure") == 0
        for path in ("/", "/healthz", "/metrics/", "/metric", "//metrics"):
            assert json.loads(support.get_page(port, path))["status"] == "alive"
        (scene.home / "go").touch()  # The workers of the first round fail, and those of the second succeed at once.
        assert node.wait() == 0
    finally:
        (scene.home / "go").touch()


def await_lines(port: int, count: int) -> None:
    def find() -> bool:
        with contextlib.suppress(OSError):
            return value(port, "holdfast_agent_log_lines_total", stream="stdout") == count
        return False

    support.wait_until(find, f"{count} lines")


@proves("health.http-coordinator-metrics-run")
def test_on_etcd_the_elected_coordinator_serves_them(tmp_path: Path, etcd: EtcdServer) -> None:
    port = support.free_port()
    home, mark = tmp_path / uuid.uuid4().hex[:8], os.environ[support.TEST_MARK]
    with nodes.scene(home, mark, etcd=etcd.get_endpoint()) as scene:
        for name in "ab":
            scene.start(name, "2", "--http", str(port))
        scene.await_world(2)
        assert value(port, "holdfast_run_nodes", run_id=scene.run_id) == 2
        scene.order("exit 0")
        assert scene.ended() == {"a": 0, "b": 0}


@promise("""health.port-address-metrics-warning: A port or address for metrics that cannot be had is one warning, and
    the job goes on.""")
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:{taken}", "cannot listen at 127.0.0.1:{taken}: the port is taken"),
        ("192.0.2.1:9400", "that is not an address of this host"),
        ("no.such.host.invalid:9400", "cannot be used: "),
    ],
)
def test_an_address_that_cannot_be_used_is_one_warning(tmp_path: Path, address: str, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with coordinator(tmp_path, "--http", address.format(taken=port)) as server:
            assert why.format(taken=port) in server.await_line("no metrics: ")


@promise("""health.http-coordinator-metrics-run: With `--http` the coordinator has the metrics of its run, on the
    loopback address unless another is given.""")
def test_by_hand_it_listens_on_loopback_alone(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--http", ":0") as server:
        found = re.search(r"metrics at http://127\.0\.0\.1:(\d+)/metrics", server.await_line("metrics at"))
        assert found
        port = int(found[1])
        assert json.loads(support.get_page(port)) == {"status": "alive", "runs": 0}
        assert "holdfast_coordinator_runs 0.0" in support.get_page(port, "/metrics")
        with socket.create_server(("127.0.0.2", port)):  # The port is free on every other address.
            pass


@promise("health.coordinator-loop-stands-reported: A coordinator whose loop stands still is reported (503).")
def test_a_coordinator_whose_loop_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "_PATIENCE_S", 0.2)
    may_end, served = threading.Event(), threading.Event()
    servers: list[monitoring.MonitoringServer] = []

    async def stand_still() -> None:
        servers.append(monitoring.MonitoringServer(("127.0.0.1", 0), None))  # type: ignore[arg-type]
        servers[0].start()
        served.set()
        may_end.wait(support.DEADLINE_S)

    thread = threading.Thread(target=lambda: asyncio.run(stand_still()))
    thread.start()
    try:
        assert served.wait(support.DEADLINE_S)
        port = servers[0].listening_port
        assert port is not None
        for path in ("/", "/metrics"):
            said = json.loads(support.get_page(port, path, status=503))
            assert said == {"status": "stuck", "reason": "the coordinator did not answer within 0.2 s"}
    finally:
        may_end.set()
        thread.join()
        servers[0].stop()


@promise("health.library-metrics-imported-first: The library for metrics is imported when the first reader comes.")
def test_the_library_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys, holdfast.telemetry.health, holdfast.cli.coordinator, holdfast.agent.publisher; "
        "sys.exit(any(name.startswith(('prometheus_client', 'opentelemetry')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
