"""Random, cut, changed and repeated bytes for some seconds, while honest nodes form rounds and use their store."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.rendezvous.client.handshake import TurnedAway
from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.frames import encode
from holdfast.rendezvous.membership.model import NodeFacts, Place, Settings, Stage
from holdfast.rendezvous.membership.restart_policy import Failure
from holdfast.rendezvous.store import Store
from tests import support
from tests.coordinators import Peer, coordinator, form, node

SECONDS = float(os.environ.get("HOLDFAST_FUZZ_SECONDS", "10"))
SEED = int(os.environ.get("HOLDFAST_FUZZ_SEED", "17"))
TOKEN = b"open sesame, says the test"
MIB = 1 << 20

FACTS = NodeFacts("intruder", 0, "127.0.0.1", 5)
PLACE = Place(1, 1, 0, 1, (("default", 1),), b"", "127.0.0.1", 5)
WORDS = [
    encode(message)
    for message in (
        protocol.Hello(protocol.MAJOR, "honest", bytes(32), has_token=True),
        protocol.Introduction("intruder"),
        protocol.Join(FACTS, Settings(1, 4)),
        protocol.Return(FACTS, Settings(1, 4), PLACE, Stage.RUNNING),
        protocol.Heartbeat(1),
        protocol.Failed(1, Failure(text="no reason")),
        protocol.Succeeded(1),
        protocol.Leaving(),
        protocol.Left(),
        protocol.Close("ha"),
        protocol.StoreRequest(b"intruder", 1, "set", ("key",), (b"value",)),
        protocol.StoreRequest(b"intruder", 2, "get", ("missing",), timeout_s=5.0),
        protocol.StoreRequest(b"intruder", 3, "add", ("number",), amount=1),
        model.Sealed("intruder/0", PLACE),
        model.Stop(1, "ha"),
    )
]


class Intruder(threading.Thread):
    """Connects, says something, leaves in one way or another, and begins again."""

    def __init__(self, port: int, seed: int, ends: float) -> None:
        super().__init__(daemon=True)
        self._port, self._ends = port, ends
        self._random = random.Random(seed)
        self.visits = 0
        self.start()

    def run(self) -> None:
        ways: list[Callable[[], None]] = [self._as_stranger, self._as_guest, self._slowly]
        while time.monotonic() < self._ends:
            with contextlib.suppress(OSError, AssertionError):
                self._random.choice(ways)()
            self.visits += 1

    def _as_stranger(self) -> None:
        with Peer(self._port) as peer:
            peer.sock.settimeout(2)
            peer.sock.sendall(self._bytes())
            self._leave(peer)

    def _as_guest(self) -> None:
        """It knows the token, but takes part in a run of its own."""
        # An earlier guest may have joined under the same name.
        with contextlib.suppress(TurnedAway), Peer(self._port) as peer:
            peer.enter(f"run {self._random.randrange(50)}", TOKEN, name="intruder")
            for _ in range(self._random.randrange(1, 20)):
                data = self._bytes()
                peer.sock.sendall(data if self._random.randrange(8) == 0 else peer._frames.sealed(data))
            self._leave(peer)

    def _slowly(self) -> None:
        with Peer(self._port) as peer:
            for each in self._bytes()[:40]:
                peer.sock.sendall(bytes([each]))
            self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        how = self._random.randrange(3)
        if how == 0:
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif how == 1:
            peer.sock.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                peer.sock.recv(1 << 16)

    def _bytes(self) -> bytes:
        word = bytearray(self._random.choice(WORDS))
        match self._random.randrange(6):
            case 0:
                return self._random.randbytes(self._random.randrange(1, 3000))
            case 1:
                return bytes(word[: self._random.randrange(1, len(word))])
            case 2:
                for _ in range(self._random.randrange(1, 6)):
                    word[self._random.randrange(len(word))] ^= 1 << self._random.randrange(8)
                return bytes(word)
            case 3:
                # The length is right, the rest is not.
                body = self._random.randbytes(len(word) - 4)
                return bytes(word[:4]) + body
            case 4:
                return struct.pack("!I", self._random.randrange(1 << 32)) + bytes(word)
            case _:
                return b"".join(self._random.choices(WORDS, k=self._random.randrange(1, 10)))


@pytest.mark.timeout(SECONDS + 120)
def test_honest_nodes_are_served_throughout(tmp_path: Path) -> None:
    file = tmp_path / "token"
    support.write_secret(file, TOKEN)
    settings = {"token_file": str(file), "run_id": "honest"}
    with (
        coordinator(tmp_path, "--token-file", str(file)) as server,
        node(server.port, "2", **settings) as a,
        node(server.port, "2", **settings) as b,
    ):
        form(a, b)
        descriptors, memory_bytes = server.descriptors, server.memory_bytes
        ends = time.monotonic() + SECONDS
        intruders = [Intruder(server.port, SEED + number, ends) for number in range(4)]
        rounds = 1
        while time.monotonic() < ends:
            first, second = form(a, b)
            rounds += 1
            assert {first.number, second.number} == {rounds}
            use(first.found.store, second.found.store)
        for intruder in intruders:
            intruder.join(30)
        assert rounds > 3
        assert sum(intruder.visits for intruder in intruders) > 50
        assert server.memory_bytes - memory_bytes < 64 * MIB
        support.wait_until(lambda: server.descriptors <= descriptors + 4, "the connections are closed")
        assert len(server.log) < MIB


def use(first: Store, second: Store) -> None:
    for turn in range(20):
        first.set(f"key {turn}", f"value {turn}")
        assert second.get(f"key {turn}") == f"value {turn}".encode()
        assert first.add("sum", 1) == turn + 1
