"""The key-value store that a coordinator keeps for each run: the values, and who waits for which keys. Pure.

Requests that wait are answered when their keys are there or their time is up, whichever comes first; the clock is
the coordinator's. What a run stores is bounded, so that no client can fill the coordinator's memory.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from holdfast.rendezvous.messages import StoreAnswer, StoreRequest

MAX_STORED_BYTES = 64 << 20
MAX_WAITING = 100_000


@dataclass(slots=True)
class _Waiting:
    client: str
    request: StoreRequest
    deadline: float
    missing: set[str]


class KeyValues:
    """`handle` returns the answers that are due, each with the client it is for."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._waiting: dict[int, _Waiting] = {}
        self._waiters_of: defaultdict[str, set[int]] = defaultdict(set)
        self._count = 0

    def handle(self, client: str, request: StoreRequest, now: float) -> list[tuple[str, StoreAnswer]]:
        match request.operation:
            case "set" if len(request.keys) == len(request.values):
                return self._set(client, request)
            case "get" | "wait":
                return self._wait(client, request, now)
            case "add" if len(request.keys) == 1:
                return self._add(client, request)
            case "compare_set" if len(request.keys) == 1 and len(request.values) == 2:
                return self._compare_set(client, request)
            case "check":
                is_there = all(key in self._values for key in request.keys)
                return [(client, StoreAnswer(request.number, amount=int(is_there)))]
            case "delete" if len(request.keys) == 1:
                return self._delete(client, request)
        problem = f"the store does not know {request.operation!r} with {len(request.keys)} keys"
        return [(client, StoreAnswer(request.number, problem=problem))]

    def _set(self, client: str, request: StoreRequest) -> list[tuple[str, StoreAnswer]]:
        answers = []
        for key, value in zip(request.keys, request.values, strict=True):
            if not self._put(key, value):
                return [(client, StoreAnswer(request.number, problem="the store is full"))]
            answers += self._wake(key)
        return [(client, StoreAnswer(request.number)), *answers]

    def _put(self, key: str, value: bytes) -> bool:
        before = len(key) + len(self._values[key]) if key in self._values else 0
        after = self._bytes - before + len(key) + len(value)
        if after > MAX_STORED_BYTES:
            return False
        self._values[key] = value
        self._bytes = after
        return True

    def _add(self, client: str, request: StoreRequest) -> list[tuple[str, StoreAnswer]]:
        key = request.keys[0]
        try:
            total = int(self._values.get(key, b"0")) + request.amount
        except ValueError:
            return [(client, StoreAnswer(request.number, problem=f"the value of {key!r} is not a number"))]
        if not self._put(key, b"%d" % total):
            return [(client, StoreAnswer(request.number, problem="the store is full"))]
        return [(client, StoreAnswer(request.number, amount=total)), *self._wake(key)]

    def _compare_set(self, client: str, request: StoreRequest) -> list[tuple[str, StoreAnswer]]:
        """Set it if it has the expected value, or if it is not there and nothing is expected; tell what it is now."""
        key, (expected, desired) = request.keys[0], request.values
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            if not self._put(key, desired):
                return [(client, StoreAnswer(request.number, problem="the store is full"))]
            return [(client, StoreAnswer(request.number, values=(desired,))), *self._wake(key)]
        return [(client, StoreAnswer(request.number, values=(expected if present is None else present,)))]

    def _delete(self, client: str, request: StoreRequest) -> list[tuple[str, StoreAnswer]]:
        value = self._values.pop(request.keys[0], None)
        if value is not None:
            self._bytes -= len(request.keys[0]) + len(value)
        return [(client, StoreAnswer(request.number, amount=int(value is not None)))]

    def _wait(self, client: str, request: StoreRequest, now: float) -> list[tuple[str, StoreAnswer]]:
        missing = {key for key in request.keys if key not in self._values}
        if not missing:
            return [(client, self._found(request))]
        if request.timeout_s <= 0:
            return [(client, StoreAnswer(request.number, problem="timeout"))]
        if len(self._waiting) >= MAX_WAITING:
            return [(client, StoreAnswer(request.number, problem="too many requests wait already"))]
        self._count += 1
        self._waiting[self._count] = _Waiting(client, request, now + request.timeout_s, missing)
        for key in missing:
            self._waiters_of[key].add(self._count)
        return []

    def _found(self, request: StoreRequest) -> StoreAnswer:
        values = tuple(self._values[key] for key in request.keys) if request.operation == "get" else ()
        return StoreAnswer(request.number, values=values)

    def _wake(self, key: str) -> list[tuple[str, StoreAnswer]]:
        answers = []
        for number in self._waiters_of.pop(key, ()):
            waiting = self._waiting[number]
            waiting.missing.discard(key)
            if not waiting.missing:
                self._forget(number)
                # A key that came earlier may have been deleted since; then it waits no longer in vain.
                is_there = all(each in self._values for each in waiting.request.keys)
                answer = (
                    self._found(waiting.request) if is_there else StoreAnswer(waiting.request.number, problem="timeout")
                )
                answers.append((waiting.client, answer))
        return answers

    def _forget(self, number: int) -> None:
        waiting = self._waiting.pop(number)
        for key in waiting.missing:
            self._waiters_of[key].discard(number)
            if not self._waiters_of[key]:
                del self._waiters_of[key]

    def drop_client(self, client: str) -> None:
        for number in [each for each, waiting in self._waiting.items() if waiting.client == client]:
            self._forget(number)

    def next_deadline(self) -> float | None:
        return min((waiting.deadline for waiting in self._waiting.values()), default=None)

    def expire(self, now: float) -> list[tuple[str, StoreAnswer]]:
        late = [number for number, waiting in self._waiting.items() if waiting.deadline <= now]
        answers = []
        for number in late:
            waiting = self._waiting[number]
            self._forget(number)
            answers.append((waiting.client, StoreAnswer(waiting.request.number, problem="timeout")))
        return answers
