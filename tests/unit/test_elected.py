"""One node of a run on etcd, as scripts: what etcd answers, and what is asked of it because of that.

A script is a list of (time, event, commands). The lease is 5 s, so workers may live for 4.5 s after the last renewal
that was answered was sent. What fails is tried again after 0.2 s if chance has it so.
"""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.rendezvous import keyspace, messages, session
from holdfast.rendezvous.elected import Elected, Office
from holdfast.rendezvous.elected_words import (
    Campaign,
    CampaignFailed,
    Follow,
    Followed,
    FollowFailed,
    Forget,
    Found,
    GrantLease,
    KeepLease,
    LeaderSeen,
    LeaseDenied,
    LeaseGone,
    LeaseGranted,
    LeaseKept,
    Load,
    Loaded,
    LoadFailed,
    NodesSeen,
    RevokeLease,
    Say,
    SayFailed,
    StatementWritten,
    StepDown,
    ToldSeen,
    Write,
    WriteFailed,
    WriteRefused,
    Written,
)
from holdfast.rendezvous.keyspace import Epitaph, Junk, Page, Statement, Telling, Tellings
from holdfast.rendezvous.outcome import End, Failure, Outcome
from holdfast.rendezvous.participant import (
    CloseWanted,
    FailureReported,
    JoinRefused,
    JoinRequested,
    LeaveCompleted,
    LeaveRequested,
    NoticeSeen,
    Participant,
    PlaceLost,
    RoundStopped,
    RunEnded,
    SuccessReported,
    WorldSealed,
)
from holdfast.rendezvous.session import Session, SessionSettings, SetLease
from holdfast.rendezvous.vocabulary import Memory, Settings, Snapshot, Stage
from holdfast.rendezvous.world import NodeFacts, Place, World

Script = list[tuple[float, Any, list[Any]]]
TIME = session.TimePassed()
SETTINGS = Settings(1, 1, last_call_s=0.0)
LEASE, NEXT_LEASE = 7, 8
TERM = 11
CRASH = Failure("a", 0, text="it broke")
CLOSED = Outcome(End.CLOSED, "enough")
SUCCESS = Outcome(End.SUCCEEDED, "all workers have succeeded")


def facts(incarnation: int = 0, port: int = 1, name: str = "a") -> NodeFacts:
    return NodeFacts(name, incarnation, port=port)


def place(round: int = 1, port: int = 1) -> Place:
    return World(round, (facts(port=port),)).places()[0]


def join(incarnation: int = 0, last_round: int = 0, replaces: str = "", failure: Any = None, port: int = 1) -> Any:
    return messages.Join(facts(incarnation, port), SETTINGS, last_round, replaces, failure)


def member(stage: Stage = Stage.RUNNING) -> Any:
    return messages.Return(facts(), SETTINGS, place(), stage)


def again(round: int) -> Any:
    return messages.Return(facts(1, 2), SETTINGS, place(round), Stage.RUNNING)


def statement(*said: Any, origin: int = 0) -> bytes:
    return keyspace.encode(Statement(keyspace.VERSION, said, origin))


def say(number: int, *said: Any, lease: int = LEASE) -> Say:
    return Say(number, lease, statement(*said))


def told(*items: tuple[int, int, Any], key: str = "a/0", origin: int = 0) -> bytes:
    tellings = tuple(Telling(term, number, key, message) for term, number, message in items)
    return keyspace.encode(Tellings(keyspace.VERSION, tellings, origin))


def sealed(round: int = 1) -> Any:
    return messages.Sealed("a/0", place(round))


def snapshot(*memory: Any, **fields: Any) -> bytes:
    return keyspace.encode(Page(keyspace.VERSION, Snapshot(Memory(*memory), **fields), TERM))


def found(value: bytes = b"", at: int = 5, lease: int = LEASE) -> Found:
    return Found(value, at, at, lease)


OTHER = found(b"b", 9, lease=3)
OURS = found(b"a", TERM)

