"""The client of etcd, on real servers: what it does when they are killed, frozen, cut off, or something else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.rendezvous import etcd_client, etcd_http, etcd_watch
from holdfast.rendezvous.etcd_client import (
    Batch,
    Closed,
    Compacted,
    Compare,
    Delete,
    EtcdClient,
    EtcdError,
    Get,
    LeaseGone,
    Put,
    Refused,
    Unavailable,
    Watch,
    is_missing,
    is_unchanged,
)
from holdfast.testing.etcd_server import EtcdCluster, EtcdServer
from tests import support
from tests.certificates import Certificates, make_certificates
from tests.coordinators import Caller, Proxy, listener

LONG_S = 30.0


@pytest.fixture
def client(etcd: EtcdServer) -> Iterator[EtcdClient]:
    """Of an etcd without a key."""
    with etcd.get_client() as found:
        found.delete(b"", is_prefix=True)
        yield found


@pytest.fixture
def proxy(etcd: EtcdServer) -> Iterator[Proxy]:
    found = Proxy(etcd.get_port())
    yield found
    found.close()


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster(options=["--heartbeat-interval=50", "--election-timeout=500"]) as found:
        yield found


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of several attempts has as much time as the first, so what it found is what the error tells."""
    monkeypatch.setattr(etcd_client, "_LEAST_ATTEMPT_S", LONG_S)


def batches(watch: Watch, last_revision: int) -> list[Batch]:
    found = []
    while not found or found[-1].revision < last_revision:
        batch = watch.take(LONG_S)
        assert batch is not None, f"revision {last_revision} never came"
        found.append(batch)
    return found


# Keys.


def test_keys_that_begin_alike(client: EtcdClient) -> None:
    keys = [b"\x00", b"a", b"a\x00", b"a\xff", b"a\xff\xff\xff", b"b", b"\xff", b"\xff\xff"]
    for key in keys:
        client.put(key, b"v" + key)
    for prefix in (b"a", b"a\xff", b"\xff", b"", b"nothing"):
        reading = client.range(prefix)
        assert [item.key for item in reading.items] == [key for key in keys if key.startswith(prefix)]
        assert all(item.value == b"v" + item.key for item in reading.items)
    assert [item.key for item in client.range(b"a", limit=2).items] == [b"a", b"a\x00"]
    assert client.range(b"a", limit=2).count == 4
    assert {item.value for item in client.range(b"a", is_keys_only=True).items} == {b""}
    assert client.get(b"b\x00") is None
    assert client.delete(b"a") == 1
    assert client.delete(b"a") == 0
    assert client.delete(b"a", is_prefix=True) == 3


def test_what_a_key_knows(client: EtcdClient) -> None:
    lease = client.grant_lease(60)
    first = client.put(b"k", bytes(range(256)), lease)
    second = client.put(b"k", b"", lease)
    found = client.get(b"k")
    assert found is not None
    assert (found.value, found.version, found.lease) == (b"", 2, lease)
    assert (found.create_revision, found.mod_revision) == (first, second)
    client.revoke(lease)


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (Compare(b"k", "value", "=", b"v"), True),
        (Compare(b"k", "value", "!=", b"v"), False),
        (Compare(b"k", "value", ">", b"u"), True),
        (Compare(b"k", "version", "=", 1), True),
        (Compare(b"k", "version", ">", 1), False),
        (Compare(b"k", "lease", "=", 0), True),
        (Compare(b"k", "create", "<", 1 << 62), True),
        (Compare(b"k", "mod", "=", 1), False),
        (is_missing(b"k"), False),
        (is_missing(b"gone"), True),
    ],
)
def test_transactions(client: EtcdClient, compare: Compare, holds: bool) -> None:
    client.put(b"k", b"v")
    client.put(b"old", b"")
    done = client.commit([compare], [Put(b"yes", b"1"), Get(b"yes"), Delete(b"old")], [Get(b"k"), Get(b"gone")])
    assert done.has_succeeded is holds
    found = [[item.value for item in reading.items] for reading in done.readings]
    assert found == ([[], [b"1"], []] if holds else [[b"v"], []])
    assert done.readings[2].count == 1 if holds else len(done.readings) == 2
    assert (client.get(b"yes") is not None) is holds
    assert (client.get(b"old") is None) is holds


