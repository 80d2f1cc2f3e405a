"""What is said to etcd, and what its answers mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UserError
from holdfast.rendezvous.decoding import decode_json
from holdfast.rendezvous.etcd_http import parse_etcd_endpoint
from holdfast.rendezvous.etcd_wire import (
    Complaint,
    Verdict,
    WatchAnswer,
    end_of_prefix,
    judge,
    span,
    version_numbers,
)


@pytest.mark.parametrize(
    ("prefix", "end"),
    [
        (b"a", b"b"),
        (b"run/1/", b"run/10"),
        (b"a\xff", b"b"),
        (b"a\xff\xff", b"b"),
        (b"\xff", b"\0"),
        (b"\xff\xff", b"\0"),
        (b"", b"\0"),
        (b"a\x00", b"a\x01"),
        (b"\xfe", b"\xff"),
    ],
)
def test_where_a_prefix_ends(prefix: bytes, end: bytes) -> None:
    assert end_of_prefix(prefix) == end


@given(st.binary(min_size=1, max_size=4), st.binary(min_size=1, max_size=6))
def test_a_prefix_holds_what_begins_with_it_and_nothing_else(prefix: bytes, key: bytes) -> None:
    end = end_of_prefix(prefix)
    is_within = prefix <= key and (end == b"\0" or key < end)
    assert is_within == key.startswith(prefix)


def test_the_empty_prefix_is_everything() -> None:
    assert span(b"", True) == {"key": "AA==", "range_end": "AA=="}
    assert span(b"", False) == {"key": ""}


@pytest.mark.parametrize(
    ("code", "message", "verdict"),
    [
        (14, "etcdserver: no leader", Verdict.ELSEWHERE),
        (8, "etcdserver: too many requests", Verdict.ELSEWHERE),
        (14, "etcdserver: rpc not supported for learner", Verdict.ELSEWHERE),
        (14, "etcdserver: request timed out", Verdict.UNKNOWN),
        (14, "etcdserver: leader changed", Verdict.UNKNOWN),
        (14, "transport is closing", Verdict.UNKNOWN),
        (2, "context deadline exceeded", Verdict.UNKNOWN),
        (16, "etcdserver: invalid auth token", Verdict.STALE_TOKEN),
        (3, "etcdserver: revision of auth store is old", Verdict.STALE_TOKEN),
        (5, "etcdserver: requested lease not found", Verdict.LEASE_GONE),
        (11, "etcdserver: mvcc: required revision has been compacted", Verdict.COMPACTED),
        (3, "etcdserver: authentication failed, invalid user ID or password", Verdict.REFUSED),
        (7, "etcdserver: permission denied", Verdict.REFUSED),
        (8, "etcdserver: mvcc: database space exceeded", Verdict.REFUSED),
        (9, "etcdserver: authentication is not enabled", Verdict.REFUSED),
    ],
)
def test_what_a_complaint_means(code: int, message: str, verdict: Verdict) -> None:
    assert judge(Complaint(message, code=code)) is verdict
    assert judge(Complaint(message, grpc_code=code)) is verdict


def test_numbers_are_text_and_what_is_missing_has_its_default() -> None:
    line = (
        b'{"header":{"revision":"9"},"events":[{"kv":{"key":"YQ==","mod_revision":"7","lease":"3"}},'
        b'{"type":"DELETE","kv":{"key":"Yg==","mod_revision":"8"}}],"new in a later version":1}'
    )
    batch = decode_json(line, WatchAnswer).batch()
    assert batch.revision == 8
    assert [(each.kind, each.item.key, each.item.value, each.item.lease) for each in batch.changes] == [
        ("put", b"a", b"", 3),
        ("delete", b"b", b"", 0),
    ]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"header":{"revision":"x"}}', b'{"events":[]}', b"\xff"])
def test_junk_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_json(data, WatchAnswer)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3.5.1", (3, 5)), ("3.4.0-rc.1", (3, 4)), ("3.10", (3, 10)), ("4", None), ("", None), ("x.y", None)],
)
def test_version_numbers(text: str, numbers: tuple[int, int] | None) -> None:
    assert version_numbers(text) == numbers


@pytest.mark.parametrize(
    ("text", "is_secure", "found"),
    [
        ("h", False, ("http", "h", 2379)),
        ("h:1", True, ("https", "h", 1)),
        ("http://h:1", False, ("http", "h", 1)),
        ("https://h:1/", False, ("https", "h", 1)),
        (" [::1]:7 ", False, ("http", "::1", 7)),
        ("https://[::1]", False, ("https", "::1", 2379)),
    ],
)
def test_endpoints(text: str, is_secure: bool, found: tuple[str, str, int]) -> None:
    assert parse_etcd_endpoint(text, is_secure) == found


@pytest.mark.parametrize("text", ["", "http://", "ftp://h", "h:port", "h:99999", "h/path", "a b"])
def test_endpoints_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="endpoint"):
        parse_etcd_endpoint(text, False)
