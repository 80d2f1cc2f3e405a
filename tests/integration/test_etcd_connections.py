"""Connections to an endpoint of etcd, byte by byte: when they are kept, when not, and what a broken one means."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import UserError
from holdfast.rendezvous.etcd_client import EtcdClient, Put, Refused, is_missing
from holdfast.rendezvous.etcd_connections import Answer, Connections, Tls, Trouble
from holdfast.rendezvous.etcd_http import Gateway
from holdfast.testing.etcd_server import EtcdServer
from tests import support
from tests.certificates import make_certificates, openssl
from tests.coordinators import Caller, Proxy

LONG_S = 30.0

Script = Callable[[socket.socket, int], None]
"""What to do when a request has come on a connection, and the how manieth that is in all."""


class Server:
    """Takes requests and does with each what it is told."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.accepted = 0
        self.asked = 0
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                self._held.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while self._has_read_one(client):
                self.asked += 1
                self._script(client, self.asked)

    def _has_read_one(self, client: socket.socket) -> bool:
        data = b""
        while not data.endswith(b"\r\n\r\n{}"):
            piece = client.recv(1 << 16)
            if not piece:
                return False
            data += piece
        return True

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LONG_S)
        for each in self._held:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextlib.contextmanager
def serving(script: Script) -> Iterator[tuple[Server, Connections]]:
    server = Server(script)
    connections = Connections("127.0.0.1", server.port, None)
    try:
        yield server, connections
    finally:
        connections.close()
        server.close()


def ask(connections: Connections, answer_s: float = LONG_S) -> Answer:
    return connections.ask("POST", "/v3/kv/range", b"{}", {}, LONG_S, answer_s)


def fetch(connections: Connections, answer_s: float = LONG_S) -> bytes:
    with ask(connections, answer_s) as answer:
        return b"".join(answer.pieces())


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("says", "is_kept"),
    [
        (OK + b"Content-Length: 5\r\n\r\nhello", True),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n", True),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nTrailer: x\r\n\r\n", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 5\r\n\r\nhello", True),
        (OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", False),
    ],
)
@pytest.mark.parametrize("at_a_time", [1, 1 << 16])
def test_answers(says: bytes, is_kept: bool, at_a_time: int, no_descriptor_leak: None) -> None:
    def script(client: socket.socket, _: int) -> None:
        for start in range(0, len(says), at_a_time):
            client.sendall(says[start : start + at_a_time])

    with serving(script) as (server, connections):
        assert [fetch(connections) for _ in range(3)] == [b"hello"] * 3
        assert server.accepted == (1 if is_kept else 3)


def test_an_answer_that_ends_with_the_connection() -> None:
    def script(client: socket.socket, _: int) -> None:
        client.sendall(OK + b"\r\nhello")
        client.shutdown(socket.SHUT_WR)

    with serving(script) as (_, connections):
        assert [fetch(connections) for _ in range(2)] == [b"hello"] * 2


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"\x15\x03\x01\x00\x02\x02\x46",
        b"HTTP/1.1 two hundred\r\n\r\n",
        OK + b"Content-Length: 9\r\n\r\nhello",
        OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\nhello",
        OK + b"Transfer-Encoding: chunked\r\n\r\nhello\r\n",
        OK + b"X: y\r\n" * 200,
    ],
)
def test_an_answer_that_is_cut_off_or_junk(says: bytes, no_descriptor_leak: None) -> None:
    """Nobody knows what became of the request. The next one is none the worse for it."""

    def script(client: socket.socket, number: int) -> None:
        client.sendall(says if number == 1 else OK + b"Content-Length: 5\r\n\r\nhello")
        if number == 1:
            client.shutdown(socket.SHUT_RDWR)

    with serving(script) as (_, connections):
        with pytest.raises(Trouble) as caught:
            fetch(connections)
        assert caught.value.may_have_happened
        assert fetch(connections) == b"hello"


