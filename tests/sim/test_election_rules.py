"""Rules of a coordinator that moves which chance seldom shows to be needed; each is told as the race that it is for."""

from __future__ import annotations

from holdfast.rendezvous.etcd.election import Leader, Office, RenewalAnswered, Resign
from holdfast.rendezvous.membership.model import NodeFacts, Resigned, Sealed, Settings, World
from holdfast.rendezvous.membership.node import JoinRequested, Participant, Pushed, Standing, Welcomed
from holdfast.rendezvous.membership.node_lease import (
    ConnectFailed,
    Disconnected,
    HangUp,
    LeaderMoved,
    LeaseSettings,
    NodeLease,
    PlaceTaken,
)
from holdfast.rendezvous.membership.protocol import FromNode, HeartbeatAnswer
from tests.promises import promise, proves
from tests.sim.script import EtcdScript

A = NodeFacts("a", address="a", port=1)
ON_ETCD = LeaseSettings(lease_s=6.0, does_refusal_renew=False, locate_after_s=2.0)


def member(term: int) -> Participant:
    """A node with a place, by a coordinator of that term, at time 0."""
    node = Participant(A, Settings(lease_s=6.0), NodeLease(ON_ETCD))
    node.step(Welcomed(term, 0), 0.0)
    node.step(JoinRequested(1), 0.0)
    node.step(Pushed(Sealed(A.key, World.of(term, 1, (A,)).place_of(A.key))), 0.1)
    assert node.standing is Standing.MEMBER
    return node


@promise("""simulation.node-never-accepts: A node never accepts a coordinator of a lower term. A coordinator checks its
    lease before each answer. Only the answer to a heartbeat extends a node's lease on etcd.""")
def test_a_lower_term_is_never_accepted() -> None:
    """1. The node is with the coordinator of term 5. 2. It reads the key, and the answer that it gets late is an old
    one: term 4, whose coordinator does not know yet that it was replaced. 3. If the node took its answers, its workers
    would live on, while the coordinator of term 5 gives its place away."""
    node = member(term=5)
    node.step(Disconnected(), 1.0)
    commands = node.step(Welcomed(4, 1), 1.2)
    assert HangUp() in commands
    assert not any(isinstance(command, FromNode) for command in commands)
    assert not node.is_connected
    node.step(Pushed(HeartbeatAnswer(2)), 1.25)
    assert node.standing is Standing.MEMBER
    node.step(ConnectFailed(was_refused=False), 1.6)
    assert node.standing is Standing.OUTSIDE, "half a second after the connection was closed the place is lost"


@proves("simulation.node-never-accepts")
def test_a_lease_that_is_over_is_found_out_before_anything_is_answered() -> None:
    """1. The coordinator is frozen past its lease and another is elected. 2. It goes on, and the answer to its last
    renewal is the first that it finds. 3. It must not serve for another moment."""
    office = Office(Leader("a", 1, "token", 1), 5.0, renewed_at=0.0)
    assert office.may_serve(4.4)
    assert not office.may_serve(4.6)
    assert office.step(RenewalAnswered(1.0, is_alive=True), 9.0) == [Resign("etcd did not renew its lease in time")]


def lease_with_place() -> NodeLease:
    lease = NodeLease(ON_ETCD)
    lease.step(PlaceTaken(1, asked_at=0.0), 0.1)
    return lease


@proves("simulation.node-never-accepts")
def test_what_lifts_the_rule_of_the_closed_connection_does_not_extend_the_lease() -> None:
    """A refusal, a resignation and a coordinator that was replaced prove that the connection was not closed to give the
    place away. How long the workers may live is a matter of answered heartbeats alone."""
    for lifted in (ConnectFailed(was_refused=True), LeaderMoved()):
        lease = lease_with_place()
        lease.step(Disconnected(), 1.0)
        assert lease.workers_may_live_until() == 1.5
        lease.step(lifted, 1.1)
        assert lease.workers_may_live_until() == 5.4


@proves("simulation.node-never-accepts")
def test_a_resignation_holds_for_one_connection() -> None:
    node = member(term=1)
    node.step(Pushed(Resigned()), 1.0)
    node.step(Disconnected(), 1.0)
    assert node._lease.workers_may_live_until() == 5.4
    node.step(Welcomed(2, 1), 1.2)
    node.step(HeartbeatAnswer(2), 1.3)
    node.step(Disconnected(), 2.0)
    assert node._lease.workers_may_live_until() == 2.5


def campaigns(count: int) -> int:
    """How many of so many nodes campaign when the coordinator's process dies: all notice at the same time."""
    script = EtcdScript(min_nodes=1, max_nodes=count)
    script.network.is_even = False
    for number in range(count):
        script.node(f"n{number}", number * 0.01)
    script.engine.run_until(10.0)
    granted, leader = script.etcd._granted, script.etcd.leader
    assert leader is not None
    assert all(host.agent and host.agent.participant.is_connected for host in script.hosts.values())
    script.kill_process(10.0)
    script.engine.run_until(13.0)
    assert script.etcd.leader is not None
    assert script.etcd.leader.term > leader.term
    return script.etcd._granted - granted


@proves("etcd-runs.leader-key-vanishes-few")
def test_few_of_many_nodes_campaign() -> None:
    assert campaigns(count=64) <= 6
