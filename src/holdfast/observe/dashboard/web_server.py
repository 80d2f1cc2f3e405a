"""The web server: what is answered to which request, and the stream of events for each page.

    GET  /?key=KEY    sets the cookie, and leads on to /
    GET  /            the page; its other files beside it
    GET  /events      a stream of server-sent events: the picture, then what changes; the log that the page follows
    GET  /worker      what is known of one rank
    POST /log         the rank and stream that a page wants to follow in its events
    POST /stacks      where a worker is
    POST /stop        end the run; only if the dashboard was given the run's token

Everything is bounded: connections, pages, logs that are followed, the bytes that are read of them, the time that a page
may take to read what it is sent. A page that lags behind gets the whole picture when it reads again, so nothing is
queued for it. One thread runs this; what waits for the run (`Watch`) is called in others.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

import holdfast
from holdfast.errors import HoldfastError, UserError
from holdfast.log import Logger
from holdfast.loop import Wakeup
from holdfast.observe.dashboard import access
from holdfast.observe.dashboard.access import Access
from holdfast.observe.dashboard.picture import Picture, difference, shown_of_log, tail_for
from holdfast.observe.dashboard.run_watcher import Watch
from holdfast.rendezvous.coordinator.limits import Bucket

logger = Logger(__name__)

T = TypeVar("T")
LogKey = tuple[int, str, int | None]  # Rank, stream, attempt.

PAGE = Path(__file__).with_name("page")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

_MOST_CONNECTIONS = 128
_MOST_PAGES = 32
_MOST_LOGS = 16
_LOG_BYTES_A_SECOND = 1 << 19
_LOG_EVERY_S = 1.0
_LOG_KEPT_CHARS = 1 << 17  # For a page that begins to follow a log which another one follows already.
_BODY_LIMIT_BYTES = 4096
_HEAD_LIMIT_S = 10.0  # From the begin of a connection, or from an answer, to the next complete request head.
_SEND_LIMIT_S = 20.0
_BEAT_S = 10.0  # A page that hears nothing for three of them connects again.
_THREADS = 8
_REASON_LIMIT = 200

# A redirect would lose the cookie if the link was followed from another site; a page that leads on does not.
_LEAD_ON = (
    '<!doctype html><meta http-equiv="refresh" content="0; url=/"><link rel="icon" href="/icon.svg">'
    "<title>holdfast</title>"
)


class Page:
    """One open page: what it was sent last, and what else is on its way to it."""

    def __init__(self) -> None:
        self.id = secrets.token_urlsafe(12)
        self.version = -1
        self.log: Log | None = None
        self.wakeup = asyncio.Event()
        self._texts: list[bytes] = []
        self._waiting_bytes = 0

    def put(self, event: str, data: Any) -> None:
        """For the page's log. If the page does not read, the oldest texts are dropped."""
        text = _event(event, data)
        self._texts.append(text)
        self._waiting_bytes += len(text)
        while self._waiting_bytes > 2 * _LOG_KEPT_CHARS and len(self._texts) > 1:
            self._waiting_bytes -= len(self._texts.pop(0))
        self.wakeup.set()

    def take(self) -> bytes:
        texts, self._texts, self._waiting_bytes = self._texts, [], 0
        return b"".join(texts)


class Log:
    """One stream of one rank, followed for all pages that want it."""

    def __init__(self, key: LogKey) -> None:
        self.key = key
        self.pages: set[Page] = set()
        self.task: asyncio.Task[None] | None = None
        self._kept: list[dict[str, Any]] = []

    def add(self, page: Page) -> None:
        self.pages.add(page)
        page.put("log", {"key": self.key, "begins": True})
        for each in self._kept:
            page.put("log", each)

    def tell(self, piece: Mapping[str, Any]) -> None:
        self._kept.append({"key": self.key, **piece})
        while sum(len(each.get("text", "")) for each in self._kept) > _LOG_KEPT_CHARS and len(self._kept) > 1:
            del self._kept[0]
        for page in self.pages:
            page.put("log", self._kept[-1])


