"""The agent's client: nothing that takes time keeps its thread from its heartbeats and its lease."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.rendezvous import handler
from holdfast.rendezvous.api import RendezvousParameters
from holdfast.rendezvous.client.handshake import Target
from holdfast.rendezvous.client.thread import Locator
from holdfast.rendezvous.handler import CoordinatorHandler
from holdfast.rendezvous.membership.model import PlaceLost
from holdfast.rendezvous.settings import read
from tests import support
from tests.coordinators import Caller, CoordinatorProcess, await_push, coordinator, form, node
from tests.promises import promise, proves
from tests.relay import Relay


def keeps_its_place(made: CoordinatorHandler, for_s: float) -> bool:
    ends = time.monotonic() + for_s
    support.wait_until(lambda: made.has_lapsed or time.monotonic() > ends, "some leases")
    return not made.has_lapsed and not [push for push in made.take() if isinstance(push, PlaceLost)]


def is_connected(made: CoordinatorHandler) -> bool:
    assert made._client is not None
    return made._client.reach.since is None


@promise("""coordinator.heartbeats-leases-go-node: Heartbeats and leases go on while a node starts a coordinator or
    connects to one. A connection attempt is given up at once when the coordinator has moved.""")
def test_a_coordinator_that_starts_slowly_costs_the_node_that_starts_it_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease goes on from each refused connection while the process starts."""
    begun, is_ready = threading.Event(), threading.Event()

    def start_slowly(*_: object) -> bool:
        begun.set()
        return is_ready.wait(30)

    first = CoordinatorProcess(tmp_path)
    with closing(first), node(first.port, is_host=True, lease=2.5, heartbeat=0.3) as a:
        form(a)
        monkeypatch.setattr(handler.launch, "host_at", start_slowly)
        first.kill()
        assert begun.wait(30)
        assert keeps_its_place(a, for_s=4.0)
        with coordinator(tmp_path, port=first.port):
            is_ready.set()
            support.wait_until(lambda: is_connected(a), "it is back")
            assert keeps_its_place(a, for_s=3.0)


def test_a_dial_that_was_refused_long_ago_starts_no_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is late: another coordinator has served meanwhile, and is gone with its run."""
    port, refused, may_go_on = support.free_port(), threading.Event(), threading.Event()
    late: list[threading.Thread] = []
    hosts: list[threading.Thread] = []  # Those that would have started a coordinator.
    connect = Target.connect

    def connect_late(target: Target, introduction: Any) -> Any:
        try:
            return connect(target, introduction)
        except ConnectionRefusedError:
            if not refused.is_set():
                late.append(threading.current_thread())
                refused.set()
                may_go_on.wait(30)
            raise

    monkeypatch.setattr(Target, "connect", connect_late)
    monkeypatch.setattr(handler.launch, "host_at", lambda *args: hosts.append(threading.current_thread()))
    with node(port, is_host=True) as a:
        waiting = Caller(a.next_rendezvous)
        assert refused.wait(30)
        with coordinator(tmp_path, port=port):
            assert a._client is not None
            a._client._inbox.put(a._client._move)  # As if another thread had found that coordinator.
            waiting.result()
    may_go_on.set()
    late[0].join(support.DEADLINE_S)
    assert not late[0].is_alive()
    assert late[0] not in hosts  # Another dial may be refused when the coordinator ends.


class Moving(Locator):
    """The coordinator moves when the test says so."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.found: Callable[[], object] | None = None

    def target(self) -> Target:
        return Target("127.0.0.1", self.port, "moving")

    def refused(self, target: Target) -> bool:
        return False

    def locate(
        self, known_term: int, node_count: int, is_wanted: Callable[[], bool], found: Callable[[], object]
    ) -> None:
        self.found = found


@proves("coordinator.heartbeats-leases-go-node")
def test_a_dial_is_given_up_when_the_coordinator_has_moved(tmp_path: Path) -> None:
    """The address that the node knows accepts its connection and says nothing: the handshake there would take 5 s."""
    with coordinator(tmp_path) as server, socket.create_server(("127.0.0.1", 0)) as silent:
        relay = Relay(server.port)
        locator = Moving(relay.port)
        times = {"lease": 4, "reconnect_grace": 2, "drop_timeout": 4, "last_call": 0.1, "close_linger": 0.1}
        params = RendezvousParameters("etcd", "127.0.0.1", "moving", 1, 1, **times)
        a = CoordinatorHandler(params, read(params), "here", lambda _: locator, [("127.0.0.1", 1)])
        try:
            form(a)
            locator.port = silent.getsockname()[1]
            relay.hang_up()
            connection, _ = silent.accept()
            locator.port = server.port
            assert locator.found is not None
            watch = support.Stopwatch(server.pid)
            with watch.measured():
                locator.found()
                support.wait_until(lambda: is_connected(a), "it is back")
            assert watch.longest_s < 2.0
            assert keeps_its_place(a, for_s=1.0)
            connection.close()
        finally:
            a.shutdown()
            relay.close()


def test_a_node_that_lost_its_place_asks_the_store_when_it_has_joined_again(tmp_path: Path) -> None:
    """The coordinator hangs up on a stranger that asks the store, so a node without a place must not ask."""
    times = {"lease": 1, "reconnect_grace": 0.2, "drop_timeout": 1}
    with coordinator(tmp_path) as server, closing(Relay(server.port)) as relay, node(relay.port, **times) as a:
        (first,) = form(a)
        relay.be_silent(True)
        await_push(a, PlaceLost)
        asking = Caller(first.found.store.set, "k", "v")
        relay.hang_up()
        support.wait_until(lambda: not is_connected(a), "it has noticed")
        relay.be_silent(False)
        support.wait_until(lambda: is_connected(a), "it is back")
        (second,) = form(a)
        asking.result()
        assert second.number > first.number
        assert not server.lines("is not a member of the run")
