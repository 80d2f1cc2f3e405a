"""Trainings whose workers are killed at any time end as those that nothing disturbed, and repeat nothing."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests import support
from tests.promises import promise, proves

PROGRAM = Path(__file__).parent.parent / "programs" / "snapshot_training.py"
RANKS = 2
STEPS_BETWEEN = 12  # At most, between two kills.
PRELOAD = {"ddp": "torch,torch._dynamo", "fsdp": "torch,torch._dynamo,torch.distributed.fsdp"}


class Line(NamedTuple):
    attempt: int
    pid: int
    what: str
    step: int
    digest: str


def lines_of(directory: Path, rank: int) -> list[Line]:
    path = directory / f"rank{rank}"
    found = []
    for text in path.read_text().splitlines() if path.exists() else ():
        attempt, pid, what, *more = text.split()
        number = int(more[0]) if what != "weights" and more else -1
        found.append(Line(int(attempt), int(pid), what, number, more[-1] if more else ""))
    return found


def result_in(directory: Path) -> tuple[list[str], list[dict[int, str]]]:
    """The weights of each rank, and its samples by step."""
    lines = [lines_of(directory, rank) for rank in range(RANKS)]
    samples = [{line.step: line.digest for line in each if line.what == "sample"} for each in lines]
    return [each[-1].digest for each in lines], samples


class Training:
    def __init__(self, kind: str, steps: int, directory: Path, restarts: int = 0) -> None:
        directory.mkdir()
        self._directory = directory
        options = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", str(restarts)]
        options += ["--preload", PRELOAD.get(kind, kind), "--log-dir", str(directory / "logs")]
        self._said = (directory / "said").open("wb")
        self.run = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "run", *options, str(PROGRAM), str(directory), kind, str(steps),
             str(restarts)],
            env={**support.clean_environment(), "OMP_NUM_THREADS": "1"}, stdout=self._said, stderr=self._said,
        )  # fmt: skip

    def said(self) -> str:
        return (self._directory / "said").read_text()

    def lines(self, rank: int) -> list[Line]:
        return lines_of(self._directory, rank)

    def of_attempt(self, attempt: int) -> list[list[Line]]:
        return [[line for line in self.lines(rank) if line.attempt == attempt] for rank in range(RANKS)]

    def finish(self) -> Training:
        assert self.run.wait(4 * support.DEADLINE_S) == 0, self.said()
        return self

    def result(self) -> tuple[list[str], list[dict[int, str]]]:
        return result_in(self._directory)

    def end(self) -> None:
        self.run.kill()
        self.run.wait()
        self._said.close()


@contextmanager
def started(*args: object, **more: object) -> Iterator[Training]:
    training = Training(*args, **more)  # type: ignore[arg-type]
    try:
        yield training
    finally:
        training.end()


def kill_some(training: Training, attempt: int, chance: random.Random) -> None:
    """Some ranks of the attempt: while they load, or at any moment of their steps."""
    wait_for = chance.randrange(-1, STEPS_BETWEEN)

    def is_time() -> bool:
        assert training.run.poll() is None, training.said()
        begun = [[line for line in lines if line.what == "begin"] for lines in training.of_attempt(attempt)]
        if wait_for < 0:
            return all(any(line.what == "loads" for line in lines) for lines in training.of_attempt(attempt))
        return all(len(each) > wait_for for each in begun)

    support.wait_until(is_time, f"attempt {attempt} is there", 3 * support.DEADLINE_S, training.said)
    pids = [lines[0].pid for lines in training.of_attempt(attempt)]
    time.sleep(chance.random() * 0.02)
    for pid in chance.sample(pids, chance.randint(1, RANKS)):
        with suppress(ProcessLookupError):  # holdfast has stopped it because of the other one.
            os.kill(pid, signal.SIGKILL)


@promise(
    "snapshots.nothing-is-lost: A training whose workers are killed at any time ends with exactly the weights and the "
    "samples of one that nothing disturbed, and no step that all ranks have saved is computed again (DDP, FSDP, JAX)."
)
@pytest.mark.timeout(1500)  # Fifty restarts on a busy machine.
@pytest.mark.parametrize(
    "kind", ["ddp", "numpy", *(pytest.param(kind, marks=support.only_in_test_all(kind)) for kind in ("fsdp", "jax"))]
)
def test_a_training_that_is_killed_ends_as_if_nothing_had_happened(kind: str, tmp_path: Path) -> None:
    support.need_module({"ddp": "torch", "fsdp": "torch"}.get(kind, kind))
    kills = 50 if support.is_test_all() else 4 if kind == "numpy" else 2
    steps = (kills + 1) * 4 * STEPS_BETWEEN
    with started(kind, steps, tmp_path / "whole") as whole:
        expected = whole.finish().result()
    chance = random.Random(f"{kind} {kills}")
    with started(kind, steps, tmp_path / "killed", restarts=kills) as killed:
        for attempt in range(kills):
            kill_some(killed, attempt, chance)
        assert killed.finish().result() == expected
        assert killed.said().count("holdfast: started") == kills + 1
        for before, after in itertools.pairwise(killed.of_attempt(attempt) for attempt in range(kills + 1)):
            saved = [max((line.step for line in lines if line.what == "saved"), default=-1) for lines in before]
            begins = {next((line.step for line in lines if line.what == "begin"), None) for lines in after} - {None}
            assert len(begins) <= 1, "all ranks load the same step"
            for first in begins:
                assert first is not None
                known = [max((line.step for line in lines if line.what == "begin"), default=-1) for lines in before]
                assert first > min(saved), (before, after)
                assert first >= max(known) - 1  # One is in flight, and a rank may have begun the one after it.


def test_without_its_spawner_a_node_begins_anew_and_ends_the_same(tmp_path: Path) -> None:
    """The slots go with the spawner, so no rank may load one."""
    with started("numpy", 60, tmp_path / "whole") as whole:
        expected = whole.finish().result()
    with started("numpy", 60, tmp_path / "killed", restarts=1) as killed:

        def spawner() -> int:
            lines = killed.of_attempt(0)
            has_saved = all(any(line.what == "saved" for line in each) for each in lines)
            return psutil.Process(lines[0][0].pid).ppid() if has_saved else 0

        os.kill(support.wait_until(spawner, "they have saved", 3 * support.DEADLINE_S, killed.said), signal.SIGKILL)
        assert killed.finish().result() == expected
        assert {lines[1].step for lines in killed.of_attempt(1)} == {0}


@proves("snapshots.memory-limit")
def test_snapshots_can_be_switched_off_and_the_start_method_fork_has_none(tmp_path: Path) -> None:
    program = tmp_path / "show.py"
    program.write_text("import holdfast\nprint('kept:', holdfast.snapshots.open().is_kept)\n")
    for options, shown in (
        (["--snapshot-memory", "off"], "kept: False\n"),
        ([], "kept: True\n"),
        (["--run-path", "--start-method", "fork"], "kept: False\n"),
    ):
        command = [sys.executable, "-m", "holdfast", "run", "--standalone", *options, str(program)]
        ended = subprocess.run(command, env=support.clean_environment(), capture_output=True, text=True, check=True)
        assert ended.stdout == shown, ended.stderr
        assert ("no snapshots are kept: the start method is fork" in ended.stderr) == ("fork" in options)


FAILS = """
import os, time
import holdfast
snapshots = holdfast.snapshots.open()
saved = snapshots.load()
first = saved.step + 1 if saved else 0
for step in range(first, first + 3):
    with snapshots.save(step) as out:
        out["step"] = step
    holdfast.progress(step)
