"""The key-value store of the handler contract, in etcd.

Its keys are those of etcd under a prefix. With a lease they are attached to it, so that they vanish with the run. Those
who wait watch the key that is missing, or what the missing ones have in common at their beginning, so a waiter hears
little that is not for it.

What depends on the value before (`add`, `compare_set`) is a transaction that does nothing if the key has changed
meanwhile, and is then tried again. If the answer to one is lost:

1. the key is read again; if it is unchanged, the same transaction is sent again. Both need the key as it was, so at
   most one of them happens;
2. if it has changed, nobody can tell who did it. `compare_set` says what the key is now, as it does in any case;
   `add` gives up, with an error that says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from holdfast.errors import UserError
from holdfast.rendezvous.api import RendezvousConnectionError
from holdfast.rendezvous.etcd_client import (
    Batch,
    Committed,
    Compacted,
    EtcdClient,
    EtcdError,
    Get,
    KeyValue,
    Put,
    Refused,
    Unavailable,
    Watch,
    is_unchanged,
)
from holdfast.rendezvous.store import DEFAULT_TIMEOUT, Store, StoreTimeoutError, as_bytes, as_int, name_some

# etcd takes 128 in one transaction unless it is told otherwise.
_MAX_OPERATIONS = 100

Found = dict[bytes, bytes]
"""The values of those keys that are there."""


class EtcdStore(Store):
    """`prefix` is a namespace of its own; `lease` is the id of a lease that others keep alive, or a function that knows
    the present one. Threads may share it."""

    def __init__(
        self,
        client: EtcdClient,
        prefix: bytes,
        timeout: timedelta = DEFAULT_TIMEOUT,
        lease: int | Callable[[], int] = 0,
    ) -> None:
        if not prefix:
            raise UserError("a store in etcd needs a prefix for its keys")
        self._client = client
        self._prefix = prefix
        self._timeout = timeout
        self._lease = lease if callable(lease) else lambda: lease
        # Threads of one process that change the same key need not find each other out through etcd.
        self._swapping = threading.Lock()

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _full(self, key: str) -> bytes:
        try:
            return self._prefix + key.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"store: {error}") from None

    def _short(self, key: bytes) -> str:
        return repr(key[len(self._prefix) :].decode())

    def _put(self, key: bytes, value: bytes) -> Put:
        return Put(key, value, self._lease())

    # Writing.

    def set(self, key: str, value: bytes | str) -> None:
        full, encoded = self._full(key), as_bytes(value)
        with _own_errors():
            self._client.put(full, encoded, self._lease())

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        if len(keys) != len(values):
            raise UserError(f"multi_set got {len(keys)} keys but {len(values)} values")
        # One transaction may not change a key twice; of a key that is given twice the last value counts.
        last = {self._full(key): as_bytes(value) for key, value in zip(keys, values, strict=True)}
        puts = [self._put(key, value) for key, value in last.items()]
        with _own_errors():
            for start in range(0, len(puts), _MAX_OPERATIONS):
                self._client.commit((), puts[start : start + _MAX_OPERATIONS])

    def add(self, key: str, amount: int) -> int:
        with _own_errors():
            stored = self._swap(key, lambda present: b"%d" % (as_int(key, present or b"0") + amount))
        if stored is None:
            raise RendezvousConnectionError(
                f"store: whether {amount} was added to {key!r} is unknown: etcd did not say"
            )
        return int(stored)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        old, new = as_bytes(expected), as_bytes(desired)

        def decide(present: bytes | None) -> bytes | None:
            return new if (present if present is not None else b"") == old else None

        with _own_errors():
            if self._swap(key, decide) is not None:
                return new
            now = self._client.get(self._full(key))
            return old if now is None else now.value

    def _swap(self, key: str, decide: Callable[[bytes | None], bytes | None]) -> bytes | None:
        """Replace a value by what `decide` makes of it (None: leave it); returns what was stored.

        None also if it cannot be told any more whether it was stored.
        """
        full = self._full(key)
        in_doubt: KeyValue | None = None
        with self._swapping:
            present = self._client.get(full)
            while True:
                before = present or KeyValue(full)
                if in_doubt is not None and before != in_doubt:
                    return None
                value = decide(None if present is None else present.value)
                if value is None:
                    return None
                try:
                    done = self._client.commit([is_unchanged(before)], [self._put(full, value)], [Get(full)])
                except Unavailable as error:
                    if not error.is_outcome_unknown or in_doubt is not None:
                        raise
                    in_doubt, present = before, self._get_again(full, error)
                    continue
                if done.has_succeeded:
                    return value
                present = next(iter(done.readings[0].items), None)

    def _get_again(self, key: bytes, doubt: Unavailable) -> KeyValue | None:
        try:
            return self._client.get(key)
        except Unavailable:
            raise doubt from None  # That the outcome is unknown is the worse news.

    def delete_key(self, key: str) -> bool:
        full = self._full(key)
        with _own_errors():
            return self._client.delete(full) > 0

    # Reading.

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        full = [self._full(key) for key in keys]
        found = self._await(full, self._timeout)
        return [found[key] for key in full]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        full = [self._full(key) for key in keys]
        self._await(full, self._timeout if timeout is None else timeout, is_keys_only=True)

    def check(self, keys: Sequence[str]) -> bool:
        full = [self._full(key) for key in keys]
        with _own_errors():
            return len(self._look(full, is_keys_only=True)[1]) == len(set(full))

    def _look(self, keys: Sequence[bytes], is_keys_only: bool) -> tuple[int, Found]:
        """What there is now of these keys, and a revision up to which nothing was overlooked."""
        wanted = list(dict.fromkeys(keys))
        found: Found = {}
        revision = 0
        for start in range(0, len(wanted), _MAX_OPERATIONS):
            gets = [Get(key, is_keys_only=is_keys_only) for key in wanted[start : start + _MAX_OPERATIONS]]
            committed = self._client.commit((), gets)
            found |= _items(committed)
            revision = min(revision or committed.revision, committed.revision)
        return revision, found

    # Waiting.

    def _await(self, keys: Sequence[bytes], timeout: timedelta, is_keys_only: bool = False) -> Found:
        """The values of all keys as soon as all are there at once. An etcd that cannot be reached is waited for."""
        deadline = time.monotonic() + timeout.total_seconds()
        missing: Sequence[bytes] = keys
        while True:
            trouble = ""
            try:
                revision, found = self._look(keys, is_keys_only)
                missing = [key for key in keys if key not in found]
                if not missing:
                    return found
                self._watch(missing, revision + 1, deadline)
            except Unavailable as error:
                trouble = f"; {error}"
            except Compacted:
                pass  # What happened meanwhile is seen by looking again.
            except EtcdError as error:
                raise _own_error(error) from None
            if time.monotonic() >= deadline:
                names = name_some([self._short(key) for key in missing])
                seconds = timeout.total_seconds()
                raise StoreTimeoutError(f"store: timed out after {seconds:g} s waiting for {names}{trouble}")

    def _watch(self, missing: Sequence[bytes], from_revision: int, deadline: float) -> None:
        """Return when all that were missing have come, or the time is up."""
        if time.monotonic() >= deadline:
            return
        awaited = dict.fromkeys(missing)
        shared = _shared_beginning(missing)
        with self._client.watch(shared, from_revision, is_prefix=len(awaited) > 1) as watch:
            while awaited and (batch := _take(watch, deadline)) is not None:
                for change in batch.changes:
                    awaited.pop(change.item.key, None)


def _shared_beginning(keys: Sequence[bytes]) -> bytes:
    first, last = min(keys), max(keys)
    pairs = zip(first, last, strict=False)
    return first[: next((at for at, (one, other) in enumerate(pairs) if one != other), len(first))]


def _take(watch: Watch, deadline: float) -> Batch | None:
    return watch.take(max(0.0, deadline - time.monotonic()))


def _items(committed: Committed) -> Found:
    return {item.key: item.value for reading in committed.readings for item in reading.items}


@contextmanager
def _own_errors() -> Iterator[None]:
    """Errors of etcd as those of a store."""
    try:
        yield
    except EtcdError as error:
        raise _own_error(error) from None


def _own_error(error: EtcdError) -> Exception:
    kind = UserError if isinstance(error, Refused) else RendezvousConnectionError
    return kind(f"store: {error}")
