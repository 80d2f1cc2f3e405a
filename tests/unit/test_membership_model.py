"""What a member knows of its world, how little that takes, and how settings differ."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib
from dataclasses import replace
from typing import Any

import pytest

from holdfast.rendezvous.membership.frames import MAX_MESSAGE_BYTES, encode
from holdfast.rendezvous.membership.model import (
    MAX_SHAPES,
    Admit,
    NodeFacts,
    Place,
    Sealed,
    Settings,
    World,
    is_loopback,
)
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from tests.promises import promise, proves

MEMBERS = (
    NodeFacts("a", address="h1", port=4, role="r", local_world_size=2, script="5c"),
    NodeFacts("b", address="h2", port=5, role="r", local_world_size=2),
    NodeFacts("c", address="h3", port=6, role="r", local_world_size=1),
    NodeFacts("d", address="h4", port=7, role="s", local_world_size=1),
    NodeFacts("e", address="h5", port=8, role="r", local_world_size=2),
)


def test_places_are_the_world_seen_by_each_member() -> None:
    world = World.of(2, 7, MEMBERS, restarts_used=3)
    shapes = (("r", 2), ("r", 1), ("s", 1))
    assert (world.order, world.size, world.missing) == ((2, 7), 5, 0)
    for rank, member in enumerate(MEMBERS):
        place = world.place_of(member.key)
        assert place == Place(2, 7, rank, 5, shapes, place.pattern, "h1", 4, 3, "5c")
        assert place.shape_of_each() == [member.shape for member in MEMBERS]


def size_of(members: list[NodeFacts]) -> int:
    """Of the message that tells the last member of its place."""
    world = World.of(1, 1, members)
    return len(encode(Sealed(members[-1].key, world.place_of(members[-1].key))))


@promise("""coordinator.place-large-world-equal: A place in a large world of equal nodes, or of two kinds that
    alternate, is as short as in a small world. Any world of 100,000 nodes fits into a message.""")
def test_a_place_in_a_large_world_of_likes_is_small() -> None:
    members = [NodeFacts(str(at), local_world_size=8) for at in range(10_000)]
    place = World.of(1, 1, members).place_of("9999/0")
    assert (place.shapes, place.pattern) == ((("default", 8),), b"")
    assert len(place.shape_of_each()) == 10_000
    assert size_of(members) - size_of(members[:1]) < 20


@proves("coordinator.place-large-world-equal")
def test_a_place_in_a_large_world_of_alternating_shapes_is_small() -> None:
    members = [NodeFacts(str(at), role="ab"[at % 2], local_world_size=1 + at % 3) for at in range(100_000)]
    assert size_of(members[:10_000]) < 500
    assert size_of(members) < 2000


@proves("coordinator.place-large-world-equal")
def test_a_large_world_of_any_shapes_fits_into_a_message() -> None:
    draw = random.Random(1)
    kinds = [(f"role-{number}", number + 1) for number in range(MAX_SHAPES)]
    picked = kinds + draw.choices(kinds, k=100_000 - MAX_SHAPES)
    members = [NodeFacts(f"n{at}", role=role, local_world_size=size) for at, (role, size) in enumerate(picked)]
    assert size_of(members) < MAX_MESSAGE_BYTES // 3
    assert World.of(1, 1, members).place_of("n0/0").shape_of_each() == picked


BOMB = zlib.compress(bytes(1 << 24))


@pytest.mark.parametrize(
    "changes",
    [
        {"node_count": 6},
        {"node_count": 4},
        {"shapes": (("r", 2),)},
        {"pattern": b""},
        {"pattern": b"junk"},
        {"pattern": BOMB},
        {"pattern": zlib.compress(bytes(10))[:-6]},
    ],
    ids=["more", "fewer", "unknown shape", "no pattern", "junk", "bomb", "cut short"],
)
def test_a_place_that_makes_no_sense(changes: dict[str, Any]) -> None:
    place = World.of(1, 1, MEMBERS).place_of("a/0")
    with pytest.raises(ValueError, match="a world "):
        replace(place, **changes).shape_of_each()


def test_without_shapes_the_nodes_know_nothing_of_each_other() -> None:
    assert Place(0, 1, 0, 2).shape_of_each() == []


@proves("nodes.script-content-warns-once")
@pytest.mark.parametrize(
    ("first", "own", "is_other"),
    [
        (("r", "1"), ("r", "2"), True),
        (("r", "1"), ("r", "1"), False),
        (("r", ""), ("r", "2"), False),  # An older agent, or one without a file.
        (("r", "1"), ("r", ""), False),
        (("r", "1"), ("s", "2"), False),  # Roles may have scripts of their own.
    ],
)
def test_who_runs_another_script_than_node_0(first: tuple[str, str], own: tuple[str, str], is_other: bool) -> None:
    a, b = (NodeFacts(name, role=role, script=script) for name, (role, script) in zip("ab", (first, own), strict=True))
    world = World.of(1, 1, [a, b])
    assert world.place_of(b.key).has_other_script(b) is is_other
    assert not world.place_of(a.key).has_other_script(a)


def test_a_script_of_a_node_of_which_nothing_is_known_is_not_compared() -> None:
    assert not Place(0, 1, 1, 2, script="1").has_other_script(NodeFacts("a", script="2"))


def test_an_adopted_world_knows_the_script_of_node_0() -> None:
    """From the place of any member."""
    known = World.of(2, 7, MEMBERS).place_of("c/0")
    world = World(known)
    world.take_up(4, MEMBERS[4])
    assert world.place_of("e/0").script == "5c"


def test_an_adopted_world_gets_to_know_its_members() -> None:
    world = World(Place(1, 3, 1, 3, (("default", 1),)))
    a, b, c = (NodeFacts(name) for name in "abc")
    assert (world.missing, world.keys) == (3, ())
    assert [world.take_up(2, c), world.take_up(0, a)] == [True, True]
    assert (world.missing, world.keys) == (1, ("a/0", "c/0"))
    assert [world.take_up(0, a), world.take_up(1, a), world.take_up(0, b), world.take_up(3, b)] == [True] + [False] * 3
    assert world.take_up(1, b)
    assert (world.missing, world.keys, world.place_of("c/0").rank) == (0, ("a/0", "b/0", "c/0"), 2)


def test_an_incarnation_is_somebody_new() -> None:
    assert NodeFacts("a", 0).key != NodeFacts("a", 1).key
    assert World.of(1, 1, (NodeFacts("a", 3), NodeFacts("b"))).keys == ("a/3", "b/0")


def test_of_two_rounds_that_of_the_higher_term_is_later() -> None:
    """A coordinator that has lost its memory may use a number again."""
    assert Place(2, 1, 0, 1).order > Place(1, 9, 0, 1).order
    assert Place(1, 2, 0, 1).order > Place(1, 1, 0, 1).order


RUN = Settings(2, 4, policy=RestartPolicy(3, fatal_exit_codes=frozenset({3, 1})))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"min_nodes": 4}, "--nnodes 4, this run has --nnodes 2:4"),
        ({"max_nodes": 3}, "--nnodes 2:3, this run has --nnodes 2:4"),
        ({"lease_s": 7.5}, "--lease 7.5, this run has --lease 5"),
        ({"drop_timeout_s": 1.0}, "drop_timeout=1, this run has drop_timeout=2"),
        ({"admit_delay_s": 0.0}, "--admit-delay 0, this run has --admit-delay 5"),
        ({"admit": Admit.ON_RESTART}, "--admit on-restart, this run has --admit now"),
        ({"policy": replace(RUN.policy, max_restarts=0)}, "--max-restarts 0, this run has --max-restarts 3"),
        ({"policy": replace(RUN.policy, loss_limit=9)}, "--loss-limit 9, this run has --loss-limit 20"),
        ({"policy": replace(RUN.policy, loss_window_s=9.0)}, "--loss-window 9, this run has --loss-window 3600"),
        ({"policy": replace(RUN.policy, window_s=9.0)}, "--restart-window 9, this run has --restart-window none"),
        (
            {"policy": replace(RUN.policy, fatal_exit_codes=frozenset())},
            "--fatal-exit-codes none, this run has --fatal-exit-codes 1,3",
        ),
    ],
)
def test_how_settings_differ(changes: dict[str, Any], words: str) -> None:
    assert RUN.difference(replace(RUN, **changes)) == words


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("127.example.org", False),
        ("10.0.0.127", False),
        ("node-1", False),
        ("::2", False),
        ("", False),
    ],
)
def test_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_a_run_of_one_node_does_not_load_what_the_wire_needs() -> None:
    check = "import sys, holdfast.rendezvous.membership.model; print({'msgspec', 'zlib'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-S", "-c", check], capture_output=True, text=True, env={"PYTHONPATH": "src"}
    )
    assert done.stdout == "set()\n", done.stderr
