"""Who is who: no peer speaks for a node that another one has joined with, and only members act on the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.rendezvous.client.handshake import TurnedAway
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import Expelled, Sealed, Settings, Stage
from tests import support
from tests.attacks.harness import HEARTBEAT_S, HONEST, HonestRun, Peer, facts, honest, member
from tests.coordinators import CoordinatorProcess, coordinator
from tests.promises import promise, proves

HIGHEST = 1 << 53
TOKEN = b"0123456789abcdef0123456789abcdef"
SECRET = b"of the member alone"
ONE = Settings(1, 1, heartbeat_s=HEARTBEAT_S, lease_s=10.0, drop_timeout_s=5.0, last_call_s=0.0)


WITH_TOKEN = pytest.param(TOKEN, marks=support.only_in_test_all("a token"), id="with the token")


@pytest.fixture(params=[pytest.param(None, id="without a token"), WITH_TOKEN])
def token(request: pytest.FixtureRequest) -> bytes | None:
    """All attackers here know the token, if there is one."""
    found: bytes | None = request.param
    return found


@pytest.fixture
def server(tmp_path: Path, token: bytes | None) -> Iterator[CoordinatorProcess]:
    options = ["--token-file", support.write_secret(tmp_path / "token", TOKEN)] if token else []
    with coordinator(tmp_path, *options) as process:
        yield process


@pytest.fixture
def run(server: CoordinatorProcess, token: bytes | None, tmp_path: Path) -> Iterator[HonestRun]:
    """It does not notice the attack, and succeeds."""
    with HonestRun(server.port, str(tmp_path / "token") if token else "", answer=no_answer) as honest_run:
        yield honest_run
        honest_run.finish()


def no_answer(_: bytes) -> bytes:
    raise AssertionError("the node was asked")


def as_join(run: HonestRun, incarnation: int) -> protocol.Join:
    return protocol.Join(facts(run.names[0], incarnation), HONEST)


def as_return(run: HonestRun, incarnation: int) -> protocol.Return:
    return protocol.Return(facts(run.names[0], incarnation), HONEST, run.places[0], Stage.RUNNING)


def as_leaver(run: HonestRun, incarnation: int) -> protocol.Join:
    return protocol.Join(facts(run.names[0], incarnation), HONEST, run.places[0], has_lost_place=True)


def impersonate(port: int, name: str, token: bytes | None, *secrets: bytes) -> None:
    for secret in (b"", b"made up", bytes(256), *secrets):
        with pytest.raises(TurnedAway, match="is another node's"):
            Peer(port, name=name, secret=secret, token=token)


@promise("""coordinator.node-id-belongs-node: A node id belongs to the node that joined with it first and shows its
    secret; knowing the token is not enough. A node that has not joined, or was refused, reads nothing, acts on nothing
    and has no store.""")
@pytest.mark.parametrize("token", [None, TOKEN], ids=["without a token", "with the token"], indirect=True)
def test_a_stranger_introduces_itself_as_a_member(
    server: CoordinatorProcess, token: bytes | None, run: HonestRun
) -> None:
    own, other = (each._client._secret for each in run.nodes)
    impersonate(server.port, run.names[0], token, own[:-1], own + b"\0", other)
    assert server.lines("is another node's")


def test_a_stranger_takes_the_name_of_a_member_that_is_away(tmp_path: Path, token: bytes | None) -> None:
    """While its lease lasts, and after a newer coordinator has read what was written down. The member comes back."""
    options = ["--token-file", support.write_secret(tmp_path / "token", TOKEN)] if token else []
    first = CoordinatorProcess(tmp_path, *options, port=support.free_port())
    with contextlib.closing(first):
        with member(first.port, "a", ONE, secret=SECRET, token=token) as peer:
            place = peer.await_kind(Sealed).place
        impersonate(first.port, "a", token)
        come_back(first.port, place, token)
        first.kill()
    with coordinator(tmp_path, *options, port=first.port) as second:
        impersonate(second.port, "a", token)
        come_back(second.port, place, token)


def come_back(port: int, place: object, token: bytes | None) -> None:
    with Peer(port, name="a", secret=SECRET, token=token) as again:
        again.send(protocol.Return(facts("a"), ONE, place, Stage.RUNNING))
        assert not again.is_turned_out()


# With a name of its own in the handshake, or none, and a member's in what it says.


@pytest.mark.parametrize("introduced_as", ["stranger", ""], ids=["another node", "no node"])
@pytest.mark.parametrize("act", [as_join, as_return, as_leaver], ids=["join", "return", "lost place"])
def test_a_stranger_speaks_for_a_member(
    server: CoordinatorProcess,
    token: bytes | None,
    run: HonestRun,
    act: Callable[[HonestRun, int], object],
    introduced_as: str,
) -> None:
    """It is cut off in one line, whatever incarnation it claims to be. The member is not replaced nor locked out."""
    for incarnation in (0, 1, HIGHEST):
        with Peer(server.port, name=introduced_as, token=token) as stranger:
            stranger.send(act(run, incarnation))
            assert stranger.is_turned_out(), f"the stranger was taken for the member ({incarnation})"
        run.check()
    server.await_line(f"speaks for '{run.names[0]}', which is another node")


def test_a_stranger_speaks_for_a_node_that_waits(server: CoordinatorProcess, token: bytes | None) -> None:
    """Before there is a round: the place in line is the one of the node that came first. The next incarnation of that
    node is let in, as it shows the secret."""
    with member(server.port, "a", secret=SECRET, token=token) as waiting:
        assert waiting.ask("check", "anything").problem == ""
        impersonate(server.port, "a", token)
        with Peer(server.port, name="stranger", token=token) as stranger:
            stranger.send(protocol.Join(facts("a", HIGHEST), HONEST))
            assert stranger.is_turned_out()
        assert waiting.ask("check", "anything").problem == "", "the node that waits was hung up on"
        with Peer(server.port, name="a", secret=SECRET, token=token) as own:
            own.send(protocol.Join(facts("a", 1), HONEST))
            assert own.ask("check", "anything").problem == ""


@promise("""coordinator.messages-older-connection: Messages on an older connection of a node are dropped. A connection
    that a newer incarnation supersedes is closed, and its heartbeats are not answered. The memory needed for that is
    bounded.""")
def test_heartbeats_on_a_connection_that_was_superseded_are_not_answered(
    server: CoordinatorProcess, token: bytes | None
) -> None:
    """When the next incarnation of a node is accepted, the connection of the one before is told so and closed: its
    workers must not live on beside the next round's."""
    with member(server.port, "a", ONE, secret=SECRET, token=token) as before:
        before.await_kind(Sealed)
        with Peer(server.port, name="a", secret=SECRET, token=token) as after:
            after.send(protocol.Join(facts("a", 1), ONE))
            assert after.await_kind(Sealed).place.round == 2
            with contextlib.suppress(ConnectionError):
                before.send(protocol.Heartbeat(1))
            said = before.until(Expelled, protocol.HeartbeatAnswer)
            assert said == Expelled("a newer incarnation of this node has joined")
            assert before.is_hung_up()
            assert not after.is_turned_out()