def test_whoever_read_an_older_state_changes_nothing(client: EtcdClient) -> None:
    client.put(b"k", b"1")
    read = client.get(b"k")
    assert read is not None
    assert client.commit([is_unchanged(read)], [Put(b"k", b"2")]).has_succeeded
    assert not client.commit([is_unchanged(read)], [Put(b"k", b"3")]).has_succeeded


def test_leases(client: EtcdClient) -> None:
    lease = client.grant_lease(60)
    assert 50 <= client.keep_alive(lease) <= 60
    assert 50 <= client.time_to_live(lease) <= 60
    client.put(b"k", b"v", lease)
    client.revoke(lease)
    client.revoke(lease)
    assert client.get(b"k") is None
    assert client.keep_alive(lease) == 0
    assert client.time_to_live(lease) == 0
    with pytest.raises(LeaseGone, match="requested lease not found"):
        client.put(b"k", b"v", lease)
    with pytest.raises(LeaseGone):
        client.commit([is_missing(b"k")], [Put(b"k", b"v", lease)])


def test_a_lease_that_is_not_kept_alive_ends(client: EtcdClient) -> None:
    lease = client.grant_lease(2)
    revision = client.put(b"k", b"v", lease)
    with client.watch(b"k", revision + 1) as watch:
        [batch] = batches(watch, revision + 1)
    assert [(change.kind, change.item.key) for change in batch.changes] == [("delete", b"k")]


# Watching.


def test_a_watch_tells_everything_from_its_revision_on(client: EtcdClient) -> None:
    before = client.put(b"run/1", b"old")
    client.put(b"run/2", b"1")
    client.put(b"other", b"")
    with client.watch(b"run/", before + 1) as watch, client.watch(b"run/1", before, is_prefix=False) as one:
        client.commit((), [Put(b"run/3", b""), Delete(b"run/2")])
        last = client.put(b"run/1", b"new")
        found = batches(watch, last)
        changes = [(change.kind, change.item.key) for batch in found for change in batch.changes]
        assert changes == [("put", b"run/2"), ("put", b"run/3"), ("delete", b"run/2"), ("put", b"run/1")]
        assert {change.item.value for batch in batches(one, last) for change in batch.changes} == {b"old", b"new"}
        assert watch.take(0.01) is None
        assert not watch.is_closed


def test_closing_a_watch_wakes_whoever_waits(client: EtcdClient) -> None:
    revision = client.put(b"k", b"")
    watch = client.watch(b"k", revision)
    taken: list[Batch] = []

    def take_all() -> None:
        for batch in watch:
            taken.append(batch)

    waiting = Caller(take_all)
    support.wait_until(lambda: taken, "the first change")
    watch.close()
    watch.close()
    waiting.result()
    assert len(taken) == 1
    assert watch.is_closed
    assert watch.take() is None
    assert not watch._thread.is_alive()


def test_closing_the_client_ends_its_watches(etcd: EtcdServer, no_descriptor_leak: None) -> None:
    client = etcd.get_client()
    waiting = Caller(client.watch(b"k", 1).take)
    client.close()
    assert waiting.result() is None
    with pytest.raises(Closed, match="the client of etcd is closed"):
        client.get(b"k")


