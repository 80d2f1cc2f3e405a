"""The client of etcd, against real servers and against things that are no etcd."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.rendezvous.etcd import gateway as module
from holdfast.rendezvous.etcd.gateway import (
    EtcdError,
    EtcdRefused,
    Fields,
    Gateway,
    LeaseGone,
    Unavailable,
    delete,
    has_value,
    is_missing,
    put,
)
from holdfast.rendezvous.etcd_server import EtcdServer
from holdfast.rendezvous.settings import TlsFiles
from tests import support
from tests.certificates import Certificates
from tests.coordinators import Caller, listener
from tests.etcd_cluster import EtcdCluster
from tests.guarded_etcd import ROOT, call, etcd_with_users, leader_of
from tests.promises import promise, proves
from tests.relay import Relay

LONG_S = 30.0
OK = b"HTTP/1.1 200 OK\r\n"
VALUE = b'{"header":{},"kvs":[{"key":"aw==","value":"dg=="}]}'


@pytest.fixture
def etcd_gateway(etcd: EtcdServer) -> Iterator[Gateway]:
    """Without what other tests have left in the same etcd."""
    with Gateway([etcd.get_endpoint()]) as gateway:
        for key in (b"k", b"other", b"gone", b"old"):
            gateway.delete(key)
        yield gateway


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster(options=["--heartbeat-interval=50", "--election-timeout=500"]) as found:
        yield found


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of several attempts has as much time as the first, so the error tells what it found."""
    monkeypatch.setattr(module, "_LEAST_ATTEMPT_S", LONG_S)


class Server(socketserver.ThreadingTCPServer):
    """Does with each HTTP request what the script says, which is given the connection and the request's number, and
    closes the connection, as it is asked to."""

    def __init__(self, script: Callable[[socket.socket, int], None]) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.daemon_threads, self._script = True, script
        self.endpoint = f"127.0.0.1:{self.server_address[1]}"
        self.asked = 0
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        with contextlib.suppress(OSError), request.makefile("rb") as incoming:
            incoming.readline()
            incoming.read(int(http.client.parse_headers(incoming).get("Content-Length", 0)))
            self.asked += 1
            self._script(request, self.asked)

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


def answering(status: str, body: bytes = b"", headers: bytes = b"") -> Server:
    """Says the same to every request."""
    said = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n%s" % (status.encode(), len(body), headers, body)
    return Server(lambda client, _: client.sendall(said))


def test_keys(etcd_gateway: Gateway) -> None:
    assert etcd_gateway.get(b"k") is None
    for value in (bytes(range(256)), b""):
        etcd_gateway.put(b"k", value)
        assert etcd_gateway.get(b"k") == value
    for _ in range(2):
        etcd_gateway.delete(b"k")
        assert etcd_gateway.get(b"k") is None
    with pytest.raises(EtcdRefused, match=r"too large|larger than max"):
        etcd_gateway.put(b"k", bytes(2 << 20))
    etcd_gateway.check_version()


def test_no_part_of_a_request_has_more_time_than_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = 100.0, []
    monkeypatch.setattr(module.time, "monotonic", lambda: now)

    class Slow(socket.socket):
        def settimeout(self, value: float | None) -> None:
            given.append(value)

        def sendall(self, *_: Any) -> None:
            nonlocal now
            now += 1.0

        def recv(self, *_: Any) -> bytes:
            nonlocal now
            now += 0.5
            return b""

    def connect(*_: Any) -> socket.socket:
        nonlocal now
        now += 2.0
        return Slow()

    monkeypatch.setattr(module.socket, "create_connection", connect)
    with pytest.raises(Unavailable):
        module._Member("host", ()).ask("/version", None, "", 104.0)
    assert given == [2.0, 1.0]


@pytest.mark.parametrize(
    ("compare", "found"),
    [
        (has_value(b"k", b"v"), (True, None)),
        (has_value(b"k", b"w"), (False, b"v")),
        (has_value(b"gone", b""), (False, b"v")),
        (is_missing(b"k"), (False, b"v")),
        (is_missing(b"gone"), (True, None)),
    ],
)
def test_transactions(etcd_gateway: Gateway, compare: Fields, found: tuple[bool, bytes | None]) -> None:
    etcd_gateway.put(b"k", b"v")
    etcd_gateway.put(b"old", b"")
    assert etcd_gateway.transact(compare, [put(b"other", b"1"), delete(b"old")], b"k") == found
    assert (etcd_gateway.get(b"other"), etcd_gateway.get(b"old")) == ((b"1", None) if found[0] else (None, b""))


