"""Lost nodes: how often the run goes on, and when a host that was lost is admitted again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from holdfast.rendezvous.membership.losses import Losses
from holdfast.rendezvous.membership.model import Memory, NodeFacts, Place, Settings, Stage
from holdfast.rendezvous.membership.nodes import NodeTable
from holdfast.rendezvous.membership.protocol import Join
from holdfast.rendezvous.membership.restart_policy import Advance, Budget, GiveUp, Restart, RestartPolicy
from tests.promises import promise, proves

LIMIT_2 = RestartPolicy(loss_limit=2, loss_window_s=100.0)
USED_UP = "the 2 allowed restarts after lost nodes within 100 s are used up (--loss-limit 2)"
MOVED = Advance(has_moved=True)
AGAIN = "1 restart without any progress (--no-progress-limit 1)"

# When rounds end that have lost a node, with how far they came; why the last of them ends the run.
ROUNDS: dict[str, tuple[RestartPolicy, list[tuple[float, Advance | None]], str]] = {
    "as many as allowed": (LIMIT_2, [(0.0, None), (1.0, None)], ""),
    "one too many": (LIMIT_2, [(0.0, None), (1.0, None), (99.0, None)], USED_UP),
    "the first is too old": (LIMIT_2, [(0.0, None), (1.0, None), (100.0, None), (101.0, None)], ""),
    "progress begins the count anew": (LIMIT_2, [(0.0, None), (1.0, None), (2.0, MOVED), (3.0, None)], ""),
    "then it counts from there": (LIMIT_2, [(0.0, None), (1.0, None), (2.0, MOVED), (3.0, None), (4.0, None)], USED_UP),
    "none at all": (
        RestartPolicy(loss_limit=0), [(0.0, MOVED)], "no restarts after lost nodes are allowed (--loss-limit 0)"
    ),
    "one": (
        RestartPolicy(loss_limit=1), [(0.0, None), (1.0, None)],
        "the 1 allowed restart after lost nodes within 3600 s is used up (--loss-limit 1)",
    ),
    "the limit of rounds without progress": (RestartPolicy(no_progress_limit=1), [(0.0, None), (5.0, None)], AGAIN),
    "no limit of rounds without progress": (RestartPolicy(), [(float(at), None) for at in range(20)], ""),
}  # fmt: skip


@promise("""nodes.most-loss-limit-restarts: At most `--loss-limit` restarts (20) within `--loss-window` (1 h) follow
    lost or expelled nodes; then the run ends on all nodes with exit code 93. Announced leaves do not count, also if the
    node is killed before it is gone, and a round with progress begins the count anew. `--no-progress-limit` counts
    rounds with lost nodes, too. The counts survive the coordinator.""")
@pytest.mark.parametrize("is_replaced", [False, True], ids=["", "each round another coordinator"])
@pytest.mark.parametrize("name", ROUNDS)
def test_how_often_the_run_goes_on(name: str, is_replaced: bool) -> None:
    policy, rounds, reason = ROUNDS[name]
    losses, budget = Losses(0.0, Memory()), Budget(0.0)
    for number, (at, advance) in enumerate(rounds, 1):
        budget.note(advance)
        decision = losses.judge(policy, budget, at)
        is_last = number == len(rounds)
        assert decision == (GiveUp(reason, is_final=True) if is_last and reason else Restart(0.0, is_charged=False))
        budget.end_round()
        if is_replaced:
            losses = Losses(at, losses.noted_in(Memory(), policy, at))


PLACE = Place(1, 7, 0, 2)


def held_s(losses: Losses, now: float, host: str = "h", **join: Any) -> float:
    return max(0.0, losses.held_until(Join(NodeFacts("n", host=host), Settings(), **join), PLACE.order, now) - now)


def lost(*times: float, host: str = "h") -> Losses:
    """In a round each."""
    losses = Losses(0.0, Memory())
    for round, at in enumerate(times):
        losses.lose(host, round, at)
    return losses


@promise("""nodes.host-lost-second-time: A host that is lost for the second time within an hour waits before its next
    node is admitted: 10 s, then twice as long each time, up to 10 min. The node is told why and `holdfast status` names
    it. It never holds up a round that can form without it; if there are too few nodes without it, the others wait for
    it, and the join timeout names it. Many nodes of a host that are lost together are one loss, and its other nodes do
    not wait. If all nodes of a round are lost, no host is to blame. A host is its name, on Kubernetes the name of the
    machine.""")
@pytest.mark.parametrize(
    ("count", "delay_s"), [(0, 0), (1, 0), (2, 10), (3, 20), (4, 40), (7, 320), (8, 600), (9, 600), (100, 600)]
)
def test_a_host_waits_longer_each_time(count: int, delay_s: float) -> None:
    losses = lost(*map(float, range(count)))
    assert held_s(losses, count - 1.0) == delay_s
    assert held_s(losses, count - 1.0, "another") == 0.0
    memory = losses.noted_in(Memory(), RestartPolicy(), count - 1.0)
    assert held_s(Losses(50.0, memory), 50.0) == delay_s, "by the clock of the next coordinator"


def test_the_delay_counts_from_the_last_loss() -> None:
    losses = lost(0.0, 100.0)
    assert [held_s(losses, at) for at in (100.0, 104.0, 110.0, 500.0)] == [10.0, 6.0, 0.0, 0.0]


def test_losses_are_forgotten_after_an_hour() -> None:
    losses = lost(0.0, 1.0, 3600.0)
    assert held_s(losses, 3600.0) == 10.0, "the first of the three is too old"
    assert losses.noted_in(Memory(), RestartPolicy(), 3601.0).host_loss_ages_s == (("h", (1.0,)),)
    assert losses.noted_in(Memory(), RestartPolicy(), 9999.0).host_loss_ages_s == ()


@proves("nodes.host-lost-second-time")
def test_many_nodes_of_a_host_are_lost_once_in_a_round() -> None:
    losses = Losses(0.0, Memory())
    for at in range(8):
        losses.lose("h", 1, float(at))
    assert held_s(losses, 8.0) == 0.0
    losses.lose("h", 2, 9.0)
    assert held_s(losses, 9.0) == 10.0


@proves("nodes.host-lost-second-time")
def test_no_host_is_to_blame_if_all_members_of_a_round_were_lost() -> None:
    losses, nodes = Losses(0.0, Memory()), NodeTable()
    for round, hosts in ((1, "hg"), (2, "h"), (3, "hgf")):
        for host in hosts:
            losses.lose(host, round, 10.0 * round)
    for host, until in (("h", 50.0), ("g", 40.0), ("f", 30.0)):
        nodes.add(NodeFacts(f"n{host}", host=host), Stage.WAITING, 30.0, until)
    losses.forgive(3, nodes, 30.0)
    nodes.check()
    assert (nodes.held, nodes.waiting_keys()) == ({}, ("nf/0", "ng/0", "nh/0"))
    assert dict(losses.noted_in(Memory(), RestartPolicy(), 30.0).host_loss_ages_s) == {"g": (20.0,), "h": (20.0, 10.0)}
    losses.lose("g", 4, 40.0)
    assert [held_s(losses, 40.0, host) for host in "hgf"] == [0.0, 10.0, 0.0]


@proves("nodes.host-lost-second-time")
def test_a_node_that_was_there_until_the_end_of_the_round_does_not_wait() -> None:
    """It is on a host of which other nodes were lost."""
    losses = lost(0.0, 1.0)
    assert held_s(losses, 1.0, place=PLACE) == 0.0
    assert held_s(losses, 1.0, place=PLACE, has_lost_place=True) == 10.0
    assert held_s(losses, 1.0, place=replace(PLACE, round=6)) == 10.0


def test_a_node_that_does_not_name_its_host_does_not_wait() -> None:
    assert held_s(lost(0.0, 1.0, host=""), 1.0, "") == 0.0


def test_the_hosts_that_were_lost_last_are_remembered() -> None:
    losses = Losses(0.0, Memory())
    for number in range(100):
        for round in (2 * number, 2 * number + 1):
            losses.lose(f"h{number}", round, 1.0)
    assert [held_s(losses, 1.0, host) for host in ("h35", "h36", "h99")] == [0.0, 10.0, 10.0]
    memory = losses.noted_in(Memory(), RestartPolicy(), 1.0)
    assert len(memory.host_loss_ages_s) == 64
    assert msgspec.convert(msgspec.to_builtins(memory), Memory) == memory


@pytest.mark.parametrize(("count", "times"), [(2, "2 times"), (8, "at least 8 times")])
def test_why_a_node_waits(count: int, times: str) -> None:
    losses, nodes = lost(*([0.0] * count)), NodeTable()
    nodes.add(NodeFacts("n", host="h"), Stage.WAITING, 4.0, 10.0)
    why = f"stands by for 6 s more, because host h was lost {times} in the last hour"
    assert losses.words(nodes, 4.0) == {"n/0": f"n {why}"}
    assert losses.words(nodes, 4.0, "this node") == {"n/0": f"this node {why}"}
