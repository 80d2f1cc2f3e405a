"""Warm workers with torch let rank 0 listen first. Rank 0 is a socket of the test here."""

from __future__ import annotations

import socket
import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest

from holdfast.process.spawner import template
from tests.promises import promise, proves


@pytest.fixture
def port() -> Iterator[int]:
    """Bound, so that it is ours, and not listened to."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def rank_one(monkeypatch: pytest.MonkeyPatch, port: int) -> pytest.MonkeyPatch:
    """This process is a worker of rank 1 on the node of rank 0, which may wait for long."""
    monkeypatch.setitem(sys.modules, "torch.distributed", types.ModuleType("torch.distributed"))
    for name, value in {"RANK": "1", "GROUP_RANK": "0", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(template, "RANK_ZERO_PATIENCE_S", 60.0)
    return monkeypatch


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "::")]
)
def test_it_sees_who_listens_at_any_address(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as server:
        server.bind((address, 0))
        port = server.getsockname()[1]
        assert not template.is_listened_to(port)
        server.listen()
        assert template.is_listened_to(port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert not template.is_listened_to(client.getsockname()[1])
    assert not template.is_listened_to(port)


@promise("""workers.torch-preloaded-store-node: With torch preloaded and without holdfast's store, workers on the node
    of rank 0 begin when rank 0 listens at `MASTER_PORT`, or after 50 ms: torch's ranks would lose up to 0.7 s if they
    came first.""")
def test_rank_one_waits_until_rank_zero_listens(rank_one: pytest.MonkeyPatch, port: int) -> None:
    waiting = threading.Thread(target=template.let_rank_zero_listen, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        waiting.join(30)
        assert not waiting.is_alive()


@proves("workers.torch-preloaded-store-node")
def test_rank_one_does_not_wait_for_long(rank_one: pytest.MonkeyPatch) -> None:
    rank_one.setattr(template, "RANK_ZERO_PATIENCE_S", 0.2)
    began = time.monotonic()
    template.let_rank_zero_listen()
    assert time.monotonic() - began >= 0.2


@proves("workers.torch-preloaded-store-node")
@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "0"), ("GROUP_RANK", "1"), ("MASTER_PORT", ""), ("MASTER_PORT", "junk")]
)
def test_others_do_not_wait(rank_one: pytest.MonkeyPatch, name: str, value: str) -> None:
    rank_one.setenv(name, value)
    began = time.monotonic()
    template.let_rank_zero_listen()
    assert time.monotonic() - began < 50


def test_a_program_without_torch_does_not_wait(rank_one: pytest.MonkeyPatch) -> None:
    rank_one.delitem(sys.modules, "torch.distributed")
    began = time.monotonic()
    template.let_rank_zero_listen()
    assert time.monotonic() - began < 50