class Dashboard:
    """The application. All methods but `publish` and `say_goodbye` are for the server's thread."""

    def __init__(self, guard: Access, *, may_stop: bool, facts: Mapping[str, Any]) -> None:
        self._guard, self._may_stop, self._facts = guard, may_stop, facts
        self.watch: Watch  # Set before the server starts: each of the two needs the other.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pages: dict[str, Page] = {}
        self._logs: dict[LogKey, Log] = {}
        self._log_bytes = Bucket(_LOG_BYTES_A_SECOND, 2 * _LOG_BYTES_A_SECOND, time.monotonic)
        self._stacks = asyncio.Lock()
        self._picture: Picture | None = None
        self._version = 0
        self._last_change = b""
        self._goodbye = ""
        self._threads = ThreadPoolExecutor(_THREADS, "holdfast-ask")
        self._files = {path.name: path.read_bytes() for path in PAGE.iterdir() if path.suffix in _TYPES}

    def app(self) -> ASGIApp:
        routes = [
            Route("/", self._root),
            Route("/events", self._events),
            Route("/worker", self._worker),
            Route("/log", self._follow, methods=["POST"]),
            Route("/stacks", self._take_stacks, methods=["POST"]),
            Route("/stop", self._stop, methods=["POST"]),
            Route("/{name}", self._file),
        ]
        return Guarded(Starlette(routes=routes), self._guard)

    # From other threads.

    def publish(self, picture: Picture, point: list[float | None] | None) -> None:
        self._call(self._take, picture, point)

    def say_goodbye(self, text: str) -> None:
        """Every page hears that this server ends, and does not try to connect again."""
        self._call(self._end, text)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    # Pictures.

    def _take(self, picture: Picture, point: list[float | None] | None) -> None:
        before, self._picture = self._picture, picture
        change = difference(before, picture) if before is not None else {}
        if point is not None:
            change["point"] = point
        if before is not None and not change:
            return
        self._version += 1
        self._last_change = _event("change", change)
        for page in self._pages.values():
            page.wakeup.set()

    def _end(self, text: str) -> None:
        self._goodbye = text
        for page in self._pages.values():
            page.wakeup.set()

    def _news_for(self, page: Page) -> bytes:
        news = page.take()
        if self._picture is not None and page.version != self._version:
            is_next = page.version == self._version - 1 and page.version >= 0
            whole = {**self._picture, "points": self.watch.series.points}
            news = (self._last_change if is_next else _event("picture", whole)) + news
            page.version = self._version
        return news

    # Requests.

    async def _root(self, request: Request) -> Response:
        if "key" not in request.query_params:
            return self._page_file("index.html")
        answer = Response(_LEAD_ON, media_type="text/html")
        answer.headers["Set-Cookie"] = self._guard.set_cookie()
        return answer

    async def _file(self, request: Request) -> Response:
        return self._page_file(request.path_params["name"])

    def _page_file(self, name: str) -> Response:
        if name not in self._files:
            return PlainTextResponse("There is no such page.\n", 404)
        return Response(self._files[name], media_type=_TYPES[Path(name).suffix])

    async def _events(self, request: Request) -> Response:
        if len(self._pages) >= _MOST_PAGES:
            return PlainTextResponse(f"{_MOST_PAGES} pages are open already.\n", 503)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        page = Page()
        self._pages[page.id] = page
        self.watch.set_watched(True)
        facts = {**self._facts, "page": page.id, "may_stop": self._may_stop, "beat_s": _BEAT_S}
        try:
            yield b"retry: 2000\n" + _event("hello", facts)
            while True:
                news = self._news_for(page)
                if self._goodbye:
                    yield news + _event("bye", {"text": self._goodbye})
                    return
                yield news or _event("beat", {})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_BEAT_S):
                        await page.wakeup.wait()
                page.wakeup.clear()
        finally:
            del self._pages[page.id]
            self._unfollow(page)
            self.watch.set_watched(bool(self._pages))

    async def _worker(self, request: Request) -> Response:
        rank = request.query_params.get("rank", "")
        if not rank.isdecimal() or len(rank) > 9:
            return _problem("rank is not a number")
        return await self._asked(self.watch.worker, int(rank))

    async def _follow(self, request: Request) -> Response:
        body = await _body(request)
        page, rank, stream, attempt = (body.get(name) for name in ("page", "rank", "stream", "attempt"))
        known = self._pages.get(page) if isinstance(page, str) else None
        if known is None:
            return _problem("unknown page; reload it")
        self._unfollow(known)
        if rank is None:
            return JSONResponse({})
        is_number = type(rank) is int and (attempt is None or type(attempt) is int)
        if not is_number or stream not in ("stdout", "stderr"):
            return _problem("a rank, a stream and perhaps an attempt are needed")
        key: LogKey = (rank, stream, attempt)
        if key not in self._logs and len(self._logs) >= _MOST_LOGS:
            return _problem(f"{_MOST_LOGS} logs are followed already, by all pages together")
        log = self._logs.setdefault(key, Log(key))
        log.add(known)
        known.log = log
        log.task = log.task or asyncio.create_task(self._read(log))
        return JSONResponse({})

    def _unfollow(self, page: Page) -> None:
        log, page.log = page.log, None
        if log is not None:
            log.pages.discard(page)
            if not log.pages:
                self._logs.pop(log.key, None)
                if log.task is not None:
                    log.task.cancel()

    async def _read(self, log: Log) -> None:
        """Until no page follows the log, or the run has ended and the log is read to its end."""
        rank, stream, attempt = log.key
        tail, problem = tail_for(attempt), ""
        while True:
            was_over = self.watch.is_over
            try:
                piece = await self._in_thread(self.watch.read_log, rank, stream, tail.attempt, tail.offset)
                await asyncio.sleep(self._log_bytes.owed_s(len(piece.text)))
                shown = shown_of_log(tail.take(piece))
                if shown["text"] or shown["note"] or problem:
                    log.tell({**shown, "attempt": piece.attempt, "path": piece.path})
                problem = ""
                if was_over and tail.is_at_end:
                    return
            except HoldfastError as error:
                tail.go_on()
                if str(error) != problem:
                    problem = str(error)
                    log.tell({"text": "", "note": "", "problem": problem})
                if was_over:
                    return
            except Exception:  # The answer is malformed. The next one may be good.
                logger.debug("a log cannot be read", exc_info=True)
            await asyncio.sleep(_LOG_EVERY_S)

    async def _take_stacks(self, request: Request) -> Response:
        rank = (await _body(request)).get("rank")
        if type(rank) is not int:
            return _problem("rank is not a number")
        if self._stacks.locked():
            return _problem("stacks are being taken already; try again in a moment")
        async with self._stacks:
            return await self._asked(lambda each: {"text": self.watch.take_stacks(each)}, rank)

    async def _stop(self, request: Request) -> Response:
        body = await _body(request)
        if not self._may_stop:
            return PlainTextResponse("This dashboard is read-only: it was not given the run's token.\n", 403)
        reason = str(body.get("reason") or "").strip()[:_REASON_LIMIT] or "stopped from the dashboard"
        return await self._asked(lambda each: {"scope": self.watch.stop_run(each)}, reason)

    async def _asked(self, ask: Callable[..., Mapping[str, Any]], *args: Any) -> Response:
        try:
            return JSONResponse(await self._in_thread(ask, *args))
        except HoldfastError as error:
            return _problem(str(error), 400 if isinstance(error, UserError) else 502)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    # The server.

    def serve(self, server: uvicorn.Server, sock: socket.socket, down: Wakeup) -> None:
        """Until `server.should_exit`; then it wakes. In any thread but the main one, so signals are left alone."""
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(server.serve(sockets=[sock]))
        finally:
            down.wake()


