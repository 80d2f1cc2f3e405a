"""What an adopted program's processes know of `holdfast adopt` (see `holdfast.adopt`): the variables, and the worker's
environment, which has none of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

DIRECTORIES_VARIABLE = "HOLDFAST_ADOPT"  # The directories of all adoptions, the innermost first.
OPTIONS_VARIABLE = "HOLDFAST_OPTS"
SCRIPTS, SITE = "bin", "site"  # What is in such a directory, and stands in PATH and in PYTHONPATH.

_VARIABLES = (DIRECTORIES_VARIABLE.encode(), OPTIONS_VARIABLE.encode())
_announced: list[int] = []


def is_adopted() -> bool:
    return bool(os.environ.get(DIRECTORIES_VARIABLE))


def options_text() -> str:
    """The options that HOLDFAST_OPTS adds to those of the caller. Outside an adopted command it has no effect."""
    return os.environ.get(OPTIONS_VARIABLE, "") if is_adopted() else ""


def announce() -> None:
    """Say that holdfast has taken over, once in a process."""
    if is_adopted() and os.getpid() not in _announced:
        from holdfast import escape, stdio

        _announced.append(os.getpid())
        stdio.write(sys.stderr, f"{escape.PREFIX} runs here in place of torchrun\n", may_drop=False)


def without_adoption(environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """What a worker gets: the environment that the command had before it was adopted."""
    directories = environ.get(DIRECTORIES_VARIABLE.encode())
    if not directories:
        return dict(environ)
    roots = directories.split(b":")
    kept = {name: value for name, value in environ.items() if name not in _VARIABLES}
    for name, part in ((b"PATH", SCRIPTS.encode()), (b"PYTHONPATH", SITE.encode())):
        ours = {os.path.join(root, part) for root in roots}
        parts = [each for each in kept.get(name, b"").split(b":") if each not in ours]
        if parts in ([], [b""]):
            kept.pop(name, None)
        else:
            kept[name] = b":".join(parts)
    return kept
