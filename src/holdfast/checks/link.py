"""The check `link`: send to another node of the run and receive from it, and say how fast that was.

The check asks the coordinator who is there, and one node after the other to listen (`partners` has the order). A node
that is asked starts `serve` for one transfer, at a port of its own and with a secret of 16 bytes:

    the check: secret, bytes, end of stream  -->  serve: bytes and seconds as it saw them, then bytes, end of stream

A transfer that works says that both nodes are good. One that fails says nothing of which is bad, so the check goes on
to the next partner: a node fails when no transfer works with two others or more. With one partner alone there is no
telling, so that counts as no evidence. Rates are shown and not judged.

All this takes less than `--check-timeout`, whatever the partners are like: a check that is killed has failed.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.checks.built_in import Agent, CheckFailed, NoEvidence

_SECRET_BYTES = 16
_MOST_BYTES, _MOST_S = 64 << 20, 0.5  # One way.
_PIECE = bytes(1 << 18)
_MOST_PARTNERS, _LOOK_EVERY_S = 3, 0.5
# Seconds, and shares of the time of the check: for one partner, and to wait for others. `Agent` may have used a half.
_PARTNER_S, _PARTNER_SHARE = 10.0, 0.1
_ALONE_S, _ALONE_SHARE = 5.0, 0.1
_SEEN = struct.Struct("!dd")


def partners(own: str, waiting: Sequence[str], others: Sequence[str], turn: int) -> list[str]:
    """Nodes to try, best first: those that wait for a place, as their workers are not disturbed. Each node begins with
    another partner, the one after it in the order of names, and with a later one at each `turn`."""
    ordered = []
    for group in ({*waiting}, {*others} - {*waiting}):
        ring = sorted(group - {own})
        if ring:
            start = (sum(each < own for each in ring) + turn) % len(ring)
            ordered += ring[start:] + ring[:start]
    return ordered[:_MOST_PARTNERS]


def link(order: Mapping[str, Any]) -> str:
    agent, turn, limit_s = Agent(order), int(order["turn"]), float(order["timeout_s"])
    silent, bad = [], []
    for name in _find(agent, turn, min(_ALONE_S, _ALONE_SHARE * limit_s)):
        until = time.monotonic() + min(_PARTNER_S, _PARTNER_SHARE * limit_s)
        try:
            to, back = _transfer(_offer(agent, name, until), until)
        except NoEvidence as error:
            silent.append(f"{name}: {error}")
        except (OSError, struct.error) as error:
            bad.append(f"{name} ({error})")
        else:
            doubts = f"; no transfer with {', '.join(bad)}: it, or the way to it, may be bad" if bad else ""
            return f"{to:.0f} MB/s to {name}, {back:.0f} MB/s from it{doubts}"
    if len(bad) > 1:
        raise CheckFailed(f"no transfer with {' nor with '.join(bad)}")
    if bad:
        raise NoEvidence(f"no transfer with {bad[0]}, and no third node to tell which of the two is bad")
    raise NoEvidence(f"no other node takes part: {'; '.join(silent)}")


def _find(agent: Agent, turn: int, patience_s: float) -> list[str]:
    """The nodes that start together find each other within some seconds."""
    until = time.monotonic() + patience_s
    while True:
        page = _page(agent, turn)
        shown = [each for each in page["nodes"] if each["is_connected"]]
        waiting = [each["node_id"] for each in shown if each["state"] == "waiting"]
        found = partners(agent.node_id, waiting, [each["node_id"] for each in shown], turn)
        if found and (len(found) > 1 or page["max_nodes"] < 3 or time.monotonic() > until):
            return found
        if time.monotonic() > until:
            raise NoEvidence("no other node of the run is there")
        time.sleep(_LOOK_EVERY_S)


def _page(agent: Agent, turn: int) -> Any:
    """Of a large run, some of its nodes: if each node asked for all, the coordinator would do nothing else."""
    page = agent.ask_run({"command": "status"})
    if page["next_page"] is None:
        return page
    count = -(-page["node_count"] // page["next_page"])
    number = (zlib.crc32(agent.node_id.encode()) + turn) % count
    return agent.ask_run({"command": "status", "first": number * page["next_page"]}) if number else page


def _offer(agent: Agent, name: str, until: float) -> Mapping[str, Any]:
    """Where that node listens. It serves a few at a time. A node that does not answer says nothing about links: the
    question goes through the coordinator."""
    while True:
        try:
            return dict(agent.ask_run({"command": "link"}, name, min(3.0, max(0.1, until - time.monotonic()))))
        except NoEvidence:
            if time.monotonic() + _LOOK_EVERY_S > until:
                raise
        time.sleep(_LOOK_EVERY_S)


def _transfer(offer: Mapping[str, Any], until: float) -> tuple[float, float]:
    """MB/s there and back."""
    with socket.create_connection((offer["address"], offer["port"]), timeout=_left_s(until)) as sock:
        sock.sendall(bytes.fromhex(offer["secret"]))
        _send(sock, until)
        sock.shutdown(socket.SHUT_WR)
        seen = b""
        while len(seen) < _SEEN.size and (piece := sock.recv(_SEEN.size - len(seen))):
            seen += piece
        return _rate(*_SEEN.unpack(seen)), _rate(*_receive(sock, until))


def serve(order: Mapping[str, Any], secret: str) -> str:
    """One transfer, at the listening socket of the order."""
    with socket.socket(fileno=int(order["fd"])) as listener:
        while True:
            sock, _ = listener.accept()
            until = time.monotonic() + _PARTNER_S
            with sock:
                sock.settimeout(_PARTNER_S)
                if hmac.compare_digest(sock.recv(_SECRET_BYTES, socket.MSG_WAITALL), bytes.fromhex(secret)):
                    sock.sendall(_SEEN.pack(*_receive(sock, until)))
                    _send(sock, until)
                    return "done"


def _send(sock: socket.socket, until: float) -> None:
    sent, ends = 0, time.monotonic() + _MOST_S
    while sent < _MOST_BYTES and time.monotonic() < ends:
        sock.settimeout(_left_s(until))
        sock.sendall(_PIECE)
        sent += len(_PIECE)


def _receive(sock: socket.socket, until: float) -> tuple[float, float]:
    """Bytes, and the seconds from the first to the last."""
    size, began = 0, time.monotonic()
    while piece := sock.recv(len(_PIECE)):
        began = began if size else time.monotonic()
        size += len(piece)
        sock.settimeout(_left_s(until))
    return float(size), time.monotonic() - began


def _left_s(until: float) -> float:
    if (left_s := until - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left_s


def _rate(size: float, seconds: float) -> float:
    return size / 1e6 / max(seconds, 1e-6)
