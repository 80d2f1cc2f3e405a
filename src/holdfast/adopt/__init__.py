"""Programs that call torchrun, with holdfast in its place: `holdfast adopt -- COMMAND`.

The command runs with a directory of ours before its PATH, in which `torchrun` is holdfast, and with another one before
its PYTHONPATH, whose `sitecustomize` has every Python of that process tree find holdfast behind the names of torch's
launcher (`hook`). The files are made by `write_files`, for one command or, with `--install`, for good.

A program comes to holdfast in one of three ways, and each leaves a line in the file `used`, by which the command knows
at the end whether the program has called torchrun at all:

    torchrun ...                             the script in PATH
    python -m torch.distributed.run ...      the hook sees it at the interpreter's start, before torch is imported
    import torch.distributed.run             the hook answers the import with a module that stands for ours

Workers inherit none of it (`without_adoption`): a script that imports torch's launcher itself gets torch's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

DIRECTORY_VARIABLE = "HOLDFAST_ADOPT"
OPTIONS_VARIABLE = "HOLDFAST_OPTS"

_TORCHRUN = """#!/bin/sh
# torchrun, which is holdfast here.
exec {python} -P -m holdfast adopted-run "$@"
"""
_SITECUSTOMIZE = """# Has this Python find holdfast behind the names of torch's launcher.
import os, sys
def _adopt(hook={hook!r}):
    names = {{"__file__": hook, "__name__": "holdfast.adopt.hook"}}
    with open(hook) as file:
        exec(compile(file.read(), hook, "exec"), names)
    names["install"]({root!r}, os.path.dirname(os.path.abspath(__file__)))
try:
    _adopt()
except Exception as error:
    print(f"holdfast adopt: this Python is not adopted: {{error}}", file=sys.stderr)
"""


def write_files(directory: Path) -> None:
    """`bin/torchrun` and `site/sitecustomize.py`."""
    root = Path(__file__).resolve().parent.parent.parent
    hook = Path(__file__).with_name("hook.py").resolve()
    for name in ("bin", "site"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    script = directory / "bin" / "torchrun"
    script.write_text(_TORCHRUN.format(python=_quoted(sys.executable)))
    script.chmod(0o755)
    (directory / "site" / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(hook=str(hook), root=str(root)))


def adopted_environment(directory: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """For the command. One that is adopted twice has the inner one's directories first."""
    paths = {"PATH": directory / "bin", "PYTHONPATH": directory / "site"}
    changed = {
        name: f"{path}{os.pathsep}{environ[name]}" if environ.get(name) else str(path) for name, path in paths.items()
    }
    return {**environ, **changed, DIRECTORY_VARIABLE: str(directory)}


def without_adoption(environ: Mapping[str, str]) -> dict[str, str]:
    """What a worker gets: the environment that the command had before it was adopted."""
    if not environ.get(DIRECTORY_VARIABLE):
        return dict(environ)
    ours = {str(Path(environ[DIRECTORY_VARIABLE]) / name) for name in ("bin", "site")}
    kept = {name: value for name, value in environ.items() if name not in (DIRECTORY_VARIABLE, OPTIONS_VARIABLE)}
    for name in ("PATH", "PYTHONPATH"):
        parts = [part for part in kept.get(name, "").split(os.pathsep) if part not in ours]
        if parts != [""] and parts:
            kept[name] = os.pathsep.join(parts)
        else:
            kept.pop(name, None)
    return kept


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)
