"""What an agent needs of whoever decides for its run.

A backend with a coordinator implements `Coordination` itself: failures are reported to it, and it pushes what the
run has decided. For every other backend `SoloCoordination` stands in: it counts restarts for this node alone, asks
a handler that cannot push whether somebody is waiting, and meets the other nodes in the handler's store at the end.
"""

from __future__ import annotations

import abc
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.records import record
from holdfast.rendezvous import restart
from holdfast.rendezvous import store as stores
from holdfast.rendezvous.api import RendezvousClosedError, RendezvousHandler, RendezvousInfo
from holdfast.rendezvous.outcome import End, Failure, Outcome
from holdfast.rendezvous.restart import RestartPolicy

if TYPE_CHECKING:
    from holdfast.rendezvous.world import Place

logger = logging.getLogger(__name__)

_TERMINAL_STATE_SYNC = "torchelastic/agent/terminal_state"


@record
class Round:
    """What an agent is told about a round. `place` is None where nodes know nothing of each other."""

    number: int
    restarts_used: int
    found: RendezvousInfo
    place: Place | None = None


@record
class RoundStopped:
    """`is_hang`: another node has found that the run hangs."""

    round: int
    reason: str
    is_hang: bool = False


@record
class PlaceLost:
    round: int
    reason: str


@record
class RunEnded:
    outcome: Outcome


Push = RoundStopped | PlaceLost | RunEnded


class RunOver(RendezvousClosedError):  # noqa: N818
    """There is no next round, because the run has ended."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class Coordination(abc.ABC):
    """Whoever decides for the run, as one agent sees it. Called from the agent's deciding loop."""

    @abc.abstractmethod
    def introduce(self, role: str, local_world_size: int, policy: RestartPolicy) -> None:
        """Say what this node brings; before the first round."""

    @abc.abstractmethod
    def next_round(self) -> Round:
        """Block until this node is in a round. Raises `RunOver` if there will be none. May run in a thread."""

    @property
    @abc.abstractmethod
    def outcome(self) -> Outcome | None:
        """How the run has ended, as far as this node has heard."""

    @abc.abstractmethod
    def report_failure(self, round: int, failure: Failure) -> None:
        """This node's workers have failed; they are being stopped."""

    @property
    def verdict(self) -> str | None:
        """What follows from the failure that was just reported, in words; None if others have yet to decide."""
        return None

    @abc.abstractmethod
    def report_success(self, round: int, timeout_s: float) -> None:
        """This node's workers have all succeeded. `RunEnded` is pushed when everybody's have."""

    @property
    def has_leases(self) -> bool:
        """Whether this node can be given up by the run, so that its workers must not outlive its lease."""
        return False

    @property
    def has_lapsed(self) -> bool:
        """Whether this node's lease has run out, so that its workers are being killed; `PlaceLost` is on its way."""
        return False

    def set_lease_sink(self, sink: Callable[[float | None], None]) -> None:  # noqa: B027
        """Who is told until when this node's workers may live; called at once with what holds now."""

    def leaving(self) -> None:  # noqa: B027  # most have nobody to tell
        """This node goes away and is stopping its workers."""

    def left(self) -> None:  # noqa: B027
        """Its workers are gone."""

    @abc.abstractmethod
    def fileno(self) -> int:
        """Readable when `take` has something."""

    @abc.abstractmethod
    def take(self) -> list[Push]:
        """What was decided since the last call, oldest first."""

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


class SoloCoordination(Coordination):
    """This node decides for itself; the handler only brings the nodes together."""

    def __init__(self, handler: RendezvousHandler, monitor_interval_s: float) -> None:
        self._handler = handler
        self._monitor_interval_s = monitor_interval_s
        self._mailbox = Mailbox()
        self._policy = RestartPolicy()
        self._round = 0
        self._charged_at: list[float] = []
        self._restarts_used = 0
        self._outcome: Outcome | None = None
        self._delay_s = 0.0
        self._verdict: str | None = None
        self._found: RendezvousInfo | None = None
        self._complaint = ""

    @property
    def has_fixed_world(self) -> bool:
        """A handler that was written for another launcher does not know the question."""
        return getattr(self._handler, "has_fixed_world", False)

    def introduce(self, role: str, local_world_size: int, policy: RestartPolicy) -> None:
        self._policy = policy

    def next_round(self) -> Round:
        if self._outcome is not None:
            raise RunOver(self._outcome)
        delay_s, self._delay_s = self._delay_s, 0.0
        time.sleep(delay_s)
        self._found = self._handler.next_rendezvous()
        self._round += 1
        return Round(self._round, self._restarts_used, self._found)

    def report_failure(self, round: int, failure: Failure) -> None:
        now = time.monotonic()
        decision = restart.decide(self._policy, self._charged_at, failure, now)
        if isinstance(decision, restart.GiveUp):
            self._outcome = Outcome(End.FAILED, decision.reason, failure)
            self._verdict = f"no restart: {decision.reason}"
            return
        self._delay_s = decision.delay_s
        what = "a restart that is not counted"
        if decision.is_charged:
            self._charged_at.append(now)
            self._restarts_used += 1
            what = f"restart {self._restarts_used} of {self._policy.max_restarts}"
        self._verdict = f"{what}, in {decision.delay_s:g} s" if decision.delay_s else what

    @property
    def verdict(self) -> str | None:
        return self._verdict

    @property
    def outcome(self) -> Outcome | None:
        return self._outcome

    def report_success(self, round: int, timeout_s: float) -> None:
        is_alone = self.has_fixed_world or self._found is None or self._found.world_size == 1
        if is_alone:
            self._mailbox.put(RunEnded(Outcome(End.SUCCEEDED, "all workers have succeeded")))
            return
        threading.Thread(target=self._meet_others, args=(timeout_s,), name="holdfast-barrier", daemon=True).start()

    def _meet_others(self, timeout_s: float) -> None:
        """Wait until the workers of every node have ended. A barrier that fails is no reason to fail a run."""
        assert self._found is not None
        store: Any = self._found.store
        ends = time.monotonic() + timeout_s
        try:
            stores.barrier(store, self._found.world_size, _TERMINAL_STATE_SYNC, timeout_s)
        except Exception as error:
            if time.monotonic() >= ends:
                return  # The agent, which looks at the clock itself, has said so.
            logger.warning("did not hear of the end of every other node: %s: %s", type(error).__name__, error)
        self._mailbox.put(RunEnded(Outcome(End.SUCCEEDED, "all workers have succeeded")))

    def fileno(self) -> int:
        return self._mailbox.fileno()

    def take(self) -> list[Push]:
        pushes = self._mailbox.take()
        if not pushes and not self.has_fixed_world and self._are_nodes_waiting():
            return [RoundStopped(self._round, "other nodes are waiting to join")]
        return pushes

    def _are_nodes_waiting(self) -> bool:
        """Workers that are well are not stopped because nobody can be asked."""
        try:
            return self._handler.num_nodes_waiting() > 0
        except Exception as error:
            complaint = f"{type(error).__name__}: {error}"
            if complaint != self._complaint:
                logger.warning("cannot ask whether other nodes are waiting; the workers go on: %s", complaint)
            self._complaint = complaint
            return False

    @property
    def ask_every_s(self) -> float | None:
        return None if self.has_fixed_world else self._monitor_interval_s
