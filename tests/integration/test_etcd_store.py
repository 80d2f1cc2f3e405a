"""What the store in etcd does that other stores do not: leases, lost answers, servers that are away."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.rendezvous.api import RendezvousConnectionError
from holdfast.rendezvous.etcd_client import EtcdClient, Unavailable
from holdfast.rendezvous.etcd_store import EtcdStore
from holdfast.rendezvous.store import StoreTimeoutError
from holdfast.testing.etcd_server import EtcdServer
from tests.coordinators import Caller
from tests.support import halt

LONG = timedelta(seconds=60)


@pytest.fixture
def client(etcd: EtcdServer) -> Iterator[EtcdClient]:
    with etcd.get_client() as found:
        yield found


def prefix() -> bytes:
    return f"store/{uuid.uuid4()}/".encode()


def test_keys_vanish_with_the_lease(client: EtcdClient) -> None:
    lease, place = client.grant_lease(60), prefix()
    store = EtcdStore(client, place, LONG, lease)
    store.set("a", "1")
    store.multi_set(["b", "c"], ["1", "2"])
    store.add("n", 1)
    store.compare_set("k", "", "v")
    assert client.range(place).count == 5
    assert {item.lease for item in client.range(place).items} == {lease}
    client.revoke(lease)
    assert client.range(place).count == 0
    for write in (lambda: store.set("a", "1"), lambda: store.add("n", 1), lambda: store.multi_set(["a"], ["1"])):
        with pytest.raises(RendezvousConnectionError, match=r"store: .*requested lease not found"):
            write()


def test_stores_under_other_prefixes_are_others(client: EtcdClient) -> None:
    place = prefix()
    one, two = EtcdStore(client, place + b"1/", LONG), EtcdStore(client, place + b"2/", LONG)
    one.set("k", "1")
    assert not two.check(["k"])
    with pytest.raises(UserError, match="needs a prefix"):
        EtcdStore(client, b"", LONG)


def test_many_keys_at_once(client: EtcdClient) -> None:
    """More than etcd takes in one transaction."""
    store = EtcdStore(client, prefix(), LONG)
    names = [f"key{n}" for n in range(333)]
    waiting = Caller(store.multi_get, names)
    store.multi_set([*names, "key0"], [str(n) for n in range(333)] + ["last"])
    assert waiting.result() == [b"last", *(b"%d" % n for n in range(1, 333))]
    assert store.check(names)
    assert store.multi_get(["key1", "key1"]) == [b"1", b"1"]


def test_a_key_that_comes_and_goes_is_not_there(client: EtcdClient) -> None:
    store = EtcdStore(client, prefix(), LONG)
    waiting = Caller(store.multi_get, ["early", "late"])
    store.set("early", "1")
    store.delete_key("early")
    store.set("late", "2")
    store.set("early", "3")
    assert waiting.result() == [b"3", b"2"]


def test_counting_by_several_clients(etcd: EtcdServer) -> None:
    place = prefix()

    def count() -> list[int]:
        with etcd.get_client() as own:
            store = EtcdStore(own, place, LONG)
            return [store.add("n", 1) for _ in range(25)]

    callers = [Caller(count) for _ in range(4)]
    assert sorted(value for each in callers for value in each.result()) == list(range(1, 101))


class Forgetful(EtcdClient):
    """Loses the answer to its first transaction that writes; before or after it is carried out."""

    def __init__(self, endpoint: str, lose: Callable[[Callable[[], Any]], None]) -> None:
        super().__init__([endpoint])
        self._lose: Callable[[Callable[[], Any]], None] | None = lose

    def commit(self, compares: Any, on_success: Any, on_failure: Any = ()) -> Any:
        lose, self._lose = (self._lose, None) if compares else (None, self._lose)
        if lose is not None:
            lose(lambda: super(Forgetful, self).commit(compares, on_success, on_failure))
            raise Unavailable("the answer is lost", is_outcome_unknown=True)
        return super().commit(compares, on_success, on_failure)


def test_a_write_that_was_lost_is_done_again(etcd: EtcdServer) -> None:
    for write, after in ((lambda s: s.add("k", 5), b"7"), (lambda s: s.compare_set("k", "2", "new"), b"new")):
        with Forgetful(etcd.get_endpoint(), lambda _: None) as client:
            store = EtcdStore(client, prefix(), LONG)
            store.set("k", "2")
            assert write(store) in (7, b"new")
            assert store.get("k") == after


def test_a_write_whose_answer_was_lost_is_not_done_again(etcd: EtcdServer) -> None:
    with Forgetful(etcd.get_endpoint(), lambda commit: commit()) as client:
        store = EtcdStore(client, prefix(), LONG)
        store.set("k", "2")
        with pytest.raises(RendezvousConnectionError, match="store: whether 5 was added to 'k' is unknown"):
            store.add("k", 5)
        assert store.get("k") == b"7"
    with Forgetful(etcd.get_endpoint(), lambda commit: commit()) as client:
        store = EtcdStore(client, prefix(), LONG)
        assert store.compare_set("k", "", "mine") == b"mine"


def test_those_who_wait_outlast_an_etcd_that_is_away() -> None:
    with EtcdServer() as server, server.get_client(request_timeout_s=0.4, watch_silence_s=0.2) as client:
        store = EtcdStore(client, prefix(), LONG)
        waiting = Caller(store.get, "late")
        halt(server.pid)
        with pytest.raises(RendezvousConnectionError, match=r"store: etcd has not answered within 0\.4 s"):
            store.set("other", "")
        with pytest.raises(StoreTimeoutError, match=r"after 0\.1 s waiting for 'gone'; etcd has not answered"):
            store.wait(["gone"], timedelta(seconds=0.1))
        os.kill(server.pid, signal.SIGCONT)
        with server.get_client() as other:
            EtcdStore(other, store._prefix, LONG).set("late", "1")
        assert waiting.result() == b"1"


def test_a_closed_client_is_no_time_out(etcd: EtcdServer) -> None:
    client = etcd.get_client()
    waiting = Caller(EtcdStore(client, prefix(), LONG).get, "k")
    client.close()
    with pytest.raises(RendezvousConnectionError, match="store: the client of etcd is closed"):
        waiting.result()


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda store: store.set("\ud800", ""), "surrogates not allowed"),
        (lambda store: store.set("k", bytes(3 << 20)), "larger than max|too large"),
    ],
)
def test_what_etcd_does_not_take(client: EtcdClient, call: Callable[[EtcdStore], None], complaint: str) -> None:
    with pytest.raises(UserError, match=f"^store: .*({complaint})"):
        call(EtcdStore(client, prefix(), LONG))
