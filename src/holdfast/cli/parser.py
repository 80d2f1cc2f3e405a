"""How a command line of `holdfast run` is read.

The tokens are scanned from the left until the first one that is neither an option nor an option's value: that
is the script, and all that follows is the script's own, whatever it looks like. Before the script a name may
be shortened as long as it means one option, and dashes and underscores mean the same. Only then does argparse
see the options, each in its full spelling, and convert the values. What the command line leaves open comes
from `PET_<NAME>`, read at that moment, and otherwise from the default. An empty variable counts as unset.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from holdfast.cli import console
from holdfast.cli.help import help_text
from holdfast.cli.options import OPTIONS, PROGRAM, USAGE, Option

# Options of other launchers that have no counterpart, and what to do instead.
_FOREIGN = {
    "-n": "did you mean --nproc-per-node?",
    "-np": "did you mean --nproc-per-node?",
    "-N": "did you mean --nnodes?",
    "--use-env": "workers always get their local rank in LOCAL_RANK, and never as an argument; leave the option out",
}


class _UsageError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Split:
    """A command line taken apart: options in full for argparse, what they set, and the script's part."""

    tokens: list[str] = field(default_factory=list)
    dests: set[str] = field(default_factory=set)
    rest: list[str] = field(default_factory=list)


def _with_dashes(name: str) -> str:
    return "--" + name[2:].replace("_", "-")


def _looks_like_option(token: str) -> bool:
    if len(token) < 2 or token[0] != "-":
        return False
    try:
        float(token)
    except ValueError:
        return True
    return False


def _listed(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


class _Scanner:
    """Splits one command line; `actions` maps every spelling to what argparse knows of it."""

    def __init__(self, actions: Mapping[str, argparse.Action]) -> None:
        self._short = {name[1]: action for name, action in actions.items() if len(name) == 2}
        self._long = {_with_dashes(name): action for name, action in actions.items() if name.startswith("--")}

    def split(self, tokens: Sequence[str]) -> _Split:
        found = _Split()
        queue = iter(tokens)
        for token in queue:
            if token == "--":
                break
            if not _looks_like_option(token):
                found.rest.append(token)
                break
            reader = self._long_option if token.startswith("--") else self._short_options
            for action, value in reader(token, queue):
                found.dests.add(action.dest)
                name = action.option_strings[-1]
                found.tokens.append(name if value is None else f"{name}={value}")
        found.rest.extend(queue)
        return found

    def _long_option(self, token: str, queue: Iterator[str]) -> Iterator[tuple[argparse.Action, str | None]]:
        name, equals, value = token.partition("=")
        action = self._resolve(name)
        if action.nargs != 0:
            yield action, value if equals else self._next_value(name, queue)
        elif equals:
            raise _UsageError(f"{name} is on or off and takes no value, not {value!r}")
        else:
            yield action, None

    def _short_options(self, token: str, queue: Iterator[str]) -> Iterator[tuple[argparse.Action, str | None]]:
        """`-m`, `-mv`, `-r3` and `-r 3`."""
        letters = token[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            action = self._short.get(letter)
            if action is None:
                raise _UsageError(self._unknown_letter(letter, token.partition("=")[0]))
            if action.nargs == 0:
                yield action, None
                continue
            yield action, letters.removeprefix("=") or self._next_value(f"-{letter}", queue)
            return

    def _unknown_letter(self, letter: str, token: str) -> str:
        """A whole word behind one dash was probably meant to have two."""
        name = token.rstrip("0123456789")
        suggestion = f"; {_FOREIGN[name]}" if name in _FOREIGN else self._suggestion(f"-{token}")
        if suggestion or token == f"-{letter}":
            return f"unknown option {token}{suggestion}"
        return f"unknown option -{letter} in {token}"

    def _next_value(self, name: str, queue: Iterator[str]) -> str:
        value = next(queue, None)
        if value is None:
            raise _UsageError(f"{name} needs a value")
        if _looks_like_option(value):
            raise _UsageError(f"{name} needs a value, but {value} follows (write {name}={value} if it is meant)")
        return value

    def _resolve(self, name: str) -> argparse.Action:
        full = _with_dashes(name)
        if full in self._long:
            return self._long[full]
        matches = sorted(known for known in self._long if known.startswith(full))
        if not matches:
            raise _UsageError(f"unknown option {name}{self._suggestion(full)}")
        if len(matches) > 1:
            raise _UsageError(f"{name} is short for more than one option: {_listed(matches)}")
        return self._long[matches[0]]

    def _suggestion(self, name: str) -> str:
        from difflib import get_close_matches

        if name in _FOREIGN:
            return f": {_FOREIGN[name]}"
        close = get_close_matches(name, list(self._long), n=1, cutoff=0.7)
        return f"; did you mean {close[0]}?" if close else ""


class RunParser(argparse.ArgumentParser):
    """An argparse parser that reads `OPTIONS`, a script and the script's arguments."""

    def __init__(self) -> None:
        super().__init__(prog=PROGRAM, usage=USAGE, allow_abbrev=False)
        for option in OPTIONS:
            self._declare(option)

    def _declare(self, option: Option) -> None:
        if option.is_flag:
            self.add_argument(*option.flags, action="store_true", dest=option.dest)
        else:
            self.add_argument(*option.flags, type=option.read, default=option.default, dest=option.dest)

    # Any in the signature, because the base class has overloads that this one need not tell apart.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        tokens = list(sys.argv[1:] if args is None else args)
        try:
            found = _Scanner(self._option_string_actions).split(tokens)
        except _UsageError as error:
            self.error(str(error))
        namespace, extras = super().parse_known_args(found.tokens, namespace)
        self._fill_from_environment(namespace, found.dests)
        if namespace.quiet and namespace.verbose:
            self.error("--quiet and --verbose exclude each other")
        if not found.rest:
            self.error("a script to run is required")
        namespace.training_script, *namespace.training_script_args = found.rest
        return namespace, extras

    def _fill_from_environment(self, namespace: argparse.Namespace, given: set[str]) -> None:
        namespace.from_environment = []
        for option in OPTIONS:
            text = os.environ.get(option.variable or "", "")
            if not text or option.dest in given:
                continue
            try:
                setattr(namespace, option.dest, option.read(text))
                namespace.from_environment.append(option)
            except argparse.ArgumentTypeError as error:
                self.error(f"environment variable {option.variable}: {error}")

    def format_help(self) -> str:
        return help_text(console.width())

    def print_help(self, file: Any = None) -> None:
        if file is None:
            console.print_out(self.format_help())
        else:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        console.write(f"usage: {USAGE}\n")
        console.write_error(PROGRAM, message.removeprefix("argument "))  # As argparse puts it.
        raise SystemExit(2)
