"""Which modules to import once, before workers are forked from the process that has them (`--preload`).

The value is a list of names, or `auto`: the third-party modules that the program imports at its top level. The program
is parsed, not run. Modules of the standard library are quick to import, and those beside the program are its own part,
which its author may be changing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.process.spawner import command

if TYPE_CHECKING:
    import ast

AUTO = "auto"


def module_names(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names in the order in which they are to be imported. Raises ValueError for what is no name of a module."""
    parts = value.split(",") if isinstance(value, str) else value or ()
    names = dict.fromkeys(part.strip() for part in parts if part.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{name!r} is not the name of a module")
    return tuple(names)


def resolved(names: tuple[str, ...], entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> tuple[str, ...]:
    """The names, with `auto` replaced by what the program imports."""
    if AUTO not in names:
        return names
    path = _source_of(entrypoint, args)
    found = third_party_imports(path) if path else ()
    return tuple(dict.fromkeys([*found, *(name for name in names if name != AUTO)]))


def third_party_imports(path: str) -> tuple[str, ...]:
    """None if the file is not Python that can be read: that is for the workers to say."""
    import ast  # Only `auto` needs it.

    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return ()
    home = os.path.dirname(os.path.realpath(path))
    return tuple(dict.fromkeys(name for name in _imported(tree.body) if _is_third_party(name.split(".")[0], home)))


def _imported(statements: Sequence[ast.stmt]) -> Iterator[str]:
    import ast

    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
        elif isinstance(statement, ast.Try):  # What is imported only if it is there.
            yield from _imported(statement.body)


def _is_third_party(name: str, home: str) -> bool:
    from importlib.machinery import PathFinder

    if name in sys.stdlib_module_names or name == "holdfast" or PathFinder.find_spec(name, [home]) is not None:
        return False
    return PathFinder.find_spec(name, [place for place in sys.path if place]) is not None


def _source_of(entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> str:
    """The file of the program; empty if it is not known."""
    if callable(entrypoint) and not getattr(entrypoint, "runs_script", False):
        return getattr(sys.modules.get(getattr(entrypoint, "__module__", "")), "__file__", None) or ""
    name = command.program_name(entrypoint, args)
    if "-m" not in args:
        return name
    stem = name.replace(".", os.sep)
    places = [os.path.join(place, each) for place in ("", *sys.path) for each in (f"{stem}.py", f"{stem}/__main__.py")]
    return next((place for place in places if os.path.isfile(place)), "")
