"""A stateful fuzzer of the coordinator: `python -m tests.attacks.fuzz --minutes 10 --seed 17`.

Hostile peers of several kinds, each drawn from the seed, hold many connections in all states: strangers, guests of
their own runs, members. They say well-formed nonsense, changed bytes, half frames, and leave in all ways. Beside them
honest runs begin, send heartbeats, use their stores and finish, one after another, and one lasts from begin to end.

The honest runs always finish with the right result, none of their nodes waits for longer than a lease, and the
coordinator's memory and log stay under a bound. A failure names the seed; threads make the order of the bytes on
different connections another one each time, so a seed gives the same kinds of attack and not the same interleaving.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.frames import Malformed, encode
from holdfast.rendezvous.membership.model import NodeFacts, Place, Settings, Stage
from holdfast.rendezvous.membership.restart_policy import Failure, RestartPolicy
from tests.attacks.harness import ESCAPE, LEASE_S, MIB, LightRun, Meter, Neighbour, Peer, check_plain
from tests.coordinators import CoordinatorProcess, coordinator

MOST_BYTES = 512 * MIB
MOST_LOG_BYTES, MOST_LOG_BYTES_A_SECOND = MIB, 1 << 14
_HOSTILES = 4
_CONNECTIONS = 12  # Of each.
_HIGHEST = 1 << 53
_TIMES = (0.0, 5e-324, 1e-9, 0.01, 0.1, 0.2, 1.0, 60.0, 3600.0, 86400.0, 1e10, float("inf"), float("nan"), -1.0)
_COUNTS = (0, 1, 2, 3, 7, 100, 4096, 65536, 131072, 1 << 31, _HIGHEST - 1, _HIGHEST, _HIGHEST + 1, -1)


class Hostile(threading.Thread):
    """One source of attacks. All that it does is drawn from its own random numbers."""

    def __init__(self, port: int, seed: str, ends: float) -> None:
        super().__init__(daemon=True)
        self._port, self._ends = port, ends
        self._random = random.Random(seed)
        self._peers: list[Peer] = []
        self._strangers: list[socket.socket] = []
        self._tickets: dict[tuple[str, str], bytes] = {}
        self.did: Counter[str] = Counter()
        self.start()

    def run(self) -> None:
        acts: list[tuple[int, Callable[[], None]]] = [
            (3, self._enter), (2, self._knock), (20, self._say), (6, self._say_junk), (3, self._say_much),
            (4, self._read), (3, self._leave), (1, self._knock_slowly), (1, self._speak_halfway),
        ]  # fmt: skip
        weights, calls = [weight for weight, _ in acts], [call for _, call in acts]
        try:
            while time.monotonic() < self._ends:
                (act,) = self._random.choices(calls, weights)
                with contextlib.suppress(OSError, HoldfastError, Malformed):
                    act()
                self.did[act.__name__] += 1
        finally:
            for each in (*self._peers, *self._strangers):
                each.close()

    # What it does.

    def _enter(self) -> None:
        if len(self._peers) >= _CONNECTIONS:
            self._forget(self._random.choice(self._peers))
        run_id = self._random.choice([f"hostile {self._random.randrange(8)}", f"new {self._random.random()}", ESCAPE])
        term = self._random.choice([0, 0, 0, 1, 1 << 40, _HIGHEST // 2])
        name = self._random.choice(["a", "b", "c", "", f"node {self._random.randrange(1 << 20)}", self._text()])
        ticket = self._random.choice([b"", self._random.choice([*self._tickets.values(), b""]), bytes(32)])
        if self._random.random() < 0.7:
            ticket = self._tickets.get((run_id, name), b"")
        peer = Peer(self._port, run_id, name, ticket=ticket, term=term)
        self._peers.append(peer)
        if len(self._tickets) < 1000:
            self._tickets[run_id, name] = peer.welcome.ticket

    def _knock(self) -> None:
        if len(self._strangers) >= _CONNECTIONS:
            self._strangers.pop(0).close()
        sock = socket.create_connection(("127.0.0.1", self._port), 2.0)
        self._strangers.append(sock)
        sock.sendall(encode(self._hello()) + self._changed(encode(self._introduction())))

    def _knock_slowly(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), 2.0) as sock:
            for each in encode(self._hello())[: self._random.randrange(40)]:
                sock.sendall(bytes([each]))

    def _say(self) -> None:
        peer = self._peer()
        peer.sock.settimeout(0.5)
        peer.sock.sendall(b"".join(peer.frame(self._message(peer.name)) for _ in range(self._random.randrange(1, 6))))

    def _say_much(self) -> None:
        """Many small messages, or one that is large."""
        peer = self._peer()
        peer.sock.settimeout(0.5)
        message = self._message(peer.name)
        frame = peer.frame(message)
        peer.sock.sendall(frame * min(2000, max(1, (1 << 18) // len(frame))))

    def _say_junk(self) -> None:
        peer = self._peer()
        peer.sock.settimeout(0.5)
        peer.sock.sendall(self._changed(peer.frame(self._message(peer.name))))

    def _speak_halfway(self) -> None:
        peer = self._peer()
        peer.sock.settimeout(0.5)
        frame = peer.frame(self._message(peer.name))
        peer.sock.sendall(frame[: self._random.randrange(1, len(frame))])

    def _read(self) -> None:
        for peer in self._peers:
            with contextlib.suppress(TimeoutError):
                if peer.receive(0.001) is None:
                    self._forget(peer)
                    return

    def _leave(self) -> None:
        peer = self._peer()
        if self._random.random() < 0.3:
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        self._peers.remove(peer)
        peer.close()

    def _peer(self) -> Peer:
        if not self._peers:
            self._enter()
        return self._random.choice(self._peers)

    # What it says.

    def _hello(self) -> protocol.Hello:
        version = self._random.choice([protocol.MAJOR, protocol.MAJOR, 0, -1, 1 << 62])
        nonce = self._random.randbytes(self._random.choice([32, 32, 0, 31, 1024]))
        has_token = self._random.random() < 0.2
        return protocol.Hello(version, self._text(), nonce, self._count(), has_token, self._text())

    def _introduction(self) -> protocol.Introduction:
        ticket = self._random.randbytes(self._random.choice([0, 32, 1024]))
        return protocol.Introduction(self._text(), ticket, self._count())

    def _message(self, name: str) -> Any:
        """What a peer says that is the node `name`, mostly."""
        pick = self._random.choice
        match self._random.randrange(12):
            case 0 | 1 | 2:
                place = self._place() if self._random.random() < 0.4 else None
                failure = self._failure() if self._random.random() < 0.2 else None
                stop = model.Stop(self._count(), self._text(), pick([True, False])) if place and failure else None
                return protocol.Join(
                    self._facts(name), self._settings(), place, self._count(), pick([True, False]), failure, stop
                )
            case 3:
                return protocol.Return(self._facts(name), self._settings(), self._place(), pick([*Stage]))
            case 4:
                return protocol.Failed(pick([1, 1, 2, self._count()]), self._failure())
            case 5:
                return protocol.Succeeded(pick([1, 1, 2, self._count()]))
            case 6:
                return pick([protocol.Leaving(), protocol.Left(), protocol.Close(self._text())])
            case 7 | 8:
                return protocol.Heartbeat(self._count())
        keys = tuple(self._text() for _ in range(pick([0, 1, 1, 1, 2, 50])))
        values = tuple(self._random.randbytes(pick([0, 1, 100, 20_000])) for _ in range(pick([0, 1, 2, len(keys)])))
        operation = pick(["set", "set", "get", "add", "compare_set", "wait", "wait", "check", "delete", self._text()])
        amount = pick([0, 1, -1, 1 << 62, -(1 << 62)])
        sender, number = pick([b"", b"h", b"hh"]), self._random.randrange(1000)
        return protocol.StoreRequest(sender, number, operation, keys, values, amount, pick([0.0, 0.01, 1.0, 1e10]))

    def _facts(self, name: str) -> NodeFacts:
        pick = self._random.choice
        name = pick([*[name] * 30, "a", self._text()])
        incarnation = pick([0, 0, 0, 1, 2, self._count()])
        rank = pick([None, None, 0, 1, self._count()])
        size = pick([1, 1, 2, self._count()])
        return NodeFacts(
            name, incarnation, pick(["", "127.0.0.1", "10.0.0.1"]), 5, self._text(), size, rank, self._time()
        )

    def _settings(self) -> Settings:
        """Mostly the same few, so that rounds are formed."""
        pick = self._random.choice
        usual = {"heartbeat_s": 0.05, "lease_s": 0.5, "drop_timeout_s": 0.05, "last_call_s": 0.0}
        policy = RestartPolicy(pick([0, 5, _HIGHEST]), pick([None, 1.0]), pick([0.0, 0.01]))
        if self._random.random() < 0.7:
            return Settings(1, 3, policy=RestartPolicy(5), **usual)  # type: ignore[arg-type]
        odd = {name: self._time() for name in usual if self._random.random() < 0.3}
        low, high = pick([(1, 1), (1, 4), (2, 2), (1, 131072), (self._count(), self._count())])
        return Settings(low, high, self._time(), close_linger_s=self._time(), policy=policy, **{**usual, **odd})  # type: ignore[arg-type]

    def _place(self) -> Place:
        pick = self._random.choice
        shapes = tuple((self._text(), pick([1, 8])) for _ in range(pick([0, 1, 1, 3, 200])))
        term, round = pick([0, 1, 1, 2, self._count()]), pick([1, 1, 2, 3, self._count()])
        rank, count = pick([0, 1, 2, self._count()]), pick([1, 2, 3, self._count()])
        pattern = self._random.randbytes(pick([0, 0, 6, 1000]))
        return Place(term, round, rank, count, shapes, pattern, self._text(), 5, self._count())

    def _failure(self) -> Failure:
        text = self._text()
        return Failure(
            text, 0, self._random.choice([1, -9, 1 << 40]), text, text, False, self._random.choice(["", text])
        )

    def _text(self) -> str:
        pick = self._random.choice
        return pick(
            ["", "default", "default", ESCAPE, "x" * 1000, "\ud7ff\U0001f600\0", f"k{self._random.randrange(50)}"]
        )

    def _count(self) -> int:
        return self._random.choice(_COUNTS)

    def _time(self) -> float:
        return self._random.choice(_TIMES)

    def _changed(self, frame: bytes) -> bytes:
        data = bytearray(frame)
        match self._random.randrange(5):
            case 0:
                for _ in range(self._random.randrange(1, 6)):
                    data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            case 1:
                del data[self._random.randrange(len(data)) :]
            case 2:
                data[4:] = self._random.randbytes(len(data) - 4)
            case 3:
                data[:4] = struct.pack(
                    "!I", self._random.choice([0, 1, 1 << 14, 1 << 20, (1 << 20) + 1, (1 << 32) - 1])
                )
            case _:
                data = bytearray(self._random.randbytes(self._random.randrange(1, 3000)))
        return bytes(data)


def attack(server: CoordinatorProcess, seconds: float, seed: int) -> dict[str, Any]:
    """Attack it for so long. Returns the figures; raises AssertionError if anything honest suffers."""
    meter = Meter(server.process.pid)
    ends = time.monotonic() + seconds
    lasting = Neighbour(server.port, "honest")
    hostiles = [Hostile(server.port, f"{seed} {number}", ends) for number in range(_HOSTILES)]
    finished, longest_s, trouble = 0, 0.0, ""
    try:
        while time.monotonic() < ends and not trouble:
            run = LightRun(server.port, f"short {finished}")
            try:
                run.form(LEASE_S)
                run.run_for(0.3)
                run.finish(LEASE_S)
            except Exception as error:  # Whatever it was, the seed is what the reader needs.
                trouble = f"{type(error).__name__}: {error}"
            finally:
                run.close()
            longest_s = max(longest_s, run.longest_s)
            is_right = not run.disturbed and {place.round for place in run.places.values()} == {1}
            trouble = trouble or ("" if is_right else f"{run.disturbed} {run.places}")
            if meter.growth_bytes > MOST_BYTES:
                trouble = trouble or "the coordinator takes too much memory"
            finished += 1
        report = lasting.finish()
    finally:
        for hostile in hostiles:
            hostile._ends = 0.0
            hostile.join(30)
        lasting.close()
    figures = {
        "seed": seed,
        "honest runs": finished,
        "hostile acts": sum(sum(each.did.values()) for each in hostiles),
        "longest answer s": round(max(longest_s, report["longest_s"]), 2),
        "peak MiB": meter.peak_bytes // MIB,
        "log KiB": len(server.log) >> 10,
    }
    print(figures)
    again = f"{figures}; again with: python -m tests.attacks.fuzz --seed {seed} --minutes {seconds / 60:.2g}"
    assert not trouble, f"{trouble}\n{again}\n{server.log[-3000:]}"
    assert not report["problem"], f"{report}\n{again}"
    assert not report["disturbed"], f"{report}\n{again}"
    assert server.process.poll() is None, f"the coordinator has ended\n{again}\n{server.log[-3000:]}"
    assert "Traceback" not in server.log, f"{again}\n{server.log[server.log.index('Traceback') :][:6000]}"
    assert figures["longest answer s"] < LEASE_S, again
    assert meter.peak_bytes < MOST_BYTES, again
    assert len(server.log) < MOST_LOG_BYTES + MOST_LOG_BYTES_A_SECOND * seconds, again
    check_plain(server.log)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.fuzz")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=17)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, coordinator(Path(home)) as server:
        attack(server, 60 * args.minutes, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
