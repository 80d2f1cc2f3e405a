"""Numbers that a peer sends: times, counts and rounds beyond sense. None of them sizes, stalls or poisons anything."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import NodeFacts, Place, Settings, Stage
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from tests import support
from tests.attacks.harness import HONEST, LEASE_S, MIB, LightRun, Peer, at_most, neighbour
from tests.coordinators import CoordinatorProcess, coordinator

JUNK = b"\0\0\0\x05hello"
HIGHEST = 1 << 53


def place(**fields: Any) -> Place:
    return Place(**{"term": 1, "round": 1, "rank": 0, "node_count": 1, "shapes": (("default", 1),), **fields})


# Times.


@pytest.mark.parametrize("lease_s", [0.0, 1e-16, 0.0999, 3600.1, float("inf")])
def test_a_lease_that_makes_no_sense_followed_by_junk(server: CoordinatorProcess, lease_s: float) -> None:
    """In one write, so that the end of the connection finds the node overdue already."""
    with neighbour(server), Peer(server.port) as peer:
        join = protocol.Join(NodeFacts("a"), Settings(1, 1, heartbeat_s=0.01, lease_s=lease_s))
        peer.raw(peer.frame(join) + JUNK)
        assert peer.until() is None
        (line,) = server.lines("sent junk")
        assert "lease_s" in line


def test_a_heartbeat_that_the_lease_is_too_short_for(server: CoordinatorProcess) -> None:
    with neighbour(server), Peer(server.port) as peer:
        peer.send(protocol.Join(NodeFacts("a"), Settings(1, 1, heartbeat_s=1.0, lease_s=1.5)))
        assert peer.until() is None
        server.await_line("a lease of 1.5 s with a heartbeat every 1 s")


def test_the_shortest_times_that_are_allowed(server: CoordinatorProcess) -> None:
    """Many runs whose nodes are overdue all the time, and whose deadlines are at once or never."""
    policy = RestartPolicy(max_restarts=HIGHEST, window_s=5e-324, backoff_s=1e10, backoff_cap_s=1e10)
    extremes = [
        {},
        {"last_call_s": 0.0, "close_linger_s": 0.0, "join_timeout_s": 0.0},
        {"last_call_s": 5e-324, "join_timeout_s": 5e-324, "close_linger_s": 86400.0},
        {"last_call_s": 1e10, "join_timeout_s": 1e10, "policy": policy},
    ]
    with neighbour(server):
        for number in range(40):
            settings = Settings(1, 2, heartbeat_s=0.01, lease_s=0.1, drop_timeout_s=0.01)
            changed = Settings(**{name: getattr(settings, name) for name in Settings.__slots__} | extremes[number % 4])
            with Peer(server.port, f"hostile {number}") as peer:
                join = protocol.Join(NodeFacts("a", grace_s=1e10 * (number % 3)), changed)
                wait = protocol.StoreRequest(b"h", 1, "wait", ("never",), timeout_s=5e-324)
                peer.raw(peer.frame(join) + peer.frame(wait) + JUNK)
        time.sleep(0.5)
        process = psutil.Process(server.process.pid)
        before = process.cpu_times()
        time.sleep(1.0)
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system < 0.5, "it spins"


# Counts.


@pytest.mark.parametrize("restarts", [10**8, HIGHEST])
@pytest.mark.parametrize("kind", ["join", "return"])
def test_restarts_that_never_happened(tmp_path: Path, kind: str, restarts: int) -> None:
    """Neither when they are heard of, nor after a restart of the coordinator from its file."""
    settings = Settings(1, 1)
    facts, told = NodeFacts("a"), place(restarts_used=restarts)
    first = CoordinatorProcess(tmp_path, port=support.free_port())
    try:
        with neighbour(first), at_most(first, 32 * MIB), Peer(first.port) as peer:
            message = protocol.Join(facts, settings, told, heard_round=1)
            peer.send(message if kind == "join" else protocol.Return(facts, settings, told, Stage.RUNNING))
            peer.ask("check", "anything")
    finally:
        first.kill()
    with (
        coordinator(tmp_path, port=first.port) as second,
        neighbour(second),
        at_most(second, 32 * MIB),
        Peer(second.port) as peer,
    ):
        peer.ask("check", "anything")


@pytest.mark.parametrize("node_count", [2, 65536, 131072])
def test_a_place_in_a_world_larger_than_the_run(server: CoordinatorProcess, node_count: int) -> None:
    with neighbour(server), at_most(server, 16 * MIB), Peer(server.port) as peer:
        told = place(rank=node_count - 1, node_count=node_count)
        peer.send(protocol.Return(NodeFacts("a"), Settings(1, 1), told, Stage.RUNNING))
        assert peer.is_turned_out(), "a world of more nodes than the run may have was adopted"


def test_worlds_of_the_greatest_size_that_is_allowed(server: CoordinatorProcess) -> None:
    """Adopted in many runs at once, each with a description that is as long as a message can be."""
    settings = Settings(1, 131072)
    with neighbour(server), at_most(server, 128 * MIB):
        peers = [Peer(server.port, f"hostile {number}") for number in range(60)]
        shapes = tuple((f"{number:04}" + "r" * 900, 1) for number in range(1024))
        told = place(node_count=131072, shapes=shapes, pattern=b"\0" * 1000)
        for peer in peers:
            peer.send(protocol.Return(NodeFacts("a"), settings, told, Stage.RUNNING))
            peer.is_turned_out()
        for peer in peers:
            peer.close()


def test_more_shapes_than_a_message_has_room_for(server: CoordinatorProcess) -> None:
    """Each node has a role of its own with a long name. The world cannot be told, which is the run's own trouble."""
    with neighbour(server), Peer(server.port) as peer:
        count = 1500
        settings = Settings(count, count, lease_s=60.0)
        for number in range(count):
            facts = NodeFacts(f"n{number}", role=f"{number} {'r' * 1000}")
            try:
                peer.send(protocol.Join(facts, settings))
            except ConnectionError:
                break
        peer.is_turned_out()
        assert "Traceback" not in server.log


# Rounds and terms, in the run of the victim.


@pytest.mark.parametrize("number", [HIGHEST, HIGHEST - 1])
@pytest.mark.parametrize("how", ["heard", "joined", "returned"])
def test_a_round_from_the_far_end(server: CoordinatorProcess, how: str, number: int) -> None:
    """One message must not make every later round of the run unreadable, or use up the numbers."""
    settings = HONEST
    messages = {
        "heard": protocol.Join(NodeFacts("evil"), settings, heard_round=number),
        "joined": protocol.Join(NodeFacts("evil"), settings, place(round=number)),
        "returned": protocol.Return(NodeFacts("evil"), settings, place(round=number, node_count=2), Stage.RUNNING),
    }
    with Peer(server.port, "victim") as evil:
        evil.send(messages[how])
        if not evil.is_turned_out():
            evil.send(protocol.Left()).ask("check", "anything")
    run = LightRun(server.port, "victim", settings=settings)
    try:
        run.form(4 * LEASE_S)
        assert max(each.round for each in run.places.values()) < HIGHEST // 2, run.places
    finally:
        run.close()


def test_a_term_from_the_far_end(server: CoordinatorProcess) -> None:
    """The nodes of the run must be able to say the term that they are told, when they come back."""
    with Peer(server.port, "victim", term=HIGHEST // 2), Peer(server.port, "victim") as first:
        told = first.welcome.term
        with Peer(server.port, "victim", term=told) as again:
            assert again.welcome.term >= told