CONNECTED: Script = [(0.0, TIME, [GrantLease()]), (0.1, LeaseGranted(LEASE), [KeepLease(1, LEASE), Follow()])]
WAITING: Script = [
    *CONNECTED,
    (0.2, JoinRequested(1), [say(1, join())]),
    (0.3, StatementWritten(1), []),
    (0.3, LeaseKept(1), []),
    (0.4, Followed(10, OTHER, None), []),
]
MEMBER: Script = [
    *WAITING,
    (0.5, ToldSeen(told((9, 1, sealed()))), [SetLease(4.6), WorldSealed(place()), say(2, member())]),
    (0.6, StatementWritten(2), []),
]
ANOTHER_LEASE: Script = [
    *MEMBER,
    (0.7, LeaseGone(LEASE), [SetLease(0.7), PlaceLost(1, "its lease has ended")]),
    (0.8, JoinRequested(2), [SetLease(None)]),
    (0.8, TIME, [GrantLease()]),
    (
        0.9,
        LeaseGranted(NEXT_LEASE),
        [KeepLease(2, NEXT_LEASE), Follow(), say(3, join(1, 1, "a/0", port=2), lease=NEXT_LEASE)],
    ),
]
RUN = Snapshot(Memory(1, 0, None, SETTINGS), World(1, (facts(),)))
FIRST_WRITE = Write(
    2, TERM, snapshot(1, 0, None, SETTINGS, world=RUN.world), (("a", told((TERM, 1, sealed()), origin=TERM)),)
)  # fmt: skip
ELECTED: Script = [
    *WAITING[:-1],
    (0.4, Followed(10, None, None), [Campaign(LEASE)]),
    (0.5, LeaderSeen(TERM, OURS), [Load(TERM)]),
]
LEADING: Script = [
    *ELECTED,
    (0.6, Loaded(TERM, None, (("a", found(statement(join()))),)), [FIRST_WRITE]),
    (0.7, Written(2), []),
]
BOTH: Script = [
    *LEADING,
    (0.8, ToldSeen(told((TERM, 1, sealed()))), [SetLease(4.6), WorldSealed(place()), say(2, member())]),
    (0.9, StatementWritten(2), []),
    (0.9, NodesSeen(TERM, (("a", found(statement(member()))),)), []),
]
ENDED = Write(
    4,
    TERM,
    snapshot(1, 0, SUCCESS, SETTINGS, world=RUN.world),
    (("a", told((TERM, 3, messages.Ended(SUCCESS)), origin=TERM)),),
    is_last=True,
    epitaph=(TERM, keyspace.encode(Epitaph(keyspace.VERSION, SUCCESS))),
)

JOINING: dict[str, Script] = {
    "a statement is under the lease": WAITING,
    "etcd is out of reach": [
        (0.0, TIME, [GrantLease()]),
        (2.0, LeaseDenied(), []),
        (2.02, TIME, []),
        (2.03, TIME, [GrantLease()]),
    ],
    "a join before there is a lease": [
        (0.0, JoinRequested(1), []),
        (0.0, TIME, [GrantLease()]),
        (0.1, LeaseGranted(LEASE), [KeepLease(1, LEASE), Follow(), say(1, join())]),
    ],
    "one statement at a time": [
        *CONNECTED,
        (0.2, JoinRequested(1), [say(1, join())]),
        (0.3, JoinRequested(2), []),
        (0.4, StatementWritten(1), [say(2, join(port=2))]),
        (0.5, StatementWritten(2), []),
    ],
    "nobody knows whether it was written": [
        *CONNECTED,
        (0.2, JoinRequested(1), [say(1, join())]),
        (0.3, SayFailed(1), []),
        (0.3, LeaseKept(1), []),
        (0.5, TIME, [say(2, join())]),
        (0.6, SayFailed(1), []),
        (0.7, StatementWritten(2), []),
    ],
    "the watch is taken up again": [
        *WAITING,
        (0.5, FollowFailed(), []),
        (0.6, TIME, []),
        (0.7, TIME, [Follow()]),
        (
            0.8,
            Followed(20, OTHER, found(told((9, 1, sealed())))),
            [SetLease(4.6), WorldSealed(place()), say(2, member())],
        ),
    ],
}