def test_leases(etcd_gateway: Gateway) -> None:
    lease = etcd_gateway.grant_lease(60)
    assert 50 <= etcd_gateway.keep_alive(lease) <= 60
    etcd_gateway.put(b"k", b"v", lease)
    etcd_gateway.revoke_lease(lease)
    etcd_gateway.revoke_lease(lease)
    assert etcd_gateway.get(b"k") is None
    assert etcd_gateway.keep_alive(lease) == 0
    with pytest.raises(LeaseGone, match="requested lease not found"):
        etcd_gateway.put(b"k", b"v", lease)
    with pytest.raises(LeaseGone):
        etcd_gateway.transact(is_missing(b"k"), [put(b"k", b"v", lease)], b"k")
    etcd_gateway.put(b"k", b"v", etcd_gateway.grant_lease(1))
    support.wait_until(lambda: etcd_gateway.get(b"k") is None, "the end of a lease that is not kept alive")


@promise("""etcd.request-finds-working-member: A request finds a working member: when the leader is killed, when a
    member is frozen, and past endpoints where nothing or another program listens.""")
def test_the_loss_of_the_leader(cluster: EtcdCluster) -> None:
    """Requests wait until there is another one."""
    leader = leader_of(cluster)
    with Gateway(cluster.endpoints[leader:] + cluster.endpoints[:leader], request_timeout_s=15) as gateway:
        gateway.put(b"k", b"0")
        lease = gateway.grant_lease(60)
        cluster.kill(leader)
        assert gateway.get(b"k") == b"0"
        gateway.put(b"k", b"1")
        assert gateway.keep_alive(lease) > 0
        assert gateway.transact(has_value(b"k", b"1"), [put(b"k", b"2")], b"k")[0]


@proves("etcd.request-finds-working-member")
def test_a_frozen_member(cluster: EtcdCluster) -> None:
    """It accepts connections and does not answer. Requests go to the next member."""
    frozen = (leader_of(cluster) + 1) % 3
    with Gateway(cluster.endpoints[frozen:] + cluster.endpoints[:frozen], request_timeout_s=9) as gateway:
        gateway.put(b"k", b"1")
        cluster.pause(frozen)
        began = time.monotonic()
        assert gateway.get(b"k") == b"1"
        assert time.monotonic() - began > 2.9, "the frozen member was not asked, so this proves nothing"


@promise("etcd.write-answer-lost-sent: A write whose answer is lost is sent again, and has its effect once.")
def test_a_transaction_is_sent_again_if_its_answer_is_lost(etcd: EtcdServer, etcd_gateway: Gateway) -> None:
    """It is carried out once, and the caller finds its own value."""
    proxy = Relay(etcd.get_port())
    proxy.is_deaf = True
    with Gateway([f"127.0.0.1:{proxy.port}", etcd.get_endpoint()], request_timeout_s=2) as gateway:
        assert gateway.transact(is_missing(b"k"), [put(b"k", b"mine")], b"k") == (False, b"mine")
    proxy.close()


@promise("""etcd.majority-something-accepts: Without a majority, or if something accepts connections and never answers,
    a request fails within its timeout and does not retry in a busy loop.""")
@proves("etcd-runs.unreachable-etcd-reported")
@pytest.mark.usefixtures("unhurried")
def test_without_a_majority(cluster: EtcdCluster) -> None:
    """The error comes in time, and the members are not asked in a busy loop until then."""
    alive = leader_of(cluster)
    with Gateway(cluster.endpoints, request_timeout_s=1) as gateway:
        gateway.put(b"k", b"1")
        for number in {0, 1, 2} - {alive}:
            cluster.kill(number)
        left = cluster.members[alive]
        support.wait_until(lambda: b"\netcd_server_has_leader 0\n" in left.fetch("/metrics"), "no leader")
        attempts = count_attempts(gateway)
        for ask in (gateway.get, lambda key: gateway.transact(is_missing(key), [], key)):
            with pytest.raises(Unavailable, match=f"within 1 s: .*{cluster.endpoints[alive]}: no leader"):
                ask(b"k")
        # Pauses of 0.05, 0.1, 0.2 and 0.4 s fit into a second, so each request goes round the three members six times.
        assert len(attempts) <= 2 * 6 * 3


def count_attempts(gateway: Gateway) -> list[str]:
    """The names of the members in the order in which they are asked from now on."""
    names: list[str] = []

    def counted(member: Any) -> Any:
        ask = member.ask
        return lambda *args: (names.append(member.name), ask(*args))[1]

    for member in gateway._members:
        member.ask = counted(member)  # type: ignore[method-assign]
    return names


