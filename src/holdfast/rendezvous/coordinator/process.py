"""The coordinator process: started by an agent for its run (`main`, see `launch`), or by a user (`serve_by_hand`).

One that an agent has started says what is wrong to that agent until it serves. Then it lets go of the agent's terminal,
and writes to a log of its own; it ends with the run, or when no node is connected. If an engine owns the agents, and
the engine's process on this host is gone (`JOB_PID_VARIABLE`), it waits for no node to come back: the next run of the
job may need the port.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast import escape, log_lines, signals
from holdfast.errors import NO_THREAD, HoldfastError, remedy
from holdfast.rendezvous import endpoints, settings
from holdfast.rendezvous.coordinator import launch, monitoring, state_file, watchdog
from holdfast.rendezvous.coordinator.launch import Orders
from holdfast.rendezvous.coordinator.server import Coordinator, Keeper

# The agent that starts a coordinator connects to it at once. If the agent does not, another agent was faster, and the
# run may be over by now.
_IDLE_TIMEOUT_S = 5.0
_LAST_WORDS_S = 2.0  # For nodes that have not heard of the end of the run when the engine's process has ended.
_LOOK_AGAIN_S = 0.5


def main(argv: list[str]) -> int:
    """Started by an agent."""
    try:
        asyncio.run(_serve_for_a_run(msgspec.json.decode(argv[0], type=Orders)))
        return 0
    except HoldfastError as error:
        problem = str(error)
    except OSError as error:
        problem = f"cannot serve: {error.strerror or error}"
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
        problem = f"cannot start a thread{remedy(errno.EAGAIN)}"
    print(escape.one_line(problem), file=sys.stderr)
    return 1


async def serve_by_hand(orders: Orders, idle_timeout_s: float | None) -> None:
    """Started by a user: it logs to the terminal, and ends on a signal. It accepts no connection before it can answer:
    agents that reconnect would wait while their leases expire."""
    _log_to_stderr("holdfast coordinator: %(message)s")
    sock = socket.socket(fileno=orders.fd)
    coordinator = _coordinator(orders, sock, idle_timeout_s)
    settings.warn_of_token(coordinator.token, sock.getsockname()[0])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) != signal.SIG_IGN:  # As SIGHUP is under nohup.
            asyncio.get_running_loop().add_signal_handler(number, coordinator.stop)
    if signals.inbox().has_pending:  # It came during the start, when signals were only noted.
        coordinator.stop()
    shown = endpoints.endpoint_text(*sock.getsockname()[:2])
    await _serve(orders, coordinator, lambda: logging.getLogger("holdfast").info("listening at %s", shown))


async def _serve_for_a_run(orders: Orders) -> None:
    """On tcp its log is named after the endpoint. On etcd it serves as long as etcd renews its lease; successive
    coordinators of a host append to the log of the run, because their ports vary."""
    sock = socket.socket(fileno=orders.fd)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Whatever the agent blocks or ignores, the coordinator can be stopped as any other can.
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if bytes(orders.office) == b"null":
        log = state_file.log_path(state_file.endpoint_name(*sock.getsockname()[:2]))
        try:
            coordinator = _coordinator(orders, sock, _IDLE_TIMEOUT_S)
            _end_with_job(coordinator)
            await _serve(orders, coordinator, lambda: _withdraw(log))
            log.unlink(missing_ok=True)
        except launch.PortTaken:
            print(launch.READY)  # Another coordinator was faster, and serves.
        return
    from holdfast.rendezvous.etcd.keeper import Appointment, EtcdKeeper

    appointment = msgspec.json.decode(orders.office, type=Appointment)
    log, keeper = state_file.log_path(appointment.run_id), EtcdKeeper(appointment)
    coordinator = _coordinator(orders, sock, _IDLE_TIMEOUT_S, keeper)
    try:
        await keeper.begin()
        keeper.when_over = coordinator.resign
        await _serve(orders, coordinator, lambda: _withdraw(log, os.O_APPEND))
    finally:
        await keeper.close()
    if not keeper.reason_to_resign and not coordinator.has_failed:
        log.unlink(missing_ok=True)


def _end_with_job(coordinator: Coordinator) -> None:
    """Other nodes may go on without the one that is here, which has finished long before them, say."""
    loop = asyncio.get_running_loop()

    def stop_without_nodes() -> None:
        if any(each.run is not None for each in coordinator.connections.values()):
            loop.call_later(_LOOK_AGAIN_S, stop_without_nodes)
        else:
            coordinator.stop()

    try:
        job = os.pidfd_open(int(os.environ[launch.JOB_PID_VARIABLE]))
    except KeyError:
        return
    except (OSError, ValueError):  # The process is gone already.
        loop.call_later(_LAST_WORDS_S, stop_without_nodes)
        return

    def ended() -> None:
        loop.remove_reader(job)
        loop.call_later(_LAST_WORDS_S, stop_without_nodes)

    loop.add_reader(job, ended)


def _coordinator(
    orders: Orders,
    sock: socket.socket,
    idle_timeout_s: float | None,
    keeper: Keeper | None = None,
) -> Coordinator:
    # Each connection needs a descriptor. The usual soft limit is for programs that use select.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Thousands of nodes may join at once, with a line for each: leave out what no line shows.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # As the documentation of logging advises.
    directory = state_file.default_directory(warns=True)
    return Coordinator(
        sock,
        keeper or state_file.StateFiles(directory, *sock.getsockname()[:2]),
        token=settings.read_token(orders.token_file, is_required=orders.require_token),
        tls=orders.tls.load(is_server=True),
        idle_timeout_s=idle_timeout_s,
        run_id=orders.run_id,
    )


async def _serve(orders: Orders, coordinator: Coordinator, when_ready: Callable[[], None]) -> None:
    """The other port is opened when this coordinator surely serves; a warning about it still reaches the user."""
    with contextlib.ExitStack() as ended:

        def ready() -> None:
            if orders.http:
                monitor = monitoring.MonitoringServer(endpoints.parse_address(orders.http), coordinator)
                ended.callback(monitor.stop)
                monitor.start()
            when_ready()

        ended.callback(watchdog.Watchdog(lambda: coordinator.patience_s).close)
        await coordinator.serve(ready)


def _withdraw(log: Path, how: int = os.O_TRUNC) -> None:
    """Tell the agent that started this coordinator that it is ready, and let go of its terminal and directory."""
    print(launch.READY, flush=True)
    output = os.open(os.devnull, os.O_WRONLY)
    try:
        state_file.make_private(log.parent)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | how | os.O_NOFOLLOW, 0o600)
    except OSError:
        pass  # It runs without a log.
    for fd in (1, 2):
        os.dup2(output, fd)
    _log_to_stderr("%(asctime)s %(message)s")
    os.chdir("/")


def _log_to_stderr(layout: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(log_lines.LogFormatter(layout))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
