"""The rules of a run, each as a short list of what happens and what is done about it.

A script is a list of (time, event, commands). The times that the settings give: a node is suspect after 25 s of
silence and lost after 50, or after 20 with its connection closed; the last call is 5 s, the join timeout 30 s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.errors import InternalError
from holdfast.rendezvous.legacy_membership import PHASE_CHANGES, Membership, Phase
from holdfast.rendezvous.outcome import End, Failure, Outcome
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.rendezvous.vocabulary import (
    Admit,
    Announce,
    CloseRequested,
    ConnectionClosed,
    Expel,
    ForgetRun,
    LeaseExpired,
    Memory,
    NodeHeard,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeReturned,
    Refuse,
    Remember,
    SealWorld,
    Settings,
    ShowProgress,
    Stage,
    StopRound,
    TellOutcome,
    TellPlace,
    TimePassed,
    WorkersFailed,
    WorkersSucceeded,
)
from holdfast.rendezvous.world import NodeFacts, Place, Run, World

Script = list[tuple[float, Any, list[Any]]]
TIME = TimePassed()


def settings(min_nodes: int, max_nodes: int, max_restarts: int = 0, **fields: Any) -> Settings:
    usual = Settings(min_nodes, max_nodes, 30.0, 5.0, 10.0, 50.0, 20.0, 10.0, policy=RestartPolicy(max_restarts))
    return replace(usual, **fields)


ONE, PAIR, UP_TO_3 = settings(1, 1), settings(2, 2), settings(1, 3)
RETRY = settings(2, 2, max_restarts=1)
ON_RESTART = settings(1, 2, admit=Admit.ON_RESTART)


def key(name: str) -> str:
    """`a`, or `a/1` for its next incarnation."""
    return name if "/" in name else f"{name}/0"


def keys(names: str) -> tuple[str, ...]:
    return tuple(map(key, names.split()))


def facts(name: str, **fields: Any) -> NodeFacts:
    node_id, _, incarnation = key(name).partition("/")
    return NodeFacts(node_id, int(incarnation), **fields)


def joined(name: str, of: Settings, **fields: Any) -> NodeJoined:
    return NodeJoined(facts(name), of, **fields)


def failure(name: str, **fields: Any) -> Failure:
    return Failure(name, 0, text=f"{name} broke", **fields)


def failed(name: str, round: int = 1, **fields: Any) -> WorkersFailed:
    return WorkersFailed(key(name), round, failure(name, **fields))


def succeeded(name: str, round: int = 1) -> WorkersSucceeded:
    return WorkersSucceeded(key(name), round)


def closed(name: str) -> ConnectionClosed:
    return ConnectionClosed(key(name))


def returned(name: str, of: Settings, round: int = 1, rank: int = 0, count: int = 2, **fields: Any) -> NodeReturned:
    stage = fields.pop("stage", Stage.RUNNING)
    place = Place(round, rank, count, (Run("default", 1, count),), "", 0, **fields)
    return NodeReturned(facts(name), of, place, stage)


def sealed(round: int, names: str, used: int = 0) -> list[Any]:
    world = World(round, tuple(map(facts, names.split())), used)
    return [Remember(Memory(round, used)), SealWorld(world)]


def stop(names: str, reason: str, round: int = 1) -> list[Any]:
    return [StopRound(keys(names), round, reason)]


def ended(names: str, outcome: Outcome, round: int = 1, used: int = 0) -> list[Any]:
    told = [TellOutcome(keys(names), outcome)] if names else []
    return [Remember(Memory(round, used, outcome)), *told]


def charged(round: int, used: int) -> list[Any]:
    return [Remember(Memory(round, used))]


SUCCESS = Outcome(End.SUCCEEDED, "all workers have succeeded")
NO_RESTARTS = "no restarts are allowed"


def put_down(who: str, names: str, round: int = 1) -> list[Any]:
    return [Announce(keys(names), f"{who} (the failures of round {round} are put down to that, and not charged)")]


def standby(names: str, round: int, nodes: str) -> list[Any]:
    return [Announce(keys(names), f"round {round} runs with {nodes}, this node stands by")]


def told_again(name: str, rank: int, round: int = 1, count: int = 2, used: int = 0) -> list[Any]:
    return [TellPlace(key(name), Place(round, rank, count, (Run("default", 1, count),), "", 0, used))]


def formed(of: Settings, names: str = "a b") -> Script:
    """At 0 they join, one after the other, and the last of them makes the round full."""
    *first, last = names.split()
    waiting: Script = [(0.0, joined(name, of), []) for name in first]
    return [*waiting, (0.0, joined(last, of), sealed(1, names))]


ALONE_OF_3: Script = [(0.0, joined("a", UP_TO_3), []), (5.0, TIME, sealed(1, "a"))]

FORMING: dict[str, Script] = {
    "at max: at once": formed(PAIR),
    "one node": formed(ONE, "a"),
    "at min: after the last call": [
        (0.0, joined("a", UP_TO_3), []),
        (4.9, TIME, [ShowProgress(keys("a"), 1, 1, 3, 25.1)]),
        (5.0, TIME, sealed(1, "a")),
    ],
    "the last call is not restarted": [
        (0.0, joined("a", UP_TO_3), []),
        (4.5, joined("b", UP_TO_3), [ShowProgress(keys("a b"), 2, 1, 3, 25.5)]),
        (5.0, TIME, sealed(1, "a b")),
    ],
    "the last call begins at min": [
        (0.0, joined("a", settings(2, 3)), []),
        (10.0, joined("b", settings(2, 3)), [ShowProgress(keys("a b"), 2, 2, 3, 20.0)]),
        (14.9, TIME, []),
        (15.0, TIME, sealed(1, "a b")),
    ],
    "below min again, the last call begins anew": [
        (0.0, joined("a", settings(2, 3)), []),
        (0.0, joined("b", settings(2, 3)), []),
        (4.0, NodeLeft("b/0"), [ShowProgress(keys("a"), 1, 2, 3, 26.0)]),
        (5.0, joined("c", settings(2, 3)), []),
        (9.9, TIME, [ShowProgress(keys("a c"), 2, 2, 3, 20.1)]),
        (10.0, TIME, sealed(1, "a c")),
    ],
    "below min at the timeout": [
        (0.0, joined("a", PAIR), []),
        (29.9, TIME, [ShowProgress(keys("a"), 1, 2, 2, 30.0 - 29.9)]),
        (
            30.0,
            TIME,
            ended("a", Outcome(End.FAILED, "only 1 of at least 2 nodes joined within 30 s (1 missing); joined: a"), 0),
        ),
    ],
    "the timeout counts from the first to join, and not while nobody is there": [
        (0.0, joined("a", PAIR), []),
        (20.0, NodeLeft("a/0"), []),
        (40.0, joined("b", PAIR), []),
        (69.0, TIME, [ShowProgress(keys("b"), 1, 2, 2, 1.0)]),
        (69.0, NodeHeard("b/0"), []),
        (69.5, joined("a", PAIR), sealed(1, "b a")),
    ],
    "progress: once a second, if it has changed": [
        (0.0, joined("a", settings(3, 3)), []),
        (0.5, joined("b", settings(3, 3)), []),
        (1.0, TIME, [ShowProgress(keys("a b"), 2, 3, 3, 29.0)]),
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
        (26.0, joined("b", PAIR), [ShowProgress(keys("a b"), 2, 2, 2, 4.0)]),
        (26.5, NodeHeard("b/0"), []),
        (27.0, NodeHeard("a/0"), sealed(1, "a b")),
    ],
    "too many: those who were first": [
        *formed(PAIR),
        (1.0, joined("c", PAIR), standby("c", 1, "2 nodes")),
    ],
}

REFUSED: dict[str, Script] = {
    "settings differ": [
        (0.0, joined("a", PAIR), []),
        (
            0.0,
            joined("b", replace(PAIR, lease_s=9.0)),
            [Refuse("b/0", "the run has lease=50, this node has lease=9")],
        ),
        (0.0, joined("c", PAIR), sealed(1, "a c")),
    ],
    "settings differ, in words": [
        (0.0, joined("a", ON_RESTART), []),
        (
            0.0,
            joined("b", replace(ON_RESTART, admit=Admit.NOW)),
            [Refuse("b/0", "the run has admit=on-restart, this node has admit=now")],
        ),
    ],
    "unreachable": [
        (0.0, NodeJoined(facts("a", address="10.0.0.1"), PAIR), []),
        (
            0.0,
            NodeJoined(facts("b", address="127.0.0.1"), PAIR),
            [
                Refuse(
                    "b/0",
                    "its address is 127.0.0.1, where no other host can reach it, and a is at 10.0.0.1; "
                    "give this node an address with --local-addr",
                )
            ],
        ),
    ],
    "the rank of a node that is silent may be taken": [
        (0.0, NodeJoined(facts("a", requested_rank=1), settings(3, 3)), []),
        (1.0, TIME, [ShowProgress(keys("a"), 1, 3, 3, 29.0)]),
        (
            25.0,
            NodeJoined(facts("b", requested_rank=1), settings(3, 3)),
            [Refuse("b/0", "rank 1 was asked for, but a has asked for it before")],
        ),
        (25.1, NodeJoined(facts("b", requested_rank=1), settings(3, 3)), []),
    ],
    "the last words of an incarnation come after the first of the next": [
        (0.0, joined("a/2", PAIR, replaces="a/1"), []),
        (0.0, joined("a/1", PAIR, replaces="a/0"), [Expel("a/1", "it has come back as somebody else")]),
        (0.0, returned("a/1", PAIR), [Expel("a/1", "it has come back as somebody else")]),
        (0.0, joined("b", PAIR), sealed(1, "a/2 b")),
    ],
    "a rank that does not exist": [
        (
            0.0,
            NodeJoined(facts("a", requested_rank=2), PAIR),
            [Refuse("a/0", "rank 2 was asked for, but the run has at most 2 nodes")],
        ),
        (
            0.0,
            NodeJoined(facts("a", requested_rank=-1), PAIR),
            [Refuse("a/0", "rank -1 was asked for, but the run has at most 2 nodes")],
        ),
    ],
    "a rank that another has": [
        (0.0, NodeJoined(facts("a", requested_rank=0), PAIR), []),
        (
            0.0,
            NodeJoined(facts("b", requested_rank=0), PAIR),
            [Refuse("b/0", "rank 0 was asked for, but a has asked for it before")],
        ),
        (0.0, NodeJoined(facts("a", requested_rank=0), PAIR), []),
        (0.1, closed("a"), []),
        (0.2, NodeJoined(facts("b", requested_rank=0), PAIR), []),
    ],
}

RUNNING: dict[str, Script] = {
    "success of all": [
        *formed(PAIR),
        (1.0, succeeded("a"), []),
        (2.0, succeeded("a"), []),
        (3.0, succeeded("b"), ended("a b", SUCCESS)),
        (4.0, NodeLeft("a/0"), []),
        (4.0, NodeLeft("b/0"), [ForgetRun()]),
    ],
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
        (2.0, failed("b"), stop("a b", "b broke")),
        (3.0, joined("b", RETRY, last_round=1), charged(1, 1)),
        (4.0, joined("a", RETRY, last_round=1), sealed(2, "a b", 1)),
    ],
    "a newcomer below max is admitted": [
        *ALONE_OF_3,
        (6.0, joined("b", UP_TO_3), stop("a", "b joins")),
        (7.0, joined("a", UP_TO_3, last_round=1), sealed(2, "a b")),
    ],
    "a newcomer at max stands by, and takes the place of the lost": [
        *formed(PAIR),
        (1.0, joined("c", PAIR), standby("c", 1, "2 nodes")),
        (2.0, closed("a"), []),
        (22.0, TIME, stop("b", "a is lost: it did not come back")),
        (23.0, joined("b", PAIR, last_round=1), sealed(2, "c b")),
    ],
    "on-restart a newcomer stands by": [
        (0.0, joined("a", ON_RESTART), []),
        (5.0, TIME, sealed(1, "a")),
        (6.0, joined("b", ON_RESTART), standby("b", 1, "1 node")),
        (7.0, TIME, []),
        (8.0, joined("a", ON_RESTART, last_round=1), [*stop("", "a has left the round"), *sealed(2, "a b")]),
    ],
    "one that was silent at the seal is told to stand by, and admitted when it is heard": [
        (0.0, joined("a", UP_TO_3), []),
        (26.0, joined("b", UP_TO_3), [*sealed(1, "b"), *standby("a", 1, "1 node")]),
        (27.0, NodeHeard("a/0"), stop("b", "a joins")),
    ],
    "back within the drop timeout, nobody notices": [
        *formed(PAIR),
        (1.0, closed("a"), []),
        (20.9, returned("a", PAIR), []),
        (22.0, TIME, []),
    ],
    "closed and not back: lost": [
        *formed(PAIR),
        (1.0, closed("a"), []),
        (20.9, TIME, []),
        (21.0, TIME, stop("b", "a is lost: it did not come back")),
        (22.0, returned("a", PAIR), [Expel("a/0", "its place in round 1 was given up")]),
        (22.0, joined("a/1", PAIR, last_round=1, replaces="a/0"), []),
        (23.0, joined("b", PAIR, last_round=1), sealed(2, "a/1 b")),
    ],
    "silent for a lease: lost and expelled": [
        *formed(PAIR),
        (40.0, NodeHeard("b/0"), []),
        (49.9, TIME, []),
        (
            50.0,
            TIME,
            [*stop("b", "a is lost: it was not heard of"), Expel("a/0", "it was not heard of for too long")],
        ),
    ],
    "one that waits has no place to return to": [
        *formed(PAIR),
        (1.0, failed("a"), stop("a b", "a broke")),
        (2.0, joined("a", PAIR, last_round=1), []),
        (3.0, returned("a", PAIR), [Expel("a/0", "its place in round 1 was given up")]),
    ],
    "one that has lost its place comes back as a stranger": [
        *formed(PAIR),
        (1.0, joined("a/1", PAIR, last_round=1, replaces="a/0"), stop("b", "a has lost its place")),
        (2.0, joined("b", PAIR, last_round=1), sealed(2, "a/1 b")),
    ],
    "one that leaves": [
        *formed(settings(1, 2)),
        (1.0, NodeLeaving("a/0"), stop("b", "a leaves")),
        (2.0, joined("b", settings(1, 2), last_round=1), []),
        (3.0, NodeLeft("a/0"), sealed(2, "b")),
    ],
    "one that is gone without a word before": [
        *formed(settings(1, 2)),
        (1.0, NodeLeft("a/0"), stop("b", "a left")),
        (2.0, joined("b", settings(1, 2), last_round=1), sealed(2, "b")),
    ],
    "a standby that leaves is not missed": [
        *formed(PAIR),
        (1.0, joined("c", PAIR), standby("c", 1, "2 nodes")),
        (2.0, NodeLeaving("c/0"), []),
        (3.0, NodeLeft("c/0"), []),
    ],
    "everybody who is known is there: no last call": [
        *formed(settings(1, 3), "a b c"),
        (1.0, NodeLeft("b/0"), stop("a c", "b left")),
        (2.0, joined("c", settings(1, 3), last_round=1), []),
        (3.0, joined("a", settings(1, 3), last_round=1), sealed(2, "a c")),
    ],
    "it does not wait for those who do not come back longer than the last call": [
        *formed(settings(1, 3), "a b c"),
        (1.0, NodeLeft("b/0"), stop("a c", "b left")),
        (2.0, joined("c", settings(1, 3), last_round=1), []),
        (3.0, joined("a", settings(1, 3), last_round=1), sealed(2, "a c")),
        (4.0, joined("b", settings(1, 3)), stop("a c", "b joins", 2)),
        (5.0, joined("a", settings(1, 3), last_round=2), []),
        (6.0, joined("c", settings(1, 3), last_round=2), sealed(3, "a c b")),
    ],
}

FAILING: dict[str, Script] = {
    "no budget: all stop, then the run fails": [
        *formed(PAIR),
        (1.0, failed("a"), stop("a b", "a broke")),
        (2.0, joined("a", PAIR, last_round=1), []),
        (3.0, joined("b", PAIR, last_round=1), ended("a b", Outcome(End.FAILED, NO_RESTARTS, failure("a")))),
    ],
    "a restart is charged": [
        *formed(RETRY),
        (1.0, failed("a"), stop("a b", "a broke")),
        (2.0, joined("a", RETRY, last_round=1), []),
        (3.0, joined("b", RETRY, last_round=1), [*charged(1, 1), *sealed(2, "a b", 1)]),
        (4.0, failed("b", 2), stop("a b", "b broke", 2)),
        (5.0, joined("b", RETRY, last_round=2), []),
        (
            6.0,
            joined("a", RETRY, last_round=2),
            ended("b a", Outcome(End.FAILED, "the 1 allowed restart is used up", failure("b")), 2, 1),
        ),
    ],
    "backoff delays the next round": [
        (0.0, joined("a", settings(1, 1, policy=RestartPolicy(1, backoff_s=8.0))), sealed(1, "a")),
        (1.0, failed("a"), stop("a", "a broke")),
        (
            2.0,
            joined("a", settings(1, 1, policy=RestartPolicy(1, backoff_s=8.0)), last_round=1),
            [*charged(1, 1), Announce(keys("a"), "a restart, in 8 s")],
        ),
        (9.9, TIME, [ShowProgress(keys("a"), 1, 1, 1, 30.0 - 7.9)]),
        (10.0, TIME, sealed(2, "a", 1)),
    ],
    "the first failure that speaks for itself is the root cause": [
        *formed(PAIR),
        (1.0, failed("a", is_consequence=True), stop("a b", "a broke")),
        (1.5, failed("b"), []),
        (2.0, joined("a", PAIR, last_round=1), []),
        (3.0, joined("b", PAIR, last_round=1), ended("a b", Outcome(End.FAILED, NO_RESTARTS, failure("b")))),
    ],
    "first stop, then judge: the failure was that of a lost node": [
        *formed(settings(1, 2)),
        (1.0, failed("b"), stop("a b", "b broke")),
        (1.5, closed("a"), []),
        (2.0, joined("b", settings(1, 2), last_round=1), []),
        (21.4, TIME, []),
        (21.5, TIME, [*put_down("a is lost: it did not come back", "b"), *sealed(2, "b")]),
    ],
    "first stop, then judge: the suspect returns and is told": [
        *formed(PAIR),
        (1.0, closed("a"), []),
        (1.5, failed("b"), stop("a b", "b broke")),
        (2.0, joined("b", PAIR, last_round=1), []),
        (2.5, returned("a", PAIR), stop("a", "the round was stopped meanwhile")),
        (3.0, joined("a", PAIR, last_round=1), ended("b a", Outcome(End.FAILED, NO_RESTARTS, failure("b")))),
    ],
    "a failure after the round was stopped is of the stop": [
        *formed(settings(1, 2)),
        (1.0, NodeLeft("a/0"), stop("b", "a left")),
        (1.5, failed("b"), []),
        (2.0, joined("b", settings(1, 2), last_round=1), sealed(2, "b")),
    ],
    "a failure of another round is none": [*formed(ONE, "a"), (1.0, failed("a", 2), []), (1.0, failed("a", 0), [])],
    "a failure of a stranger is none": [*formed(ONE, "a"), (1.0, failed("x"), [])],
    "a failure after success is none": [*formed(PAIR), (1.0, succeeded("a"), []), (2.0, failed("a"), [])],
    "a report that got lost comes with the join": [
        *formed(ONE, "a"),
        (
            1.0,
            joined("a", ONE, last_round=1, failure=failure("a")),
            [*stop("a", "a broke"), *ended("a", Outcome(End.FAILED, NO_RESTARTS, failure("a")))],
        ),
    ],
    "an uncounted failure costs nothing": [
        (
            0.0,
            joined("a", settings(1, 1, policy=RestartPolicy(0, uncounted_exit_codes=frozenset({9})))),
            sealed(1, "a"),
        ),
        (1.0, failed("a", exitcode=9), stop("a", "a broke")),
        (
            2.0,
            joined("a", settings(1, 1, policy=RestartPolicy(0, uncounted_exit_codes=frozenset({9}))), last_round=1),
            [Announce(keys("a"), "a restart that is not counted"), *sealed(2, "a")],
        ),
    ],
}

UNAWARE: dict[str, Script] = {
    "a member that has not heard of its round is told again": [
        *formed(PAIR),
        (1.0, closed("b"), []),
        (2.0, joined("b", PAIR), told_again("b", 1)),
        (30.0, succeeded("a"), []),
        (30.0, succeeded("b"), ended("a b", SUCCESS)),
    ],
    "it is told again that the round was stopped, too": [
        *formed(RETRY),
        (1.0, failed("a"), stop("a b", "a broke")),
        (2.0, joined("b", RETRY), [*told_again("b", 1), *stop("b", "the round was stopped meanwhile")]),
        (3.0, joined("a", RETRY, last_round=1), []),
        (4.0, joined("b", RETRY, last_round=1), [*charged(1, 1), *sealed(2, "a b", 1)]),
    ],
    "what it said before, and comes late, does not take its place away": [
        *formed(PAIR),
        (1.0, returned("b", PAIR, rank=1), []),
        (2.0, joined("b", PAIR), told_again("b", 1)),
        (3.0, succeeded("a"), []),
        (3.0, succeeded("b"), ended("a b", SUCCESS)),
    ],
    "one that was in the round has left it": [
        *formed(PAIR),
        (1.0, joined("b", PAIR, last_round=1), stop("a", "b has left the round")),
    ],
}

CLOSED = Outcome(End.CLOSED, "enough")
ENDING: dict[str, Script] = {
    "closed before anybody came": [(0.0, CloseRequested("enough"), [*ended("", CLOSED, 0), ForgetRun()])],
    "closed while forming": [(0.0, joined("a", PAIR), []), (1.0, CloseRequested("enough"), ended("a", CLOSED, 0))],
    "closed while running: its door stays closed for a while": [
        *formed(ONE, "a"),
        (1.0, CloseRequested("enough"), ended("a", CLOSED)),
        (2.0, CloseRequested("again"), []),
        (2.0, NodeLeft("a/0"), []),
        (3.0, joined("b", ONE), [TellOutcome(keys("b"), CLOSED)]),
        (4.0, NodeLeft("b/0"), []),
        (10.9, TIME, []),
        (11.0, TIME, [ForgetRun()]),
    ],
    "closed while stopping": [
        *formed(RETRY),
        (1.0, failed("a"), stop("a b", "a broke")),
        (2.0, CloseRequested("enough"), ended("a b", CLOSED)),
        (3.0, joined("a", RETRY, last_round=1), [TellOutcome(keys("a"), CLOSED)]),
    ],
    "who returns after the end is told": [
        *formed(PAIR),
        (1.0, succeeded("a"), []),
        (1.0, closed("a"), []),
        (2.0, succeeded("b"), ended("b", SUCCESS)),
        (3.0, returned("a", PAIR), [TellOutcome(keys("a"), SUCCESS)]),
        (4.0, NodeLeft("b/0"), []),
        (5.0, NodeLeft("a/0"), [ForgetRun()]),
    ],
    "those who do not confirm are waited for, for a while": [
        *formed(ONE, "a"),
        (1.0, succeeded("a"), ended("a", SUCCESS)),
        (2.0, closed("a"), []),
        (11.0, TIME, [ForgetRun()]),
    ],
    "one that was lost may still come back": [
        *formed(settings(1, 2)),
        (0.0, closed("a"), []),
        (20.0, TIME, stop("b", "a is lost: it did not come back")),
        (21.0, joined("b", settings(1, 2), last_round=1), sealed(2, "b")),
        (22.0, succeeded("b", 2), ended("b", SUCCESS, 2)),
        (22.5, NodeLeft("b/0"), []),
        (23.0, joined("a/1", settings(1, 2), last_round=1, replaces="a/0"), [TellOutcome(keys("a/1"), SUCCESS)]),
        (32.0, TIME, [ForgetRun()]),
    ],
}

MEMORY = Memory(last_round=3, restarts_used=1)
RECOVERING: dict[str, Script] = {
    "all members return: the round goes on": [
        (0.0, returned("b", RETRY, 3, 1, restarts_used=1), []),
        (1.0, returned("a", RETRY, 3, 0, restarts_used=1), []),
        (49.0, NodeHeard("a/0"), []),
        (49.0, NodeHeard("b/0"), []),
        (60.0, TIME, []),
        (61.0, succeeded("a", 3), []),
        (61.0, succeeded("b", 3), ended("a b", SUCCESS, 3, 1)),
    ],
    "one does not return within the lease: it is lost": [
        (0.0, returned("b", RETRY, 3, 1, restarts_used=1), []),
        (40.0, NodeHeard("b/0"), []),
        (49.9, TIME, []),
        (50.0, TIME, stop("b", "unknown node of rank 0 is lost: it did not come back", 3)),
        (51.0, joined("b", RETRY, last_round=3), []),
        (52.0, joined("c", RETRY), sealed(4, "c b", 1)),
    ],
    "one that had finished says so": [
        (0.0, returned("b", RETRY, 3, 1, stage=Stage.FINISHED, restarts_used=1), []),
        (1.0, returned("a", RETRY, 3, 0, restarts_used=1), []),
        (2.0, succeeded("a", 3), ended("b a", SUCCESS, 3, 1)),
    ],
    "a failure of the adopted round is charged after those before": [
        (0.0, returned("b", RETRY, 3, 1, restarts_used=1), []),
        (1.0, returned("a", RETRY, 3, 0, restarts_used=1), []),
        (2.0, failed("a", 3), stop("a b", "a broke", 3)),
        (3.0, joined("a", RETRY, last_round=3), []),
        (
            4.0,
            joined("b", RETRY, last_round=3),
            ended("a b", Outcome(End.FAILED, "the 1 allowed restart is used up", failure("a")), 3, 1),
        ),
    ],
    "a member of an earlier round is expelled": [
        (0.0, returned("b", RETRY, 2, 1), [Expel("b/0", "its place in round 2 was given up")]),
    ],
    "a later round than was written down is adopted": [
        (0.0, returned("b", RETRY, 5, 1), []),
        (1.0, returned("a", RETRY, 3, 0), [Expel("a/0", "its place in round 3 was given up")]),
    ],
    "after the adoption a later round is only counted": [
        (0.0, returned("a", RETRY, 3, 0), []),
        (1.0, returned("b", RETRY, 7, 1), [Expel("b/0", "its place in round 7 was given up")]),
        (2.0, joined("b/1", RETRY, last_round=7, replaces="b/0"), standby("b/1", 3, "2 nodes")),
        (49.0, NodeHeard("a/0"), []),
        (49.0, NodeHeard("b/1"), []),
        (50.0, TIME, stop("a", "unknown node of rank 1 is lost: it did not come back", 3)),
        (51.0, joined("a", RETRY, last_round=3), sealed(8, "a b/1", 1)),
    ],
    "nothing is sealed for a lease": [
        (0.0, joined("a", RETRY, last_round=3), []),
        (0.0, joined("b", RETRY, last_round=3), []),
        (1.0, TIME, [ShowProgress(keys("a b"), 2, 2, 2, 29.0)]),
        (45.0, NodeHeard("a/0"), []),
        (45.0, NodeHeard("b/0"), []),
        (49.9, TIME, []),
        (50.0, TIME, sealed(4, "a b", 1)),
    ],
    "who waits is told to stand by if the round that is adopted is full": [
        (0.0, joined("c", RETRY), []),
        (1.0, TIME, [ShowProgress(keys("c"), 1, 2, 2, 29.0)]),
        (2.0, returned("a", RETRY, 3, 0), standby("c", 3, "2 nodes")),
        (3.0, returned("b", RETRY, 3, 1), []),
    ],
    "who waits is let in once the round is adopted": [
        (0.0, joined("c", replace(RETRY, max_nodes=3)), []),
        (
            1.0,
            returned("a", replace(RETRY, max_nodes=3), 3, 0),
            [StopRound(("a/0", "unknown node of rank 1/0"), 3, "c joins")],
        ),
        (2.0, returned("b", replace(RETRY, max_nodes=3), 3, 1), stop("b", "the round was stopped meanwhile", 3)),
    ],
}

# Another keeps the leases, and the one who decides may change: (what happens first, what the next one does).
UP_TO_4 = settings(2, 4, max_restarts=1)
FORMED = formed(RETRY)
LOST = "is lost: its lease ended"
RESUMED: dict[str, tuple[Script, Script]] = {
    "nothing is noticed": (
        FORMED,
        [
            (10.0, returned("a", RETRY), []),
            (10.0, returned("b", RETRY, rank=1, stage=Stage.FINISHED), []),
            (99.0, TIME, []),
            (99.0, succeeded("a"), ended("a b", SUCCESS)),
        ],
    ),
    "nobody is suspect because of silence": (
        [(0.0, joined("a", RETRY), []), (0.0, TIME, [])],
        [(10.0, joined("a", RETRY), []), (39.0, joined("b", RETRY), sealed(1, "a b"))],
    ),
    "whose key is gone is lost": (
        FORMED,
        [
            (10.0, LeaseExpired("a/0"), stop("b", f"a {LOST}")),
            (10.0, returned("b", RETRY, rank=1), stop("b", "the round was stopped meanwhile")),
            (11.0, joined("b", RETRY, last_round=1), []),
            (12.0, joined("c", RETRY), sealed(2, "c b")),
        ],
    ),
    "a failure is explained to whoever has stopped before it could be told": (
        FORMED,
        [
            (10.0, LeaseExpired("a/0"), stop("b", f"a {LOST}")),
            (10.0, joined("b", RETRY, last_round=1, failure=failure("b")), put_down(f"a {LOST}", "b")),
            (12.0, joined("c", RETRY), sealed(2, "c b")),
        ],
    ),
    "who has finished is not missed": (
        [*FORMED, (1.0, succeeded("a"), [])],
        [
            (10.0, LeaseExpired("a/0"), []),
            (10.0, returned("b", RETRY, rank=1), []),
            (11.0, succeeded("b"), ended("b", SUCCESS)),
        ],
    ),
    "a join that the seal has answered is no news": (
        FORMED,
        [
            (10.0, joined("a", RETRY), told_again("a", 0)),
            (10.0, returned("b", RETRY, rank=1), []),
            (11.0, returned("a", RETRY), []),
        ],
    ),
    "the round that was sealed before is not sealed again": (
        [*FORMED, (1.0, failed("a"), stop("a b", "a broke"))],
        [
            (10.0, joined("a", RETRY, last_round=1), []),
            (10.0, joined("b", RETRY, last_round=1), [*charged(1, 1), *sealed(2, "a b", 1)]),
        ],
    ),
    "a stop that was a failure's stays one, whoever speaks first": (
        [*FORMED, (1.0, failed("a"), stop("a b", "a broke"))],
        [
            (10.0, joined("b", RETRY, last_round=1), []),
            (10.0, joined("a", RETRY, last_round=1, failure=failure("a")), [*charged(1, 1), *sealed(2, "a b", 1)]),
        ],
    ),
    "a stop that was a change's stays one": (
        [*formed(UP_TO_4, "a b c d"), (1.0, LeaseExpired("d/0"), stop("a b c", f"d {LOST}"))],
        [
            (10.0, LeaseExpired("d/0"), []),
            (10.0, failed("a"), []),
            (10.0, joined("a", UP_TO_4, last_round=1), []),
            (10.0, joined("b", UP_TO_4, last_round=1), []),
            (10.0, joined("c", UP_TO_4, last_round=1), sealed(2, "a b c")),
        ],
    ),
    "survivors keep the order of the world before": (
        [
            *formed(settings(2, 2), "b a"),
            (1.0, LeaseExpired("b/0"), stop("a", f"b {LOST}")),
            (2.0, joined("a", PAIR, last_round=1), []),
        ],
        [(10.0, joined("a", PAIR, last_round=1), []), (11.0, joined("c", PAIR), sealed(2, "c a"))],
    ),
    "whoever asks how it ended has time to hear the answer": (
        [*formed(ONE, "a"), (1.0, succeeded("a"), ended("a", SUCCESS))],
        [(10.0, TIME, []), (15.0, joined("b", ONE), [TellOutcome(keys("b"), SUCCESS)]), (20.0, TIME, []),
         (25.0, TIME, [ForgetRun()])],
    ),
    "one that had finished and missed the stop is told": (
        [
            *FORMED,
            (1.0, succeeded("a"), []),
            (1.0, failed("b"), stop("a b", "b broke")),
            (2.0, joined("b", RETRY, last_round=1), charged(1, 1)),
        ],
        [
            (10.0, returned("a", RETRY, stage=Stage.FINISHED), stop("a", "the round was stopped meanwhile")),
            (10.0, joined("b", RETRY, last_round=1), []),
            (11.0, joined("a", RETRY, last_round=1), sealed(2, "a b", 1)),
        ],
    ),
    "one that still runs in a round that is over is expelled": (
        [*FORMED, (1.0, LeaseExpired("b/0"), stop("a", f"b {LOST}")), (2.0, joined("a", RETRY, last_round=1), [])],
        [(10.0, returned("b", RETRY, rank=1), [Expel("b/0", "its place in round 1 was given up")])],
    ),
    "one that had finished is told of the stop, not turned out": (
        [*FORMED, (1.0, succeeded("b"), [])],
        [
            (10.0, LeaseExpired("a/0"), stop("b", f"a {LOST}")),
            (10.0, returned("b", RETRY, rank=1, stage=Stage.FINISHED), stop("b", "the round was stopped meanwhile")),
            (10.5, joined("b", RETRY, last_round=1), []),
            (10.5, joined("c", RETRY), sealed(2, "c b")),
        ],
    ),
    "an end stays the end": (
        [*formed(ONE, "a"), (1.0, succeeded("a"), ended("a", SUCCESS))],
        [(10.0, returned("a", ONE, count=1), [TellOutcome(keys("a"), SUCCESS)]), (11.0, LeaseExpired("a/0"), []),
         (20.0, TIME, [ForgetRun()])],
    ),
}  # fmt: skip

ALL = FORMING | REFUSED | RUNNING | FAILING | UNAWARE | ENDING


def step(run: Membership, event: Any, at: float) -> list[Any]:
    """What is done, with memories that are compared without their settings: those are always the run's."""
    commands = run.step(event, at)
    run.check()
    remembered = [command.memory.settings for command in commands if isinstance(command, Remember)]
    assert remembered == [run.settings] * len(remembered)
    return [Remember(replace(each.memory, settings=None)) if isinstance(each, Remember) else each for each in commands]


