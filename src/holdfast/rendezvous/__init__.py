"""Rendezvous: how nodes agree on who is in.

The names below are resolved on first use. Asking for `rendezvous_handler_registry` here also registers the
built-in backends; out-of-tree ones are looked for when a name is asked for that is not registered.
"""

from __future__ import annotations

from holdfast import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.rendezvous.api import RendezvousClosedError as RendezvousClosedError
    from holdfast.rendezvous.api import RendezvousConnectionError as RendezvousConnectionError
    from holdfast.rendezvous.api import RendezvousError as RendezvousError
    from holdfast.rendezvous.api import RendezvousGracefulExitError as RendezvousGracefulExitError
    from holdfast.rendezvous.api import RendezvousHandler as RendezvousHandler
    from holdfast.rendezvous.api import RendezvousHandlerCreator as RendezvousHandlerCreator
    from holdfast.rendezvous.api import RendezvousHandlerRegistry as RendezvousHandlerRegistry
    from holdfast.rendezvous.api import RendezvousInfo as RendezvousInfo
    from holdfast.rendezvous.api import RendezvousParameters as RendezvousParameters
    from holdfast.rendezvous.api import RendezvousStateError as RendezvousStateError
    from holdfast.rendezvous.api import RendezvousStoreInfo as RendezvousStoreInfo
    from holdfast.rendezvous.api import RendezvousTimeoutError as RendezvousTimeoutError
    from holdfast.rendezvous.registry import rendezvous_handler_registry as rendezvous_handler_registry

__all__, __getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "holdfast.rendezvous.api": (
            "RendezvousClosedError RendezvousConnectionError RendezvousError RendezvousGracefulExitError "
            "RendezvousHandler RendezvousHandlerCreator RendezvousHandlerRegistry RendezvousInfo "
            "RendezvousParameters RendezvousStateError RendezvousStoreInfo RendezvousTimeoutError"
        ),
        "holdfast.rendezvous.registry": "rendezvous_handler_registry",
    },
)
