"""What every store promises: ours in one process and at a coordinator, and torch's, which have the same names and
types. And the functions that are built on these promises."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import HoldfastError, UserError
from holdfast.rendezvous.client.remote_store import RemoteStore
from holdfast.rendezvous.client.thread import Client
from holdfast.rendezvous.endpoints import HeldPort
from holdfast.rendezvous.store import InProcessStore, StoreTimeoutError, barrier, get_all, store_timeout, synchronize
from tests.coordinators import Caller, coordinator_thread, form, node
from tests.promises import promise

SHORT, LONG = timedelta(seconds=0.05), timedelta(seconds=60)
LONG_S = LONG.total_seconds()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A node's connection to a coordinator. No agent joins again if it loses its place on a busy machine."""
    home, lease_s = tmp_path_factory.mktemp("home"), 2 * LONG_S
    with coordinator_thread(home) as port, node(port, run_id="stores", lease=lease_s) as handler:
        form(handler)
        assert handler._client is not None
        yield handler._client


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Any:
    made: Any
    match request.param:
        case "in process":
            return InProcessStore(LONG)
        case "coordinator":
            return RemoteStore(request.getfixturevalue("client"), LONG, f"{uuid.uuid4().hex}/")
        case kind:
            from torch.distributed import HashStore, TCPStore

            made = HashStore() if kind == "torch hash" else TCPStore("127.0.0.1", 0, 1, True)
            made.set_timeout(LONG)
            return made


OURS = ["in process", "coordinator"]
our_stores = pytest.mark.parametrize("store", OURS, indirect=True)
every_store = pytest.mark.parametrize("store", [*OURS, "torch hash", "torch tcp"], indirect=True)


def own_client(store: Any) -> Any:
    """For a thread of its own: a client of torch's TCPStore serves one blocking call at a time."""
    return store.clone() if type(store).__name__ == "TCPStore" else store


def at_once(call: Callable[[int], Any], count: int) -> list[Any]:
    """The results of `call(0)`, `call(1)` and so on, each in its own thread."""
    return [each.result(LONG_S) for each in [Caller(call, number) for number in range(count)]]


@every_store
def test_values_are_bytes_and_text_is_encoded(store: Any) -> None:
    store.set("a", b"\xff\x00")
    store.set("b", "é")
    store.set("empty", "")
    assert [store.get(key) for key in ("a", "b", "empty")] == [b"\xff\x00", "é".encode(), b""]
    store.multi_set(["a", "c"], ["1", b"3"])
    assert store.multi_get(["c", "a"]) == [b"3", b"1"]
    assert store.multi_get([]) == []


@every_store
def test_check_and_delete(store: Any) -> None:
    store.set("a", "")
    assert [store.check(keys) for keys in (["a"], [], ["a", "b"])] == [True, True, False]
    assert [store.delete_key("a") for _ in range(2)] == [True, False]
    assert not store.check(["a"])


@every_store
def test_add_keeps_decimal_text(store: Any) -> None:
    assert [store.add("n", amount) for amount in (0, -3)] == [0, -3]
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
def test_compare_set(store: Any, before: str | None, expected: str, returned: bytes, after: bytes | None) -> None:
    if before is not None:
        store.set("k", before)
    assert store.compare_set("k", expected, "new") == returned
    assert (store.get("k") if store.check(["k"]) else None) == after


@our_stores
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda store: store.add("n", 1), UserError, r"cannot add to '.*n', its value .*is not a number"),
        (lambda store: store.set("k", 5), TypeError, "bytes or text, not int: 5"),
        (lambda store: store.multi_set(["a", "b"], ["1"]), UserError, "2 keys but 1 values"),
    ],
)
def test_mistakes_change_nothing(store: Any, call: Callable[[Any], Any], error: type[Exception], words: str) -> None:
    store.set("n", "many")
    with pytest.raises(error, match=words):
        call(store)
    assert store.get("n") == b"many"
    assert not any(store.check([key]) for key in ("a", "k"))


@our_stores
@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.get("late"),
        lambda store: store.multi_get(["early", "late"])[1],
        lambda store: store.wait(["early", "late"]) or store.get("late"),
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
def test_readers_wait_for_writers(store: Any, read: Callable[[Any], bytes], write: Callable[[Any], Any]) -> None:
    store.set("early", "0")
    reading = Caller(read, store)
    write(store)
    assert reading.result(LONG_S) == b"1"


@our_stores
def test_time_outs_name_the_missing_keys_and_the_seconds(store: Any) -> None:
    store.set("here", "")
    with pytest.raises(StoreTimeoutError, match=r"timed out after 0\.05 s waiting for '\S*gone', '\S*lost'$"):
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
    with pytest.raises(StoreTimeoutError, match=r"key14', '\S*key15', \.\.\.$"):
        store.wait([f"key{n}" for n in range(4000)], timedelta(0))


@every_store
def test_counting_by_many_threads_loses_nothing(store: Any) -> None:
    seen = at_once(lambda _: [store.add("n", 1) for _ in range(50)], 8)
    assert sorted(value for values in seen for value in values) == list(range(1, 401))


@every_store
def test_one_of_many_wins_a_compare_set(store: Any) -> None:
    (winner,) = set(at_once(lambda number: store.compare_set("leader", "", str(number)), 8))
    assert store.get("leader") == winner


