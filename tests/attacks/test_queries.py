"""Those who only ask: what strangers get, what they cannot do, and what a crowd of them costs a run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import HoldfastError
from holdfast.frozen import changed
from holdfast.rendezvous.client.handshake import Target
from holdfast.rendezvous.client.visitor import Visitor
from holdfast.rendezvous.coordinator.limits import Limits
from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.model import NodeFacts
from holdfast.rendezvous.membership.restart_policy import Failure, RestartPolicy
from tests.attacks import harness
from tests.attacks.harness import ESCAPE, HONEST, LightRun, Peer, light_run, neighbour
from tests.coordinators import CoordinatorProcess, coordinator, coordinator_thread

TOKEN = b"a token of more than 16 bytes"
STATUS = {"command": "status"}


def visitor(port: int, run_id: str = "honest", token: bytes | None = None) -> Visitor:
    return Visitor(Target("127.0.0.1", port, run_id, token))


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path, env={"HOLDFAST_TOKEN": TOKEN.decode()}) as server:
        yield server


@contextlib.contextmanager
def answering(run: LightRun, answer: bytes | None) -> Iterator[list[protocol.Query]]:
    """The nodes of the run answer what they are asked, while `run.turn` is called."""
    asked: list[protocol.Query] = []
    take = run._take

    def take_query(name: str, message: Any) -> None:
        if not isinstance(message, protocol.Query):
            take(name, message)
            return
        asked.append(message)
        if answer is not None:
            run._peers[run.names.index(name)].send(protocol.Answer(message.number, answer))

    run._take = take_query  # type: ignore[method-assign]
    yield asked


# Strangers.


@pytest.mark.parametrize("token", [None, b"another token of this length"])
def test_a_stranger_without_the_token_gets_nothing(guarded: CoordinatorProcess, token: bytes | None) -> None:
    with light_run(guarded.port, "honest", TOKEN) as run:
        with pytest.raises(HoldfastError) as caught:
            visitor(guarded.port, token=token)
        assert "token" in str(caught.value)
        assert run.names[0] not in str(caught.value)
        assert visitor(guarded.port, token=TOKEN).ask(STATUS)["round"] == 1
        run.run_for(0.3)
        assert run.disturbed == []


def test_a_question_before_the_handshake_is_over_costs_the_connection(guarded: CoordinatorProcess) -> None:
    from tests.coordinators import Peer as RawPeer

    with light_run(guarded.port, "honest", TOKEN), RawPeer(guarded.port) as stranger:
        hello = protocol.Hello(protocol.MAJOR, "honest", bytes(32), protocol.MINOR, True)
        stranger.send(hello, protocol.Introduction(is_visitor=True), protocol.Query(1, json.dumps(STATUS).encode()))
        said = []
        with contextlib.suppress(ValueError):  # What comes is sealed with a key that the stranger does not have.
            while (message := stranger.receive()) is not None:
                said.append(type(message))
        assert set(said) <= {protocol.Challenge}


def test_a_visitor_cannot_stop_a_run_that_has_no_token(server: CoordinatorProcess) -> None:
    with light_run(server.port, "honest") as run, visitor(server.port) as guest:
        with pytest.raises(HoldfastError, match="this run has no token, so only its own nodes can end it"):
            guest.ask({"command": "stop", "reason": "forged"})
        run.run_for(0.3)
        assert (run.disturbed, run.outcome) == ([], None)


@pytest.mark.parametrize(
    "message",
    [
        protocol.Close("forged"),
        protocol.Join(NodeFacts("a"), HONEST),
        protocol.Heartbeat(1),
        protocol.Left(),
        protocol.StoreRequest(b"x", 1, "set", ("key",), (b"value",)),
    ],
)
def test_a_visitor_that_acts_is_cut_off(server: CoordinatorProcess, message: Any) -> None:
    with light_run(server.port, "honest") as run:
        guest = visitor(server.port)
        guest._sock.setblocking(True)
        guest._sock.sendall(guest._frames.sealed(harness.frames.encode(message)))
        with pytest.raises(HoldfastError, match="broke"):
            guest.ask(STATUS)
        assert f"is a visitor and sent {type(message).__name__}" in server.await_line("is a visitor")
        run.run_for(0.3)
        assert (run.disturbed, run.outcome) == ([], None)


def test_without_a_token_visitors_read_no_logs_and_stacks(server: CoordinatorProcess) -> None:
    with light_run(server.port, "honest") as run, answering(run, b"{}") as asked, visitor(server.port) as guest:
        for command in ("logs", "stacks", "stop", None):
            with pytest.raises(HoldfastError, match="passes on nothing but the status"):
                guest.ask({"command": command}, run.names[0])
        run.run_for(0.2)
        assert asked == []


def test_asking_for_a_run_does_not_create_it_nor_keep_it(server: CoordinatorProcess) -> None:
    for number in range(300):
        with pytest.raises(HoldfastError, match=f"it has no run 'r{number}'"):
            visitor(server.port, f"r{number}")
    with light_run(server.port, "honest") as run, visitor(server.port) as guest:
        run.finish()
        assert run.disturbed == []
        with contextlib.suppress(HoldfastError):  # The run is over, whoever looks at it.
            while guest.ask(STATUS)["run_id"]:
                pass


@pytest.mark.parametrize("token", [None, TOKEN])
def test_the_outcome_is_pushed_and_its_evidence_only_with_the_token(tmp_path: Path, token: bytes | None) -> None:
    with coordinator(tmp_path, env={"HOLDFAST_TOKEN": token.decode()} if token else {}) as server:
        once = changed(HONEST, policy=RestartPolicy(0))
        with light_run(server.port, "honest", token, once) as run, visitor(server.port, token=token) as guest:
            asked = ask_without_waiting(guest, {"command": "outcome"})
            failure = Failure(run.names[0], rank=0, exitcode=1, text="rank 0 failed", evidence="what it said")
            run._peers[0].send(protocol.Failed(1, failure))
            run._turn_until(lambda: bool(run.disturbed), "was stopped", 10)
            for peer, name in zip(run._peers, run.names, strict=True):
                facts = NodeFacts(name, address="127.0.0.1", port=1)
                told = failure if name == run.names[0] else None
                peer.send(protocol.Join(facts, run.settings, run.places[name], failure=told))
            outcome = guest._answer_to(asked, time.monotonic() + 30)["result"]
    assert (outcome["end"], outcome["cause"]["text"]) == ("FAILED", "rank 0 failed")
    assert outcome["cause"]["evidence"] == ("what it said" if token else "")


def test_those_that_wait_for_the_outcome_are_counted(server: CoordinatorProcess) -> None:
    with light_run(server.port, "honest") as run, contextlib.ExitStack() as opened:
        guests = [opened.enter_context(visitor(server.port)) for _ in range(70)]
        for guest in guests:
            for _ in range(20):
                asked = ask_without_waiting(guest, {"command": "outcome"})
            assert guest.ask(STATUS)["round"] == 1  # It has been taken.
        run.finish()
        assert run.disturbed == []
        for guest in guests[6:]:
            assert guest._answer_to(asked, time.monotonic() + 30)["result"]["end"] == "SUCCEEDED"
        with pytest.raises(ConnectionResetError):  # Forgotten for one that came later.
            guests[0]._answer_to(asked, time.monotonic() + 30)


def ask_without_waiting(guest: Visitor, request: dict[str, Any]) -> int:
    guest._number += 1
    query = protocol.Query(guest._number, json.dumps(request).encode())
    guest._sock.sendall(guest._frames.sealed(harness.frames.encode(query)))
    return guest._number


# Answers.


def test_only_the_agent_that_was_asked_can_answer(guarded: CoordinatorProcess) -> None:
    with (
        light_run(guarded.port, "honest", TOKEN) as run,
        visitor(guarded.port, token=TOKEN) as guest,
        Peer(guarded.port, "honest", "intruder", token=TOKEN) as intruder,
    ):
        forged = [protocol.Answer(number, b'{"result": "forged"}') for number in range(1, 200)]
        with answering(run, None) as asked:
            query = protocol.Query(7, json.dumps({"command": "logs"}).encode(), run.names[0])
            guest._sock.setblocking(True)
            guest._sock.sendall(guest._frames.sealed(harness.frames.encode(query)))
            run._turn_until(lambda: bool(asked), "was asked", 10)
            intruder.send(*forged)
            intruder.send(protocol.Heartbeat(1))
            assert intruder.until(protocol.HeartbeatAnswer)
            run._peers[1].send(*forged)  # The other member was not asked either.
            run.run_for(0.2)
            run._peers[0].send(protocol.Answer(asked[0].number, b'{"result": "true"}'))
        assert guest._answer_to(7, time.monotonic() + 10) == {"result": "true"}


def test_what_a_node_calls_itself_is_passed_on_as_text(server: CoordinatorProcess) -> None:
    name = (ESCAPE * 4)[:250]
    with Peer(server.port, "honest", name) as hostile:
        hostile.send(protocol.Join(NodeFacts(name, address=name), model.Settings(2, 2)))
        with visitor(server.port) as guest:
            found = guest.ask(STATUS)["nodes"]
            while not found:
                found = guest.ask(STATUS)["nodes"]
        assert [each["node_id"] for each in found] == [name]


JUNK = {
    "no JSON": b"\xff\xfe",
    "no object": b"[1, 2]",
    "deep": b"[" * 4000,
    "an unknown command": b'{"command": "rm"}',
    "a command of another type": b'{"command": {"command": "status"}}',
    "a page far away": b'{"command": "status", "first": 1000000000000}',
    "a page before the first": b'{"command": "status", "first": -5}',
    "a page that is no number": b'{"command": "status", "first": "x"}',
    "a true page": b'{"command": "status", "first": true}',
}


@pytest.mark.parametrize("name", JUNK)
def test_junk_in_a_question_is_answered_or_refused(server: CoordinatorProcess, name: str) -> None:
    """No number that a peer sends sizes anything."""
    with light_run(server.port, "honest") as run, visitor(server.port) as guest:
        guest._sock.setblocking(True)
        guest._sock.sendall(guest._frames.sealed(harness.frames.encode(protocol.Query(1, JUNK[name]))))
        answer = guest._answer_to(1, time.monotonic() + 10)
        assert set(answer) in ({"error"}, {"result"})
        if "result" in answer:
            assert len(answer["result"]["nodes"]) == 2
        assert guest.ask(STATUS)["phase"] == "running"
        run.run_for(0.2)
        assert run.disturbed == []


@pytest.mark.parametrize("message", [protocol.Query(1, bytes(5000)), protocol.Answer(1, bytes((1 << 19) + 1))])
def test_what_is_too_long_costs_its_sender_the_connection(server: CoordinatorProcess, message: Any) -> None:
    with light_run(server.port, "honest") as run:
        with Peer(server.port, "honest", "x") as hostile:
            hostile.send(message)
            assert hostile.receive() is None
        run.run_for(0.2)
        assert run.disturbed == []


# Many.


def test_visitors_are_counted_and_let_in_again(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path, limits=Limits(visitors=3)) as port, light_run(port, "honest"):
        guests = [visitor(port) for _ in range(3)]
        with pytest.raises(HoldfastError, match="3 others are asking already"):
            visitor(port)
        guests.pop().close()
        deadline = time.monotonic() + 10
        while True:
            try:
                guests.append(visitor(port))
                break
            except HoldfastError:
                assert time.monotonic() < deadline
        for guest in guests:
            assert guest.ask(STATUS)["round"] == 1
            guest.close()


def test_agents_are_asked_at_a_bounded_rate(tmp_path: Path) -> None:
    limits = Limits(relays_a_second=1, relays_at_once=5, relays_unanswered=3)
    with (
        coordinator_thread(tmp_path, limits=limits) as port,
        light_run(port, "honest") as run,
        answering(run, None) as asked,
        visitor(port) as guest,
    ):
        guest._sock.setblocking(True)
        for number in range(1, 41):
            query = protocol.Query(number, json.dumps(STATUS).encode(), run.names[0])
            guest._sock.sendall(guest._frames.sealed(harness.frames.encode(query)))
        last = guest._answer_to(40, time.monotonic() + 10)
        assert "agents are asked at most 1 times a second" in last["error"]
        run.run_for(0.3)
        assert len(asked) in (5, 6)


def test_a_thousand_readers_do_not_disturb_changing_rounds(server: CoordinatorProcess) -> None:
    """They ask as fast as they are answered; an honest run on the same coordinator, and another one that forms round
    after round, go on. `neighbour` checks the longest wait for an answer."""
    with neighbour(server), contextlib.ExitStack() as stack:
        run = LightRun(server.port, "changing", settings=HONEST)
        stack.callback(run.close)
        run.form()
        guests = []
        for number in range(1000):
            guests.append(stack.enter_context(visitor(server.port, "changing")))
            if number % 50 == 0:
                run.turn()  # Its heartbeats go on meanwhile.
        question = protocol.Query(1, json.dumps(STATUS).encode())
        rounds = answers = 0
        ends = time.monotonic() + 6.0
        frames = {guest: guest._frames.sealed(harness.frames.encode(question)) for guest in guests}
        for guest in guests:
            guest._sock.setblocking(False)
            guest._sock.send(frames[guest])
        while time.monotonic() < ends:
            for guest in guests:
                with contextlib.suppress(BlockingIOError):
                    data = guest._sock.recv(1 << 20)
                    assert data, "a reader was cut off"
                    guest._frames.feed(data)
                    if guest._frames.next() is not None:
                        answers += 1
                        guest._sock.send(frames[guest])
            run.turn()
            rounds += run.change_round()
        assert rounds >= 3, rounds
        assert answers >= 1000, answers
