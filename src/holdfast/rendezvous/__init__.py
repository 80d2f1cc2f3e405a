"""Rendezvous: how nodes agree on who is in.

The names below are resolved on first use. Asking for `rendezvous_handler_registry` here also registers the
built-in backends; out-of-tree ones are looked for when a name is asked for that is not registered.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.rendezvous.api import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousHandler,
        RendezvousHandlerCreator,
        RendezvousHandlerRegistry,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStateError,
        RendezvousStoreInfo,
        RendezvousTimeoutError,
    )
    from holdfast.rendezvous.registry import rendezvous_handler_registry

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "rendezvous_handler_registry",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.rendezvous' has no attribute {name!r}")
    module = "registry" if name == "rendezvous_handler_registry" else "api"
    value = getattr(import_module(f"holdfast.rendezvous.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
