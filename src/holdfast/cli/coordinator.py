"""`holdfast coordinator`: serve runs from a host of your choice, instead of from the first agent's host."""

from __future__ import annotations

import asyncio
import signal
import socket

from holdfast.cli import console
from holdfast.cli.arguments.parser import PlainParser, argument
from holdfast.cli.arguments.values import address, duration_s
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.rendezvous import endpoints, settings
from holdfast.rendezvous.coordinator import launch, process
from holdfast.rendezvous.coordinator.launch import Orders

PROGRAM = "holdfast coordinator"

_EPILOG = """\
The agents of a run find a coordinator at their --rdzv-endpoint. If there is none, the agent on the host of the
endpoint starts one. Start one by hand if it is to outlive every host of the run.

exit status:
  0  it has served until a signal, or until --idle-timeout was over
  1  it cannot serve: the port is taken, or the address is not one of this host
  2  wrong usage

example:
  holdfast coordinator --listen 10.0.0.1:29400 --token-file /etc/holdfast.token
"""


def get_parser() -> PlainParser:
    parser = PlainParser(PROGRAM, "Serve the membership of a run.", _EPILOG)
    parser.add_argument("--listen", type=argument(_listen_address), metavar="[HOST:]PORT", help="where to listen; "
                        "without a host at 127.0.0.1, which no other host can reach")  # fmt: skip
    parser.add_argument("--rdzv-id", default="", metavar="ID", help="serve this run only (default: runs one after "
                        "another; the first node that joins decides which)")  # fmt: skip
    parser.add_argument("--token-file", default="", metavar="FILE", help="agents must know the token in this file "
                        "(or the environment variable HOLDFAST_TOKEN)")  # fmt: skip
    parser.add_argument("--require-token", action="store_true", help="do not start without a token")
    parser.add_argument("--tls-cert", default="", metavar="FILE", help="speak TLS with this certificate")
    parser.add_argument("--tls-key", default="", metavar="FILE", help="the certificate's key, if it is not in it")
    parser.add_argument("--tls-ca", default="", metavar="FILE", help="agents must show a certificate of this authority")
    parser.add_argument("--http", type=argument(address), metavar="[HOST:]PORT", help="answer HTTP "
                        "requests there: /metrics for Prometheus; without a host at 127.0.0.1, port 0 is any free "
                        "one")  # fmt: skip
    parser.add_argument("--idle-timeout", type=argument(duration_s), metavar="TIME", help="exit when no node has been "
                        "connected for this long, or the last run is over (default: serve until stopped)")  # fmt: skip
    return parser


def main(argv: list[str]) -> int:
    parser = get_parser()
    args = parser.parse_args(argv)
    if args.listen is None:
        parser.error("--listen [HOST:]PORT is required")
    if args.idle_timeout == 0:
        parser.error("--idle-timeout 0 is not a time above 0")
    try:
        tls = settings.TlsFiles(args.tls_cert, args.tls_key, args.tls_ca)
        sock = _bind(*args.listen)
        orders = Orders(sock.detach(), args.rdzv_id, args.token_file, args.require_token, tls, args.http or "")
        asyncio.run(process.serve_by_hand(orders, args.idle_timeout))
        return 0
    except HoldfastError as error:
        console.write_error(PROGRAM, str(error))
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:
        console.write_error(PROGRAM, f"cannot serve: {error.strerror or error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _listen_address(text: str) -> tuple[str, int]:
    return endpoints.parse_address(text, 29400)


def _bind(host: str, port: int) -> socket.socket:
    try:
        return launch.bind(host, port)
    except socket.gaierror as error:
        raise HostError(f"cannot listen at {endpoints.endpoint_text(host, port)}: "
                        f"{endpoints.unresolved(host, error)}") from None  # fmt: skip
