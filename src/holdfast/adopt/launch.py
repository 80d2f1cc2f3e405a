"""`torchrun` and `python -m torch.distributed.run` or `.launch` of an adopted command, and what `import
torch.distributed.launch` gets there.

The older front end differs from torchrun in one thing: without `--use-env` every worker has `--local-rank=N` as its
first argument.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.adopt import hook
from holdfast.cli import console
from holdfast.cli import run as cli_run
from holdfast.cli.arguments import command_line
from holdfast.cli.arguments.options import WORKERS, RunArguments
from holdfast.cli.run import run
from holdfast.log import Logger
from holdfast.option import Option
from holdfast.process.adoption import without_adoption

if TYPE_CHECKING:
    import argparse

__all__ = ["launch", "main", "parse_args", "run"]

log = Logger(__name__)

USE_ENV = Option("--use-env", WORKERS, "Give workers their local rank in LOCAL_RANK alone.", in_environment=False)
_INTERPRETER = re.compile(r"""#!\s*(\S*python[\w.]*)|#!/bin/sh\n'''exec' "?([^"\n]*?python[\w.]*)"?\s""")


def parse_args(args: Sequence[str] | None) -> RunArguments:
    return command_line.read(sys.argv[1:] if args is None else args, (USE_ENV,))


def launch(args: RunArguments | argparse.Namespace) -> None:
    if not getattr(args, "use_env", True):
        log.warning(
            "torch.distributed.launch is the older form of torchrun: workers get --local-rank as an argument "
            "(--use-env leaves it out)"
        )
    run(args)


def main(args: Sequence[str] | None = None) -> None:
    parsed = parse_args(args)
    console.set_up(quiet=parsed.quiet, verbose=parsed.verbose)
    launch(parsed)


def launch_command(args: Sequence[str]) -> int:
    """`holdfast adopted-launch`."""
    hook.note(f"{hook.USED}python -m torch.distributed.launch")
    return cli_run.command(args, main)


def run_command(args: Sequence[str]) -> int:
    """`holdfast adopted-run`."""
    hook.note(f"{hook.USED}python -m torch.distributed.run")
    return cli_run.command(args)


def torchrun_command(args: Sequence[str]) -> int:
    """`holdfast adopted-torchrun`. Workers run under the Python of the torchrun that is replaced, as far as it can be
    found."""
    hook.note(f"{hook.USED}torchrun")
    python = _interpreter_of_torchrun()
    if python and hook.place_of(python) != hook.place_of(sys.executable):
        os.environ.setdefault("PYTHON_EXEC", python)
    return cli_run.command(args)


def _interpreter_of_torchrun() -> str:
    """The one that the first line of the script names; "" if there is no such script."""
    path = os.fsdecode(without_adoption(os.environb).get(b"PATH", b""))
    script: Any = shutil.which("torchrun", path=path)
    try:
        with open(script or "", encoding="utf-8") as file:
            found = _INTERPRETER.match(file.read(1024))
    except (OSError, ValueError):
        return ""
    return (found[1] or found[2]) if found else ""
