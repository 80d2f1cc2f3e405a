"""What is said to etcd and what it answers, over the JSON gateway of its v3 interface. Pure.

Keys and values are bytes here and base64 on the wire; whole numbers are text there, as JSON has no 64-bit ones. What
is missing from an answer has its default: etcd leaves out zeros, empty texts and false.

The errors are divided by what the caller can do about them. What an error of etcd means is decided in `judge`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Literal

import msgspec

from holdfast.errors import HoldfastError
from holdfast.records import record

OLDEST_VERSION = (3, 4)


class EtcdError(HoldfastError):
    """Base of what can go wrong with etcd."""


class Unavailable(EtcdError):  # noqa: N818
    """No endpoint could carry the request out in time. `is_outcome_unknown`: a write may have happened all the same.

    `problem` is what kept it from that.
    """

    def __init__(self, problem: str, is_outcome_unknown: bool = False) -> None:
        doubt = "; whether the write has happened is unknown" if is_outcome_unknown else ""
        super().__init__(problem + doubt)
        self.problem = problem
        self.is_outcome_unknown = is_outcome_unknown


class Refused(EtcdError):  # noqa: N818
    """etcd, or what listens in its place, says no: password, permission, certificate, version. Nothing has happened,
    and asking again will not help."""


class Closed(EtcdError):  # noqa: N818
    """The client was closed."""


class LeaseGone(EtcdError):  # noqa: N818
    """The lease that a key should be attached to has ended. Nothing has happened."""


class Compacted(EtcdError):  # noqa: N818
    """etcd has forgotten the revision from which to watch or read; `compact_revision` is the oldest it has."""

    def __init__(self, text: str, compact_revision: int = 0) -> None:
        super().__init__(text)
        self.compact_revision = compact_revision


# What is stored.


class KeyValue(msgspec.Struct, frozen=True):
    """A key as it is stored. Of a key that was deleted only `key` and `mod_revision` are known."""

    key: bytes = b""
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    version: int = 0
    lease: int = 0


@record
class Reading:
    """What was read: the store's revision at that time, the keys in their order, and how many there are in all."""

    revision: int
    items: tuple[KeyValue, ...] = ()
    count: int = 0


@record
class Change:
    kind: Literal["put", "delete"]
    item: KeyValue


@record
class Batch:
    """Changes in their order, of one revision or several. Those of one revision are never divided."""

    revision: int
    changes: tuple[Change, ...]


# What is asked for.


@record
class Compare:
    """`target` of the key stands in the relation `result` to `operand`. A key that is not there has zeros and b""."""

    key: bytes
    target: Literal["create", "mod", "version", "lease", "value"]
    result: Literal["=", "!=", "<", ">"]
    operand: int | bytes


def is_missing(key: bytes) -> Compare:
    """The key is not there."""
    return Compare(key, "create", "=", 0)


def is_unchanged(item: KeyValue) -> Compare:
    """The key is still what it was when it was read; or still missing, if it was."""
    return Compare(item.key, "mod", "=", item.mod_revision)


@record
class Put:
    key: bytes
    value: bytes
    lease: int = 0


@record
class Delete:
    key: bytes
    is_prefix: bool = False


@record
class Get:
    key: bytes
    is_prefix: bool = False
    is_keys_only: bool = False


Operation = Put | Delete | Get


@record
class Committed:
    """`readings` has one entry for each operation that was carried out; that of a put or a delete has no items, and
    that of a delete says in `count` how many keys it removed."""

    has_succeeded: bool
    revision: int
    readings: tuple[Reading, ...] = ()


_TARGETS = {
    "create": ("CREATE", "create_revision"),
    "mod": ("MOD", "mod_revision"),
    "version": ("VERSION", "version"),
    "lease": ("LEASE", "lease"),
    "value": ("VALUE", "value"),
}
_RESULTS = {"=": "EQUAL", "!=": "NOT_EQUAL", "<": "LESS", ">": "GREATER"}


