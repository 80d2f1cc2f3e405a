"""The store that torch's client speaks to, without sockets: bytes in, bytes out."""

from __future__ import annotations

import struct

import pytest

from holdfast.process import torch_store
from holdfast.process.torch_store import Client, TorchStore
from tests.promises import proves
from tests.torch_wire import (
    CANCEL_WAIT,
    NUM_KEYS,
    VALIDATE,
    add,
    barrier,
    compare_set,
    get,
    i64,
    multi_get,
    multi_set,
    set_,
    sized,
    wait,
)


def client_of(store: TorchStore, name: str = "a") -> Client:
    client = Client(name)
    assert store.take(client, VALIDATE) == ([], "")
    return client


def said(store: TorchStore, client: Client, request: bytes) -> bytes:
    """What the client gets for it. It keeps nothing back."""
    _, problem = store.take(client, request)
    assert not problem, problem
    answer = bytes(client.output)
    client.output.clear()
    return answer


def problem_with(request: bytes, *, is_validated: bool = True) -> str:
    store = TorchStore()
    client = client_of(store) if is_validated else Client("a")
    _, problem = store.take(client, request)
    return problem


@proves("workers.store-answers-request-torch")
def test_requests_arrive_in_pieces_of_any_size() -> None:
    requests = VALIDATE + set_("/k", b"v" * 20) + add("/n", 7) + get("/k") + wait("/k", "/n") + add("/n", -10)
    requests += multi_set(a=b"x" * 9, b=b"") + multi_get("/a", "/none", "/b") + NUM_KEYS + multi_get()
    expected = i64(7) + sized(b"v" * 20) + b"\0" + i64(-3) + sized(b"x" * 9) + sized(b"") * 2 + i64(4)
    for size in (1, 2, 3, 7, 20, len(requests)):
        store, pieces = TorchStore(), range(0, len(requests), size)
        client = Client("a")
        assert b"".join(said(store, client, requests[at : at + size]) for at in pieces) == expected


def test_a_client_that_is_gone_waits_for_nothing() -> None:
    store = TorchStore()
    gone, waiting = client_of(store), client_of(store)
    for client in (gone, waiting):
        assert said(store, client, wait("/k", "/l")) == b""
    store.drop(gone)
    answered, _ = store.take(client_of(store), set_("/k", b"") + set_("/l", b""))
    assert (answered, bytes(waiting.output), bytes(gone.output)) == ([waiting], b"\0", b"")
    assert not store._waiting


def test_another_wait_takes_the_place_of_the_first() -> None:
    store = TorchStore()
    waiting, other = client_of(store), client_of(store)
    assert said(store, waiting, wait("/k") + wait("/l") + CANCEL_WAIT + barrier("/b", 2)) == b"\1"
    assert store.take(other, set_("/k", b"") + set_("/l", b"")) == ([], "")
    assert store.take(other, barrier("/b", 2)) == ([other, waiting], "")


def test_a_number_that_is_too_long_for_a_counter_reaches_no_barrier() -> None:
    store = TorchStore()
    waiting, other = client_of(store), client_of(store, "b")
    assert said(store, waiting, barrier("/b", 2)) == b""
    assert store.take(other, set_("/b", b"9" * 5000)) == ([], "")
    assert "no number" in store.take(other, add("/b", 1))[1]


@pytest.mark.parametrize(("value", "number"), [(b"12x", 13), (b" -7", -6), (b"+1_0", 2)])
def test_a_counter_begins_with_the_number_at_the_start_of_its_value(value: bytes, number: int) -> None:
    store = TorchStore()
    assert said(store, client_of(store), set_("/n", value) + add("/n", 1)) == i64(number)
    assert "no number" in problem_with(set_("/n", b"-x") + add("/n", 1))


def test_barriers_of_different_sizes_with_one_key() -> None:
    """Each ends with its own number, whoever has gone in between and whatever else was written there."""
    store = TorchStore()
    gone, small, large, last = (client_of(store) for _ in range(4))
    for client, world in ((gone, 2), (large, 4), (small, 3)):
        said(store, client, add("/b", -1) + barrier("/b", world) if client is gone else barrier("/b", world))
    store.drop(gone)
    assert store.take(last, set_("/b", b"text")) == ([], "")
    assert store.take(last, set_("/b", b"3")) == ([small], "")
    assert store.take(last, barrier("/b", 4)) == ([last, large], "")
    assert not store._barriers


def test_a_comparison_with_a_missing_key_ends_no_wait() -> None:
    store = TorchStore()
    waiting, other = client_of(store), client_of(store)
    said(store, waiting, wait("/k"))
    assert said(store, other, compare_set("/k", b"expected", b"new")) == sized(b"expected")
    assert not waiting.output


def test_what_others_were_woken_for_reaches_them_though_the_client_breaks_the_protocol() -> None:
    store = TorchStore()
    waiting, other = client_of(store), client_of(store)
    said(store, waiting, wait("/k"))
    answered, problem = store.take(other, set_("/k", b"") + b"\x63")
    assert (answered, problem) == ([waiting], "sent the operation 99, which this store does not know")


@proves("workers.client-store-breaks-protocol")
@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"\x01" + struct.pack("<Q", 8193), "sent a key of 8193 bytes; at most 8192 are possible"),
        (b"\x01" + sized(b"k") + struct.pack("<Q", 1 << 60), "sent a value of 1152921504606846976 bytes"),
        (b"\x06" + struct.pack("<Q", 1 << 40), "named 1099511627776 keys in one request"),
        (set_("/k", b"junk") + add("/k", 1), "counts with the key 'k', whose value is no number"),
        (set_("/k", b"") + add("/k", 1), "counts with the key 'k', whose value is no number"),
    ],
)
def test_limits(request_: bytes, expected: str) -> None:
    assert problem_with(request_).startswith(expected)


@proves("workers.client-store-breaks-protocol")
def test_values_are_bounded_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """What replaces or removes a value makes room."""
    monkeypatch.setattr(torch_store, "MAX_STORE_BYTES", 2000)
    store = TorchStore()
    client = client_of(store)
    for _ in range(5):
        said(store, client, set_("/k", b"v" * 1000))
    said(store, client, b"\x08" + sized(b"/k") + set_("/l", b"v" * 1000))
    assert store.take(client, set_("/k", b"v" * 1000))[1] == "wants to store more than 0 GiB"


@proves("workers.client-store-breaks-protocol")
def test_a_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_store, "MAX_REQUEST_BYTES", 100)
    many = b"\x0b" + struct.pack("<Q", 20) + (sized(b"/k") + sized(b"v" * 10)) * 20
    assert problem_with(many) == "sent a request of more than 0 MiB"


@proves("workers.client-store-breaks-protocol")
@pytest.mark.parametrize(
    ("beginning", "expected"),
    [
        (b"\x16\x03\x01\x02\x00", "speaks TLS; this port is for torch's store"),
        (b"GET / HTTP/1.1\r\n", "speaks HTTP; this port is for torch's store"),
        (b"\x00\xce\xf7\x85\x3d", "is not a client of torch's store"),
        (b"\x07", "is not a client of torch's store"),
        (b"GIF89a", "is not a client of torch's store"),
    ],
)
def test_other_protocols(beginning: bytes, expected: str) -> None:
    assert problem_with(beginning, is_validated=False) == expected
