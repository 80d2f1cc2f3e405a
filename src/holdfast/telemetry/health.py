"""The health check: an HTTP server that says whether something is alive, for a scheduler that restarts what is not.

    GET / (any path)   200 {"status": "alive", "phase": "running", "round": 1, "restarts": 0}
                       503 {"status": "stuck", "reason": "no sign of life for 73 s, ...", "phase": ...}

Alive means that the alive callback's time (seconds since the epoch) is less than `timeout` seconds ago. For an agent
it is the time at which its loop was last known to turn, which is now in every phase in which the loop waits.

The server listens on all interfaces, because probes (the kubelet's, say) come from outside. It is one thread that never
waits for a single caller: each gets a few seconds and a few kilobytes to ask one question, and if too many come at once
the oldest is dropped for the newest. If the port cannot be opened, the log has one warning: a health check never ends a
job.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from holdfast.errors import UserError
from holdfast.loop import release_in_children
from holdfast.telemetry.status import AgentStatus

__all__ = ["AgentAlive", "HealthCheckServer", "create_healthcheck_server"]

logger = logging.getLogger(__name__)

PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
TIMEOUT_S = 60

_served: list[Any] = []

_MOST_CALLERS = 32
_CALL_LIMIT_S = 5.0
_CALL_LIMIT_BYTES = 8192
_STOP_PATIENCE_S = 2.0
_SHORTAGE_PAUSE_S = 1.0


class AgentAlive:
    """An alive callback that speaks for an agent as soon as there is one; until then, for the process."""

    def __init__(self) -> None:
        self.callback: Callable[[], float] = time.time

    def __call__(self) -> float:
        return self.callback()


class HealthCheckServer:
    """Answers for whatever `alive_callback` speaks for. If that is an agent, `status` is how it stands.

    Port 0 is any free port; `port` says which, while the server is started. It may be started again after a stop.
    """

    def __init__(self, alive_callback: Callable[[], float], port: int, timeout: float) -> None:
        self.alive_callback = alive_callback
        self.status: Callable[[], AgentStatus | None] = lambda: None
        self.port = self._wanted_port = port
        self._timeout_s = timeout
        self._listener: socket.socket | None = None
        self._callers: dict[socket.socket, asyncio.Task[None]] = {}  # In the order in which they came.
        release_in_children(self)

    def start(self) -> None:
        """Serve from now on. Does nothing if it serves already, and warns if it cannot."""
        if self._listener is not None:
            return
        # Every interface, IPv4 and, where there is such a thing, IPv6. Not inherited by what is executed.
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        try:
            listener = socket.create_server(("", self._wanted_port), family=family, dualstack_ipv6=has_both)
            with contextlib.ExitStack() as undo:
                undo.callback(listener.close)
                listener.setblocking(False)
                runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
                runner.get_loop()  # Made here, where a lack of descriptors is told.
                self._thread = threading.Thread(
                    target=self._run, args=(runner, listener), name="holdfast-health", daemon=True
                )
                self._listener, self.port = listener, listener.getsockname()[1]
                self._thread.start()
                undo.pop_all()
        except (OSError, RuntimeError) as error:
            self._listener = None
            is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
            what = "is taken" if is_taken else f"cannot be used: {error}"
            logger.warning("no health check: port %d %s", self._wanted_port, what)
            return
        logger.log(logging.DEBUG if self._wanted_port else logging.INFO, "health check on port %d", self.port)

    def stop(self) -> None:
        """Release the port. Does nothing if it does not serve."""
        listener, self._listener, self.port = self._listener, None, self._wanted_port
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

    def condition(self) -> dict[str, Any]:
        """What is answered: `status` is `alive` or `stuck`, the latter with a `reason`."""
        try:
            status = self.status()
            silent_s = time.time() - self.alive_callback()
        except Exception as error:
            return {"status": "stuck", "reason": f"the alive callback failed: {type(error).__name__}: {error}"}
        told: dict[str, Any] = {}
        if status is not None:
            told = {"phase": status.phase, "round": status.round, "restarts": status.restarts_used}
        if silent_s < self._timeout_s:
            return {"status": "alive", **told}
        where = f" in phase {status.phase}" if status is not None else ""
        reason = f"no sign of life for {silent_s:.0f} s{where}, the limit is {self._timeout_s:g} s"
        return {"status": "stuck", "reason": reason, **told}

    # In the thread.

    def _run(self, runner: asyncio.Runner, listener: socket.socket) -> None:
        try:
            with listener, runner:
                runner.run(self._serve(listener))
        except Exception as error:
            logger.warning("the health check has ended: %s: %s", type(error).__name__, error)

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
            await asyncio.sleep(0)  # Let it begin: a task that is cancelled before that would not close its socket.

    async def _hear(self, sock: socket.socket) -> None:
        loop, said, answer = asyncio.get_running_loop(), b"", None
        try:
            async with asyncio.timeout(_CALL_LIMIT_S):
                while len(said) <= 4 * _CALL_LIMIT_BYTES and (heard := await loop.sock_recv(sock, 4096)):
                    said += heard
                    if answer is None and (answer := respond(said, self.condition)) is not None:
                        # Closing the connection while something is unread would take the answer back, so the caller
                        # hangs up first, or is dropped when its time is up.
                        await loop.sock_sendall(sock, answer)
                        sock.shutdown(socket.SHUT_WR)
        except OSError:  # It is gone, or its time is up.
            pass
        finally:
            del self._callers[sock]
            sock.close()


def create_healthcheck_server(alive_callback: Callable[[], float], port: int, timeout: float) -> HealthCheckServer:
    """A server that is not started yet. Replace this function to get another kind in every run."""
    return HealthCheckServer(alive_callback, port, timeout)


# The server of an agent: one that the caller brought along, or one at a port. It serves from the beginning of a launch
# to its end, or of `agent.run` if that was called directly.


def chosen_port(given: int | None = None) -> int:
    """The port that was given, else the one in the environment."""
    text = str(given) if given is not None else os.environ[PORT_VARIABLE].strip()
    if not text.isdecimal() or int(text) > 65535:
        what = f"health_port {text}" if given is not None else f"{PORT_VARIABLE}={text}"
        raise UserError(f"{what} is not a port (0 to 65535; 0 is any free one)")
    return int(text)


def server_at(port: int) -> HealthCheckServer:
    """A server for the agent that will be introduced to it."""
    server = create_healthcheck_server(AgentAlive(), port, TIMEOUT_S)
    introduce(server, time.time, AgentStatus)
    return server


def introduce(server: Any, alive_time: Callable[[], float], status: Callable[[], AgentStatus]) -> None:
    """From now on the server speaks for this agent, unless its user has given it a callback of another meaning."""
    if isinstance(server, HealthCheckServer):
        server.status = status
        if isinstance(server.alive_callback, AgentAlive):
            server.alive_callback.callback = alive_time


@contextlib.contextmanager
def served(server: Any) -> Iterator[None]:
    """The server serves within this block. If it did before, it goes on after it."""
    if any(each is server for each in _served):
        yield
        return
    _served.append(server)
    _attempt(server, "start")
    try:
        yield
    finally:
        _served[:] = [each for each in _served if each is not server]
        _attempt(server, "stop")


def _attempt(server: Any, what: str) -> None:
    """A server that cannot be started or stopped is a warning: it must never end a healthy job."""
    try:
        getattr(server, what)()
    except Exception as error:
        logger.warning("the health check server failed to %s: %s: %s", what, type(error).__name__, error)


# The answers.


def respond(request: bytes, ask: Callable[[], Mapping[str, Any]]) -> bytes | None:
    """The answer to what a caller has said so far; None if there is more to come."""
    if b"\r\n\r\n" not in request and b"\n\n" not in request:
        too_long = len(request) >= _CALL_LIMIT_BYTES
        return _answer(431, {"reason": f"more than {_CALL_LIMIT_BYTES} bytes"}) if too_long else None
    words = request.split(b"\n", 1)[0].split()
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return _answer(400, {"reason": "not a request of HTTP/1"})
    if words[0] not in (b"GET", b"HEAD"):
        return _answer(405, {"reason": "only GET and HEAD are answered"}, "Allow: GET, HEAD\r\n")
    condition = ask()
    return _answer(200 if condition["status"] == "alive" else 503, condition, has_body=words[0] == b"GET")


def _answer(status: int, content: Mapping[str, Any], more_headers: str = "", *, has_body: bool = True) -> bytes:
    body = json.dumps(content).encode() + b"\n"
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Cache-Control: no-store\r\nConnection: close\r\n{more_headers}\r\n"
    )
    return head.encode() + (body if has_body else b"")
