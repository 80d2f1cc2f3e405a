"""The contract between backends and agents: parameters, store addresses, the registry."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError
from datetime import timedelta
from typing import Any

import pytest

import holdfast.rendezvous
from holdfast.errors import HoldfastError
from holdfast.rendezvous import api
from holdfast.rendezvous.api import (
    RendezvousHandler,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from holdfast.rendezvous.store import InProcessStore
from tests import support


def parameters(backend: str = "own", **kwargs: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, "host:1", "run", 1, 2, **kwargs)


class OwnHandler(RendezvousHandler):
    def __init__(self, backend: str) -> None:
        self._backend = backend

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return "run"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(InProcessStore(), 0, 1, RendezvousStoreInfo("h", 1))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def create_own(params: RendezvousParameters) -> RendezvousHandler:
    return OwnHandler("own")


def test_package_exports_every_public_name() -> None:
    for name in holdfast.rendezvous.__all__:
        assert getattr(holdfast.rendezvous, name) is getattr(api, name)
        assert name in dir(holdfast.rendezvous)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = holdfast.rendezvous.nonsense


def test_importing_the_package_imports_none_of_its_modules() -> None:
    code = (
        "import sys, holdfast.rendezvous as r\n"
        "assert [m for m in sys.modules if m.startswith('holdfast.rendezvous.')] == []\n"
        "assert {'static', 'standalone'} <= set(r.rendezvous_handler_registry.names())\n"
        "assert 'holdfast.rendezvous.static' not in sys.modules\n"
        "assert 'importlib.metadata' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True, env={"PYTHONPATH": _source_root()})


def _source_root() -> str:
    return holdfast.rendezvous.__path__[0].removesuffix("/holdfast/rendezvous")


def test_parameters_keep_what_they_are_given() -> None:
    params = RendezvousParameters("b", "h:1", "run", 1, 3, "me", extra="x", none=None)
    assert (params.backend, params.endpoint, params.run_id) == ("b", "h:1", "run")
    assert (params.min_nodes, params.max_nodes, params.local_addr) == (1, 3, "me")
    assert params.config == {"extra": "x", "none": None}
    assert RendezvousParameters("b", "", "", 1, 1).local_addr is None


@pytest.mark.parametrize(
    ("backend", "min_nodes", "max_nodes", "text"),
    [
        ("", 1, 1, "no name: ''"),
        (None, 1, 1, "no name: None"),
        ("b", 0, 1, "min_nodes is 0"),
        ("b", -1, 1, "min_nodes is -1"),
        ("b", 3, 2, "max_nodes is 2, .* min_nodes, which is 3"),
    ],
)
def test_parameters_refuse(backend: Any, min_nodes: int, max_nodes: int, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        RendezvousParameters(backend, "", "run", min_nodes, max_nodes)
    assert isinstance(caught.value, HoldfastError)


def test_get() -> None:
    params = parameters(a="1", n=None)
    assert (params.get("a"), params.get("n", 5), params.get("x"), params.get("x", 5)) == ("1", None, None, 5)
    assert (params.get_as_bool("x"), params.get_as_bool("x", True)) == (None, True)
    assert (params.get_as_int("x"), params.get_as_int("x", 7)) == (None, 7)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *[(None, None), (True, True), (False, False), (1, True), (0, False)],
        *[(text, True) for text in ("1", "true", "TRUE", "t", "Yes", "y")],
        *[(text, False) for text in ("0", "false", "False", "F", "no", "N")],
        *[(value, "'flag' is") for value in (2, -1, "2", "", "on", " true", 1.0, [1], b"1")],
    ],
)
def test_get_as_bool(value: Any, expected: bool | str | None) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            parameters(flag=value).get_as_bool("flag")
    else:
        assert parameters(flag=value).get_as_bool("flag") is expected


def test_get_as_int() -> None:
    values = (None, 3, "3", " -3 ", 2.9)
    assert [parameters(number=value).get_as_int("number") for value in values] == [None, 3, 3, -3, 2]
    with pytest.raises(ValueError, match="'number' is 'many'"):
        parameters(number="many").get_as_int("number")
    with pytest.raises(TypeError):
        parameters(number=[]).get_as_int("number")


def test_store_address_is_published_by_rank_0_and_read_by_all() -> None:
    store = InProcessStore(timedelta(seconds=30))
    found: list[RendezvousStoreInfo] = []
    reader = threading.Thread(target=lambda: found.append(RendezvousStoreInfo.build(1, store, "mine")))
    reader.start()
    built = RendezvousStoreInfo.build(0, store, "node0", 1234)
    reader.join(30)
    assert found == [built] == [RendezvousStoreInfo("node0", 1234)]
    assert store.get(RendezvousStoreInfo.MASTER_ADDR_KEY) == b"node0"
    assert store.get(RendezvousStoreInfo.MASTER_PORT_KEY) == b"1234"


def test_store_address_defaults_to_the_host_name_and_a_port_that_is_held() -> None:
    built = RendezvousStoreInfo.build(0, InProcessStore(), None)
    assert built.master_addr == socket.getfqdn()
    port = built.master_port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.socket() as worker:
        worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        worker.bind(("127.0.0.1", port))
        worker.listen()
    assert port in support.ports_of_this_process()
    del built
    gc.collect()
    assert port not in support.ports_of_this_process()


def test_rendezvous_info_is_read_only() -> None:
    store, address = InProcessStore(), RendezvousStoreInfo("h", 1)
    info = RendezvousInfo(store, 1, 2, address)
    assert (info.store, info.rank, info.world_size, info.bootstrap_store_info) == (store, 1, 2, address)
    with pytest.raises(FrozenInstanceError):
        info.rank = 5  # type: ignore[misc]


def test_handler_contract_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        RendezvousHandler()  # type: ignore[abstract]
    assert OwnHandler("own").use_agent_store is False


def test_registry() -> None:
    registry = RendezvousHandlerRegistry()
    with pytest.raises(ValueError, match=r"unknown rendezvous backend 'own'; available: none$"):
        registry.create_handler(parameters("own"))
    registry.register("own", create_own)
    registry.register(backend="own", creator=create_own)
    registry.register("alias", create_own)
    assert registry.names() == ["alias", "own"]
    assert ("own" in registry, "other" in registry) == (True, False)
    assert registry.create_handler(parameters("own")).get_backend() == "own"
    with pytest.raises(ValueError, match=r"unknown rendezvous backend 'c10d'; available: alias, own$"):
        registry.create_handler(parameters("c10d"))
    with pytest.raises(RuntimeError, match=r"'alias' .* calls itself 'own'"):
        registry.create_handler(parameters("alias"))
    with pytest.raises(ValueError, match="'own' is taken by"):
        registry.register("own", lambda params: OwnHandler("own"))
    for nameless in ("", None):
        with pytest.raises(ValueError, match=repr(nameless)):
            registry.register(nameless, create_own)  # type: ignore[arg-type]
