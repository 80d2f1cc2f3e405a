"""How the command line of `holdfast run` is read.

The tokens are scanned from the left until the first one that is neither an option nor an option's value: that is the
script, and all that follows is the script's own, whatever it looks like. Before the script a name may be shortened as
long as it means one option (options that say `in_full` do not count), and dashes and underscores mean the same. What
the command line leaves open comes from `PET_<NAME>`, read at that moment, and otherwise from the default. An empty
variable counts as unset.

argparse is not needed for that, and is slow to import. `parser.RunParser` has its interface, for programs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.cli import console
from holdfast.cli.arguments.options import HELP_ALL, INFORMATION, OPTIONS, PROGRAM, USAGE, RunArguments
from holdfast.option import Option
from holdfast.process import adoption

# Options of other launchers that have no counterpart, and what to do instead.
_WORKERS = ("-n", "-np", "--np", "--nprocs", "--num-procs", "--num-processes", "--gpus", "--num-gpus")
_FOREIGN = {
    **dict.fromkeys(_WORKERS, "; did you mean --nproc-per-node?"),
    **dict.fromkeys(("-N", "--nodes", "--num-nodes", "--num-machines"), "; did you mean --nnodes?"),
    "--use-env": ": workers always get their local rank in LOCAL_RANK, and never as an argument; leave the option out",
}


class UsageError(Exception):
    """With the line that says what is wrong."""


class UnknownOptionError(UsageError):
    """It is none of ours."""


class HelpWanted(Exception):  # noqa: N818  (no error: the user asked)
    """`--help`, `--help-all` or `--print-completion` was given."""

    def __init__(self, is_all: bool = False, shell: str = "") -> None:
        self.is_all, self.shell = is_all, shell


def read(tokens: Sequence[str], more: Sequence[Option] = ()) -> RunArguments:
    """The values of all options, with the script and its arguments. For wrong usage and for `--help`, print the lines
    about it and raise SystemExit."""
    try:
        return parse(tokens, more)
    except HelpWanted as wanted:
        from holdfast.cli.arguments.parser import wanted_text

        text = wanted_text(wanted)
        raise SystemExit(console.show(PROGRAM, lambda: text)) from None
    except UsageError as problem:
        raise SystemExit(refuse(PROGRAM, USAGE, problem)) from None


def refuse(program: str, usage: str, problem: UsageError) -> int:
    """Say what is wrong with a command line; the exit code of that."""
    console.write(f"usage: {usage}\n")
    console.write_error(program, str(problem))
    return 2


def parse(
    tokens: Sequence[str], more: Sequence[Option] = (), added: str | None = None, unknown: list[str] | None = None
) -> RunArguments:
    """As `read`, but raises UsageError and HelpWanted. `more` are options of another command that also takes those of
    `run`; their values are attributes, too. `added` are the options that an adopted caller cannot pass (HOLDFAST_OPTS,
    if None). Unknown options are appended to `unknown`, if it is there."""
    values: dict[str, Any] = {option.dest: option.default_value for option in more}
    typed, left = _Scanner((*OPTIONS, *more, *INFORMATION)).scan(tokens, unknown)
    typed = [*_added_options(adoption.options_text() if added is None else added), *typed]
    for option, text in typed:
        if option in INFORMATION:
            shell = _value_of(option, text) if text is not None else ""
            raise HelpWanted(is_all=option is HELP_ALL, shell=shell)
        values[option.dest] = True if text is None else _value_of(option, text)
    args = RunArguments(**values)
    _complete(args, {option.dest: _word(option, text) for option, text in typed}, left)
    return args


def _added_options(text: str) -> list[tuple[Option, str | None]]:
    """The options of HOLDFAST_OPTS, which give way to those of the command line and of the environment."""
    if not text:
        return []
    import shlex

    try:
        options, left = _Scanner(OPTIONS).scan(shlex.split(text))
        if left:
            raise UsageError(f"{left[0]!r} is not an option")
        for option, value in options:
            if value is not None:
                _value_of(option, value)
    except (UsageError, ValueError) as error:
        raise UsageError(f"{adoption.OPTIONS_VARIABLE}: {error}") from None
    return [each for each in options if not os.environ.get(each[0].variable or "")]


def _word(option: Option, text: str | None) -> str:
    """An option and its value in one word of another command line."""
    return option.flags[-1] + ("" if text is None else f"={text}")


def _value_of(option: Option, text: str) -> Any:
    try:
        return option.read(text)
    except ValueError as error:
        raise UsageError(f"{'/'.join(option.flags)}: {error}") from None


def _complete(args: RunArguments, typed: Mapping[str, str], left: list[str]) -> None:
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
            args.given[option.dest] = _word(option, None if option.is_flag else text)
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


class _Scanner:
    """Finds the options of a command line, and the texts of their values."""

    def __init__(self, options: Sequence[Option]) -> None:
        self._flags = {flag: option for option in options for flag in option.flags}
        self._long_names = {flag: option for flag, option in self._flags.items() if flag.startswith("--")}

    def scan(
        self, tokens: Sequence[str], unknown: list[str] | None = None
    ) -> tuple[list[tuple[Option, str | None]], list[str]]:
        """Each option with the text of its value (None for a flag), and the tokens from the script on."""
        left = list(tokens)
        given: list[tuple[Option, str | None]] = []
        while left and left[0] != "--" and _looks_like_option(left[0]):
            token = left.pop(0)
            find = self._long_option if token.startswith("--") else self._short_options
            try:
                given += [*find(token, left)]
            except UnknownOptionError:
                if unknown is None:
                    raise
                unknown.append(token)
        return self._joined(given), left

    def _joined(self, given: list[tuple[Option, str | None]]) -> list[tuple[Option, str | None]]:
        """The texts of a list that is given in parts are one text."""
        lists: dict[Option, list[str]] = {}
        for option, text in given:
            if option.joined_by:
                lists.setdefault(option, []).append(text or "")
        others = [each for each in given if not each[0].joined_by]
        return [*others, *((option, option.joined_by.join(texts)) for option, texts in lists.items())]

    def _long_option(self, token: str, left: list[str]) -> Iterator[tuple[Option, str | None]]:
        name, equals, value = token.partition("=")
        option = self._resolve(name)
        if not option.is_flag:
            yield option, value if equals else self._next_value(option, name, left)
        elif equals:
            raise UsageError(f"{name} is on or off and takes no value, not {value!r}")
        else:
            yield option, None

    def _short_options(self, token: str, left: list[str]) -> Iterator[tuple[Option, str | None]]:
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
                raise UnknownOptionError(
                    f"unknown option {word}{suggestion}" if is_one else f"unknown option -{letter} in {word}"
                )
            if not option.is_flag:
                yield option, letters.removeprefix("=") or self._next_value(option, f"-{letter}", left)
                return
            yield option, None

    def _next_value(self, option: Option, name: str, left: list[str]) -> str:
        if not left:
            raise UsageError(f"{name} needs a value")
        if _looks_like_option(left[0]) and not option.takes_dashes:
            raise UsageError(f"{name} needs a value, but {left[0]} follows (write {name}={left[0]} if it is meant)")
        return left.pop(0)

    def _resolve(self, name: str) -> Option:
        full, known = name.replace("_", "-"), self._long_names
        shortened = sorted(flag for flag, option in known.items() if flag.startswith(full) and not option.in_full)
        matches = [full] if full in known else shortened
        if not matches:
            raise UnknownOptionError(f"unknown option {name}{self._suggestion(full)}")
        if len(matches) > 1:
            raise UsageError(f"{name} is short for more than one option: {', '.join(matches[:-1])} or {matches[-1]}")
        return known[matches[0]]

    def _suggestion(self, name: str) -> str:
        from difflib import get_close_matches

        if name in _FOREIGN:
            return _FOREIGN[name]
        close = get_close_matches(name, self._long_names, n=1, cutoff=0.7)
        return f"; did you mean {close[0]}?" if close else ""