def play(run: Membership, script: Script) -> None:
    for at, event, expected in script:
        commands = step(run, event, at)
        assert commands == expected, f"{event} at {at}; the story:\n{run.story()}"


def after(script: Script) -> Membership:
    run = Membership(0.0)
    play(run, script)
    return run


@pytest.mark.parametrize("name", ALL)
def test_rules(name: str) -> None:
    play(Membership(0.0), ALL[name])


@pytest.mark.parametrize("name", RECOVERING)
def test_rules_after_the_coordinator_was_restarted(name: str) -> None:
    play(Membership(0.0, MEMORY), RECOVERING[name])


@pytest.mark.parametrize("name", RESUMED)
def test_rules_for_who_goes_on_in_the_place_of_another(name: str) -> None:
    first, then = RESUMED[name]
    run = Membership(0.0, keeps_leases=False)
    play(run, first)
    play(Membership.resume(run.snapshot(), 10.0), then)


def test_the_names_of_the_rules_are_distinct() -> None:
    assert len(ALL) == sum(map(len, (FORMING, REFUSED, RUNNING, FAILING, UNAWARE, ENDING)))


def test_a_remembered_outcome_is_told_to_whoever_comes() -> None:
    run = Membership(0.0, Memory(3, 1, SUCCESS))
    play(run, [(0.0, joined("a", PAIR), [TellOutcome(keys("a"), SUCCESS)])])
    play(run, [(1.0, returned("b", PAIR, 3), [TellOutcome(keys("b"), SUCCESS)])])
    play(run, [(2.0, NodeLeft("a/0"), []), (2.0, NodeLeft("b/0"), [])])
    play(run, [(10.0, TIME, [ForgetRun()])])