def test_a_reader_that_is_slow_can_close(client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch has more to tell than it keeps."""
    monkeypatch.setattr(etcd_watch, "_MAX_BATCHES", 1)
    watch = client.watch(b"k", client.put(b"k", b""))
    for _ in range(2):
        support.wait_until(lambda: len(watch._batches) == 1, "as much as it keeps")
        client.put(b"k", b"")
    watch.close()
    assert not watch._thread.is_alive()


def test_a_watch_survives_broken_connections(etcd: EtcdServer, proxy: Proxy, client: EtcdClient) -> None:
    """Every change is told once and in order, however often the stream breaks."""
    with EtcdClient([f"127.0.0.1:{proxy.port}"]) as watcher:
        revision = client.put(b"k/0", b"")
        written = [revision]
        told: list[int] = []
        with watcher.watch(b"k/", revision) as watch:
            for number in range(1, 40):
                last = client.put(b"k/%d" % number, b"")
                written.append(last)
                if number % 8 == 0:
                    told += [change.item.mod_revision for each in batches(watch, last) for change in each.changes]
                    proxy.cut()
            told += [change.item.mod_revision for each in batches(watch, last) for change in each.changes]
    assert told == written


def test_a_silent_stream_is_noticed(proxy: Proxy, client: EtcdClient) -> None:
    """What the server says does not arrive any more, and no connection is closed."""
    with EtcdClient([f"127.0.0.1:{proxy.port}"], watch_silence_s=0.2, request_timeout_s=2) as watcher:
        revision = client.put(b"k", b"1")
        with watcher.watch(b"k", revision) as watch:
            batches(watch, revision)
            proxy.is_deaf = True
            with pytest.raises(Unavailable, match=r"has not answered within 2 s: .*no answer in time"):
                watch.take(LONG_S)
            with pytest.raises(Unavailable):
                watch.take(0)


def test_a_silent_stream_is_replaced(etcd: EtcdServer, proxy: Proxy, client: EtcdClient) -> None:
    endpoints = [f"127.0.0.1:{proxy.port}", etcd.get_endpoint()]
    # Half of the time is for the one that is not heard; a busy machine may need some of the other.
    with EtcdClient(endpoints, watch_silence_s=0.2, request_timeout_s=8) as watcher:
        revision = client.put(b"k", b"1")
        with watcher.watch(b"k", revision) as watch:
            batches(watch, revision)
            proxy.is_deaf = True
            last = client.put(b"k", b"2")
            [batch] = batches(watch, last)
            assert batch.changes[0].item.value == b"2"


def test_a_quiet_watch_is_renewed_and_misses_nothing(client: EtcdClient, etcd: EtcdServer) -> None:
    with etcd.get_client(watch_silence_s=0.05) as watcher:
        revision = client.put(b"k", b"1")
        opened = count_calls(watcher._gateways[0], "stream")
        with watcher.watch(b"k", revision + 1) as watch:
            support.wait_until(lambda: len(opened) > 2, "a stream that was renewed")
            last = client.put(b"k", b"2")
            assert [batch.revision for batch in batches(watch, last)] == [last]


def test_a_revision_that_is_forgotten(client: EtcdClient, etcd: EtcdServer) -> None:
    old = client.put(b"k", b"1")
    with etcd.get_client(watch_silence_s=0.05) as watcher:
        with watcher.watch(b"quiet", old) as watch:
            assert watch.take(0.1) is None
            newest = client.put(b"k", b"2")
            client.call("kv/compaction", revision=str(newest))
            # The stream that is there goes on; the next one would have a gap.
            with pytest.raises(Compacted, match=f"forgotten revision {old}; the oldest is {newest}") as caught:
                watch.take(LONG_S)
            assert caught.value.compact_revision == newest
        with watcher.watch(b"k", newest) as watch:
            assert batches(watch, newest)[0].changes[0].item.value == b"2"


def test_a_watch_begins_somewhere(client: EtcdClient) -> None:
    with pytest.raises(UserError, match="revision 1 or later, not 0"):
        client.watch(b"k", 0)


# Members that come and go.


def count_calls(gateway: Any, name: str) -> list[float]:
    """When the method of this gateway was called."""
    calls: list[float] = []
    original = getattr(gateway, name)

    def counted(*args: Any) -> Any:
        calls.append(time.monotonic())
        return original(*args)

    setattr(gateway, name, counted)
    return calls


def test_the_loss_of_the_leader(cluster: EtcdCluster) -> None:
    """Writes wait until there is another one, and a watch at the lost member goes on elsewhere."""
    leader = cluster.leader()
    endpoints = cluster.endpoints[leader:] + cluster.endpoints[:leader]
    with EtcdClient(endpoints, request_timeout_s=15) as client:
        first = client.put(b"n", b"0")
        lease = client.grant_lease(60)
        with client.watch(b"n", first) as watch:
            batches(watch, first)
            cluster.kill(leader)
            last = [client.put(b"n", b"%d" % number) for number in range(1, 20)][-1]
            assert client.keep_alive(lease) > 0
            values = [change.item.value for each in batches(watch, last) for change in each.changes]
            assert list(dict.fromkeys(values)) == [b"%d" % number for number in range(1, 20)]
        assert client.get(b"n").value == b"19"  # type: ignore[union-attr]
        client.revoke(lease)


def test_a_frozen_member(cluster: EtcdCluster) -> None:
    """It takes connections and says nothing. What may be repeated is asked elsewhere, what may not is in doubt."""
    frozen = (cluster.leader() + 1) % 3
    endpoints = cluster.endpoints[frozen:] + cluster.endpoints[:frozen]
    with (
        EtcdClient(endpoints, request_timeout_s=9, watch_silence_s=0.2) as client,
        EtcdClient(endpoints, request_timeout_s=3) as other,
    ):
        revision = client.put(b"k", b"1")
        with client.watch(b"k", revision) as watch:
            batches(watch, revision)
            cluster.pause(frozen)
            assert client.get(b"k").value == b"1"  # type: ignore[union-attr]
            with pytest.raises(Unavailable, match="whether the write has happened is unknown") as caught:
                other.commit([is_missing(b"once")], [Put(b"once", b"")])
            assert caught.value.is_outcome_unknown
            # The next one goes to a member that works.
            assert other.commit([is_missing(b"more")], [Put(b"more", b"")]).has_succeeded
            [batch] = batches(watch, client.put(b"k", b"2"))
            assert batch.changes[0].item.value == b"2"


@pytest.mark.usefixtures("unhurried")
def test_without_a_majority(cluster: EtcdCluster) -> None:
    """It is said within the time, and nobody is asked in a busy loop meanwhile."""
    alive = cluster.leader()
    with cluster.get_client(request_timeout_s=2) as client:
        revision = client.put(b"k", b"1")
        watch = client.watch(b"k", revision)
        batches(watch, revision)
        for number in {0, 1, 2} - {alive}:
            cluster.kill(number)
        left = cluster._members[alive]
        support.wait_until(lambda: b"\netcd_server_has_leader 0\n" in left._fetch("/metrics", 1.0), "no leader")
        calls = [count_calls(gateway, "ask") for gateway in client._gateways]
        place = cluster.endpoints[alive]
        for ask in (lambda: client.get(b"k"), lambda: client.put(b"k", b"2"), lambda: client.keep_alive(1)):
            began = time.monotonic()
            with pytest.raises(Unavailable, match=f"has not answered within 2 s: .*{place}: etcdserver: no leader"):
                ask()
            assert time.monotonic() - began < LONG_S
        assert sum(map(len, calls)) < 150
        with pytest.raises(Unavailable):
            watch.take(LONG_S)


def test_endpoints_that_are_not_there_are_passed_over(etcd: EtcdServer) -> None:
    with listener(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as web, listener() as silent:
        bad = [f"127.0.0.1:{support.free_port()}", "no-such-host.invalid", f"127.0.0.1:{web}", f"127.0.0.1:{silent}"]
        with EtcdClient([*bad, etcd.get_endpoint()], request_timeout_s=10) as client:
            asked = count_calls(client._gateways[0], "ask")
            client.put(b"k", b"v")
            assert client.commit([is_missing(b"gone")], [Get(b"k")]).has_succeeded
            # The one that works is remembered.
            assert len(asked) == 1


# Something else at the port.


@contextlib.contextmanager
def web_server(status: int, body: bytes = b"", **headers: str) -> Iterator[str]:
    """Something that speaks HTTP and says the same to everybody."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "headers", "complaint"),
    [
        (200, b"<html>hello</html>", {}, "not an answer of etcd: '<html>hello</html>'"),
        (200, b'{"header":7}', {}, "not an answer of etcd"),
        (200, b"[" * 100_000, {}, "not an answer of etcd"),
        (200, b'{"result":' + b"[" * 100_000, {}, "not an answer of etcd"),
        (400, b'{"error":' + b"[" * 100_000, {}, "not an answer of etcd: HTTP status 400"),
        (404, b"nope", {}, "not an answer of etcd: HTTP status 404, 'nope'"),
        (302, b"", {"Location": "http://127.0.0.1:1/"}, "HTTP status 302"),
        (400, b"[]", {}, "HTTP status 400"),
    ],
)
def test_a_web_server_is_refused_at_once(status: int, body: bytes, headers: dict[str, str], complaint: str) -> None:
    with web_server(status, body, **headers) as place, EtcdClient([place], request_timeout_s=3600) as client:
        with pytest.raises(Refused, match=f"{place}: .*{complaint}"):
            client.get(b"k")
        with client.watch(b"k", 1) as watch, pytest.raises(Refused, match=complaint):
            watch.take(LONG_S)


