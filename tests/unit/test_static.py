"""Worlds that are known from the start: standalone and static."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.rendezvous import settings, static
from holdfast.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from holdfast.rendezvous.store import barrier
from tests import support
from tests.promises import promise, proves


def standalone(nodes: int = 1, endpoint: str = "", **config: Any) -> RendezvousHandler:
    params = RendezvousParameters("standalone", endpoint, "run", 1, nodes, **config)
    return static.create_standalone_handler(params)


def fixed(nodes: int = 1, endpoint: str = "host:29500", **config: Any) -> Any:
    config = {"rank": 0, "timeout": 900, **config}
    return static.create_rdzv_handler(RendezvousParameters("static", endpoint, "run", 1, nodes, **config))


BOTH: list[Any] = [standalone, fixed]
either = pytest.mark.parametrize("create", BOTH)


@promise("""rendezvous.start-group-empty-store: Every start of the group has an empty store, and with `standalone` its
    own master port.""")
@either
def test_every_round_has_an_empty_store(create: Any) -> None:
    handler = create(timeout="7")
    rounds = []
    for number in (1, 2, 3):
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        assert info.store.timeout == timedelta(seconds=7)
        assert not info.store.check(["left-over"])
        info.store.set("left-over", str(number))
        barrier(info.store, 1, "end", 5)
        rounds.append(info)
    assert [info.store.get("left-over") for info in rounds] == [b"1", b"2", b"3"]
    handler.shutdown()


@either
@pytest.mark.parametrize("close", ["set_closed", "shutdown"])
def test_no_rounds_after_the_end(create: Any, close: str) -> None:
    handler = create()
    handler.next_rendezvous()
    assert getattr(handler, close)() is (True if close == "shutdown" else None)
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError, match=r"rendezvous 'run' \(.*\) is closed after round 1"):
        handler.next_rendezvous()
    assert handler.shutdown() is True


@proves("rendezvous.start-group-empty-store")
def test_standalone_holds_a_fresh_port_in_each_round() -> None:
    handler = standalone()
    ports = []
    for _ in range(5):
        master = handler.next_rendezvous().bootstrap_store_info
        assert master.master_addr == "127.0.0.1"
        assert master.master_port in support.ports_of_this_process()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", master.master_port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", master.master_port), timeout=30)
        ports.append(master.master_port)
    assert len(set(ports)) == len(ports)
    assert support.ports_of_this_process() & {*ports} == {ports[-1]}
    handler.set_closed()
    assert support.ports_of_this_process() & {*ports} == {ports[-1]}
    handler.shutdown()
    assert support.ports_of_this_process() & {*ports} == set()


@proves("rendezvous.master-port-reserved-rank")
def test_standalone_worker_can_listen_on_the_master_port() -> None:
    handler = standalone()
    port = handler.next_rendezvous().bootstrap_store_info.master_port
    with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port), timeout=30):
        pass
    handler.shutdown()


@pytest.mark.parametrize("endpoint", ["", "localhost:0", "host:29500"])
def test_standalone_needs_no_endpoint(endpoint: str) -> None:
    assert standalone(endpoint=endpoint).get_backend() == "standalone"


@promise("""rendezvous.static-workers-get-master: With `static` the workers get the master's address and port as the
    user wrote them, and holdfast does not listen there.""")
@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("host:29500", ("host", 29500)),
        (" 10.0.0.1:1 ", ("10.0.0.1", 1)),
        ("[fd00::1]:65535", ("fd00::1", 65535)),
        ("no.such.host.invalid:80", ("no.such.host.invalid", 80)),
    ],
)
def test_static_master_is_what_the_user_wrote(endpoint: str, expected: tuple[str, int]) -> None:
    handler = fixed(endpoint=endpoint)
    for _ in range(2):
        assert handler.next_rendezvous().bootstrap_store_info == RendezvousStoreInfo(*expected)


@proves("rendezvous.static-workers-get-master")
def test_static_leaves_the_master_port_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as worker:
        port = worker.getsockname()[1]
        worker.settimeout(0)
        before = os.listdir("/proc/self/fd")
        handler = fixed(endpoint=f"127.0.0.1:{port}")
        assert handler.next_rendezvous().bootstrap_store_info.master_port == port
        assert os.listdir("/proc/self/fd") == before
        with pytest.raises(BlockingIOError):
            worker.accept()


@promise("""rendezvous.static-nodes-coordinator-port: `static` nodes with `coordinator_port=off` run side by side, with
    fixed ranks.""")
@pytest.mark.parametrize("rank", [0, 2, "2"])
def test_static_nodes_without_coordinator(rank: Any) -> None:
    info = fixed(3, rank=rank, coordinator_port="off").next_rendezvous()
    assert (info.rank, info.world_size) == (int(rank), 3)
    assert info.bootstrap_store_info == RendezvousStoreInfo("host", 29500)


@pytest.mark.parametrize("value", ["off", "1", 65535, "29501", None])
def test_coordinator_port_of_one_node(value: Any) -> None:
    assert fixed(coordinator_port=value).next_rendezvous().world_size == 1
    assert standalone(coordinator_port=value).get_backend() == "standalone"


@pytest.mark.parametrize(
    ("create", "nodes", "config", "text"),
    [
        (standalone, 2, {}, "backend 'standalone' is for one node, not for max_nodes 2"),
        (standalone, 1, {"rank": 1}, "rank 1 is out of range"),
        (fixed, 1, {"rank": None}, "backend 'static' needs the rank of this node"),
        (fixed, 1, {"rank": "first"}, "rank must be a whole number, not 'first'"),
        (fixed, 1, {"rank": 1}, "rank 1 is out of range: with max_nodes 1 it must be from 0 to 0"),
        (fixed, 3, {"rank": 3, "coordinator_port": "off"}, "rank 3 is out of range: .* from 0 to 2"),
        (fixed, 3, {"rank": -1, "coordinator_port": "off"}, "rank -1 is out of range"),
        (fixed, 1, {"endpoint": " "}, "needs an endpoint host:port, but it is empty"),
        (fixed, 1, {"endpoint": "[::1]"}, r"endpoint '\[::1\]' has no port"),
        (fixed, 1, {"endpoint": "host:0"}, "endpoint 'host:0': workers cannot meet at port 0"),
        (fixed, 1, {"endpoint": "host:port"}, "endpoint 'host:port': port 'port'"),
        (fixed, 2, {"coordinator_port": "on"}, "coordinator_port must be a port from 1 to 65535, or off, not 'on'"),
        *((create, 1, {"coordinator_port": "on"}, "coordinator_port must be .* or off, not 'on'") for create in BOTH),
        *((create, 1, {"timeout": -1}, "timeout must be a number of seconds above 0, not -1") for create in BOTH),
    ],
)
def test_mistakes_are_refused(create: Any, nodes: int, config: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        create(nodes, **config)
    assert "\n" not in str(caught.value)


@proves("rendezvous.setting-backend-know-refused")
@either
def test_unknown_settings_are_refused(create: Any) -> None:
    with pytest.raises(UserError, match=r"^unknown rendezvous setting 'typo', 'zeal' of backend '[a-z]*'$"):
        create(typo=1, zeal=2, join_timeout=5)


@proves("rendezvous.setting-backend-know-refused")
@either
def test_every_setting_of_another_backend_is_known(create: Any) -> None:
    """Whatever its value, because it has no effect. People keep settings in scripts."""
    names = settings.names_of(settings.TABLE) - {*settings._USED_ALONE}
    assert create(**dict.fromkeys(names, "x")) is not None
    of_torchrun = {"close_timeout", "heartbeat_timeout", "store_type", "read_timeout", "ssl_cert", "cacert", "protocol"}
    assert of_torchrun < names


@proves("rendezvous.setting-backend-know-refused")
@either
def test_settings_of_other_backends_are_accepted_and_said_to_do_nothing(
    create: Any, caplog: pytest.LogCaptureFixture
) -> None:
    create(timeout=900)
    assert caplog.messages == []
    create(timeout=900, join_timeout="600", last_call_timeout=30)
    (message,) = caplog.messages
    assert message.endswith("ignores the settings 'last_call_timeout'")


@either
def test_how_often_a_step_is_written(create: Any) -> None:
    assert (create().snapshot_every_s, create(snapshot_every="90").snapshot_every_s) == (0.0, 90.0)


@either
def test_shutdown_in_another_thread(create: Any) -> None:
    """Rounds are asked for until the end comes from elsewhere; then the last port is free."""
    handler = create()
    rounds: list[RendezvousInfo] = []
    several = threading.Event()

    def ask_for_rounds() -> None:
        while True:
            rounds.append(handler.next_rendezvous())
            if len(rounds) == 3:
                several.set()

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_for_rounds)
        assert several.wait(60)
        assert handler.shutdown() is True
        with pytest.raises(RendezvousClosedError) as caught:
            asking.result(60)
    assert str(caught.value).endswith(f"after round {len(rounds)}")
    if create is standalone:
        assert rounds[-1].bootstrap_store_info.master_port not in support.ports_of_this_process()


@proves("nodes.static-torch-job-several")
def test_the_coordinator_is_at_the_port_after_the_masters_unless_told() -> None:
    handler = fixed(3, rank=1)
    master = handler._master
    assert master is not None
    assert handler._where.endswith(f":{master.master_port + 1}")
    assert fixed(3, rank=1, coordinator_port=4711)._where.endswith(":4711")
