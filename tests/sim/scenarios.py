"""Runs that people had trouble with elsewhere, as scripts. What comes of each is in `golden/`, to be read.

The times are those of the defaults: heartbeats every second, a lease of 5 s, 2 s for a closed connection. Names of
the functions are the names of the files; the first words of each are the first lines of its file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from holdfast.rendezvous.membership.model import Admit
from holdfast.rendezvous.membership.restart_policy import Advance, RestartPolicy
from tests.sim.engine import Clock
from tests.sim.host import Plan
from tests.sim.script import EtcdScript, Script, failing, succeeding

Scenario = Callable[[], str]
SCENARIOS: dict[str, Scenario] = {}


def scenario(until_s: float, kind: type[Script] = Script, **settings: Any) -> Callable[[Any], None]:
    """What happens in a script with these settings, and when its story ends."""

    def keep(function: Callable[[Any], None]) -> None:
        def tell() -> str:
            script = kind(**settings)
            function(script)
            return script.tell(until_s)

        tell.__doc__ = function.__doc__
        SCENARIOS[function.__name__] = tell

    return keep


on_etcd = partial(scenario, kind=EtcdScript)


def _feels(after_s: float) -> Plan:
    """Workers that run for ever, and fail of a peer's death after a while, as collectives do."""
    return Plan(None, feels_peers_after_s=after_s)


# Nodes that go and come.


@scenario(9.0, min_nodes=2, max_nodes=3)
def a_killed_agent_is_no_end(script: Script) -> None:
    """An agent is killed. The others go on without it, uncharged; when it is started again it is let in."""
    script.nodes("abc")
    script.kill("b", at=3.0)
    script.node("b", at=8.0)


@scenario(8.0, min_nodes=1, max_nodes=2)
def a_node_leaves(script: Script) -> None:
    """SIGTERM to an agent means that this node goes, not that the run is closed."""
    script.nodes("ab")
    script.terminate("a", at=3.0)
    script.work("b", 2, succeeding(2.0))


@scenario(9.0, min_nodes=1, max_nodes=2)
def a_host_vanishes(script: Script) -> None:
    """Nobody closes the connection: the lease tells. The workers on it died with it."""
    script.nodes("ab")
    script.lose("b", at=3.0)


@scenario(6.0, min_nodes=2, max_nodes=3)
def the_first_node_dies(script: Script) -> None:
    """The host of rank 0 dies. The next round has another master, and everybody is told the same one, with a new port
    and the same count of restarts."""
    script.nodes("abc")
    script.kill("a", at=3.0)


@scenario(6.0, min_nodes=2, max_nodes=2)
def a_spare_node_stands_by(script: Script) -> None:
    """More nodes than max: the last one waits, is told so, and takes the place of the first that is lost."""
    script.nodes("abc")
    script.kill("a", at=3.0)


@scenario(11.0, min_nodes=1, max_nodes=3)
def a_newcomer_is_let_in(script: Script) -> None:
    """Below max and with `admit=now` the round is stopped in order, with grace for the workers. One agent is slow, and
    its workers fail because their peers are gone: that is not charged, and no restart is allowed."""
    script.nodes("ab")
    script.work("a", 1, Plan(None, stops_after_s=1.0))
    script.work("b", 1, _feels(0.0))
    script.slow_down("b", at=8.0, for_s=2.0)
    script.node("c", at=8.0)


@scenario(14.0, min_nodes=1, max_nodes=5, admit_delay_s=5.0)
def newcomers_are_let_in_together(script: Script) -> None:
    """They come one after the other. The first of them waits for 5 s, and the round is stopped once."""
    script.node("a")
    for number, name in enumerate("bcd"):
        script.node(name, at=8.0 + 2 * number)


@scenario(3.0, min_nodes=1, max_nodes=2, last_call_s=0.1)
def a_failure_crosses_a_planned_stop(script: Script) -> None:
    """The stop for a newcomer is on its way when the workers fail. That is not charged: no restart is allowed."""
    script.node("a")
    script.work("a", 1, failing(1.0))
    script.node("b", at=1.115)


