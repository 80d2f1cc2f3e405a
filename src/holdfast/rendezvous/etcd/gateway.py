"""A client of etcd: keys, transactions and leases, over the JSON gateway of its v3 interface (etcd 3.4 and later).

Finding a member. A request goes to the member that answered last. If that one cannot be reached, does not answer, or
knows no leader, the next one is asked, and so on, round after round with growing pauses, until `request_timeout_s` is
over. A member gets an equal share of that time, so a frozen one does not use it up. An endpoint that will never work
(wrong certificate, not an etcd) is passed over; if all are like that, `EtcdRefused` is raised at once.

Repeating. Reads, puts, deletes and lease requests may be sent twice. A transaction that compares and writes may not:
once it may have reached a member it is not sent again but waits for its answer as long as the time allows. If there is
none, `Unavailable.is_unknown` says that it may have been carried out.

Connections. Each request takes an idle connection or opens one. No request waits beyond its deadline, even if the
answer arrives byte by byte (`_Connection`); only the lookup of a host name has the resolver's own limit. An idle
connection that has become readable was closed by etcd and is not used. Proxies and passwords of the environment are
ignored.

Errors by who can act: `Unavailable` (time), `EtcdRefused` (a person), `LeaseGone` (the caller: a new lease).
"""

from __future__ import annotations

import io
import random
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, RemoteDisconnected
from typing import Any

import msgspec

from holdfast.errors import HoldfastError, UserError
from holdfast.frozen import frozen
from holdfast.rendezvous.endpoints import endpoint_text, parse_rendezvous_endpoint
from holdfast.rendezvous.tls import ReloadingTls, TlsFiles

DEFAULT_PORT = 2379
OLDEST_VERSION = (3, 4)
MAX_ANSWER_BYTES = 8 << 20  # etcd itself takes values of 1.5 MiB by default, which base64 makes 2 MiB.

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_LEAST_ATTEMPT_S = 0.2
# With the second header a member that knows no leader says so at once instead of letting the request wait.
_HEADERS = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}


class EtcdError(HoldfastError):
    """Base of everything that can go wrong with etcd."""


class Unavailable(EtcdError):  # noqa: N818
    """No member carried the request out in time. `is_unknown`: a write may have been carried out all the same."""

    def __init__(self, problem: str, is_unknown: bool = False) -> None:
        super().__init__(problem + ("; whether the write has happened is unknown" if is_unknown else ""))
        self.is_unknown = is_unknown


class EtcdRefused(EtcdError):  # noqa: N818
    """Only a person can put this right: password, permission, certificate, version, or no etcd at the endpoint.
    Nothing was carried out."""


class LeaseGone(EtcdError):  # noqa: N818
    """The lease of a put does not exist any more. Nothing was carried out."""


# Requests, in the form that etcd expects. Bytes become base64 when they are encoded; the relation of a compare that
# names none is equality.


class Put(msgspec.Struct, frozen=True):
    key: bytes
    value: bytes
    lease: int = 0


class Get(msgspec.Struct, frozen=True):
    key: bytes


class Delete(msgspec.Struct, frozen=True):
    key: bytes


Operation = Put | Get | Delete
_OPERATION_FIELDS = {Put: "request_put", Get: "request_range", Delete: "request_delete_range"}


class Compare(msgspec.Struct, frozen=True):
    key: bytes
    target: str
    value: bytes | msgspec.UnsetType = msgspec.UNSET
    create_revision: int | msgspec.UnsetType = msgspec.UNSET


def is_missing(key: bytes) -> Compare:
    return Compare(key, "CREATE", create_revision=0)


def has_value(key: bytes, value: bytes) -> Compare:
    return Compare(key, "VALUE", value)


@frozen
class Transacted:
    """`values` has one entry for each `Get` of the branch that ran; None is a key that does not exist."""

    succeeded: bool
    values: tuple[bytes | None, ...] = ()


