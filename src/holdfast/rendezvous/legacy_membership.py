"""The run's machine: join, last call, seal, lease, admit, end. Pure.

One `Membership` is one run. The coordinator turns messages, closed connections and time into events and the
commands into messages; in the simulator a fake world does the same.

                     everybody has joined, or the last call is over
        +---------- FORMING -------------------------------------> RUNNING
        |              ^                                            |   |
        | too few      |  everybody is accounted for, and           |   | every member's workers
        | in time      |  the run goes on                           |   | have succeeded
        v              +------------------ STOPPING <---------------+   v
      ENDED <-----------------------------------+    a failure, a lost  ENDED
                 the policy gives up                 or leaving member,
                                                     a newcomer to admit

Nodes. A node is WAITING when it has joined and none of its workers are alive; RUNNING, FINISHED or LEAVING when
it is a member of the current round. A connection that closes makes it suspect: it may return within
`drop_timeout_s`. A node that is not heard of for `lease_s`, or does not return, is lost; by then its own side
has killed its workers (`session`), which is what makes it safe to give its place away.

First stop, then judge. The first word of a failure stops the round at once. What it means is decided when every
member of the round is accounted for: it has joined again, left, or is lost. If one was lost, the failures around
it are its consequence and cost nothing. This order matters:

  1. node A is killed; B's collective fails at once, and B's report is here before A's connection is closed,
  2. the round stops; B and C stop their workers and join again,
  3. A is still unaccounted for, so nothing is decided, until it is lost after `drop_timeout_s`,
  4. the next round is formed without A, uncharged, although `max_restarts` may be 0.

A coordinator that was restarted knows nothing but what it wrote down (`Memory`: the last round, restarts used, the
outcome). It seals nothing until a lease has passed, because members of the old round may still be running.
A member that returns says which world it is in; the highest round is adopted, and its other members have a lease
to return. If all do, nobody notices anything.

Where an outside authority keeps the leases (etcd), the machine counts none itself and is told when one has ended. Who
leads such a run changes; the next leader takes a `Snapshot` and what all nodes say at that time, and goes on. If there
is none, and yet somebody says that it was here before, then the authority has lost its data: others may not have
noticed yet. Nothing is sealed until a lease has passed, and round and restarts go on from the highest that is heard of.

A join is not always news. A node that was sealed into a world may not have heard of it: it says its join again on a
new connection, or a new leader finds it where it stood. The round that it last saw tells: it is older than the one
that it is a member of, so it is told of its place again and not taken for one that has left.
"""

from __future__ import annotations

import math
from collections import deque
from typing import assert_never

from holdfast.errors import InternalError
from holdfast.rendezvous import restart
from holdfast.rendezvous.forming import Forming, too_few
from holdfast.rendezvous.objections import objection_to
from holdfast.rendezvous.outcome import HANG, End, Failure, Outcome
from holdfast.rendezvous.roster import Node, Roster
from holdfast.rendezvous.vocabulary import (  # fmt: skip
    PHASE_CHANGES,
    Admit,
    Announce,
    CloseRequested,
    Command,
    ConnectionClosed,
    Event,
    Expel,
    ForgetRun,
    LeaseExpired,
    Memory,
    NodeHeard,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeReturned,
    Phase,
    Refuse,
    Remember,
    SealWorld,
    Settings,
    ShowProgress,
    Snapshot,
    Stage,
    StopRound,
    TellOutcome,
    TellPlace,
    TimePassed,
    WorkersFailed,
    WorkersSucceeded,
)
from holdfast.rendezvous.world import (  # fmt: skip
    NodeFacts,
    Place,
    World,
    arrange,
    is_stand_in,
    stand_ins,
)

_STORY_LENGTH = 40
_SILENT_HEARTBEATS = 2.5  # This many heartbeats without a word make a node suspect.
_ALLOWED = frozenset((before, after) for before, _, after in PHASE_CHANGES)


