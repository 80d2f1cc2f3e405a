"""The pump: the effects of a machine's answers, in their order, whatever the storage takes its time for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.rendezvous.coordinator import pump as pumps
from holdfast.rendezvous.coordinator.pump import Pump
from holdfast.rendezvous.membership import protocol
from holdfast.rendezvous.membership.model import Memory, Notice
from holdfast.rendezvous.membership.protocol import HeartbeatAnswer, Introduction, Opened, Ready, TermRaised
from tests.promises import proves


class Script:
    """A machine that answers each event with the next `Ready`; it takes `TermRaised` without a word."""

    def __init__(self, *answers: Ready) -> None:
        self.answers = [*answers]
        self.taken: list[Any] = []

    def step(self, event: Any, now: float) -> Ready:
        self.taken.append(event)
        return Ready() if isinstance(event, TermRaised) else self.answers.pop(0)

    def next_deadline(self) -> float | None:
        return 7.0


class Bench:
    """Everything around a pump. Writes are durable when the test says so."""

    def __init__(self, *answers: Ready) -> None:
        self.done: list[Any] = []
        self.writes: list[Callable[[], None]] = []
        self.later: list[Callable[[], None]] = []
        self.is_in_office = True
        self.script = Script(*answers)
        wake = lambda at: self.done.append(f"wake at {at:g}")  # noqa: E731
        self.pump = Pump(self.script, self, self, lambda: 1.0, wake, self.later.append, lambda *_: None)  # type: ignore[arg-type]

    def feed(self, times: int = 1) -> list[Any]:
        for _ in range(times):
            self.pump.feed(Opened(1, Introduction()))
        return self.told()

    def told(self) -> list[Any]:
        done, self.done = [each for each in self.done if not str(each).startswith("wake")], []
        return done

    # Storage and transport.

    def may_serve(self) -> bool:
        return self.is_in_office

    def write(self, memory: Memory, then: Callable[[], None]) -> None:
        self.done.append(f"write {memory.last_round}")
        self.writes.append(then)

    def raise_term(self, heard: int, then: Callable[[int], None]) -> None:
        self.done.append(f"raise {heard}")
        self.writes.append(lambda: then(heard + 1))

    def send(self, conns: tuple[int, ...], message: protocol.ToClient) -> None:
        self.done.append((conns, message.text if isinstance(message, Notice) else type(message).__name__))

    def close(self, conn: int, reason: str) -> None:
        self.done.append(f"close {conn} {reason}")

    def forget(self) -> None:
        self.done.append("forget")

    def fail(self, error: Exception) -> None:
        self.done.append(f"fail {error}")


def telling(text: str, *conns: int) -> Any:
    return [(conns or (1,), Notice(text))]


def at_round(number: int) -> Memory:
    return Memory(last_round=number)


@proves("coordinator.nodes-told-written-down")
def test_what_follows_from_a_write_waits_for_it_and_keeps_its_order() -> None:
    bench = Bench(
        Ready(persist=at_round(1), send_after_persist=telling("one")),
        Ready(send_after_persist=telling("two"), close=[(1, "expelled")]),
        Ready(persist=at_round(2), send_after_persist=telling("three"), forget=True),
    )
    assert bench.feed(3) == ["write 1", "write 2"]
    bench.writes[0]()
    assert bench.told() == [((1,), "one"), ((1,), "two"), "close 1 expelled"]
    bench.writes[1]()
    assert bench.told() == [((1,), "three"), "forget"]


@proves("coordinator.connection-holds-slice-time")
def test_answers_to_heartbeats_wait_for_nothing() -> None:
    answer: Any = [((1,), HeartbeatAnswer(1))]
    bench = Bench(Ready(persist=at_round(1), send_after_persist=telling("one")), Ready(answer))
    assert bench.feed(2) == ["write 1", ((1,), "HeartbeatAnswer")]


def test_a_term_is_raised_before_anything_else_is_told() -> None:
    bench = Bench(Ready(raise_term=7), Ready(send_after_persist=telling("one")))
    assert bench.feed(2) == ["raise 7"]
    bench.writes[0]()
    assert bench.script.taken[2:] == [TermRaised(8)]
    assert bench.told() == [((1,), "one")]


def test_one_durable_write_covers_those_before_it() -> None:
    bench = Bench(
        Ready(persist=at_round(1), send_after_persist=telling("one")),
        Ready(persist=at_round(2), send_after_persist=telling("two")),
    )
    bench.feed(2)
    bench.writes[1]()
    assert bench.told() == [((1,), "one"), ((1,), "two")]


def test_many_nodes_are_told_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pumps, "_SENT_IN_A_TURN", 2)
    sends = [each for number in range(5) for each in telling(str(number), number)]
    answer: Any = [((9,), HeartbeatAnswer(1))]
    bench = Bench(
        Ready(send_after_persist=sends, close=[(0, "")]), Ready(answer), Ready(send_after_persist=telling("last"))
    )
    assert [text for _, text in bench.feed()] == ["0", "1"]
    assert bench.feed(2) == [((9,), "HeartbeatAnswer")]
    bench.later.pop()()
    assert [text for _, text in bench.told()] == ["2", "3"]
    bench.later.pop()()
    assert bench.told() == [((4,), "4"), "close 0 ", ((1,), "last")]
    assert not bench.later


def test_nothing_is_done_out_of_office() -> None:
    bench = Bench(Ready(persist=at_round(1), send_after_persist=telling("one")))
    bench.feed()
    bench.is_in_office = False
    bench.writes[0]()
    assert bench.feed() == []


def test_nothing_is_done_after_the_end() -> None:
    bench = Bench(Ready(persist=at_round(1), send_after_persist=telling("one")))
    bench.feed()
    bench.pump.close()
    bench.writes[0]()
    assert bench.feed() == []


def test_a_machine_that_fails_is_reported() -> None:
    bench = Bench()
    assert bench.feed() == ["fail pop from empty list"]


def test_the_machine_is_asked_for_its_next_deadline_once_a_turn() -> None:
    bench = Bench(Ready(), Ready())
    bench.pump.feed(Opened(1, Introduction()))
    bench.pump.feed(Opened(2, Introduction()))
    assert bench.done == []
    bench.later.pop()()
    assert (bench.done, bench.later) == (["wake at 7"], [])
