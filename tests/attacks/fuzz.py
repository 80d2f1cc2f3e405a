"""A stateful fuzzer of the coordinator: `python -m tests.attacks.fuzz --minutes 10 --seed 17`.

Hostile peers of several kinds, each drawn from the seed, hold many connections in all states: strangers, visitors,
nodes of the honest run and of others. They say well-formed nonsense, changed bytes, half frames, and leave in all ways.
Meanwhile the nodes of the honest run send heartbeats and use their store, and newcomers join it and leave.

The honest run succeeds in its first round, none of its nodes waits for longer than half a lease, and the coordinator's
memory and log stay under a bound. A failure names the seed; threads make the order of the bytes on different
connections another one each time, so a seed gives the same kinds of attack and not the same interleaving.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import random
import socket
import struct
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import structs

from holdfast.errors import HoldfastError
from holdfast.frozen import changed
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.frames import Malformed, encode
from tests.attacks.harness import ESCAPE, HONEST, MIB, RUN_ID, Peer, at_most, check_plain, honest
from tests.coordinators import Caller, CoordinatorProcess, coordinator

MOST_BYTES = 256 * MIB
MOST_LOG_BYTES, MOST_LOG_BYTES_A_SECOND = MIB, 1 << 14
_HOSTILES = 4
_CONNECTIONS = 12  # Of each.
_HIGHEST = 1 << 53
_VALUES: dict[type, tuple[Any, ...]] = {
    float: (0.0, 5e-324, 1e-9, 0.01, 0.1, 0.2, 1.0, 60.0, 3600.0, 86400.0, 1e10, float("inf"), float("nan"), -1.0),
    int: (0, 1, 2, 3, 7, 100, 4096, 65536, 131072, 1 << 31, _HIGHEST - 1, _HIGHEST, _HIGHEST + 1, -1),
    str: ("", "default", "default", ESCAPE, "x" * 1000, "\ud7ff\U0001f600\0", *(f"k{number}" for number in range(9))),
    bytes: (b"", b"1", b"h", bytes(32), b"\xff" * 256, bytes(20_000)),
    bool: (True, False),
    types.NoneType: (None,),
}
_SENSIBLE: dict[str, tuple[Any, ...]] = {
    "version": (protocol.MAJOR,),
    "nonce": (bytes(32),),
    "address": ("", "127.0.0.1", "10.0.0.1"),
    "incarnation": (0, 0, 1, 2),
    "term": (0, 1, 1, 2),
    "round": (1, 1, 2, 3),
    "rank": (0, 1),
    "node_count": (2,),
    "operation": ("set", "get", "add", "compare_set", "wait", "check", "delete"),
    "keys": (("k",), ("k", "l"), ()),
    "values": ((b"1",), (b"", b"1"), (bytes(20_000),), ()),
    "timeout_s": (0.0, 0.01, 1.0, 1e10),
    "body": (b'{"command": "status"}', b'{"command": "outcome"}'),
}


class Hostile:
    """One source of attacks, for a thread. All that it does is drawn from its own random numbers."""

    def __init__(self, port: int, seed: str, ends: float) -> None:
        self._port, self._ends = port, ends
        self._random = random.Random(seed)
        self._peers: list[Peer] = []
        self._strangers: list[socket.socket] = []
        self.did: Counter[str] = Counter()

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
            opened: list[Peer | socket.socket] = [*self._peers, *self._strangers]
            for each in opened:
                each.close()

    # What it does.

    def _enter(self) -> None:
        """As a node of the honest run, as a visitor, or as a node of another run."""
        pick = self._random.choice
        if len(self._peers) >= _CONNECTIONS:
            self._forget(pick(self._peers))
        run_id = pick([*[RUN_ID] * 8, f"new {self._random.random()}", ESCAPE])
        term = pick([0, 0, 0, 1, 1 << 40, _HIGHEST // 2])
        name = pick(["a", "b", "c", "", f"node {self._random.randrange(1 << 20)}", pick(_VALUES[str])])
        secret = pick([b"", b"its own", name.encode()[:256]])
        is_visitor = self._random.random() < 0.1
        self._peers.append(Peer(self._port, run_id, name, secret=secret, term=term, is_visitor=is_visitor))

    def _knock(self) -> None:
        if len(self._strangers) >= _CONNECTIONS:
            self._strangers.pop(0).close()
        sock = socket.create_connection(("127.0.0.1", self._port), 2.0)
        self._strangers.append(sock)
        sock.sendall(encode(self._value(protocol.Hello)) + self._changed(encode(self._value(protocol.Introduction))))

    def _knock_slowly(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), 2.0) as sock:
            for each in encode(self._value(protocol.Hello))[: self._random.randrange(40)]:
                sock.sendall(bytes([each]))

    def _say(self) -> None:
        peer = self._peer()
        peer.sock.sendall(b"".join(self._frame(peer) for _ in range(self._random.randrange(1, 6))))

    def _say_much(self) -> None:
        """Many small messages, or one that is large."""
        peer = self._peer()
        frame = self._frame(peer)
        peer.sock.sendall(frame * min(2000, max(1, (1 << 18) // len(frame))))

    def _say_junk(self) -> None:
        peer = self._peer()
        peer.sock.sendall(self._changed(self._frame(peer)))

    def _speak_halfway(self) -> None:
        peer = self._peer()
        frame = self._frame(peer)
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
        peer = self._random.choice(self._peers)
        peer.sock.settimeout(0.5)
        return peer

    def _frame(self, peer: Peer) -> bytes:
        return peer.frame(self._message(peer.name))

    # What it says.

    def _message(self, name: str) -> Any:
        """What a peer says that is the node `name`, mostly. It does not close the run, which a member may do."""
        kind = self._random.choice([each for each in get_args(protocol.ToCoordinator) if each is not protocol.Close])
        message = self._value(kind)
        if not isinstance(message, protocol.Join | protocol.Return):
            return message
        if self._random.random() < 0.9:
            message = structs.replace(message, facts=changed(message.facts, node_id=name))
        return structs.replace(message, settings=HONEST) if self._random.random() < 0.7 else message

    def _value(self, kind: Any, field: str = "") -> Any:
        """Of that type, at its limits or beyond. The names of some fields say what makes sense there."""
        pick, origin, args = self._random.choice, get_origin(kind), get_args(kind)
        if field in _SENSIBLE and self._random.random() < 0.8:
            return pick(_SENSIBLE[field])
        if origin in (Annotated, Union, types.UnionType):
            return self._value(args[0] if origin is Annotated else pick(args))
        if origin is tuple and args[-1] is not Ellipsis:
            return tuple(map(self._value, args))
        if origin in (tuple, frozenset):
            return origin(self._value(args[0]) for _ in range(pick([0, 1, 1, 2, 50])))
        if kind in _VALUES or origin is Literal or issubclass(kind, Enum):
            return pick(_VALUES.get(kind) or args or [*kind])
        hints, fields = get_type_hints(kind, include_extras=True), inspect.signature(kind).parameters.values()
        given = [each.name for each in fields if each.default is each.empty or self._random.random() < 0.3]
        return kind(**{name: self._value(hints[name], name) for name in given})

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
    """Attack it for so long. Returns the figures; raises AssertionError if the honest run suffers."""
    try:
        with at_most(server, MOST_BYTES), honest(server) as report:
            ends = time.monotonic() + seconds
            hostiles = [Hostile(server.port, f"{seed} {number}", ends) for number in range(_HOSTILES)]
            for caller in [Caller(each.run) for each in hostiles]:
                caller.result(seconds + 60)
        assert server.process.poll() is None, f"the coordinator has ended\n{server.log[-3000:]}"
        assert "Traceback" not in server.log, server.log[server.log.index("Traceback") :][:6000]
        assert len(server.log) < MOST_LOG_BYTES + MOST_LOG_BYTES_A_SECOND * seconds
        check_plain(server.log)
    except AssertionError as error:
        again = f"python -m tests.attacks.fuzz --seed {seed} --minutes {seconds / 60:.2g}"
        raise AssertionError(f"{error}\nagain with: {again}") from None
    figures = {
        "seed": seed,
        "hostile acts": sum(sum(each.did.values()) for each in hostiles),
        "newcomers": report["newcomers"],
        "longest answer s": round(report["longest_s"], 2),
        "log KiB": len(server.log) >> 10,
    }
    print(figures)
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
