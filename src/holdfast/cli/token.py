"""`holdfast token`: make the secret of a run, or derive one that opens a single run."""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Sequence

from holdfast.cli.arguments.parser import PlainParser
from holdfast.errors import UserError
from holdfast.rendezvous.membership import keys

PROGRAM = "holdfast token"

_EPILOG = """\
Give the file to every node of a run (--token-file FILE); without the token no node gets in. With --run, a node that has
only the printed token can take part in that run and in no other of the same coordinator.

examples:
  holdfast token > token
  holdfast token --run job7 --token-file token > token-of-job7
"""


def get_parser() -> PlainParser:
    parser = PlainParser(PROGRAM, "Print a new token, or the token of one run.", _EPILOG)
    parser.add_argument("--run", metavar="ID", help="the token of this run alone, derived from --token-file")
    parser.add_argument("--token-file", default="", metavar="FILE", help="the coordinator's token (or the environment "
                        "variable HOLDFAST_TOKEN); only with --run")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
    return get_parser().run(argv, _make)


def _make(args: argparse.Namespace) -> str:
    text = _token(args.run, args.token_file)
    _make_private(1)
    return f"{text}\n"


def _token(run_id: str | None, token_file: str) -> str:
    if run_id is None:
        if token_file:
            raise UserError("--token-file is for --run: a new token is made of nothing but chance")
        return keys.made_token(os.urandom(32))
    from holdfast.rendezvous import settings

    if not run_id:
        raise UserError("--run needs the id of a run")
    token = settings.read_token(token_file)
    if token is None:
        raise UserError("--run needs the coordinator's token: give --token-file, or set HOLDFAST_TOKEN")
    settings.warn_of_token(token)
    return keys.run_token(token, run_id).decode(errors="surrogateescape")


def _make_private(fd: int) -> None:
    """A file that the shell made for us is open to all users as a rule, and a token in it would be refused."""
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        os.fchmod(fd, 0o600)
