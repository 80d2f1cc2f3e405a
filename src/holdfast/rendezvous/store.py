"""The key-value store through which the agents of a round talk to each other.

`Store` is the contract, with the names and types of torch's stores (a third-party handler may return one of those).
`InProcessStore` serves a world whose agents are all in this process.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from holdfast.errors import HoldfastError, UserError
from holdfast.rendezvous.api import RendezvousConnectionError

DEFAULT_TIMEOUT = timedelta(seconds=300)

# How many keys an error names before it stops: the text has to stay readable with 4,000 nodes.
_MAX_NAMED = 16


class StoreTimeoutError(HoldfastError, TimeoutError):
    """A key did not appear, or a barrier was not reached by all, in time."""


class StoreLostError(RendezvousConnectionError):
    """The coordinator was replaced, and its store was lost with it. The next round has a new store."""


class Store(ABC):
    """Keys are text, values are bytes; text given as a value is stored as UTF-8."""

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long `get`, `multi_get` and `wait` wait for keys, unless told otherwise, for all users of this object."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value, whatever was there before."""
        self.multi_set([key], [value])

    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Store several values at once."""

    def get(self, key: str) -> bytes:
        """The key's value; waits until there is one."""
        return self.multi_get([key])[0]

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, in their order; waits until each has one."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to the number that is stored as decimal text (a missing key is 0); returns the sum."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until every key has a value."""

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Whether every key has a value now."""

    @abstractmethod
    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Store `desired` if the value is `expected`, or if there is none and `expected` is empty. Returns the value
        that the key has afterwards; if it has none, `expected`."""

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Remove a key; whether there was one."""


class InProcessStore(Store):
    """A store for the threads of one process."""

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        if len(keys) != len(values):
            raise UserError(f"multi_set got {len(keys)} keys but {len(values)} values")
        encoded = [as_bytes(value) for value in values]
        with self._changed:
            self._values.update(zip(keys, encoded, strict=True))
            self._changed.notify_all()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._changed:
            self.wait(keys)
            return [self._values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            value = self._values.get(key, b"0")
            try:
                total = int(value) + amount
            except ValueError:
                raise UserError(f"store: cannot add to {key!r}, its value {value[:40]!r} is not a number") from None
            self.set(key, str(total))
            return total

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = (self._timeout if timeout is None else timeout).total_seconds()
        with self._changed:
            if self._changed.wait_for(lambda: self.check(keys), min(timeout_s, threading.TIMEOUT_MAX)):
                return
            missing = name_some([repr(key) for key in keys if key not in self._values])
        raise StoreTimeoutError(f"store: timed out after {timeout_s:g} s waiting for {missing}")

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        with self._changed:
            current = self._values.get(key)
            if (current or b"") == as_bytes(expected):
                self.set(key, desired)
                return self._values[key]
            return as_bytes(expected) if current is None else current

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None


def as_bytes(value: bytes | str) -> bytes:
    """A value as a store keeps it."""
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"a store's values are bytes or text, not {type(value).__name__}: {value!r}")
    return bytes(value)


def name_some(names: Sequence[str]) -> str:
    """The names in a list, no more of them than a reader can take in."""
    return ", ".join([*names[:_MAX_NAMED], "..."] if len(names) > _MAX_NAMED else names)


def barrier(store: Store, world_size: int, key_prefix: str, timeout_s: float) -> None:
    """Return when `world_size` callers have arrived, or raise `StoreTimeoutError`. Works once for a prefix. Stores
    differ in what they raise when the time is up, so the store is asked once more; one that has failed raises then."""
    last_member = f"{key_prefix}/last_member"
    if store.add(f"{key_prefix}/num_members", 1) == world_size:
        store.set(last_member, "arrived")
    try:
        store.wait([last_member], timedelta(seconds=max(timeout_s, 0.001)))  # To torch's stores zero means no limit.
    except (TimeoutError, RuntimeError, LookupError):
        if not store.check([last_member]):
            arrived = f"{store.add(f'{key_prefix}/num_members', 0)} of {world_size} had arrived"
            raise StoreTimeoutError(f"barrier {key_prefix!r}: timed out after {timeout_s:g} s: {arrived}") from None