@proves("etcd.request-finds-working-member", "etcd-runs.unreachable-etcd-reported")
def test_endpoints_that_do_not_work_are_passed_over(etcd: EtcdServer) -> None:
    with listener(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as web, listener() as silent:
        bad = [f"127.0.0.1:{support.free_port()}", "no-such-host.invalid", "x" * 60]
        bad += [f"127.0.0.1:{web}", f"127.0.0.1:{silent}"]
        with Gateway([*bad, etcd.get_endpoint()], request_timeout_s=12) as gateway:
            gateway.put(b"k", b"v")
            names = count_attempts(gateway)
            assert gateway.get(b"k") == b"v"
            assert names == [etcd.get_endpoint()]


def test_closing_ends_the_search_for_a_member() -> None:
    gateway = Gateway([f"127.0.0.1:{support.free_port()}"], request_timeout_s=3600)
    names = count_attempts(gateway)
    asking = Caller(gateway.get, b"k")
    support.wait_until(lambda: len(names) > 2, "several attempts")
    gateway.close()
    with pytest.raises(Unavailable, match="the client is closed"):
        asking.result()


@promise("""etcd.errors-retries-fix-reported: Errors that retries cannot fix are reported at once and in one line:
    another kind of server, a wrong password, a missing permission, a wrong certificate, too old a version.""")
@proves("etcd-runs.mistake-causes-clear-line")
@pytest.mark.parametrize(
    ("status", "body", "headers", "complaint"),
    [
        ("200 OK", b"<html>hello</html>", b"", "not an answer of etcd: HTTP status 200, '<html>hello</html>'"),
        ("200 OK", b"{}", b"", "not an answer of etcd"),
        ("200 OK", b'{"header":7}', b"", "not an answer of etcd"),
        ("200 OK", b" " * (2 << 20), b"", "more than 1 MiB"),
        ("400 No", b'{"error":' * 100_000, b"", "not an answer of etcd: HTTP status 400"),
        ("404 No", b'{"message":"no route"}', b"", "not an answer of etcd: HTTP status 404"),
        ("302 Elsewhere", b"", b"Location: http://127.0.0.1:1/\r\n", "HTTP status 302"),
    ],
)
def test_a_web_server_is_refused_at_once(
    status: str, body: bytes, headers: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 1 << 20)
    with answering(status, body, headers) as server, Gateway([server.endpoint], request_timeout_s=3600) as gateway:
        for ask in (lambda: gateway.get(b"k"), lambda: gateway.keep_alive(1), gateway.check_version):
            with pytest.raises(EtcdRefused, match=f"^etcd: {server.endpoint}: .*{complaint}"):
                ask()


@promise("""etcd-runs.mistake-causes-clear-line: A mistake causes one clear line: too old an etcd, another program at
    the port, a wrong or missing password, a missing permission, a wrong certificate, settings that are unknown, make no
    sense or differ.""")
@proves("etcd.errors-retries-fix-reported")
@pytest.mark.parametrize("version", ["3.3.27", "2.3.8", "4", "junk", "3.x.0", "3.4.0", "3.10.1", "4.0.0-rc.1"])
def test_versions(version: str) -> None:
    with answering("200 OK", b'{"etcdserver":"%s"}' % version.encode()) as server:
        # The password is not asked for: an old etcd has no such interface.
        gateway = Gateway([server.endpoint], user="me", password="secret")
        if version in ("3.4.0", "3.10.1", "4.0.0-rc.1", "4"):
            gateway.check_version()
        else:
            with pytest.raises(EtcdRefused, match=f"etcd '{version}' at {server.endpoint} is too old: .* 3.4 or later"):
                gateway.check_version()
        gateway.close()


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        (OK + b"Content-Length: 51\r\n\r\n", b""),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n33\r\n", b"\r\n0\r\nTrailer: x\r\n\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 51\r\n\r\n", b""),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 51\r\n\r\n", b""),
    ],
)
@pytest.mark.parametrize("at_a_time", [1, 1 << 16])
def test_answers(head: bytes, tail: bytes, at_a_time: int, no_descriptor_leak: None) -> None:
    said = head + VALUE + tail

    def script(client: socket.socket, _: int) -> None:
        for start in range(0, len(said), at_a_time):
            client.sendall(said[start : start + at_a_time])

    with Server(script) as server, Gateway([server.endpoint]) as gateway:
        assert [gateway.get(b"k") for _ in range(3)] == [b"v"] * 3


