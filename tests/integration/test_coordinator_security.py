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

from holdfast.rendezvous import settings
from holdfast.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from holdfast.rendezvous.client import handshake, reachability
from holdfast.rendezvous.client.handshake import TurnedAway
from holdfast.rendezvous.coordinator import connection
from holdfast.rendezvous.handler import CoordinatorHandler
from holdfast.rendezvous.membership import keys, protocol
from holdfast.rendezvous.membership.frames import Malformed, encode
from holdfast.rendezvous.membership.model import Sealed, Settings, Stop
from holdfast.rendezvous.membership.protocol import MAJOR
from holdfast.rendezvous.settings import TlsFiles
from tests import support
from tests.certificates import Certificates
from tests.coordinators import Caller, CoordinatorProcess, Peer, coordinator, coordinator_thread, form, listener, node
from tests.promises import promise, proves
from tests.relay import Relay

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


def refusal(handler: CoordinatorHandler) -> str:
    with pytest.raises(RendezvousConnectionError) as caught:
        Caller(handler.next_rendezvous).result()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def only_complaint(server: CoordinatorProcess) -> str:
    """The one thing that the coordinator's side has said about strangers, perhaps again in the next minute."""

    def complaints() -> set[str]:
        lines = [line for line in server.lines("127.0.0.1:") if "listening" not in line]
        return {re.sub(r"127\.0\.0\.1:\d+", "a client", line) for line in lines}

    (said,) = support.wait_until(complaints, f"a line about a client in\n{server.log}")
    return said


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    return support.write_secret(tmp_path / "token", TOKEN + b"\n")


@pytest.fixture
def server(
    request: pytest.FixtureRequest, tmp_path: Path, token_file: str, certificates: Certificates
) -> Iterator[CoordinatorProcess]:
    """With a token, or as the parameter says."""
    tls = ("--tls-cert", certificates.server_pem, "--tls-key", certificates.server_key)
    options = {
        "plain": (),
        "token": ("--token-file", token_file),
        "tls": tls,
        "mutual": (*tls, "--tls-ca", certificates.ca_pem),
    }
    with coordinator(tmp_path, *options[getattr(request, "param", "token")]) as process:
        yield process


def of_kind(kind: str) -> Any:
    return pytest.mark.parametrize("server", [kind], indirect=True)


@promise("""coordinator.token-sides-prove-know: With a token both sides prove that they know it before anything is
    served, the coordinator first. A wrong token, or a token on one side only, causes one clear line on each side.""")
def test_the_right_token(server: CoordinatorProcess, token_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with node(server.port, "2", token_file=token_file) as a:
        monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN.decode())
        with node(server.port, "2") as b:
            assert {each.number for each in form(a, b)} == {1}


@proves("coordinator.token-sides-prove-know")
def test_the_wrong_token(server: CoordinatorProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "open barley, says the thief")
    with node(server.port) as a:
        where = f"127.0.0.1:{server.port}"
        assert refusal(a) == f"the coordinator at {where} does not know this agent's token"
    assert only_complaint(server).endswith("is turned away: its token is not the one of this coordinator")


@proves("coordinator.token-sides-prove-know")
@pytest.mark.parametrize(
    ("server", "token", "words"),
    [
        ("token", "", "this coordinator wants a token, and it brings none"),
        ("plain", TOKEN.decode(), "it brings a token, but this coordinator was started without one"),
    ],
    indirect=["server"],
)
def test_a_token_on_one_side_only(
    server: CoordinatorProcess, monkeypatch: pytest.MonkeyPatch, token: str, words: str
) -> None:
    if token:
        monkeypatch.setenv("HOLDFAST_TOKEN", token)
    with node(server.port) as a:
        assert refusal(a).endswith(f"turned this agent away: {words}")
    assert only_complaint(server).endswith(f"is turned away: {words}")