def server_for(app: ASGIApp) -> uvicorn.Server:
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logging.getLogger(name).disabled = True  # It would print a line for each request.
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_CONNECTIONS + 1,  # From this number on it answers 503.
            timeout_graceful_shutdown=1,
        )
    )


class BoundedProtocol(H11Protocol):
    """A connection. It has some time for each request head.

    If there are too many, the oldest that has not sent a request head makes room for the next. A request without the
    key is the last of its connection (`Guarded`), so all others belong to clients with the key.
    """

    _numbers = itertools.count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its base
        self._number = next(self._numbers)
        if len(self.connections) >= _MOST_CONNECTIONS:
            strangers = [each for each in self.connections if isinstance(each, BoundedProtocol) and each.cycle is None]
            if strangers:
                oldest = min(strangers, key=lambda each: each._number)
                self.connections.discard(oldest)
                oldest.transport.abort()
        super().connection_made(transport)
        self._await_head()

    def on_response_complete(self) -> None:
        self._await_head()
        super().on_response_complete()

    def _await_head(self) -> None:
        """uvicorn closes idle connections, and one that has sent a part of a head is not idle."""
        self.loop.call_later(_HEAD_LIMIT_S, self._close_without_head, self.cycle)

    def _close_without_head(self, last: object) -> None:
        if self.cycle is last:
            self.transport.close()


class Guarded:
    """Refuses requests that `Access` does not allow, and adds the headers to all answers."""

    def __init__(self, app: ASGIApp, guard: Access) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        has_begun = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                extra = [(name.lower().encode(), value.encode()) for name, value in access.HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            async with asyncio.timeout(_SEND_LIMIT_S):
                await send(message)

        problem = self._objection(request)
        refusal = PlainTextResponse(f"{problem}\n", 403, {"Connection": "close"})
        app: ASGIApp = refusal if problem else self._app
        try:
            await app(scope, receive, send_with_headers)
        except Exception:
            logger.debug("a request failed", exc_info=True)
            if not has_begun:
                await PlainTextResponse("internal error (please report)\n", 500)(scope, receive, send_with_headers)

    def _objection(self, request: Request) -> str:
        problem = self._guard.objection(request.method, request.headers)
        if problem:
            return problem
        key = request.query_params.get("key") if request.url.path == "/" else None
        has_key = self._guard.opens(key) if key is not None else self._guard.knows(request.headers)
        return "" if has_key else access.WRONG_KEY


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object in the request's body; an empty one if there is none."""
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > _BODY_LIMIT_BYTES:
            return {}
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _problem(text: str, status: int = 400) -> Response:
    return JSONResponse({"problem": text}, status)


def _event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def facts_of(linger_s: float) -> dict[str, Any]:
    """About this server, for the foot of the page."""
    return {"version": holdfast.__version__, "host": os.uname().nodename, "pid": os.getpid(), "linger_s": linger_s}
