"""The coordinator's store against the simplest thing that could be right: a dictionary and a list of who waits."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.rendezvous.coordinator.kv_store import KeyValues
from holdfast.rendezvous.membership.protocol import StoreAnswer, StoreRequest
from tests.promises import promise

CLIENTS = st.sampled_from(["a", "b", "c"])
KEYS = st.sampled_from(["k", "l", "m"])
SOME_KEYS = st.lists(KEYS, min_size=1, max_size=3).map(tuple)
VALUES = st.sampled_from([b"", b"1", b"-4", b"x"])


@dataclass
class Waiting:
    client: str
    number: int
    operation: str
    keys: tuple[str, ...]
    deadline: float


@promise("""coordinator.run-store-keeps-limits: The run's store keeps its limits, wakes waiting requests, and carries
    out a repeated request once.""")
class StoreAgainstModel(RuleBasedStateMachine):
    """After each rule the answers of the store are compared with those that the model expects."""

    def __init__(self) -> None:
        super().__init__()
        self.store = KeyValues()
        self.values: dict[str, bytes] = {}
        self.waiting: list[Waiting] = []
        self.done: dict[StoreRequest, StoreAnswer] = {}
        self.now = 0.0
        self.number = 0

    def request(self, operation: str, keys: tuple[str, ...], **fields: object) -> StoreRequest:
        self.number += 1
        return StoreRequest(b"s", self.number, operation, keys, **fields)  # type: ignore[arg-type]

    def check(self, client: str, request: StoreRequest, expected: StoreAnswer | None) -> None:
        """The client's own answer first, then those of everybody who need not wait any longer."""
        own = [] if expected is None else [(client, expected)]
        assert self.store.handle(client, request, self.now) == own + self.woken()

    def change(self, client: str, request: StoreRequest, expected: StoreAnswer) -> None:
        self.check(client, request, expected)
        self.done[request] = expected

    def woken(self) -> list[tuple[str, StoreAnswer]]:
        ready = [each for each in self.waiting if all(key in self.values for key in each.keys)]
        self.waiting = [each for each in self.waiting if each not in ready]
        return [(each.client, self.found(each.number, each.operation, each.keys)) for each in ready]

    def found(self, number: int, operation: str, keys: tuple[str, ...]) -> StoreAnswer:
        values = tuple(self.values[key] for key in keys) if operation == "get" else ()
        return StoreAnswer(number, values)

    def too_late(self, number: int, keys: tuple[str, ...]) -> StoreAnswer:
        missing = tuple(key.encode() for key in keys if key not in self.values)
        return StoreAnswer(number, missing, problem="timeout")

    @rule(client=CLIENTS, keys=SOME_KEYS, value=VALUES)
    def set(self, client: str, keys: tuple[str, ...], value: bytes) -> None:
        values = tuple(value + bytes([at]) for at in range(len(keys)))
        self.values.update(zip(keys, values, strict=True))
        request = self.request("set", keys, values=values)
        self.change(client, request, StoreAnswer(request.number))

    @rule(client=CLIENTS, key=KEYS, amount=st.integers(-3, 3))
    def add(self, client: str, key: str, amount: int) -> None:
        request = self.request("add", (key,), amount=amount)
        try:
            total = int(self.values.get(key, b"0")) + amount
        except ValueError:
            problem = f"cannot add to {key!r}, its value is not a number"
            self.change(client, request, StoreAnswer(request.number, problem=problem))
            return
        self.values[key] = str(total).encode()
        self.change(client, request, StoreAnswer(request.number, amount=total))

    @rule(client=CLIENTS, key=KEYS, expected=VALUES, desired=VALUES)
    def compare_set(self, client: str, key: str, expected: bytes, desired: bytes) -> None:
        present = self.values.get(key)
        if (present or b"") == expected and (present is not None or not expected):
            self.values[key] = desired
        request = self.request("compare_set", (key,), values=(expected, desired))
        now = self.values.get(key, expected)
        self.change(client, request, StoreAnswer(request.number, (now,)))

    @rule(client=CLIENTS, key=KEYS)
    def delete(self, client: str, key: str) -> None:
        was_there = self.values.pop(key, None) is not None
        request = self.request("delete", (key,))
        self.change(client, request, StoreAnswer(request.number, amount=int(was_there)))

    @rule(client=CLIENTS, keys=SOME_KEYS, operation=st.sampled_from(["get", "wait"]), timeout_s=st.integers(0, 9))
    def wait(self, client: str, keys: tuple[str, ...], operation: str, timeout_s: int) -> None:
        request = self.request(operation, keys, timeout_s=float(timeout_s))
        if all(key in self.values for key in keys):
            self.check(client, request, self.found(request.number, operation, keys))
        elif timeout_s == 0:
            self.check(client, request, self.too_late(request.number, keys))
        else:
            self.check(client, request, None)
            self.waiting.append(Waiting(client, request.number, operation, keys, self.now + timeout_s))

    @rule(client=CLIENTS, keys=SOME_KEYS)
    def look(self, client: str, keys: tuple[str, ...]) -> None:
        request = self.request("check", keys)
        is_there = all(key in self.values for key in keys)
        self.check(client, request, StoreAnswer(request.number, amount=int(is_there)))

    @rule(client=CLIENTS, data=st.data())
    def ask_again(self, client: str, data: st.DataObject) -> None:
        if self.done:
            request = data.draw(st.sampled_from(list(self.done)))
            self.check(client, request, self.done[request])

    @rule(client=CLIENTS)
    def vanish(self, client: str) -> None:
        self.store.drop_client(client)
        self.waiting = [each for each in self.waiting if each.client != client]

    @rule(seconds=st.integers(0, 5))
    def let_time_pass(self, seconds: int) -> None:
        self.now += seconds
        late = [each for each in self.waiting if each.deadline <= self.now]
        self.waiting = [each for each in self.waiting if each not in late]
        expected = {(each.client, self.too_late(each.number, each.keys)) for each in late}
        answers = self.store.expire(self.now)
        assert len(answers) == len(expected)
        assert set(answers) == expected

    @invariant()
    def the_next_deadline_is_the_earliest(self) -> None:
        assert self.store.next_deadline() == min((each.deadline for each in self.waiting), default=None)

    @invariant()
    def nothing_else_is_kept(self) -> None:
        kept = self.store._bytes - self.store._remembered_bytes
        assert (kept > 0) == bool(self.values or self.waiting)


StoreAgainstModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestStoreAgainstModel = StoreAgainstModel.TestCase
