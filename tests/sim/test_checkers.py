"""Every rule objects to what it is there for, and to nothing in a run that goes well."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.failures.records import Failure
from holdfast.rendezvous.etcd.election import Leader
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import (
    Agreed,
    Chosen,
    Complete,
    End,
    Ended,
    Held,
    Memory,
    NodeFacts,
    Outcome,
    Sealed,
    Settings,
    SnapshotId,
    SnapshotPlan,
    Stop,
    World,
)
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from tests.promises import promise
from tests.sim.checkers import RULES, Checks, name_of
from tests.sim.engine import Violation

SETTINGS = Settings(min_nodes=2, max_nodes=3, snapshot_copies=1, policy=RestartPolicy(max_restarts=1))
A, B, C, D = (NodeFacts(name, address=name, port=1, snapshot_port=1) for name in "abcd")
CRASH = Failure("a", 0, 1, "", "it crashed")
ECHO = Failure("b", 1, 1, "", "connection closed", is_consequence=True)
FAILED = Outcome(End.FAILED, "no restarts are left", CRASH)
PLACE = World.of(1, 1, (A, B)).place_of(A.key)
LEADER = Leader("a", 1, "token", 1)
SNAPSHOT = SnapshotId(1, 1, 5, 2)
HELD, REST = Held(SNAPSHOT, ((0, 1),)), Held(SNAPSHOT, ((1, 1),))
STOP = Stop(1, "it crashed", is_failure=True)
SUCCEEDED = Outcome(End.SUCCEEDED, "all workers have succeeded")


def group(node: NodeFacts, round: int, rank: int, *, has_succeeded: bool = False, has_agreed: bool = False) -> Any:
    host, ended = SimpleNamespace(name=node.node_id), {"has_succeeded": has_succeeded, "has_agreed": has_agreed}
    return SimpleNamespace(host=host, node=node.node_id, round=round, rank=rank, **ended)


def join(node: NodeFacts, failure: Failure | None = None) -> Any:
    return protocol.Join(node, SETTINGS, PLACE, failure=failure)


def join_after(round: int) -> Any:
    return protocol.Join(A, SETTINGS, World.of(1, round, (A, C)).place_of(A.key))


def sealed(round: int, *members: NodeFacts, restarts_used: int = 0, **plan: Any) -> Callable[[Checks], None]:
    return lambda checks: checks.world_sealed(World.of(1, round, members, restarts_used, plan=SnapshotPlan(**plan)))


def heard(node: NodeFacts, message: Any) -> Callable[[Checks], None]:
    return lambda checks: checks.message_received(node.key, message)


def wrote(round: int, restarts_used: int = 0, outcome: Outcome | None = None) -> Callable[[Checks], None]:
    return lambda checks: checks.remembered(Memory(last_round=round, restarts_used=restarts_used, outcome=outcome))


def did(hook: str, *arguments: Any) -> Callable[[Checks], None]:
    return lambda checks: getattr(checks, hook)(*arguments)


def kept(name: str) -> Callable[[Checks], None]:
    return did("step_kept", name, SNAPSHOT)


def stored(node: NodeFacts, rank: int) -> Callable[[Checks], None]:
    return did("step_stored", node.node_id, SNAPSHOT, range(rank, rank + 1))


def placed(node: NodeFacts, world: World, rank: int) -> Callable[[Checks], None]:
    return lambda checks: checks.place_received(None, node.key, world.place_of(world.keys[rank]))


def calm(checks: Checks) -> None:
    checks.be_calm()


def coordinator(*, may_serve: bool = True) -> Any:
    return SimpleNamespace(
        name="c", is_up=True, local_now=0.0, office=SimpleNamespace(may_serve=lambda now: may_serve, leader=LEADER)
    )


def later(seconds: float) -> Callable[[Checks], None]:
    def pass_time(checks: Checks) -> None:
        for rule in checks.rules:
            rule.now = lambda: seconds

    return pass_time


def held_up(node: NodeFacts, *, free_for_s: float) -> Callable[[Checks], None]:
    host = SimpleNamespace(grace_s=8.0)
    return did("loop_held_up", SimpleNamespace(name=node.node_id, loop_free_for_s=free_for_s, host=host))


def decided(round: int) -> Callable[[Checks], None]:
    return lambda checks: checks.decided(Memory(last_round=round))


STOPPED = [sealed(1, A, B), did("stop_ordered", STOP)]
FAILURE_IN_ROUND_1 = [
    sealed(1, A, B), heard(A, protocol.Failed(1, CRASH)), did("stop_ordered", STOP), heard(A, join(A)),
]  # fmt: skip
STORIES: list[tuple[str, list[Callable[[Checks], None]]]] = [
    ("ranks_agree", [sealed(1, A, A)]),
    ("ranks_agree", [sealed(1, A, B), placed(B, World.of(1, 1, (B, A)), 0)]),
    ("ranks_agree", [sealed(1, A, B), placed(A, World.of(1, 1, (A, B)), 0), placed(B, World.of(1, 1, (A, B), 1), 1)]),
    ("rounds_rise", [sealed(2, A, B), sealed(2, A, C)]),
    ("rounds_rise", [sealed(2, A, B), sealed(1, A, B)]),
    ("rounds_rise", [wrote(2), wrote(1)]),
    ("size_within_bounds", [sealed(1, A)]),
    ("size_within_bounds", [sealed(1, A, B, C, D)]),
    ("one_round_per_node", [did("workers_started", group(A, 1, 0)), did("workers_started", group(A, 1, 0))]),
    ("one_world_at_once", [did("workers_started", group(A, 1, 0)), did("workers_started", group(B, 2, 0))]),
    ("one_world_at_once", [did("workers_started", group(A, 1, 0)), sealed(2, B, C)]),
    ("survivors_keep_order", [sealed(1, A, B, C), sealed(2, C, A)]),
    ("membership_is_free", [*FAILURE_IN_ROUND_1, wrote(1, 1)]),
    ("membership_is_free", [*FAILURE_IN_ROUND_1, wrote(1, 0, FAILED)]),
    ("membership_is_free", [
        sealed(1, A, B), did("stop_ordered", STOP), heard(A, protocol.Failed(1, CRASH)), heard(A, join(A)),
        heard(B, join(B)), wrote(1, 1),
    ]),
    ("failures_are_charged", [*FAILURE_IN_ROUND_1, heard(B, join(B)), sealed(2, A, B)]),
    ("no_failure_is_forgotten", [
        sealed(1, A, B), did("failure_reported", A.key, 1), heard(A, join(A)), did("stop_ordered", STOP),
    ]),
    ("root_cause", [
        sealed(1, A, B), heard(B, protocol.Failed(1, ECHO)), heard(A, protocol.Failed(1, CRASH)),
        did("stop_ordered", STOP), heard(A, join(A)), heard(B, join(B)), wrote(1, 0, Outcome(End.FAILED, "", ECHO)),
    ]),
    ("success_is_unanimous", [
        sealed(1, A, B), did("workers_started", group(A, 1, 0)),
        did("workers_gone", group(A, 1, 0, has_succeeded=True)), wrote(1, 0, SUCCEEDED),
    ]),
    ("restarts_within_budget", [wrote(1), sealed(1, A, B), wrote(1, 2)]),
    ("restarts_within_budget", [wrote(1, 1), wrote(1, 2)]),
    ("restarts_within_budget", [wrote(1), wrote(1, 0, Outcome(End.FAILED, "the 1 allowed restart is used up", CRASH))]),
    ("restarts_within_budget", [sealed(1, A, B), sealed(2, A, B, restarts_used=1)]),
    ("losses_are_bounded", [sealed(1, A, B), heard(A, join(A)), sealed(2, A, C), *[
        each for round in range(2, 22) for each in (heard(A, join_after(round)), sealed(round + 1, A, C))
    ]]),
    # A leave that was announced before the seal was decided excuses nothing.
    ("losses_are_bounded", [
        sealed(1, A, B), heard(A, join(A)), heard(C, protocol.Left()), decided(2), sealed(2, A, C), *[
        each for round in range(2, 22) for each in (heard(A, join_after(round)), sealed(round + 1, A, C))
    ]]),
    ("losses_are_bounded", [sealed(1, A, B), wrote(1, 0, Outcome(End.FAILED, "used up (--loss-limit 20)"))]),
    ("admitted_together", [
        sealed(1, A), later(9.0), heard(B, protocol.Join(B, SETTINGS)), later(13.9),
        did("stop_ordered", Stop(1, "b joins")),
    ]),
    ("one_step_for_all", [did("snapshots_held", "a", (HELD, REST)), sealed(1, A)]),
    ("one_step_for_all", [sealed(1, A, chosen=Chosen(SNAPSHOT))]),
    ("one_step_for_all", [
        did("snapshots_gained", "a", (HELD, REST)), sealed(1, A, chosen=Chosen(SnapshotId(1, 1, 6, 2))),
    ]),
    ("one_step_for_all", [
        did("snapshots_held", "a", (HELD, REST)),
        sealed(1, A, B, chosen=Chosen(SNAPSHOT), fetching={1: Chosen(None)}),
    ]),
    ("one_step_for_all", [
        did("snapshots_held", "a", (HELD,)), did("snapshots_held", "b", (REST,)),
        sealed(1, B, A, chosen=Chosen(SNAPSHOT)),
    ]),
    ("one_step_for_all", [
        did("committed", SNAPSHOT, 0), did("rank_loaded", PLACE, 0, SNAPSHOT, 0),
        did("rank_loaded", PLACE, 1, None, 1),
    ]),
    ("one_step_for_all", [
        did("committed", SNAPSHOT, 0), did("rank_loaded", PLACE, 1, SNAPSHOT, 1),
    ]),
    ("one_step_for_all", [did("source_is_empty", "a", 0, SNAPSHOT)]),
    ("agreed_means_kept", [sealed(1, A, B), kept("a"), did("snapshot_ordered", Agreed(1, 5))]),
    ("agreed_means_kept", [
        sealed(1, A, B), kept("a"), kept("b"), did("snapshot_ordered", Agreed(1, 5)), stored(A, 0),
        did("snapshot_ordered", Complete(1, SNAPSHOT.order)),
    ]),
    ("last_complete_survives", [
        stored(A, 0), stored(B, 1), did("snapshot_ordered", Complete(1, SNAPSHOT.order)), sealed(2, A, B),
    ]),
    ("last_complete_survives", [
        stored(A, 0), stored(B, 1), did("copied", "c", SNAPSHOT, 0), did("snapshot_ordered", Complete(1,
        SNAPSHOT.order)), sealed(2, C, B, chosen=Chosen(SnapshotId(1, 1, 4, 2))),
    ]),
    ("last_complete_survives", [
        sealed(1, A, B), stored(A, 0), stored(B, 1), did("copied", "b", SNAPSHOT, 0), did("copied", "b", SNAPSHOT, 1),
        did("snapshot_ordered", Complete(1, SNAPSHOT.order)),
    ]),
    ("one_outcome", [wrote(1, 0, Outcome(End.CLOSED, "")), wrote(1, 0, Outcome(End.CLOSED, "again"))]),
    ("notices_end_runs", [sealed(1, A, B), wrote(1, 0, Outcome(End.CLOSED, "", is_notice=True))]),
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
    ("nobody_lost_without_reason", [calm, *STOPPED, later(15.0), did("expelled", A.key)]),
    ("nobody_lost_without_reason", [calm, *STOPPED, later(14.0), held_up(A, free_for_s=-1.0), did("expelled", A.key)]),
    ("nobody_lost_without_reason", [calm, *STOPPED, later(15.0), held_up(B, free_for_s=-1.0), did("expelled", A.key)]),
    ("nobody_lost_without_reason", [calm, *STOPPED, later(15.0), held_up(A, free_for_s=9.0), did("expelled", A.key)]),
    ("nobody_lost_without_reason", [
        calm, *STOPPED, later(15.0), held_up(A, free_for_s=8.9), did("expelled", A.key),
        did("lease_ended", group(A, 1, 0)), sealed(2, A, B), did("workers_started", group(A, 2, 0)),
        did("lease_ended", group(A, 2, 0)),
    ]),
    ("writes_are_in_turn", [did("leader_written", LEADER), did("leader_written", LEADER)]),
    ("writes_are_in_turn", [
        did("leader_written", LEADER), did("leader_written", Leader("b", 1, "other", 2)),
        did("leader_written", Leader("a", 1, "token", 1, turn=1)),
    ]),
    ("one_in_office", [
        did("leader_written", LEADER), did("elected", coordinator()), did("elected", coordinator()),
    ]),
    ("only_in_office", [did("told", coordinator(may_serve=False), "anything", Memory())]),
    ("tellings_are_backed", [did("told", coordinator(), Ended(SUCCEEDED), Memory())]),
    ("tellings_are_backed", [did("told", coordinator(), Sealed(A.key, PLACE), None)]),
    ("stopping_is_bounded", [did("stepped", True), later(82.0), did("stepped", True)]),
]  # fmt: skip


@promise("simulation.checkers-fails-rule-broken: Each of these checkers fails when its rule is broken.")
@pytest.mark.parametrize(("rule", "story"), STORIES, ids=lambda each: each if isinstance(each, str) else "")
def test_the_rule_objects_at_the_last_step(rule: str, story: list[Callable[[Checks], None]]) -> None:
    """It stands alone here: others may object to the same thing."""
    checks = Checks(SETTINGS, lambda: 0.0, tuple(each for each in RULES if name_of(each) == rule))
    for step in story[:-1]:
        step(checks)
    with pytest.raises(Violation) as caught:
        story[-1](checks)
    assert caught.value.checker == rule


def test_a_leave_between_the_decision_to_seal_and_the_write_is_no_loss() -> None:
    checks = Checks(SETTINGS, lambda: 0.0, RULES)
    for round in range(1, 30):
        for step in (decided(round), heard(C, protocol.Left()), sealed(round, A, C), heard(A, join_after(round))):
            step(checks)


def test_news_that_is_on_its_way_when_the_world_is_sealed_may_count_or_not() -> None:
    checks = Checks(SETTINGS, lambda: 0.0, tuple(each for each in RULES if name_of(each) == "one_step_for_all"))
    for step in (did("snapshots_held", "a", (HELD,)), did("snapshots_gained", "a", (HELD, REST))):
        step(checks)
    for round, chosen in ((1, Chosen(None, problem="no node has rank 1")), (2, Chosen(SNAPSHOT))):
        sealed(round, A, chosen=chosen)(checks)


def test_a_larger_world_is_told_again_of_a_snapshot_that_was_complete_in_a_smaller_one() -> None:
    checks = Checks(SETTINGS, lambda: 0.0, tuple(each for each in RULES if name_of(each) == "last_complete_survives"))
    told, told_again = (did("snapshot_ordered", Complete(round, SNAPSHOT.order)) for round in (1, 3))
    older = Chosen(SnapshotId(1, 1, 4, 2))
    for step in (stored(A, 0), stored(A, 1), told, sealed(2, B, C, chosen=older), sealed(3, A, B), told_again):
        step(checks)


def test_every_rule_has_a_story() -> None:
    assert {rule for rule, _ in STORIES} == {name_of(rule) for rule in RULES}


def test_nobody_objects_to_a_run_that_goes_well() -> None:
    checks = Checks(SETTINGS, lambda: 0.0, RULES)
    world = World.of(1, 1, (A, B))
    story = [
        did("coordinator_started", None), heard(A, join(A)), heard(B, join(B)), wrote(1), sealed(1, A, B),
        placed(A, world, 0), placed(B, world, 1),
        did("workers_started", group(A, 1, 0)), did("workers_started", group(B, 1, 1)),
        did("workers_gone", group(A, 1, 0)), did("failure_reported", A.key, 1),
        heard(A, protocol.Failed(1, CRASH)), did("stop_ordered", STOP), heard(A, join(A, CRASH)),
        did("workers_gone", group(B, 1, 1)), heard(B, join(B)), wrote(1, 1), wrote(2, 1),
        sealed(2, A, B, restarts_used=1),
        did("workers_started", group(A, 2, 0)), did("workers_started", group(B, 2, 1)),
        did("workers_gone", group(A, 2, 0, has_succeeded=True)), heard(A, protocol.Succeeded(2)),
        did("workers_gone", group(B, 2, 1, has_succeeded=True)), heard(B, protocol.Succeeded(2)),
        wrote(2, 1, SUCCEEDED), did("outcome_learned", SimpleNamespace(name="a"), SUCCEEDED),
        did("end_taken_in", SimpleNamespace(name="a")),
    ]  # fmt: skip
    for step in story:
        step(checks)
