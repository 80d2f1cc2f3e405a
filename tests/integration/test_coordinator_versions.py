"""Agents and coordinators of different versions: another major is refused by name, another minor works."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.rendezvous.api import RendezvousConnectionError
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.frames import encode
from holdfast.rendezvous.membership.model import NodeFacts, Place, Sealed, Settings
from holdfast.rendezvous.membership.protocol import MAJOR, MINOR
from tests.coordinators import DEADLINE_S, Caller, CoordinatorProcess, Peer, coordinator, form, listener, node
from tests.promises import promise, proves

NEWER: dict[str, Any] = {"colour": "red", "shapes_of_2030": [1, {"deep": None}]}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path) as process:
        yield process


def as_map(message: Any) -> dict[str, Any]:
    """The message as it crosses the wire."""
    found = msgspec.msgpack.decode(encode(message)[4:])
    assert isinstance(found, dict)
    return found


def with_more(value: Any) -> Any:
    """The same with fields that this version does not know, on every level."""
    match value:
        case dict():
            return {**{key: with_more(each) for key, each in value.items()}, **NEWER}
        case list():
            return [with_more(each) for each in value]
    return value


def frame(value: Any) -> bytes:
    body = msgspec.msgpack.encode(value)
    return struct.pack("!I", len(body)) + body


@proves("coordinator.wrong-endpoint-ends-first", "etcd-runs.coordinator-port-host-false")
def test_a_coordinator_of_another_version() -> None:
    challenge = encode(protocol.Challenge(99, b"its own kind of nonce", False))
    with listener(challenge) as port, node(port) as a:
        with pytest.raises(RendezvousConnectionError) as caught:
            Caller(a.next_rendezvous).result()
        where = f"127.0.0.1:{port}"
        expected = f"the coordinator at {where} speaks version 99 of the protocol, this agent speaks {MAJOR}"
        assert str(caught.value) == expected


@proves("coordinator.wrong-endpoint-ends-first")
def test_an_agent_of_another_version(server: CoordinatorProcess) -> None:
    with Peer(server.port) as peer:
        peer.await_kind(protocol.Challenge)
        peer.send(protocol.Hello(99, "run", b"its own kind of nonce"))
        denied = peer.await_kind(protocol.Denied)
        assert denied.reason == f"it speaks version 99 of the protocol, this coordinator speaks {MAJOR}"
        assert peer.is_hung_up()
    server.await_line("is turned away: it speaks version 99")
    assert len(server.lines("turned away")) == 1


@promise("""coordinator.agents-minor-version-work: Agents and coordinators of another minor version work together:
    unknown fields are ignored, missing ones have defaults.""")
@pytest.mark.parametrize("is_newer", [True, False], ids=["newer", "older"])
def test_an_agent_of_another_minor_takes_part(server: CoordinatorProcess, is_newer: bool) -> None:
    """A newer one sends fields that the coordinator does not know, an older one leaves some out."""
    run_id = f"an agent, newer: {is_newer}"
    hello = as_map(protocol.Hello(MAJOR, run_id, bytes(32), minor=MINOR + 7))
    join = as_map(protocol.Join(NodeFacts("a"), Settings(1, 1)))
    if is_newer:
        hello, join = with_more(hello), with_more(join)
    else:
        hello = {key: hello[key] for key in ("type", "version", "run_id", "nonce")}
        join = {"type": "Join", "facts": {"node_id": "a"}, "settings": {"min_nodes": 1, "max_nodes": 1}}
    with Peer(server.port) as peer:
        challenge = peer.await_kind(protocol.Challenge)
        assert (challenge.version, challenge.minor) == (MAJOR, MINOR)
        peer.sock.sendall(frame(hello) + frame({"type": "Introduction", "node_id": "a"}))
        peer.await_kind(protocol.Welcome)
        peer.expect_pushes()
        peer.sock.sendall(frame(join))
        assert peer.await_kind(Sealed).place.node_count == 1


class FakeCoordinator:
    """Serves one agent, message by message, as maps."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(DEADLINE_S)
        self.port = int(self._server.getsockname()[1])

    def __enter__(self) -> FakeCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        self._server.close()

    def accept(self) -> None:
        self._sock, _ = self._server.accept()
        self._sock.settimeout(DEADLINE_S)

    def send(self, message: dict[str, Any]) -> None:
        self._sock.sendall(frame(message))

    def read(self, kind: str) -> dict[str, Any]:
        while True:
            (length,) = struct.unpack("!I", self._sock.recv(4, socket.MSG_WAITALL))
            found: dict[str, Any] = msgspec.msgpack.decode(self._sock.recv(length, socket.MSG_WAITALL))
            if found["type"] == kind:
                return found


@proves("coordinator.agents-minor-version-work")
@pytest.mark.parametrize("is_newer", [True, False], ids=["newer", "older"])
def test_a_coordinator_of_another_minor_serves_an_agent(is_newer: bool) -> None:
    """A newer one sends fields that the agent does not know, an older one leaves some out."""

    def as_it_sends(message: Any, *left_out: str) -> dict[str, Any]:
        sent = as_map(message)
        return with_more(sent) if is_newer else {key: sent[key] for key in sent if key not in left_out}

    with FakeCoordinator() as fake, node(fake.port) as a:
        joining = Caller(form, a)
        fake.accept()
        fake.send(as_it_sends(protocol.Challenge(MAJOR, bytes(32), False, MINOR + 7), "minor"))
        hello = fake.read("Hello")
        assert (hello["version"], hello["minor"]) == (MAJOR, MINOR)
        fake.send(as_it_sends(protocol.Welcome(), "term", "last_round", "restarts_used"))
        key = NodeFacts(**fake.read("Join")["facts"]).key
        sealed = as_it_sends(Sealed(key, Place(1, 1, 0, 1, (("default", 1),))))
        if not is_newer:
            del sealed["place"]["script"]
        fake.send(sealed)
        (found,) = joining.result()
        assert (found.number, found.found.world_size) == (1, 1)
        number = fake.read("Heartbeat")["number"]
        fake.send(as_it_sends(protocol.HeartbeatAnswer(number)))
        assert fake.read("Heartbeat")["number"] == number + 1
