"""Programs that call torchrun, with holdfast in its place: `holdfast adopt -- COMMAND`.

The command runs with a directory of ours before its PATH, in which `torchrun` is holdfast, and with another one before
its PYTHONPATH, whose `sitecustomize` has every Python of that process tree find holdfast behind the names of torch's
launcher (`hook`). The files are made by `write_files`, for one command or, with `--install`, for good.

A program comes to holdfast in one of three ways. Each leaves a line in the file `used`, by which the command knows at
the end whether the program has called torchrun at all:

    torchrun ...                             the script in PATH
    python -m torch.distributed.run ...      the hook sees it at the interpreter's start, before torch is imported
    import torch.distributed.run             the hook answers the import with a module that stands for ours, and a
                                             debugger that runs a module gets a program that is ours

Workers inherit none of it (`process.adoption`): a script that imports torch's launcher itself gets torch's.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from holdfast.process.adoption import DIRECTORIES_VARIABLE, SCRIPTS, SITE

_TORCHRUN = """#!/bin/sh
# torchrun, which is holdfast here.
[ -n "${variable}" ] || {variable}={directory}
export {variable}
exec {python} -P -m holdfast adopted-torchrun "$@"
"""
_SITECUSTOMIZE = """# Has this Python find holdfast behind the names of torch's launcher.
import os, sys
def _adopt(hook={hook!r}):
    os.environ.setdefault({variable!r}, {directory!r})
    names = {{"__file__": hook, "__name__": "holdfast.adopt.hook"}}
    with open(hook) as file:
        exec(compile(file.read(), hook, "exec"), names)
    names["install"]({python!r}, os.path.dirname(os.path.abspath(__file__)))
try:
    _adopt()
except Exception as error:
    print(f"holdfast adopt: this Python is not adopted: {{error}}", file=sys.stderr)
"""


def write_files(directory: Path) -> None:
    """`bin/torchrun` and `site/sitecustomize.py`."""
    for name in (SCRIPTS, SITE):
        (directory / name).mkdir(parents=True, exist_ok=True)
    hook = str(Path(__file__).with_name("hook.py").resolve())
    names = {"variable": DIRECTORIES_VARIABLE, "directory": str(directory), "python": sys.executable, "hook": hook}
    script = directory / SCRIPTS / "torchrun"
    # A path is bytes, which need not be UTF-8. The other file has them as escapes.
    script.write_bytes(os.fsencode(_TORCHRUN.format(**{name: shlex.quote(value) for name, value in names.items()})))
    script.chmod(0o755)
    (directory / SITE / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(**names), encoding="utf-8")


def adopted_environment(directory: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """For the command. In one that is adopted twice the inner directories stand first."""
    before = {"PATH": environ.get("PATH") or os.defpath, "PYTHONPATH": environ.get("PYTHONPATH")}
    before[DIRECTORIES_VARIABLE] = environ.get(DIRECTORIES_VARIABLE)
    added = {"PATH": directory / SCRIPTS, "PYTHONPATH": directory / SITE, DIRECTORIES_VARIABLE: directory}
    return {**environ, **{name: ":".join(filter(None, (str(added[name]), before[name]))) for name in added}}