def test_the_first_to_come_after_a_restart_does_not_fix_the_settings() -> None:
    run = Membership(0.0, Memory(3, 1, settings=RETRY))
    other, words = replace(RETRY, max_nodes=3), "the run has max_nodes=2, this node has max_nodes=3"
    nobody = "none of its nodes is here now; the run is forgotten when no node has come for a minute"
    play(run, [(0.0, joined("x", other), [Refuse("x/0", f"{words} ({nobody})")])])
    play(run, [(1.0, returned("a", RETRY, 3), []), (1.5, joined("x", other), [Refuse("x/0", words)])])
    play(run, [(2.0, joined("c", RETRY), standby("c", 3, "2 nodes"))])


def test_a_coordinator_without_memory_adopts_as_well() -> None:
    """Its state file may be lost: what the members say is enough."""
    run = Membership(0.0)
    play(run, [(0.0, returned("a", PAIR, 3), []), (1.0, returned("b", PAIR, 3, 1), [])])
    assert (run.phase, run.round) == (Phase.RUNNING, 3)
    assert run.world is not None
    assert run.world.keys == keys("a b")


def test_restarts_that_a_node_knows_of_are_used_up() -> None:
    """Whatever was written down is gone with the disk that it was on."""
    machine = Membership(0.0)
    machine.step(joined("a", RETRY, last_round=3, restarts_used=1), 0.0)
    machine.step(joined("b", RETRY), 0.0)
    assert machine.world == World(4, (facts("a"), facts("b")), 1)
    machine.step(failed("a", 4), 1.0)
    machine.step(joined("a", RETRY, last_round=4, restarts_used=1), 1.0)
    machine.step(joined("b", RETRY, last_round=4, restarts_used=1), 1.0)
    assert machine.outcome is not None
    assert machine.outcome.reason == "the 1 allowed restart is used up"


