"""What a node makes of words that come when its lease has run out."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.rendezvous import messages, session
from holdfast.rendezvous.outcome import Failure
from holdfast.rendezvous.participant import (
    FailureReported,
    JoinRequested,
    MessageCame,
    Participant,
    PlaceLost,
    RoundStopped,
    Send,
    Standing,
    SuccessReported,
)
from holdfast.rendezvous.session import Session, SessionSettings
from holdfast.rendezvous.vocabulary import Settings
from holdfast.rendezvous.world import NodeFacts, Place, Run

LEASE_S = 2.0
JOINED_AT = 10.0
IN_TIME = JOINED_AT + 0.89 * LEASE_S
TOO_LATE = JOINED_AT + 0.91 * LEASE_S


def member() -> Participant:
    """A node that has joined at `JOINED_AT`, was sealed at once, and whose first heartbeat is on its way."""
    node = Participant(NodeFacts("n"), Settings(), Session(SessionSettings(heartbeat_s=0.5, lease_s=LEASE_S)))
    node.step(session.TimePassed(), JOINED_AT - 1.0)
    node.step(session.Connected(), JOINED_AT - 1.0)
    node.step(MessageCame(messages.HeartbeatAnswer(1)), JOINED_AT - 1.0)
    node.step(JoinRequested(1), JOINED_AT)
    place = Place(1, 0, 1, (Run("default", 1, 1),), "host", 1)
    node.step(MessageCame(messages.Sealed("n/0", place)), JOINED_AT)
    node.step(session.TimePassed(), JOINED_AT + 0.6)  # A heartbeat, its number is 2.
    return node


@pytest.mark.parametrize("is_hang", [False, True])
def test_a_stop_says_whether_the_run_hangs(is_hang: bool) -> None:
    [stopped] = member().step(MessageCame(messages.Stop(1, "why", is_hang)), IN_TIME)
    assert stopped == RoundStopped(1, "why", is_hang)


LATE_WORDS = [
    FailureReported(1, Failure("n", 0, -9)),
    SuccessReported(1),
    MessageCame(messages.HeartbeatAnswer(2)),
    session.Disconnected(),
    session.ConnectFailed(was_refused=True),
]


@pytest.mark.parametrize("word", LATE_WORDS, ids=lambda word: type(word).__name__)
def test_after_the_lease_nothing_brings_the_place_back(word: Any) -> None:
    node = member()
    commands = node.step(word, TOO_LATE)
    assert [command for command in commands if isinstance(command, PlaceLost)]
    told = [command.message for command in commands if isinstance(command, Send)]
    assert not [message for message in told if isinstance(message, messages.Failed | messages.Succeeded)]
    assert node.standing is Standing.OUTSIDE
    assert node.facts.incarnation == 1


@pytest.mark.parametrize("word", LATE_WORDS, ids=lambda word: type(word).__name__)
def test_within_the_lease_they_count(word: Any) -> None:
    node = member()
    commands = node.step(word, IN_TIME)
    assert not [command for command in commands if isinstance(command, PlaceLost)]
    assert node.standing is Standing.MEMBER


def test_a_join_after_the_lease_is_a_strangers() -> None:
    node = member()
    commands = node.step(JoinRequested(2), TOO_LATE)
    joins = [c.message for c in commands if isinstance(c, Send) and isinstance(c.message, messages.Join)]
    assert [(join.facts.key, join.replaces) for join in joins] == [("n/1", "n/0")]
