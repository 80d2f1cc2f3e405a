"""The run's key-value store, over the agent's connection to its coordinator.

It lives in the coordinator's memory and is lost when the coordinator process is replaced. A `RemoteStore` learns the
generation of the store before its first request and names it in every request, so it never mistakes the empty store of
the next coordinator for the one that it knows; it raises `StoreLostError` from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from holdfast.errors import UserError
from holdfast.rendezvous.api import RendezvousConnectionError
from holdfast.rendezvous.client.thread import CONNECTION_CLOSED, Client
from holdfast.rendezvous.membership.protocol import StoreAnswer
from holdfast.rendezvous.store import Store, StoreLostError, StoreTimeoutError, as_bytes, name_some

_PIECE_KEYS = 4096
_PIECE_BYTES = 1 << 18

_Within = tuple[float, float]  # The time-out, and when it ends.
_LOST = "store: the coordinator was replaced, and what this round had stored was lost with it"


class RemoteStore(Store):
    """Every call is a request and its answer, or several. Those that wait do so in the coordinator."""

    def __init__(self, client: Client, timeout: timedelta, prefix: str = "") -> None:
        """All keys are in the namespace `prefix`."""
        super().__init__(timeout)
        self._client, self._prefix = client, prefix
        self._generation = b""
        self._lock = threading.Lock()

    def _full(self, *keys: str) -> list[str]:
        return [f"{self._prefix}{key}" for key in keys]

    def _ask(self, operation: str, keys: Sequence[str], within: _Within | None = None, **fields: Any) -> StoreAnswer:
        timeout_s, ends = within or self._within(None)
        try:
            answer = self._exchange(operation, tuple(keys), ends - time.monotonic(), fields)
        except (ValueError, OverflowError) as error:
            raise UserError(f"store: {error}") from None
        match answer.problem:
            case "":
                return answer
            case "timeout":
                missing = name_some([repr(key) for key in [value.decode() for value in answer.values] or keys])
                why = "; the coordinator is out of reach" if self._client.reach.since is not None else ""
                raise StoreTimeoutError(f"store: timed out after {timeout_s:g} s waiting for {missing}{why}")
            case "generation":
                raise StoreLostError(_LOST)
            case problem if problem == CONNECTION_CLOSED:
                raise RendezvousConnectionError(f"store: {answer.problem}")
        raise UserError(f"store: {answer.problem}")

    def _within(self, timeout: timedelta | None) -> _Within:
        timeout_s = (self._timeout if timeout is None else timeout).total_seconds()
        return timeout_s, time.monotonic() + timeout_s

    def _exchange(self, operation: str, keys: tuple[str, ...], timeout_s: float, fields: dict[str, Any]) -> StoreAnswer:
        if not self._generation:
            # Learnt by a request that changes nothing: the first one that counts could be lost with its coordinator and
            # be repeated, without a generation, to the next one.
            answer = self._client.request("check", (), timeout_s)
            if answer.problem:
                return answer
            with self._lock:
                self._generation = self._generation or answer.generation
        return self._client.request(operation, keys, timeout_s, generation=self._generation, **fields)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        within = self._within(None)
        values: list[bytes] = []
        for piece in _pieces(self._full(*keys)):
            expected = len(values) + len(piece)
            while len(values) < expected:
                values += self._ask("get", piece[len(values) - expected :], within).values
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        if len(keys) != len(values):
            raise UserError(f"multi_set got {len(keys)} keys but {len(values)} values")
        self._ask("set", self._full(*keys), values=tuple(as_bytes(value) for value in values))

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", self._full(key), amount=amount).amount

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        within = self._within(timeout)
        for piece in _pieces(self._full(*keys)):
            self._ask("wait", piece, within)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._ask("check", piece).amount for piece in _pieces(self._full(*keys)))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._ask("compare_set", self._full(key), values=(as_bytes(expected), as_bytes(desired))).values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", self._full(key)).amount)


def _pieces(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """The keys in groups that fit into a message."""
    begin = size = 0
    for at, key in enumerate(keys):
        size += len(key.encode())
        if at > begin and (at - begin == _PIECE_KEYS or size > _PIECE_BYTES):
            yield keys[begin:at]
            begin, size = at, len(key.encode())
    if begin < len(keys):
        yield keys[begin:]
