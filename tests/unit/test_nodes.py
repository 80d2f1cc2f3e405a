"""Who is there, who was silent for the longest time, who is about to be lost, and who may join."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from holdfast.rendezvous.membership.model import NodeFacts, Settings, Stage
from holdfast.rendezvous.membership.nodes import Node, NodeTable, rejection_of
from tests.promises import proves


def add(nodes: NodeTable, name: str, now: float, stage: Stage = Stage.WAITING, rank: int | None = None) -> Node:
    node = nodes.add(NodeFacts(name, requested_rank=rank), stage, now)
    nodes.check()
    return node


@pytest.fixture
def nodes() -> NodeTable:
    """a, b and c have arrived one after the other."""
    nodes = NodeTable()
    for at, name in enumerate("abc"):
        add(nodes, name, float(at))
    return nodes


def first(nodes: NodeTable) -> tuple[str, float] | None:
    node = nodes.most_silent()
    return None if node is None else (node.facts.node_id, node.heard_at)


def arrived(nodes: NodeTable) -> str:
    return "".join(node.facts.node_id for node in nodes.waiting_in_order())


def test_a_node_that_is_held_does_not_wait_before_its_time(nodes: NodeTable) -> None:
    def add_d(now: float, held_until: float) -> None:
        nodes.add(NodeFacts("d"), Stage.WAITING, now, held_until)

    add_d(3.0, 9.0)
    add_d(4.0, 4.0)
    assert (arrived(nodes), nodes.next_release_at()) == ("abc", 9.0), "it is known, and held as before"
    nodes.drop(nodes["d/0"], 20.0)
    assert [nodes.out_beyond(at) for at in (8.9, 9.0)] == [1, 0]
    nodes.reopen(nodes["d/0"], 5.0)
    for at, waiting in ((8.9, "abc"), (9.0, "abcd")):
        nodes.release(at)
        nodes.check()
        assert arrived(nodes) == waiting
    add_d(10.0, 99.0)
    assert (arrived(nodes), nodes.next_release_at()) == ("abcd", None), "once is enough"
    nodes.remove("d/0")
    add_d(11.0, 99.0)
    nodes.drop(nodes["d/0"], 200.0)
    nodes.release(99.0)
    assert arrived(nodes) == "abc", "its connection is closed"
    nodes.check()
    nodes.reopen(nodes["d/0"], 100.0)
    assert arrived(nodes) == "abcd"


def test_the_longest_silent_is_first(nodes: NodeTable) -> None:
    assert first(nodes) == ("a", 0.0)
    nodes.hear("a/0", 5.0)
    assert first(nodes) == ("b", 1.0)
    nodes.drop(nodes["b/0"], 9.0)
    assert first(nodes) == ("c", 2.0), "one whose connection is closed is lost at another time"
    nodes.hear("b/0", 6.0)
    nodes.hear("c/0", 7.0)
    assert first(nodes) == ("a", 5.0)
    nodes.reopen(nodes["b/0"], 8.0)
    nodes.remove("a/0")
    assert first(nodes) == ("c", 7.0)
    nodes.check()


def test_who_joins_again_keeps_its_place_in_the_order_of_arrival(nodes: NodeTable) -> None:
    nodes.hear("a/0", 5.0)
    assert arrived(nodes) == "abc", "to be heard of is not to arrive"
    add(nodes, "a", 9.0)
    assert (arrived(nodes), first(nodes)) == ("abc", ("b", 1.0))
    nodes.remove("a/0")
    add(nodes, "a", 10.0)
    assert arrived(nodes) == "bca", "one that was gone has lost it"


def test_one_whose_connection_is_closed_does_not_wait_and_is_lost_in_time(nodes: NodeTable) -> None:
    nodes.drop(nodes["b/0"], 7.0)
    nodes.drop(nodes["a/0"], 6.0)
    nodes.check()
    assert (nodes.waiting, nodes.open_keys(), nodes.next_drop_at()) == ({"c/0"}, ("c/0",), 6.0)
    assert [nodes.dropped_by(now) for now in (5.9, 6.0, 7.0)] == [[], ["a/0"], ["a/0", "b/0"]]


@pytest.mark.parametrize("how", ["reopened", "added", "removed"])
def test_one_that_is_back_or_out_has_no_time_to_be_lost_at(nodes: NodeTable, how: str) -> None:
    nodes.drop(nodes["a/0"], 6.0)
    nodes.drop(nodes["b/0"], 7.0)
    match how:
        case "reopened":
            nodes.reopen(nodes["a/0"], 5.0)
            assert (nodes["a/0"].is_open, nodes["a/0"].heard_at) == (True, 5.0)
        case "added":
            add(nodes, "a", 5.0)
        case "removed":
            nodes.remove("a/0")
    nodes.check()
    assert (nodes.next_drop_at(), nodes.dropped_by(100.0)) == (7.0, ["b/0"])


def test_claims_on_ranks() -> None:
    nodes = NodeTable()
    for name, rank in (("a", 1), ("b", 1), ("c", 0), ("d", None)):
        add(nodes, name, 0.0, rank=rank)
    assert sorted(node.key for node in nodes.claimants(1)) == ["a/0", "b/0"]
    nodes.remove("a/0")
    add(nodes, "c", 1.0, rank=2)
    assert [[node.key for node in nodes.claimants(rank)] for rank in range(3)] == [[], ["b/0"], ["c/0"]]


@proves("coordinator.10-000-nodes-return")
def test_nothing_grows_with_the_nodes_that_have_been_there() -> None:
    """Nodes that come and go, connections that break, ranks that are requested: for as long as a run lasts."""

    def go_on(begin: int, count: int) -> None:
        for number in range(begin, begin + count):
            now = float(number)
            nodes.reopen(lasting, now)
            passing = nodes.add(NodeFacts(f"n{number:09}", number, requested_rank=number), Stage.WAITING, now)
            nodes.drop(passing, now + 2.0)
            nodes.drop(lasting, now + 2.0)
            nodes.next_drop_at()
            nodes.remove(passing.key)

    nodes = NodeTable()
    lasting = add(nodes, "a", 0.0)
    go_on(0, 5000)
    tracemalloc.start()
    go_on(5000, 5000)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # What is kept of those that are gone was allocated anew, for others.
    assert size < 1_000_000
    assert len(nodes._claims) <= 1
    assert len(nodes._drop_times) < 10


# Who may join.

RUN = Settings(1, 3)
A = NodeFacts("a", address="10.0.0.1", requested_rank=0)


@pytest.mark.parametrize(
    ("newcomer", "settings", "words"),
    [
        (NodeFacts("b", address="10.0.0.2"), RUN, ""),
        (NodeFacts("b"), RUN, ""),
        (A, RUN, ""),
        (replace(A, incarnation=1), RUN, ""),
        (NodeFacts("b"), Settings(1, 2), "--nnodes 1:2, this run has --nnodes 1:3"),
        (NodeFacts("b"), Settings(3, 3), "--nnodes 3, this run has --nnodes 1:3"),
        (NodeFacts("b", requested_rank=1), RUN, ""),
        (NodeFacts("b", requested_rank=3), RUN, "--node-rank 3, but this run has at most 3 nodes"),
        (NodeFacts("b", requested_rank=-1), RUN, "--node-rank -1, but this run has at most 3 nodes"),
        (
            NodeFacts("b", requested_rank=0),
            RUN,
            "this node has rank 0 (--node-rank, or 0 if it was not given), and a has it already; give --node-rank 1",
        ),
        (
            NodeFacts("b", address="127.0.0.1"),
            RUN,
            "its address is 127.0.0.1, where no other host can reach it, and a is at 10.0.0.1; give this node an "
            "address with --local-addr",
        ),
    ],
)
def test_who_is_refused(newcomer: NodeFacts, settings: Settings, words: str) -> None:
    nodes = NodeTable()
    nodes.add(A, Stage.WAITING, 0.0)
    assert rejection_of(newcomer, settings, RUN, nodes, 0.0) == words


def test_a_rank_is_free_if_the_node_that_has_it_is_silent_or_closed() -> None:
    nodes, b = NodeTable(), NodeFacts("b", requested_rank=0)
    node = nodes.add(A, Stage.RUNNING, 0.0)
    assert rejection_of(b, RUN, RUN, nodes, 0.0)
    assert not rejection_of(b, RUN, RUN, nodes, 2.6 * RUN.heartbeat_s)
    nodes.drop(node, 2.0)
    assert not rejection_of(b, RUN, RUN, nodes, 0.0)


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
    nodes = NodeTable()
    nodes.add(NodeFacts("m", address=member), Stage.WAITING, 0.0)
    assert rejection_of(NodeFacts("n", address=newcomer), RUN, RUN, nodes, 0.0) == expected
