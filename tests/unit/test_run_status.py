"""How a run stands, as people are told: after a history of events, the phase, the wait and the nodes it is about."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.rendezvous.membership import run_status
from holdfast.rendezvous.membership.model import CloseRequested, Memory, Place, Stage
from holdfast.rendezvous.membership.phases import Membership
from holdfast.rendezvous.membership.protocol import ConnectionClosed
from holdfast.telemetry.status import RunStatus, plain
from tests.promises import promise, proves
from tests.unit.test_phases import (
    BACKOFF,
    ONE,
    PAIR,
    RETRY,
    THREE,
    TIME,
    TOGETHER,
    UP_TO_2,
    failed,
    joined,
    left,
    returned,
    succeeded,
)

PAIR_RUNS = [(0.0, joined("a", RETRY, address="10.0.0.1", local_world_size=2)), (0.0, joined("b", RETRY))]
ADOPTED = Place(1, 3, 0, 2, (("default", 1),))

# Events with their times; the time of the look; what is waited for; on whom.
HISTORIES: dict[str, tuple[list[tuple[float, Any]], float, str | None, tuple[str, ...]]] = {
    "nothing has happened": ([], 0.0, "nodes to join", ()),
    "too few": (
        [(0.0, joined("a", THREE))], 10.0, "2 more of at least 3 nodes to join (1 joined, timeout in 20 s)", ()
    ),
    "last call": ([(0.0, joined("a", UP_TO_2))], 2.0, "last call: 1 of at most 2 nodes joined, 3 s left", ()),
    "one that has joined is cut off": (
        [(0.0, joined("a", THREE)), (0.0, joined("b", THREE)), (1.0, ConnectionClosed("b/0"))],
        1.0, "2 more of at least 3 nodes to join (1 joined, timeout in 29 s)", ("b",),
    ),
    "all is well": (PAIR_RUNS, 1.0, None, ()),
    "one has finished": ([*PAIR_RUNS, (2.0, succeeded("a"))], 2.0, "the workers of b to finish", ("b",)),
    "a member is cut off": (
        [*PAIR_RUNS, (2.0, ConnectionClosed("b/0"))], 2.0, "b to connect again, else a new round is formed", ("b",)
    ),
    "stopping": ([*PAIR_RUNS, (2.0, failed("a"))], 2.0, "a, b to stop the workers of round 1", ("a", "b")),
    "one is back from the stop": (
        [*PAIR_RUNS, (2.0, failed("a")), (3.0, joined("a", RETRY, 1))], 3.0, "b to stop the workers of round 1", ("b",)
    ),
    "a pause before the restart": (
        [(0.0, joined("a", BACKOFF)), (1.0, failed("a")), (2.0, joined("a", BACKOFF, 1))],
        4.0, "the pause before a restart to end, 6 s more", (),
    ),
    "newcomers come together": (
        [(0.0, joined("a", TOGETHER)), (5.0, TIME), (10.0, joined("b", TOGETHER))],
        12.0, "more newcomers, 3 s more, before b can join", ("b",),
    ),
    "adopted": ([(0.0, returned("a", PAIR, ADOPTED))], 1.0, "1 node of round 3 to come back", ()),
    "ended": ([(0.0, joined("a", ONE)), (1.0, succeeded("a"))], 1.0, None, ()),
}  # fmt: skip


def look(events: list[tuple[float, Any]], now: float, **fields: Any) -> RunStatus:
    run = Membership(0.0)
    for at, event in events:
        run.step(event, at)
        run.check()
    return run_status.run_status("job7", run, now, **fields)


@promise("""steering.says-sentence-run-waits: It says in one sentence what the run does or waits for and on whom, and
    who was refused and why, a wrong token included.""")
@proves("nodes.newcomers-arrive-admit-delay")
@pytest.mark.parametrize("name", HISTORIES)
def test_what_is_waited_for(name: str) -> None:
    events, now, waiting_for, waiting_on = HISTORIES[name]
    found = look(events, now)
    assert (found.waiting_for, found.waiting_on) == (waiting_for, waiting_on)


def test_members_of_an_earlier_round_are_awaited() -> None:
    run = Membership(0.0, Memory(last_round=2, members=("a/0", "b/0"), settings=PAIR))
    run.step(joined("c", PAIR), 1.0)
    found = run_status.run_status("job7", run, 10.0)
    assert (found.waiting_for, found.waiting_on) == ("a, b of round 2 to come back, at most 40 s more", ("a", "b"))


def test_a_stopped_round_waits_for_members_that_the_coordinator_has_not_seen() -> None:
    run = Membership(0.0, Memory(last_round=2, members=("a/0", "b/0"), settings=PAIR))
    run.step(joined("a", PAIR, Place(1, 2, 0, 2)), 1.0)
    found = run_status.run_status("job7", run, 10.0)
    assert (found.phase, found.members, [node.node_id for node in found.nodes]) == ("stopping", 2, ["a"])
    assert (found.waiting_for, found.waiting_on) == ("1 node of round 2 to come back", ())


def test_the_nodes_with_their_ranks() -> None:
    found = look([*PAIR_RUNS, (5.0, joined("c", RETRY))], 7.0)
    assert [(each.node_id, each.address, each.rank, each.first_rank, each.state) for each in found.nodes] == [
        ("a", "10.0.0.1", 0, 0, "running"),
        ("b", "", 1, 2, "running"),
        ("c", "", None, None, "waiting"),
    ]
    assert [each.heard_ago_s for each in found.nodes] == [7.0, 7.0, 2.0]
    assert (found.round, found.node_count, found.members, found.restarts_left) == (1, 3, 2, 1)


def test_pages_are_complete_and_disjoint() -> None:
    events = [(0.0, joined(f"n{number}", THREE)) for number in range(2)] + [(0.0, left("n0"))]
    events += [(1.0, joined(f"m{number:02}", THREE)) for number in range(9)]
    whole = look(events, 1.0)
    names: list[str] = []
    following: int | None = 0
    while following is not None:
        page = look(events, 1.0, first=following, page=4)
        assert page.node_count == whole.node_count
        names += [each.node_id for each in page.nodes]
        following = page.next_page
    assert names == [each.node_id for each in whole.nodes]
    assert len(names) == len(set(names)) == whole.node_count


def test_refused_nodes_and_strangers_in_the_order_of_time() -> None:
    events = [(0.0, joined("a", PAIR)), (2.0, joined("b", THREE)), (4.0, joined("c" * 256, THREE))]
    found = look(events, 5.0, strangers=[(3.0, "10.0.0.9:4711", "its token is another one")])
    told = "--nnodes 3, this run has --nnodes 2"
    assert [(each.who[:13], each.reason, each.ago_s) for each in found.refused] == [
        ("b", told, 3.0),
        ("10.0.0.9:4711", "its token is another one", 2.0),
        ("c" * 13, told, 1.0),
    ]


@proves("nodes.host-lost-second-time")
def test_nodes_that_have_to_wait_are_named() -> None:
    """While the run is formed, and while it runs without them."""
    lost = tuple((host, (60.0, age_s)) for host, age_s in (("h", 1.0), ("g", 3.0)))
    run = Membership(0.0, Memory(1, 1, 1, ("b/0",), is_round_over=True, host_loss_ages_s=lost))
    for name, host in (("b", "h"), ("c", "g")):
        run.step(joined(name, UP_TO_2, host=host), 0.0)
    found = run_status.run_status("job7", run, 1.0)
    words = "{} stands by for {} s more, because host {} was lost 2 times in the last hour"
    expected = [("c", "g", 6.0, words.format("c", 6, "g")), ("b", "h", 8.0, words.format("b", 8, "h"))]
    assert [(each.node_id, each.host, each.left_s, each.text) for each in found.held] == expected
    assert found.waiting_for == (
        f"1 more of at least 1 nodes to join (0 joined, timeout in 29 s; {words.format('c', 6, 'g')})"
    )
    run.step(joined("a", UP_TO_2, Place(1, 1, 0, 1)), 1.0)
    shown = plain(run_status.run_status("job7", run, 2.0))
    assert (shown["phase"], [each["node_id"] for each in shown["held"]]) == ("running", ["c", "b"])


def test_the_last_refusals_and_steps_are_kept() -> None:
    events = [(0.0, joined("a", PAIR))] + [(float(at), joined(f"x{at}", THREE)) for at in range(1, 20)]
    found = look(events, 20.0)
    assert [each.who for each in found.refused] == [f"x{at}" for at in range(12, 20)]
    assert found.story[-1].event == "Join x19/0 -> Refused, Notice"
    assert len(found.story) == 12


def test_a_closed_run_says_why() -> None:
    found = look([*PAIR_RUNS, (1.0, CloseRequested("enough"))], 2.0)
    assert (found.phase, found.end, found.end_reason) == ("ended", "closed", "enough")
    assert found.waiting_for is None


def test_closing_a_run_that_has_ended_changes_nothing() -> None:
    found = look([(0.0, joined("a", ONE)), (1.0, succeeded("a")), (2.0, CloseRequested("late"))], 2.0)
    assert (found.end, found.end_reason) == ("succeeded", "all workers have succeeded")


def test_its_json_form_is_plain_data() -> None:
    shown = plain(look([*PAIR_RUNS, (2.0, returned("b", RETRY, stage=Stage.FINISHED))], 3.0))
    assert shown["nodes"][0]["node_id"] == "a"
    assert set(shown["story"][0]) == {"ago_s", "event"}
    assert shown["refused"] == []