# Peers that are no members.

ACTS: dict[str, Callable[[str], object]] = {
    "close": lambda _: protocol.Close("ha"),
    "succeed": lambda _: protocol.Succeeded(1),
    "leave": lambda _: protocol.Leaving(),
    "left": lambda _: protocol.Left(),
    "answer": lambda _: protocol.Answer(1, b'{"result": "forged"}'),
    "read the status": lambda _: protocol.Query(1, b'{"command": "status"}'),
    "stop": lambda _: protocol.Query(1, b'{"command": "stop"}'),
    "read logs": lambda node: protocol.Query(1, b'{"command": "logs"}', node),
    "read stacks": lambda node: protocol.Query(1, b'{"command": "stacks"}', node),
    "read the store": lambda node: protocol.StoreRequest(b"x", 1, "get", (f"round/1/{node}",)),
}


@proves("coordinator.node-id-belongs-node")
@pytest.mark.parametrize("is_refused", [False, True], ids=["before its join", "after it was refused"])
def test_a_peer_that_is_no_member_acts_on_the_run(
    server: CoordinatorProcess, token: bytes | None, run: HonestRun, is_refused: bool
) -> None:
    """It gets no answer, no node is asked anything, and the log does not take its word."""
    for what, act in ACTS.items():
        with Peer(server.port, name=f"stranger {what}", token=token) as stranger:
            join = protocol.Join(facts(stranger.name), Settings(1, 9))
            with contextlib.suppress(ConnectionError):
                stranger.send(*([join] if is_refused else []), act(run.names[0]), protocol.Heartbeat(1))
            with contextlib.suppress(TimeoutError):  # Words of a node that has not joined mean nothing.
                said = stranger.until(protocol.Answer, protocol.StoreAnswer, protocol.HeartbeatAnswer, deadline_s=0.2)
                assert said is None, what
        run.check()
    assert not [line for line in server.lines("stranger") if line.endswith((" is leaving", " left"))]


@promise("""coordinator.endpoint-run-node-run: One endpoint is one run: a node of another run is refused at once, or
    waits while the present run has ended or has no node. The served run is named only to nodes that have proved the
    token. The name of a run that had all its nodes can be used again at once.""")
@pytest.mark.parametrize("token", [None, TOKEN], ids=["without a token", "with the token"], indirect=True)
def test_nodes_of_another_run_at_a_busy_endpoint(
    server: CoordinatorProcess, token: bytes | None, tmp_path: Path
) -> None:
    """They are refused at once. Only with the token are they told which run it is."""
    line = "serves the run 'honest'; all nodes" if token else "serves another run; all nodes"
    with honest(server, str(tmp_path / "token") if token else ""):
        for number in range(200):
            with pytest.raises(TurnedAway, match=line):
                Peer(server.port, "another run", f"n{number}", token=token)
