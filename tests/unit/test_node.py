"""What a node says to its coordinators, and what it makes of messages that come when its lease has run out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.errors import InternalError
from holdfast.failures.records import Failure
from holdfast.rendezvous.membership import node_lease, protocol
from holdfast.rendezvous.membership.model import (
    Agreed,
    Complete,
    End,
    Ended,
    Expelled,
    Held,
    KeepFrom,
    NodeFacts,
    Notice,
    Outcome,
    Place,
    PlaceLost,
    Progress,
    Refused,
    Resigned,
    SavedSteps,
    Sealed,
    Settings,
    SnapshotId,
    Stage,
    StandBy,
    Stop,
)
from holdfast.rendezvous.membership.node import (
    STANDING_CHANGES,
    JoinRequested,
    Participant,
    Pushed,
    RequestChanged,
    Standing,
    Welcomed,
)
from holdfast.rendezvous.membership.node_lease import HangUp, LeaseSettings, Locate, NodeLease, SetLease
from holdfast.rendezvous.membership.protocol import (
    Close,
    Failed,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Leaving,
    Left,
    Return,
    SnapshotReport,
    Succeeded,
)
from tests.promises import promise, proves

LEASE_S = 2.0
JOINED_AT = 10.0
IN_TIME = JOINED_AT + 0.89 * LEASE_S
TOO_LATE = JOINED_AT + 0.91 * LEASE_S
SETTINGS = Settings()
PLACE = Place(1, 1, 0, 1, (("default", 1),), b"", "host", 1)
FAILURE = Failure("n", 0, -9)
STOP = Stop(1, "why", is_failure=True, is_hang=True)
LOST = "the coordinator was out of reach for too long"
SUCCESS = Ended(Outcome(End.SUCCEEDED, "all workers have succeeded"))


def outside(term: int = 1, last_round: int = 0, **settings: Any) -> Participant:
    """A node that is connected, and whose first heartbeat was answered."""
    node = Participant(NodeFacts("n"), SETTINGS, NodeLease(LeaseSettings(0.5, LEASE_S, **settings)))
    node.step(protocol.TimePassed(), JOINED_AT - 1.0)
    node.step(Welcomed(term, last_round), JOINED_AT - 1.0)
    node.step(Pushed(HeartbeatAnswer(1)), JOINED_AT - 1.0)
    return node


def waiting(**settings: Any) -> Participant:
    node = outside(**settings)
    node.step(JoinRequested(1), JOINED_AT)
    return node


def member(**settings: Any) -> Participant:
    """A node that has joined at `JOINED_AT`, was sealed at once, and whose second heartbeat is on its way."""
    node = waiting(**settings)
    node.step(Pushed(Sealed("n/0", PLACE)), JOINED_AT)
    node.step(protocol.TimePassed(), JOINED_AT + 0.6)
    return node


def said(commands: list[Any]) -> list[Any]:
    """The messages, but for heartbeats."""
    messages = [command for command in commands if isinstance(command, protocol.FromNode)]
    return [message for message in messages if not isinstance(message, Heartbeat)]


def told(commands: list[Any]) -> list[Any]:
    """What the agent is told."""
    kinds = Sealed | StandBy | Stop | PlaceLost | Ended | Refused | Progress | Notice
    return [command for command in commands if isinstance(command, kinds)]


def reconnect(node: Participant, at: float = JOINED_AT + 0.7, term: int = 1, last_round: int = 0) -> list[Any]:
    """What it says on its next connection."""
    node.step(node_lease.Disconnected(), at)
    node.step(protocol.TimePassed(), at + 0.06)
    return said(node.step(Welcomed(term, last_round), at + 0.06))


def test_a_round_from_join_to_join() -> None:
    node = outside(last_round=4)
    first, again = NodeFacts("n", port=7), NodeFacts("n", port=8)
    assert said(node.step(JoinRequested(7), JOINED_AT)) == [Join(first, SETTINGS, None, 4)]
    place = replace(PLACE, round=5)
    assert node.step(Pushed(Sealed("n/0", place)), JOINED_AT) == [SetLease(JOINED_AT + 1.8), Sealed("n/0", place)]
    assert said(node.step(Failed(4, FAILURE), JOINED_AT)) == [], "of another round"
    assert said(node.step(Failed(5, FAILURE), JOINED_AT)) == [Failed(5, FAILURE)]
    stop = replace(STOP, round=5)
    assert node.step(Pushed(STOP), JOINED_AT) == [], "of another round"
    assert node.step(Pushed(stop), JOINED_AT) == [stop]
    commands = node.step(JoinRequested(8), JOINED_AT)
    assert commands == [SetLease(None), Join(again, SETTINGS, place, 5, False, FAILURE, stop)]
    node.step(Pushed(Sealed("n/0", replace(PLACE, round=6))), JOINED_AT)
    assert said(node.step(JoinRequested(9), JOINED_AT))[0].failure is None, "it was of the round before"


def test_success_is_said_once_and_again_on_the_next_connection() -> None:
    node = member()
    assert said(node.step(Succeeded(1), JOINED_AT + 0.7)) == [Succeeded(1)]
    assert reconnect(node) == [Return(node.facts, SETTINGS, PLACE, Stage.FINISHED)]


@pytest.mark.parametrize(
    ("begin", "events", "expected"),
    [
        (outside, [], []),
        (waiting, [], [Join(NodeFacts("n", port=1), SETTINGS)]),
        (member, [], [Return(NodeFacts("n", port=1), SETTINGS, PLACE, Stage.RUNNING)]),
        (
            member,
            [Failed(1, FAILURE)],
            [Return(NodeFacts("n", port=1), SETTINGS, PLACE, Stage.RUNNING), Failed(1, FAILURE)],
        ),
        (member, [Leaving()], [Return(NodeFacts("n", port=1), SETTINGS, PLACE, Stage.RUNNING), Leaving()]),
        (waiting, [Leaving()], [Leaving()]),
        (waiting, [Leaving(), Left()], [Left()]),
        (outside, [Close("enough")], [Close("enough")]),
        (waiting, [Pushed(SUCCESS)], [Left()]),
    ],
)
def test_what_may_have_got_lost_is_said_again(begin: Any, events: list[Any], expected: list[Any]) -> None:
    node = begin()
    for event in events:
        node.step(event, JOINED_AT + 0.1)
    assert reconnect(node, JOINED_AT + 0.2) == expected


@proves("nodes.newest-snapshot-all-can-load")
def test_the_snapshots_of_a_node_are_said_until_the_next_join() -> None:
    """On the next connection, and by its next incarnation."""
    held = (Held(SnapshotId(1, 3, 120, 4), ((0, 2),)),)
    node = outside()
    first = said(node.step(JoinRequested(1, held=held, snapshot_port=9), JOINED_AT))
    again = [*reconnect(node, JOINED_AT + 0.2), *said(node.step(Pushed(Expelled("late")), JOINED_AT + 0.5))]
    assert [(join.facts.incarnation, join.facts.snapshot_port, join.held) for join in first + again] == [
        (0, 9, held), (0, 9, held), (1, 9, held),
    ]  # fmt: skip
    [join] = said(node.step(JoinRequested(2), JOINED_AT + 0.6))
    assert (join.held, join.facts.snapshot_port) == ((), 0)


@proves("nodes.newest-snapshot-all-can-load")
def test_a_copy_that_comes_while_a_node_waits_is_said_at_once_and_again() -> None:
    held = (Held(SnapshotId(1, 3, 120, 4), ((0, 2),)),)
    node = waiting()
    joins = [*said(node.step(RequestChanged(None, held), JOINED_AT)), *reconnect(node, JOINED_AT + 0.2)]
    assert [join.held for join in joins] == [held, held]
    assert member().step(RequestChanged(None, held), JOINED_AT + 0.1) == []


@proves("nodes.agreed-step-kept-by-all")
def test_what_was_saved_is_said_once_a_second_and_answers_at_once() -> None:
    node = waiting()
    node.step(Pushed(Sealed("n/0", replace(PLACE, agrees_on_steps=True))), JOINED_AT)

    def reports(after_s: float, *steps: int | None, round: int = 1) -> int:
        report = SnapshotReport(round, SavedSteps(*steps))
        return len(said(node.step(report, JOINED_AT + after_s)))

    assert [reports(0.0, 5), reports(0.9, 6), reports(1.0, 7), reports(1.1, 8)] == [1, 0, 1, 0]
    assert [reports(1.2, 9, 9), reports(1.2, 9, None), reports(1.3, 10, 9, 9), reports(1.3, 11, 9, 9)] == [1, 0, 1, 0]
    assert reports(1.4, 12, round=2) == 0, "of another round"
    node.step(Pushed(HeartbeatAnswer(2)), JOINED_AT + 1.3)
    back, report = reconnect(node, JOINED_AT + 1.4)
    assert (type(back), report) == (Return, SnapshotReport(1, SavedSteps(11, 9, 9)))


def test_nothing_is_said_of_steps_to_a_coordinator_that_agrees_on_none() -> None:
    """It may be too old to know the message."""
    node = member()
    assert said(node.step(SnapshotReport(1, SavedSteps(5)), JOINED_AT + 0.7)) == []
    assert len(reconnect(node)) == 1


def test_orders_about_snapshots_are_for_the_present_round() -> None:
    orders = [KeepFrom(1, 7), Agreed(1, 7), Complete(1, (1, 1, 7))]
    assert [each for order in orders for each in member().step(Pushed(order), JOINED_AT + 0.7)] == orders
    assert member().step(Pushed(KeepFrom(2, 7)), JOINED_AT + 0.7) == waiting().step(Pushed(orders[0]), JOINED_AT) == []


def test_every_node_tells_the_last_round_that_it_has_heard_of() -> None:
    """From its own place, from what it was told when it stood by, and from the coordinator's first message."""
    for node, expected in ((member(), 1), (waiting(), 0), (outside(last_round=9), 9)):
        node.step(JoinRequested(1), JOINED_AT + 0.6)
        assert [join.heard_round for join in reconnect(node)] == [expected]
    node = waiting()
    assert told(node.step(Pushed(StandBy(5, "round 5 runs")), JOINED_AT)) == [StandBy(5, "round 5 runs")]
    [join] = reconnect(node, last_round=3)
    assert join.heard_round == 5