@proves("coordinator.token-sides-prove-know")
@pytest.mark.parametrize(
    ("wants_token", "answer"), [(True, protocol.Proved()), (True, protocol.Welcome()), (False, protocol.Welcome())]
)
def test_a_coordinator_that_does_not_prove_the_token_hears_nothing(
    monkeypatch: pytest.MonkeyPatch, wants_token: bool, answer: Any
) -> None:
    """Whether it pretends to know the token or wants none."""
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN.decode())
    said = encode(protocol.Challenge(MAJOR, bytes(32), wants_token)) + encode(answer)
    with listener(said) as port, node(port) as a:
        assert refusal(a) == f"the coordinator at 127.0.0.1:{port} does not know this agent's token"


@promise("""coordinator.token-frame-sealed-heard: With a token every frame is sealed. What was heard on one connection
    opens no other; a frame that was made up, changed, repeated, dropped or reordered on the way ends the
    connection.""")
def test_what_was_heard_on_one_connection_opens_no_other(server: CoordinatorProcess) -> None:
    with Peer(server.port) as honest, Peer(server.port) as thief:
        honest.sock = recorder = Recorder(honest.sock)  # type: ignore[assignment]
        honest.enter("run", TOKEN)
        thief.await_kind(protocol.Challenge)
        thief.sock.sendall(recorder.sent)
        with pytest.raises(Malformed):  # What it is sent is sealed.
            thief.is_hung_up()


@proves("coordinator.endpoint-run-node-run")
def test_a_coordinator_with_the_token_of_one_run_names_it_to_no_other(tmp_path: Path) -> None:
    """It cannot check what a node of another run knows."""
    token = keys.run_token(TOKEN, "run")
    with coordinator_thread(tmp_path, token=token) as port, Peer(port) as own, Peer(port) as other:
        own.enter("run", token).join("a", Settings(2, 2)).ask("check", "k")
        with pytest.raises(TurnedAway, match="serves another run; all nodes of a run need the same --rdzv-id"):
            other.enter("another run", TOKEN)


def test_an_agent_starts_a_coordinator_with_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN.decode())
    port = support.free_port()
    with node(port, is_host=None) as a:
        form(a)
        monkeypatch.delenv("HOLDFAST_TOKEN")
        with node(port) as stranger:
            assert "wants a token" in refusal(stranger)
        (log,) = tmp_path.glob("holdfast-*/coordinator-*.log")
        words = "is turned away: this coordinator wants a token"
        support.wait_until(lambda: words in log.read_text(), f"{words!r} in the coordinator's log")
        a.set_closed()
        support.wait_until(a.is_closed, "the end of the run")


