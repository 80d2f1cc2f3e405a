"""Who gets in: tokens and certificates, right, wrong, and on one side only. One clear line on each side."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.rendezvous import options
from holdfast.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from holdfast.rendezvous.client import handshake, reachability
from holdfast.rendezvous.client.handshake import TurnedAway
from holdfast.rendezvous.coordinator import connection
from holdfast.rendezvous.handler import CoordinatorHandler
from holdfast.rendezvous.membership import keys, protocol
from holdfast.rendezvous.membership.frames import Malformed, encode
from holdfast.rendezvous.membership.protocol import MAJOR
from tests import support
from tests.certificates import Certificates, make_certificates
from tests.coordinators import (
    Caller,
    CoordinatorProcess,
    Peer,
    Proxy,
    coordinator,
    coordinator_thread,
    form,
    listener,
    node,
)

TOKEN = b"open sesame, says the test"


class Recorder:
    """A socket that notes what is sent."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.sent = sock, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self._sock.sendall(data)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)


def refusal(handler: CoordinatorHandler) -> str:
    with pytest.raises(RendezvousConnectionError) as caught:
        Caller(handler.next_rendezvous).result()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def only_complaint(server: CoordinatorProcess) -> str:
    """The one thing that the coordinator's side has said about strangers, perhaps again in the next minute."""
    server.await_line("127.0.0.1:")
    lines = [line for line in server.log.splitlines() if "127.0.0.1:" in line and "listening" not in line]
    (said,) = {re.sub(r"127\.0\.0\.1:\d+", "somebody", line) for line in lines}
    return said


# Tokens.


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("token") / "token"
    support.write_secret(file, TOKEN + b"\n")
    return file


@pytest.fixture(scope="module")
def with_token(tmp_path_factory: pytest.TempPathFactory, token_file: Path) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path_factory.mktemp("home"), "--token-file", str(token_file)) as process:
        yield process


@pytest.fixture(scope="module")
def without_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path_factory.mktemp("home")) as process:
        yield process


@pytest.fixture(autouse=True)
def _new_page(with_token: CoordinatorProcess, without_token: CoordinatorProcess) -> None:
    with_token.turn_page()
    without_token.turn_page()


def test_the_right_token(with_token: CoordinatorProcess, token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with node(with_token.port, "2", token_file=str(token_file)) as a:
        monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN.decode())
        with node(with_token.port, "2") as b:
            assert {each.number for each in form(a, b)} == {1}


def test_the_wrong_token(with_token: CoordinatorProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "open barley, says the thief")
    with node(with_token.port) as a:
        where = f"127.0.0.1:{with_token.port}"
        assert refusal(a) == f"the coordinator at {where} does not know this agent's token"
    assert only_complaint(with_token).endswith("is turned away: its token is not the one of this coordinator")


def test_a_token_on_the_coordinators_side_only(with_token: CoordinatorProcess) -> None:
    with node(with_token.port) as a:
        assert refusal(a).endswith("turned this agent away: this coordinator wants a token, and it brings none")
    assert only_complaint(with_token).endswith("is turned away: this coordinator wants a token, and it brings none")


def test_a_token_on_the_agents_side_only(without_token: CoordinatorProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN.decode())
    words = "it brings a token, but this coordinator was started without one"
    with node(without_token.port) as a:
        assert refusal(a).endswith(f"turned this agent away: {words}")
    assert only_complaint(without_token).endswith(f"is turned away: {words}")


@pytest.mark.parametrize("answer", [protocol.Ready(), protocol.Welcome()])
def test_a_coordinator_that_only_pretends_to_know_the_token(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN.decode())
    said = encode(protocol.Challenge(MAJOR, bytes(32), True)) + encode(answer)
    with listener(said) as port, node(port) as a:
        assert refusal(a) == f"the coordinator at 127.0.0.1:{port} does not know this agent's token"


def test_a_coordinator_that_wants_no_token_hears_nothing_of_an_agent_that_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN.decode())
    said = encode(protocol.Challenge(MAJOR, bytes(32), False)) + encode(protocol.Welcome())
    with listener(said) as port, node(port) as a:
        assert refusal(a) == f"the coordinator at 127.0.0.1:{port} does not know this agent's token"


def test_what_was_heard_on_one_connection_opens_no_other(with_token: CoordinatorProcess) -> None:
    with Peer(with_token.port) as honest, Peer(with_token.port) as thief:
        honest.sock = recorder = Recorder(honest.sock)
        honest.enter("run", TOKEN)
        thief.await_kind(protocol.Challenge)
        thief.sock.sendall(recorder.sent)
        with pytest.raises(Malformed):  # What it is sent is sealed.
            thief.is_hung_up()