class Gateway:
    """Blocking; any number of threads may use it."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        user: str | None = None,
        password: str | None = None,
        tls: TlsFiles | None = None,
        request_timeout_s: float = 5.0,
    ) -> None:
        self.request_timeout_s = request_timeout_s
        self._members = [_Member(each, tls or TlsFiles()) for each in endpoints]
        self._share_s = max(request_timeout_s / len(self._members), _LEAST_ATTEMPT_S)
        self._preferred = 0
        self._credentials = None if user is None else msgspec.json.encode({"name": user, "password": password})
        self._token = ""
        self._closing = threading.Event()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close idle connections and end all pauses. Requests that wait for an answer end by their own deadline."""
        self._closing.set()
        for member in self._members:
            member.close()

    def get(self, key: bytes) -> bytes | None:
        """The value, or None if there is no such key. It sees every write that was finished before."""
        return self._send("/v3/kv/range", Get(key), is_write=False).value

    def put(self, key: bytes, value: bytes, lease: int = 0) -> None:
        self._send("/v3/kv/put", Put(key, value, lease))

    def delete(self, key: bytes) -> None:
        self._send("/v3/kv/deleterange", Delete(key))

    def transact(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> Transacted:
        """Carry out `then` if all compares hold, else `otherwise`; at once, and all of it or nothing."""
        fields = {
            "compare": compares,
            "success": [{_OPERATION_FIELDS[type(each)]: each} for each in then],
            "failure": [{_OPERATION_FIELDS[type(each)]: each} for each in otherwise],
        }
        is_write = not all(isinstance(each, Get) for each in (*then, *otherwise))
        answer = self._send("/v3/kv/txn", fields, is_write=is_write, is_repeatable=not (is_write and compares))
        found = (each.get("response_range") for each in answer.responses)
        return Transacted(answer.succeeded, tuple(each.value for each in found if each is not None))

    def grant_lease(self, ttl_s: int) -> int:
        """The id of a new lease. etcd may give it more time than asked for, never less."""
        return self._send("/v3/lease/grant", {"TTL": ttl_s}).lease

    def keep_alive(self, lease: int) -> int:
        """Renew a lease; returns the seconds that it has from now on, 0 if etcd does not know it any more."""
        return self._send("/v3/lease/keepalive", {"ID": lease}).ttl_s

    def revoke_lease(self, lease: int) -> None:
        """End a lease and delete the keys attached to it. It may have ended already."""
        try:
            self._send("/v3/lease/revoke", {"ID": lease})
        except LeaseGone:
            pass

    def check_version(self) -> None:
        """Raises `EtcdRefused` if etcd is older than the interface that this client speaks."""
        version = self._send("/version", None, is_write=False).etcdserver
        numbers = tuple(int(part) if part.isdecimal() else -1 for part in version.split(".")[:2])
        if numbers < OLDEST_VERSION:
            name = self._members[self._preferred].name
            raise EtcdRefused(f"etcd {version!r} at {name} is too old: holdfast needs 3.4 or later")

    def call(self, path: str, **fields: Any) -> None:
        """Any other request of the v3 interface, for its effect: `call("auth/role/add", name="reader")`."""
        self._send(f"/v3/{path}", fields, is_repeatable=False)

    def _send(self, path: str, fields: Any, *, is_write: bool = True, is_repeatable: bool = True) -> _Answer:
        """Ask one member after the other until one answers."""
        body = None if fields is None else msgspec.json.encode(fields)
        deadline = time.monotonic() + self.request_timeout_s
        failures: dict[int, _Failed] = {}
        is_unknown = False
        for number in self._turns(deadline):
            member = self._members[number]
            share_by = time.monotonic() + max(min(self._share_s, deadline - time.monotonic()), _LEAST_ATTEMPT_S)
            try:
                return self._ask(member, path, body, share_by, share_by if is_repeatable else max(share_by, deadline))
            except _Failed as failure:
                failures[number] = failure
                if self._preferred == number:
                    self._preferred = (number + 1) % len(self._members)
                is_unknown |= is_write and failure.may_have_happened
                if is_unknown and not is_repeatable:
                    break
                if len(failures) == len(self._members) and all(each.is_lasting for each in failures.values()):
                    raise EtcdRefused(f"etcd: {self._listed(failures)}") from None
        reason = "the client is closed" if self._closing.is_set() else self._listed(failures)
        raise Unavailable(f"etcd has not answered within {self.request_timeout_s:.2g} s: {reason}", is_unknown)

    def _listed(self, failures: dict[int, _Failed]) -> str:
        return "; ".join(f"{self._members[number].name}: {failure}" for number, failure in failures.items())

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

    def _ask(self, member: _Member, path: str, body: bytes | None, share_by: float, answer_by: float) -> _Answer:
        """Ask one member, with a token if etcd wants one; a request without a body needs none."""
        token = ""
        if self._credentials is not None and body is not None:
            token = self._token or self._authenticate(member, share_by)
        try:
            return member.ask(path, body, token, share_by, answer_by)
        except _StaleToken:
            if not token:
                raise
            return member.ask(path, body, self._authenticate(member, share_by), share_by, answer_by)

    def _authenticate(self, member: _Member, deadline: float) -> str:
        """A new token. Threads that ask at the same time get different ones, all of them good."""
        try:
            self._token = member.ask("/v3/auth/authenticate", self._credentials, "", deadline, deadline).token
        except _Failed as failure:
            failure.may_have_happened = False  # The caller's request was not sent.
            raise
        return self._token


# One member.


class _Member:
    """One endpoint and its idle connections. `name` is what errors call it."""

    def __init__(self, endpoint: str, files: TlsFiles) -> None:
        protocol, self._host, self._port = parse_etcd_endpoint(endpoint, is_secure=files.are_given)
        if protocol == "http" and files.are_given:
            raise UserError(f"etcd endpoint {endpoint!r} is plain http, but TLS files are given")
        self.name = endpoint_text(self._host, self._port)
        self._tls = _reloading(files) if protocol == "https" else None
        self._idle: list[_Connection] = []
        self._is_closed = False

    def ask(self, path: str, body: bytes | None, token: str, connect_by: float, answer_by: float) -> _Answer:
        """One request on one connection, which is kept if all of the answer was read."""
        headers = {**_HEADERS, "Authorization": token} if token else _HEADERS
        connection = self._take_idle() or self._connect(connect_by)
        is_reusable = False
        try:
            response = connection.ask(path, body, headers, answer_by)
            data = response.read(MAX_ANSWER_BYTES + 1)
            is_reusable = response.isclosed() and not response.will_close
        except (OSError, HTTPException, ValueError) as error:
            raise _failure(error, may_have_happened=True) from None
        finally:
            self._put_back(connection, is_reusable)
        if len(data) > MAX_ANSWER_BYTES:
            raise _not_etcd(f"more than {MAX_ANSWER_BYTES >> 20} MiB")
        if response.length:
            raise _Failed("the connection broke in the middle of the answer", may_have_happened=True)
        return _read(self.name, response.status, data)

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # Another thread was faster.
                break
            if not connection.is_readable():
                return connection
            connection.hang_up()
        return None

    def _put_back(self, connection: _Connection, is_reusable: bool) -> None:
        if not is_reusable:
            return connection.hang_up()
        self._idle.append(connection)
        return self.close() if self._is_closed else None

    def _connect(self, deadline: float) -> _Connection:
        try:
            sock = socket.create_connection((self._host, self._port), _left_s(deadline))
        except (OSError, UnicodeError) as error:
            raise _failure(error) from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock.settimeout(_left_s(deadline))
                sock = self._tls.context().wrap_socket(sock, server_hostname=self._host)
        except (OSError, ValueError) as error:
            sock.close()
            raise _failure(error) from None
        return _Connection(self._host, self._port, sock)

    def close(self) -> None:
        self._is_closed = True
        while connection := self._take_idle():
            connection.hang_up()


def parse_etcd_endpoint(endpoint: str, is_secure: bool) -> tuple[str, str, int]:
    """Protocol, host and port of `[http[s]://]host[:port]`."""
    protocol, separator, place = endpoint.strip().rpartition("://")
    if not separator:
        protocol = "https" if is_secure else "http"
    if protocol not in ("http", "https") or not place.strip("/"):
        raise UserError(f"etcd endpoint {endpoint!r} is not [http://|https://]host[:port]")
    return (protocol, *parse_rendezvous_endpoint(place.rstrip("/"), DEFAULT_PORT))


def _reloading(files: TlsFiles) -> ReloadingTls:
    return ReloadingTls(files.cert, files.key, files.ca, protocols=["http/1.1"])


class _Connection(io.RawIOBase):
    """One request at a time. `http.client` takes it for its socket; no wait on it goes beyond the deadline."""

    def __init__(self, host: str, port: int, sock: socket.socket) -> None:
        self._sock = sock
        self._deadline = 0.0
        self._http = HTTPConnection(host, port)
        self._http.auto_open = 0
        self._http.sock = self

    def ask(self, path: str, body: bytes | None, headers: dict[str, str], deadline: float) -> HTTPResponse:
        self._deadline = deadline
        self._http.request("GET" if body is None else "POST", path, body, headers)
        return self._http.getresponse()

    def is_readable(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def hang_up(self) -> None:
        self._sock.close()

    # What `http.client` uses of a socket.

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(_left_s(self._deadline))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_left_s(self._deadline))
        return self._sock.recv_into(buffer)

    def close(self) -> None:
        """Does nothing: `http.client` closes its socket after each answer, but this one may be kept."""


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


# Answers and failures.


class _KeyValue(msgspec.Struct, frozen=True):
    value: bytes = b""


class _Answer(msgspec.Struct, frozen=True):
    """All fields that are read of any answer. etcd leaves out zeros, empty texts and false."""

    header: dict[str, Any] | None = None
    etcdserver: str = ""
    token: str = ""
    kvs: tuple[_KeyValue, ...] = ()
    succeeded: bool = False
    responses: tuple[dict[str, _Answer], ...] = ()
    lease: int = msgspec.field(name="ID", default=0)
    ttl_s: int = msgspec.field(name="TTL", default=0)
    # The answer to a renewal is a stream of one line, which is either a result or an error.
    result: _Answer | None = None
    error: _Answer | str | None = None
    # Of an error.
    message: str = ""
    code: int = 0
    grpc_code: int = 0

    @property
    def value(self) -> bytes | None:
        return self.kvs[0].value if self.kvs else None


class _Failed(Exception):  # noqa: N818
    """A member has not answered. `is_lasting`: it never will, however often it is asked."""

    def __init__(self, text: str, *, may_have_happened: bool = False, is_lasting: bool = False) -> None:
        super().__init__(text)
        self.may_have_happened = may_have_happened
        self.is_lasting = is_lasting


class _StaleToken(EtcdRefused):
    """etcd does not know the token any more."""


# Made once, here: two threads must not make msgspec look at a type at the same time. etcd writes numbers as texts.
_answer_decoder = msgspec.json.Decoder(_Answer, strict=False)


def _read(name: str, status: int, data: bytes) -> _Answer:
    """What a member has answered. Raises what it means if that is not the answer to the request."""
    try:
        answer = _answer_decoder.decode(data)
        problem = ""
    except (ValueError, RecursionError) as error:
        answer = _Answer()
        problem = f": {error}"
    complaint = answer.error if isinstance(answer.error, _Answer) else answer
    if code := complaint.code or complaint.grpc_code:
        raise _meaning(name, code, complaint.message.removeprefix("etcdserver: "))
    if status >= 500:
        raise _Failed(f"HTTP status {status}", may_have_happened=True)
    if status == 200 and not data:  # A member that is about to end hangs up before the first line of a stream.
        raise _Failed("the answer is empty", may_have_happened=True)
    answer = answer.result or answer
    if status != 200 or (answer.header is None and not answer.etcdserver):
        raise _not_etcd(f"HTTP status {status}, {data[:80].decode(errors='replace').strip()!r}{problem}")
    return answer


_NOT_FOUND, _UNAUTHENTICATED = 5, 16
# Canceled, unknown, deadline exceeded, internal, unavailable, data loss: it may have been carried out.
_UNFINISHED = frozenset({1, 2, 4, 13, 14, 15})
_NOT_BEGUN = ("no leader", "too many requests", "not capable", "not supported for learner")


def _meaning(name: str, code: int, text: str) -> Exception:
    if code == _UNAUTHENTICATED or "revision of auth store is old" in text:
        return _StaleToken(f"etcd at {name}: {text}")
    if any(words in text for words in _NOT_BEGUN):
        return _Failed(text)
    if code == _NOT_FOUND and "lease not found" in text:
        return LeaseGone(f"etcd at {name}: {text}")
    if code in _UNFINISHED:
        return _Failed(text, may_have_happened=True)
    return EtcdRefused(f"etcd at {name}: {text}")


def _not_etcd(what: str) -> _Failed:
    return _Failed(f"this is not an answer of etcd: {what}", is_lasting=True)


_CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, RemoteDisconnected, ConnectionResetError)


def _failure(error: Exception, may_have_happened: bool = False) -> _Failed:
    """`may_have_happened`: the request was sent, at least in part."""
    if isinstance(error, ssl.SSLError) and not isinstance(error, (TimeoutError, *_CUT_OFF)):
        return _Failed(f"TLS: {error.reason or error}", is_lasting=True)
    if isinstance(error, UnicodeError):
        return _Failed("this cannot be the name of a host", is_lasting=True)
    if isinstance(error, TimeoutError):
        text = "no answer in time" if may_have_happened else "no connection in time"
    elif isinstance(error, _CUT_OFF):  # A member that is killed looks like one that expected the other protocol.
        text = "the connection was closed without an answer (is it http or https?)"
    else:
        text = (getattr(error, "strerror", None) or "the connection broke").lower()
    return _Failed(text, may_have_happened=may_have_happened)
