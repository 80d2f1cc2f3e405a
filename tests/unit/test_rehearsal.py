"""Which faults a job is rehearsed with, and what is made of what was seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.frozen import changed
from holdfast.rehearsal import plan, trial
from holdfast.rehearsal.plan import Fault, Seen, Trial
from tests.promises import promise, proves

UNDISTURBED = Seen(0, 10.0, last_step=40, result="abc")


@promise("""rehearse.not-covered: A fault that the options of the run do not cover is reported as not covered, with the
    reason.""")
@pytest.mark.parametrize(
    ("fault", "changes", "why"),
    [
        (Fault.WORKER_KILLED, {}, ""),
        (Fault.WORKER_KILLED, {"max_restarts": 0}, "with --max-restarts 0 the first failure ends the run"),
        (Fault.WORKER_FROZEN, {}, ""),
        (Fault.WORKER_FROZEN, {"has_hang_timeout": False}, "without --hang-timeout"),
        (Fault.NODE_LOST, {"max_nodes": 1}, "the run has one node"),
        (Fault.COORDINATOR_LOST, {"max_nodes": 1}, "the run has one node"),
        (Fault.DISK_FULL, {"can_fill_disk": False}, "cannot make a small disk"),
        (Fault.DISK_FULL, {"is_remote": True}, "cannot be made on other hosts"),
        (Fault.NODE_LOST, {"is_remote": True}, ""),
        (Fault.NODE_LOST, {"is_remote": True, "can_return": False}, "without --rejoin-hosts a lost one"),
        (Fault.NEW_START, {"max_restarts": 0, "max_nodes": 1}, ""),
    ],
)
def test_obstacles(fault: Fault, changes: dict[str, Any], why: str) -> None:
    usual: dict[str, Any] = {"max_nodes": 2, "max_restarts": 3, "has_hang_timeout": True, "can_fill_disk": True}
    found = plan.obstacle(fault, **{**usual, **changes})
    assert why in found if why else found == ""


@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ({}, "survived", ""),
        ({"exit_code": None}, "lost", "had not ended after 10 s"),
        ({"exit_code": 93}, "lost", "exit code 93"),
        ({"has_struck": False}, "not covered", "over before the fault"),
        ({"result": "abd"}, "lost", "the result is not that of the undisturbed run"),
        ({"last_step": 39}, "lost", "the last step was 39, not 40"),
    ],
)
def test_a_trial_is_judged_by_its_end_and_its_result(changes: dict[str, object], state: str, reason: str) -> None:
    trial = plan.judged(Fault.WORKER_KILLED, changed(UNDISTURBED, **changes), UNDISTURBED)
    assert trial.state == state
    assert reason in trial.reason


@pytest.mark.parametrize(
    ("expected", "missing"),
    [
        (trial.Expected(("model",), "loss"), "there is no file model"),
        (trial.Expected((), "LOSS"), "no line of the output matches 'LOSS'"),
    ],
)
def test_a_result_that_is_not_there_is_not_the_same_as_another_one(
    tmp_path: Path, expected: trial.Expected, missing: str
) -> None:
    """A name with a typo would let every job pass."""
    output = tmp_path / "output"
    output.write_text("loss 0.1\n")
    seen = changed(UNDISTURBED, missing=expected.digest([[""] * len(expected.files)], output)[1])
    undisturbed = plan.judged(Fault.NONE, seen, seen)
    assert undisturbed == Trial(Fault.NONE, "lost", f"there is nothing to compare: {missing}", seen)
    assert plan.table([undisturbed], "it").splitlines()[-1] == "no fault was tried; compared: it"


@proves("rehearse.not-covered")
def test_the_table_names_what_was_not_survived() -> None:
    seen = changed(UNDISTURBED, noticed_s=0.04, running_s=0.2, further_s=0.31, steps_again=1)
    trials = [
        Trial(Fault.NONE, "survived", "", UNDISTURBED),
        Trial(Fault.WORKER_KILLED, "survived", "", seen),
        Trial(Fault.WORKER_FROZEN, "not covered", "no watch"),
    ]
    *_, frozen, why, last = plan.table(trials, "model.pt").splitlines()
    assert frozen.split() == ["a", "worker", "stands", "still", "not", "covered", "-", "-", "-", "-", "-"]
    assert (why, last) == ("a worker stands still: no watch", "all 1 fault survived; compared: model.pt")
    assert plan.is_passed(trials)
    assert not plan.is_passed([*trials, Trial(Fault.DISK_FULL, "lost", "no end", seen)])


def test_a_result_may_be_on_one_host_or_on_all(tmp_path: Path) -> None:
    expected, output = trial.Expected(("model",)), tmp_path / "output"
    one, all_of_them = expected.digest([["a"], [""]], output), expected.digest([["a"], ["a"]], output)
    assert one == all_of_them
    assert one[1] == ""
    assert len({one, expected.digest([["a"], ["b"]], output), expected.digest([[""], [""]], output)}) == 3
