"""The rules of a run, each as a short list of what happens and what is done about it.

A script is a list of (time, event, commands). The times that the settings give: a node is suspect after 25 s of
silence and lost after 50, or after 20 with its connection closed; the last call is 5 s, the join timeout 30 s. A
coordinator that has no memory is of term 1, one that has is of term 2.
"""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from holdfast.errors import InternalError
from holdfast.failures.records import Evidence, Failure, Folded
from holdfast.rendezvous.membership.model import (
    PHASE_CHANGES,
    Chosen,
    End,
    Ended,
    Held,
    KeepFrom,
    Memory,
    NodeFacts,
    Notice,
    Outcome,
    Place,
    Progress,
    Refused,
    RoundEnd,
    SavedSteps,
    Sealed,
    Settings,
    SnapshotId,
    Source,
    Stage,
    StandBy,
    Stop,
)
from holdfast.rendezvous.membership.phases import Membership, Phase
from holdfast.rendezvous.membership.protocol import (
    Close,
    ConnectionClosed,
    Expel,
    Failed,
    ForgetRun,
    From,
    Heartbeat,
    Join,
    Leaving,
    Left,
    Remember,
    Return,
    SnapshotReport,
    Succeeded,
    Tell,
    TimePassed,
)
from holdfast.rendezvous.membership.restart_policy import Advance, RestartPolicy
from tests.promises import promise, proves

Script = list[tuple[float, Any, list[Any]]]
TIME = TimePassed()


def settings(min_nodes: int, max_nodes: int, max_restarts: int = 0, **fields: Any) -> Settings:
    policy = RestartPolicy(max_restarts)
    usual = Settings(min_nodes, max_nodes, 30.0, 5.0, 10.0, 50.0, 20.0, 10.0, policy=policy, admit_delay_s=0.0)
    return replace(usual, **fields)


ONE, PAIR, THREE, UP_TO_2, UP_TO_3 = settings(1, 1), settings(2, 2), settings(3, 3), settings(1, 2), settings(1, 3)
RETRY, RETRY_3 = settings(2, 2, max_restarts=1), settings(1, 3, max_restarts=1)
RETRY_2 = settings(1, 2, max_restarts=1)
BACKOFF = settings(1, 1, policy=RestartPolicy(1, backoff_s=8.0))
UNCOUNTED = settings(1, 1, policy=RestartPolicy(0, uncounted_exit_codes=frozenset({9})))


def key(name: str) -> str:
    """`a`, or `a/1` for its next incarnation."""
    return name if "/" in name else f"{name}/0"


def keys(names: str) -> tuple[str, ...]:
    return tuple(map(key, names.split()))


def facts(name: str, **fields: Any) -> NodeFacts:
    node_id, _, incarnation = key(name).partition("/")
    return NodeFacts(node_id, int(incarnation), **fields)


def place(round: int, rank: int = 0, count: int = 2, used: int = 0, term: int = 1) -> Place:
    return Place(term, round, rank, count, (("default", 1),), b"", "", 0, used)


def joined(name: str, of: Settings, last: int | Place = 0, **fields: Any) -> From:
    """`last` is the place that the node had, or the round of it."""
    had = place(last) if isinstance(last, int) and last else last or None
    own = {each: fields.pop(each) for each in NodeFacts.__match_args__ if each in fields}
    return From(key(name), Join(facts(name, **own), of, had, had.round if had else 0, **fields))


def knows(name: str, of: Settings, heard_round: int) -> From:
    """It joins without ever having had a place, but has heard of a round."""
    return From(key(name), Join(facts(name), of, None, heard_round))


def returned(name: str, of: Settings, last: Place | None = None, stage: Stage = Stage.RUNNING, **fields: Any) -> From:
    return From(key(name), Return(facts(name, **fields), of, last or place(1), stage))


def failure(name: str, **fields: Any) -> Failure:
    return Failure(name, 0, text=f"{name} broke", **fields)


def failed(name: str, round: int = 1, **fields: Any) -> From:
    return From(key(name), Failed(round, failure(name, **fields)))


def succeeded(name: str, round: int = 1) -> From:
    return From(key(name), Succeeded(round))


def leaving(name: str) -> From:
    return From(key(name), Leaving())


def left(name: str) -> From:
    return From(key(name), Left())


def heard(name: str) -> From:
    return From(key(name), Heartbeat(1))


def closes(reason: str = "enough", by: str = "a") -> From:
    return From(f"{by}/0", Close(reason))


def closed(name: str) -> ConnectionClosed:
    return ConnectionClosed(key(name))


def written(round: int, used: int = 0, outcome: Outcome | None = None) -> list[Any]:
    return [Remember(Memory(last_round=round, restarts_used=used, outcome=outcome))]


def told_place(name: str, rank: int, round: int = 1, count: int = 2, used: int = 0, term: int = 1) -> list[Any]:
    return [Tell(keys(name), Sealed(key(name), place(round, rank, count, used, term)))]


def sealed(round: int, names: str, used: int = 0, term: int = 1) -> list[Any]:
    each = names.split()
    told = [told_place(name, rank, round, len(each), used, term) for rank, name in enumerate(each)]
    return sum(told, written(round, used))


def stop(names: str, reason: str, round: int = 1, is_failure: bool = False) -> list[Any]:
    is_loss = "is lost" in reason or "lost its place" in reason or "did not come back" in reason
    return [Tell(keys(names), Stop(round, reason, is_failure, is_loss=is_loss))]


def broke(name: str, names: str = "a b", round: int = 1) -> list[Any]:
    return stop(names, f"{name} broke", round, is_failure=True)


def ended(names: str, outcome: Outcome, round: int = 1, used: int = 0) -> list[Any]:
    return [*written(round, used, outcome.in_brief()), *([Tell(keys(names), Ended(outcome))] if names else [])]


def progress(names: str, wanted: int, max_nodes: int, seconds_left: float) -> list[Any]:
    return [Tell(keys(names), Progress(len(names.split()), wanted, max_nodes, seconds_left))]


def notice(names: str, text: str) -> list[Any]:
    return [Tell(keys(names), Notice(text))]


def refused(name: str, problem: str, waiting: str = "") -> list[Any]:
    others = notice(waiting, f"node {name} was turned away: {problem}") if waiting else []
    return [Tell(keys(name), Refused(problem)), *others]


def put_down(who: str, names: str, round: int = 1) -> list[Any]:
    return notice(names, f"{who} (the failures of round {round} are put down to that, and not charged)")


def standby(names: str, round: int, nodes: str) -> list[Any]:
    return [Tell(keys(names), StandBy(round, f"round {round} runs with {nodes}, this node stands by"))]


def admitted(name: str, left_s: int, round: int = 1) -> list[Any]:
    return [Tell(keys(name), StandBy(round, f"round {round} runs with 1 node, this node is admitted in {left_s} s"))]


SUCCESS, CLOSED = Outcome(End.SUCCEEDED, "all workers have succeeded"), Outcome(End.CLOSED, "enough")
USED_UP = "the 1 allowed restart is used up"
GIVEN_AWAY = "its place in round {} was given away"
NOT_BACK = "is lost: its connection closed and it was not back within 20 s"


def gave_up(name: str, reason: str = "no restarts are allowed", **fields: Any) -> Outcome:
    return Outcome(End.FAILED, reason, **{"cause": failure(name), **fields})


def formed(of: Settings, names: str = "a b") -> Script:
    """At 0 they join, one after the other, and the last of them makes the round full."""
    *first, last = names.split()
    waiting: Script = [(0.0, joined(name, of), []) for name in first]
    return [*waiting, (0.0, joined(last, of), sealed(1, names))]


ALONE_OF_3: Script = [(0.0, joined("a", UP_TO_3), []), (5.0, TIME, sealed(1, "a"))]

FORMING: dict[str, Script] = {
    "at max: at once": formed(PAIR),
    "at min: after the last call": [
        (0.0, joined("a", UP_TO_3), []),
        (4.9, TIME, progress("a", 1, 3, 25.1)),
        (5.0, TIME, sealed(1, "a")),
    ],
    "the last call is not restarted": [
        (0.0, joined("a", UP_TO_3), []),
        (4.5, joined("b", UP_TO_3), progress("a b", 1, 3, 25.5)),
        (5.0, TIME, sealed(1, "a b")),
    ],
    "the last call begins at min": [
        (0.0, joined("a", settings(2, 3)), []),
        (10.0, joined("b", settings(2, 3)), progress("a b", 2, 3, 20.0)),
        (14.9, TIME, []),
        (15.0, TIME, sealed(1, "a b")),
    ],
    "below min again, the last call begins anew": [
        (0.0, joined("a", settings(2, 3)), []),
        (0.0, joined("b", settings(2, 3)), []),
        (4.0, left("b"), progress("a", 2, 3, 26.0)),
        (5.0, joined("c", settings(2, 3)), []),
        (9.9, TIME, progress("a c", 2, 3, 20.1)),
        (10.0, TIME, sealed(1, "a c")),
    ],
    "below min at the timeout": [
        (0.0, joined("a", PAIR), []),
        (29.9, TIME, progress("a", 2, 2, 30.0 - 29.9)),
        (
            30.0,
            TIME,
            ended("a", Outcome(End.FAILED, "only 1 of at least 2 nodes joined within 30 s (1 missing); joined: a"), 0),
        ),
    ],
    "the timeout counts from the first to join, and not while nobody is there": [
        (0.0, joined("a", PAIR), []),
        (20.0, left("a"), []),
        (40.0, joined("b", PAIR), []),
        (69.0, TIME, progress("b", 2, 2, 1.0)),
        (69.0, heard("b"), []),
        (69.5, joined("a", PAIR), sealed(1, "b a")),
    ],
    "progress: once a second, if it has changed": [
        (0.0, joined("a", THREE), []),
        (0.5, joined("b", THREE), []),
        (1.0, TIME, progress("a b", 3, 3, 29.0)),
        (2.0, TIME, []),
    ],
    "a closed connection does not wait": [
        (0.0, joined("a", PAIR), []),
        (0.1, closed("a"), []),
        (0.2, joined("b", PAIR), []),
        (0.3, joined("a", PAIR), sealed(1, "a b")),
    ],
    "a silent one is not sealed before it is heard": [
        (0.0, joined("a", PAIR), []),
        (26.0, joined("b", PAIR), progress("a b", 2, 2, 4.0)),
        (26.5, heard("b"), []),
        (27.0, heard("a"), sealed(1, "a b")),
    ],
    "too many: those who were first": [*formed(PAIR), (1.0, joined("c", PAIR), standby("c", 1, "2 nodes"))],
}

