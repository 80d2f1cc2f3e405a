"""What peers make the coordinator keep: it has one budget, and says so in one clear line when that is used up."""

from __future__ import annotations

import contextlib
import time

import pytest

from holdfast.rendezvous.client.handshake import TurnedAway
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import MAX_SHAPES, NodeFacts, Place, Settings, Stage
from holdfast.rendezvous.membership.restart_policy import Failure, RestartPolicy
from tests.attacks.harness import MIB, Peer, at_most, neighbour
from tests.coordinators import CoordinatorProcess

ATTACK_S = 2.0
BUDGET_BYTES = 512 * MIB  # For all runs together: no less than any sensible budget.


def test_the_stores_of_many_runs(server: CoordinatorProcess) -> None:
    """Each as full as it may be. Beyond the budget of the process a set is refused with a word, and the neighbour's
    store has room."""
    problems = set()
    with neighbour(server), at_most(server, BUDGET_BYTES) as meter, contextlib.ExitStack() as stack:
        for run in range(25):
            with contextlib.suppress(TurnedAway):
                peer = stack.enter_context(Peer(server.port, f"hoarder {run}"))
                for number in range(70):
                    answer = peer.ask("set", f"key {number}", values=(bytes(MIB - 1000),))
                    if answer is None or answer.problem:
                        problems.add(answer and answer.problem)
                        break
            if meter.growth_bytes > BUDGET_BYTES:
                break
        assert any(problems), problems


def test_the_stories_of_many_runs(server: CoordinatorProcess) -> None:
    """Long messages, of which a run's machine keeps the last few for its own report."""
    settings = Settings(1, 2)
    shapes = tuple((f"{number:04}" + "r" * 120, 1) for number in range(MAX_SHAPES))
    place = Place(1, 1, 0, 2, shapes)
    with neighbour(server), at_most(server, 256 * MIB) as meter, contextlib.ExitStack() as stack:
        for run in range(20):
            with contextlib.suppress(TurnedAway, ConnectionError):
                peer = stack.enter_context(Peer(server.port, f"teller {run}"))
                blob = peer.frame(protocol.Join(NodeFacts("a"), settings, place))
                for _ in range(40):
                    peer.raw(blob)
                peer.ask("check", "anything")
            if meter.growth_bytes > 256 * MIB:
                break


def test_many_runs_that_are_deserted(server: CoordinatorProcess) -> None:
    """With the longest lease, settings as long as they may be, and a failure to remember."""
    names = frozenset(f"{number:03}" + "x" * 250 for number in range(256))
    policy = RestartPolicy(max_restarts=9, fatal_exceptions=names, uncounted_exceptions=names)
    settings = Settings(1, 1, lease_s=3600.0, close_linger_s=86400.0, policy=policy)
    denied = set()
    with neighbour(server), at_most(server, 256 * MIB) as meter:
        ends = time.monotonic() + ATTACK_S
        for run in range(2000):
            try:
                with Peer(server.port, f"deserted {run}") as peer:
                    peer.send(protocol.Join(NodeFacts("a"), settings))
                    peer.send(protocol.Failed(1, Failure(text="t" * 16000, evidence="e" * 65000)))
                    peer.ask("check", "anything")
            except TurnedAway as error:
                denied.add(str(error))
            if meter.growth_bytes > 256 * MIB or time.monotonic() > ends:
                break


@pytest.mark.parametrize("goes", [(), (protocol.Left(),)], ids=["vanish", "leave"])
def test_ever_new_nodes(server: CoordinatorProcess, goes: tuple[object, ...]) -> None:
    """Each on a connection of its own, as a connection speaks for one node, with all that a node can say of itself."""
    settings = Settings(131072, 131072, lease_s=3600.0)
    count = 0
    with neighbour(server), at_most(server, 64 * MIB) as meter:
        ends = time.monotonic() + ATTACK_S
        while meter.growth_bytes <= 64 * MIB and time.monotonic() < ends:
            count += 1
            with Peer(server.port, name=f"{count} {'n' * 240}") as peer:
                facts = NodeFacts(peer.name, address="a" * 256, role="r" * 128)
                peer.send(protocol.Join(facts, settings), *goes).ask("check", "anything")
    assert count > 20, "that was no attack"


def test_one_connection_for_many_nodes(server: CoordinatorProcess) -> None:
    """It speaks for the node as which it introduced itself, and is cut off when it speaks for another one."""
    with neighbour(server), Peer(server.port) as peer:
        peer.send(protocol.Join(NodeFacts("a"), Settings(2, 2)), protocol.Join(NodeFacts("b"), Settings(2, 2)))
        assert peer.until() is None
        server.await_line("speaks for 'b', which is another node")


def test_ever_new_incarnations_that_return(server: CoordinatorProcess) -> None:
    settings = Settings(1, 4, lease_s=3600.0)
    place = Place(1, 1, 0, 4)
    ticket, number = b"", 0
    with neighbour(server), at_most(server, 32 * MIB):
        ends = time.monotonic() + ATTACK_S
        while time.monotonic() < ends:
            number += 1
            with Peer(server.port, name="n" * 256, ticket=ticket) as peer:
                ticket = peer.welcome.ticket
                peer.send(protocol.Return(NodeFacts(peer.name, number), settings, place, Stage.RUNNING))
                assert peer.is_turned_out() == (number > 1), "the place is that of the first incarnation"
    assert number > 20, "that was no attack"


def test_answers_that_no_peer_reads(server: CoordinatorProcess) -> None:
    """One set wakes several waiting requests of each of many connections, and none of them reads its answers, which are
    as long as they can be. What waits for all together is bounded: beyond it those with most of it are cut off."""
    with neighbour(server), at_most(server, 144 * MIB), contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(server.port, name=f"n{number}")) for number in range(60)]
        for peer in peers:
            waits = [protocol.StoreRequest(b"h", at, "get", ("key",), timeout_s=60.0) for at in range(6)]
            peer.send(*waits).ask("check", "anything")
        with Peer(server.port, name="talker") as talker:
            talker.ask("set", "key", values=(bytes(MIB - 1000),))
            server.await_line("does not read what it is sent")


def test_one_peer_does_not_use_up_the_waiting_of_its_run(server: CoordinatorProcess) -> None:
    with Peer(server.port, "shared") as greedy, Peer(server.port, "shared", "b") as modest:
        wait = greedy.frame(protocol.StoreRequest(b"g", 1, "wait", ("never",), timeout_s=3600.0))
        for _ in range(40):
            greedy.raw(wait * 1000)
        answer = greedy.ask("check", "anything")
        assert answer is None or not answer.amount
        modest.send(protocol.StoreRequest(b"m", 1, "wait", ("later",), timeout_s=60.0))
        modest.send(protocol.StoreRequest(b"m", 2, "set", ("later",), (b"",)))
        answers = [modest.until(protocol.StoreAnswer) for _ in range(2)]
        assert {answer.number: answer.problem for answer in answers} == {1: "", 2: ""}
