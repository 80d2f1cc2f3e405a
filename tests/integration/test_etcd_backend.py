"""The etcd backend on a real etcd: what a run leaves there, what others may have left, who may, and what is refused."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import logging
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import urlopen

import pytest

from holdfast.failures.records import Failure
from holdfast.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from holdfast.rendezvous.client import reachability
from holdfast.rendezvous.coordinator.state_file import boot_id
from holdfast.rendezvous.etcd import keeper
from holdfast.rendezvous.etcd.election import Leader
from holdfast.rendezvous.etcd.gateway import Gateway
from holdfast.rendezvous.etcd.locator import EtcdLocator, create_handler
from holdfast.rendezvous.etcd_server import EtcdServer
from holdfast.rendezvous.handler import CoordinatorHandler
from holdfast.rendezvous.membership.model import NodeFacts
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.rendezvous.settings import TlsFiles, read
from tests import support
from tests.certificates import Certificates
from tests.promises import promise, proves
from tests.relay import Relay


class Place:
    """One run and where its keys are."""

    def __init__(self, endpoint: str, gateway: Gateway) -> None:
        self.endpoint = endpoint
        self.run_id = uuid.uuid4().hex
        self.gateway = gateway
        self.leader_key, self.memory_key, _ = keeper.keys_of("/holdfast", self.run_id)

    @contextlib.contextmanager
    def node(self, nodes: str = "1", endpoint: str = "", **config: Any) -> Iterator[CoordinatorHandler]:
        """A handler as an agent has it."""
        low, _, high = nodes.partition(":")
        settings = {"last_call": 0.2, "join_timeout": 30, "close_linger": 0.5, **config}
        sizes = int(low), int(high or low)
        handler = create_handler(
            RendezvousParameters("etcd", endpoint or self.endpoint, self.run_id, *sizes, **settings)
        )
        try:
            yield handler
        finally:
            handler.shutdown()

    def left(self) -> list[bytes]:
        return [key for key in (self.leader_key, self.memory_key) if self.gateway.get(key) is not None]

    def leader(self) -> Leader | None:
        return keeper.decode_leader(self.gateway.get(self.leader_key))


@pytest.fixture
def place(etcd: EtcdServer) -> Iterator[Place]:
    with etcd.get_client() as gateway:
        found = Place(etcd.get_endpoint(), gateway)
        yield found
        for key in found.left():
            gateway.delete(key)


def form(*handlers: CoordinatorHandler) -> list[RendezvousInfo]:
    """Each gets a place in the same round."""
    with ThreadPoolExecutor(len(handlers)) as threads:
        return [each.result(30) for each in [threads.submit(handler.next_rendezvous) for handler in handlers]]


def close(*handlers: CoordinatorHandler) -> None:
    handlers[0].set_closed()
    support.wait_until(lambda: all(each.is_closed() for each in handlers), "the end")


def refusal(handler: CoordinatorHandler, kind: type[Exception] = RendezvousConnectionError) -> str:
    """The one line that the user of this node sees."""
    with pytest.raises(kind) as caught:
        form(handler)
    assert "\n" not in str(caught.value)
    return str(caught.value)


_earlier_threads: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def earlier_threads() -> None:
    """Those of other tests in this process."""
    _earlier_threads.clear()
    _earlier_threads.update(threading.enumerate())


def own_threads() -> list[str]:
    found = (each for each in threading.enumerate() if each not in _earlier_threads)
    return [each.name for each in found if each.name.startswith("holdfast-")]


@promise("""etcd-runs.run-key-thread-process: After a run no key, thread or process of it is left: at once, also if
    nodes had left it; after `close_linger`, if one was lost or there was room for more. If all processes are killed,
    the memory stays for about a minute.""")
def test_a_run_leaves_nothing(place: Place) -> None:
    """Its keys go at once, not with their leases: a leave is no loss."""
    with place.node("3") as a, place.node("3") as b, place.node("3") as c:
        found = form(a, b, c)
        assert sorted(each.rank for each in found) == [0, 1, 2]
        assert all(each.bootstrap_store_info == found[0].bootstrap_store_info for each in found)
        found[0].store.set("key", "value")
        assert found[1].store.get("key") == b"value"
        assert place.left() == [place.leader_key, place.memory_key]
        for each in (a, b, c):
            each.report_success(1, 10)
        support.wait_until(lambda: all(each.is_closed() for each in (a, b, c)), "success")
        support.wait_until(lambda: not place.left(), "the end of all keys", deadline_s=3)
    support.wait_until(lambda: not own_threads(), "the end of all threads")


@proves("etcd-runs.several-endpoints-users")
def test_runs_do_not_meet_under_other_prefixes(place: Place) -> None:
    with place.node(prefix="one") as a, place.node(prefix="/two/") as b:
        first, second = form(a, b)
        first.store.set("key", "one")
        second.store.set("key", "two")
        assert first.store.get("key") == b"one"
        assert (first.world_size, second.world_size) == (1, 1)
        close(a)
        close(b)


def ask(place: Place, path: str, **fields: object) -> dict[str, Any]:
    """What the gateway has no words for."""
    with urlopen(f"http://{place.endpoint}/v3/{path}", json.dumps(fields).encode(), timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def lease_of(place: Place, key: bytes) -> str:
    lease: str = ask(place, "kv/range", key=base64.b64encode(key).decode())["kvs"][0]["lease"]
    return lease


@proves("etcd-runs.run-key-thread-process")
def test_the_memory_does_not_stay_for_long_if_every_process_is_killed(place: Place) -> None:
    """Long enough for workers that nobody can see to end, and a minute more."""
    with place.node(lease=2, leader_lease=2) as a:
        form(a)
        left_s = int(ask(place, "lease/timetolive", ID=lease_of(place, place.memory_key))["TTL"])
        assert 60 < left_s <= 68
        assert int(ask(place, "lease/timetolive", ID=lease_of(place, place.leader_key))["TTL"]) <= 2
        close(a)


@proves("etcd-runs.run-survives-etcd-loses")
def test_a_memory_that_is_lost_while_the_run_goes_on(place: Place) -> None:
    """Its lease was ended by hand: the coordinator steps down, and the next one learns from the nodes."""
    with place.node("2", leader_lease=2, lease=3) as a, place.node("2", leader_lease=2, lease=3) as b:
        for each in (a, b):
            each.introduce("default", 1, RestartPolicy(3))
        form(a, b)
        before = place.leader()
        ask(place, "lease/revoke", ID=lease_of(place, place.memory_key))
        a.report_failure(1, Failure("a", 0, exitcode=3, text="broken"))
        assert [each.world_size for each in form(a, b)] == [2, 2]
        after = place.leader()
        assert before
        assert after
        assert after.term > before.term
        close(a, b)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "_FIRST_WORD_AFTER_S", 0.2)


@promise("""etcd-runs.coordinator-port-host-false: `coordinator_port` and `is_host=false` are honoured. A port that is
    in use, a coordinator of another version, and one at a loopback address of another host are named.""")
def test_the_port_of_the_coordinator_can_be_chosen(place: Place) -> None:
    port = support.free_port()
    with place.node(coordinator_port=port) as a:
        form(a)
        leader = place.leader()
        assert leader is not None
        assert (leader.host, leader.port, leader.boot_id) == ("127.0.0.1", port, boot_id())
        close(a)


@proves("etcd-runs.coordinator-port-host-false")
def test_a_port_that_is_taken(place: Place) -> None:
    """Another node may start the coordinator, or the port may become free, so it is tried again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with place.node(coordinator_port=port, join_timeout=3) as a:
            said = refusal(a, RendezvousTimeoutError)
    assert said.endswith(
        "the last attempt: no coordinator is in office, and this node cannot start one: "
        f"cannot listen at 127.0.0.1:{port}: the port is taken"
    )


