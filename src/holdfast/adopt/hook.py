"""Has a Python process find holdfast behind the names of torch's launcher. Run by its path, as a `sitecustomize`.

It needs nothing but the standard library until one of the names is imported. Names of torch's that holdfast does not
have are taken from torch's own module. Where HOLDFAST_ADOPT is not set, as in a worker that was forked from an adopted
process, imports are left alone.
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
    "torch.distributed.launcher": "holdfast.adopt.launcher",
    "torch.distributed.launcher.api": "holdfast.adopt.launcher",
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
# Imported by programs that launch, and by no others.
_LAUNCHERS = (
    *_COMMANDS, "torch.distributed.launcher.api", "torch.distributed.elastic.agent.server.local_elastic_agent",
)  # fmt: skip

USED, WITHOUT_TORCH = "used by ", "no torch in "


class Alias(types.ModuleType):
    """A module of torch's name. Reading and setting names goes to holdfast's module."""

    def __init__(self, name: str, target: types.ModuleType, spec: importlib.machinery.ModuleSpec) -> None:
        super().__init__(name, target.__doc__)
        self.__dict__.update(_holdfast=target, _torch_spec=spec, _torch=None)

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__
        if name.startswith("__") and name != "__all__":  # Those of the module itself, such as its `__path__`.
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        try:
            return getattr(known["_holdfast"], name)
        except AttributeError:
            pass
        if known["_torch"] is None:
            known["_torch"] = importlib.util.module_from_spec(known["_torch_spec"])
            known["_torch_spec"].loader.exec_module(known["_torch"])
        return getattr(known["_torch"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets a package's modules as its attributes.
        if name.startswith("__") or isinstance(value, types.ModuleType):
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["_holdfast"], name, value)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_holdfast"])


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands before the usual finders. Also the loader of what it finds."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in ALIASES and name != "torch":
            return None
        found = (each.find_spec(name, path, target) for each in sys.meta_path if not isinstance(each, Finder))
        theirs = next(filter(None, found), None)
        if name == "torch":
            if theirs is None:
                note(WITHOUT_TORCH + sys.executable)
            return None
        if theirs is None or not os.environ.get("HOLDFAST_ADOPT"):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=theirs.origin)
        spec.submodule_search_locations = theirs.submodule_search_locations
        spec.loader_state = theirs
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        _check_holdfast(spec.name)
        target = importlib.import_module(ALIASES[spec.name])
        if spec.name in _LAUNCHERS:
            note(f"{USED}import {spec.name}")
        return Alias(spec.name, target, spec.loader_state)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is left to be done."""

    def get_code(self, name: str) -> types.CodeType | None:
        """For `runpy`, by which debuggers and profilers run a module in their own process."""
        if name not in _COMMANDS:
            return None
        _check_holdfast(name)
        words = f"[{_COMMANDS[name]!r}, *sys.argv[1:]]"
        return compile(f"import sys, holdfast.cli.main as own; sys.exit(own.main({words}))", f"<{name}>", "exec")


def _check_holdfast(name: str) -> None:
    try:
        importlib.import_module("holdfast.errors")
    except ImportError as error:
        raise ImportError(
            f"holdfast adopt cannot answer for {name}: {sys.executable} has no holdfast ({error}); "
            "install it there, too"
        ) from error


def note(line: str) -> None:
    """For `holdfast adopt`, which says at the end if its command never came here. It has made the file."""
    for directory in filter(None, os.environ.get("HOLDFAST_ADOPT", "").split(":")):
        try:
            file = os.open(os.path.join(directory, "used"), os.O_WRONLY | os.O_APPEND)
            os.write(file, f"{line}\n".encode(errors="surrogateescape"))
            os.close(file)
        except OSError:
            pass  # Installed for good, or the adopting command has ended.


def install(python: str, own_directory: str) -> None:
    """`python` is the interpreter that holdfast is installed for, `own_directory` that of the `sitecustomize` that
    calls this."""
    module = _module_to_run()
    if module in _COMMANDS:
        # As `holdfast` itself would be started: torch is never imported. The workers run under this interpreter.
        if place_of(python) != place_of(sys.executable):
            os.environ.setdefault("PYTHON_EXEC", sys.executable)
        os.execv(python, [python, "-P", "-m", "holdfast", _COMMANDS[module], *sys.argv[1:]])
    if not any(type(each).__name__ == "Finder" and type(each).__module__ == __name__ for each in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    _call_the_next_sitecustomize(own_directory)


def place_of(python: str) -> tuple[str, str]:
    """Equal for the names that one interpreter has in one environment."""
    return os.path.dirname(python), os.path.realpath(python)


def _module_to_run() -> str:
    """The module of `python -m`. At this time `sys.argv` has `-m` in its place, and its arguments."""
    if sys.argv[:1] != ["-m"]:
        return ""
    word = sys.orig_argv[-len(sys.argv)]
    return word.partition("m")[2] if word.startswith("-") else word


def _call_the_next_sitecustomize(own_directory: str) -> None:
    """The user's, or that of an adoption around this one."""
    places = [os.path.abspath(each) for each in sys.path]
    others = sys.path[places.index(own_directory) + 1 :] if own_directory in places else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)
