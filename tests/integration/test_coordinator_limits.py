"""Clients that misbehave cost the coordinator one connection and nothing else. Limits are lowered to meet them soon."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.rendezvous.api import RendezvousError, RendezvousTimeoutError
from holdfast.rendezvous.client.handshake import Target
from holdfast.rendezvous.client.visitor import Visitor
from holdfast.rendezvous.coordinator import connection, served_run
from holdfast.rendezvous.coordinator import server as servers
from holdfast.rendezvous.coordinator.limits import MIB, Limits
from holdfast.rendezvous.membership import frames, protocol
from holdfast.rendezvous.membership.frames import encode
from holdfast.rendezvous.membership.model import Settings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from tests import coordinators, support
from tests.coordinators import CoordinatorProcess, Peer, coordinator_thread, form, listener, node
from tests.promises import promise, proves

TWO = Settings(2, 2, lease_s=60.0)  # No heartbeats are needed.


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")


@contextlib.contextmanager
def limited(home: Path, **limits: int) -> Iterator[int]:
    with coordinator_thread(home, limits=Limits(**limits)) as port:
        yield port


def await_line(caplog: pytest.LogCaptureFixture, *words: str) -> str:
    def find() -> str:
        lines = [record.getMessage() for record in list(caplog.records)]
        return next((line for line in lines if all(word in line for word in words)), "")

    return support.wait_until(find, f"{words} in the log")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinators.coordinator(tmp_path) as process:
        yield process


@pytest.fixture
def honest(server: CoordinatorProcess) -> Iterator[Settings]:
    """A node that is in a round before and is served as before when the test is over. Another one with the same
    settings stands by."""
    with node(server.port, lease=60) as a:
        (found,) = form(a)
        found.found.store.set("key", "value")
        yield a._options.settings(RestartPolicy())
        assert found.found.store.get("key") == b"value"
        assert a.take() == []


def member(port: int, name: str = "a", settings: Settings = TWO) -> Peer:
    return Peer(port).enter(name=name).join(name, settings)


JUNK = [
    b"\0\0\0\0",
    b"\0\0\0\x01\xc1",
    b"\xff\xff\xff\xff",
    struct.pack("!I", MIB + 1),
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    b"\0\0\0\x05hello",
    bytes(1 << 16),
]


@promise("""coordinator.client-sends-junk-much: A client that sends junk, too much, too slowly or nothing, or does not
    read, costs the coordinator one connection. Hundreds of idle connections do no harm, and closed connections leave
    nothing behind.""")
def test_junk_instead_of_a_hello_after_it_and_after_a_join(server: CoordinatorProcess, honest: Settings) -> None:
    for number, junk in enumerate(JUNK):
        for peer in (
            Peer(server.port),
            Peer(server.port).enter(name=f"stranger {number}"),
            member(server.port, f"member {number}", honest),
        ):
            with peer:
                peer.sock.sendall(junk)
                assert peer.is_hung_up(), junk


# Strangers and silent ones.

HELLO = encode(protocol.Hello(protocol.MAJOR, "run", bytes(32)))


@proves("coordinator.client-sends-junk-much")
@pytest.mark.parametrize(
    ("said", "line"),
    [
        (b"", "said nothing for 0.5 s"),
        (HELLO[:-1], "was too slow to say hello"),
        (HELLO + encode(protocol.Introduction("a")), "has not joined within 0.5 s"),
        (struct.pack("!I", frames.MAX_HANDSHAKE_BYTES + 1), "a message of 16385 bytes is longer than the 16384"),
        (encode(protocol.Welcome()), "sent Welcome where a hello was expected"),
    ],
)
def test_a_stranger_says_hello_and_joins_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: bytes, line: str
) -> None:
    monkeypatch.setattr(connection, "_HANDSHAKE_TIMEOUT_S", 0.5)
    with limited(tmp_path) as port, Peer(port) as peer:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # Its time may be up before it has said all.
            for each in said:
                peer.sock.sendall(bytes([each]))
        assert peer.is_hung_up()
    await_line(caplog, line)


@proves("coordinator.client-sends-junk-much")
def test_a_client_that_falls_silent_is_cut_off_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a message, or nothing at all: its machine may be gone without a word. One that asks now and then stays."""
    monkeypatch.setattr(served_run, "_SILENCE_S", 1.0)
    monkeypatch.setattr(servers, "_SWEEP_EVERY_S", 0.05)
    settings = Settings(2, 2, heartbeat_s=0.05, lease_s=0.3)
    with limited(tmp_path) as port, member(port, settings=settings) as peer, contextlib.ExitStack() as stack:
        peer.ask("check", "k")
        target = Target("127.0.0.1", port, coordinators.default_run_id())
        half, silent, alive = (stack.enter_context(Visitor(target)) for _ in range(3))
        half._sock.sendall(encode(protocol.Query(1, b"{}"))[:-1])
        for guest in (half, silent):
            while not is_closed(guest):
                alive.ask({"command": "status"})
                time.sleep(0.02)


