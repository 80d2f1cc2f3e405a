"""A coordinator and whoever turns up there: runs side by side, wrong addresses, other versions, restarts, the end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.errors import UserError
from holdfast.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from holdfast.rendezvous.client import handshake, reachability
from holdfast.rendezvous.coordinator import launch
from holdfast.rendezvous.handler import CoordinatorHandler
from holdfast.rendezvous.membership import model
from holdfast.rendezvous.membership.model import Settings
from tests import support
from tests.coordinators import Caller, CoordinatorProcess, Peer, coordinator, form, listener, node
from tests.promises import promise, proves


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path) as process:
        yield process


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds takes tenths of them."""
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(reachability, "_FIRST_WORD_AFTER_S", 0.2)
    monkeypatch.setattr(reachability, "_DOUBT_S", 0.4)


def refusal(handler: CoordinatorHandler) -> str:
    """The one line that the user of this node sees."""
    with pytest.raises(RendezvousConnectionError) as caught:
        Caller(handler.next_rendezvous).result()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@promise("""coordinator.node-rank-holds-master: The node of rank 0 holds the master port, at all its addresses: no other
    process can be given it at one of them.""")
def test_the_master_port_is_held_by_the_node_of_rank_0(server: CoordinatorProcess) -> None:
    with node(server.port) as a:
        (found,) = form(a)
        place = found.found.bootstrap_store_info
        with socket.create_server((place.master_addr, place.master_port)):
            pass  # A worker can listen there, and whoever wants any free port is not given this one.


@proves("coordinator.endpoint-run-node-run")
def test_runs_are_served_one_after_another(server: CoordinatorProcess) -> None:
    """A handshake fixes nothing; a run that is over, or has no node for a lease, gives way."""
    with Peer(server.port) as looked_in:
        looked_in.enter("zero")
        with node(server.port, "1", "one") as a:
            form(a)
            a.set_closed()
            support.wait_until(a.is_closed, "the end of the first run")
    with Peer(server.port) as vanished:
        vanished.enter("two").join("a", Settings(lease_s=2.0, heartbeat_s=1.0)).await_kind(model.Sealed)
    with node(server.port, "1", "three") as c:
        assert form(c)[0].number == 1
    server.await_line("run 'two' is over: no node is there any more")


def only_the_end_is_left(home: Path) -> bool:
    """How the run ended is kept for nodes that were away; the memory and the log are gone."""
    return [path.suffix for path in home.glob("holdfast-*/*")] == [".ended"]


def first_node(server: CoordinatorProcess, settings: Settings, **facts: Any) -> Peer:
    """A node that has joined when this returns."""
    peer = Peer(server.port).enter(name="first").join("first", settings, **facts)
    peer.ask("check", "anything")
    return peer


@promise("coordinator.loopback-address-refused: A loopback address is refused if other nodes have real addresses.")
def test_a_node_at_a_loopback_address_is_refused_among_others(server: CoordinatorProcess) -> None:
    words = r"its address is 127\.0\.0\.1, .* first is at 192\.0\.2\.7; give this node an address with --local-addr$"
    settings = Settings(2, 2, 30.0, 0.2, close_linger_s=0.3)
    first = first_node(server, settings, address="192.0.2.7")
    with first, node(server.port, "2") as b, pytest.raises(UserError, match=words):
        Caller(b.next_rendezvous).result()


@promise("""coordinator.listens-endpoint-address: The coordinator listens only at the endpoint's address, and not before
    it can answer.""")
