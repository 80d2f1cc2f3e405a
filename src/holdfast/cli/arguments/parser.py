"""The commands' parsers of the kind that Python programs know, and the text of `--help`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import holdfast
from holdfast import stdio
from holdfast.cli import console
from holdfast.cli.arguments import command_line
from holdfast.cli.arguments.command_line import HelpWanted, UsageError
from holdfast.cli.arguments.options import GROUPS, INFORMATION, OPTIONS, PROGRAM, USAGE
from holdfast.option import Option


def argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same function for argparse, which shows what a ValueError says only if it is of another class."""

    def read_argument(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_argument


class PlainParser(argparse.ArgumentParser):
    """For the small commands: argparse, with errors in one line."""

    def __init__(self, program: str, description: str = "", epilog: str = "", usage: str | None = None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(program, usage, description, epilog, formatter_class=formatter, allow_abbrev=False)

    def run(self, argv: Sequence[str], act: Callable[[argparse.Namespace], str]) -> int:
        """Run the command: `act` makes its text. The exit code says how that ended (`console.show`)."""
        args = self.parse_args(argv)
        return console.show(self.prog, lambda: act(args))

    def add_option(self, option: Option, text: str) -> None:
        kwargs: dict[str, Any] = {} if option.is_flag else {"metavar": option.invocation.split()[-1]}
        action = "store_true" if option.is_flag else "store"
        self.add_argument(*option.flags, action=action, help=text.replace("%", "%%"), **kwargs)

    def print_help(self, file: Any = None) -> None:
        text = self.format_help()
        self._print_message(f"{text}\n{documents_line()}\n" if "docs/" in text else text, file or sys.stdout)

    def _print_message(self, message: str, file: Any = None) -> None:
        """As other text of holdfast's: a reader that has gone (`| head`) is no error."""
        stdio.write(file or sys.stderr, message, may_drop=False)

    def error(self, message: str) -> NoReturn:
        console.write_error(self.prog, message.removeprefix("argument "))  # As argparse puts it.
        raise SystemExit(2)


# What programs find in place of None.
TORCH_DEFAULTS = {"node_rank": 0, "duplicate_stdout_filters": [], "duplicate_stderr_filters": []}


class RunParser(PlainParser):
    """`command_line` with the interface of argparse, for programs, which may add options of their own."""

    def __init__(self) -> None:
        super().__init__(PROGRAM, usage=USAGE)

    # Any in the signatures, because the base class has overloads that this one need not tell apart.
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self._parse(args, namespace, None)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Unknown options before the script are in the rest. The token after one is the script, as for argparse."""
        unknown: list[str] = []
        return self._parse(args, namespace, unknown), unknown

    def _parse(self, args: Any, namespace: Any, unknown: list[str] | None) -> Any:
        added = {_as_option(action): action for action in self._actions if action.dest != "help"}
        try:
            parsed = command_line.parse(sys.argv[1:] if args is None else args, tuple(added), unknown=unknown)
        except HelpWanted as wanted:
            text = wanted_text(wanted)
            self.exit(console.show(self.prog, lambda: text))
        except UsageError as problem:
            self.error(str(problem))
        # argparse makes the values of the added options, and knows of `set_defaults`.
        typed = [(option, action) for option, action in added.items() if option.dest in parsed.given]
        words = [
            parsed.given[each.dest].replace(each.flags[-1], action.option_strings[-1], 1) for each, action in typed
        ]
        namespace, _ = super().parse_known_args(words, namespace)
        own = {action.dest for action in added.values()}
        for name, value in vars(parsed).items():
            if name not in own and (name in parsed.given or not hasattr(namespace, name)):
                setattr(namespace, name, TORCH_DEFAULTS.get(name) if value is None else value)
        return namespace

    def format_help(self) -> str:
        return help_text(console.width())

    def error(self, message: str) -> NoReturn:
        console.write(f"usage: {USAGE}\n")
        super().error(message)


def _as_option(action: argparse.Action) -> Option:
    flags = [flag.replace("_", "-") for flag in action.option_strings]
    return Option(", ".join(flags) + ("" if action.nargs == 0 else " VALUE"), "", "", in_environment=False)


def documents_line() -> str:
    """Where the files are that help texts name. A wheel has them inside the package."""
    package = os.path.dirname(holdfast.__file__)
    inside, beside = os.path.join(package, "docs"), os.path.join(package, "..", "..", "docs")
    return f"docs/ is {os.path.normpath(inside if os.path.isdir(inside) else beside)}"


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
    ("93", "no progress in --no-progress-limit restarts, or more lost nodes than --loss-limit: do not start it again"),
    ("94", "the run was ended on all nodes, by `holdfast stop` for example: do not start it again"),
    ("95", "this node, or the run, went away after a notice (docs/notice.md): it may be started again"),
    ("128+n", "stopped by signal n, for example 143 after SIGTERM"),
)

EXAMPLES = (
    "# four workers on this machine, restarted at most three times\n"
    "holdfast run --nproc-per-node 4 --max-restarts 3 train.py",
    "# one worker for each GPU, their output on the console and in files\n"
    "holdfast run --nproc-per-node gpu -t 3 train.py",
    "# on two other machines, started and ended by this command through ssh\n"
    "holdfast run --hosts node1,node2 --nproc-per-node 4 --max-restarts 3 train.py",
    "# the same line on each of two machines, one of which is node1\n"
    "holdfast run --nnodes 2 --rdzv-backend tcp --rdzv-endpoint node1:29400 \\\n"
    "    --rdzv-id job7 --nproc-per-node 4 --max-restarts 3 train.py",
)


def wanted_text(wanted: HelpWanted) -> str:
    if not wanted.shell:
        return help_text(console.width(), wanted.is_all)
    from holdfast.cli import completion

    return completion.script(wanted.shell)


def help_text(width: int, is_all: bool = False) -> str:
    """The text of `--help` or `--help-all`, at most `width` columns wide."""
    from textwrap import fill, indent

    def wrap(text: str, column: int = 0) -> str:
        pad = " " * column
        return fill(text, width, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False)

    def entry(name: str, text: str, column: int = 24) -> str:
        body = wrap(text, column)
        head = f"  {name}"
        return head + body[len(head) :] if len(head) + 2 <= column else f"{head}\n{body}"

    parts = [f"usage: {USAGE}", *map(wrap, INTRODUCTION)]
    shown = [option for option in (*OPTIONS, *INFORMATION) if is_all or option.is_common]
    for group in GROUPS:
        lines = [f"{group}:"]
        for option in [each for each in shown if each.group == group]:
            note = f" (default: {option.default_text})" if option.default_text else ""
            lines.append(entry(option.invocation, option.help + note))
        parts.append("\n".join(lines))
    parts.append("\n".join(["Exit status:", *(entry(code, text, 10) for code, text in EXIT_CODES)]))
    parts.append(f"Documents:\n  {documents_line()}")
    parts.append("\n".join(["Examples:", *(indent(example, "  ") for example in EXAMPLES)]))
    return "\n\n".join(parts) + "\n"