HEARING: dict[str, Script] = {
    "a place": MEMBER,
    "what was heard is not heard again": [*MEMBER, (0.7, ToldSeen(told((9, 1, sealed()))), [])],
    "only what is new of a list": [
        *MEMBER,
        (
            0.7,
            ToldSeen(told((9, 1, sealed()), (9, 2, messages.Notice("hello")), (9, 3, messages.Stop(1, "b joins")))),
            [NoticeSeen("hello"), RoundStopped(1, "b joins")],
        ),
        (0.8, ToldSeen(told((9, 3, messages.Stop(1, "b joins")), (9, 4, messages.Notice("bye")))), [NoticeSeen("bye")]),
    ],
    "a notice is not read twice": [
        *WAITING,
        (0.5, ToldSeen(told((9, 1, messages.Notice("hello")))), [NoticeSeen("hello")]),
        (0.6, Followed(12, OTHER, found(told((9, 1, messages.Notice("hello"))))), []),
    ],
    "the next leader counts from the beginning": [
        *MEMBER,
        (0.7, ToldSeen(told((12, 1, messages.Stop(1, "again")))), [RoundStopped(1, "again")]),
    ],
    "a past leader is not heard": [
        *MEMBER,
        (0.7, ToldSeen(told((12, 1, messages.Notice("new")))), [NoticeSeen("new")]),
        (0.8, ToldSeen(told((9, 7, messages.Stop(1, "old")))), []),
    ],
    "what is for an earlier incarnation": [
        *WAITING,
        (0.5, ToldSeen(told((9, 1, messages.Expelled("late")))), [say(2, join(1, replaces="a/0"))]),
        (0.6, ToldSeen(told((9, 2, sealed()))), []),
    ],
    "the end is for every incarnation": [
        *WAITING,
        (0.5, ToldSeen(told((9, 1, messages.Expelled("late")))), [say(2, join(1, replaces="a/0"))]),
        (0.6, ToldSeen(told((9, 2, messages.Ended(CLOSED)))), [RunEnded(CLOSED)]),
    ],
    "expelled": [
        *MEMBER,
        (0.7, ToldSeen(told((9, 2, messages.Expelled("late")))), [SetLease(0.7), PlaceLost(1, "late")]),
        (0.8, JoinRequested(2), [SetLease(None), say(3, join(1, 1, "a/0", port=2))]),
    ],
}

LOSING: dict[str, Script] = {
    "the workers live for most of a lease": [
        *MEMBER,
        (1.2, TIME, [KeepLease(2, LEASE)]),
        (1.3, LeaseKept(2), [SetLease(1.2 + 4.5)]),
    ],
    "a granted lease counts from when it was asked for": [
        (0.0, JoinRequested(1), []),
        (0.0, TIME, [GrantLease()]),
        (0.1, LeaseGranted(LEASE), [KeepLease(1, LEASE), Follow(), say(1, join())]),
        (
            0.2,
            Followed(3, OTHER, found(told((9, 1, sealed())))),
            [SetLease(4.5), WorldSealed(place())],
        ),
    ],
    "the lease is gone, and with it the place": ANOTHER_LEASE,
    "somebody who waits comes back as somebody else": [
        *WAITING,
        (0.7, LeaseGone(LEASE), []),
        (0.75, TIME, [GrantLease()]),
        (
            0.9,
            LeaseGranted(NEXT_LEASE),
            [KeepLease(2, NEXT_LEASE), Follow(), say(2, join(1, replaces="a/0"), lease=NEXT_LEASE)],
        ),
        (1.0, ToldSeen(told((9, 1, sealed()))), []),
    ],
    "also if nothing is heard for a lease": [
        *WAITING,
        *((at, TIME, [KeepLease(number, LEASE)]) for number, at in enumerate((1.1, 2.1, 3.1, 4.1, 5.1), 2)),
        (6.1, TIME, []),
        (6.125, TIME, [GrantLease()]),
        (
            6.2,
            LeaseGranted(NEXT_LEASE),
            [RevokeLease(LEASE), KeepLease(7, NEXT_LEASE), Follow(), say(2, join(1, replaces="a/0"), lease=NEXT_LEASE)],
        ),
        (6.3, ToldSeen(told((9, 1, sealed()))), []),
    ],
    "etcd has lost its data, and counts from the beginning": [
        *ANOTHER_LEASE,
        (1.0, StatementWritten(3), []),
        (1.0, Followed(2, None, None), [Campaign(NEXT_LEASE)]),
        (1.1, LeaderSeen(3, found(b"b", 3, lease=3)), []),
        (
            1.2,
            ToldSeen(told((3, 1, messages.Sealed("a/1", place(2))), key="a/1")),
            [SetLease(5.3), WorldSealed(place(2)), say(4, again(2), lease=NEXT_LEASE)],
        ),
    ],
    "what was to be tried again with the lease before is not": [
        *WAITING,
        (0.5, FollowFailed(), []),
        (0.6, LeaseGone(LEASE), []),
        (0.65, TIME, [GrantLease()]),
        (
            0.68,
            LeaseGranted(NEXT_LEASE),
            [KeepLease(2, NEXT_LEASE), Follow(), say(2, join(1, replaces="a/0"), lease=NEXT_LEASE)],
        ),
        (0.7, TIME, []),
    ],
    "another's lease": [*MEMBER, (0.7, LeaseGone(99), [])],
}

