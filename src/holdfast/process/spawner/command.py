"""What a worker runs: its command line, or the call of a function.

A Python program is started through `bootstrap.py`, which runs it as the interpreter would and keeps evidence of its
failure. That needs the place in the command line where the interpreter's own options end and the program begins.
A command line that is not understood with certainty is executed unchanged. Its only evidence is its output and its exit
status.
"""

from __future__ import annotations

import functools
import marshal
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.errors import HostError, UserError
from holdfast.process.spawner import bootstrap
from holdfast.process.spawner.wire import BYTECODE

if TYPE_CHECKING:
    from holdfast.process.spawner.warm import Wanted
    from holdfast.process.workers.group import GroupSpec

BOOTSTRAP_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap.py")

# Versions that cannot run the bootstrap are left alone: 2.x and 3.0 to 3.7.
_INTERPRETER_NAME = r"(python|pypy)(3(\.([89]|[1-9]\d+)(\.\d+)*)?)?(t|d|td|-dbg|-debug)?"
_SWITCHES = "bBdEIOPqRsSuv"


def command_for(entrypoint: str, args: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The command line, and whether it goes through the bootstrap, which needs a black box."""
    split = _split(args) if _is_interpreter(entrypoint) else None
    if split is None:
        return (entrypoint, *args), False
    options, program = split
    return (entrypoint, *options, _bootstrap_for(entrypoint), *program), True


def why_not_warm(entrypoint: Callable[..., Any] | str, args: Sequence[Any], start_method: str) -> str:
    """Why workers of this kind cannot be forked from a process that has imported modules; empty if they can."""
    if callable(entrypoint):
        return "" if start_method != "fork" else "start method fork forks the calling process"
    if entrypoint != sys.executable:
        return f"{entrypoint!r} is not the Python that runs holdfast"
    split = _split([str(arg) for arg in args])
    if split is None:
        return "the program is not a script, a module or a command for Python"
    return "the name of the script differs between workers" if "$" in split[1][0] else ""


def template_for(spec: GroupSpec, args: Sequence[Any]) -> Wanted | None:
    """The template that the group's workers are forked from; None if they start cold. `args` are those of a worker."""
    is_forked = callable(spec.entrypoint) and spec.start_method == "forkserver"
    if not (spec.preload or is_forked) or why_not_warm(spec.entrypoint, args, spec.start_method):
        return None
    if isinstance(spec.entrypoint, str):
        path, (argv, _) = None, command_for(spec.entrypoint, texts(args))
    else:
        path, argv = list(sys.path), function_command()
    return [os.fsencode(part) for part in argv], list(spec.preload), path, spec.preload_timeout_s


def texts(args: Sequence[Any]) -> list[str]:
    return [os.fsdecode(each) if isinstance(each, str | bytes) else str(each) for each in args]


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


def script_path(entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]) -> str:
    """The file that all workers run, as the user has named it. Empty for a function, a module, code in the command line
    or on stdin, a program that is looked for on PATH, and a name that differs between workers."""
    if not isinstance(entrypoint, str):
        path = program_name(entrypoint, args)
    elif _is_interpreter(entrypoint):
        _, program = _split(texts(args)) or ([], ["-"])
        path = "" if program[0].startswith("-") else program[0]
    else:
        path = entrypoint if "/" in entrypoint else ""
    return "" if "$" in path else path


def function_command() -> tuple[str, ...]:
    """The command line of a new interpreter that calls the function in its payload. It behaves like this one, with its
    output unbuffered."""
    import subprocess

    if not sys.executable:
        raise HostError("cannot start an interpreter for a function: sys.executable is empty")
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # As multiprocessing does.
    return sys.executable, "-u", *flags, _bootstrap_for(sys.executable), "--holdfast-function"


def pickled_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call, for `bootstrap.load_call`."""
    import pickle

    import cloudpickle

    try:
        call = cloudpickle.dumps((function, args))
    except Exception as error:
        culprit = _unpicklable_part(function, args)
        raise UserError(f"{culprit} cannot be sent to a worker: {type(error).__name__}: {error}") from None
    return pickle.dumps((list(sys.path), list(sys.argv), call))


def _unpicklable_part(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    import cloudpickle

    for index, value in enumerate(args):
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"argument {index} of {name_of(function)}"
    return f"the function {name_of(function)}"


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _is_interpreter(entrypoint: str) -> bool:
    return entrypoint == sys.executable or bool(re.fullmatch(_INTERPRETER_NAME, os.path.basename(entrypoint)))


def _split(args: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """The interpreter's options, and the program with its arguments; None if they are not understood with certainty.

    `-um name args` is `-u`, and the program `-m name args`; so are `-u -mname args`.
    """
    options: list[str] = []
    rest = list(args)
    while rest:
        if not rest[0].startswith("-"):
            return (options, rest) if rest[0] else None
        word = rest.pop(0)
        options.append(word)
        if word == "--":
            return (options, rest) if rest and rest[0][:1] not in ("", "-") else None
        # Switches, then a letter that takes the rest of the word or the next word: an option's value, or the program.
        rest_of_word = word[1:].lstrip(_SWITCHES)
        switches, letter, value = word[1 : len(word) - len(rest_of_word)], rest_of_word[:1], rest_of_word[1:]
        if word == "--check-hash-based-pycs":
            letter, value = "W", ""  # It takes a value, as `-W` does.
        if word == "-" or letter not in ("", "W", "X", "c", "m"):
            return None
        if letter in ("c", "m"):
            options[-1:] = [f"-{switches}"] if switches else []
            program = [value, *rest] if value else rest
            return (options, [f"-{letter}", *program]) if program else None
        if letter and not value:
            options += rest[:1]
            del rest[:1]
    return None


def _bootstrap_for(interpreter: str) -> str:
    """The bootstrap: as byte code if `interpreter` is certain to understand it.

    Compiling it takes several times as long as running it, and an interpreter compiles a script at each start.
    """
    return BYTECODE if interpreter == sys.executable else BOOTSTRAP_PATH


@functools.cache
def bytecode() -> bytes:
    """The content of the file that `BYTECODE` stands for. The import system compiles it if it has no copy."""
    from importlib._bootstrap_external import MAGIC_NUMBER  # As in `importlib.util`, without what that imports.

    assert bootstrap.__loader__ is not None
    code = bootstrap.__loader__.get_code(bootstrap.__name__)  # type: ignore[attr-defined]  # all loaders of files have it
    return MAGIC_NUMBER + bytes(12) + marshal.dumps(code)  # Of a file that is run, only the first number is checked.
