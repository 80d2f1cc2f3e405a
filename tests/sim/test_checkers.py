"""Every rule objects to what it is there for, and to nothing in a run that goes well."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.rendezvous import messages
from holdfast.rendezvous.keyspace import Telling
from holdfast.rendezvous.outcome import End, Failure, Outcome
from holdfast.rendezvous.restart import RestartPolicy
from holdfast.rendezvous.vocabulary import Memory, Settings, Snapshot
from holdfast.rendezvous.world import NodeFacts, World
from tests.sim.checkers import Checks, name_of
from tests.sim.engine import Violation
from tests.sim.etcd_checkers import ETCD_RULES

SETTINGS = Settings(min_nodes=2, max_nodes=3, policy=RestartPolicy(max_restarts=1))
A, B, C, D = (NodeFacts(name, address=name, port=1) for name in "abcd")
CRASH = Failure("a", 0, 1, "", "it crashed")
ECHO = Failure("b", 1, 1, "", "connection closed", is_consequence=True)
FAILED = Outcome(End.FAILED, "no restarts are left", CRASH)
SUCCEEDED = Outcome(End.SUCCEEDED, "all workers have succeeded")


def group(node: NodeFacts, round: int, rank: int, *, has_succeeded: bool = False) -> Any:
    host = SimpleNamespace(name=node.node_id)
    return SimpleNamespace(host=host, node=node.node_id, round=round, rank=rank, has_succeeded=has_succeeded)


def join(node: NodeFacts, failure: Failure | None = None) -> Any:
    return messages.Join(node, SETTINGS, 1, "", failure)


def on(node: NodeFacts) -> Any:
    return SimpleNamespace(key=node.key)


def sealed(round: int, *members: NodeFacts, restarts_used: int = 0) -> Callable[[Checks], None]:
    return lambda checks: checks.world_sealed(World(round, members, restarts_used))


def heard(node: NodeFacts, message: Any) -> Callable[[Checks], None]:
    return lambda checks: checks.message_received(on(node), message)


def wrote(round: int, restarts_used: int = 0, outcome: Outcome | None = None) -> Callable[[Checks], None]:
    return lambda checks: checks.remembered(Memory(round, restarts_used, outcome))


def did(hook: str, *arguments: Any) -> Callable[[Checks], None]:
    return lambda checks: getattr(checks, hook)(*arguments)


def placed(node: NodeFacts, world: World, rank: int) -> Callable[[Checks], None]:
    return lambda checks: checks.place_received(None, node.key, world.places()[rank])


def calm(checks: Checks) -> None:
    checks.be_calm()


FAILURE_IN_ROUND_1 = [
    sealed(1, A, B), heard(A, messages.Failed(1, CRASH)), did("stop_ordered", 1), heard(A, join(A)),
]  # fmt: skip
STORIES: list[tuple[str, list[Callable[[Checks], None]]]] = [
    ("ranks_agree", [sealed(1, A, A)]),
    ("ranks_agree", [sealed(1, A, B), placed(B, World(1, (B, A)), 0)]),
    ("ranks_agree", [sealed(1, A, B), placed(A, World(1, (A, B)), 0), placed(B, World(1, (A, B), 1), 1)]),
    ("rounds_rise", [sealed(2, A, B), sealed(2, A, C)]),
    ("rounds_rise", [sealed(2, A, B), sealed(1, A, B)]),
    ("rounds_rise", [sealed(2, A, B), wrote(1)]),
    ("size_within_bounds", [sealed(1, A)]),
    ("size_within_bounds", [sealed(1, A, B, C, D)]),
    ("one_round_per_node", [did("workers_started", group(A, 1, 0)), did("workers_started", group(A, 1, 0))]),
    ("one_world_at_once", [did("workers_started", group(A, 1, 0)), did("workers_started", group(B, 2, 0))]),
    ("one_world_at_once", [did("workers_started", group(A, 1, 0)), sealed(2, B, C)]),
    ("survivors_keep_order", [sealed(1, A, B, C), sealed(2, C, A)]),
    ("membership_is_free", [*FAILURE_IN_ROUND_1, wrote(1, 1), sealed(2, A, C, restarts_used=1)]),
    ("membership_is_free", [*FAILURE_IN_ROUND_1, wrote(1, 0, FAILED)]),
    ("membership_is_free", [
        sealed(1, A, B), did("stop_ordered", 1), heard(A, messages.Failed(1, CRASH)), heard(A, join(A)),
        heard(B, join(B)), wrote(1, 1), sealed(2, A, B, restarts_used=1),
    ]),
    ("failures_are_charged", [*FAILURE_IN_ROUND_1, heard(B, join(B)), sealed(2, A, B)]),
    ("no_failure_is_forgotten", [
        sealed(1, A, B), did("failure_reported", A.key, 1), heard(A, join(A)), did("stop_ordered", 1),
    ]),
    ("root_cause", [
        sealed(1, A, B), heard(B, messages.Failed(1, ECHO)), heard(A, messages.Failed(1, CRASH)),
        did("stop_ordered", 1), heard(A, join(A)), heard(B, join(B)), wrote(1, 0, Outcome(End.FAILED, "", ECHO)),
    ]),
    ("success_is_unanimous", [
        sealed(1, A, B), did("workers_started", group(A, 1, 0)),
        did("workers_gone", group(A, 1, 0, has_succeeded=True)), wrote(1, 0, SUCCEEDED),
    ]),
    ("restarts_within_budget", [wrote(1), sealed(1, A, B), wrote(1, 2)]),
    ("restarts_within_budget", [wrote(1, 1), wrote(1, 2)]),
    ("restarts_within_budget", [sealed(1, A, B), sealed(2, A, B, restarts_used=1)]),
    ("one_outcome", [wrote(1, 0, Outcome(End.CLOSED, "")), wrote(1, 0, Outcome(End.CLOSED, "again"))]),
    ("one_outcome", [did("outcome_learned", SimpleNamespace(name="a"), SUCCEEDED)]),
    ("ended_run_stays_ended", [wrote(1, 0, Outcome(End.CLOSED, "")), sealed(2, A, B)]),
    ("ended_run_stays_ended", [
        did("end_taken_in", SimpleNamespace(name="a")), did("workers_started", group(A, 1, 0)),
    ]),
    ("only_misfits_are_refused", [
        did("refused", SimpleNamespace(name="a", participant=SimpleNamespace(settings=SETTINGS, facts=A)), "late"),
    ]),
    ("nobody_lost_without_reason", [calm, did("expelled", A.key)]),
    ("nobody_lost_without_reason", [calm, did("lease_ended", group(A, 1, 0))]),
]  # fmt: skip


ENDED = messages.Ended(SUCCEEDED)
RUNS = Snapshot(Memory(1), World(1, (A, B)))


def told(message: Any, snapshot: Snapshot | None, number: int = 1) -> Callable[[Checks], None]:
    return did("told", "a", Telling(9, number, A.key, message), snapshot)


STORIES += [
    ("past_terms_write_nothing", [did("leader_wrote", 9, 9, 1), did("leader_wrote", 9, 12, 2)]),
    ("past_terms_write_nothing", [did("leader_wrote", 12, 12, 1), did("leader_wrote", 9, 9, 2)]),
    ("nothing_is_undone", [did("leader_wrote", 9, 9, 2), did("leader_wrote", 9, 9, 1)]),
    ("nothing_is_undone", [did("statement_written", "a", 2), did("statement_written", "a", 1)]),
    ("tellings_are_backed", [told(ENDED, None)]),
    ("tellings_are_backed", [told(ENDED, RUNS)]),
    ("tellings_are_backed", [told(messages.Sealed(A.key, World(2, (A, B)).places()[0]), RUNS)]),
    ("tellings_are_backed", [told(messages.Sealed(A.key, World(1, (B, A)).places()[1]), RUNS)]),
    ("tellings_are_backed", [told(messages.Stop(1, "b joins"), RUNS)]),
    ("tellings_are_backed", [told(messages.Stop(2, "b joins"), RUNS)]),
    ("only_an_ended_run_is_forgotten", [did("run_forgotten", RUNS)]),
    ("tellings_are_numbered", [told(messages.Notice("one"), RUNS), told(messages.Notice("another"), RUNS)]),
]


@pytest.mark.parametrize(("rule", "story"), STORIES, ids=lambda each: each if isinstance(each, str) else "")
def test_the_rule_objects_at_the_last_step(rule: str, story: list[Callable[[Checks], None]]) -> None:
    """It stands alone here: others may object to the same thing."""
    checks = Checks(SETTINGS, lambda: 0.0, tuple(each for each in ETCD_RULES if name_of(each) == rule))
    for step in story[:-1]:
        step(checks)
    with pytest.raises(Violation) as caught:
        story[-1](checks)
    assert caught.value.checker == rule


def test_every_rule_has_a_story() -> None:
    assert {rule for rule, _ in STORIES} == {name_of(rule) for rule in ETCD_RULES}


def test_nobody_objects_to_a_run_that_goes_well() -> None:
    checks = Checks(SETTINGS, lambda: 0.0, ETCD_RULES)
    world = World(1, (A, B))
    story = [
        did("coordinator_started"), heard(A, join(A)), heard(B, join(B)), wrote(1), sealed(1, A, B),
        placed(A, world, 0), placed(B, world, 1),
        did("workers_started", group(A, 1, 0)), did("workers_started", group(B, 1, 1)),
        did("workers_gone", group(A, 1, 0)), did("failure_reported", A.key, 1),
        heard(A, messages.Failed(1, CRASH)), did("stop_ordered", 1), heard(A, join(A, CRASH)),
        did("workers_gone", group(B, 1, 1)), heard(B, join(B)), wrote(1, 1), wrote(2, 1),
        sealed(2, A, B, restarts_used=1),
        did("workers_started", group(A, 2, 0)), did("workers_started", group(B, 2, 1)),
        did("workers_gone", group(A, 2, 0, has_succeeded=True)), heard(A, messages.Succeeded(2)),
        did("workers_gone", group(B, 2, 1, has_succeeded=True)), heard(B, messages.Succeeded(2)),
        wrote(2, 1, SUCCEEDED), did("outcome_learned", SimpleNamespace(name="a"), SUCCEEDED),
        did("end_taken_in", SimpleNamespace(name="a")),
    ]  # fmt: skip
    for step in story:
        step(checks)


def test_a_member_that_a_new_leader_does_not_find_excuses_a_failure() -> None:
    checks = Checks(SETTINGS, lambda: 0.0)
    story = [
        sealed(1, A, B), heard(A, messages.Failed(1, CRASH)), did("stop_ordered", 1), heard(A, join(A)),
        heard(B, join(B)), did("leader_changed"), did("lease_expired", B.key), sealed(2, A, C),
    ]  # fmt: skip
    for step in story:
        step(checks)