if "AWAIT" in os.environ:
    time.sleep(600)
holdfast.progress(step + 2)  # Two steps that were not saved.
raise SystemExit(3)
"""


@promise(
    "snapshots.status-report: Status, metrics and `report.json` show the newest step and the steps that were lost."
)
def test_status_and_report_show_snapshots(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(FAILS)
    command = [sys.executable, "-m", "holdfast", "run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command += ["--log-dir", str(tmp_path / "logs"), str(program)]
    ended = subprocess.run(command, env=support.clean_environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    report = json.loads((tmp_path / "logs" / "latest" / "report.json").read_text())
    assert report["restarts"]["steps_lost"] == 4  # Two in each of the two restarts.
    run_id, env = f"job-{os.getpid()}", {**support.clean_environment(), "AWAIT": "1"}
    command = [*command[:4], "--rdzv-id", run_id, *command[4:]]
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as run:
        try:
            ask = [sys.executable, "-m", "holdfast", "status", run_id]

            def shown() -> str:
                told = subprocess.run(ask, env=support.clean_environment(), capture_output=True, text=True, check=False)
                return told.stdout if "snapshot of step 2, saved " in told.stdout else ""

            assert "in memory)" in support.wait_until(shown, "status shows the step")
            told = subprocess.run([*ask, "--json"], env=support.clean_environment(), capture_output=True, check=True)
            (agent,) = json.loads(told.stdout)["agents"]
            assert agent["snapshots"]["step"] == 2
            assert 0 < agent["snapshots"]["used_bytes"] <= agent["snapshots"]["limit_bytes"]
        finally:
            run.terminate()
