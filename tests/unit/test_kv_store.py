"""The coordinator's key-value store at its edges. What each operation does is in tests/properties/test_kv_store.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from holdfast.rendezvous.coordinator.kv_store import KeyValues
from holdfast.rendezvous.coordinator.limits import Limits
from holdfast.rendezvous.membership.frames import encode
from holdfast.rendezvous.membership.protocol import StoreAnswer, StoreRequest
from tests.promises import promise, proves

_numbers = itertools.count(1)


def ask(store: KeyValues, operation: str, *keys: str, client: str = "a", now: float = 0.0, **fields: Any) -> Any:
    """The client's own answer, or None if it has to wait; answers to others must not be among them."""
    answers = ask_all(store, operation, *keys, client=client, now=now, **fields)
    assert all(name == client for name, _ in answers)
    return answers[0][1] if answers else None


def ask_all(
    store: KeyValues, operation: str, *keys: str, client: str = "a", now: float = 0.0, **fields: Any
) -> list[tuple[str, StoreAnswer]]:
    request = StoreRequest(client.encode(), next(_numbers), operation, keys, **fields)
    return store.handle(client, request, now)


def value(store: KeyValues, key: str) -> bytes | None:
    answer = ask(store, "get", key)
    return answer.values[0] if not answer.problem else None


@pytest.mark.parametrize(
    ("before", "amount", "words"),
    [
        (b"seven", 1, "cannot add to 'n', its value is not a number"),
        (b"", 1, "not a number"),
        (b"9" * 5000, 1, "not a number"),
        (b"%d" % (2**63 - 1), 1, "out of range"),
        (b"%d" % -(2**63), -1, "out of range"),
    ],
)
def test_add_that_cannot_be(before: bytes, amount: int, words: str) -> None:
    store = KeyValues()
    ask(store, "set", "n", values=(before,))
    answer = ask(store, "add", "n", amount=amount)
    assert words in answer.problem
    encode(answer)  # What is out of range must not break the answer.
    assert value(store, "n") == before


@pytest.mark.parametrize(
    ("operation", "keys", "values"),
    [
        ("explode", ("k",), ()),
        ("", ("k",), ()),
        ("set", ("k",), ()),
        ("set", ("k",), (b"1", b"2")),
        ("add", (), ()),
        ("add", ("k", "l"), ()),
        ("compare_set", ("k",), (b"1",)),
        ("delete", ("k", "l"), ()),
    ],
)
def test_requests_that_mean_nothing_are_answered(operation: str, keys: tuple[str, ...], values: Any) -> None:
    answer = ask(KeyValues(), operation, *keys, values=values)
    assert f"does not know {operation!r} with {len(keys)} keys and {len(values)} values" in answer.problem


def test_who_waits_too_long_is_told_some_of_the_missing_keys() -> None:
    store = KeyValues()
    ask(store, "set", "k0", values=(b"",))
    keys = [f"k{number}" for number in range(1000)] + ["long" * 1000]
    assert ask(store, "wait", *reversed(keys)).values[:2] == (b"long" * 50, b"k999")
    ask(store, "get", *keys, timeout_s=5.0)
    ((_, answer),) = store.expire(5.0)
    assert answer.problem == "timeout"
    assert answer.values == tuple(f"k{number}".encode() for number in range(1, 18))


def test_a_key_that_was_deleted_meanwhile_is_waited_for_again() -> None:
    store = KeyValues()
    ask(store, "get", "a", "b", client="b", timeout_s=5.0)
    ask(store, "set", "a", values=(b"1",))
    ask(store, "delete", "a")
    ask(store, "set", "b", values=(b"2",))
    _, (client, answer) = ask_all(store, "set", "a", values=(b"3",))
    assert (client, answer.values) == ("b", (b"3", b"2"))


@proves("coordinator.store-lost-process-plug")
@pytest.mark.parametrize("operation", ["set", "get", "wait", "check", "add", "compare_set", "delete"])
def test_a_request_of_another_generation_is_refused(operation: str) -> None:
    store = KeyValues(b"second")
    answer = ask(store, operation, "k", values=(b"",), timeout_s=5.0, generation=b"first")
    assert (answer.problem, answer.generation) == ("generation", b"second")
    assert ask(store, "check", "k").amount == 0
    assert store.next_deadline() is None


def test_the_same_number_of_another_client_is_another_request() -> None:
    store = KeyValues()
    for sender in (b"one", b"two"):
        store.handle("a", StoreRequest(sender, 1, "add", ("n",), amount=1), 0.0)
    assert value(store, "n") == b"2"


def bounded(store_bytes: int) -> KeyValues:
    return KeyValues(limits=Limits(store_bytes=store_bytes))


