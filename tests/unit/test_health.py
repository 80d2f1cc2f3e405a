"""The health check server: what it answers, to whom, and what callers cannot do to it."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from holdfast import loop
from holdfast.agent import publisher
from holdfast.agent.model import TORCHELASTIC_HEALTH_CHECK_PORT
from holdfast.errors import UserError
from holdfast.loop import BusyTime
from holdfast.telemetry import health
from holdfast.telemetry import http as telemetry_http
from holdfast.telemetry.health import AgentAlive, HealthCheckServer, create_healthcheck_server
from holdfast.telemetry.http import Page, Request, read_request
from holdfast.telemetry.status import AgentStatus
from tests import support
from tests.promises import promise, proves

TIMEOUT_S = 60


@contextmanager
def serving(alive_callback: Any = time.time, port: int = 0) -> Iterator[HealthCheckServer]:
    server = create_healthcheck_server(alive_callback, port, TIMEOUT_S)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def say(port: int, words: bytes) -> bytes:
    """All that a caller hears who says just that, and nothing more, and does not hang up."""
    with socket.create_connection(("127.0.0.1", port), support.DEADLINE_S) as caller:
        caller.sendall(words)
        return b"".join(iter(lambda: caller.recv(4096), b""))


# What is answered.

ALIVE = {"status": "alive"}
RUNNING = {"phase": "running", "round": 2, "restarts": 1}


@proves("health.slow-callers-junk-lack")
@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 200),
        (b"GET /healthz?x=1 HTTP/1.0\r\n\r\n", 200),
        (b"GET / HTTP/1.1\n\n", 200),
        (b"HEAD / HTTP/1.1\r\n\r\n", 200),
        (b"POST / HTTP/1.1\r\n\r\n", 200),
        (b"DELETE / HTTP/1.1\r\n\r\n", 405),
        (b"GET /\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\xff\n\n", 400),
        (b"x" * 8192, 431),
        (b"x" * 8191, None),
        (b"", None),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", None),
    ],
)
def test_answers(request_: bytes, status: int | None) -> None:
    found = read_request(request_)
    assert (200 if isinstance(found, Request) else found and found.status) == status


def test_a_request_and_an_answer_are_http() -> None:
    assert read_request(b"GET /metrics?x=/y HTTP/1.1\r\n\r\n") == Request("/metrics")
    assert read_request(b"HEAD /\xff HTTP/1.1\r\n\r\n") == Request("/\xff", is_head=True)
    page = Page.of(200, ALIVE)
    head, body = page.encoded().split(b"\r\n\r\n")
    assert json.loads(body) == ALIVE
    assert f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")
    assert page.encoded(has_body=False) == head + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("age_s", "reason"),
    [(0, ""), (59, ""), (-3600, ""), (73, "no sign of life for 73 s in phase running, the limit is 60 s")],
)
def test_alive_is_a_matter_of_the_callbacks_time(age_s: float, reason: str) -> None:
    with serving(lambda: time.time() - age_s) as server:
        server.status = lambda: AgentStatus(phase="running", round=2, restarts_used=1)
        told = {"status": "stuck", "reason": reason} if reason else ALIVE
        assert support.get_json(server.port) == (503 if reason else 200, {**told, **RUNNING})
        assert server.alive_callback() <= time.time() - age_s


def test_a_callback_that_fails_is_told() -> None:
    empty: dict[str, Any] = {}
    with serving(lambda: empty["progress"]) as server:
        assert support.get_json(server.port) == (
            503,
            {"status": "stuck", "reason": "the alive callback failed: KeyError: 'progress'"},
        )


def test_over_the_wire_on_ipv4_and_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that sends more than was read gets its answer, too."""
    with serving() as server:
        for host in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            assert support.get_json(server.port, "/healthz", host=host) == (200, ALIVE)
        assert support.get_json(server.port, method="HEAD") == (200, {})
        body = b"POST / HTTP/1.1\r\nContent-Length: 9000\r\n\r\n" + b"x" * 9000
        assert say(server.port, body).startswith(b"HTTP/1.1 413")
        assert say(server.port, b"POST / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405")
        assert say(server.port, b"x" * 9000).startswith(b"HTTP/1.1 431")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with serving() as server:
        assert support.get_json(server.port) == (200, ALIVE)


@promise("health.port-use-server-fails: A port that is in use, or a server that fails, causes one warning.")
def test_a_taken_port_is_one_warning_and_a_free_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    with serving() as first, serving(port=first.port) as second:
        assert (second.port, second.listening_port) == (first.port, None)
        served, refused = caplog.messages
        assert str(first.port) in served
        assert refused.endswith(f"port {first.port} is taken")


def test_the_port_is_released_although_the_callback_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_http, "_STOP_PATIENCE_S", 0.1)
    was_asked, may_end = threading.Event(), threading.Event()

    def hang() -> float:
        was_asked.set()
        may_end.wait(support.DEADLINE_S)
        return time.time()

    with serving(hang) as server, socket.create_connection(("127.0.0.1", server.port)) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert was_asked.wait(support.DEADLINE_S)
        port = server.port
        server.stop()
        with socket.create_server(("", port)):
            pass
        may_end.set()


@promise("""health.slow-callers-junk-lack: Slow callers, junk and a lack of descriptors do not prevent other callers
    from getting an answer.""")