LEADING_ON: dict[str, Script] = {
    "elected, and alone": BOTH,
    "somebody was faster": [
        *WAITING[:-1],
        (0.4, Followed(10, None, None), [Campaign(LEASE)]),
        (0.5, LeaderSeen(11, OTHER), []),
    ],
    "the campaign has failed": [
        *WAITING[:-1],
        (0.4, Followed(10, None, None), [Campaign(LEASE)]),
        (0.5, CampaignFailed(), []),
        (0.7, TIME, [Campaign(LEASE)]),
        (0.75, CampaignFailed(), []),
        (0.8, LeaderSeen(11, OTHER), []),
        (1.0, TIME, []),
    ],
    "the leader is gone": [*WAITING, (0.5, LeaderSeen(12, None), [Campaign(LEASE)])],
    "what is older is no news": [*LEADING, (0.8, LeaderSeen(TERM - 1, None), []), (0.9, LeaderSeen(TERM, OURS), [])],
    "a campaign without a lease waits for one": [
        *WAITING,
        (0.7, LeaseGone(LEASE), []),
        (0.72, LeaderSeen(12, None), []),
        (0.75, TIME, [GrantLease()]),
        (
            0.9,
            LeaseGranted(NEXT_LEASE),
            [KeepLease(2, NEXT_LEASE), Follow(), say(2, join(1, replaces="a/0"), lease=NEXT_LEASE)],
        ),
        (1.0, Followed(12, None, None), [Campaign(NEXT_LEASE)]),
    ],
    "its own key under an earlier lease is somebody else's": [
        *LEADING,
        (0.8, LeaseGone(LEASE), [StepDown()]),
        (0.85, TIME, [GrantLease()]),
        (
            0.9,
            LeaseGranted(NEXT_LEASE),
            [KeepLease(2, NEXT_LEASE), Follow(), say(2, join(1, replaces="a/0"), lease=NEXT_LEASE)],
        ),
        (1.0, LeaderSeen(TERM, OURS), []),
    ],
    "a write was refused": [
        *ELECTED,
        (0.6, Loaded(TERM, None, (("a", found(statement(join()))),)), [FIRST_WRITE]),
        (0.7, WriteRefused(2), [StepDown()]),
    ],
    "nobody knows whether a write was carried out": [
        *ELECTED,
        (0.6, Loaded(TERM, None, (("a", found(statement(join()))),)), [FIRST_WRITE]),
        (0.7, WriteFailed(2), []),
        (0.9, TIME, [FIRST_WRITE]),
        (1.0, WriteFailed(1), []),
        (1.0, Written(2), []),
    ],
    "it cannot be read": [*ELECTED, (0.6, LoadFailed(TERM), []), (0.8, TIME, [Load(TERM)])],
    "the watch is interrupted": [
        *BOTH,
        (1.0, LoadFailed(TERM), []),
        (1.2, TIME, [KeepLease(2, LEASE), Load(TERM)]),
        (1.3, Loaded(TERM, None, (("a", found(statement(member()))),)), []),
    ],
    "a write and a reading are tried again at the same time": [
        *ELECTED,
        (0.6, Loaded(TERM, None, (("a", found(statement(join()))),)), [FIRST_WRITE]),
        (0.7, WriteFailed(2), []),
        (0.7, LoadFailed(TERM), []),
        (0.9, TIME, [Load(TERM), FIRST_WRITE]),
    ],
    "answers to an earlier term": [
        *LEADING,
        (0.8, LeaderSeen(12, None), [StepDown(), Campaign(LEASE)]),
        (0.9, LeaderSeen(13, found(b"a", 13)), [Load(13)]),
        (0.9, Loaded(TERM, None, ()), []),
        (0.9, NodesSeen(TERM, (("b", None),)), []),
        (0.9, LoadFailed(TERM), []),
        (
            1.0,
            Loaded(13, found(FIRST_WRITE.run or b""), (("a", found(statement(join()))),)),
            [Write(4, 13, None, (("a", told((13, 3, sealed()), origin=TERM)),))],
        ),
        (1.1, Written(2), []),
        (1.1, WriteRefused(2), []),
    ],
    "a thawed leader finds that it is none": [*LEADING, (20.0, LeaderSeen(12, OTHER), [StepDown()])],
}

