"""The health check: an HTTP server that says whether the agent is alive, for a scheduler that replaces dead ones.

    GET / (any path)   200 {"status": "alive", "phase": "running", "round": 1, "restarts": 0}
                       503 {"status": "stuck", "reason": "no sign of life for 73 s, ...", "phase": ...}
    POST /notice       this node goes away (`notice_http`), if it speaks for an agent
    GET /metrics       the agent's metrics for Prometheus (`prometheus`), if it speaks for an agent

Alive means that the alive callback's time (seconds since the epoch) is less than `timeout` seconds ago. For an agent
it is the time at which its loop was last known to turn, which is now in every phase in which the loop waits.

The server (`http`) that a program makes listens on all interfaces. That of an agent listens where the user says:
probes (the kubelet's, say) come from outside, and need an address such as `[::]:8080`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.log import DEBUG, INFO, Logger
from holdfast.telemetry.http import HttpServer, KeptPage, Page, Request
from holdfast.telemetry.status import AgentStatus

if TYPE_CHECKING:
    from holdfast.telemetry.notice_http import NoticeDoor

__all__ = ["AgentAlive", "HealthCheckServer", "create_healthcheck_server"]

logger = Logger(__name__)

TIMEOUT_S = 60

_served: list[Any] = []


class AgentAlive:
    """An alive callback that speaks for an agent as soon as there is one; until then, for the process."""

    def __init__(self) -> None:
        self.callback: Callable[[], float] = time.time

    def __call__(self) -> float:
        return self.callback()


class HealthCheckServer(HttpServer):
    """`alive_callback` returns when its subject was last alive. If that is an agent, `status` returns its status, and
    `describe` the same for JSON, with the values that are not in the record.

    Port 0 is any free port; `port` says which, while the server is started. It may be started again after a stop.
    `host` is the address to listen at; `::` stands for every interface, IPv4 and, if the host has it, IPv6.
    """

    host = "::"

    def __init__(self, alive_callback: Callable[[], float], port: int, timeout: float) -> None:
        super().__init__("health check", f"port {port}", self._open)
        self.alive_callback = alive_callback
        self.status: Callable[[], AgentStatus | None] = lambda: None
        self.describe: Callable[[], Mapping[str, Any]] | None = None
        self.door: NoticeDoor | None = None
        self.port = self._wanted_port = port
        self._timeout_s = timeout
        self._metrics = KeptPage(self._make_metrics)

    def _open(self) -> socket.socket:
        """Not inherited by what is executed."""
        if self.host != "::":
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self._wanted_port), family=family)
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        return socket.create_server(("", self._wanted_port), family=family, dualstack_ipv6=has_both)

    def start(self) -> None:
        was_serving = self.listening_port is not None
        super().start()
        if (port := self.listening_port) is not None and not was_serving:
            self.port = port
            logger.log(DEBUG if self._wanted_port else INFO, "health check on port %d", port)

    def stop(self) -> None:
        self.port = self._wanted_port
        super().stop()

    async def page(self, path: str) -> Page:
        if path == "/metrics" and self.describe is not None:
            return await self._metrics.get()
        if path == "/notice/nonce" and self.door is not None:
            return self.door.nonce()
        condition = self.condition()
        return Page.of(200 if condition["status"] == "alive" else 503, condition)

    async def post(self, request: Request, peer: str) -> Page:
        if self.door is None:
            return await super().post(request, peer)
        if request.path != "/notice":
            return Page.of(404, {"reason": "POST is for /notice"})
        return self.door.post(request, peer)

    async def _make_metrics(self) -> Page:
        from holdfast.telemetry import prometheus

        assert self.describe is not None
        return prometheus.agent_page(self.describe())

    def condition(self) -> dict[str, Any]:
        """The answer: `status` is `alive` or `stuck`; if it is `stuck`, there is a `reason`."""
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


def create_healthcheck_server(alive_callback: Callable[[], float], port: int, timeout: float) -> HealthCheckServer:
    """A server that is not started yet. Replace this function to get another kind in every run."""
    return HealthCheckServer(alive_callback, port, timeout)


# The server of an agent: one that the caller brought along, or one at a port. It serves from the beginning of a launch
# to its end, or of `agent.run` if that was called directly.


def server_at(host: str, port: int) -> HealthCheckServer:
    """A server for the agent that will be introduced to it."""
    server = create_healthcheck_server(AgentAlive(), port, TIMEOUT_S)
    server.host = host
    introduce(server, time.time, AgentStatus, dict)
    return server


def introduce(
    server: Any,
    alive_time: Callable[[], float],
    status: Callable[[], AgentStatus],
    describe: Callable[[], Mapping[str, Any]] | None = None,
    door: NoticeDoor | None = None,
) -> None:
    """From now on the server speaks for this agent, unless the user has given it another callback."""
    if isinstance(server, HealthCheckServer):
        server.status, server.describe, server.door = status, describe, door
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
