"""What peers make the coordinator keep is bounded, and the honest run does not notice."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time

import pytest

from holdfast.errors import HoldfastError
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import MAX_SHAPES, Place
from tests.attacks.harness import HONEST, MIB, HonestRun, Peer, at_most, facts, honest, member
from tests.coordinators import Caller, CoordinatorProcess
from tests.promises import promise, proves

ATTACK_S = 2.0


@proves("coordinator.store-bound-request-most")
def test_a_member_fills_the_store(server: CoordinatorProcess) -> None:
    """Beyond the bound a set is refused with a word. Who has a value there can still change it."""
    with honest(server), at_most(server, 128 * MIB), member(server.port) as hoarder:
        time.sleep(0.3)  # The honest nodes have set theirs.
        problems = [hoarder.ask("set", f"{at}", values=(bytes(MIB - 1000),)).problem for at in range(70)]
        assert problems[:60] == [""] * 60
        assert problems[-1] == "the store is full (at most 64 MiB)"


@proves("coordinator.store-bound-request-most")
def test_a_stranger_fills_the_store(server: CoordinatorProcess) -> None:
    """It is cut off with its first request, whatever it asks for."""
    with honest(server), at_most(server, 16 * MIB):
        for operation in ("set", "get", "wait", "add", "check", "delete", "compare_set"):
            for name in ("stranger", ""):
                with Peer(server.port, name=name) as stranger:
                    assert stranger.ask(operation, "key", values=(bytes(MIB - 1000),), timeout_s=60.0) is None
        server.await_line("is not a member of the run and sent StoreRequest, and is cut off")


def test_long_messages_of_members(server: CoordinatorProcess) -> None:
    """The machine keeps the last messages for its own report, but only in brief."""
    shapes = tuple((f"{number:04}" + "r" * 120, 1) for number in range(MAX_SHAPES))
    with honest(server), at_most(server, 32 * MIB), contextlib.ExitStack() as stack:
        for number in range(20):
            peer = stack.enter_context(member(server.port, f"n{number}"))
            join = protocol.Join(facts(peer.name), HONEST, Place(1, 1, 1, 2, shapes))
            peer.raw(peer.frame(join) * 40)
            assert peer.ask("check", "anything").problem == ""


@pytest.mark.parametrize("how", ["vanish", "leave", "return as the next incarnation"])
def test_ever_new_nodes(server: CoordinatorProcess, how: str) -> None:
    """Each on a connection of its own, as a connection speaks for one node, with all that a node can say of itself."""
    count = 0
    with honest(server), at_most(server, 64 * MIB):
        ends = time.monotonic() + ATTACK_S
        while time.monotonic() < ends:
            count += 1
            is_same = how == "return as the next incarnation"
            with Peer(server.port, name="n" * 256 if is_same else f"{count} {'n' * 240}", secret=b"its own") as peer:
                said = facts(peer.name, count if is_same else 0, address="127.0.0.1" + " " * 200)
                peer.send(protocol.Join(said, HONEST), *([protocol.Left()] if how == "leave" else []))
                assert (peer.ask("check", "anything") is None) == (how == "leave")
    assert count > 20, "that was no attack"


@promise("coordinator.peer-read-bounded-connection: What a peer does not read is bounded for each connection.")
def test_answers_that_no_peer_reads(server: CoordinatorProcess) -> None:
    """One set wakes several waiting requests of each of many connections, and none of them reads its answers, which are
    as long as they can be. What waits for each is bounded."""
    with honest(server), at_most(server, 192 * MIB), contextlib.ExitStack() as stack:
        peers = [stack.enter_context(member(server.port, f"n{number}")) for number in range(30)]
        for peer in peers:
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for number in range(12):  # In turns, so that the answers to all of them grow together.
            for peer in peers:
                name = peer.name.encode()
                wait = protocol.StoreRequest(name, 2 * number, "get", ("key",), timeout_s=60.0)
                peer.send(protocol.Heartbeat(1), wait, protocol.StoreRequest(name, 2 * number + 1, "check", ("key",)))
                peer.await_kind(protocol.StoreAnswer)
        with member(server.port, "talker") as talker:
            talker.ask("set", "key", values=(bytes(MIB - 1000),))
            server.await_line("does not read what it is sent")


@proves("coordinator.client-sends-junk-much", "coordinator.strangers-use-connections")
def test_connections_that_are_let_in_and_never_join(server: CoordinatorProcess) -> None:
    """They are strangers as long as they have not joined: the oldest are cut off, and no node is locked out. With a
    limit of 4,096 descriptors it took 4,021 of them to lock a run out; here the limit is lower."""
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (512, 512))
    with honest(server) as report, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(Peer(server.port, name=f"idle {number}")) for number in range(600)]
        server.await_line("has not joined while others wait, and is cut off")
        assert idle[0].is_hung_up()
        time.sleep(1.0)
    assert report["newcomers"] > 0


@proves("coordinator.strangers-use-connections")
def test_idle_run_ids(server: CoordinatorProcess) -> None:
    """On a coordinator that has no run yet a handshake fixes nothing: the first node that joins does."""
    with contextlib.ExitStack() as stack:
        for number in range(255):
            stack.enter_context(Peer(server.port, f"idle {number}"))
        with HonestRun(server.port) as run:
            run.finish()


@proves("coordinator.strangers-use-connections")
def test_ever_new_run_ids_do_not_keep_the_first_node_from_joining(server: CoordinatorProcess) -> None:
    is_over = threading.Event()

    def introduce() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            with contextlib.suppress(OSError, HoldfastError), Peer(server.port, f"new {number}"):
                pass

    hostile = [Caller(introduce) for _ in range(3)]
    try:
        HonestRun(server.port).close()
    finally:
        is_over.set()
        for each in hostile:
            each.result()
