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

If A is lost before B's report comes, the round is stopped already. Then B is told why its failure does not count.

Stopping is bounded. A member that keeps its lease but does not come back from a stop within the longest time that a
member needs for one (`NodeFacts.stops_within_s`) is expelled; a lease later its workers must be gone, and it is lost.

A coordinator that was restarted knows what its predecessor wrote down (`Memory`). A node that comes back says which
place it has, or had: the newest round is adopted, and its other members have a lease to come back. If all return with
their workers running, no worker notices anything. `round.Past` says how long nothing is sealed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import assert_never

from holdfast.errors import InternalError
from holdfast.failures.records import HANG, Failure
from holdfast.rendezvous.membership import invariants, model, protocol, restart_policy, snapshots
from holdfast.rendezvous.membership.agreed_steps import AgreedSteps
from holdfast.rendezvous.membership.finished import SUCCESS, FinishedRun, Linger, finished_in
from holdfast.rendezvous.membership.formation import Formation, arrange, named, too_few
from holdfast.rendezvous.membership.losses import Losses
from holdfast.rendezvous.membership.model import (
    AgentStore,
    End,
    Memory,
    NodeFacts,
    Notice,
    Outcome,
    Phase,
    Place,
    Stage,
    World,
)
from holdfast.rendezvous.membership.nodes import Node, NodeTable, Refusals, rejection_of
from holdfast.rendezvous.membership.notices import SAVED, Notices
from holdfast.rendezvous.membership.protocol import Command, Event, Expel, From, Join, Remember, Return, Tell
from holdfast.rendezvous.membership.round import Past, Round
from holdfast.telemetry.history import History

_STORY_LENGTH = 40
_ALLOWED = frozenset((before, after) for before, _, after in model.PHASE_CHANGES)


