"""Decoders of typed values, which threads may begin to use at the same time.

msgspec finds out about a type when its first decoder is made, and crashes the process if two threads make it do so at
once; also if they want different types, or formats, that have a third type in common. So every decoder is made here,
one at a time, and once. Using one that is made is safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_making = threading.Lock()
_made: dict[tuple[Callable[[Any], Any], object], Any] = {}


def decode_msgpack(data: bytes, kind: type[T]) -> T:
    """Raises `ValueError` or `RecursionError` if it is anything else."""
    value: T = msgpack_decoder(kind).decode(data)
    return value


def decode_json(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """The same for JSON. Numbers may be given as texts, as etcd does."""
    value: T = _once(_lax_json, kind).decode(data)
    return value


def msgpack_decoder(kinds: object) -> msgspec.msgpack.Decoder[Any]:
    """For one kind, or a union of several."""
    decoder: msgspec.msgpack.Decoder[Any] = _once(msgspec.msgpack.Decoder, kinds)
    return decoder


def _lax_json(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=False)


def _once(make: Callable[[Any], T], kinds: object) -> T:
    found: T | None = _made.get((make, kinds))
    if found is None:
        with _making:
            found = _made.get((make, kinds)) or make(kinds)
            _made[(make, kinds)] = found
    return found