GOING: dict[str, Script] = {
    "the last word, then the lease": [
        *MEMBER,
        (0.7, LeaveRequested(), [say(3, member(), messages.Leaving())]),
        (0.8, StatementWritten(3), []),
        (0.9, LeaveCompleted(), [SetLease(None), say(4, member(), messages.Left())]),
        (1.0, StatementWritten(4), [RevokeLease(LEASE)]),
        (2.0, TIME, []),
        (2.0, LeaseGone(LEASE), []),
    ],
    "a last word that fails is repeated": [
        *MEMBER,
        (0.7, LeaveRequested(), [say(3, member(), messages.Leaving())]),
        (0.8, LeaveCompleted(), [SetLease(None)]),
        (0.9, SayFailed(3), []),
        (1.1, TIME, [KeepLease(2, LEASE), say(4, member(), messages.Left())]),
        (1.2, StatementWritten(4), [RevokeLease(LEASE)]),
    ],
    "a failure, and the join that follows": [
        *MEMBER,
        (0.7, FailureReported(1, CRASH), [say(3, member(), messages.Failed(1, CRASH))]),
        (0.8, JoinRequested(2), [SetLease(None)]),
        (0.9, StatementWritten(3), [say(4, join(0, 1, "", CRASH, port=2))]),
    ],
    "success": [*MEMBER, (0.7, SuccessReported(1), [say(3, member(Stage.FINISHED))])],
    "close": [*MEMBER, (0.7, CloseWanted("enough"), [say(3, member(), messages.Close("enough"))])],
    "the end": [
        *MEMBER,
        (
            0.7,
            ToldSeen(told((9, 2, messages.Ended(CLOSED)))),
            [SetLease(None), RunEnded(CLOSED), say(3, messages.Left())],
        ),
        (0.8, StatementWritten(3), [RevokeLease(LEASE)]),
    ],
    "refused": [
        *WAITING,
        (0.7, ToldSeen(told((9, 2, messages.Refused("no")))), [JoinRefused("no"), say(2, messages.Left())]),
        (0.8, StatementWritten(2), [RevokeLease(LEASE)]),
    ],
    "a leader that leaves does not campaign": [
        *MEMBER,
        (0.7, LeaveRequested(), [say(3, member(), messages.Leaving())]),
        (0.8, LeaveCompleted(), [SetLease(None)]),
        (0.8, LeaderSeen(12, None), []),
    ],
    "a run that never began goes with the last who waited for it": [
        *WAITING[:-1],
        (0.4, Followed(10, None, None), [Campaign(LEASE)]),
        (0.5, LeaderSeen(TERM, OURS), [Load(TERM)]),
        (
            0.6,
            Loaded(TERM, None, (("a", found(statement(messages.Join(facts(), Settings(2, 2))))),)),
            [Write(1, TERM, snapshot(0, 0, None, Settings(2, 2)), ())],
        ),
        (0.6, Written(1), []),
        (0.7, LeaveRequested(), [say(2, messages.Leaving())]),
        (0.8, LeaveCompleted(), []),
        (0.9, StatementWritten(2), [say(3, messages.Left())]),
        (1.0, StatementWritten(3), [Forget(TERM), StepDown(), RevokeLease(LEASE)]),
    ],
    "what it was told says to which run it belongs": [
        *WAITING,
        (
            0.5,
            ToldSeen(told((9, 1, sealed()), origin=9)),
            [SetLease(4.6), WorldSealed(place()), Say(2, LEASE, statement(member(), origin=9))],
        ),
        (0.6, StatementWritten(2), []),
        (0.7, LeaseGone(LEASE), [SetLease(0.7), PlaceLost(1, "its lease has ended")]),
        (0.8, JoinRequested(2), [SetLease(None)]),
        (0.8, TIME, [GrantLease()]),
        (
            0.9,
            LeaseGranted(NEXT_LEASE),
            [
                KeepLease(2, NEXT_LEASE),
                Follow(),
                Say(3, NEXT_LEASE, statement(join(1, 1, "a/0", port=2), origin=9)),
            ],
        ),
    ],
    "a leader has duties after the end": [
        *BOTH,
        (1.0, SuccessReported(1), [say(3, member(Stage.FINISHED))]),
        (1.0, StatementWritten(3), []),
        (1.0, NodesSeen(TERM, (("a", found(statement(member(Stage.FINISHED)))),)), [ENDED]),
        (
            1.1,
            ToldSeen(told((TERM, 3, messages.Ended(SUCCESS)))),
            [SetLease(None), RunEnded(SUCCESS), say(4, messages.Left())],
        ),
        (1.1, StatementWritten(4), []),
        (1.2, TIME, [KeepLease(2, LEASE)]),
        (1.3, NodesSeen(TERM, (("a", found(statement(messages.Left()))),)), []),
        (1.4, Written(4), [Forget(TERM, TERM), StepDown(), RevokeLease(LEASE)]),
    ],
}

