"""Peers that keep the coordinator busy: the honest neighbour is answered in time all the same."""

from __future__ import annotations

import contextlib
import itertools
import time

from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import NodeFacts, Settings
from tests.attacks.harness import Peer, flood, neighbour
from tests.coordinators import CoordinatorProcess

ATTACK_S = 2.0
_numbers = itertools.count(1)


def request(operation: str, *keys: str, **fields: object) -> protocol.StoreRequest:
    return protocol.StoreRequest(b"hostile", next(_numbers), operation, keys, **fields)  # type: ignore[arg-type]


def test_one_wait_for_many_keys_and_sets_and_deletes_of_them(server: CoordinatorProcess) -> None:
    keys = [f"{number:x}" for number in range(30_000)]
    with neighbour(server), Peer(server.port, name="waiting") as waiting:
        waiting.send(request("wait", *keys, timeout_s=3600.0))
        sets = [request("set", *keys[at : at + 100], values=(b"",) * 100) for at in range(0, len(keys) - 100, 100)]
        deletes = [request("delete", key) for key in keys[:5000]]
        talker = Peer(server.port, name="talker")
        blob = b"".join(map(talker.frame, sets + deletes))
        with flood([talker], lambda _: blob):
            time.sleep(ATTACK_S)


def test_many_waits_for_the_same_key_and_sets_and_deletes_of_it(server: CoordinatorProcess) -> None:
    """Each set and each delete concerns every one of them, and wakes none."""
    with neighbour(server), Peer(server.port, name="waiting") as waiting:
        waits = [request("wait", "there", "never", timeout_s=3600.0) for _ in range(20_000)]
        waiting.raw(b"".join(map(waiting.frame, waits)))
        waiting.ask("check", "anything")
        talker = Peer(server.port, name="talker")
        changes = [(request("set", "there", values=(b"",)), request("delete", "there")) for _ in range(3000)]
        blob = b"".join(talker.frame(each) for pair in changes for each in pair)
        with flood([talker], lambda _: blob):
            time.sleep(ATTACK_S)


def test_many_waits_that_one_set_wakes(server: CoordinatorProcess) -> None:
    """With an answer of some length for each, which all go to one connection that does not read."""
    with neighbour(server), Peer(server.port, name="b") as waiting, Peer(server.port) as talker:
        waits = [request("get", "key", timeout_s=3600.0) for _ in range(20_000)]
        waiting.raw(b"".join(map(waiting.frame, waits)))
        talker.ask("set", "key", values=(bytes(1 << 19),))
        assert waiting.until() is None, "what it does not read piles up, so it is cut off"


def test_a_dozen_chatty_peers(server: CoordinatorProcess) -> None:
    """Thousands of small messages in each read."""
    with neighbour(server):
        peers = [Peer(server.port, "chatty", f"n{number}") for number in range(12)]
        blob = peers[0].frame(protocol.Heartbeat(1)) * 50_000
        with flood(peers, lambda _: blob):
            time.sleep(ATTACK_S)


def test_five_peers_with_costly_messages(server: CoordinatorProcess) -> None:
    """Each a hundred bytes that cost as much as they can: refused joins, which are told to those that wait."""
    with neighbour(server), contextlib.ExitStack() as stack:
        settings = Settings(3000, 3000, lease_s=3600.0)
        for number in range(300):
            waiting = stack.enter_context(Peer(server.port, "costly", f"n{number}"))
            waiting.send(protocol.Join(NodeFacts(waiting.name), settings))
        peers = [Peer(server.port, "costly", f"other {number}") for number in range(5)]
        refused = {peer: peer.frame(protocol.Join(NodeFacts(peer.name), Settings(1, 1))) * 2000 for peer in peers}
        with flood(peers, lambda peer: refused[peer]):
            time.sleep(ATTACK_S)


def test_five_peers_that_connect_and_go(server: CoordinatorProcess) -> None:
    with neighbour(server):
        ends = time.monotonic() + ATTACK_S
        while time.monotonic() < ends:
            peers = [Peer(server.port, f"hostile {number}", f"n{next(_numbers)}") for number in range(5)]
            for peer in peers:
                peer.send(protocol.Join(NodeFacts(peer.name), Settings(1, 1)))
                peer.close()


def test_a_dozen_peers_that_make_it_write(server: CoordinatorProcess) -> None:
    """Each join knows of a later round than the memory, which is written to a file before anything else is done."""
    rounds = itertools.count(1)
    settings = Settings(2, 2)
    with neighbour(server):
        peers = [Peer(server.port, f"writer {number}") for number in range(12)]

        def joins(peer: Peer) -> bytes:
            told = (protocol.Join(NodeFacts("a"), settings, heard_round=next(rounds)) for _ in range(2000))
            return b"".join(map(peer.frame, told))

        with flood(peers, joins):
            time.sleep(ATTACK_S)
