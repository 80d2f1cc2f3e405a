"""Whose turn it is: no connection holds up another, and no turn of the loop is long."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.rendezvous.coordinator.turns import Turns


class World:
    """A clock that only work moves on, and a loop whose turns are counted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self._next: list[Callable[[], None]] = []
        self.turns = Turns(lambda: self.now, self._next.append)

    def offer(self, name: str, count: int = 1, cost_s: float = 0.0001, *, is_member: bool = True) -> bool:
        """A connection with so many messages, each of which takes so long."""
        return self.turns.offer(Talker(self, name, count, cost_s, is_member))

    def turn(self) -> float:
        """How long it took."""
        began = self.now
        calls, self._next[:] = list(self._next), []
        for call in calls:
            call()
        return self.now - began

    @property
    def is_idle(self) -> bool:
        return not self._next


class Talker:
    def __init__(self, world: World, name: str, count: int, cost_s: float, is_member: bool) -> None:
        self._world, self._name, self._left, self._cost_s = world, name, count, cost_s
        self.is_member = is_member

    def take_turn(self, ends_at: float) -> bool:
        while self._left:
            self._left -= 1
            self._world.now += self._cost_s
            self._world.done.append(self._name)
            if self._world.now >= ends_at:
                break
        return self._left > 0


def test_a_message_that_comes_alone_is_taken_at_once() -> None:
    world = World()
    for _ in range(4):
        assert world.offer("a")
    assert world.done == ["a"] * 4
    world.turn()
    assert world.is_idle


def test_a_talkative_connection_does_not_hold_up_another() -> None:
    world = World()
    assert not world.offer("chatty", 100_000)
    for number in range(1, 21):
        assert world.turn() < 0.03
        assert world.offer("modest"), "in the turn in which it comes"
        assert world.done.count("modest") == number


def test_members_that_wait_have_equal_parts_of_each_turn() -> None:
    world = World()
    for number in range(10):
        world.offer(f"{number}", 10_000)
    assert world.now < 0.03, "what comes when the turn is over has to wait"
    for _ in range(20):
        assert world.turn() < 0.03
    counts = [world.done.count(f"{number}") for number in range(10)]
    assert max(counts) <= 1.2 * min(counts)


def test_strangers_share_what_a_turn_has_and_members_do_not_wait_for_them() -> None:
    world = World()
    for _ in range(5000):
        world.offer("stranger", 100, is_member=False)
    for number in range(1, 21):
        world.offer("member", 10)
        assert world.turn() < 0.06
        assert world.done.count("member") == 10 * number
    assert world.done.count("stranger") > 1000


def test_all_is_done_in_the_end() -> None:
    world = World()
    for number in range(30):
        world.offer(f"{number}", 100, is_member=bool(number % 3))
    for _ in range(1000):
        world.turn()
    assert len(world.done) == 3000
    assert world.is_idle