SCRIPTS = {**JOINING, **HEARING, **LOSING, **LEADING_ON, **GOING}


def node(**fields: Any) -> Elected:
    link = SessionSettings(does_join_renew=False)
    return Elected(Participant(NodeFacts("a"), SETTINGS, Session(link, **fields)))


def play(script: Script, machine: Elected | None = None) -> Elected:
    machine = machine or node()
    for now, event, expected in script:
        commands = machine.step(event, now)
        machine.check()
        assert list(map(plain, commands)) == list(map(plain, expected)), (now, event)
    return machine


def plain(command: Any) -> Any:
    """Times are sums of decimal fractions, and the members of a set have no order."""
    match command:
        case SetLease(until) if until is not None:
            return SetLease(round(until, 6))
        case Write(number, term, run, items, is_last, removed, epitaph):
            read = keyspace.decode(Page, run) if run is not None else None
            told = [(name, keyspace.decode(Tellings, value)) for name, value in items]
            return (number, term, read, told, is_last, removed, epitaph)
    return command


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str) -> None:
    play(SCRIPTS[name])


def test_there_are_no_two_scripts_of_one_name() -> None:
    assert len(SCRIPTS) == sum(map(len, (JOINING, HEARING, LOSING, LEADING_ON, GOING)))


@pytest.mark.parametrize(
    ("script", "office"),
    [(MEMBER, Office.FOLLOWING), (ELECTED, Office.LOADING), (LEADING, Office.LEADING)],
    ids=["following", "loading", "leading"],
)
def test_office(script: Script, office: Office) -> None:
    assert play(script).office is office


def test_one_that_prefers_running_on_says_again_where_it_stands() -> None:
    machine = node(may_outlive_lease=True)
    for now, event, _ in MEMBER:
        machine.step(event, now)
    assert machine.step(LeaseGone(LEASE), 0.7) == []
    assert machine.step(TIME, 0.75) == [GrantLease()]
    commands = [KeepLease(2, NEXT_LEASE), Follow(), say(3, member(), lease=NEXT_LEASE)]
    assert machine.step(LeaseGranted(NEXT_LEASE), 0.8) == commands


@pytest.mark.parametrize("event", [ToldSeen(b"\xc1"), Followed(12, OTHER, found(b"junk"))], ids=["seen", "read"])
def test_junk_among_what_it_is_told_is_not_passed_over(event: Any) -> None:
    machine = play(WAITING)
    with pytest.raises(Junk, match="Tellings"):
        machine.step(event, 1.0)


def test_resigning() -> None:
    machine = play(LEADING)
    assert machine.resign() == [StepDown(), RevokeLease(LEASE)]
    assert machine.is_gone
    assert machine.next_deadline() is None
    assert machine.resign() == []
    assert machine.step(LeaderSeen(30, None), 5.0) == []


def test_who_has_no_lease_is_gone_already() -> None:
    machine = node()
    assert machine.is_gone
    assert machine.resign() == []


def test_duties_end_with_the_last_write() -> None:
    machine = play(GOING["a leader has duties after the end"][:-1])
    assert machine.has_duties
    assert not machine.is_gone
    play(GOING["a leader has duties after the end"][-1:], machine)
    assert not machine.has_duties
    assert machine.is_gone


def test_it_wakes_up_for_what_failed() -> None:
    machine = play([*WAITING, (0.5, FollowFailed(0.0), [])])
    assert machine.next_deadline() == pytest.approx(0.7)
