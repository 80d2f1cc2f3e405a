"""One run cannot slow, fill or stop another on the same coordinator; its limits are lowered here to meet them soon."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.rendezvous.api import RendezvousError, RendezvousTimeoutError
from holdfast.rendezvous.client.handshake import TurnedAway
from holdfast.rendezvous.coordinator import run as runs
from holdfast.rendezvous.coordinator.limits import Limits
from holdfast.rendezvous.coordinator.memory import StateFiles
from holdfast.rendezvous.membership import frames, model, protocol
from holdfast.rendezvous.membership.model import NodeFacts, Settings
from tests import support
from tests.coordinators import Peer, coordinator_thread, form, listener, node

ONE = Settings(1, 1)


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


def test_whoever_is_too_fast_waits_and_loses_nothing(tmp_path: Path) -> None:
    with limited(tmp_path, bytes_a_second=6554 * 500) as port, Peer(port) as peer:
        peer.enter()
        began = time.monotonic()
        peer.send(*(protocol.Heartbeat(number) for number in range(2000)))
        assert [peer.await_kind(protocol.HeartbeatAnswer).number for _ in range(2000)] == list(range(2000))
        peer.send(protocol.Heartbeat(2000))
        assert peer.await_kind(protocol.HeartbeatAnswer).number == 2000
        assert time.monotonic() - began > 1.0  # It owes at least 1,000 messages, at 500 a second.


def test_many_that_one_set_wakes_are_all_answered(tmp_path: Path) -> None:
    with limited(tmp_path) as port, Peer(port) as waiting, Peer(port) as setting:
        waiting.enter()
        waiting.send(*(protocol.StoreRequest(b"w", at, "get", ("k",), timeout_s=60.0) for at in range(1000)))
        waiting.ask("check", "anything")
        setting.enter(name="b").ask("set", "k", values=(b"v",))
        assert [waiting.await_kind(protocol.StoreAnswer).number for _ in range(1000)] == list(range(1000))


# What is kept.


def test_one_run_too_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with limited(tmp_path, runs=2) as port, Peer(port) as first, Peer(port) as second, Peer(port) as third:
        first.enter("first")
        second.enter("second")
        with pytest.raises(TurnedAway, match="this coordinator serves 2 runs already"):
            third.enter("third")
        await_line(caplog, "is turned away: this coordinator serves 2 runs already")
        with Peer(port) as more:
            more.enter("second", name="b")


def test_a_deserted_run_makes_room_and_is_as_it_was_when_its_node_returns(tmp_path: Path) -> None:
    with limited(tmp_path, runs=1) as port:
        with Peer(port) as node:
            ticket = node.enter("deserted").welcome.ticket
            place = node.join("a", ONE).await_kind(model.Sealed).place
        support.wait_until(lambda: runs_are_deserted(port), "another run gets its place")
        with Peer(port) as node:
            node.enter("deserted", ticket=ticket)
            node.send(protocol.Return(NodeFacts("a"), ONE, place, model.Stage.RUNNING), protocol.Heartbeat(1))
            assert node.await_kind(protocol.HeartbeatAnswer).number == 1
            with Peer(port) as stranger, pytest.raises(TurnedAway, match="is another node's"):
                stranger.enter("deserted")


def runs_are_deserted(port: int) -> bool:
    with Peer(port) as other:
        try:
            other.enter("other")
        except TurnedAway:
            return False
        return True


def test_the_memory_of_runs_that_made_room_is_bounded(tmp_path: Path) -> None:
    with limited(tmp_path, runs=1, parked_runs=3) as port:
        for number in range(10):
            with Peer(port) as node:
                support.wait_until(lambda node=node, number=number: entered(port, node, number), "there is room")
                node.join("a", ONE).await_kind(model.Sealed)
        files = tmp_path / "state"
        support.wait_until(lambda: len(list(files.iterdir())) <= 4, "old ones are gone")


def entered(port: int, node: Peer, number: int) -> bool:
    try:
        node.enter(f"run {number}")
        return True
    except TurnedAway:
        node.__init__(port)  # type: ignore[misc]  # it has been hung up on
        return False


@pytest.mark.parametrize(
    ("lease_s", "has_round", "kept_s"),
    [(5.0, True, 60.0), (50.0, False, 150.0), (3600.0, False, 300.0), (3600.0, True, 3600.0)],
)
def test_how_long_a_deserted_run_is_kept(lease_s: float, has_round: bool, kept_s: float) -> None:
    class Owner:
        idle_timeout_s = None

    class Machine:
        settings = Settings(1, 1, lease_s=lease_s)
        round = int(has_round)

    run = object.__new__(runs.Run)
    run._owner, run.machine = Owner(), Machine()  # type: ignore[assignment]
    assert run.deserted_s == kept_s


def test_one_node_too_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with limited(tmp_path, nodes=2) as port, contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(Peer(port)) for _ in range(3))
        for name, peer in (("a", first), ("b", second)):
            peer.enter(name=name).join(name, Settings(9, 9)).ask("check", "k")
        third.enter(name="c").join("c", Settings(9, 9))
        assert third.await_kind(model.Refused).reason == "this coordinator has 2 nodes already"
        await_line(caplog, "c at 127.0.0.1:", "is refused: this coordinator has 2 nodes already")
        first.send(protocol.Left())
        first.ask("check", "k")
        third.join("c", Settings(9, 9)).ask("check", "k")
        third.send(protocol.Close("enough"))
        third.await_kind(model.Ended)


def test_the_next_incarnation_on_a_connection_ends_the_one_before(tmp_path: Path) -> None:
    """Even if it is turned away: nothing is left of nodes that were given up."""
    with limited(tmp_path, nodes=1) as port, Peer(port) as peer:
        settings = Settings(9, 9, drop_timeout_s=0.2, heartbeat_s=0.05, lease_s=3600.0)
        peer.enter().join("a", settings)
        peer.join("a", settings, incarnation=1).ask("check", "k")
        with Peer(port) as other:
            other.enter(name="b").join("b", settings)
            other.await_kind(model.Refused)
            peer.close()
            support.wait_until(lambda: is_taken(other, settings), "the node that was lost does not count")


def is_taken(peer: Peer, settings: Settings) -> bool:
    peer.join("b", settings)
    peer.send(protocol.Heartbeat(1))
    return isinstance(peer.receive(), protocol.HeartbeatAnswer | model.Progress)


def test_a_node_that_was_cut_off_in_the_handshake_gets_its_ticket_once_more(tmp_path: Path) -> None:
    """Its first connection may look open to the coordinator for a while. Once it has joined, its id is its own."""
    with limited(tmp_path) as port, Peer(port) as lost, Peer(port) as node:
        lost.enter("run")
        node.enter("run").join("a", Settings(2, 2))
        node.await_kind(model.Progress)
        with Peer(port) as stranger, pytest.raises(TurnedAway, match="the node id 'a' is another node's"):
            stranger.enter("run")
        with Peer(port) as again:
            again.enter("run", ticket=node.welcome.ticket)


def test_half_messages_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with limited(tmp_path, held_bytes=3 << 19) as port, contextlib.ExitStack() as stack:
        modest = stack.enter_context(Peer(port)).enter("modest")
        peers = [stack.enter_context(Peer(port)).enter("greedy", name=f"{at}") for at in range(4)]
        half = frames.encode(protocol.StoreRequest(b"", 1, "set", ("k",), (bytes(1 << 19),)))[:-1]
        modest.sock.sendall(half)
        for peer in peers:
            with contextlib.suppress(ConnectionError):
                peer.sock.sendall(half)
        await_line(caplog, "has sent more than can be taken (1 MiB of all peers), and is cut off")
        modest.sock.sendall(b"\0")
        assert modest.await_kind(protocol.StoreAnswer).problem == ""


@pytest.mark.parametrize("waiting", [1000, 3], ids=["all are taken", "some wait"])
def test_a_run_writes_its_memory_down_a_few_times_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    """The newest one, which says what the ones before it say."""
    written: list[int] = []
    remember = StateFiles.remember

    def note(self: StateFiles, run_id: str, memory: model.Memory, then: Callable[[], None]) -> None:
        written.append(memory.last_round)
        remember(self, run_id, memory, then)

    monkeypatch.setattr(StateFiles, "remember", note)
    limits = {"writes_a_second": 5, "writes_at_once": 2, "waiting_commands": waiting}
    with limited(tmp_path, **limits) as port, Peer(port) as peer:
        peer.enter()
        peer.send(*(protocol.Join(NodeFacts("a"), Settings(2, 2), heard_round=at) for at in range(1, 21)))
        support.wait_until(lambda: 20 in written, "the last one is written down")
        assert written == sorted(written)
        assert len(written) <= (5 if waiting > 20 else 12)
        assert peer.ask("check", "k").problem == ""


# Strangers.


@pytest.mark.parametrize("is_passing", [True, False])
def test_an_agent_tries_again_if_it_may_be_let_in_later(is_passing: bool) -> None:
    with (
        listener(frames.encode(protocol.Denied("there are too many", is_passing))) as port,
        node(port, join_timeout=1.0) as handler,
        pytest.raises(RendezvousError, match="there are too many") as caught,
    ):
        form(handler)
    assert isinstance(caught.value, RendezvousTimeoutError) == is_passing, "after the join timeout, or at once"


def test_the_oldest_stranger_makes_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with limited(tmp_path, strangers=3) as port, contextlib.ExitStack() as stack:
        known = stack.enter_context(Peer(port)).enter()
        silent = []
        for _ in range(5):
            silent.append(stack.enter_context(Peer(port)))
            silent[-1].await_kind(protocol.Challenge)
        assert silent[0].is_hung_up()
        assert silent[1].is_hung_up()
        await_line(caplog, "has not said hello while others wait, and is cut off")
        known.ask("check", "k")
        stack.enter_context(Peer(port)).enter(name="late")


def test_the_last_descriptors_are_kept_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with limited(tmp_path, spare_descriptors=soft - 3) as port, Peer(port) as peer:
        assert peer.receive() == protocol.Denied("this coordinator has too many connections", is_passing=True)
        assert peer.is_hung_up()
    await_line(caplog, "is turned away: this coordinator has too many connections")


def test_a_stranger_that_sends_much_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with limited(tmp_path, stranger_bytes=1000) as port, Peer(port) as peer:
        peer.sock.sendall((2000).to_bytes(4, "big") + bytes(1500))
        assert peer.is_hung_up()
    await_line(caplog, "sent too much before it was let in")


def test_an_agent_that_dialled_another_address(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with limited(tmp_path) as port, Peer(port) as peer:
        peer.await_kind(protocol.Challenge)
        peer.send(protocol.Hello(protocol.MAJOR, "run", bytes(32), endpoint="10.9.8.7:29400"))
        peer.send(protocol.Introduction("a"))
        peer.await_kind(protocol.Welcome)
        line = await_line(caplog, "dialled 10.9.8.7:29400")
        assert line.endswith(f"arrived at 127.0.0.1:{port}: there is a relay or address translation between")


# What is said, and what goes wrong.


def test_a_line_for_each_decision(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with limited(tmp_path) as port, Peer(port) as first, Peer(port) as second, Peer(port) as third:
        settings = Settings(1, 2, last_call_s=0.0)
        first.enter("run", name="first").join("first", settings)
        first.join("first", settings).ask("check", "k")  # Which is not a decision.
        second.enter("run", name="second").join("second", Settings(1, 3)).ask("check", "k")
        third.enter("run", name="third").join("third", settings, incarnation=1).ask("check", "k")
        third.join("third", settings, incarnation=0)
        assert third.is_hung_up()
        first.send(protocol.Close("e" * 5000))
        first.await_kind(model.Ended)
        first.send(protocol.Left())
        first.ask("check", "k")
    at = r"at 127.0.0.1:"
    for words in (
        ("first/0", at, "joined"),
        ("second/0", at, "is refused: --nnodes"),
        ("third/1", at, "joined"),
        ("third/0", at, "is expelled: a newer incarnation"),
        ("first/0", at, "closed the run: eee"),
        ("first/0", at, "left"),
    ):
        line = await_line(caplog, *words)
        assert caplog.messages.count(line) == 1
        assert len(line) < 1000


def test_a_run_whose_machine_fails_is_closed_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its nodes are hung up on and can come back; other runs do not notice."""
    step = runs.Membership.step

    def fail(self: runs.Membership, event: protocol.Event, now: float) -> list[protocol.Command]:
        if isinstance(event, protocol.From) and isinstance(event.message, protocol.Leaving):
            raise ZeroDivisionError("on purpose")
        return step(self, event, now)

    monkeypatch.setattr(runs.Membership, "step", fail)
    with limited(tmp_path) as port, Peer(port) as first, Peer(port) as second, Peer(port) as other:
        ticket = first.enter("broken", name="a").join("a", ONE).welcome.ticket
        first.await_kind(model.Sealed)
        second.enter("broken", name="b")
        other.enter("other")
        first.send(protocol.Leaving())
        assert first.is_hung_up()
        assert second.is_hung_up()
        other.ask("check", "k")
        await_line(caplog, "run 'broken' failed, and its connections are closed: on purpose")
        with Peer(port) as again:
            again.enter("broken", name="a", ticket=ticket)
            assert again.welcome.last_round == 1


