"""One endpoint of etcd, over HTTP. The only module that knows the `etcd3gw` package.

`etcd3gw` knows where the gateway is and how TLS is set up. It has no notion of several endpoints, of a time limit for
one request, of tokens, and of streams that break; the requests are therefore made here, through its session, and the
rest is up to `EtcdClient` (see docs/decisions/0022-etcd-through-its-gateway.md).

Whatever goes wrong with an endpoint is a `Trouble`, which says whether the request may have got through all the same.
What etcd itself objects to is a `Complaint`, and `EtcdClient` decides what to make of it.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from holdfast.errors import UserError
from holdfast.rendezvous.decoding import decode_json
from holdfast.rendezvous.endpoints import parse_rendezvous_endpoint
from holdfast.rendezvous.etcd_wire import Complained, Complaint, Streamed

if TYPE_CHECKING:
    from types import ModuleType

    import requests

S = TypeVar("S", bound=msgspec.Struct)

DEFAULT_PORT = 2379
# A range over the members of a large run has to fit; it says that something else is at the other end, no more.
MAX_ANSWER_BYTES = 32 << 20
_PIECE_BYTES = 1 << 16
_POOL_SIZE = 8

# A member that knows no leader says so at once instead of letting the request wait, and ends its streams.
_HEADERS = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}


class Trouble(Exception):  # noqa: N818
    """An endpoint has not answered. `is_lasting`: it will not do so however often it is asked."""

    def __init__(self, text: str, *, may_have_happened: bool = False, is_lasting: bool = False) -> None:
        super().__init__(text)
        self.may_have_happened = may_have_happened
        self.is_lasting = is_lasting


class Objection(Exception):  # noqa: N818
    """etcd has answered that it will not."""

    def __init__(self, complaint: Complaint) -> None:
        super().__init__(complaint.message)
        self.complaint = complaint


def import_etcd3gw() -> ModuleType:
    try:
        import etcd3gw
    except ImportError as error:
        raise UserError(f"etcd needs a package that is not there ({error}): pip install holdfast[etcd]") from None
    return etcd3gw


class Gateway:
    """`name` is what errors call it. Any number of threads may ask at the same time."""

    def __init__(self, endpoint: str, ca_cert: str | None, cert: str | None, key: str | None) -> None:
        protocol, host, port = parse_etcd_endpoint(endpoint, is_secure=bool(ca_cert or cert))
        if protocol == "http" and (ca_cert or cert):
            raise UserError(f"etcd endpoint {endpoint!r} is plain http, but certificates are given")
        client = import_etcd3gw().Etcd3Client(
            host, port, protocol, ca_cert=ca_cert, cert_cert=cert, cert_key=key, api_path="/v3/"
        )
        self._client = client
        self.name: str = client.base_url.partition("://")[2]
        self._session: requests.Session = client.session
        self._prepare_session(cert, key)

    def _prepare_session(self, cert: str | None, key: str | None) -> None:
        from requests.adapters import HTTPAdapter

        # Proxies, other certificates and passwords that the environment has for the web at large are not for etcd.
        self._session.trust_env = False
        if cert:
            self._session.cert = (cert, key or cert)
        for prefix in ("http://", "https://"):
            self._session.mount(prefix, HTTPAdapter(pool_connections=1, pool_maxsize=_POOL_SIZE))

    def ask(self, path: str, fields: Any, token: str, connect_s: float, read_s: float) -> bytes:
        """The body of the answer to one request, within about `read_s`."""
        deadline = time.monotonic() + read_s
        with self._send("POST", self._client.get_url(path), fields, token, connect_s, read_s) as response:
            return b"".join(_pieces(response, deadline))

    def version(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        with self._send("GET", f"{self._client.base_url}/version", None, "", timeout_s, timeout_s) as response:
            return b"".join(_pieces(response, deadline))

    def stream(self, path: str, fields: Any, token: str, timeout_s: float) -> requests.Response:
        """An answer that goes on; see `lines_of`. It is the caller's to close."""
        return self._send("POST", self._client.get_url(path), fields, token, timeout_s, timeout_s)

    def _send(
        self, method: str, url: str, fields: Any, token: str, connect_s: float, read_s: float
    ) -> requests.Response:
        from requests.exceptions import RequestException

        headers = {**_HEADERS, "Authorization": token} if token else _HEADERS
        try:
            response = self._session.request(
                method,
                url,
                data=None if fields is None else json.dumps(fields),
                headers=headers,
                timeout=(max(connect_s, 0.01), max(read_s, 0.01)),
                allow_redirects=False,
                stream=True,
            )
        except (RequestException, OSError, ValueError) as error:
            raise _trouble(error) from None
        if response.status_code != 200:
            with response:
                raise _objection(response, time.monotonic() + read_s)
        return response

    def close(self) -> None:
        self._session.close()


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
    except ValueError as error:
        raise not_etcd(f"{_excerpt(data)!r}: {error}") from None


