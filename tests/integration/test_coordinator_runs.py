"""What the nodes of a run hear of each other through a real coordinator, how a run ends, what the coordinator writes to
its log about it, and what happens when the coordinator fails itself."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.rendezvous.api import RendezvousClosedError
from holdfast.rendezvous.client import handshake, reachability
from holdfast.rendezvous.client.handshake import TurnedAway
from holdfast.rendezvous.coordinator import served_run
from holdfast.rendezvous.handler import CoordinatorHandler
from holdfast.rendezvous.membership import frames, protocol
from holdfast.rendezvous.membership import run as machine
from holdfast.rendezvous.membership.model import Ended, Sealed, Settings, Stop
from tests import support
from tests.coordinators import Caller, CoordinatorProcess, Peer, await_push, coordinator, coordinator_thread, form, node
from tests.promises import promise, proves


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path) as process:
        yield process


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")


def await_log(caplog: pytest.LogCaptureFixture, *words: str) -> str:
    """The first line of this process that has the words."""

    def find() -> str:
        lines = [record.getMessage() for record in list(caplog.records)]
        return next((line for line in lines if all(word in line for word in words)), "")

    return support.wait_until(find, f"{words} in the log")


@promise("""coordinator.waiting-node-reports: A waiting node reports that another was rejected, and why. If a node
    leaves, the others report within seconds what they wait for.""")
def test_a_node_that_waits_hears_that_another_was_turned_away(
    server: CoordinatorProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with node(server.port, "2") as waiting, node(server.port, "3") as other:
        waiting.join()
        await_log(caplog, "1 of 2 nodes joined, waiting for 1")
        difference = "--nnodes 3, this run has --nnodes 2"
        with pytest.raises(UserError, match=f"rejected this node: {difference}$"):
            Caller(other.next_rendezvous).result()
        said = await_log(caplog, "was turned away")
        assert said == f"node {other.node_id} was turned away: {difference}"


@proves("coordinator.waiting-node-reports")
def test_a_node_whose_peer_leaves_says_what_it_waits_for(
    server: CoordinatorProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with node(server.port, "2") as a, node(server.port, "2") as b:
        form(a, b)
        caplog.clear()
        b.leaving()
        b.left()
        assert await_push(a, Stop).reason == f"{b.node_id} leaves"
        began = time.monotonic()
        a.join()
        await_log(caplog, "1 of 2 nodes joined, waiting for 1 (timeout in ")
        assert time.monotonic() - began < 10  # It takes a second; the join timeout is 30 s.


@promise("""coordinator.newcomer-waits-frozen-join: A newcomer waits for a frozen coordinator until its join timeout, as
    its message says.""")
def test_a_newcomer_waits_for_a_frozen_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the line promises holds: it goes on until the join timeout, and joins when the coordinator thaws."""
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(reachability, "_FIRST_WORD_AFTER_S", 0.5)
    monkeypatch.setattr(reachability, "_SECOND_WORD_AFTER_S", 1.0)
    monkeypatch.setattr(reachability, "_NEXT_WORD_AFTER_S", 0.5)
    with coordinator(tmp_path) as process, node(process.port) as a:
        process.process.send_signal(signal.SIGSTOP)
        try:
            a.join()
            support.wait_until(lambda: caplog.text.count("this node tries for ") > 2, "more than its first words")
            assert a.take() == []
        finally:
            process.process.send_signal(signal.SIGCONT)
        assert await_push(a, Sealed).place.round == 1


# A stop that does not end.


def succeed(*handlers: CoordinatorHandler) -> None:
    rounds_of = form(*handlers)
    for each, found in zip(handlers, rounds_of, strict=True):
        each.report_success(found.number, 10)
    for each in handlers:
        await_push(each, Ended)


@promise("""coordinator.run-ended-below-maximum: If a run ended below its maximum number of nodes, a node that comes
    within `close_linger` gets its outcome, and one line names `--rdzv-id`.""")
