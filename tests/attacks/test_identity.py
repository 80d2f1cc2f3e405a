"""Who is who: no peer of a run speaks for a node that another one has joined with, and only members act on the run."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import NodeFacts, Sealed, Settings, Stage
from tests.attacks.harness import HEARTBEAT_S, HONEST, LightRun, Peer, light_run
from tests.coordinators import CoordinatorProcess

HIGHEST = 1 << 53


def as_join(run: LightRun, incarnation: int) -> protocol.Join:
    name = run.names[0]
    return protocol.Join(NodeFacts(name, incarnation, "127.0.0.1", 1), HONEST)


def as_return(run: LightRun, incarnation: int) -> protocol.Return:
    name = run.names[0]
    return protocol.Return(NodeFacts(name, incarnation, "127.0.0.1", 1), HONEST, run.places[name], Stage.RUNNING)


def as_leaver(run: LightRun, incarnation: int) -> protocol.Join:
    name, place = run.names[0], run.places[run.names[0]]
    return protocol.Join(NodeFacts(name, incarnation), HONEST, place, has_lost_place=True)


@pytest.mark.parametrize("incarnation", [0, 1, HIGHEST])
@pytest.mark.parametrize("act", [as_join, as_return, as_leaver], ids=["join", "return", "lost place"])
def test_a_stranger_with_the_name_of_a_member(
    server: CoordinatorProcess, act: Callable[[LightRun, int], object], incarnation: int
) -> None:
    """It is turned away in one line, and the run does not notice."""
    with light_run(server.port, "victim") as run:
        with Peer(server.port, "victim") as stranger:
            stranger.send(act(run, incarnation))
            is_turned_out = stranger.is_turned_out()
            run.run_for(0.5)
            assert not run.disturbed, run.disturbed
            assert is_turned_out, "the stranger was taken for the member"
        run.run_for(0.5)
        run.finish()
        assert not run.disturbed


def test_a_member_is_not_locked_out_by_a_stranger_that_came_before_its_return(server: CoordinatorProcess) -> None:
    """The member lost its place and comes back as its next incarnation, as agents do."""
    settings = Settings(1, 1, heartbeat_s=HEARTBEAT_S, lease_s=1.0, drop_timeout_s=0.2, last_call_s=0.1)
    with Peer(server.port, "victim") as member:
        member.send(protocol.Join(NodeFacts("a"), settings))
        assert isinstance(member.until(Sealed), Sealed)
        with Peer(server.port, "victim") as stranger:
            stranger.send(protocol.Join(NodeFacts("a", HIGHEST), settings))
            stranger.is_turned_out()
        member.send(protocol.Heartbeat(1))
        assert isinstance(member.until(protocol.HeartbeatAnswer), protocol.HeartbeatAnswer), "it was shut out"
        member.send(protocol.Join(NodeFacts("a", 1), settings, has_lost_place=True))
        assert isinstance(member.until(Sealed), Sealed), "it was shut out"


def test_never_two_worlds_through_a_newer_incarnation(server: CoordinatorProcess) -> None:
    """If the stranger gets the place, the member must have been told, or its heartbeats must not be answered."""
    settings = Settings(1, 1, heartbeat_s=HEARTBEAT_S, lease_s=2.0, drop_timeout_s=0.2, last_call_s=0.1)
    with Peer(server.port, "victim") as member, Peer(server.port, "victim") as stranger:
        member.send(protocol.Join(NodeFacts("a"), settings))
        assert isinstance(member.until(Sealed), Sealed)
        stranger.send(protocol.Join(NodeFacts("a", 7), settings))
        ends, number = time.monotonic() + 1.0, 0
        while time.monotonic() < ends:
            number += 1
            member.send(protocol.Heartbeat(number))
            said = member.until(protocol.HeartbeatAnswer)
            stranger.send(protocol.Heartbeat(number))
            other = stranger.until(Sealed, protocol.HeartbeatAnswer)
            assert not (isinstance(other, Sealed) and said is not None), "both have a place and keep their lease"
            if said is None or other is None:
                break


def test_the_name_of_a_node_that_waits(server: CoordinatorProcess) -> None:
    """Before there is a round: the place in line is the one of the node that came first."""
    with Peer(server.port, "victim") as member, Peer(server.port, "victim") as stranger:
        member.send(protocol.Join(NodeFacts("a"), HONEST)).ask("check", "anything")
        stranger.send(protocol.Join(NodeFacts("a"), HONEST))
        assert stranger.is_turned_out()
        assert member.ask("check", "anything") is not None, "the node that waits was hung up on"


@pytest.mark.parametrize(
    "message",
    [protocol.Close("ha"), protocol.Succeeded(1), protocol.Leaving(), protocol.Left()],
    ids=lambda message: type(message).__name__,
)
def test_a_peer_that_has_not_joined_acts_on_the_run(server: CoordinatorProcess, message: object) -> None:
    with light_run(server.port, "victim") as run, Peer(server.port, "victim") as stranger:
        stranger.send(message)
        run.run_for(0.5)
        assert not run.disturbed, run.disturbed
        assert run.outcome is None, run.outcome
        run.finish()
        assert not run.disturbed


def test_a_peer_of_another_run_acts_on_this_one(server: CoordinatorProcess) -> None:
    """With the names, the places and the numbers of its members."""
    with light_run(server.port, "victim") as run, Peer(server.port, "victim too") as stranger:
        for incarnation in (0, 1):
            for act in (as_join, as_return, as_leaver):
                stranger.send(act(run, incarnation), protocol.Leaving(), protocol.Left(), protocol.Succeeded(1))
        stranger.send(protocol.Close("ha"))
        run.run_for(1.0)
        run.finish()
        assert not run.disturbed
