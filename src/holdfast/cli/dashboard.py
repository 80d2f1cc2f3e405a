"""`holdfast dashboard`: serve the page about a run, in the foreground."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from holdfast.cli import console, runs
from holdfast.cli.arguments.parser import PlainParser, argument
from holdfast.cli.arguments.values import duration_s, host_and_port
from holdfast.observe.ask import AskedRun
from holdfast.observe.dashboard.serving import DEFAULT_ADDRESS, DEFAULT_LINGER_S, Service, serve

PROGRAM = "holdfast dashboard"

_EPILOG = """\
The page shows the nodes and workers of the run, its rounds and what ended each, live logs, stacks and the failure
report. It is read-only unless the run's token is given (--token-file or HOLDFAST_TOKEN); then it can end the run, too.
The URL has a key in it, which is all one needs to look. On an address that other hosts can reach, the token is needed.
It needs the packages of `pip install 'holdfast[dashboard]'`.

exit status:
  0      the run has ended, and the page was there for --linger after that
  1      there is no such run, it cannot be asked, or the page cannot be served
  2      wrong usage, or several runs fit
  128+n  ended by signal n, for example 130 after Ctrl-C

examples:
  holdfast dashboard
  holdfast dashboard job7 --rdzv-endpoint node1:29400 --token-file token
"""


def get_parser() -> PlainParser:
    description = "Serve a page about a run: nodes, workers, rounds, logs, failures."
    parser = runs.parser_for(PROGRAM, description, _EPILOG, json_help="")
    parser.add_argument("--addr", type=argument(host_and_port), default=DEFAULT_ADDRESS, metavar="[HOST:]PORT",
                        help=f"where to serve (default: {DEFAULT_ADDRESS}; port 0 is any free one)")  # fmt: skip
    parser.add_argument("--linger", type=argument(duration_s), default=DEFAULT_LINGER_S, metavar="TIME", help="how "
                        "long to stay after the run has ended (default: 5m)")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
    args = get_parser().parse_args(argv)
    service = Service(args.addr, args.linger, args.token_file, may_read_files=not args.all_users)

    def find_run() -> AskedRun:
        # On this host the token is for what the page may do, not for asking.
        ours = {} if args.rdzv_endpoint is not None else {"token_file": ""}
        run = runs.open_run(argparse.Namespace(**{**vars(args), **ours}))
        args.run, args.rdzv_id = run.name, None  # Other runs may start on this host later.
        return run

    def announce(name: str, url: str) -> None:
        console.print_out(f"dashboard of run {name} (pid {os.getpid()}, Ctrl-C ends it): {url}\n")

    return console.show(PROGRAM, lambda: f"{serve(service, find_run, announce)}\n")
