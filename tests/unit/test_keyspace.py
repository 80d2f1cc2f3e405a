"""What a run keeps in etcd: keys that cannot be mistaken for each other, and values that cannot be misread."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.errors import UserError
from holdfast.rendezvous import keyspace, messages
from holdfast.rendezvous.keyspace import Epitaph, Junk, Keyspace, Page, Statement, Telling, Tellings
from holdfast.rendezvous.outcome import End, Failure, Outcome
from holdfast.rendezvous.vocabulary import Memory, Settings, Snapshot, Stage
from holdfast.rendezvous.world import NodeFacts, World

A, B = NodeFacts("a", 2, "host", 7, "trainer", 4, 1), NodeFacts("b")
WORLD = World(3, (A, B), 1)
FAILURE = Failure("a", 0, 1, "ValueError", "it broke", is_consequence=True)
OUTCOME = Outcome(End.FAILED, "no restarts are left", FAILURE)
PLACE = WORLD.places()[0]

VALUES: list[Any] = [
    Statement(1, (messages.Join(A, Settings(), 3, "a/1", FAILURE),)),
    Statement(1, (messages.Return(A, Settings(), PLACE, Stage.FINISHED), messages.Failed(3, FAILURE))),
    Statement(1, (messages.Leaving(), messages.Left(), messages.Close("enough"))),
    Tellings(1, (Telling(40, 1, "a/2", messages.Sealed("a/2", PLACE)), Telling(40, 2, "a/2", messages.Stop(3, "b")))),
    Tellings(1, (Telling(41, 1, "a/2", messages.Ended(OUTCOME)), Telling(41, 3, "a/2", messages.Notice("hello")))),
    Tellings(1, (Telling(41, 1, "a/2", messages.Refused("no")), Telling(41, 3, "a/2", messages.Expelled("late")))),
    Tellings(1, (Telling(41, 1, "a/2", messages.Progress(1, 2, 3, 4.5)),)),
    Page(1, Snapshot(Memory())),
    Page(1, Snapshot(Memory(3, 1, None, Settings()), WORLD, True, (("a/2", FAILURE),), (("b/0", "left"),), ("b/0",))),
    Page(1, Snapshot(Memory(3, 1, OUTCOME, Settings()), is_recovering=True, has_lost_nodes=True), 40),
    Epitaph(1, OUTCOME),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_is_written_is_read(value: Any) -> None:
    assert keyspace.decode(type(value), keyspace.encode(value)) == value


JUNK = {
    "nothing": b"",
    "text": b"hello",
    "no map": msgspec.msgpack.encode([1, 2]),
    "another kind": keyspace.encode(Tellings(1, ())),
    "a later version": keyspace.encode(Statement(2, ())),
    "what nobody says": msgspec.msgpack.encode({"version": 1, "said": [{"type": "Sealed", "key": "a"}]}),
    "what cannot be": keyspace.encode(Statement(1, (messages.Join(NodeFacts(""), Settings()),))),
    "deep": b"\x91" * 5000,
}


@pytest.mark.parametrize("name", JUNK)
def test_junk(name: str) -> None:
    with pytest.raises(Junk):
        keyspace.decode(Statement, JUNK[name])


def test_junk_says_what_is_wrong_with_it() -> None:
    with pytest.raises(Junk, match="version 2 of the protocol, this holdfast speaks 1"):
        keyspace.decode(Statement, JUNK["a later version"])


def test_the_keys_of_a_run() -> None:
    keys = Keyspace("/some/where/", "job")
    assert keys.root == b"/some/where/job/"
    assert [keys.leader, keys.run, keys.turn] == [keys.root + each for each in (b"leader", b"run", b"turn")]
    assert keys.node("n") == b"/some/where/job/nodes/n"
    assert keys.told_to("n") == b"/some/where/job/told/n"


NAMES = ["n", "host:1", "a/b", "../leader", "ä ö", "%2F", "n'"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_part_of_a_key(name: str) -> None:
    keys = Keyspace("holdfast", name)
    assert keys.root.count(b"/") == 3
    assert keys.node(name).count(b"/") == 4
    assert keys.node_of(keys.node(name)) == name


def test_no_two_nodes_share_a_key() -> None:
    keys = Keyspace("holdfast", "job")
    every = [*map(keys.node, NAMES), *map(keys.told_to, NAMES), keys.leader, keys.run, keys.turn]
    assert len(set(every)) == len(every)


def test_a_prefix_must_be_there() -> None:
    with pytest.raises(UserError, match="prefix"):
        Keyspace("/", "job")


def test_an_epitaph_is_beside_the_run_and_not_of_any_other() -> None:
    keys = Keyspace("/holdfast", "job")
    assert keys.ended_of(40) == b"/holdfast/job:ended/40"
    assert keys.origin_of(keys.ended_of(40)) == 40
    assert keys.origin_of(keys.ended + b"what") == 0
    assert not keys.ended.startswith(keys.root)
    assert not Keyspace("/holdfast", "job:ended").root.startswith(keys.ended)


def test_who_is_told_something() -> None:
    keys = Keyspace("/holdfast", "job")
    assert keys.node_told(keys.told_to("a/b c")) == "a/b c"
