"""Ways to break the machines, each with the rules that must notice. If a rule does not, it is no rule.

A mutation replaces something of the production code (or of the fake spawner) for as long as it is applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from holdfast.agent.lifecycle import Lifecycle
from holdfast.rendezvous import legacy_membership as membership
from holdfast.rendezvous import participant, restart, session, world
from holdfast.rendezvous import vocabulary as words
from holdfast.rendezvous.legacy_membership import Membership
from holdfast.rendezvous.participant import Participant
from holdfast.rendezvous.session import Session
from tests.sim.host import Host


@dataclass(frozen=True)
class Mutation:
    """`change` makes of what it was what it is to be. `rules` are those that may be the first to object."""

    name: str
    owner: Any
    attribute: str
    change: Callable[[Any], Any]
    rules: tuple[str, ...]
    first_seed: int = 0
    """The search begins here."""

    def apply(self) -> AbstractContextManager[Any]:
        return patch.object(self.owner, self.attribute, self.change(getattr(self.owner, self.attribute)))


def mutation_of(
    name: str, owner: Any, attribute: str, change: Callable[[Any], Any], *rules: str, first_seed: int = 0
) -> Mutation:
    return Mutation(name, owner, attribute, change, rules, first_seed)


# How things are changed.


def _lease_of_half_the_length(original: Any) -> Any:
    return lambda self, node: node.heard_at + self.settings.lease_s / 2


def _drop_at_once(original: Any) -> Any:
    def closed(self: Membership, key: str, now: float) -> None:
        node = self._roster.get(key)
        if node is not None and node.is_open:
            self._roster.drop(node, now + 0.1)

    return closed


def _judge_at_once(original: Any) -> Any:
    def stop(self: Membership, *arguments: Any, **named: Any) -> Any:
        commands = original(self, *arguments, **named)
        if commands:
            self._owing.clear()
        return commands

    return stop


def _blame_departed(original: Any) -> Any:
    def judge(self: Membership, now: float) -> Any:
        self._departed.clear()
        return original(self, now)

    return judge


def _blame_stopped(original: Any) -> Any:
    def failed(self: Membership, key: str, round: int, failure: Any) -> Any:
        if self._is_current(key, round):
            self._failures.setdefault(key, failure)
        return original(self, key, round, failure)

    return failed


def _adopt_without_waiting(original: Any) -> Any:
    def adopt(self: Membership, place: Any, now: float) -> Any:
        commands = original(self, place, now)
        for node in self._roster:
            if not node.is_open:
                self._roster.drop(node, now + 0.2)
        return commands

    return adopt


def _without_outcome(original: Any) -> Any:
    def init(self: Membership, now: float, memory: words.Memory | None = None) -> None:
        original(self, now, replace(memory, outcome=None) if memory else None)

    return init


def _without_restarts(original: Any) -> Any:
    def init(self: Membership, now: float, memory: words.Memory | None = None) -> None:
        original(self, now, replace(memory, restarts_used=0) if memory else None)
        learn = self._learn_the_past
        self._learn_the_past = lambda last_round, _, was_here, now: learn(last_round, 0, was_here, now)

    return init


def _without_settings(original: Any) -> Any:
    def init(self: Membership, now: float, memory: words.Memory | None = None) -> None:
        original(self, now, replace(memory, settings=None) if memory else None)

    return init


def _same_round(original: Any) -> Any:
    def seal(self: Membership, ready: Any) -> Any:
        self.round = max(0, self.round - 1)
        return original(self, ready)

    return seal


def _unremembered(original: Any) -> Any:
    return lambda self, ready: [c for c in original(self, ready) if not isinstance(c, words.Remember)]


def _one_too_many(original: Any) -> Any:
    return lambda previous, candidates, max_nodes: original(previous, candidates, max_nodes + 1)


def _newest_first(original: Any) -> Any:
    return lambda previous, candidates, max_nodes: tuple(reversed(original(previous, candidates, max_nodes)))


def _own_master(original: Any) -> Any:
    def places(self: world.World) -> list[world.Place]:
        pairs = zip(original(self), self.members, strict=True)
        return [replace(place, master_address=member.address) for place, member in pairs]

    return places


def _admit_at_the_join_only(original: Any) -> Any:
    def admit(self: Membership, now: float) -> Any:
        newest = max(self._roster, key=lambda node: node.arrival)
        has_just_joined = newest.stage is words.Stage.WAITING and newest.heard_at == now
        return original(self, now) if has_just_joined else []

    return admit


def _lift_the_lease(original: Any) -> Any:
    def lose(self: Session, now: float) -> Any:
        commands = original(self, now)
        if commands:
            self.has_place, self._lost_at = False, None
        return commands

    return lose


def _call_it_refused(original: Any) -> Any:
    return lambda self, was_refused, jitter, now: original(self, True, jitter, now)


def _say_it_once(original: Any) -> Any:
    return lambda self: _struct_replace(original(self), failure=None)


def _struct_replace(struct: Any, **changes: Any) -> Any:
    from msgspec.structs import replace as replace_in

    return replace_in(struct, **changes)


def _tell_those_present(original: Any) -> Any:
    def after_end(self: Membership, event: Any, now: float) -> Any:
        original(self, event, now)
        return []

    return after_end


def _start_whatever_is_late(original: Any) -> Any:
    def sealed(self: Participant, key: str, place: Any, now: float) -> Any:
        commands = original(self, key, place, now)
        if commands and not any(isinstance(each, participant.WorldSealed) for each in commands):
            commands.append(participant.WorldSealed(place))
        return commands

    return sealed


def _succeed_with_the_first(original: Any) -> Any:
    def finish(self: Membership, node: Any) -> None:
        original(self, node)
        self._unfinished.clear()

    return finish


def _forgive_failures(original: Any) -> Any:
    def judge(self: Membership, now: float) -> Any:
        self._failures.clear()
        return original(self, now)

    return judge


def _last_failure(original: Any) -> Any:
    return lambda failures: failures[-1]


def _two_outcomes(original: Any) -> Any:
    def after_end(self: Membership, event: Any, now: float) -> Any:
        if self.outcome is not None and isinstance(event, (words.NodeJoined, words.NodeReturned)):
            self.outcome = replace(self.outcome, reason="it was something else")
        return original(self, event, now)

    return after_end


def _never(original: Any) -> Any:
    return lambda self, node: math.inf


def _do_not_mind(original: Any) -> Any:
    return lambda self, jitter, now: self._retreat(jitter, now) or []


def _do_nothing(original: Any) -> Any:
    return lambda self, *arguments: None


def _nothing_is_stale(original: Any) -> Any:
    return lambda self, event: False


def _join_at_once(original: Any) -> Any:
    return lambda self, *, at_once: [*original(self, at_once=at_once), *self._join()]


_FENCING = "one_world_at_once"
_RAISE = "machines_never_raise"

MUTATIONS = [
    # Fencing: workers outlive the place of their node, or the place is given away before they are gone.
    mutation_of("the agent uses its whole lease", session, "_LEASE_SHARE", lambda original: 1.0, _FENCING),
    mutation_of(
        "the coordinator waits for half a lease", Membership, "_lease_ends", _lease_of_half_the_length, _FENCING
    ),
    mutation_of("a closed connection is given up at once", Membership, "_closed", _drop_at_once, _FENCING),
    mutation_of("an agent does not mind a closed connection", Session, "_disconnected", _do_not_mind, _FENCING),
    mutation_of(
        "an agent takes a silent network for a refusal", Session, "_connect_failed", _call_it_refused, _FENCING
    ),
    mutation_of("the lease is lifted when the place is lost", Session, "_lose_place_if_due", _lift_the_lease, _FENCING),
    mutation_of("the spawner ignores the lease", Host, "set_lease", _do_nothing, _FENCING),
    mutation_of("a place that comes too late is taken", Participant, "_sealed", _start_whatever_is_late, "ranks_agree"),
    mutation_of("a restarted coordinator does not wait", Membership, "_keep_quiet", _do_nothing, _FENCING),
    mutation_of("an agent joins before its workers are gone", Lifecycle, "_stop", _join_at_once, _RAISE, _FENCING),
    # Judging.
    mutation_of(
        "a stopped round is judged at once", Membership, "_stop", _judge_at_once, _FENCING, "membership_is_free"
    ),
    mutation_of("a lost node is charged to the budget", Membership, "_judge", _blame_departed, "membership_is_free"),
    mutation_of("failures of a planned stop are charged", Membership, "_failed", _blame_stopped, "membership_is_free"),
    mutation_of("failures cost nothing", Membership, "_judge", _forgive_failures, "failures_are_charged"),
    mutation_of("a failure is reported once", Participant, "_join_message", _say_it_once, "no_failure_is_forgotten"),
    mutation_of("the last failure is the cause", restart, "root_cause", _last_failure, "root_cause"),
    mutation_of("an agent does not know stale rounds", Lifecycle, "_is_stale", _nothing_is_stale, _RAISE),
    mutation_of("one success is everybody's", Membership, "_finish", _succeed_with_the_first, "success_is_unanimous"),
    # Worlds.
    mutation_of(
        "a world larger than max is sealed", membership, "arrange", _one_too_many, "size_within_bounds", _RAISE
    ),
    mutation_of("survivors change places", membership, "arrange", _newest_first, "survivors_keep_order"),
    mutation_of("every node is its own master", world.World, "places", _own_master, "ranks_agree"),
    mutation_of("the round is not counted on", Membership, "_seal", _same_round, "rounds_rise"),
    # A coordinator that is restarted.
    mutation_of("a sealed round is not written down", Membership, "_seal", _unremembered, "rounds_rise", _FENCING),
    mutation_of("nobody knows of the restarts", Membership, "__init__", _without_restarts, "restarts_within_budget"),
    mutation_of("the settings are forgotten", Membership, "__init__", _without_settings, "only_misfits_are_refused"),
    mutation_of(
        "an adopted round does not wait", Membership, "_adopt", _adopt_without_waiting, "nobody_lost_without_reason"
    ),
    # The end, and getting there.
    mutation_of(
        "the end is forgotten", Membership, "__init__", _without_outcome, "ended_run_stays_ended", "one_outcome"
    ),
    mutation_of("the outcome changes", Membership, "_react_after_end", _two_outcomes, "one_outcome"),
    mutation_of(
        "whoever comes after the end is told nothing",
        Membership,
        "_react_after_end",
        _tell_those_present,
        "settles",
        "ends_and_everybody_knows",
    ),
    mutation_of(
        "newcomers are let in when they join only", Membership, "_maybe_admit", _admit_at_the_join_only, "settles"
    ),
    mutation_of("silent nodes are never lost", Membership, "_lease_ends", _never, "settles"),
]
