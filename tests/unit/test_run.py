"""The machine of a run: which connection speaks for which node, terms, and what waits for a write.

Connections are numbers. A node `a` has the secret `a`, unless a test says otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.rendezvous.membership import model, protocol
from holdfast.rendezvous.membership.keys import hash_of_secret
from holdfast.rendezvous.membership.model import End, Memory, NodeFacts, Outcome, Settings
from holdfast.rendezvous.membership.protocol import (
    Closed,
    Denied,
    Heartbeat,
    HeartbeatAnswer,
    Introduction,
    Join,
    Opened,
    Ready,
    Received,
    TermRaised,
    Welcome,
)
from holdfast.rendezvous.membership.run import Access, Run
from tests.promises import promise, proves

ONE = Settings(1, 1, last_call_s=0.0)
PAIR = Settings(2, 2, 30.0)
UP_TO_3 = Settings(1, 3, 30.0, last_call_s=5.0)


def opened(conn: int, name: str, secret: str = "", term: int = 0) -> Opened:
    return Opened(conn, Introduction(name, (secret or name).encode(), term))


def joined(conn: int, name: str, settings: Settings = PAIR, incarnation: int = 0, **fields: Any) -> Received:
    return Received(conn, Join(NodeFacts(name, incarnation), settings, **fields))


def feed(run: Run, *events: Any, now: float = 0.0) -> Ready:
    """What comes of the last one."""
    for event in events:
        ready = run.step(event, now)
        run.check()
    return ready


def said(ready: Ready) -> list[tuple[tuple[int, ...], type]]:
    return [(conns, type(message)) for conns, message in ready.send_after_persist]


def pair() -> Run:
    """Two nodes on connections 1 and 2, whose first round is written down."""
    run = Run(0.0)
    feed(run, opened(1, "a"), joined(1, "a"), opened(2, "b"), joined(2, "b"))
    return run


@promise("""coordinator.nodes-told-written-down: What nodes are told is written down before. While one write is under
    way only the newest memory waits.""")
def test_a_round_is_told_when_it_is_written_down() -> None:
    run = Run(0.0)
    assert said(feed(run, opened(1, "a"))) == [((1,), Welcome)]
    feed(run, joined(1, "a"), opened(2, "b"))
    ready = feed(run, joined(2, "b"))
    assert ready.persist is not None
    assert (ready.persist.last_round, ready.persist.members) == (1, ("a/0", "b/0"))
    assert ready.persist.secrets == (hash_of_secret(b"a"), hash_of_secret(b"b"))
    assert said(ready) == [((1,), model.Sealed), ((2,), model.Sealed)]
    assert ready.send_now == []


@proves("coordinator.nodes-told-written-down")
def test_a_newcomer_is_not_told_of_a_round_that_is_not_written_down_yet() -> None:
    """Its welcome has the number of the write that it waits for."""
    run = Run(0.0)
    feed(run, opened(1, "a"), joined(1, "a"), opened(2, "b"), joined(2, "b"))
    ready = feed(run, opened(3, "c"))
    assert ready.send_after_persist == [((3,), Welcome(1, 1, 0))]


@promise("""coordinator.connection-holds-slice-time: No connection holds up another: each has a slice of time in a turn
    of the loop, members a longer one. Heartbeats never wait for a write.""")
def test_heartbeats_wait_for_nothing() -> None:
    run = Run(0.0)
    feed(run, opened(1, "a"), joined(1, "a"), opened(2, "b"), joined(2, "b"))
    assert feed(run, Received(1, Heartbeat(7))) == Ready([((1,), HeartbeatAnswer(7))])


def test_a_node_that_knows_of_a_higher_term_is_welcomed_when_the_storage_has_raised_it() -> None:
    run = Run(0.0, term=1)
    ready = feed(run, opened(1, "a", term=7))
    assert (ready.raise_term, said(ready)) == (7, [])
    assert said(feed(run, opened(2, "b"))) == []  # It waits behind the other one.
    welcomed = feed(run, TermRaised(9))
    assert welcomed.send_after_persist == [((1,), Welcome(9)), ((2,), Welcome(9))]
    assert feed(run, opened(3, "c", term=9)).raise_term is None


def test_a_connection_that_is_closed_while_the_term_is_raised_is_not_welcomed() -> None:
    run = Run(0.0, term=1)
    feed(run, opened(1, "a", term=7), Closed(1, by_peer=True))
    assert said(feed(run, TermRaised(8))) == []


def test_a_connection_that_has_not_joined_is_a_stranger() -> None:
    run = pair()
    feed(run, opened(3, "c"), Opened(4, Introduction(is_visitor=True)))
    assert [run.access_of(conn) for conn in (1, 3, 4, 5)] == [
        Access.MEMBER,
        Access.STRANGER,
        Access.VISITOR,
        Access.STRANGER,
    ]
    assert feed(run, Received(3, Heartbeat(1))) == Ready()
    assert feed(run, Received(3, protocol.Close("no"))) == Ready()


def test_a_node_that_is_refused_is_no_member_and_its_connection_is_closed() -> None:
    run = pair()
    ready = feed(run, opened(3, "c"), joined(3, "c", UP_TO_3))
    refused = model.Refused("--nnodes 1:3, this run has --nnodes 2")
    assert ready.send_after_persist == [((3,), refused)]
    assert ready.close == [(3, f"is refused: {refused.reason}")]
    assert run.access_of(3) is Access.STRANGER


def test_a_visitor_that_acts_is_cut_off() -> None:
    run = pair()
    feed(run, Opened(3, Introduction(is_visitor=True)))
    assert feed(run, Received(3, protocol.Close("no"))).close == [(3, "is a visitor and sent Close")]
    assert run.membership.outcome is None


@proves("coordinator.node-id-belongs-node")
@pytest.mark.parametrize("incarnation", [0, 1, 2**52])
def test_another_node_cannot_take_the_name_of_a_member(incarnation: int) -> None:
    """Whether it knows the token is no matter: the secret is the member's own."""
    run = pair()
    ready = feed(run, opened(3, "a", secret="other"))
    assert ready.send_after_persist == [((3,), Denied("the node id 'a' is another node's"))]
    assert [conn for conn, _ in ready.close] == [3]
    assert feed(run, joined(3, "a", incarnation=incarnation)) == Ready()
    assert run.speaker(1) == "a/0"
    assert feed(run, Received(1, Heartbeat(1))).send_now == [((1,), HeartbeatAnswer(1))]


