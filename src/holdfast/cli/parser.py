"""How command lines are read, and the text of `--help`.

For `holdfast run` the tokens are scanned from the left until the first one that is neither an option nor an option's
value: that is the script, and all that follows is the script's own, whatever it looks like. Before the script a name
may be shortened as long as it means one option (options that say `in_full` do not count), and dashes and underscores
mean the same. Only then does argparse see the options, each in its full spelling, and convert the values. What the
command line leaves open comes from `PET_<NAME>`, read at that moment, and otherwise from the default. An empty variable
counts as unset.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, TypeAlias

from holdfast.cli import console
from holdfast.cli.options import GROUPS, OPTIONS, OUTPUT, PROGRAM, USAGE

# Options of other launchers that have no counterpart, and what to do instead.
_FOREIGN = {
    "-n": "; did you mean --nproc-per-node?",
    "-np": "; did you mean --nproc-per-node?",
    "-N": "; did you mean --nnodes?",
    "--use-env": ": workers always get their local rank in LOCAL_RANK, and never as an argument; leave the option out",
}

# An option on the command line, and the text of its value; a flag has none.
_Given: TypeAlias = tuple[argparse.Action, str | None]


def _looks_like_option(token: str) -> bool:
    if len(token) < 2 or token[0] != "-":
        return False
    try:
        float(token)
    except ValueError:
        return True
    return False


class PlainParser(argparse.ArgumentParser):
    """For the small commands: argparse, with errors in one line."""

    def __init__(self, program: str, description: str = "", epilog: str = "", usage: str | None = None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(program, usage, description, epilog, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        console.write_error(self.prog, message.removeprefix("argument "))  # As argparse puts it.
        raise SystemExit(2)


class RunParser(PlainParser):
    """Reads `OPTIONS` and what callers have added, a script and the script's arguments."""

    def __init__(self) -> None:
        super().__init__(PROGRAM, usage=USAGE)
        for option in OPTIONS:
            if option.is_flag:
                self.add_argument(*option.flags, action="store_true", dest=option.dest)
            else:
                self.add_argument(*option.flags, type=option.read, default=option.default, dest=option.dest)

    # Any in the signature, because the base class has overloads that this one need not tell apart.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        left = list(sys.argv[1:] if args is None else args)
        given: list[_Given] = []
        while left and left[0] != "--" and _looks_like_option(left[0]):
            token = left.pop(0)
            given += self._long_option(token, left) if token.startswith("--") else self._short_options(token, left)
        tokens = [action.option_strings[-1] + ("" if value is None else f"={value}") for action, value in given]
        namespace, extras = super().parse_known_args(tokens, namespace)
        self._fill_from_environment(namespace, {action.dest for action, _ in given})
        if namespace.quiet and namespace.verbose:
            self.error("--quiet and --verbose exclude each other")
        if left[:1] == ["--"]:
            del left[0]
        if not left:
            self.error("a script to run is required")
        namespace.training_script, *namespace.training_script_args = left
        return namespace, extras

    def _long_option(self, token: str, left: list[str]) -> Iterator[_Given]:
        name, equals, value = token.partition("=")
        action = self._resolve(name)
        if action.nargs != 0:
            yield action, value if equals else self._next_value(name, left)
        elif equals:
            self.error(f"{name} is on or off and takes no value, not {value!r}")
        else:
            yield action, None

    def _short_options(self, token: str, left: list[str]) -> Iterator[_Given]:
        """`-m`, `-mv`, `-r3` and `-r 3`."""
        letters = token[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            action = self._option_string_actions.get(f"-{letter}")
            if action is None:
                # A whole word behind one dash was probably meant to have two.
                word = token.partition("=")[0]
                suggestion = _FOREIGN.get(word.rstrip("0123456789")) or self._suggestion(f"-{word}")
                is_one = suggestion or word == f"-{letter}"
                self.error(f"unknown option {word}{suggestion}" if is_one else f"unknown option -{letter} in {word}")
            if action.nargs != 0:
                yield action, letters.removeprefix("=") or self._next_value(f"-{letter}", left)
                return
            yield action, None

    def _next_value(self, name: str, left: list[str]) -> str:
        if not left:
            self.error(f"{name} needs a value")
        if _looks_like_option(left[0]):
            self.error(f"{name} needs a value, but {left[0]} follows (write {name}={left[0]} if it is meant)")
        return left.pop(0)

    def _long_names(self) -> dict[str, argparse.Action]:
        actions = self._option_string_actions
        return {name.replace("_", "-"): action for name, action in actions.items() if name.startswith("--")}

    def _resolve(self, name: str) -> argparse.Action:
        full, known = name.replace("_", "-"), self._long_names()
        in_full = {flag for option in OPTIONS if option.in_full for flag in option.flags}
        matches = [full] if full in known else sorted(each for each in known.keys() - in_full if each.startswith(full))
        if not matches:
            self.error(f"unknown option {name}{self._suggestion(full)}")
        if len(matches) > 1:
            self.error(f"{name} is short for more than one option: {', '.join(matches[:-1])} or {matches[-1]}")
        return known[matches[0]]

    def _suggestion(self, name: str) -> str:
        from difflib import get_close_matches

        if name in _FOREIGN:
            return _FOREIGN[name]
        close = get_close_matches(name, self._long_names(), n=1, cutoff=0.7)
        return f"; did you mean {close[0]}?" if close else ""

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
        super().error(message)


INTRODUCTION = (
    "Start workers on this machine, as part of a run on one machine or many, and keep them together: if one "
    "fails, all are stopped and, if restarts are left, started again.",
    "An option that is not given is taken from the environment: --max-restarts from PET_MAX_RESTARTS, and "
    "so on. For a flag 1, true or yes means on and 0, false or no means off.",
)

EXIT_CODES = (
    ("0", "all workers succeeded"),
    ("1", "the workers failed for good, or the run could not go on"),
    ("2", "wrong usage, or a node that does not fit into the run; nothing was started"),
    ("128+n", "stopped by signal n, for example 143 after SIGTERM"),
)

EXAMPLES = (
    "# four workers on this machine, restarted at most three times\n"
    "holdfast run --nproc-per-node 4 --max-restarts 3 train.py",
    "# one worker for each GPU, their output on the console and in files\n"
    "holdfast run --nproc-per-node gpu -t 3 train.py",
    "# the same line on each of two machines, one of which is node1\n"
    "holdfast run --nnodes 2 --rdzv-backend tcp --rdzv-endpoint node1:29400 \\\n"
    "    --rdzv-id job7 --nproc-per-node 4 --max-restarts 3 train.py",
)


def help_text(width: int) -> str:
    """What `--help` prints, at most `width` columns wide."""
    from textwrap import fill, indent

    def wrap(text: str, column: int = 0) -> str:
        pad = " " * column
        return fill(text, width, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False)

    def entry(name: str, text: str, column: int = 24) -> str:
        body = wrap(text, column)
        head = f"  {name}"
        return head + body[len(head) :] if len(head) + 2 <= column else f"{head}\n{body}"

    parts = [f"usage: {USAGE}", *map(wrap, INTRODUCTION)]
    for group in GROUPS:
        lines = [f"{group}:"]
        for option in [each for each in OPTIONS if each.group == group]:
            note = f" (default: {option.default_text})" if option.default_text else ""
            lines.append(entry(option.invocation, option.help + note))
        if group == OUTPUT:
            lines.append(entry("-h, --help", "Show this text."))
        parts.append("\n".join(lines))
    parts.append("\n".join(["Exit status:", *(entry(code, text, 10) for code, text in EXIT_CODES)]))
    parts.append("\n".join(["Examples:", *(indent(example, "  ") for example in EXAMPLES)]))
    return "\n\n".join(parts) + "\n"
