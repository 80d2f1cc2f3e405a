"""`holdfast submit` and `holdfast render`: the command line of `holdfast run`, as a job for an engine.

Both read the options of `holdfast run` (the same table, the same scanner), those of the engine, and the script. What
the environment adds (`PET_*`) becomes part of the job, because the engine's nodes may have another environment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.cli import console
from holdfast.cli.arguments import command_line
from holdfast.cli.arguments.options import HOSTS, OPTIONS, Option
from holdfast.cli.arguments.parser import PlainParser
from holdfast.cli.exit_status import explain
from holdfast.cli.job import job_of
from holdfast.errors import UserError
from holdfast.hosts import engines
from holdfast.hosts.engines import Engine, EngineOption
from holdfast.hosts.job import JobSpec

_USAGES = {
    "submit": "holdfast submit --on ENGINE [options of the engine] [options of holdfast run] script [arguments]",
    "render": "holdfast render ENGINE [options of the engine] [options of holdfast run] script [arguments]",
}
_DESCRIPTIONS = {
    "submit": "Start a job on the nodes of an engine, show its output, and end with its exit code.",
    "render": "Print the batch script or manifest by which an engine starts a job.",
}
_EPILOG = """\
All options of `holdfast run` can be given as well, but for those that the engine decides: where the nodes meet and
which rank each has, and all about hosts by ssh. See docs/engines.md.

examples:
  holdfast submit --on slurm --nnodes 2 --nproc-per-node 8 train.py
  holdfast render slurm --nnodes 2 --nproc-per-node 8 train.py
"""


def _own_option(row: EngineOption) -> Option:
    """As a row of the table. `PET_*` variables are those of `holdfast run` alone, and nothing is shortened."""
    return Option(row.invocation, "", row.help, row.parse, row.default, row.choices, in_environment=False, in_full=True)


_ON = EngineOption("--on ENGINE", "the engine that starts the job")
_DETACH = EngineOption("--detach", "do not wait for the job: print its id and return when the engine has accepted it")


def submit(argv: Sequence[str]) -> int:
    """`--on` may stand anywhere before the script. Which options there are is known only when it was found."""

    def start() -> int:
        name = _engine_named(argv)
        if not name and {"-h", "--help"} & {*argv}:
            raise command_line.HelpWanted
        if not name:
            raise _no_engine()
        engine = engines.find(name, "submit")
        job, settings = read(engine, argv, (_ON, _DETACH))
        if settings.pop("on") is None:
            raise _no_engine()
        return engine.submit(job, settings)

    return _reported("submit", start)


def render(argv: Sequence[str]) -> int:
    def show() -> int:
        if argv[:1] in (["-h"], ["--help"]):
            raise command_line.HelpWanted
        if not argv or argv[0].startswith("-"):
            raise UserError(f"the engine comes first: {_USAGES['render']}")
        engine = engines.find(argv[0], "render")
        console.print_out(engine.render(*read(engine, argv[1:])))
        sys.stdout.flush()
        return 0

    return _reported("render", show)


def _reported(command: str, act: Callable[[], int]) -> int:
    """What went wrong is one line, and the exit code says whose it is."""
    try:
        return act()
    except command_line.HelpWanted:
        get_parser(command).print_help()
        return 0
    except command_line.UsageError as problem:
        return command_line.refuse(f"holdfast {command}", _USAGES[command], problem)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error, f"holdfast {command}")


def get_submit_parser() -> PlainParser:
    return get_parser("submit")


def get_render_parser() -> PlainParser:
    return get_parser("render")


def get_parser(command: str) -> PlainParser:
    """For `--help` and docs/cli.md: it reads no command line."""
    parser = PlainParser(f"holdfast {command}", _DESCRIPTIONS[command], _EPILOG, _USAGES[command])
    rows: dict[str, tuple[EngineOption, list[str]]] = {}
    own = [("", (_ON, _DETACH))] if command == "submit" else []
    engine_rows = [(f"{kind.name}: ", kind.options) for kind in engines.kinds() if kind.can(command)]
    for whose, options in (*own, *engine_rows):
        for row in options:  # Several engines may have an option of the same name.
            default = _own_option(row).default_text
            note = f" (default: {default})" if default else ""
            rows.setdefault(_own_option(row).name, (row, []))[1].append(f"{whose}{row.help}{note}")
    for row, texts in rows.values():
        option = _own_option(row)
        kwargs: dict[str, Any] = {} if option.is_flag else {"metavar": row.invocation.split()[-1]}
        action = "store_true" if option.is_flag else "store"
        parser.add_argument(*option.flags, action=action, help="; ".join(texts).replace("%", "%%"), **kwargs)
    return parser


def _no_engine() -> UserError:
    known = ", ".join(kind.name for kind in engines.kinds() if kind.can("submit"))
    return UserError(f"--on ENGINE is needed, before the script; the engines are: {known or 'none'}")


def _engine_named(argv: Sequence[str]) -> str:
    """What follows the first `--on`. If that belongs to the script, `read` will find no other."""
    for index, token in enumerate(argv):
        if token.startswith("--on="):
            return token.removeprefix("--on=")
        if token == "--on" and index + 1 < len(argv):
            return argv[index + 1]
    return ""


def read(engine: Engine, tokens: Sequence[str], common: Sequence[EngineOption] = ()) -> tuple[JobSpec, dict[str, Any]]:
    """The job, and the values of the engine's options."""
    rows = [_own_option(row) for row in (*common, *engine.options)]
    args = command_line.parse(tokens, rows)
    console.set_up(quiet=args.quiet, verbose=args.verbose)
    for name in engine.decides:
        if name in args.given:
            flag = args.given[name].partition("=")[0]
            raise UserError(f"{flag}: {engine.name} decides that itself; leave the option out")
    for option in OPTIONS:
        if option.group == HOSTS and option.dest in args.given:
            reason = (
                f"is for hosts that `holdfast run --hosts` reaches by ssh, and {engine.name} starts the agents itself"
            )
            named = option.variable if option in args.from_environment else option.flags[-1]
            raise UserError(f"{named} {reason}; leave it out")
    job = job_of(args, {row.dest for row in rows}, sys.executable)
    return job, {row.dest: getattr(args, row.dest) for row in rows}