@scenario(8.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
def the_newest_common_step_is_loaded(script: Script) -> None:
    """The first node is a step ahead when its peer fails: both load the step before. Then the peer is lost with what it
    held, and all ranks begin anew, with the reason."""
    script.nodes("abc")
    script.save("ab", at=1.0, step=1)
    script.save("ab", at=2.0, step=2)
    script.save("a", at=3.0, step=3)
    script.work("b", 1, failing(3.5))
    script.kill("b", at=5.0)


@scenario(6.5, min_nodes=2, max_nodes=2, snapshot_copies=1)
def a_complete_step_is_told_again(script: Script) -> None:
    """All nodes keep one step and copy it. One of them loses its connection, and is asked again when it is back; it
    loses another one, and answers the same again, although it has a newer step. It misses that the step is complete,
    and the coordinator is killed: the next coordinator hears of it from the other node, and tells it before it asks for
    the next step."""
    script.nodes("ab")
    for step, at in enumerate((2.0, 4.0, 4.03, 6.0), 1):
        script.save("ab", at=at, step=step)
    script.reset("b", at=2.015)
    script.reset("b", at=4.005)
    script.cut("b", at=4.19, for_s=0.5)
    script.kill_coordinator(at=4.25, for_s=0.2)


@scenario(11.0, min_nodes=1, max_nodes=3, admit=Admit.ON_RESTART, policy=RestartPolicy(max_restarts=1))
def a_newcomer_waits_for_a_restart(script: Script) -> None:
    """With `admit=on-restart` it stands by until the round ends of something else."""
    script.nodes("ab")
    script.work("a", 1, failing(5.0))
    script.node("c", at=7.0)


@scenario(21.0, min_nodes=2, max_nodes=2)
def a_late_node_is_waited_for(script: Script) -> None:
    """Two are needed; the second comes after twenty seconds, and nothing is wrong with that."""
    script.node("a")
    script.node("b", at=20.0)


@scenario(12.0, min_nodes=3, max_nodes=3, join_timeout_s=10.0)
def too_few_nodes(script: Script) -> None:
    """At the end of the join timeout the run fails, and says who is there and how many are missing."""
    script.nodes("ab")


@scenario(6.0, min_nodes=3, max_nodes=4)
def ranks_are_kept(script: Script) -> None:
    """Survivors keep their order, and a newcomer fills the hole that was left."""
    script.nodes("abcd")
    script.kill("b", at=3.0)
    script.node("e", at=4.0)


@scenario(1.0, min_nodes=3, max_nodes=3)
def ranks_are_given_as_asked_for(script: Script) -> None:
    """Requested ranks are honoured whatever the order of arrival; who asks for a rank that is taken is refused."""
    script.node("a", at=0.0, rank=2)
    script.node("b", at=0.1, rank=0)
    script.node("x", at=0.2, rank=0)
    script.node("c", at=0.3, rank=1)


# Failures.


@scenario(3.0, min_nodes=3, max_nodes=3, policy=RestartPolicy(max_restarts=1))
def a_failure_is_pushed(script: Script) -> None:
    """A worker fails, and its peers, who would wait for it for half an hour, are stopped at once."""
    script.nodes("abc")
    script.work("b", 1, failing(2.0))


@scenario(20.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=2, backoff_s=0.5))
def one_budget_for_the_run(script: Script) -> None:
    """Two restarts, wherever the failures are. The third failure ends the run, with one cause for every node: the
    one that speaks for itself, although a consequence of it was reported first."""
    script.nodes("ab")
    script.work("a", 1, failing(1.0, "ValueError: the first"))
    script.work("b", 2, failing(1.0, "ValueError: the second"))
    script.work("a", 3, failing(1.0, "connection closed by peer", is_consequence=True))
    script.work("b", 3, failing(1.001, "ValueError: the third"))