def read_line_as(data: bytes, kind: type[S]) -> S:
    """The same for a line of a stream, which may be a complaint instead."""
    line = read_as(data, Streamed)
    if bytes(line.error):
        raise Objection(read_as(bytes(line.error), Complaint))
    return read_as(bytes(line.result) or b"null", kind)


def not_etcd(what: str) -> Trouble:
    return Trouble(f"this is not an answer of etcd: {what}", may_have_happened=True, is_lasting=True)


def lines_of(response: requests.Response) -> Iterator[bytes]:
    """The lines of a stream as they come."""
    left = b""
    for piece in _pieces(response, None):
        *lines, left = (left + piece).split(b"\n")
        yield from (line for line in lines if line.strip())
        if len(left) > MAX_ANSWER_BYTES:
            raise not_etcd(f"a line of more than {MAX_ANSWER_BYTES >> 20} MiB")
    if left.strip():
        yield left


def give_patience(response: requests.Response, silence_s: float) -> None:
    """From now on so long a silence of a stream is a `Trouble`; before, it was the time-out of the request."""
    sock = getattr(response.raw.connection, "sock", None)
    if sock is not None:
        sock.settimeout(silence_s)


def hang_up(response: requests.Response) -> None:
    """Ends a stream that another thread reads from."""
    try:
        response.raw.shutdown()
    except (OSError, RuntimeError, ValueError):
        pass  # It has ended by itself.


def _pieces(response: requests.Response, deadline: float | None) -> Iterator[bytes]:
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    size = 0
    try:
        for piece in response.iter_content(_PIECE_BYTES):
            yield piece
            size += len(piece)
            if deadline is not None and size > MAX_ANSWER_BYTES:
                raise not_etcd(f"more than {MAX_ANSWER_BYTES >> 20} MiB")
            if deadline is not None and time.monotonic() > deadline:
                raise Trouble("the answer is too slow", may_have_happened=True)
    except (RequestException, HTTPError, OSError, AttributeError, ValueError) as error:
        # An AttributeError is what a connection that was hung up meanwhile may come to.
        raise _trouble(error) from None


def _objection(response: requests.Response, deadline: float) -> Exception:
    """What an answer with another status than 200 means."""
    body = b"".join(_pieces(response, deadline))
    complaint = _complaint_in(body)
    if complaint is not None:
        return Objection(complaint)
    if response.status_code >= 500:
        return Trouble(f"HTTP status {response.status_code}", may_have_happened=True)
    return not_etcd(f"HTTP status {response.status_code}, {_excerpt(body)!r}")


def _complaint_in(body: bytes) -> Complaint | None:
    """It stands by itself, or, if a stream was asked for, in an `error`."""
    try:
        return decode_json(body, Complaint)
    except ValueError:
        pass
    try:
        return decode_json(body, Complained).error
    except ValueError:
        return None


def _excerpt(data: bytes) -> str:
    return data[:80].decode(errors="replace").strip()


def _trouble(error: BaseException) -> Trouble:
    from http.client import RemoteDisconnected

    from requests import exceptions as http
    from urllib3 import exceptions as urllib3

    causes = list(_causes(error))
    if isinstance(error, http.ConnectTimeout):
        return Trouble("no connection in time")
    for cause in causes:
        # The end of a TLS connection without a farewell is that of the member, not a disagreement about certificates.
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return Trouble(f"TLS: {cause.reason or cause}", is_lasting=True)
    reason = next((str(each.strerror).lower() for each in causes if isinstance(each, OSError) and each.strerror), "")
    if any(isinstance(cause, urllib3.NewConnectionError) for cause in causes):
        return Trouble(reason or "no connection")
    if any(isinstance(cause, TimeoutError | urllib3.ReadTimeoutError | http.ReadTimeout) for cause in causes):
        return Trouble("no answer in time", may_have_happened=True)
    if isinstance(error, http.InvalidURL | http.InvalidSchema):
        return Trouble(str(error), is_lasting=True)
    # What listens in vain for the other kind of connection hangs up like a member that is killed.
    cut_off = (ssl.SSLEOFError, RemoteDisconnected, ConnectionResetError)
    is_cut_off = any(isinstance(cause, cut_off) for cause in causes)
    text = "the connection was closed without an answer (is it http or https?)" if is_cut_off else reason
    return Trouble(text or "the connection has broken", may_have_happened=True)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and whatever it was made of, outermost first. urllib3 also keeps causes among its arguments."""
    seen: set[int] = set()
    waiting: list[Any] = [error]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__, getattr(each, "reason", None), *each.args]
