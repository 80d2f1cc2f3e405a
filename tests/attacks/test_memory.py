"""What peers make the coordinator keep: it has one budget, and says so in one clear line when that is used up."""

from __future__ import annotations

import contextlib
import time

import pytest

from holdfast.rendezvous.client.handshake import TurnedAway
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import NodeFacts, Place, Settings, Stage
from holdfast.rendezvous.membership.restart_policy import Failure, RestartPolicy
from tests.attacks.harness import MIB, Peer, at_most, neighbour
from tests.coordinators import CoordinatorProcess

ATTACK_S = 10.0
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
    shapes = tuple((f"{number:04}" + "r" * 900, 1) for number in range(1024))
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
    ends = time.monotonic() + ATTACK_S
    with neighbour(server), at_most(server, 256 * MIB) as meter:
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


@pytest.mark.parametrize("lease_s", [2.0, 3600.0])
def test_ever_new_nodes_on_one_connection(server: CoordinatorProcess, lease_s: float) -> None:
    """One connection speaks for one node at a time; those that it gave up are forgotten."""
    settings = Settings(131072, 131072, lease_s=lease_s)
    ends = time.monotonic() + ATTACK_S
    with (
        neighbour(server),
        at_most(server, 64 * MIB) as meter,
        Peer(server.port) as peer,
        contextlib.suppress(ConnectionError),
    ):
        for batch in range(400):
            facts = [NodeFacts(f"{batch} {number} {'n' * 900}", address="a" * 1000) for number in range(250)]
            peer.raw(b"".join(peer.frame(protocol.Join(each, settings)) for each in facts))
            if meter.growth_bytes > 64 * MIB or time.monotonic() > ends:
                break
        peer.ask("check", "anything")


def test_ever_new_nodes_that_leave(server: CoordinatorProcess) -> None:
    settings = Settings(2, 2)
    ends = time.monotonic() + ATTACK_S
    with neighbour(server), at_most(server, 64 * MIB) as meter, Peer(server.port) as peer:
        for batch in range(200):
            for number in range(250):
                facts = NodeFacts(f"{batch} {number} {'n' * 900}", address="a" * 1000, requested_rank=number % 2)
                peer.raw(peer.frame(protocol.Join(facts, settings)) + peer.frame(protocol.Left()))
            if meter.growth_bytes > 64 * MIB or time.monotonic() > ends:
                break
            peer.ask("check", "anything")


def test_ever_new_incarnations_that_return(server: CoordinatorProcess) -> None:
    settings = Settings(1, 4, lease_s=3600.0)
    place = Place(1, 1, 0, 4)
    with (
        neighbour(server),
        at_most(server, 32 * MIB),
        Peer(server.port) as peer,
        contextlib.suppress(ConnectionError),
    ):
        for number in range(20_000):
            peer.send(protocol.Return(NodeFacts("n" * 1000, number), settings, place, Stage.RUNNING))


def test_one_peer_does_not_use_up_the_waiting_of_its_run(server: CoordinatorProcess) -> None:
    with Peer(server.port, "shared") as greedy, Peer(server.port, "shared") as modest:
        wait = greedy.frame(protocol.StoreRequest(b"g", 1, "wait", ("never",), timeout_s=3600.0))
        for _ in range(40):
            greedy.raw(wait * 1000)
        answer = greedy.ask("check", "anything")
        assert answer is None or not answer.amount
        modest.send(protocol.StoreRequest(b"m", 1, "wait", ("later",), timeout_s=60.0))
        modest.send(protocol.StoreRequest(b"m", 2, "set", ("later",), (b"",)))
        answers = [modest.until(protocol.StoreAnswer) for _ in range(2)]
        assert {answer.number: answer.problem for answer in answers} == {1: "", 2: ""}