@pytest.mark.usefixtures("unhurried")
def test_a_balancer_without_members() -> None:
    with (
        web_server(503) as place,
        EtcdClient([place], request_timeout_s=0.5) as client,
        pytest.raises(Unavailable, match=f"within 0.5 s: {place}: HTTP status 503$"),
    ):
        client.get(b"k")


@pytest.mark.parametrize(
    ("says", "hangs_up", "complaint"),
    [
        (b"", False, "no answer in time"),
        (b"", True, "127.0.0.1"),
        (b"SSH-2.0-OpenSSH\r\n", True, "127.0.0.1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", False, "no answer in time"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", True, "127.0.0.1"),
    ],
)
def test_an_endpoint_that_does_not_answer(says: bytes, hangs_up: bool, complaint: str) -> None:
    with (
        listener(says, hangs_up=hangs_up) as port,
        EtcdClient([f"127.0.0.1:{port}"], request_timeout_s=0.6) as client,
    ):
        with pytest.raises(Unavailable, match=f"within 0.6 s: .*{complaint}") as caught:
            client.get(b"k")
        assert not caught.value.is_outcome_unknown
        with client.watch(b"k", 1) as watch, pytest.raises(Unavailable):
            watch.take(LONG_S)


def test_an_endless_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_http, "MAX_ANSWER_BYTES", 1 << 20)
    with web_server(200, b" " * (2 << 20)) as place, EtcdClient([place]) as client:
        with pytest.raises(Refused, match="more than 1 MiB"):
            client.get(b"k")
        with client.watch(b"k", 1) as watch, pytest.raises(Refused, match="more than 1 MiB"):
            watch.take(LONG_S)


