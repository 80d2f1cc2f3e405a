"""Whose turn it is: no job and no share holds up another."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.rendezvous.coordinator.turns import Share, Turns


class World:
    """A clock that only work moves on, and a loop whose turns are counted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self._next: list[Callable[[], None]] = []
        self.turns = Turns(lambda: self.now, self._next.append)

    def turn(self) -> None:
        calls, self._next[:] = list(self._next), []
        for call in calls:
            call()

    @property
    def is_idle(self) -> bool:
        return not self._next


class Talker:
    """A connection with so many messages, each of which takes so long."""

    def __init__(self, world: World, share: Share, name: str, count: int, cost_s: float = 0.0001) -> None:
        self._world, self._share, self._name = world, share, name
        self._left, self._cost_s = count, cost_s

    def take_turn(self, now: float, ends_at: float) -> None:
        while self._left:
            self._left -= 1
            self._world.now += self._cost_s
            self._world.done.append(self._name)
            if self._world.now >= ends_at:
                break
        if self._left:
            self._world.turns.wait(self._share, self)


def test_what_comes_alone_is_done_at_once_and_needs_no_turn() -> None:
    world, share = World(), Share()
    for _ in range(4):
        assert world.turns.offer(share, Talker(world, share, "a", 1))
    assert world.done == ["a"] * 4
    assert world.is_idle


def test_a_talkative_run_does_not_hold_up_another() -> None:
    world, chatty, modest = World(), Share(), Share()
    world.turns.offer(chatty, Talker(world, chatty, "chatty", 100_000))
    assert world.now < 0.03
    for _ in range(20):
        before = world.now
        assert world.turns.offer(modest, Talker(world, modest, "modest", 1))  # In the very turn in which it comes.
        world.turn()
        assert world.now - before < 0.03
    assert world.done.count("modest") == 20


def test_each_of_many_runs_has_a_part_of_a_turn() -> None:
    world = World()
    shares = [Share() for _ in range(10)]
    for at, share in enumerate(shares):
        world.turns.offer(share, Talker(world, share, f"{at}", 10_000))
    assert world.now < 0.07  # All in one turn, in which none has to wait for the next.
    for _ in range(20):
        world.turn()
    world.done.clear()
    before = world.now
    for _ in range(10):
        world.turn()
    assert 0.1 < world.now - before < 0.4
    counts = [world.done.count(f"{at}") for at in range(10)]
    assert max(counts) <= 1.2 * min(counts)


def test_the_first_turn_of_hundreds_of_runs_is_bounded_too() -> None:
    world = World()
    for _ in range(256):
        share = Share()
        world.turns.offer(share, Talker(world, share, "x", 10_000))
    assert world.now < 0.5


def test_connections_of_a_run_take_turns() -> None:
    world, share = World(), Share()
    world.turns.offer(share, Talker(world, share, "chatty", 100_000))
    assert not world.turns.offer(share, Talker(world, share, "modest", 3))
    world.turn()
    assert world.done.count("modest") == 3


def test_a_costly_message_is_paid_for_later() -> None:
    world, costly, other = World(), Share(), Share()
    world.turns.offer(costly, Talker(world, costly, "costly", 50, 0.1))
    world.turns.offer(other, Talker(world, other, "other", 100_000))
    for _ in range(100):
        world.turn()
    spent_s = world.done.count("costly") * 0.1
    assert 0.5 < spent_s / (world.done.count("other") * 0.0001) < 2.0


def test_all_is_done_in_the_end() -> None:
    world = World()
    shares = [Share() for _ in range(3)]
    for at in range(30):
        world.turns.offer(shares[at % 3], Talker(world, shares[at % 3], f"{at}", 100))
    for _ in range(1000):
        world.turn()
    assert len(world.done) == 3000
    assert world.is_idle