def test_leaving_and_the_end() -> None:
    node = member()
    assert said(node.step(Leaving(), IN_TIME)) == [Leaving()]
    assert said(node.step(Left(), IN_TIME)) == [Left()]
    node = member()
    assert node.step(Pushed(SUCCESS), IN_TIME) == [Left(), SetLease(None), SUCCESS]
    assert (node.standing, node.next_deadline()) == (Standing.DONE, None)
    assert node.step(JoinRequested(2), IN_TIME) == [SUCCESS]
    assert node.step(Leaving(), IN_TIME) == []
    node = waiting()
    assert node.step(Pushed(Refused("no")), IN_TIME) == [Refused("no")]
    assert node.step(JoinRequested(2), IN_TIME) == [Refused("no")]


def test_what_the_agent_hears_while_it_waits() -> None:
    progress, notice = Progress(1, 2, 2, 9.0), Notice("node b was turned away: --nnodes 3, this run has --nnodes 2")
    for node, expected in ((waiting(), [progress, notice]), (member(), [notice])):
        heard = [each for message in (progress, notice) for each in told(node.step(Pushed(message), IN_TIME))]
        assert heard == expected


@pytest.mark.parametrize(
    "late",
    [Sealed("n/1", replace(PLACE, round=2)), Sealed("n/0", PLACE)],
    ids=["for another incarnation", "of a round that is over"],
)
def test_a_place_that_is_not_for_this_join_is_not_taken(late: Sealed) -> None:
    node = member()
    node.step(JoinRequested(2), IN_TIME)
    assert node.step(Pushed(late), IN_TIME) == []
    assert node.standing is Standing.WAITING