TAKEN = "this node has rank {0} (--node-rank, or 0 if it was not given), and a has it already; give --node-rank {1}"
NNODES = "--nnodes 2, this run has --nnodes {}"

REFUSED: dict[str, Script] = {
    "settings differ": [
        (0.0, joined("a", PAIR), []),
        (0.0, joined("b", replace(PAIR, lease_s=9.0)), refused("b", "--lease 9, this run has --lease 50", "a")),
        (0.0, joined("c", PAIR), sealed(1, "a c")),
    ],
    "those who wait hear of it, at most once a second": [
        (0.0, joined("a", THREE), []),
        (0.0, joined("b", THREE), []),
        (1.0, joined("c", PAIR), [*refused("c", NNODES.format(3), "a b"), *progress("a b", 3, 3, 29.0)]),
        (1.9, joined("d", PAIR), refused("d", NNODES.format(3))),
        (2.0, joined("e", UP_TO_2), refused("e", "--nnodes 1:2, this run has --nnodes 3", "a b")),
    ],
    "members of a round do not": [*formed(ONE, "a"), (1.0, joined("b", PAIR), refused("b", NNODES.format(1)))],
    "the rank of a node that is silent may be taken": [
        (0.0, joined("a", THREE, requested_rank=1), []),
        (1.0, TIME, progress("a", 3, 3, 29.0)),
        (25.0, joined("b", THREE, requested_rank=1), refused("b", TAKEN.format(1, 0), "a")),
        (25.1, joined("b", THREE, requested_rank=1), []),
    ],
    "a rank that another has": [
        (0.0, joined("a", PAIR, requested_rank=0), []),
        (0.0, joined("b", PAIR, requested_rank=0), refused("b", TAKEN.format(0, 1), "a")),
        (0.0, joined("a", PAIR, requested_rank=0), []),
        (0.1, closed("a"), []),
        (0.2, joined("b", PAIR, requested_rank=0), []),
    ],
}  # fmt: skip

RUNNING: dict[str, Script] = {
    "success of another round is none": [*formed(ONE, "a"), (1.0, succeeded("a", 2), []), (1.0, succeeded("a", 0), [])],
    "success of a stranger is none": [*formed(ONE, "a"), (1.0, succeeded("x"), [])],
    "finished and lost: it is not missed": [
        *formed(PAIR),
        (1.0, succeeded("a"), []),
        (2.0, closed("a"), []),
        (22.0, TIME, []),
        (23.0, succeeded("b"), ended("b", SUCCESS)),
    ],
    "finished, but another failed: all go again": [
        *formed(RETRY),
        (1.0, succeeded("a"), []),
        (2.0, failed("b"), broke("b")),
        (3.0, joined("b", RETRY, 1), written(1, 1)),
        (4.0, joined("a", RETRY, 1), sealed(2, "a b", 1)),
    ],
    "a newcomer at max stands by, and takes the place of the lost": [
        *formed(PAIR),
        (1.0, joined("c", PAIR), standby("c", 1, "2 nodes")),
        (2.0, closed("a"), []),
        (22.0, TIME, stop("b", f"a {NOT_BACK}")),
        (23.0, joined("b", PAIR, 1), sealed(2, "c b")),
    ],
    "one that was silent at the seal is told to stand by, and admitted when it is heard": [
        (0.0, joined("a", UP_TO_3), []),
        (26.0, joined("b", UP_TO_3), [*sealed(1, "b"), *standby("a", 1, "1 node")]),
        (27.0, heard("a"), stop("b", "a joins")),
    ],
    "silent for a lease: lost and expelled": [
        *formed(PAIR),
        (40.0, heard("b"), []),
        (49.9, TIME, []),
        (50.0, TIME, [*stop("b", "a is lost: it was silent for 50 s"), Expel("a/0", "it was silent for 50 s")]),
    ],
    "one that waits has no place to return to": [
        *formed(PAIR),
        (1.0, failed("a"), broke("a")),
        (2.0, joined("a", PAIR, 1), []),
        (3.0, returned("a", PAIR), [Expel("a/0", GIVEN_AWAY.format(1))]),
    ],
    "one that has lost its place comes back as a stranger": [
        *formed(PAIR),
        (1.0, joined("a/1", PAIR, 1), stop("b", "a has lost its place")),
        (2.0, joined("b", PAIR, 1), sealed(2, "a/1 b")),
    ],
    "one that is gone without a word before": [
        *formed(UP_TO_2),
        (1.0, left("a"), stop("b", "a left")),
        (2.0, joined("b", UP_TO_2, 1), sealed(2, "b")),
    ],
    "a standby that leaves is not missed": [
        *formed(PAIR),
        (1.0, joined("c", PAIR), standby("c", 1, "2 nodes")),
        (2.0, leaving("c"), []),
        (3.0, left("c"), []),
    ],
    "who comes again is a newcomer": [
        *formed(UP_TO_3, "a b c"),
        (1.0, left("b"), stop("a c", "b left")),
        (2.0, joined("c", UP_TO_3, 1), []),
        (3.0, joined("a", UP_TO_3, 1), sealed(2, "a c")),
        (4.0, joined("b", UP_TO_3), stop("a c", "b joins", 2)),
        (5.0, joined("a", UP_TO_3, 2), []),
        (6.0, joined("c", UP_TO_3, 2), sealed(3, "a c b")),
    ],
    "it does not wait for those who do not come back longer than the last call": [
        *formed(RETRY_3, "a b c"),
        (1.0, succeeded("a"), []),
        (2.0, failed("b"), broke("b", "a b c")),
        (3.0, joined("b", RETRY_3, 1), []),
        (4.0, joined("c", RETRY_3, 1), written(1, 1)),
        (8.9, TIME, progress("b c", 1, 3, 30.0 - 4.9)),
        (9.0, TIME, sealed(2, "b c", 1)),
        (10.0, joined("a", RETRY_3, 1), stop("b c", "a joins", 2)),
    ],
    "when a node has left, the other hears what it waits for": [
        *formed(PAIR),
        (1.0, leaving("a"), stop("b", "a leaves")),
        (2.0, left("a"), []),
        (3.0, joined("b", PAIR, 1), []),
        (4.0, TIME, progress("b", 2, 2, 29.0)),
    ],
}

FAILING: dict[str, Script] = {
    "backoff delays the next round": [
        (0.0, joined("a", BACKOFF), sealed(1, "a")),
        (1.0, failed("a"), broke("a", "a")),
        (2.0, joined("a", BACKOFF, 1), [*written(1, 1), *notice("a", "a restart, in 8 s")]),
        (9.9, TIME, progress("a", 1, 1, 30.0 - 7.9)),
        (10.0, TIME, sealed(2, "a", 1)),
    ],
    "the first failure that speaks for itself is the root cause": [
        *formed(PAIR),
        (1.0, failed("a", is_consequence=True), broke("a")),
        (1.5, failed("b"), []),
        (2.0, joined("a", PAIR, 1), []),
        (3.0, joined("b", PAIR, 1), ended("a b", gave_up("b", others=(failure("a", is_consequence=True),)))),
    ],
    "first stop, then judge: the suspect returns and is told": [
        *formed(PAIR),
        (1.0, closed("a"), []),
        (1.5, failed("b"), broke("b")),
        (2.0, joined("b", PAIR, 1), []),
        (2.5, returned("a", PAIR), broke("b", "a")),
        (3.0, joined("a", PAIR, 1), ended("b a", gave_up("b"))),
    ],
    "a failure after the round was stopped is of the stop, and its node hears so once": [
        *formed(UP_TO_2),
        (1.0, closed("a"), []),
        (21.0, TIME, stop("b", f"a {NOT_BACK}")),
        (21.5, failed("b"), put_down(f"a {NOT_BACK}", "b")),
        (22.0, joined("b", UP_TO_2, 1, failure=failure("b")), sealed(2, "b")),
    ],
    "a failure when a newcomer is admitted is of the stop, too": [
        *ALONE_OF_3,
        (6.0, joined("b", UP_TO_3), stop("a", "b joins")),
        (6.5, failed("a"), put_down("b joins", "a")),
        (7.0, joined("a", UP_TO_3, place(1, 0, 1)), sealed(2, "a b")),
    ],
    "a failure of another round is none": [*formed(ONE, "a"), (1.0, failed("a", 2), []), (1.0, failed("a", 0), [])],
    "a failure of a stranger is none": [*formed(ONE, "a"), (1.0, failed("x"), [])],
    "a failure after success is none": [*formed(PAIR), (1.0, succeeded("a"), []), (2.0, failed("a"), [])],
    "a report that got lost comes with the join": [
        *formed(ONE, "a"),
        (1.0, joined("a", ONE, 1, failure=failure("a")), [*broke("a", "a"), *ended("a", gave_up("a"))]),
    ],
    "an uncounted failure costs nothing": [
        (0.0, joined("a", UNCOUNTED), sealed(1, "a")),
        (1.0, failed("a", exitcode=9), broke("a", "a")),
        (2.0, joined("a", UNCOUNTED, 1), [*notice("a", "a restart that is not counted"), *sealed(2, "a")]),
    ],
}