def test_a_name_is_fixed_by_a_join_and_not_by_a_handshake() -> None:
    run = Run(0.0)
    feed(run, opened(1, "a", secret="first"), opened(2, "a", secret="second"), joined(2, "a"))
    assert run.speaker(2) == "a/0"
    ready = feed(run, joined(1, "a"))
    assert (ready.close, ready.send_after_persist, run.speaker(2)) == ([(1, "")], [], "a/0")


@proves("coordinator.node-id-belongs-node")
def test_the_names_of_a_round_are_remembered_by_the_next_coordinator() -> None:
    run = Run(0.0)
    feed(run, opened(1, "a"), joined(1, "a"), opened(2, "b"))
    memory = feed(run, joined(2, "b")).persist
    assert memory is not None
    assert b"b" not in memory.secrets
    after = Run(0.0, memory)
    assert said(feed(after, opened(1, "a", secret="other"))) == [((1,), Denied)]
    assert said(feed(after, opened(2, "a"))) == [((2,), Welcome)]
    assert said(feed(after, opened(3, "new", secret="any"))) == [((3,), Welcome)]


@proves("coordinator.messages-older-connection")
def test_a_newer_incarnation_expels_the_older_connection() -> None:
    run = pair()
    ready = feed(run, opened(3, "a"), joined(3, "a", incarnation=1, has_lost_place=True))
    assert ((1,), model.Expelled("a newer incarnation of this node has joined")) in ready.send_after_persist
    assert (1, "") in ready.close
    assert feed(run, Received(1, Heartbeat(1))).send_now == []
    assert feed(run, Received(3, Heartbeat(1))).send_now != []
    late = feed(run, opened(4, "a"), joined(4, "a"))
    outdated = "a newer incarnation of this node has joined"
    assert (late.send_after_persist, late.close) == (
        [((4,), model.Expelled(outdated))],
        [(4, f"is expelled: {outdated}")],
    )
    assert run.speaker(3) == "a/1"


def test_what_was_said_on_an_older_connection_is_ignored() -> None:
    run = Run(0.0)
    feed(run, opened(1, "a"), opened(2, "a"), joined(2, "a"), opened(3, "b"), joined(3, "b"))
    ready = feed(run, joined(1, "a"))
    assert (ready.close, ready.send_after_persist) == ([(1, "")], [])
    assert run.membership.phase is model.Phase.RUNNING


def test_a_node_that_speaks_for_another_is_cut_off() -> None:
    run = pair()
    ready = feed(run, opened(3, "c"), joined(3, "a"))
    assert ready.close == [(3, "speaks for 'a', which is another node")]
    assert run.speaker(1) == "a/0"


def test_a_node_that_is_done_says_so_on_a_new_connection() -> None:
    run = pair()
    feed(run, model.CloseRequested("enough"), Closed(1, by_peer=True), Received(2, protocol.Left()))
    assert [*run.membership.nodes] == ["a/0"]
    assert not feed(run, opened(3, "a", secret="other"), Received(3, protocol.Left())).forget
    feed(run, opened(4, "a"), Received(4, protocol.Left()))
    assert not run.membership.nodes


@promise("""coordinator.close-doubtful-gives-place: After a close of its own, or a doubtful one, the coordinator gives a
    place away after the whole lease; after a close by the node, after `drop_timeout`, also under TLS.""")
