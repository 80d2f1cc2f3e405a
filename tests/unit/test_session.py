"""An agent's connection and lease: when it says what, and until when its workers may live."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.rendezvous.session import (
    Connect,
    Connected,
    ConnectFailed,
    Disconnected,
    HangUp,
    HeartbeatAnswered,
    Line,
    LosePlace,
    PlaceGivenUp,
    PlaceRevoked,
    PlaceTaken,
    SendHeartbeat,
    Session,
    SessionSettings,
    SetLease,
    TimePassed,
)

# The lease, as the agent counts it, is 9 s.
SETTINGS = SessionSettings(
    heartbeat_s=2.0, lease_s=10.0, reconnect_grace_s=1.0, backoff_first_s=0.25, backoff_cap_s=1.0
)
TIME = TimePassed()
REFUSED = ConnectFailed(was_refused=True)
UNREACHABLE = ConnectFailed(was_refused=False)

Script = list[tuple[float, Any, list[Any]]]

# A connection at 100, and a place that was asked for at 101.
FRESH: Script = [(100.0, TIME, [Connect()]), (100.0, Connected(), [SendHeartbeat(1)])]
CONNECTED: Script = [*FRESH, (100.0, HeartbeatAnswered(1), [])]
MEMBER: Script = [*CONNECTED, (101.0, PlaceTaken(101.0), [SetLease(110.0)])]
# The connection was found closed at 102.
CUT_OFF: Script = [*MEMBER, (102.0, Disconnected(), [SetLease(103.0)])]

SCRIPTS: dict[str, Script] = {
    "a connection is made at once, a heartbeat goes out at once": FRESH,
    "heartbeats go on": [
        *CONNECTED,
        (101.9, TIME, []),
        (102.0, TIME, [SendHeartbeat(2)]),
        (104.5, TIME, [SendHeartbeat(3)]),
        (106.4, TIME, []),
    ],
    "the lease counts from when the heartbeat was sent": [
        *MEMBER,
        (102.0, TIME, [SendHeartbeat(2)]),
        (103.9, HeartbeatAnswered(2), [SetLease(111.0)]),
    ],
    "an older answer does not take back a newer one": [
        *MEMBER,
        (102.0, TIME, [SendHeartbeat(2)]),
        (104.0, TIME, [SendHeartbeat(3)]),
        (105.0, HeartbeatAnswered(3), [SetLease(113.0)]),
        (105.0, HeartbeatAnswered(2), []),
    ],
    "an answer to what was sent before the join gives nothing": [
        *FRESH,
        (101.0, PlaceTaken(101.0), [SetLease(110.0)]),
        (101.5, HeartbeatAnswered(1), []),
    ],
    "an answer to what was never sent gives nothing": [*MEMBER, (102.0, HeartbeatAnswered(99), [])],
    "a place counts from when it was asked for": [*CONNECTED, (105.0, PlaceTaken(101.0), [SetLease(110.0)])],
    "a place that was asked for long ago is lost already": [
        *CONNECTED,
        (110.0, PlaceTaken(101.0), [SetLease(110.0), LosePlace()]),
    ],
    "a silent coordinator costs the place": [
        *MEMBER,
        (109.9, TIME, [SendHeartbeat(2)]),
        (110.0, TIME, [LosePlace()]),
    ],
    "it is lost only once, and late answers do not bring it back": [
        *MEMBER,
        (109.0, TIME, [SendHeartbeat(2)]),
        (110.0, HeartbeatAnswered(2), [LosePlace()]),
        (111.0, TIME, [SendHeartbeat(3)]),
        (111.0, HeartbeatAnswered(3), []),
        (130.0, Disconnected(), []),
    ],
    "workers that are gone have no lease": [*MEMBER, (102.0, PlaceGivenUp(), [SetLease(None)])],
    "the lease of a lost place stays in the past until the workers are gone": [
        *MEMBER,
        (115.0, PlaceRevoked(), [LosePlace()]),
        (116.0, PlaceGivenUp(), [SetLease(None)]),
        (120.0, TIME, [SendHeartbeat(2)]),
    ],
    "a revoked place ends now": [
        *MEMBER,
        (103.0, PlaceRevoked(), [SetLease(103.0)]),
        (104.0, PlaceRevoked(), []),
        (110.0, TIME, [SendHeartbeat(2)]),
    ],
    "a new place has a lease of its own": [
        *MEMBER,
        (103.0, PlaceRevoked(), [SetLease(103.0)]),
        (104.0, PlaceGivenUp(), [SetLease(None)]),
        (106.0, PlaceTaken(105.0), [SetLease(114.0)]),
    ],
    "a closed connection leaves the grace": [*CUT_OFF, (103.0, TIME, [Connect(), LosePlace()])],
    "back within the grace, proved by an answer": [
        *CUT_OFF,
        (102.5, TIME, [Connect()]),
        (102.5, Connected(), [SendHeartbeat(2)]),
        (102.75, HeartbeatAnswered(2), [SetLease(111.5)]),
    ],
    "a connection alone proves nothing": [
        *CUT_OFF,
        (102.5, TIME, [Connect()]),
        (102.5, Connected(), [SendHeartbeat(2)]),
        (103.0, TIME, [LosePlace()]),
    ],
    "an answer of the connection before proves nothing": [
        *MEMBER,
        (102.0, TIME, [SendHeartbeat(2)]),
        (102.0, Disconnected(), [SetLease(103.0)]),
        (102.5, TIME, [Connect()]),
        (102.5, Connected(), [SendHeartbeat(3)]),
        (102.75, HeartbeatAnswered(2), []),
    ],
    "closed twice, the grace counts from the first": [
        *CUT_OFF,
        (102.5, TIME, [Connect()]),
        (102.5, Connected(), [SendHeartbeat(2)]),
        (102.75, Disconnected(), []),
        (103.0, TIME, [Connect(), LosePlace()]),
    ],
    "the grace does not make the lease longer": [
        *MEMBER,
        (109.5, Disconnected(), []),
        (110.0, TIME, [Connect(), LosePlace()]),
    ],
    "a mute coordinator is hung up on after a lease, and dialled anew": [
        *FRESH,
        (108.0, TIME, [SendHeartbeat(2)]),
        (110.0, TIME, [HangUp()]),
        (110.0625, TIME, []),
        (110.125, TIME, [Connect()]),
        (110.25, Connected(), [SendHeartbeat(3)]),
        (112.25, TIME, [SendHeartbeat(4)]),
    ],
    "an answer within the lease keeps the connection": [
        *FRESH,
        (108.0, TIME, [SendHeartbeat(2)]),
        (109.0, HeartbeatAnswered(2), []),
        (110.0, TIME, [SendHeartbeat(3)]),
        (119.0, TIME, [SendHeartbeat(4)]),
        (121.0, TIME, [HangUp()]),
    ],
    "a host that does not answer changes nothing": [
        *CUT_OFF,
        (102.5, TIME, [Connect()]),
        (102.75, UNREACHABLE, []),
        (103.0, TIME, [Connect(), LosePlace()]),
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
        (103.5, REFUSED, [LosePlace()]),
    ],
    "a place taken after the connection was back is not cut off": [
        *CONNECTED,
        (101.0, Disconnected(), []),
        (101.5, TIME, [Connect()]),
        (101.5, Connected(), [SendHeartbeat(2)]),
        (104.0, PlaceTaken(101.5), [SetLease(110.5)]),
    ],
    "a place asked for before the connection closed has the grace": [
        *CONNECTED,
        (101.0, Disconnected(), []),
        (101.5, PlaceTaken(100.5), [SetLease(102.0)]),
    ],
    "without a place there is nothing to lose": [*CONNECTED, (101.0, Disconnected(), []), (200.0, TIME, [Connect()])],
}  # fmt: skip


def play(session: Session, script: Script) -> None:
    for at, event, expected in script:
        assert session.step(event, at) == expected, f"{event} at {at}; before:\n{session.story()}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str) -> None:
    play(Session(SETTINGS), SCRIPTS[name])


def test_where_a_join_renews_nothing_the_grant_of_the_lease_does() -> None:
    """It counts from when it was asked for, also after a lease that was lost."""
    session = Session(replace(SETTINGS, does_join_renew=False))
    granted: Script = [(100.0, TIME, [Connect()]), (104.0, Connected(), [SendHeartbeat(1)])]
    play(session, [*granted, (105.0, PlaceTaken(104.5), [SetLease(109.0)]), (106.0, PlaceGivenUp(), [SetLease(None)])])
    again: Script = [(107.0, Disconnected(), []), (108.0, TIME, [Connect()]), (109.0, Connected(), [SendHeartbeat(2)])]
    play(session, [*again, (110.0, PlaceTaken(109.5), [SetLease(117.0)])])


def test_those_who_prefer_running_on_never_lose_their_place() -> None:
    session = Session(SETTINGS, may_outlive_lease=True)
    play(session, [*CONNECTED, (101.0, PlaceTaken(101.0), []), (102.0, Disconnected(), [])])
    assert session.workers_may_live_until() is None
    play(session, [(500.0, TIME, [Connect()]), (501.0, UNREACHABLE, []), (900.0, TIME, [Connect()])])
    assert session.has_place
    assert not session.has_lapsed(1000.0)


@pytest.mark.parametrize(("jitter", "share"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
@pytest.mark.parametrize("event", [UNREACHABLE, REFUSED], ids=repr)
def test_attempts_come_less_and_less_often(event: ConnectFailed, jitter: float, share: float) -> None:
    session, now, waits_s = Session(SETTINGS), 100.0, []
    for _ in range(5):
        play(session, [(now, TIME, [Connect()]), (now, ConnectFailed(event.was_refused, jitter), [])])
        assert session.line is Line.CLOSED
        due_at = session.next_deadline()
        assert due_at is not None
        play(session, [(due_at - 0.01, TIME, [])])
        waits_s.append(due_at - now)
        now = due_at
    assert waits_s == [share * wait_s for wait_s in (0.25, 0.5, 1.0, 1.0, 1.0)]


def test_a_connection_that_was_made_forgets_the_failures_before() -> None:
    session = Session(SETTINGS)
    for now in (100.0, 101.0, 102.0):
        play(session, [(now, TIME, [Connect()]), (now, UNREACHABLE, [])])
    play(session, [(103.0, TIME, [Connect()]), (103.0, Connected(), [SendHeartbeat(1)])])
    play(session, [(104.0, Disconnected(jitter=1.0), [])])
    assert session.next_deadline() == 104.25


def test_very_many_failures_do_no_harm() -> None:
    session = Session(SETTINGS)
    for now in range(100, 2100):
        play(session, [(float(now), TIME, [Connect()]), (float(now), UNREACHABLE, [])])
    assert session.next_deadline() == 2099.5


DEADLINES: dict[str, tuple[Script, float | None, Line]] = {
    "at first": ([], 0.0, Line.CLOSED),
    "connecting, no place": (CONNECTED[:1], None, Line.CONNECTING),
    "the next heartbeat": (CONNECTED, 102.0, Line.OPEN),
    "the lease is before the next heartbeat": (
        [*MEMBER, (109.5, TIME, [SendHeartbeat(2)])], 110.0, Line.OPEN,
    ),
    "closed, the next attempt": (CUT_OFF, 102.125, Line.CLOSED),
    "connecting, the grace": ([*CUT_OFF, (102.5, TIME, [Connect()])], 103.0, Line.CONNECTING),
    "a lost place has no deadline": (
        [*CUT_OFF, (102.5, TIME, [Connect()]), (103.0, TIME, [LosePlace()])], None, Line.CONNECTING,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEADLINES)
def test_deadlines(name: str) -> None:
    script, deadline, line = DEADLINES[name]
    session = Session(SETTINGS)
    play(session, script)
    assert (session.next_deadline(), session.line) == (deadline, line)


def test_it_tells_when_it_has_lapsed() -> None:
    session = Session(SETTINGS)
    play(session, MEMBER)
    assert not session.has_lapsed(109.99)
    assert session.has_lapsed(110.0)
    play(session, [(110.0, TIME, [SendHeartbeat(2), LosePlace()])])
    assert not session.has_lapsed(111.0), "it has been said"
    assert session.workers_may_live_until() == 110.0
    assert "110.000 TimePassed() -> [SendHeartbeat(number=2), LosePlace()]" in session.story()
