"""Numbers that a peer sends: times, counts and rounds beyond sense. None of them sizes, stalls or poisons anything."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.model import NodeFacts, Place, Settings, Stage
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from tests import support
from tests.attacks.harness import HEARTBEAT_S, LEASE_S, MIB, Drain, LightRun, Peer, at_most, neighbour
from tests.coordinators import CoordinatorProcess, coordinator

JUNK = b"\0\0\0\x05hello"
HIGHEST = 1 << 53


def place(**fields: Any) -> Place:
    return Place(**{"term": 1, "round": 1, "rank": 0, "node_count": 1, "shapes": (("default", 1),), **fields})


# Times.


def test_a_lease_that_makes_no_sense_followed_by_junk(server: CoordinatorProcess) -> None:
    """In one write, so that the end of the connection finds the node overdue already."""
    with neighbour(server):
        for lease_s in (0.0, 1e-16, 0.0999, 3600.1, float("inf"), float("nan"), -1.0):
            with Peer(server.port) as peer:
                join = protocol.Join(NodeFacts("a"), Settings(1, 1, heartbeat_s=0.01, lease_s=lease_s))
                peer.raw(peer.frame(join) + JUNK)
                assert peer.until() is None, lease_s
        lines = server.lines("sent junk")
        assert all("$.settings.lease_s" in line for line in lines)
        assert len(lines) == 2, "too short, and too long"


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
        time.sleep(0.2)
        process = psutil.Process(server.process.pid)
        before = process.cpu_times()
        time.sleep(1.0)
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system < 0.5, "it spins"


# Counts.


def test_restarts_that_never_happened(tmp_path: Path) -> None:
    """They cost nothing when a coordinator hears of them, nor after its restart, from the file that it wrote."""
    tickets: dict[str, bytes] = {}

    def tell(port: int, kind: str, restarts: int) -> None:
        run_id = f"{kind} {restarts}"
        facts, settings, told = NodeFacts("a"), Settings(1, 1), place(restarts_used=restarts)
        with Peer(port, run_id, ticket=tickets.get(run_id, b"")) as peer:
            tickets[run_id] = peer.welcome.ticket
            join = protocol.Join(facts, settings, told, heard_round=1)
            peer.send(join if kind == "join" else protocol.Return(facts, settings, told, Stage.RUNNING))
            assert peer.ask("check", "anything") is not None, "it was not believed, so that was no attack"

    def tell_all(server: CoordinatorProcess) -> None:
        with at_most(server, 32 * MIB):
            for restarts in (10**8, HIGHEST):
                for kind in ("join", "return"):
                    tell(server.port, kind, restarts)

    first = CoordinatorProcess(tmp_path, port=support.free_port())
    try:
        with neighbour(first):
            tell_all(first)
    finally:
        first.kill()
    with coordinator(tmp_path, port=first.port) as second:
        tell_all(second)


def test_a_place_in_a_world_larger_than_the_run(server: CoordinatorProcess) -> None:
    with neighbour(server), at_most(server, 16 * MIB):
        for node_count in (2, 65536, 131072):
            with Peer(server.port) as peer:
                told = place(rank=node_count - 1, node_count=node_count)
                peer.send(protocol.Return(NodeFacts("a"), Settings(1, 1), told, Stage.RUNNING))
                assert peer.is_turned_out(), f"a world of {node_count} nodes was adopted in a run of one"


def test_worlds_of_the_greatest_size_that_is_allowed(server: CoordinatorProcess) -> None:
    """Adopted in many runs at once, each with a description that is as long as a message can be."""
    settings = Settings(1, 131072)
    with neighbour(server), at_most(server, 128 * MIB):
        peers = [Peer(server.port, f"hostile {number}") for number in range(60)]
        shapes = tuple((f"{number:04}" + "r" * 120, 1) for number in range(model.MAX_SHAPES))
        told = place(node_count=131072, shapes=shapes, pattern=b"\0" * 1000)
        for peer in peers:
            peer.send(protocol.Return(NodeFacts("a"), settings, told, Stage.RUNNING))
            peer.is_turned_out()
        for peer in peers:
            peer.close()


def test_more_shapes_than_a_message_has_room_for(server: CoordinatorProcess) -> None:
    """Each node has a role of its own with as long a name as it may have. Beyond a number of them nodes are refused, so
    the world can be told to each of the others: half a MiB for each, which does not hold up the neighbour."""
    with neighbour(server), at_most(server, 192 * MIB), contextlib.ExitStack() as stack:
        settings = Settings(model.MAX_SHAPES, model.MAX_SHAPES + 9, lease_s=60.0, last_call_s=1.0)
        peers = [stack.enter_context(Peer(server.port, name=f"n{at}")) for at in range(model.MAX_SHAPES + 3)]
        for number, peer in enumerate(peers):
            role = f"{number} ".ljust(128, "\U0001f600")
            peer.send(protocol.Join(NodeFacts(peer.name, role=role), settings))
        read = [peers[0], peers[-1]]
        stack.callback(Drain(*(peer for peer in peers if peer not in read)).close)
        first, last = (peer.until(model.Refused, model.Sealed) for peer in read)
        assert isinstance(first, model.Sealed)
        assert isinstance(last, model.Refused)


# Rounds and terms, in the run of the victim.


@pytest.mark.parametrize("number", [HIGHEST, HIGHEST - 1, protocol.HIGHEST_CLAIM])
@pytest.mark.parametrize("how", ["heard", "joined", "returned"])
def test_a_round_from_the_far_end(server: CoordinatorProcess, how: str, number: int) -> None:
    """One message must not make every later round of the run unreadable, or use up the numbers."""
    settings = Settings(2, 2, heartbeat_s=HEARTBEAT_S, lease_s=1.0, last_call_s=0.0, drop_timeout_s=0.2)
    messages = {
        "heard": protocol.Join(NodeFacts("evil"), settings, heard_round=number),
        "joined": protocol.Join(NodeFacts("evil"), settings, place(round=number)),
        "returned": protocol.Return(NodeFacts("evil"), settings, place(round=number, node_count=2), Stage.RUNNING),
    }
    with Peer(server.port, "victim", "evil") as evil:
        evil.send(messages[how])
        assert evil.is_turned_out() == (number > protocol.HIGHEST_CLAIM)
        with contextlib.suppress(ConnectionError):
            evil.send(protocol.Left()).ask("check", "anything")
    run = LightRun(server.port, "victim", settings=settings)
    try:
        run.form(4 * LEASE_S)
        assert max(each.round for each in run.places.values()) < protocol.HIGHEST_CLAIM + 100, run.places
    finally:
        run.close()


def test_a_term_from_the_far_end(server: CoordinatorProcess) -> None:
    """The nodes of the run must be able to say the term that they are told, when they come back."""
    with Peer(server.port, "victim", "evil", term=HIGHEST // 2), Peer(server.port, "victim") as first:
        told = first.welcome.term
        with Peer(server.port, "victim", ticket=first.welcome.ticket, term=told) as again:
            assert again.welcome.term >= told