@proves("etcd.request-keeps-timeout-answer")
@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"\x15\x03\x01\x00\x02\x02\x46",
        b"HTTP/1.1 two hundred\r\n\r\n",
        OK + b"Content-Length: 99\r\n\r\nhello",
        OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\nhello",
        OK + b"Transfer-Encoding: chunked\r\n\r\nhello\r\n",
        OK + b"X: y\r\n" * 200,
        OK + b"Content-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 No\r\nContent-Length: 25\r\n\r\n" + b'{"message":"no upstream"}',
    ],
)
def test_an_answer_that_is_cut_off_or_junk(says: bytes, no_descriptor_leak: None) -> None:
    """The request is sent again."""

    def script(client: socket.socket, number: int) -> None:
        client.sendall(says if number == 1 else OK + b"Content-Length: 51\r\n\r\n" + VALUE)
        client.shutdown(socket.SHUT_RDWR)

    with Server(script) as server, Gateway([server.endpoint]) as gateway:
        assert gateway.get(b"k") == b"v"
        assert server.asked == 2


@promise("""etcd.request-keeps-timeout-answer: A request keeps its timeout, also if the answer comes byte by byte. After
    a truncated or junk answer the request is sent again.""")
@proves("etcd.majority-something-accepts")
@pytest.mark.parametrize("begins", [b"", OK, OK + b"Content-Length: 99999\r\n\r\n"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_an_answer_that_does_not_come_in_time(begins: bytes, goes_on: bool) -> None:
    """One that comes byte by byte gets no more time."""
    is_over = threading.Event()

    def script(client: socket.socket, _: int) -> None:
        client.sendall(begins)
        while not is_over.wait(0.02):
            client.sendall(b"x" * goes_on)

    with Server(script) as server, Gateway([server.endpoint], request_timeout_s=0.3) as gateway:
        with pytest.raises(Unavailable, match=r"within 0.3 s: .*no answer in time"):
            gateway.get(b"k")
        is_over.set()


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (14, "etcdserver: no leader", Unavailable),
        (8, "etcdserver: too many requests", Unavailable),
        (2, "context deadline exceeded", Unavailable),
        (8, "etcdserver: mvcc: database space exceeded", EtcdRefused),
        (7, "etcdserver: permission denied", EtcdRefused),
    ],
)
@pytest.mark.parametrize(
    "form", ['{"error":"x","message":"%s","code":%d}', '{"error":{"message":"%s","grpc_code":%d}}']
)
def test_what_a_complaint_means(form: str, code: int, message: str, kind: type[EtcdError]) -> None:
    body = (form % (message, code)).encode()
    with (
        answering("400 No", body) as server,
        Gateway([server.endpoint], request_timeout_s=0.1) as gateway,
        pytest.raises(kind, match=message.removeprefix("etcdserver: ")),
    ):
        gateway.get(b"k")


@pytest.fixture(scope="module")
def locked() -> Iterator[EtcdServer]:
    """With a user who may read and write keys that begin with a."""
    with etcd_with_users() as server:
        with server.get_client(**ROOT) as root:
            call(root, "auth/role/add", name="some")
            a, b = "YQ==", "Yg=="
            call(root, "auth/role/grant", name="some", perm={"permType": "READWRITE", "key": a, "range_end": b})
            call(root, "auth/user/add", name="ann", password="pw")
            call(root, "auth/user/grant", user="ann", role="some")
        yield server


@proves("etcd.errors-retries-fix-reported", "etcd-runs.mistake-causes-clear-line")
def test_a_user_may_do_what_the_role_says(locked: EtcdServer) -> None:
    with Gateway([locked.get_endpoint()], user="ann", password="pw") as gateway:
        gateway.put(b"a", b"1")
        assert gateway.get(b"a") == b"1"
        with pytest.raises(EtcdRefused, match="permission denied"):
            gateway.get(b"z")


@proves("etcd.errors-retries-fix-reported", "etcd-runs.mistake-causes-clear-line")
@pytest.mark.parametrize(
    ("user", "password", "complaint"),
    [
        ("root", "wrong", "invalid user ID or password"),
        ("nobody", "secret", "invalid user ID or password"),
        (None, None, "user name is empty"),
    ],
)
def test_a_wrong_password(locked: EtcdServer, user: str | None, password: str | None, complaint: str) -> None:
    endpoint = locked.get_endpoint()
    gateway = Gateway([endpoint], user=user, password=password, request_timeout_s=3600)
    with gateway, pytest.raises(EtcdRefused, match=f"etcd at {endpoint}: .*{complaint}"):
        gateway.get(b"k")