TOGETHER = settings(1, 4, admit_delay_s=5.0)
ALONE_OF_4: Script = [(0.0, joined("a", TOGETHER), []), (5.0, TIME, sealed(1, "a"))]
B_COMES: Script = [*ALONE_OF_4, (10.0, joined("b", TOGETHER), admitted("b", 5))]
ADMITTING: dict[str, Script] = {
    "newcomers that trickle in stop the round once": [
        *B_COMES,
        (12.0, joined("c", TOGETHER), admitted("c", 3)),
        (14.9, TIME, []),
        (15.0, TIME, stop("a", "b, c join")),
        (15.5, joined("a", TOGETHER, place(1, 0, 1)), sealed(2, "a b c")),
    ],
    "at max nodes they are admitted at once": [
        *B_COMES,
        (11.0, joined("c", TOGETHER), admitted("c", 4)),
        (12.0, joined("d", TOGETHER), stop("a", "b, c, d join")),
    ],
    "the newcomer leaves: the round goes on, and the next one has a delay of its own": [
        *B_COMES,
        (12.0, left("b"), []),
        (15.0, TIME, []),
        (20.0, joined("c", TOGETHER), admitted("c", 5)),
        (25.0, TIME, stop("a", "c joins")),
    ],
    "one whose connection is closed is not admitted": [
        *B_COMES,
        (12.0, closed("b"), []),
        (15.0, TIME, []),
        (16.0, joined("b", TOGETHER), admitted("b", 5)),
    ],
    "the round ends of something else": [
        *B_COMES,
        (11.0, joined("a", TOGETHER, place(1, 0, 1)), [*stop("", "a has left the round"), *sealed(2, "a b")]),
        (16.0, TIME, []),
    ],
}

UNAWARE: dict[str, Script] = {
    "a member that has not heard of its round is told again": [
        *formed(PAIR),
        (1.0, closed("b"), []),
        (2.0, joined("b", PAIR), told_place("b", 1)),
        (30.0, succeeded("a"), []),
        (30.0, succeeded("b"), ended("a b", SUCCESS)),
    ],
    "it is told again that the round was stopped, too": [
        *formed(RETRY),
        (1.0, failed("a"), broke("a")),
        (2.0, joined("b", RETRY), [*told_place("b", 1), *broke("a", "b")]),
        (3.0, joined("a", RETRY, 1), []),
        (4.0, joined("b", RETRY, 1), [*written(1, 1), *sealed(2, "a b", 1)]),
    ],
    "what it said before, and comes late, does not take its place away": [
        *formed(PAIR),
        (1.0, returned("b", PAIR, place(1, 1)), []),
        (2.0, joined("b", PAIR), told_place("b", 1)),
        (3.0, succeeded("a"), []),
        (3.0, succeeded("b"), ended("a b", SUCCESS)),
    ],
    "one that was in the round has left it": [
        *formed(PAIR),
        (1.0, joined("b", PAIR, 1), stop("a", "b has left the round")),
    ],
}

ENDING: dict[str, Script] = {
    "only a node of the run closes it": [
        (0.0, closes(by="stranger"), []),
        (0.0, joined("a", PAIR), []),
        (0.0, closes(by="stranger"), []),
        (0.0, joined("b", ONE), refused("b", "--nnodes 1, this run has --nnodes 2", "a")),
        (0.0, closes(by="b"), []),
    ],
    "closed while forming": [(0.0, joined("a", PAIR), []), (1.0, closes(), ended("a", CLOSED, 0))],
    "closed while running: its door stays closed for a while": [
        *formed(ONE, "a"),
        (1.0, closes(), ended("a", CLOSED)),
        (2.0, closes("again"), []),
        (2.0, left("a"), []),
        (3.0, joined("b", ONE), [Tell(keys("b"), Ended(CLOSED))]),
        (4.0, left("b"), []),
        (10.9, TIME, []),
        (11.0, TIME, [ForgetRun()]),
    ],
    "closed while stopping": [
        *formed(RETRY),
        (1.0, failed("a"), broke("a")),
        (2.0, closes(), ended("a b", CLOSED)),
        (3.0, joined("a", RETRY, 1), [Tell(keys("a"), Ended(CLOSED))]),
    ],
    "who returns after the end is told": [
        *formed(PAIR),
        (1.0, succeeded("a"), []),
        (1.0, closed("a"), []),
        (2.0, succeeded("b"), ended("b", SUCCESS)),
        (3.0, returned("a", PAIR), [Tell(keys("a"), Ended(SUCCESS))]),
        (4.0, left("b"), []),
        (5.0, left("a"), [ForgetRun()]),
    ],
    "those who do not confirm are waited for, for a while": [
        *formed(ONE, "a"),
        (1.0, succeeded("a"), ended("a", SUCCESS)),
        (2.0, closed("a"), []),
        (11.0, TIME, [ForgetRun()]),
    ],
    "ended below max: who comes late hears of it, for a while": [
        *ALONE_OF_3,
        (6.0, succeeded("a"), ended("a", SUCCESS)),
        (6.5, left("a"), []),
        (15.9, joined("b", UP_TO_3), [Tell(keys("b"), Ended(SUCCESS))]),
        (15.9, left("b"), []),
        (16.0, TIME, [ForgetRun()]),
    ],
    "one that was lost may still come back": [
        *formed(UP_TO_2),
        (0.0, closed("a"), []),
        (20.0, TIME, stop("b", f"a {NOT_BACK}")),
        (21.0, joined("b", UP_TO_2, 1), sealed(2, "b")),
        (22.0, succeeded("b", 2), ended("b", SUCCESS, 2)),
        (22.5, left("b"), []),
        (23.0, joined("a/1", UP_TO_2, 1), [Tell(keys("a/1"), Ended(SUCCESS))]),
        (32.0, TIME, [ForgetRun()]),
    ],
}


STOPPED = Stop(3, "b broke", is_failure=True)
MISSING = "1 node of round 3 did not come back after the coordinator was replaced"
A3, B3 = place(3, 0, used=1), place(3, 1, used=1)

# What a coordinator finds: the last round was 3, of a and b, and one restart was charged.
MEMORY = Memory(term=1, round_term=1, last_round=3, members=keys("a b"), restarts_used=1)
RECOVERING: dict[str, Script] = {
    "one that had finished says so": [
        (0.0, returned("b", RETRY, B3, Stage.FINISHED), []),
        (1.0, returned("a", RETRY, A3), []),
        (2.0, succeeded("a", 3), ended("b a", SUCCESS, 3, 1)),
    ],
    "a failure of the adopted round is charged after those before": [
        (0.0, returned("b", RETRY, B3), []),
        (1.0, returned("a", RETRY, A3), []),
        (2.0, failed("a", 3), broke("a", "a b", 3)),
        (3.0, joined("a", RETRY, A3), []),
        (4.0, joined("b", RETRY, B3), ended("a b", gave_up("a", USED_UP), 3, 1)),
    ],
    "a failure that comes with a join is not lost, nor is anybody who lives": [
        (0.0, joined("b", RETRY, B3, failure=failure("b")), broke("b", "", 3)),
        (1.0, returned("a", RETRY, A3), broke("b", "a", 3)),
        (2.0, joined("a", RETRY, A3), ended("b a", gave_up("b", USED_UP), 3, 1)),
    ],
    "the same, the other way round": [
        (0.0, returned("a", RETRY, A3), []),
        (1.0, joined("b", RETRY, B3, failure=failure("b")), broke("b", "a", 3)),
        (2.0, joined("a", RETRY, A3), ended("b a", gave_up("b", USED_UP), 3, 1)),
    ],
    "the same, after the coordinator before has told the other to stop": [
        (0.0, joined("a", RETRY, A3, stop=STOPPED), broke("b", "", 3)),
        (1.0, joined("b", RETRY, B3, failure=failure("b")), ended("a b", gave_up("b", USED_UP), 3, 1)),
    ],
    "the same, and the other had succeeded before it took note of the stop": [
        (0.0, returned("a", RETRY, A3), []),
        (1.0, succeeded("a", 3), []),
        (1.0, joined("a", RETRY, A3, stop=STOPPED), broke("b", "a", 3)),
        (2.0, joined("b", RETRY, B3, failure=failure("b")), ended("a b", gave_up("b", USED_UP), 3, 1)),
    ],
    "a member of an earlier round is expelled": [
        (0.0, returned("b", RETRY, place(2, 1)), [Expel("b/0", GIVEN_AWAY.format(2))])
    ],
    "a later round than was written down is adopted": [
        (0.0, returned("b", RETRY, place(5, 1)), written(5, 1)),
        (1.0, returned("a", RETRY, A3), [Expel("a/0", GIVEN_AWAY.format(3))]),
    ],
    "after the adoption a later round is only counted": [
        (0.0, returned("a", RETRY, A3), []),
        (1.0, returned("b", RETRY, place(7, 1)), [Expel("b/0", GIVEN_AWAY.format(7))]),
        (2.0, joined("b/1", RETRY, place(7, 1)), standby("b/1", 3, "2 nodes")),
        (49.0, heard("a"), []),
        (49.0, heard("b/1"), []),
        (50.0, TIME, stop("a", MISSING, 3)),
        (51.0, joined("a", RETRY, A3), sealed(8, "a b/1", 1, 2)),
    ],
    "all members are back: sealed at once": [
        (0.0, joined("a", RETRY, A3), stop("", "a has left the round", 3)),
        (0.0, joined("b", RETRY, B3), sealed(4, "a b", 1, 2)),
    ],
    "all members have come back, without their places: sealed at once": [
        (0.0, joined("a/1", RETRY, A3, has_lost_place=True), stop("", "a has lost its place", 3)),
        (0.0, joined("b/1", RETRY, B3, has_lost_place=True), sealed(4, "a/1 b/1", 1, 2)),
    ],
    "one member has left: the other and a newcomer are sealed at once": [
        (0.0, returned("a", RETRY, A3), []),
        (0.5, returned("b", RETRY, B3), []),
        (1.0, leaving("a"), stop("b", "a leaves", 3)),
        (1.0, left("a"), []),
        (1.5, joined("b", RETRY, B3), []),
        (1.5, joined("c", RETRY), sealed(4, "c b", 1, 2)),
    ],
    "nothing is sealed for a lease while a member may run": [
        (0.0, joined("c", RETRY), []),
        (0.0, joined("d", RETRY), []),
        (1.0, TIME, progress("c d", 2, 2, 29.0)),
        (45.0, heard("c"), []),
        (45.0, heard("d"), []),
        (49.9, TIME, []),
        (50.0, TIME, sealed(4, "c d", 1, 2)),
    ],
    "who waits is told to stand by if the round that is adopted is full": [
        (0.0, joined("c", RETRY), []),
        (1.0, TIME, progress("c", 2, 2, 29.0)),
        (2.0, returned("a", RETRY, A3), standby("c", 3, "2 nodes")),
        (3.0, returned("b", RETRY, B3), []),
    ],
    "who waits is let in once the round is adopted": [
        (0.0, joined("c", RETRY_3), []),
        (1.0, returned("a", RETRY_3, A3), stop("a", "c joins", 3)),
        (2.0, returned("b", RETRY_3, B3), stop("b", "c joins", 3)),
    ],
    "a place that another has is not given twice": [
        (0.0, returned("a", RETRY, A3), []),
        (1.0, returned("x", RETRY, A3), [Expel("x/0", GIVEN_AWAY.format(3))]),
        (1.0, returned("y", RETRY, replace(A3, term=7)), [Expel("y/0", GIVEN_AWAY.format(3))]),
    ],
}

