"""The fleet of agents, as tables of events: each row is a time, an event, and the commands that follow."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import RUN_CLOSED, RUN_WENT_AWAY, WENT_AWAY
from holdfast.hosts import agent_fleet
from holdfast.hosts.agent_fleet import (
    AgentFleet,
    Agree,
    Agreed,
    Command,
    Cut,
    Ended,
    Event,
    Failed,
    FleetSettings,
    Forward,
    Host,
    HostsSeen,
    Lost,
    Outcome,
    Phase,
    Prepare,
    Ready,
    Say,
    Signalled,
    Start,
    TimePassed,
)
from tests.promises import promise, proves

Row = tuple[float, Event, list[Command]]

A, B, C = (Host(name, f"node-{name}") for name in "abc")
TERM, INT = signal.SIGTERM, signal.SIGINT
TIME = TimePassed()
REPORT = "\nthe report\n"
STOPPED = "holdfast: stopped by SIGINT\n"


def warn(text: str) -> Say:
    return Say(text, is_warning=True)


def fleet(nnodes: str, *, is_fixed: bool, **values: Any) -> AgentFleet:
    least, _, most = nnodes.partition(":")
    times = {"prepare_timeout_s": 30.0} if is_fixed else {"join_timeout_s": 60.0}
    settings = FleetSettings(int(least), int(most or least), nnodes, 10.0, is_fixed, **{**times, **values})
    return AgentFleet(settings, 0.0)


def ready(*hosts: Host) -> list[Row]:
    """All hosts of a fixed fleet are there."""
    rows: list[Row] = [(0.0, HostsSeen(hosts), [Prepare(host) for host in hosts])]
    rows += [(1.0, Ready(host.host_id), []) for host in hosts[:-1]]
    return [*rows, (1.0, Ready(hosts[-1].host_id), [Agree(tuple(host.host_id for host in hosts))])]


def fixed(*hosts: Host) -> list[Row]:
    """They run, and meet at the first."""
    names = ", ".join(host.name for host in hosts)
    said = Say(f"{len(hosts)} host{'' if len(hosts) == 1 else 's'} connected: {names}")
    return [*ready(*hosts), (1.0, Agreed("a"), [said, *(Start(host.host_id) for host in hosts)])]


def changing(*hosts: Host) -> list[Row]:
    starts: list[Row] = [(1.0, Ready(host.host_id), [Start(host.host_id)]) for host in hosts]
    return [(0.0, HostsSeen(hosts), [Prepare(host) for host in hosts]), *starts]


STANDS_BY: list[Row] = [
    *ready(A, B, C),
    (1.0, Agreed("a"), [Say("3 hosts connected: node-a, node-b, node-c"), Say("standing by: node-c"), Start("a"),
                        Start("b")]),
]  # fmt: skip

# Of a fixed fleet: what the rows tell, --nnodes, the rows, and the outcome (None: it goes on).
FIXED: dict[str, tuple[str, list[Row], Outcome | None]] = {
    "all succeed": ("2", [*fixed(A, B), (5.0, Ended("a", 0), []), (5.1, Ended("b", 0), [])], Outcome(0)),
    "a report is the outcome, and the others are stopped and cut": (
        "2",
        [
            *fixed(A, B),
            (5.0, Ended("b", 93, REPORT), []),
            (10.0, TIME, [Forward(TERM, ("a",))]),
            (40.0, TIME, [warn("node-a did not end in time; giving up"), Cut("a")]),
            (40.1, Lost("a", "cut"), []),
        ],
        Outcome(93, REPORT),
    ),
    "a run that is closed is over for all": (
        "1:2",
        [*fixed(A, B), (5.0, Ended("a", RUN_CLOSED, "holdfast: closed\n"), []), (5.1, Ended("b", RUN_CLOSED), [])],
        Outcome(RUN_CLOSED, "holdfast: closed\n"),
    ),
    "a run that went away after a notice is over for all, also for the host that stands by": (
        "1:2",
        [
            *STANDS_BY,
            (5.0, Ended("a", WENT_AWAY, f"holdfast: {RUN_WENT_AWAY}: x\n"), [Cut("c")]),
            (5.1, Ended("b", WENT_AWAY), []),
            (5.2, Lost("c", "cut"), []),
        ],
        Outcome(WENT_AWAY, f"holdfast: {RUN_WENT_AWAY}: x\n"),
    ),
    "a node that went away is not the run": (
        "1:2",
        [
            *fixed(A, B),
            (5.0, Ended("b", WENT_AWAY, "holdfast: this node went away after a notice: x\n"),
             [warn("node-b: this node went away after a notice: x; the run goes on with 1 host")]),
            (9.0, Ended("a", 0), []),
        ],
        Outcome(0),
    ),
    "a host that does not answer is cut": (
        "1",
        [
            (0.0, HostsSeen((A,)), [Prepare(A)]),
            (3.0, TIME, [Say("0 of 1 hosts are ready, waiting for node-a")]),
            (30.0, TIME, [Cut("a")]),
            (30.1, Ready("a"), []),  # Too late.
            (30.2, Lost("a", "it did not answer"), []),
        ],
        Outcome(1, error="node-a: it did not answer"),
    ),
    "failures are gathered for a moment, and the rest is cut": (
        "3",
        [
            (0.0, HostsSeen((A, B, C)), [Prepare(A), Prepare(B), Prepare(C)]),
            (1.0, Ready("c"), []),
            (1.0, Lost("b", "unknown"), []),
            (3.0, TIME, [Cut("a"), Cut("c")]),
            (3.1, Lost("a", "cut"), []),
            (3.1, Lost("c", "cut"), []),
        ],
        Outcome(1, error="node-b: unknown"),
    ),
    "a server that hangs up is tried again, four times in all": (
        "2",
        [
            (0.0, HostsSeen((A, B)), [Prepare(A), Prepare(B)]),
            (0.1, Ready("a"), []),
            (1.0, Lost("b", "it hung up", may_retry=True), []),
            (1.9, TIME, []),
            (2.0, TIME, [Prepare(B)]),
            (2.1, Lost("b", "it hung up", may_retry=True), []),
            (4.1, TIME, [Prepare(B), Say("1 of 2 hosts are ready, waiting for node-b")]),
            (4.2, Lost("b", "it hung up", may_retry=True), []),
            (7.2, TIME, [Prepare(B)]),
            (7.3, Lost("b", "it hung up", may_retry=True), [Cut("a")]),
            (7.4, Lost("a", "cut"), []),
        ],
        Outcome(1, error="node-b: it hung up"),
    ),
    "a host that cannot be reached is a node less": (
        "1:2",
        [
            (0.0, HostsSeen((A, B)), [Prepare(A), Prepare(B)]),
            (0.1, Lost("a", "unknown"), [warn("node-a: unknown; the run goes on with 1 host")]),
            (0.2, Ready("b"), [Agree(("b",))]),
            (0.2, Agreed("b"), [Say("1 host connected: node-b"), Start("b")]),
            (9.0, Ended("b", 0), []),
        ],
        Outcome(0),
    ),
    "the hosts cannot agree on where to meet": (
        "2",
        [
            *ready(A, B),
            (1.0, Failed("no place"), [Cut("a"), Cut("b")]),
            (1.1, Lost("a", ""), []),
            (1.1, Lost("b", ""), []),
        ],
        Outcome(1, error="no place"),
    ),
    "a signal while hosts connect cuts all": (
        "2",
        [
            (0.0, HostsSeen((A, B)), [Prepare(A), Prepare(B)]),
            (0.5, Ready("a"), []),
            (1.0, Signalled(INT), [Cut("a"), Cut("b")]),
            (1.1, Lost("a", "cut"), []),
            (1.1, Lost("b", "cut"), []),
        ],
        Outcome(130, STOPPED),
    ),
    "signals are passed on each time, and a second interrupt shortens the wait": (
        "2",
        [
            *fixed(A, B),
            (5.0, Signalled(INT), [warn("got SIGINT, passing it on to node-a, node-b"), Forward(INT, ("a", "b"))]),
            (6.0, Ended("a", 130, STOPPED), []),
            (7.0, Signalled(INT), [warn("got SIGINT, passing it on to node-b"), Forward(INT, ("b",))]),
            (21.9, TIME, []),
            (22.0, TIME, [warn("node-b did not end in time; giving up"), Cut("b")]),
            (22.1, Ended("b", 130, "holdfast: stopped by SIGINT; rank 1 had to be killed\n"), []),
        ],
        Outcome(130, "holdfast: stopped by SIGINT; rank 1 had to be killed\n"),
    ),
    "a failure after the signal is its consequence": (
        "2",
        [
            *fixed(A, B),
            (5.0, Signalled(INT), [warn("got SIGINT, passing it on to node-a, node-b"), Forward(INT, ("a", "b"))]),
            (6.0, Ended("a", 1, REPORT), []),
            (6.0, Ended("b", 130, STOPPED), []),
        ],
        Outcome(130, STOPPED),
    ),
    "a lost host is a lost node": (
        "1:2",
        [
            *fixed(A, B),
            (5.0, Lost("b", "the cable"), [warn("node-b is lost: the cable; the run goes on with 1 host")]),
            (9.0, Ended("a", 0), []),
        ],
        Outcome(0),
    ),
    "the host at which the nodes meet is lost": (
        "1:2",
        [
            *fixed(A, B),
            (5.0, Lost("a", "the cable"), [
                warn("node-a is lost: the cable; the run goes on with 1 host, if they can still reach the coordinator "
                     "there")
            ]),
            (65.0, Ended("b", 1, "holdfast run: error: could not reach a\n"), []),
        ],
        Outcome(1, error="node-a is lost: the cable; node-b: could not reach a"),
    ),
    "too few hosts end the run": (
        "2",
        [
            *fixed(A, B),
            (5.0, Lost("b", "the cable"), [
                warn("node-b is lost: the cable; 1 host is left, and --nnodes 2 needs 2: the run ends")
            ]),
            (10.0, TIME, [Forward(TERM, ("a",))]),
            (11.0, Ended("a", 143, "holdfast: stopped by SIGTERM\n"), []),
        ],
        Outcome(1, error="node-b is lost: the cable"),
    ),
    "all hosts are lost": (
        "1",
        [*fixed(A), (5.0, Lost("a", "the cable"), [])],
        Outcome(1, error="node-a is lost: the cable"),
    ),
    "an agent that cannot take part speaks for the command": (
        "2",
        [
            *fixed(A, B),
            (5.0, Ended("b", 2, "holdfast run: error: no gpu\n"), []),
            (5.1, Ended("a", 2, "holdfast run: error: no gpu\n"), []),
        ],
        Outcome(2, "holdfast run: error: node-b: no gpu\n"),
    ),
    "an agent that leaves is a node less": (
        "1:2",
        [
            *fixed(A, B),
            (5.0, Ended("b", 143, "holdfast: stopped by SIGTERM\n"), [
                warn("node-b: stopped by SIGTERM; the run goes on with 1 host")
            ]),
        ],
        None,
    ),
    "a host that stands by takes the place of one that is lost": (
        "2",
        [
            *STANDS_BY,
            (5.0, Lost("b", "the cable"), [
                warn("node-b is lost: the cable; the run goes on with 2 hosts"), Start("c")
            ]),
            (9.0, Ended("a", 0), []),
            (9.0, Ended("c", 0), []),
        ],
        Outcome(0),
    ),
    "a host that stands by is not started for a run that has succeeded": (
        "2",
        [
            *STANDS_BY,
            (5.0, Ended("a", 0), [Cut("c")]),
            (5.1, Lost("c", "cut"), []),
            (5.2, Lost("b", "the cable"), [
                warn("node-b is lost: the cable; 1 host is left, and --nnodes 2 needs 2: the run ends")
            ]),
        ],
        Outcome(0),
    ),
    "a host that stands by ends with the run": (
        "2",
        [*STANDS_BY, (5.0, Ended("b", 1, REPORT), [Cut("c")]), (5.1, Lost("c", "cut"), []),
         (5.2, Ended("a", 1, REPORT), [])],
        Outcome(1, REPORT),
    ),
    "a host that stands by may be lost": (
        "2",
        [*STANDS_BY, (5.0, Lost("c", "the cable"), [warn("node-c: the cable; the run goes on with 2 hosts")])],
        None,
    ),
}  # fmt: skip

POOR = Host("p", "poor", "4 GPUs")

CHANGING: dict[str, tuple[str, list[Row], Outcome | None]] = {
    "hosts get an agent up to the maximum, also those that come later": (
        "1:2",
        [
            *changing(A),
            (2.0, HostsSeen((A, B, C)), [Prepare(B)]),
            (2.1, Ready("b"), [Start("b")]),
            (3.0, HostsSeen((A, B, C)), []),
        ],
        None,
    ),
    "what is missing is said when it changes": (
        "2",
        [
            (0.0, HostsSeen(()), []),
            (3.0, TIME, [Say("0 of 2 hosts are ready, waiting for 2 more")]),
            (4.0, HostsSeen((A, POOR)), [Prepare(A)]),
            (5.0, Ready("a"), [Start("a")]),
            (13.0, TIME, [Say("1 of 2 hosts are ready, waiting for 1 more (poor lacks 4 GPUs)")]),
            (60.0, HostsSeen((A, B, POOR)), [Prepare(B)]),
        ],
        None,
    ),
    "a host that is waited for is named": (
        "1",
        [
            (0.0, HostsSeen((A,)), [Prepare(A)]),
            (3.0, TIME, [Say("0 of 1 hosts are ready, waiting for node-a")]),
            (60.0, TIME, [Cut("a")]),
            (60.1, Lost("a", "cut"), []),
        ],
        Outcome(1, error="no agent could be started within 60 s (--join-timeout): 0 of 1 hosts are ready, waiting for "
                "node-a"),
    ),
    "without any host the job waits for the join timeout": (
        "1",
        [
            *changing(A),
            (100.0, HostsSeen(()), [Cut("a"), warn("node-a is lost: the engine has lost the host")]),
            (100.1, Lost("a", "cut"), []),
            (103.0, TIME, [Say("0 of 1 hosts are ready, waiting for 1 more")]),
            (159.9, TIME, []),
            (160.0, TIME, []),
        ],
        Outcome(1, error="no agent could be started within 60 s (--join-timeout): 0 of 1 hosts are ready, waiting for "
                "1 more"),
    ),
    "no agent is started for a run that has succeeded": (
        "1:3",
        [
            *changing(A, B),
            (2.0, HostsSeen((A, B, C)), [Prepare(C)]),
            (3.0, Ended("a", 0), [Cut("c")]),
            (3.1, Lost("c", "cut"), []),
            (3.2, HostsSeen((A, B, C)), []),
            (3.3, Ended("b", 0), []),
        ],
        Outcome(0),
    ),
    "a bad host is not used again": (
        "1:2",
        [
            *changing(A, B),
            (5.0, Ended("a", 2), [warn("node-a: its agent ended with exit code 2; the run goes on with 1 host")]),
            (6.0, HostsSeen((A, B)), []),
            (7.0, Ended("b", 1), []),
        ],
        Outcome(2, error="node-a: its agent ended with exit code 2; node-b: its agent ended with exit code 1"),
    ),
    "another host takes the place of a bad one": (
        "1",
        [
            *changing(A),
            (2.0, HostsSeen((A, B)), []),
            (3.0, Ended("a", 2), [warn("node-a: its agent ended with exit code 2"), Prepare(B)]),
        ],
        None,
    ),
    "an agent that is killed is started again": (
        "1",
        [
            *changing(A),
            (5.0, Lost("a", "its agent was killed", may_retry=True), [
                warn("node-a is lost: its agent was killed; it is started again")
            ]),
            (6.0, TIME, [Prepare(A)]),
            (7.0, Ready("a"), [Start("a")]),
        ],
        None,
    ),
    "a start that cannot succeed is not repeated": (
        "1",
        [(0.0, HostsSeen((A,)), [Prepare(A)]), (1.0, Lost("a", "no holdfast there"), [])],
        Outcome(1, error="node-a: no holdfast there"),
    ),
    "a lost host leaves, and comes back under another id": (
        "1:2",
        [
            *changing(A, B),
            (5.0, HostsSeen((A,)), [
                Cut("b"), warn("node-b is lost: the engine has lost the host; the run goes on with 1 host")
            ]),
            (5.1, Ended("b", 0), []),  # Too late: nothing is known of it.
            (6.0, HostsSeen((A, Host("b2", "node-b"))), [Prepare(Host("b2", "node-b"))]),
        ],
        None,
    ),
    "a signal before anything runs": ("1", [(0.0, Signalled(INT), [])], Outcome(130, STOPPED)),
    "a signal cuts what has not started": (
        "1:3",
        [
            *changing(A),
            (2.0, HostsSeen((A, B)), [Prepare(B)]),
            (3.0, Signalled(INT), [warn("got SIGINT, passing it on to node-a"), Cut("b"), Forward(INT, ("a",))]),
            (3.1, Lost("b", "cut"), []),
            (4.0, Ended("a", 130, STOPPED), []),
        ],
        Outcome(130, STOPPED),
    ),
    "an engine that is lost stops the agents": (
        "2",
        [
            *changing(A, B),
            (5.0, Failed("it is gone"), [Forward(TERM, ("a", "b"))]),
            (5.1, Lost("a", "silent"), []),
            (5.2, Ended("b", 143), []),
        ],
        Outcome(1, error="it is gone"),
    ),
}  # fmt: skip


def rows_of(scenarios: dict[str, tuple[str, list[Row], Outcome | None]], is_fixed: bool) -> Iterator[Any]:
    for name, (nnodes, rows, outcome) in scenarios.items():
        yield pytest.param(fleet(nnodes, is_fixed=is_fixed), rows, outcome, id=name)


@proves(
    "ssh.failed-run-prints-report",
    "ssh.host-beyond-number-nodes",
    "steering.stop-ends-run-nodes",
    "ray.submit-starts-agent-node",
    "ray.failure-followed-restart-failed",
    "ray.nodes-adds-join-lost",
    "ray.sigterm-ctrl-command-end",
    "ray.head-killed-job-stopped",
    "ray.killed-coordinator-started-workers",
    "ray.wrong-input-missing-unreachable",
)
@pytest.mark.parametrize(("made", "rows", "outcome"), [*rows_of(FIXED, True), *rows_of(CHANGING, False)])
def test_a_scenario(made: AgentFleet, rows: list[Row], outcome: Outcome | None) -> None:
    for now, event, commands in rows:
        assert made.step(event, now) == commands, (now, event)
        deadline = made.next_deadline()
        assert deadline is None or deadline > now, "the transport would not sleep"
    assert made.outcome == outcome
    assert made.is_over == (outcome is not None)


REJOINS: list[Row] = [
    *fixed(A, B),
    (5.0, Lost("b", "gone"), [warn("node-b is lost: gone; it is started again")]),
    (9.9, TIME, []),
    (10.0, TIME, [Prepare(B)]),
    (12.0, Lost("b", "no route"), []),  # Its host is still away.
    (21.9, TIME, []),
    (22.0, TIME, [Prepare(B)]),
    (52.0, TIME, [Cut("b")]),  # It did not answer in time.
    (52.1, Lost("b", "it did not answer"), []),
    (72.1, TIME, [Prepare(B)]),
    (73.0, Ready("b"), [Start("b")]),
    (80.0, Lost("b", "gone"), [warn("node-b is lost: gone; it is started again")]),
]


@proves("ssh.lost-host-rejoins")
def test_a_lost_host_is_tried_again_later_each_time_and_named_at_the_end() -> None:
    made = fleet("1:2", is_fixed=True, rejoins=True)
    rows: list[Row] = [*REJOINS, (81.0, Ended("a", 0), [warn("exclude: node-b (2 losses)")])]
    for now, event, commands in rows:
        assert made.step(event, now) == commands, (now, event)
    assert made.outcome == Outcome(0)


@proves("ssh.lost-host-rejoins")
def test_a_host_that_is_lost_too_often_is_not_used_again() -> None:
    made, now = fleet("1:2", is_fixed=True, rejoins=True), 1.0
    for at, event, _ in fixed(A, B):
        made.step(event, at)
    for losses in range(1, agent_fleet.MOST_LOSSES + 1):
        said = made.step(Lost("b", "gone"), now)
        if losses < agent_fleet.MOST_LOSSES:
            now += 5.0 * 2 ** (losses - 1)
            assert made.step(TIME, now) == [Prepare(B)]
            assert made.step(Ready("b"), now) == [Start("b")]
    assert said == [warn("node-b is lost: gone; the run goes on with 1 host")]
    assert made.next_deadline() is None


@proves("ssh.host-discovery")
def test_the_list_of_hosts_may_change() -> None:
    made = fleet("1:2", is_fixed=True, rejoins=True)
    rows: list[Row] = [
        *fixed(A),
        (5.0, HostsSeen((A, B, C)), [Prepare(B)]),
        (6.0, Ready("b"), [Start("b")]),
        (7.0, HostsSeen((A, C)), [
            Cut("b"),
            warn("node-b is lost: it is not in the list of hosts any more; the run goes on with 2 hosts"),
            Prepare(C),
        ]),
        (8.0, Lost("b", "cut"), []),
    ]  # fmt: skip
    for now, event, commands in rows:
        assert made.step(event, now) == commands, (now, event)


def test_only_so_many_hosts_are_prepared_at_once_and_those_that_wait_do_not_hold_up_a_failure() -> None:
    hosts = tuple(Host(str(number), f"n{number}") for number in range(agent_fleet.MOST_AT_ONCE + 2))
    made = fleet(str(len(hosts)), is_fixed=True)
    *first, one_more, _ = hosts
    assert made.step(HostsSeen(hosts), 0.0) == [Prepare(host) for host in first]
    assert made.step(Ready("5"), 0.1) == [Prepare(one_more)]
    made.step(Lost("0", "unknown"), 0.2)
    for command in made.step(TIME, 2.2):
        assert isinstance(command, Cut)
        made.step(Lost(command.host_id, ""), 2.3)
    assert made.outcome == Outcome(1, error="n0: unknown")


def test_many_failures_are_counted() -> None:
    hosts = tuple(Host(name, name) for name in "abcdef")
    made = fleet("6", is_fixed=True)
    made.step(HostsSeen(hosts), 0.0)
    for host in hosts:
        made.step(Lost(host.host_id, "no"), 0.1)
    assert made.outcome == Outcome(1, error="a: no; b: no; c: no; d: no; and 2 more")


@promise("""ray.agent-workers-take-longer: An agent whose workers take longer than the others wait
    (`--exit-barrier-timeout`) goes on; if it fails, so has the job.""")
@proves("ssh.host-beyond-number-nodes")
@pytest.mark.parametrize("is_fixed", [True, False])
@pytest.mark.parametrize(
    ("later_s", "event", "outcome"),
    [
        (1.0, Lost("b", "the cable"), Outcome(0)),
        (5000.0, Ended("b", 0), Outcome(0)),
        (99.0, Lost("b", "the cable"), Outcome(1, error="node-b is lost: the cable")),
        (99.0, Ended("b", 1, REPORT), Outcome(1, REPORT)),
        (99.0, Ended("b", 2, "holdfast run: error: x\n"), Outcome(2, "holdfast run: error: node-b: x\n")),
        (99.0, Signalled(INT), Outcome(130, STOPPED)),
    ],
)
def test_an_agent_that_is_still_at_work_after_the_success_of_another(
    is_fixed: bool, later_s: float, event: Event, outcome: Outcome
) -> None:
    """The agent that has ended has waited for it for --exit-barrier-timeout. If it fails later, so has the job."""
    made = fleet("2", is_fixed=is_fixed)
    for now, each, _ in fixed(A, B) if is_fixed else changing(A, B):
        made.step(each, now)
    made.step(Ended("a", 0), 5.0)
    assert not made.is_over
    if later_s > 10.0:
        named = Say("other agents have succeeded; waiting for node-b (Ctrl-C or SIGTERM ends that)")
        assert (made.next_deadline(), made.step(TIME, 15.0)) == (15.0, [named])
        assert made.next_deadline() is None
    made.step(event, 5.0 + later_s)
    if not made.is_over:
        made.step(Ended("b", 130, STOPPED), 5.0 + later_s + 1)
    assert made.outcome == outcome


EVENTS = st.one_of(
    st.builds(Ready, st.sampled_from("abcd")),
    st.builds(Ended, st.sampled_from("abcd"), st.sampled_from([0, 1, 2, 143]), st.sampled_from(["", REPORT, STOPPED])),
    st.builds(Lost, st.sampled_from("abcd"), st.just("why"), st.booleans()),
    st.builds(Signalled, st.sampled_from([2, 15])),
    st.lists(st.sampled_from([A, B, C, Host("d", "d")]), unique=True).map(lambda hosts: HostsSeen(tuple(hosts))),
    st.just(Failed("gone")),
    st.just(TIME),
)


@promise("ssh.job-always-ends-agent: The job always ends, and with it every agent, whatever happens in which order.")
@given(st.lists(EVENTS, max_size=30), st.integers(1, 4), st.integers(0, 2), st.booleans())
def test_it_always_ends_and_every_agent_is_ended_once(
    events: list[Event], least: int, spare: int, is_fixed: bool
) -> None:
    """A transport that reports each host as it was prepared, and kills what is to be cut."""
    most, now = max(least, 4 - spare), 0.0
    made = fleet(f"{least}:{most}", is_fixed=is_fixed)
    alive: set[str] = set()
    running: set[str] = set()
    cut: set[str] = set()

    def step(event: Event) -> None:
        match event:
            case Ended(host) | Lost(host):
                alive.discard(host)
                running.discard(host)
                cut.discard(host)
        for command in made.step(event, now):
            match command:
                case Prepare(prepared):
                    assert prepared.host_id not in alive
                    alive.add(prepared.host_id)
                case Start(name):
                    assert name in alive
                    running.add(name)
                    assert len(running - cut) <= most
                case Cut(name):
                    assert name in alive
                    cut.add(name)
                case Agree():
                    step(Agreed("a"))

    step(HostsSeen((A, B, C, Host("d", "d"))))
    for event in events:
        now += 0.5
        is_of_host = isinstance(event, Ready | Ended | Lost)
        if (is_of_host and event.host_id not in alive) or made.is_over or (is_fixed and isinstance(event, HostsSeen)):
            continue
        if isinstance(event, HostsSeen) and {host.host_id for host in event.hosts} & cut:
            continue
        step(event)
    # From now on only time passes, and what is cut ends. Agents that are told to stop do not.
    for _ in range(100):
        while cut & alive:
            step(Lost(min(cut & alive), "cut"))
        if made.is_over:
            break
        deadline = made.next_deadline()
        if deadline is None:  # A run that goes on: the user ends it.
            assert made.phase is Phase.RUNNING
            step(Signalled(TERM))
        else:
            now = max(now, deadline)
            step(TIME)
    assert alive == set()
    assert made.outcome is not None