@pytest.mark.parametrize("keeps_leases", [True, False], ids=["coordinator", "etcd"])
@pytest.mark.parametrize(
    ("story", "is_fixed"),
    [
        ([joined("a", PAIR), NodeLeft("a/0")], False),
        ([joined("a", PAIR), NodeLeaving("a/0"), NodeLeft("a/0")], False),
        ([joined("a", PAIR), joined("b", ONE), NodeLeft("b/0")], True),
        ([joined("a", UP_TO_3), joined("b", UP_TO_3), NodeLeft("a/0")], True),
        ([joined("a", UP_TO_3), joined("b", UP_TO_3), LeaseExpired("b/0"), NodeLeft("a/0")], True),
        ([joined("a", PAIR), joined("b", PAIR), NodeLeft("a/0"), NodeLeft("b/0")], True),
        ([joined("a", PAIR), LeaseExpired("a/0")], True),
    ],
    ids=["left", "left in order", "a misfit", "one waits", "one may come back", "a round", "lost"],
)
def test_settings_are_free_again_when_all_have_left_before_the_first_round(
    story: list[Any], is_fixed: bool, keeps_leases: bool
) -> None:
    machine = Membership(0.0, keeps_leases=keeps_leases)
    for event in story:
        machine.step(event, 0.0)
        machine.check()
    other = settings(1, 2, lease_s=49.0)
    commands = machine.step(joined("c", other), 1.0)
    assert any(isinstance(command, Refuse) for command in commands) == is_fixed


