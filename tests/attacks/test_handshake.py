"""Strangers at the door: relays, floods, half-open connections, and tokens that are none."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.rendezvous.api import RendezvousConnectionError
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.frames import encode
from holdfast.rendezvous.membership.model import End, Ended, Expelled, Outcome, Stop
from tests import support
from tests.attacks.harness import MIB, Meter, check_plain, end, neighbour, result_of
from tests.certificates import make_certificates
from tests.coordinators import CoordinatorProcess, coordinator, form, node
from tests.e2e.command import COMMAND, Holdfast

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


class Impostor:
    """Passes everything on between an agent and its coordinator, and says something of its own when told to."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._near: socket.socket | None = None
        self._far: socket.socket | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._near, self._far = near, far
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def to_agent(self, message: object) -> None:
        assert self._near is not None
        self._near.sendall(encode(message))

    def to_coordinator(self, message: object) -> None:
        assert self._far is not None
        self._far.sendall(encode(message))

    def close(self) -> None:
        for each in (self._server, self._near, self._far):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()


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
    impostor = Impostor(guarded.port)
    conf = f"token_file={token_file},heartbeat=0.2,lease=10,drop_timeout=5,reconnect_grace=3"
    place = ("--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{impostor.port}", "--rdzv-conf", conf)
    running = holdfast.start("--nnodes", "1", *place, holdfast.script(JOB))
    try:
        support.wait_until(lambda: (holdfast.directory / "started").exists(), "the worker runs")
        (impostor.to_agent if whom == "agent" else impostor.to_coordinator)(message)
        time.sleep(1.0)  # For it to have an effect.
        (holdfast.directory / "go").touch()
        ended = running.wait()
    finally:
        impostor.close()
        end(running)
    assert ended.code == 1, f"the agent believed the relay\n{ended}"
    assert "exit code 9" in ended.err or "code 9" in ended.err or "exitcode  : 9" in ended.err, str(ended)
    assert not guarded.lines("round 2 begins"), guarded.log


# Tokens.


@pytest.mark.parametrize(
    ("mode", "is_taken"), [(0o600, True), (0o400, True), (0o640, True), (0o644, False), (0o602, False)]
)
def test_a_token_file_that_the_world_can_reach(holdfast: Holdfast, tmp_path: Path, mode: int, is_taken: bool) -> None:
    path = tmp_path / "token"
    path.write_bytes(TOKEN)
    path.chmod(mode)
    check_token_file(holdfast, path, is_taken)


@pytest.mark.parametrize(("size", "is_taken"), [(16, True), (15, False), (1, False)])
def test_a_token_that_can_be_guessed(holdfast: Holdfast, tmp_path: Path, size: int, is_taken: bool) -> None:
    path = tmp_path / "token"
    path.write_bytes(TOKEN[:size] + b"\n")
    path.chmod(0o600)
    check_token_file(holdfast, path, is_taken)


