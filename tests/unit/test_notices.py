"""Nodes that go away at a known time: what the run's machine makes of it, and what a node says to coordinators."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from holdfast.rendezvous.membership.model import (
    End,
    Ended,
    GoingAway,
    NodeFacts,
    NoticeRequest,
    Outcome,
    Sealed,
    Settings,
    Stage,
    Stop,
)
from holdfast.rendezvous.membership.node import GiveNotice, Pushed, Welcomed
from holdfast.rendezvous.membership.notices import matching
from holdfast.rendezvous.membership.phases import Membership, Phase
from holdfast.rendezvous.membership.protocol import (
    From,
    Leaving,
    NoticeRequested,
    Return,
    Succeeded,
    Tell,
    TimePassed,
)
from holdfast.rendezvous.membership.run_status import run_status
from tests.promises import promise, proves
from tests.unit import test_node as nodes
from tests.unit.test_phases import PAIR, UP_TO_2, UP_TO_3, closed, facts, failed, joined, key, left, settings, succeeded

IN_2M = NoticeRequest(120.0, "spot")
WITHDRAWN = NoticeRequest(None)


def notice(name: str, request: NoticeRequest = IN_2M) -> From:
    return From(key(name), GiveNotice(request))


def agreed(name: str, round: int = 1) -> From:
    return From(key(name), Succeeded(round, has_agreed=True))


class Story:
    """A run whose nodes have just begun round 1, and what it tells them."""

    def __init__(self, of: Settings = UP_TO_2, names: str = "a b", **fields: Any) -> None:
        self.of, self.run, self.now = of, Membership(0.0), 0.0
        for name in names.split():
            self.step(joined(name, of, **fields), 0.0)
        self.step(TimePassed(), 5.0)
        assert self.run.phase is Phase.RUNNING

    def step(self, event: Any, at: float) -> list[Tell]:
        self.now = at
        told = [each for each in self.run.step(event, at) if isinstance(each, Tell)]
        self.run.check()
        return told

    def rejoins(self, name: str, at: float, round: int = 1, **fields: Any) -> list[Tell]:
        world = self.run.world
        place = world.place_of(key(name)) if world is not None else fields.pop("place", round)
        return self.step(joined(name, self.of, place, **fields), at)


def going(told: list[Tell]) -> dict[str, GoingAway]:
    return {each: tell.message for tell in told if isinstance(tell.message, GoingAway) for each in tell.keys}


def ends(told: list[Tell]) -> list[Outcome]:
    return [tell.message.outcome for tell in told if isinstance(tell.message, Ended)]


def stops(told: list[Tell]) -> list[str]:
    return [tell.message.reason for tell in told if isinstance(tell.message, Stop)]


# All nodes are told.


@promise("""notice.all-nodes-told: A notice for one node is told to all nodes of the run, members and standbys, with the
    time that is left.""")
def test_all_nodes_are_told_how_long_it_is() -> None:
    story = Story(UP_TO_2, "a b")
    story.step(joined("c", UP_TO_2), 6.0)
    told = going(story.step(notice("b"), 10.0))
    others = GoingAway(120.0, None, False, ("b",), 1, "spot")
    assert told == {"a/0": others, "c/0": others, "b/0": replace(others, own_left_s=120.0)}
    assert story.run.phase is Phase.RUNNING
    assert going(story.step(joined("d", UP_TO_2), 30.0)) == {"d/0": replace(others, left_s=100.0)}, (
        "a late one hears it"
    )


def test_the_whole_run() -> None:
    story = Story()
    told = going(story.step(NoticeRequested(replace(IN_2M, is_whole_run=True)), 10.0))
    assert told == dict.fromkeys(("a/0", "b/0"), GoingAway(120.0, 120.0, True, (), 2, "spot"))


def test_a_notice_of_a_whole_day_can_be_sent() -> None:
    """Sums of times are not exact, and no receiver takes more than a day."""
    now = 84743.374
    assert (now + 86400.0) - now > 86400.0
    of, run = settings(2, 2), Membership(now)
    run.step(joined("a", of), now)
    told = going([each for each in run.step(notice("a", NoticeRequest(86400.0)), now) if isinstance(each, Tell)])
    assert (told["a/0"].left_s, told["a/0"].own_left_s) == (86400.0, 86400.0)


@promise("""notice.repeated-forward-only: A second notice for a node can bring its time forward, not back; after a
    withdrawal any time can be given.""")
def test_a_second_notice_brings_the_time_forward_only() -> None:
    story = Story()
    story.step(notice("b"), 10.0)
    later = going(story.step(notice("b", NoticeRequest(300.0)), 20.0))
    assert later["b/0"].own_left_s == 110.0
    sooner = going(story.step(notice("b", NoticeRequest(5.0, "now really")), 30.0))
    assert (sooner["b/0"].own_left_s, sooner["b/0"].reason) == (5.0, "now really")
    assert going(story.step(notice("b", WITHDRAWN), 31.0)) == dict.fromkeys(("a/0", "b/0"), GoingAway())
    assert going(story.step(notice("b", NoticeRequest(300.0)), 32.0))["b/0"].own_left_s == 300.0


def test_two_nodes_at_once_and_one_withdrawal() -> None:
    story = Story(UP_TO_3, "a b c")
    story.step(notice("c", NoticeRequest(60.0, "later")), 10.0)
    assert story.step(notice("b", NoticeRequest(30.0, "sooner")), 10.1) == [], "not more than twice a second"
    assert story.run.next_deadline() == 10.5
    told = going(story.step(TimePassed(), 10.5))
    assert (told["a/0"].nodes, told["a/0"].node_count, told["a/0"].reason) == (("b", "c"), 2, "sooner")
    assert [round(told[each].own_left_s or 0, 3) for each in ("b/0", "c/0")] == [29.6, 59.5]
    told = going(story.step(notice("b", WITHDRAWN), 11.0))
    assert (told["a/0"].nodes, told["b/0"].own_left_s, told["c/0"].own_left_s) == (("c",), None, 59.0)


def test_thousands_of_nodes_get_the_same_signal() -> None:
    """The names are bounded, and the nodes are told twice."""
    count, run = 4000, Membership(0.0)
    for each in range(count):
        run.step(joined(f"n{each}", settings(count, count)), 0.0)
    told = [command for each in range(count) for command in run.step(notice(f"n{each}"), 10.0)]
    assert len(told) == 2
    all_told = going([each for each in run.step(TimePassed(), 10.5) if isinstance(each, Tell)])
    assert len(all_told) == count
    assert (len(all_told["n7/0"].nodes), all_told["n7/0"].node_count) == (16, count)


def test_an_event_costs_no_more_if_many_nodes_stay() -> None:
    """While a round is formed, each of them joins."""

    def calls(count: int) -> int:
        of, run, made = settings(count + 2, count + 2), Membership(0.0), list[str]()
        for each in range(count):
            run.step(joined(f"n{each}", of), 0.0)
        run.step(notice("n0"), 1.0)
        sys.setprofile(lambda frame, event, _: made.append(event))
        try:
            run.step(joined("last", of), 2.0)
        finally:
            sys.setprofile(None)
        return len(made)

    assert calls(200) == calls(20)


def test_after_the_end_and_from_strangers() -> None:
    story = Story()
    assert story.step(notice("x"), 10.0) == []
    story.step(succeeded("a"), 11.0)
    assert ends(story.step(succeeded("b"), 11.0))
    assert story.step(notice("b"), 12.0) == story.step(NoticeRequested(IN_2M, ("b",)), 12.0) == []


@pytest.mark.parametrize(
    ("name", "found"), [("b", ["b"]), ("host1", ["a"]), ("1", ["b"]), ("7", []), ("c", [])], ids=str
)
def test_which_nodes_are_meant(name: str, found: list[str]) -> None:
    story = Story()
    story.run.nodes["a/0"].facts = facts("a", host="host1")
    assert story.run.world is not None
    assert matching(name, story.run.nodes.values(), story.run.world.ranks) == found


# What follows.


@promise("""notice.leave-uncounted: A node that leaves after a notice costs no restart, also with --max-restarts 0, and
    the others form the next round at once.""")
def test_the_node_leaves_and_the_others_go_on() -> None:
    story = Story()
    story.step(notice("b"), 10.0)
    assert stops(story.step(From("b/0", Leaving()), 100.0)) == ["b leaves"]
    story.rejoins("a", 101.0)
    told = story.step(left("b"), 102.0)
    assert [type(each.message) for each in told][-1] is Sealed
    assert going(told) == {"a/0": GoingAway()}, "its workers must not start with a notice that has passed"
    assert (story.run.round, story.run.restarts_used) == (2, 0)


@promise("""notice.early-loss-uncounted: If the machine is taken before its time, that is no lost node: no restart is
    charged, and --loss-limit does not count it.""")
def test_a_machine_that_goes_early_is_not_lost() -> None:
    story = Story()
    story.step(notice("b"), 10.0)
    story.step(closed("b"), 20.0)
    (reason,) = stops(story.step(TimePassed(), 40.0))
    assert "b is lost" in reason
    story.rejoins("a", 41.0)
    assert (story.run.round, story.run.restarts_used) == (2, 0)
    assert run_status("x", story.run, 41.0).history.restarts["node lost"] == 0


@promise("""notice.too-few-ends-95: If the nodes that stay are fewer than `--nnodes` needs, the run ends on all nodes
    with exit code 95.""")
def test_too_few_stay() -> None:
    story = Story(PAIR)
    story.step(notice("b"), 10.0)
    story.step(From("b/0", Leaving()), 100.0)
    story.rejoins("a", 101.0)
    (outcome,) = ends(story.step(left("b"), 102.0))
    assert (outcome.end, outcome.is_notice) == (End.CLOSED, True)
    assert outcome.reason == "b goes away: spot; --nnodes needs at least 2 nodes"


def test_a_leave_without_notice_does_not_end_the_run() -> None:
    story = Story(PAIR)
    story.step(From("b/0", Leaving()), 100.0)
    story.rejoins("a", 101.0)
    assert ends(story.step(left("b"), 102.0)) == []
    assert story.run.phase is Phase.FORMING


def test_the_notice_of_a_standby_does_not_end_the_run_when_a_member_is_lost() -> None:
    story = Story(PAIR)
    story.step(joined("c", PAIR), 6.0)
    story.step(notice("c"), 10.0)
    story.step(left("c"), 10.1)
    story.step(closed("b"), 20.0)
    story.step(TimePassed(), 40.0)
    story.rejoins("a", 41.0)
    assert story.run.phase is Phase.FORMING


def test_a_whole_run_whose_nodes_all_leave_at_once_has_ended() -> None:
    """Else a run that is started again under the id would hear of the old notice."""
    story = Story()
    story.step(NoticeRequested(replace(IN_2M, is_whole_run=True)), 10.0)
    for name in "ab":
        story.step(From(key(name), Leaving()), 100.0)
    for name in "ab":
        story.step(left(name), 101.0)
    outcome = story.run.outcome
    assert outcome is not None
    assert (outcome.is_notice, outcome.reason) == (True, "the whole run goes away: spot")


@promise("""notice.no-place-in-new-round: A node that is to go gets no place in a new round; after a failure the run
    goes on without it.""")
def test_a_node_that_goes_gets_no_place() -> None:
    story = Story(settings(1, 2, max_restarts=1))
    story.step(notice("b"), 10.0)
    story.step(failed("a"), 20.0)
    story.rejoins("a", 21.0)
    told = story.rejoins("b", 21.0)
    assert {each.keys for each in told if isinstance(each.message, Sealed)} == {("a/0",)}
    assert story.run.restarts_used == 1, "the failure was one, whoever goes later"


def test_a_newcomer_under_notice_does_not_stop_a_round() -> None:
    story = Story(UP_TO_2, "a")
    story.run.notices.take(IN_2M, ("b",), 5.0)
    told = story.step(joined("b", UP_TO_2), 6.0)
    assert stops(told) == []
    assert going(told)["b/0"].own_left_s == 119.0


# Workers that have saved their state.


@promise("""notice.agreed-95: While a notice stands, a worker that exits with 95 has saved its state. When the workers
    of all nodes have ended, the next round begins without the nodes that go; nothing is charged.""")
def test_all_nodes_agree() -> None:
    story = Story()
    story.step(notice("b"), 10.0)
    assert story.step(agreed("a"), 11.0) == [], "the others may still be writing"
    (reason,) = stops(story.step(agreed("b"), 15.0))
    assert reason == "the workers have saved their state after a notice, and have ended"
    story.step(left("b"), 15.1)
    story.rejoins("a", 15.2, place=1)
    assert (story.run.round, story.run.restarts_used, story.run.outcome) == (2, 0, None)


def test_one_node_is_done_and_the_other_has_agreed() -> None:
    story = Story()
    story.step(succeeded("a"), 11.0)
    assert stops(story.step(agreed("b"), 12.0))
    assert story.run.outcome is None


def test_a_failure_among_workers_that_agree_is_not_charged() -> None:
    story = Story(PAIR)
    story.step(agreed("a"), 11.0)
    story.step(failed("b"), 12.0)
    story.rejoins("b", 13.0)
    assert story.run.phase is Phase.FORMING


def test_a_new_coordinator_hears_that_a_node_has_agreed() -> None:
    """Otherwise it would take the run for done."""
    old = Story()
    run = Membership(0.0, memory=old.run._memory(6.0), age_s=0.0)
    assert old.run.world is not None
    for name in "ab":
        place = old.run.world.place_of(key(name))
        run.step(From(key(name), Return(facts(name), UP_TO_2, place, Stage.FINISHED, has_agreed=True)), 1.0)
    assert (run.phase, run.outcome) == (Phase.FORMING, None)


# A node's side.


def test_a_node_tells_its_coordinator() -> None:
    node = nodes.member()
    assert nodes.said(node.step(GiveNotice(IN_2M), 11.0)) == [GiveNotice(IN_2M)]
    heard = GoingAway(120.0, 120.0, False, ("n",), 1, "spot")
    assert node.step(Pushed(heard), 11.1) == [heard]


@promise("""notice.coordinator-away: A node that cannot reach its coordinator acts on a notice alone, and tells the
    coordinator when it is back, with the time that is left then.""")
def test_a_node_acts_alone_and_tells_later() -> None:
    node = nodes.member()
    node.step(nodes.node_lease.Disconnected(), 10.7)
    assert node.step(GiveNotice(IN_2M), 10.7) == [GoingAway(120.0, 120.0, False, ("n",), 1, "spot")]
    node.step(TimePassed(), 10.76)
    said = nodes.said(node.step(Welcomed(1, 1), 10.9))
    assert [type(each) for each in said] == [Return, GiveNotice]
    assert said[1].request.left_s == pytest.approx(119.8)


@pytest.mark.parametrize(("heard_at", "says"), [(10.7, True), (11.65, False)])
def test_a_push_that_was_sent_before_the_notice_arrived(heard_at: float, says: bool) -> None:
    """All nodes get the same signal, and the coordinator is gone when it has told of the first: none is forgotten. But
    later the coordinator has read the notice, and a push without it says that it was withdrawn."""
    node = nodes.member()
    node.step(GiveNotice(IN_2M), 10.6)
    node.step(Pushed(GoingAway(60.0, None, False, ("other",), 1, "spot")), heard_at)
    assert [type(each) for each in nodes.reconnect(node, at=heard_at)] == [Return, GiveNotice][: 1 + says]


@pytest.mark.parametrize(("term", "says"), [(1, False), (2, True)], ids=["the same", "another"])
def test_a_new_coordinator_hears_what_the_node_knows(term: int, says: bool) -> None:
    """The same one may have heard of a withdrawal since."""
    node = nodes.member()
    node.step(Pushed(GoingAway(120.0, 120.0, False, ("n",), 1, "spot")), 10.6)
    said = nodes.reconnect(node, term=term)
    assert [each.request.reason for each in said if isinstance(each, GiveNotice)] == ["spot"] * says


@proves("notice.agreed-95")
def test_a_node_says_again_that_it_has_agreed() -> None:
    node = nodes.member()
    node.step(Succeeded(1, has_agreed=True), 10.6)
    assert nodes.reconnect(node) == [Return(NodeFacts("n", port=1), nodes.SETTINGS, nodes.PLACE, Stage.FINISHED, True)]
