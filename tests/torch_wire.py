"""The requests of torch's store client, as bytes (see `holdfast.process.torch_store`)."""

from __future__ import annotations

import struct

VALIDATE = b"\x00" + struct.pack("<I", 0x3C85F7CE)
CANCEL_WAIT = b"\x0c"
NUM_KEYS = b"\x07"


def sized(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def i64(number: int) -> bytes:
    return struct.pack("<q", number)


def _key(key: str) -> bytes:
    return sized(key.encode())


def _keys(keys: tuple[str, ...]) -> bytes:
    return struct.pack("<Q", len(keys)) + b"".join(map(_key, keys))


def set_(key: str, value: bytes) -> bytes:
    return b"\x01" + _key(key) + sized(value)


def compare_set(key: str, expected: bytes, desired: bytes) -> bytes:
    return b"\x02" + _key(key) + sized(expected) + sized(desired)


def get(key: str) -> bytes:
    return b"\x03" + _key(key)


def add(key: str, number: int) -> bytes:
    return b"\x04" + _key(key) + i64(number)


def check(*keys: str) -> bytes:
    return b"\x05" + _keys(keys)


def wait(*keys: str) -> bytes:
    return b"\x06" + _keys(keys)


def delete(key: str) -> bytes:
    return b"\x08" + _key(key)


def append(key: str, value: bytes) -> bytes:
    return b"\x09" + _key(key) + sized(value)


def multi_get(*keys: str) -> bytes:
    return b"\x0a" + _keys(keys)


def multi_set(**values: bytes) -> bytes:
    pairs = b"".join(_key(f"/{key}") + sized(value) for key, value in values.items())
    return b"\x0b" + struct.pack("<Q", len(values)) + pairs


def ping(number: int) -> bytes:
    return b"\x0d" + struct.pack("<I", number)


def push(key: str, value: bytes) -> bytes:
    return b"\x0e" + _key(key) + sized(value)


def pop(key: str) -> bytes:
    return b"\x0f" + _key(key)


def queue_length(key: str) -> bytes:
    return b"\x10" + _key(key)


def barrier(key: str, world: int) -> bytes:
    return b"\x12" + _key(key) + i64(world)
