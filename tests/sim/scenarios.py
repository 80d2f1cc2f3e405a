"""Runs that people had trouble with elsewhere, as scripts. What comes of each is in `golden/`, to be read.

The times are those of the defaults: heartbeats every second, a lease of 5 s, 2 s for a closed connection. Names of
the functions are the names of the files; the first words of each are the first lines of its file.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.rendezvous.membership.model import Admit
from holdfast.rendezvous.membership.restart_policy import Advance, RestartPolicy
from tests.sim.engine import Clock
from tests.sim.host import Plan
from tests.sim.script import EtcdScript, Script, failing, succeeding

Scenario = Callable[[], str]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def _feels(after_s: float) -> Plan:
    """Workers that run for ever, and fail of a peer's death after a while, as collectives do."""
    return Plan(None, feels_peers_after_s=after_s)


# Nodes that go and come.


@scenario
def a_killed_agent_is_no_end() -> str:
    """An agent is killed. The others go on without it, uncharged; when it is started again it is let in."""
    script = Script(min_nodes=2, max_nodes=3)
    script.nodes("abc")
    script.kill("b", at=3.0)
    script.node("b", at=8.0)
    return script.tell(until=9.0)


@scenario
def a_node_leaves() -> str:
    """SIGTERM to an agent means that this node goes, not that the run is closed."""
    script = Script(min_nodes=1, max_nodes=2)
    script.nodes("ab")
    script.terminate("a", at=3.0)
    script.work("b", 2, succeeding(2.0))
    return script.tell(until=8.0)


@scenario
def a_host_vanishes() -> str:
    """Nobody closes the connection: the lease tells. The workers on it died with it."""
    script = Script(min_nodes=1, max_nodes=2)
    script.nodes("ab")
    script.lose("b", at=3.0)
    return script.tell(until=9.0)


@scenario
def the_first_node_dies() -> str:
    """The host of rank 0 dies. The next round has another master, and everybody is told the same one, with a new port
    and the same count of restarts."""
    script = Script(min_nodes=2, max_nodes=3)
    script.nodes("abc")
    script.kill("a", at=3.0)
    return script.tell(until=6.0)


@scenario
def a_spare_node_stands_by() -> str:
    """More nodes than max: the last one waits, is told so, and takes the place of the first that is lost."""
    script = Script(min_nodes=2, max_nodes=2)
    script.nodes("abc")
    script.kill("a", at=3.0)
    return script.tell(until=6.0)


@scenario
def a_newcomer_is_let_in() -> str:
    """Below max and with `admit=now` the round is stopped in order, with grace for the workers. One agent is slow, and
    its workers fail because their peers are gone: that is not charged, and no restart is allowed."""
    script = Script(min_nodes=1, max_nodes=3)
    script.nodes("ab")
    script.work("a", 1, Plan(None, stops_after_s=1.0))
    script.work("b", 1, _feels(0.0))
    script.slow_down("b", at=8.0, for_s=2.0)
    script.node("c", at=8.0)
    return script.tell(until=11.0)


@scenario
def newcomers_are_let_in_together() -> str:
    """They come one after the other. The first of them waits for 5 s, and the round is stopped once."""
    script = Script(min_nodes=1, max_nodes=5, admit_delay_s=5.0)
    script.node("a")
    for number, name in enumerate("bcd"):
        script.node(name, at=8.0 + 2 * number)
    return script.tell(until=14.0)


@scenario
def a_failure_crosses_a_planned_stop() -> str:
    """The stop for a newcomer is on its way when the workers fail. That is not charged: no restart is allowed."""
    script = Script(min_nodes=1, max_nodes=2, last_call_s=0.1)
    script.node("a")
    script.work("a", 1, failing(1.0))
    script.node("b", at=1.115)
    return script.tell(until=3.0)


