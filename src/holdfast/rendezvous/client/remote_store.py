"""The run's key-value store, over the agent's connection to its coordinator.

It lives in the coordinator's memory: it is empty after the coordinator process was replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from holdfast.errors import UserError
from holdfast.rendezvous.api import RendezvousConnectionError
from holdfast.rendezvous.client.thread import CONNECTION_CLOSED, Client
from holdfast.rendezvous.membership.protocol import StoreAnswer
from holdfast.rendezvous.store import Store, StoreTimeoutError, as_bytes, name_some


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
        try:
            answer = self._client.request(operation, tuple(keys), timeout_s, **fields)
        except (ValueError, OverflowError) as error:
            raise UserError(f"store: {error}") from None
        if not answer.problem:
            return answer
        if answer.problem == "timeout":
            raise StoreTimeoutError(self._late(keys, timeout_s))
        if answer.problem == CONNECTION_CLOSED:
            raise RendezvousConnectionError(f"store: {answer.problem}")
        raise UserError(f"store: {answer.problem}")

    def _late(self, keys: Sequence[str], timeout_s: float) -> str:
        is_cut_off = self._client.reach.since is not None
        why = "; the coordinator is out of reach" if is_cut_off else ""
        return f"store: timed out after {timeout_s:g} s waiting for {name_some([repr(key) for key in keys])}{why}"

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], values=(as_bytes(value),))

    def get(self, key: str) -> bytes:
        return self._ask("get", [key]).values[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._ask("get", keys).values)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        if len(keys) != len(values):
            raise UserError(f"multi_set got {len(keys)} keys but {len(values)} values")
        self._ask("set", keys, values=tuple(as_bytes(value) for value in values))

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], amount=amount).amount

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys).amount)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._ask("compare_set", [key], values=(as_bytes(expected), as_bytes(desired))).values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]).amount)
