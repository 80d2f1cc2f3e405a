"""The agent's side of the health check: which server tells how an agent is, for how long, and what it says.

A server is made from a port (`LaunchConfig.health_port`, else `TORCHELASTIC_HEALTH_CHECK_PORT`) or brought along by the
caller. It serves from the beginning of a launch to its end, or of `agent.run` if nobody launched. A server that
cannot be started or stopped is a warning: it must never end a healthy job.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.errors import UserError

logger = logging.getLogger(__name__)

PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
TIMEOUT_S = 60

_served: list[Any] = []


def checked_port(name: str, port: int) -> int:
    if not 0 <= port < 65536:
        raise UserError(f"{name} {port} is not a port (0 to 65535; 0 is any free one)")
    return port


def port_from_environment() -> int | None:
    text = os.environ.get(PORT_VARIABLE)
    if not text:
        return None
    try:
        return checked_port(PORT_VARIABLE, int(text))
    except ValueError:
        raise UserError(f"{PORT_VARIABLE}={text} is not a port (0 to 65535; 0 is any free one)") from None


def server_at(port: int | None) -> Any:
    """A server for the agent that will be introduced to it, or None if there is no port for one."""
    if port is None:
        return None
    from holdfast.telemetry import health

    server = health.create_healthcheck_server(health.AgentAlive(), port, TIMEOUT_S)
    introduce(server, time.time, lambda: {"phase": "idle", "round": 0, "restarts": 0})
    return server


def introduce(server: Any, alive_time: Callable[[], float], describe: Callable[[], Mapping[str, Any]]) -> None:
    """From now on the server speaks for this agent, unless its user has given it a callback of another meaning."""
    if server is None:
        return
    from holdfast.telemetry.health import AgentAlive, HealthCheckServer

    if isinstance(server, HealthCheckServer):
        server.describe = describe
        if isinstance(server.alive_callback, AgentAlive):
            server.alive_callback.attach(alive_time)


@contextmanager
def served(server: Any) -> Iterator[None]:
    """The server serves within this block. If it does already, whoever started it will stop it."""
    if server is None or any(each is server for each in _served):
        yield
        return
    _served.append(server)
    _attempt(server.start)
    try:
        yield
    finally:
        _served[:] = [each for each in _served if each is not server]
        _attempt(server.stop)


def _attempt(act: Callable[[], Any]) -> None:
    try:
        act()
    except Exception as error:
        name = getattr(act, "__name__", "call")
        logger.warning("the health check server failed to %s: %s: %s", name, type(error).__name__, error)
