"""Who is there, who was silent for the longest time, and who is about to be lost."""

from __future__ import annotations

import pytest

from holdfast.rendezvous.roster import Node, Roster
from holdfast.rendezvous.vocabulary import Stage
from holdfast.rendezvous.world import NodeFacts


def add(roster: Roster, name: str, now: float, stage: Stage = Stage.WAITING, rank: int | None = None) -> Node:
    node = roster.add(NodeFacts(name, requested_rank=rank), stage, now)
    roster.check()
    return node


@pytest.fixture
def roster() -> Roster:
    """a, b and c have arrived one after the other."""
    roster = Roster()
    for at, name in enumerate("abc"):
        add(roster, name, float(at))
    return roster


def line(roster: Roster) -> str:
    """The nodes as they stand, the longest silent first."""
    return "".join(node.facts.node_id for node in roster)


def arrived(roster: Roster) -> str:
    return "".join(node.facts.node_id for node in roster.in_order_of_arrival())


def test_nobody() -> None:
    roster = Roster()
    assert (len(roster), roster.first(), roster.next_drop_at(), roster.get("a/0")) == (0, None, None, None)
    assert (roster.open_keys(), roster.dropped_by(9.0), roster.claimants(0)) == ((), [], [])
    roster.remove("a/0")
    roster.hear("a/0", 1.0)
    roster.check()


def test_the_longest_silent_is_first(roster: Roster) -> None:
    assert line(roster) == "abc"
    roster.hear("a/0", 5.0)
    assert line(roster) == "bca"
    assert (first := roster.first()) is not None
    assert (first.key, first.heard_at) == ("b/0", 1.0)
    assert roster["a/0"].heard_at == 5.0
    assert arrived(roster) == "abc", "to be heard of is not to arrive"


def test_who_joins_again_keeps_its_place_in_the_order_of_arrival(roster: Roster) -> None:
    add(roster, "a", 9.0)
    assert line(roster) == "bca"
    assert arrived(roster) == "abc"
    roster.remove("a/0")
    add(roster, "a", 10.0)
    assert arrived(roster) == "bca", "one that was gone has lost it"


def test_only_those_who_wait_are_waiting(roster: Roster) -> None:
    add(roster, "r", 3.0, Stage.RUNNING)
    assert roster.waiting == {"a/0", "b/0", "c/0"}
    add(roster, "a", 4.0, Stage.RUNNING)
    roster.remove("b/0")
    assert roster.waiting == {"c/0"}
    assert (len(roster), "b/0" in roster, "r/0" in roster) == (3, False, True)


def test_one_whose_connection_is_closed_does_not_wait_and_is_lost_in_time(roster: Roster) -> None:
    roster.drop(roster["b/0"], 7.0)
    roster.drop(roster["a/0"], 6.0)
    roster.check()
    assert roster.waiting == {"c/0"}
    assert roster.open_keys() == ("c/0",)
    assert roster.next_drop_at() == 6.0
    assert [roster.dropped_by(now) for now in (5.9, 6.0, 7.0)] == [[], ["a/0"], ["a/0", "b/0"]]


@pytest.mark.parametrize("how", ["reopened", "added", "removed"])
def test_one_that_is_back_or_out_has_no_time_to_be_lost_at(roster: Roster, how: str) -> None:
    roster.drop(roster["a/0"], 6.0)
    roster.drop(roster["b/0"], 7.0)
    match how:
        case "reopened":
            roster.reopen(roster["a/0"], 5.0)
            assert (roster["a/0"].is_open, line(roster)) == (True, "bca")
        case "added":
            add(roster, "a", 5.0)
        case "removed":
            roster.remove("a/0")
    roster.check()
    assert roster.next_drop_at() == 7.0
    assert roster.dropped_by(100.0) == ["b/0"]


def test_closed_again_it_is_lost_at_the_later_time(roster: Roster) -> None:
    roster.drop(roster["a/0"], 6.0)
    roster.reopen(roster["a/0"], 5.0)
    roster.drop(roster["a/0"], 9.0)
    roster.check()
    assert (roster.next_drop_at(), roster.dropped_by(6.0), roster.dropped_by(9.0)) == (9.0, [], ["a/0"])


def test_claims_on_ranks() -> None:
    roster = Roster()
    add(roster, "a", 0.0, rank=1)
    add(roster, "b", 0.0, rank=1)
    add(roster, "c", 0.0, rank=0)
    add(roster, "d", 0.0)
    assert sorted(node.key for node in roster.claimants(1)) == ["a/0", "b/0"]
    roster.remove("a/0")
    add(roster, "c", 1.0, rank=2)
    assert [[node.key for node in roster.claimants(rank)] for rank in range(3)] == [[], ["b/0"], ["c/0"]]
