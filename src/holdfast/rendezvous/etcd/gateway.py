"""A client of etcd: keys, transactions and leases, over the JSON gateway of its v3 interface (etcd 3.4 and later).

Finding a member. A request goes to the member that answered last, then to the others by turns, with growing pauses,
until `request_timeout_s` is over. Each member gets an equal share of that time, so a frozen one does not use it up. A
member that will never work (wrong certificate, not an etcd) is passed over; if all are so, `EtcdRefused` is raised at
once.

Repeating. Every request may be carried out twice, or after the caller has given up. Callers write with transactions
whose condition does not hold any more once they were carried out.

Connections. Each request has its own, which the member closes after its answer: a run sends one request a second. No
request waits beyond its deadline, even if the answer arrives byte by byte; only the lookup of a host name has the
resolver's own limit. Proxies of the environment are ignored.

Errors by who can act: `Unavailable` (time), `EtcdRefused` (a person), `LeaseGone` (the caller: a new lease).
"""

from __future__ import annotations

import contextlib
import io
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPException, HTTPResponse, RemoteDisconnected
from types import SimpleNamespace
from typing import Any

import msgspec

from holdfast.errors import HoldfastError, UserError
from holdfast.rendezvous.endpoints import endpoint_text, parse_rendezvous_endpoint
from holdfast.tls import ReloadingTls

DEFAULT_PORT = 2379
MAX_ANSWER_BYTES = 8 << 20  # etcd itself takes values of 1.5 MiB by default, which base64 makes 2 MiB.

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_LEAST_ATTEMPT_S = 0.2
_READ_BYTES = 1 << 16
# With the last header a member that knows no leader says so at once instead of letting the request wait.
_HEADERS = "Content-Type: application/json\r\nConnection: close\r\nGrpc-Metadata-hasleader: true\r\n"


class EtcdError(HoldfastError):
    pass


class Unavailable(EtcdError):  # noqa: N818
    """No answer in time. The request may have been carried out all the same, or may yet be."""


class EtcdRefused(EtcdError):  # noqa: N818
    """Nothing was carried out: wrong password, permission, certificate or version, or no etcd at the endpoint."""


class _Unusable(EtcdRefused):
    """This endpoint will never answer; another one may."""


class _StaleToken(EtcdRefused):
    pass


class LeaseGone(EtcdError):  # noqa: N818
    """The lease of a put does not exist any more. Nothing was carried out."""


# Requests and answers, in the form of etcd. Bytes are base64 on the wire, and a compare that names no relation is
# equality. etcd writes numbers as texts, and leaves out zeros, empty texts and false.
Fields = dict[str, Any]


def put(key: bytes, value: bytes, lease: int = 0) -> Fields:
    return {"request_put": {"key": key, "value": value, "lease": lease}}


def delete(key: bytes) -> Fields:
    return {"request_delete_range": {"key": key}}


def is_missing(key: bytes) -> Fields:
    return {"key": key, "target": "CREATE", "create_revision": 0}


def has_value(key: bytes, value: bytes) -> Fields:
    return {"key": key, "target": "VALUE", "value": value}


class _KeyValue(msgspec.Struct, frozen=True):
    value: bytes = b""


class Reply(msgspec.Struct, frozen=True):
    """All fields that are read of any answer."""

    header: dict[str, Any] | None = None
    etcdserver: str = ""
    token: str = ""
    kvs: tuple[_KeyValue, ...] = ()
    succeeded: bool = False
    responses: tuple[dict[str, Reply], ...] = ()
    lease: int = msgspec.field(name="ID", default=0)
    ttl_s: int = msgspec.field(name="TTL", default=0)
    # The answer to a renewal is a stream of one line, which is either a result or an error.
    result: Reply | None = None
    error: Reply | str | None = None
    message: str = ""
    code: int = 0
    grpc_code: int = 0

    @property
    def value(self) -> bytes | None:
        return self.kvs[0].value if self.kvs else None


# Made once, here: two threads must not make msgspec look at a type at the same time.
_reply_decoder = msgspec.json.Decoder(Reply, strict=False)


