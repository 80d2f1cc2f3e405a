"""`holdfast coordinator`: serve runs from a place of its own, instead of from the first agent's host."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from typing import NoReturn

from holdfast.errors import HoldfastError, UserError

_EPILOG = """\
The agents of a run find a coordinator at their --rdzv-endpoint. If nobody listens there, the agent on whose host
the endpoint is starts one; start one by hand where it shall outlive every host of the run.

example:
  holdfast coordinator --listen 10.0.0.1:29400 --token-file /etc/holdfast.token
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"holdfast coordinator: error: {message}\n")


def get_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="holdfast coordinator",
        description="Serve the membership of any number of runs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="where to listen; exactly there, not on all interfaces")
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--token-file", default="", metavar="FILE", help="agents must know the token in this file "
                        "(or the environment variable HOLDFAST_TOKEN)")  # fmt: skip
    parser.add_argument("--tls-cert", default="", metavar="FILE", help="speak TLS with this certificate")
    parser.add_argument("--tls-key", default="", metavar="FILE", help="the certificate's key, if it is not in it")
    parser.add_argument("--tls-ca", default="", metavar="FILE", help="agents must show a certificate of this authority")
    parser.add_argument("--idle-timeout", type=float, metavar="SECONDS", help="end when nobody has been there for so "
                        "long, and when the last run is over (default: serve until stopped)")  # fmt: skip
    return parser


def main(argv: list[str]) -> int:
    args = get_parser().parse_args(argv)
    try:
        return asyncio.run(_serve(args))
    except HoldfastError as error:
        print(f"holdfast coordinator: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:
        print(f"holdfast coordinator: error: cannot serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


async def _serve(args: argparse.Namespace) -> int:
    from holdfast.rendezvous import options
    from holdfast.rendezvous.coordinator import Coordinator

    is_by_hand = args.fd is None
    sock = _listen(args.listen) if is_by_hand else socket.socket(fileno=args.fd)
    if is_by_hand:
        logging.basicConfig(level=logging.INFO, format="holdfast coordinator: %(message)s")
    idle_timeout_s = args.idle_timeout if is_by_hand else 60.0
    coordinator = Coordinator(
        sock,
        token=options.read_token(args.token_file),
        tls=options.server_tls(args.tls_cert, args.tls_key, args.tls_ca),
        idle_timeout_s=idle_timeout_s,
    )
    loop = asyncio.get_running_loop()
    if is_by_hand:
        host, port = sock.getsockname()[:2]
        logging.getLogger("holdfast").info("listening at %s:%d", host, port)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, coordinator.stop)
    else:
        # It was started for a run, not by a person; it ends with the run, or when nobody is there.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    await coordinator.serve()
    return 0


def _listen(endpoint: str | None) -> socket.socket:
    from holdfast.rendezvous import endpoints, hosting

    if not endpoint:
        raise UserError("--listen HOST:PORT is required")
    host, port = endpoints.parse_rendezvous_endpoint(endpoint, 29400)
    try:
        sock = hosting.try_to_listen(host, port)
    except socket.gaierror as error:
        raise UserError(f"cannot listen at {endpoint}: the name does not resolve ({error.strerror})") from None
    if sock is None:
        raise UserError(f"cannot listen at {endpoint}: the address is not of this host, or the port is taken")
    return sock