def test_a_node_that_comes_too_late_gets_the_outcome(
    server: CoordinatorProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """The run ended below max nodes, so the node may have been meant for it."""
    with node(server.port, "1:2", close_linger=30) as a:
        succeed(a)
    with node(server.port, "1:2", close_linger=30) as late:
        with pytest.raises(RendezvousClosedError, match="all workers have succeeded"):
            Caller(late.next_rendezvous).result()
        (line,) = [record.getMessage() for record in caplog.records if "--rdzv-id" in record.getMessage()]
        assert line.endswith("all workers have succeeded; a new run needs another --rdzv-id, or a wait of 30 s")


@proves("coordinator.endpoint-run-node-run")
def test_the_name_of_a_run_that_was_complete_is_free_at_once(server: CoordinatorProcess) -> None:
    long: dict[str, Any] = {"last_call": 60, "close_linger": 60}  # However late the second node comes.
    for _ in range(2):
        with node(server.port, "1:2", **long) as a, node(server.port, "1:2", **long) as b:
            succeed(a, b)


@proves("coordinator.messages-older-connection")
def test_what_is_known_of_nodes_that_are_away_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a node that is connected stays its own, however many nodes come and go."""
    monkeypatch.setattr(machine, "_REMEMBERED_NODES", 4)
    settings = Settings(99, 99, lease_s=60.0)
    with coordinator_thread(tmp_path) as port, Peer(port) as here, Peer(port) as away:
        for name, peer in (("here", here), ("away", away)):
            peer.enter(name=name, secret=b"its own").join(name, settings).ask("check", "k")
        away.close()
        for number in range(20):
            with Peer(port) as other:
                other.enter(name=f"other {number}").join(f"other {number}", settings).ask("check", "k")
        with Peer(port) as stranger, pytest.raises(TurnedAway, match="is another node's"):
            stranger.enter(name="here")
        with Peer(port) as stranger:
            stranger.enter(name="away")


@promise("""coordinator.decision-peer-caused-line: Each decision that a peer caused is one line with its address and
    node id; lines are short and rationed.""")
def test_a_line_for_each_decision(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(1, 2, last_call_s=0.0)
    with coordinator_thread(tmp_path) as port, Peer(port) as first, Peer(port) as second, Peer(port) as third:
        first.enter("run", name="first").join("first", settings)
        first.join("first", settings).ask("check", "k")  # Which is not a decision.
        second.enter("run", name="second").join("second", Settings(1, 3))
        assert second.is_hung_up()
        third.enter("run", name="third").join("third", settings, incarnation=1).ask("check", "k")
        third.join("third", settings, incarnation=0)
        assert third.is_hung_up()
        first.send(protocol.Close("e" * 5000))
        first.await_kind(Ended)
        first.send(protocol.Left())
    for words in (
        ("first/0 at 127.0.0.1:", "joined"),
        ("second", "127.0.0.1:", "is refused: --nnodes"),
        ("third/1 at 127.0.0.1:", "joined"),
        ("third/", "at 127.0.0.1:", "is expelled: a newer incarnation"),
        ("first/0 at 127.0.0.1:", "left"),
        ("has ended: eee",),
    ):
        line = await_log(caplog, *words)
        assert caplog.messages.count(line) == 1
        assert len(line) < 1000


@promise("""coordinator.run-machine-fails-closed: A run whose machine fails is closed as a whole, and goes on from its
    memory when its nodes come back.""")
@pytest.mark.parametrize("broken", ["machine", "encoder"])
def test_a_run_that_fails_inside_is_closed_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    """Its nodes are hung up on and can come back; the run goes on from its memory."""
    step, encode = machine.Membership.step, frames.encode

    def fail_step(self: Any, event: protocol.Event, now: float) -> list[protocol.Command]:
        if isinstance(event, protocol.From) and isinstance(event.message, protocol.Leaving):
            raise ZeroDivisionError("on purpose")
        return step(self, event, now)

    def fail_encode(message: object) -> bytes:
        if isinstance(message, Stop):
            raise ValueError("on purpose")
        return encode(message)

    with coordinator_thread(tmp_path) as port, Peer(port) as first, Peer(port) as second:
        settings = Settings(2, 2, lease_s=60.0)
        for name, peer in (("a", first), ("b", second)):
            peer.enter("broken", name=name, secret=b"its own").join(name, settings)
        first.await_kind(Sealed)
        if broken == "machine":
            monkeypatch.setattr(machine.Membership, "step", fail_step)
        else:
            monkeypatch.setattr(served_run.frames, "encode", fail_encode)
        first.sock.sendall(encode(protocol.Leaving()))
        assert first.is_hung_up()
        assert second.is_hung_up()
        await_log(caplog, "internal error (please report): run 'broken' failed, its connections are closed")
        monkeypatch.undo()
        with Peer(port) as again:
            again.enter("broken", name="a", secret=b"its own")
            assert again.welcome.last_round == 1


# The watchdog.

BLOCKED = """
import asyncio, contextlib, pathlib, sys, time
from holdfast.rendezvous.coordinator import launch, state_file, watchdog
from holdfast.rendezvous.coordinator.server import Coordinator

async def main():
    sock = launch.bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    coordinator = Coordinator(sock, state_file.StateFiles(pathlib.Path(sys.argv[1]), "127.0.0.1", port))
    if sys.argv[2] == "block":
        asyncio.get_running_loop().call_later(0.1, time.sleep, 60)
    with contextlib.closing(watchdog.Watchdog(lambda: min(1.0, coordinator.patience_s))):
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


@promise("""coordinator.loop-stands-longer-lease: A coordinator whose loop stands still for longer than a lease kills
    itself; one that was frozen as a whole goes on.""")
def test_a_coordinator_whose_loop_stands_still_kills_itself(tmp_path: Path) -> None:
    with watched(tmp_path, "block") as process:
        _, said = process.communicate(timeout=30)
        assert process.returncode == -9
        assert "the loop of this coordinator has stood still for 1.5 s: it kills itself; its stacks:\n" in said
        assert "in main" in said or "in serve" in said or "in run_forever" in said


@proves("coordinator.loop-stands-longer-lease")
def test_a_coordinator_that_was_frozen_goes_on(tmp_path: Path) -> None:
    with watched(tmp_path, "serve") as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        process.send_signal(signal.SIGCONT)
        with Peer(port) as peer:
            peer.enter().join("a", Settings(1, 1)).await_kind(Sealed)
            time.sleep(1.5)
            assert process.poll() is None
            peer.ask("check", "k")
