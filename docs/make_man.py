"""Prints man/holdfast.1, which is made from the catalogue of commands and the tables of docs/make_cli.py.

python -m docs.make_man > man/holdfast.1
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable

import holdfast
from docs import make_cli
from holdfast.cli import catalogue
from holdfast.cli.arguments import parser
from holdfast.cli.arguments.options import GROUPS, INFORMATION, OPTIONS, USAGE
from holdfast.cli.main import COMMANDS

_ABOUT = (
    "starts a group of worker processes on one machine or many, keeps the group alive through failures, and says "
    "exactly what went wrong when it cannot."
)


def document() -> str:
    lines = [
        f'.TH HOLDFAST 1 "" "holdfast {holdfast.__version__}" "User Commands"',
        ".SH NAME", r"holdfast \- elastic launcher and supervisor for distributed jobs",
        ".SH SYNOPSIS", *_code([USAGE, "holdfast COMMAND [options]"]),
        ".SH DESCRIPTION", f"\\fBholdfast\\fR {_text(_ABOUT)}",
        ".SH COMMANDS", *_entries((name, what) for name, (_, what) in COMMANDS.items()),
        ".SH HOLDFAST RUN", *_paragraphs((*parser.INTRODUCTION, *make_cli._READING_RULES)),
    ]  # fmt: skip
    for group in GROUPS:
        rows = [each for each in (*OPTIONS, *INFORMATION) if each.group == group]
        notes = {each: f" (default: {each.default_text})" if each.default_text else "" for each in rows}
        lines += [f'.SS "{group}"', *_entries((each.invocation, each.help + notes[each]) for each in rows)]
    for name in COMMANDS:
        if name != "run":
            lines += _command(catalogue.parser_of(name))
    of_run = ("PET_NAME", "an option of `holdfast run`, such as PET_NNODES for --nnodes")
    lines += [
        ".SH EXIT STATUS", *_entries(parser.EXIT_CODES),
        ".SH ENVIRONMENT", *_entries((*make_cli._OTHER_VARIABLES, of_run)),
        ".SH EXAMPLES", *_code("\n\n".join(parser.EXAMPLES).splitlines()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _command(command: argparse.ArgumentParser) -> list[str]:
    lines = [f".SH {command.prog.upper()}", *_paragraphs([command.description or ""])]
    shown = [each for each in command._actions if each.help not in (None, argparse.SUPPRESS) and each.dest != "help"]
    names = {each: f"{', '.join(each.option_strings)} {each.metavar or ''}".strip() for each in shown}
    lines += _entries((names[each], (each.help or "").replace("%%", "%")) for each in shown)
    return lines + _code((command.epilog or "").strip().splitlines())


def _entries(rows: Iterable[tuple[str, str | None]]) -> list[str]:
    return [line for name, text in rows for line in (".TP", f"\\fB{_escaped(name)}\\fR", _text(text or ""))]


def _paragraphs(texts: Iterable[str]) -> list[str]:
    return [line for text in texts for line in (".PP", _text(text))]


def _code(lines: Iterable[str]) -> list[str]:
    return [".PP", ".nf", *(_line(_escaped(line)) for line in lines), ".fi"]


def _text(text: str) -> str:
    return _line(re.sub(r"`([^`]+)`", r"\\fB\1\\fR", _escaped(" ".join(text.split()))))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq")


def _line(text: str) -> str:
    return rf"\&{text}" if text.startswith(".") else text


if __name__ == "__main__":
    sys.stdout.write(document())
