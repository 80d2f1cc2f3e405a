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
from holdfast.rendezvous.client import thread
from holdfast.rendezvous.client.thread import Client
from holdfast.rendezvous.membership.protocol import StoreAnswer
from holdfast.rendezvous.store import Store, StoreLostError, StoreTimeoutError, as_bytes, name_some

_PIECE_KEYS = 4096
_PIECE_BYTES = 1 << 18

_LOST = "store: the coordinator was replaced, and what this round had stored was lost with it"


class RemoteStore(Store):
    """Every call is a request and its answer, or several if there are many keys. Those that wait do so in the
    coordinator."""

    def __init__(self, client: Client, timeout: timedelta, prefix: str = "") -> None:
        """All keys are in the namespace `prefix`."""
        super().__init__(timeout)
        self._client = client
        self._prefix = prefix
        self._generation = b""
        self._lock = threading.Lock()

    def _full(self, *keys: str) -> list[str]:
        return [f"{self._prefix}{key}" for key in keys]

    def _ask(
        self,
        operation: str,
        keys: Sequence[str],
        timeout: timedelta | None = None,
        began: float | None = None,
        **fields: Any,
    ) -> StoreAnswer:
        """`began`: when the time-out began to run, if it was not now."""
        timeout_s = (self._timeout if timeout is None else timeout).total_seconds()
        left_s = timeout_s if began is None else timeout_s - (time.monotonic() - began)
        try:
            answer = self._exchange(operation, tuple(keys), left_s, fields)
        except (ValueError, OverflowError) as error:
            raise UserError(f"store: {error}") from None
        match answer.problem:
            case "":
                return answer
            case "timeout":
                raise StoreTimeoutError(self._late([value.decode() for value in answer.values] or keys, timeout_s))
            case "generation":
                raise StoreLostError(_LOST)
            case thread.CONNECTION_CLOSED:
                raise RendezvousConnectionError(f"store: {answer.problem}")
        raise UserError(f"store: {answer.problem}")

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

    def _late(self, keys: Sequence[str], timeout_s: float) -> str:
        is_cut_off = self._client.reach.since is not None
        why = "; the coordinator is out of reach" if is_cut_off else ""
        return f"store: timed out after {timeout_s:g} s waiting for {name_some([repr(key) for key in keys])}{why}"

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        began = time.monotonic()
        values: list[bytes] = []
        for piece in _pieces(self._full(*keys)):
            expected = len(values) + len(piece)
            while len(values) < expected:
                values += self._ask("get", piece[len(values) - expected :], began=began).values
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        if len(keys) != len(values):
            raise UserError(f"multi_set got {len(keys)} keys but {len(values)} values")
        self._ask("set", self._full(*keys), values=tuple(as_bytes(value) for value in values))

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", self._full(key), amount=amount).amount

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        began = time.monotonic()
        for piece in _pieces(self._full(*keys)):
            self._ask("wait", piece, timeout, began)

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