class Membership:
    """One run. The cost of an event does not depend on the number of nodes, except where it decides for all of them."""

    def __init__(
        self, now: float, memory: Memory | None = None, *, term: int | None = None, age_s: float = 0.0
    ) -> None:
        """`memory` is what an earlier coordinator of this run wrote down, `age_s` ago. `term` is that of this
        coordinator, higher than any before it; without one, the next after the memory's. If the memory tells of a run
        that ended longer ago than it lingers, a new run may begin under the same id."""
        finished = finished_in(memory, age_s)
        memory = None if finished else memory
        past = memory or Memory(finished.term if finished else 0)
        self.finished = FinishedRun(finished)  # A run under the same id that is over; its nodes hear how it ended.
        self.term = past.term + 1 if term is None else term  # It rises if a node knows a higher one.
        self.round = max(past.last_round, self.finished.last_round)  # The last that any coordinator has sealed.
        self.settings = past.settings  # Those of the first node. None before, and when all nodes left before a round.
        self.phase = Phase.FORMING if past.outcome is None else Phase.ENDED
        self.outcome = past.outcome  # If and only if the phase is ENDED.
        self.nodes = NodeTable()  # Those that have joined, with the time until which each is held.
        self._round: Round | None = None  # While RUNNING or STOPPING, and when the run ended in it.
        self._formation = Formation(now + past.backoff_left_s)  # While FORMING: when a world may be sealed.
        self._past = Past(memory, now)  # Rounds that this coordinator did not seal, and the ranks of the last one.
        self._budget = restart_policy.Budget.of(now, past)  # Charged restarts, and progress.
        # `restarts_used` at the last seal. If the last round was judged, one restart may have been charged since.
        self.restarts_at_seal = max(0, past.restarts_used - past.is_round_over)
        self._losses = Losses(now, past)  # Restarts after lost nodes, and losses of each host.
        self._has_lost_nodes = False  # Since this coordinator began: they may come back, even when the run has ended.
        self._steps = AgreedSteps(now)  # While RUNNING: what the members are asked to keep.
        self.notices = Notices()  # Nodes that go away at a known time.
        self._linger = Linger()  # While ENDED: who has yet to hear of it.
        self.refusals = Refusals(now)  # Of nodes that cannot take part.
        self.history = History(now, is_whole=memory is None).enter(self.phase.lower(), now)
        self._story: deque[protocol.Step] = deque(maxlen=_STORY_LENGTH)  # The last steps, for status and errors.
        self._now = now  # Of the present step.

    # What the shell calls.

    def step(self, event: Event, now: float) -> list[Command]:
        match event:
            case From(key, protocol.Heartbeat()):
                node = self.nodes.get(key)
                if node is None or node.stage is not Stage.WAITING or not node.is_silent(self._agreed, now):
                    self.nodes.hear(key, now)
                    return []
        self._now = now
        commands = self._react(event, now) + self._advance(now)
        self._story.append(protocol.brief(event, commands, now))
        return commands

    def next_deadline(self) -> float | None:
        """When `TimePassed` is due unless something happens before."""
        if self.phase is Phase.ENDED:
            return self._linger.ends_at
        silent = self.nodes.most_silent()  # All leases are equally long, so the next one to end is its.
        candidates = [self.nodes.next_drop_at(), self.nodes.next_release_at(), self._formation.report_at]
        candidates += [self._lease_ends(silent) if silent else None, self.notices.tell_at]
        if self._round is not None:
            candidates += [self._round.returns_until, self._round.stop_by, self._round.admit_at]
        if self.phase is Phase.FORMING and self.settings is not None:
            candidates += self._formation.deadlines(self.settings, self._now)
        return min((each for each in candidates if each is not None), default=None)

    def story(self) -> str:
        return "\n".join(map(protocol.told, self._story))

    @property
    def world(self) -> World | None:
        return self._round.world if self._round is not None else None

    @property
    def told_round(self) -> int:
        """The last round of this run, not of runs before it under the same id; 0 if there was none."""
        return self.round if self.round > self.finished.last_round else 0

    def record(self) -> Memory | None:
        """What is kept of a run that is over."""
        known = Memory(self.term, last_round=self.round, settings=self.settings, outcome=self.outcome)
        return self._linger.record(known) if self.outcome is not None else self.finished.record

    @property
    def restarts_used(self) -> int:
        return self._budget.used

    @property
    def is_blank(self) -> bool:
        """Whether nothing would be lost if the run were forgotten."""
        return self.told_round == 0 and self.outcome is None and not self.nodes

    # Events.

    def _react(self, event: Event, now: float) -> list[Command]:
        match event:
            case From(key, message):
                take = self._take_after_end if self.phase is Phase.ENDED else self._take
                return take(key, message, now)
            case protocol.ConnectionClosed(key, by_peer):
                self._closed(key, by_peer, now)
                return []
            case model.CloseRequested(reason):
                return [] if self.phase is Phase.ENDED else self._end(Outcome(End.CLOSED, reason))
            case protocol.NoticeRequested(request, node_ids):
                return [] if self.phase is Phase.ENDED else self.notices.take(request, node_ids, now)
            case protocol.TimePassed():
                return self._lose_overdue(now)
        assert_never(event)

    def _take(self, key: str, message: protocol.FromNode, now: float) -> list[Command]:
        match message:
            case Join(facts) | Return(facts) if problem := self._past.doubts(message, self.round):
                return self.refusals.add(facts, problem, self.nodes, now)
            case Join(facts) | Return(facts) if self.finished.has(message):
                return self.finished.tell(facts.key)
            case Join():
                return self._joined(message, now)
            case Return():
                return self._returned(message, now)
            case protocol.Failed(round, failure):
                return self._failed(key, round, failure)
            case protocol.Succeeded(round, has_agreed):
                if self._is_current(key, round):
                    self._finish(self.nodes[key], has_agreed)
                return []
            case protocol.GiveNotice(request):
                return self._react(protocol.NoticeRequested(request, self.nodes.ids_of(key)), now)
            case protocol.SnapshotReport(round, steps):
                return self._saved(key, round, steps, now)
            case protocol.Leaving():
                return self._leaving(key)
            case protocol.Left():
                return self._left(key)
            case protocol.Close(reason):
                return self._end(Outcome(End.CLOSED, reason)) if key in self.nodes else []
            case protocol.Heartbeat():
                self.nodes.hear(key, now)
                return []
        assert_never(message)

    def _take_after_end(self, key: str, message: protocol.FromNode, now: float) -> list[Command]:
        assert self.outcome is not None
        match message:
            case Join(facts, settings) | Return(facts, settings):
                self.settings = self.settings or settings
                self.nodes.add(facts, Stage.WAITING, now)
                return [Tell((facts.key,), model.Ended(self.outcome))]
            case protocol.Left():
                self.nodes.remove(key)
        return []

    def _joined(self, join: Join, now: float) -> list[Command]:
        facts, last = join.facts, join.place
        if self._owes(facts.key) and (last is None or last.order < self._present.world.order):
            # It is a member of a round of which it has not heard, and says its join again on a new connection.
            self.nodes.reopen(self.nodes[facts.key], now)
            place = self._present.world.place_of(facts.key)
            return [Tell((facts.key,), model.Sealed(facts.key, place)), *self._stop_again(facts.key)]
        ours = self.settings or join.settings
        if problem := rejection_of(facts, join.settings, ours, self.nodes, now):
            return self.refusals.add(facts, problem, self.nodes, now)
        self.settings = ours
        commands = [] if self.told_round else self.finished.announce_next(facts.key)
        commands += self._learn_the_past(last, join.heard_round, now, join.heard_restarts)
        earlier = self.nodes.earlier_self(facts)
        if earlier is not None:  # A new incarnation joins when nothing of the one before it is alive.
            commands += self._gone(earlier, "has lost its place")
        if last is not None and self._round is not None:
            self._round.take_up(facts, last, now)
        if join.failure is not None and last is not None:
            commands += self._failed(facts.key, last.round, join.failure)
        if self._round is not None and self._round.is_left_by(join):
            self._budget.note(join.advance)
            self._present.note(join)
            commands += self._stopped_before(join)
            self._present.owing.discard(facts.key)
        self._past.awaited.discard(facts.node_id)
        held_until = self._losses.held_until(join, self._past.order, now)
        node = self.nodes.add(facts, Stage.WAITING, now, held_until, join.unready)
        node.snapshots = join.held
        commands += self.notices.known_by((facts.key,), self.nodes, now)
        if facts.key in self.nodes.held or join.unready or (self.phase is Phase.RUNNING and join.unready is not None):
            return commands + self._hold([facts.key])
        return commands + (self._stand_by((facts.key,)) if self.phase is Phase.RUNNING else [])

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

    def _learn_the_past(self, last: Place | None, heard_round: int, now: float, restarts: int = 0) -> list[Command]:
        """What a node knows of earlier rounds. If that is more than the memory does, the memory was lost; what is
        learned is written down, so that the next coordinator knows it, too."""
        self._budget.used = max(self._budget.used, last.restarts_used if last is not None else 0, restarts)
        knows_more = self._past.learn(last, heard_round > self.round)
        self.round = max(self.round, heard_round, last.round if last is not None else 0)
        commands: list[Command] = []
        if last is not None and self._past.may_adopt(last, self.round, self._agreed.max_nodes):
            commands = self._adopt(last, now)
        return [*commands, Remember(self._memory(now))] if knows_more else commands

    def _adopt(self, place: Place, now: float) -> list[Command]:
        """Go on with a round that another coordinator sealed. Its members have a lease to come back."""
        self._begin(Round(World(place), now + self._agreed.lease_s), is_ours=False)
        return self._stand_by(self.nodes.waiting_keys())

    def _returned(self, back: Return, now: float) -> list[Command]:
        self.settings = self.settings or back.settings
        facts, place = back.facts, back.place
        commands = self._learn_the_past(place, place.round, now)
        if self._round is not None and self._round.take_up(facts, place, now):
            self.nodes.add(facts, Stage.RUNNING, now)
        node = self.nodes.get(facts.key)
        is_member = self.world is not None and self.world.order == place.order
        if self._past.was_finished_by(facts.key, place) and back.stage is Stage.FINISHED:
            return [*commands, Tell((facts.key,), model.Stop(place.round, "the round was stopped meanwhile"))]
        if node is None or not is_member or node.stage is Stage.WAITING:
            return [*commands, Expel(facts.key, f"its place in round {place.round} was given away")]
        self.nodes.reopen(node, now)
        if back.stage is Stage.FINISHED:
            self._finish(node, back.has_agreed)
        orders = self._steps.repeated() if self.phase is Phase.RUNNING else ()
        commands += self.notices.known_by((facts.key,), self.nodes, now)
        return [*commands, *self._stop_again(facts.key), *(Tell((facts.key,), each) for each in orders)]

    def _stop_again(self, key: str) -> list[Command]:
        """It may have missed that the round is being stopped."""
        return [Tell((key,), self._present.stopped_meanwhile())] if self.phase is Phase.STOPPING else []

    def _closed(self, key: str, by_peer: bool, now: float) -> None:
        """A node that may not know of the close may go on for the whole lease."""
        node = self.nodes.get(key)
        if node is not None and node.is_open and self.phase is not Phase.ENDED:
            self.nodes.drop(node, now + (self._agreed.drop_timeout_s if by_peer else self._agreed.lease_s), by_peer)

    def _failed(self, key: str, round: int, failure: Failure) -> list[Command]:
        """Workers that fail after the round was stopped for another reason fail because of the stop."""
        is_current = self._is_current(key, round)
        if not is_current or (self.phase is Phase.STOPPING and not self._present.stopped.is_failure):
            return self._present.excuse(key) if is_current else []
        self._present.report(key, failure)
        return self._stop(failure.text, is_failure=True, is_hang=failure.exception == HANG)

    def _finish(self, node: Node, has_agreed: bool) -> None:
        if node.stage is Stage.RUNNING:
            node.stage = Stage.FINISHED
            self._present.has_agreed |= has_agreed
            self._present.owing.discard(node.key)
            self._present.unfinished.discard(node.key)

    def _saved(self, key: str, round: int, steps: model.SavedSteps, now: float) -> list[Command]:
        if self.phase is not Phase.RUNNING or not self._is_current(key, round):
            return []
        return [Tell(self._present.world.keys, order) for order in self._steps.take(key, steps, now)]

    def _leaving(self, key: str) -> list[Command]:
        if (node := self.nodes.get(key)) is None or node.stage is not Stage.RUNNING:
            return []
        node.stage = Stage.LEAVING
        return self._stop(f"{node.facts.node_id} leaves", departed=node.facts)

    def _left(self, key: str) -> list[Command]:
        if (node := self.nodes.get(key)) is not None:
            self._past.awaited.discard(node.facts.node_id)
            if self.told_round == 0 and not self._has_lost_nodes and len(self.nodes) == 1:
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
        for key in self.nodes.dropped_by(now):
            self._has_lost_nodes = True
            within_s = self.settings.drop_timeout_s if self.nodes[key].has_hung_up else self.settings.lease_s
            commands += self._gone(key, f"is lost: its connection closed and it was not back within {within_s:g} s")
        while (node := self.nodes.most_silent()) is not None and self._lease_ends(node) <= now:
            self._has_lost_nodes, how = True, f"is lost: it was silent for {self.settings.lease_s:g} s"
            commands += [*self._gone(node.key, how), Expel(node.key, how.removeprefix("is lost: "))]
        round = self._round
        if round is not None and round.returns_until is not None and now >= round.returns_until:
            self._has_lost_nodes = True
            commands += self._stop(round.give_up_unknown())
        if round is not None and round.stop_by is not None and now >= round.stop_by:
            commands += round.expel_stuck(self.nodes, self.settings.lease_s, now)
        return commands

    def _lease_ends(self, node: Node) -> float:
        return node.heard_at + self._agreed.lease_s

    def _gone(self, key: str, how: str) -> list[Command]:
        """A node is out, and none of its workers can be alive. One that had announced its leave is not lost."""
        node = self.nodes.get(key)
        if node is None:
            return []
        self.nodes.remove(key)
        was_announced = self.notices.take_away(node, self)
        is_lost = how != "left" and node.stage is not Stage.LEAVING and not was_announced
        if is_lost:
            self._losses.lose(node.facts.host, self.round, self._now)
        if not self._owes(key):
            return []
        self._present.owing.discard(key)
        self._present.has_lost_node |= is_lost
        return self._stop(f"{node.facts.node_id} {how}", departed=node.facts)

    # Rounds.

    def _begin(self, round: Round, *, is_ours: bool) -> None:
        self._enter(Phase.RUNNING)
        self._round, self.round = round, round.world.round
        self.restarts_at_seal = round.world.template.restarts_used
        self._past.begin(round.world, is_ours=is_ours)
        self._formation = Formation(self._now)
        self._steps.begin(round.world.template, *self._agreed.agreed_steps)
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
        members = [self.nodes[key] for key in round.world.keys if key in self.nodes]
        within_s = max((node.facts.stops_within_s for node in members), default=0.0)
        round.stop(reason, is_failure, is_hang, within_s, self._now)
        self.history = self.history.stop(*round.end(), self._now)
        keys = tuple(node.key for node in members if departed is None or node.key != departed.key)
        return [Tell(keys, round.stopped)]

    def _maybe_admit(self, now: float) -> list[Command]:
        """Let waiting nodes in below max: newcomers, and those that were silent when the round was sealed."""
        if not self._present.is_time_to_admit(self.notices.waiting_count(self.nodes), self._agreed, now):
            return []
        newcomers = [facts.node_id for facts in self._ready(now)]
        if not self._present.is_time_to_admit(len(newcomers), self._agreed, now):
            return []
        return self._stop(f"{named(newcomers)} {'joins' if len(newcomers) == 1 else 'join'}")

    def _stand_by(self, keys: tuple[str, ...], *, are_new: bool = True) -> list[Command]:
        """Also so that nodes without a place know of the round, should the coordinator lose its memory. Newcomers for
        which the round is stopped at once hear of the next one."""
        left_s = self._present.admitted_in_s(self.notices.waiting_count(self.nodes), self._agreed, self._now)
        is_told = keys and not (are_new and left_s == 0.0)
        return [Tell(keys, self._present.stand_by(left_s))] if is_told else []

    def _hold(self, keys: Iterable[str]) -> list[Command]:
        """Tell nodes that are held why. What it follows from is written down before."""
        why = self._losses.words(self.nodes, self._now, "this node")
        told = [Tell((key,), model.StandBy(self.round, why[key])) for key in keys]
        return [*([] if self._losses.is_written else [Remember(self._memory(self._now))]), *told]

    def _advance(self, now: float) -> list[Command]:
        """What is due now that the event has been taken in."""
        freed = self.nodes.release(now)
        commands = self.notices.tell(self.nodes, now) + (self._stand_by(freed) if self.phase is Phase.RUNNING else [])
        if self.phase is Phase.RUNNING and self._present.has_succeeded:
            commands += self._stop(SAVED) if self._present.has_agreed else self._end(SUCCESS)
        if self.phase is Phase.RUNNING:
            commands += self._maybe_admit(now)
        if self.phase is Phase.STOPPING and self._present.is_accounted_for:
            commands += self._judge(now)
        if self.phase is Phase.FORMING:
            commands += self._form(now)
        if self.phase is Phase.ENDED:
            linger_s = self.settings.close_linger_s if self.settings else 0.0
            commands += self._linger.step(bool(self.nodes), linger_s, now)
        return commands

    def _judge(self, now: float) -> list[Command]:
        """All members of the stopped round are accounted for: what was it, and does the run go on?"""
        round = self._present
        self.history = self.history.amend(*round.end(), round.idle_s)
        survivors = tuple(key for key in round.world.keys if key in self.nodes)
        self._past.end(survivors, round.world.ranks)
        if not survivors:
            self._losses.forgive(self.round, self.nodes, now)
        if round.departed:
            self._past.note_end(self.round, round.gone, self.restarts_used, has_departed=True)
        cause, decision = round.judge(self._agreed, self._budget, self._losses, now)
        if isinstance(decision, restart_policy.GiveUp):
            said = (round.failures_besides(cause), self._past.earlier, decision.is_final)
            return self._end(Outcome(End.FAILED, decision.reason, round.with_peers(cause), *said))
        if decision is not None:
            self._formation.not_before = now + decision.delay_s
            self._budget.go_on(decision, now)
        if cause is not None:
            self._past.note_end(self.round, cause.text, self.restarts_used)
        must_write = decision is not None and (decision.is_charged or decision.delay_s > 0 or decision.drops_store)
        told = [Tell(self.nodes.open_keys(), Notice(text))] if (text := round.verdict(decision)) else []
        self._round = None
        self._enter(Phase.FORMING)
        return [*([Remember(self._memory(now))] if must_write else []), *told]

    def _form(self, now: float) -> list[Command]:
        if (outcome := self.notices.outcome(self, now)) is not None:
            return self._end(outcome)
        if not self.nodes or self.settings is None:
            self._formation.reset()
            return []
        self._formation.held_until = self._past.others_may_run_until(self.settings, now)
        waiting = self.notices.waiting_count(self.nodes)
        self._formation.count(waiting, self.settings, now)
        if self._formation.has_timed_out(self.settings, now) and self.nodes.hopeful < self.settings.min_nodes:
            missing = too_few(self.nodes.names_waiting(), self._losses.words(self.nodes, now).values(), self.settings)
            return self._end(Outcome(End.FAILED, missing, earlier=self._past.earlier))
        if self._is_time_to_seal(waiting, now) and self._is_time_to_seal(len(ready := self._ready(now)), now):
            return self._seal(ready, now)
        progress = self._formation.progress(waiting, self.settings, now)
        return [Tell(self.nodes.waiting_keys(), progress)] if progress is not None and waiting else []

    def _is_time_to_seal(self, ready_count: int, now: float) -> bool:
        is_everyone = self.told_round > 0 and ready_count == (
            self.notices.staying_count(self.nodes) - self.nodes.out_beyond(now + self._agreed.last_call_s)
        )
        return self._formation.may_seal(ready_count, is_everyone, self._agreed, now)

    def _ready(self, now: float) -> list[NodeFacts]:
        """The nodes that can be sealed into a world, in order of arrival."""
        return [node.facts for node in self.notices.waiting(self.nodes) if not node.is_silent(self._agreed, now)]

    def _seal(self, ready: list[NodeFacts], now: float) -> list[Command]:
        members = arrange(self._past.ranks, ready, self._agreed.max_nodes)
        is_wanted = self._agreed.agent_store is not AgentStore.OFF and not self._budget.is_without_store
        has_store = is_wanted and members[0].serves_store
        plan = snapshots.plan([self.nodes[each.key] for each in members], self._agreed)
        world = World.of(self.term, self.round + 1, members, self.restarts_used, has_store=has_store, plan=plan)
        self._begin(Round(world), is_ours=True)
        for key in world.keys:
            self.nodes[key].stage = Stage.RUNNING
            self.nodes.waiting.discard(key)
        told = self.notices.seal(world.keys, self.nodes, now)
        told += [Tell((key,), model.Sealed(key, world.place_of(key))) for key in world.keys]
        told += self._stand_by(self.nodes.waiting_keys(), are_new=False)
        return [Remember(self._memory(now)), *told, *self._hold(sorted({*self.nodes.held, *self.nodes.unready}))]

    # The end.

    def _end(self, outcome: Outcome) -> list[Command]:
        self.history = self.history.finish(outcome.end.lower(), outcome.reason, self._now)
        self._enter(Phase.ENDED)
        self.outcome, keys = outcome, self.nodes.open_keys()
        size = self.world.size if self.world is not None else len(self._past.ranks)
        had_room = self.settings is not None and 0 < size < self.settings.max_nodes
        self._linger.may_more_come = outcome.is_for_good or self._has_lost_nodes or had_room
        return [Remember(self._memory(self._now)), *([Tell(keys, model.Ended(outcome))] if keys else [])]

    def _memory(self, now: float) -> Memory:
        """What the next coordinator must know. Each part adds what it would read from it."""
        policy = self.settings.policy if self.settings else restart_policy.RestartPolicy()
        left_s, outcome = self._formation.backoff_left_s(now), self.outcome and self.outcome.in_brief()
        own = Memory(self.term, last_round=self.round, settings=self.settings, outcome=outcome, backoff_left_s=left_s)
        memory = self._budget.noted_in(self._past.noted_in(own, self.world), policy, now)
        return self._losses.noted_in(memory, policy, now)

    def check(self) -> None:
        """The invariants; tests and the simulator call this after every step."""
        invariants.check(self)