class Gateway:
    """Blocking; any number of threads may use it. `tls` is as in `TlsFiles`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        user: str = "",
        password: str | None = None,
        tls: Sequence[str] = (),
        request_timeout_s: float = 5.0,
    ) -> None:
        self._timeout_s = request_timeout_s
        self._members = [_Member(each, tls) for each in endpoints]
        self._preferred = 0
        self._credentials = msgspec.json.encode({"name": user, "password": password}) if user else None
        self._token = ""
        self._closing = threading.Event()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all pauses. Requests that wait for an answer end by their own deadline."""
        self._closing.set()

    def get(self, key: bytes) -> bytes | None:
        """The value, or None if there is no such key. It sees every write that was finished before."""
        return self._send("/v3/kv/range", {"key": key}).value

    def put(self, key: bytes, value: bytes, lease: int = 0) -> None:
        self._send("/v3/kv/put", {"key": key, "value": value, "lease": lease})

    def delete(self, key: bytes) -> None:
        self._send("/v3/kv/deleterange", {"key": key})

    def transact(self, compare: Fields, then: list[Fields], otherwise: bytes) -> tuple[bool, bytes | None]:
        """If the compare holds carry out `then`, all of it or nothing. Whether it held, and if not the value of the key
        `otherwise` at that moment."""
        fields = {"compare": [compare], "success": then, "failure": [{"request_range": {"key": otherwise}}]}
        done = self._send("/v3/kv/txn", fields)
        return done.succeeded, None if done.succeeded else done.responses[0]["response_range"].value

    def grant_lease(self, ttl_s: int) -> int:
        """The id of a new lease. etcd may give it more time than asked for, never less."""
        return self._send("/v3/lease/grant", {"TTL": ttl_s}).lease

    def keep_alive(self, lease: int) -> int:
        """Renew a lease; returns the seconds that it has from now on, 0 if etcd does not know it any more."""
        return self._send("/v3/lease/keepalive", {"ID": lease}).ttl_s

    def time_left_s(self, lease: int) -> int:
        """Until the lease ends; 0 or less if it has ended."""
        return self._send("/v3/lease/timetolive", {"ID": lease}).ttl_s

    def revoke_lease(self, lease: int) -> None:
        """End a lease and delete the keys attached to it. It may have ended already."""
        with contextlib.suppress(LeaseGone):
            self._send("/v3/lease/revoke", {"ID": lease})

    def check_version(self) -> None:
        """Raises `EtcdRefused` if etcd is older than the interface that this client speaks."""
        version = self._send("/version", None).etcdserver
        numbers = [int(part) if part.isdecimal() else -1 for part in version.split(".")[:2]]
        if numbers < [3, 4]:
            where = self._members[self._preferred].name
            raise EtcdRefused(f"etcd {version!r} at {where} is too old: holdfast needs 3.4 or later")

    def _send(self, path: str, fields: Fields | None) -> Reply:
        """Ask one member after the other until one answers."""
        body = None if fields is None else msgspec.json.encode(fields)
        deadline = time.monotonic() + self._timeout_s
        failures: dict[str, EtcdError] = {}
        for number in self._turns(deadline):
            member = self._members[number]
            share_s = min(self._timeout_s / len(self._members), deadline - time.monotonic())
            try:
                return self._ask(member, path, body, time.monotonic() + max(share_s, _LEAST_ATTEMPT_S))
            except (Unavailable, _Unusable) as failure:
                failures[member.name] = failure
                if self._preferred == number:
                    self._preferred = (number + 1) % len(self._members)
            if all(isinstance(failures.get(each.name), _Unusable) for each in self._members):
                raise EtcdRefused(f"etcd: {_listed(failures)}")
        reason = "the client is closed" if self._closing.is_set() else _listed(failures)
        raise Unavailable(f"etcd has not answered within {self._timeout_s:.2g} s: {reason}")

    def _turns(self, deadline: float) -> Iterator[int]:
        """The members by turns, the one that worked last first, until the time is up."""
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            first = self._preferred
            for offset in range(len(self._members)):
                yield (first + offset) % len(self._members)
                if time.monotonic() >= deadline or self._closing.is_set():
                    return
            self._closing.wait(min(deadline - time.monotonic(), pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, member: _Member, path: str, body: bytes | None, deadline: float) -> Reply:
        """Ask one member, with a token if etcd wants one; a request without a body needs none."""
        if self._credentials is None or body is None:
            return member.ask(path, body, "", deadline)
        try:
            return member.ask(path, body, self._token or self._authenticate(member, deadline), deadline)
        except _StaleToken:
            return member.ask(path, body, self._authenticate(member, deadline), deadline)

    def _authenticate(self, member: _Member, deadline: float) -> str:
        """A new token. Threads that ask at the same time get different ones, all of them good."""
        self._token = member.ask("/v3/auth/authenticate", self._credentials, "", deadline).token
        return self._token


class _Member:
    """`name` is what errors call it."""

    def __init__(self, endpoint: str, files: Sequence[str]) -> None:
        protocol, self._host, self._port = parse_etcd_endpoint(endpoint, is_secure=any(files))
        self.name = endpoint_text(self._host, self._port)
        self._tls = ReloadingTls(*files) if protocol == "https" else None

    def ask(self, path: str, body: bytes | None, token: str, deadline: float) -> Reply:
        method, content = ("GET", b"") if body is None else ("POST", body)
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.name}\r\n{_HEADERS}Content-Length: {len(content)}\r\n"
        head += f"Authorization: {token}\r\n\r\n" if token else "\r\n"
        received = bytearray()
        try:
            with self._connect(deadline) as sock:
                _within(deadline, sock).sendall(head.encode() + content)
                while len(received) <= MAX_ANSWER_BYTES and (piece := _within(deadline, sock).recv(_READ_BYTES)):
                    received += piece
            if len(received) > MAX_ANSWER_BYTES:
                raise _Unusable(f"{_NOT_ETCD}: more than {MAX_ANSWER_BYTES >> 20} MiB")
            source: Any = SimpleNamespace(makefile=lambda _: io.BytesIO(received))
            response = HTTPResponse(source)
            response.begin()
            return _read(self.name, response.status, response.read())
        except (OSError, HTTPException, ValueError) as error:
            raise _failure(error) from None

    def _connect(self, deadline: float) -> socket.socket:
        sock = socket.create_connection((self._host, self._port), _left_s(deadline))
        if self._tls is None:
            return sock
        with sock:  # Its descriptor moves to the other one.
            return self._tls.context().wrap_socket(_within(deadline, sock), server_hostname=self._host)