@pytest.mark.parametrize(
    ("version", "is_fine"), [("3.3.27", False), ("2.3.8", False), ("junk", False), ("3.4.0", True)]
)
def test_versions(version: str, is_fine: bool) -> None:
    with web_server(200, b'{"etcdserver":"%s"}' % version.encode()) as place, EtcdClient([place]) as client:
        assert client.server_version() == version
        if is_fine:
            client.check_version()
        else:
            with pytest.raises(Refused, match=f"etcd '{version}' at {place} is too old: 3.4 is needed"):
                client.check_version()


# Answers that get lost.


def test_a_transaction_whose_answer_is_lost_is_not_sent_again(proxy: Proxy, client: EtcdClient) -> None:
    with EtcdClient([f"127.0.0.1:{proxy.port}"], request_timeout_s=1) as deaf:
        proxy.is_deaf = True
        client.put(b"k", b"1")
        with pytest.raises(Unavailable, match="unknown") as caught:
            deaf.commit([Compare(b"k", "version", ">", 0)], [Put(b"k", b"2")])
        assert caught.value.is_outcome_unknown
        with pytest.raises(Unavailable) as caught:
            deaf.get(b"k")
        assert not caught.value.is_outcome_unknown
    found = client.get(b"k")
    assert found is not None
    assert (found.value, found.version) == (b"2", 2)


def test_a_transaction_that_never_left_is_not_in_doubt() -> None:
    with EtcdClient([f"127.0.0.1:{support.free_port()}"], request_timeout_s=0.3) as client:
        with pytest.raises(Unavailable, match=r"connection refused$") as caught:
            client.commit([is_missing(b"k")], [Put(b"k", b"")])
        assert not caught.value.is_outcome_unknown


# Who may.


