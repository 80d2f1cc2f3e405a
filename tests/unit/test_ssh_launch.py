"""The machine of `holdfast run --hosts`, in tables of events."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.hosts.ssh import launch
from holdfast.hosts.ssh.launch import (
    Begun,
    Connect,
    Connected,
    Cut,
    Forward,
    Gone,
    Launch,
    Outcome,
    Phase,
    Say,
    Settings,
    Signalled,
    Start,
    TimePassed,
)
from holdfast.hosts.ssh.messages import Hello


def hello(address: str = "10.0.0.1", machine: str = "") -> Hello:
    return Hello(1, "0.1.0", address, 4000, machine or address)


def machine(*names: str, at_least: int = 0, at_most: int = 0, **values: Any) -> Launch:
    most = at_most or len(names)
    least = at_least or most
    nnodes = f"{least}:{most}" if at_least else str(least)
    return Launch(Settings(names, least, most, nnodes, 30.0, 10.0, **{"needs_place": True, **values}))


def begun(*names: str, **values: Any) -> Launch:
    made = machine(*names, **values)
    assert made.step(Begun(), 0.0) == [Connect(host) for host in range(len(names))]
    return made


def running(*names: str, **values: Any) -> Launch:
    made = begun(*names, **values)
    for host in range(len(names)):
        made.step(Connected(host, hello(f"10.0.0.{host}")), 1.0)
    assert made.phase is Phase.RUNNING
    return made


def words(commands: list[launch.Command]) -> list[str]:
    return [each.text for each in commands if isinstance(each, Say)]


def acts(commands: list[launch.Command]) -> list[launch.Command]:
    return [each for each in commands if not isinstance(each, Say)]


def success(host: int) -> Gone:
    return Gone(host, code=0)


# Connecting.


def test_hosts_are_started_when_all_are_connected_and_meet_at_the_first() -> None:
    made = begun("a", "b")
    assert made.step(Connected(1, hello("10.0.0.2")), 1.0) == []
    assert made.step(Connected(0, hello("10.0.0.1")), 2.0) == [
        Say("2 hosts connected: a, b"), Start(0, 0), Start(1, 0)
    ]  # fmt: skip


def test_no_place_is_needed_if_the_user_names_one() -> None:
    made = begun("a", needs_place=False)
    assert acts(made.step(Connected(0, hello("")), 1.0)) == [Start(0, None)]


def test_only_so_many_connect_at_once() -> None:
    count = launch.MOST_AT_ONCE + 2
    made = machine(*(f"n{number}" for number in range(count)))
    assert made.step(Begun(), 0.0) == [Connect(host) for host in range(launch.MOST_AT_ONCE)]
    assert made.step(Connected(5, hello()), 0.1) == [Connect(launch.MOST_AT_ONCE)]
    assert made.step(TimePassed(), 0.2) == []
    assert made.step(Connected(6, hello()), 0.3) == [Connect(launch.MOST_AT_ONCE + 1)]


def test_it_is_said_who_is_waited_for() -> None:
    made = begun("a", "b", "c")
    made.step(Connected(1, hello()), 0.5)
    assert made.next_deadline() == 3.0
    assert words(made.step(TimePassed(), 3.0)) == ["1 of 3 hosts are connected, waiting for a, c"]
    assert made.next_deadline() == 13.0


def test_a_host_that_does_not_answer_is_cut() -> None:
    made = begun("a")
    made.step(TimePassed(), 29.0)
    assert made.next_deadline() == 30.0
    assert acts(made.step(TimePassed(), 30.0)) == [Cut(0)]
    assert acts(made.step(TimePassed(), 30.1)) == []
    made.step(Connected(0, hello()), 30.2)  # Too late.
    made.step(Gone(0, "it did not answer"), 30.3)
    assert acts(made.step(TimePassed(), made.next_deadline() or 99.0)) == []
    assert made.outcome == Outcome(1, "holdfast run: error: a: it did not answer\n")


def test_failures_are_gathered_for_a_moment_and_the_rest_is_cut() -> None:
    made = begun("a", "b", "c", "d")
    made.step(Connected(0, hello()), 0.5)
    assert made.step(Gone(1, "unknown"), 1.0) == []
    assert made.step(Gone(2, "refused"), 1.5) == []
    assert made.next_deadline() == 3.0
    assert acts(made.step(TimePassed(), 3.0)) == [Cut(0), Cut(3)]
    assert made.step(Gone(0, "cut"), 3.1) == []
    assert made.phase is Phase.ENDING
    made.step(Gone(3, "cut"), 3.2)
    assert made.outcome == Outcome(1, "holdfast run: error: b: unknown; c: refused\n")


def test_hosts_that_wait_for_their_turn_do_not_hold_up_a_failure() -> None:
    names = [f"n{number}" for number in range(launch.MOST_AT_ONCE + 5)]
    made = machine(*names)
    made.step(Begun(), 0.0)
    made.step(Gone(0, "unknown"), 0.1)
    cut = acts(made.step(TimePassed(), 2.1))
    assert cut == [Cut(host) for host in range(1, launch.MOST_AT_ONCE)]
    for each in cut:
        assert isinstance(each, Cut)
        made.step(Gone(each.host, ""), 2.2)
    assert made.outcome == Outcome(1, "holdfast run: error: n0: unknown\n")


def test_many_failures_are_counted() -> None:
    made = begun(*"abcdef")
    for host in range(6):
        made.step(Gone(host, "no"), 0.1)
    assert made.outcome == Outcome(1, "holdfast run: error: a: no; b: no; c: no; d: no; and 2 more\n")


def test_a_host_that_cannot_be_reached_is_a_node_less() -> None:
    made = begun("a", "b", at_least=1)
    assert words(made.step(Gone(0, "unknown"), 0.1)) == ["a: unknown; the run goes on with 1 host"]
    assert acts(made.step(Connected(1, hello()), 0.2)) == [Start(1, 1)]
    made.step(success(1), 9.0)
    assert made.outcome == Outcome(0)


def test_a_server_that_hangs_up_is_tried_again() -> None:
    made = begun("a", "b")
    made.step(Connected(0, hello()), 0.1)
    hung_up = Gone(1, "it hung up", may_pass=True)
    for now, tries in ((4.0, 1), (8.0, 2), (12.0, 3)):
        assert acts(made.step(hung_up, now)) == []
        assert acts(made.step(TimePassed(), now + 0.9 * tries)) == []
        assert acts(made.step(TimePassed(), now + tries)) == [Connect(1)]
    assert acts(made.step(hung_up, 16.0)) == [Cut(0)]
    made.step(Gone(0, "cut"), 16.1)
    assert made.outcome == Outcome(1, "holdfast run: error: b: it hung up\n")


def test_a_signal_while_hosts_connect_cuts_all() -> None:
    made = begun("a", "b")
    made.step(Connected(0, hello()), 0.5)
    assert made.step(Signalled(signal.SIGINT), 1.0) == [Cut(0), Cut(1)]
    made.step(Gone(0, "cut"), 1.1)
    made.step(Gone(1, "cut"), 1.2)
    assert made.outcome == Outcome(130, "holdfast: stopped by SIGINT\n")


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (hello("127.0.0.1", "m1"), hello("10.0.0.2", "m2"), "a was reached at 127.0.0.1, where b cannot reach it"),
        (hello("::1", "m1"), hello("::1", "m2"), "a was reached at ::1, where b cannot reach it"),
        (hello("", "m1"), hello("10.0.0.2", "m2"), "a does not know at which address it was reached"),
        (hello("127.0.0.1", "m1"), hello("127.0.0.2", "m1"), ""),
        (hello("10.0.0.1", "m1"), hello("127.0.0.1", "m2"), ""),
    ],
)
def test_a_loopback_address_between_hosts(first: Hello, second: Hello, problem: str) -> None:
    made = begun("a", "b")
    made.step(Connected(0, first), 1.0)
    done = acts(made.step(Connected(1, second), 1.0))
    assert done == ([Cut(0), Cut(1)] if problem else [Start(0, 0), Start(1, 0)])
    for host in (0, 1) if problem else ():
        made.step(Gone(host), 1.1)
    assert problem in (made.outcome.words if made.outcome else "")


def test_the_user_lets_hosts_meet_at_a_loopback_address() -> None:
    for machines, is_wrong in ((("m1", "m2"), True), (("m1", "m1"), False)):
        made = begun("a", "b", needs_place=False, place="localhost")
        made.step(Connected(0, hello(machine=machines[0])), 1.0)
        done = acts(made.step(Connected(1, hello(machine=machines[1])), 1.0))
        assert done == ([Cut(0), Cut(1)] if is_wrong else [Start(0, None), Start(1, None)])


# Running.


def test_success_is_said_by_all() -> None:
    made = running("a", "b")
    assert made.step(success(0), 5.0) == []
    assert made.step(success(1), 5.1) == []
    assert made.outcome == Outcome(0)


def test_a_host_that_is_still_at_work_goes_on_after_the_success_of_another() -> None:
    """The agent that has ended has waited for it for --exit-barrier-timeout."""
    made = running("a", "b")
    assert made.step(success(0), 5.0) == []
    assert made.next_deadline() is None
    assert made.step(success(1), 5000.0) == []
    assert made.outcome == Outcome(0)


@pytest.mark.parametrize(
    ("later_s", "event", "outcome"),
    [
        (1.0, Gone(1, "the cable"), Outcome(0)),
        (99.0, Gone(1, "the cable"), Outcome(1, "holdfast run: error: b is lost: the cable\n")),
        (99.0, Gone(1, code=1, words="the report\n", is_outcome=True), Outcome(1, "the report\n")),
        (99.0, Gone(1, code=2, words="holdfast run: error: x\n"), Outcome(2, "holdfast run: error: b: x\n")),
    ],
)
def test_a_failure_after_the_success_of_another_host(later_s: float, event: Gone, outcome: Outcome) -> None:
    made = running("a", "b")
    made.step(success(0), 5.0)
    made.step(event, 5.0 + later_s)
    assert made.outcome == outcome


def test_a_signal_after_the_success_of_another_host() -> None:
    made = running("a", "b")
    made.step(success(0), 5.0)
    assert acts(made.step(Signalled(signal.SIGINT), 99.0)) == [Forward(signal.SIGINT, (1,))]
    made.step(Gone(1, code=130, words="holdfast: stopped by SIGINT\n"), 100.0)
    assert made.outcome == Outcome(130, "holdfast: stopped by SIGINT\n")


def test_a_report_is_shown_once() -> None:
    made = running("a", "b")
    made.step(Gone(1, code=1, words="the report\n", is_outcome=True), 5.0)
    made.step(Gone(0, code=1, words="the report\n", is_outcome=True), 5.1)
    assert made.outcome == Outcome(1, "the report\n")


def test_an_agent_that_does_not_end_with_the_run_is_stopped_and_cut() -> None:
    made = running("a", "b")
    made.step(Gone(1, code=93, words="the report\n", is_outcome=True), 5.0)
    assert made.next_deadline() == 10.0
    assert made.step(TimePassed(), 10.0) == [Forward(signal.SIGTERM, (0,))]
    assert made.next_deadline() == 40.0
    assert acts(made.step(TimePassed(), 40.0)) == [Cut(0)]
    made.step(Gone(0, "cut"), 40.1)
    assert made.outcome == Outcome(93, "the report\n")


def test_a_lost_host_is_a_lost_node() -> None:
    made = running("a", "b", at_least=1)
    assert made.step(Gone(1, "the cable"), 5.0) == [Say("b is lost: the cable; the run goes on with 1 host", True)]
    assert made.next_deadline() is None
    made.step(success(0), 9.0)
    assert made.outcome == Outcome(0)


def test_the_host_where_the_nodes_meet_is_lost() -> None:
    made = running("a", "b", "c", at_least=1)
    said = words(made.step(Gone(0, "the cable"), 5.0))
    assert said == ["a is lost: the cable; the run goes on with 2 hosts, if they can still reach the coordinator there"]
    for host in (1, 2):
        made.step(Gone(host, code=1, words="holdfast run: error: could not reach a\n"), 65.0)
    stories = "a is lost: the cable; b: could not reach a; c: could not reach a"
    assert made.outcome == Outcome(1, f"holdfast run: error: {stories}\n")


def test_too_few_hosts_end_the_run() -> None:
    made = running("a", "b")
    said = words(made.step(Gone(1, "the cable"), 5.0))
    assert said == ["b is lost: the cable; 1 host is left, and --nnodes 2 needs 2: the run ends"]
    assert made.step(TimePassed(), 10.0) == [Forward(signal.SIGTERM, (0,))]
    made.step(Gone(0, code=143, words="holdfast: stopped by SIGTERM\n"), 11.0)
    assert made.outcome == Outcome(1, "holdfast run: error: b is lost: the cable\n")


def test_all_hosts_are_lost() -> None:
    made = running("a", "b")
    made.step(Gone(1, "the cable"), 5.0)
    made.step(Gone(0, "the switch"), 5.0)
    assert made.outcome == Outcome(1, "holdfast run: error: b is lost: the cable; a is lost: the switch\n")


def test_an_agent_that_cannot_take_part_speaks_for_the_command() -> None:
    made = running("a", "b")
    assert made.step(Gone(1, code=2, words="holdfast run: error: no gpu\n"), 5.0) == []
    made.step(Gone(0, code=2, words="holdfast run: error: no gpu\n"), 5.0)
    assert made.outcome == Outcome(2, "holdfast run: error: b: no gpu\n")


def test_an_agent_that_leaves_is_a_node_less() -> None:
    made = running("a", "b", at_least=1)
    said = words(made.step(Gone(1, code=143, words="holdfast: stopped by SIGTERM\n"), 5.0))
    assert said == ["b: stopped by SIGTERM; the run goes on with 1 host"]


def test_signals_are_passed_on_each_time() -> None:
    made = running("a", "b")
    assert made.step(Signalled(signal.SIGINT), 5.0) == [
        Say("got SIGINT, passing it on to a, b", True), Forward(signal.SIGINT, (0, 1))
    ]  # fmt: skip
    assert made.next_deadline() == 35.0
    made.step(Gone(0, code=130, words="holdfast: stopped by SIGINT\n"), 6.0)
    assert acts(made.step(Signalled(signal.SIGINT), 7.0)) == [Forward(signal.SIGINT, (1,))]
    assert made.next_deadline() == 22.0
    made.step(Gone(1, code=130, words="holdfast: stopped by SIGINT; rank 1 had to be killed\n"), 8.0)
    assert made.outcome == Outcome(130, "holdfast: stopped by SIGINT; rank 1 had to be killed\n")


def test_a_failure_after_the_signal_is_its_consequence() -> None:
    made = running("a", "b")
    made.step(Signalled(signal.SIGINT), 5.0)
    made.step(Gone(0, code=1, words="the report\n", is_outcome=True), 6.0)
    made.step(Gone(1, code=130, words="holdfast: stopped by SIGINT\n"), 6.0)
    assert made.outcome == Outcome(130, "holdfast: stopped by SIGINT\n")


def test_more_termination_signals_do_not_shorten_the_wait() -> None:
    made = running("a")
    made.step(Signalled(signal.SIGTERM), 5.0)
    assert acts(made.step(Signalled(signal.SIGTERM), 6.0)) == [Forward(signal.SIGTERM, (0,))]
    assert made.next_deadline() == 35.0


def test_a_closed_run_is_an_outcome() -> None:
    made = running("a", "b", at_least=1)
    closed = "holdfast: the run was closed: by me\n"
    made.step(Gone(0, code=94, words=closed, is_outcome=True), 5.0)
    made.step(Gone(1, code=94, words=closed, is_outcome=True), 5.0)
    assert made.outcome == Outcome(94, closed)


# Hosts that stand by.


def with_spare() -> Launch:
    made = begun("a", "b", "c", at_most=2)
    made.step(Connected(2, hello("10.0.0.2")), 1.0)
    made.step(Connected(1, hello("10.0.0.1")), 1.0)
    assert made.step(Connected(0, hello("10.0.0.0")), 1.0) == [
        Say("3 hosts connected: a, b, c"), Say("standing by: c"), Start(0, 0), Start(1, 0)
    ]  # fmt: skip
    return made


def test_a_host_that_stands_by_is_not_started_and_ends_with_the_run() -> None:
    made = with_spare()
    assert made.step(success(0), 5.0) == []
    assert made.step(success(1), 5.1) == [Cut(2)]
    made.step(Gone(2, "cut"), 5.2)
    assert made.outcome == Outcome(0)


def test_it_takes_the_place_of_a_host_that_is_lost() -> None:
    made = with_spare()
    assert acts(made.step(Gone(1, "the cable"), 5.0)) == [Start(2, 0)]
    assert made.step(success(0), 9.0) == []
    made.step(success(2), 9.0)
    assert made.outcome == Outcome(0)


def test_it_is_not_started_for_a_run_that_has_succeeded() -> None:
    made = with_spare()
    made.step(success(0), 5.0)
    assert made.step(Gone(1, "the cable"), 5.1)[-1] == Cut(2)
    made.step(Gone(2, "cut"), 5.2)
    assert made.outcome == Outcome(0)


@pytest.mark.parametrize("event", [Signalled(signal.SIGTERM), Gone(1, code=1, words="report\n", is_outcome=True)])
def test_it_is_cut_when_the_run_ends(event: launch.Event) -> None:
    assert Cut(2) in with_spare().step(event, 5.0)


def test_a_host_that_stands_by_may_be_lost() -> None:
    made = with_spare()
    assert made.step(Gone(2, "the cable"), 5.0) == [Say("c: the cable; the run goes on with 2 hosts", True)]


# Whatever happens.

EVENTS = st.one_of(
    st.builds(Connected, st.integers(0, 3), st.builds(hello, st.sampled_from(["10.0.0.1", "127.0.0.1", ""]))),
    st.builds(
        Gone,
        st.integers(0, 3),
        st.just("why"),
        st.sampled_from([None, None, 0, 1, 2, 143]),
        st.just("words"),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(Signalled, st.sampled_from([2, 15])),
    st.just(TimePassed()),
)


@given(st.lists(EVENTS, max_size=30), st.integers(1, 4), st.integers(0, 2))
def test_it_always_ends_and_every_ssh_is_ended_once(events: list[launch.Event], least: int, spare: int) -> None:
    """A shell that reports each ssh as `Connect` has started it, and kills what is to be cut."""
    made, now = machine(*"abcd", at_least=least, at_most=max(least, 4 - spare)), 0.0
    alive: set[int] = set()
    hellos: set[int] = set()
    cut: set[int] = set()

    def step(event: launch.Event) -> None:
        for command in made.step(event, now):
            match command:
                case Connect(host):
                    assert host not in alive
                    alive.add(host)
                    hellos.discard(host)
                case Start(host):
                    assert host in alive
                case Cut(host):
                    assert host in alive
                    cut.add(host)

    step(Begun())
    for event in events:
        now += 0.5
        match event:
            case Gone(host):
                if host not in alive:
                    continue
                alive.discard(host)
            case Connected(host):
                if host not in alive or host in hellos:
                    continue
                hellos.add(host)
        if made.phase is not Phase.OVER:
            step(event)
    # From now on only time passes, and what is cut ends. Agents that are told to stop do not.
    for _ in range(100):
        while cut & alive:
            host = min(cut & alive)
            alive.discard(host)
            step(Gone(host, "cut"))
        if made.phase is Phase.OVER:
            break
        deadline = made.next_deadline()
        if deadline is None:  # A run that goes on: the user ends it.
            assert made.phase is Phase.RUNNING
            step(Signalled(signal.SIGTERM))
        else:
            now = max(now, deadline)
            step(TimePassed())
    assert alive == set()
    assert made.phase is Phase.OVER
    assert made.outcome is not None