def test_a_token_of_a_run_opens_that_run_only(with_token: CoordinatorProcess) -> None:
    own = keys.run_token(TOKEN, "run")
    with Peer(with_token.port) as peer:
        peer.enter("run", own)
        assert peer.ask("set", "k", values=(b"v",)).problem == ""
    with Peer(with_token.port) as peer, pytest.raises(TurnedAway, match="does not know this agent's token"):
        peer.enter("another run", own)


def test_a_frame_that_was_changed_or_sent_twice_ends_the_connection(with_token: CoordinatorProcess) -> None:
    for spoil in (lambda frame: frame[:-1] + b"!", lambda frame: frame + frame):
        with Peer(with_token.port) as peer:
            peer.enter("run", TOKEN)
            peer.sock.sendall(spoil(peer._frames.sealed(encode(protocol.Heartbeat(1)))))
            assert peer.is_hung_up()
    assert only_complaint(with_token).endswith("a frame whose seal is wrong")


def test_nothing_is_served_before_the_token_is_proved(with_token: CoordinatorProcess) -> None:
    for request in (protocol.StoreRequest(b"", 1, "set", ("k",), (b"v",)), protocol.Close("ha"), protocol.Heartbeat(1)):
        with Peer(with_token.port) as peer:
            peer.await_kind(protocol.Challenge)
            peer.send(request)
            assert peer.receive() is None


def test_an_agent_starts_a_coordinator_with_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN.decode())
    port = support.free_port()
    with node(port, is_host=None) as a:
        form(a)
        monkeypatch.delenv("HOLDFAST_TOKEN")
        with node(port, run_id="another") as stranger:
            assert "wants a token" in refusal(stranger)
        (log,) = tmp_path.glob("holdfast-*/coordinator-*.log")
        words = "is turned away: this coordinator wants a token"
        support.wait_until(lambda: words in log.read_text(), f"{words!r} in the coordinator's log")
        a.set_closed()
        support.wait_until(a.is_closed, "the end of the run")


