"""Runs whose state moves between nodes and to disk: real agents on this host, workers that train and save each step.

The training is arithmetic whose result depends on the rank and on every step: so a step that was left out, computed
twice from another state, or loaded from another rank shows in the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import HostError
from holdfast.observe import ask
from tests import nodes, support
from tests.certificates import Certificates
from tests.e2e import test_snapshot_runs as programs
from tests.nodes import Scene
from tests.promises import promise, proves

TRAIN = '''
"""Trains to a step, and saves after each. Stands still at the step in the file `pause`, while that is there."""
import json, os, pathlib, signal, sys, time

import holdfast

home, last, label = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rank, size, round = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["HOLDFAST_ROUND"]
snapshots = holdfast.snapshots.open()
saved = snapshots.load(reshard=os._exit) if (home / "reshard").exists() else snapshots.load()
step, value = (saved.step, saved["value"]) if saved is not None else (0, rank + 1)


def note(name, **more):
    with open(home / f"{name}.jsonl", "a") as file:
        file.write(json.dumps({"rank": rank, "round": int(round), "step": step, "label": label, **more}) + "\\n")


def await_others():
    """Between two saves lies a collective operation."""
    (home / f"at.{label}.{round}.{step}.{rank}").touch()
    while not all((home / f"at.{label}.{round}.{step}.{each}").exists() for each in range(size)):
        time.sleep(0.002)


def pause():
    try:
        return int((home / "pause").read_text() or last + 1)
    except FileNotFoundError:
        return last + 1


if (home / "deaf").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
note("loads", node=os.environ["TEST_NODE"])
while step < last:
    if (home / "fail").exists():
        raise RuntimeError("as the test wants it")
    step += 1
    value = (value * 6364136223846793005 + 31 * step + rank) % (1 << 61)
    await_others()
    with snapshots.save(step) as out:
        out["value"], out["bulk"] = value, bytearray(200_000)
    note("steps")
    while step >= pause():
        time.sleep(0.01)
        if (home / "fail").exists():
            raise RuntimeError("as the test wants it")
    time.sleep(0.01)
note("results", value=value)
'''


def result_of(rank: int, last: int) -> int:
    value = rank + 1
    for step in range(1, last + 1):
        value = (value * 6364136223846793005 + 31 * step + rank) % (1 << 61)
    return value


class Training(Scene):
    """A run of `TRAIN`."""

    def __init__(self, home: Path, mark: str) -> None:
        super().__init__(home, mark)
        self.train = support.write_script(home / "train.py", TRAIN)
        self.token = home / "token"
        self.token.write_text("holdfast-test-token-of-this-run")
        self.token.chmod(0o600)
        self.disk = home / "disk"

    def train_on(
        self, name: str, nnodes: str, *options: str, last: int = 60, label: str = "x", **more: Any
    ) -> nodes.Node:
        token = ("--token-file", str(self.token))
        return self.start(name, nnodes, *token, *options, script=self.train, args=(str(last), label), **more)

    def train_alone(self, *options: str, last: int = 60, label: str = "x") -> nodes.Node:
        return self.start_standalone("a", *options, script=self.train, args=(str(last), label))

    def notes(self, name: str, **wanted: Any) -> list[dict[str, Any]]:
        try:
            lines = (self.home / f"{name}.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines]
        return [each for each in found if all(each[key] == value for key, value in wanted.items())]

    def pause_at(self, step: int) -> None:
        (self.home / "pause").write_text(str(step))

    def go_on(self) -> None:
        (self.home / "pause").unlink()

    def await_step(self, step: int, ranks: int, **wanted: Any) -> None:
        self.wait_for(lambda: len(self.notes("steps", step=step, **wanted)) >= ranks, f"step {step} of {ranks} ranks")

    def check_results(self, ranks: int, last: int = 60, **wanted: Any) -> None:
        results = {each["rank"]: each["value"] for each in self.notes("results", **wanted)}
        assert results == {rank: result_of(rank, last) for rank in range(ranks)}, str(self)

    def loaded(self, **wanted: Any) -> dict[int, int]:
        """By rank, the step from which it went on."""
        return {each["rank"]: each["step"] for each in self.notes("loads", **wanted)}

    def listed(self, *args: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.ask("snapshots", *args, "--json"))["snapshots"]
        return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Training]:
    stage = Training(tmp_path / uuid.uuid4().hex[:8], os.environ[support.TEST_MARK])
    try:
        yield stage
    finally:
        stage.close()
    stage.check()


def test_workers_that_could_reshard_need_not_if_the_world_keeps_its_size(run: Training) -> None:
    """Nothing has to move: each node has the parts of its ranks."""
    (run.home / "reshard").touch()
    run.pause_at(20)
    for name in "ab":
        run.train_on(name, "2", "--nproc-per-node", "2", "--max-restarts", "1")
    run.await_step(20, 4)
    victim = run.notes("steps", step=20, rank=3)
    assert victim
    (run.home / "fail").touch()
    run.wait_for(lambda: "as the test wants it" in run.nodes[0].log or "as the test wants it" in run.nodes[1].log, "it")
    (run.home / "fail").unlink()
    run.go_on()
    assert run.ended() == {"a": 0, "b": 0}
    assert run.loaded(round=2) == dict.fromkeys(range(4), 20)
    run.check_results(4)


@promise(
    "snapshots.node-lost: With `--snapshot-copies 1` a standby that takes the place of a lost node loads its ranks "
    "from the copies, and the job ends with the result of an undisturbed one."
)
def test_a_standby_goes_on_from_the_copies_of_a_lost_node(run: Training) -> None:
    options = ("--nproc-per-node", "2", "--snapshot-copies", "1", "--max-restarts", "3")
    for name in "ab":
        run.train_on(name, "2", *options, last=400)
    run.await_step(1, 4)
    run.train_on("c", "2", *options, last=400)
    complete = run.wait_for(lambda: next(iter(copied_steps(run)), None), "a step that was copied")
    run.nodes[1].send(signal.SIGKILL)
    assert run.ended() == {"a": 0, "b": -9, "c": 0}
    [step] = set(run.loaded(round=2).values())
    assert step >= complete
    run.check_results(4, last=400)
    assert {each["node"] for each in run.notes("loads", round=2)} == {"a", "c"}


def copied_steps(run: Training) -> list[int]:
    """Steps of which each rank is on two nodes."""
    both = [each for each in run.listed(run.run_id) if len(each["places"].get("copy", ())) == 2]
    return [each["step"] for each in both if not each["missing"] and len(each["places"].get("memory", ())) == 2]


class TorchTraining:
    """`snapshot_training.py` on two nodes with a worker each; a node that is lost is replaced."""

    def __init__(self, run: Training, kind: str, steps: int, chance: random.Random) -> None:
        self._run, self._args, self._chance, self._count = run, (kind, str(steps), "0"), chance, 0
        self._modules = programs.PRELOAD[kind]
        self.agents = [self._start() for _ in range(2)]

    def _start(self) -> nodes.Node:
        self._count += 1
        options = ["--token-file", str(self._run.token), "--snapshot-copies", "1", "--max-restarts", "100"]
        more: Any = {"script": str(programs.PROGRAM), "args": self._args}
        return self._run.start(f"n{self._count}", "2", *options, "--preload", self._modules, **more)

    def begun(self) -> list[list[programs.Line]]:
        lines = [programs.lines_of(self._run.home, rank) for rank in range(2)]
        return [[line for line in each if line.what == "begin"] for each in lines]

    def pause_at(self, step: int) -> None:
        (self._run.home / "pause.new").write_text(str(step))
        (self._run.home / "pause.new").rename(self._run.home / "pause")

    def await_step(self, step: int, after_attempt: int = -1) -> None:
        def is_there() -> bool:
            ends = [each[-1] for each in self.begun() if each]
            return len(ends) == 2 and all(line.step >= step and line.attempt > after_attempt for line in ends)

        self._run.wait_for(is_there, f"step {step} after attempt {after_attempt}", 180)

    # The faults. Each returns the oldest step with which the training may go on.

    def worker(self) -> int:
        ends = [each[-1] for each in self.begun()]
        for line in self._chance.sample(ends, self._chance.randint(1, 2)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(line.pid, signal.SIGKILL)
        return min(line.step for line in ends)

    def node(self) -> int:
        copied = self._run.wait_for(lambda: copied_steps(self._run), "a step that was copied")
        victim = self._chance.randrange(2)
        self.agents[victim].send(signal.SIGKILL)
        self.agents[victim] = self._start()
        return max(copied) + 1

    def coordinator(self) -> int:
        step = min(each[-1].step for each in self.begun())
        os.kill(self._run.await_coordinator(), signal.SIGKILL)
        return step


@promise(
    "snapshots.nodes-lost: A training with torch whose workers, nodes and coordinator are killed at any time ends with "
    "exactly the weights and the samples of one that nothing disturbed, with copies on other nodes (DDP, FSDP)."
)
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_training_that_loses_nodes_ends_as_if_nothing_had_happened(run: Training, kind: str) -> None:
    support.need_module("torch")
    if kind == "fsdp":
        support.leave_to_test_all(kind)
    chance = random.Random(kind)
    faults = ["node", "coordinator", "worker"] * (17 if support.is_test_all() else 1)
    steps = 200 * (len(faults) + 3)
    options = ("--nproc-per-node", "2", "--preload", programs.PRELOAD[kind])
    run.start_standalone("whole", *options, script=str(programs.PROGRAM), args=(kind, str(steps), "0")).wait(300)
    expected = programs.result_in(run.home)
    for rank in range(2):
        (run.home / f"rank{rank}").unlink()
    training = TorchTraining(run, kind, steps, chance)
    training.pause_at(600)
    for number, fault in enumerate(faults, 1):
        training.await_step(200 * number + chance.randrange(150))
        before = max(each[-1].attempt for each in training.begun())
        oldest = getattr(training, fault)()
        training.pause_at(200 * (number + 3))  # Workers that wait at the last one begin no step.
        training.await_step(200 * (number + 1), after_attempt=before if fault != "coordinator" else -1)
        later = [line.step for each in training.begun() for line in each if line.attempt > before]
        assert bool(later) == (fault != "coordinator"), fault
        assert min(later, default=oldest) >= oldest, fault
    assert [agent.wait(120) for agent in training.agents] == [0, 0]
    assert programs.result_in(run.home) == expected


@proves("snapshots.rank-moves")
def test_ranks_that_change_their_nodes_are_fetched(run: Training) -> None:
    """In the second run each node has the directory, and so the rank, of the other."""
    run.pause_at(20)
    for name in "ab":
        run.train_on(name, "2", "--nproc-per-node", "1", "--max-restarts", "3", "--snapshot-dir", str(run.disk / name))
    run.await_step(20, 2)
    for node in run.nodes:
        node.send(signal.SIGTERM)
    assert {node.wait() for node in run.nodes} == {143}
    ranks_of = {each["node"]: each["rank"] for each in run.notes("loads")}
    run.go_on()
    # The directories are swapped: now each node has the file of the other one's rank.
    for name, other in ("ab", "ba"):
        options = ("--nproc-per-node", "1", "--max-restarts", "3", "--node-rank", str(ranks_of[name]))
        run.train_on(f"{name}-2", "2", *options, "--snapshot-dir", str(run.disk / other), label="y")
    assert {code for name, code in run.ended().items() if name.endswith("-2")} == {0}
    assert run.loaded(label="y") == {0: 20, 1: 20}
    run.check_results(2, label="y")
    assert all((run.disk / name / "step-20" / "complete").exists() for name in "ab")  # So older steps can go.


@pytest.mark.parametrize("end", ["signal", "failure", "stop"])
@promise(
    "snapshots.disk-at-the-end: With `--snapshot-dir` a run that is ended by a signal, a failure or `holdfast stop` "
    "writes its last common step, and the next run goes on from it."
)
def test_the_next_run_goes_on_where_this_one_ended(run: Training, end: str) -> None:
    run.pause_at(20)
    node = run.train_alone("--nproc-per-node", "2", "--snapshot-dir", str(run.disk))
    run.await_step(20, 2)
    if end == "signal":
        node.send(signal.SIGTERM)
    elif end == "stop":
        run.ask("stop", str(node.pid))
    else:
        (run.home / "fail").touch()
    assert node.wait() == {"signal": 143, "failure": 1, "stop": 94}[end]
    assert f"step 20 of this node was written to {run.disk}" in node.log
    [newest, *_] = run.listed("--dir", str(run.disk))
    assert (newest["step"], newest["missing"], newest["places"].keys()) == (20, [], {"disk"})
    (run.home / "fail").unlink(missing_ok=True)
    run.go_on()
    assert run.train_alone("--nproc-per-node", "2", "--snapshot-dir", str(run.disk), label="y").wait() == 0
    assert run.loaded(label="y") == {0: 20, 1: 20}
    run.check_results(2, label="y")


@proves("snapshots.disk-at-the-end")
def test_workers_that_ignore_the_signal_leave_their_files_as_well(run: Training) -> None:
    """They use up the grace period; meanwhile the files are written."""
    (run.home / "deaf").touch()
    run.pause_at(20)
    node = run.train_alone("--nproc-per-node", "2", "--snapshot-dir", str(run.disk), "--grace-period", "2s")
    run.await_step(20, 2)
    node.send(signal.SIGTERM)
    assert node.wait() == 143
    assert f"step 20 of this node was written to {run.disk}" in node.log
    assert "within the grace period" not in node.log


@promise(
    "snapshots.disk-every: With `--snapshot-every` steps are written while the workers run, and the next run goes on "
    "from there if this one is killed."
)
def test_steps_are_written_meanwhile(run: Training) -> None:
    options = ("--nproc-per-node", "2", "--snapshot-dir", str(run.disk), "--snapshot-every", "0.5s")
    run.disk.mkdir()
    node = run.train_alone(*options, last=2000)
    run.wait_for(lambda: len(run.listed("--dir", str(run.disk))) >= 2, "two steps on disk")
    node.send(signal.SIGKILL)
    node.wait()
    written = max(each["step"] for each in run.listed("--dir", str(run.disk)) if not each["missing"])
    assert run.train_alone(*options, last=written + 50, label="y").wait() == 0
    assert run.loaded(label="y") == {0: written, 1: written}
    run.check_results(2, last=written + 50, label="y")


@promise(
    "snapshots.disk-trouble: A full disk, or a directory that is gone, costs one line; the files of older steps stay."
)
@pytest.mark.parametrize("trouble", ["full", "gone"])
def test_trouble_with_the_disk_costs_one_line(run: Training, trouble: str) -> None:
    if os.geteuid():
        pytest.skip("only root can mount a file system")
    run.disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(run.disk)], check=True)
    try:
        run.pause_at(20)
        options = ("--nproc-per-node", "2", "--snapshot-dir", str(run.disk))
        node = run.train_alone(*options)
        run.await_step(20, 2)
        node.send(signal.SIGTERM)
        node.wait()
        run.pause_at(40)
        node = run.train_alone(*options, label="y")
        run.await_step(40, 2, label="y")
        if trouble == "full":
            free = os.statvfs(run.disk)
            (run.disk / "full").write_bytes(bytes(free.f_bavail * free.f_frsize))
            reason = "No space left on device"
        else:
            subprocess.run(["umount", "-l", str(run.disk)], check=True)
            run.disk.rmdir()
            reason = "No such file or directory"
        node.send(signal.SIGTERM)
        assert node.wait() == 143
        assert f"step 40 cannot be written to {run.disk}: {reason}" in node.log
        if trouble == "full":
            run.go_on()
            assert run.train_alone(*options, label="z", last=41).wait() == 0
            assert run.loaded(label="z") == {0: 20, 1: 20}
    finally:
        subprocess.run(["umount", "-l", str(run.disk)], check=False, stderr=subprocess.DEVNULL)


@promise(
    "snapshots.disk-later-steps: Steps on disk that are later than the one that is loaded are set aside. If nothing "
    "can be loaded, they stay."
)
def test_later_steps_are_set_aside_unless_nothing_is_loaded(run: Training) -> None:
    run.pause_at(20)
    options = ("--snapshot-dir", str(run.disk))
    node = run.train_alone("--nproc-per-node", "2", *options)
    run.await_step(20, 2)
    node.send(signal.SIGTERM)
    node.wait()
    names = sorted(os.listdir(run.disk))
    # Another number of workers: the state of two ranks is not that of one.
    node = run.train_alone("--nproc-per-node", "1", *options, last=5, label="y")
    assert node.wait() == 0
    assert run.loaded(label="y") == {0: 0}
    assert "has step 20, which is not loaded as it is" in node.log
    assert sorted(os.listdir(run.disk)) == names
    shutil.copytree(run.disk / "step-20", run.disk / "step-30")
    for path in (run.disk / "step-30").iterdir():
        path.write_bytes(path.read_bytes().replace(b'"holdfast.step":"20"', b'"holdfast.step":"30"'))
    (run.disk / "step-30" / "rank-0-of-2.safetensors").unlink()
    run.go_on()
    node = run.train_alone("--nproc-per-node", "2", *options, label="z")
    assert node.wait() == 0
    assert run.loaded(label="z") == {0: 20, 1: 20}
    assert f"goes on from step 20; a later one is now {run.disk}/step-30.set-aside" in node.log


def test_snapshots_of_a_run_are_listed_and_exported(run: Training) -> None:
    run.pause_at(20)
    node = run.train_alone("--nproc-per-node", "2")
    run.await_step(20, 2)
    newest = run.wait_for(lambda: next((each for each in run.listed(str(node.pid)) if each["step"] == 20), None), "it")
    assert (newest["missing"], [*newest["places"]]) == ([], ["memory"])
    assert newest["bytes"] > 400_000
    assert "20 " in run.ask("snapshots", str(node.pid))
    run.ask("snapshots", str(node.pid), "--export", str(run.home / "exported"))
    assert run.listed("--dir", str(run.home / "exported"))[0]["step"] == 20
    node.send(signal.SIGTERM)
    node.wait()
    assert "there are no snapshots" in run.ask("snapshots", "--dir", str(run.home / "notes"))


@promise(
    "snapshots.export-copies: `holdfast snapshots --export` writes parts of other nodes' ranks as well, from copies on "
    "this host."
)
def test_an_agent_exports_the_copies_that_it_has(run: Training, certificates: Certificates) -> None:
    """The copies came through TLS."""
    tls = ("--tls-cert", certificates.server_pem, "--tls-key", certificates.server_key, "--tls-ca", certificates.ca_pem)
    for name in "ab":
        run.train_on(name, "2", "--nproc-per-node", "2", "--snapshot-copies", "1", *tls, last=2000)
    run.await_step(1, 4)
    run.wait_for(lambda: copied_steps(run), "a step that was copied")
    run.pause_at(1)  # Now the last copies stay.
    exported = run.home / "exported"
    exported.mkdir()

    def is_written() -> bool:
        """As long as the training comes to a halt, a step may be gone when it is asked for."""
        copied = copied_steps(run)
        found = [each for each in run.listed(run.run_id) if each["step"] in copied]
        [agent], _ = ask.find(pids=[run.nodes[0].pid])
        request = {"command": "export", "snapshot": found[0]["key"], "directory": str(exported)} if found else {}
        with contextlib.suppress(HostError):
            return bool(ask.LocalRun([agent]).ask_node(agent.name, request, dict[str, Any]))
        return False

    run.wait_for(is_written, "an export")
    listed = run.listed("--dir", str(exported))[0]
    assert (listed["missing"], listed["world_size"]) == ([], 4)


@promise(
    "snapshots.dead-mount: A directory for snapshots that does not answer does not hold up the agent: signals count at "
    "once, and after 10 s the node joins without it."
)
def test_a_directory_on_a_dead_mount_holds_nothing_up(run: Training) -> None:
    with support.dead_mount(run.disk):
        node = run.train_alone("--nproc-per-node", "1", "--snapshot-dir", str(run.disk / "x"), last=5)
        support.await_sleep(node.pid)
        began = time.monotonic()
        node.send(signal.SIGTERM)
        assert node.wait() == 143
        assert time.monotonic() - began < 8
        node = run.train_alone("--nproc-per-node", "1", "--snapshot-dir", str(run.disk / "x"), last=5)
        assert node.wait() == 0
        assert f"--snapshot-dir {run.disk}/x: it did not answer within 10 s; this node goes on without it" in node.log
    run.check_results(1, last=5)


def test_copies_without_a_token_are_refused(run: Training) -> None:
    node = run.start("a", "2", "--snapshot-copies", "1", script=run.train, args=("5", "x"))
    assert node.wait() == 2
    assert "token" in node.log
