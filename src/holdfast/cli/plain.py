"""How the small commands read their command lines: by argparse, with errors in one line as `holdfast run` has them."""

from __future__ import annotations

import argparse
from typing import NoReturn

from holdfast.cli import console


class PlainParser(argparse.ArgumentParser):
    def __init__(self, program: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=program,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        console.write_error(self.prog, message.removeprefix("argument "))
        raise SystemExit(2)

    def rows(self) -> list[tuple[str, str]]:
        """Each option and what it means, for the documentation."""
        return [(_invocation(action), action.help) for action in self._actions if action.help and _is_told(action)]


def _is_told(action: argparse.Action) -> bool:
    return action.help is not argparse.SUPPRESS and action.dest != "help"


def _invocation(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {action.metavar}"
