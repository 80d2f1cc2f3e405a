"""The command line of a worker.

A Python program is started through `bootstrap.py`, which runs it as the interpreter would and keeps evidence of its
failure. That needs the place in the command line where the interpreter's own options end and the program begins.
A command line that is not understood with certainty is executed unchanged. Its only evidence is its output and its exit
status.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import HostError
from holdfast.frozen import frozen
from holdfast.process.spawner import bootstrap

BOOTSTRAP_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap.py")

# Versions that cannot run the bootstrap are left alone: 2.x and 3.0 to 3.7.
_INTERPRETER_NAME = re.compile(r"(python|pypy)(3(\.([89]|[1-9]\d+)(\.\d+)*)?)?(t|d|td|-dbg|-debug)?")
_SWITCHES = frozenset("bBdEIOPqRsSuv")
_SWITCHES_WITH_VALUE = frozenset("WX")
_PROGRAM_SWITCHES = frozenset("cm")


@frozen
class Command:
    """A command line. `is_python`: it goes through the bootstrap, which needs a black box."""

    argv: tuple[str, ...]
    is_python: bool


def command_for(entrypoint: str, args: Sequence[str]) -> Command:
    split = _split(args) if _is_interpreter(entrypoint) else None
    if split is None:
        return Command((entrypoint, *args), is_python=False)
    options, program = split
    return Command((entrypoint, *options, _bootstrap_for(entrypoint), *program), is_python=True)


def program_name(entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]) -> str:
    """The user's name for the program: the script or module that Python runs, or the executable. Empty for a function,
    unless it runs the script in its first argument (`runs_script`)."""
    if not isinstance(entrypoint, str):
        return str(args[0]) if getattr(entrypoint, "runs_script", False) and args else ""
    if not _is_interpreter(entrypoint):
        return entrypoint
    _, program = _split([arg if isinstance(arg, str) else str(arg) for arg in args]) or ([], [])
    named = program[1:] if program[:1] == ["-m"] else [each for each in program[:1] if each != "-c"]
    return named[0] if named else "" if entrypoint == sys.executable else entrypoint


def function_command() -> Command:
    """The command line of a new interpreter that calls the function in its payload."""
    if not sys.executable:
        raise HostError("cannot start an interpreter for a function: sys.executable is empty")
    flags = python_flags_for_function()
    return Command((sys.executable, *flags, _bootstrap_for(sys.executable), "--holdfast-function"), is_python=True)


def python_flags_for_function() -> list[str]:
    """The options with which another interpreter behaves like this one, with its output unbuffered."""
    import subprocess

    return ["-u", *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]  # multiprocessing's source


def _is_interpreter(entrypoint: str) -> bool:
    return entrypoint == sys.executable or bool(_INTERPRETER_NAME.fullmatch(os.path.basename(entrypoint)))


def _split(args: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """The interpreter's options, and the program with its arguments; None if they are not understood with certainty."""
    options: list[str] = []
    rest = list(args)
    while rest:
        token = rest[0]
        if token == "--":
            is_script = len(rest) > 1 and rest[1][:1] not in ("", "-")
            return ([*options, token], rest[1:]) if is_script else None
        if not token.startswith("-"):
            return (options, rest) if token else None
        if token == "--check-hash-based-pycs":
            taken = 2
        else:
            switches, taken = _read_switches(token)
            if taken == 0:
                return None
            if switches != token:
                return _split_at_switch(options, switches, rest)
        if len(rest) < taken:
            return None
        options += rest[:taken]
        rest = rest[taken:]
    return None


def _read_switches(token: str) -> tuple[str, int]:
    """The interpreter's options in the token, and how many tokens they take (0 if one is unknown). If the options end
    before the token does, `c` or `m` follows."""
    for index, letter in enumerate(token[1:], start=1):
        if letter in _SWITCHES_WITH_VALUE:
            return token, 1 if token[index + 1 :] else 2
        if letter in _PROGRAM_SWITCHES:
            return token[:index], 1
        if letter not in _SWITCHES:
            return token, 0
    return token, 1 if token[1:] else 0


def _split_at_switch(options: list[str], switches: str, rest: list[str]) -> tuple[list[str], list[str]] | None:
    """`-um name args` is `-u`, and the program `-m name args`; so are `-u -mname args`."""
    switch, operand = rest[0][len(switches)], rest[0][len(switches) + 1 :]
    operands = ([operand] if operand else []) + rest[1:]
    before = [switches] if switches != "-" else []
    return ([*options, *before], [f"-{switch}", *operands]) if operands else None


def _bootstrap_for(interpreter: str) -> str:
    """The bootstrap, or its file in the import system's cache, if that is up to date and `interpreter` can read it.

    Compiling the bootstrap takes several times as long as running it, and a script is compiled at each start.
    """
    from importlib.util import MAGIC_NUMBER

    spec = bootstrap.__spec__
    if interpreter != sys.executable or spec is None or spec.cached is None:
        return BOOTSTRAP_PATH
    try:
        with open(spec.cached, "rb") as file:
            header = file.read(16)
        status = os.stat(BOOTSTRAP_PATH)
    except OSError:
        return BOOTSTRAP_PATH
    fields = (0, int(status.st_mtime), status.st_size)
    expected = MAGIC_NUMBER + b"".join((each & 0xFFFFFFFF).to_bytes(4, "little") for each in fields)
    return spec.cached if header == expected else BOOTSTRAP_PATH