def check_token_file(holdfast: Holdfast, path: Path, is_taken: bool) -> None:
    """By the coordinator and by an agent, in one line."""
    options = ("--listen", "127.0.0.1:0", "--token-file", str(path), "--idle-timeout", "0.2")
    place = ("--rdzv-backend", "tcp", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-conf", f"token_file={path}")
    serving = holdfast.start(*options, command=(COMMAND, "coordinator"))
    running = holdfast.start("--nnodes", "1", *place, holdfast.script("pass"))
    try:
        served, ran = result_of(serving), result_of(running)
    finally:
        end(running)
    assert (served.code == 0, ran.code == 0) == (is_taken, is_taken), f"{served}\n{ran}"
    for ended in () if is_taken else (served, ran):
        assert str(path) in ended.last
        assert TOKEN.decode()[:15] not in ended.err


# Floods without the token.


@contextlib.contextmanager
def strangers(port: int, count: int, says: bytes = b"") -> Iterator[None]:
    """So many connections from elsewhere that prove nothing; one that is closed is made again at once."""
    is_over = threading.Event()

    def hold(share: int) -> None:
        held: list[socket.socket] = []
        while not is_over.is_set():
            try:
                for _ in range(share - len(held)):
                    sock = socket.create_connection(("127.0.0.1", port), 2.0, (ELSEWHERE, 0))
                    sock.sendall(says)
                    sock.setblocking(False)
                    held.append(sock)
            except OSError:
                is_over.wait(0.05)
            alive = []
            for sock in held:
                try:
                    is_open = bool(sock.recv(4096))
                except BlockingIOError:
                    is_open = True
                except OSError:
                    is_open = False
                alive += [sock] if is_open else []
                if not is_open:
                    sock.close()
            held = alive
            is_over.wait(0.02)
        for sock in held:
            sock.close()

    threads = [threading.Thread(target=hold, args=(count // 4,), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(30)


def test_strangers_do_not_use_up_the_descriptors(tmp_path: Path, token_file: str) -> None:
    """The neighbour is served, and so is a newcomer; the log says it in a few lines."""
    server = CoordinatorProcess(tmp_path, "--token-file", token_file)
    try:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (128, 128))
        with neighbour(server, token_file), strangers(server.port, 400):
            time.sleep(2.0)
    finally:
        server.close()
        print(f"{len(server.log)} bytes of log")
    assert len(server.log) < 20_000, server.log[-2000:]
    assert "Traceback" not in server.log
    check_plain(server.log)


def test_strangers_that_send_junk_do_not_fill_the_log(guarded: CoordinatorProcess, token_file: str) -> None:
    with neighbour(guarded, token_file):
        for number in range(1000):
            with socket.create_connection(("127.0.0.1", guarded.port), 5.0, (ELSEWHERE, 0)) as sock:
                sock.sendall(
                    encode(protocol.Denied(f"{number}")) if number % 2 else b"\xff\xff\xff" + bytes([number % 256])
                )
    assert len(guarded.log) < 20_000, guarded.log[-2000:]


def test_half_open_tls_connections_cost_little(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    options = ("--tls-cert", certificates.server_pem, "--tls-key", certificates.server_key)
    with coordinator(tmp_path, *options) as server:
        ca = certificates.ca_pem
        with node(server.port, run_id="before", tls_ca=ca) as a:
            form(a)
            meter = Meter(server.process.pid)
            with strangers(server.port, 1000, b"\x16\x03\x01\x02\x00\x01"):
                time.sleep(2.0)
                print(f"{meter.peak_bytes / MIB:.0f} MiB")
                assert meter.peak_bytes < 48 * MIB  # 256 of them, at 0.1 MiB.
                with node(server.port, run_id="meanwhile", tls_ca=ca) as b:
                    form(b)
            assert a.take() == []


# Without a token.


def test_between_hosts_without_a_token_there_is_a_warning(tmp_path: Path) -> None:
    with coordinator(tmp_path, address="0.0.0.0") as server:
        (line,) = [line for line in server.log.splitlines() if "token" in line]
        assert "holdfast token" in line


def test_on_loopback_without_a_token_there_is_none(server: CoordinatorProcess) -> None:
    assert "token" not in server.log


def test_a_token_can_be_required(holdfast: Holdfast) -> None:
    options = ("--listen", "127.0.0.1:0", "--idle-timeout", "0.2", "--require-token")
    ended = holdfast.run(*options, command=(COMMAND, "coordinator"))
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    assert "holdfast token" in ended.last


def test_a_new_token_opens_a_coordinator(holdfast: Holdfast, tmp_path: Path) -> None:
    made = [holdfast.run(command=(COMMAND, "token")) for _ in range(2)]
    assert [each.code for each in made] == [0, 0]
    assert made[0].out != made[1].out
    assert len(made[0].out.strip()) >= 16
    path = tmp_path / "token"
    path.write_bytes(made[0].raw_out)
    path.chmod(0o600)
    with coordinator(tmp_path, "--token-file", str(path)) as server, node(server.port, token_file=str(path)) as a:
        form(a)


def test_the_token_of_one_run_opens_that_run_only(holdfast: Holdfast, tmp_path: Path, token_file: str) -> None:
    """Assumed: the token that it is derived from is found as everywhere else, in HOLDFAST_TOKEN here."""
    made = holdfast.run("--run", "mine", command=(COMMAND, "token"), env={"HOLDFAST_TOKEN": TOKEN.decode()})
    assert made.code == 0, str(made)
    path = tmp_path / "of one run"
    path.write_bytes(made.raw_out)
    path.chmod(0o600)
    with coordinator(tmp_path, "--token-file", token_file) as server:
        with node(server.port, run_id="mine", token_file=str(path)) as a:
            form(a)
        with node(server.port, run_id="other", token_file=str(path)) as b, pytest.raises(RendezvousConnectionError):
            form(b)
