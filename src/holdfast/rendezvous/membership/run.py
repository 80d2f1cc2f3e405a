"""The machine of one run: join, last call, seal, lease, admit, end. Pure.

It takes the messages of the nodes (`From`), closed connections and time, and gives messages to the nodes (`Tell`), what
must be written down first (`Remember`), nodes to turn out (`Expel`) and the end of it all (`ForgetRun`). The
coordinator passes them on; in the simulator a fake world does the same.

                     all nodes have joined, or the last call is over
        +---------- FORMING -------------------------------------> RUNNING
        |              ^                                            |   |
        | too few      |  all members are accounted for, and        |   | every member's workers
        | in time      |  the run goes on                           |   | have succeeded
        v              +------------------ STOPPING <---------------+   v
      ENDED <-----------------------------------+    a failure, a lost  ENDED
                 the policy gives up                 or leaving member,
                                                     a newcomer to admit

A node is WAITING when it has joined and none of its workers are alive; RUNNING, FINISHED or LEAVING when it is a member
of the current round. One that is not heard of for `lease_s`, or whose connection closed and that does not return within
`drop_timeout_s`, is lost; by then its own side has killed its workers (`node_lease`), so its place can be given away.

First stop, then judge. The first report of a failure stops the round at once. It is judged when every member of the
round is accounted for: it has joined again, left, or is lost. If one was lost, the failures around it are its
consequence and cost nothing:

  1. node A is killed; B's collective fails at once, and B's report is here before A's connection is closed,
  2. the round stops; B and C stop their workers and join again,
  3. A is still unaccounted for, so nothing is decided until it is lost after `drop_timeout_s`,
  4. the next round is formed without A, uncharged, although `max_restarts` may be 0.

Stopping is bounded. A member that keeps its lease but does not come back from a stop within the longest grace of the
round and a margin is expelled; a lease later its workers must be gone, and it is lost.

A coordinator that was restarted knows what its predecessor wrote down (`Memory`). A node that comes back says which
place it has, or had: the newest round is adopted, and its other members have a lease to come back. If all return with
their workers running, no worker notices anything. `round.Past` says how long nothing is sealed.
"""

from __future__ import annotations

from collections import deque
from typing import assert_never

from holdfast.errors import InternalError
from holdfast.rendezvous.membership import model, protocol, restart_policy
from holdfast.rendezvous.membership.formation import Formation, arrange, too_few
from holdfast.rendezvous.membership.model import End, Memory, NodeFacts, Notice, Outcome, Phase, Place, Stage, World
from holdfast.rendezvous.membership.nodes import Node, NodeTable, Refusals, rejection_of
from holdfast.rendezvous.membership.protocol import Command, Event, Expel, From, Join, Remember, Return, Tell
from holdfast.rendezvous.membership.round import Past, Round
from holdfast.telemetry.history import History

_STORY_LENGTH = 40
_SILENT_HEARTBEATS = 2.5  # A node that sent none for so long is not sealed into a world.
_ALLOWED = frozenset((before, after) for before, _, after in model.PHASE_CHANGES)


