"""Clients that misbehave cost the coordinator one connection and nothing else."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.rendezvous.coordinator import connection
from holdfast.rendezvous.coordinator import run as runs
from holdfast.rendezvous.coordinator import server as servers
from holdfast.rendezvous.membership import frames, model, protocol
from holdfast.rendezvous.membership.frames import encode
from holdfast.rendezvous.membership.model import Settings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from tests import coordinators, support
from tests.coordinators import CoordinatorProcess, Peer, coordinator_thread, form, node

pytestmark = pytest.mark.usefixtures("honest")

MIB = 1 << 20


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    with coordinators.coordinator(tmp_path_factory.mktemp("home")) as process:
        yield process


@pytest.fixture
def server(process: CoordinatorProcess) -> CoordinatorProcess:
    process.turn_page()
    return process


@pytest.fixture
def honest(server: CoordinatorProcess) -> Iterator[None]:
    """A node that is in a round before and is served as before when the test is over."""
    with node(server.port, run_id=f"honest {time.monotonic_ns()}") as a:
        (found,) = form(a)
        found.found.store.set("key", "value")
        yield
        assert found.found.store.get("key") == b"value"
        assert a.take() == []


JUNK = [
    b"\0\0\0\0",
    b"\0\0\0\x01\xc1",
    b"\xff\xff\xff\xff",
    struct.pack("!I", MIB + 1),
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    b"\0\0\0\x05hello",
    bytes(1 << 16),
]


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: junk[:8].hex())
def test_junk_instead_of_a_hello(server: CoordinatorProcess, junk: bytes) -> None:
    with Peer(server.port) as peer:
        peer.sock.sendall(junk)
        assert peer.is_hung_up()


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: junk[:8].hex())
def test_junk_after_the_hello(server: CoordinatorProcess, junk: bytes) -> None:
    with Peer(server.port) as peer:
        peer.enter()
        peer.sock.sendall(junk)
        assert peer.is_hung_up()


def test_a_stranger_may_not_send_much(server: CoordinatorProcess) -> None:
    with Peer(server.port) as peer:
        peer.sock.sendall(struct.pack("!I", frames.MAX_HANDSHAKE_BYTES + 1))
        assert peer.is_hung_up()
    server.await_line("sent junk: a message of 16385 bytes is longer than the 16384 that are allowed")


def test_another_word_instead_of_a_hello(server: CoordinatorProcess) -> None:
    with Peer(server.port) as peer:
        peer.send(protocol.Welcome())
        assert peer.is_hung_up()
    server.await_line("sent Welcome where a hello was expected")


def test_values_that_make_no_sense_cost_the_connection(server: CoordinatorProcess) -> None:
    with Peer(server.port) as peer:
        peer.enter().join("a", Settings(1, 1, lease_s=float("nan")))
        assert peer.is_hung_up()
    server.await_line("sent junk: not a message: Expected `float` >= 0.1 - at `$.settings.lease_s`")


def test_what_one_node_says_is_not_too_long_for_the_others(server: CoordinatorProcess) -> None:
    """The reason why a node is refused is told to those that wait, who take no longer texts than anybody does."""
    with Peer(server.port) as waiting, Peer(server.port) as intruder:
        waiting.enter().join("a", Settings(2, 2))
        waiting.ask("check", "anything")
        policy = RestartPolicy(fatal_exceptions=frozenset(f"E{number:03}" + "x" * 250 for number in range(200)))
        intruder.enter(name="b").join("b", Settings(2, 2, policy=policy))
        assert intruder.await_kind(model.Refused).reason.endswith(" ...")
        assert waiting.await_kind(model.Notice).text.startswith("node b was turned away: --fatal-exceptions E000")
        waiting.send(protocol.Heartbeat(1))
        assert waiting.await_kind(protocol.HeartbeatAnswer).number == 1


def test_words_before_joining_mean_nothing(server: CoordinatorProcess) -> None:
    with Peer(server.port) as peer:
        peer.enter()
        peer.send(protocol.Succeeded(1), protocol.Leaving(), protocol.Left(), protocol.Heartbeat(7))
        assert peer.await_kind(protocol.HeartbeatAnswer).number == 7


# Slow ones; the limits are lowered to wait less.


def test_one_byte_at_a_time_and_then_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_HANDSHAKE_TIMEOUT_S", 0.5)
    hello = encode(protocol.Hello(protocol.MAJOR, "run", bytes(32)))
    with coordinator_thread(tmp_path) as port, Peer(port) as peer, Peer(port) as silent:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # Its time may be up before it has said all.
            for each in hello[:-1]:
                peer.sock.sendall(bytes([each]))
        assert peer.is_hung_up()
        assert silent.is_hung_up()


def test_a_hello_that_comes_slowly_but_in_time(server: CoordinatorProcess) -> None:
    with Peer(server.port) as peer:
        for each in encode(protocol.Hello(protocol.MAJOR, "run", bytes(32))) + encode(protocol.Introduction("a")):
            peer.sock.sendall(bytes([each]))
        peer.await_kind(protocol.Welcome)


def test_whoever_falls_silent_is_cut_off_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a message, or nothing at all: its machine may be gone without a word. Whoever sends heartbeats stays."""
    monkeypatch.setattr(runs, "_SILENCE_S", 2.0)
    monkeypatch.setattr(servers, "_SWEEP_EVERY_S", 0.05)
    with coordinator_thread(tmp_path) as port, Peer(port) as half, Peer(port) as silent, Peer(port) as alive:
        for name, peer in (("half", half), ("silent", silent), ("alive", alive)):
            peer.enter(name=name)
        half.sock.sendall(encode(protocol.Heartbeat(1))[:-1])
        others = [coordinators.Caller(peer.is_hung_up) for peer in (half, silent)]
        number = 0
        while any(each.is_alive() for each in others):
            number += 1
            alive.send(protocol.Heartbeat(number))
            assert alive.await_kind(protocol.HeartbeatAnswer).number == number
            time.sleep(0.02)
        assert all(each.result() for each in others)


