"""`holdfast warm`: import modules for the next runs of this user, and show or end what is kept for them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from holdfast import text
from holdfast.cli import console
from holdfast.cli.arguments.parser import PlainParser, argument
from holdfast.cli.arguments.values import duration_s, module_names
from holdfast.errors import HostError, UserError
from holdfast.process.output.logs import DefaultLogsSpecs
from holdfast.process.spawner import client, command, kept
from holdfast.process.workers.group import GroupSpec

PROGRAM = "holdfast warm"

_EPILOG = """\
A run with --preload of the same modules, by the same user in the same environment, then starts at once. What is kept
ends by itself when no run has used it for the time of --keep, when memory is short, or when a file of it has changed.
As for a run of several workers, OMP_NUM_THREADS is 1 unless it is set. See docs/warm-start.md.

examples:
  holdfast warm torch,numpy --keep 1h
  holdfast run --preload torch,numpy train.py
  holdfast warm --list
  holdfast warm --stop
"""


def get_parser() -> PlainParser:
    parser = PlainParser(PROGRAM, "Import modules once for the next runs, and keep them in memory.", _EPILOG)
    parser.add_argument("modules", nargs="?", type=argument(module_names), default=(), metavar="MODULES",
                        help="as in --preload of `holdfast run`, such as torch,numpy")  # fmt: skip
    parser.add_argument("--keep", type=argument(duration_s), default=600.0, metavar="TIME",
                        help="for how long they stay after the last run that used them (default: 10m)")  # fmt: skip
    parser.add_argument("--timeout", type=argument(duration_s), default=300.0, metavar="TIME",
                        help="how long the imports may take (default: 5m)")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="show what is kept")
    parser.add_argument("--stop", action="store_true", help="end what is kept, or only MODULES")
    return parser


def main(argv: Sequence[str]) -> int:
    return get_parser().run(argv, _do)


def _do(args: argparse.Namespace) -> str:
    if args.stop:
        return _stop(args.modules)
    if args.list:
        return _list()
    if not args.modules or "auto" in args.modules:
        raise UserError("name the modules, such as torch,numpy; or use --list or --stop")
    return _start(args.modules, args.keep, args.timeout)


def _start(modules: tuple[str, ...], keep_s: float, timeout_s: float) -> str:
    if job := kept.batch_job():
        raise UserError(f"nothing is kept in a batch job ({job} is set)")
    console.set_up()
    for name, value in kept.THREADS.items():
        os.environ.setdefault(name, value)
    os.chdir("/")  # A module of the same name in this directory is not meant.
    group = GroupSpec(
        "warm", sys.executable, DefaultLogsSpecs(os.devnull), preload=modules, preload_timeout_s=timeout_s
    )
    wanted = command.template_for(group, ("-u", "-c", "pass"))
    assert wanted is not None
    link = client.launch_or_take_early(modules)
    try:
        link.preload(wanted, command.bytecode())
        while link.is_preloading:
            link.wait(None)
            link.reports()
        why = link.keep(keep_s, modules)
    except BaseException:
        link.close()
        raise
    if why:
        link.close()
        raise HostError(f"{', '.join(modules)} cannot be kept: {why}")
    return f"{', '.join(modules)} stays preloaded for {text.duration(keep_s)} (process {link.pid})\n"


def _list() -> str:
    lines = [(each.pid, each.state(), text.size_text(each.memory_bytes()), each.modules) for each in kept.everyone()]
    if not lines:
        return "nothing is kept\n"
    heading = ("PROCESS", "STATE", "MEMORY", "MODULES")
    rows = [tuple(map(str, line)) for line in (heading, *lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)


def _stop(modules: tuple[str, ...]) -> str:
    told = [each.stop() for each in kept.everyone() if not modules or each.modules == ",".join(modules)]
    return "".join(f"{line}\n" for line in told) or "nothing is kept\n"
