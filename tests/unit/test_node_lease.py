"""An agent's connection and lease: when it says what, and until when its workers may live."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.rendezvous.membership.model import Expelled, Notice, PlaceLost, Resigned
from holdfast.rendezvous.membership.node_lease import (
    Connect,
    Connected,
    ConnectFailed,
    Disconnected,
    HangUp,
    LeaderMoved,
    LeaseSettings,
    Line,
    Locate,
    LoopSeen,
    NodeLease,
    PlaceGivenUp,
    PlaceTaken,
    SetLease,
    TimePassed,
)
from holdfast.rendezvous.membership.protocol import Heartbeat, HeartbeatAnswer
from tests.promises import promise, proves

# The lease, as the agent counts it, is 9 s.
SETTINGS = LeaseSettings(heartbeat_s=2.0, lease_s=10.0, reconnect_grace_s=1.0, backoff_first_s=0.25, backoff_cap_s=1.0)
TIME = TimePassed()
REFUSED = ConnectFailed(was_refused=True)
UNREACHABLE = ConnectFailed(was_refused=False)
LOST = PlaceLost(1, "the coordinator was out of reach for too long")
LOST_WHILE_STUCK = PlaceLost(1, "the agent's loop did not turn for too long")

Script = list[tuple[float, Any, list[Any]]]


def stuck(for_s: float) -> Notice:
    return Notice(f"the agent's loop has not turned for {for_s} s, so its heartbeats stop")


# A connection at 100, and a place that was asked for at 101.
FRESH: Script = [(100.0, TIME, [Connect()]), (100.0, Connected(), [Heartbeat(1)])]
CONNECTED: Script = [*FRESH, (100.0, HeartbeatAnswer(1), [])]
MEMBER: Script = [*CONNECTED, (101.0, PlaceTaken(1, 101.0), [SetLease(110.0)])]
# The connection was found closed at 102.
CUT_OFF: Script = [*MEMBER, (102.0, Disconnected(), [SetLease(103.0)])]

SCRIPTS: dict[str, Script] = {
    "a connection is made at once, a heartbeat goes out at once": FRESH,
    "heartbeats go on": [
        *CONNECTED,
        (101.9, TIME, []),
        (102.0, TIME, [Heartbeat(2)]),
        (104.5, TIME, [Heartbeat(3)]),
        (106.4, TIME, []),
    ],
    "a loop that does not turn for a lease sends none until it turns": [
        *MEMBER,
        (102.0, LoopSeen(9.9), []),
        (102.0, TIME, [Heartbeat(2)]),
        (102.0, HeartbeatAnswer(2), [SetLease(111.0)]),
        (104.0, LoopSeen(11.9), [stuck(11.9)]),
        (104.0, TIME, []),
        (105.0, TIME, []),
        (106.0, LoopSeen(13.9), []),
        (106.0, TIME, []),
        (108.0, LoopSeen(0.1), []),
        (108.0, TIME, [Heartbeat(3)]),
        (108.0, HeartbeatAnswer(3), [SetLease(117.0)]),
    ],
    "a loop that does not turn costs the place": [
        *MEMBER,
        (102.0, LoopSeen(10.0), [stuck(10.0)]),
        (102.0, TIME, []),
        (110.0, LoopSeen(18.0), [LOST_WHILE_STUCK]),
    ],
    "nor does it send one on a new connection": [
        *CUT_OFF,
        (102.5, LoopSeen(10.0), [stuck(10.0)]),
        (102.5, TIME, [Connect()]),
        (102.5, Connected(), []),
        (103.0, LoopSeen(10.5), [LOST_WHILE_STUCK]),
        (105.0, LoopSeen(0.0), []),
        (105.0, TIME, [Heartbeat(2)]),
    ],
    "the lease counts from when the heartbeat was sent": [
        *MEMBER,
        (102.0, TIME, [Heartbeat(2)]),
        (103.9, HeartbeatAnswer(2), [SetLease(111.0)]),
    ],
    "an older answer does not take back a newer one": [
        *MEMBER,
        (102.0, TIME, [Heartbeat(2)]),
        (104.0, TIME, [Heartbeat(3)]),
        (105.0, HeartbeatAnswer(3), [SetLease(113.0)]),
        (105.0, HeartbeatAnswer(2), []),
    ],
    "an answer to what was sent before the join gives nothing": [
        *FRESH,
        (101.0, PlaceTaken(1, 101.0), [SetLease(110.0)]),
        (101.5, HeartbeatAnswer(1), []),
    ],
    "an answer to what was never sent gives nothing": [*MEMBER, (102.0, HeartbeatAnswer(99), [])],
    "a place counts from when it was asked for": [*CONNECTED, (105.0, PlaceTaken(1, 101.0), [SetLease(110.0)])],
    "a place that was asked for long ago is lost already": [
        *CONNECTED,
        (110.0, PlaceTaken(1, 101.0), [SetLease(110.0), LOST]),
    ],
    "a silent coordinator costs the place": [
        *MEMBER,
        (109.9, TIME, [Heartbeat(2)]),
        (110.0, TIME, [LOST]),
    ],
    "it is lost only once, and late answers do not bring it back": [
        *MEMBER,
        (109.0, TIME, [Heartbeat(2)]),
        (110.0, HeartbeatAnswer(2), [LOST]),
        (111.0, TIME, [Heartbeat(3)]),
        (111.0, HeartbeatAnswer(3), []),
        (130.0, Disconnected(), []),
    ],
    "workers that are gone have no lease": [*MEMBER, (102.0, PlaceGivenUp(), [SetLease(None)])],
    "the lease of a lost place stays in the past until the workers are gone": [
        *MEMBER,
        (115.0, Expelled(""), [LOST]),
        (116.0, PlaceGivenUp(), [SetLease(None)]),
        (120.0, TIME, [Heartbeat(2)]),
    ],
    "a revoked place ends now": [
        *MEMBER,
        (103.0, Expelled(""), [SetLease(103.0)]),
        (104.0, Expelled(""), []),
        (110.0, TIME, [Heartbeat(2)]),
    ],
    "a new place has a lease of its own": [
        *MEMBER,
        (103.0, Expelled(""), [SetLease(103.0)]),
        (104.0, PlaceGivenUp(), [SetLease(None)]),
        (106.0, PlaceTaken(1, 105.0), [SetLease(114.0)]),
    ],
    "a closed connection leaves the grace": [*CUT_OFF, (103.0, TIME, [Connect(), LOST])],
    "back within the grace, proved by an answer": [
        *CUT_OFF,
        (102.5, TIME, [Connect()]),
        (102.5, Connected(), [Heartbeat(2)]),
        (102.75, HeartbeatAnswer(2), [SetLease(111.5)]),
    ],
    "a connection alone proves nothing": [
        *CUT_OFF,
        (102.5, TIME, [Connect()]),
        (102.5, Connected(), [Heartbeat(2)]),
        (103.0, TIME, [LOST]),
    ],
    "an answer of the connection before proves nothing": [
        *MEMBER,
        (102.0, TIME, [Heartbeat(2)]),
        (102.0, Disconnected(), [SetLease(103.0)]),
        (102.5, TIME, [Connect()]),
        (102.5, Connected(), [Heartbeat(3)]),
        (102.75, HeartbeatAnswer(2), []),
    ],
    "closed twice, the grace counts from the first": [
        *CUT_OFF,
        (102.5, TIME, [Connect()]),
        (102.5, Connected(), [Heartbeat(2)]),
        (102.75, Disconnected(), []),
        (103.0, TIME, [Connect(), LOST]),
    ],
    "the grace does not make the lease longer": [
        *MEMBER,
        (109.5, Disconnected(), []),
        (110.0, TIME, [Connect(), LOST]),
    ],
    "a mute coordinator is hung up on after a lease, and dialled anew": [
        *FRESH,
        (108.0, TIME, [Heartbeat(2)]),
        (110.0, TIME, [HangUp()]),
        (110.0625, TIME, []),
        (110.125, TIME, [Connect()]),
        (110.25, Connected(), [Heartbeat(3)]),
        (112.25, TIME, [Heartbeat(4)]),
    ],
    "an answer within the lease keeps the connection": [
        *FRESH,
        (108.0, TIME, [Heartbeat(2)]),
        (109.0, HeartbeatAnswer(2), []),
        (110.0, TIME, [Heartbeat(3)]),
        (119.0, TIME, [Heartbeat(4)]),
        (121.0, TIME, [HangUp()]),
    ],
    "a host that does not answer changes nothing": [
        *CUT_OFF,
        (102.5, TIME, [Connect()]),
        (102.75, UNREACHABLE, []),
        (103.0, TIME, [Connect(), LOST]),
    ],
    "refused: the coordinator is down, the lease counts from the attempt": [
        *CUT_OFF,
        (102.5, TIME, [Connect()]),
        (102.75, REFUSED, [SetLease(111.5)]),
    ],
    "refused again and again, the workers go on": [
        *CUT_OFF,
        (102.5, TIME, [Connect()]),
        (102.5, REFUSED, [SetLease(111.5)]),
        (108.0, TIME, [Connect()]),
        (108.0, REFUSED, [SetLease(117.0)]),
        (116.0, TIME, [Connect()]),
        (116.0, REFUSED, [SetLease(125.0)]),
    ],
    "refused when it is too late": [
        *CUT_OFF,
        (102.5, TIME, [Connect()]),
        (103.5, REFUSED, [LOST]),
    ],
    "a place taken after the connection was back is not cut off": [
        *CONNECTED,
        (101.0, Disconnected(), []),
        (101.5, TIME, [Connect()]),
        (101.5, Connected(), [Heartbeat(2)]),
        (104.0, PlaceTaken(1, 101.5), [SetLease(110.5)]),
    ],
    "a place asked for before the connection closed has the grace": [
        *CONNECTED,
        (101.0, Disconnected(), []),
        (101.5, PlaceTaken(1, 100.5), [SetLease(102.0)]),
    ],
    "without a place there is nothing to lose": [*CONNECTED, (101.0, Disconnected(), []), (200.0, TIME, [Connect()])],
}  # fmt: skip


def play(lease: NodeLease, script: Script) -> None:
    for at, event, expected in script:
        assert lease.step(event, at) == expected, f"{event} at {at}"


@promise("""nodes.gives-connection-nothing-arrived: A node gives up a connection on which nothing has arrived for a
    lease, and opens another.""")
@proves("nodes.agent-loop-turned-whole")
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str) -> None:
    play(NodeLease(SETTINGS), SCRIPTS[name])


# Where coordinators may move, as with etcd: a refusal renews nothing, and a silence of 3 s makes the node look.
MOVING = replace(SETTINGS, does_refusal_renew=False, locate_after_s=3.0)
CUT_OFF_THERE: Script = [*MEMBER, (102.0, Disconnected(), [Locate(), SetLease(103.0)])]
RESIGNED: Script = [*MEMBER, (101.0, Resigned(), [])]
MOVES: dict[str, Script] = {
    "a closed connection makes it look, at most twice a second": [
        *CUT_OFF_THERE,
        (102.25, TIME, [Connect()]),
        (102.375, UNREACHABLE, []),
        (102.625, TIME, [Connect()]),
        (102.75, UNREACHABLE, [Locate()]),
    ],
    "so does a silence, without hanging up, again and again": [
        *FRESH,
        (102.0, TIME, [Heartbeat(2)]),
        (102.9, TIME, []),
        (103.0, TIME, [Locate()]),
        (103.4, TIME, []),
        (103.5, TIME, [Locate()]),
        (103.6, HeartbeatAnswer(1), []),
        (104.0, TIME, [Heartbeat(3)]),
        (104.9, TIME, []),
        (105.0, TIME, [Locate()]),
    ],
    "who answers is not looked for": [*CONNECTED, (102.0, TIME, [Heartbeat(2)]), (104.9, TIME, [Heartbeat(3)])],
    "refused: it was not closed to give the place away, and the lease goes on as it was": [
        *CUT_OFF_THERE,
        (102.25, TIME, [Connect()]),
        (102.5, REFUSED, [Locate(), SetLease(110.0)]),
        (109.0, TIME, [Connect()]),
        (109.0, REFUSED, [Locate()]),
        (110.0, TIME, [Connect(), LOST]),
    ],
    "refused when it is too late": [*CUT_OFF_THERE, (103.5, REFUSED, [Locate(), LOST])],
    "one that resigns does not close to give the place away": [
        *RESIGNED,
        (102.0, Disconnected(), [Locate()]),
        (109.0, TIME, [Connect()]),
        (109.5, UNREACHABLE, [Locate()]),
        (110.0, TIME, [Connect(), LOST]),
    ],
    "the next one's closed connection counts again": [
        *RESIGNED,
        (102.0, Disconnected(), [Locate()]),
        (102.5, TIME, [Connect()]),
        (102.5, Connected(), [Heartbeat(2)]),
        (102.75, Disconnected(), [Locate(), SetLease(103.75)]),
    ],
    "to another leader at once, if the present one is silent": [
        *MEMBER,
        (104.0, TIME, [Heartbeat(2)]),
        (107.0, LeaderMoved(), [HangUp(), Locate()]),
        (107.0, TIME, [Connect()]),
        (107.25, Connected(), [Heartbeat(3)]),
        (107.5, HeartbeatAnswer(3), [SetLease(116.25)]),
    ],
    "to another leader at once, if the connection is closed": [
        *CUT_OFF_THERE,
        (102.0, LeaderMoved(), [SetLease(110.0)]),
        (102.0, TIME, [Connect()]),
        (102.0, LeaderMoved(), []),
    ],
}


@pytest.mark.parametrize("name", MOVES)
def test_where_coordinators_may_move(name: str) -> None:
    play(NodeLease(MOVING), MOVES[name])


@pytest.mark.parametrize("settings", [SETTINGS, MOVING, replace(MOVING, lease_s=2.0, locate_after_s=0.01)], ids=repr)
@pytest.mark.parametrize("is_answered", [False, True])
def test_a_deadline_that_was_kept_is_not_named_again(settings: LeaseSettings, is_answered: bool) -> None:
    """Else a loop that waits for it would turn without end while the clock stands still."""
    lease, now = NodeLease(settings), 100.0
    lease.step(TIME, now)
    lease.step(Connected(), now)
    lease.step(PlaceTaken(1, now), now)
    while now < 130.0:
        for _ in range(4):
            commands = lease.step(TIME, now)
            for command in commands:
                if isinstance(command, Connect):
                    lease.step(Connected() if is_answered else UNREACHABLE, now)
                if isinstance(command, Heartbeat) and is_answered:
                    lease.step(HeartbeatAnswer(command.number), now)
        due_at = lease.next_deadline()
        assert due_at is not None
        assert due_at > now
        now = due_at


@promise("""nodes.isolation-continue-never-gives: With `--on-isolation continue` a node never gives up its place by its
    own clock.""")
def test_those_who_prefer_running_on_never_lose_their_place() -> None:
    lease = NodeLease(SETTINGS, may_outlive_lease=True)
    play(lease, [*CONNECTED, (101.0, PlaceTaken(1, 101.0), []), (102.0, Disconnected(), [])])
    assert lease.workers_may_live_until() is None
    play(lease, [(500.0, TIME, [Connect()]), (501.0, UNREACHABLE, []), (900.0, TIME, [Connect()])])
    assert not lease.has_lapsed(1000.0)


@pytest.mark.parametrize(("jitter", "share"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
@pytest.mark.parametrize("event", [UNREACHABLE, REFUSED], ids=repr)
def test_attempts_come_less_and_less_often(event: ConnectFailed, jitter: float, share: float) -> None:
    lease, now, waits_s = NodeLease(SETTINGS), 100.0, []
    for _ in range(5):
        play(lease, [(now, TIME, [Connect()]), (now, ConnectFailed(event.was_refused, jitter), [])])
        assert lease.line is Line.CLOSED
        due_at = lease.next_deadline()
        assert due_at is not None
        play(lease, [(due_at - 0.01, TIME, [])])
        waits_s.append(due_at - now)
        now = due_at
    assert waits_s == [share * wait_s for wait_s in (0.25, 0.5, 1.0, 1.0, 1.0)]


def test_a_connection_that_was_made_forgets_the_failures_before() -> None:
    lease = NodeLease(SETTINGS)
    for now in (100.0, 101.0, 102.0):
        play(lease, [(now, TIME, [Connect()]), (now, UNREACHABLE, [])])
    play(lease, [(103.0, TIME, [Connect()]), (103.0, Connected(), [Heartbeat(1)])])
    play(lease, [(104.0, Disconnected(jitter=1.0), [])])
    assert lease.next_deadline() == 104.25


def test_very_many_failures_do_no_harm() -> None:
    lease = NodeLease(SETTINGS)
    for now in range(100, 2100):
        play(lease, [(float(now), TIME, [Connect()]), (float(now), UNREACHABLE, [])])
    assert lease.next_deadline() == 2099.5


DEADLINES: dict[str, tuple[Script, float | None, Line]] = {
    "at first": ([], 0.0, Line.CLOSED),
    "connecting, no place": (CONNECTED[:1], None, Line.CONNECTING),
    "the next heartbeat": (CONNECTED, 102.0, Line.OPEN),
    "the lease is before the next heartbeat": (
        [*MEMBER, (109.5, TIME, [Heartbeat(2)])], 110.0, Line.OPEN,
    ),
    "closed, the next attempt": (CUT_OFF, 102.125, Line.CLOSED),
    "connecting, the grace": ([*CUT_OFF, (102.5, TIME, [Connect()])], 103.0, Line.CONNECTING),
    "a lost place has no deadline": (
        [*CUT_OFF, (102.5, TIME, [Connect()]), (103.0, TIME, [LOST])], None, Line.CONNECTING,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEADLINES)
def test_deadlines(name: str) -> None:
    script, deadline, line = DEADLINES[name]
    lease = NodeLease(SETTINGS)
    play(lease, script)
    assert (lease.next_deadline(), lease.line) == (deadline, line)


def test_it_tells_when_it_has_lapsed() -> None:
    lease = NodeLease(SETTINGS)
    play(lease, MEMBER)
    assert not lease.has_lapsed(109.99)
    assert lease.has_lapsed(110.0)
    play(lease, [(110.0, TIME, [Heartbeat(2), LOST])])
    assert not lease.has_lapsed(111.0), "it has been said"
    assert lease.workers_may_live_until() == 110.0