# A coordinator without memory: a container has started again with an empty file system.
FORGETFUL: dict[str, Script] = {
    "all members return": [(0.0, returned("a", RETRY, A3), written(3, 1)), (1.0, returned("b", RETRY, B3), [])],
    "two have stopped, the third still runs: it is told, and waited for": [
        (0.0, joined("a", UP_TO_3, place(5, 0, 3)), [*written(5), *stop("", "a has left the round", 5)]),
        (0.0, joined("b", UP_TO_3, place(5, 1, 3)), []),
        (20.0, heard("a"), []),
        (20.0, heard("b"), []),
        (30.0, TIME, []),
        (40.0, returned("c", UP_TO_3, place(5, 2, 3)), stop("c", "a has left the round", 5)),
        (41.0, joined("c", UP_TO_3, place(5, 2, 3)), []),
        (42.0, TIME, progress("a b c", 1, 3, 29.0)),
        (49.9, heard("a"), []),
        (49.9, heard("b"), []),
        (50.0, TIME, sealed(6, "a b c")),
    ],
    "two have stopped, the third is out of sight: nothing is sealed for a lease": [
        (0.0, joined("a", settings(2, 3), place(5, 0, 3)), [*written(5), *stop("", "a has left the round", 5)]),
        (0.0, joined("b", settings(2, 3), place(5, 1, 3)), []),
        (49.9, heard("a"), []),
        (49.9, heard("b"), []),
        (50.0, TIME, sealed(6, "a b")),
    ],
    "one that only stood by has heard of the round: nothing is sealed for a lease": [
        (0.0, joined("x", PAIR), []),
        (0.5, knows("y", PAIR, 5), written(5)),
        (1.5, TIME, progress("x y", 2, 2, 28.5)),
        (49.9, heard("x"), []),
        (49.9, heard("y"), []),
        (50.0, TIME, sealed(6, "x y")),
    ],
    "nobody knows of a past: the run is new": formed(PAIR),
}


def stays_out(name: str, round: int, why: str = "") -> list[Any]:
    words = f"this node stays out: {why}" if why else "this node stands by until its checks have ended"
    return [Tell(keys(name), StandBy(round, words))]


A2_OF_2, B2_OF_2 = place(1, 0, 2), place(1, 1, 2)
UNREADY: dict[str, Script] = {
    "no place while checks run; the last of them ends the wait": [
        (0.0, joined("a", PAIR, unready=""), []),
        (0.0, joined("b", PAIR, unready=""), []),
        (0.5, joined("a", PAIR), []),
        (0.6, joined("b", PAIR), sealed(1, "a b")),
    ],
    "a later round waits for checks that run, as for any node that is there": [
        *formed(RETRY_2),
        (1.0, failed("b"), broke("b")),
        (2.0, joined("b", RETRY_2, B2_OF_2, unready=""), []),
        (2.0, joined("a", RETRY_2, A2_OF_2), [*written(1, 1)]),
        (3.0, joined("b", RETRY_2, B2_OF_2), sealed(2, "a b", 1)),
    ],
    "but not longer than the last call": [
        *formed(RETRY_2),
        (1.0, failed("b"), broke("b")),
        (2.0, joined("b", RETRY_2, B2_OF_2, unready=""), []),
        (2.0, joined("a", RETRY_2, A2_OF_2), [*written(1, 1)]),
        (3.0, TIME, progress("a", 1, 2, 29.0)),
        (7.0, TIME, [*sealed(2, "a", 1), *stays_out("b", 2)]),
        (8.0, joined("b", RETRY_2, B2_OF_2), stop("a", "b joins", 2)),
    ],
    "a node that stays out is not waited for, and is let in when it is ready": [
        *formed(RETRY_2),
        (1.0, failed("b"), broke("b")),
        (2.0, joined("b", RETRY_2, B2_OF_2, unready="its disk broke"), stays_out("b", 1, "its disk broke")),
        (2.0, joined("a", RETRY_2, A2_OF_2), [
            *written(1, 1), *sealed(2, "a", 1),
            *stays_out("b", 2, "its disk broke"),
        ]),
        (8.0, joined("b", RETRY_2, B2_OF_2), stop("a", "b joins", 2)),
    ],
    "a newcomer whose checks run, or fail, disturbs nobody": [
        (0.0, joined("a", UP_TO_2), []),
        (5.0, TIME, sealed(1, "a")),
        (6.0, joined("b", UP_TO_2, unready=""), stays_out("b", 1)),
        (7.0, joined("b", UP_TO_2, unready="no link"), stays_out("b", 1, "no link")),
        (8.0, closed("b"), []),
        (9.0, joined("b", UP_TO_2, unready="no link"), stays_out("b", 1, "no link")),
        (10.0, succeeded("a"), ended("a b", SUCCESS)),
    ],
    "too few without the nodes that stay out: they are named when the time is up": [
        (0.0, joined("a", PAIR), []),
        (0.0, joined("b", PAIR, unready="no link"), stays_out("b", 0, "no link")),
        (1.0, TIME, progress("a", 2, 2, 29.0)),
        (30.0, TIME, ended("a b", Outcome(
            End.FAILED, "only 1 of at least 2 nodes joined within 30 s (1 missing); joined: a; b stays out: no link"
        ), 0)),
    ],
}  # fmt: skip

ALL = FORMING | REFUSED | RUNNING | FAILING | ADMITTING | UNAWARE | ENDING | UNREADY


def step(run: Membership, event: Any, at: float) -> list[Any]:
    """What is done, with memories that are compared by what differs from step to step."""
    commands = run.step(event, at)
    run.check()
    places = [each.message.place for each in commands if isinstance(each, Tell) and isinstance(each.message, Sealed)]
    for memory in [command.memory for command in commands if isinstance(command, Remember)]:
        assert (memory.settings, memory.term) == (run.settings, run.term)
        assert memory.restart_ages_s == ()
        if places and memory.last_round == places[0].round:
            assert (memory.round_term, len(memory.members)) == (places[0].term, places[0].node_count)
    return [plain(each.memory) if isinstance(each, Remember) else each for each in commands]


def plain(memory: Memory) -> Remember:
    return Remember(Memory(last_round=memory.last_round, restarts_used=memory.restarts_used, outcome=memory.outcome))


def play(run: Membership, script: Script) -> None:
    for at, event, expected in script:
        commands = step(run, event, at)
        assert commands == expected, f"{event} at {at}; the story:\n{run.story()}"


def after(script: Script) -> Membership:
    run = Membership(0.0)
    play(run, script)
    return run


def memory_of(commands: list[Any]) -> Memory:
    """The last that was to be written down."""
    return [command.memory for command in commands if isinstance(command, Remember)][-1]


@promise("""nodes.finishes-early-waits-starts: A node that finishes early waits for the others, and starts again with
    them if one fails.""")
@promise("""nodes.few-join-time-run: If too few nodes join in time, the run ends and says which nodes joined and how
    many are missing.""")
@promise("""nodes.newcomers-arrive-admit-delay: Newcomers that arrive within `--admit-delay` (5 s) of the first one are
    admitted together: the round is stopped once, or as soon as there is no more room. Newcomers that are gone again do
    not stop it. Each is told when it will be admitted.""")
@promise("""nodes.member-know-round-message: If a member does not know of its round because the message was lost, the
    coordinator repeats it. Messages that the member sent before do not cost it its place.""")
@promise("""coordinator.node-run-closes-node: Only a node of the run closes it. No node can make a run use up the
    numbers of its rounds, or make the coordinator keep much.""")
@pytest.mark.parametrize("name", ALL)
def test_rules(name: str) -> None:
    after(ALL[name])


@promise("""coordinator.restart-earlier-charged: After a restart of the coordinator, earlier charged restarts still
    count, by how long ago they were. A failure that was already judged is not charged again. A round number that a node
    has seen is never used again. A run that had ended is not started again.""")
@pytest.mark.parametrize("name", RECOVERING)
def test_rules_after_the_coordinator_was_restarted(name: str) -> None:
    play(Membership(0.0, MEMORY), RECOVERING[name])


@promise("""coordinator.lost-memory-learns-last: A coordinator that has lost its memory learns the last round from the
    nodes, and seals nothing for a whole lease.""")
@pytest.mark.parametrize("name", FORGETFUL)
def test_rules_after_the_coordinator_has_lost_its_memory(name: str) -> None:
    after(FORGETFUL[name])


@proves("coordinator.restart-earlier-charged")
def test_a_remembered_outcome_is_told_to_whoever_comes() -> None:
    run = Membership(0.0, replace(MEMORY, outcome=SUCCESS))
    play(run, [(0.0, joined("a", PAIR), [Tell(keys("a"), Ended(SUCCESS))])])
    play(run, [(1.0, returned("b", PAIR, B3), [Tell(keys("b"), Ended(SUCCESS))])])
    play(run, [(2.0, left("a"), []), (2.0, left("b"), []), (10.0, TIME, [ForgetRun()])])


@promise("""nodes.rejected-settings-differ-requested: A node is rejected if its settings differ, or if another node has
    requested its rank. The message names both values, and the run is not disturbed. If none of the run's nodes is
    connected, the message says so, and when the run will be forgotten.""")
def test_the_first_to_come_after_a_restart_does_not_fix_the_settings() -> None:
    run = Membership(0.0, replace(MEMORY, settings=RETRY))
    other, words = replace(RETRY, max_nodes=3), "--nnodes 2:3, this run has --nnodes 2"
    nobody = "none of its nodes is here now; the run is forgotten when no node has come for a minute"
    play(run, [(0.0, joined("x", other), refused("x", f"{words} ({nobody})"))])
    play(run, [(1.0, returned("a", RETRY, A3), []), (1.5, joined("x", other), refused("x", words))])
    play(run, [(2.0, joined("c", RETRY), standby("c", 3, "2 nodes"))])


