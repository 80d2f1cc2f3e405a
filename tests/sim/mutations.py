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
from holdfast.rendezvous import membership, participant, session, world
from holdfast.rendezvous import vocabulary as words
from holdfast.rendezvous.membership import Membership
from holdfast.rendezvous.participant import Participant
from holdfast.rendezvous.session import Session
from tests.sim.host import Host

Patch = AbstractContextManager[Any]


@dataclass(frozen=True)
class Mutation:
    """`noticed_by` are the rules that may be the first to object."""

    name: str
    apply: Callable[[], Patch]
    noticed_by: frozenset[str]


def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], Patch]:
    """Replace an attribute by something made of it."""
    return lambda: patch.object(owner, name, make(getattr(owner, name)))


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
    def adopt(self: Membership, place: Any, now: float) -> None:
        original(self, place, now)
        for node in self._roster:
            if not node.is_open:
                self._roster.drop(node, now + 0.2)

    return adopt


def _without_outcome(original: Any) -> Any:
    def init(self: Membership, now: float, memory: words.Memory | None = None) -> None:
        original(self, now, replace(memory, outcome=None) if memory else None)

    return init


def _without_restarts(original: Any) -> Any:
    def init(self: Membership, now: float, memory: words.Memory | None = None) -> None:
        original(self, now, replace(memory, restarts_used=0) if memory else None)

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


def _two_outcomes(original: Any) -> Any:
    def after_end(self: Membership, event: Any, now: float) -> Any:
        if self.outcome is not None and isinstance(event, words.NodeReturned):
            self.outcome = replace(self.outcome, reason="it was something else")
        return original(self, event, now)

    return after_end


_FENCING = frozenset({"one_world_at_once"})
_RAISE = frozenset({"machines_never_raise"})

MUTATIONS = [
    Mutation("the agent uses its whole lease", lambda: patch.object(session, "_LEASE_SHARE", 1.0), _FENCING),
    Mutation(
        "the coordinator waits for half a lease",
        _replaced(Membership, "_lease_ends", _lease_of_half_the_length),
        _FENCING,
    ),
    Mutation(
        "a closed connection is given up before the agent gives up",
        _replaced(Membership, "_closed", _drop_at_once),
        _FENCING,
    ),
    Mutation(
        "an agent does not mind a closed connection",
        _replaced(
            Session, "_disconnected", lambda original: lambda self, jitter, now: self._retreat(jitter, now) or []
        ),
        _FENCING,
    ),
    Mutation(
        "an agent takes a silent network for a refusal",
        _replaced(Session, "_connect_failed", _call_it_refused),
        _FENCING,
    ),
    Mutation(
        "the lease is lifted when the place is lost",
        _replaced(Session, "_lose_place_if_due", _lift_the_lease),
        _FENCING,
    ),
    Mutation(
        "the spawner ignores the lease",
        _replaced(Host, "set_lease", lambda original: lambda self, until: None),
        _FENCING,
    ),
    Mutation(
        "a place that comes too late is taken",
        _replaced(Participant, "_sealed", _start_whatever_is_late),
        _FENCING | _RAISE | {"ranks_agree", "rounds_rise"},
    ),
    Mutation(
        "a stopped round is judged before everybody is there",
        _replaced(Membership, "_stop", _judge_at_once),
        _FENCING | _RAISE | {"membership_is_free"},
    ),
    Mutation(
        "an adopted round does not wait",
        _replaced(Membership, "_adopt", _adopt_without_waiting),
        frozenset({"nobody_lost_without_reason"}),
    ),
    Mutation(
        "a restarted coordinator does not wait",
        _replaced(Membership, "_sealing_allowed_at", lambda original: lambda self: self._not_before),
        _FENCING,
    ),
    Mutation(
        "a lost node is charged to the budget",
        _replaced(Membership, "_judge", _blame_departed),
        frozenset({"membership_is_free"}),
    ),
    Mutation(
        "failures of a planned stop are charged",
        _replaced(Membership, "_failed", _blame_stopped),
        frozenset({"membership_is_free"}),
    ),
    Mutation(
        "failures cost nothing", _replaced(Membership, "_judge", _forgive_failures), frozenset({"failures_are_charged"})
    ),
    Mutation(
        "a failure is reported once",
        _replaced(Participant, "_join_message", _say_it_once),
        frozenset({"no_failure_is_forgotten"}),
    ),
    Mutation(
        "stale rounds are taken for the present one",
        _replaced(Membership, "_is_current", lambda original: lambda self, key, round: key in self._owing),
        frozenset({"membership_is_free", "root_cause", "no_failure_is_forgotten", "success_is_unanimous"}),
    ),
    Mutation(
        "an agent does not know stale rounds",
        _replaced(Lifecycle, "_is_stale", lambda original: lambda self, event: False),
        _RAISE,
    ),
    Mutation(
        "a world larger than max is sealed",
        lambda: patch.object(membership, "arrange", _one_too_many(membership.arrange)),
        frozenset({"size_within_bounds"}) | _RAISE,
    ),
    Mutation(
        "survivors change places",
        lambda: patch.object(membership, "arrange", _newest_first(membership.arrange)),
        frozenset({"survivors_keep_order"}),
    ),
    Mutation("every node is its own master", _replaced(world.World, "places", _own_master), frozenset({"ranks_agree"})),
    Mutation("the round is not counted on", _replaced(Membership, "_seal", _same_round), frozenset({"rounds_rise"})),
    Mutation(
        "a sealed round is not written down",
        _replaced(Membership, "_seal", _unremembered),
        frozenset({"rounds_rise"}) | _FENCING,
    ),
    Mutation(
        "a restarted coordinator forgets the end",
        _replaced(Membership, "__init__", _without_outcome),
        frozenset({"ended_run_stays_ended", "one_outcome"}),
    ),
    Mutation(
        "a restarted coordinator forgets the restarts",
        _replaced(Membership, "__init__", _without_restarts),
        frozenset({"restarts_within_budget"}),
    ),
    Mutation(
        "whoever comes after the end is told nothing",
        _replaced(Membership, "_react_after_end", _tell_those_present),
        frozenset({"settles", "ends_and_everybody_knows"}),
    ),
    Mutation(
        "the outcome changes", _replaced(Membership, "_react_after_end", _two_outcomes), frozenset({"one_outcome"})
    ),
    Mutation(
        "one success is everybody's",
        _replaced(Membership, "_finish", _succeed_with_the_first),
        frozenset({"success_is_unanimous"}),
    ),
    Mutation(
        "newcomers are let in at the moment of the join only",
        _replaced(Membership, "_maybe_admit", _admit_at_the_join_only),
        frozenset({"settles"}),
    ),
    Mutation(
        "silent nodes are never lost",
        _replaced(Membership, "_lease_ends", lambda original: lambda self, node: math.inf),
        frozenset({"settles"}),
    ),
    Mutation(
        "an agent joins again before its workers are gone",
        _replaced(
            Lifecycle,
            "_stop",
            lambda original: lambda self, *, at_once: [*original(self, at_once=at_once), *self._join()],
        ),
        _FENCING | _RAISE | {"one_round_per_node"},
    ),
]
