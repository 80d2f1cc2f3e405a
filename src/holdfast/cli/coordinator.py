"""`holdfast coordinator`: serve runs from a host of your choice, instead of from the first agent's host."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from holdfast import log_lines, signals
from holdfast.cli import console
from holdfast.cli.options import check_brackets, duration_s
from holdfast.cli.parser import PlainParser, argument
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.rendezvous import endpoints, options
from holdfast.rendezvous.coordinator import launch, memory, monitoring, watchdog
from holdfast.rendezvous.coordinator.run import Keeper
from holdfast.rendezvous.coordinator.server import Coordinator

PROGRAM = "holdfast coordinator"

_IDLE_TIMEOUT_S = 60.0

_EPILOG = """\
The agents of a run find a coordinator at their --rdzv-endpoint. If there is none, the agent on the host of the
endpoint starts one. Start one by hand if it is to outlive every host of the run.

example:
  holdfast coordinator --listen 10.0.0.1:29400 --token-file /etc/holdfast.token
"""


def get_parser() -> PlainParser:
    parser = PlainParser(PROGRAM, "Serve the membership of any number of runs.", _EPILOG)
    parser.add_argument("--listen", metavar="HOST:PORT", help="where to listen; exactly there, not on all interfaces")
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--office", help=argparse.SUPPRESS)
    parser.add_argument("--token-file", default="", metavar="FILE", help="agents must know the token in this file "
                        "(or the environment variable HOLDFAST_TOKEN)")  # fmt: skip
    parser.add_argument("--require-token", action="store_true", help="do not start without a token")
    parser.add_argument("--tls-cert", default="", metavar="FILE", help="speak TLS with this certificate")
    parser.add_argument("--tls-key", default="", metavar="FILE", help="the certificate's key, if it is not in it")
    parser.add_argument("--tls-ca", default="", metavar="FILE", help="agents must show a certificate of this authority")
    parser.add_argument("--http", type=argument(endpoints.parse_http_address), metavar="HOST:PORT", help="answer HTTP "
                        "requests there: /metrics for Prometheus; a port alone is on 127.0.0.1, 0 is any "
                        "free one")  # fmt: skip
    parser.add_argument("--idle-timeout", type=argument(duration_s), metavar="TIME", help="exit when no node has been "
                        "connected for this long, or the last run is over (default: serve until stopped)")  # fmt: skip
    return parser


def main(argv: list[str]) -> int:
    parser = get_parser()
    args = parser.parse_args(argv)
    if args.idle_timeout == 0:
        parser.error("--idle-timeout 0 is not a time above 0")
    try:
        asyncio.run(_serve_by_hand(args) if args.fd is None else _serve_for_a_run(args))
        return 0
    except HoldfastError as error:
        console.write_error(PROGRAM, str(error))
        return 2 if isinstance(error, UserError | HostError) else 1
    except OSError as error:
        console.write_error(PROGRAM, f"cannot serve: {error.strerror or error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


async def _serve_by_hand(args: argparse.Namespace) -> None:
    """Started by a user: it logs to the terminal, and ends on a signal. It accepts no connection before it can answer:
    agents that reconnect would wait while their leases expire."""
    _log_to_stderr("holdfast coordinator: %(message)s")
    sock = _bind(args.listen)
    coordinator = _coordinator(args, sock)
    options.warn_without_token(coordinator.token, sock.getsockname()[0])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) != signal.SIG_IGN:  # As SIGHUP is under nohup.
            asyncio.get_running_loop().add_signal_handler(number, coordinator.stop)
    if signals.inbox().has_pending:  # It came during the start, when signals were only noted.
        coordinator.stop()
    shown = endpoints.endpoint_text(*sock.getsockname()[:2])
    await _serve(args, coordinator, lambda: logging.getLogger("holdfast").info("listening at %s", shown))


async def _serve(args: argparse.Namespace, coordinator: Coordinator, when_ready: Callable[[], None]) -> None:
    """The other port is opened when this coordinator surely serves; a warning about it still reaches the user."""
    monitor = monitoring.MonitoringServer(args.http, coordinator) if args.http is not None else None

    def ready() -> None:
        if monitor is not None:
            monitor.start()
        when_ready()

    with watchdog.watching(lambda: coordinator.patience_s):
        try:
            await coordinator.serve(ready)
        finally:
            if monitor is not None:
                monitor.stop()


async def _serve_for_a_run(args: argparse.Namespace) -> None:
    """Started by an agent: it ends with the run, or when no node is connected, and writes to its log only."""
    sock = socket.socket(fileno=args.fd)
    args.idle_timeout = _IDLE_TIMEOUT_S
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Whatever the agent blocks or ignores, the coordinator can be stopped as any other can.
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if args.office is not None:
        await _serve_in_office(args, sock)
        return
    log = memory.log_path(memory.endpoint_name(*sock.getsockname()[:2]))
    coordinator = _coordinator(args, sock)
    try:
        await _serve(args, coordinator, lambda: _withdraw(log))
    except launch.PortTaken:
        print(launch.READY)  # Another coordinator was faster, and serves.
    else:
        log.unlink(missing_ok=True)


async def _serve_in_office(args: argparse.Namespace, sock: socket.socket) -> None:
    """For one run on etcd, for as long as etcd renews its lease. Its port varies, so its log is named after the run:
    successive coordinators of a host append to it, and the one that sees the end of the run removes it."""
    import msgspec

    from holdfast.rendezvous.etcd.memory import Appointment, EtcdKeeper

    appointment = msgspec.json.decode(args.office, type=Appointment)
    log = memory.log_path(appointment.run_id)
    keeper = EtcdKeeper(appointment)
    coordinator = _coordinator(args, sock, keeper, appointment.run_id)
    try:
        await keeper.begin()
        keeper.when_over = coordinator.resign
        await _serve(args, coordinator, lambda: _withdraw(log, os.O_APPEND))
    finally:
        await keeper.close()
    if not keeper.reason_to_resign and not coordinator.has_failed:
        log.unlink(missing_ok=True)


def _coordinator(
    args: argparse.Namespace, sock: socket.socket, keeper: Keeper | None = None, only_run: str | None = None
) -> Coordinator:
    # Each connection needs a descriptor. The usual soft limit is for programs that use select.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Thousands of nodes may join at once, with a line for each: leave out what no line shows.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # As the documentation of logging advises.
    memory.warn_of_directory()
    return Coordinator(
        sock,
        keeper or memory.StateFiles(memory.default_directory(), *sock.getsockname()[:2]),
        token=options.read_token(args.token_file, is_required=args.require_token),
        tls=options.TlsFiles(args.tls_cert, args.tls_key, args.tls_ca).load(is_server=True),
        idle_timeout_s=args.idle_timeout,
        only_run=only_run,
    )


def _withdraw(log: Path, how: int = os.O_TRUNC) -> None:
    """Tell the agent that started this coordinator that it is ready, and let go of its terminal and directory."""
    print(launch.READY, flush=True)
    output = os.open(os.devnull, os.O_WRONLY)
    try:
        memory.make_private(log.parent)
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


def _bind(endpoint: str | None) -> socket.socket:
    if not endpoint:
        raise UserError("--listen HOST:PORT is required")
    check_brackets("--listen", endpoint, 29400)
    host, port = endpoints.parse_rendezvous_endpoint(endpoint, 29400)
    try:
        return launch.bind(host, port)
    except socket.gaierror as error:
        raise UserError(f"cannot listen at {endpoint}: the name does not resolve ({error.strerror})") from None
