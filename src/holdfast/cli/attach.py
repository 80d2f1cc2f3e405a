"""`holdfast attach`: shows the output of a run that `holdfast run --hosts --detach` has started, and ends with it.

The command that owns the run writes to a file and has a control socket (`hosts.ssh.questions`). This one shows what the
file has of this run, and asks the socket for the end.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from holdfast import loop, stdio
from holdfast.cli import runs
from holdfast.cli.arguments.parser import PlainParser
from holdfast.errors import HostError
from holdfast.observe.ask import LocalRun, Question
from holdfast.process.output.logs import open_left_file

PROGRAM = "holdfast attach"
_LOOK_AGAIN_S = 0.2  # At a file: no event says that it has grown.
_PIECE_BYTES = 1 << 16

_EPILOG = """\
Ctrl-C ends this command, and the run goes on; `holdfast stop RUN` ends the run.

exit status:
  n    the run has ended with exit code n
  1    there is no such run, or it was not started with --detach on this host
  130  Ctrl-C; the run goes on

example:
  holdfast attach job7
"""


def get_parser() -> PlainParser:
    description = "Show the output of a run that was started with --hosts and --detach, until its end."
    return runs.parser_for(PROGRAM, description, _EPILOG, json_help="")


def main(argv: Sequence[str]) -> int:
    codes: list[int] = []

    def follow(args: argparse.Namespace) -> str:
        with suppress(BrokenPipeError):  # The reader has gone (`| head`), and the run goes on.
            codes.append(_followed(runs.open_run(args)))
        return ""

    return get_parser().run(argv, follow) or sum(codes)


def _followed(run: Any) -> int:
    for agent in run.local_agents() if isinstance(run, LocalRun) else ():
        try:
            place = Question(agent.socket, {"command": "attach"}).answer().get("result")
            end = Question(agent.socket, {"command": "end"})
        except (OSError, ValueError):
            continue
        begin, _, path = str(place or "").partition(":")
        if path and begin.isdecimal():
            return _show(path, int(begin), end, run.name)
        end.close()
    raise HostError(f"run {run.name!r} was not started with --hosts and --detach on this host")


def _show(path: str, begin: int, end: Question, name: str) -> int:
    with open_left_file(path) as output:
        output.seek(begin)
        has_ended = False
        while not has_ended:
            has_ended = loop.is_readable(end.fileno())
            while piece := output.read(_PIECE_BYTES):
                left = memoryview(piece)
                while left:
                    left = left[stdio.write_some(1, left) :]
            if not has_ended:
                loop.wait_readable([end.fileno()], _LOOK_AGAIN_S)
    try:
        return int(end.answer()["result"]["exit_code"])
    except (OSError, ValueError, KeyError, TypeError):
        raise HostError(
            f"the command that owned run {name!r} was killed; see the end of {os.path.abspath(path)}"
        ) from None