def test_it_listens_at_the_given_address_and_nowhere_else(server: CoordinatorProcess) -> None:
    listening = [
        each.laddr
        for each in psutil.Process(server.process.pid).net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    assert [tuple(address) for address in listening] == [("127.0.0.1", server.port)]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), 5)


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def web_server() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@proves("coordinator.nothing-listens-answers-yet")
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("server_at", [web_server, listener])
def test_something_that_says_nothing_at_the_port(server_at: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It may be a frozen coordinator, so the node waits, and says what it sees."""
    with caplog.at_level(logging.WARNING), server_at() as port, node(port, join_timeout=2) as a:
        seen = f"127.0.0.1:{port} accepts connections but says nothing; is it a coordinator, and without TLS?"
        with pytest.raises(RendezvousTimeoutError) as caught:
            Caller(a.next_rendezvous).result()
        assert str(caught.value) == f"could not reach 127.0.0.1:{port} within 2 s; the last attempt: {seen}"
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"cannot reach 127.0.0.1:{port}: {seen} (tried ")


@pytest.mark.usefixtures("hasty")
def test_somebody_who_hangs_up_at_the_port() -> None:
    with listener(hangs_up=True) as port, node(port) as a:
        assert f"cannot reach 127.0.0.1:{port}: it closed the connection (tried " in refusal(a)


@proves("coordinator.wrong-endpoint-ends-first")
@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.6\r\n", b"\x00\x00\x00\x03abc", b"\xff" * 64])
def test_something_else_that_speaks_first(says: bytes) -> None:
    with listener(says) as port, node(port) as a:
        assert refusal(a) == f"127.0.0.1:{port} answers, but it is not a holdfast coordinator"


def test_an_address_that_only_others_can_use(server: CoordinatorProcess) -> None:
    with node(server.port, local_addr="192.0.2.9") as a:
        (found,) = form(a)
        assert found.found.bootstrap_store_info.master_addr == "192.0.2.9"


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def await_free(port: int) -> None:
    def is_free() -> bool:
        try:
            socket.create_server(("127.0.0.1", port)).close()
            return True
        except OSError:
            return False

    support.wait_until(is_free, f"the end of the coordinator at port {port}")


@proves("coordinator.outlives-agent-started")
@pytest.mark.usefixtures("own_home")
def test_several_agents_of_a_host_start_one_coordinator(tmp_path: Path) -> None:
    port = support.free_port()
    with node(port, "3", is_host=None) as a, node(port, "3", is_host=None) as b, node(port, "3", is_host=None) as c:
        assert {each.number for each in form(a, b, c)} == {1}
        for each in (a, b, c):
            each.report_success(1, 10)
        support.wait_until(lambda: all(each.is_closed() for each in (a, b, c)), "success of all")
    await_free(port)
    support.wait_until(lambda: only_the_end_is_left(tmp_path), "the end of its files")


@pytest.mark.usefixtures("own_home")
def test_any_free_port_does_for_one_node() -> None:
    with node(0, is_host=None) as a, node(0, is_host=None) as b:
        (first, second) = form(a, b)
        assert (first.found.world_size, second.found.world_size) == (1, 1)
        a.set_closed()
        b.set_closed()
        support.wait_until(lambda: a.is_closed() and b.is_closed(), "the end of both runs")
    with node(0, "2", is_host=None) as c, pytest.raises(UserError, match=r"127\.0\.0\.1:0 names no port, so 2 nodes"):
        c.next_rendezvous()


@pytest.mark.usefixtures("own_home")
def test_a_coordinator_that_cannot_start_says_why(tmp_path: Path) -> None:
    token = tmp_path / "token"
    support.write_secret(token, "a secret of many bytes")
    port = support.free_port()
    with node(port, is_host=None, token_file=str(token)) as a:
        token.unlink()
        assert refusal(a) == (
            f"the coordinator cannot be started: the token file '{token}' cannot be read: No such file or directory"
        )


@proves("coordinator.node-joins-gave-shutdown")
@pytest.mark.usefixtures("own_home")
def test_a_host_that_cannot_look_up_the_endpoint_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """To connect was refused, so the name did resolve just before."""
    bind, failures = launch.bind, [socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")]

    def bind_later(host: str, port: int) -> socket.socket:
        if failures:
            raise failures.pop()
        return bind(host, port)

    monkeypatch.setattr(launch, "bind", bind_later)
    with node(support.free_port(), is_host=None) as a:
        assert form(a)[0].number == 1
        assert not failures
        a.set_closed()
        support.wait_until(a.is_closed, "the end")


@promise("""coordinator.node-joins-gave-shutdown: A node that joins again after it gave up, or after a shutdown, gets
    the reason why it cannot. A moment in which the endpoint cannot be bound ends nothing.""")
@pytest.mark.usefixtures("hasty")
def test_whoever_joins_again_hears_again_why_it_cannot() -> None:
    with node(support.free_port(), join_timeout=0.3) as a:
        for _ in range(2):
            with pytest.raises(RendezvousTimeoutError, match=r"could not reach .* within 0.3 s"):
                Caller(a.next_rendezvous).result()
        a.shutdown()
        with pytest.raises(RendezvousConnectionError, match="was shut down"):
            Caller(a.next_rendezvous).result()


@proves("coordinator.node-joins-gave-shutdown")
@pytest.mark.usefixtures("no_descriptor_leak")
def test_a_shutdown_while_the_first_join_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is looked up in a thread of its own; what it makes of it later is nobody's."""
    may_go_on = threading.Event()
    monkeypatch.setattr("holdfast.rendezvous.endpoints.own_address", lambda *_: may_go_on.wait() and "127.0.0.1")
    with node(support.free_port()) as a:
        joining = Caller(a.next_rendezvous)
        (thread,) = support.wait_until(
            lambda: [each for each in threading.enumerate() if each.name == "holdfast-client"], "the thread"
        )
        a.shutdown()
        with pytest.raises(RendezvousConnectionError, match="was shut down"):
            joining.result()
        may_go_on.set()
        thread.join()


def test_a_node_that_joins_imports_only_what_it_needs(server: CoordinatorProcess) -> None:
    """Each node of a run pays for it. `encodings.idna` is what Python looks names up with, unless they are bytes."""
    code = (
        "import sys\n"
        "from holdfast.rendezvous.api import RendezvousParameters\n"
        "from holdfast.rendezvous.registry import get_rendezvous_handler\n"
        f"parameters = RendezvousParameters('tcp', 'localhost:{server.port}', 'imports', 1, 1, is_host=False)\n"
        "handler = get_rendezvous_handler(parameters)\n"
        "assert handler.next_rendezvous().rank == 0\n"
        "print(*[name for name in ('encodings.idna', 'asyncio', 'ssl') if name in sys.modules])\n"
        "handler.shutdown()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "\n"


# Holds up an import until somebody opens the gate.
SLOW_IMPORT = """
    import sys

    class Finder:
        def find_spec(name, path=None, target=None):
            if name == "holdfast.rendezvous.coordinator.server":
                with open({mailbox!r}, "w") as box:
                    box.write("importing\\n")
                open({gate!r}).close()

    sys.meta_path.insert(0, Finder)
"""


@proves("coordinator.started-hand-started-agents")
def test_nobody_can_connect_before_it_is_ready_to_answer(tmp_path: Path, mailbox: support.Mailbox) -> None:
    """Agents whose coordinator is started again take a connection for its return; a refusal keeps their leases."""
    gate, port = tmp_path / "gate", support.free_port()
    os.mkfifo(gate)
    support.write_script(tmp_path / "sitecustomize.py", SLOW_IMPORT.format(mailbox=str(mailbox), gate=str(gate)))
    env = {"PYTHONPATH": str(tmp_path)}
    starting = Caller(lambda: CoordinatorProcess(tmp_path, port=port, env=env))
    assert mailbox.take() == ["importing"]
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), support.DEADLINE_S)
    finally:
        support.open_gate(gate)
        process = starting.result()
        process.close()