def _left_s(deadline: float) -> float:
    if (left_s := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left_s


def _within(deadline: float, sock: socket.socket) -> socket.socket:
    """For the next call, which must not last longer."""
    sock.settimeout(_left_s(deadline))
    return sock


def _listed(failures: dict[str, EtcdError]) -> str:
    return "; ".join(f"{name}: {failure}" for name, failure in failures.items())


def parse_etcd_endpoint(endpoint: str, is_secure: bool) -> tuple[str, str, int]:
    """Protocol, host and port of `[http[s]://]host[:port]`."""
    protocol, separator, place = endpoint.strip().rpartition("://")
    if not separator:
        protocol = "https" if is_secure else "http"
    if protocol not in ("http", "https") or not place.strip("/"):
        raise UserError(f"etcd endpoint {endpoint!r} is not [http://|https://]host[:port]")
    return (protocol, *parse_rendezvous_endpoint(place.rstrip("/"), DEFAULT_PORT))


_NOT_ETCD = "this is not an answer of etcd"
_NOT_FOUND, _UNAUTHENTICATED = 5, 16
# Canceled, unknown, deadline exceeded, internal, unavailable, data loss.
_PASSING = frozenset({1, 2, 4, 13, 14, 15})
_CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, RemoteDisconnected, ConnectionResetError)


def _read(name: str, status: int, data: bytes) -> Reply:
    """Raises an error if it is not the answer to the request."""
    answer, problem = Reply(), ""
    try:
        answer = _reply_decoder.decode(data)
    except (ValueError, RecursionError) as error:
        problem = f": {error}"
    complaint = answer.error if isinstance(answer.error, Reply) else answer
    if code := complaint.code or complaint.grpc_code:
        raise _meaning(name, code, complaint.message.removeprefix("etcdserver: "))
    if status >= 500:
        raise Unavailable(f"HTTP status {status}")
    if status == 200 and not data:  # A member that is about to end hangs up before the first line of a stream.
        raise Unavailable("the answer is empty")
    answer = answer.result or answer
    if status != 200 or (answer.header is None and not answer.etcdserver):
        raise _Unusable(f"{_NOT_ETCD}: HTTP status {status}, {data[:80].decode(errors='replace').strip()!r}{problem}")
    return answer


def _meaning(name: str, code: int, text: str) -> EtcdError:
    if code == _UNAUTHENTICATED or "revision of auth store is old" in text:
        return _StaleToken(f"etcd at {name}: {text}")
    if code == _NOT_FOUND and "lease not found" in text:
        return LeaseGone(f"etcd at {name}: {text}")
    if code in _PASSING or "too many requests" in text:
        return Unavailable(text)
    return EtcdRefused(f"etcd at {name}: {text}")


def _failure(error: Exception) -> EtcdError:
    if isinstance(error, ssl.SSLError) and not isinstance(error, (TimeoutError, *_CUT_OFF)):
        return _Unusable(f"TLS: {error.reason or error}")
    if isinstance(error, TimeoutError):
        return Unavailable("no answer in time")
    if isinstance(error, _CUT_OFF):  # A member that is killed looks like one that expected the other protocol.
        return Unavailable("the connection was closed without an answer (is it http or https?)")
    return Unavailable((getattr(error, "strerror", None) or "the connection broke").lower())