def is_closed(guest: Visitor) -> bool:
    try:
        return guest._sock.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


@proves("coordinator.client-sends-junk-much")
def test_a_client_that_never_reads(server: CoordinatorProcess, honest: Settings) -> None:
    """It gets its answers no faster than it reads them, and is not read from meanwhile."""
    before = server.memory_bytes
    with member(server.port, "a", honest) as peer:
        peer.ask("set", "large", values=(bytes(MIB - 1000),))
        peer.sock.settimeout(0.5)
        requests = encode(protocol.StoreRequest(b"x", 1, "get", ("large",))) * 500_000
        with pytest.raises(TimeoutError):
            peer.sock.sendall(requests)
        assert server.memory_bytes - before < 64 * MIB


@proves("coordinator.store-bound-request-most")
def test_half_messages_of_strangers_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with limited(tmp_path, held_bytes=3 << 19) as port, member(port) as modest, contextlib.ExitStack() as stack:
        half = encode(protocol.StoreRequest(b"", 1, "set", ("k",), (bytes(1 << 19),)))[:-1]
        modest.sock.sendall(half)
        for number in range(4):
            with contextlib.suppress(ConnectionError):
                stack.enter_context(Peer(port)).enter(name=f"{number}").sock.sendall(half)
        await_line(caplog, "has sent more than can be taken (1 MiB of all strangers), and is cut off")
        modest.sock.sendall(b"\0")
        assert modest.await_kind(protocol.StoreAnswer).problem == ""


@promise("""coordinator.strangers-use-connections: Strangers cannot use up connections or descriptors; a connection that
    has not joined is a stranger, also after its handshake.""")
@pytest.mark.parametrize("is_admitted", [False, True])
def test_the_oldest_stranger_makes_room(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_admitted: bool) -> None:
    """Whether it has introduced itself or not. A node is no stranger."""
    with limited(tmp_path, strangers=3) as port, member(port) as known, contextlib.ExitStack() as stack:
        known.ask("check", "k")
        strangers = []
        for number in range(5):
            strangers.append(stack.enter_context(Peer(port)))
            if is_admitted:
                strangers[-1].enter(name=f"{number}")
            else:
                strangers[-1].await_kind(protocol.Challenge)
        assert [peer.is_hung_up() for peer in strangers[:2]] == [True, True]
        await_line(caplog, "has not joined while others wait, and is cut off")
        known.ask("check", "k")
        with member(port, "late") as late:
            late.ask("check", "k")


@proves("coordinator.strangers-use-connections")
def test_the_last_descriptors_are_kept_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with limited(tmp_path, spare_descriptors=soft - 3) as port, Peer(port) as peer:
        assert peer.receive() == protocol.Denied("this coordinator has too many connections", is_passing=True)
        assert peer.is_hung_up()
    await_line(caplog, "is turned away: this coordinator has too many connections")


@proves("coordinator.strangers-use-connections")
@pytest.mark.parametrize("is_passing", [True, False])
def test_an_agent_tries_again_if_it_may_be_let_in_later(is_passing: bool) -> None:
    with (
        listener(encode(protocol.Denied("there are too many", is_passing))) as port,
        node(port, join_timeout=1.0) as handler,
        pytest.raises(RendezvousError, match="there are too many") as caught,
    ):
        form(handler)
    assert isinstance(caught.value, RendezvousTimeoutError) == is_passing, "after the join timeout, or at once"


@proves("coordinator.client-sends-junk-much")
def test_connections_that_come_and_go_leave_nothing(server: CoordinatorProcess, honest: Settings) -> None:
    with Peer(server.port):
        before = server.descriptors
    for number in range(300):
        enter: Any = [
            lambda: Peer(server.port),
            lambda: Peer(server.port).enter(),
            lambda: member(server.port, "a", honest),
        ]
        with enter[number % 3]() as peer:
            if number % 2:
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    support.wait_until(lambda: server.descriptors <= before, "its descriptors are closed again")


def test_an_agent_that_dialled_another_address(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with limited(tmp_path) as port, Peer(port) as peer:
        peer.await_kind(protocol.Challenge)
        peer.send(protocol.Hello(protocol.MAJOR, "run", bytes(32), endpoint="10.9.8.7:29400"))
        peer.send(protocol.Introduction("a"))
        peer.await_kind(protocol.Welcome)
        line = await_line(caplog, "dialled 10.9.8.7:29400")
        assert line.endswith(f"arrived at 127.0.0.1:{port}: there is a relay or address translation between")
