"""`holdfast submit` and `holdfast render`: the command line of `holdfast run`, as a job for an engine.

Both read the options of `holdfast run` (the same table, the same scanner), those of the engine, and the script. What
the environment adds (`PET_*`) becomes part of the job, because the engine's nodes may have another environment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from holdfast import signals
from holdfast.cli import console
from holdfast.cli.arguments import command_line
from holdfast.cli.arguments.options import HOSTS, OPTIONS
from holdfast.cli.arguments.parser import PlainParser
from holdfast.cli.exit_status import reported
from holdfast.cli.job import job_of
from holdfast.errors import UserError
from holdfast.frozen import changed
from holdfast.hosts import engines
from holdfast.hosts.engines import Engine, O
from holdfast.hosts.job import JobSpec
from holdfast.log import Logger
from holdfast.option import Option, Options, flag, optional

_USAGE = "holdfast {} ENGINE [options of the engine] [options of holdfast run] script [arguments]"
_DESCRIPTIONS = {
    "submit": "Start a job on the nodes of an engine, show its output, and end with its exit code.",
    "render": "Print the batch script or manifest by which an engine starts a job.",
}
_EPILOG = """\
All options of `holdfast run` can be given as well, but for those that the engine decides: where the nodes meet and
which rank each has, and all about hosts by ssh. See docs/engines.md.

examples:
  holdfast submit slurm --nnodes 2 --nproc-per-node 8 train.py
  holdfast render slurm --nnodes 2 --nproc-per-node 8 train.py
"""
log = Logger(__name__)
C = TypeVar("C", bound=Options)


class _SubmitOptions(Options):
    # fmt: off
    on = optional("--on ENGINE", engines.OWN, str, help="the engine, if it does not come first")
    detach = flag("--detach", engines.OWN, help=
        "do not wait for the job: print its id and return when the engine has accepted it")
    # fmt: on


def submit(argv: Sequence[str]) -> int:
    def start() -> int:
        name, tokens = _engine_named("submit", argv)
        engine = engines.find(name, "submit")
        job, settings, own = read(engine, tokens, _SubmitOptions)
        if own.on is None and tokens is argv:  # It is an argument of the script.
            raise _no_engine("submit")
        signals.inbox().watch(job.notice_signal if engine.takes_notice else None, frozenset())
        return engine.submit(job, settings, detach=own.detach)

    return _reported("submit", start)


def render(argv: Sequence[str]) -> int:
    def show() -> int:
        name, tokens = _engine_named("render", argv)
        engine = engines.find(name, "render")
        job, settings, _ = read(engine, tokens, Options)
        console.deliver(engine.render(job, settings))
        for line in engine.advice(job, settings):
            log.info("%s", line)
        return 0

    return _reported("render", show)


def _engine_named(command: str, argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The engine comes first. `submit` also knows `--on`, anywhere before the script. With the tokens to be read."""
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    for index, token in enumerate(argv if command == "submit" else ()):
        if token.startswith("--on="):
            return token.removeprefix("--on="), argv
        if token == "--on" and index + 1 < len(argv):
            return argv[index + 1], argv
    if {"-h", "--help"} & {*argv}:
        raise command_line.HelpWanted
    raise _no_engine(command)


def _no_engine(command: str) -> UserError:
    known = ", ".join(kind.name for kind in engines.kinds() if kind.can(command))
    return UserError(f"the engine comes first, as in `holdfast {command} {known.partition(', ')[0]}`; known: {known}")


def _reported(command: str, act: Callable[[], int]) -> int:
    return reported(f"holdfast {command}", _USAGE.format(command), act, lambda: get_parser(command).print_help())


def get_submit_parser() -> PlainParser:
    return get_parser("submit")


def get_render_parser() -> PlainParser:
    return get_parser("render")


def get_parser(command: str) -> PlainParser:
    """For `--help` and docs/cli.md: it reads no command line."""
    parser = PlainParser(f"holdfast {command}", _DESCRIPTIONS[command], _EPILOG, _USAGE.format(command))
    rows: dict[str, tuple[Option, list[str]]] = {}
    own = [("", _SubmitOptions.table())] if command == "submit" else []
    engine_rows = [(f"{kind.name}: ", kind.options.table()) for kind in engines.kinds() if kind.can(command)]
    for whose, options in (*own, *engine_rows):
        for option in options:  # Several engines may have an option of the same name.
            note = f" (default: {option.default_text})" if option.default_text else ""
            rows.setdefault(option.name, (option, []))[1].append(f"{whose}{option.help}{note}")
    for option, texts in rows.values():
        parser.add_option(option, "; ".join(texts))
    return parser


def read(engine: Engine[O], tokens: Sequence[str], common: type[C]) -> tuple[JobSpec, O, C]:
    """The job, and the values of the engine's options and of those of the command."""
    own = {row.dest for kind in (common, engine.options) for row in kind.table()}
    # Nothing is shortened.
    rows = [changed(row, in_full=True) for kind in (common, engine.options) for row in kind.table()]
    args = command_line.parse(tokens, rows)
    console.set_up(quiet=args.quiet, verbose=args.verbose)
    for name in engine.decides:
        if name in args.given:
            flag = args.given[name].partition("=")[0]
            raise UserError(f"{flag}: {engine.name} decides that itself; leave the option out")
    for option in OPTIONS:
        if option.group == HOSTS and option.dest in args.given and option.dest not in own | {"env"}:
            reason = (
                f"is for hosts that `holdfast run --hosts` reaches by ssh, and {engine.name} starts the agents itself"
            )
            named = option.variable if option in args.from_environment else option.flags[-1]
            raise UserError(f"{named} {reason}; leave it out")
    job = job_of(args, own | {"env"}, sys.executable)
    return job, engine.options.taken_from(args), common.taken_from(args)