@scenario(3.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=9))
def a_fatal_error_is_not_tried_again(script: Script) -> None:
    """No restart cures a missing module, however many are left."""
    script.nodes("ab")
    script.work("b", 1, failing(1.0, "ModuleNotFoundError: no module named x", exception="ModuleNotFoundError"))


@scenario(9.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=9, no_progress_limit=2))
def restarts_without_progress_end_the_run(script: Script) -> None:
    """Step 5 is reached once, on the node whose worker does not fail. Two restarts lead no further, and the third
    failure since then ends the run for good, although restarts are left."""
    script.nodes("ab")
    for round in range(1, 5):
        script.work("a", round, Plan(None, advance=Advance(5)))
        script.work("b", round, failing(1.0))


@scenario(10.0, min_nodes=1, max_nodes=2)
def a_quick_rejoin_is_no_way_around_the_budget(script: Script) -> None:
    """No restarts are allowed. The node of the worker that failed is back before the others have stopped, and the run
    still ends."""
    script.nodes("ab")
    script.work("a", 1, failing(1.0))
    script.work("b", 1, Plan(None, stops_after_s=3.0))


@scenario(6.0, min_nodes=1, max_nodes=2)
def first_stop_then_judge(script: Script) -> None:
    """A node dies, its workers first, and the collective of its peer fails before anybody knows. The failure stops
    the round at once, but it is judged when the dead one is accounted for, and then it is a consequence: the run
    goes on although no restart is allowed."""
    script.nodes("ab")
    script.work("b", 1, _feels(0.0))
    script.slow_down("a", at=2.9, for_s=1.0)
    script.kill_workers("a", at=3.0)
    script.kill("a", at=3.05)


