"""One endpoint of etcd: the gateway that has its v3 interface as JSON over HTTP.

What etcd itself objects to is an `Objection`, and `EtcdClient` decides what to make of it; if there is no answer of
etcd at all, that is a `Trouble` (`etcd_connections`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from holdfast.errors import UserError
from holdfast.rendezvous.decoding import decode_json
from holdfast.rendezvous.endpoints import endpoint_text, parse_rendezvous_endpoint
from holdfast.rendezvous.etcd_connections import Answer, Connections, Trouble
from holdfast.rendezvous.etcd_wire import Complained, Complaint, Streamed
from holdfast.rendezvous.tls import ReloadingTls

S = TypeVar("S", bound=msgspec.Struct)

DEFAULT_PORT = 2379
# A range over the members of a large run has to fit; it says that something else is at the other end, no more.
MAX_ANSWER_BYTES = 32 << 20

# A member that knows no leader says so at once instead of letting the request wait, and ends its streams.
_HEADERS = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}


class Objection(Exception):  # noqa: N818
    """etcd has answered that it will not."""

    def __init__(self, complaint: Complaint) -> None:
        super().__init__(complaint.message)
        self.complaint = complaint


class Gateway:
    """`name` is what errors call it. Any number of threads may ask at the same time."""

    def __init__(self, endpoint: str, tls: ReloadingTls | None = None) -> None:
        """`tls` is for an endpoint that speaks it; None if no certificates are given."""
        protocol, host, port = parse_etcd_endpoint(endpoint, is_secure=tls is not None)
        if protocol == "http" and tls is not None:
            raise UserError(f"etcd endpoint {endpoint!r} is plain http, but certificates are given")
        self.name = endpoint_text(host, port)
        if protocol == "https" and tls is None:
            tls = ReloadingTls(protocols=["http/1.1"])
        self._connections = Connections(host, port, tls)

    def ask(self, path: str, fields: Any, token: str, connect_s: float, answer_s: float) -> bytes:
        """The body of the answer to one request."""
        with self._send("POST", f"/v3/{path}", fields, token, connect_s, answer_s) as answer:
            return _whole(answer)

    def version(self, timeout_s: float) -> bytes:
        with self._send("GET", "/version", None, "", timeout_s, timeout_s) as answer:
            return _whole(answer)

    def stream(self, path: str, fields: Any, token: str, timeout_s: float) -> Answer:
        """An answer that goes on; see `lines_of`. It is the caller's to close."""
        answer = self._send("POST", f"/v3/{path}", fields, token, timeout_s, timeout_s)
        answer.may_be_kept = False  # Whoever hangs it up must not meet another request.
        return answer

    def _send(self, method: str, path: str, fields: Any, token: str, connect_s: float, answer_s: float) -> Answer:
        headers = {**_HEADERS, "Authorization": token} if token else _HEADERS
        body = None if fields is None else msgspec.json.encode(fields)
        answer = self._connections.ask(method, path, body, headers, connect_s, answer_s)
        if answer.status != 200:
            with answer:
                raise _objection(answer.status, _whole(answer))
        return answer

    def close(self) -> None:
        self._connections.close()


def parse_etcd_endpoint(endpoint: str, is_secure: bool) -> tuple[str, str, int]:
    """Protocol, host and port of `[http[s]://]host[:port]`."""
    protocol, separator, place = endpoint.strip().rpartition("://")
    if not separator:
        protocol = "https" if is_secure else "http"
    if protocol not in ("http", "https") or not place.strip("/"):
        raise UserError(f"etcd endpoint {endpoint!r} is not [http://|https://]host[:port]")
    return (protocol, *parse_rendezvous_endpoint(place.rstrip("/"), DEFAULT_PORT))


def read_as(data: bytes, kind: type[S]) -> S:
    if not data:  # A member that is about to end hangs up before the first line of a stream.
        raise Trouble("the answer is empty", may_have_happened=True)
    try:
        return decode_json(data, kind)
    except (ValueError, RecursionError) as error:
        raise not_etcd(f"{_excerpt(data)!r}: {error}") from None


def read_line_as(data: bytes, kind: type[S]) -> S:
    """The same for a line of a stream, which may be a complaint instead."""
    line = read_as(data, Streamed)
    if bytes(line.error):
        raise Objection(read_as(bytes(line.error), Complaint))
    return read_as(bytes(line.result) or b"null", kind)


def not_etcd(what: str) -> Trouble:
    return Trouble(f"this is not an answer of etcd: {what}", may_have_happened=True, is_lasting=True)


def lines_of(answer: Answer) -> Iterator[bytes]:
    """The lines of a stream as they come."""
    left = b""
    for piece in answer.pieces():
        *lines, left = (left + piece).split(b"\n")
        yield from (line for line in lines if line.strip())
        if len(left) > MAX_ANSWER_BYTES:
            raise not_etcd(f"a line of more than {MAX_ANSWER_BYTES >> 20} MiB")
    if left.strip():
        yield left


def _whole(answer: Answer) -> bytes:
    body = bytearray()
    for piece in answer.pieces():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise not_etcd(f"more than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(body)


def _objection(status: int, body: bytes) -> Exception:
    """What an answer with another status than 200 means."""
    complaint = _complaint_in(body)
    if complaint is not None:
        return Objection(complaint)
    if status >= 500:
        return Trouble(f"HTTP status {status}", may_have_happened=True)
    return not_etcd(f"HTTP status {status}, {_excerpt(body)!r}")


def _complaint_in(body: bytes) -> Complaint | None:
    """It stands by itself, or, if a stream was asked for, in an `error`."""
    try:
        return decode_json(body, Complaint)
    except (ValueError, RecursionError):
        pass
    try:
        return decode_json(body, Complained).error
    except (ValueError, RecursionError):
        return None


def _excerpt(data: bytes) -> str:
    return data[:80].decode(errors="replace").strip()
