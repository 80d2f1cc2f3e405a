"""Those who only ask: what strangers get, what they cannot do, and what a crowd of them costs a run."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.failures.records import Evidence, Failure
from holdfast.rendezvous.client.handshake import TurnedAway
from holdfast.rendezvous.coordinator.limits import Limits
from holdfast.rendezvous.membership import model, protocol
from tests import support
from tests.attacks.harness import ESCAPE, HONEST, RUN_ID, HonestRun, Peer, facts, member
from tests.coordinators import CoordinatorProcess, await_push, coordinator, coordinator_thread
from tests.promises import promise, proves

TOKEN = b"a token of more than 16 bytes"
_numbers = itertools.count(1)


def visitor(port: int, run_id: str = RUN_ID, token: bytes | None = None) -> Peer:
    return Peer(port, run_id, token=token, is_visitor=True)


def query(command: str | None, node_id: str = "") -> protocol.Query:
    return protocol.Query(next(_numbers), json.dumps({"command": command}).encode(), node_id)


def ask(guest: Peer, question: protocol.Query) -> dict[str, Any]:
    guest.send(question)
    return answer_to(guest, question)


def answer_to(guest: Peer, question: protocol.Query) -> dict[str, Any]:
    while (answer := guest.await_kind(protocol.Answer)).number != question.number:
        pass
    found: dict[str, Any] = json.loads(answer.body)
    return found


@pytest.fixture
def run(server: CoordinatorProcess) -> Iterator[HonestRun]:
    """It does not notice the attack."""
    with HonestRun(server.port) as honest_run:
        yield honest_run
        honest_run.check()


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    return support.write_secret(tmp_path / "token", TOKEN)


@promise("""steering.stranger-token-learns-nothing: A stranger without the token learns nothing of the run. Without a
    token, logs and stacks are not passed on to strangers.""")
@pytest.mark.parametrize("token", [None, b"another token of this length"])
def test_a_stranger_without_the_token_gets_nothing(tmp_path: Path, token_file: str, token: bytes | None) -> None:
    with coordinator(tmp_path, "--token-file", token_file) as server, HonestRun(server.port, token_file) as run:
        with pytest.raises(TurnedAway, match="token") as caught:
            visitor(server.port, token=token)
        assert run.names[0] not in str(caught.value)
        with visitor(server.port, token=TOKEN) as guest:
            assert ask(guest, query("status"))["result"]["round"] == 1
        run.check()


@proves("steering.endpoint-run-stopped-token", "steering.stranger-token-learns-nothing")
def test_without_a_token_a_visitor_reads_the_status_and_nothing_else(server: CoordinatorProcess) -> None:
    asked: list[bytes] = []
    with HonestRun(server.port, answer=lambda body: asked.append(body) or b"{}") as run, visitor(server.port) as guest:
        problem = ask(guest, query("stop"))["error"]
        assert problem.startswith("this run has no token, so only its own nodes can end it")
        for command in ("logs", "stacks", "stop", None):
            assert "passes on nothing but the status" in ask(guest, query(command, run.names[0]))["error"]
        run.check()
        assert asked == []


@pytest.mark.parametrize(
    "message",
    [
        protocol.Close("forged"),
        protocol.Join(facts("a"), HONEST),
        protocol.Left(),
        protocol.Answer(1, b"{}"),
        protocol.StoreRequest(b"x", 1, "set", ("key",), (b"value",)),
    ],
)
def test_a_visitor_that_acts_is_cut_off(server: CoordinatorProcess, run: HonestRun, message: Any) -> None:
    with visitor(server.port) as guest:
        guest.send(message)
        assert guest.is_hung_up()
        server.await_line(f"sent {type(message).__name__}")


@proves("steering.agent-asked-answer-asking")
def test_asking_for_a_run_does_not_create_it_nor_keep_it(server: CoordinatorProcess) -> None:
    for number in range(300):
        with pytest.raises(TurnedAway, match=f"it has no run 'r{number}'"):
            visitor(server.port, f"r{number}")
    with HonestRun(server.port) as run, visitor(server.port) as guest:
        run.finish()
        assert guest.is_hung_up()


@proves("dashboard.end-run-last-state")
@pytest.mark.parametrize("has_token", [False, True])
def test_the_outcome_is_pushed_and_its_evidence_only_with_the_token(
    tmp_path: Path, token_file: str, has_token: bool
) -> None:
    with (
        coordinator(tmp_path, *(["--token-file", token_file] if has_token else [])) as server,
        HonestRun(server.port, token_file if has_token else "") as run,
        visitor(server.port, token=TOKEN if has_token else None) as guest,
    ):
        guest.send(question := query("outcome"))
        told = Evidence(message="what it said")
        failure = Failure(node=run.names[0], rank=0, exitcode=1, text="rank 0 failed", evidence=told)
        run.nodes[0].report_failure(1, failure)
        for each in run.nodes:
            await_push(each, model.Stop)
        for each, why in zip(run.nodes, (failure, None), strict=True):
            each.join(why)
        outcome = answer_to(guest, question)["result"]
    assert (outcome["end"], outcome["cause"]["text"]) == ("FAILED", "rank 0 failed")
    assert ("what it said" in json.dumps(outcome)) == has_token


def test_those_that_wait_for_the_outcome_are_counted(server: CoordinatorProcess) -> None:
    with HonestRun(server.port) as run, contextlib.ExitStack() as opened:
        guests = [opened.enter_context(visitor(server.port)) for _ in range(70)]
        for guest in guests:
            guest.send(*(query("outcome") for _ in range(19)), last := query("outcome"))
            assert ask(guest, query("status"))["result"]["round"] == 1  # It has been taken.
        run.finish()
        assert answer_to(guests[-1], last)["result"]["end"] == "SUCCEEDED"
        assert [guest.until(protocol.Answer) is not None for guest in guests[:-1]] == [False] * 6 + [True] * 63


@promise("""steering.agent-asked-answer-asking: Only the agent that was asked can answer. Asking neither creates a run
    nor keeps it.""")
def test_only_the_agent_that_was_asked_can_answer(tmp_path: Path, token_file: str) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def answer(_: bytes) -> bytes:
        is_asked.set()
        assert may_answer.wait(30)
        return b'{"result": "true"}'

    forged = [protocol.Answer(number, b'{"result": "forged"}') for number in range(1, 200)]
    with (
        coordinator(tmp_path, "--token-file", token_file) as server,
        HonestRun(server.port, token_file, answer) as run,
        visitor(server.port, token=TOKEN) as guest,
        member(server.port, "intruder", token=TOKEN) as intruder,
    ):
        guest.send(question := query("logs", run.names[0]))
        assert is_asked.wait(30)
        intruder.send(*forged)
        assert intruder.ask("check", "anything").problem == ""
        may_answer.set()
        assert answer_to(guest, question) == {"result": "true"}


def test_what_a_node_calls_itself_is_passed_on_as_text(server: CoordinatorProcess) -> None:
    name = (ESCAPE * 4)[:250]
    with member(server.port, name, address=name) as hostile, visitor(server.port) as guest:
        hostile.ask("check", "anything")
        assert [each["node_id"] for each in ask(guest, query("status"))["result"]["nodes"]] == [name]


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


def test_junk_in_a_question_is_answered_or_refused(server: CoordinatorProcess, run: HonestRun) -> None:
    """No number that a peer sends sizes anything."""
    with visitor(server.port) as guest:
        for name, body in JUNK.items():
            answer = ask(guest, protocol.Query(next(_numbers), body))
            assert ("error" in answer) != ("page" in name), name
            assert "error" in answer or len(answer["result"]["nodes"]) == 2, name


@pytest.mark.parametrize("message", [protocol.Query(1, bytes(5000)), protocol.Answer(1, bytes((1 << 19) + 1))])
def test_what_is_too_long_costs_its_sender_the_connection(
    server: CoordinatorProcess, run: HonestRun, message: Any
) -> None:
    with member(server.port) as hostile:
        hostile.send(message)
        assert hostile.is_hung_up()


def test_visitors_are_counted_and_let_in_again(tmp_path: Path) -> None:
    with (
        coordinator_thread(tmp_path, limits=Limits(visitors=3)) as port,
        HonestRun(port),
        contextlib.ExitStack() as opened,
    ):
        first, *others = [opened.enter_context(visitor(port)) for _ in range(3)]
        with pytest.raises(TurnedAway, match="3 others are asking already"):
            visitor(port)
        first.close()

        def next_one() -> Peer | None:
            with contextlib.suppress(TurnedAway):
                return opened.enter_context(visitor(port))
            return None

        others.append(support.wait_until(next_one, "there is room"))
        assert [ask(guest, query("status"))["result"]["round"] for guest in others] == [1, 1, 1]


def test_agents_are_asked_at_a_bounded_rate(tmp_path: Path) -> None:
    asked: list[bytes] = []
    limits = Limits(relays_a_second=1, relays_at_once=5, relays_unanswered=3)
    with (
        coordinator_thread(tmp_path, limits=limits) as port,
        HonestRun(port, answer=lambda body: asked.append(body) or b"{}") as run,
        visitor(port) as guest,
    ):
        guest.send(*(query("status", run.names[0]) for _ in range(39)))
        assert "agents are asked at most 1 times a second" in ask(guest, query("status", run.names[0]))["error"]
        run.check()
        support.wait_until(lambda: len(asked) >= 5, "as many were asked as may be at once")
        assert len(asked) <= 6