def test_a_place_that_comes_after_its_lease_is_lost_at_once() -> None:
    node = waiting()
    commands = node.step(Pushed(Sealed("n/0", PLACE)), TOO_LATE)
    assert told(commands) == []
    assert [join.facts.key for join in said(commands)] == ["n/1"]


def test_one_that_is_expelled_kills_its_workers_and_comes_back_as_a_stranger() -> None:
    node = member()
    assert node.step(Pushed(Expelled("it was silent")), IN_TIME) == [SetLease(IN_TIME), PlaceLost(1, "it was silent")]
    assert node.standing is Standing.OUTSIDE
    [join] = said(node.step(JoinRequested(2), IN_TIME))
    assert (join.facts.key, join.place, join.has_lost_place, join.failure) == ("n/1", PLACE, True, None)


def test_one_that_is_expelled_while_it_waits_joins_again_by_itself() -> None:
    [join] = said(waiting().step(Pushed(Expelled("a newer incarnation")), IN_TIME))
    assert (join.facts.key, join.has_lost_place) == ("n/1", False)


def test_one_that_leaves_has_nothing_to_lose_but_its_workers() -> None:
    node = member()
    node.step(Leaving(), JOINED_AT)
    assert node.step(Pushed(Expelled("it was silent")), IN_TIME) == [SetLease(IN_TIME)]
    assert node.standing is Standing.LEAVING


