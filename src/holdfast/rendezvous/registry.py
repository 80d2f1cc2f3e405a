"""From a backend's name to its handler.

The built-in backends are known as soon as this module is imported, and their code is imported when one of
them is asked for. Out-of-tree backends announce themselves as entry points. Reading those takes longer than
everything else here, so it happens only when a name is asked for that is not yet known.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from holdfast.errors import UserError
from holdfast.log import Logger
from holdfast.rendezvous.api import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry

__all__ = ["get_rendezvous_handler", "rendezvous_handler_registry"]

log = Logger(__name__)

# Backend name -> module and function that creates its handler.
_BUILT_IN = {
    "static": ("static", "create_rdzv_handler"),
    "standalone": ("static", "create_standalone_handler"),
    "tcp": ("handler", "create_tcp_handler"),
    "c10d": ("handler", "create_tcp_handler"),  # The name in torchrun command lines.
    "etcd": ("etcd.locator", "create_handler"),
    "etcd-v3": ("etcd.locator", "create_handler"),
}

_ENTRY_POINT_GROUPS = ("torchrun.handlers", "holdfast.handlers")

# Backend name -> the object reference of the entry point that it came from. An entry point may return a new
# creator at each call, so a repeated scan cannot tell by the creator that it has met the same one again.
_origins: dict[str, str] = {}


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A handler of the backend that `params` names, wherever that backend comes from."""
    if params.backend not in rendezvous_handler_registry:
        _register_out_of_tree_handlers()
    if params.backend == "etcd-v2" and params.backend not in rendezvous_handler_registry:
        instead = "use the backend etcd, which speaks v3 with etcd 3.4 or later"
        raise UserError(f"the backend 'etcd-v2' uses the v2 interface, which etcd has removed; {instead}")
    return rendezvous_handler_registry.create_handler(params)


def _create_built_in(module: str, function: str, params: RendezvousParameters) -> Any:
    return getattr(import_module(f"holdfast.rendezvous.{module}"), function)(params)


def _register_built_in_handlers() -> None:
    for name, (module, function) in _BUILT_IN.items():
        # A program may have registered its own handler under this name before this module was imported.
        if name not in rendezvous_handler_registry:
            rendezvous_handler_registry.register(name, partial(_create_built_in, module, function))


def _register_out_of_tree_handlers() -> None:
    """Register every backend that an installed distribution offers; a broken one costs one warning."""
    from importlib.metadata import entry_points

    for group in _ENTRY_POINT_GROUPS:
        for entry_point in entry_points(group=group):
            name, value = entry_point.name, entry_point.value
            if value.startswith("holdfast.") or (name in rendezvous_handler_registry and _origins.get(name) == value):
                continue  # Ours is for torch's own torchrun.
            try:
                creator = entry_point.load()()
                if not callable(creator):
                    raise TypeError(f"it must return a function that creates handlers, not {creator!r}")
                rendezvous_handler_registry.register(name, creator)
                _origins[name] = value
            except Exception as error:
                what, why = f"{name!r} (entry point {value} of group {group})", f"{type(error).__name__}: {error}"
                log.warning("rendezvous backend %s is not available: %s", what, why, exc_info=True)


_register_built_in_handlers()