def test_a_run_that_everybody_has_left_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_SILENCE_S", 0.2)
    monkeypatch.setattr(runs, "_DESERTED_S", 0.2)
    settings = Settings(1, 1, heartbeat_s=0.05, lease_s=0.1)
    with coordinator_thread(tmp_path) as port:
        with Peer(port) as peer:
            peer.enter("deserted").join("a", settings)
            assert peer.await_kind(model.Sealed).place.round == 1
            assert list((tmp_path / "state").iterdir())
        support.wait_until(lambda: not list((tmp_path / "state").iterdir()), "its memory is gone")
        with Peer(port) as peer:
            peer.enter("deserted", name="b").join("b", settings)
            assert peer.await_kind(model.Sealed).place.round == 1


# Greedy ones.


def test_a_client_that_never_reads(server: CoordinatorProcess) -> None:
    """It gets its answers no faster than it reads them, and is not read from meanwhile."""
    before = server.memory_bytes
    with Peer(server.port) as peer:
        peer.enter()
        peer.ask("set", "large", values=(bytes(MIB - 1000),))
        peer.sock.settimeout(0.5)
        requests = encode(protocol.StoreRequest(b"x", 1, "get", ("large",))) * 500_000
        with pytest.raises(TimeoutError):
            peer.sock.sendall(requests)
        assert server.memory_bytes - before < 64 * MIB


def test_many_questions_at_once_are_all_answered(server: CoordinatorProcess) -> None:
    with Peer(server.port) as peer:
        peer.enter()
        peer.ask("set", "large", values=(bytes(MIB - 1000),))
        peer.send(*(protocol.StoreRequest(b"x", number, "get", ("large",)) for number in range(40)))
        answers = [peer.await_kind(protocol.StoreAnswer) for _ in range(40)]
        assert [answer.number for answer in answers] == list(range(40))
        assert {len(answer.values[0]) for answer in answers} == {MIB - 1000}


def test_whoever_does_not_read_what_it_must_be_told_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pushes cannot wait for the reader, so there is a limit to what piles up."""
    monkeypatch.setattr(connection, "_UNREAD_LIMIT_BYTES", 100_000)
    with coordinator_thread(tmp_path) as port, Peer(port) as deaf, Peer(port) as talker:
        deaf.enter()
        deaf.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for number in range(200):
            deaf.send(protocol.StoreRequest(b"deaf", number, "get", ("late",), timeout_s=60.0))
        deaf.ask("check", "anything")
        talker.enter(name="talker")
        talker.ask("set", "late", values=(bytes(200_000),))
        support.wait_until(lambda: "does not read what it is sent" in caplog.text, "it is cut off")
        assert len(talker.ask("get", "late").values[0]) == 200_000


def test_more_is_stored_than_there_is_room_for(server: CoordinatorProcess) -> None:
    with Peer(server.port) as peer:
        peer.enter("hoarder")
        problems = [peer.ask("set", f"key {number}", values=(bytes(MIB - 1000),)).problem for number in range(80)]
        assert problems[:60] == [""] * 60
        assert problems[-1] == "the store is full (at most 64 MiB)"
        for number in range(80):
            peer.ask("delete", f"key {number}")


def test_an_answer_has_the_values_that_fit(server: CoordinatorProcess) -> None:
    with Peer(server.port) as peer:
        peer.enter()
        for key in "xy":
            peer.ask("set", key, values=(bytes(600_000),))
        assert [len(value) for value in peer.ask("get", "x", "y").values] == [600_000]


# Many.


def test_five_hundred_idle_connections(server: CoordinatorProcess) -> None:
    """Half of them are strangers, the others have said hello."""
    peers: list[Peer] = []
    try:
        for number in range(250):
            peers += [Peer(server.port), Peer(server.port).enter("idle", name=f"{number}")]
        with node(server.port, "2") as a, node(server.port, "2") as b:
            assert {each.number for each in form(a, b)} == {1}
    finally:
        for peer in peers:
            peer.close()


def test_connections_that_come_and_go_leave_nothing(server: CoordinatorProcess) -> None:
    with Peer(server.port):
        before = server.descriptors
    for number in range(300):
        with Peer(server.port) as peer:
            peer.enter(f"run {number}")
            if number % 3 == 0:
                peer.join("a", Settings(2, 2))
            if number % 3 == 1:
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    support.wait_until(lambda: server.descriptors <= before, "its descriptors are closed again")


def test_a_node_that_connects_twice_is_served_on_the_newer_connection(server: CoordinatorProcess) -> None:
    settings = Settings(1, 1)
    with Peer(server.port) as old, Peer(server.port) as new:
        old.enter().join("a", settings)
        place = old.await_kind(model.Sealed).place
        new.enter(ticket=old.welcome.ticket)
        new.send(protocol.Return(coordinators.NodeFacts("a"), settings, place, model.Stage.RUNNING))
        assert old.is_hung_up()
        new.send(protocol.Heartbeat(1))
        assert new.await_kind(protocol.HeartbeatAnswer).number == 1