@proves("coordinator.ends-run-node-connected")
def test_it_ends_when_nobody_has_been_there(tmp_path: Path) -> None:
    process = CoordinatorProcess(tmp_path, "--idle-timeout", "0.3")
    try:
        assert process.process.wait(30) == 0
    finally:
        process.close()


@promise("""coordinator.ends-run-node-connected: The coordinator ends with its run, when no node has connected for a
    while, or when it is told to. The next one continues an unfinished run.""")
def test_it_ends_with_its_run(tmp_path: Path) -> None:
    process = CoordinatorProcess(tmp_path, "--idle-timeout", "60")
    try:
        with node(process.port) as a:
            form(a)
            a.report_success(1, 10)
            support.wait_until(a.is_closed, "success")
        assert process.process.wait(30) == 0
        assert only_the_end_is_left(tmp_path)
    finally:
        process.close()


ENDINGS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])


@proves("coordinator.ends-run-node-connected")
@ENDINGS
def test_it_ends_when_it_is_told_to(tmp_path: Path, number: signal.Signals) -> None:
    process = CoordinatorProcess(tmp_path)
    with Peer(process.port) as peer:
        peer.enter().join("a", Settings(1, 1))
        peer.await_kind(model.Sealed)
        process.process.send_signal(number)
        assert process.process.wait(30) == 0
        assert peer.is_hung_up()


