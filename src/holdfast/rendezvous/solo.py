"""For runs without a coordinator: this node decides for itself, the handler only brings the nodes together.

It counts restarts for this node alone, asks a handler that cannot push whether other nodes are waiting, and meets the
other nodes in the handler's store at the end. Every call of the handler may block, so each round has a thread: it forms
the round, and asks every `monitor_interval_s` until the workers have ended. The next thread waits for the last one: a
handler is never called twice at once.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from holdfast.failures.records import Failure
from holdfast.frozen import changed
from holdfast.log import Logger
from holdfast.rendezvous import store as stores
from holdfast.rendezvous.api import RendezvousHandler, RendezvousInfo
from holdfast.rendezvous.coordination import AgentPush, Coordination, JoinFailed
from holdfast.rendezvous.membership import model, restart_policy
from holdfast.rendezvous.membership.model import (
    AgentStore,
    Chosen,
    End,
    Ended,
    Outcome,
    Place,
    SavedSteps,
    Sealed,
    Stop,
)
from holdfast.rendezvous.membership.restart_policy import Budget, RestartPolicy
from holdfast.rendezvous.static import JOIN_TIMEOUT_S, StandaloneRendezvous

if TYPE_CHECKING:
    from holdfast.rendezvous.membership.agreed_steps import AgreedSteps

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
        # Of handlers, only that of a run on one machine holds the master port.
        self._agent_store = getattr(handler, "agent_store", AgentStore.OFF)
        self._snapshot_every_s = getattr(handler, "snapshot_every_s", 0.0)
        self._steps: AgreedSteps | None = None  # If `_snapshot_every_s` is above 0.
        self._serves_store = False
        self._local_world_size = 1
        self._round = 0
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()  # No answer about the present round is wanted any more.
        self._budget = Budget(time.monotonic())
        self._delay_s = 0.0
        self._earlier: tuple[model.RoundEnd, ...] = ()
        self._found: RendezvousInfo | None = None
        self._is_deferred = False  # The agent wants a place, and is not ready for it.
        self._failure: Failure | None = None  # Of the last round.
        self.join_patience_s = float(getattr(handler, "join_timeout_s", JOIN_TIMEOUT_S))

    def introduce(
        self, role: str, local_world_size: int, policy: RestartPolicy, grace_s: float = 30.0, script: str = "",
        stop_margin_s: float = 15.0, serves_store: bool = False,
    ) -> None:  # fmt: skip
        self._policy, self._local_world_size = policy, local_world_size
        self._serves_store = serves_store and self._agent_store is not AgentStore.OFF

    def join(self, failure: Failure | None = None) -> None:
        if self.outcome is not None:
            self._mailbox.put(Ended(self.outcome))
            return
        self._is_deferred = self.unready is not None
        if self._is_deferred:
            self._failure = failure
            return  # There is no coordinator that would want to know.
        delay_s, self._delay_s = self._delay_s, 0.0
        self.close()
        self._is_over = is_over = threading.Event()
        if self._has_fixed_world and not delay_s:
            self._meet()  # It does not block.
            return
        at = (self._thread, is_over, delay_s)
        self._thread = threading.Thread(target=self._meet_and_ask, args=at, name="holdfast-handler", daemon=True)
        self._thread.start()

    def tell_change(self) -> None:
        """A rendezvous that this node waits in cannot be left."""
        if self.unready is None and self._is_deferred:
            self.join()

    def give_up(self, reason: str) -> None:
        text = f"no round within {self.join_patience_s:g} s (--join-timeout): {os.uname().nodename} stays out: {reason}"
        # The round of that failure is in the report as the last one.
        earlier = self._earlier if self._failure is None else self._earlier[:-1]
        self.outcome = Outcome(End.FAILED, text, self._failure, (), earlier)
        self._mailbox.put(Ended(self.outcome))

    def close(self) -> None:
        """Ask the handler no more about this round."""
        self._is_over.set()

    def _meet_and_ask(self, before: threading.Thread | None, is_over: threading.Event, delay_s: float) -> None:
        if before is not None:
            before.join()
        if is_over.wait(delay_s) or not self._meet() or self._has_fixed_world:
            return
        complaint = ""
        while not is_over.wait(self._monitor_interval_s):
            try:
                if self._handler.num_nodes_waiting() > 0:
                    self._mailbox.put(Stop(self._round, "other nodes are waiting to join"))
                    return
            except Exception as error:  # That the handler cannot be asked is no reason to stop healthy workers.
                if complaint != (complaint := f"{type(error).__name__}: {error}"):
                    logger.warning("cannot ask whether other nodes are waiting; the workers go on: %s", complaint)

    def _meet(self) -> bool:
        try:
            self._found = found = self._handler.next_rendezvous()
            self._round += 1
            # No shapes: the nodes know nothing of each other.
            port, has_store = getattr(self._handler, "free_port", 0), self._serves_store
            world = (0, self._round, found.rank, found.world_size)
            chosen = self._choose(found.world_size)
            agrees = found.world_size == 1 and self._snapshot_every_s > 0  # To write a step to disk now and then.
            place = Place(
                *world, restarts_used=self._budget.used, free_port=port, has_store=has_store,
                chosen=chosen, agrees_on_steps=agrees,
            )  # fmt: skip
            if agrees:
                self._begin_steps(place)
            return self._mailbox.put(Sealed("", place))
        except BaseException as error:
            self._mailbox.put(JoinFailed(error))
            return False

    def _choose(self, node_count: int) -> Chosen | None:
        if not self.held:
            return None
        from holdfast.rendezvous.membership import snapshots  # Most runs have none.

        return snapshots.choose_alone(self._local_world_size, self.held, node_count)

    def _begin_steps(self, place: Place) -> None:
        from holdfast.rendezvous.membership.agreed_steps import AgreedSteps

        self._steps = self._steps or AgreedSteps(time.monotonic())
        self._steps.begin(place, 0, self._snapshot_every_s)

    def report_steps(self, round: int, steps: SavedSteps) -> None:
        if self._steps is not None and round == self._round:
            for order in self._steps.take("", steps, time.monotonic()):
                self._mailbox.put(order)

    def found(self, sealed: Sealed) -> RendezvousInfo:
        assert self._found is not None
        return self._found

    def listen_at_master(self) -> int:
        assert isinstance(self._handler, StandaloneRendezvous)
        return self._handler.listen_at_master()

    def report_failure(self, round: int, failure: Failure) -> None:
        self.close()
        now = time.monotonic()
        self._budget.note(self.advance)
        may_drop_store = self._serves_store and self._agent_store is AgentStore.AUTO
        decision = restart_policy.decide(self._policy, self._budget, failure, now, may_drop_store=may_drop_store)
        if isinstance(decision, restart_policy.GiveUp):
            self.outcome = Outcome(End.FAILED, decision.reason, failure, (), self._earlier, decision.is_final)
            self.verdict = f"no restart: {decision.reason}"
            return
        self._delay_s = decision.delay_s
        self._budget.end_round()
        self._serves_store &= not decision.drops_store
        what = restart_policy.announcement(changed(decision, delay_s=0.0))
        if decision.is_charged:
            self._budget.charge(now)
            what = f"restart {self._budget.used} of {self._policy.max_restarts}"
        self._earlier = model.with_end(self._earlier, round, failure.text, self._budget.used)
        self.verdict = f"{what}, in {decision.delay_s:g} s" if decision.delay_s else what

    def report_success(self, round: int, timeout_s: float) -> None:
        self.close()
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

    def take(self) -> list[AgentPush]:
        """Whether nodes wait is of interest while workers run: an answer that came too late is dropped."""
        return [push for push in super().take() if not (isinstance(push, Stop) and self._is_over.is_set())]