class Membership:
    """One run. The cost of an event does not depend on the number of nodes, except where it decides for all of them."""

    def __init__(self, now: float, memory: Memory | None = None, *, term: int | None = None) -> None:
        """`memory` is what an earlier coordinator of this run wrote down. `term` is that of this coordinator, higher
        than any before it; without one, the next after the memory's."""
        past = memory or Memory()
        self.term = past.term + 1 if term is None else term
        self.settings = past.settings
        self.phase = Phase.FORMING if past.outcome is None else Phase.ENDED
        self.outcome, self.round = past.outcome, past.last_round
        used, ages_s = past.restarts_used, past.restart_ages_s
        self._budget = restart_policy.Budget(now, used, ages_s, past.best_step, past.fruitless)
        self._past = Past(memory, now)
        self._now = now
        self.history = History(now, is_whole=memory is None).enter(self.phase.lower(), now)
        self.nodes = self._nodes = NodeTable()
        self._round: Round | None = None  # That runs or is being stopped.
        self._formation = Formation(now)
        self.refusals = Refusals()
        self._has_lost_nodes = False
        self._may_more_come = True  # After the end. A coordinator that finds the end in the memory does not know.
        self._forget_at: float | None = None
        self._is_forgotten = False
        self._story: deque[protocol.Step] = deque(maxlen=_STORY_LENGTH)

    # What the shell calls.

    def step(self, event: Event, now: float) -> list[Command]:
        match event:
            case From(key, protocol.Heartbeat()) if not self._was_silent(key, now):
                self._nodes.hear(key, now)
                return []
        self._now = now
        commands = self._react(event, now) + self._advance(now)
        self._story.append(protocol.brief(event, commands, now))
        return commands

    def next_deadline(self) -> float | None:
        """When `TimePassed` is due unless something happens before."""
        if self.phase is Phase.ENDED:
            return None if self._is_forgotten else self._forget_at
        silent = self._nodes.most_silent()  # All leases are equally long, so the next one to end is its.
        lease_ends = self._lease_ends(silent) if silent else None
        candidates = [self._nodes.next_drop_at(), self._formation.report_at, lease_ends]
        if self._round is not None:
            candidates += [self._round.returns_until, self._round.stop_by]
        if self.phase is Phase.FORMING and self.settings is not None:
            candidates += self._formation.deadlines(self.settings, self._now)
        return min((each for each in candidates if each is not None), default=None)

    def raise_term(self, heard: int) -> bool:
        """A node knows of a coordinator of that term; rounds of this one must be later. True if its term changed."""
        if heard <= self.term:
            return False
        self.term = heard + 1
        return True

    def knows(self, node_id: str) -> bool:
        return self._nodes.has_seen(node_id) or node_id in self._past.awaited

    def story(self) -> str:
        return "\n".join(map(protocol.told, self._story))

    @property
    def world(self) -> World | None:
        return self._round.world if self._round is not None else None

    @property
    def restarts_used(self) -> int:
        return self._budget.used

    @property
    def is_blank(self) -> bool:
        """Whether nothing would be lost if the run were forgotten."""
        return self.round == 0 and self.outcome is None and not self._nodes

    # Events.

    def _react(self, event: Event, now: float) -> list[Command]:
        match event:
            case From(key, message):
                take = self._take_after_end if self.phase is Phase.ENDED else self._take
                return take(key, message, now)
            case protocol.ConnectionClosed(key):
                self._closed(key, now)
                return []
            case model.CloseRequested(reason):
                return [] if self.phase is Phase.ENDED else self._end(Outcome(End.CLOSED, reason))
            case protocol.TimePassed():
                return self._lose_overdue(now)
        assert_never(event)

    def _take(self, key: str, message: protocol.FromNode, now: float) -> list[Command]:
        match message:
            case Join(facts) | Return(facts) if self._nodes.is_outdated(facts):
                return [Expel(facts.key, "a newer incarnation of this node has joined")]
            case Join(facts) | Return(facts) if problem := self._past.doubts(message, self.round):
                return self._refuse(facts, problem, now)
            case Join():
                return self._joined(message, now)
            case Return():
                return self._returned(message, now)
            case protocol.Failed(round, failure):
                return self._failed(key, round, failure)
            case protocol.Succeeded(round):
                if self._is_current(key, round):
                    self._finish(self._nodes[key])
                return []
            case protocol.Leaving():
                return self._leaving(key)
            case protocol.Left():
                return self._left(key)
            case protocol.Close(reason):
                return self._end(Outcome(End.CLOSED, reason)) if key in self._nodes else []
            case protocol.Heartbeat():
                self._nodes.hear(key, now)
                return []
        assert_never(message)

    def _take_after_end(self, key: str, message: protocol.FromNode, now: float) -> list[Command]:
        assert self.outcome is not None
        match message:
            case Join(facts, settings) | Return(facts, settings):
                self.settings = self.settings or settings
                self._nodes.add(facts, Stage.WAITING, now)
                return [Tell((facts.key,), model.Ended(self.outcome))]
            case protocol.Left():
                self._nodes.remove(key)
        return []

    def _joined(self, join: Join, now: float) -> list[Command]:
        facts, last = join.facts, join.place
        if self._owes(facts.key) and (last is None or last.order < self._present.world.order):
            # It is a member of a round of which it has not heard, and says its join again on a new connection.
            self._nodes.reopen(self._nodes[facts.key], now)
            place = self._present.world.place_of(facts.key)
            return [Tell((facts.key,), model.Sealed(facts.key, place)), *self._stop_again(facts.key)]
        ours = self.settings or join.settings
        problem = rejection_of(facts, join.settings, ours, self._nodes, lambda node: self._is_silent(node, now))
        if problem:
            return self._refuse(facts, problem, now)
        self.settings = ours
        commands = self._learn_the_past(last, join.heard_round, now)
        earlier = self._nodes.earlier_self(facts)
        if earlier is not None:  # A new incarnation joins when nothing of the one before it is alive.
            commands += self._gone(earlier, "has lost its place")
        if last is not None and self._round is not None:
            self._round.take_up(facts, last, now)
        if join.failure is not None and last is not None:
            commands += self._failed(facts.key, last.round, join.failure)
        if self._owes(facts.key):
            self._budget.note(join.advance)
            self._present.note(join.advance)
            commands += self._stopped_before(join)
            self._present.owing.discard(facts.key)
        self._past.awaited.discard(facts.node_id)
        self._nodes.add(facts, Stage.WAITING, now)
        return commands + ([] if self.phase is not Phase.RUNNING or self._has_room() else self._stand_by((facts.key,)))

    def _stopped_before(self, join: Join) -> list[Command]:
        """A member has no workers any more, in a round that this coordinator may not know to be stopped: it lost its
        place, or the coordinator before this one told it to stop."""
        name = join.facts.node_id
        if join.has_lost_place:
            self._present.has_lost_node = True
            return self._stop(f"{name} has lost its place", departed=join.facts)
        if join.stop is not None and not join.stop.is_failure:
            self._present.departed.setdefault("", join.stop.reason)  # What failed since then is put down to that.
            self._present.has_lost_node |= join.stop.is_loss
        if self.phase is not Phase.RUNNING:
            return []
        if join.stop is None:
            return self._stop(f"{name} has left the round", departed=join.facts)
        return self._stop(join.stop.reason, is_failure=join.stop.is_failure, is_hang=join.stop.is_hang)

    def _refuse(self, facts: NodeFacts, problem: str, now: float) -> list[Command]:
        """The nodes that wait hear of it too: they may be waiting for this one."""
        refused = Tell((facts.key,), model.Refused(problem))
        if not self.refusals.add(now, facts.node_id, problem, bool(self._nodes.waiting - {facts.key})):
            return [refused]
        others = tuple(key for key in self._nodes.waiting_keys() if key != facts.key)
        return [refused, Tell(others, Notice(f"node {facts.node_id} was turned away: {problem}"))]

    def _learn_the_past(self, last: Place | None, heard_round: int, now: float) -> list[Command]:
        """What a node knows of earlier rounds. If that is more than the memory does, the memory was lost; what is
        learned is written down, so that the next coordinator knows it, too."""
        if last is not None:
            self._budget.used = max(self._budget.used, last.restarts_used)
        knows_more = self._past.learn(last, heard_round > self.round)
        self.round = max(self.round, heard_round, last.round if last is not None else 0)
        commands: list[Command] = []
        if last is not None and self._past.may_adopt(last, self.round, self._agreed.max_nodes):
            commands = self._adopt(last, now)
        return [*commands, Remember(self._memory(now))] if knows_more else commands

    def _adopt(self, place: Place, now: float) -> list[Command]:
        """Go on with a round that another coordinator sealed. Its members are unknown until they come back, which they
        have a lease for. Nodes that wait are told that they stand by."""
        self._begin(Round(World(place), now + self._agreed.lease_s), is_ours=False)
        return [] if self._has_room() else self._stand_by(self._nodes.waiting_keys())

    def _returned(self, back: Return, now: float) -> list[Command]:
        self.settings = self.settings or back.settings
        facts, place = back.facts, back.place
        commands = self._learn_the_past(place, place.round, now)
        if self._round is not None and self._round.take_up(facts, place, now):
            self._nodes.add(facts, Stage.RUNNING, now)
        node = self._nodes.get(facts.key)
        is_member = self.world is not None and self.world.order == place.order
        if self._past.was_finished_by(facts.key, place) and back.stage is Stage.FINISHED:
            return [*commands, Tell((facts.key,), model.Stop(place.round, "the round was stopped meanwhile"))]
        if node is None or not is_member or node.stage is Stage.WAITING:
            return [*commands, Expel(facts.key, f"its place in round {place.round} was given away")]
        self._nodes.reopen(node, now)
        if back.stage is Stage.FINISHED:
            self._finish(node)
        return commands + self._stop_again(facts.key)

    def _stop_again(self, key: str) -> list[Command]:
        """It may have missed that the round is being stopped."""
        return [Tell((key,), self._present.stopped_meanwhile())] if self.phase is Phase.STOPPING else []

    def _was_silent(self, key: str, now: float) -> bool:
        node = self._nodes.get(key)
        return node is not None and node.stage is Stage.WAITING and self._is_silent(node, now)

    def _is_silent(self, node: Node, now: float) -> bool:
        return self.settings is not None and now - node.heard_at > _SILENT_HEARTBEATS * self.settings.heartbeat_s

    def _closed(self, key: str, now: float) -> None:
        node = self._nodes.get(key)
        if node is not None and node.is_open and self.phase is not Phase.ENDED:
            self._nodes.drop(node, now + self._agreed.drop_timeout_s)

    def _failed(self, key: str, round: int, failure: restart_policy.Failure) -> list[Command]:
        """Workers that fail after the round was stopped for another reason fail because of the stop."""
        is_of_stop = self.phase is Phase.STOPPING and not self._present.is_stopped_for_failure
        if is_of_stop or not self._is_current(key, round):
            return []
        self._present.report(key, failure)
        return self._stop(failure.text, is_failure=True, is_hang=failure.exception == restart_policy.HANG)

    def _finish(self, node: Node) -> None:
        if node.stage is Stage.RUNNING:
            node.stage = Stage.FINISHED
            self._present.owing.discard(node.key)
            self._present.unfinished.discard(node.key)

    def _leaving(self, key: str) -> list[Command]:
        node = self._nodes.get(key)
        if node is None or node.stage is not Stage.RUNNING:
            return []
        node.stage = Stage.LEAVING
        return self._stop(f"{node.facts.node_id} leaves", departed=node.facts)

    def _left(self, key: str) -> list[Command]:
        node = self._nodes.get(key)
        if node is not None:
            self._past.awaited.discard(node.facts.node_id)
            if self.round == 0 and not self._has_lost_nodes and len(self._nodes) == 1:
                self.settings = None  # Nothing is left of the run. A node that was lost may come back.
        return self._gone(key, "left")

    def _is_current(self, key: str, round: int) -> bool:
        """Whether a member speaks of the present round. The one place where stale reports are dropped."""
        return self._owes(key) and round == self._present.world.round

    def _owes(self, key: str) -> bool:
        """Whether the node is a member of the present round whose workers may be alive."""
        return self._round is not None and key in self._round.owing

    @property
    def _agreed(self) -> model.Settings:
        assert self.settings is not None
        return self.settings

    @property
    def _present(self) -> Round:
        assert self._round is not None
        return self._round

    # Losing nodes.

    def _lose_overdue(self, now: float) -> list[Command]:
        if self.phase is Phase.ENDED or self.settings is None:
            return []
        commands: list[Command] = []
        for key in self._nodes.dropped_by(now):
            self._has_lost_nodes, drop_s = True, self.settings.drop_timeout_s
            commands += self._gone(key, f"is lost: its connection closed and it was not back within {drop_s:g} s")
        while (node := self._nodes.most_silent()) is not None and self._lease_ends(node) <= now:
            self._has_lost_nodes, how = True, f"is lost: it was silent for {self.settings.lease_s:g} s"
            commands += [*self._gone(node.key, how), Expel(node.key, how.removeprefix("is lost: "))]
        round = self._round
        if round is not None and round.returns_until is not None and now >= round.returns_until:
            self._has_lost_nodes = True
            commands += self._stop(round.give_up_unknown())
        if round is not None and round.stop_by is not None and now >= round.stop_by:
            commands += self._expel_stuck(now)
        return commands

    def _expel_stuck(self, now: float) -> list[Command]:
        """Members that have not come back from the stop. They are lost when their leases have surely ended. One that
        returns because it has not heard of this is expelled again."""
        present = self._present
        present.stop_by = now + self._agreed.lease_s
        stuck = [node for key in sorted(present.owing) if (node := self._nodes[key]).is_open]
        for node in stuck:
            self._nodes.drop(node, now + self._agreed.lease_s)
        if not stuck:
            return []
        to_others, to_each = present.give_up_stuck([node.facts for node in stuck], now)
        told = Tell(self._nodes.open_keys(), Notice(to_others))
        return [told, *(Expel(node.key, to_each) for node in stuck)]

    def _lease_ends(self, node: Node) -> float:
        return node.heard_at + self._agreed.lease_s

    def _gone(self, key: str, how: str) -> list[Command]:
        """A node is out, and none of its workers can be alive."""
        node = self._nodes.get(key)
        if node is None:
            return []
        self._nodes.remove(key)
        if not self._owes(key):
            return []
        self._present.owing.discard(key)
        self._present.has_lost_node |= how != "left"
        return self._stop(f"{node.facts.node_id} {how}", departed=node.facts)

    # Rounds.

    def _begin(self, round: Round, *, is_ours: bool) -> None:
        self._enter(Phase.RUNNING)
        self._round, self.round = round, round.world.round
        self._past.begin(round.world, is_ours=is_ours)
        self._formation.reset()
        size = (round.world.size, round.world.template.worker_count())
        self.history = self.history.begin_round(self.round, *size, self._now, is_new=is_ours).run(self._now)

    def _enter(self, phase: Phase) -> None:
        if (self.phase, phase) not in _ALLOWED:
            raise InternalError(f"a run cannot go from {self.phase} to {phase}; before:\n{self.story()}")
        self.phase = phase
        self.history = self.history.enter(phase.lower(), self._now)

    def _stop(
        self, reason: str, departed: NodeFacts | None = None, *, is_failure: bool = False, is_hang: bool = False
    ) -> list[Command]:
        """Stop the round for all members. Whether the run goes on is decided when all are accounted for."""
        round = self._present
        if departed is not None:
            round.departed.setdefault(departed.key, reason)
        if self.phase is not Phase.RUNNING:
            return []
        self._enter(Phase.STOPPING)
        members = [self._nodes[key] for key in round.world.keys if key in self._nodes]
        grace_s = max((node.facts.grace_s for node in members), default=0.0)
        round.stop(reason, is_failure, is_hang, grace_s, self._now)
        self.history = self.history.stop(*round.end(), self._now)
        keys = tuple(node.key for node in members if departed is None or node.key != departed.key)
        return [Tell(keys, model.Stop(round.world.round, reason, is_failure, is_hang, round.has_lost_node))]

    def _maybe_admit(self, now: float) -> list[Command]:
        """Let waiting nodes in below max: newcomers, and those that were silent when the round was sealed."""
        newcomers = self._ready(now) if self._has_room() else []
        return self._stop(f"{newcomers[0].node_id} joins") if newcomers else []

    def _has_room(self) -> bool:
        return self._agreed.admit is model.Admit.NOW and self._present.world.size < self._agreed.max_nodes

    def _stand_by(self, keys: tuple[str, ...]) -> list[Command]:
        """Also so that nodes without a place know of the round, should the coordinator lose its memory."""
        return [Tell(keys, self._present.stand_by())] if keys else []

    def _advance(self, now: float) -> list[Command]:
        """What is due now that the event has been taken in."""
        commands: list[Command] = []
        if self.phase is Phase.RUNNING and self._present.has_succeeded:
            commands += self._end(Outcome(End.SUCCEEDED, "all workers have succeeded"))
        if self.phase is Phase.RUNNING and self._nodes.waiting:
            commands += self._maybe_admit(now)
        if self.phase is Phase.STOPPING and self._present.is_accounted_for:
            commands += self._judge(now)
        if self.phase is Phase.FORMING:
            commands += self._form(now)
        if self.phase is Phase.ENDED:
            commands += self._maybe_forget(now)
        return commands

    def _judge(self, now: float) -> list[Command]:
        """All members of the stopped round are accounted for: what was it, and does the run go on?"""
        round = self._present
        self.history = self.history.amend(*round.end(), round.idle_s)
        self._past.end(tuple(key for key in round.world.keys if key in self._nodes), round.world.ranks)
        commands: list[Command] = []
        if round.failures and round.departed:
            excuse = restart_policy.excuse([*round.departed.values()], self.round)
            commands.append(Tell(self._nodes.open_keys(), Notice(excuse)))
        if round.departed:
            gone = restart_policy.named([*round.departed.values()])
            self._past.note_end(self.round, gone, self.restarts_used, has_departed=True)
        if round.failures and not round.departed:
            cause = restart_policy.root_cause(list(round.failures.values()))
            decision = restart_policy.decide(self._agreed.policy, self._budget, cause, now)
            if isinstance(decision, restart_policy.GiveUp):
                said = (round.failures_besides(cause), self._past.earlier, decision.is_final)
                return self._end(Outcome(End.FAILED, decision.reason, cause, *said))
            self._formation.not_before = now + decision.delay_s
            self._budget.end_round()
            if decision.is_charged:
                self._budget.charge(now)
            self._past.note_end(self.round, cause.text, self.restarts_used)
            if decision.is_charged:
                commands.append(Remember(self._memory(now)))
            if text := restart_policy.announcement(decision):
                commands.append(Tell(self._nodes.open_keys(), Notice(text)))
        self._round = None
        self._enter(Phase.FORMING)
        return commands

    def _form(self, now: float) -> list[Command]:
        if not self._nodes or self.settings is None:
            self._formation.reset()
            return []
        self._formation.held_until = self._past.others_may_run_until(self.settings, now)
        waiting = len(self._nodes.waiting)
        self._formation.count(waiting, self.settings, now)
        if self._formation.has_timed_out(self.settings, now):
            missing = too_few(self._nodes.names_waiting(), self.settings.min_nodes, self.settings.join_timeout_s)
            return self._end(Outcome(End.FAILED, missing, earlier=self._past.earlier))
        if self._is_time_to_seal(waiting, now) and self._is_time_to_seal(len(ready := self._ready(now)), now):
            return self._seal(ready, now)
        progress = self._formation.progress(waiting, self.settings, now)
        return [] if progress is None else [Tell(self._nodes.waiting_keys(), progress)]

    def _is_time_to_seal(self, ready_count: int, now: float) -> bool:
        is_everyone = self.round > 0 and ready_count == len(self._nodes)
        return self._formation.may_seal(ready_count, is_everyone, self._agreed, now)

    def _ready(self, now: float) -> list[NodeFacts]:
        """The nodes that can be sealed into a world, in order of arrival."""
        return [node.facts for node in self._nodes.waiting_in_order() if not self._is_silent(node, now)]

    def _seal(self, ready: list[NodeFacts], now: float) -> list[Command]:
        members = arrange(self._past.ranks, ready, self._agreed.max_nodes)
        world = World.of(self.term, self.round + 1, members, self.restarts_used)
        self._begin(Round(world), is_ours=True)
        for key in world.keys:
            self._nodes[key].stage = Stage.RUNNING
            self._nodes.waiting.discard(key)
        told = [Tell((key,), model.Sealed(key, world.place_of(key))) for key in world.keys]
        return [Remember(self._memory(now)), *told, *self._stand_by(self._nodes.waiting_keys())]

    # The end.

    def _end(self, outcome: Outcome) -> list[Command]:
        self.history = self.history.finish(outcome.end.lower(), outcome.reason, self._now)
        self._enter(Phase.ENDED)
        self.outcome, keys = outcome, self._nodes.open_keys()
        size = self.world.size if self.world is not None else len(self._past.ranks)
        had_room = self.settings is not None and 0 < size < self.settings.max_nodes
        self._may_more_come = outcome.end is End.CLOSED or self._has_lost_nodes or had_room
        return [Remember(self._memory(self._now)), *([Tell(keys, model.Ended(outcome))] if keys else [])]

    def _maybe_forget(self, now: float) -> list[Command]:
        """Free the name of a run that is over: at once if all nodes have confirmed the end. But a node that was lost
        may come back, one that was meant for the run may come late, and a closed run stays closed for a while."""
        if self._forget_at is None:
            self._forget_at = now + (self.settings.close_linger_s if self.settings else 0.0)
        is_time = now >= self._forget_at or not (self._nodes or self._may_more_come)
        if self._is_forgotten or not is_time:
            return []
        self._is_forgotten = True
        return [protocol.ForgetRun()]

    def _memory(self, now: float) -> Memory:
        agreed = (self.settings, self.outcome)
        return self._past.memory(self.term, self.round, self.world, self._budget, *agreed, now)

    def check(self) -> None:
        """The invariants; tests and the simulator call this after every step."""
        round = self._round
        assert (self.phase in (Phase.RUNNING, Phase.STOPPING)) <= (round is not None)
        assert (self.phase is Phase.ENDED) == (self.outcome is not None)
        assert round is None or round.returns_until is None or round.world.missing > 0
        self._nodes.check()
        self.history.check(self._now)
        if self.phase is not Phase.ENDED:
            assert round is None or all(key in round.world.ranks and key in self._nodes for key in round.owing)
        if self.settings and self.world:
            assert self.settings.min_nodes <= self.world.size <= self.settings.max_nodes
            policy = self.settings.policy
            assert policy.window_s is not None or self.restarts_used <= policy.max_restarts
