"""The key-value store that a coordinator keeps for its run: the values, and who waits for which keys. Pure.

All that it keeps has one bound (`limits.store_bytes`): values, requests that wait, and answers. A client that lost its
connection asks again what it got no answer to. The last answers to requests that change something are kept, so that a
repetition gets the same answer and changes nothing.

A request that waits is found under one key that it misses. When the key comes, the request moves on to the next one.

The store is lost with its coordinator. Its generation, a random name, is in every answer; a request that names another
one was made by a client that counts on what is lost, and is refused.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from holdfast.rendezvous.coordinator.limits import MIB, Limits
from holdfast.rendezvous.membership.frames import MAX_MESSAGE_BYTES
from holdfast.rendezvous.membership.protocol import StoreAnswer, StoreRequest

# Roughly what an entry costs besides its key and value, a waiting request besides its keys, an answer its values.
_ENTRY_BYTES = 200
_WAITING_BYTES = 500
_REMEMBERED_BYTES = 400
_MOST_REMEMBERED_BYTES = 4 * MIB
# An answer has less besides its values than a request that sets them: what could be set can be got.
_ANSWER_BYTES = MAX_MESSAGE_BYTES - 96
_MAX_NAMED = 17
_EXPIRED_AT_ONCE = 1000
_INT_LIMIT = 1 << 63

Answers = list[tuple[Any, StoreAnswer]]
K = TypeVar("K")


class _Impossible(Exception):  # noqa: N818
    """The request cannot be carried out, and nothing was changed."""


@dataclass(slots=True)
class _Waiting:
    client: Hashable
    request: StoreRequest
    deadline: float
    cost_bytes: int
    at: int = 0  # The position of a key that is missing.


class KeyValues:
    """`handle` returns the answers that are due, each with the client it is for: what the caller knows it by."""

    def __init__(self, generation: bytes = b"", limits: Limits | None = None) -> None:
        self._generation = generation
        self._limits = limits or Limits()
        self._bytes = 0  # All that is kept.
        self._values: dict[str, bytes] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._missing_it: dict[str, set[int]] = {}  # By key.
        self._requests_of: dict[Hashable, set[int]] = {}  # By client.
        # Deadlines of requests that wait, and of some that do not any more.
        self._deadlines: list[tuple[float, int]] = []
        self._woken: list[int] = []
        self._count = 0
        self._remembered: OrderedDict[tuple[bytes, int], StoreAnswer] = OrderedDict()
        self._remembered_bytes = 0

    def handle(self, client: Hashable, request: StoreRequest, now: float) -> Answers:
        name = (request.sender, request.number)
        if request.generation not in (b"", self._generation):
            return [(client, self._answer(request, problem="generation"))]
        if name in self._remembered:
            return [(client, self._remembered[name])]
        if request.operation in ("get", "wait"):
            return self._wait(client, request, now)
        try:
            answer = self._answer(request, **self._carry_out(request))
        except _Impossible as error:
            answer = self._answer(request, problem=str(error))
        if request.operation != "check":
            self._remember(name, answer)
        # Those that miss no key any more are answered, too, the longest waiting first.
        answers, woken, self._woken = [(client, answer)], sorted(self._woken), []
        for number in woken:
            waiting = self._waiting[number]
            if (key := self._missing(waiting)) is not None:
                self._missing_it.setdefault(key, set()).add(number)
            else:
                answers.append((waiting.client, self._found(self._forget(number).request)))
        return answers

    def _missing(self, waiting: _Waiting) -> str | None:
        """A key that is missing. Those before the last one are looked at again only if all others are there."""
        keys = waiting.request.keys
        for begin in (waiting.at, 0):
            for waiting.at in range(begin, len(keys)):
                if keys[waiting.at] not in self._values:
                    return keys[waiting.at]
        return None

    def _carry_out(self, request: StoreRequest) -> dict[str, Any]:
        """Do what need not wait; returns what the answer says."""
        keys, values = request.keys, request.values
        match request.operation, len(keys), len(values):
            case "check", _, _:
                return {"amount": int(all(key in self._values for key in keys))}
            case "set", key_count, value_count if key_count == value_count:
                self._put(dict(zip(keys, values, strict=True)))
                return {}
            case "add", 1, _:
                return {"amount": self._add(keys[0], request.amount)}
            case "compare_set", 1, 2:
                return {"values": (self._compare_set(keys[0], *values),)}
            case "delete", 1, _:
                return {"amount": int(self._delete(keys[0]))}
        given = f"{len(keys)} keys and {len(values)} values"
        raise _Impossible(f"the store does not know {request.operation[:40]!r} with {given}")

    def _answer(self, request: StoreRequest, **fields: Any) -> StoreAnswer:
        return StoreAnswer(request.number, generation=self._generation, **fields)

    def _remember(self, name: tuple[bytes, int], answer: StoreAnswer) -> None:
        """The oldest are forgotten. The newest is kept, whether there is room or not."""
        cost_bytes = _answer_bytes(answer)
        while self._remembered and (
            self._remembered_bytes + cost_bytes > _MOST_REMEMBERED_BYTES or not self._has_room(cost_bytes)
        ):
            self._count_remembered(-_answer_bytes(self._remembered.popitem(last=False)[1]))
        self._remembered[name] = answer
        self._count_remembered(cost_bytes)

    def _count_remembered(self, more: int) -> None:
        self._remembered_bytes += more
        self._bytes += more

    def _has_room(self, more: int) -> bool:
        return self._bytes + more <= self._limits.store_bytes

    def _put(self, entries: dict[str, bytes]) -> None:
        """All of them or none."""
        before = sum(_entry_bytes(key, self._values[key]) for key in entries if key in self._values)
        more = sum(_entry_bytes(key, value) for key, value in entries.items()) - before
        if more > 0 and not self._has_room(more):
            raise _Impossible(f"the store is full (at most {self._limits.store_bytes // MIB} MiB)")
        self._woken += [number for key in entries for number in self._missing_it.pop(key, ())]
        self._values.update(entries)
        self._bytes += more

    def _add(self, key: str, amount: int) -> int:
        try:
            total = int(self._values.get(key, b"0")) + amount
        except ValueError:
            raise _Impossible(f"cannot add to {key[:200]!r}, its value is not a number") from None
        if not -_INT_LIMIT <= total < _INT_LIMIT:
            raise _Impossible(f"the sum at {key[:200]!r} is out of range (64 bits)")
        self._put({key: b"%d" % total})
        return total

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set it if it has the expected value, or if it is not there and nothing is expected; tell what it is now."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self._put({key: desired})
            return desired
        return expected if present is None else present

    def _delete(self, key: str) -> bool:
        if key not in self._values:
            return False
        self._bytes -= _entry_bytes(key, self._values.pop(key))
        return True

    def _wait(self, client: Hashable, request: StoreRequest, now: float) -> Answers:
        cost_bytes = _WAITING_BYTES + sum(_WAITING_BYTES + _text_bytes(key) for key in request.keys)
        waiting = _Waiting(client, request, now + request.timeout_s, cost_bytes)
        if (key := self._missing(waiting)) is None:
            return [(client, self._found(request))]
        if request.timeout_s <= 0:
            return [(client, self._too_late(request))]
        if not self._has_room(cost_bytes):
            return [(client, self._answer(request, problem="too many requests wait already"))]
        self._count += 1
        self._waiting[self._count] = waiting
        self._bytes += cost_bytes
        self._requests_of.setdefault(client, set()).add(self._count)
        self._missing_it.setdefault(key, set()).add(self._count)
        heapq.heappush(self._deadlines, (waiting.deadline, self._count))
        if len(self._deadlines) > 2 * len(self._waiting) + 64:
            self._deadlines = [(each.deadline, at) for at, each in self._waiting.items()]
            heapq.heapify(self._deadlines)
        return []

    def _forget(self, number: int) -> _Waiting:
        waiting = self._waiting.pop(number)
        self._bytes -= waiting.cost_bytes
        _discard(self._requests_of, waiting.client, number)
        _discard(self._missing_it, waiting.request.keys[waiting.at], number)
        return waiting

    def _found(self, request: StoreRequest) -> StoreAnswer:
        """With the values of the first keys, as many as fit; the client asks for the others."""
        values: list[bytes] = []
        left_bytes = _ANSWER_BYTES
        for key in request.keys if request.operation == "get" else ():
            value = self._values[key]
            left_bytes -= len(value) + 5
            if values and left_bytes < 0:
                break
            values.append(value)
        return self._answer(request, values=tuple(values))

    def _too_late(self, request: StoreRequest) -> StoreAnswer:
        """Names some of the keys that are missing."""
        missing = islice((key for key in request.keys if key not in self._values), _MAX_NAMED)
        return self._answer(request, problem="timeout", values=tuple(key[:200].encode() for key in missing))

    def drop_client(self, client: Hashable) -> None:
        for number in list(self._requests_of.get(client, ())):
            self._forget(number)

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._waiting:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> Answers:
        """Some of those whose time is up. If there are more, the next deadline is still in the past."""
        answers: Answers = []
        while len(answers) < _EXPIRED_AT_ONCE and (deadline := self.next_deadline()) is not None and deadline <= now:
            waiting = self._forget(heapq.heappop(self._deadlines)[1])
            answers.append((waiting.client, self._too_late(waiting.request)))
        return answers


def _text_bytes(key: str) -> int:
    return len(key) if key.isascii() else 4 * len(key)


def _entry_bytes(key: str, value: bytes) -> int:
    return _ENTRY_BYTES + _text_bytes(key) + len(value)


def _answer_bytes(answer: StoreAnswer) -> int:
    return _REMEMBERED_BYTES + sum(map(len, answer.values)) + len(answer.problem)


def _discard(index: dict[K, set[int]], key: K, number: int) -> None:
    if numbers := index.get(key):
        numbers.discard(number)
        if not numbers:
            del index[key]