def test_who_goes_on_for_another_frees_no_settings() -> None:
    """Somebody may have been lost between the two.

    1. a waits and leads, is frozen, and loses its lease before any round was formed,
    2. b leads, who never hears of a, and c waits and leaves,
    3. a is back with the settings of the run, and must not be refused.
    """
    machine = Membership(0.0, keeps_leases=False)
    machine.step(joined("a", PAIR), 0.0)
    other = Membership.resume(machine.snapshot(), 1.0)
    other.step(joined("c", PAIR), 1.0)
    other.step(NodeLeft("c/0"), 2.0)
    assert other.settings == PAIR


def test_a_misfit_that_leaves_frees_no_settings() -> None:
    machine = Membership(0.0)
    machine.step(joined("a", PAIR), 0.0)
    machine.step(LeaseExpired("a/0"), 1.0)
    machine.step(joined("b", ONE), 1.0)
    machine.step(NodeLeft("b/0"), 1.0)
    assert machine.settings == PAIR


def test_a_round_that_a_node_has_seen_is_never_used_again() -> None:
    run = after([(0.0, joined("a", PAIR, last_round=8), []), (0.0, joined("b", PAIR), sealed(9, "a b"))])
    assert run.round == 9


def test_many_lost_nodes_are_not_all_named() -> None:
    many = settings(1, 12)
    names = [f"n{at:02}" for at in range(12)]
    run = after(formed(many, " ".join(names)))
    run.step(failed("n00"), 1.0)
    for name in names[1:]:
        run.step(closed(name), 1.0)
    run.step(joined("n00", many, last_round=1), 2.0)
    said = [command for command in run.step(TIME, 21.0) if isinstance(command, Announce)]
    assert len(said) == 1
    assert said[0].text.startswith("n01 is lost: it did not come back; n02 is lost")
    assert "n08" in said[0].text
    assert "n09" not in said[0].text
    assert "; and 3 more (the failures of round 1 are put down" in said[0].text