@every_store
def test_store_timeout_restores_always(store: Any) -> None:
    before = store.timeout
    with store_timeout(store, 1.5):
        assert store.timeout == timedelta(seconds=1.5)
    assert store.timeout == before
    with pytest.raises(KeyError), store_timeout(store, 1.5):
        raise KeyError
    assert store.timeout == before


@every_store
def test_zero_seconds_do_not_mean_for_ever(store: Any) -> None:
    with store_timeout(store, 0), pytest.raises((StoreTimeoutError, RuntimeError)):
        store.get("gone")
    with pytest.raises(StoreTimeoutError):
        barrier(store, 2, "b", barrier_timeout=0)


@every_store
def test_synchronize_gives_all_to_all(store: Any) -> None:
    values = [b"", b"x" * 100_000, b"\x00" * 8, b"", b"y" * 70_000]

    def member(rank: int) -> list[bytes]:
        return synchronize(own_client(store), values[rank], rank, len(values), "p/", LONG_S)

    assert at_once(member, len(values)) == [values] * len(values)
    assert store.check(["p/0", "p//finished/last_member"])
    assert not store.check(["p//all/0"]), "a piece that was only made for this is left"


@every_store
def test_rank_0_waits_until_all_have_read(store: Any) -> None:
    store.multi_set(["p0", "p1", "p2"], ["a", "b", "c"])
    with store_timeout(store, 0.05), pytest.raises((StoreTimeoutError, RuntimeError)):
        get_all(store, 0, "p", 3)
    assert get_all(store, 1, "p", 3) == [b"a", b"b", b"c"]
    assert not store.check(["p/finished/last_member"])
    assert get_all(store, 2, "p", 3) == [b"a", b"b", b"c"]
    assert store.check(["p/finished/last_member"])


@our_stores
def test_synchronize_fails_when_a_rank_is_missing(store: Any) -> None:
    with pytest.raises(StoreTimeoutError, match=r"0\.05 s waiting for '\S*p1'"):
        synchronize(store, b"", 0, 2, "p", 0.05)
    assert store.timeout == LONG


@every_store
@pytest.mark.parametrize("with_rank", [False, True])
def test_barrier_opens_for_all_at_once(store: Any, with_rank: bool) -> None:
    arrived: list[int] = []

    def member(rank: int) -> int:
        arrived.append(rank)
        barrier(own_client(store), 4, "b", LONG_S, rank if with_rank else None)
        return len(arrived)

    assert at_once(member, 4) == [4] * 4


GATE_IS_OPEN = {"b0/TRACE": "arrived", "b/num_members": "1", "b/TRACING_GATE": "open"}


@every_store
@pytest.mark.parametrize(
    ("others", "rank", "said"),
    [
        ({}, None, ": 1 of 3 had arrived"),
        ({}, 1, " on rank 1: 1 of 3 had arrived; rank 0 is missing"),
        (GATE_IS_OPEN, 1, " on rank 1: 2 of 3 had arrived; see rank 0 for who is missing"),
        ({"b1/TRACE": "arrived"}, 0, " on rank 0: 1 of 3 had arrived; missing ranks: node2"),
    ],
)
def test_a_barrier_that_times_out_says_who_came(
    store: Any, others: dict[str, str], rank: int | None, said: str
) -> None:
    before = store.timeout
    for key, value in others.items():
        store.set(key, value)
    decode = None if rank is None else "node{}".format
    with pytest.raises(StoreTimeoutError) as caught:
        barrier(store, 3, "b", 0.05, rank, decode, trace_timeout=0.05)
    assert str(caught.value) == f"barrier 'b': timed out after 0.05 s{said}"
    assert store.timeout == before


@every_store
def test_other_ranks_wait_while_rank_0_looks(store: Any) -> None:
    """Rank 1 is still inside the barrier, and must not be called missing."""

    def rank_1() -> str:
        with pytest.raises(StoreTimeoutError) as caught:
            barrier(own_client(store), 3, "b", 0.3, 1, trace_timeout=LONG_S)
        assert store.check(["b/TRACING_GATE"])
        return str(caught.value)

    waiting = Caller(rank_1)
    while store.add("b/num_members", 0) == 0:  # torch's HashStore wakes no thread when `add` makes a key.
        time.sleep(0.001)
    with pytest.raises(StoreTimeoutError, match=r"missing ranks: 2$"):
        barrier(store, 3, "b", 0.05, 0, trace_timeout=0.05)
    assert waiting.result(LONG_S).endswith("see rank 0 for who is missing")


def test_barrier_names_a_bounded_number_of_ranks() -> None:
    with pytest.raises(StoreTimeoutError, match=r"1 of 4000 had arrived; missing ranks: 1, .*, 16, \.\.\.$"):
        barrier(InProcessStore(), 4000, "b", 0.01, 0, trace_timeout=0.01)


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
        barrier(InProcessStore(), 1, "b", rank_tracing_decoder=str)


@promise("rendezvous.torch-store-use-port: torch's own store can use that port.")
def test_torch_hosts_its_store_on_a_held_port() -> None:
    from torch.distributed import TCPStore

    held = HeldPort()
    held.renew("127.0.0.1")
    server, client = (TCPStore("127.0.0.1", held.number, 1, is_server, LONG) for is_server in (True, False))
    server.set("k", "v")
    assert client.get("k") == b"v"
    held.release()
