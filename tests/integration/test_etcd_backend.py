"""The etcd backend on a real etcd: what a run leaves there, what others may have left, and everything that is wrong."""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from holdfast.rendezvous.etcd_client import EtcdClient
from holdfast.rendezvous.keyspace import Keyspace, Page, Tellings
from holdfast.rendezvous.legacy_etcd import EtcdRendezvousHandler, create_handler
from holdfast.rendezvous.outcome import End, Failure

from holdfast.errors import UserError
from holdfast.rendezvous import keyspace, reach
from holdfast.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.testing.etcd_server import EtcdServer
from tests import support
from tests.certificates import Certificates, make_certificates
from tests.coordinators import Caller, default_run_id, listener
from tests.nodes import Relay


@contextlib.contextmanager
def node(endpoint: str, nodes: str = "1", restarts: int = 0, **config: Any) -> Iterator[EtcdRendezvousHandler]:
    """A handler as an agent has it."""
    low, _, high = nodes.partition(":")
    settings = {"lease": 10, "last_call": 0.2, "join_timeout": 30, "close_linger": 1, **config}
    params = RendezvousParameters("etcd", endpoint, default_run_id(), int(low), int(high or low), **settings)
    handler = create_handler(params)
    handler.introduce("default", 1, RestartPolicy(restarts))
    try:
        yield handler
    finally:
        handler.shutdown()


def form(*handlers: EtcdRendezvousHandler) -> list[Any]:
    callers = [Caller(each.next_round) for each in handlers]
    return [each.result() for each in callers]


@pytest.fixture
def keys() -> Keyspace:
    return Keyspace("/holdfast", default_run_id())


@pytest.fixture
def client(etcd: EtcdServer) -> Iterator[EtcdClient]:
    with etcd.get_client() as client:
        yield client


@pytest.fixture
def at(etcd: EtcdServer) -> str:
    return etcd.get_endpoint()


def left(client: EtcdClient, keys: Keyspace) -> list[bytes]:
    return [item.key for item in client.range(keys.root).items]


def own_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("holdfast-etcd")]


def leader_of(client: EtcdClient, keys: Keyspace) -> bytes:
    found = client.get(keys.leader)
    return b"" if found is None else found.value


# A run and its end.


def test_a_run_leaves_nothing(at: str, client: EtcdClient, keys: Keyspace) -> None:
    with node(at, "3") as a, node(at, "3") as b, node(at, "3") as c:
        rounds = form(a, b, c)
        assert {each.number for each in rounds} == {1}
        assert sorted(each.found.rank for each in rounds) == [0, 1, 2]
        assert len({each.found.bootstrap_store_info for each in rounds}) == 1
        rounds[0].found.store.set("key", "value")
        assert rounds[1].found.store.get("key") == b"value"
        for each in (a, b, c):
            each.report_success(1, 10)
        support.wait_until(lambda: all(each.outcome for each in (a, b, c)), "success")
        support.wait_until(lambda: not left(client, keys), "the end of all keys", deadline_s=20)
        assert {each.outcome.end for each in (a, b, c) if each.outcome} == {End.SUCCEEDED}
    support.wait_until(lambda: not own_threads(), "the end of all threads")


def test_a_run_whose_node_was_lost_leaves_nothing_after_the_linger(at: str, client: EtcdClient, keys: Keyspace) -> None:
    """One that may come back finds the outcome until then."""
    with node(at, "1:2", last_call=30) as a, node(at, "1:2", last_call=30) as b:
        rounds = form(a, b)
        rounds[0].found.store.set("key", "value")
        lost = next(item for item in client.range(keys.nodes).items if leader_of(client, keys) not in item.key)
        survivor = a if leader_of(client, keys).decode() == a._facts.node_id else b
        client.revoke(lost.lease)
        (again,) = form(survivor)
        assert again.found.world_size == 1
        survivor.report_success(again.number, 10)
        support.wait_until(lambda: survivor.outcome, "success")
        survivor.shutdown()
        (b if survivor is a else a).shutdown()
    support.wait_until(lambda: not left(client, keys), "the end of all keys", deadline_s=20)


def test_runs_do_not_meet_under_other_prefixes(at: str) -> None:
    with node(at, prefix="one") as a, node(at, prefix="/two/") as b:
        first, second = form(a, b)
        first.found.store.set("key", "one")
        second.found.store.set("key", "two")
        assert first.found.store.get("key") == b"one"
        assert (first.found.world_size, second.found.world_size) == (1, 1)