def test_a_welcome_node_that_is_turned_away_later_keeps_trying(
    tmp_path: Path, token_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another coordinator at the same port, with another token, does not end a node whose workers may run."""
    monkeypatch.setattr(reachability, "_FIRST_WORD_AFTER_S", 0.0)
    first = CoordinatorProcess(tmp_path, "--token-file", token_file, port=support.free_port())
    try:
        with node(first.port, token_file=token_file, on_isolation="continue") as a:
            form(a)
            assert a._client is not None
            client = a._client
            first.kill()
            with coordinator(tmp_path, port=first.port) as second:
                second.await_line("is turned away: it brings a token")
                support.wait_until(lambda: "turned this agent away" in client.reach.last_problem, "it was turned away")
                assert a.take() == []
                second.turn_page()
            with coordinator(tmp_path, "--token-file", token_file, port=first.port):
                support.wait_until(lambda: client.reach.since is None, "it is welcome again")
                assert a.take() == []
    finally:
        first.close()


@promise("""coordinator.tls-works-certificates-side: TLS works with certificates of one side or of both. A certificate
    of another authority, a missing certificate, and TLS on one side only are reported.""")
@of_kind("tls")
def test_a_server_with_a_certificate(server: CoordinatorProcess, certificates: Certificates) -> None:
    by_name = {"endpoint": f"localhost:{server.port}", "tls_ca": certificates.ca_pem}
    with node(server.port, "2", tls_ca=certificates.ca_pem) as a, node(server.port, "2", **by_name) as b:
        first, second = form(a, b)
        first.found.store.set("large", bytes(900_000))
        assert second.found.store.get("large") == bytes(900_000)


@proves("coordinator.tls-works-certificates-side")
@of_kind("mutual")
def test_clients_with_certificates(server: CoordinatorProcess, certificates: Certificates) -> None:
    files = {"tls_cert": certificates.client_pem, "tls_key": certificates.client_key, "tls_ca": certificates.ca_pem}
    with node(server.port, "2", **files) as a, node(server.port, "2", **files) as b:
        assert {each.number for each in form(a, b)} == {1}


@proves("coordinator.tls-works-certificates-side")
@pytest.mark.parametrize(
    ("server", "files", "words", "complaint"),
    [
        ("tls", {"tls_ca": "other_pem"}, "the certificate of 127.0.0.1:{port} is not accepted: ", "TLS connection: "),
        ("mutual", {"tls_ca": "ca_pem"}, "certificate", "TLS connection: PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        ("mutual", {"tls_ca": "ca_pem", "tls_cert": "stranger_pem", "tls_key": "stranger_key"}, "certificate",
         "TLS connection: CERTIFICATE_VERIFY_FAILED"),
        ("plain", {"tls_ca": "ca_pem"}, "no TLS connection to 127.0.0.1:{port}: ",
         "speaks TLS, this coordinator does not"),
    ],
    indirect=["server"],
    ids=["of another authority", "none", "the agent's of another authority", "TLS on the agent's side only"],
)  # fmt: skip
def test_a_certificate_that_is_not_accepted(
    server: CoordinatorProcess, certificates: Certificates, files: dict[str, str], words: str, complaint: str
) -> None:
    with node(server.port, **{name: getattr(certificates, file) for name, file in files.items()}) as a:
        assert words.format(port=server.port) in refusal(a)
    assert complaint in only_complaint(server)


@proves("coordinator.tls-works-certificates-side")
@of_kind("tls")
def test_tls_on_the_coordinators_side_only(server: CoordinatorProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.3)
    words = "accepts connections but says nothing; is it a coordinator, and without TLS?"
    with node(server.port, join_timeout=1) as a, pytest.raises(RendezvousTimeoutError, match=re.escape(words)):
        Caller(a.next_rendezvous).result()
    assert "does not get a TLS connection: it went away" in only_complaint(server)


@promise("""coordinator.certificates-renewed-run: Certificates can be renewed while a run is active: the coordinator
    uses them for new connections, agents when they reconnect. A half-finished renewal changes nothing.""")
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
    with coordinator(tmp_path, *options) as process, contextlib.closing(Relay(process.port)) as proxy:
        with node(proxy.port, **files) as a:
            store = form(a)[0].found.store
            store.set("before", "")
            renew(new)
            proxy.hang_up()
            store.set("after", "")
        with node(process.port, tls_ca=old[2], tls_cert=old[0], tls_key=old[1]) as b:
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


def test_a_stranger_that_is_slow_with_tls(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connection, "_HANDSHAKE_TIMEOUT_S", 0.3)
    tls = settings.TlsFiles(certificates.server_pem, certificates.server_key).load(is_server=True)
    with coordinator_thread(tmp_path, tls=tls) as port, Peer(port) as peer:
        peer.sock.sendall(b"\x16\x03\x01\x02\x00")  # The beginning of a hello that never goes on.
        assert peer.is_hung_up()


@proves("coordinator.close-doubtful-gives-place")
def test_a_node_that_is_killed_is_noticed_by_the_end_of_its_connection(
    tmp_path: Path, certificates: Certificates
) -> None:
    """It cannot say the goodbye of TLS. The others hear of it after the drop timeout, not after the lease."""
    tls = TlsFiles(certificates.server_pem, certificates.server_key).load(is_server=True)
    settings = Settings(2, 2, lease_s=60.0, drop_timeout_s=0.2)
    client = TlsFiles(ca=certificates.ca_pem).load()
    assert client is not None
    with coordinator_thread(tmp_path, tls=tls) as port, Peer(port) as a, Peer(port) as b:
        for name, peer in (("a", a), ("b", b)):
            peer.sock = client.context().wrap_socket(peer.sock, server_hostname="127.0.0.1")
            peer.enter("run", name=name).join(name, settings)
        b.await_kind(Sealed)
        a.close()
        assert b.await_kind(Stop).reason == "a is lost: its connection closed and it was not back within 0.2 s"