def test_a_password_where_none_is_wanted(etcd: EtcdServer) -> None:
    gateway = Gateway([etcd.get_endpoint()], user="me", password="pw")
    with gateway, pytest.raises(EtcdRefused, match="is not enabled"):
        gateway.get(b"k")


@promise("etcd.token-longer-knows-renewed: An etcd token that etcd no longer knows is renewed.")
def test_a_token_that_etcd_has_forgotten_is_renewed(locked: EtcdServer) -> None:
    with Gateway([locked.get_endpoint()], user="ann", password="pw") as gateway:
        gateway.put(b"a", b"1")
        gateway._token = "forgotten.1"
        callers = [Caller(gateway.get, b"a") for _ in range(8)]
        assert {each.result() for each in callers} == {b"1"}
        assert gateway._token != "forgotten.1"


def own_files(certificates: Certificates, who: str, ca: str) -> TlsFiles:
    cert, key = (getattr(certificates, f"{who}_{name}") if who else "" for name in ("pem", "key"))
    return TlsFiles(cert, key, getattr(certificates, f"{ca}_pem") if ca else "")


@proves("etcd.errors-retries-fix-reported", "etcd-runs.mistake-causes-clear-line")
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    ("scheme", "who", "ca", "complaint"),
    [
        ("", "client", "ca", None),
        ("https://", "client", "ca", None),
        ("", "client", "other", "TLS: CERTIFICATE_VERIFY_FAILED"),
        ("https://", "", "", "TLS: CERTIFICATE_VERIFY_FAILED"),
        # The refusal of the server is an alert, or a connection that is reset, which is a matter of timing.
        ("", "", "ca", r"TLS: .*ALERT|closed without an answer|broken pipe"),
        ("", "stranger", "ca", r"TLS: .*ALERT|closed without an answer|broken pipe"),
        ("http://", "", "", r"http or https\?|HTTPS"),
    ],
)
def test_certificates(
    secured_etcd: EtcdServer, certificates: Certificates, scheme: str, who: str, ca: str, complaint: str | None
) -> None:
    files = own_files(certificates, who, ca)
    with Gateway([scheme + secured_etcd.get_endpoint()], tls=files, request_timeout_s=2) as gateway:
        if complaint is None:
            gateway.put(b"k", b"v")
            assert gateway.get(b"k") == b"v"
        else:
            with pytest.raises(EtcdError, match=complaint):
                gateway.put(b"k", b"v")


@pytest.mark.usefixtures("unhurried")
def test_tls_where_there_is_none(etcd: EtcdServer, certificates: Certificates) -> None:
    files = own_files(certificates, "", "ca")
    gateway = Gateway([etcd.get_endpoint()], tls=files, request_timeout_s=0.5)
    with gateway, pytest.raises(EtcdError, match=r"TLS: |http or https\?"):
        gateway.get(b"k")
    with Gateway([f"http://{etcd.get_endpoint()}"], tls=files) as gateway:
        assert gateway.get(b"no such key") is None


@promise("""etcd.renewed-certificates-used-run: Renewed certificates for etcd are used while a run is active. A
    half-finished renewal changes nothing.""")
def test_certificates_are_renewed(secured_etcd: EtcdServer, certificates: Certificates, tmp_path: Path) -> None:
    """They live for days where runs live for weeks."""
    mine = TlsFiles(*(str(tmp_path / name) for name in ("cert", "key", "ca")))

    def renew(files: TlsFiles) -> None:
        for source, target in zip(files, mine, strict=True):
            shutil.copy(source, target)

    renew(own_files(certificates, "stranger", "other"))
    with Gateway([secured_etcd.get_endpoint()], tls=mine) as gateway:
        with pytest.raises(EtcdRefused, match="TLS: CERTIFICATE_VERIFY_FAILED"):
            gateway.put(b"k", b"v")
        renew(own_files(certificates, "client", "ca"))
        gateway.put(b"k", b"v")


@promise("""etcd.client-needs-loads-package: The etcd client needs and loads no package beyond those that holdfast needs
    anyway.""")
def test_nothing_is_loaded_that_holdfast_does_not_need_anyway(etcd: EtcdServer) -> None:
    """An agent has to start fast and stay small."""
    program = """
import sys
from holdfast.rendezvous.etcd.gateway import Gateway

Gateway(sys.argv[1:]).put(b"k", b"v")
print(*{name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"__main__"})
"""
    command = [sys.executable, "-S", "-c", program, etcd.get_endpoint()]
    paths = ":".join(path for path in sys.path if path)
    done = subprocess.run(
        command, env={"PYTHONPATH": paths}, capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"holdfast", "msgspec", "typing_extensions"}
