"""One term of a leader: what it makes of statements, and what it writes.

A script is a list of (time, what happens, what is written): whom it tells what, and what the run looks like if that has
changed. Unless the script says otherwise every write is carried out at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast.rendezvous import keyspace, messages, reign
from holdfast.rendezvous.elected_words import Forget, Found, Load, Write
from holdfast.rendezvous.keyspace import Epitaph, Junk, Page, Statement, Tellings
from holdfast.rendezvous.outcome import End, Failure, Outcome
from holdfast.rendezvous.reign import Reign
from holdfast.rendezvous.restart import RestartPolicy
from holdfast.rendezvous.vocabulary import Memory, Settings, Snapshot, Stage
from holdfast.rendezvous.world import NodeFacts, World

TERM = 40
ORIGIN = 30
PAIR = Settings(2, 2, last_call_s=5.0, lease_s=5.0, policy=RestartPolicy(1))
CRASH = Failure("a", 0, text="a broke")
NOTHING = Snapshot(Memory())


def facts(key: str, rank: int | None = None) -> NodeFacts:
    name, _, incarnation = key.partition("/")
    return NodeFacts(name, int(incarnation or 0), name, requested_rank=rank)


A, B, C = facts("a"), facts("b"), facts("c")
WORLD = World(1, (A, B))
FIXED = Memory(0, 0, None, PAIR)
RUNNING = Snapshot(replace(FIXED, last_round=1), WORLD)
STOPPING = replace(RUNNING, is_stopping=True)


def sealed(world: World, key: str) -> Any:
    return messages.Sealed(key, world.places()[world.keys.index(key)])


def join(node: NodeFacts, last_round: int = 0, replaces: str = "", failure: Any = None) -> Any:
    return messages.Join(node, PAIR, last_round, replaces, failure)


def member(node: NodeFacts, stage: Stage = Stage.RUNNING, world: World = WORLD) -> Any:
    return messages.Return(node, PAIR, world.places()[world.keys.index(node.key)], stage)


def found(*said: Any, at: int = 1, origin: int = 0) -> Found:
    return Found(keyspace.encode(Statement(keyspace.VERSION, said, origin)), at, at, 1)


class Leader:
    """A reign and what it has written; `written` are the last tellings of each node, `run` the last snapshot."""

    def __init__(
        self,
        snapshot: Snapshot | None = None,
        told: tuple[str, ...] = (),
        ended: tuple[tuple[int, bytes], ...] = (),
        **nodes: tuple[Any, ...],
    ) -> None:
        self.reign = Reign(TERM)
        self.now = 0.0
        self.run: Snapshot | None = None
        self.told: dict[str, list[Any]] = {}
        self.numbers: list[int] = []
        self.removed: list[str] = []
        self.epitaph: Any = None
        page = Found(keyspace.encode(Page(keyspace.VERSION, snapshot, ORIGIN)), 1, 1) if snapshot else None
        self._do(lambda: self.reign.load(page, _present(nodes), self.now, told, ended))

    def see(self, **nodes: tuple[Any, ...] | None) -> Leader:
        changes = tuple((name, found(*said) if said is not None else None) for name, said in nodes.items())
        return self.see_found(*changes)

    def see_found(self, *changes: tuple[str, Found | None]) -> Leader:
        return self._do(lambda: self.reign.see(changes, self.now))

    def read_again(self, **nodes: tuple[Any, ...]) -> Leader:
        return self._do(lambda: self.reign.load(None, _present(nodes), self.now))

    def wait(self, until: float) -> Leader:
        self.now = until
        return self._do(lambda: self.reign.time_passed([], self.now))

    def _do(self, something: Callable[[], Any]) -> Leader:
        self.run, self.told = None, {}
        something()
        while commands := self.reign.write(self.now):
            for command in commands:
                self._take(command)
        return self

    def _take(self, command: Any) -> None:
        if not isinstance(command, Write):
            self.told["etcd"] = [command]
            return
        if command.run is not None:
            self.run = keyspace.decode(Page, command.run).snapshot
        self.removed += command.removed
        self.epitaph = command.epitaph
        for name, value in command.told:
            items = keyspace.decode(Tellings, value).items
            assert all(item.term == TERM for item in items)
            assert [item.number for item in items] == sorted({item.number for item in items})
            self.numbers.append(items[-1].number)
            self.told[name] = [item.message for item in items]
        self.reign.was_written(command.number, self.now)


def _present(nodes: dict[str, tuple[Any, ...]]) -> tuple[tuple[str, Found], ...]:
    return tuple((name, found(*said, at=at)) for at, (name, said) in enumerate(nodes.items()))


def both(snapshot: Snapshot | None = RUNNING) -> Leader:
    return Leader(snapshot, a=(member(A),), b=(member(B),))


def test_the_first_word_of_a_run() -> None:
    leader = Leader()
    assert leader.run is None, "nobody has joined"
    leader.see(a=(join(A),))
    assert leader.run == Snapshot(FIXED)
    leader.see(b=(join(B),))
    assert leader.run == RUNNING
    assert leader.told == {"a": [sealed(WORLD, "a/0")], "b": [sealed(WORLD, "b/0")]}


def test_statements_are_taken_in_the_order_of_their_change() -> None:
    leader = Leader(None, b=(join(B),), a=(join(A),))
    assert leader.run is not None
    assert leader.run.world == World(1, (B, A))


def test_a_round_that_runs_is_gone_on_with() -> None:
    leader = both()
    assert leader.run is None
    assert leader.told == {}


@pytest.mark.parametrize("absent", ["a", "b", "a b"])
def test_half_of_the_members_were_told(absent: str) -> None:
    """The leader before has sealed the round, and was killed in the middle of telling."""
    said = {name: (join(facts(name)),) if name in absent.split() else (member(facts(name)),) for name in "ab"}
    leader = Leader(RUNNING, **said)
    assert leader.run is None
    assert leader.told == {name: [sealed(WORLD, f"{name}/0")] for name in absent.split()}
    for name in absent.split():
        leader.see(**{name: (member(facts(name)),)})
        assert leader.told == {}


def test_half_of_them_were_told_that_the_round_is_stopped() -> None:
    leader = Leader(STOPPING, a=(join(A, 1),), b=(member(B),))
    assert leader.told == {"b": [messages.Stop(1, "the round was stopped meanwhile")]}
    leader.see(b=(join(B, 1),))
    assert leader.run is not None
    assert leader.run.world == World(2, (A, B))


def test_a_member_that_is_not_there_any_more_is_lost() -> None:
    leader = Leader(RUNNING, a=(member(A),))
    assert leader.told == {"a": [messages.Stop(1, "b is lost: its lease ended")]}
    departed = (("b/0", "b is lost: its lease ended"),)
    assert leader.run == replace(STOPPING, departed=departed, has_lost_nodes=True)


def test_what_was_known_of_the_failure_is_known() -> None:
    stopping = replace(STOPPING, failures=(("a/0", CRASH),))
    leader = Leader(stopping, a=(join(A, 1, failure=CRASH),), b=(join(B, 1),))
    assert leader.run is not None
    assert leader.run.memory.restarts_used == 1


def test_a_finished_member_that_missed_the_stop() -> None:
    """The round is judged already, and nobody has told it."""
    forming = Snapshot(RUNNING.memory, previous=("a/0", "b/0"))
    leader = Leader(forming, a=(member(A, Stage.FINISHED),), b=(join(B, 1),))
    assert leader.told == {"a": [messages.Stop(1, "the round was stopped meanwhile")]}
    leader.see(a=(join(A, 1),))
    assert leader.run is not None
    assert leader.run.world == World(2, (A, B))


def test_the_lease_of_a_member_ends() -> None:
    leader = both().see(b=None)
    assert leader.told == {"a": [messages.Stop(1, "b is lost: its lease ended")]}


def test_a_lease_that_ends_after_the_last_word() -> None:
    leader = both().see(b=(member(B), messages.Left()))
    assert leader.told == {"a": [messages.Stop(1, "b left")]}
    leader.see(b=None)
    assert leader.told == {}


def test_another_incarnation_replaces_the_one_before() -> None:
    leader = both().see(b=(join(facts("b/1"), 1, "b/0"),))
    assert leader.told["a"] == [messages.Stop(1, "b has lost its place")]
    assert leader.run is not None
    assert leader.run.departed == (("b/0", "b has lost its place"),)


def test_the_failure_of_a_round() -> None:
    leader = both().see(a=(member(A), messages.Failed(1, CRASH)))
    assert leader.told == {name: [messages.Stop(1, "a broke")] for name in "ab"}
    assert leader.run == replace(STOPPING, failures=(("a/0", CRASH),))
    leader.see(a=(join(A, 1, failure=CRASH),))
    assert leader.told == {}
    leader.see(b=(join(B, 1),))
    assert leader.run is not None
    assert leader.run.memory.restarts_used == 1


def test_who_has_missed_a_seal_is_told_of_it_and_of_the_stop() -> None:
    leader = Leader(None, a=(join(A),), b=(join(B),))
    leader.see(a=(member(A), messages.Failed(1, CRASH)))
    assert leader.told["b"] == [sealed(WORLD, "b/0"), messages.Stop(1, "a broke")]


def test_a_notice_rides_along_once() -> None:
    """The third stands by; the next telling does not repeat it."""
    leader = Leader(RUNNING, a=(member(A),), b=(member(B),), c=(join(C),))
    assert leader.told == {"c": [messages.Notice("round 1 runs with 2 nodes, this node stands by")]}
    leader.see(a=None)
    leader.see(b=(join(B, 1),))
    assert leader.told["c"] == [sealed(World(2, (C, B)), "c/0")]


def test_progress_replaces_progress() -> None:
    leader = Leader(None, a=(join(A),)).wait(1.0)
    assert leader.told == {"a": [messages.Progress(1, 2, 2, 599.0)]}


def test_what_nobody_can_read_is_no_news() -> None:
    leader = both()
    leader.reign.see((("c", Found(b"junk", 1, 1)), ("b", Found(b"\xc1", 1, 1)), ("a", found(at=3))), 1.0)
    assert leader.reign.write(1.0) == []
    leader.see(b=None)
    assert leader.told == {"a": [messages.Stop(1, "b is lost: its lease ended")]}


def test_a_run_that_nobody_can_read_is_an_error() -> None:
    with pytest.raises(Junk, match="Page"):
        Reign(TERM).load(Found(b"junk", 1, 1), (), 0.0)


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ({"a": (member(A),), "b": (member(B),)}, {}),
        ({"a": (member(A),)}, {"a": [messages.Stop(1, "b is lost: its lease ended")]}),
        (
            {"a": (member(A),), "b": (member(B), messages.Failed(1, replace(CRASH, text="b broke")))},
            {name: [messages.Stop(1, "b broke")] for name in "ab"},
        ),
    ],
    ids=["nothing happened", "one is gone", "one has failed"],
)
def test_the_watch_was_interrupted(nodes: dict[str, Any], told: dict[str, Any]) -> None:
    assert both().read_again(**nodes).told == told


def test_close() -> None:
    leader = both().see(b=(member(B), messages.Close("enough")))
    outcome = Outcome(End.CLOSED, "enough")
    assert leader.told == {name: [messages.Ended(outcome)] for name in "ab"}
    assert leader.run is not None
    assert leader.run.memory.outcome == outcome
    leader.see(a=(messages.Left(),)).see(a=None).see(b=(messages.Left(),)).see(b=None)
    assert leader.told == {}
    assert leader.reign.is_ending
    assert leader.wait(10.0).told == {"etcd": [Forget(TERM, ORIGIN)]}
    assert not leader.reign.is_ending
    assert leader.reign.next_deadline() is None


def test_a_run_that_has_succeeded_is_forgotten_when_everybody_knows() -> None:
    leader = both().see(a=(member(A, Stage.FINISHED),)).see(b=(member(B, Stage.FINISHED),))
    ended = messages.Ended(Outcome(End.SUCCEEDED, "all workers have succeeded"))
    assert leader.told == {"a": [ended], "b": [ended]}
    assert leader.see(a=(messages.Left(),)).told == {}
    assert leader.see(b=(messages.Left(),)).told == {"etcd": [Forget(TERM, ORIGIN)]}


def test_a_run_is_not_forgotten_before_its_end_is_written() -> None:
    """A write takes longer than the run is remembered, and meanwhile everybody has succeeded."""
    leader = both()
    reign = leader.reign
    reign.see((("c", found(join(C))),), 1.0)
    (slow,) = reign.write(1.0)
    assert isinstance(slow, Write)
    finished = ((name, found(member(facts(name), Stage.FINISHED))) for name in "ab")
    reign.see(tuple(finished), 1.0)
    reign.time_passed([], 20.0)
    assert reign.write(20.0) == []
    assert reign.next_deadline() is None
    reign.was_written(slow.number, 21.0)
    (end,) = reign.write(21.0)
    assert isinstance(end, Write)
    assert end.is_last
    assert [name for name, _ in end.told] == ["a", "b", "c"]
    reign.was_written(end.number, 22.0)
    assert reign.write(22.0) == []
    assert reign.next_deadline() == 32.0
    reign.time_passed([], 32.0)
    assert reign.write(32.0) == [Forget(TERM)]
    assert reign.next_deadline() is None


def test_somebody_who_comes_when_the_run_should_be_forgotten() -> None:
    """The request to forget it got lost, and the one who asked for it still leads."""
    outcome = Outcome(End.CLOSED, "enough")
    leader = Leader(Snapshot(replace(FIXED, outcome=outcome)))
    assert leader.wait(10.0).told == {"etcd": [Forget(TERM)]}
    assert leader.reign.next_deadline() is None
    leader.now = 30.0
    assert leader.see(c=(join(C),)).told == {"c": [messages.Ended(outcome)]}
    assert leader.reign.next_deadline() == 40.0
    assert leader.see(c=(messages.Left(),)).told == {}
    assert leader.wait(40.0).told == {"etcd": [Forget(TERM)]}
    assert leader.see(c=None).told == {}


def test_an_ended_run_is_told_by_the_next_leader() -> None:
    outcome = Outcome(End.FAILED, "enough")
    leader = Leader(Snapshot(replace(FIXED, outcome=outcome)), a=(member(A),), c=(join(C),), b=(messages.Left(),))
    assert leader.told == {"a": [messages.Ended(outcome)], "c": [messages.Ended(outcome)]}


def test_one_write_at_a_time() -> None:
    leader = both()
    reign = leader.reign
    reign.see((("b", None),), 1.0)
    (first,) = reign.write(1.0)
    assert isinstance(first, Write)
    reign.see((("a", found(join(A, 1))),), 1.0)
    assert reign.write(1.0) == []
    assert reign.time_passed(["write"], 1.0) == [first]
    assert reign.time_passed(["load", "write"], 1.0) == [Load(TERM), first]
    reign.was_written(first.number - 1, 1.0)
    assert reign.write(1.0) == []
    reign.was_written(first.number, 1.0)
    (second,) = reign.write(1.0)
    assert isinstance(second, Write)
    assert second.number > first.number
    assert reign.time_passed(["write"], 1.0) == [second]


def test_a_reign_counts_on_where_the_one_before_has_stopped() -> None:
    reign = Reign(TERM, 17)
    reign.load(None, (("a", found(join(A))),), 0.0)
    (write,) = reign.write(1.0)
    assert isinstance(write, Write)
    assert write.number == 18


RANKED = facts("a", 0), facts("b", 1)
RANKED_RUN = Snapshot(replace(FIXED, last_round=1), World(1, RANKED))
AGAIN = facts("z", 1)


def ranked(**more: tuple[Any, ...]) -> Leader:
    world = World(1, RANKED)
    return Leader(RANKED_RUN, a=(member(RANKED[0], world=world),), b=(member(RANKED[1], world=world),), **more)


def test_a_rank_is_free_when_the_lease_of_its_last_owner_ends() -> None:
    """The agent of b was killed and started again, with another name and the same rank."""
    leader = ranked(z=(join(AGAIN),))
    assert leader.told == {}
    assert leader.reign.next_deadline() == 10.0
    leader.see(b=None)
    leader.see(a=(join(RANKED[0], 1),))
    assert leader.run is not None
    assert leader.run.world == World(2, (RANKED[0], AGAIN))


def test_a_rank_that_somebody_goes_on_to_claim() -> None:
    leader = ranked(z=(join(AGAIN),))
    assert leader.wait(9.9).told == {}
    refused = messages.Refused("rank 1 was asked for, but b has asked for it before")
    assert leader.wait(10.0).told == {"z": [refused]}


def test_a_new_leader_knows_that_the_last_owner_of_a_rank_is_gone() -> None:
    leader = Leader(RANKED_RUN, a=(member(RANKED[0], world=World(1, RANKED)),), z=(join(AGAIN),))
    assert set(leader.told) == {"a"}


@pytest.mark.parametrize("how", ["gone", "not there when it is read again"])
def test_who_waits_for_a_rank_may_go(how: str) -> None:
    leader = ranked(z=(join(AGAIN),))
    world = World(1, RANKED)
    if how == "gone":
        leader.see(z=None)
    else:
        leader.read_again(a=(member(RANKED[0], world=world),), b=(member(RANKED[1], world=world),))
    assert leader.told == {}
    assert leader.reign.next_deadline() is None


def test_after_the_end_nobody_waits_for_a_rank() -> None:
    outcome = Outcome(End.FAILED, "enough")
    ended = Snapshot(replace(FIXED, outcome=outcome))
    leader = Leader(ended, b=(join(RANKED[1]),), z=(join(AGAIN),))
    assert leader.told == {"b": [messages.Ended(outcome)], "z": [messages.Ended(outcome)]}


def test_a_snapshot_is_never_larger_than_etcd_takes() -> None:
    """All members fail with a long text; the texts are cut, nobody is left out."""
    failures = tuple((f"n{at}/0", Failure(f"n{at}", at, text="x" * 16_000)) for at in range(200))
    page = reign._page(Snapshot(Memory(1, 0), is_stopping=True, failures=failures), TERM)
    assert len(page) <= 1 << 20
    kept = keyspace.decode(keyspace.Page, page).snapshot.failures
    assert [key for key, _ in kept] == [key for key, _ in failures]
    assert all(failure.text.startswith("x" * 100) for _, failure in kept)


# What nobody needs any more.


def test_what_was_told_to_a_node_that_is_gone_is_removed() -> None:
    leader = both()
    assert leader.see(c=(join(C),)).told == {"c": [messages.Notice("round 1 runs with 2 nodes, this node stands by")]}
    assert leader.removed == []
    leader.see(c=None)
    assert leader.removed == ["c"]
    leader.see(b=None)
    assert leader.removed == ["c", "b"]
    assert leader.told == {"a": [messages.Stop(1, "b is lost: its lease ended")]}


def test_a_new_leader_removes_what_the_last_one_has_left() -> None:
    leader = Leader(RUNNING, ("a", "b", "c", "d"), a=(member(A),), d=(join(facts("d")),))
    assert leader.removed == ["b", "c"]
    assert leader.told.keys() == {"a"}


def test_who_is_told_something_anew_keeps_it() -> None:
    leader = both()
    leader.see_found(("b", None), ("b", found(join(facts("b/1"), 1, "b/0"))))
    assert leader.removed == ["b"]
    leader = both()
    leader.reign.see((("c", found(join(C))),), 0.0)
    leader.see_found(("c", None), ("c", found(join(facts("c/1"), 0, "c/0"))))
    assert leader.removed == []
    assert leader.told.keys() == {"c"}


def test_what_was_told_stays_after_the_end() -> None:
    """It is how somebody who was away hears of it."""
    leader = both().see(b=(member(B), messages.Close("enough")))
    leader.see(a=None, b=None)
    assert leader.removed == []


SUCCESS = Outcome(End.SUCCEEDED, "all workers have succeeded")


def epitaph(outcome: Outcome) -> bytes:
    return keyspace.encode(Epitaph(keyspace.VERSION, outcome))


def test_the_end_is_written_for_those_who_come_late() -> None:
    leader = both().see(a=(member(A, Stage.FINISHED),)).see(b=(member(B, Stage.FINISHED),))
    assert leader.epitaph == (ORIGIN, epitaph(SUCCESS))
    leader.see(a=(messages.Left(),)).see(b=None)
    assert leader.wait(10.0).told == {"etcd": [Forget(TERM)]}, "b has not said that it has heard"


def test_an_epitaph_is_short() -> None:
    cause = replace(CRASH, text="x" * 10_000)
    leader = both().see(a=(member(A), messages.Failed(1, cause))).see(b=(join(B, 1),)).see(a=(join(A, 1),))
    again = World(2, (A, B), 1)
    leader.see(a=(member(A, world=again), messages.Failed(2, cause)), b=(join(B, 2),)).see(a=(join(A, 2),))
    origin, value = leader.epitaph
    outcome = keyspace.decode(Epitaph, value).outcome
    assert (origin, outcome.end, len(outcome.cause.text if outcome.cause else "")) == (ORIGIN, End.FAILED, 1024)


@pytest.mark.parametrize("snapshot", [None, Snapshot(FIXED), RUNNING], ids=["nothing", "another run", "its round"])
def test_who_comes_late_hears_how_its_run_ended(snapshot: Snapshot | None) -> None:
    """Whatever is there by now under the same name is not its run."""
    leader = Leader(snapshot, (), ((20, epitaph(SUCCESS)),))
    leader.see_found(("c", found(join(facts("c/1"), 7, "c/0"), origin=20)))
    assert leader.told == {"c": [messages.Ended(SUCCESS)]}
    assert leader.see_found(("c", found(join(facts("c/1"), 7, "c/0"), origin=20))).told == {}
    assert leader.see(c=(messages.Left(),)).told == {}
    assert leader.see(c=None).removed[-1:] == ["c"]


@pytest.mark.parametrize("snapshot", [None, Snapshot(FIXED), RUNNING], ids=["nothing", "another run", "its round"])
def test_what_was_said_of_a_run_that_has_ended_is_not_said_of_this_one(snapshot: Snapshot | None) -> None:
    """The last word of a node outlives it by a lease."""
    leader = Leader(snapshot, (), ((20, epitaph(SUCCESS)),))
    leader.see_found(("c", found(messages.Left(), messages.Close("closed by the user"), origin=20)))
    assert (leader.run, leader.told) == (None, {})
    assert leader.see(c=None).run is None


@pytest.mark.parametrize("origin", [0, 19, ORIGIN])
def test_who_is_of_no_run_that_has_ended_takes_part(origin: int) -> None:
    junk = (19, b"junk")
    leader = Leader(Snapshot(FIXED), (), ((ORIGIN, epitaph(SUCCESS)), junk), a=(join(A),))
    assert leader.see_found(("b", found(join(B), origin=origin))).run == RUNNING


def test_a_run_that_never_began_is_nothing_without_its_last_node() -> None:
    leader = Leader(None, a=(join(A),))
    assert leader.reign.leave("a/0") == [Forget(TERM)]
    leader.see(b=None)
    assert leader.see(c=(join(C),)).reign.leave("a/0") == []


@pytest.mark.parametrize("how", ["a round", "another led", "somebody lost", "unwritten", "unread"])
def test_a_run_that_may_be_missed_stays(how: str) -> None:
    before = {"a round": RUNNING, "another led": Snapshot(FIXED)}.get(how)
    told = ("gone",) if how == "somebody lost" else ()
    leader = Leader(before, told, a=(member(A) if how == "a round" else join(A),))
    if how == "unwritten":
        leader.reign.see((("b", found(join(B))),), 0.0)
        leader.reign.write(0.0)
    reign = Reign(TERM) if how == "unread" else leader.reign
    assert reign.leave("a/0") == []


def test_etcd_has_lost_the_run() -> None:
    """Nothing is there, but nodes that remember. Others may have workers for another lease, also when another leads."""
    a, b = (messages.Join(facts(f"{name}/1"), PAIR, 4, f"{name}/0", None, 1) for name in "ab")
    found_out = Snapshot(Memory(4, 1, None, PAIR), is_recovering=True, has_lost_nodes=True)
    world = World(5, (facts("a/1"), facts("b/1")), 1)
    sealed_then = Snapshot(Memory(5, 1, None, PAIR), world, has_lost_nodes=True)
    first, second = Leader(None, a=(a,), b=(b,)), Leader(found_out, a=(a,), b=(b,))
    assert first.run == found_out
    for leader in (first, second):
        assert leader.wait(4.9).run is None
        assert leader.wait(5.0).run == sealed_then


@pytest.mark.parametrize(("origins", "origin"), [((0, 0), TERM), ((0, 20), 20), ((20, 19), 20), ((21, 20), 20)])
def test_a_run_that_etcd_has_lost_is_still_the_same(origins: tuple[int, int], origin: int) -> None:
    """The one of origin 21 has ended."""
    reign = Reign(TERM)
    nodes = tuple((name, found(join(facts(name)), origin=each)) for name, each in zip("ab", origins, strict=True))
    reign.load(None, nodes, 0.0, (), ((21, epitaph(SUCCESS)),))
    (write,) = reign.write(0.0)
    assert isinstance(write, Write)
    assert keyspace.decode(Page, write.run or b"").origin == origin
    assert {keyspace.decode(Tellings, value).origin for _, value in write.told} == {origin}


def test_a_fresh_run_waits_for_nobody() -> None:
    assert Leader(None, a=(join(A),), b=(join(B),)).run == RUNNING


def test_who_led_only_to_hear_of_the_end_leaves_nothing() -> None:
    leader = Leader(None, (), ((20, epitaph(SUCCESS)),))
    leader.see_found(("c", found(join(facts("c/1"), 7, "c/0"), origin=20)))
    assert leader.told == {"c": [messages.Ended(SUCCESS)]}
    assert leader.reign.leave("c/1") == [Forget(TERM)]
