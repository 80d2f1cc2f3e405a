"""Who may start a coordinator, and where it is bound."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import HostError
from holdfast.rendezvous.coordinator import launch, process, state_file
from holdfast.rendezvous.coordinator.launch import NotThisHost, Orders, PortTaken
from holdfast.rendezvous.settings import NodeSettings, TlsFiles
from tests.promises import promise, proves

# Addresses that are set apart for documentation: no host has them.
ANOTHER_HOST = "192.0.2.1"
FIRST, SECOND = NodeSettings(http="1"), NodeSettings(http="2")


def can_connect(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5).close()
        return True
    except ConnectionRefusedError:
        return False


def listening(host: str, port: int) -> socket.socket:
    sock = launch.bind(host, port)
    sock.listen()
    return sock


@proves("coordinator.listens-endpoint-address")
def test_a_bound_socket_refuses_until_it_listens() -> None:
    with launch.bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert not can_connect("127.0.0.1", port)
        sock.listen()
        assert can_connect("127.0.0.1", port)


def test_exactly_this_address_is_bound() -> None:
    with listening("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert not can_connect("127.0.0.2", port)


def test_two_can_be_bound_but_only_one_listens() -> None:
    with launch.bind("127.0.0.1", 0) as first, launch.bind("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        with pytest.raises(OSError, match="in use"):
            second.listen()


def test_a_port_where_somebody_listens_is_taken() -> None:
    with listening("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"cannot listen at 127.0.0.1:{port}: the port is taken"):
            launch.bind("127.0.0.1", port)


def test_the_port_of_connections_that_are_over_is_free() -> None:
    with listening("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = sock.accept()
        served.close()  # This side closes first, so its half of the connection lingers.
        client.close()
    with listening("127.0.0.1", port):
        pass


def test_an_address_of_another_host() -> None:
    with pytest.raises(NotThisHost, match="that is not an address of this host"):
        launch.bind(ANOTHER_HOST, 29400)


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(socket.gaierror):
        launch.bind("does-not-exist.invalid", 29400)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may bind every port")
def test_a_port_that_is_not_allowed() -> None:
    with pytest.raises(HostError, match="Permission denied"):
        launch.bind("127.0.0.1", 1)


def test_ipv6() -> None:
    try:
        probe = socket.socket(socket.AF_INET6)
        with closing(probe):
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this host has no IPv6 loopback address")
    with listening("::1", 0) as sock:
        port = sock.getsockname()[1]
        assert can_connect("::1", port)
        assert not can_connect("127.0.0.1", port)


def test_a_coordinator_that_cannot_be_started_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the limit of processes of the user."""

    def refuse(*args: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    async def serve(orders: Orders) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(os, "fork", refuse)
    *_, code = launch.detached("holdfast.rendezvous.coordinator.process")
    with pytest.raises(SystemExit, match=r"^Resource temporarily unavailable$"):
        exec(code, {})
    monkeypatch.setattr(process, "_serve_for_a_run", serve)
    assert process.main([msgspec.json.encode(Orders(3)).decode()]) == 1
    assert capsys.readouterr().err.startswith("cannot start a thread (see ulimit -u")


def test_only_one_is_about_to_start_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds the guard taken while the first starts one, and free again when nobody holds it."""
    seen = []

    def start(sock: socket.socket, guard: socket.socket, settings: NodeSettings, run_id: str) -> None:
        seen.append(settings)
        if len(seen) == 1:
            assert launch.host_at(sock, SECOND, "trial") is False

    monkeypatch.setattr(launch, "start_coordinator", start)
    with launch.bind("127.0.0.1", 0) as sock:
        assert launch.host_at(sock, FIRST, "trial") is True
        assert launch.host_at(sock, SECOND, "trial") is True
    assert seen == [FIRST, SECOND]


@promise("""coordinator.user-host-neither-prevent: Another user of the host can neither prevent a coordinator from being
    started nor read or replace its memory.""")
def test_another_user_cannot_keep_a_coordinator_from_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """By taking what can be taken: names of abstract sockets, and locks on files that every user can open."""
    started: list[NodeSettings] = []
    monkeypatch.setattr(launch, "start_coordinator", lambda sock, guard, settings, run_id: started.append(settings))
    with launch.bind("127.0.0.1", 0) as sock, socket.socket(socket.AF_UNIX) as squatter, open(os.devnull, "ab") as null:
        address, port = sock.getsockname()
        squatter.bind(f"\0holdfast-coordinator-{address}-{port}")
        fcntl.flock(null, fcntl.LOCK_EX)
        assert launch.host_at(sock, FIRST, "trial") is True
        monkeypatch.setattr(state_file, "log_path", lambda name: Path("/proc/nowhere/log"))
        assert launch.host_at(sock, SECOND, "trial") is True
    assert started == [FIRST, SECOND]


def start_instead(
    script: str, path: Path, monkeypatch: pytest.MonkeyPatch, settings: NodeSettings = FIRST, office: Any = None
) -> None:
    """Start a coordinator, where the interpreter is this shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))
    with launch.bind("127.0.0.1", 0) as sock, socket.socket() as guard:
        launch.start_coordinator(sock, guard, settings, "trial", office)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("ready", None),
        ("a warning of the interpreter\nready", None),
        ("", "it ended without a word"),
        ("no such file", "no such file"),
        ("Traceback\n  File\nOSError: broken", "OSError: broken"),
    ],
)
def test_what_a_coordinator_says_when_it_starts(
    said: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raised: AbstractContextManager[Any] = nullcontext()
    if problem is not None:
        raised = pytest.raises(HostError, match=f"cannot be started: {problem}$")
    with raised:
        start_instead(f"cat <<'.'\n{said}\n.", tmp_path / "python", monkeypatch)
    assert caplog.messages == [f"the coordinator: {line}" for line in said.splitlines()[:-1]]


def test_one_that_takes_too_long_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process has ended; the second one, which keeps the pipe open, says nothing."""
    monkeypatch.setattr(launch, "_START_PATIENCE_S", 0.01)
    start_instead("sleep 1 &", tmp_path / "python", monkeypatch)


def test_an_interpreter_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with (
        launch.bind("127.0.0.1", 0) as sock,
        socket.socket() as guard,
        pytest.raises(HostError, match="cannot be started: No such file"),
    ):
        launch.start_coordinator(sock, guard, FIRST, "trial")


@pytest.mark.parametrize(
    ("settings", "office", "expected"),
    [
        (NodeSettings(), None, Orders(0, "trial")),
        (
            NodeSettings(token_file="t", require_token=True, tls=TlsFiles("c", "k", "a"), http="9400"),
            {"run_id": "trial"},
            Orders(0, "trial", "t", True, TlsFiles("c", "k", "a"), "9400", msgspec.Raw(b'{"run_id":"trial"}')),
        ),
    ],
)
def test_a_coordinator_speaks_as_the_node_that_starts_it(
    settings: NodeSettings, office: Any, expected: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told so in its last argument."""
    script = f'for last; do :; done; printf %s "$last" > {tmp_path}/told; echo ready'
    start_instead(script, tmp_path / "python", monkeypatch, settings, office)
    told = msgspec.json.decode((tmp_path / "told").read_text(), type=Orders)
    assert told.fd >= 3
    assert msgspec.structs.replace(told, fd=0) == expected
