"""The agent's end of the run's store, and what is built on it, for 10,000 nodes: in memory, frame by frame."""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.rendezvous import store
from holdfast.rendezvous.client.remote_store import RemoteStore
from holdfast.rendezvous.coordinator.kv_store import KeyValues
from holdfast.rendezvous.membership import frames
from holdfast.rendezvous.membership.protocol import StoreAnswer, StoreRequest
from holdfast.rendezvous.store import StoreLostError, StoreTimeoutError
from tests.coordinators import Caller
from tests.promises import promise, proves

RANKS = 10_000


class Pump:
    """What stands between the two ends: it can be asked like a client, from any thread, and counts the requests."""

    def __init__(self) -> None:
        self.reach = SimpleNamespace(since=None)
        self.requests = 0
        self.replace_coordinator()
        self._lock = threading.Condition()
        self._answers: dict[int, StoreAnswer] = {}
        self._numbers = itertools.count(1)

    def replace_coordinator(self, generation: bytes = b"first") -> None:
        self.keyvalues = KeyValues(generation)

    def request(self, operation: str, keys: tuple[str, ...], timeout_s: float, **fields: Any) -> StoreAnswer:
        number, timeout_s = next(self._numbers), max(timeout_s, 0.0)  # As the client does: the time may be up already.
        request = through_a_frame(StoreRequest(b"s", number, operation, keys, timeout_s=timeout_s, **fields))
        with self._lock:
            self.requests += 1
            for _, answer in self.keyvalues.handle("client", request, 0.0):
                self._answers[answer.number] = through_a_frame(answer)
            self._lock.notify_all()
            if not self._lock.wait_for(lambda: number in self._answers, timeout_s):
                ends = self.keyvalues.next_deadline()
                assert ends is not None
                self._answers.update((answer.number, answer) for _, answer in self.keyvalues.expire(ends))
            return self._answers.pop(number)

    def open(self, prefix: str = "") -> RemoteStore:
        return RemoteStore(self, timedelta(seconds=60), prefix)  # type: ignore[arg-type]


def through_a_frame(message: Any) -> Any:
    decoder = frames.UPWARD if isinstance(message, StoreRequest) else frames.DOWNWARD
    return frames.decode(decoder, frames.encode(message)[4:])


@pytest.fixture
def pump() -> Pump:
    return Pump()


def test_prefixes_are_namespaces(pump: Pump) -> None:
    base, one, two = pump.open(), pump.open("one/"), pump.open("two/")
    one.set("k", "1")
    assert not two.check(["k"])
    assert base.get("one/k") == b"1"
    assert two.compare_set("k", "", "2") == b"2"
    assert two.add("n", 1) == 1
    assert base.multi_get(["two/k", "two/n"]) == [b"2", b"1"]
    assert two.delete_key("k")
    assert one.get("k") == b"1"


@promise("coordinator.synchronize-get-barrier-10: `synchronize`, `get_all` and `barrier` of 10,000 ranks work.")
def test_ten_thousand_ranks_synchronize(pump: Pump) -> None:
    """Rank 0 and a few others call it; the many others are their requests."""
    data = [f"what rank {rank} tells to all others, at some length: {'x' * 60}".encode() for rank in range(RANKS)]
    shared = pump.open()
    for rank in range(1, RANKS):
        shared.set(f"p/{rank}", data[rank])
    first = Caller(store.synchronize, pump.open(), data[0], 0, RANKS, "p/")
    few = range(9_990, RANKS)
    assert [store.get_all(pump.open(), rank, "p/", RANKS) == data for rank in few] == [True] * len(few)
    for _ in range(1, few[0]):
        store._arrive(shared, RANKS, "p//finished")
    assert first.result() == data


@proves("coordinator.synchronize-get-barrier-10")
def test_a_barrier_of_ten_thousand_names_the_missing_with_few_requests(pump: Pump) -> None:
    missing = [17, 5000, 9_999]
    shared = pump.open()
    marks = [f"b{rank}/TRACE" for rank in range(1, RANKS) if rank not in missing]
    shared.multi_set(marks, ["arrived"] * len(marks))
    pump.requests = 0
    with pytest.raises(StoreTimeoutError, match=r"missing ranks: 17, 5000, 9999$"):
        store.barrier(pump.open(), RANKS, "b", 0.0, 0, None, 0.0)
    assert pump.requests < 300


@proves("coordinator.store-lost-process-plug")
def test_a_lost_store_is_an_error_and_never_a_silent_zero(pump: Pump) -> None:
    known, unused = pump.open(), pump.open()
    known.add("count", 1)
    pump.replace_coordinator(b"second")
    for _ in range(2):
        with pytest.raises(StoreLostError, match="the coordinator was replaced"):
            known.add("count", 1)
    assert unused.add("count", 1) == 1


def test_the_first_request_names_a_generation_already(pump: Pump) -> None:
    """Else it could be carried out by one coordinator and, when the answer was lost, by the next one again."""
    asked: list[tuple[str, bytes]] = []
    handle = pump.keyvalues.handle

    def listen(client: Any, request: StoreRequest, now: float) -> Any:
        asked.append((request.operation, request.generation))
        return handle(client, request, now)

    pump.keyvalues.handle = listen  # type: ignore[method-assign]
    pump.open().add("count", 1)
    assert asked == [("check", b""), ("add", b"first")]


def test_threads_that_begin_at_the_same_time_agree_on_the_generation(pump: Pump) -> None:
    """1. Both ask for the generation, 2. one is answered by the first coordinator and 3. the other by the next."""
    shared = pump.open()
    ask = pump.request

    def replaced_in_between(operation: str, keys: tuple[str, ...], timeout_s: float, **fields: Any) -> StoreAnswer:
        pump.request = ask  # type: ignore[method-assign]
        shared.set("key", "of the other thread")
        pump.replace_coordinator(b"second")
        return ask(operation, keys, timeout_s, **fields)

    pump.request = replaced_in_between  # type: ignore[method-assign]
    with pytest.raises(StoreLostError):
        shared.check(["key"])
