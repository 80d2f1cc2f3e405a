"""The key-value store between several clients of a coordinator, and over connections that break. What every store
promises is in test_stores.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.rendezvous import store as stores
from holdfast.rendezvous.api import RendezvousConnectionError
from holdfast.rendezvous.store import Store, StoreLostError, StoreTimeoutError
from tests import support
from tests.coordinators import Caller, CoordinatorProcess, coordinator, form, node
from tests.promises import promise, proves
from tests.relay import Relay

SHORT = timedelta(seconds=0.1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path) as process:
        yield process


@pytest.fixture
def clients(server: CoordinatorProcess) -> Iterator[list[Store]]:
    """The stores of the three nodes of a round, in the order of their ranks."""
    with node(server.port, "3") as a, node(server.port, "3") as b, node(server.port, "3") as c:
        rounds = sorted(form(a, b, c), key=lambda each: each.found.rank)
        yield [each.found.store for each in rounds]


TOO_LARGE: list[tuple[Any, str]] = [
    (lambda store: store.add("k", 2**70), "store: "),
    (lambda store: store.set("k", bytes(1 << 20)), "at most 1048576 can be sent"),
]


@pytest.mark.parametrize(("call", "words"), TOO_LARGE)
def test_what_cannot_be_sent(clients: list[Store], call: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        call(clients[0])
    assert not clients[1].check(["k"])


def test_rounds_have_stores_of_their_own(server: CoordinatorProcess) -> None:
    with node(server.port) as a:
        (first,) = form(a)
        first.found.store.set("key", "first")
        (second,) = form(a)
        assert second.number == 2
        assert not second.found.store.check(["key"])
        assert first.found.store.get("key") == b"first"


def test_more_keys_and_values_than_fit_into_a_message(clients: list[Store]) -> None:
    a, b, _ = clients
    keys = [f"{'long' * 50}{number}" for number in range(9000)]
    waiting = Caller(b.wait, keys)
    for begin in range(0, len(keys), 1000):
        some = keys[begin : begin + 1000]
        assert not a.check(keys)
        a.multi_set(some, [key[-4:] * 60 for key in some])
    waiting.result()
    assert a.check(keys)
    assert b.multi_get(keys) == [key[-4:].encode() * 60 for key in keys]
    with pytest.raises(StoreTimeoutError, match=r"timed out after 0.1 s waiting for 'round/1/no', 'round/1/never'$"):
        a.wait([*keys, "no", "never"], SHORT)


@pytest.fixture
def proxy(server: CoordinatorProcess) -> Iterator[Relay]:
    proxy = Relay(server.port)
    yield proxy
    proxy.close()


@promise("""coordinator.requests-store-survive: Requests to the store survive a reconnect. A request whose answer was
    lost is not carried out again.""")
def test_a_get_that_waits_survives_a_reconnect(server: CoordinatorProcess, proxy: Relay) -> None:
    with node(proxy.port, "2") as a, node(server.port, "2") as b:
        first, second = form(a, b)
        waiting = Caller(first.found.store.get, "late")
        for _ in range(3):
            first.found.store.set("on its way", "")
            proxy.hang_up()
            first.found.store.set("back again", "")
        second.found.store.set("late", "here")
        assert waiting.result() == b"here"


@proves("coordinator.requests-store-survive")
def test_what_was_carried_out_before_the_answer_got_lost_is_not_carried_out_again(
    server: CoordinatorProcess, proxy: Relay
) -> None:
    with node(proxy.port, "2") as a, node(server.port, "2") as b:
        first, second = form(a, b)
        first.found.store.set("the store is known", "")
        for turn in range(1, 4):
            proxy.is_deaf = True
            adding = Caller(first.found.store.add, "sum", 1)
            support.wait_until(lambda turn=turn: second.found.store.add("sum", 0) == turn, "it was added")
            assert adding.is_alive()
            proxy.is_deaf = False
            proxy.hang_up()
            assert adding.result() == turn
        assert second.found.store.get("sum") == b"3"


def test_while_nobody_answers_time_runs_out(server: CoordinatorProcess, proxy: Relay) -> None:
    with node(proxy.port, on_isolation="continue") as a:
        store = form(a)[0].found.store
        assert a._client is not None
        reach = a._client.reach
        proxy.close()
        support.wait_until(lambda: reach.since is not None, "it knows that the connection is gone")
        store.set_timeout(SHORT)
        with pytest.raises(StoreTimeoutError, match="waiting for 'round/1/key'; the coordinator is out of reach"):
            store.get("key")


@promise("""coordinator.store-lost-process-plug: The store is lost with its coordinator process: a plug-in that waits or
    counts in it gets `StoreLostError`, never a silent zero. The store of the next round works.""")
def test_a_store_that_was_lost_with_its_coordinator(tmp_path: Path) -> None:
    """Whoever waits, or counts, is told; a store that is opened afterwards works."""
    process = CoordinatorProcess(tmp_path)
    with contextlib.closing(process), node(process.port) as handler:
        store = form(handler)[0].found.store
        assert store.add("count", 1) == 1
        waiting = Caller(store.get, "never")
        process.kill()
        with coordinator(tmp_path, port=process.port):
            with pytest.raises(StoreLostError, match="the coordinator was replaced, and what this round had stored"):
                waiting.result()
            with pytest.raises(StoreLostError):
                store.add("count", 1)
            with pytest.raises(StoreLostError):
                stores.barrier(store, 2, "barrier", 0.1, 0)
            after = form(handler)[0].found.store
            assert after.add("count", 1) == 1
            assert after.add("count", 1) == 2


def test_whoever_waits_when_the_node_leaves_is_told(server: CoordinatorProcess) -> None:
    with node(server.port) as a:
        store = form(a)[0].found.store
        waiting = Caller(store.get, "never")
        store.set("in between", "")
    with pytest.raises(RendezvousConnectionError, match="the connection to the coordinator is closed"):
        waiting.result()
    with pytest.raises(RendezvousConnectionError, match="the connection to the coordinator is closed"):
        store.set("too", "late")
