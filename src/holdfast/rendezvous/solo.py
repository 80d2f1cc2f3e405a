"""For runs without a coordinator: this node decides for itself, the handler only brings the nodes together.

It counts restarts for this node alone, asks a handler that cannot push whether other nodes are waiting, and meets the
other nodes in the handler's store at the end. A handler blocks while it forms a round; that happens in a thread here,
and nowhere else.
"""

from __future__ import annotations

import threading
import time

from holdfast.log import Logger
from holdfast.rendezvous import store as stores
from holdfast.rendezvous.api import RendezvousHandler, RendezvousInfo
from holdfast.rendezvous.coordination import Coordination, JoinFailed, Push
from holdfast.rendezvous.membership import model, restart_policy
from holdfast.rendezvous.membership.model import End, Ended, Outcome, Place, Sealed, Stop
from holdfast.rendezvous.membership.restart_policy import Budget, Failure, RestartPolicy

logger = Logger(__name__)

_TERMINAL_STATE_SYNC = "torchelastic/agent/terminal_state"
_SUCCEEDED = Ended(Outcome(End.SUCCEEDED, "all workers have succeeded"))


class SoloCoordination(Coordination):
    def __init__(self, handler: RendezvousHandler, monitor_interval_s: float) -> None:
        super().__init__()
        self._handler = handler
        # A handler that was written for another launcher does not know the question.
        self._has_fixed_world = getattr(handler, "has_fixed_world", False)
        self._monitor_interval_s = monitor_interval_s
        self._policy = RestartPolicy()
        self._round = 0
        self._is_joining = False
        self._budget = Budget(time.monotonic())
        self._delay_s = 0.0
        self._earlier: tuple[model.RoundEnd, ...] = ()
        self._found: RendezvousInfo | None = None
        self._complaint = ""

    def introduce(
        self, role: str, local_world_size: int, policy: RestartPolicy, grace_s: float = 30.0, script: str = ""
    ) -> None:
        self._policy = policy

    def join(self, failure: Failure | None = None) -> None:
        if self.outcome is not None:
            self._mailbox.put(Ended(self.outcome))
            return
        self._is_joining = True
        delay_s, self._delay_s = self._delay_s, 0.0
        if self._has_fixed_world and not delay_s:
            self._meet(delay_s)  # It does not block.
        else:
            threading.Thread(target=self._meet, args=(delay_s,), name="holdfast-next_rendezvous", daemon=True).start()

    def _meet(self, delay_s: float) -> None:
        try:
            time.sleep(delay_s)
            self._found = found = self._handler.next_rendezvous()
            self._round += 1
            # No shapes: the nodes know nothing of each other.
            place = Place(0, self._round, found.rank, found.world_size, restarts_used=self._budget.used)
            self._mailbox.put(Sealed("", place))
        except BaseException as error:
            self._mailbox.put(JoinFailed(error))

    def found(self, sealed: Sealed) -> RendezvousInfo:
        assert self._found is not None
        return self._found

    def report_failure(self, round: int, failure: Failure) -> None:
        now = time.monotonic()
        self._budget.note(self.advance)
        decision = restart_policy.decide(self._policy, self._budget, failure, now)
        if isinstance(decision, restart_policy.GiveUp):
            self.outcome = Outcome(End.FAILED, decision.reason, failure, (), self._earlier, decision.is_final)
            self.verdict = f"no restart: {decision.reason}"
            return
        self._delay_s = decision.delay_s
        self._budget.end_round()
        what = "a restart that is not counted"
        if decision.is_charged:
            self._budget.charge(now)
            what = f"restart {self._budget.used} of {self._policy.max_restarts}"
        self._earlier = model.with_end(self._earlier, round, failure.text, self._budget.used)
        self.verdict = f"{what}, in {decision.delay_s:g} s" if decision.delay_s else what

    def report_success(self, round: int, timeout_s: float) -> None:
        found = self._found
        if self._has_fixed_world or found is None or found.world_size == 1:
            self._mailbox.put(_SUCCEEDED)
            return
        threading.Thread(target=self._await_others, args=(found, timeout_s), name="holdfast-wait", daemon=True).start()

    def _await_others(self, found: RendezvousInfo, timeout_s: float) -> None:
        """Wait until the workers of all nodes have ended. A barrier that fails is no reason to fail a run."""
        ends = time.monotonic() + timeout_s
        try:
            stores.barrier(found.store, found.world_size, _TERMINAL_STATE_SYNC, timeout_s)
        except Exception as error:
            if time.monotonic() >= ends:
                return  # The agent, which looks at the clock itself, has said so.
            logger.warning("could not wait for the other nodes to finish: %s: %s", type(error).__name__, error)
        self._mailbox.put(_SUCCEEDED)

    def take(self) -> list[Push]:
        pushes = super().take()
        if any(isinstance(push, Sealed) for push in pushes):
            self._is_joining = False
        try:
            if not pushes and self.ask_every_s is not None and self._handler.num_nodes_waiting() > 0:
                return [Stop(self._round, "other nodes are waiting to join")]
        except Exception as error:  # That the handler cannot be asked is no reason to stop healthy workers.
            complaint = f"{type(error).__name__}: {error}"
            if complaint != self._complaint:
                logger.warning("cannot ask whether other nodes are waiting; the workers go on: %s", complaint)
            self._complaint = complaint
        return pushes

    @property
    def ask_every_s(self) -> float | None:
        return None if self._has_fixed_world or self._is_joining else self._monitor_interval_s
