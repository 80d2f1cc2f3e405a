"""The key-value store through which the agents of a round talk to each other.

`Store` is the contract, `InProcessStore` serves a world whose agents are all in this process. The functions below them
need nothing but the methods of the contract, which has the names and types of torch's stores, so they work with those
too (a third-party handler may return one).

A time-out is a `timedelta`, as it is there. Functions take seconds.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice

from holdfast.errors import HoldfastError, UserError
from holdfast.rendezvous.api import RendezvousConnectionError

DEFAULT_TIMEOUT = timedelta(seconds=300)

# How many keys or ranks an error names before it stops: the text has to stay readable with 4,000 nodes.
_MAX_NAMED = 16
# So small that thousands of ranks may read a piece at the same time.
_PIECE_BYTES = 1 << 16


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


def _duration(seconds: float) -> timedelta:
    # Zero means no limit to torch's stores, and no time at all here.
    return timedelta(seconds=max(seconds, 0.001))


@contextmanager
def store_timeout(store: Store, timeout: float) -> Iterator[None]:
    """Give the store another time-out for the length of a block, however the block ends."""
    before = store.timeout
    store.set_timeout(_duration(timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Store, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """The values of `<prefix>0`, `<prefix>1`, ... in this order; every rank has to call it. Rank 0 collects the values
    and stores all of them together, in pieces; the other ranks wait for one key and read the pieces. If every rank read
    every value itself, 10,000 ranks would make 100 million reads. Rank 0 returns last, because the store may end with
    its process while others still read."""
    from msgspec import msgpack

    count, piece = f"{prefix}/all", f"{prefix}/all/"
    if rank != 0:
        packed = b"".join(store.get(f"{piece}{at}") for at in range(int(store.get(count))))
        _arrive(store, world_size, f"{prefix}/finished")
        return msgpack.decode(packed, type=list[bytes])
    values = store.multi_get([f"{prefix}{other}" for other in range(world_size)])
    packed = msgpack.encode(values)
    pieces = [packed[at : at + _PIECE_BYTES] for at in range(0, len(packed), _PIECE_BYTES)]
    for at, each in enumerate(pieces):
        store.set(f"{piece}{at}", each)
    store.set(count, str(len(pieces)))
    store.wait([_arrive(store, world_size, f"{prefix}/finished")])
    for at in range(len(pieces)):
        store.delete_key(f"{piece}{at}")
    return values


def synchronize(
    store: Store, data: bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """Give every rank the data of all ranks. Works once for a prefix."""
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


def barrier(
    store: Store,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Return when `world_size` callers have arrived, or raise `StoreTimeoutError`. Works once for a prefix. With
    `rank`, an error says who is missing: each rank leaves a mark when it arrives, rank 0 gives stragglers
    `trace_timeout` seconds and then names those without one (through `rank_tracing_decoder`, if given); the others wait
    until it has, so that the store does not go away under it, and refer to it."""
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("barrier: rank_tracing_decoder needs a rank")
    if rank is not None:
        store.set(_mark(key_prefix, rank), "arrived")
    if _appear(store, [_arrive(store, world_size, key_prefix)], barrier_timeout):
        return
    arrived = f"{store.add(f'{key_prefix}/num_members', 0)} of {world_size} had arrived"
    who = cause = ""
    if rank is not None:
        who = f" on rank {rank}"
        cause = _trace(store, world_size, key_prefix, rank, rank_tracing_decoder or str, trace_timeout)
    raise StoreTimeoutError(f"barrier {key_prefix!r}: timed out after {barrier_timeout:g} s{who}: {arrived}{cause}")


def _arrive(store: Store, world_size: int, prefix: str) -> str:
    """Count one more arrival; returns the key that appears with the last."""
    last_member = f"{prefix}/last_member"
    if store.add(f"{prefix}/num_members", 1) == world_size:
        store.set(last_member, "arrived")
    return last_member


def _mark(prefix: str, rank: int) -> str:
    return f"{prefix}{rank}/TRACE"


def _appear(store: Store, keys: Sequence[str], timeout_s: float) -> bool:
    """Whether all keys appear in time. Stores differ in what they raise when the time is up, so the store is asked once
    more: if it answers, the time was up, and if it has failed, it raises its own error here."""
    try:
        store.wait(keys, _duration(timeout_s))
    except (TimeoutError, RuntimeError, LookupError):
        return store.check(keys)
    return True


def _trace(
    store: Store, world_size: int, prefix: str, rank: int, decode: Callable[[int], str], timeout_s: float
) -> str:
    """The missing ranks, as far as this rank knows them, as the end of a sentence."""
    gate = f"{prefix}/TRACING_GATE"
    if rank != 0:
        if not store.check([_mark(prefix, 0)]):
            return "; rank 0 is missing"
        # Twice, because rank 0 may have begun its own wait that much later.
        _appear(store, [gate], 2 * timeout_s)
        return "; see rank 0 for who is missing"
    others = range(1, world_size)
    missing: list[int] = []
    if not _appear(store, [_mark(prefix, other) for other in others], timeout_s):
        # One more than can be named is enough to know that not all can be.
        missing = list(islice(_unmarked(store, prefix, others), _MAX_NAMED + 1))
    store.set(gate, "open")
    return f"; missing ranks: {name_some([*map(decode, missing)])}" if missing else "; the others came too late"


def _unmarked(store: Store, prefix: str, ranks: Sequence[int]) -> Iterator[int]:
    """The ranks without a mark, found by halves: a few missing ones among thousands take few requests."""
    if store.check([_mark(prefix, other) for other in ranks]):
        return
    if len(ranks) == 1:
        yield ranks[0]
        return
    middle = len(ranks) // 2
    yield from _unmarked(store, prefix, ranks[:middle])
    yield from _unmarked(store, prefix, ranks[middle:])
