"""Rendezvous: how nodes agree on who is in.

The names below are resolved on first use. Asking for `rendezvous_handler_registry` here also registers the
built-in backends; out-of-tree ones are looked for when a name is asked for that is not registered.
"""
# ruff: noqa: F403, F405  (type checkers read the names from api)

from typing import TYPE_CHECKING

from holdfast import lazy

if TYPE_CHECKING:
    from holdfast.rendezvous.api import *

__all__ = [
    "RendezvousClosedError", "RendezvousConnectionError", "RendezvousError", "RendezvousGracefulExitError",
    "RendezvousHandler", "RendezvousHandlerCreator", "RendezvousHandlerRegistry", "RendezvousInfo",
    "RendezvousParameters", "RendezvousStateError", "RendezvousStoreInfo", "RendezvousTimeoutError",
    "rendezvous_handler_registry",
]  # fmt: skip

__getattr__, __dir__ = lazy.exports(
    __name__, dict.fromkeys(__all__, "api") | {"rendezvous_handler_registry": "registry"}
)
