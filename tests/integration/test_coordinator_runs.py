"""What the nodes of a run hear of each other through a real coordinator: refusals, stuck nodes, how a run ended."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import UserError
from holdfast.rendezvous.api import RendezvousClosedError
from holdfast.rendezvous.client import handshake, reachability
from holdfast.rendezvous.coordinator import run as runs
from holdfast.rendezvous.handler import CoordinatorHandler
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership import round as rounds
from holdfast.rendezvous.membership.model import Ended, Expelled, NodeFacts, Sealed, Settings, Stop
from holdfast.rendezvous.membership.restart_policy import Failure, RestartPolicy
from tests import support
from tests.coordinators import (
    Caller,
    CoordinatorProcess,
    Peer,
    await_push,
    coordinator,
    coordinator_thread,
    form,
    node,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path_factory.mktemp("home")) as process:
        yield process


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")


def await_log(caplog: pytest.LogCaptureFixture, words: str) -> str:
    """The first line of this process that has the words."""

    def find() -> str:
        return next((text for text in map(logging.LogRecord.getMessage, list(caplog.records)) if words in text), "")

    return support.wait_until(find, f"{words!r} in the log")


# While a node waits.


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
        assert said == f"node {other._facts.node_id} was turned away: {difference}"


def test_a_node_whose_peer_leaves_says_what_it_waits_for(
    server: CoordinatorProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with node(server.port, "2") as a, node(server.port, "2") as b:
        form(a, b)
        caplog.clear()
        b.leaving()
        b.left()
        assert await_push(a, Stop).reason == f"{b._facts.node_id} leaves"
        began = time.monotonic()
        a.join()
        await_log(caplog, "1 of 2 nodes joined, waiting for 1 (timeout in ")
        assert time.monotonic() - began < 10  # It takes a second; the join timeout is 30 s.


def test_a_newcomer_waits_for_a_frozen_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the line promises holds: it goes on until the join timeout, and joins when the coordinator thaws."""
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(reachability, "_FIRST_WORD_AFTER_S", 0.5)
    monkeypatch.setattr(reachability, "_NEXT_WORD_AFTER_S", 0.5)
    with coordinator(tmp_path) as process, node(process.port) as a:
        process.process.send_signal(signal.SIGSTOP)
        try:
            a.join()
            support.wait_until(lambda: caplog.text.count(", trying for ") > 2, "it goes on after what it said first")
            assert a.take() == []
        finally:
            process.process.send_signal(signal.SIGCONT)
        assert await_push(a, Sealed).place.round == 1


# A stop that does not end.


class Stuck:
    """A node that heartbeats and never comes back from a stop. Gives what it was told before it was hung up on."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._caller = Caller(self._beat)

    def _beat(self) -> list[object]:
        told: list[object] = []
        for number in range(1, 10_000):
            try:
                self._peer.send(protocol.Heartbeat(number))
            except OSError:
                return told
            while not isinstance(message := self._peer.receive(), protocol.HeartbeatAnswer):
                if message is None:
                    return told
                told.append(message)
            time.sleep(0.05)
        raise AssertionError("it was never hung up on")

    def told(self) -> list[object]:
        found = self._caller.result()
        assert isinstance(found, list)
        return found


def agreed(handler: CoordinatorHandler) -> Settings:
    return handler._options.settings(RestartPolicy())


def test_a_node_that_never_comes_back_from_a_stop_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rounds, "STOP_MARGIN_S", 0.3)
    with coordinator_thread(tmp_path) as port, Peer(port) as peer, node(port, "1:2", lease=2, last_call=5) as a:
        a.introduce("default", 1, RestartPolicy(), grace_s=0.2)
        peer.enter(name="stuck").join("stuck", agreed(a), grace_s=0.2)
        stuck = Stuck(peer)
        assert form(a)[0].found.world_size == 2
        a.report_failure(1, Failure(text="no reason"))
        assert await_push(a, Stop).is_failure
        (second,) = form(a)
        assert (second.number, second.found.world_size) == (2, 1)
        kinds = [type(message) for message in stuck.told()]
        assert kinds[-2:] == [Stop, Expelled]
    assert "stuck did not stop its workers within" in await_log(caplog, "treated as lost")


# After the end.


def succeed(*handlers: CoordinatorHandler) -> None:
    form(*handlers)
    for each in handlers:
        each.report_success(1, 10)
    for each in handlers:
        await_push(each, Ended)


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
        assert line.endswith("all workers have succeeded; a new run needs another --rdzv-id")


def test_the_name_of_a_run_that_was_complete_is_free_at_once(server: CoordinatorProcess) -> None:
    for _ in range(2):
        with node(server.port, "1:2", close_linger=30) as a, node(server.port, "1:2", close_linger=30) as b:
            succeed(a, b)


# What a coordinator keeps of nodes that come and go.


def speak_on(peer: Peer, name: str, ticket: bytes = b"") -> None:
    """The node says its join there, and it has been taken."""
    peer.enter(name=name, ticket=ticket).join(name, Settings(99, 99))
    peer.ask("check", "anything")


@pytest.mark.parametrize("is_connected", [True, False])
def test_what_is_known_of_connections_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_connected: bool
) -> None:
    """A join that is late on an older connection is dropped, however many nodes come and go, while the node has a newer
    connection. Of nodes that have none the last few are known."""
    monkeypatch.setattr(runs, "_REMEMBERED_CONNECTIONS", 3)
    with coordinator_thread(tmp_path) as port, Peer(port) as old:
        old.enter()
        with Peer(port) as newer:
            speak_on(newer, "a", old.welcome.ticket)
            if not is_connected:
                newer.close()
            for number in range(10):
                with Peer(port) as other:
                    speak_on(other, f"other {number}")
            old.send(protocol.Join(NodeFacts("a"), Settings(99, 99)))
            if is_connected:
                assert old.is_hung_up()
                newer.ask("check", "anything")
            else:
                old.ask("check", "anything")