def test_what_was_charged_before_the_restart_of_the_coordinator_counts() -> None:
    """Within a window, too: the restarts count as if they had been charged when the new process began."""
    policy = RestartPolicy(1, window_s=100.0)
    of = settings(1, 1, policy=policy)
    run = Membership(0.0, Memory(1, 1))
    run.step(joined("a", of, last_round=1), 0.0)
    run.step(NodeHeard("a/0"), 49.0)
    play(run, [(50.0, TIME, sealed(2, "a", 1)), (99.0, NodeHeard("a/0"), [])])
    play(run, [(99.0, failed("a", 2), stop("a", "a broke", 2))])
    commands = step(run, joined("a", of, last_round=2), 100.0)
    assert commands == [*charged(2, 2), *sealed(3, "a", 2)]
    run.step(failed("a", 3), 101.0)
    commands = step(run, joined("a", of, last_round=3), 102.0)
    cause = Outcome(End.FAILED, "the 1 allowed restart within 100 s is used up", failure("a"))
    assert commands == ended("a", cause, 3, 2)


DEADLINES: dict[str, tuple[Script, float | None]] = {
    "nobody": ([], None),
    "progress first": ([(0.0, joined("a", PAIR), [])], 1.0),
    "the join timeout": ([(0.0, joined("a", PAIR), []), (1.0, TIME, [ShowProgress(keys("a"), 1, 2, 2, 29.0)])], 30.0),
    "the last call": ([(0.0, joined("a", UP_TO_3), []), (1.0, TIME, [ShowProgress(keys("a"), 1, 1, 3, 29.0)])], 5.0),
    "the first lease to end": ([*formed(PAIR), (7.0, NodeHeard("a/0"), [])], 50.0),
    "leases that go on": ([*formed(PAIR), (7.0, NodeHeard("a/0"), []), (8.0, NodeHeard("b/0"), [])], 57.0),
    "a closed connection": ([*formed(PAIR), (7.0, closed("a"), [])], 27.0),
    "back again": ([*formed(PAIR), (7.0, closed("a"), []), (8.0, returned("a", PAIR), [])], 50.0),
    "the end": ([*formed(ONE, "a"), (1.0, succeeded("a"), ended("a", SUCCESS))], 11.0),
}


