"""The store contract, on our own store and on torch's, and what is built on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import HoldfastError, UserError
from holdfast.rendezvous.endpoints import bind_port
from holdfast.rendezvous.store import (
    InProcessStore,
    Store,
    StoreTimeoutError,
    barrier,
    get_all,
    store_timeout,
    synchronize,
)

SHORT = timedelta(seconds=0.05)
LONG_S = 60.0


def in_process() -> Store:
    return InProcessStore(timedelta(seconds=LONG_S))


def torch_hash() -> Any:
    from torch.distributed import HashStore

    store = HashStore()
    store.set_timeout(timedelta(seconds=LONG_S))
    return store


def torch_tcp() -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=LONG_S))


def own_client(store: Any) -> Any:
    """What a thread of its own needs: a client of torch's TCPStore serves one blocking call at a time."""
    return store.clone() if type(store).__name__ == "TCPStore" else store


# Running the same tables on torch's stores shows that ours mean the same by the same names.
every_store = pytest.mark.parametrize("make", [in_process, torch_hash, torch_tcp])
Make = Callable[[], Any]


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Future[Any]]:
    """Run all calls at the same time and wait for all."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


@every_store
def test_values_are_bytes_and_text_is_encoded(make: Make) -> None:
    store = make()
    store.set("a", b"\xff\x00")
    store.set("b", "é")
    store.set("empty", "")
    assert store.get("a") == b"\xff\x00"
    assert store.get("b") == "é".encode()
    assert store.get("empty") == b""
    store.multi_set(["a", "c"], ["1", b"3"])
    assert store.multi_get(["c", "a"]) == [b"3", b"1"]
    assert store.multi_get([]) == []


@every_store
def test_check_and_delete(make: Make) -> None:
    store = make()
    store.set("a", "")
    assert store.check(["a"])
    assert store.check([])
    assert not store.check(["a", "b"])
    assert store.delete_key("a") is True
    assert store.delete_key("a") is False
    assert not store.check(["a"])


@every_store
def test_add_keeps_decimal_text(make: Make) -> None:
    store = make()
    assert store.add("n", 0) == 0
    assert store.add("n", -3) == -3
    assert store.get("n") == b"-3"
    store.set("n", "40")
    assert store.add("n", 2) == 42


@every_store
@pytest.mark.parametrize(
    ("before", "expected", "returned", "after"),
    [
        (None, "", b"new", b"new"),
        (None, "old", b"old", None),
        ("old", "old", b"new", b"new"),
        ("old", "", b"old", b"old"),
        ("old", "other", b"old", b"old"),
        ("", "", b"new", b"new"),
    ],
)
def test_compare_set(make: Make, before: str | None, expected: str, returned: bytes, after: bytes | None) -> None:
    store = make()
    if before is not None:
        store.set("k", before)
    assert store.compare_set("k", expected, "new") == returned
    if after is None:
        assert not store.check(["k"])
    else:
        assert store.get("k") == after


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda store: store.add("n", 1), UserError, r"cannot add to 'n', its value b'many' is not a number"),
        (lambda store: store.set("k", 5), TypeError, "bytes or text, not int: 5"),
        (lambda store: store.multi_set(["a", "b"], ["1"]), UserError, "2 keys but 1 values"),
    ],
)
def test_mistakes_change_nothing(call: Callable[[Any], Any], error: type[Exception], words: str) -> None:
    store = in_process()
    store.set("n", "many")
    with pytest.raises(error, match=words):
        call(store)
    assert store.get("n") == b"many"
    assert not any(store.check([key]) for key in ("a", "k"))


@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.get("late"),
        lambda store: store.multi_get(["early", "late"])[1],
        lambda store: store.wait(["early", "late"]) or store.get("late"),
        lambda store: store.wait(["late"], timedelta(seconds=LONG_S)) or store.get("late"),
        lambda store: store.wait(["late"], timedelta.max) or store.get("late"),
    ],
)
@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.set("late", "1"),
        lambda store: store.multi_set(["other", "late"], ["0", "1"]),
        lambda store: store.add("late", 1),
        lambda store: store.compare_set("late", "", "1"),
    ],
)
def test_readers_wait_for_writers(read: Callable[[Any], bytes], write: Callable[[Any], Any]) -> None:
    store = in_process()
    store.set("early", "0")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, store)
        write(store)
        assert reading.result(LONG_S) == b"1"


def test_time_outs_name_the_missing_keys_and_the_seconds() -> None:
    store = in_process()
    store.set("here", "")
    with pytest.raises(StoreTimeoutError, match=r"timed out after 0\.05 s waiting for 'gone', 'lost'$"):
        store.wait(["gone", "here", "lost"], SHORT)
    with pytest.raises(StoreTimeoutError, match=r"after 0 s waiting for '.*gone'$"):
        store.wait(["gone"], timedelta(0))
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    for read in (lambda: store.get("gone"), lambda: store.multi_get(["gone"]), lambda: store.wait(["gone"])):
        with pytest.raises(StoreTimeoutError, match=r"after 0\.05 s waiting for '.*gone'$") as caught:
            read()
        assert isinstance(caught.value, HoldfastError)
        assert isinstance(caught.value, TimeoutError)
    with pytest.raises(StoreTimeoutError, match=r"'key14', 'key15', \.\.\.$"):
        store.wait([f"key{n}" for n in range(4000)], timedelta(0))


@every_store
def test_counting_by_many_threads_loses_nothing(make: Make) -> None:
    store = make()

    def count() -> list[int]:
        return [store.add("n", 1) for _ in range(100)]

    seen = sorted(value for one in in_threads([count] * 8) for value in one.result())
    assert seen == list(range(1, 801))


def test_one_of_many_wins_a_compare_set() -> None:
    store = in_process()
    calls = [lambda name=name: store.compare_set("leader", "", name) for name in "abcdefgh"]
    (winner,) = {one.result() for one in in_threads(calls)}
    assert store.get("leader") == winner


@every_store
def test_store_timeout_restores_always(make: Make) -> None:
    store = make()
    before = store.timeout
    with store_timeout(store, 1.5):
        assert store.timeout == timedelta(seconds=1.5)
    assert store.timeout == before
    with pytest.raises(KeyError), store_timeout(store, 1.5):
        raise KeyError
    assert store.timeout == before


@every_store
def test_zero_seconds_do_not_mean_for_ever(make: Make) -> None:
    store = make()
    with store_timeout(store, 0), pytest.raises((StoreTimeoutError, RuntimeError)):
        store.get("gone")
    with pytest.raises(StoreTimeoutError):
        barrier(store, 2, "b", barrier_timeout=0)


@every_store
def test_synchronize_gives_all_to_all(make: Make) -> None:
    store = make()

    def member(rank: int) -> list[bytes]:
        return synchronize(own_client(store), b"%d" % rank, rank, 4, "p/", LONG_S)

    calls = [lambda rank=rank: member(rank) for rank in range(4)]
    assert [one.result() for one in in_threads(calls)] == [[b"0", b"1", b"2", b"3"]] * 4
    assert store.check(["p/0", "p//finished/last_member"])


@every_store
def test_rank_0_waits_until_all_have_read(make: Make) -> None:
    store = make()
    store.multi_set(["p0", "p1", "p2"], ["a", "b", "c"])
    with store_timeout(store, 0.05), pytest.raises((StoreTimeoutError, RuntimeError)):
        get_all(store, 0, "p", 3)
    assert get_all(store, 1, "p", 3) == [b"a", b"b", b"c"]
    assert not store.check(["p/finished/last_member"])
    assert get_all(store, 2, "p", 3) == [b"a", b"b", b"c"]
    assert store.check(["p/finished/last_member"])


@every_store
def test_get_all_of_values_that_are_large_small_and_empty(make: Make) -> None:
    store = make()
    values = [b"", b"x" * 100_000, b"\x00" * 8, b"", b"y" * 70_000]

    def member(rank: int) -> list[bytes]:
        return synchronize(own_client(store), values[rank], rank, len(values), "p", LONG_S)

    calls = [lambda rank=rank: member(rank) for rank in range(len(values))]
    assert [one.result() for one in in_threads(calls)] == [values] * len(values)
    assert not store.check(["p/all/0"])  # What was only made for this is gone.


def test_synchronize_fails_when_a_rank_is_missing() -> None:
    store = in_process()
    before = store.timeout
    with pytest.raises(StoreTimeoutError, match=r"0\.05 s waiting for 'p1'"):
        synchronize(store, b"", 0, 2, "p", 0.05)
    assert store.timeout == before


@every_store
@pytest.mark.parametrize("with_rank", [False, True])
def test_barrier_opens_for_all_at_once(make: Make, with_rank: bool) -> None:
    store = make()
    arrived: list[int] = []

    def member(rank: int) -> None:
        arrived.append(rank)
        barrier(own_client(store), 4, "b", LONG_S, rank if with_rank else None)
        assert len(arrived) == 4

    for one in in_threads([lambda rank=rank: member(rank) for rank in range(4)]):
        one.result()


GATE_IS_OPEN = {"b0/TRACE": "arrived", "b/num_members": "1", "b/TRACING_GATE": "open"}


@every_store
@pytest.mark.parametrize(
    ("others", "rank", "said"),
    [
        ({}, None, ": 1 of 3 had arrived"),
        ({}, 1, " on rank 1: 1 of 3 had arrived; rank 0 is missing"),
        (GATE_IS_OPEN, 1, " on rank 1: 2 of 3 had arrived; see rank 0 for who is missing"),
        ({"b1/TRACE": "arrived"}, 0, " on rank 0: 1 of 3 had arrived; missing ranks: 2"),
    ],
)
def test_a_barrier_that_times_out_says_who_came(
    make: Make, others: dict[str, str], rank: int | None, said: str
) -> None:
    store = make()
    barrier(store, 1, "of one", LONG_S)
    before = store.timeout
    for key, value in others.items():
        store.set(key, value)
    with pytest.raises(StoreTimeoutError) as caught:
        barrier(store, 3, "b", 0.05, rank, trace_timeout=0.05)
    assert str(caught.value) == f"barrier 'b': timed out after 0.05 s{said}"
    assert store.timeout == before


@every_store
def test_rank_0_says_who_is_missing(make: Make) -> None:
    store = make()

    def time_out(rank: int, timeout_s: float) -> str:
        with pytest.raises(StoreTimeoutError) as caught:
            barrier(own_client(store), 4, "b", timeout_s, rank, lambda other: f"node{other}", 0.05)
        return str(caught.value)

    # Rank 1 is still inside the barrier when rank 0 gives up, and must not be called missing.
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(time_out, 1, 0.3)
        # Asked for again and again, because torch's HashStore wakes nobody when `add` makes a key.
        while store.add("b/num_members", 0) == 0:
            time.sleep(0.001)
        assert time_out(0, 0.05) == (
            "barrier 'b': timed out after 0.05 s on rank 0: 2 of 4 had arrived; missing ranks: node2, node3"
        )
        assert patient.result(LONG_S).startswith("barrier 'b': timed out after 0.3 s on rank 1: ")


@every_store
def test_other_ranks_wait_while_rank_0_looks(make: Make) -> None:
    store = make()
    store.set("b0/TRACE", "arrived")

    def rank_1() -> str:
        with pytest.raises(StoreTimeoutError) as caught:
            barrier(own_client(store), 3, "b", 0.01, 1, trace_timeout=LONG_S)
        assert store.check(["b/TRACING_GATE"])
        return str(caught.value)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rank_1)
        store.wait(["b1/TRACE"], timedelta(seconds=LONG_S))
        with pytest.raises(StoreTimeoutError, match=r"missing ranks: 2$"):
            barrier(store, 3, "b", 0.05, 0, trace_timeout=0.05)
        assert waiting.result(LONG_S).endswith("see rank 0 for who is missing")


def test_barrier_names_a_bounded_number_of_ranks() -> None:
    with pytest.raises(StoreTimeoutError, match=r"1 of 4000 had arrived; missing ranks: 1, .*, 16, \.\.\.$"):
        barrier(in_process(), 4000, "b", 0.01, 0, trace_timeout=0.01)


def test_barrier_whose_last_member_comes_during_the_trace() -> None:
    class Late(InProcessStore):
        """Lets rank 1 arrive in the moment in which rank 0 looks for its mark."""

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            if list(keys) == ["b1/TRACE"]:
                self.set("b1/TRACE", "arrived")
            super().wait(keys, timeout)

    with pytest.raises(StoreTimeoutError, match=r"1 of 2 had arrived; the others came too late$"):
        barrier(Late(), 2, "b", 0.01, 0, trace_timeout=LONG_S)


def test_barrier_that_opens_in_the_last_moment_is_open() -> None:
    class Slow(InProcessStore):
        """Tells the waiter that its time is up just as the last member arrives."""

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            self.multi_set(keys, [b""] * len(keys))
            raise StoreTimeoutError("time is up")

    barrier(Slow(), 2, "b", 0.01)


def test_barrier_on_a_store_that_has_failed_raises_the_stores_error() -> None:
    class Failed(InProcessStore):
        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            raise RuntimeError("connection lost")

        def check(self, keys: Sequence[str]) -> bool:
            raise RuntimeError("connection is still lost")

    with pytest.raises(RuntimeError, match="connection is still lost"):
        barrier(Failed(), 2, "b", 0.01)


def test_decoder_needs_a_rank() -> None:
    with pytest.raises(AssertionError, match="needs a rank"):
        barrier(in_process(), 1, "b", rank_tracing_decoder=str)


def test_torch_hosts_its_store_on_a_held_port() -> None:
    from torch.distributed import TCPStore

    with bind_port() as held:
        port = held.getsockname()[1]
        server = TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=LONG_S))
        client = TCPStore("127.0.0.1", port, 1, False, timedelta(seconds=LONG_S))
        server.set("k", "v")
        assert client.get("k") == b"v"
