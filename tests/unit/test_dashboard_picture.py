"""What the page is told of a run: from statuses of any kind to one picture, and from picture to picture."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from holdfast.frozen import changed
from holdfast.observe.ask import LastWord
from holdfast.observe.dashboard.picture import Series, difference, node_of, picture_of, worker_facts
from holdfast.observe.run_view import RunView, Told
from holdfast.telemetry.history import HistoryStatus, RoundStatus
from holdfast.telemetry.status import (
    AgentStatus,
    NodeStatus,
    NoticeStatus,
    Refusal,
    RunStatus,
    SnapshotStatus,
    WorkerStatus,
)
from tests.promises import promise, proves


def a_node(name: str, rank: int | None = 0, first: int | None = 0, **facts: Any) -> NodeStatus:
    usual = {"address": "10.0.0.1", "role": "default", "local_world_size": 2, "state": "running", "is_connected": True}
    return NodeStatus(name, **{**usual, "rank": rank, "first_rank": first, **facts})


def a_run(*nodes: NodeStatus, **facts: Any) -> RunStatus:
    usual = {"phase": "running", "round": 1, "min_nodes": 2, "max_nodes": 2, "restarts_used": 0, "restarts_left": 3}
    return RunStatus(**{**usual, "nodes": nodes, **facts})


def an_agent(*states: str, first: int = 0, **facts: Any) -> AgentStatus:
    workers = tuple(
        WorkerStatus(n, first + n, 100 + first + n, state, step=10 * (first + n)) for n, state in enumerate(states)
    )
    usual = {"pid": 99, "host": "vm", "node_id": "a", "phase": "running", "round": 1, "node": 0, "workers": workers}
    return AgentStatus(**{**usual, **facts})


def known(status: RunStatus | None = None, *, now: float = 10.0, **facts: Any) -> RunView:
    agents = {
        name: told if isinstance(told, Told) else Told(told, now) for name, told in facts.pop("agents", {}).items()
    }
    return RunView("job7", now, status, now, agents=agents, **facts)


@proves("dashboard.page-shows-run-sentence")
def test_two_nodes_of_which_one_was_asked() -> None:
    status = a_run(a_node("a"), a_node("b", 1, 2))
    picture = picture_of(known(status, agents={"a": an_agent("running", "failed")}, silent={"b": "it is busy"}))
    assert picture["order"] == ["a", "b"]
    assert [node["workers"] for node in picture["nodes"].values()] == ["RF", "rr"], "small letters are guesses"
    assert [node["note"] for node in picture["nodes"].values()] == ["", "silent: it is busy"]
    run = picture["run"]
    assert (run["state"], run["round"], run["nodes_here"], run["restarts_left"]) == ("running", 1, 2, 3)
    assert run["sentence"] == "Of 4 workers 1 failed, 3 running."
    assert [node_of(picture, rank) for rank in (0, 1, 2, 3, 4)] == ["a", "a", "b", "b", None]


@pytest.mark.parametrize(
    ("state", "is_connected", "letter"),
    [("running", True, "r"), ("finished", True, "d"), ("leaving", True, "s"), ("waiting", True, "n"),
     ("dancing", True, "u"), ("running", False, "u")],
)  # fmt: skip
def test_guesses(state: str, is_connected: bool, letter: str) -> None:
    picture = picture_of(known(a_run(a_node("a", state=state, is_connected=is_connected))))
    assert picture["nodes"]["a"]["workers"] == 2 * letter
    assert picture["run"]["nodes_here"] == int(is_connected)


def test_what_an_agent_said_of_an_earlier_round_does_not_count() -> None:
    old = an_agent("failed", "failed", round=1)
    picture = picture_of(known(a_run(a_node("a"), round=2), agents={"a": old}))
    assert picture["nodes"]["a"]["workers"] == "rr"
    assert picture["run"]["round"] == 2


def test_a_run_without_a_coordinator() -> None:
    agent = an_agent("running", "running", node_id="", history=HistoryStatus(wall_s=3.0))
    picture = picture_of(known(None, agents={"agent 99": agent}, problem="this run has no coordinator"))
    node = picture["nodes"]["agent 99"]
    assert (node["rank"], node["first"], node["workers"], node["pid"]) == (0, 0, "RR", 99)
    assert picture["run"]["sentence"] == "All 2 workers are running."
    assert picture["run"]["note"] == "this run has no coordinator"
    assert picture["totals"]["wall_s"] == 3.0


ELSEWHERE = "The run may go on without this host."


def word(end: str, *states: str) -> LastWord:
    return LastWord(end, "it rained", None, an_agent(*states))


@pytest.mark.parametrize(
    ("end", "sentence", "others"),
    [
        ("succeeded", "The run has succeeded.", "dd"),
        ("failed", "The run has failed: it rained.", "ss"),
        ("closed", "The run has been closed: it rained.", "ss"),
        ("left", f"The agent of this host has left the run (it rained). {ELSEWHERE}", "rr"),
        ("error", f"The agent of this host has ended with an error: it rained. {ELSEWHERE}", "rr"),
        ("gone", f"The agent of this host is gone without a word, as after kill -9. {ELSEWHERE}", "rr"),
    ],
)
def test_the_end_as_an_agent_of_this_host_tells_it(end: str, sentence: str, others: str) -> None:
    last = word(end, "stopped", "failed")
    status = a_run(a_node("a"), a_node("b", 1, 2))
    picture = picture_of(known(status, agents={"a": last.status}, end=last, report="the report"))
    assert (picture["run"]["state"], picture["run"]["is_over"]) == (end, True)
    assert picture["run"]["sentence"] == sentence
    assert [node["workers"] for node in picture["nodes"].values()] == ["SF", others]
    assert picture["report"] == "the report"


def test_the_end_as_the_coordinator_tells_it() -> None:
    status = a_run(a_node("a"), end="failed", end_reason="no restarts are left")
    picture = picture_of(known(status, agents={"a": an_agent("running", "failed")}))
    assert picture["run"]["sentence"] == "The run has failed: no restarts are left."
    assert picture["nodes"]["a"]["workers"] == "sF"


def a_round(number: int, began_ago_s: float, end: str | None = None, cause: str = "rank 2 failed") -> RoundStatus:
    return RoundStatus(number, 2, 4, began_ago_s, 5.0, 1.0, end, cause)


def a_past(*rounds: RoundStatus, **facts: Any) -> HistoryStatus:
    return HistoryStatus(rounds, **facts)


def test_the_rounds_have_places_that_stay() -> None:
    def at(ago_s: float) -> dict[str, Any]:
        history = a_past(a_round(1, 60 + ago_s, "failed"), a_round(2, 50 + ago_s), wall_s=60 + ago_s)
        return picture_of(known(a_run(a_node("a"), history=history)))

    first, later = at(0), at(7)
    assert [(each["round"], each["start_s"], each["ran_s"], each["end"]) for each in first["rounds"]] == [
        (1, 0, 5.0, "failed"),
        (2, 10, None, ""),
    ]
    assert set(difference(first, later)) == {"totals"}
    assert later["totals"]["rounds_s"] == 67


def test_the_last_word_completes_the_rounds() -> None:
    status = a_run(a_node("a"), history=a_past(a_round(1, 60, "failed"), a_round(2, 50), wall_s=60))
    last = word("closed", "stopped")
    past = a_past(a_round(2, 51, "closed"), wall_s=61, goodput=0.5)
    assert last.status is not None
    picture = picture_of(known(status, end=changed(last, status=changed(last.status, history=past))))
    assert [(each["round"], each["end"]) for each in picture["rounds"]] == [(1, "failed"), (2, "closed")]
    assert picture["totals"]["goodput"] == 0.5


@promise("""dashboard.notice: The dashboard shows a notice while it stands: which nodes go away, when, and why.
    `holdfast status` and `holdfast top` show it, too.""")
def test_a_notice() -> None:
    def at(left_s: float, **facts: Any) -> dict[str, Any]:
        told = NoticeStatus(left_s, None, False, ("b",), 1, "spot\nmarket")
        nodes = (a_node("a"), a_node("b", 1, 2, leaves_in_s=left_s))
        return picture_of(known(a_run(*nodes, notice=told), **facts))

    first = at(80.2)
    assert first["notice"] == {"text": "b goes away", "left_s": 80, "reason": r"spot\nmarket"}
    assert [node["is_going"] for node in first["nodes"].values()] == [False, True]
    assert [*difference(first, at(79.2))] == ["notice"]
    assert at(70.0, end=word("closed", "stopped"))["notice"] is None
    assert picture_of(known(a_run(a_node("a"))))["notice"] is None


@proves("dashboard.notice")
def test_a_notice_in_a_run_without_a_coordinator() -> None:
    agent = an_agent("running", node_id="", notice=NoticeStatus(30.0, 30.0, False, (), 1, "SIGUSR1"))
    picture = picture_of(known(None, agents={"agent 99": agent}))
    assert (picture["notice"]["text"], picture["nodes"]["agent 99"]["is_going"]) == ("this node goes away", True)


@promise("dashboard.last-snapshot: The dashboard shows the last step of which all nodes have a snapshot, and its age.")
def test_the_last_snapshot_is_one_that_all_nodes_have() -> None:
    def shown(*steps: int | None) -> Any:
        agents = {
            f"n{n}": an_agent("running", node_id=f"n{n}", snapshots=SnapshotStatus(step, 3.0 + n, 100, 1000))
            for n, step in enumerate(steps)
        }
        return picture_of(known(a_run(a_node("n0"), a_node("n1", 1, 1)), agents=agents))["totals"]["snapshot"]

    assert shown(8, 7) == {"step": 7, "age": "4s"}
    assert shown(8, None) is None
    assert shown() is None


@proves("dashboard.fits-360-pixels-dark")
def test_only_what_differs_is_sent() -> None:
    nodes = [a_node(f"n{n}", n, 2 * n) for n in range(500)]
    before = picture_of(known(a_run(*nodes)))
    assert difference(before, picture_of(known(a_run(*nodes)))) == {}
    nodes[7] = a_node("n7", 7, 14, is_connected=False)
    change = difference(before, picture_of(known(a_run(*nodes))))
    assert list(change["nodes"]) == ["n7"]
    assert len(json.dumps(change)) < 1000
    gone = difference(before, picture_of(known(a_run(*nodes[1:]))))
    assert gone["nodes"]["n0"] is None
    assert len(gone["order"]) == 499


HOSTILE = "<img src=x onerror=alert(1)>\n\x1b[2J\u202e"


@proves("dashboard.log-lines-host-names")
def test_hostile_names_are_one_line_each() -> None:
    status = a_run(a_node(HOSTILE, address=HOSTILE, role=HOSTILE), refused=(Refusal(HOSTILE, HOSTILE),))
    history = a_past(a_round(1, 5, HOSTILE, cause=HOSTILE), restarts={HOSTILE: 1})
    picture = picture_of(known(changed(status, history=history, waiting_for=HOSTILE), silent={HOSTILE: HOSTILE}))
    shown = json.dumps({name: value for name, value in picture.items() if name not in ("nodes", "order")})
    assert "\\n" not in shown.replace("\\\\n", "")
    [node] = picture["nodes"].values()
    assert all("\n" not in str(value) and "\u202e" not in str(value) for value in node.values())


def test_no_number_sizes_anything() -> None:
    large = picture_of(known(a_run(a_node("a", local_world_size=1 << 40))))
    assert len(json.dumps(large)) < 10_000


def test_a_worker_in_words() -> None:
    worker = WorkerStatus(1, 1, 101, "failed", exit_code=-9, stdout="x", age_s=60.0, progress_age_s=1.0, step=10)
    what = known(None, agents={"a": Told(an_agent(workers=(worker,)), 4.0)})
    found = what.worker(1)
    assert found is not None
    assert what.worker(2) is None
    facts = worker_facts(found[0])
    assert (facts["state"], facts["age"], facts["progress"]) == ("failed (SIGKILL)", "1m06s", "step 10, 7s ago")
    assert facts["has_log"] == {"stdout": True, "stderr": False}


def test_a_plot_stays_small_however_long_it_is_watched() -> None:
    series = Series(most=100)
    agents = {"a": an_agent("running", "running")}
    added = [series.add(known(None, agents=agents), 0.5, float(second)) for second in range(10_000)]
    assert 50 <= len(series.points) <= 100
    assert series.points[0] == [0.0, 0, 10, 0.5]
    assert added[1] is not None, "a second later"
    assert (series.points[-1][0] or 0) > 9_800
    times = [point[0] or 0 for point in series.points]
    gaps = [b - a for a, b in pairwise(times)]
    assert max(gaps) <= 2 * min(gaps)
    assert None in added
    assert series.add(known(None, agents={"a": Told(agents["a"], 1.0)}), None, 1e6) == [1e6, None, None, None], (
        "too old"
    )
