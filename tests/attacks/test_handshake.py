"""Strangers at the door: relays, floods, half-open connections, and tokens that are none."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.rendezvous.api import RendezvousConnectionError
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.frames import encode
from holdfast.rendezvous.membership.model import End, Ended, Expelled, Outcome, Stop
from tests import support
from tests.attacks.harness import MIB, at_most, check_plain, end, honest
from tests.certificates import Certificates
from tests.coordinators import Caller, CoordinatorProcess, coordinator, form, node
from tests.e2e.command import COMMAND, Holdfast
from tests.promises import proves
from tests.relay import Relay

TOKEN = b"0123456789abcdef0123456789abcdef"
ELSEWHERE = "127.0.0.66"  # A source address that is not the one of honest nodes.


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_bytes(TOKEN + b"\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def guarded(tmp_path: Path, token_file: str) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path, "--token-file", token_file) as process:
        yield process


# A relay that does not know the token.

JOB = """
import os, sys, time
open(f"started", "w")
while not os.path.exists("go"):
    time.sleep(0.01)
sys.exit(9)
"""


@pytest.mark.parametrize(
    ("whom", "message"),
    [
        ("agent", Ended(Outcome(End.SUCCEEDED, "all workers have succeeded"))),
        ("agent", Ended(Outcome(End.CLOSED, "closed"))),
        ("agent", Expelled("ha")),
        ("agent", Stop(1, "ha")),
        ("coordinator", protocol.Close("ha")),
        ("coordinator", protocol.Succeeded(1)),
    ],
    ids=["succeeded", "closed", "expelled", "stop", "close", "success"],
)
def test_a_relay_injects_a_message(
    holdfast: Holdfast, guarded: CoordinatorProcess, token_file: str, whom: str, message: object
) -> None:
    """The run ends as its worker does, with the worker's exit code, in its first round."""
    relay = Relay(guarded.port)
    conf = f"token_file={token_file},heartbeat=0.2,lease=10,drop_timeout=5,reconnect_grace=3"
    place = ("--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{relay.port}", "--rdzv-conf", conf)
    running = holdfast.start("--nnodes", "1", *place, holdfast.script(JOB))
    try:
        support.wait_until(lambda: (holdfast.directory / "started").exists(), "the worker runs")
        relay.inject(encode(message), to_target=whom == "coordinator")
        time.sleep(1.0)  # For it to have an effect.
        (holdfast.directory / "go").touch()
        ended = running.wait()
    finally:
        relay.close()
        end(running)
    assert ended.code == 1, f"the agent believed the relay\n{ended}"
    assert "exit code 9" in ended.err or "code 9" in ended.err or "exitcode  : 9" in ended.err, str(ended)
    assert not guarded.lines("round 2 begins"), guarded.log


@contextlib.contextmanager
def strangers(port: int, count: int, says: bytes = b"") -> Iterator[None]:
    """So many connections from elsewhere that prove nothing, and ever new ones in their places."""
    is_over = threading.Event()

    def hold() -> None:
        held: deque[socket.socket] = deque()
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), 2.0, (ELSEWHERE, 0)))
                held[-1].sendall(says)
            if len(held) > count // 4:
                held.popleft().close()
        for sock in held:
            sock.close()

    holders = [Caller(hold) for _ in range(4)]
    try:
        yield
    finally:
        is_over.set()
        for each in holders:
            each.result()


def test_strangers_do_not_use_up_the_descriptors(tmp_path: Path, token_file: str) -> None:
    """The honest is served, and so is a newcomer; the log says it in a few lines."""
    server = CoordinatorProcess(tmp_path, "--token-file", token_file)
    try:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (128, 128))
        with honest(server, token_file), strangers(server.port, 400):
            time.sleep(2.0)
    finally:
        server.close()
        print(f"{len(server.log)} bytes of log")
    assert len(server.log) < 20_000, server.log[-2000:]
    assert "Traceback" not in server.log
    check_plain(server.log)


def test_strangers_that_send_junk_do_not_fill_the_log(guarded: CoordinatorProcess, token_file: str) -> None:
    with honest(guarded, token_file):
        for number in range(1000):
            with socket.create_connection(("127.0.0.1", guarded.port), 5.0, (ELSEWHERE, 0)) as sock:
                sock.sendall(
                    encode(protocol.Denied(f"{number}")) if number % 2 else b"\xff\xff\xff" + bytes([number % 256])
                )
    assert len(guarded.log) < 20_000, guarded.log[-2000:]


def test_half_open_tls_connections_cost_little(tmp_path: Path, certificates: Certificates) -> None:
    """At most 256 at a time, 0.1 MiB each. The nodes of the run do not notice, and a newcomer is let in."""
    files = ("--tls-cert", certificates.server_pem, "--tls-key", certificates.server_key)
    with (
        coordinator(tmp_path, *files) as server,
        node(server.port, tls_ca=certificates.ca_pem) as a,
    ):
        form(a)
        with (
            at_most(server, 128 * MIB),
            strangers(server.port, 1000, b"\x16\x03\x01\x02\x00\x01"),
            node(server.port, tls_ca=certificates.ca_pem) as b,
        ):
            time.sleep(2.0)
            b.join()
            server.await_line("this node stands by")
        assert a.take() == []


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1"])
def test_between_hosts_without_a_token_there_is_a_warning(tmp_path: Path, address: str) -> None:
    with coordinator(tmp_path, address=address) as server:
        lines = [line for line in server.log.splitlines() if "token" in line]
        assert ["holdfast token" in line for line in lines] == ([True] if address == "0.0.0.0" else [])


def test_a_token_can_be_required(holdfast: Holdfast) -> None:
    options = ("--listen", "127.0.0.1:0", "--idle-timeout", "0.2", "--require-token")
    ended = holdfast.run(*options, command=(COMMAND, "coordinator"))
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    assert "holdfast token" in ended.last


@proves("coordinator.token-makes-token-private")
def test_a_new_token_opens_a_coordinator_and_that_of_a_run_opens_the_run_only(
    holdfast: Holdfast, tmp_path: Path
) -> None:
    main, other = (holdfast.run(command=(COMMAND, "token")) for _ in range(2))
    assert main.out != other.out
    token = main.out.strip()
    of_run = holdfast.run("--run", "mine", command=(COMMAND, "token"), env={"HOLDFAST_TOKEN": token})
    assert [each.code for each in (main, other, of_run)] == [0, 0, 0], str(of_run)
    files = [support.write_secret(tmp_path / name, made.raw_out) for name, made in (("main", main), ("of run", of_run))]
    with coordinator(tmp_path, "--token-file", files[0]) as server:
        with (
            node(server.port, "2", "mine", token_file=files[0]) as a,
            node(server.port, "2", "mine", token_file=files[1]) as b,
        ):
            form(a, b)
        with node(server.port, "1", "other", token_file=files[1]) as c, pytest.raises(RendezvousConnectionError):
            form(c)