@pytest.fixture(scope="module")
def locked() -> Iterator[EtcdServer]:
    """With a user who may read and write what begins with a, and nothing else."""
    with EtcdServer(username="root", password="secret") as server:
        with server.get_client() as root:
            root.call("auth/role/add", name="some")
            a, b = "YQ==", "Yg=="
            root.call("auth/role/grant", name="some", perm={"permType": "READWRITE", "key": a, "range_end": b})
            root.call("auth/user/add", name="ann", password="pw")
            root.call("auth/user/grant", user="ann", role="some")
        yield server


def test_a_user_may_what_the_role_says(locked: EtcdServer) -> None:
    with locked.get_client(username="ann", password="pw") as client:
        revision = client.put(b"a", b"1")
        with client.watch(b"a", revision) as watch:
            assert batches(watch, revision)[0].changes[0].item.value == b"1"
        forbidden: list[Callable[[], Any]] = [
            lambda: client.get(b"z"),
            lambda: client.put(b"z", b""),
            lambda: client.range(b""),
            lambda: client.commit([is_missing(b"z")], [Put(b"z", b"")]),
        ]
        for call in forbidden:
            with pytest.raises(Refused, match="permission denied"):
                call()
        with client.watch(b"z", revision) as watch, pytest.raises(Refused, match="permission denied"):
            watch.take(LONG_S)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"username": "root", "password": "wrong"}, "invalid user ID or password"),
        ({"username": "nobody", "password": "secret"}, "invalid user ID or password"),
        ({"username": None, "password": None}, "user name is empty"),
    ],
)
def test_a_wrong_password(locked: EtcdServer, options: dict[str, Any], complaint: str) -> None:
    with locked.get_client(request_timeout_s=LONG_S, **options) as client:
        with pytest.raises(Refused, match=f"etcd at {locked.get_endpoint()}: .*{complaint}"):
            client.get(b"k")
        with client.watch(b"a", 1) as watch, pytest.raises(Refused):
            watch.take(LONG_S)


def test_a_password_where_none_is_wanted(etcd: EtcdServer) -> None:
    with etcd.get_client(username="me", password="pw") as client, pytest.raises(Refused, match="is not enabled"):
        client.get(b"k")


def test_a_token_that_etcd_has_forgotten_is_renewed(locked: EtcdServer) -> None:
    with locked.get_client(username="ann", password="pw") as client:
        calls: list[Callable[[], Any]] = [
            lambda: client.put(b"a", b"1"),
            lambda: client.commit([is_missing(b"a/gone")], [Put(b"a", b"2")]),
            lambda: client.get(b"a"),
        ]
        for call in calls:
            client._token = "forgotten.1"
            call()
            assert client._token != "forgotten.1"
        client._token = "forgotten.1"
        revision = client.put(b"a", b"2")
        client._token = "forgotten.1"
        with client.watch(b"a", revision) as watch:
            batches(watch, revision)


def test_tokens_that_live_for_a_second() -> None:
    """Threads that find their token expired at the same time."""
    server = EtcdServer(username="root", password="secret", options=["--auth-token-ttl=1"])
    with server, server.get_client() as client:
        client.put(b"k", b"")
        token = client._token

        def is_expired() -> bool:
            time.sleep(1.5)  # Each use makes it live on.
            try:
                client._gateways[0].ask("kv/range", {"key": "YQ=="}, token, 5, 5)
            except etcd_http.Objection:
                return True
            return False

        support.wait_until(is_expired, "a token that has expired")
        threads = [Caller(client.put, b"k", b"%d" % number) for number in range(8)]
        assert all(each.result() > 0 for each in threads)
        assert client._token != token


# Certificates.


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(certificates: Certificates) -> Iterator[EtcdServer]:
    files = {"cert": certificates.server_pem, "key": certificates.server_key, "client_ca": certificates.ca_pem}
    with EtcdServer(**files) as server:
        yield server


