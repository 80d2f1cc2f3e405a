"""Which nodes get an agent, when a job is over and how it ended, as tables of events."""

from __future__ import annotations

import signal

import pytest

from holdfast.errors import RUN_CLOSED
from holdfast.hosts.placement import (
    ClusterLost,
    Command,
    Cut,
    Ended,
    Event,
    Interrupted,
    Lost,
    Node,
    NodesSeen,
    Outcome,
    Pass,
    Phase,
    Placement,
    Say,
    Start,
    Started,
)

A, B, C = (Node(name, f"node-{name}") for name in "abc")


class Job:
    """A machine with a clock, and what it ordered."""

    def __init__(self, min_nodes: int = 1, max_nodes: int = 2) -> None:
        self.now = 100.0
        self.machine = Placement(min_nodes, max_nodes, join_timeout_s=60.0, grace_s=30.0, now=self.now)

    def take(self, *events: Event | None) -> list[Command]:
        return [command for event in events for command in self.machine.step(event, self.now)]

    def running(self, *nodes: Node) -> Job:
        self.take(NodesSeen(nodes), *(Started(node.node_id) for node in nodes))
        return self

    def pass_time(self) -> list[Command]:
        """Until the next deadline."""
        deadline = self.machine.next_deadline()
        assert deadline is not None
        self.now = deadline
        return self.take(None)

    @property
    def end(self) -> Outcome | None:
        return self.machine.outcome if self.machine.phase is Phase.OVER else None


def starts(commands: list[Command]) -> list[Node]:
    return [command.node for command in commands if isinstance(command, Start)]


def said(commands: list[Command]) -> list[str]:
    return [command.text for command in commands if isinstance(command, Say)]


def test_nodes_get_an_agent_up_to_the_maximum() -> None:
    job = Job(1, 2)
    assert job.take(NodesSeen((A, B, C))) == [Start(A), Start(B)]
    assert job.take(NodesSeen((A, B, C)), Started("a"), Started("b")) == []


def test_a_node_that_comes_later_gets_one() -> None:
    assert starts(Job(1, 2).running(A).take(NodesSeen((A, B)))) == [B]


def test_what_is_missing_is_said_when_it_changes() -> None:
    job, poor = Job(2, 2), Node("p", "poor", "4 GPUs")
    assert said(job.take(None)) == []
    assert said(job.take(NodesSeen(()))) == ["the cluster has no node yet, waiting for 2 more"]
    there = ["1 of 2 nodes are there, waiting for 1 more (poor lacks 4 GPUs)"]
    assert said(job.take(NodesSeen((A, poor)))) == there
    assert said(job.take(NodesSeen((A, poor)), Started("a"))) == []
    assert said(job.take(NodesSeen((A, B, poor)))) == []


def test_success_ends_the_job() -> None:
    job = Job().running(A, B)
    assert job.take(Ended("a", 0)) == []
    assert job.end is None
    assert job.take(Ended("b", 0)) == []
    assert job.end == Outcome(0)


def test_the_first_report_is_the_outcome() -> None:
    job = Job().running(A, B)
    job.take(Ended("b", 3, "the report"), Ended("a", 3, "the report"))
    assert job.end == Outcome(3, "the report")


def test_agents_that_do_not_end_with_the_run_are_stopped_and_killed() -> None:
    job = Job().running(A, B)
    job.take(Ended("a", 1, "the report"))
    assert job.pass_time() == [Pass("b", signal.SIGTERM)]
    assert Cut("b") in job.pass_time()
    assert job.end == Outcome(1, "the report")


def test_an_agent_that_is_still_at_work_goes_on_after_the_success_of_another() -> None:
    """The agent that has ended has waited for it for --exit-barrier-timeout."""
    job = Job().running(A, B)
    job.take(Ended("a", 0))
    assert job.machine.next_deadline() is None
    job.now += 5000
    job.take(Ended("b", 0))
    assert job.end == Outcome(0)


@pytest.mark.parametrize(
    ("later_s", "event", "outcome"),
    [
        (1.0, Lost("b", "its actor died"), Outcome(0)),
        (99.0, Lost("b", "its actor died"), Outcome(1, error="node-b: its actor died")),
        (99.0, Ended("b", 3, "the report"), Outcome(3, "the report")),
        (99.0, Ended("b", 137), Outcome(137, error="node-b: the agent was killed")),
    ],
)
def test_a_failure_after_the_success_of_another_agent(later_s: float, event: Event, outcome: Outcome) -> None:
    job = Job().running(A, B)
    job.take(Ended("a", 0))
    job.now += later_s
    job.take(event)
    assert job.end == outcome