@pytest.mark.parametrize(("by_peer", "lost_at"), [(True, 12.0), (False, 15.0)])
def test_after_a_close_of_its_own_the_coordinator_waits_for_the_whole_lease(by_peer: bool, lost_at: float) -> None:
    """The peer may not hear of it, and its workers live on until its lease ends."""
    run = pair()
    feed(run, Received(1, Heartbeat(1)), Received(2, Heartbeat(1)), Closed(1, by_peer), now=10.0)
    feed(run, Received(2, Heartbeat(2)), protocol.TimePassed(), now=lost_at - 0.1)
    assert "a/0" in run.membership.nodes
    feed(run, protocol.TimePassed(), now=lost_at)
    assert "a/0" not in run.membership.nodes


def test_a_close_that_is_the_machines_own_word_is_not_reported_again() -> None:
    run = pair()
    feed(run, opened(3, "a"), joined(3, "a", incarnation=1, has_lost_place=True))
    assert feed(run, Closed(1, by_peer=False)) == Ready()


@promise("""coordinator.run-client-forgotten-few: A run without a client is forgotten after a few minutes, but not
    before its lease is over if it has a round.""")
def test_a_run_without_nodes_is_forgotten_after_a_while() -> None:
    run = pair()
    feed(run, Closed(1, by_peer=True), Closed(2, by_peer=True), now=100.0)
    assert run.passing_s(101.0) == 4.0  # Until the leases are over.
    assert run.passing_s(110.0) == 0.0
    assert not feed(run, protocol.TimePassed(), now=159.0).forget
    assert feed(run, protocol.TimePassed(), now=160.0).forget
    assert not feed(run, protocol.TimePassed(), now=170.0).forget  # Once.


def test_a_run_with_a_node_is_not_passing() -> None:
    assert pair().passing_s(100.0) is None


def test_a_run_that_has_ended_passes_when_all_nodes_know() -> None:
    run = pair()
    feed(run, model.CloseRequested("enough"))
    assert run.passing_s(1.0) == 9.0
    feed(run, Received(1, protocol.Left()), Received(2, protocol.Left()))
    assert run.passing_s(1.0) == 0.0


OVER = Memory(
    4, 4, 7, settings=replace(ONE, close_linger_s=10.0), outcome=Outcome(End.SUCCEEDED, "all workers have succeeded")
)


@proves("coordinator.node-part-run-comes")
def test_a_node_of_a_run_that_is_over_hears_how_it_ended() -> None:
    """It was cut off, and comes back when its run has been forgotten."""
    run = Run(0.0, OVER, age_s=60.0)
    feed(run, opened(1, "a"))
    ready = feed(run, joined(1, "a", ONE, heard_round=7))
    assert ready.send_after_persist[-1] == ((1,), model.Ended(Outcome(End.SUCCEEDED, "all workers have succeeded")))
    assert run.membership.phase is model.Phase.FORMING
    assert feed(run, Closed(1, by_peer=True), now=1.0).forget  # No other node is expected.
    assert run.membership.record() == OVER


@proves("coordinator.node-part-run-comes")
@pytest.mark.parametrize(("age_s", "is_new"), [(9.0, False), (11.0, True)])
def test_a_node_that_knows_of_no_past_begins_a_new_run_after_the_linger(age_s: float, is_new: bool) -> None:
    run = Run(0.0, OVER, age_s=age_s)
    assert feed(run, opened(1, "new")).send_after_persist == [((1,), Welcome(5, 0 if is_new else 7, 0))]
    ready = feed(run, joined(1, "new", ONE))
    kinds = [type(message) for _, message in ready.send_after_persist]
    assert kinds == ([model.Notice, model.Sealed] if is_new else [model.Ended])
    if is_new:
        assert ready.persist is not None
        assert (ready.persist.last_round, ready.persist.term) == (8, 5)  # No round number is used twice.


def test_a_new_run_ends_and_leaves_its_own_record() -> None:
    run = Run(0.0, OVER, age_s=60.0)
    assert run.membership.record() == OVER
    feed(run, opened(1, "new"), joined(1, "new", ONE), Received(1, protocol.Succeeded(8)))
    record = run.membership.record()
    assert record is not None
    assert (record.last_round, record.outcome) == (8, Outcome(End.SUCCEEDED, "all workers have succeeded"))


@promise("""coordinator.memory-lost-restarts-nodes: If the memory is lost, restarts that nodes have heard of still
    count.""")
def test_restarts_that_nodes_have_heard_of_are_not_forgotten() -> None:
    """All agents were replaced, and the memory was lost before the next round."""
    run = Run(0.0)
    feed(run, opened(1, "a"), joined(1, "a", ONE, heard_round=3, heard_restarts=2))
    assert run.membership.restarts_used == 2