@proves("coordinator.lost-memory-learns-last")
def test_restarts_that_a_node_knows_of_are_used_up() -> None:
    """Whatever was written down is gone with the disk that it was on."""
    first = (0.0, joined("a", RETRY, A3), [*written(3, 1), *stop("", "a has left the round", 3)])
    run = after([first, (0.0, joined("b", RETRY, B3), [])])
    play(run, [(1.0, TIME, progress("a b", 2, 2, 29.0)), (49.0, heard("a"), []), (49.0, heard("b"), [])])
    play(run, [(50.0, TIME, sealed(4, "a b", 1))])
    play(run, [(51.0, failed("a", 4), broke("a", "a b", 4)), (52.0, joined("a", RETRY, place(4, 0, used=1)), [])])
    earlier = (RoundEnd(3, "a has left the round", 1, has_departed=True),)
    end = ended("a b", gave_up("a", USED_UP, earlier=earlier), 4, 1)
    play(run, [(53.0, joined("b", RETRY, place(4, 1, used=1)), end)])


@proves("coordinator.restart-earlier-charged")
def test_a_round_that_a_node_has_seen_is_never_used_again() -> None:
    run = after(
        [(0.0, knows("a", PAIR, 8), written(8)), (0.0, joined("b", PAIR), []), (1.0, TIME, progress("a b", 2, 2, 29.0))]
    )
    play(run, [(49.0, heard("a"), []), (49.0, heard("b"), []), (50.0, TIME, sealed(9, "a b"))])


@pytest.mark.parametrize("members", [keys("a b"), ()], ids=["one is missing", "too many to be written down"])
def test_where_a_leader_may_have_vanished_early_its_lease_is_waited_for_too(members: tuple[str, ...]) -> None:
    on_etcd = replace(RETRY, leader_lease_s=7.0)
    run = Membership(0.0, replace(MEMORY, members=members, settings=on_etcd), term=9)
    play(run, [(40.0, joined("a", on_etcd), []), (40.0, joined("c", on_etcd), [])])
    play(run, [(56.9, TIME, progress("a c", 2, 2, 30.0 - 16.9)), (57.0, TIME, sealed(4, "a c", 1, 9))])


def test_the_members_of_a_large_world_are_not_written_down() -> None:
    """So the memory has a bound, and after a restart there is no shortcut."""
    for count, expected in ((4096, 4096), (4097, 0)):
        run, of = Membership(0.0), settings(count, count)
        for number in range(count):
            commands = run.step(joined(f"n{number}", of), 0.0)
        assert len(memory_of(commands).members) == expected


MANY_LOSSES = Memory(
    loss_ages_s=(1 / 3,) * 20_000,
    host_loss_ages_s=tuple((f"{number:03}" + "\U0001f600" * 253, (1 / 3,) * 8) for number in range(64)),
)


@proves("coordinator.10-000-nodes-return")
def test_the_memory_fits_into_a_value_of_etcd() -> None:
    """1.5 MB by default. Whatever the nodes are called, and however many restarts and classes of failures there are."""
    long, names = "\U0001f600", frozenset(f"{number:03}" + "\U0001f600" * 253 for number in range(256))
    policy = RestartPolicy(10**6, 600.0, 0.0, 0.0, frozenset(range(512)), names, frozenset(range(512)), names)
    cause = Failure(long * 256, 0, 1, long * 256, long * 512, kind=long * 256, words=long * 512)
    for length, are_written in ((25, True), (1000, False)):
        run, of = (
            Membership(0.0, replace(MANY_LOSSES, restarts_used=10**5, restart_ages_s=(1 / 3,) * 20_000)),
            settings(4096, 4096, policy=policy),
        )
        for number in range(4096):
            commands = run.step(joined(f"{number}{long * length}", of), 50.0)
        assert bool(memory_of(commands).members) == are_written
        memory = replace(memory_of(commands), outcome=Outcome(End.FAILED, long * 16_384, cause))
        assert len(msgspec.msgpack.encode(memory)) < 1_500_000


@promise("""restarts.coordinator-replaced-backoff: A coordinator that is replaced while a backoff runs waits for the
    rest of it.""")
@proves("coordinator.restart-earlier-charged")
def test_a_failure_that_was_judged_before_is_not_charged_again() -> None:
    """1. b fails, 2. a restart is charged, and waits for its backoff, 3. the coordinator is replaced, 4. b joins the
    next one, still with what it failed of. The rest of the backoff is waited for."""
    of = settings(2, 2, policy=RestartPolicy(1, backoff_s=8.0))
    run = after([*formed(of), (1.0, failed("b"), broke("b")), (2.0, joined("a", of, 1), [])])
    memory = memory_of(run.step(joined("b", of, place(1, 1)), 3.0))
    assert (memory.restarts_used, memory.members, memory.is_round_over) == (1, keys("a b"), True)
    assert memory.backoff_left_s == 8.0
    run = Membership(0.0, replace(memory, backoff_left_s=3.0))
    play(run, [(0.0, returned("x", of, place(1, 1)), [Expel("x/0", GIVEN_AWAY.format(1))])])
    play(run, [(1.0, joined("b", of, place(1, 1), failure=failure("b")), [])])
    play(run, [(1.5, joined("a", of, place(1, 0)), []), (3.0, TIME, sealed(2, "a b", 1, 2))])
    assert memory_of(run.step(closes(by="b"), 4.0)).backoff_left_s == 0.0


@proves("restarts.coordinator-replaced-backoff")
def test_what_is_left_of_a_backoff_is_written_down() -> None:
    """Also before a restart that is not counted; and by a coordinator that writes because of something else."""
    policy = RestartPolicy(0, backoff_s=8.0, backoff_cap_s=1e6, uncounted_exit_codes=frozenset({9}))
    of = settings(1, 1, policy=policy)
    run = after([(0.0, joined("a", of), sealed(1, "a")), (1.0, failed("a", exitcode=9), broke("a", "a"))])
    commands = run.step(joined("a", of, place(1, 0, 1)), 2.0)
    assert commands[1:] == notice("a", "a restart that is not counted, in 8 s")
    assert memory_of(commands).backoff_left_s == 8.0
    again = Membership(100.0, memory_of(commands))
    assert memory_of(again.step(knows("b", of, 7), 103.0)).backoff_left_s == 5.0
    endless = replace(of, policy=replace(policy, backoff_s=1e6))
    run = after([(0.0, joined("a", endless), sealed(1, "a")), (1.0, failed("a", exitcode=9), broke("a", "a"))])
    assert memory_of(run.step(joined("a", endless, place(1, 0, 1)), 2.0)).backoff_left_s == 86400.0


def test_members_that_an_adopted_round_has_got_to_know_are_written_down() -> None:
    of = settings(2, 2, max_restarts=2)
    run = Membership(0.0, replace(MEMORY, members=()))
    run.step(returned("a", of, A3), 0.0)
    run.step(joined("b", of, B3, failure=failure("b")), 0.0)
    assert memory_of(run.step(joined("a", of, A3), 1.0)).members == keys("a b")


def fails(run: Membership, of: Settings, at: float, round: int) -> list[Any]:
    """The only node fails and joins again."""
    run.step(heard("a"), at)
    run.step(failed("a", round), at)
    return run.step(joined("a", of, place(round, 0, 1)), at)


@proves("coordinator.restart-earlier-charged")
@pytest.mark.parametrize(("every_s", "is_end"), [(86_400.0, False), (60.0, True)])
def test_what_was_charged_before_the_restart_of_the_coordinator_counts(every_s: float, is_end: bool) -> None:
    """With 5 in 10 minutes: 7 restarts in 7 days do no harm, those of the last minutes do."""
    of = settings(1, 1, policy=RestartPolicy(5, window_s=600.0), lease_s=1e6)
    run = Membership(0.0)
    run.step(joined("a", of), 0.0)
    used = 5 if is_end else 7
    for number in range(1, used + 1):
        commands = fails(run, of, every_s * number, number)
    memory = memory_of(commands)
    assert (memory.restarts_used, memory.last_round, run.outcome) == (used, used + 1, None)
    run = Membership(5.0, memory)  # Another host, whose clock shows another time.
    commands = run.step(joined("a", of, place(used + 1, 0, 1, used), failure=failure("a")), 6.0)
    assert (run.phase is Phase.ENDED) == is_end
    assert run.restarts_used == (used if is_end else 8)