@ENDINGS
def test_it_ends_when_it_is_told_to_while_it_starts(tmp_path: Path, number: signal.Signals) -> None:
    """It reads its token from a pipe, and cannot be ready before that."""
    gate = tmp_path / "token"
    os.mkfifo(gate)
    script = support.write_script(tmp_path / "start.py", "from holdfast.__main__ import run\nrun()\n")
    with support.python(script, "coordinator", "--listen=127.0.0.1:0", f"--token-file={gate}") as process:
        token = support.wait_until(lambda: writer_of(gate), "it waits for the token")
        process.send_signal(number)
        support.await_delivery(process.pid)
        os.write(token, b"a secret of many bytes")
        os.close(token)
        assert process.wait(30) == 0


def writer_of(pipe: Path) -> int | None:
    """The other end of a pipe that somebody reads; None as long as nobody does."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--listen [HOST:]PORT is required"),
        (("--listen", "127.0.0.1:99999"), "'127.0.0.1:99999' is not HOST:PORT or PORT (0 to 65535"),
        (("--listen", "127.0.0.1:0", "--colour", "red"), "unrecognized arguments: --colour red"),
        (("--listen", "127.0.0.1:0", "more"), "unrecognized arguments: more"),
        (("--listen", "127.0.0.1:0", "--token-file", "/no/file"), "the token file '/no/file' cannot be read: No such"),
        (("--listen", "127.0.0.1:0", "--tls-cert", "/no/file"), "the TLS certificate /no/file cannot be used: No such"),
        (("--listen", "127.0.0.1:0", "--tls-ca", "/no/file"), "TLS needs a certificate (tls_cert)"),
        (("--listen", "127.0.0.1:0", "--idle-timeout", "0"), "--idle-timeout 0 is not a time above 0"),
        (("--listen", "127.0.0.1:0", "--idle-timeout", "nan"), "--idle-timeout: 'nan' is not a duration"),
        (("--listen", "127.0.0.1:0", "--idle-timeout", "soon"), "--idle-timeout: 'soon' is not a duration"),
    ],
)
def test_wrong_options(options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = support.refused(capsys, 2, "coordinator", *options)
    assert line.startswith("holdfast coordinator: error: ")
    assert words in line


def test_a_port_that_is_taken(server: CoordinatorProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """An error of the host, not of usage; so is an address of another host."""
    for address, reason in (
        (f"127.0.0.1:{server.port}", "the port is taken"),
        ("192.0.2.1:29400", "that is not an address of this host"),
    ):
        line = support.refused(capsys, 1, "coordinator", "--listen", address)
        assert line == f"holdfast coordinator: error: cannot listen at {address}: {reason}"


@proves("coordinator.ends-run-node-connected")
def test_state_is_kept_when_it_is_stopped_in_the_middle_of_a_run(tmp_path: Path) -> None:
    process = CoordinatorProcess(tmp_path)
    with Peer(process.port) as peer:
        peer.enter().join("a", Settings(1, 1))
        peer.await_kind(model.Sealed)
        process.close()
    assert len(list(tmp_path.glob(f"holdfast-{os.getuid()}/127.0.0.1-{process.port}-*.json"))) == 1