@pytest.mark.parametrize("begins", [b"", OK, OK + b"Content-Length: 99999\r\n\r\n"])
def test_an_answer_that_comes_byte_by_byte_has_no_more_time_than_others(begins: bytes) -> None:
    is_over = threading.Event()

    def script(client: socket.socket, _: int) -> None:
        client.sendall(begins)
        while not is_over.wait(0.02):
            client.sendall(b"x")

    with serving(script) as (_, connections):
        try:
            with pytest.raises(Trouble, match="no answer in time") as caught:
                fetch(connections, answer_s=0.3)
            assert caught.value.may_have_happened
        finally:
            is_over.set()


def test_a_stream_has_as_much_time_as_it_needs_unless_it_falls_silent() -> None:
    go_on = threading.Event()

    def script(client: socket.socket, _: int) -> None:
        client.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        go_on.wait(LONG_S)
        client.sendall(b"1\r\nb\r\n")

    with serving(script) as (_, connections), ask(connections, answer_s=5) as answer:
        pieces = answer.pieces()
        assert next(pieces) == b"a"
        answer.be_patient(LONG_S)
        go_on.set()
        assert next(pieces) == b"b"
        answer.be_patient(0.1)
        with pytest.raises(Trouble, match="no answer in time"):
            next(pieces)


def test_whoever_reads_finds_the_end_when_another_hangs_up() -> None:
    def script(client: socket.socket, _: int) -> None:
        client.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n")

    with serving(script) as (_, connections), ask(connections) as answer:
        pieces = answer.pieces()
        assert next(pieces) == b"a"
        reading = Caller(lambda: next(pieces))
        answer.hang_up()
        with pytest.raises(Trouble):
            reading.result()
        answer.hang_up()


def test_a_connection_that_was_closed_meanwhile_is_not_used(etcd: EtcdServer) -> None:
    """A transaction that compares is sent once; on such a connection its outcome would be in doubt."""
    proxy = Proxy(etcd.get_port())
    with contextlib.closing(proxy), EtcdClient([f"127.0.0.1:{proxy.port}"]) as client:
        for number in range(5):
            assert client.commit([is_missing(b"c/%d" % number)], [Put(b"c/%d" % number, b"")]).has_succeeded
            [idle] = client._gateways[0]._connections._idle
            proxy.cut()
            support.wait_until(idle.is_readable, "the end of the connection")
        assert client.delete(b"c/", is_prefix=True) == 5


def test_no_more_connections_are_kept_than_needed(no_descriptor_leak: None) -> None:
    everybody = threading.Barrier(20)

    def script(client: socket.socket, number: int) -> None:
        if number <= everybody.parties:
            everybody.wait(LONG_S)
        client.sendall(OK + b"Content-Length: 5\r\n\r\nhello")

    with serving(script) as (server, connections):
        callers = [Caller(fetch, connections) for _ in range(everybody.parties)]
        assert [each.result() for each in callers] == [b"hello"] * 20
        assert len(connections._idle) == 8
        assert fetch(connections) == b"hello"
        assert server.accepted == 20


def test_what_is_in_use_when_all_is_closed_is_closed_later(no_descriptor_leak: None) -> None:
    with serving(lambda client, _: client.sendall(OK + b"Content-Length: 5\r\n\r\nhello")) as (_, connections):
        answer = ask(connections)
        connections.close()
        assert b"".join(answer.pieces()) == b"hello"
        answer.close()
        answer.close()
        assert connections._idle == []


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [("h", "h:2379"), ("https://h:1", "h:1"), ("[::1]:7", "[::1]:7"), ("http://[::1]", "[::1]:2379")],
)
def test_names(endpoint: str, name: str) -> None:
    assert Gateway(endpoint).name == name


def test_nobody_is_there() -> None:
    began = time.monotonic()
    for host, words in (("127.0.0.1", "connection refused"), ("no-such-host.invalid", "name"), ("x" * 70, "name of a")):
        with pytest.raises(Trouble, match=words) as caught:
            ask(Connections(host, support.free_port(), None))
        assert not caught.value.may_have_happened
    assert time.monotonic() - began < LONG_S


