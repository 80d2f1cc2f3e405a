"""One coordinator's time in office on etcd: when it renews, what it writes, and when it steps down.

A script is a list of (time, event, commands). The lease is 5 s, taken at 100: it serves until 104.5.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.rendezvous.etcd.election import (
    Acknowledge,
    Candidacy,
    Leader,
    MemoryChanged,
    Office,
    Renew,
    RenewalAnswered,
    RenewalFailed,
    Resign,
    TermHeard,
    TimePassed,
    Write,
    WriteAnswered,
    WriteFailed,
    WriteRefused,
    wait_s,
)
from holdfast.rendezvous.membership.model import Memory
from tests.promises import promise, proves

Script = list[tuple[float, Any, list[Any]]]
TIME = TimePassed()
L0 = Leader("10.0.0.1", 4711, "token", 7, boot_id="boot")
L1, L2, L3 = (replace(L0, turn=turn) for turn in (1, 2, 3))
TEN = replace(L2, term=10)
OTHER = Leader("10.0.0.2", 4712, "another", 8)
FIRST, SECOND = Memory(last_round=1), Memory(last_round=2)


def write(before: Leader, after: Leader, memory: Memory | None = None) -> Write:
    return Write(before, after, replace(memory, term=after.term) if memory else None)


LOST = Resign("etcd has lost the leader key")
REFUSED = Resign("etcd refuses to store the run's memory: no space", is_refused=True)
LATE = Resign("etcd did not renew its lease in time")
W1 = write(L0, L1, FIRST)
WRITING: Script = [(100.0, MemoryChanged(FIRST), [W1])]
RENEWED: Script = [(101.0, TIME, [Renew()]), (101.5, RenewalAnswered(101.0, True), [])]

SCRIPTS: dict[str, Script] = {
    "it renews in time, and serves from when it asked": [
        (100.9, TIME, []),
        *RENEWED,
        (101.9, TIME, []),
        (102.0, TIME, [Renew()]),
        (105.4, TIME, []),
        (105.5, TIME, [LATE]),
    ],
    "one renewal at a time": [(101.0, TIME, [Renew()]), (102.0, TIME, []), (104.0, TIME, [])],
    "a renewal without an answer is tried again": [
        (101.0, TIME, [Renew()]),
        (102.0, RenewalFailed(), []),
        (102.2, TIME, []),
        (102.3, TIME, [Renew()]),
        (102.5, RenewalAnswered(102.3, True), []),
        (106.7, TIME, [Renew()]),
    ],
    "an answer that took long proves only that it was asked for": [
        (101.0, TIME, [Renew()]),
        (104.4, RenewalAnswered(101.0, True), []),
        (104.4, TIME, [Renew()]),
        (105.5, RenewalAnswered(104.4, True), [LATE]),
    ],
    "the lease is checked before anything": [(104.5, MemoryChanged(FIRST), [LATE]), (104.6, TIME, [])],
    "a lease that is unknown has ended": [
        (101.0, TIME, [Renew()]),
        (101.1, RenewalAnswered(101.0, False), [Resign("etcd has ended its lease")]),
        (101.2, MemoryChanged(FIRST), []),
        (101.3, RenewalAnswered(101.0, True), []),
    ],
    "what is written is acknowledged": [*WRITING, (100.1, WriteAnswered(L1), [Acknowledge()])],
    "one write at a time, in order": [
        *WRITING,
        (100.1, MemoryChanged(SECOND), []),
        (100.1, TermHeard(7), []),
        (100.2, WriteAnswered(L1), [Acknowledge(), write(L1, L2, SECOND)]),
        (100.3, WriteAnswered(L2), [Acknowledge(), write(L2, replace(L3, term=8))]),
        (100.4, WriteAnswered(replace(L3, term=8)), [Acknowledge()]),
    ],
    "a write without an answer is sent again; its own result is success": [
        *WRITING,
        (100.1, WriteFailed(), []),
        (100.3, MemoryChanged(SECOND), []),
        (100.4, TIME, [W1]),
        (100.5, WriteAnswered(L1), [Acknowledge(), write(L1, L2, SECOND)]),
    ],
    "again and again, while it serves": [
        *WRITING,
        (100.1, WriteFailed(), []),
        (100.4, TIME, [W1]),
        (100.5, WriteFailed(), []),
        (100.8, TIME, [W1]),
        (104.5, WriteAnswered(L1), [LATE]),
    ],
    "a late answer to an earlier attempt is no answer to the next write": [
        *WRITING,
        (100.1, MemoryChanged(SECOND), []),
        (100.2, WriteAnswered(L1), [Acknowledge(), write(L1, L2, SECOND)]),
        (100.3, WriteAnswered(L1), []),
        (100.4, WriteAnswered(L2), [Acknowledge()]),
        (100.5, WriteAnswered(L2), []),
    ],
    "another one is in office": [
        *WRITING,
        (100.1, WriteAnswered(OTHER), [Resign("another coordinator, of term 8, is in office")]),
        (100.2, WriteAnswered(L1), []),
    ],
    "etcd has lost the key": [*WRITING, (100.1, WriteAnswered(None), [LOST])],
    "a write that etcd refuses for good ends its time": [
        *WRITING,
        (100.1, WriteRefused("no space"), [REFUSED]),
        (100.2, TIME, []),
        (100.3, MemoryChanged(SECOND), []),
    ],
    "the token decides, not the term": [
        *WRITING,
        (100.1, WriteAnswered(replace(L1, token="x")), [Resign("another coordinator, of term 7, is in office")]),
    ],
    "it raises its term before anything that follows": [
        (100.0, TermHeard(9), [write(L0, replace(L1, term=10))]),
        (100.1, MemoryChanged(FIRST), []),
        (100.2, WriteAnswered(replace(L1, term=10)), [Acknowledge(), write(replace(L1, term=10), TEN, FIRST)]),
    ],
    "it never lowers it": [(100.0, TermHeard(3), [write(L0, L1)])],
    "renewals go on while it writes": [
        *WRITING,
        (101.0, TIME, [Renew()]),
        (101.1, WriteAnswered(L1), [Acknowledge()]),
    ],
}  # fmt: skip


def play(office: Office, script: Script) -> None:
    for at, event, expected in script:
        assert office.step(event, at) == expected, f"{event} at {at}"


@promise("""etcd-runs.etcd-refuses-coordinator: If etcd refuses a coordinator's writes for good (no space left, no
    permission), the coordinator steps down, and every node says once what etcd said. Nodes pause longer and longer
    before they start another one. The run ends with that reason after `outage_timeout` (`join_timeout` before a node's
    first place), and at once if it is refused at the start.""")
@proves("etcd-runs.agent-elected-coordinator")
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str) -> None:
    play(Office(L0, 5.0, 100.0), SCRIPTS[name])


@proves("etcd-runs.agent-elected-coordinator")
def test_it_serves_for_less_than_its_lease() -> None:
    """A coordinator that was frozen asks before it says its next word."""
    office = Office(L0, 5.0, 100.0)
    assert [office.may_serve(at) for at in (100.0, 104.49, 104.5)] == [True, True, False]
    play(office, RENEWED)
    assert [office.may_serve(at) for at in (104.5, 105.49, 105.5)] == [True, True, False]
    play(office, [(101.6, MemoryChanged(FIRST), [W1]), (102.0, WriteAnswered(None), [LOST])])
    assert not office.may_serve(102.0)
    assert office.next_deadline() is None


@pytest.mark.parametrize(
    ("script", "deadline"),
    [
        ([], 101.0),
        ([(101.0, TIME, [Renew()])], 104.5),
        (RENEWED, 102.0),
        ([*WRITING, (100.1, WriteFailed(), [])], 100.1 + 0.3),
        ([(104.5, TIME, [LATE])], None),
    ],
    ids=["the renewal", "the end of the lease", "the next renewal", "the write", "resigned"],
)
def test_deadlines(script: Script, deadline: float | None) -> None:
    office = Office(L0, 5.0, 100.0)
    play(office, script)
    assert office.next_deadline() == deadline


def test_a_deadline_that_was_kept_is_not_named_again() -> None:
    """Else a loop that waits for it would turn without end while the clock stands still."""
    office = Office(L0, 5.0, 100.0)
    play(office, [*WRITING, (100.1, WriteFailed(), [])])
    for _ in range(50):
        due_at = office.next_deadline()
        if due_at is None:
            return
        for command in office.step(TIME, due_at):
            office.step(RenewalFailed() if isinstance(command, Renew) else WriteFailed(), due_at)
        assert office.next_deadline() != due_at
    raise AssertionError("it never resigned")


@dataclass
class Keys:
    """What etcd holds, and the writes that were sent and may still be carried out."""

    leader: Leader | None = L0
    memory: Memory | None = None
    pending: list[Write] = field(default_factory=list)

    def carry_out(self, write: Write) -> Leader | None:
        if self.leader == write.before:
            self.leader = write.after
            self.memory = write.memory or self.memory
        return self.leader


@proves("etcd.write-answer-lost-sent", "etcd-runs.agent-elected-coordinator")
@given(
    st.lists(
        st.sampled_from(["change", "raise", "answer", "answer lost", "request lost", "late", "other"]), max_size=60
    )
)
def test_what_is_acknowledged_is_written_and_stays(moves: list[str]) -> None:
    """Whatever gets lost or comes late, until another one is in office; from then on nothing is written."""
    office, keys, now, number, acknowledged = Office(L0, 1000.0, 0.0), Keys(), 1.0, 0, 0
    in_flight: Write | None = None
    changes: set[int] = set()
    written = 0

    def react(commands: list[Any]) -> None:
        nonlocal in_flight, acknowledged, written
        for command in commands:
            match command:
                case Write():
                    assert in_flight is None, "one at a time"
                    in_flight = command
                case Acknowledge():
                    acknowledged += 1
                    assert keys.leader == office.leader
                    if acknowledged in changes:
                        written = acknowledged
                        assert keys.memory == Memory(term=office.leader.term, last_round=written)
                case Resign():
                    assert keys.leader == OTHER

    for move in moves:
        now += 0.4
        if in_flight is None:
            react(office.step(TIME, now))
        attempt = in_flight
        match move:
            case "change" | "raise":
                number += 1
                changes |= {number} if move == "change" else set()
                changed = MemoryChanged(Memory(last_round=number))
                react(office.step(changed if move == "change" else TermHeard(office.leader.term + 1), now))
            case "answer" if attempt is not None:
                in_flight = None
                react(office.step(WriteAnswered(keys.carry_out(attempt)), now))
            case "answer lost" if attempt is not None:
                in_flight = None
                keys.carry_out(attempt)
                react(office.step(WriteFailed(), now))
            case "request lost" if attempt is not None:
                in_flight = None
                keys.pending.append(attempt)
                react(office.step(WriteFailed(), now))
            case "late" if keys.pending:
                before = keys.leader
                late = keys.pending.pop(0)
                keys.carry_out(late)
                assert keys.leader in (before, late.after)
            case "other":
                keys.leader, keys.memory = OTHER, Memory(last_round=10**6)
        assert (keys.memory or Memory()).last_round >= written, "a late write changes nothing"
        assert keys.leader != OTHER or keys.memory == Memory(last_round=10**6)


@promise("""etcd-runs.leader-key-vanishes-few: When the leader key vanishes, a few of many nodes campaign, within a
    second.""")
@pytest.mark.parametrize("count", [2, 8, 64, 1000, 10_000])
def test_few_nodes_campaign_before_a_coordinator_is_in_office(count: int) -> None:
    """That takes 50 ms, say. However few of the nodes are left, one of them begins within a second."""
    random = Random(count)
    waits = [sorted(wait_s(count, random.random()) for _ in range(count)) for _ in range(100)]
    early = [sum(each < drawn[0] + 0.05 for each in drawn) for drawn in waits]
    assert sum(early) / len(early) < 4
    assert max(drawn[0] for drawn in waits) < 0.4
    assert max(drawn[-1] for drawn in waits) <= min(1.0, 0.1 * count)


def test_a_node_alone_does_not_wait() -> None:
    assert [wait_s(1, draw) for draw in (0.0, 0.5, 1.0)] == [0.0] * 3


def test_the_turn_of_a_vacancy_is_drawn_once() -> None:
    candidacy = Candidacy()
    turn_at = candidacy.turn_at(1000, 0.9, 100.0)
    assert 100.9 < turn_at < 101.0
    assert candidacy.turn_at(1000, 0.1, 100.5) == turn_at
    candidacy.settle()
    assert candidacy.turn_at(1000, 0.0001, 200.0) == 200.0


@proves("etcd-runs.etcd-refuses-coordinator")
@pytest.mark.parametrize("now", [100.0, 0.5], ids=["", "on a host that has just booted"])
def test_a_node_that_etcd_refuses_waits_longer_each_time(now: float) -> None:
    """Nodes that hear of it at the same time do not come back at the same time. A refusal of long ago is forgotten."""
    candidacy, pauses = Candidacy(), []
    for _ in range(6):
        candidacy.refused(now)
        turn_at = candidacy.turn_at(1, 1.0, now)
        pauses.append(turn_at - now)
        now = turn_at
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    candidacy.refused(now)
    assert candidacy.turn_at(1 << 20, 1.0, now) == now + 11.0
    candidacy.refused(now + 60)
    assert candidacy.turn_at(1, 1.0, now + 60) == now + 61
