"""The run's key-value store, over the agent's connection to its coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from holdfast.rendezvous.api import RendezvousStateError
from holdfast.rendezvous.client import Client
from holdfast.rendezvous.messages import StoreAnswer
from holdfast.rendezvous.store import Store, StoreTimeoutError


class RemoteStore(Store):
    """Every call is one request and one answer. Those that wait do so in the coordinator."""

    def __init__(self, client: Client, timeout: timedelta) -> None:
        self._client = client
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _ask(
        self, operation: str, keys: Sequence[str], timeout: timedelta | None = None, **fields: object
    ) -> StoreAnswer:
        timeout_s = (self._timeout if timeout is None else timeout).total_seconds()
        answer = self._client.request(operation, tuple(keys), timeout_s, **fields)
        if answer.problem == "timeout":
            raise StoreTimeoutError(f"{operation} of {', '.join(map(repr, keys))} took more than {timeout_s:g} s")
        if answer.problem:
            raise RendezvousStateError(answer.problem)
        return answer

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], values=(_bytes(value),))

    def get(self, key: str) -> bytes:
        return self._ask("get", [key]).values[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._ask("get", keys).values)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        self._ask("set", keys, values=tuple(_bytes(value) for value in values))

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], amount=amount).amount

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys).amount)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._ask("compare_set", [key], values=(_bytes(expected), _bytes(desired))).values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]).amount)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