@scenario(3.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
def a_failure_behind_a_closed_connection(script: Script) -> None:
    """The connection is down when the workers fail. The report goes with the join that follows, and is charged."""
    script.nodes("ab")
    script.work("b", 1, failing(2.0))
    script.reset("b", at=2.13)


@scenario(4.0, grace_s=2.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
def a_stubborn_worker_is_killed(script: Script) -> None:
    """It ignores SIGTERM, and has its grace like everybody else, and no more."""
    script.nodes("ab")
    script.work("a", 1, failing(1.0))
    script.work("b", 1, Plan(None, heeds_sigterm=False))


# The end.


@scenario(20.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
def success_is_everybodys(script: Script) -> None:
    """A node whose workers have succeeded waits for the others. One of them fails, so all start again, and succeed."""
    script.nodes("ab")
    script.work("a", 1, succeeding(1.0))
    script.work("b", 1, failing(2.0))
    script.work("a", 2, succeeding(1.0))
    script.work("b", 2, succeeding(3.0))


@scenario(20.0, min_nodes=2, max_nodes=2)
def the_end_is_told_to_who_was_away(script: Script) -> None:
    """A node is out of reach when the run is closed. It hears how it ended when it is back: the coordinator waits."""
    script.nodes("ab")
    script.cut("b", at=3.0, for_s=6.0)
    script.close("a", at=4.0)


@scenario(15.0, grace_s=8.0, min_nodes=2, max_nodes=2)
def a_run_is_closed(script: Script) -> None:
    """The user ends the run: everybody is told the same outcome, and workers are stopped with their grace, longer
    than a lease if need be."""
    script.nodes("ab")
    script.work("b", 1, Plan(None, stops_after_s=7.0))
    script.close("a", at=2.0)


# Fencing.


@scenario(13.0, min_nodes=1, max_nodes=2)
def no_split_world(script: Script) -> None:
    """With one node enough for a world, a node that is cut off does not form its own: its workers are killed before
    the other goes on, and it comes back as a stranger."""
    script.nodes("ab")
    script.cut("b", at=3.0, for_s=8.0)


@scenario(14.0, min_nodes=1, max_nodes=2)
def a_frozen_agent(script: Script) -> None:
    """SIGSTOP for longer than the lease. The spawner kills the workers in time, the other goes on, and the agent
    finds out when it is continued."""
    script.nodes("ab")
    script.freeze("b", at=3.0, for_s=9.0)


@scenario(10.0, min_nodes=2, max_nodes=2)
def a_connection_is_lost_and_found(script: Script) -> None:
    """A connection that is closed and open again within the grace is nobody's business."""
    script.nodes("ab")
    script.reset("b", at=3.0)


@scenario(45.0, min_nodes=3, max_nodes=3)
def clocks_disagree(script: Script) -> None:
    """Sixty seconds ahead, an hour behind, a tenth too slow: no clock crosses a host, so nothing happens."""
    script.node("a", clock=Clock(60.0))
    script.node("b", clock=Clock(100_000.0))
    script.node("c", clock=Clock(3.0, 0.91))
    script.work("a", 1, succeeding(30.0))
    script.work("b", 1, succeeding(30.0))
    script.work("c", 1, succeeding(30.0))


# The coordinator.


@scenario(30.0, min_nodes=2, max_nodes=2)
def the_coordinator_is_killed(script: Script) -> None:
    """It is gone for ten seconds, and nobody's workers notice. What it adopts is what was there."""
    script.nodes("ab")
    script.kill_coordinator(at=3.0, for_s=10.0)
    script.work("a", 1, succeeding(15.0))
    script.work("b", 1, succeeding(16.0))


@scenario(15.0, min_nodes=1, max_nodes=2)
def a_node_dies_while_the_coordinator_is_down(script: Script) -> None:
    """The round is adopted; the one who does not return within a lease is lost, and its peer goes on in a round whose
    number nobody has had."""
    script.nodes("ab")
    script.kill_coordinator(at=3.0, for_s=5.0)
    script.kill("b", at=4.0)


@scenario(14.0, min_nodes=1, max_nodes=3)
def a_newcomer_meets_a_coordinator_that_was_restarted(script: Script) -> None:
    """It is there before the members return. The round is adopted, and then the newcomer is let in."""
    script.nodes("ab")
    script.kill_coordinator(at=7.0, for_s=5.0)
    script.node("c", at=11.95)


@scenario(13.0, min_nodes=1, max_nodes=2, policy=RestartPolicy(max_restarts=1))
def the_coordinator_loses_its_memory(script: Script) -> None:
    """It comes back at once with an empty disk. One member is out of reach and still runs, as it was refused a moment
    ago. The other has joined and knows of a round that the memory does not, so nothing is sealed for a lease."""
    script.nodes("ab")
    script.work("a", 1, failing(3.0))
    script.kill_coordinator(at=3.0, for_s=0.5, with_its_memory=True)
    script.cut("b", at=3.45, for_s=8.0)


@scenario(5.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
def a_failure_at_the_coordinators_death(script: Script) -> None:
    """A worker fails a moment after the coordinator died. Its node joins the next one first, then the other member
    returns. The failure is known and paid for."""
    script.nodes("ab")
    script.work("a", 1, failing(3.0))
    script.kill_coordinator(at=3.1, for_s=0.5)
    script.slow_down("a", at=3.0, for_s=0.15)


@scenario(30.0, min_nodes=1, max_nodes=1, policy=RestartPolicy(max_restarts=2, window_s=10.0))
def old_restarts_stay_old(script: Script) -> None:
    """Two restarts in 10 s are allowed. A coordinator is started after the second, which came long after the first. It
    knows how old they were, so a third failure soon after is within the budget, and a fourth is not."""
    script.nodes("a")
    script.work("a", 1, failing(1.0))
    script.work("a", 2, failing(12.0))
    script.kill_coordinator(at=15.0, for_s=0.1)
    script.work("a", 3, failing(3.0))
    script.work("a", 4, failing(3.0))


@scenario(10.0, min_nodes=1, max_nodes=2)
def a_standby_meets_a_coordinator_without_memory(script: Script) -> None:
    """It was told of the round that it has no place in. So it is not given one beside the two members that still run,
    out of the new coordinator's reach."""
    script.nodes("abc")
    script.kill_coordinator(at=3.0, for_s=0.5, with_its_memory=True)
    script.cut("a", at=3.45, for_s=8.0)
    script.cut("b", at=3.45, for_s=8.0)


@scenario(10.0, min_nodes=1, max_nodes=2, admit=Admit.ON_RESTART)
def a_newcomer_meets_a_coordinator_without_memory(script: Script) -> None:
    """The same with a node that the coordinator had welcomed, and no more, when it died."""
    script.nodes("ab")
    script.node("c", at=2.975)
    script.kill_coordinator(at=3.0, for_s=0.5, with_its_memory=True)
    script.cut("a", at=3.45, for_s=8.0)
    script.cut("b", at=3.45, for_s=8.0)


@scenario(10.0, min_nodes=2, max_nodes=3, last_call_s=0.1)
def only_one_has_heard_of_the_round(script: Script) -> None:
    """A round with a third node is sealed and written down; the coordinator dies when only that one has heard of it. It
    runs, out of reach. The other two tell the next coordinator of the round before, and are all that there was of it.
    But the memory knows better."""
    script.nodes("ab")
    script.node("c", at=3.0)
    script.reset("a", at=3.106)
    script.reset("b", at=3.106)
    script.kill_coordinator(at=3.112, for_s=0.3)
    script.cut("c", at=3.115, for_s=10.0)


@scenario(12.0, min_nodes=1, max_nodes=2)
def what_nodes_know_is_written_down(script: Script) -> None:
    """The coordinator loses its memory, and the next one adopts the round of which the nodes tell it. When that one
    dies, too, a node is first at the third that was started a moment ago and knows of nothing. The memory does."""
    script.nodes("ab")
    script.kill_coordinator(at=3.0, for_s=0.2, with_its_memory=True)
    script.kill_coordinator(at=5.0, for_s=0.2)
    script.cut("a", at=5.15, for_s=8.0)
    script.cut("b", at=5.15, for_s=8.0)
    script.node("c", at=5.3)


@scenario(5.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=2, backoff_s=1.0))
def all_are_back(script: Script) -> None:
    """The coordinator dies between two rounds, after it has charged the first. The next one finds written down who its
    members were. When all of them have joined, nothing of the round can be alive, so it waits for the backoff and for
    nothing else; and it does not charge the failure again, of which the join tells once more."""
    script.nodes("ab")
    script.work("a", 1, failing(3.0))
    script.kill_coordinator(at=3.5, for_s=0.2)


@scenario(6.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
def the_coordinator_dies_while_it_stops_a_round(script: Script) -> None:
    """The one whose worker did not fail is back first, and says that it was told of a failure. So the failure that the
    other one tells of is no consequence of a node that went away, and is paid for."""
    script.nodes("ab")
    script.work("a", 1, failing(3.0))
    script.kill_coordinator(at=3.165, for_s=0.2)
    script.cut("a", at=3.16, for_s=1.0)


# Nodes that do not come back.


@scenario(30.0, grace_s=1.0, min_nodes=1, max_nodes=2, policy=RestartPolicy(max_restarts=1))
def a_stuck_agent_is_expelled(script: Script) -> None:
    """Its loop decides nothing any more, but it keeps its lease. The round is stopped; the grace and a margin later the
    node is expelled, whose spawner kills its workers then; a lease later the others go on."""
    script.nodes("ab")
    script.slow_down("b", at=1.0, for_s=100.0)
    script.work("a", 1, failing(2.0))


@scenario(35.0, grace_s=1.0, min_nodes=1, max_nodes=2, policy=RestartPolicy(max_restarts=1))
def a_stuck_agent_is_away_when_its_time_is_over(script: Script) -> None:
    """The same, and its connection is being replaced when it is to be expelled. It is expelled a lease later."""
    script.nodes("ab")
    script.slow_down("b", at=1.0, for_s=100.0)
    script.work("a", 1, failing(2.0))
    script.reset("b", at=18.13)


@scenario(24.0, stop_margin_s=35.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
def stacks_take_their_time(script: Script) -> None:
    """The run hangs, and the other node takes the stacks of its workers for 20 s before it stops them. Its agent had
    said that it may need so long, so it is waited for, and the restart is charged."""
    script.nodes("ab")
    script.work("a", 1, failing(2.0, "the workers hang", exception="hang"))
    script.work("b", 1, Plan(None, stacks_s=20.0))


@scenario(20.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(loss_limit=1))
def losses_are_bounded(script: Script) -> None:
    """One restart after lost nodes is allowed. A round with progress begins the count anew; the second loss after it
    ends the run for good, although the coordinator was replaced in between."""
    script.nodes("abcd")
    script.work("a", 2, Plan(None, advance=Advance(7)))
    script.kill("b", at=3.0)
    script.kill("c", at=8.0)
    script.kill_coordinator(at=11.0, for_s=0.2)
    script.lose("d", at=13.0)


@scenario(26.0, min_nodes=1, max_nodes=2)
def a_host_that_is_lost_again_waits(script: Script) -> None:
    """The first loss of a host costs nothing. After the second its node stands by for 10 s, and the other node goes on
    without it at once. The coordinator is replaced meanwhile, and the next one knows of the losses."""
    script.nodes("ab")
    script.kill("b", at=3.0)
    script.node("b", at=6.0)
    script.kill("b", at=8.0)
    script.slow_down("a", at=9.0, for_s=2.0)
    script.node("b", at=10.5)
    script.kill_coordinator(at=13.0, for_s=0.2)


@scenario(25.0, min_nodes=2, max_nodes=2)
def all_hosts_are_cut_off_again(script: Script) -> None:
    """Twice the network to all nodes is gone for longer than their leases. No host is to blame for that, so none has to
    wait."""
    script.nodes("ab")
    for at in (3.0, 15.0):
        script.cut("a", at=at, for_s=7.0)
        script.cut("b", at=at, for_s=7.0)


@scenario(9.0, min_nodes=2, max_nodes=3, policy=RestartPolicy(max_restarts=1))
def a_later_round_has_a_last_call(script: Script) -> None:
    """The workers of one node have succeeded, and its loop is stuck when another node fails. The others wait for it for
    as long as the last call, and go on without it."""
    script.nodes("abc")
    script.work("a", 1, succeeding(1.0))
    script.slow_down("a", at=2.0, for_s=100.0)
    script.work("b", 1, failing(3.0))


# A coordinator that etcd elects.


@on_etcd(12.0, min_nodes=2, max_nodes=2)
def the_coordinators_process_dies(script: EtcdScript) -> None:
    """The agent that started it revokes its lease at once. The nodes are refused at the old address, so they know that
    their places were not given away; one of them is elected, all are back, and no worker notices."""
    script.nodes("ab")
    script.kill_process(at=3.0)
    script.work("a", 1, succeeding(8.0))
    script.work("b", 1, succeeding(8.0))


@on_etcd(30.0, min_nodes=2, max_nodes=3)
def a_leader_is_killed_while_it_tells_of_a_round(script: EtcdScript) -> None:
    """Its host is gone when the round is written down and told to nobody but itself. The next coordinator finds the
    round in the memory, waits for a node lease and a leader lease, as one of its members did not come, and goes on."""
    script.nodes("abc")
    script.lose("a", at=0.275)


@on_etcd(14.0, min_nodes=2, max_nodes=3)
def a_leader_is_cut_off_from_etcd(script: EtcdScript) -> None:
    """It still answers its nodes. At 0.9 of its lease it stops, says so, and closes; b cannot be elected before, as the
    key is there. Nobody's place was given away, so b's and c's workers live on their leases, and are back in time."""
    script.nodes("abc")
    script.cut_from_etcd("a", at=3.0, for_s=20.0)


@on_etcd(9.0, min_nodes=2, max_nodes=3, admit=Admit.ON_RESTART)
def an_answer_that_is_late_renews_no_longer(script: EtcdScript) -> None:
    """The renewal was carried out at once, and its answer takes 0.9 s; then nothing gets through to etcd. The leader
    counts from when it asked, so it stops before c, which has just been started, finds no key."""
    script.nodes("ab")
    script.cut_from_etcd("a", at=3.0, for_s=0.9, up=False)
    script.cut_from_etcd("a", at=3.95, for_s=20.0)
    script.node("c", at=8.1)


@on_etcd(9.0, min_nodes=2, max_nodes=3)
def a_leader_resigns_and_is_gone(script: EtcdScript) -> None:
    """The same, and when it has said that it resigns nothing reaches its host any more, so nobody is refused there. b
    and c believe it: they have the rest of their leases, not half a second."""
    script.nodes("abc")
    script.cut_from_etcd("a", at=3.0, for_s=20.0)
    script.cut("a", at=6.535, for_s=20.0)


@on_etcd(16.0, min_nodes=1, max_nodes=2)
def a_member_lives_on_the_word_of_the_leader_before(script: EtcdScript) -> None:
    """etcd ends the leader's lease early, and the leader does not know. c, which stands by, is elected beside it and
    would do for a world. b has answers from the first leader for most of its lease; then nothing reaches b, and its
    workers live for most of a node lease more. The second leader waits for both."""
    script.nodes("abc")
    script.cut_from_etcd("a", at=3.04, for_s=20.0)
    script.end_lease_early(at=3.05)
    script.reset("c", at=3.06)
    script.cut("b", at=6.4, for_s=20.0)


@on_etcd(25.0, min_nodes=2, max_nodes=3)
def a_frozen_leader_goes_on(script: EtcdScript) -> None:
    """The coordinator's process is frozen for longer than its lease. The nodes read the key when it is silent for 2 s,
    and find the next one. When it goes on it finds that its time is over, before it says anything else."""
    script.nodes("abc")
    script.freeze_process(at=3.0, for_s=9.0)


@on_etcd(13.0, min_nodes=2, max_nodes=2, policy=RestartPolicy(max_restarts=1))
def etcd_loses_its_data(script: EtcdScript) -> None:
    """The coordinator finds with its next renewal that its lease is gone, and resigns. The next one has no memory, but
    the nodes know of the round, of the term and of the restart. All come back, and no worker notices."""
    script.nodes("ab")
    script.work("b", 1, failing(1.0))
    script.wipe(at=5.5)


@on_etcd(20.0, min_nodes=1, max_nodes=3)
def two_nodes_think_that_they_lead(script: EtcdScript) -> None:
    """etcd ends the leader's lease early, and the leader is cut off from it: it does not know. c, which lost its
    connection, is elected beside it. a and b have answers from the first one until it stops, at 0.9 of its lease; it
    would seal a round without c, but cannot write that down. The second one seals nothing for a node lease and a leader
    lease."""
    script.nodes("abc")
    script.cut_from_etcd("a", at=3.0, for_s=20.0)
    script.end_lease_early(at=3.01)
    script.reset("c", at=3.02)


@on_etcd(25.0, min_nodes=1, max_nodes=3)
def the_leaders_host_is_lost(script: EtcdScript) -> None:
    """Nobody closes anything. The nodes lose their places by their own clocks; the key lapses; the next coordinator
    waits for a node lease and a leader lease. That costs a restart, which is not charged."""
    script.nodes("abc")
    script.lose("a", at=3.0)


@on_etcd(40.0, min_nodes=2, max_nodes=2)
def etcd_is_without_a_quorum(script: EtcdScript) -> None:
    """For 3 s, which is not noticed; then for 10 s. The coordinator resigns, and the workers are stopped by their
    leases, but the run is not lost."""
    script.nodes("ab")
    script.lose_quorum(at=3.0, for_s=3.0)
    script.lose_quorum(at=10.0, for_s=10.0)