def test_a_message_that_became_too_large_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode = frames.encode

    def fail(message: object) -> bytes:
        if isinstance(message, model.Sealed):
            raise ValueError("Sealed has 1516401 bytes")
        return encode(message)

    monkeypatch.setattr(runs.frames, "encode", fail)
    with limited(tmp_path) as port, Peer(port) as peer, Peer(port) as other:
        other.enter("other")
        peer.enter("broken").join("a", ONE)
        assert peer.is_hung_up()
        other.ask("check", "k")
    await_line(caplog, "failed, and its connections are closed: Sealed has 1516401 bytes")
    assert not [record for record in caplog.records if record.exc_info]


# The watchdog.

BLOCKED = """
import asyncio, os, pathlib, sys, time
from holdfast.rendezvous.coordinator import launch, memory, watchdog
from holdfast.rendezvous.coordinator.server import Coordinator

async def main():
    sock = launch.bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    coordinator = Coordinator(sock, memory.StateFiles(pathlib.Path(sys.argv[1]), "127.0.0.1", port))
    if sys.argv[2] == "block":
        asyncio.get_running_loop().call_later(0.1, time.sleep, 60)
    with watchdog.watching(lambda: min(1.0, coordinator.patience_s)):
        await coordinator.serve(lambda: print(port, flush=True))

asyncio.run(main())
"""


@contextlib.contextmanager
def watched(home: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", BLOCKED, str(home), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_coordinator_whose_loop_stands_still_kills_itself(tmp_path: Path) -> None:
    with watched(tmp_path, "block") as process:
        _, said = process.communicate(timeout=30)
        assert process.returncode == -9
        assert "the loop of this coordinator has stood still for 1.5 s: it kills itself; its stacks:\n" in said
        assert "in main" in said or "in serve" in said or "in run_forever" in said


def test_a_coordinator_that_was_frozen_goes_on(tmp_path: Path) -> None:
    with watched(tmp_path, "serve") as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        process.send_signal(signal.SIGCONT)
        with Peer(port) as peer:
            peer.enter().ask("check", "k")
        time.sleep(1.5)
        assert process.poll() is None
        with socket.create_connection(("127.0.0.1", port), 5.0):
            pass