class Membership:
    """One run. `step` takes what happened and returns what is to be done.

    The cost of an event does not depend on the number of nodes, except where it decides something for all of them.
    """

    def __init__(self, now: float, memory: Memory | None = None, *, keeps_leases: bool = True) -> None:
        """`memory` is what an earlier coordinator process of this run has written down, if one did. Without
        `keeps_leases` a node is lost when `LeaseExpired` says so."""
        self.settings: Settings | None = memory.settings if memory else None
        self.phase = Phase.FORMING
        self.world: World | None = None
        self.round = memory.last_round if memory else 0
        self.restarts_used = memory.restarts_used if memory else 0
        self.outcome: Outcome | None = None
        self._keeps_leases = keeps_leases
        self._is_recovering = memory is not None and keeps_leases
        self._has_seen_no_round = True
        self._started_at = self._now = now
        self._roster = Roster()
        self._owing: set[str] = set()  # Members of this round whose workers may be alive.
        self._unfinished: set[str] = set()  # Members of this round whose workers have not succeeded.
        self._charged_at: list[float] = [now] * self.restarts_used
        self._failures: dict[str, Failure] = {}  # In the order in which they were reported, one for each node.
        self._departed: dict[str, str] = {}  # Members that went away, and how.
        self._previous: tuple[str, ...] = ()
        self._forming = Forming(now)
        self._forget_at: float | None = None
        self._has_lost_nodes = False
        self._is_end_told = False
        self._story: deque[tuple[float, Event, tuple[Command, ...]]] = deque(maxlen=_STORY_LENGTH)
        if memory and memory.outcome:
            self.phase, self.outcome = Phase.ENDED, memory.outcome

    @classmethod
    def resume(cls, snapshot: Snapshot, now: float) -> Membership:
        """Go on where another leader was. What each node says now is fed to it next, and who is gone is said to be."""
        machine = cls(now, snapshot.memory, keeps_leases=False)
        machine._previous, machine._is_recovering = snapshot.previous, snapshot.is_recovering
        machine._has_lost_nodes = snapshot.has_lost_nodes
        machine._has_seen_no_round = False
        if snapshot.world is not None and machine.phase is not Phase.ENDED:
            machine._begin(snapshot.world)
            for facts in snapshot.world.members:
                machine._roster.add(facts, Stage.RUNNING, now)
            for key in snapshot.finished:
                machine._finish(machine._roster[key])
            machine._failures, machine._departed = dict(snapshot.failures), dict(snapshot.departed)
            if snapshot.is_stopping:
                machine._enter(Phase.STOPPING)
        return machine

    def snapshot(self) -> Snapshot:
        is_stopping = self.phase is Phase.STOPPING
        failures = tuple(self._failures.items()) if is_stopping else ()
        departed = tuple(self._departed.items()) if is_stopping else ()
        members = self.world.keys if self.world is not None and self.outcome is None else ()
        finished = tuple(key for key in members if key not in self._unfinished)
        past = (self._previous, finished, self._is_recovering, self._has_lost_nodes)
        return Snapshot(self._memory(), self.world, is_stopping, failures, departed, *past)

    # What the shell calls.

    def step(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, NodeHeard) and not self._was_silent(event.key, now):
            self._roster.hear(event.key, now)
            return []
        self._now = now
        commands = self._react(event, now) + self._advance(now)
        self._story.append((now, event, tuple(commands)))
        return commands

    def next_deadline(self) -> float | None:
        """When `TimePassed` is due unless something happens before."""
        if self.phase is Phase.ENDED:
            return self._forget_at
        candidates = [self._next_loss_at(), self._forming.progress.due_at]
        if self.phase is Phase.FORMING and self.settings is not None:
            candidates += self._forming.deadlines(self.settings, self._now)
        return min((each for each in candidates if each is not None), default=None)

    def story(self) -> str:
        return "\n".join(f"{at:.3f} {event} -> {list(commands)}" for at, event, commands in self._story)

    @property
    def node_count(self) -> int:
        return len(self._roster)

    @property
    def have_all_heard(self) -> bool:
        """How the run ended: nobody can come back who does not know."""
        return self._is_end_told and not self._roster and not self._has_lost_nodes

    def is_nothing_without(self, key: str) -> bool:
        """Whether no round was ever formed, and nobody but this node has anything to do with the run. One that was lost
        may come back, and has the settings that the run has; who goes on for another cannot know of all of them."""
        is_alone = key in self._roster and len(self._roster) == 1
        return self._has_seen_no_round and self.round == 0 and is_alone and not self._has_lost_nodes

    # Events.

    def _react(self, event: Event, now: float) -> list[Command]:
        if self.phase is Phase.ENDED:
            return self._react_after_end(event, now)
        match event:
            case NodeJoined(facts) | NodeReturned(facts) if self._roster.is_outdated(facts):
                return [Expel(facts.key, "it has come back as somebody else")]
            case NodeJoined():
                return self._joined(event, now)
            case NodeReturned():
                return self._returned(event, now)
            case NodeHeard(key):
                self._roster.hear(key, now)
                return []
            case ConnectionClosed(key):
                self._closed(key, now)
                return []
            case WorkersFailed(key, round, failure):
                return self._failed(key, round, failure)
            case WorkersSucceeded(key, round):
                if self._is_current(key, round):
                    self._finish(self._roster[key])
                return []
            case NodeLeaving(key):
                return self._leaving(key)
            case NodeLeft(key):
                self.settings = None if self.is_nothing_without(key) else self.settings
                return self._gone(key, "left")
            case LeaseExpired(key):
                return self._lose(key, "is lost: its lease ended")
            case CloseRequested(reason):
                return self._end(Outcome(End.CLOSED, reason))
            case TimePassed():
                return self._lose_overdue(now)
        assert_never(event)

    def _react_after_end(self, event: Event, now: float) -> list[Command]:
        assert self.outcome is not None
        match event:
            case NodeJoined(facts) | NodeReturned(facts):
                self.settings = self.settings or event.settings
                self._roster.add(facts, Stage.WAITING, now)
                if not self._keeps_leases:
                    self._forget_at = None  # What it is told lies where it looks for it, so it must stay there a while.
                return [TellOutcome((facts.key,), self.outcome)]
            case NodeLeft(key) | LeaseExpired(key):
                is_lost = isinstance(event, LeaseExpired) and key in self._roster
                self._has_lost_nodes = self._has_lost_nodes or is_lost
                self._roster.remove(key)
        return []

    def _joined(self, event: NodeJoined, now: float) -> list[Command]:
        facts = event.facts
        if facts.key in self._owing and self.world is not None and event.last_round < self.world.round:
            return self._tell_again(self._roster[facts.key], now)
        ours = self.settings or event.settings
        problem = objection_to(event, ours, self._roster, lambda node: self._is_silent(node, now))
        if problem:
            return [Refuse(facts.key, problem)]
        self.settings = ours
        self._learn_the_past(event.last_round, event.restarts_used, bool(event.replaces), now)
        commands = self._gone(event.replaces, "has lost its place") if event.replaces else []
        if event.failure is not None:
            commands += self._failed(facts.key, event.last_round, event.failure) + self._explain(facts.key)
        if facts.key in self._owing and self.phase is Phase.RUNNING:
            commands += self._stop(f"{facts.node_id} has left the round", departed=facts)
        self._owing.discard(facts.key)
        self._roster.add(facts, Stage.WAITING, now)
        return commands + ([] if self.phase is not Phase.RUNNING or self._has_room() else self._stand_by((facts.key,)))

    def _learn_the_past(self, last_round: int, restarts_used: int, was_here: bool, now: float) -> None:
        self.round = max(self.round, last_round)
        self._charged_at += [now] * (restarts_used - self.restarts_used)
        self.restarts_used = max(self.restarts_used, restarts_used)
        if self._has_seen_no_round and not self._keeps_leases and (last_round > 0 or was_here):
            self._is_recovering = self._has_lost_nodes = True

    def _explain(self, key: str) -> list[Command]:
        """It had stopped because of a failure before anybody could tell it who was gone: its leader."""
        is_late = not self._keeps_leases and self.phase is Phase.STOPPING and self._departed and not self._failures
        return [self._excuse((key,))] if is_late else []

    def _excuse(self, keys: tuple[str, ...]) -> Announce:
        return Announce(keys, restart.excuse([*self._departed.values()], self.round))

    def _tell_again(self, node: Node, now: float) -> list[Command]:
        """It is a member of a round of which it has not heard."""
        assert self.world is not None
        self._roster.reopen(node, now)
        return [TellPlace(node.key, self.world.place_of(node.key)), *self._stop_again(node)]

    def _stop_again(self, node: Node) -> list[Command]:
        """It may have missed that the round is being stopped."""
        if self.phase is not Phase.STOPPING or self.world is None:
            return []
        return [StopRound((node.key,), self.world.round, "the round was stopped meanwhile")]

    def _returned(self, event: NodeReturned, now: float) -> list[Command]:
        self.settings = self.settings or event.settings
        is_news = self._has_seen_no_round and event.place.round >= self.round
        adopted = self._adopt(event.place, now) if is_news else []
        return adopted + self._resume(event, now)

    def _resume(self, event: NodeReturned, now: float) -> list[Command]:
        facts, place = event.facts, event.place
        if self.world is not None and self.world.round == place.round:
            self._take_up(facts, place.rank, now)
        node = self._roster.get(facts.key)
        is_member = self.world is not None and self.world.round == place.round
        if node is None or not is_member or node.stage is Stage.WAITING:
            self.round = max(self.round, place.round)
            is_done = event.stage is Stage.FINISHED and (node is None or node.stage is Stage.FINISHED)
            if is_done and not self._keeps_leases:
                return self._stop_late(facts, place.round, now)
            return [Expel(facts.key, f"its place in round {place.round} was given up")]
        self._roster.reopen(node, now)
        if event.stage is Stage.FINISHED:
            self._finish(node)
        return self._stop_again(node)

    def _stop_late(self, facts: NodeFacts, round: int, now: float) -> list[Command]:
        """It had done its part of a round that was stopped, and nobody has told it."""
        self._roster.add(facts, Stage.FINISHED, now)
        return [StopRound((facts.key,), round, "the round was stopped meanwhile")]

    def _adopt(self, place: Place, now: float) -> list[Command]:
        """Go on with a round that another coordinator process has sealed; its members have a lease to return. Who they
        are is not known before they do. Until then a stand-in holds each place. Those who wait were not told of it."""
        assert self.settings is not None
        self._learn_the_past(place.round, place.restarts_used, True, now)
        members = stand_ins(place)
        self._begin(World(place.round, members, place.restarts_used))
        for facts in members:
            self._roster.drop(self._roster.add(facts, Stage.RUNNING, now), now + self.settings.lease_s)
        return [] if self._has_room() else self._stand_by(tuple(sorted(self._roster.waiting)))

    def _take_up(self, facts: NodeFacts, rank: int, now: float) -> None:
        """A member of an adopted round has returned: it takes the place of its stand-in."""
        assert self.world is not None
        assert self.settings is not None
        stand_in = self.world.keys[rank] if rank < len(self.world.members) else ""
        if not is_stand_in(stand_in) or stand_in not in self._roster:
            return
        self.world = self.world.with_member(rank, facts)
        self._roster.remove(stand_in)
        for keys in (self._owing, self._unfinished):
            keys.discard(stand_in)
            keys.add(facts.key)
        self._roster.drop(self._roster.add(facts, Stage.RUNNING, now), now + self.settings.lease_s)

    def _was_silent(self, key: str, now: float) -> bool:
        node = self._roster.get(key)
        return node is not None and node.stage is Stage.WAITING and self._is_silent(node, now)

    def _is_silent(self, node: Node, now: float) -> bool:
        if not self._keeps_leases or self.settings is None:
            return False
        return now - node.heard_at > _SILENT_HEARTBEATS * self.settings.heartbeat_s

    def _closed(self, key: str, now: float) -> None:
        node = self._roster.get(key)
        if node is not None and node.is_open:
            assert self.settings is not None
            self._roster.drop(node, now + self.settings.drop_timeout_s)

    def _failed(self, key: str, round: int, failure: Failure) -> list[Command]:
        """Workers that fail after the round was stopped for another reason fail of the stop: a peer was faster."""
        is_of_stop = self.phase is Phase.STOPPING and not self._failures
        if is_of_stop or not self._is_current(key, round):
            return []
        self._failures.setdefault(key, failure)
        return self._stop(failure.text, is_hang=failure.exception == HANG)

    def _finish(self, node: Node) -> None:
        if node.stage is Stage.RUNNING:
            node.stage = Stage.FINISHED
            self._owing.discard(node.key)
            self._unfinished.discard(node.key)

    def _leaving(self, key: str) -> list[Command]:
        node = self._roster.get(key)
        if node is None or node.stage is not Stage.RUNNING:
            return []
        node.stage = Stage.LEAVING
        return self._stop(f"{node.facts.node_id} leaves", departed=node.facts)

    def _is_current(self, key: str, round: int) -> bool:
        """Whether a member speaks of the present round. The one place where what is stale is dropped."""
        return key in self._owing and self.world is not None and round == self.world.round

    # Losing nodes.

    def _lose_overdue(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for key in self._roster.dropped_by(now):
            commands += self._lose(key, "is lost: it did not come back")
        while (node := self._roster.first()) is not None and self._lease_ends(node) <= now:
            if node.is_open:
                commands += self._lose(node.key, "is lost: it was not heard of")
                commands.append(Expel(node.key, "it was not heard of for too long"))
            else:
                self._roster.hear(node.key, now)  # It has its own deadline.
        return commands

    def _lose(self, key: str, how: str) -> list[Command]:
        self._has_lost_nodes = True
        return self._gone(key, how)

    def _lease_ends(self, node: Node) -> float:
        assert self.settings is not None
        return node.heard_at + self.settings.lease_s if self._keeps_leases else math.inf

    def _next_loss_at(self) -> float | None:
        """The next time at which somebody may be lost. All leases are equally long, so the first in line tells."""
        oldest = self._roster.first()
        candidates = [self._roster.next_drop_at(), self._lease_ends(oldest) if oldest and self._keeps_leases else None]
        return min((each for each in candidates if each is not None), default=None)

    def _gone(self, key: str, how: str) -> list[Command]:
        """A node is out, and none of its workers can be alive."""
        node = self._roster.get(key)
        if node is None:
            return []
        is_missed = key in self._owing
        self._roster.remove(key)
        if not is_missed:
            return []
        self._owing.discard(key)
        return self._stop(f"{node.facts.node_id} {how}", departed=node.facts)

    # Rounds.

    def _begin(self, world: World) -> None:
        self._enter(Phase.RUNNING)
        self._has_seen_no_round = False
        self.world, self.round = world, world.round
        self._owing, self._unfinished = set(world.keys), set(world.keys)
        self._failures, self._departed = {}, {}
        self._forming.reset()

    def _enter(self, phase: Phase) -> None:
        if (self.phase, phase) not in _ALLOWED:
            raise InternalError(f"a run cannot go from {self.phase} to {phase}; before:\n{self.story()}")
        self.phase = phase

    def _stop(self, reason: str, departed: NodeFacts | None = None, *, is_hang: bool = False) -> list[Command]:
        """Stop the round for everybody. Whether the run goes on is decided when all are accounted for."""
        assert self.world is not None
        if departed is not None:
            self._departed.setdefault(departed.key, reason)
        if self.phase is not Phase.RUNNING:
            return []
        self._enter(Phase.STOPPING)
        gone = departed.key if departed else ""
        keys = tuple(key for key in self.world.keys if key in self._roster and key != gone)
        return [StopRound(keys, self.world.round, reason, is_hang)]

    def _maybe_admit(self, now: float) -> list[Command]:
        """Whoever waits below max is let in. Mostly it has just joined; it may also have been silent when the round
        was sealed, or have been there before a restarted coordinator adopted the round."""
        newcomers = self._ready(now) if self._has_room() else []
        return self._stop(f"{newcomers[0].node_id} joins") if newcomers else []

    def _has_room(self) -> bool:
        assert self.settings is not None
        assert self.world is not None
        return self.settings.admit is Admit.NOW and len(self.world.members) < self.settings.max_nodes

    def _stand_by(self, keys: tuple[str, ...]) -> list[Command]:
        assert self.world is not None
        return [Announce(keys, f"{self.world.description}, this node stands by")] if keys else []

    def _advance(self, now: float) -> list[Command]:
        """Whatever is due now that the event has been taken in."""
        commands: list[Command] = []
        if self.phase is Phase.RUNNING and not self._unfinished:
            commands += self._end(Outcome(End.SUCCEEDED, "all workers have succeeded"))
        if self.phase is Phase.RUNNING and self._roster.waiting:
            commands += self._maybe_admit(now)
        if self.phase is Phase.STOPPING and not self._owing:
            commands += self._judge(now)
        if self.phase is Phase.FORMING:
            commands += self._form(now)
        if self.phase is Phase.ENDED:
            commands += self._maybe_forget(now)
        return commands

    def _judge(self, now: float) -> list[Command]:
        """Everybody of the stopped round is accounted for: what was it, and does the run go on?"""
        assert self.settings is not None
        assert self.world is not None
        commands: list[Command] = []
        if self._failures and self._departed:
            commands.append(self._excuse(self._roster.open_keys()))
        if self._failures and not self._departed:
            cause = restart.root_cause(list(self._failures.values()))
            decision = restart.decide(self.settings.policy, self._charged_at, cause, now)
            if isinstance(decision, restart.GiveUp):
                return self._end(Outcome(End.FAILED, decision.reason, cause))
            self._forming.not_before = now + decision.delay_s
            if decision.is_charged:
                self._charged_at.append(now)
                self.restarts_used += 1
                commands.append(Remember(self._memory()))
            if text := restart.announcement(decision):
                commands.append(Announce(self._roster.open_keys(), text))
        self._previous = self.world.keys
        self.world = None
        self._enter(Phase.FORMING)
        return commands

    def _form(self, now: float) -> list[Command]:
        if not self._roster or self.settings is None:
            self._forming.reset()
            return []
        self._keep_quiet(now)
        self._forming.count(len(self._roster.waiting), self.settings, now)
        if self._forming.has_failed(self.settings, now):
            missing = too_few(self._roster.names_waiting(), self.settings.min_nodes, self.settings.join_timeout_s)
            return self._end(Outcome(End.FAILED, missing))
        if self._is_time_to_seal(len(self._roster.waiting), now):
            ready = self._ready(now)
            if self._is_time_to_seal(len(ready), now):
                return self._seal(ready)
        return self._maybe_show_progress(now)

    def _is_time_to_seal(self, ready_count: int, now: float) -> bool:
        assert self.settings is not None
        is_everybody = self.round > 0 and ready_count == len(self._roster)
        return self._forming.is_over(ready_count, is_everybody, self.settings, now)

    def _keep_quiet(self, now: float) -> None:
        """After a restart of the coordinator, members of a round that it never saw may run for another lease."""
        assert self.settings is not None
        if self._is_recovering:
            quiet_until = self._started_at + self.settings.lease_s
            self._forming.not_before = max(self._forming.not_before, quiet_until)
            self._is_recovering = now < quiet_until

    def _ready(self, now: float) -> list[NodeFacts]:
        """Who can be sealed into a world, in order of arrival."""
        return [node.facts for node in self._roster.in_order_of_arrival() if not self._is_silent(node, now)]

    def _seal(self, ready: list[NodeFacts]) -> list[Command]:
        assert self.settings is not None
        members = arrange(self._previous, ready, self.settings.max_nodes)
        world = World(self.round + 1, members, self.restarts_used)
        self._begin(world)
        for key in world.keys:
            self._roster[key].stage = Stage.RUNNING
            self._roster.waiting.discard(key)
        return [Remember(self._memory()), SealWorld(world), *self._stand_by(tuple(sorted(self._roster.waiting)))]

    def _maybe_show_progress(self, now: float) -> list[Command]:
        assert self.settings is not None
        if not self._forming.progress.is_due(len(self._roster.waiting), now):
            return []
        waiting, left_s = tuple(sorted(self._roster.waiting)), self._forming.left_s(self.settings, now)
        return [ShowProgress(waiting, len(waiting), self.settings.min_nodes, self.settings.max_nodes, left_s)]

    # The end.

    def _end(self, outcome: Outcome) -> list[Command]:
        self._enter(Phase.ENDED)
        self.outcome = outcome
        self._is_end_told = True
        keys = self._roster.open_keys()
        told: list[Command] = [TellOutcome(keys, outcome)] if keys else []
        return [Remember(self._memory()), *told]

    def _maybe_forget(self, now: float) -> list[Command]:
        """At once if everybody who was there has confirmed the end, so that the run's name can be used again. A node
        that was lost may still come back, and a run that was closed keeps its door closed, for a while."""
        if self._forget_at is None:
            self._forget_at = now + (self.settings.close_linger_s if self.settings else 0.0)
        is_closed = self.outcome is not None and self.outcome.end is End.CLOSED
        return [ForgetRun()] if (self.have_all_heard and not is_closed) or now >= self._forget_at else []

    def _memory(self) -> Memory:
        return Memory(self.round, self.restarts_used, self.outcome, self.settings)

    def check(self) -> None:
        """The invariants; tests and the simulator call this after every step."""
        keys = self.world.keys if self.world else ()
        assert len(set(keys)) == len(keys)
        assert (self.phase in (Phase.RUNNING, Phase.STOPPING)) <= (self.world is not None)
        assert (self.phase is Phase.ENDED) == (self.outcome is not None)
        self._roster.check()
        if self.phase is not Phase.ENDED:
            assert self._owing <= {key for key in keys if key in self._roster}
            waiting = {node.key for node in self._roster if node.stage is Stage.WAITING and node.is_open}
            assert self._roster.waiting == waiting
        if self.settings and self.world:
            assert self.settings.min_nodes <= len(keys) <= self.settings.max_nodes
            policy = self.settings.policy
            assert policy.window_s is not None or self.restarts_used <= policy.max_restarts
