"""A small HTTP server for telemetry, in a thread of its own, that cannot harm the process it runs in.

It answers GET and HEAD, and POST where a server takes it, one question a connection. It never waits for a caller: each
gets a few seconds and a few kilobytes to ask, at most 500 are let in a second, and if too many are there at once the
oldest is dropped for the newest. If the port cannot be opened, the log has one warning: telemetry never ends a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.frozen import field, frozen
from holdfast.log import Logger
from holdfast.loop import release_in_children

logger = Logger(__name__)

_MOST_CALLERS = 32
_CALL_LIMIT_S = 5.0
_CALL_LIMIT_BYTES = 8192
_BODY_LIMIT_BYTES = 4096
_STOP_PATIENCE_S = 2.0
_SHORTAGE_PAUSE_S = 1.0
_BETWEEN_CALLERS_S = 0.002
_KEPT_S = 1.0


@frozen
class Page:
    """An answer."""

    status: int
    body: bytes
    content_type: str = "application/json"
    more_headers: str = ""

    @classmethod
    def of(cls, status: int, content: Any, more_headers: str = "") -> Page:
        return cls(status, json.dumps(content).encode() + b"\n", more_headers=more_headers)

    def encoded(self, *, has_body: bool = True) -> bytes:
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n"
            f"Content-Type: {self.content_type}\r\nContent-Length: {len(self.body)}\r\n"
            f"Cache-Control: no-store\r\nConnection: close\r\n{self.more_headers}\r\n"
        )
        return head.encode() + (self.body if has_body else b"")


NOT_ALLOWED = Page.of(405, {"reason": "only GET and HEAD are answered"}, "Allow: GET, HEAD\r\n")


@frozen
class Request:
    """`path` is without a query. `is_head`: only the head of the answer is wanted. Of a POST, `headers` by their names
    in small letters, and the body."""

    path: str
    is_head: bool = False
    is_post: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def read_request(said: bytes) -> Request | Page | None:
    """The request in what a caller has sent; the answer if it is malformed, None if it is incomplete."""
    if b"\r\n\r\n" not in said and b"\n\n" not in said:
        too_long = len(said) >= _CALL_LIMIT_BYTES
        return Page.of(431, {"reason": f"more than {_CALL_LIMIT_BYTES} bytes"}) if too_long else None
    words = said.split(b"\n", 1)[0].split()
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return Page.of(400, {"reason": "not a request of HTTP/1"})
    path = words[1].partition(b"?")[0].decode("latin-1")
    if words[0] == b"POST":
        return _read_post(said, path)
    return Request(path, words[0] == b"HEAD") if words[0] in (b"GET", b"HEAD") else NOT_ALLOWED


def _read_post(said: bytes, path: str) -> Request | Page | None:
    """Without `Content-Length` there is no body."""
    head, _, body = said.partition(b"\r\n\r\n") if b"\r\n\r\n" in said else said.partition(b"\n\n")
    lines = (line.partition(":") for line in head.decode("latin-1").splitlines()[1:])
    headers = {name.strip().lower(): text.strip() for name, _, text in lines}
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isdecimal() or len(length) > 9:
        return Page.of(411, {"reason": "a body needs a Content-Length"})
    if int(length) > _BODY_LIMIT_BYTES:
        return Page.of(413, {"reason": f"a body has at most {_BODY_LIMIT_BYTES} bytes"})
    return None if len(body) < int(length) else Request(path, False, True, headers, body[: int(length)])


class HttpServer:
    """Serves `page(path)` between `start` and `stop`; it may be started again. `what` names it in the log, `where` its
    place. `open_socket` returns a bound socket, and raises OSError or HoldfastError."""

    def __init__(self, what: str, where: str, open_socket: Callable[[], socket.socket]) -> None:
        self._what, self._where, self._open_socket = what, where, open_socket
        self._listener: socket.socket | None = None
        self._callers: dict[socket.socket, asyncio.Task[None]] = {}  # In the order in which they came.
        release_in_children(self)

    async def page(self, path: str) -> Page:
        """In the server's thread."""
        raise NotImplementedError

    async def post(self, request: Request, peer: str) -> Page:
        """The same, of a POST by a caller at that address."""
        return NOT_ALLOWED

    def start(self) -> None:
        """Serve from now on. Does nothing if it serves already, and warns if it cannot."""
        if self._listener is not None:
            return
        try:
            with contextlib.ExitStack() as undo:
                listener = undo.enter_context(self._open_socket())
                listener.listen(128)
                listener.setblocking(False)
                runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
                runner.get_loop()  # Made here, so that a lack of descriptors raises here.
                self._thread = threading.Thread(
                    target=self._run, args=(runner, listener), name="holdfast-http", daemon=True
                )
                self._listener = listener
                self._thread.start()
                undo.pop_all()
        except HoldfastError as error:
            logger.warning("no %s: %s", self._what, error)
        except (OSError, RuntimeError) as error:
            self._listener = None
            is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
            what = "is taken" if is_taken else f"cannot be used: {error}"
            logger.warning("no %s: %s %s", self._what, self._where, what)

    @property
    def listening_port(self) -> int | None:
        """None if it does not serve."""
        return self._listener.getsockname()[1] if self._listener is not None else None

    def stop(self) -> None:
        """Release the port. Does nothing if it does not serve."""
        listener, self._listener = self._listener, None
        if listener is not None:
            # It ends the thread's accept. Even if the thread is stuck in a callback, the port is free from here on.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            self._thread.join(_STOP_PATIENCE_S)

    def release(self) -> None:
        """In a forked process: let go of the port and of all callers."""
        for sock in (self._listener, *self._callers):
            if sock is not None:
                sock.close()

    # In the thread.

    def _run(self, runner: asyncio.Runner, listener: socket.socket) -> None:
        try:
            with listener, runner:
                runner.run(self._serve(listener))
        except Exception as error:
            logger.warning("the %s has ended: %s: %s", self._what, type(error).__name__, error)

    async def _serve(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:
                if self._listener is listener:
                    # No descriptor or memory for it. The caller stays in the queue, and we must not spin meanwhile.
                    await asyncio.sleep(_SHORTAGE_PAUSE_S)
                continue
            if len(self._callers) >= _MOST_CALLERS:
                next(iter(self._callers.values())).cancel()
            self._callers[sock] = asyncio.create_task(self._hear(sock))
            # The task begins meanwhile. If it were cancelled before, its socket would stay open.
            await asyncio.sleep(_BETWEEN_CALLERS_S)

    async def _hear(self, sock: socket.socket) -> None:
        loop, said, answer = asyncio.get_running_loop(), b"", None
        try:
            async with asyncio.timeout(_CALL_LIMIT_S):
                while len(said) <= 4 * _CALL_LIMIT_BYTES and (heard := await loop.sock_recv(sock, 4096)):
                    said += heard
                    if answer is None and (answer := await self._answer_to(said, sock)) is not None:
                        # Closing the connection while something is unread would take the answer back, so the caller
                        # hangs up first, or is dropped when its time is up.
                        await loop.sock_sendall(sock, answer)
                        sock.shutdown(socket.SHUT_WR)
        except OSError:  # It is gone, or its time is up.
            pass
        finally:
            del self._callers[sock]
            sock.close()

    async def _answer_to(self, said: bytes, sock: socket.socket) -> bytes | None:
        request = read_request(said)
        if not isinstance(request, Request):
            return request.encoded() if request is not None else None
        try:
            if request.is_post:
                page = await self.post(request, sock.getpeername()[0])
            else:
                page = await self.page(request.path)
        except Exception as error:
            page = Page.of(500, {"reason": f"{type(error).__name__}: {error}"})
        return page.encoded(has_body=not request.is_head)


class KeptPage:
    """A page that is made at most once a second, however many ask for it. An error is not kept."""

    def __init__(self, make: Callable[[], Coroutine[None, None, Page]]) -> None:
        self._make = make
        self._made: asyncio.Task[Page] | None = None
        self._made_at = 0.0

    async def get(self) -> Page:
        if self._made is None or (self._made.done() and self._is_stale(self._made)):
            self._made, self._made_at = asyncio.create_task(self._make()), time.monotonic()
        return await asyncio.shield(self._made)  # A caller that is dropped does not take it from the others.

    def _is_stale(self, made: asyncio.Task[Page]) -> bool:
        return made.cancelled() or made.exception() is not None or time.monotonic() >= self._made_at + _KEPT_S
