"""What the live view shows and selects, without a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.cli import top
from holdfast.cli.top import View
from holdfast.observe.run_view import RunView, Told
from holdfast.telemetry.status import AgentStatus, NodeStatus, RunStatus, WorkerStatus
from holdfast.telemetry.stragglers import Rate
from tests.promises import proves

HOSTILE = "\x1b[2J\nnode 9 forged"


def worker(rank: int, state: str = "running", pid: int = 0, **fields: Any) -> WorkerStatus:
    return WorkerStatus(0, rank, pid or 100 + rank, state, age_s=65.0, **fields)


def picture(
    *workers: WorkerStatus, name: str = "host-1", failed: Sequence[WorkerStatus] = (), **fields: Any
) -> RunView:
    node = NodeStatus(name, "10.0.0.1", 0, 0, "", len(workers), "running", is_connected=True)
    run = RunStatus("job7", "running", 1, 2, 1, 1, 1, 1, 1, 2, nodes=(node,))
    agent = AgentStatus(node_id=name, round=2, workers=workers, failed=tuple(failed))
    whole = {"status": run, "status_at": 10.0, "agents": {name: Told(agent, 10.0)}}
    return RunView(**{"run_id": "job7", "now": 10.0, **whole, **fields})


def shown(view: View, width: int = 80, height: int = 20) -> list[str]:
    lines = [text for text, _ in view.lines(width, height)]
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= height
    return lines


def view_of(*pictures: RunView) -> View:
    view = View()
    for each in pictures:
        view.take(each)
    return view


def test_the_tree_of_nodes_and_workers() -> None:
    view = view_of(picture(worker(0, step=7, progress_age_s=2.0), worker(1, "failed", exit_code=-9)))
    assert shown(view) == [
        "run job7: running, round 2, 1 of 1 nodes here, 1 of 3 restarts used",
        "Of 2 workers 1 failed, 1 running.",
        "node 0 running  host-1  10.0.0.1",
        "> rank 0 running 1m05s  step 7, 2s ago  pid 100",
        "  rank 1 failed (SIGKILL) 1m05s  pid 101",
        "arrows select  s stacks  q leave",
    ]


@proves("steering.status-top-json-report")
def test_workers_that_are_behind_are_named() -> None:
    rates = [Rate(each, "steps", 60.0) for each in (2.0, 2.0, 0.5)]
    lines = shown(view_of(picture(*(worker(rank, step=7, rate=rate) for rank, rate in enumerate(rates)))))
    assert lines[2] == "Behind the median of 3 ranks (2 steps/s): rank 2 (0.5)"
    assert "  rank 2 running 1m05s  step 7, 0.5 steps/s  pid 102" in lines
    odd = shown(view_of(picture(worker(0, rate=Rate(1.0, HOSTILE)))), 200)
    assert all(line.isprintable() for line in odd)


def test_a_failed_worker_stays_after_its_restart() -> None:
    failed = worker(0, "failed", 17, exit_code=3, round=1)
    lines = shown(view_of(picture(worker(0, pid=18), failed=[failed])))
    assert "> rank 0 running 1m05s  pid 18" in lines
    assert lines[lines.index("failed before:") + 1] == "  round 1: rank 0 failed (exit code 3) 1m05s  pid 17"
    # One that is in the tree is not shown twice.
    assert "failed before:" not in shown(view_of(picture(worker(0, "failed", 17, exit_code=3), failed=[failed])))


def test_arrows_select_and_the_selection_stays_with_its_worker() -> None:
    view = view_of(picture(worker(0), worker(1), worker(2)))
    for key in ("down", "down", "down", "down", "up"):
        view.press(key)
    assert view.selected == ("host-1", 1)
    view.take(picture(worker(1), worker(2), worker(3)))
    assert view.selected == ("host-1", 1)
    view.take(picture(worker(7)))
    assert view.selected == ("host-1", 7)
    assert view.press("stacks") == ("host-1", 7)
    assert shown(view)[-1] == "taking the stacks of rank 7 ..."


def test_stacks_scroll_and_any_other_key_leads_back() -> None:
    view = view_of(picture(worker(0)))
    view.stacks = [f"frame {number}" for number in range(100)]
    assert shown(view, 40, 10)[:2] == ["frame 0", "frame 1"]
    view.press("page down")
    view.press("down")
    assert shown(view, 40, 10)[0] == "frame 21"
    for _ in range(20):
        view.press("page down")
    assert shown(view, 40, 10)[0] == "frame 99"
    view.press("other")
    assert view.stacks is None


@proves("steering.top-shows-nodes-workers")
@pytest.mark.parametrize(("width", "height"), [(40, 10), (40, 4), (200, 60), (10, 5)])
def test_it_fits_and_the_selected_line_is_there(width: int, height: int) -> None:
    view = view_of(picture(*(worker(rank) for rank in range(300))))
    for _ in range(150):
        view.press("down")
    assert any(line.startswith("> rank") for line in shown(view, width, height))


@proves("steering.top-puts-terminal-back")
def test_hostile_names_stay_on_their_line() -> None:
    view = view_of(picture(worker(0), name=HOSTILE, run_id=HOSTILE, problem=HOSTILE))
    lines = shown(view, 200)
    assert "node 0 running  \\x1b[2J\\nnode 9 forged  10.0.0.1" in lines
    assert all(line.isprintable() for line in lines)


def test_agents_without_a_node_id_are_told_apart() -> None:
    alone = [AgentStatus(host="vm", pid=pid, node=0, workers=(worker(0, pid=10 * pid),)) for pid in (1, 2)]
    agents = {f"agent {each.pid}": Told(each, 10.0) for each in alone}
    view = view_of(picture(agents=agents, status=None, problem="this run has no coordinator"))
    assert [line for line in shown(view) if "pid" in line] == ["> rank 0 running 1m05s  pid 10",
                                                               "  rank 0 running 1m05s  pid 20"]  # fmt: skip
    view.press("down")
    assert view.press("stacks") == ("agent 2", 0)


def test_a_node_that_does_not_answer_says_why() -> None:
    silent = picture(agents={}, silent={"host-1": "did not answer within 0.7 s"})
    assert "  silent: did not answer within 0.7 s" in shown(view_of(silent))


def test_keys_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top.loop, "is_readable", lambda fd: True)
    monkeypatch.setattr(top.os, "read", lambda fd, size: b"\x1b[A\x1bOBjskx\x1b[6~q")
    assert top._pressed() == ["up", "down", "down", "stacks", "up", "other", "page down", "leave"]
    monkeypatch.setattr(top.os, "read", lambda fd, size: b"")
    assert top._pressed() == ["leave"]