def test_a_node_whose_settings_differ_is_refused(at: str) -> None:
    words = r"does not take this node: the run has lease=(4|10), this node has lease=(4|10)$"
    with node(at, "2", heartbeat=0.5) as a, node(at, "2", heartbeat=0.5, lease=4) as b:
        callers = [Caller(each.next_round) for each in (a, b)]
        support.wait_until(lambda: not all(each.is_alive() for each in callers), "a refusal")
        refused = next(each for each in callers if not each.is_alive())
        with pytest.raises(UserError, match=words):
            refused.result()


def test_a_closed_run_is_closed_for_all(at: str) -> None:
    with node(at, "2") as a, node(at, "2") as b:
        form(a, b)
        a.set_closed()
        support.wait_until(lambda: a.is_closed() and b.is_closed(), "the end")


# What is late, and what is forgotten.


@pytest.fixture
def relay(etcd: EtcdServer) -> Iterator[Relay]:
    link = Relay(etcd.get_port())
    yield link
    link.close()


def test_what_a_deposed_leader_has_written_is_refused_when_it_comes(
    at: str, client: EtcdClient, keys: Keyspace, relay: Relay
) -> None:
    """It seals a world while it is cut off. Its request lies in the network until another leads, and then arrives."""
    began = client.put(keys.root + b"began", b"")
    with node(f"127.0.0.1:{relay.port}", "2:4", last_call=1.5, lease=3) as a:
        waiting = Caller(a.next_round)
        support.wait_until(lambda: leader_of(client, keys), "a leader")
        with node(at, "2:4", last_call=1.5, lease=3) as b, node(at, "2:4", last_call=1.5, lease=3) as c:
            others = [Caller(each.next_round) for each in (b, c)]
            support.wait_until(lambda: len(client.range(keys.told).items) == 3, "word to all three")
            relay.be_silent(True)
            first = leader_of(client, keys)
            support.wait_until(lambda: leader_of(client, keys) not in (b"", first), "another leader")
            successor = client.get(keys.leader)
            assert successor is not None
            passed = len(relay.passed)
            relay.be_silent(False)
            late = base64.b64encode(keys.turn)
            support.wait_until(lambda: late in relay.passed[passed:], "the late write")
            assert {each.result().number for each in others} == {1}
            client.put(keys.root + b"end", b"")
            with client.watch(keys.root, began) as watch:
                changes = [change for batch in _until(watch, keys.root + b"end") for change in batch.changes]
            b.set_closed()
            support.wait_until(b.is_closed, "the end")
        with contextlib.suppress(Exception):
            waiting.result()
    term = successor.create_revision
    after = [each.item for each in changes if each.kind == "put" and each.item.mod_revision > term]
    terms = {
        telling.term
        for item in after
        if item.key.startswith(keys.told)
        for telling in keyspace.decode(Tellings, item.value).items
    }
    assert terms == {term}
    worlds = [keyspace.decode(Page, item.value).snapshot.world for item in after if item.key == keys.run]
    members = [member.key for world in worlds if world is not None for member in world.members]
    assert members
    assert f"{first.decode()}/0" not in members, "it is back as somebody else at the most"
    client.delete(keys.root, is_prefix=True)


def _until(watch: Any, key: bytes) -> Iterator[Any]:
    for batch in watch:
        yield batch
        if any(change.item.key == key for change in batch.changes):
            return


def test_history_that_etcd_has_forgotten(at: str, client: EtcdClient, keys: Keyspace, relay: Relay) -> None:
    """Both the watches of an agent and that of the leader are behind; all is read again."""
    cut = f"127.0.0.1:{relay.port}"
    with node(cut, "2", 1, lease=20) as a, node(cut, "2", 1, lease=20) as b:
        form(a, b)
        relay.be_silent(True)
        for each in (keys.leader + b"-not", keys.nodes + b"stranger"):
            revision = client.put(each, b"junk")
        for item in client.range(keys.told).items:
            revision = client.put(item.key, item.value, item.lease)
        client.call("kv/compaction", revision=str(revision), physical=True)
        relay.hang_up()
        relay.be_silent(False)
        a.report_failure(1, Failure("a", 0, exitcode=3, text="broken"))
        assert [each.number for each in form(a, b)] == [2, 2]
        b.set_closed()
        support.wait_until(lambda: a.is_closed() and b.is_closed(), "the end")
    client.delete(keys.root, is_prefix=True)


