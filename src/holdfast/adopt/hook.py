"""Has a Python process find holdfast behind the names of torch's launcher. Run by its path, as a `sitecustomize`.

It needs nothing but the standard library until one of the names is imported. Names of torch's that holdfast does not
have are taken from torch's own module.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

# A module of torch, and the one of holdfast that answers for it.
ALIASES = {
    "torch.distributed.run": "holdfast.cli.run",
    "torch.distributed.launch": "holdfast.adopt.launch",
    "torch.distributed.launcher": "holdfast.launcher",
    "torch.distributed.launcher.api": "holdfast.launcher",
    "torch.distributed.elastic.agent.server": "holdfast.agent",
    "torch.distributed.elastic.agent.server.api": "holdfast.agent",
    "torch.distributed.elastic.agent.server.local_elastic_agent": "holdfast.agent.local",
    "torch.distributed.elastic.events": "holdfast.telemetry.events",
    "torch.distributed.elastic.metrics": "holdfast.telemetry.metrics",
    "torch.distributed.elastic.multiprocessing": "holdfast.process",
    "torch.distributed.elastic.multiprocessing.api": "holdfast.process",
    "torch.distributed.elastic.multiprocessing.errors": "holdfast.process.errors",
    "torch.distributed.elastic.rendezvous": "holdfast.rendezvous",
    "torch.distributed.elastic.rendezvous.api": "holdfast.rendezvous.api",
    "torch.distributed.elastic.rendezvous.registry": "holdfast.rendezvous.registry",
    "torch.distributed.elastic.timer": "holdfast.timer",
}
_COMMANDS = {"torch.distributed.run": "adopted-run", "torch.distributed.launch": "adopted-launch"}


class _Alias(types.ModuleType):
    """A module of torch's name. Reading and setting names goes to holdfast's module."""

    def __init__(self, name: str, target: types.ModuleType, spec: importlib.machinery.ModuleSpec) -> None:
        super().__init__(name, target.__doc__)
        self.__dict__["_holdfast"], self.__dict__["_torch_spec"] = target, spec
        self.__dict__["_torch"] = None

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__
        try:
            return getattr(known["_holdfast"], name)
        except AttributeError:
            if name.startswith("__"):
                raise
        if known["_torch"] is None:
            known["_torch"] = importlib.util.module_from_spec(known["_torch_spec"])
            known["_torch_spec"].loader.exec_module(known["_torch"])
        return getattr(known["_torch"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["_holdfast"], name, value)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_holdfast"])


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands before the usual finders. Also the loader of what it finds."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in ALIASES:
            return None
        theirs = importlib.machinery.PathFinder.find_spec(name, path)
        if theirs is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=theirs.origin)
        spec.submodule_search_locations = theirs.submodule_search_locations
        spec.loader_state = theirs
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        try:
            target = importlib.import_module(ALIASES[spec.name])
        except ModuleNotFoundError:
            sys.path.append(self._root)
            target = importlib.import_module(ALIASES[spec.name])
        note_use(f"import {spec.name}")
        return _Alias(spec.name, target, spec.loader_state)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is left to be done."""


def note_use(how: str) -> None:
    """For `holdfast adopt`, which says at the end if its command never came here."""
    directory = os.environ.get("HOLDFAST_ADOPT")
    if directory:
        try:
            with open(os.path.join(directory, "used"), "a") as file:
                file.write(f"{how}\n")
        except OSError:
            pass


def install(root: str, own_directory: str) -> None:
    """`root` is where the package holdfast is, `own_directory` that of the `sitecustomize` that calls this."""
    command = _module_to_run()
    if command is not None:
        # As `holdfast` itself would be started: torch is never imported.
        name, rest = command
        code = f"import sys; sys.path.append({root!r}); from holdfast.__main__ import run; run()"
        os.execv(sys.executable, [sys.executable, "-P", "-c", code, _COMMANDS[name], *rest])
    sys.meta_path.insert(0, Finder(root))
    _call_the_next_sitecustomize(own_directory)


def _module_to_run() -> tuple[str, list[str]] | None:
    """The module of `python -m`, if it is torch's launcher, and its arguments."""
    given = sys.orig_argv[1:]
    for position, word in enumerate(given):
        if word == "-m" and position + 1 < len(given):
            name = given[position + 1]
            return (name, given[position + 2 :]) if name in _COMMANDS else None
        if not word.startswith("-") or word in ("-c", "-"):
            return None
    return None


def _call_the_next_sitecustomize(own_directory: str) -> None:
    others = [each for each in sys.path if os.path.abspath(each) != own_directory]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)