def to_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def end_of_prefix(prefix: bytes) -> bytes:
    """The first key after all those that begin with the prefix; b"\\0" means that there is no such key."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


def span(key: bytes, is_prefix: bool) -> dict[str, str]:
    """The fields that name one key, or all that begin with it. The empty prefix is everything."""
    if not is_prefix:
        return {"key": to_text(key)}
    return {"key": to_text(key or b"\0"), "range_end": to_text(end_of_prefix(key))}


def put_fields(put: Put) -> dict[str, str]:
    return {"key": to_text(put.key), "value": to_text(put.value), "lease": str(put.lease)}


def get_fields(get: Get, limit: int = 0) -> dict[str, Any]:
    return {**span(get.key, get.is_prefix), "limit": str(limit), "keys_only": get.is_keys_only}


def transaction_fields(
    compares: Sequence[Compare], on_success: Sequence[Operation], on_failure: Sequence[Operation]
) -> dict[str, Any]:
    return {
        "compare": [_compare_fields(each) for each in compares],
        "success": [_operation_fields(each) for each in on_success],
        "failure": [_operation_fields(each) for each in on_failure],
    }


def _compare_fields(compare: Compare) -> dict[str, Any]:
    target, field = _TARGETS[compare.target]
    operand = compare.operand
    value = to_text(operand) if isinstance(operand, bytes) else str(operand)
    return {"key": to_text(compare.key), "target": target, "result": _RESULTS[compare.result], field: value}


def _operation_fields(operation: Operation) -> dict[str, Any]:
    match operation:
        case Put():
            return {"request_put": put_fields(operation)}
        case Delete():
            return {"request_delete_range": span(operation.key, operation.is_prefix)}
        case Get():
            return {"request_range": get_fields(operation)}


# Answers.


class Header(msgspec.Struct, frozen=True):
    revision: int = 0


class Headed(msgspec.Struct, frozen=True):
    """Every answer has this. Asked for where nothing else of an answer matters."""

    header: Header


class Version(msgspec.Struct, frozen=True):
    etcdserver: str


class Token(msgspec.Struct, frozen=True):
    token: str


class RangeAnswer(msgspec.Struct, frozen=True):
    header: Header
    kvs: tuple[KeyValue, ...] = ()
    count: int = 0

    def reading(self) -> Reading:
        return Reading(self.header.revision, self.kvs, self.count)


class DeleteAnswer(msgspec.Struct, frozen=True):
    header: Header
    deleted: int = 0


class LeaseAnswer(msgspec.Struct, frozen=True):
    lease: int = msgspec.field(name="ID")
    ttl_s: int = msgspec.field(name="TTL", default=0)


class Streamed(msgspec.Struct, frozen=True):
    """One line of a stream."""

    result: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


class _OperationAnswer(msgspec.Struct, frozen=True):
    response_put: Headed | None = None
    response_range: RangeAnswer | None = None
    response_delete_range: DeleteAnswer | None = None

    def reading(self) -> Reading:
        if self.response_range is not None:
            return self.response_range.reading()
        if self.response_delete_range is not None:
            return Reading(self.response_delete_range.header.revision, count=self.response_delete_range.deleted)
        return Reading(self.response_put.header.revision if self.response_put is not None else 0)


class TransactionAnswer(msgspec.Struct, frozen=True):
    header: Header
    succeeded: bool = False
    responses: tuple[_OperationAnswer, ...] = ()

    def committed(self) -> Committed:
        readings = tuple(each.reading() for each in self.responses)
        return Committed(self.succeeded, self.header.revision, readings)


class _Event(msgspec.Struct, frozen=True):
    kv: KeyValue
    type: str = "PUT"


class WatchAnswer(msgspec.Struct, frozen=True):
    header: Header
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[_Event, ...] = ()

    def batch(self) -> Batch:
        changes = tuple(Change("delete" if each.type == "DELETE" else "put", each.kv) for each in self.events)
        return Batch(max(change.item.mod_revision for change in changes), changes)


class Complaint(msgspec.Struct, frozen=True):
    """What etcd says instead of an answer: by itself, or within a stream."""

    message: str
    code: int = 0
    grpc_code: int = 0

    @property
    def number(self) -> int:
        return self.code or self.grpc_code


class Complained(msgspec.Struct, frozen=True):
    """What etcd says instead of a stream."""

    error: Complaint


class Verdict(Enum):
    STALE_TOKEN = auto()
    """The token is not known (any more): ask for another one. Nothing has happened."""
    ELSEWHERE = auto()
    """This member cannot, another may. Nothing has happened."""
    UNKNOWN = auto()
    """This member could not finish it. It may have happened."""
    COMPACTED = auto()
    LEASE_GONE = auto()
    REFUSED = auto()


_CANCELED, _UNKNOWN, _DEADLINE, _NOT_FOUND, _EXHAUSTED, _OUT_OF_RANGE = 1, 2, 4, 5, 8, 11
_INTERNAL, _UNAVAILABLE, _DATA_LOSS, _UNAUTHENTICATED = 13, 14, 15, 16
_UNFINISHED = frozenset({_CANCELED, _UNKNOWN, _DEADLINE, _INTERNAL, _UNAVAILABLE, _DATA_LOSS})
_NOT_BEGUN = ("no leader", "too many requests", "not capable", "not supported for learner")


def judge(complaint: Complaint) -> Verdict:
    text, number = complaint.message, complaint.number
    if number == _UNAUTHENTICATED or "revision of auth store is old" in text:
        return Verdict.STALE_TOKEN
    if any(words in text for words in _NOT_BEGUN):
        return Verdict.ELSEWHERE
    if number == _NOT_FOUND and "lease not found" in text:
        return Verdict.LEASE_GONE
    if number == _OUT_OF_RANGE and "compacted" in text:
        return Verdict.COMPACTED
    return Verdict.UNKNOWN if number in _UNFINISHED else Verdict.REFUSED


def version_numbers(text: str) -> tuple[int, int] | None:
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
