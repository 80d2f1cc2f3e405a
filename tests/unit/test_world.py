"""How the members of a round are chosen and put in order."""

from __future__ import annotations

import pytest

from holdfast.rendezvous.world import (
    NodeFacts,
    Place,
    Run,
    World,
    arrange,
    is_loopback,
    unreachable_between_hosts,
)


def node(text: str) -> NodeFacts:
    """`a`, or `a@2` for one that asks for rank 2."""
    name, _, rank = text.partition("@")
    return NodeFacts(name, requested_rank=int(rank) if rank else None)


ARRANGED = {
    # Who was there, who is there in order of arrival, how many may be, and the order that follows.
    "in order of arrival": ("", "b a c", 3, "b a c"),
    "nobody": ("", "", 3, ""),
    "too many, the first to arrive": ("", "c b a", 2, "c b"),
    "survivors keep their order": ("a b c", "c b a", 3, "a b c"),
    "survivors close ranks": ("a b c d", "d a c", 4, "a c d"),
    "a newcomer fills the hole": ("a b c", "a c x", 3, "a x c"),
    "newcomers fill holes, then append": ("a b c", "x y a c z", 9, "a x c y z"),
    "all lost": ("a b", "x y z", 3, "x y z"),
    "survivors before those who wait": ("a b", "x y a b", 3, "a b x"),
    "survivors before those who wait, at max": ("a b", "x a y b", 2, "a b"),
    "requested ranks": ("", "b@1 a@0 c", 3, "a b c"),
    "requested ranks move the others": ("", "a b c@0", 3, "c a b"),
    "requested ranks go before survivors": ("a b c", "a b x@0", 3, "x a b"),
    "survivors with requested ranks": ("a b", "b@1 a@0", 2, "a b"),
    "a requested rank in a hole": ("a b c", "a c x@1", 3, "a x c"),
    "a rank beyond the end": ("", "b@5 a", 3, "a b"),
    "ranks beyond the end, in the order asked": ("", "c@7 b@5 a", 4, "a b c"),
    "one rank asked for twice, the first has it": ("", "a@0 b@0 c", 3, "a c b"),
    "another incarnation is a newcomer": ("b/1 b/0", "b c", 3, "c b"),
}


@pytest.mark.parametrize("case", ARRANGED)
def test_arrange(case: str) -> None:
    previous, candidates, max_nodes, expected = ARRANGED[case]
    keys = [each if "/" in each else f"{each}/0" for each in previous.split()]
    members = arrange(keys, map(node, candidates.split()), max_nodes)
    assert [member.node_id for member in members] == expected.split()
    assert arrange(keys, map(node, candidates.split()), max_nodes) == members


def test_places_are_the_world_seen_by_each_member() -> None:
    members = (
        NodeFacts("a", address="h1", port=4, role="r", local_world_size=2),
        NodeFacts("b", address="h2", port=5, role="r", local_world_size=2),
        NodeFacts("c", address="h3", port=6, role="r", local_world_size=1),
        NodeFacts("d", address="h4", port=7, role="s", local_world_size=1),
        NodeFacts("e", address="h5", port=8, role="r", local_world_size=2),
    )
    places = World(7, members, restarts_used=3).places()
    runs = (Run("r", 2, 2), Run("r", 1, 1), Run("s", 1, 1), Run("r", 2, 1))
    assert places == [Place(7, rank, 5, runs, "h1", 4, 3) for rank in range(5)]
    assert places[0].shapes() == [(member.role, member.local_world_size) for member in members]


def test_a_place_in_a_large_world_of_likes_is_small() -> None:
    world = World(1, tuple(NodeFacts(str(at), local_world_size=8) for at in range(1000)))
    assert world.places()[999].runs == (Run("default", 8, 1000),)
    assert len(world.places()[0].shapes()) == 1000


def test_an_incarnation_is_somebody_new() -> None:
    assert NodeFacts("a", 0).key != NodeFacts("a", 1).key
    assert World(1, (NodeFacts("a", 3), NodeFacts("b"))).keys == ("a/3", "b/0")


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


@pytest.mark.parametrize(
    ("newcomer", "member", "expected"),
    [
        ("10.0.0.1", "10.0.0.2", ""),
        ("127.0.0.1", "localhost", ""),
        ("", "127.0.0.1", ""),
        ("10.0.0.1", "", ""),
        ("127.0.0.1", "10.0.0.2", "its address is 127.0.0.1, where no other host can reach it, and m is at 10.0.0.2; "
         "give this node an address with --local-addr"),
        ("10.0.0.1", "localhost", "its address is 10.0.0.1, but m is at localhost, where no other host can reach it; "
         "give m an address with --local-addr"),
    ],
)  # fmt: skip
def test_reach_between_hosts(newcomer: str, member: str, expected: str) -> None:
    said = unreachable_between_hosts(NodeFacts("n", address=newcomer), NodeFacts("m", address=member))
    assert said == expected
