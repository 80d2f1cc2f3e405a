"""Who is who: no peer of a run speaks for a node that another one has joined with, and only members act on the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.rendezvous.client.handshake import TurnedAway
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import NodeFacts, Sealed, Settings, Stage
from tests import support
from tests.attacks.harness import HEARTBEAT_S, HONEST, LightRun, Peer, light_run
from tests.coordinators import CoordinatorProcess, coordinator

HIGHEST = 1 << 53
TOKEN = b"0123456789abcdef0123456789abcdef"


def as_join(run: LightRun, incarnation: int) -> protocol.Join:
    name = run.names[0]
    return protocol.Join(NodeFacts(name, incarnation, "127.0.0.1", 1), HONEST)


def as_return(run: LightRun, incarnation: int) -> protocol.Return:
    name = run.names[0]
    return protocol.Return(NodeFacts(name, incarnation, "127.0.0.1", 1), HONEST, run.places[name], Stage.RUNNING)


def as_leaver(run: LightRun, incarnation: int) -> protocol.Join:
    name, place = run.names[0], run.places[run.names[0]]
    return protocol.Join(NodeFacts(name, incarnation), HONEST, place, has_lost_place=True)


# With a member's name in the handshake.


def impersonate(port: int, name: str, ticket: bytes = b"", token: bytes | None = None) -> None:
    with pytest.raises(TurnedAway, match="is another node's"):
        Peer(port, "victim", name, ticket=ticket, token=token)


@pytest.mark.parametrize("token", [None, TOKEN], ids=["without a token", "with the token"])
def test_a_stranger_introduces_itself_as_a_member(tmp_path: Path, token: bytes | None) -> None:
    """It has no ticket, one of its own, one of the same name in another run, one that is cut or is too long. The log
    says it once, and the member notices nothing."""
    options = ["--token-file", support.write_secret(tmp_path / "token", TOKEN)] if token else []
    with coordinator(tmp_path, *options) as server, light_run(server.port, "victim", token) as run:
        name = run.names[0]
        with (
            Peer(server.port, "victim", "stranger", token=token) as stranger,
            Peer(server.port, "another run", name, token=token) as namesake,
        ):
            others = (stranger.welcome.ticket, namesake.welcome.ticket)
            for ticket in (b"", *others, run.tickets[name][:-1], run.tickets[name] + b"\0", bytes(32)):
                impersonate(server.port, name, ticket, token)
        run.run_for(0.3)
        run.finish()
        assert not run.disturbed
        assert 1 <= len(server.lines("is another node's")) <= 2, "it is said once a minute"


def test_a_stranger_takes_the_name_of_a_member_that_is_away(server: CoordinatorProcess) -> None:
    """While its lease lasts, and after a newer coordinator has read what was written down; its own ticket opens it."""
    settings = Settings(1, 1, heartbeat_s=HEARTBEAT_S, lease_s=10.0, drop_timeout_s=5.0, last_call_s=0.0)
    with Peer(server.port, "victim") as member:
        member.send(protocol.Join(NodeFacts("a"), settings))
        sealed = member.until(Sealed)
    impersonate(server.port, "a")
    with Peer(server.port, "victim", ticket=member.welcome.ticket) as again:
        again.send(protocol.Return(NodeFacts("a"), settings, sealed.place, Stage.RUNNING))
        assert not again.is_turned_out()


def test_a_stranger_takes_the_name_of_a_member_when_the_coordinator_is_restarted(tmp_path: Path) -> None:
    first = CoordinatorProcess(tmp_path, port=support.free_port())
    settings = Settings(1, 1, heartbeat_s=HEARTBEAT_S, lease_s=10.0, last_call_s=0.0)
    try:
        with Peer(first.port, "victim") as member:
            member.send(protocol.Join(NodeFacts("a"), settings))
            sealed = member.until(Sealed)
            first.kill()
    finally:
        first.close()
    with coordinator(tmp_path, port=first.port) as second:
        impersonate(second.port, "a")
        with Peer(second.port, "victim", ticket=member.welcome.ticket) as again:
            again.send(protocol.Return(NodeFacts("a"), settings, sealed.place, Stage.RUNNING))
            assert not again.is_turned_out()


# With a name of its own in the handshake, or none, and a member's in what it says.


@pytest.mark.parametrize("introduced_as", ["stranger", ""], ids=["another node", "no node"])
@pytest.mark.parametrize("act", [as_join, as_return, as_leaver], ids=["join", "return", "lost place"])
def test_a_stranger_speaks_for_a_member(
    server: CoordinatorProcess, act: Callable[[LightRun, int], object], introduced_as: str
) -> None:
    """It is cut off in one line, whatever incarnation it claims to be, and the run does not notice: the member is not
    hung up on, not replaced, and not locked out."""
    with light_run(server.port, "victim") as run:
        for incarnation in (0, 1, HIGHEST):
            with Peer(server.port, "victim", introduced_as) as stranger:
                stranger.send(act(run, incarnation))
                assert stranger.is_turned_out(), f"the stranger was taken for the member ({incarnation})"
            run.run_for(0.2)
            assert not run.disturbed, (incarnation, run.disturbed)
        assert 1 <= len(server.lines("speaks for")) <= 2, "it is said once a minute"
        run.finish()
        assert not run.disturbed


def test_a_stranger_speaks_for_a_node_that_waits(server: CoordinatorProcess) -> None:
    """Before there is a round: the place in line is the one of the node that came first."""
    with Peer(server.port, "victim") as member, Peer(server.port, "victim", "stranger") as stranger:
        member.send(protocol.Join(NodeFacts("a"), HONEST)).ask("check", "anything")
        impersonate(server.port, "a")
        stranger.send(protocol.Join(NodeFacts("a"), HONEST))
        assert stranger.is_turned_out()
        assert member.ask("check", "anything") is not None, "the node that waits was hung up on"


def test_a_member_is_not_locked_out_by_a_stranger_that_came_before_its_return(server: CoordinatorProcess) -> None:
    """The member lost its place and comes back as its next incarnation, as agents do."""
    settings = Settings(1, 1, heartbeat_s=HEARTBEAT_S, lease_s=5.0, drop_timeout_s=0.2, last_call_s=0.1)
    with Peer(server.port, "victim") as member:
        member.send(protocol.Join(NodeFacts("a"), settings))
        assert isinstance(member.until(Sealed), Sealed)
        with Peer(server.port, "victim", "stranger") as stranger:
            stranger.send(protocol.Join(NodeFacts("a", HIGHEST), settings))
            assert stranger.is_turned_out()
        member.send(protocol.Heartbeat(1))
        assert isinstance(member.until(protocol.HeartbeatAnswer), protocol.HeartbeatAnswer), "it was shut out"
        member.send(protocol.Join(NodeFacts("a", 1), settings, has_lost_place=True))
        assert isinstance(member.until(Sealed), Sealed), "it was shut out"


# Peers that are no members, or of another run.


@pytest.mark.parametrize(
    "message",
    [protocol.Close("ha"), protocol.Succeeded(1), protocol.Leaving(), protocol.Left()],
    ids=lambda message: type(message).__name__,
)
def test_a_peer_that_has_not_joined_acts_on_the_run(server: CoordinatorProcess, message: object) -> None:
    with light_run(server.port, "victim") as run, Peer(server.port, "victim", "stranger") as stranger:
        stranger.send(message)
        run.run_for(0.3)
        assert not run.disturbed, run.disturbed
        assert run.outcome is None, run.outcome
        run.finish()
        assert not run.disturbed


def test_a_peer_of_another_run_acts_on_this_one(server: CoordinatorProcess) -> None:
    """With the name, the places and the numbers of a member."""
    with light_run(server.port, "victim") as run, Peer(server.port, "victim too", run.names[0]) as stranger:
        for incarnation in (0, 1):
            for act in (as_join, as_return, as_leaver):
                stranger.send(act(run, incarnation), protocol.Leaving(), protocol.Left(), protocol.Succeeded(1))
        stranger.send(protocol.Close("ha"))
        run.run_for(0.5)
        run.finish()
        assert not run.disturbed