def test_a_signal_after_the_success_of_another_agent() -> None:
    job = Job().running(A, B)
    job.take(Ended("a", 0))
    job.now += 99
    assert job.take(Interrupted(signal.SIGINT)) == [Pass("b", signal.SIGINT)]
    job.take(Ended("b", 130))
    assert job.end == Outcome(130)


def test_no_agent_is_started_for_a_run_that_is_over() -> None:
    job = Job(1, 3).running(A, B)
    assert starts(job.take(NodesSeen((A, B, C)))) == [C]
    assert job.take(Ended("a", 0)) == [Cut("c")]
    assert job.take(NodesSeen((A, B, C))) == []


def test_a_bad_node_is_not_used_again() -> None:
    job = Job(1, 2).running(A, B)
    assert job.take(Ended("a", 2)) == [Say("node-a: the agent ended with exit code 2", is_warning=True)]
    assert job.take(NodesSeen((A, B))) == []
    job.take(Ended("b", 1))
    assert job.end == Outcome(2)


def test_another_node_takes_the_place_of_a_bad_one() -> None:
    job = Job(1, 1).running(A)
    assert starts(job.take(NodesSeen((A, B)))) == []
    assert starts(job.take(Ended("a", 2))) == [B]


def test_an_agent_that_is_killed_or_lost_is_started_again_but_not_for_ever() -> None:
    job = Job(1, 1).running(A)
    assert starts(job.take(Ended("a", 128 + signal.SIGKILL))) == [A]
    commands = job.take(Started("a"), Lost("a", "its actor died"))
    assert commands == [Cut("a"), Say("node-a: its actor died", is_warning=True), Start(A)]
    job.take(Started("a"), Lost("a", "its actor died"))
    assert job.end == Outcome(1, error="no node is left that can run an agent")


def test_a_start_that_cannot_succeed_is_not_repeated() -> None:
    job = Job(1, 1)
    job.take(NodesSeen((A,)), Lost("a", "no holdfast there", is_final=True))
    assert job.end == Outcome(1, error="no node is left that can run an agent")


def test_a_lost_node_leaves_and_comes_back() -> None:
    job = Job(1, 2).running(A, B)
    assert job.take(NodesSeen((A,))) == [Cut("b"), Say("node-b: the cluster has lost the node", is_warning=True)]
    assert job.take(Ended("b", 0)) == []  # Too late: nothing is known of it.
    assert job.end is None
    again = Node("b2", "node-b")
    assert starts(job.take(NodesSeen((A, again)))) == [again]


def test_without_any_node_the_job_waits_for_the_join_timeout() -> None:
    job = Job(1, 2).running(A)
    job.now += 1000
    job.take(NodesSeen(()))
    left_at = job.now
    job.pass_time()
    assert job.now == left_at + 60
    assert job.end is not None
    assert job.end.error.startswith("no agent could be started within 60 s (--join-timeout): the cluster has no node")


def test_an_agent_that_must_wait_for_resources_is_named() -> None:
    job = Job(1, 1)
    job.take(NodesSeen((A,)))
    assert said(job.pass_time()) == ["node-a: waiting for the resources that the agent is to have"]
    assert job.pass_time() == [Cut("a")]
    assert job.end is not None
    assert job.end.code == 1


def test_a_signal_is_passed_on_each_time() -> None:
    job = Job(1, 3).running(A, B)
    job.take(NodesSeen((A, B, C)))
    assert job.take(Interrupted(signal.SIGINT)) == [Cut("c"), Pass("a", signal.SIGINT), Pass("b", signal.SIGINT)]
    assert job.take(Ended("a", 130), Interrupted(signal.SIGINT)) == [Pass("b", signal.SIGINT)]
    stopped_at = job.now
    assert Cut("b") in job.pass_time()
    assert job.now == stopped_at + 10  # And not after the whole grace.
    assert job.end == Outcome(130)


def test_a_closed_run_is_over_for_all() -> None:
    """`holdfast stop` is not a problem of one node."""
    job = Job(1, 2).running(A, B)
    assert job.take(Ended("a", RUN_CLOSED), Ended("b", RUN_CLOSED), NodesSeen((A, B, C))) == []
    assert job.end == Outcome(RUN_CLOSED)


def test_a_signal_before_anything_runs() -> None:
    job = Job()
    job.take(Interrupted(signal.SIGTERM))
    assert job.end == Outcome(143)


def test_a_lost_cluster_stops_the_agents() -> None:
    job = Job().running(A, B)
    assert job.take(ClusterLost("it is gone")) == [Pass("a", signal.SIGTERM), Pass("b", signal.SIGTERM)]
    job.take(Lost("a", "silent"), Ended("b", 143))
    assert job.end == Outcome(1, error="it is gone")
