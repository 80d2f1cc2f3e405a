"""Ways to break the machines, each with the rules that must notice. If a rule does not, it is no rule.

A mutation replaces something of the production code (or of the fake spawner) for as long as it is applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace as replace_in_message

from holdfast.agent.lifecycle import Lifecycle
from holdfast.rendezvous.coordinator.pump import Pump
from holdfast.rendezvous.etcd import election
from holdfast.rendezvous.etcd.election import Candidacy, Office
from holdfast.rendezvous.membership import losses, node_lease, phases, protocol, snapshots
from holdfast.rendezvous.membership import round as rounds
from holdfast.rendezvous.membership.agreed_steps import AgreedSteps
from holdfast.rendezvous.membership.formation import Formation
from holdfast.rendezvous.membership.losses import Losses
from holdfast.rendezvous.membership.model import End, Memory, NodeFacts, Outcome, Resigned, Sealed, Stage, World
from holdfast.rendezvous.membership.node import Participant
from holdfast.rendezvous.membership.node_lease import NodeLease
from holdfast.rendezvous.membership.nodes import NodeTable
from holdfast.rendezvous.membership.notices import Notices
from holdfast.rendezvous.membership.phases import Membership
from holdfast.rendezvous.membership.protocol import Remember
from holdfast.rendezvous.membership.restart_policy import Budget, Restart
from holdfast.rendezvous.membership.round import Past, Round
from holdfast.rendezvous.membership.run import Run
from tests.sim.elected import Candidate, ElectedCoordinator
from tests.sim.etcd import Etcd
from tests.sim.host import Host
from tests.sim.slots import Slots


class Mutation:
    """`change` makes of what it was what it is to be. `rules` are those that may be the first to object; the search for
    a seed begins at `first_seed`. Where chance seldom gets there, `scenario` names one that goes another way, or breaks
    a rule."""

    def __init__(
        self, name: str, owner: Any, attribute: str, change: Callable[[Any], Any], *rules: str,
        first_seed: int = 0, scenario: str = "", is_on_etcd: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.owner, self.attribute, self.change, self.rules = name, owner, attribute, change, rules
        self.first_seed, self.scenario, self.is_on_etcd = first_seed, scenario, is_on_etcd

    def apply(self) -> AbstractContextManager[Any]:
        return patch.object(self.owner, self.attribute, self.change(getattr(self.owner, self.attribute)))


# How things are changed.


def _always(value: Any) -> Any:
    return lambda original: lambda *arguments, **named: value


def _before(do: Callable[[Any], Any]) -> Any:
    """Do something to the machine first."""
    return lambda original: lambda self, *arguments, **named: (do(self), original(self, *arguments, **named))[1]


def _after(do: Callable[[Any], Any]) -> Any:
    def change(original: Any) -> Any:
        def changed(self: Any, *arguments: Any, **named: Any) -> Any:
            result = original(self, *arguments, **named)
            do(self)
            return result

        return changed

    return change


def _without(kind: type) -> Any:
    """Commands of that kind are not given."""
    return lambda original: lambda *arguments: [c for c in original(*arguments) if not isinstance(c, kind)]


def _message_without(**fields: Any) -> Any:
    return lambda original: lambda self: replace_in_message(original(self), **fields)


def _judge_at_once(original: Any) -> Any:
    def stop(self: Membership, *arguments: Any, **named: Any) -> Any:
        commands = original(self, *arguments, **named)
        if commands:
            self._present.owing.clear()
        return commands

    return stop


def _lease_of_half_the_length(original: Any) -> Any:
    return lambda self, node: node.heard_at + self.settings.lease_s / 2


def _drop_at_once(original: Any) -> Any:
    def closed(self: Membership, key: str, by_peer: bool, now: float) -> None:
        node = self.nodes.get(key)
        if node is not None and node.is_open:
            self.nodes.drop(node, now + 0.1, by_peer)

    return closed


def _always_by_the_peer(original: Any) -> Any:
    return lambda self, key, by_peer, now: original(self, key, True, now)


def _blame_stopped(original: Any) -> Any:
    def failed(self: Membership, key: str, round: int, failure: Any) -> Any:
        if self._is_current(key, round):
            self._present.failures.setdefault(key, failure)
        return original(self, key, round, failure)

    return failed


def _memory_without(**fields: Any) -> Any:
    def change(original: Any) -> Any:
        def init(self: Membership, now: float, memory: Memory | None = None, **named: Any) -> None:
            original(self, now, replace(memory, **fields) if memory else None, **named)

        return init

    return change


def _without_restarts(original: Any) -> Any:
    def init(self: Membership, now: float, memory: Memory | None = None, **named: Any) -> None:
        original(self, now, replace(memory, restarts_used=0) if memory else None, **named)
        learn = self._learn_the_past

        def forget(last: Any, heard_round: int, now: float, restarts: int = 0) -> Any:
            return learn(replace(last, restarts_used=0) if last else None, heard_round, now)

        self._learn_the_past = forget  # type: ignore[method-assign]

    return init


def _without_progress(original: Any) -> Any:
    def judge(self: Losses, policy: Any, budget: Budget, now: float) -> Any:
        return original(self, policy, Budget(now), now)

    return judge


def _from_the_last(original: Any) -> Any:
    def is_time(self: Round, waiting: int, settings: Any, now: float) -> bool:
        if waiting != getattr(self, "waiting_before", 0):
            self.admit_at, self.waiting_before = None, waiting  # type: ignore[attr-defined]
        return bool(original(self, waiting, settings, now))

    return is_time


def _one_too_many(original: Any) -> Any:
    return lambda previous, candidates, max_nodes: original(previous, candidates, max_nodes + 1)


def _newest_first(original: Any) -> Any:
    return lambda previous, candidates, max_nodes: tuple(reversed(original(previous, candidates, max_nodes)))


def _own_master(original: Any) -> Any:
    def place_of(self: World, key: str) -> Any:
        return replace(original(self, key), master_address=key.partition("/")[0])

    return place_of


def _without_sources(original: Any) -> Any:
    return lambda self, key: replace(original(self, key), chosen=self.template.chosen)


def _first_said(original: Any) -> Any:
    def joined(self: Membership, join: protocol.Join, now: float) -> Any:
        known = self.nodes.get(join.facts.key)
        return original(self, replace_in_message(join, held=known.snapshots if known else join.held), now)

    return joined


def _first_answer(original: Any) -> Any:
    def take(self: AgreedSteps, key: str, steps: Any, asked: Any, now: float) -> Any:
        if steps.kept is not None and self._kept and steps.kept >= asked.step:
            steps = replace(steps, kept=next(iter(self._kept.values())))
        return original(self, key, steps, asked, now)

    return take


def _to_itself(original: Any) -> Any:
    return lambda members, copies: {
        rank: ((own.address, own.snapshot_port),) if own.snapshot_port else () for rank, own in enumerate(members)
    }


def _admit_at_the_join_only(original: Any) -> Any:
    def admit(self: Membership, now: float) -> Any:
        newest = max(self.nodes.values(), key=lambda node: node.arrival)
        has_just_joined = newest.stage is Stage.WAITING and newest.heard_at == now
        return original(self, now) if has_just_joined else []

    return admit


def _lift_the_lease(original: Any) -> Any:
    def lose(self: NodeLease, now: float) -> Any:
        commands = original(self, now)
        if commands:
            self._round, self._lost_at = None, None
        return commands

    return lose


def _call_it_refused(original: Any) -> Any:
    return lambda self, was_refused, jitter, now: original(self, True, jitter, now)


def _tell_those_present(original: Any) -> Any:
    return lambda self, key, message, now: original(self, key, message, now) and []


def _start_whatever_is_late(original: Any) -> Any:
    def sealed(self: Participant, message: Sealed, now: float) -> Any:
        commands = original(self, message, now)
        if commands and not any(isinstance(each, Sealed) for each in commands):
            commands.append(message)
        return commands

    return sealed


def _two_outcomes(original: Any) -> Any:
    def after_end(self: Membership, key: str, message: Any, now: float) -> Any:
        if self.outcome is not None and isinstance(message, (protocol.Join, protocol.Return)):
            self.outcome = replace(self.outcome, reason="it was something else")
        return original(self, key, message, now)

    return after_end


def _all_count_as_now(original: Any) -> Any:
    def init(self: Budget, now: float, used: int = 0, ages_s: Any = (), *progress: Any) -> None:
        original(self, now, used, (0.0,) * used, *progress)

    return init


def _whatever_is_known(original: Any) -> Any:
    def learn(self: Membership, last: Any, heard_round: int, now: float, heard_restarts: int = 0) -> Any:
        was_unknown = self._past.is_unknown
        commands = original(self, last, heard_round, now, heard_restarts)
        self._past.is_unknown = was_unknown
        return commands

    return learn


def _only_the_first_round(original: Any) -> Any:
    def may_seal(self: Formation, ready: int, is_everyone: bool, settings: Any, now: float) -> bool:
        is_first = not is_everyone and self.not_before == 0.0
        return original(self, ready, is_everyone, settings, now if is_first else -math.inf) or (
            is_everyone and original(self, ready, is_everyone, settings, now)
        )

    return may_seal


def _do_not_mind(original: Any) -> Any:
    return lambda self, jitter, now: self._retreat(jitter, now)


def _join_at_once(original: Any) -> Any:
    return lambda self, *, at_once=False: [*original(self, at_once=at_once), *self._join()]


def _hear_nothing(original: Any) -> Any:
    return lambda self, welcome, now: original(self, replace_record(welcome, last_round=0), now)


def _wait_in_any_case(original: Any) -> Any:
    return lambda self, settings, now: max(original(self, settings, now), self._started_at + settings.lease_s)


# On etcd.


def _any_leader(original: Any) -> Any:
    def write(self: Etcd, write: election.Write) -> Any:
        return original(self, replace_record(write, before=self.leader))

    return write


def _any_turn(original: Any) -> Any:
    def write(self: Etcd, write: election.Write) -> Any:
        is_own = self.leader is not None and self.leader.token == write.before.token
        return original(self, replace_record(write, before=self.leader) if is_own else write)

    return write


def replace_record(record: Any, **changes: Any) -> Any:
    return type(record)(*(changes.get(name, getattr(record, name)) for name in record.__match_args__))


def _from_the_answer(original: Any) -> Any:
    def step(self: Office, event: Any, now: float) -> Any:
        if isinstance(event, election.RenewalAnswered):
            event = election.RenewalAnswered(now, event.is_alive)
        return original(self, event, now)

    return step


def _without_leader_lease(original: Any) -> Any:
    return lambda self, settings, now: original(self, replace(settings, leader_lease_s=0.0), now)


def _by_what_members_say(original: Any) -> Any:
    def learn(self: Membership, last: Any, heard_round: int, now: float, heard_restarts: int = 0) -> Any:
        if last is None or not self._past.has_seen_no_round:
            return original(self, last, heard_round, now, heard_restarts)
        self._past.awaited.clear()
        return self._adopt(last, now)

    return learn


def _for_ever(original: Any) -> Any:
    def react(self: NodeLease, event: Any, now: float) -> Any:
        if isinstance(event, Resigned):
            self.may_outlive_lease = True
        return original(self, event, now)

    return react


def _unbelieved(original: Any) -> Any:
    def react(self: NodeLease, event: Any, now: float) -> Any:
        return [] if isinstance(event, Resigned) else original(self, event, now)

    return react


def _refusals_are_failures(original: Any) -> Any:
    def step(self: Office, event: Any, now: float) -> Any:
        return original(self, election.WriteFailed() if isinstance(event, election.WriteRefused) else event, now)

    return step


_FENCING = "one_world_at_once"
_RAISE = "machines_never_raise"
_FREE = "membership_is_free"
_STEPS = "one_step_for_all"
_KEPT = "agreed_means_kept"
_COPIES = "last_complete_survives"

# fmt: off
MUTATIONS = [
    # Fencing: workers outlive the place of their node, or the place is given away before they are gone.
    Mutation("the agent uses its whole lease", node_lease, "_LEASE_SHARE", lambda original: 1.0, _FENCING),
    Mutation("the coordinator waits for half a lease", Membership, "_lease_ends", _lease_of_half_the_length, _FENCING),
    Mutation("a closed connection is given up at once", Membership, "_closed", _drop_at_once, _FENCING, first_seed=140),
    Mutation("a close of its own counts as one of the node", Membership, "_closed", _always_by_the_peer, _FENCING),
    Mutation("an agent does not mind a closed connection", NodeLease, "_disconnected", _do_not_mind, _FENCING,
        first_seed=190),
    Mutation("an agent takes a silent network for a refusal", NodeLease, "_connect_failed", _call_it_refused, _FENCING,
        first_seed=290),
    Mutation("the lease is lifted when the place is lost", NodeLease, "_lose_place_if_due", _lift_the_lease, _FENCING,
        first_seed=450),
    Mutation("the spawner ignores the lease", Host, "set_lease", _always(None), _FENCING),
    Mutation("a place that comes too late is taken", Participant, "_sealed", _start_whatever_is_late, "ranks_agree"),
    Mutation("a node that is not ready gives its place up unasked", Participant, "_change_request", lambda original:
        lambda self, unready, held: self._join(self._asked_at), _FENCING, _RAISE),
    Mutation("a restarted coordinator does not wait", Past, "others_may_run_until", lambda original: lambda self,
        settings, now: now, _FENCING),
    Mutation("an agent joins before its workers are gone", Lifecycle, "_stop", _join_at_once, _RAISE, _FENCING),
    # Judging.
    Mutation("a stopped round is judged at once", Membership, "_stop", _judge_at_once, _FENCING, _FREE),
    Mutation("a lost node is charged to the budget", Membership, "_judge",
        _before(lambda self: self._present.departed.clear()), _FREE),
    Mutation("failures of a planned stop are charged", Membership, "_failed", _blame_stopped,
        scenario="a_failure_crosses_a_planned_stop"),
    Mutation("failures cost nothing", Membership, "_judge", _before(lambda self: self._present.failures.clear()),
        "failures_are_charged"),
    Mutation("a failure is reported once", Participant, "_join_message", _message_without(failure=None),
        "no_failure_is_forgotten"),
    Mutation("a join does not say why its node stopped", Participant, "_join_message", _message_without(stop=None),
        scenario="the_coordinator_dies_while_it_stops_a_round"),
    Mutation("the last failure is the cause", rounds, "root_cause",
        lambda original: lambda failures: failures[-1], "root_cause"),
    Mutation("one success is everybody's", Membership, "_finish", _after(lambda self: self._present.unfinished.clear()),
        "success_is_unanimous"),
    Mutation("a stop has no end", Round, "expel_stuck", lambda original: lambda self, *_: setattr(self, "stop_by", None)
        or [], scenario="a_stuck_agent_is_expelled"),
    Mutation("every node has the same time to stop", NodeFacts, "stops_within_s",
        lambda original: property(lambda self: self.grace_s + 15.0), scenario="stacks_take_their_time"),
    Mutation("losses have no limit", Losses, "judge", _always(Restart(0.0, is_charged=False)), "losses_are_bounded"),
    Mutation("the count of losses is never begun anew", Losses, "judge", _without_progress,
        scenario="losses_are_bounded"),
    Mutation("losses are forgotten", Membership, "__init__", _memory_without(loss_ages_s=()),
        scenario="losses_are_bounded"),
    Mutation("a backoff is forgotten", Membership, "__init__", _memory_without(backoff_left_s=0.0),
        scenario="all_are_back"),
    Mutation("the losses of hosts are forgotten", Membership, "__init__", _memory_without(host_loss_ages_s=()),
        scenario="a_host_that_is_lost_again_waits"),
    Mutation("a host that is lost again does not wait", losses, "FIRST_DELAY_S", lambda original: 0.0,
        scenario="a_host_that_is_lost_again_waits"),
    Mutation("hosts are to blame for what all have in common", Losses, "forgive", _always(None),
        scenario="all_hosts_are_cut_off_again"),
    Mutation("a host that has to wait is waited for", NodeTable, "out_beyond", _always(0),
        scenario="a_host_that_is_lost_again_waits"),
    Mutation("a stop is not told again", Membership, "_stop_again", _always([]),
        scenario="a_failure_at_the_coordinators_death"),
    # Worlds.
    Mutation("a world larger than max is sealed", phases, "arrange", _one_too_many, "size_within_bounds", _RAISE),
    Mutation("survivors change places", phases, "arrange", _newest_first, "survivors_keep_order"),
    Mutation("every node is its own master", World, "place_of", _own_master, "ranks_agree"),
    Mutation("the round is not counted on", Membership, "_seal", _before(lambda self: setattr(self, "round", max(0,
        self.round - 1))), "rounds_rise"),
    Mutation("later rounds have no last call", Formation, "may_seal", _only_the_first_round,
        scenario="a_later_round_has_a_last_call"),
    # Snapshots.
    Mutation("a snapshot is chosen although ranks are missing", snapshots._Candidate, "problem", _always(""), _STEPS,
        _RAISE),
    Mutation("the oldest snapshot is chosen", snapshots, "_newness",
        lambda original: lambda snapshot: tuple(-each for each in snapshot.order), _STEPS),
    Mutation("a join says nothing of snapshots", Participant, "_join_message", _message_without(held=()), _STEPS),
    Mutation("what a node held before counts", Membership, "_joined", _first_said, _STEPS),
    Mutation("members are not told where to fetch ranks", World, "place_of", _without_sources, _STEPS),
    Mutation("each node has one worker", snapshots._Candidate, "_ranks_of", lambda original: lambda self, rank: (rank,
        rank + 1), _STEPS, _RAISE),
    Mutation("a protected slot is used again", Slots, "_protected", _always(frozenset()), _STEPS),
    # Steps that all nodes keep.
    Mutation("one node is not asked what it keeps", AgreedSteps, "begin", lambda original: lambda self, place, *what:
        original(self, replace(place, node_count=max(1, place.node_count - 1)), *what), _KEPT),
    Mutation("different answers agree", AgreedSteps, "_take_kept", _first_answer, _KEPT),
    Mutation("a complete step is not told again", AgreedSteps, "_ask", _before(lambda self: setattr(self,
        "_is_complete_told", True)), scenario="a_complete_step_is_told_again"),
    Mutation("a node that is back is not asked again", AgreedSteps, "repeated", _always([]),
        scenario="a_complete_step_is_told_again"),
    Mutation("a node that is back does not answer again", Participant, "_introduce", _without(protocol.SnapshotReport),
        scenario="a_complete_step_is_told_again"),
    Mutation("an order that comes again is a new one", Slots, "keep", lambda original: lambda self, round, step:
        (setattr(self, "kept", None), original(self, round, step)), scenario="a_complete_step_is_told_again"),
    Mutation("each node has its own copies", snapshots, "_copy_targets", _to_itself, _COPIES),
    Mutation("what is complete may be let go", Slots, "finish", _always(None), _COPIES),
    # A coordinator that is restarted.
    Mutation("a sealed round is not written down", Membership, "_seal", _without(Remember), "rounds_rise", _FENCING,
        first_seed=150),
    Mutation("the restarts are forgotten", Membership, "__init__", _without_restarts, "restarts_within_budget",
        first_seed=260),
    Mutation("restarts do not age", Budget, "__init__", _all_count_as_now, scenario="old_restarts_stay_old"),
    Mutation("it is forgotten that a round was charged", Membership, "__init__", _memory_without(is_round_over=False),
        scenario="all_are_back"),
    Mutation("a lease is waited for although all are back", Past, "others_may_run_until", _wait_in_any_case,
        scenario="all_are_back"),
    Mutation("the settings are forgotten", Membership, "__init__", _memory_without(settings=None),
        "only_misfits_are_refused", first_seed=600),
    Mutation("not all members are waited for", Membership, "__init__",
        _after(lambda self: self._past.awaited.discard(min(self._past.awaited, default=""))), _FENCING),
    Mutation("an adopted round does not wait", Membership, "_adopt", _after(lambda self: setattr(self._present,
        "returns_until", self._now + 0.2)), "nobody_lost_without_reason"),
    # A coordinator that has lost its memory.
    Mutation("what nodes know of rounds is nothing", Membership, "_learn_the_past", _whatever_is_known, _FENCING),
    Mutation("a node without a place knows of no round", Participant, "_join_message", _message_without(heard_round=0),
        scenario="a_standby_meets_a_coordinator_without_memory"),
    Mutation("a welcome tells nothing of rounds", Participant, "_welcomed", _hear_nothing,
        scenario="a_newcomer_meets_a_coordinator_without_memory"),
    Mutation("what nodes know is not written down", Membership, "_learn_the_past", _without(Remember),
        scenario="what_nodes_know_is_written_down"),
    # A coordinator that etcd elects.
    Mutation("its whole lease is served", election, "_SERVED_SHARE", lambda original: 1.0, "one_in_office",
        is_on_etcd=True),
    Mutation("a renewal counts from its answer", Office, "step", _from_the_answer,
        scenario="an_answer_that_is_late_renews_no_longer"),
    Mutation("writes are not guarded", Etcd, "write", _any_leader, "writes_are_in_turn", _RAISE, is_on_etcd=True),
    Mutation("writes do not wait for their turn", Etcd, "write", _any_turn, "writes_are_in_turn", is_on_etcd=True,
        first_seed=100),
    Mutation("the lease is not looked at before an answer", ElectedCoordinator, "may_serve", _always(True),
        "only_in_office", is_on_etcd=True),
    Mutation("nodes are told before it is written down", Pump, "__init__", _after(lambda self: setattr(self,
        "_durable", math.inf)), "tellings_are_backed", is_on_etcd=True),
    Mutation("the next coordinator waits for a node lease only", Past, "others_may_run_until", _without_leader_lease,
        scenario="a_member_lives_on_the_word_of_the_leader_before"),
    Mutation("members say who may still run", Membership, "_learn_the_past", _by_what_members_say,
        scenario="only_one_has_heard_of_the_round"),
    Mutation("a term is not raised", Run, "_raise_term", _always(False), "settles", "ends_and_everybody_knows",
        first_seed=346),
    Mutation("a resignation frees from the lease", NodeLease, "_react", _for_ever, _FENCING, is_on_etcd=True,
        first_seed=310),
    Mutation("a resignation is not believed", NodeLease, "_react", _unbelieved,
        scenario="a_leader_resigns_and_is_gone"),
    Mutation("a node that hears nothing does not look", NodeLease, "_locate_at", _always(None),
        scenario="a_frozen_leader_goes_on"),
    Mutation("what etcd refuses is tried again", Office, "step", _refusals_are_failures, "a_refusal_ends_the_term",
        is_on_etcd=True),
    Mutation("a node that etcd refuses does not pause", Candidacy, "refused", _always(None), "candidates_pause",
        is_on_etcd=True),
    Mutation("the lease of a dead coordinator is not revoked", Candidate, "_revoke", _always(None),
        scenario="the_coordinators_process_dies"),
    # The end, and getting there.
    Mutation("the end is forgotten", Membership, "__init__", _memory_without(outcome=None), "ended_run_stays_ended",
        "one_outcome"),
    Mutation("the outcome changes", Membership, "_take_after_end", _two_outcomes, "one_outcome"),
    Mutation("a node that comes after the end is told nothing", Membership, "_take_after_end", _tell_those_present,
        "settles", "ends_and_everybody_knows"),
    Mutation("newcomers are let in when they join only", Membership, "_maybe_admit", _admit_at_the_join_only,
        scenario="a_newcomer_meets_a_coordinator_that_was_restarted"),
    Mutation("newcomers are let in one by one", Round, "admitted_in_s", lambda original: lambda *arguments: None if
        original(*arguments) is None else 0.0, "admitted_together"),
    Mutation("each newcomer begins the delay anew", Round, "is_time_to_admit", _from_the_last,
        scenario="newcomers_are_let_in_together"),
    Mutation("silent nodes are never lost", Membership, "_lease_ends", _always(math.inf), "settles"),
    # Notices.
    Mutation("workers that have saved their state are done", Membership, "_finish", lambda original: lambda self, node,
        has_agreed: original(self, node, False), "success_is_unanimous"),
    Mutation("a run ends as after a notice", Notices, "outcome", _always(Outcome(End.CLOSED, "", is_notice=True)),
        "notices_end_runs"),
]
# fmt: on