def test_slow_callers_do_not_keep_others_from_being_answered(no_descriptor_leak: None) -> None:
    with serving() as server, ExitStack() as callers:
        for _ in range(200):
            slow = callers.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            slow.sendall(b"GET / HT")
        assert support.get_json(server.port) == (200, ALIVE)
        assert len(server._callers) <= telemetry_http._MOST_CALLERS + 1


@proves("health.slow-callers-junk-lack")
def test_bad_callers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow ones, ones that never end, and ones that hang up at once."""
    monkeypatch.setattr(telemetry_http, "_CALL_LIMIT_S", 0.5)  # Enough for it to be read before.
    with serving() as server:
        assert say(server.port, b"GET / HT") == b""
        with pytest.raises(ConnectionError):
            say(server.port, b"x" * 100_000_000)
        for words in (b"", b"GET", b"GET / HTTP/1.1\r\n\r\n"):
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", server.port)) as caller:
                    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    caller.sendall(words)
        assert support.get_json(server.port) == (200, ALIVE)


SHORTAGE = """
import os, resource, sys, time
from holdfast.telemetry.health import HealthCheckServer

server = HealthCheckServer(time.time, 0, 60)
server.start()
most = len(os.listdir("/proc/self/fd")) - 1
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
print(server.port, flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
sys.stdin.readline()
print(time.process_time(), flush=True)
"""


@proves("health.slow-callers-junk-lack")
def test_without_descriptors_nothing_spins_and_the_caller_waits() -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SHORTAGE], **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), support.DEADLINE_S) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
            caller.settimeout(1.5)
            with pytest.raises(TimeoutError):
                caller.recv(1)
            process.stdin.write("\n")
            process.stdin.flush()
            caller.settimeout(support.DEADLINE_S)
            assert caller.recv(12) == b"HTTP/1.1 200"
        process.stdin.write("\n")
        process.stdin.flush()
        used_s = float(process.stdout.readline())
        assert used_s < 1.0, "it has looked again and again"


def test_a_loop_that_waits_is_not_busy() -> None:
    busy_time = BusyTime()
    read_fd, write_fd = os.pipe()
    states = []

    def deciding() -> None:
        with busy_time.measured_here():
            loop.wait_readable([read_fd], None)

    thread = threading.Thread(target=deciding)
    thread.start()
    support.wait_until(lambda: busy_time.busy_for_s() == 0, "a loop that waits")
    states.append(busy_time.busy_for_s())
    loop.wait_readable([], 0)  # Somebody else's wait is nothing to it.
    states.append(busy_time.busy_for_s())
    os.write(write_fd, b".")
    thread.join()
    assert states == [0, 0]
    assert busy_time.busy_for_s() > 0
    os.close(read_fd)
    os.close(write_fd)


@proves("nodes.agent-loop-turned-whole")
def test_a_loop_in_a_hook_is_busy_but_not_stuck() -> None:
    busy_time = BusyTime()
    with busy_time.measured_here():
        assert busy_time.stuck_for_s() <= busy_time.busy_for_s(), "before any hook"
        with loop.in_hook():
            loop.wait_readable([], 0)
            assert busy_time.busy_for_s() > 0
            assert busy_time.stuck_for_s() == 0
        assert 0 < busy_time.stuck_for_s() < busy_time.busy_for_s()
        loop.wait_readable([], 0)
        assert 0 < busy_time.stuck_for_s() <= busy_time.busy_for_s()


def test_until_there_is_an_agent_the_process_is_alive() -> None:
    alive = AgentAlive()
    server = HealthCheckServer(alive, 0, TIMEOUT_S)
    assert server.condition() == ALIVE
    health.introduce(server, lambda: 0.0, lambda: AgentStatus(phase="joining"))
    assert server.condition()["status"] == "stuck"
    own = HealthCheckServer(time.time, 0, TIMEOUT_S)
    health.introduce(own, lambda: 0.0, lambda: AgentStatus(phase="joining"))
    assert own.condition() == {"status": "alive", "phase": "joining", "round": 0, "restarts": 0}


@promise("health.invalid-port-number-refused: An invalid port number is refused before anything starts.")
@pytest.mark.parametrize("text", ["x", "-1", "65536", "tcp://10.0.0.1:80"])
def test_a_port_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCHELASTIC_HEALTH_CHECK_PORT, text)
    with pytest.raises(UserError, match=f"TORCHELASTIC_HEALTH_CHECK_PORT: '{text}'"):
        publisher.health_address()


@proves("cli.address-serve-health-port")
def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a host it is the loopback address, so that only those who ask for it are reached from outside."""
    assert publisher.health_address() is None
    assert [publisher.health_address(given) for given in (0, ":80", "[::]:80")] == [
        ("127.0.0.1", 0),
        ("127.0.0.1", 80),
        ("::", 80),
    ]
    monkeypatch.setenv(TORCHELASTIC_HEALTH_CHECK_PORT, "8080")
    assert publisher.health_address() == ("127.0.0.1", 8080)
    for host, reached in (("127.0.0.1", False), ("::", True)):
        server = health.server_at(host, 0)
        server.start()
        try:
            with suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", server.port)).close()
                assert reached
                continue
            assert not reached
        finally:
            server.stop()


class Broken:
    """A server of somebody else, which does not work."""

    def start(self) -> None:
        raise OSError("no")

    def stop(self) -> None:
        raise OSError("no, again")


@proves("health.port-use-server-fails")
def test_a_server_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    server = Broken()
    with health.served(server), health.served(server):
        caplog.clear()
    [warning] = caplog.messages
    assert "OSError: no, again" in warning