def test_a_welcome_node_that_is_turned_away_later_keeps_trying(
    tmp_path: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another coordinator at the same port, with another token, does not end a node whose workers may run."""
    monkeypatch.setattr(reachability, "_FIRST_WORD_AFTER_S", 0.0)
    first = CoordinatorProcess(tmp_path, "--token-file", str(token_file), port=support.free_port())
    try:
        with node(first.port, token_file=str(token_file), on_isolation="continue") as a:
            form(a)
            assert a._client is not None
            client = a._client
            first.kill()
            with coordinator(tmp_path, port=first.port) as second:
                second.await_line("is turned away: it brings a token")
                support.wait_until(lambda: "turned this agent away" in client.reach.last_problem, "it was turned away")
                assert a.take() == []
                second.turn_page()
            with coordinator(tmp_path, "--token-file", str(token_file), port=first.port):
                support.wait_until(lambda: client.reach.since is None, "it is welcome again")
                assert a.take() == []
    finally:
        first.close()


# TLS.


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[CoordinatorProcess]:
    options = ("--tls-cert", certificates.server_pem, "--tls-key", certificates.server_key)
    with coordinator(tmp_path_factory.mktemp("home"), *options) as process:
        yield process


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[CoordinatorProcess]:
    options = ("--tls-cert", certificates.server_pem, "--tls-key", certificates.server_key)
    with coordinator(tmp_path_factory.mktemp("home"), *options, "--tls-ca", certificates.ca_pem) as process:
        yield process


def test_a_server_with_a_certificate(secure: CoordinatorProcess, certificates: Certificates) -> None:
    with (
        node(secure.port, "2", tls_ca=certificates.ca_pem) as a,
        node(secure.port, "2", tls_ca=certificates.ca_pem) as b,
    ):
        first, second = form(a, b)
        first.found.store.set("large", bytes(900_000))
        assert second.found.store.get("large") == bytes(900_000)
    with node(secure.port, "1", "by name", endpoint=f"localhost:{secure.port}", tls_ca=certificates.ca_pem) as c:
        assert form(c)[0].number == 1


def test_clients_with_certificates(mutual: CoordinatorProcess, certificates: Certificates) -> None:
    files = {"tls_cert": certificates.client_pem, "tls_key": certificates.client_key, "tls_ca": certificates.ca_pem}
    with node(mutual.port, "2", **files) as a, node(mutual.port, "2", **files) as b:
        assert {each.number for each in form(a, b)} == {1}


def test_a_certificate_of_the_wrong_authority(secure: CoordinatorProcess, certificates: Certificates) -> None:
    secure.turn_page()
    with node(secure.port, tls_ca=certificates.other_pem) as a:
        assert refusal(a).startswith(f"the certificate of 127.0.0.1:{secure.port} is not accepted: ")
    assert "does not get a TLS connection: " in only_complaint(secure)


def test_a_client_without_a_certificate(mutual: CoordinatorProcess, certificates: Certificates) -> None:
    mutual.turn_page()
    with node(mutual.port, tls_ca=certificates.ca_pem) as a:
        assert "certificate" in refusal(a)
    assert "does not get a TLS connection: PEER_DID_NOT_RETURN_A_CERTIFICATE" in only_complaint(mutual)


def test_a_client_with_a_certificate_of_the_wrong_authority(
    mutual: CoordinatorProcess, certificates: Certificates
) -> None:
    mutual.turn_page()
    files = {"tls_cert": certificates.stranger_pem, "tls_key": certificates.stranger_key, "tls_ca": certificates.ca_pem}
    with node(mutual.port, **files) as a:
        assert "certificate" in refusal(a)
    assert "does not get a TLS connection: CERTIFICATE_VERIFY_FAILED" in only_complaint(mutual)


def test_tls_on_the_agents_side_only(without_token: CoordinatorProcess, certificates: Certificates) -> None:
    with node(without_token.port, tls_ca=certificates.ca_pem) as a:
        assert refusal(a).startswith(f"no TLS connection to 127.0.0.1:{without_token.port}: ")
    assert only_complaint(without_token).endswith("speaks TLS, this coordinator does not")


def test_tls_on_the_coordinators_side_only(
    secure: CoordinatorProcess, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    secure.turn_page()
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.3)
    words = "accepts connections but says nothing; is it a coordinator, and without TLS?"
    with node(secure.port, join_timeout=1) as a, pytest.raises(RendezvousTimeoutError, match=re.escape(words)):
        Caller(a.next_rendezvous).result()
    assert "does not get a TLS connection: it went away" in only_complaint(secure)


def test_a_key_that_does_not_belong_to_the_certificate(certificates: Certificates) -> None:
    expected = pytest.raises(UserError, match=r"the TLS certificate .*client.pem with .*server.key cannot be used: ")
    with node(1, tls_cert=certificates.client_pem, tls_key=certificates.server_key) as a, expected:
        a.next_rendezvous()


def test_renewed_certificates_are_used(tmp_path: Path, certificates: Certificates) -> None:
    """Both sides get others, of another authority, while a node is in a round; then its connection is cut."""
    old = (certificates.server_pem, certificates.server_key, certificates.ca_pem)
    new = (certificates.stranger_pem, certificates.stranger_key, certificates.other_pem)
    mine = [str(tmp_path / f"mine.{name}") for name in ("pem", "key", "ca")]

    def renew(files: tuple[str, ...]) -> None:
        for source, target in zip(files, mine, strict=True):
            shutil.copy(source, target)

    renew(old)
    options = [part for pair in zip(("--tls-cert", "--tls-key", "--tls-ca"), mine, strict=True) for part in pair]
    files = dict(zip(("tls_cert", "tls_key", "tls_ca"), mine, strict=True))
    with coordinator(tmp_path, *options) as process, contextlib.closing(Proxy(process.port)) as proxy:
        with node(proxy.port, **files) as a:
            store = form(a)[0].found.store
            store.set("before", "")
            renew(new)
            proxy.cut()
            store.set("after", "")
        with node(process.port, run_id="old ones", tls_ca=old[2], tls_cert=old[0], tls_key=old[1]) as b:
            assert "is not accepted" in refusal(b)


def test_an_agent_starts_a_coordinator_that_speaks_tls(
    tmp_path: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    port = support.free_port()
    host = {"tls_cert": certificates.server_pem, "tls_key": certificates.server_key, "tls_ca": certificates.ca_pem}
    other = {"tls_cert": certificates.client_pem, "tls_key": certificates.client_key, "tls_ca": certificates.ca_pem}
    with node(port, "2", is_host=True, **host) as a, node(port, "2", **other) as b:
        assert {each.number for each in form(a, b)} == {1}
        a.set_closed()
        support.wait_until(lambda: a.is_closed() and b.is_closed(), "the end of the run")


def test_an_agent_that_cannot_start_one_that_speaks_tls(certificates: Certificates) -> None:
    port = support.free_port()
    with node(port, is_host=None, tls_ca=certificates.ca_pem) as a:
        assert refusal(a) == (
            f"nothing listens at 127.0.0.1:{port}, and without tls_cert this node cannot start a coordinator that "
            "speaks TLS"
        )


def test_a_stranger_who_is_slow_with_tls(
    secure: CoordinatorProcess, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connection, "_HANDSHAKE_TIMEOUT_S", 0.3)
    tls = options.TlsFiles(certificates.server_pem, certificates.server_key).load(is_server=True)
    with coordinator_thread(tmp_path, tls=tls) as port, Peer(port) as peer:
        peer.sock.sendall(b"\x16\x03\x01\x02\x00")  # The beginning of a hello that never goes on.
        assert peer.is_hung_up()
