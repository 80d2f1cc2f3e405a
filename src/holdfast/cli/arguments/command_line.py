"""How the command line of `holdfast run` is read.

The tokens are scanned from the left until the first one that is neither an option nor an option's value: that is the
script, and all that follows is the script's own, whatever it looks like. Before the script a name may be shortened as
long as it means one option (options that say `in_full` do not count), and dashes and underscores mean the same. What
the command line leaves open comes from `PET_<NAME>`, read at that moment, and otherwise from the default. An empty
variable counts as unset.

argparse is not needed for that, and is slow to import. `parser.RunParser` is for programs that want a parser of theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from holdfast.cli import console
from holdfast.cli.arguments.options import HELP, HELP_ALL, OPTIONS, PROGRAM, USAGE, Option, RunArguments

# Options of other launchers that have no counterpart, and what to do instead.
_FOREIGN = {
    "-n": "; did you mean --nproc-per-node?",
    "-np": "; did you mean --nproc-per-node?",
    "-N": "; did you mean --nnodes?",
    "--use-env": ": workers always get their local rank in LOCAL_RANK, and never as an argument; leave the option out",
}

T = TypeVar("T")


class UsageError(Exception):
    """With the line that says what is wrong."""


class HelpWanted(Exception):  # noqa: N818  (no error: the user asked)
    """`--help` or `--help-all` was given."""

    def __init__(self, is_all: bool = False) -> None:
        self.is_all = is_all


def read(tokens: Sequence[str]) -> RunArguments:
    """The values of all options, with the script and its arguments. For wrong usage and for `--help`, print the lines
    about it and raise SystemExit."""
    try:
        return parse(tokens)
    except HelpWanted as wanted:
        from holdfast.cli.arguments.parser import help_text

        console.print_out(help_text(console.width(), wanted.is_all))
        raise SystemExit(0) from None
    except UsageError as problem:
        raise SystemExit(refuse(PROGRAM, USAGE, problem)) from None


def refuse(program: str, usage: str, problem: UsageError) -> int:
    """Say what is wrong with a command line; the exit code of that."""
    console.write(f"usage: {usage}\n")
    console.write_error(program, str(problem))
    return 2


def parse(tokens: Sequence[str], more: Sequence[Option] = ()) -> RunArguments:
    """As `read`, but raises UsageError and HelpWanted. `more` are options of another command that also takes those of
    `run`; their values are attributes, too."""
    flags = {flag: option for option in (*OPTIONS, *more, HELP, HELP_ALL) for flag in option.flags}
    values: dict[str, Any] = {option.dest: option.default_value for option in more}
    typed, left = Scanner(flags, lambda option: option.is_flag).scan(tokens)
    for option, text in typed:
        if option in (HELP, HELP_ALL):
            raise HelpWanted(is_all=option is HELP_ALL)
        values[option.dest] = True if text is None else _value_of(option, text)
    args = RunArguments(**values)
    complete(args, {option.dest: word(option.flags, text) for option, text in typed}, left)
    return args


def word(flags: Sequence[str], text: str | None) -> str:
    """An option and its value in one word of another command line."""
    return flags[-1] + ("" if text is None else f"={text}")


def _value_of(option: Option, text: str) -> Any:
    try:
        return option.read(text)
    except ValueError as error:
        raise UsageError(f"{'/'.join(option.flags)}: {error}") from None


def complete(args: Any, typed: Mapping[str, str], left: list[str]) -> None:
    """Add the values of the environment, and the script. `typed` are the words of the options that were typed, by name;
    `given` gets these and the ones of the environment. A flag that a variable switches off is not among them."""
    from_environment: list[Option] = []
    args.given, args.may_detect = {**typed}, True
    for option in OPTIONS:
        text = os.environ.get(option.variable or "", "")
        if not text or option.dest in typed:
            continue
        try:
            value = option.read(text)
        except ValueError as error:
            raise UsageError(f"environment variable {option.variable}: {error}") from None
        setattr(args, option.dest, value)
        from_environment.append(option)
        if value is not False:
            args.given[option.dest] = word(option.flags, None if option.is_flag else text)
    args.from_environment = tuple(from_environment)
    if args.quiet and args.verbose:
        raise UsageError("--quiet and --verbose exclude each other")
    if left[:1] == ["--"]:
        del left[0]
    if not left:
        raise UsageError("a script to run is required")
    args.training_script, *args.training_script_args = left


def _looks_like_option(token: str) -> bool:
    if len(token) < 2 or token[0] != "-":
        return False
    try:
        float(token)
    except ValueError:
        return True
    return False


class Scanner(Generic[T]):
    """Finds the options of a command line, and the text of their values. `flags` are their names with dashes."""

    def __init__(self, flags: Mapping[str, T], is_switch: Callable[[T], bool]) -> None:
        self._flags, self._is_switch = flags, is_switch
        self._long_names = {name.replace("_", "-"): option for name, option in flags.items() if name.startswith("--")}

    def scan(self, tokens: Sequence[str]) -> tuple[list[tuple[T, str | None]], list[str]]:
        """Each option with the text of its value, which a switch has not, and the tokens from the script on."""
        left = list(tokens)
        given: list[tuple[T, str | None]] = []
        while left and left[0] != "--" and _looks_like_option(left[0]):
            token = left.pop(0)
            given += self._long_option(token, left) if token.startswith("--") else self._short_options(token, left)
        return self._joined(given), left

    def _joined(self, given: list[tuple[T, str | None]]) -> list[tuple[T, str | None]]:
        """The texts of a list that is given in parts are one text."""
        for flag in [flag for option in OPTIONS if option.is_list for flag in option.flags if flag in self._flags]:
            parts = [text or "" for option, text in given if option == self._flags[flag]]
            if len(parts) > 1:
                given = [each for each in given if each[0] != self._flags[flag]]
                given.append((self._flags[flag], ",".join(parts)))
        return given

    def _long_option(self, token: str, left: list[str]) -> Iterator[tuple[T, str | None]]:
        name, equals, value = token.partition("=")
        option = self._resolve(name)
        if not self._is_switch(option):
            yield option, value if equals else self._next_value(name, left)
        elif equals:
            raise UsageError(f"{name} is on or off and takes no value, not {value!r}")
        else:
            yield option, None

    def _short_options(self, token: str, left: list[str]) -> Iterator[tuple[T, str | None]]:
        """`-m`, `-mv`, `-r3` and `-r 3`."""
        letters = token[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            option = self._flags.get(f"-{letter}")
            if option is None:
                # A whole word behind one dash was probably meant to have two.
                word = token.partition("=")[0]
                suggestion = _FOREIGN.get(word.rstrip("0123456789")) or self._suggestion(f"-{word}")
                is_one = suggestion or word == f"-{letter}"
                raise UsageError(
                    f"unknown option {word}{suggestion}" if is_one else f"unknown option -{letter} in {word}"
                )
            if not self._is_switch(option):
                yield option, letters.removeprefix("=") or self._next_value(f"-{letter}", left)
                return
            yield option, None

    def _next_value(self, name: str, left: list[str]) -> str:
        if not left:
            raise UsageError(f"{name} needs a value")
        if _looks_like_option(left[0]):
            raise UsageError(f"{name} needs a value, but {left[0]} follows (write {name}={left[0]} if it is meant)")
        return left.pop(0)

    def _resolve(self, name: str) -> T:
        full, known = name.replace("_", "-"), self._long_names
        own: list[Option] = [option for option in self._flags.values() if isinstance(option, Option)]
        in_full = {flag for option in (*OPTIONS, HELP_ALL, *own) if option.in_full for flag in option.flags}
        matches = [full] if full in known else sorted(each for each in known.keys() - in_full if each.startswith(full))
        if not matches:
            raise UsageError(f"unknown option {name}{self._suggestion(full)}")
        if len(matches) > 1:
            raise UsageError(f"{name} is short for more than one option: {', '.join(matches[:-1])} or {matches[-1]}")
        return known[matches[0]]

    def _suggestion(self, name: str) -> str:
        from difflib import get_close_matches

        if name in _FOREIGN:
            return _FOREIGN[name]
        close = get_close_matches(name, self._long_names, n=1, cutoff=0.7)
        return f"; did you mean {close[0]}?" if close else ""