@scenario
def the_newest_common_step_is_loaded() -> str:
    """The first node is a step ahead when its peer fails: both load the step before. Then the peer is lost with what it
    held, and all ranks begin anew, with the reason."""
    script = Script(min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
    script.nodes("abc")
    script.save("ab", at=1.0, step=1)
    script.save("ab", at=2.0, step=2)
    script.save("a", at=3.0, step=3)
    script.work("b", 1, failing(3.5))
    script.kill("b", at=5.0)
    return script.tell(until=8.0)


@scenario
def a_complete_step_is_told_again() -> str:
    """All nodes keep one step and copy it. One of them loses its connection, and is asked again when it is back; it
    loses another one, and answers the same again, although it has a newer step. It misses that the step is complete,
    and the coordinator is killed: the next coordinator hears of it from the other node, and tells it before it asks for
    the next step."""
    script = Script(min_nodes=2, max_nodes=2, snapshot_copies=1)
    script.nodes("ab")
    for step, at in enumerate((2.0, 4.0, 4.03, 6.0), 1):
        script.save("ab", at=at, step=step)
    script.reset("b", at=2.015)
    script.reset("b", at=4.005)
    script.cut("b", at=4.19, for_s=0.5)
    script.kill_coordinator(at=4.25, for_s=0.2)
    return script.tell(until=6.5)


@scenario
def a_newcomer_waits_for_a_restart() -> str:
    """With `admit=on-restart` it stands by until the round ends of something else."""
    script = Script(min_nodes=1, max_nodes=3, admit=Admit.ON_RESTART, policy=RestartPolicy(max_restarts=1))
    script.nodes("ab")
    script.work("a", 1, failing(5.0))
    script.node("c", at=7.0)
    return script.tell(until=11.0)


@scenario
def a_late_node_is_waited_for() -> str:
    """Two are needed; the second comes after twenty seconds, and nothing is wrong with that."""
    script = Script(min_nodes=2, max_nodes=2)
    script.node("a")
    script.node("b", at=20.0)
    return script.tell(until=21.0)


@scenario
def too_few_nodes() -> str:
    """At the end of the join timeout the run fails, and says who is there and how many are missing."""
    script = Script(min_nodes=3, max_nodes=3, join_timeout_s=10.0)
    script.nodes("ab")
    return script.tell(until=12.0)


@scenario
def ranks_are_kept() -> str:
    """Survivors keep their order, and a newcomer fills the hole that was left."""
    script = Script(min_nodes=3, max_nodes=4)
    script.nodes("abcd")
    script.kill("b", at=3.0)
    script.node("e", at=4.0)
    return script.tell(until=6.0)


@scenario
def ranks_are_given_as_asked_for() -> str:
    """Requested ranks are honoured whatever the order of arrival; who asks for a rank that is taken is refused."""
    script = Script(min_nodes=3, max_nodes=3)
    script.node("a", at=0.0, rank=2)
    script.node("b", at=0.1, rank=0)
    script.node("x", at=0.2, rank=0)
    script.node("c", at=0.3, rank=1)
    return script.tell(until=1.0)


# Failures.


@scenario
def a_failure_is_pushed() -> str:
    """A worker fails, and its peers, who would wait for it for half an hour, are stopped at once."""
    script = Script(min_nodes=3, max_nodes=3, policy=RestartPolicy(max_restarts=1))
    script.nodes("abc")
    script.work("b", 1, failing(2.0))
    return script.tell(until=3.0)


@scenario
def one_budget_for_the_run() -> str:
    """Two restarts, wherever the failures are. The third failure ends the run, with one cause for every node: the
    one that speaks for itself, although a consequence of it was reported first."""
    script = Script(min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=2, backoff_s=0.5))
    script.nodes("ab")
    script.work("a", 1, failing(1.0, "ValueError: the first"))
    script.work("b", 2, failing(1.0, "ValueError: the second"))
    script.work("a", 3, failing(1.0, "connection closed by peer", is_consequence=True))
    script.work("b", 3, failing(1.001, "ValueError: the third"))
    return script.tell(until=20.0)


@scenario
def a_fatal_error_is_not_tried_again() -> str:
    """No restart cures a missing module, however many are left."""
    script = Script(min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=9))
    script.nodes("ab")
    script.work("b", 1, failing(1.0, "ModuleNotFoundError: no module named x", exception="ModuleNotFoundError"))
    return script.tell(until=3.0)