def test_with_certificates(secure: EtcdServer, certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the environment has for the web at large is of no concern.
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", certificates.other_pem)
    files = {"ca_cert": certificates.ca_pem, "cert": certificates.client_pem, "key": certificates.client_key}
    with secure.get_client(**files) as client:
        revision = client.put(b"k", b"v")
        watch = client.watch(b"k", revision)
        assert batches(watch, revision)[0].changes[0].item.value == b"v"
        waiting = Caller(watch.take)
        watch.close()
        assert waiting.result() is None
        assert not watch._thread.is_alive()


@pytest.mark.parametrize(
    ("ca", "cert", "scheme", "complaint"),
    [
        ("other", "client", "", "TLS: CERTIFICATE_VERIFY_FAILED"),
        (None, None, "https://", "TLS: CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_wrong_certificates(
    secure: EtcdServer, certificates: Certificates, ca: str | None, cert: str | None, scheme: str, complaint: str
) -> None:
    files = {"ca_cert": f"{ca}_pem", "cert": f"{cert}_pem", "key": f"{cert}_key"} if ca else {}
    options = {name: getattr(certificates, file) for name, file in files.items()}
    with EtcdClient([scheme + secure.get_endpoint()], request_timeout_s=LONG_S, **options) as client:
        for ask in (lambda: client.get(b"k"), client.check_version):
            with pytest.raises(Refused, match=complaint):
                ask()


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("who", [None, "stranger"])
def test_a_client_without_the_right_certificate(
    secure: EtcdServer, certificates: Certificates, who: str | None
) -> None:
    """How the server's refusal arrives is a matter of timing: as an alert, or as a connection that is reset."""
    mine = {"cert": getattr(certificates, f"{who}_pem"), "key": getattr(certificates, f"{who}_key")} if who else {}
    client = secure.get_client(ca_cert=certificates.ca_pem, request_timeout_s=3, **mine)
    with client, pytest.raises(EtcdError, match=r"TLS: .*ALERT|closed without an answer|broken pipe"):
        client.put(b"k", b"v")


@pytest.mark.usefixtures("unhurried")
def test_tls_where_there_is_none(etcd: EtcdServer, certificates: Certificates) -> None:
    options = {"request_timeout_s": 0.5, "ca_cert": certificates.ca_pem}
    with etcd.get_client(**options) as client, pytest.raises(EtcdError, match=r"TLS: |http or https\?"):
        client.get(b"k")


@pytest.mark.usefixtures("unhurried")
def test_none_where_there_is_tls(secure: EtcdServer) -> None:
    with secure.get_client(request_timeout_s=0.5) as client, pytest.raises(EtcdError, match=r"http or https\?|HTTPS"):
        client.get(b"k")


# What a user gets wrong.


@pytest.mark.parametrize(
    ("endpoints", "options", "complaint"),
    [
        ([], {}, "at least one"),
        ("host:1", {}, "list of at least one, not 'host:1'"),
        (["h"], {"username": "x"}, "go together"),
        (["h"], {"ca_cert": "/no/such/file"}, "the TLS authority /no/such/file cannot be used: No such file"),
        (["h"], {"cert": __file__}, f"the TLS certificate {__file__} cannot be used"),
        (["h"], {"request_timeout_s": 0}, "must be more than 0"),
        (["h:x"], {}, "'x' is not a number"),
    ],
)
def test_mistakes(endpoints: Any, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        EtcdClient(endpoints, **options)


def test_certificates_for_an_endpoint_without_tls(certificates: Certificates) -> None:
    with pytest.raises(UserError, match="'http://h' is plain http, but certificates are given"):
        EtcdClient(["http://h"], ca_cert=certificates.ca_pem)


def test_too_large_a_value(client: EtcdClient) -> None:
    with pytest.raises(Refused, match=r"too large|larger than max"):
        client.put(b"k", bytes(2 << 20))


def test_proxies_are_not_for_etcd(etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login x password y\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    with etcd.get_client() as client:
        client.put(b"k", b"v")


def test_many_threads_share_a_client(client: EtcdClient) -> None:
    def work(number: int) -> list[bytes]:
        key = b"t/%d" % number
        return [client.put(key, b"%d" % n) and client.get(key).value for n in range(20)]  # type: ignore[union-attr]

    threads = [Caller(work, number) for number in range(16)]
    assert all(each.result() == [b"%d" % n for n in range(20)] for each in threads)
    assert threading.active_count() < 100
