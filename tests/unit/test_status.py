"""The status of an agent: records that do not change, a JSON form with stable names, and a bound on its size."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.agent import publisher
from holdfast.agent.lifecycle import Lifecycle, RunRequested
from holdfast.agent.model import Worker
from holdfast.frozen import changed
from holdfast.rendezvous.membership.model import Place, Sealed
from holdfast.telemetry.history import History
from holdfast.telemetry.status import AgentStatus, WorkerStatus, plain
from holdfast.telemetry.stragglers import STEPS, Rate
from tests.promises import proves

WORKER = WorkerStatus(0, 4, 17, "running", 1000.0, 90.0, stdout="/logs/0/stdout.log")
PAST = History(50.0)
STATUS = AgentStatus("job7", "trainer", "vm-a", 16, 999.0, 89.0, "running", 2, 1, 3, 1, 2, (WORKER,), past=PAST)


def test_nothing_of_it_can_be_changed() -> None:
    for record in (STATUS, WORKER):
        with pytest.raises(AttributeError):
            record.pid = 5  # type: ignore[misc]
    assert changed(STATUS, round=3) == changed(changed(STATUS, round=3))
    assert (STATUS.round, changed(STATUS, round=3).round) == (2, 3)


@proves("status.agent-phase-round-place")
def test_the_json_form() -> None:
    readers = (lambda local_rank: (99.5, 1200 + local_rank), lambda local_rank: Rate(2.5, STEPS, 60.0))
    told = json.loads(json.dumps(plain(STATUS.told(100.0, None, *readers))))
    assert told == {
        "run_id": "job7",
        "role": "trainer",
        "host": "vm-a",
        "pid": 16,
        "started": 999.0,
        "age_s": 11.0,
        "phase": "running",
        "round": 2,
        "node": 1,
        "nodes": 3,
        "restarts_used": 1,
        "restarts_left": 2,
        "waiting_for": None,
        "workers": [
            {
                "local_rank": 0,
                "global_rank": 4,
                "pid": 17,
                "state": "running",
                "started": 1000.0,
                "age_s": 10.0,
                "exit_code": None,
                "stdout": "/logs/0/stdout.log",
                "stderr": "",
                "error_file": "",
                "round": 0,
                "progress_age_s": 0.5,
                "step": 1200,
                "rate": {"per_s": 2.5, "unit": "steps", "window_s": 60.0},
            }
        ],
        "story": [],
        "node_id": "",
        "failed": [],
        "history": plain(PAST.told(100.0)),
        "output": {},
        "snapshots": None,
        "checks": [],
        "notice": None,
    }


def test_the_story_is_told_in_few_words() -> None:
    machine = Lifecycle(300)
    steps = [machine.step(RunRequested(), 10.0)]
    large = Place(1, 1, 0, 900, tuple((f"role-{number}", 1) for number in range(300)))
    steps.append(machine.step(Sealed("", large), 12.0))
    [first, second] = AgentStatus(story=tuple(steps)).told(12.5).story
    assert first == {"ago_s": 2.5, "phase": "idle", "event": "RunRequested()", "commands": ["JoinRound()"]}
    assert (second["ago_s"], second["phase"], second["commands"]) == (0.5, "joining", ["StartWorkers(round=1)"])
    assert second["event"].startswith("Sealed(")
    assert len(second["event"]) < 250
    many = AgentStatus(story=tuple(steps) * 100)
    assert len(json.dumps(plain(many.told(12.5)))) < 5000


@pytest.mark.parametrize(
    ("phase", "waiting_for"),
    [
        ("joining", "1 of 2 nodes joined, waiting for 1"),
        ("starting", "the workers to start"),
        ("running", None),
        ("stopping", "the workers to stop"),
        ("finished", "the other nodes to finish"),
    ],
)
def test_what_is_waited_for(phase: str, waiting_for: str | None) -> None:
    status = AgentStatus(phase=phase)
    assert status.told(0.0, "1 of 2 nodes joined, waiting for 1").waiting_for == waiting_for
    assert AgentStatus(phase="joining").told(0.0).waiting_for == "a place in the run"


def worker(rank: int, id_: Any = None) -> Worker:
    made = Worker(0, rank)
    made.id = id_
    return made


@pytest.mark.parametrize(
    ("end", "state"), [((0, False, 9.0), "succeeded"), ((3, False, 9.0), "failed"), ((-15, True, None), "stopped")]
)
def test_the_life_of_a_worker(end: tuple[int, bool, float | None], state: str) -> None:
    waiting = publisher.worker_status(None, worker(4), {}, None)
    assert waiting == WorkerStatus(0, 4)
    running = publisher.worker_status(waiting, worker(4, 17), {}, None)
    assert (running.pid, running.state, running.exit_code) == (17, "running", None)
    assert publisher.worker_status(running, worker(4, 17), {}, None) is running
    ended = publisher.worker_status(running, worker(4, 17), {0: end}, None)
    assert (ended.state, ended.exit_code, ended.started) == (state, end[0], running.started)
    assert publisher.worker_status(ended, worker(4, 17), {0: end}, None) is ended
    # In the next round, when only the end of the last one is known.
    assert publisher.worker_status(ended, worker(2), {0: end}, None) == WorkerStatus(0, 2)
    assert publisher.worker_status(waiting, worker(4, "pod-3"), {}, None).pid is None