@proves("coordinator.10-000-nodes-return", "coordinator.node-run-closes-node")
def test_no_number_that_a_node_sends_sizes_anything() -> None:
    of = settings(1, 2, policy=RestartPolicy(10**9, window_s=600.0))
    most = Place(1, 2**52, 2**17 - 2, 2**17 - 1, (("default", 1),), restarts_used=50_000_000)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    run, began = Membership(0.0), time.thread_time()
    run.step(joined("a", of, most, failure=failure("a")), 0.0)
    run.step(From("b/0", Return(facts("b"), of, replace(most, rank=3), Stage.RUNNING)), 0.0)
    run.step(joined("b", of, replace(most, rank=3)), 0.0)
    run.step(TIME, 51.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (run.restarts_used, run.round) == (50_000_000, 2**52)
    assert peak - before < 200_000
    assert time.thread_time() - began < 0.5


@proves("coordinator.node-run-closes-node")
def test_nothing_large_that_a_node_says_is_kept_for_the_story_or_the_outcome() -> None:
    """A run of 1,000 nodes that all fail, with all the evidence that may be sent."""
    of = settings(1000, 1000, policy=RestartPolicy(9))
    run = Membership(0.0)
    for number in range(1000):
        run.step(joined(f"n{number}", of), 0.0)
    tracemalloc.start()
    for number in range(1000):
        evidence = Evidence(*("e" * 16_000 for _ in range(4)))
        told = replace(failure(f"n{number}", is_consequence=number < 900), text="x" * 512, evidence=evidence)
        run.step(From(f"n{number}/0", Failed(1, told)), 1.0)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 2_000_000
    assert [each.node for each in run._present.failures.values()] == [*(f"n{number}" for number in range(8)), "n900"]


@proves("coordinator.node-run-closes-node")
def test_a_run_has_a_bounded_number_of_kinds_of_nodes() -> None:
    of = settings(1, 5000)
    run = Membership(0.0)
    for number in range(1024):
        run.step(joined(f"n{number}", of, local_world_size=number + 1), 0.0)
    problem = "the nodes of this run have 1024 different roles and numbers of processes already"
    assert run.step(joined("newcomer", of, local_world_size=2000), 0.0)[0] == refused("newcomer", problem)[0]
    assert run.step(joined("alike", of, local_world_size=7), 0.0) == []


@proves("coordinator.node-run-closes-node")
def test_no_node_can_make_a_run_use_up_the_numbers_of_its_rounds() -> None:
    too_much = "it claims to know of round {}, this run is at {}"
    run = Membership(0.0)
    commands = run.step(From("x/0", Join(facts("x"), PAIR, heard_round=2**52 + 1)), 0.0)
    assert commands == refused("x", too_much.format(2**52 + 1, 0))
    for event in (joined("a", PAIR), joined("b", PAIR)):
        run.step(event, 0.0)
    assert run.round == 1
    high = Place(1, 2**20 + 2, 0, 2, (("default", 1),))
    for message in (
        Join(facts("x"), PAIR, heard_round=2**20 + 2),
        Join(facts("x"), PAIR, high),
        Return(facts("x"), PAIR, high, Stage.RUNNING),
    ):
        assert run.step(From("x/0", message), 1.0) == refused("x", too_much.format(2**20 + 2, 1))
    assert run.round == 1


# Stopping is bounded.

STUCK = "did not stop its workers within 45 s"
WITHOUT_B: Script = [
    *formed(RETRY),
    (1.0, failed("a"), broke("a")),
    (2.0, joined("a", RETRY, 1), []),
    (40.0, heard("a"), []),
    (40.0, heard("b"), []),
    (45.9, TIME, []),
    (46.0, TIME, [*notice("a", f"b {STUCK}: treated as lost"), Expel("b/0", f"it {STUCK}")]),
]


@proves("coordinator.node-keeps-lease-come")
def test_one_that_does_not_come_back_from_a_stop_is_lost_a_lease_after_it_was_expelled() -> None:
    run = after(WITHOUT_B)
    play(run, [(47.0, heard("a"), []), (60.0, heard("b"), []), (90.0, heard("a"), []), (95.9, TIME, [])])
    play(run, [(96.0, TIME, put_down(f"b {STUCK}", "a")), (97.0, joined("c", RETRY), sealed(2, "a c"))])


def test_one_that_comes_back_at_last_as_a_stranger_takes_part() -> None:
    run = after(WITHOUT_B)
    back = joined("b/1", RETRY, place(1, 1), has_lost_place=True)
    play(run, [(50.0, back, [*put_down(f"b {STUCK}", "a b/1"), *sealed(2, "a b/1")])])


def test_one_that_was_expelled_and_did_not_hear_of_it_has_no_place_to_return_to() -> None:
    """1. b is expelled, 2. its connection breaks before it hears of that, 3. it is back, and never stops."""
    run = after([*WITHOUT_B, (47.0, returned("b", RETRY, place(1, 1)), broke("a", "b"))])
    later = "did not stop its workers within 95 s"
    play(run, [(90.0, heard("a"), []), (90.0, heard("b"), [])])
    play(run, [(96.0, TIME, [*notice("a", f"b {later}: treated as lost"), Expel("b/0", f"it {later}")])])
    play(run, [(130.0, heard("a"), []), (146.0, TIME, put_down(f"b {STUCK}", "a"))])


def test_a_member_of_an_adopted_round_has_its_own_grace() -> None:
    """The round is stopped by one that needs no time, and the other is heard of later."""
    run = Membership(0.0, MEMORY)
    run.step(joined("b", RETRY, B3, grace_s=0.0, failure=failure("b")), 0.0)
    play(run, [(10.0, returned("a", RETRY, A3, grace_s=100.0), broke("b", "a", 3))])
    for at in range(20, 120, 20):
        play(run, [(float(at), heard(name), []) for name in "ab"] + [(float(at), TIME, [])])
    play(run, [(120.0, joined("a", RETRY, A3), ended("b a", gave_up("b", USED_UP), 3, 1))])


@promise("""coordinator.node-keeps-lease-come: A node that keeps its lease but does not come back from a stop is lost
    after its grace period and a margin, and the others report which one it was. Many such nodes are reported at once.
    The margin is what the agents of the round need: 35 s, or 55 s with a limit for hangs, because stacks may take 20 s;
    at most 60 s.""")
def test_a_stop_takes_as_long_as_a_member_says_that_it_may_need() -> None:
    """Stacks of workers that hang take up to 20 s. With a margin of 15 s the node would be expelled, uncharged, in
    every round."""
    run = after([(0.0, joined("a", RETRY), []), (0.0, joined("b", RETRY, stop_margin_s=35.0), sealed(1, "a b"))])
    play(run, [(1.0, failed("a", exception="hang"), [Tell(keys("a b"), Stop(1, "a broke", True, is_hang=True))])])
    play(run, [(2.0, joined("a", RETRY, 1), []), (48.0, heard("a"), []), (48.0, heard("b"), []), (52.0, TIME, [])])
    back = joined("b", RETRY, place(1, 1), stop_margin_s=35.0)
    play(run, [(53.0, back, [*written(1, 1), *sealed(2, "a b", 1)])])


# Losses are bounded.

TWICE = replace(UP_TO_2, policy=RestartPolicy(loss_limit=2, loss_window_s=1000.0))
LOST_TWICE = "the 2 allowed restarts after lost nodes within 1000 s are used up (--loss-limit 2)"


def lose_b(run: Membership, of: Settings, round: int, how: str = "lost", **fields: Any) -> list[Any]:
    """Another node b joins, and is lost in the next round, or goes away as `how` says. Rounds take 100 s."""
    name, at = f"b{round}", 100.0 * round
    said = run.step(joined(name, of, **fields), at)
    said += run.step(joined("a", of, place(round, 0, 1), **fields), at)
    assert run.world is not None
    last = run.world.place_of("a/0")
    if how != "lost":
        said += run.step(leaving(name), at + 1)
    said += run.step(left(name) if how == "left" else closed(name), at + 1)
    for _ in range(2):
        run.step(heard("a"), at + 21)
    said += run.step(TIME, at + 21)
    said += run.step(joined("a", of, last, **fields), at + 22)
    run.check()
    return said


def alone(of: Settings, **fields: Any) -> Membership:
    run = Membership(0.0)
    for at, event in ((0.0, joined("a", of, **fields)), (5.0, TIME)):
        run.step(event, at)
    return run


@proves("nodes.most-loss-limit-restarts")
@pytest.mark.parametrize("how", ["left", "leaves and is killed"])
def test_a_node_that_announces_its_leave_is_not_lost(how: str) -> None:
    run = alone(TWICE)
    for round in (1, 3, 5, 7, 9):
        lose_b(run, TWICE, round, how, host="h")
    assert (run.phase, run.round) == (Phase.RUNNING, 11)


@proves("nodes.most-loss-limit-restarts")
def test_progress_begins_the_count_of_losses_anew() -> None:
    run = alone(TWICE)
    for round in (1, 3, 5, 7, 9):
        lose_b(run, TWICE, round, advance=Advance(round) if round == 5 else None)
        assert (run.phase is Phase.ENDED) == (round == 9)


@proves("nodes.most-loss-limit-restarts")
def test_losses_survive_the_coordinator() -> None:
    run = alone(TWICE)
    for round in (1, 3):
        memory = memory_of(lose_b(run, TWICE, round, host="h"))
    assert (memory.loss_ages_s, memory.host_loss_ages_s) == ((200.0, 0.0), (("h", (201.0, 1.0)),))
    again = Membership(500.0, memory)
    again.step(returned("a", TWICE, place(5, 0, 1), host="h"), 500.0)
    assert memory_of(lose_b(again, TWICE, 5, host="other")).outcome == Outcome(End.FAILED, LOST_TWICE, is_final=True)


def waits(name: str, round: int, left_s: int, count: int = 2, host: str = "h") -> list[Any]:
    why = f"because host {host} was lost {count} times in the last hour"
    return [Tell(keys(name), StandBy(round, f"this node stands by for {left_s} s more, {why}"))]


ANY_LOSSES = RestartPolicy(loss_limit=100)
HOSTS_2, HOSTS_3 = replace(UP_TO_2, policy=ANY_LOSSES), replace(settings(2, 3), policy=ANY_LOSSES)
LOST_BEFORE = Memory(1, 1, 4, keys("a"), is_round_over=True, host_loss_ages_s=(("h", (100.0, 3.0)),))
A4 = place(4, 0, 1)
HELD: dict[str, tuple[Memory, Script]] = {
    "the run goes on without it, and admits it when its time has come": (
        LOST_BEFORE, [
            (0.0, joined("b", HOSTS_2, host="h"), waits("b", 4, 7)),
            (1.0, joined("a", HOSTS_2, A4), [*sealed(5, "a", term=2), *waits("b", 5, 6)]),
            (6.9, TIME, []),
            (7.0, TIME, stop("a", "b joins", 5)),
            (8.0, joined("a", HOSTS_2, place(5, 0, 1, term=2)), sealed(6, "a b", term=2)),
        ],
    ),
    "when its time has come there is no room: it stands by like any other": (
        replace(LOST_BEFORE, members=keys("a c")), [
            (0.0, joined("b", HOSTS_2, host="h"), waits("b", 4, 7)),
            (0.5, joined("a", HOSTS_2, place(4, 0, 2)), []),
            (0.5, joined("c", HOSTS_2, place(4, 1, 2)), [*sealed(5, "a c", term=2), *waits("b", 5, 6)]),
            (7.0, TIME, standby("b", 5, "2 nodes")),
        ],
    ),
    "one that will be free within the last call is waited for": (
        LOST_BEFORE, [
            (2.5, joined("b", HOSTS_2, host="h"), waits("b", 4, 4)),
            (2.5, joined("a", HOSTS_2, A4), []),
            (6.9, TIME, progress("a", 1, 2, 30.0 - 4.4)),
            (7.0, TIME, sealed(5, "a b", term=2)),
        ],
    ),
    "without it there are too few: it is waited for, longer than the join timeout if need be": (
        replace(LOST_BEFORE, members=(), host_loss_ages_s=(("h", (4.0, 3.0, 2.0, 1.0)),)), [
            (0.0, joined("b", HOSTS_3, host="h"), waits("b", 4, 39, 4)),
            (0.0, joined("a", HOSTS_3), []),
            (1.0, TIME, progress("a", 2, 3, 29.0)),
            (30.0, heard("a"), []),
            (30.0, heard("b"), []),
            (31.0, TIME, []),
            (39.0, TIME, []),
            (40.0, TIME, progress("a b", 2, 3, 0.0)),
            (50.0, TIME, sealed(5, "b a", term=2)),
        ],
    ),
    "with it there would still be too few: it is named": (
        LOST_BEFORE, [
            (0.0, joined("b", replace(HOSTS_3, min_nodes=3, join_timeout_s=5.0), host="h"), waits("b", 4, 7)),
            (5.0, TIME, ended("b", Outcome(
                End.FAILED, "only 0 of at least 3 nodes joined within 5 s (3 missing); joined: no node; b stands by "
                "for 2 s more, because host h was lost 2 times in the last hour"), 4)),
        ],
    ),
    "it is back on another connection, which changes nothing": (
        LOST_BEFORE, [
            (0.0, joined("b", HOSTS_2, host="h"), waits("b", 4, 7)),
            (1.0, closed("b"), []),
            (2.0, joined("b", HOSTS_2, host="h"), waits("b", 4, 5)),
            (3.0, joined("a", HOSTS_2, A4), []),
            (7.0, TIME, sealed(5, "a b", term=2)),
        ],
    ),
    "another node of the same host, which was not lost, does not wait": (
        LOST_BEFORE, [(0.0, joined("a", HOSTS_2, A4, host="h"), sealed(5, "a", term=2))],
    ),
}  # fmt: skip


@proves("nodes.host-lost-second-time")
@pytest.mark.parametrize("name", HELD)
def test_a_host_that_was_lost_repeatedly_waits(name: str) -> None:
    memory, script = HELD[name]
    play(Membership(0.0, memory), script)


@proves("nodes.host-lost-second-time")
def test_what_a_node_waits_for_is_written_down_before_it_is_told() -> None:
    """1. b joins and stops a round by that, 2. it dies before the next one, 3. the same again."""
    run = alone(HOSTS_2)
    for round in (1, 2):
        run.step(joined(f"b{round}", HOSTS_2, host="h"), 100.0 * round)
        run.step(closed(f"b{round}"), 100.0 * round + 1)
        run.step(heard("a"), 100.0 * round + 21)
        run.step(TIME, 100.0 * round + 21)
        if round == 1:
            run.step(joined("a", HOSTS_2, place(round, 0, 1)), 122.0)
    commands = run.step(joined("b3", HOSTS_2, host="h"), 225.0)
    assert memory_of(commands).host_loss_ages_s == (("h", (104.0, 4.0)),)
    assert [plain(each.memory) if isinstance(each, Remember) else each for each in commands] == [
        *written(2),
        *waits("b3", 2, 6),
    ]
    assert step(run, joined("b4", HOSTS_2, host="h"), 226.0) == waits("b4", 2, 5), "it is known by now"


@promise("""etcd-runs.nodes-left-first-round: When all nodes have left before the first round, the next may come with
    other settings. This holds with a coordinator, too.""")
@pytest.mark.parametrize(
    ("story", "is_fixed"),
    [
        ([joined("a", PAIR), left("a")], False),
        ([joined("a", PAIR), leaving("a"), left("a")], False),
        ([joined("a", PAIR), joined("b", ONE), left("b")], True),
        ([joined("a", UP_TO_3), joined("b", UP_TO_3), left("a")], True),
        ([joined("a", THREE), joined("b", THREE), closed("b"), TIME, left("a")], True),
        ([joined("a", PAIR), joined("b", PAIR), left("a"), left("b")], True),
        ([joined("a", PAIR), closed("a"), TIME], True),
        ([joined("a", PAIR), closed("a"), TIME, joined("b", ONE), left("b")], True),
    ],
    ids=["left", "left in order", "a misfit", "one waits", "one may come back", "a round", "lost", "a misfit leaves"],
)
def test_settings_are_free_again_when_all_have_left_before_the_first_round(story: list[Any], is_fixed: bool) -> None:
    run = Membership(0.0)
    for event in story:
        at = 20.0 if event is TIME else 0.0
        run.step(event, at)
        run.check()
    commands = run.step(joined("c", settings(1, 2, lease_s=49.0)), 21.0)
    assert any(isinstance(each, Tell) and isinstance(each.message, Refused) for each in commands) == is_fixed


def test_many_lost_nodes_are_not_all_named() -> None:
    many = settings(1, 12)
    names = [f"n{at:02}" for at in range(12)]
    run = after(formed(many, " ".join(names)))
    run.step(failed("n00"), 1.0)
    for name in names[1:]:
        run.step(closed(name), 1.0)
    run.step(joined("n00", many, 1), 2.0)
    [said] = [
        each.message.text
        for each in run.step(TIME, 21.0)
        if isinstance(each, Tell) and isinstance(each.message, Notice)
    ]
    assert said.startswith(f"n01 {NOT_BACK}; n02 is lost")
    assert "n08" in said
    assert "n09" not in said
    assert "; and 3 more (the failures of round 1 are put down" in said


@proves("nodes.newest-snapshot-all-can-load")
def test_the_members_are_told_which_snapshot_to_load() -> None:
    """What a node holds that joins again, not what it held before; and nothing of a node that stands by."""
    old, new = SnapshotId(1, 3, 7, 2), SnapshotId(1, 3, 8, 2)
    run, both = Membership(0.0), (Held(old, ((0, 2),)), Held(new, ((0, 2),)))
    run.step(joined("a", PAIR, held=both, snapshot_port=5, address="x"), 0.0)
    run.step(joined("a", PAIR, held=(Held(old, ((0, 1),)),), snapshot_port=5, address="x"), 0.0)
    commands = run.step(joined("b", PAIR, held=(Held(old, ((1, 1),)), Held(new, ((1, 1),))), address="y"), 0.0)
    places = [each.message.place for each in commands if isinstance(each, Tell) and isinstance(each.message, Sealed)]
    assert [each.chosen for each in places] == [Chosen(old), Chosen(old)]
    run.step(joined("c", PAIR, held=both, snapshot_port=5, address="z"), 0.0)
    commands = [*run.step(left("b"), 1.0), *run.step(joined("a", PAIR, places[0], snapshot_port=5, address="x"), 1.0)]
    places = [each.message.place for each in commands if isinstance(each, Tell) and isinstance(each.message, Sealed)]
    assert [each.chosen for each in places] == [Chosen(new, (Source((0, 1), "z", 5),)), Chosen(new)]


@proves("nodes.agreed-step-kept-by-all")
def test_members_are_asked_to_keep_a_step_while_the_round_runs() -> None:
    def saved(name: str, *steps: int, round: int = 1) -> From:
        return From(key(name), SnapshotReport(round, SavedSteps(*steps)))

    copied = settings(2, 2, max_restarts=1, snapshot_copies=1)
    run, places = Membership(0.0), []
    for name in "ab":
        commands = run.step(joined(name, copied, snapshot_port=7, address=name, host=name), 0.0)
        places += [each.message.place for each in commands if isinstance(each, Tell)]
    assert [(each.agrees_on_steps, each.copy_to) for each in places] == [(True, (("b", 7),)), (True, (("a", 7),))]
    assert run.step(saved("a", 5), 1.0) + run.step(saved("c", 5), 1.0) + run.step(saved("b", 5, round=2), 1.0) == []
    assert run.step(saved("b", 5), 1.0) == [Tell(keys("a b"), KeepFrom(1, 6))]
    run.step(closed("b"), 1.0)
    assert run.step(returned("b", copied, places[1]), 2.0) == [Tell(keys("b"), KeepFrom(1, 6))]
    run.step(failed("a"), 3.0)
    assert run.step(saved("a", 6, 6), 3.0) + run.step(saved("b", 6, 6), 3.0) == [], "it is being stopped"
    back = run.step(returned("b", copied, places[1]), 3.0)
    assert [type(each.message) for each in back if isinstance(each, Tell)] == [Stop]


COPY_TARGETS: list[tuple[str, int, dict[str, str]]] = [
    ("a b c", 1, {"a": "b", "b": "c", "c": "a"}),
    ("a b c", 2, {"a": "b c", "b": "c a", "c": "a b"}),
    ("a b", 3, {"a": "b", "b": "a"}),
    ("a", 1, {"a": ""}),
    ("a b- c", 1, {"a": "c", "b-": "c", "c": "a"}),
    ("a a2 b", 1, {"a": "b", "a2": "b", "b": "a"}),
    ("a a2", 1, {"a": "a2", "a2": "a"}),
]


@promise("""nodes.copies-on-other-hosts: Copies of snapshots go to the next nodes in rank order, on other hosts if there
    are any near by.""")
@pytest.mark.parametrize(("names", "copies", "expected"), COPY_TARGETS)
def test_where_copies_go(names: str, copies: int, expected: dict[str, str]) -> None:
    """A node's host is its first letter; one with a `-` has no transfer process."""
    run, of, found = Membership(0.0), settings(len(names.split()), 8, snapshot_copies=copies, last_call_s=0.0), {}
    for name in names.split():
        facts = {"snapshot_port": 0 if "-" in name else 7, "address": name, "host": name[0]}
        for each in run.step(joined(name, of, **facts), 0.0):
            if isinstance(each, Tell) and isinstance(each.message, Sealed):
                found[each.keys[0].removesuffix("/0")] = " ".join(to for to, _ in each.message.place.copy_to)
    assert found == expected


MANY = 10_000
CROWD = settings(MANY, MANY, max_restarts=1)


def took_s(run: Membership, events: list[Any], at: float) -> float:
    """Of this thread's time. It is next to nothing if each node costs the same, and far more than the 2 s that are
    allowed if each costs as much as there are nodes."""
    began = time.thread_time()
    for event in events:
        run.step(event, at)
    return time.thread_time() - began


def crowd() -> Membership:
    run = Membership(0.0)
    assert took_s(run, [joined(f"n{number}", CROWD) for number in range(MANY)], 0.0) < 2.0
    assert run.phase is Phase.RUNNING
    return run


@promise("""coordinator.10-000-nodes-return: 10,000 nodes return to a new coordinator, get their places again, are lost
    or rejected at a cost that grows linearly. No number that a node sends sizes anything, and the memory fits into a
    value of etcd.""")
def test_very_many_nodes_are_adopted() -> None:
    run = Membership(0.0)
    back = [returned(f"n{number}", CROWD, place(3, number, MANY)) for number in range(MANY)]
    assert took_s(run, back, 0.0) < 2.0
    run.check()
    assert run.world is not None
    assert (run.phase, run.world.missing, len(run.world.keys)) == (Phase.RUNNING, 0, MANY)


@proves("coordinator.10-000-nodes-return")
def test_very_many_nodes_that_have_stopped_are_taken_up() -> None:
    """After a failure that the coordinator before did not live to judge."""
    run, last = Membership(0.0), [place(3, number, MANY) for number in range(MANY)]
    back = [joined(f"n{number}", CROWD, last[number], failure=failure("n")) for number in range(MANY)]
    assert took_s(run, back, 0.0) < 2.0
    run.check()
    assert (run.phase, run.round, run.restarts_used) == (Phase.FORMING, 3, 1), "nothing is sealed for a lease"


@proves("coordinator.10-000-nodes-return")
def test_very_many_nodes_are_told_again_of_their_place() -> None:
    run = crowd()
    assert took_s(run, [joined(f"n{number}", CROWD) for number in range(MANY)], 1.0) < 2.0
    assert run.step(joined("n77", CROWD), 1.0) == told_place("n77", 77, 1, MANY)


@proves("coordinator.10-000-nodes-return")
def test_very_many_nodes_are_lost() -> None:
    run = crowd()
    assert took_s(run, [*(closed(f"n{number}") for number in range(1, MANY))], 1.0) + took_s(run, [TIME], 21.0) < 2.0
    assert (len(run.nodes), run.phase) == (1, Phase.STOPPING)


@proves("coordinator.node-keeps-lease-come")
def test_very_many_nodes_do_not_stop() -> None:
    run = crowd()
    play(run, [(1.0, failed("n0"), broke("n0", " ".join(f"n{number}" for number in range(MANY))))])
    play(run, [(1.0, joined("n0", CROWD, place(1, 0, MANY)), [])])
    began = time.thread_time()
    told, *expelled = run.step(TIME, 46.0)
    assert time.thread_time() - began < 2.0
    names = "n1, n10, n100, n1000, n1001, n1002, n1003, n1004, ..."
    assert [told] == notice("n0", f"{names} did not stop their workers within 45 s: treated as lost")
    assert len(expelled) == MANY - 1


@proves("coordinator.10-000-nodes-return")
def test_very_many_nodes_are_refused_while_many_wait() -> None:
    run, of = Membership(0.0), settings(MANY, MANY + 1)
    for number in range(MANY - 1):
        run.step(joined(f"n{number}", of), 0.0)
    assert took_s(run, [joined(f"x{number}", PAIR) for number in range(2000)], 1.5) < 2.0


# The rest.

DEADLINES: dict[str, tuple[Script, float | None]] = {
    "nobody": ([], None),
    "progress first": ([(0.0, joined("a", PAIR), [])], 1.0),
    "the join timeout": ([(0.0, joined("a", PAIR), []), (1.0, TIME, progress("a", 2, 2, 29.0))], 30.0),
    "the last call": ([(0.0, joined("a", UP_TO_3), []), (1.0, TIME, progress("a", 1, 3, 29.0))], 5.0),
    "the first lease to end": ([*formed(PAIR), (7.0, heard("a"), [])], 50.0),
    "leases that go on": ([*formed(PAIR), (7.0, heard("a"), []), (8.0, heard("b"), [])], 57.0),
    "a closed connection": ([*formed(PAIR), (7.0, closed("a"), [])], 27.0),
    "back again": ([*formed(PAIR), (7.0, closed("a"), []), (8.0, returned("a", PAIR), [])], 50.0),
    "a stop": ([*formed(PAIR), (2.0, heard("a"), []), (2.0, heard("b"), []), (2.0, failed("a"), broke("a"))], 47.0),
    "newcomers": (B_COMES, 15.0),
    "the end": ([*formed(ONE, "a"), (1.0, succeeded("a"), ended("a", SUCCESS))], 11.0),
}


@pytest.mark.parametrize("name", DEADLINES)
def test_deadlines(name: str) -> None:
    script, expected = DEADLINES[name]
    assert after(script).next_deadline() == expected


@proves("nodes.order-events-run-machine")
def test_phases_change_only_as_the_picture_says() -> None:
    run = after([*formed(ONE, "a"), (1.0, succeeded("a"), ended("a", SUCCESS))])
    with pytest.raises(InternalError, match=r"a run cannot go from ENDED to RUNNING; before:\n0\.000 Join a/0 -> "):
        run._enter(Phase.RUNNING)
    assert {after for _, _, after in PHASE_CHANGES} == set(Phase)
    assert Phase.ENDED not in {before for before, _, _ in PHASE_CHANGES}


def test_everybody_hears_that_a_round_is_stopped_because_it_hung() -> None:
    """Each node then sees where its workers are; the one with the worker that stands out names the cause."""
    run = after(formed(RETRY))
    hung = Tell(keys("a b"), Stop(1, "a broke", is_failure=True, is_hang=True))
    play(run, [(10.0, failed("a", exception="hang", is_consequence=True), [hung])])
    play(run, [(10.1, failed("b", exception="hang"), []), (10.2, joined("a", RETRY, 1), [])])
    play(run, [(10.3, joined("b", RETRY, 1), [*written(1, 1), *sealed(2, "a b", 1)])])
    [again] = step(run, failed("a", round=2, exception="hang", is_consequence=True), 11.0)
    assert again.message.is_hang
    step(run, failed("b", round=2, exception="hang"), 11.1)
    step(run, joined("a", RETRY, 2), 11.2)
    step(run, joined("b", RETRY, 2), 11.3)
    assert run.outcome is not None
    assert run.outcome.cause is not None
    assert run.outcome.cause.node == "b"


def test_other_failures_are_no_hangs() -> None:
    [stopped] = step(after(formed(PAIR)), failed("a", exception="ValueError"), 10.0)
    assert not stopped.message.is_hang


@proves("failures.peers-places")
def test_a_failure_that_points_at_a_peer_has_the_places_of_all_nodes() -> None:
    run = after(formed(PAIR))
    [stopped] = step(run, failed("a", blames_peer=True), 10.0)
    assert stopped == Tell(keys("a b"), Stop(1, "a broke", is_failure=True, blames_peer=True))
    step(run, joined("a", PAIR, 1, peers=(Folded((0, 1), "in a collective", "at x.py:1"),)), 10.1)
    step(run, joined("b", PAIR, 1, peers=(Folded((2, 3), "in a collective", "at x.py:1"),)), 10.2)
    assert run.outcome is not None
    assert run.outcome.cause is not None
    places = run.outcome.cause.evidence.peers
    assert places == (Folded((1, 2, 3), "in a collective", "at x.py:1"),), "0 is the one that failed"


def test_a_node_that_had_finished_hears_that_its_round_is_over() -> None:
    """The coordinator before this one died when it had judged the round, before it told the node of the stop."""
    script: Script = [
        (0.0, returned("a", RETRY, A3, Stage.FINISHED), stop("a", "the round was stopped meanwhile", 3)),
        (1.0, joined("a", RETRY, A3), []),
        (2.0, joined("b", RETRY, B3), sealed(4, "a b", 1, term=2)),
    ]
    play(Membership(0.0, replace(MEMORY, is_round_over=True)), script)


def test_workers_of_a_round_that_is_over_are_expelled() -> None:
    machine = Membership(0.0, replace(MEMORY, is_round_over=True))
    assert machine.step(returned("a", RETRY, A3), 0.0) == [Expel("a/0", GIVEN_AWAY.format(3))]


def test_why_rounds_ended_is_told_with_the_outcome_and_survives_the_coordinator() -> None:
    of = settings(1, 1, max_restarts=10)
    run = Membership(0.0)
    run.step(joined("a", of), 0.0)
    for round in range(1, 11):
        run.step(failed("a", round), float(round))
        commands = run.step(joined("a", of, place(round, 0, 1, round - 1)), float(round))
    earlier = memory_of(commands).earlier
    assert earlier == tuple(RoundEnd(round, "a broke", round) for round in range(3, 11)), "the last eight"
    run = Membership(20.0, memory_of(commands))
    run.step(returned("a", of, place(11, 0, 1, 10)), 20.0)
    run.step(failed("a", 11), 21.0)
    told = run.step(joined("a", of, place(11, 0, 1, 10)), 22.0)
    assert [each.message.outcome.earlier for each in told if isinstance(each, Tell)] == [earlier]


@proves("cli.progress-limit-restarts-row")
def test_progress_of_any_member_counts_and_the_count_survives_the_coordinator() -> None:
    of = settings(2, 2, policy=RestartPolicy(9, no_progress_limit=1))
    run = after(formed(of))

    def fail(run: Membership, round: int, *advances: Advance) -> list[Any]:
        run.step(failed("a", round), float(round))
        told = []
        for rank, (name, advance) in enumerate(zip("ab", advances, strict=True)):
            told += run.step(joined(name, of, place(round, rank, 2, round - 1), advance=advance), float(round))
        return told

    fail(run, 1, Advance(), Advance())
    fail(run, 2, Advance(), Advance(7))
    commands = fail(run, 3, Advance(7), Advance(6))
    memory = memory_of(commands)
    assert (memory.best_step, memory.fruitless) == (7, 1)
    again = Membership(20.0, memory)
    for name, rank in (("a", 0), ("b", 1)):
        again.step(returned(name, of, place(4, rank, 2, 3)), 20.0)
    *_, ended_with = fail(again, 4, Advance(7), Advance(7))
    outcome = ended_with.message.outcome
    assert (outcome.end, outcome.is_final) == (End.FAILED, True)
    assert outcome.reason == "1 restart without getting further than step 7 (--no-progress-limit 1)"
    assert outcome.in_brief().is_final
