"""Peers that keep the coordinator busy: the honest run is answered in time all the same."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from typing import Any

import pytest

from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.model import Settings
from tests.attacks.harness import HONEST, MIB, Peer, at_most, facts, flood, honest, member
from tests.coordinators import CoordinatorProcess
from tests.promises import proves

ATTACK_S = 2.0
_numbers = itertools.count(1)


def request(operation: str, *keys: str, **fields: object) -> protocol.StoreRequest:
    return protocol.StoreRequest(b"hostile", next(_numbers), operation, keys, **fields)  # type: ignore[arg-type]


def test_one_wait_for_many_keys_and_sets_and_deletes_of_them(server: CoordinatorProcess) -> None:
    keys = [f"{number:x}" for number in range(16_000)]
    with honest(server), member(server.port, "waiting") as waiting:
        waiting.send(request("wait", *keys, timeout_s=3600.0))
        sets = [request("set", *keys[at : at + 100], values=(b"",) * 100) for at in range(0, len(keys) - 100, 100)]
        deletes = [request("delete", key) for key in keys[:5000]]
        talker = member(server.port, "talker")
        blob = b"".join(map(talker.frame, sets + deletes))
        with flood([talker], lambda _: blob):
            time.sleep(ATTACK_S)


def test_many_waits_for_the_same_key_and_sets_and_deletes_of_it(server: CoordinatorProcess) -> None:
    """Each set and each delete concerns every one of them, and wakes none."""
    with honest(server), member(server.port, "waiting") as waiting:
        waits = [request("wait", "there", "never", timeout_s=3600.0) for _ in range(20_000)]
        waiting.raw(b"".join(map(waiting.frame, waits)))
        waiting.ask("check", "anything")
        talker = member(server.port, "talker")
        changes = [(request("set", "there", values=(b"",)), request("delete", "there")) for _ in range(3000)]
        blob = b"".join(talker.frame(each) for pair in changes for each in pair)
        with flood([talker], lambda _: blob):
            time.sleep(ATTACK_S)


@proves("coordinator.peer-read-bounded-connection")
def test_many_waits_that_one_set_wakes(server: CoordinatorProcess) -> None:
    """With an answer of some length for each, which all go to one connection that does not read."""
    with honest(server), member(server.port, "waiting") as waiting, member(server.port) as talker:
        waits = [request("get", "key", timeout_s=3600.0) for _ in range(40_000)]
        waiting.raw(b"".join(map(waiting.frame, waits)))
        waiting.ask("check", "anything")
        talker.ask("set", "key", values=(bytes(MIB - 1000),))
        assert waiting.is_hung_up(), "what it does not read piles up, so it is cut off"


@proves("coordinator.store-bound-request-most")
@pytest.mark.parametrize("is_member", [True, False], ids=["members", "strangers"])
def test_sixty_waits_for_a_million_keys(server: CoordinatorProcess, is_member: bool) -> None:
    """The keys of a request are counted when it is decoded: it costs the connection. A stranger has no store at all."""
    with honest(server), at_most(server, 96 * MIB), contextlib.ExitStack() as stack:
        enter = member if is_member else Peer
        peers = [stack.enter_context(enter(server.port, name=f"n{number}")) for number in range(60)]
        wait = request("wait", *[""] * 1_000_000, timeout_s=3600.0)
        for peer in peers:
            with contextlib.suppress(ConnectionError):  # A stranger may be cut off before it has said all.
                peer.send(wait)
        answers = [peer.until(protocol.StoreAnswer) for peer in peers]
        assert set(answers) == {None}


CHATTY = {
    "members' heartbeats": (member, protocol.Heartbeat(1)),
    "strangers' heartbeats": (Peer, protocol.Heartbeat(1)),
    "visitors' questions": (Peer, protocol.Query(1, json.dumps({"command": "status"}).encode())),
}


@proves("coordinator.connection-holds-slice-time")
@pytest.mark.parametrize("kind", CHATTY)
def test_a_dozen_chatty_peers(server: CoordinatorProcess, kind: str) -> None:
    """Thousands of small messages in each read."""
    enter: Any
    enter, message = CHATTY[kind]
    options = {"is_visitor": True} if "visitors" in kind else {}
    with honest(server):
        peers = [enter(server.port, name=f"n{number}", **options) for number in range(12)]
        blob = peers[0].frame(message) * 20_000
        with flood(peers, lambda _: blob):
            time.sleep(ATTACK_S)


@pytest.mark.parametrize("settings", [HONEST, Settings(1, 1)], ids=["taken", "refused"])
def test_peers_that_join_and_go(server: CoordinatorProcess, settings: Settings) -> None:
    """Nodes that wait hear of those that are refused."""
    with honest(server), contextlib.ExitStack() as stack:
        for number in range(200):
            stack.enter_context(member(server.port, f"waiting {number}"))
        ends = time.monotonic() + ATTACK_S
        while time.monotonic() < ends:
            with member(server.port, f"n{next(_numbers)}", settings) as peer:
                assert isinstance(peer.until(model.StandBy, model.Refused), model.StandBy) == (settings == HONEST)


@proves("coordinator.nodes-told-written-down")
def test_a_dozen_members_that_make_it_write(server: CoordinatorProcess) -> None:
    """Each join knows of a later round than the memory, which is written to a file before anything else is done."""
    rounds = itertools.count(2)
    with honest(server):
        peers = [member(server.port, f"n{number}") for number in range(12)]

        def joins(peer: Peer) -> bytes:
            told = (protocol.Join(facts(peer.name), HONEST, heard_round=next(rounds)) for _ in range(200))
            return b"".join(map(peer.frame, told))

        with flood(peers, joins):
            time.sleep(ATTACK_S)