@pytest.mark.parametrize("name", DEADLINES)
def test_deadlines(name: str) -> None:
    script, expected = DEADLINES[name]
    assert after(script).next_deadline() == expected


def test_phases_change_only_as_the_picture_says() -> None:
    run = after([*formed(ONE, "a"), (1.0, succeeded("a"), ended("a", SUCCESS))])
    with pytest.raises(InternalError, match=r"a run cannot go from ENDED to RUNNING; before:\n0\.000 NodeJoined"):
        run._enter(Phase.RUNNING)
    assert {after for _, _, after in PHASE_CHANGES} == set(Phase)
    assert Phase.ENDED not in {before for before, _, _ in PHASE_CHANGES}


def test_everybody_hears_that_a_round_is_stopped_because_it_hung() -> None:
    """Each node then sees where its workers are; the one with the worker that stands out names the cause."""
    of = settings(2, 2, max_restarts=1)
    run = after(formed(of))
    [stopped] = step(run, failed("a", exception="hang", is_consequence=True), 10.0)
    assert (stopped.keys, stopped.is_hang) == (keys("a b"), True)
    assert step(run, failed("b", exception="hang"), 10.1) == []
    step(run, joined("a", of, last_round=1), 10.2)
    step(run, joined("b", of, last_round=1), 10.3)
    assert run.restarts_used == 1
    [again] = step(run, failed("a", round=2, exception="hang", is_consequence=True), 11.0)
    assert again.is_hang
    step(run, failed("b", round=2, exception="hang"), 11.1)
    step(run, joined("a", of, last_round=2), 11.2)
    commands = step(run, joined("b", of, last_round=2), 11.3)
    [outcome] = [command.outcome for command in commands if hasattr(command, "outcome")]
    assert outcome.cause is not None
    assert outcome.cause.node == "b"


def test_other_failures_are_no_hangs() -> None:
    run = after(formed(settings(2, 2)))
    [stopped] = step(run, failed("a", exception="ValueError"), 10.0)
    assert not stopped.is_hang