LATE = [
    Failed(1, FAILURE),
    Succeeded(1),
    Pushed(HeartbeatAnswer(2)),
    node_lease.Disconnected(),
    node_lease.ConnectFailed(was_refused=True),
]


@promise("""nodes.once-lease-expired-nothing: Once the lease has expired, nothing restores the place: neither a late
    answer nor a late report.""")
@pytest.mark.parametrize("event", LATE, ids=lambda event: type(event).__name__)
def test_after_the_lease_nothing_brings_the_place_back(event: Any) -> None:
    node = member()
    commands = node.step(event, TOO_LATE)
    assert told(commands) == [PlaceLost(1, LOST)]
    assert said(commands) == []
    assert (node.standing, node.facts.incarnation) == (Standing.OUTSIDE, 1)


@pytest.mark.parametrize("event", LATE, ids=lambda event: type(event).__name__)
def test_within_the_lease_they_count(event: Any) -> None:
    node = member()
    assert told(node.step(event, IN_TIME)) == []
    assert node.standing is Standing.MEMBER


@proves("nodes.once-lease-expired-nothing")
def test_a_join_after_the_lease_is_a_strangers() -> None:
    [join] = said(member().step(JoinRequested(2), TOO_LATE))
    assert (join.facts.key, join.has_lost_place) == ("n/1", True)


def test_a_coordinator_that_was_replaced_is_never_accepted_again() -> None:
    node = member(does_refusal_renew=False, locate_after_s=0.5)
    assert reconnect(node, JOINED_AT + 0.7, term=3)
    node.step(node_lease.Disconnected(), JOINED_AT + 0.8)
    node.step(protocol.TimePassed(), JOINED_AT + 0.9)
    commands = node.step(Welcomed(2, 9), JOINED_AT + 0.9)
    assert commands[0] == HangUp()
    assert (said(commands), node.is_connected, node.term) == ([], False, 3)
    node.step(protocol.TimePassed(), JOINED_AT + 1.0)
    assert said(node.step(Welcomed(3, 1), JOINED_AT + 1.0)) == [Return(node.facts, SETTINGS, PLACE, Stage.RUNNING)]


def test_one_that_resigns_leaves_the_node_its_lease() -> None:
    node = member(does_refusal_renew=False, locate_after_s=0.5)
    assert node.step(Pushed(Resigned()), JOINED_AT + 0.7) == []
    assert node.step(node_lease.Disconnected(), JOINED_AT + 0.7) == [Locate()]
    assert node.step(node_lease.ConnectFailed(was_refused=False), JOINED_AT + 1.0) == []
    assert told(node.step(protocol.TimePassed(), IN_TIME)) == []
    assert told(node.step(protocol.TimePassed(), TOO_LATE)) == [PlaceLost(1, LOST)]


def test_a_standing_changes_only_as_the_picture_says() -> None:
    node = outside()
    with pytest.raises(InternalError, match="node n/0 cannot go from OUTSIDE to MEMBER"):
        node._stand(Standing.MEMBER)
    assert {standing for each in STANDING_CHANGES for standing in (each[0], each[2])} == set(Standing)


@proves("nodes.agent-loop-turned-whole")
def test_a_place_that_is_lost_because_the_agent_is_stuck() -> None:
    node = member()
    notice = Notice("the agent's loop has not turned for 2.0 s, so its heartbeats stop")
    assert told(node.step(node_lease.LoopSeen(LEASE_S), IN_TIME)) == [notice]
    lost = PlaceLost(1, "the agent's loop did not turn for too long")
    assert told(node.step(Pushed(HeartbeatAnswer(99)), TOO_LATE)) == [lost]