@scenario
def restarts_without_progress_end_the_run() -> str:
    """Step 5 is reached once, on the node whose worker does not fail. Two restarts lead no further, and the third
    failure since then ends the run for good, although restarts are left."""
    script = Script(min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=9, no_progress_limit=2))
    script.nodes("ab")
    for round in range(1, 5):
        script.work("a", round, Plan(None, advance=Advance(5)))
        script.work("b", round, failing(1.0))
    return script.tell(until=9.0)


@scenario
def a_quick_rejoin_is_no_way_around_the_budget() -> str:
    """No restarts are allowed. The node of the worker that failed is back before the others have stopped, and the run
    still ends."""
    script = Script(min_nodes=1, max_nodes=2)
    script.nodes("ab")
    script.work("a", 1, failing(1.0))
    script.work("b", 1, Plan(None, stops_after_s=3.0))
    return script.tell(until=10.0)


@scenario
def first_stop_then_judge() -> str:
    """A node dies, its workers first, and the collective of its peer fails before anybody knows. The failure stops
    the round at once, but it is judged when the dead one is accounted for, and then it is a consequence: the run
    goes on although no restart is allowed."""
    script = Script(min_nodes=1, max_nodes=2)
    script.nodes("ab")
    script.work("b", 1, _feels(0.0))
    script.slow_down("a", at=2.9, for_s=1.0)
    script.kill_workers("a", at=3.0)
    script.kill("a", at=3.05)
    return script.tell(until=6.0)


