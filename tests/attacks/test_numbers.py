"""Numbers that a peer sends: times, counts and rounds beyond sense. None of them sizes, stalls or poisons anything."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.model import Place, Settings, Stage
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from tests import support
from tests.attacks.harness import (
    DEADLINE_S,
    LONGEST_ANSWER_S,
    MIB,
    HonestRun,
    Peer,
    agreed,
    at_most,
    drained,
    facts,
    honest,
)
from tests.coordinators import CoordinatorProcess, coordinator

JUNK = b"\0\0\0\x05hello"
HIGHEST = 1 << 53
QUICK = {"lease": 1, "reconnect_grace": 0.05, "drop_timeout": 0.2, "last_call": 0.1}


def place(**fields: Any) -> Place:
    return Place(**{"term": 1, "round": 1, "rank": 0, "node_count": 1, "shapes": (("default", 1),), **fields})


def test_a_lease_that_makes_no_sense_followed_by_junk(server: CoordinatorProcess) -> None:
    """In one write, so that the end of the connection finds the node overdue already."""
    with honest(server):
        for lease_s in (0.0, 1e-16, 0.0999, 3600.1, float("inf"), float("nan"), -1.0, 1.5):
            with Peer(server.port) as peer:
                settings = Settings(1, 1, heartbeat_s=1.0, lease_s=lease_s)
                peer.raw(peer.frame(protocol.Join(facts(peer.name), settings)) + JUNK)
                assert peer.is_hung_up(), lease_s
        lines = {line.partition("sent junk: ")[2] for line in server.lines("sent junk")}
        assert {line for line in lines if "$.settings.lease_s" not in line} == {
            "Join makes no sense: a lease of 1.5 s with a heartbeat every 1 s"
        }
        assert len(lines) == 3, "too short, too long, and too short for the heartbeat"


EXTREMES = {
    "usual": {},
    "none": {"last_call_s": 0.0, "close_linger_s": 0.0, "join_timeout_s": 0.0},
    "shortest": {"last_call_s": 5e-324, "join_timeout_s": 5e-324, "close_linger_s": 86400.0},
    "longest": {"last_call_s": 1e10, "join_timeout_s": 1e10},
    "policy": {"policy": RestartPolicy(max_restarts=HIGHEST, window_s=5e-324, backoff_s=1e10, backoff_cap_s=1e10)},
}


@pytest.mark.parametrize("extreme", EXTREMES)
def test_the_shortest_times_that_are_allowed(server: CoordinatorProcess, extreme: str) -> None:
    """A run whose nodes are overdue all the time, and whose deadlines are at once or never."""
    settings = Settings(1, 2, heartbeat_s=0.01, lease_s=0.1, drop_timeout_s=0.01, **EXTREMES[extreme])
    for number in range(5):
        with contextlib.suppress(ConnectionError), Peer(server.port, "extreme", f"n{number}") as peer:
            wait = protocol.StoreRequest(b"h", 1, "wait", ("never",), timeout_s=5e-324)
            peer.raw(peer.frame(protocol.Join(facts(peer.name, grace_s=1e10), settings)) + peer.frame(wait) + JUNK)
    time.sleep(0.2)
    process = psutil.Process(server.process.pid)
    before = process.cpu_times()
    time.sleep(1.0)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.5, "it spins"


@pytest.mark.parametrize("kind", [protocol.Join, protocol.Return])
@pytest.mark.parametrize("restarts", [10**8, HIGHEST])
def test_restarts_that_never_happened(tmp_path: Path, kind: type, restarts: int) -> None:
    """They cost nothing when a coordinator hears of them, nor after its restart, from the file that it wrote."""
    told = place(restarts_used=restarts)
    message = kind(facts("a"), Settings(1, 1), told, 1 if kind is protocol.Join else Stage.RUNNING)

    def tell(server: CoordinatorProcess) -> None:
        with at_most(server, 32 * MIB), Peer(server.port, name="a") as peer:
            peer.send(message)
            assert peer.ask("check", "anything") is not None, "it was not believed, so that was no attack"

    first = CoordinatorProcess(tmp_path, port=support.free_port())
    with contextlib.closing(first):
        tell(first)
        first.kill()
    with coordinator(tmp_path, port=first.port) as second:
        tell(second)


@pytest.mark.parametrize("node_count", [2, 65536, 131072])
def test_a_place_in_a_world_larger_than_the_run(server: CoordinatorProcess, node_count: int) -> None:
    """The greatest world that is allowed is adopted, with a description that is as long as a message can be."""
    shapes = tuple((f"{number:04}" + "r" * 120, 1) for number in range(model.MAX_SHAPES))
    told = place(rank=node_count - 1, node_count=node_count, shapes=shapes, pattern=b"\0" * 1000)
    with at_most(server, 16 * MIB):
        for most, is_taken in ((node_count - 1, False), (131072, True)):
            with Peer(server.port) as peer:
                peer.send(protocol.Return(facts(peer.name), Settings(1, most), told, Stage.RUNNING))
                assert peer.is_turned_out() != is_taken


def test_more_shapes_than_a_message_has_room_for(server: CoordinatorProcess) -> None:
    """Each node has a role of its own with as long a name as it may have. Beyond a number of them nodes are refused, so
    the world can be told to each of the others: half a MiB for each. Meanwhile heartbeats are answered."""
    with at_most(server, 192 * MIB), contextlib.ExitStack() as stack:
        settings = Settings(model.MAX_SHAPES, model.MAX_SHAPES + 9, lease_s=60.0, last_call_s=1.0)
        peers = [stack.enter_context(Peer(server.port, name=f"n{at}")) for at in range(model.MAX_SHAPES + 3)]
        for number, peer in enumerate(peers):
            role = f"{number} ".ljust(128, "\U0001f600")
            peer.send(protocol.Join(facts(peer.name, role=role), settings))
        first, *others, last = peers
        stack.enter_context(drained(others))
        # The coordinator makes half a GiB of messages, for which it needs a second of a core that it may have to share.
        assert isinstance(last.until(model.Refused, model.Sealed, deadline_s=4 * DEADLINE_S), model.Refused)
        watch, told = support.Stopwatch(server.pid), None
        while not isinstance(told, model.Sealed):
            with watch.measured():
                first.send(protocol.Heartbeat(1))
                told = first.until(model.Sealed, protocol.HeartbeatAnswer)
        assert watch.longest_s < LONGEST_ANSWER_S


@pytest.mark.parametrize("number", [HIGHEST, protocol.HIGHEST_CLAIM + 1, protocol.HIGHEST_CLAIM])
@pytest.mark.parametrize("how", ["heard", "joined", "returned"])
def test_a_round_from_the_far_end(server: CoordinatorProcess, how: str, number: int) -> None:
    """One message must not make every later round of the run unreadable, or use up the numbers."""
    evil, settings = facts("evil"), agreed(**QUICK)
    messages = {
        "heard": protocol.Join(evil, settings, heard_round=number),
        "joined": protocol.Join(evil, settings, place(round=number)),
        "returned": protocol.Return(evil, settings, place(round=number, node_count=2), Stage.RUNNING),
    }
    with Peer(server.port, name="evil") as peer:
        peer.send(messages[how])
        assert peer.is_turned_out() == (number > protocol.HIGHEST_CLAIM)
        with contextlib.suppress(ConnectionError):
            peer.send(protocol.Left())
            peer.ask("check", "anything")
    with HonestRun(server.port, **QUICK) as run:
        assert run.places[0].round < protocol.HIGHEST_CLAIM + 100


def test_a_term_from_the_far_end(server: CoordinatorProcess) -> None:
    """The nodes of the run must be able to say the term that they are told, when they come back."""
    with Peer(server.port, name="evil", term=HIGHEST // 2), Peer(server.port, name="a", secret=b"its own") as first:
        told = first.welcome.term
        with Peer(server.port, name="a", secret=b"its own", term=told) as again:
            assert again.welcome.term >= told