@promise("""coordinator.store-bound-request-most: The store has one bound, a request has at most 16,384 keys, and half
    messages of strangers are bounded together.""")
@proves("coordinator.run-store-keeps-limits")
def test_a_full_store_takes_all_of_a_request_or_nothing() -> None:
    store = bounded(6000)
    ask(store, "set", "big", values=(bytes(1000),))
    ask(store, "wait", "x", client="b", timeout_s=5.0)
    answer = ask(store, "set", "x", "y", values=(bytes(1000), bytes(3000)))
    assert "the store is full" in answer.problem
    assert ask(store, "check", "x").amount == 0
    assert store.next_deadline() == 5.0  # Nobody was woken for what is not there.
    assert "full" in ask(store, "compare_set", "x", values=(b"", bytes(4000))).problem
    ask(store, "delete", "big")
    assert ask(store, "set", "y", "z", values=(bytes(1000), bytes(1000))).problem == ""


def test_many_small_keys_count_for_what_they_cost() -> None:
    store = bounded(100_000)
    taken = sum(ask(store, "set", f"{number}", values=(b"",)).problem == "" for number in range(1000))
    assert 100 < taken < 1000


@proves("coordinator.store-bound-request-most", "coordinator.ten-thousand-wait")
def test_not_too_many_wait() -> None:
    store = bounded(10_000)
    answers = [ask(store, "get", "k", client=f"c{number}", timeout_s=5.0) for number in range(100)]
    refused = [answer for answer in answers if answer is not None]
    assert 80 < len(refused) < 100
    assert all(answer.problem == "too many requests wait already" for answer in refused)
    for number in range(100):
        store.drop_client(f"c{number}")
    assert ask(store, "get", "k", timeout_s=5.0) is None


def test_what_is_kept_for_repetitions_is_bounded() -> None:
    store = bounded(50_000)
    for number in range(1000):
        store.handle("a", StoreRequest(b"s", number, "add", ("n",), amount=1), 0.0)
    assert store.handle("a", StoreRequest(b"s", 999, "add", ("n",), amount=1), 0.0)[0][1].amount == 1000
    assert store.handle("a", StoreRequest(b"s", 0, "add", ("n",), amount=1), 0.0)[0][1].amount == 1001


@pytest.mark.parametrize(
    ("sizes", "fitting"),
    [
        ([600_000, 600_000], 1),
        ([400_000, 400_000, 400_000], 2),
        ([0] * 10, 10),
        ([100, 1_048_466], 1),
        ([1_048_466, 100], 1),
    ],
)
def test_an_answer_has_the_values_that_fit(sizes: list[int], fitting: int) -> None:
    store = KeyValues(b"generation")
    keys = [str(at) for at in range(len(sizes))]
    for key, size in zip(keys, sizes, strict=True):
        ask(store, "set", key, values=(bytes(size),))
    answer = ask(store, "get", *keys)
    encode(answer)
    assert [len(value) for value in answer.values] == sizes[:fitting]


def test_whatever_could_be_sent_can_be_got() -> None:
    store = KeyValues(bytes(8))
    request = StoreRequest(b"", 1, "set", ("",), (bytes((1 << 20) - 110),))
    encode(request)
    store.handle("a", request, 0.0)
    answers = store.handle("a", StoreRequest(b"", 2**63 - 1, "get", ("",)), 0.0)
    encode(answers[0][1])


def test_many_that_are_late_are_told_a_part_at_a_time() -> None:
    store = KeyValues()
    for number in range(2500):
        ask(store, "wait", "never", client=f"c{number}", timeout_s=5.0)
    assert [len(store.expire(5.0)) for _ in range(4)] == [1000, 1000, 500, 0]
    assert store.next_deadline() is None


@promise("coordinator.ten-thousand-wait: 10,000 nodes can wait in the store; what waits is bounded.")
def test_ten_thousand_wait_for_one_key() -> None:
    store = KeyValues()
    key = "round/12/a_prefix_of_the_usual_length/last_member"
    ranks = [f"connection {number}" for number in range(10_000)]
    assert [ask(store, "get", key, client=rank, timeout_s=300.0) for rank in ranks] == [None] * len(ranks)
    # And one waits for the marks of all.
    ask(store, "wait", *(f"{key}{number}/TRACE" for number in range(10_000)), timeout_s=300.0)
    _, *woken = ask_all(store, "set", key, values=(b"",))
    assert [client for client, _ in woken] == ranks


def test_deadlines_that_are_over_are_not_kept() -> None:
    store = KeyValues()
    for number in range(5000):
        ask(store, "get", f"k{number}", timeout_s=1e6)
        ask_all(store, "set", f"k{number}", values=(b"",))
        ask(store, "delete", f"k{number}")
    assert len(store._deadlines) < 200
