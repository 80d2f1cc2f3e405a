"""Every command and its options as data. Shell completion, the man page and docs/cli.md are made from it.

The commands come from `main.COMMANDS`. Their options come from the table of `holdfast run` and from the parser that the
module of each command makes: `get_NAME_parser` if it has one, else `get_parser`.
"""

from __future__ import annotations

import argparse
from importlib import import_module

from holdfast.cli.arguments.options import INFORMATION, OPTIONS
from holdfast.cli.main import COMMANDS
from holdfast.frozen import frozen
from holdfast.hosts import engines

_FILES = ("FILE", "DIR", "DIRECTORY", "PATH")
# Their options may be followed by those of `holdfast run`, then comes the program, whose arguments are its own.
STARTING = ("run", "submit", "render", "rehearse")


@frozen
class Flag:
    """One option. `metavar` is empty if it takes no value. `may_repeat`: it may be given more than once."""

    names: tuple[str, ...]
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    may_repeat: bool = False

    @property
    def takes_file(self) -> bool:
        return self.metavar in _FILES

    @property
    def summary(self) -> str:
        """The first sentence of its help, or the beginning of it."""
        return self.help.partition(". ")[0].partition("; ")[0].partition(": ")[0].rstrip(".")


@frozen
class Command:
    """`words` are what may follow it in the first place, such as the names of engines."""

    name: str
    what: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...] = ()

    @property
    def starts_program(self) -> bool:
        return self.name in STARTING


def commands() -> tuple[Command, ...]:
    return tuple(_command(name, what) for name, (_, what) in COMMANDS.items())


def parser_of(name: str) -> argparse.ArgumentParser:
    """That of any command but `run`."""
    module = import_module(COMMANDS[name][0].partition(":")[0])
    made: argparse.ArgumentParser = (getattr(module, f"get_{name}_parser", None) or module.get_parser)()
    return made


def _command(name: str, what: str) -> Command:
    of_run = [
        Flag(each.flags, each.help, "" if each.is_flag else each.invocation.split()[-1], each.choices,
             bool(each.joined_by)) for each in (*OPTIONS, *INFORMATION)
    ]  # fmt: skip
    if name == "run":
        return Command(name, what, tuple(of_run))
    actions = [each for each in parser_of(name)._actions if each.help not in (None, argparse.SUPPRESS)]
    own = [_flag(each) for each in actions if each.option_strings]
    taken = {flag for each in own for flag in each.names}
    if name in STARTING:
        own += [each for each in of_run if not taken & {*each.names}]
    places = [each for each in actions if not each.option_strings and each.choices]
    words = engines.names() if name in ("submit", "render") else [*map(str, places[0].choices or ())] if places else []
    return Command(name, what, tuple(own), tuple(words))


def _flag(action: argparse.Action) -> Flag:
    choices = tuple(map(str, action.choices or ()))
    metavar = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    may_repeat = isinstance(action, argparse._AppendAction)
    return Flag(tuple(action.option_strings), action.help or "", metavar, choices, may_repeat)
