"""Connections to one endpoint of etcd: HTTP, with or without TLS, kept for the next request.

A request has a deadline as a whole, whatever the other side does with it: `http.client` is given something that looks
like a socket and lets no wait go beyond the deadline (`_Wire`). The answer is read piece by piece; when its end was
read, the connection waits for the next request. One on which something can be read although nothing was asked has been
closed by the other side, and is not used again.

Whatever goes wrong is a `Trouble`, which says whether the request may have got through all the same. A connection that
turns out to be broken only when a request was sent is such a case; whether to ask again is up to `EtcdClient`.

Nothing is taken from the environment: no proxy, no passwords.
"""

from __future__ import annotations

import io
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, RemoteDisconnected
from typing import Any

from holdfast.rendezvous.tls import ReloadingTls

_PIECE_BYTES = 1 << 16
_MAX_IDLE = 8
_LEAST_S = 0.01

_CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, RemoteDisconnected, ConnectionResetError)


class Trouble(Exception):  # noqa: N818
    """An endpoint has not answered. `is_lasting`: it will not do so however often it is asked."""

    def __init__(self, text: str, *, may_have_happened: bool = False, is_lasting: bool = False) -> None:
        super().__init__(text)
        self.may_have_happened = may_have_happened
        self.is_lasting = is_lasting


class Connections:
    """Those to one endpoint. Any number of threads may ask at the same time."""

    def __init__(self, host: str, port: int, tls: ReloadingTls | None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._is_closed = False

    def ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], connect_s: float, answer_s: float
    ) -> Answer:
        """The answer as soon as it begins; all of it has to come within `answer_s`. It is the caller's to close."""
        deadline = time.monotonic() + max(answer_s, _LEAST_S)
        connection = self._take() or self._open(max(connect_s, _LEAST_S))
        try:
            response = connection.ask(method, path, body, headers, deadline)
        except (OSError, HTTPException, ValueError) as error:
            connection.close()
            raise _broken(error) from None
        return Answer(connection, response, self._put)

    def _take(self) -> _Connection | None:
        """One that waits for a request and is still open, if there is any."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not connection.is_readable():
                return connection
            connection.close()

    def _put(self, connection: _Connection) -> None:
        with self._lock:
            is_kept = not self._is_closed and len(self._idle) < _MAX_IDLE
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()

    def _open(self, timeout_s: float) -> _Connection:
        try:
            sock = socket.create_connection((self._host, self._port), timeout_s)
        except OSError as error:
            raise _unconnected(error) from None
        except UnicodeError:
            raise Trouble(f"{self._host!r} cannot be the name of a host", is_lasting=True) from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secured = sock if self._tls is None else self._tls.context().wrap_socket(sock, server_hostname=self._host)
        except (OSError, ValueError) as error:
            sock.close()
            raise _unconnected(error) from None
        return _Connection(self._host, self._port, secured)

    def close(self) -> None:
        """Those that are in use are closed when they are not any more."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class _Connection:
    """One request at a time."""

    def __init__(self, host: str, port: int, sock: socket.socket) -> None:
        self._sock = sock
        self.wire = _Wire(sock)
        self._http = HTTPConnection(host, port)
        self._http.auto_open = 0
        self._http.sock = self.wire

    def ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], deadline: float
    ) -> HTTPResponse:
        self.wire.deadline, self.wire.silence_s = deadline, None
        self._http.request(method, path, body, headers)
        return self._http.getresponse()

    def is_readable(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def hang_up(self) -> None:
        """From any thread: whoever reads finds the end."""
        try:
            # Not that of a TLS socket, which would have whoever reads go on without TLS.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            pass  # It has ended by itself.

    def close(self) -> None:
        self._http.close()
        self._sock.close()


class _Wire:
    """What `http.client` takes for a socket. A wait ends at `deadline`, or, if there is one, after `silence_s`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.deadline = 0.0
        self.silence_s: float | None = None

    def sendall(self, data: bytes) -> None:
        self._set_timeout()
        self._sock.sendall(data)

    def receive(self, buffer: Any) -> int:
        self._set_timeout()
        return self._sock.recv_into(buffer)

    def _set_timeout(self) -> None:
        left_s = self.deadline - time.monotonic() if self.silence_s is None else self.silence_s
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Incoming(self), _PIECE_BYTES)

    def close(self) -> None:
        """The connection's owner does that: an answer may still be read when `http.client` is done with it."""


class _Incoming(io.RawIOBase):
    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._wire.receive(buffer)


class Answer:
    """What comes back. Read by one thread; `hang_up` is for any."""

    def __init__(
        self, connection: _Connection, response: HTTPResponse, give_back: Callable[[_Connection], None]
    ) -> None:
        self.status = response.status
        self._connection = connection
        self._response = response
        self._give_back = give_back
        self._is_whole = False
        self._is_closed = False
        self.may_be_kept = True
        """Whether the connection may be used again when all was read."""

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pieces(self) -> Iterator[bytes]:
        """The body, as it comes."""
        try:
            while piece := self._read():
                yield piece
        except (OSError, HTTPException, ValueError) as error:
            raise _broken(error) from None
        if self._response.length:
            raise Trouble("the connection has broken", may_have_happened=True)
        self._is_whole = True

    def _read(self) -> bytes:
        # What has a length is not counted by `read1`; what has none, a stream, must not wait for more than there is.
        read = self._response.read if self._response.length is not None else self._response.read1
        return read(_PIECE_BYTES)

    def be_patient(self, silence_s: float) -> None:
        """From now on there is no deadline, but so long a silence is a `Trouble`."""
        self._connection.wire.silence_s = silence_s

    def hang_up(self) -> None:
        """The thread that reads finds the end."""
        self._connection.hang_up()

    def close(self) -> None:
        """May be called any number of times. The connection is kept if all was read, and nothing speaks against it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._response.close()
        if self._is_whole and self.may_be_kept and not self._response.will_close:
            self._give_back(self._connection)
        else:
            self._connection.close()


def _unconnected(error: OSError | ValueError) -> Trouble:
    """Nothing was sent."""
    if isinstance(error, TimeoutError):
        return Trouble("no connection in time")
    trouble = _broken(error)
    if isinstance(error, _CUT_OFF) or trouble.is_lasting:
        return Trouble(str(trouble), is_lasting=trouble.is_lasting)
    return Trouble(_reason(error) or "no connection")


def _broken(error: Exception) -> Trouble:
    # The end of a TLS connection without a farewell is that of the member, not a disagreement about certificates.
    if isinstance(error, ssl.SSLError) and not isinstance(error, _CUT_OFF):
        return Trouble(f"TLS: {error.reason or error}", is_lasting=True)
    if isinstance(error, TimeoutError):
        return Trouble("no answer in time", may_have_happened=True)
    # What listens in vain for the other kind of connection hangs up like a member that is killed.
    is_cut_off = isinstance(error, _CUT_OFF)
    text = "the connection was closed without an answer (is it http or https?)" if is_cut_off else _reason(error)
    return Trouble(text or "the connection has broken", may_have_happened=True)


def _reason(error: Exception) -> str:
    if not isinstance(error, OSError) or not error.strerror:
        return ""
    return error.strerror.lower() + (f": {error.filename}" if error.filename else "")
