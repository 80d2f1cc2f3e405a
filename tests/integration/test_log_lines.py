"""What a peer says is one line of the coordinator's log, of bounded length and without control characters."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast import escape
from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.model import Settings
from holdfast.rendezvous.membership.restart_policy import Failure
from tests import coordinators
from tests.coordinators import CoordinatorProcess, Peer, node

HOSTILE = "\x1b]0;owned\x07\x1b[2J\nholdfast coordinator: forged\r\x9b31m\u202e"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinators.coordinator(tmp_path) as process:
        yield process


def junk(port: int) -> None:
    for value in ({"type": HOSTILE}, {"type": "Hello", HOSTILE: 1}, {"type": "Hello", "version": HOSTILE}):
        body = msgspec.msgpack.encode(value)
        with Peer(port) as peer:
            peer.sock.sendall(struct.pack("!I", len(body)) + body)
            assert peer.is_hung_up()


def failed(port: int) -> None:
    with Peer(port) as peer:
        peer.enter(name=HOSTILE).join(HOSTILE, Settings(1, 1))
        peer.await_kind(model.Sealed)
        peer.send(protocol.Failed(1, Failure(HOSTILE, text=HOSTILE, exception=HOSTILE)))
        peer.await_kind(model.Stop)


def failed_at_length(port: int) -> None:
    with Peer(port) as peer:
        peer.enter().join("a", Settings(1, 1))
        peer.await_kind(model.Sealed)
        peer.send(protocol.Failed(1, Failure("a", text="t" * 16000)))
        peer.await_kind(model.Stop)


def closed(port: int) -> None:
    with Peer(port) as peer:
        peer.enter(run_id=HOSTILE).join("a", Settings(1, 1, close_linger_s=0.0))
        peer.await_kind(model.Sealed)
        peer.send(protocol.Close(HOSTILE))
        peer.await_kind(model.Ended)


@pytest.mark.parametrize("act", [junk, failed, failed_at_length, closed])
def test_in_the_log_of_the_coordinator(server: CoordinatorProcess, act: Callable[[int], None]) -> None:
    before = len(server.log)
    act(server.port)
    with node(server.port, run_id="the next") as handler:
        coordinators.form(handler)
    server.await_line("'the next'")
    assert len(server.log) > before
    assert escape.lines(server.log) == server.log
    assert all(line.startswith("holdfast coordinator: ") for line in server.log.splitlines())
    assert not [line for line in server.log.splitlines() if line.startswith("holdfast coordinator: forged")]
    assert max(map(len, server.log.splitlines())) <= escape.LINE_LIMIT_CHARS
