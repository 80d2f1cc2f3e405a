"""The health check of the command."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from typing import Any

import pytest

from tests import support
from tests.e2e.command import Holdfast

STUBBORN = """
import signal, time
ends = []
signal.signal(signal.SIGTERM, lambda *_: print("asked to stop", flush=True))
signal.signal(signal.SIGUSR1, lambda *_: ends.append(1))
print("ready", flush=True)
while not ends:
    time.sleep(0.01)
"""


def get(port: int) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=support.DEADLINE_S)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    except ConnectionError:
        return 0, {}
    finally:
        connection.close()


def await_phase(port: int, phase: str) -> tuple[int, dict[str, Any]]:
    return support.wait_until(lambda: (found := get(port))[1].get("phase") == phase and found, f"phase {phase}")


@pytest.mark.parametrize("way", ["option", "variable"])
def test_through_a_run_that_is_stopped_by_a_signal(holdfast: Holdfast, way: str) -> None:
    port = support.free_port()
    options = ("--health-port", str(port)) if way == "option" else ()
    env = {"TORCHELASTIC_HEALTH_CHECK_PORT": "1" if way == "option" else str(port)}
    running = holdfast.start("--grace-period", "60", *options, holdfast.script(STUBBORN), env=env)
    told = {"status": "alive", "phase": "running", "round": 1, "restarts": 0}
    assert await_phase(port, "running") == (200, told)
    # The phase is that of the agent; the worker itself may still be on its way.
    out = holdfast.directory / "1.out"
    support.wait_until(lambda: "ready" in out.read_text(), "the worker's first word")
    running.send(signal.SIGTERM)
    assert await_phase(port, "stopping") == (200, {**told, "phase": "stopping"})
    support.wait_until(lambda: "asked to stop" in out.read_text(), "the worker's second word")
    (worker,) = running.workers()
    os.kill(worker, signal.SIGUSR1)
    ended = running.wait()
    assert ended.code == 143
    assert get(port) == (0, {})


def test_any_free_port_is_told(holdfast: Holdfast) -> None:
    ended = holdfast.run("--health-port", "0", holdfast.script("pass"))
    assert ended.code == 0
    assert any(line.startswith("holdfast: health check on port ") for line in ended.own), str(ended)


def test_a_taken_port_is_one_warning(holdfast: Holdfast) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        ended = holdfast.run("--health-port", str(port), holdfast.script("pass"))
    assert ended.code == 0
    assert ended.own.count(f"holdfast: no health check: port {port} is taken") == 1