def test_another_client_finds_the_same(etcd: EtcdServer) -> None:
    """`etcd3gw` knows the gateway, too, and nothing of us."""
    etcd3gw = pytest.importorskip("etcd3gw")
    theirs = etcd3gw.Etcd3Client(etcd.get_host(), etcd.get_port(), api_path="/v3/")
    with etcd.get_client() as ours:
        ours.put(b"both/1", bytes(range(256)))
        theirs.put("both/2", "of theirs")
        assert theirs.get("both/1") == [bytes(range(256))]
        assert [item.value for item in ours.range(b"both/").items] == [bytes(range(256)), b"of theirs"]
        assert ours.delete(b"both/", is_prefix=True) == 2


def test_nothing_is_loaded_that_holdfast_does_not_need_anyway(etcd: EtcdServer) -> None:
    """An agent has to start fast and stay small."""
    program = """
import sys
from holdfast.rendezvous import legacy_etcd as etcd
from holdfast.rendezvous.etcd_client import EtcdClient

with EtcdClient(sys.argv[1:]) as client:
    client.watch(b"k", client.put(b"k", b"v")).take(30)
print(*{name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"__main__"})
"""
    command = [sys.executable, "-S", "-c", program, etcd.get_endpoint()]
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        command, env={"PYTHONPATH": ":".join(paths)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"holdfast", "msgspec", "typing_extensions"}


# Certificates.


def test_renewed_certificates_are_used(tmp_path: Path) -> None:
    """They live for days where runs live for weeks."""
    made = make_certificates(tmp_path)
    mine = {name: str(tmp_path / f"mine.{name}") for name in ("ca", "pem", "key")}
    for name, file in (("ca", made.other_pem), ("pem", made.stranger_pem), ("key", made.stranger_key)):
        shutil.copy(file, mine[name])
    server = EtcdServer(cert=made.server_pem, key=made.server_key, client_ca=made.ca_pem)
    with server, server.get_client(ca_cert=mine["ca"], cert=mine["pem"], key=mine["key"]) as client:
        with pytest.raises(Refused, match="TLS: CERTIFICATE_VERIFY_FAILED"):
            client.put(b"k", b"v")
        for name, file in (("ca", made.ca_pem), ("pem", made.client_pem), ("key", made.client_key)):
            shutil.copy(file, mine[name])
        client.put(b"k", b"v")


@pytest.mark.parametrize("half_done", ["key", "pem", "ca"])
def test_a_renewal_that_is_half_done_changes_nothing(tmp_path: Path, half_done: str) -> None:
    made = make_certificates(tmp_path)
    mine = {name: str(tmp_path / f"mine.{name}") for name in ("ca", "pem", "key")}
    whole = {"ca": made.ca_pem, "pem": made.client_pem, "key": made.client_key}
    for name, file in whole.items():
        shutil.copy(file, mine[name])
    server = EtcdServer(cert=made.server_pem, key=made.server_key, client_ca=made.ca_pem)
    with server:
        tls = Tls(mine["ca"], mine["pem"], mine["key"])
        for text in ("", "junk", None):
            Path(mine[half_done]).unlink() if text is None else Path(mine[half_done]).write_text(text)
            connect_by(tls, server)
        for name, file in (("ca", made.other_pem), ("pem", made.stranger_pem), ("key", made.stranger_key)):
            shutil.copy(file, mine[name])
        with pytest.raises(ssl.SSLCertVerificationError):
            connect_by(tls, server)


def connect_by(tls: Tls, server: EtcdServer) -> None:
    with socket.create_connection(("127.0.0.1", server.get_port())) as sock, tls.wrap(sock, "127.0.0.1"):
        pass


def test_a_key_with_a_passphrase_is_refused_without_a_question(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    openssl("ec", "-in", "client.key", "-aes128", "-passout", "pass:secret", "-out", "locked.key", cwd=tmp_path)
    with pytest.raises(UserError, match=r"the TLS certificate .*client\.pem with .*locked\.key cannot be used: "):
        Tls(made.ca_pem, made.client_pem, str(tmp_path / "locked.key"))