@proves("etcd-runs.coordinator-port-host-false")
@pytest.mark.usefixtures("hasty")
def test_a_node_that_may_not_start_a_coordinator_waits_for_one(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    words = "no coordinator is in office, and this node may not start one (is_host=false)"
    with place.node("2", is_host="false") as a, place.node("2") as b, ThreadPoolExecutor(2) as threads:
        with caplog.at_level(logging.WARNING):
            waiting = threads.submit(a.next_rendezvous)
            support.wait_until(lambda: words in caplog.text, words)
        assert not place.left()
        threads.submit(b.next_rendezvous)
        assert waiting.result(30).world_size == 2
        close(a, b)


@contextlib.contextmanager
def stored(place: Place, key: bytes, value: bytes) -> Iterator[None]:
    place.gateway.put(key, value)
    yield
    assert place.gateway.get(key) == value, "it is not touched"
    place.gateway.delete(key)


@proves("etcd-runs.coordinator-port-host-false")
def test_a_leader_at_a_loopback_address_of_another_host(place: Place) -> None:
    there = Leader("127.0.0.1", 1, "token", 1, boot_id="another")
    with stored(place, place.leader_key, keeper.encode_leader(there)), place.node() as a:
        said = refusal(a)
    assert said == (
        f"the coordinator of run {place.run_id!r} is at 127.0.0.1 on another host, where this node cannot reach it; "
        "give the nodes addresses with --local-addr"
    )


@promise("""etcd-runs.foreign-data-keys-run: Foreign data in the keys of a run causes one clear line. holdfast does not
    change it where the leader should be, and trusts none of it.""")
@pytest.mark.parametrize(
    "value",
    [
        b"somebody's notes",
        b"\xff\x00",
        b"[" * 10_000,
        b"{}",
        b'{"host":"a b","port":1,"token":"","term":1}',
        b'{"host":"a","port":70000,"token":"","term":1}',
        b'{"host":"a","port":1,"token":"","term":1%s}' % (b"0" * 30),
    ],
)
def test_junk_where_the_leader_should_be(place: Place, value: bytes) -> None:
    with stored(place, place.leader_key, value), place.node() as a:
        said = refusal(a)
    assert said.startswith("the run's leader key in etcd cannot be read: ")


@proves("etcd-runs.foreign-data-keys-run")
def test_junk_where_the_memory_should_be(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """It is told in one line and counts as lost: nothing of it is believed, and the full wait holds."""
    place.gateway.put(place.memory_key, b"somebody's notes")
    with caplog.at_level(logging.WARNING), place.node(leader_lease=2, lease=1) as a:
        began = time.monotonic()
        form(a)
        assert time.monotonic() - began > 3
        close(a)
    line = next(each.getMessage() for each in caplog.records if "counts as lost" in each.getMessage())
    assert f"the memory of run {place.run_id!r} in etcd cannot be read, and counts as lost: " in line


@proves("etcd-runs.foreign-data-keys-run")
def test_something_that_overwrites_the_leader(place: Place) -> None:
    """The coordinator steps down with its next write. When the key is free again there is another one."""
    with place.node("1:2", lease=20) as a:
        form(a)
        port = place.leader().port  # type: ignore[union-attr]
        place.gateway.put(place.leader_key, b"notes")
        a.report_success(1, 10)
        support.wait_until(lambda: not listens(port), "the coordinator to step down")
        place.gateway.delete(place.leader_key)
        close(a)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != errno.ECONNREFUSED


def locator_of(place: Place, endpoint: str) -> EtcdLocator:
    """It knows of a coordinator of term 7, which is gone."""
    chosen = read(RendezvousParameters("etcd", endpoint, place.run_id, 1, 1))
    locator = EtcdLocator(place.run_id, chosen, NodeFacts("a", address="127.0.0.1"))
    locator._leader = Leader("127.0.0.1", 2, "", 7)
    return locator


def test_the_lease_of_a_coordinator_that_ended_during_an_outage_is_revoked_after_it(
    etcd: EtcdServer, place: Place
) -> None:
    """Else the next coordinator would have to wait until it ends."""
    lease = place.gateway.grant_lease(600)
    place.gateway.put(place.leader_key, b"left", lease)
    relay = Relay(etcd.get_port())
    locator = locator_of(place, f"127.0.0.1:{relay.port}")
    try:
        relay.be_silent(True)
        locator._revoke(lease)
        assert place.left() == [place.leader_key]
        relay.be_silent(False)
        locator.locate(7, 1, lambda: False, lambda: None)
        support.wait_until(lambda: not place.left(), "the end of the key")
    finally:
        locator.stop()
        relay.close()


@proves("etcd.write-answer-lost-sent")
def test_a_leader_key_whose_answer_was_lost_is_this_nodes(etcd: EtcdServer, place: Place) -> None:
    """The request is sent again, and finds the key that it has created."""
    proxy = Relay(etcd.get_port())
    proxy.is_deaf = True
    locator = locator_of(place, f"127.0.0.1:{proxy.port},{place.endpoint}")
    mine = Leader("127.0.0.1", 1, "mine", 8)
    assert locator._create(mine, place.gateway.grant_lease(60)) == mine
    locator.stop()
    proxy.close()


def test_a_look_that_is_not_wanted_any_more_starts_no_coordinator(place: Place) -> None:
    """A node that looked for its coordinator has heard meanwhile that the run is over."""
    locator = locator_of(place, place.endpoint)
    locator.locate(7, 1, lambda: False, lambda: pytest.fail("there is none to be found"))
    support.wait_until(lambda: not own_threads(), "the end of the look")
    assert not place.left()
    locator.stop()


def requests(place: Place) -> float:
    with urlopen(f"http://{place.endpoint}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(r"^grpc_server_started_total{[^}]*} (\S+)$", text, re.MULTILINE)))


@promise("""etcd-runs.rest-coordinator-talks-etcd: At rest only the coordinator talks to etcd, and not more with more
    nodes.""")
@pytest.mark.parametrize("count", [1, 8])
def test_at_rest_only_the_coordinator_talks_to_etcd(count: int) -> None:
    """It renews its lease five times in a lease, however many nodes there are."""
    with EtcdServer() as server, server.get_client() as gateway, contextlib.ExitStack() as stack:
        place = Place(server.get_endpoint(), gateway)
        handlers = [stack.enter_context(place.node(str(count))) for _ in range(count)]
        form(*handlers)
        before, began = requests(place), time.monotonic()
        support.wait_until(lambda: time.monotonic() - began > 3, "some seconds at rest")
        done, took_s = requests(place) - before, time.monotonic() - began
        assert took_s * 0.5 < done < took_s + 2
        close(*handlers)
        support.wait_until(lambda: not place.left(), "the end of the coordinator, while it can tell etcd")


@promise("""etcd-runs.unreachable-etcd-reported: An unreachable etcd is reported within seconds, and retried without a
    busy loop until the join timeout. An etcd that starts later works, and so do endpoints of which some are dead.""")
@pytest.mark.usefixtures("hasty")
def test_nobody_listens(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, the end of patience is told, and no time is burnt meanwhile."""
    at = f"127.0.0.1:{support.free_port()}"
    began = time.process_time()
    with caplog.at_level(logging.WARNING), place.node(endpoint=at, join_timeout=4) as a:
        said = refusal(a, RendezvousTimeoutError)
    assert time.process_time() - began < 1.5
    assert said.startswith(f"could not reach etcd {at} within 4 s; the last attempt: etcd has not answered")
    assert said.endswith(f"{at}: connection refused")
    told = [record.getMessage() for record in caplog.records if "etcd" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"cannot reach etcd {at}: ")


@proves("etcd-runs.unreachable-etcd-reported")
def test_an_etcd_that_comes_later(place: Place) -> None:
    relay = Relay(support.free_port())
    try:
        with place.node(endpoint=f"127.0.0.1:{relay.port}") as a, ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(a.next_rendezvous)
            support.wait_until(lambda: a._client and a._client.reach.last_problem, "a first attempt")
            with EtcdServer() as server:
                relay.target_port = server.get_port()
                assert waiting.result(30).world_size == 1
                close(a)
                with server.get_client() as gateway:
                    key = place.leader_key
                    support.wait_until(
                        lambda: gateway.get(key) is None, "the coordinator's end, while it can tell etcd"
                    )
    finally:
        relay.close()


@proves("etcd-runs.run-key-thread-process")
def test_shutting_down_does_not_wait_for_an_etcd_that_is_gone() -> None:
    with EtcdServer() as server, server.get_client() as gateway:
        place = Place(server.get_endpoint(), gateway)
        with place.node(leader_lease=2) as a:  # The coordinator lives on for so long.
            form(a)
            server.stop()
            watch = support.Stopwatch()
            with watch.measured():
                a.shutdown()
            assert watch.longest_s < 5
    support.wait_until(lambda: not own_threads(), "the end of all threads")


@promise("""etcd-runs.agent-traffic-encrypted: Agent traffic is encrypted if the traffic to etcd is, unless
    `agent_tls=off`. A token keeps out agents that do not have it.""")
def test_tls_to_etcd_and_between_agents(secured_etcd: EtcdServer, certificates: Certificates) -> None:
    """One certificate for both, good for a server and for a client."""
    tls = TlsFiles(certificates.server_pem, certificates.server_key, certificates.ca_pem)
    files = {f"tls_{name}": path for name, path in tls._asdict().items()}
    with secured_etcd.get_client(tls=tls) as gateway:
        place = Place(secured_etcd.get_endpoint(), gateway)
        with place.node("2", **files) as a, place.node("2", **files) as b:
            form(a, b)
            leader = place.leader()
            assert leader is not None
            with socket.create_connection((leader.host, leader.port), 5) as stranger:
                stranger.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    stranger.recv(1)  # A coordinator that speaks plainly would greet it.
            close(a, b)
