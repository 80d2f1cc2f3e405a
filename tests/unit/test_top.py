"""What the live view shows, without a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.cli import top
from holdfast.cli.top import KEYS, Screen
from holdfast.observe.run_view import RunView, Told
from holdfast.telemetry.status import AgentStatus, NodeStatus, NoticeStatus, RunStatus, WorkerStatus
from holdfast.telemetry.stragglers import Rate
from tests.promises import proves

HOSTILE = "\x1b[2J\nnode 9 forged"


def worker(rank: int, state: str = "running", pid: int = 0, **fields: Any) -> WorkerStatus:
    return WorkerStatus(0, rank, pid or 100 + rank, state, age_s=65.0, **fields)


def screen(*workers: WorkerStatus, name: str = "host-1", failed: Sequence[WorkerStatus] = (), **fields: Any) -> Screen:
    notice: NoticeStatus | None = fields.pop("notice", None)
    leaves_in_s = notice.left_s if notice is not None else None
    node = NodeStatus(name, "10.0.0.1", 0, 0, "", len(workers), "running", is_connected=True, leaves_in_s=leaves_in_s)
    run = RunStatus("job7", "running", 1, 2, 1, 1, 1, 1, 1, 2, nodes=(node,), notice=notice)
    agent = AgentStatus(node_id=name, round=2, pid=9, node=0, workers=workers, failed=tuple(failed))
    whole = {"status": run, "status_at": 10.0, "agents": {name: Told(agent, 10.0)}}
    found = Screen()
    found.of_run = RunView(**{"run_id": "job7", "now": 10.0, **whole, **fields})
    return found


def shown(of: Screen, width: int = 80, height: int = 20) -> list[str]:
    lines = [text for text, _ in of.lines(width, height)]
    assert all(len(line) <= width and line.isprintable() for line in lines)
    assert len(lines) <= height
    return lines


def test_it_shows_what_status_prints() -> None:
    assert shown(screen(worker(0, step=7, progress_age_s=2.0), worker(1, "failed", exit_code=-9))) == [
        "run job7: running, round 2, 1 of 1 nodes here, 1 of 3 restarts used",
        "Of 2 workers 1 failed, 1 running.",
        "",
        "NODE  NAME    ADDRESS   STATE    AGENT  WORKERS",
        "0     host-1  10.0.0.1  running  9      1 running, 1 failed",
        "",
        "RANK  NODE  PID  STATE             AGE    PROGRESS",
        "0     0     100  running           1m05s  step 7, 2s ago",
        "1     0     101  failed (SIGKILL)  1m05s",
        "arrows scroll  q leave",
    ]


@proves("dashboard.notice")
def test_a_notice_and_the_node_that_goes() -> None:
    lines = shown(screen(worker(0), notice=NoticeStatus(75.0, None, False, ("host-1",), 1, "spot")))
    assert lines[2] == "host-1 goes away in 1m15s: spot"
    assert "running, goes in 1m15s" in lines[5]


@proves("steering.status-top-json-report")
def test_workers_that_are_behind_are_named() -> None:
    rates = [Rate(each, "steps", 60.0) for each in (2.0, 2.0, 0.5)]
    lines = shown(screen(*(worker(rank, step=7, rate=rate) for rank, rate in enumerate(rates))))
    assert "Behind the median of 3 ranks (2 steps/s): rank 2 (0.5)" in lines


def test_a_failed_worker_stays_after_its_restart() -> None:
    failed = worker(0, "failed", 17, exit_code=3, round=1)
    assert "earlier, in round 1: rank 0 (pid 17) failed (exit code 3)" in shown(screen(worker(0), failed=[failed]))
    # One that is in the table is not shown twice.
    assert not any("earlier" in line for line in shown(screen(worker(0, "failed", 17), failed=[failed])))


@proves("steering.top-shows-nodes-workers")
@pytest.mark.parametrize(("width", "height"), [(40, 10), (40, 4), (200, 60), (10, 5)])
def test_it_fits_and_scrolls_to_both_ends(width: int, height: int) -> None:
    view = screen(*(worker(rank) for rank in range(200)))
    first = shown(view, width, height)
    for _ in range(200):
        view.press("page_down", height)
    assert shown(view, width, height)[-2].startswith("199 ")
    for _ in range(300):
        view.press("up", height)
    assert shown(view, width, height) == first


@proves("steering.top-puts-terminal-back")
def test_hostile_names_stay_on_their_line() -> None:
    odd = worker(0, rate=Rate(1.0, HOSTILE))
    view = screen(odd, name=HOSTILE, failed=[worker(1, HOSTILE)], run_id=HOSTILE, problem=HOSTILE)
    view.note = HOSTILE
    assert any("\\x1b[2J\\nnode 9 forged" in line for line in shown(view, 200))


def test_a_node_that_does_not_answer_says_why() -> None:
    silent = screen(agents={}, silent={"host-1": "did not answer within 0.7 s"})
    assert any("silent: did not answer within 0.7 s" in line for line in shown(silent))


def test_keys_are_told_apart() -> None:
    pressed = [match.lastgroup for match in KEYS.finditer(b"\x1b[A\x1bOBjskx\x1b[6~q")]
    assert pressed == ["up", "down", "down", "up", "page_down", "leave"]


def test_without_a_terminal_it_says_so_also_if_stdin_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr("os.isatty", lambda fd: False)
    assert top.main([]) == 2
    assert capsys.readouterr().err.startswith("holdfast top: error: this needs a terminal;")