def test_a_lease_of_the_run_that_somebody_ends_is_restored(
    at: str, client: EtcdClient, keys: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.rendezvous.etcd_leadership._SHORTEST_RUN_LEASE_S", 1)
    with node(at, lease=2) as a:
        (found,) = form(a)
        run = client.get(keys.run)
        assert run is not None
        client.revoke(run.lease)
        support.wait_until(lambda: client.get(keys.run), "the run to be there again")
        support.wait_until(lambda: a._etcd and a._etcd.run_lease != run.lease, "the new lease to be known")
        found.found.store.set("key", "value")
        again = client.get(keys.run)
        assert again is not None
        assert again.value == run.value
        a.report_success(1, 10)
        support.wait_until(lambda: a.outcome, "success")
    assert not left(client, keys)


# What others have left.


def refusal(handler: EtcdRendezvousHandler, kind: type[Exception] = RendezvousConnectionError) -> str:
    """The one line that the user of this node sees."""
    with pytest.raises(kind) as caught:
        Caller(handler.next_round).result()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_something_else_where_the_run_should_be(at: str, client: EtcdClient, keys: Keyspace) -> None:
    client.put(keys.run, b"somebody's notes")
    with node(at) as a:
        said = refusal(a, RendezvousStateError)
    assert said.startswith(f"what is stored under {keys.root.decode()} is not a run of this holdfast: not a Page: ")
    assert left(client, keys) == [keys.run], "it is not touched, and whoever comes next need not wait"
    client.delete(keys.root, is_prefix=True)


def test_a_leader_that_is_none(at: str, client: EtcdClient, keys: Keyspace) -> None:
    client.put(keys.leader, b"me")
    with node(at) as a:
        assert refusal(a, RendezvousStateError).endswith("is not a run of this holdfast: its leader has no lease")
    client.delete(keys.root, is_prefix=True)


def test_strangers_among_the_nodes_are_not_heard(at: str, client: EtcdClient, keys: Keyspace) -> None:
    for name in (b"junk", b"\xff\xfe", b"%zz/deep"):
        client.put(keys.nodes + name, b"\x00\xffjunk")
    with node(at) as a:
        assert form(a)[0].found.world_size == 1
        client.put(keys.nodes + b"more", b"junk")
        a.report_success(1, 10)
        support.wait_until(lambda: a.outcome, "success")
    client.delete(keys.root, is_prefix=True)


def test_junk_among_what_a_node_is_told_costs_that_node_alone(at: str, client: EtcdClient, keys: Keyspace) -> None:
    times = {"last_call": 30, "lease": 2}
    with node(at, "1:2", **times) as a, node(at, "1:2", **times) as b:
        form(a, b)
        other = a if leader_of(client, keys).decode() != a._facts.node_id else b
        leader = b if other is a else a
        client.put(keys.told_to(other._facts.node_id), b"junk")
        assert "is not a run of this holdfast: not a Tellings" in refusal(other, RendezvousStateError)
        (found,) = form(leader)
        if found.found.world_size == 2:  # It had said that it joins, and the leader has not seen yet that it is gone.
            support.wait_until(leader.take, "the end of a round with a node that is gone")
            (found,) = form(leader)
        assert found.found.world_size == 1
        leader.set_closed()
        support.wait_until(leader.is_closed, "the end")
    client.delete(keys.root, is_prefix=True)


# What cannot be reached.


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_FIRST_WORD_AFTER_S", 0.2)


@pytest.mark.usefixtures("hasty")
def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, the end of patience is told, and no time is burnt meanwhile."""
    port = support.free_port()
    began = time.process_time()
    with caplog.at_level(logging.WARNING), node(f"127.0.0.1:{port}", join_timeout=4) as a:
        said = refusal(a, RendezvousTimeoutError)
    assert time.process_time() - began < 1.5
    assert said.startswith(f"no etcd could be reached at 127.0.0.1:{port} within 4 s; the last attempt: etcd has not")
    assert said.endswith(f"127.0.0.1:{port}: connection refused")
    told = [record.getMessage() for record in caplog.records if "etcd" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"no etcd can be reached at 127.0.0.1:{port}: ")


def test_somebody_who_says_nothing_is_asked_in_no_hurry() -> None:
    with listener() as port, node(f"127.0.0.1:{port}", join_timeout=2) as a:
        began = time.process_time()
        assert "no answer in time" in refusal(a, RendezvousTimeoutError)
        assert time.process_time() - began < 1.0


def test_an_etcd_that_comes_later() -> None:
    relay = Relay(support.free_port())
    try:
        with node(f"127.0.0.1:{relay.port}") as a:
            caller = Caller(a.next_round)
            support.wait_until(lambda: a._etcd and a._etcd.reach.last_problem, "a first attempt")
            with EtcdServer() as server:
                relay.target_port = server.get_port()
                assert caller.result().number == 1
                a.report_success(1, 10)
                support.wait_until(lambda: a.outcome, "success")
    finally:
        relay.close()


def test_the_first_of_several_endpoints_is_dead(at: str) -> None:
    with node(f"127.0.0.1:{support.free_port()},{at}") as a:
        assert form(a)[0].number == 1
        a.set_closed()
        support.wait_until(a.is_closed, "the end")


def test_shutting_down_does_not_wait_for_an_etcd_that_is_gone() -> None:
    with EtcdServer() as server, node(server.get_endpoint()) as a:
        form(a)
        server.stop()
        began = time.monotonic()
        a.shutdown()
        assert time.monotonic() - began < 10
    support.wait_until(lambda: not own_threads(), "the end of all threads")


@contextlib.contextmanager
def web_server(body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"etcdserver":"3.3.27","etcdcluster":"3.3.0"}', r"^etcd '3\.3\.27' at \S+ is too old: 3\.4 is needed$"),
        (b"<html>welcome</html>", r"^etcd: \S+: this is not an answer of etcd: '<html>welcome</html>'"),
    ],
)
def test_something_that_will_not_do(body: bytes, words: str) -> None:
    with web_server(body) as endpoint, node(endpoint) as a, pytest.raises(RendezvousConnectionError, match=words):
        Caller(a.next_round).result()


# Who may.


@pytest.fixture(scope="module")
def guarded() -> Iterator[EtcdServer]:
    with EtcdServer(username="root", password="secret") as server, server.get_client() as client:
        client.call("auth/user/add", name="guest", password="guest")
        yield server


def test_a_password_from_a_file_or_the_environment(
    guarded: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    monkeypatch.setenv("HOLDFAST_ETCD_PASSWORD", "secret")
    at = guarded.get_endpoint()
    with node(at, "2", user="root", password_file=str(password)) as a, node(at, "2", user="root") as b:
        assert {each.number for each in form(a, b)} == {1}
        a.set_closed()
        support.wait_until(lambda: a.is_closed() and b.is_closed(), "the end")


@pytest.mark.parametrize(
    ("user", "password", "words"),
    [
        ("root", "wrong", "authentication failed, invalid user ID or password"),
        ("", "", "user name is empty"),
        ("guest", "guest", "permission denied"),
    ],
)
def test_who_may_not(
    guarded: EtcdServer, monkeypatch: pytest.MonkeyPatch, user: str, password: str, words: str
) -> None:
    monkeypatch.setenv("HOLDFAST_ETCD_PASSWORD", password)
    config = {"user": user} if user else {}
    with node(guarded.get_endpoint(), **config) as a:
        assert words in refusal(a)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured(certificates: Certificates) -> Iterator[EtcdServer]:
    cert, key, ca = certificates.server_pem, certificates.server_key, certificates.ca_pem
    with EtcdServer(cert=cert, key=key, client_ca=ca) as server:
        yield server


def test_tls(secured: EtcdServer, certificates: Certificates) -> None:
    files = {
        "tls_ca": certificates.ca_pem,
        "tls_cert": certificates.client_pem,
        "tls_key": certificates.client_key,
    }
    with node(secured.get_endpoint(), **files) as a:
        assert form(a)[0].number == 1
        a.set_closed()
        support.wait_until(a.is_closed, "the end")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tls_ca": "other_pem"}, "CERTIFICATE_VERIFY_FAILED"),
        ({"tls_ca": "ca_pem", "tls_cert": "stranger_pem", "tls_key": "stranger_key"}, "TLS"),
    ],
)
def test_wrong_certificates(secured: EtcdServer, certificates: Certificates, files: dict[str, str], words: str) -> None:
    paths = {name: getattr(certificates, file) for name, file in files.items()}
    with node(secured.get_endpoint(), **paths) as a:
        assert words in refusal(a)