@scenario
def a_failure_behind_a_closed_connection() -> str:
    """The connection is down when the workers fail. The report goes with the join that follows, and is charged."""
    script = Script(min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
    script.nodes("ab")
    script.work("b", 1, failing(2.0))
    script.reset("b", at=2.13)
    return script.tell(until=3.0)


@scenario
def a_stubborn_worker_is_killed() -> str:
    """It ignores SIGTERM, and has its grace like everybody else, and no more."""
    script = Script(grace_s=2.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
    script.nodes("ab")
    script.work("a", 1, failing(1.0))
    script.work("b", 1, Plan(None, heeds_sigterm=False))
    return script.tell(until=4.0)


# The end.


@scenario
def success_is_everybodys() -> str:
    """A node whose workers have succeeded waits for the others. One of them fails, so all start again, and succeed."""
    script = Script(min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
    script.nodes("ab")
    script.work("a", 1, succeeding(1.0))
    script.work("b", 1, failing(2.0))
    script.work("a", 2, succeeding(1.0))
    script.work("b", 2, succeeding(3.0))
    return script.tell(until=20.0)


@scenario
def the_end_is_told_to_who_was_away() -> str:
    """A node is out of reach when the run is closed. It hears how it ended when it is back: the coordinator waits."""
    script = Script(min_nodes=2, max_nodes=2)
    script.nodes("ab")
    script.cut("b", at=3.0, for_s=6.0)
    script.close("a", at=4.0)
    return script.tell(until=20.0)


@scenario
def a_run_is_closed() -> str:
    """The user ends the run: everybody is told the same outcome, and workers are stopped with their grace, longer
    than a lease if need be."""
    script = Script(grace_s=8.0, min_nodes=2, max_nodes=2)
    script.nodes("ab")
    script.work("b", 1, Plan(None, stops_after_s=7.0))
    script.close("a", at=2.0)
    return script.tell(until=15.0)


# Fencing.


@scenario
def no_split_world() -> str:
    """With one node enough for a world, a node that is cut off does not form its own: its workers are killed before
    the other goes on, and it comes back as a stranger."""
    script = Script(min_nodes=1, max_nodes=2)
    script.nodes("ab")
    script.cut("b", at=3.0, for_s=8.0)
    return script.tell(until=13.0)


@scenario
def a_frozen_agent() -> str:
    """SIGSTOP for longer than the lease. The spawner kills the workers in time, the other goes on, and the agent
    finds out when it is continued."""
    script = Script(min_nodes=1, max_nodes=2)
    script.nodes("ab")
    script.freeze("b", at=3.0, for_s=9.0)
    return script.tell(until=14.0)


@scenario
def a_connection_is_lost_and_found() -> str:
    """A connection that is closed and open again within the grace is nobody's business."""
    script = Script(min_nodes=2, max_nodes=2)
    script.nodes("ab")
    script.reset("b", at=3.0)
    return script.tell(until=10.0)


@scenario
def clocks_disagree() -> str:
    """Sixty seconds ahead, an hour behind, a tenth too slow: no clock crosses a host, so nothing happens."""
    script = Script(min_nodes=3, max_nodes=3)
    script.node("a", clock=Clock(60.0))
    script.node("b", clock=Clock(100_000.0))
    script.node("c", clock=Clock(3.0, 0.91))
    script.work("a", 1, succeeding(30.0))
    script.work("b", 1, succeeding(30.0))
    script.work("c", 1, succeeding(30.0))
    return script.tell(until=45.0)


# The coordinator.


@scenario
def the_coordinator_is_killed() -> str:
    """It is gone for ten seconds, and nobody's workers notice. What it adopts is what was there."""
    script = Script(min_nodes=2, max_nodes=2)
    script.nodes("ab")
    script.kill_coordinator(at=3.0, for_s=10.0)
    script.work("a", 1, succeeding(15.0))
    script.work("b", 1, succeeding(16.0))
    return script.tell(until=30.0)


@scenario
def a_node_dies_while_the_coordinator_is_down() -> str:
    """The round is adopted; the one who does not return within a lease is lost, and its peer goes on in a round whose
    number nobody has had."""
    script = Script(min_nodes=1, max_nodes=2)
    script.nodes("ab")
    script.kill_coordinator(at=3.0, for_s=5.0)
    script.kill("b", at=4.0)
    return script.tell(until=15.0)


@scenario
def a_newcomer_meets_a_coordinator_that_was_restarted() -> str:
    """It is there before the members return. The round is adopted, and then the newcomer is let in."""
    script = Script(min_nodes=1, max_nodes=3)
    script.nodes("ab")
    script.kill_coordinator(at=7.0, for_s=5.0)
    script.node("c", at=11.95)
    return script.tell(until=14.0)


@scenario
def the_coordinator_loses_its_memory() -> str:
    """It comes back at once with an empty disk. One member is out of reach and still runs, as it was refused a moment
    ago. The other has joined and knows of a round that the memory does not, so nothing is sealed for a lease."""
    script = Script(min_nodes=1, max_nodes=2, policy=RestartPolicy(max_restarts=1))
    script.nodes("ab")
    script.work("a", 1, failing(3.0))
    script.kill_coordinator(at=3.0, for_s=0.5, with_its_memory=True)
    script.cut("b", at=3.45, for_s=8.0)
    return script.tell(until=13.0)


@scenario
def a_failure_at_the_coordinators_death() -> str:
    """A worker fails a moment after the coordinator died. Its node joins the next one first, then the other member
    returns. The failure is known and paid for."""
    script = Script(min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
    script.nodes("ab")
    script.work("a", 1, failing(3.0))
    script.kill_coordinator(at=3.1, for_s=0.5)
    script.slow_down("a", at=3.0, for_s=0.15)
    return script.tell(until=5.0)


@scenario
def old_restarts_stay_old() -> str:
    """Two restarts in 10 s are allowed. A coordinator is started after the second, which came long after the first. It
    knows how old they were, so a third failure soon after is within the budget, and a fourth is not."""
    script = Script(min_nodes=1, max_nodes=1, policy=RestartPolicy(max_restarts=2, window_s=10.0))
    script.nodes("a")
    script.work("a", 1, failing(1.0))
    script.work("a", 2, failing(12.0))
    script.kill_coordinator(at=15.0, for_s=0.1)
    script.work("a", 3, failing(3.0))
    script.work("a", 4, failing(3.0))
    return script.tell(until=30.0)


@scenario
def a_standby_meets_a_coordinator_without_memory() -> str:
    """It was told of the round that it has no place in. So it is not given one beside the two members that still run,
    out of the new coordinator's reach."""
    script = Script(min_nodes=1, max_nodes=2)
    script.nodes("abc")
    script.kill_coordinator(at=3.0, for_s=0.5, with_its_memory=True)
    script.cut("a", at=3.45, for_s=8.0)
    script.cut("b", at=3.45, for_s=8.0)
    return script.tell(until=10.0)


@scenario
def a_newcomer_meets_a_coordinator_without_memory() -> str:
    """The same with a node that the coordinator had welcomed, and no more, when it died."""
    script = Script(min_nodes=1, max_nodes=2, admit=Admit.ON_RESTART)
    script.nodes("ab")
    script.node("c", at=2.975)
    script.kill_coordinator(at=3.0, for_s=0.5, with_its_memory=True)
    script.cut("a", at=3.45, for_s=8.0)
    script.cut("b", at=3.45, for_s=8.0)
    return script.tell(until=10.0)


@scenario
def only_one_has_heard_of_the_round() -> str:
    """A round with a third node is sealed and written down; the coordinator dies when only that one has heard of it. It
    runs, out of reach. The other two tell the next coordinator of the round before, and are all that there was of it.
    But the memory knows better."""
    script = Script(min_nodes=2, max_nodes=3, last_call_s=0.1)
    script.nodes("ab")
    script.node("c", at=3.0)
    script.reset("a", at=3.106)
    script.reset("b", at=3.106)
    script.kill_coordinator(at=3.112, for_s=0.3)
    script.cut("c", at=3.115, for_s=10.0)
    return script.tell(until=10.0)


@scenario
def what_nodes_know_is_written_down() -> str:
    """The coordinator loses its memory, and the next one adopts the round of which the nodes tell it. When that one
    dies, too, a node is first at the third that was started a moment ago and knows of nothing. The memory does."""
    script = Script(min_nodes=1, max_nodes=2)
    script.nodes("ab")
    script.kill_coordinator(at=3.0, for_s=0.2, with_its_memory=True)
    script.kill_coordinator(at=5.0, for_s=0.2)
    script.cut("a", at=5.15, for_s=8.0)
    script.cut("b", at=5.15, for_s=8.0)
    script.node("c", at=5.3)
    return script.tell(until=12.0)


@scenario
def all_are_back() -> str:
    """The coordinator dies between two rounds, after it has charged the first. The next one finds written down who its
    members were. When all of them have joined, nothing of the round can be alive, so it waits for the backoff and for
    nothing else; and it does not charge the failure again, of which the join tells once more."""
    script = Script(min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=2, backoff_s=1.0))
    script.nodes("ab")
    script.work("a", 1, failing(3.0))
    script.kill_coordinator(at=3.5, for_s=0.2)
    return script.tell(until=5.0)


@scenario
def the_coordinator_dies_while_it_stops_a_round() -> str:
    """The one whose worker did not fail is back first, and says that it was told of a failure. So the failure that the
    other one tells of is no consequence of a node that went away, and is paid for."""
    script = Script(min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
    script.nodes("ab")
    script.work("a", 1, failing(3.0))
    script.kill_coordinator(at=3.165, for_s=0.2)
    script.cut("a", at=3.16, for_s=1.0)
    return script.tell(until=6.0)


# Nodes that do not come back.


@scenario
def a_stuck_agent_is_expelled() -> str:
    """Its loop decides nothing any more, but it keeps its lease. The round is stopped; the grace and a margin later the
    node is expelled, whose spawner kills its workers then; a lease later the others go on."""
    script = Script(grace_s=1.0, min_nodes=1, max_nodes=2, policy=RestartPolicy(max_restarts=1))
    script.nodes("ab")
    script.slow_down("b", at=1.0, for_s=100.0)
    script.work("a", 1, failing(2.0))
    return script.tell(until=30.0)


@scenario
def a_stuck_agent_is_away_when_its_time_is_over() -> str:
    """The same, and its connection is being replaced when it is to be expelled. It is expelled a lease later."""
    script = Script(grace_s=1.0, min_nodes=1, max_nodes=2, policy=RestartPolicy(max_restarts=1))
    script.nodes("ab")
    script.slow_down("b", at=1.0, for_s=100.0)
    script.work("a", 1, failing(2.0))
    script.reset("b", at=18.13)
    return script.tell(until=35.0)


@scenario
def stacks_take_their_time() -> str:
    """The run hangs, and the other node takes the stacks of its workers for 20 s before it stops them. Its agent had
    said that it may need so long, so it is waited for, and the restart is charged."""
    script = Script(stop_margin_s=35.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
    script.nodes("ab")
    script.work("a", 1, failing(2.0, "the workers hang", exception="hang"))
    script.work("b", 1, Plan(None, stacks_s=20.0))
    return script.tell(until=24.0)


@scenario
def losses_are_bounded() -> str:
    """One restart after lost nodes is allowed. A round with progress begins the count anew; the second loss after it
    ends the run for good, although the coordinator was replaced in between."""
    script = Script(min_nodes=2, max_nodes=2, policy=RestartPolicy(loss_limit=1))
    script.nodes("abcd")
    script.work("a", 2, Plan(None, advance=Advance(7)))
    script.kill("b", at=3.0)
    script.kill("c", at=8.0)
    script.kill_coordinator(at=11.0, for_s=0.2)
    script.lose("d", at=13.0)
    return script.tell(until=20.0)


@scenario
def a_host_that_is_lost_again_waits() -> str:
    """The first loss of a host costs nothing. After the second its node stands by for 10 s, and the other node goes on
    without it at once. The coordinator is replaced meanwhile, and the next one knows of the losses."""
    script = Script(min_nodes=1, max_nodes=2)
    script.nodes("ab")
    script.kill("b", at=3.0)
    script.node("b", at=6.0)
    script.kill("b", at=8.0)
    script.slow_down("a", at=9.0, for_s=2.0)
    script.node("b", at=10.5)
    script.kill_coordinator(at=13.0, for_s=0.2)
    return script.tell(until=26.0)


@scenario
def all_hosts_are_cut_off_again() -> str:
    """Twice the network to all nodes is gone for longer than their leases. No host is to blame for that, so none has to
    wait."""
    script = Script(min_nodes=2, max_nodes=2)
    script.nodes("ab")
    for at in (3.0, 15.0):
        script.cut("a", at=at, for_s=7.0)
        script.cut("b", at=at, for_s=7.0)
    return script.tell(until=25.0)


@scenario
def a_later_round_has_a_last_call() -> str:
    """The workers of one node have succeeded, and its loop is stuck when another node fails. The others wait for it for
    as long as the last call, and go on without it."""
    script = Script(min_nodes=2, max_nodes=3, policy=RestartPolicy(max_restarts=1))
    script.nodes("abc")
    script.work("a", 1, succeeding(1.0))
    script.slow_down("a", at=2.0, for_s=100.0)
    script.work("b", 1, failing(3.0))
    return script.tell(until=9.0)


# A coordinator that etcd elects.


@scenario
def the_coordinators_process_dies() -> str:
    """The agent that started it revokes its lease at once. The nodes are refused at the old address, so they know that
    their places were not given away; one of them is elected, all are back, and no worker notices."""
    script = EtcdScript(min_nodes=2, max_nodes=2)
    script.nodes("ab")
    script.kill_process(at=3.0)
    script.work("a", 1, succeeding(8.0))
    script.work("b", 1, succeeding(8.0))
    return script.tell(until=12.0)


@scenario
def a_leader_is_killed_while_it_tells_of_a_round() -> str:
    """Its host is gone when the round is written down and told to nobody but itself. The next coordinator finds the
    round in the memory, waits for a node lease and a leader lease, as one of its members did not come, and goes on."""
    script = EtcdScript(min_nodes=2, max_nodes=3)
    script.nodes("abc")
    script.lose("a", at=0.275)
    return script.tell(until=30.0)


@scenario
def a_leader_is_cut_off_from_etcd() -> str:
    """It still answers its nodes. At 0.9 of its lease it stops, says so, and closes; b cannot be elected before, as the
    key is there. Nobody's place was given away, so b's and c's workers live on their leases, and are back in time."""
    script = EtcdScript(min_nodes=2, max_nodes=3)
    script.nodes("abc")
    script.cut_from_etcd("a", at=3.0, for_s=20.0)
    return script.tell(until=14.0)


@scenario
def an_answer_that_is_late_renews_no_longer() -> str:
    """The renewal was carried out at once, and its answer takes 0.9 s; then nothing gets through to etcd. The leader
    counts from when it asked, so it stops before c, which has just been started, finds no key."""
    script = EtcdScript(min_nodes=2, max_nodes=3, admit=Admit.ON_RESTART)
    script.nodes("ab")
    script.cut_from_etcd("a", at=3.0, for_s=0.9, up=False)
    script.cut_from_etcd("a", at=3.95, for_s=20.0)
    script.node("c", at=8.1)
    return script.tell(until=9.0)


@scenario
def a_leader_resigns_and_is_gone() -> str:
    """The same, and when it has said that it resigns nothing reaches its host any more, so nobody is refused there. b
    and c believe it: they have the rest of their leases, not half a second."""
    script = EtcdScript(min_nodes=2, max_nodes=3)
    script.nodes("abc")
    script.cut_from_etcd("a", at=3.0, for_s=20.0)
    script.cut("a", at=6.535, for_s=20.0)
    return script.tell(until=9.0)


@scenario
def a_member_lives_on_the_word_of_the_leader_before() -> str:
    """etcd ends the leader's lease early, and the leader does not know. c, which stands by, is elected beside it and
    would do for a world. b has answers from the first leader for most of its lease; then nothing reaches b, and its
    workers live for most of a node lease more. The second leader waits for both."""
    script = EtcdScript(min_nodes=1, max_nodes=2)
    script.nodes("abc")
    script.cut_from_etcd("a", at=3.04, for_s=20.0)
    script.end_lease_early(at=3.05)
    script.reset("c", at=3.06)
    script.cut("b", at=6.4, for_s=20.0)
    return script.tell(until=16.0)


@scenario
def a_frozen_leader_goes_on() -> str:
    """The coordinator's process is frozen for longer than its lease. The nodes read the key when it is silent for 2 s,
    and find the next one. When it goes on it finds that its time is over, before it says anything else."""
    script = EtcdScript(min_nodes=2, max_nodes=3)
    script.nodes("abc")
    script.freeze_process(at=3.0, for_s=9.0)
    return script.tell(until=25.0)


@scenario
def etcd_loses_its_data() -> str:
    """The coordinator finds with its next renewal that its lease is gone, and resigns. The next one has no memory, but
    the nodes know of the round, of the term and of the restart. All come back, and no worker notices."""
    script = EtcdScript(min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
    script.nodes("ab")
    script.work("b", 1, failing(1.0))
    script.wipe(at=5.5)
    return script.tell(until=13.0)


@scenario
def two_nodes_think_that_they_lead() -> str:
    """etcd ends the leader's lease early, and the leader is cut off from it: it does not know. c, which lost its
    connection, is elected beside it. a and b have answers from the first one until it stops, at 0.9 of its lease; it
    would seal a round without c, but cannot write that down. The second one seals nothing for a node lease and a leader
    lease."""
    script = EtcdScript(min_nodes=1, max_nodes=3)
    script.nodes("abc")
    script.cut_from_etcd("a", at=3.0, for_s=20.0)
    script.end_lease_early(at=3.01)
    script.reset("c", at=3.02)
    return script.tell(until=20.0)


@scenario
def the_leaders_host_is_lost() -> str:
    """Nobody closes anything. The nodes lose their places by their own clocks; the key lapses; the next coordinator
    waits for a node lease and a leader lease. That costs a restart, which is not charged."""
    script = EtcdScript(min_nodes=1, max_nodes=3)
    script.nodes("abc")
    script.lose("a", at=3.0)
    return script.tell(until=25.0)


@scenario
def etcd_is_without_a_quorum() -> str:
    """For 3 s, which is not noticed; then for 10 s. The coordinator resigns, and the workers are stopped by their
    leases, but the run is not lost."""
    script = EtcdScript(min_nodes=2, max_nodes=2)
    script.nodes("ab")
    script.lose_quorum(at=3.0, for_s=3.0)
    script.lose_quorum(at=10.0, for_s=10.0)
    return script.tell(until=40.0)
