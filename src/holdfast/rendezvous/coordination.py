"""What an agent needs to know of the run that it takes part in.

A backend with a coordinator implements `Coordination` itself: failures are reported to it, and it pushes what the run
has decided. For every other backend `SoloCoordination` (`solo`) stands in.
"""

from __future__ import annotations

import abc
import os
import threading
from collections import deque
from collections.abc import Callable

from holdfast.frozen import frozen
from holdfast.rendezvous.api import RendezvousInfo
from holdfast.rendezvous.membership.model import Ended, Outcome, PlaceLost, Refused, Sealed, Stop
from holdfast.rendezvous.membership.restart_policy import Failure, RestartPolicy


@frozen
class JoinFailed:
    """There is no way to get a place: the backend has failed, or cannot be reached."""

    error: BaseException


Push = Sealed | Stop | PlaceLost | Ended | Refused | JoinFailed


class Coordination(abc.ABC):
    """The run, as one agent sees it. Called from the agent's deciding loop.

    `joined` says in words how far the round is that this node waits for; any thread may read it.
    """

    joined: str | None = None

    @abc.abstractmethod
    def introduce(self, role: str, local_world_size: int, policy: RestartPolicy, grace_s: float = 30.0) -> None:
        """Say what this node brings; before the first round. `grace_s` is how long its workers may take to stop."""

    @abc.abstractmethod
    def join(self) -> None:
        """Ask for a place in the next round. The answer is pushed: `Sealed`, `Ended`, `Refused` or `JoinFailed`."""

    @abc.abstractmethod
    def found(self, sealed: Sealed) -> RendezvousInfo:
        """The store of the round that was sealed, and where its workers meet."""

    @abc.abstractmethod
    def report_failure(self, round: int, failure: Failure) -> None:
        """This node's workers have failed; they are being stopped."""

    @property
    def verdict(self) -> str | None:
        """What follows from the failure that was just reported, in words; None if others have yet to decide."""
        return None

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended, if this node knows already."""
        return None

    @abc.abstractmethod
    def report_success(self, round: int, timeout_s: float) -> None:
        """This node's workers have all succeeded. `Ended` is pushed when those of all nodes have."""

    @property
    def has_leases(self) -> bool:
        """Whether this node can lose its place to another, so that its workers must not outlive its lease."""
        return False

    @property
    def has_lapsed(self) -> bool:
        """Whether this node's lease has run out, so that its workers are being killed; `PlaceLost` is on its way."""
        return False

    def set_lease_sink(self, sink: Callable[[float | None], None]) -> None:  # noqa: B027
        """`sink` is told until when this node's workers may live; called at once with what holds now."""

    def leaving(self) -> None:  # noqa: B027  # most have no one to tell
        """This node goes away and is stopping its workers."""

    def left(self) -> None:  # noqa: B027
        """Its workers are gone."""

    @abc.abstractmethod
    def fileno(self) -> int:
        """Readable when `take` has something."""

    @abc.abstractmethod
    def take(self) -> list[Push]:
        """What was pushed since the last call, oldest first."""

    @property
    def ask_every_s(self) -> float | None:
        """How often `take` must be called although nothing is readable; None if that is never so."""
        return None


class Mailbox:
    """Pushes from any thread for the one loop that decides."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[Push] = deque()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        return self._fd

    def put(self, item: Push) -> None:
        with self._lock:
            self._items.append(item)
            os.eventfd_write(self._fd, 1)

    def take(self) -> list[Push]:
        with self._lock:
            items = list(self._items)
            self._items.clear()
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                pass
            return items
