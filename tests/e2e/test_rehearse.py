"""`holdfast rehearse` does to a real job what it says, and notices a job that does not come back to the same result."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import COMMAND, Ended, Holdfast
from tests.engines import Engines, Ssh
from tests.promises import promise, proves
from tests.support import Mailbox

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = str(EXAMPLES / "rehearse" / "train.py")
RESULTS = ("--expect-file=result-0.json", "--expect-file=result-1.json")


def rehearse(holdfast: Holdfast, *words: str) -> Ended:
    return holdfast.run(*words, command=(COMMAND, "rehearse"), deadline_s=200)


@promise("""rehearse.faults: `holdfast rehearse` runs a job once undisturbed and once for each fault, says for each how
    long it took to be noticed, to run again and to be further than before, and compares the results. It ends with 0
    only if every fault was survived.""")
def test_a_job_that_keeps_its_place_survives(holdfast: Holdfast) -> None:
    ended = rehearse(holdfast, "--nproc-per-node=2", "--max-restarts=3", *RESULTS, "--json", JOB)
    assert ended.code == 0, ended
    trials = {each["fault"]: each for each in json.loads(ended.out)["trials"]}
    killed = trials["a worker is killed"]
    assert killed["state"] == "survived"
    assert killed["seen"]["noticed_s"] <= killed["seen"]["running_s"] <= killed["seen"]["further_s"]
    assert trials["a stop and a new start"]["state"] == "survived"
    assert {each["state"] for each in trials.values() if "node" in each["fault"]} == {"not covered"}


@proves("rehearse.faults")
def test_a_job_that_begins_anew_with_another_result_does_not(holdfast: Holdfast) -> None:
    script = holdfast.script(
        """
        import os, time, holdfast
        for step in range(40):
            time.sleep(0.05)
            holdfast.progress(step)
        print("result", os.environ["HOLDFAST_ROUND"])
        """
    )
    ended = rehearse(holdfast, "--max-restarts=1", "--expect-output=result", script)
    assert ended.code == 1, ended
    assert "a worker is killed: the result is not that of the undisturbed run" in ended.lines
    assert re.search(r"^\d faults? not survived; compared: the last line with 'result'", ended.out, re.MULTILINE)


@proves("rehearse.faults")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--rdzv-id=job7", JOB), "--rdzv-id: a rehearsal never touches a real run; leave the option out"),
        (("--hosts=a,b", "--copy=script", JOB), "--copy: a rehearsal decides that; leave the option out"),
        (("--rejoin-hosts", JOB), "--rejoin-hosts is for --hosts; leave it out"),
        (("--hosts=a,b", "--ssh=no-such-ssh", JOB), "there is no 'no-such-ssh' on PATH"),
        ((), "a script to run is required"),
        (("--seed=x", JOB), "--seed: 'x' is not a whole number from 0 on"),
        (("--keep=/dev/null", JOB), "--keep /dev/null: File exists"),
        (("--keep=/dev/null/x", JOB), "--keep /dev/null/x: Not a directory"),
        (("--keep=/proc", JOB), "--keep /proc: the directory is not empty"),
        (("--trial-timeout=0", JOB), "--trial-timeout: '0' is not a number of seconds above 0"),
        (("--expect-output=(", JOB), "--expect-output: '(' is no regular expression"),
        (("--snapshot-dir=/ckpt", JOB), "--snapshot-dir /ckpt: a real run may have its snapshots there"),
        (("--preload=json", "--preload-keep=1h", JOB), "--preload-keep: a rehearsal decides that"),
    ],
)
def test_wrong_words(words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert problem in support.refused(capsys, 2, "rehearse", *words)


@proves("rehearse.faults")
def test_a_job_of_several_nodes_survives_every_fault(holdfast: Holdfast) -> None:
    support.leave_to_test_all("a rehearsal of two nodes with every fault")
    options = ("--nnodes=2", "--max-restarts=3", "--hang-timeout=3s", *RESULTS)
    ended = rehearse(holdfast, *options, JOB)
    assert ended.code == 0, ended
    assert "all 6 faults survived" in ended.out


@proves("rehearse.faults")
def test_the_training_of_the_examples_survives_every_fault(holdfast: Holdfast) -> None:
    support.leave_to_test_all("a rehearsal of a training with torch on two nodes")
    options = ("--nnodes=2", "--nproc-per-node=2", "--max-restarts=3", "--hang-timeout=8s", "--expect-output=^loss")
    job = (str(EXAMPLES / "ddp" / "train.py"), "--checkpoint=model.pt", "--steps=60", "--step-time=0.1")
    ended = holdfast.run(*options, *job, command=(COMMAND, "rehearse"), deadline_s=600)
    assert ended.code == 0, ended
    assert "all 6 faults survived; compared: the last line with '^loss'" in ended.out


@pytest.fixture
def cluster(holdfast: Holdfast, mailbox: Mailbox, tmp_path: Path) -> Iterator[Ssh]:
    with Engines().engine("ssh", holdfast, mailbox, tmp_path) as made:
        assert isinstance(made, Ssh)
        yield made


@promise("""rehearse.hosts: `holdfast rehearse --hosts` does the same on other hosts, by ssh: their agents, workers and
    coordinators are killed and frozen there, and the result is read there. A disk cannot be filled.""")
def test_a_rehearsal_on_other_hosts(cluster: Ssh) -> None:
    options = (f"--ssh={cluster.servers.ssh}", "--hosts=node1,node2", "--rejoin-hosts", "--rdzv-conf=close_linger=1")
    limits = ("--max-restarts=3", "--hang-timeout=3s")
    ended = rehearse(cluster.holdfast, *options, *limits, *RESULTS, "--json", JOB)
    assert ended.code == 0, ended
    trials = {each["fault"]: each for each in json.loads(ended.out)["trials"]}
    states = {fault: each["state"] for fault, each in trials.items()}
    assert states.pop("the disk for logs is full") == "not covered"
    assert {*states.values()} == {"survived"}, ended
    for fault in ("a worker is killed", "a node is lost"):
        seen = trials[fault]["seen"]
        assert seen["running_s"] <= seen["further_s"]
        assert seen["last_step"] == 40


@proves("rehearse.hosts")
def test_a_host_that_cannot_be_reached_ends_a_rehearsal(holdfast: Holdfast) -> None:
    ssh = holdfast.script("#!/bin/sh\nexit 255\n", "ssh", executable=True)
    ended = rehearse(holdfast, "--hosts=a,b", f"--ssh=./{ssh}", JOB)
    assert ended.code == 1, ended
    assert "a: the connection has ended" in ended.last


def test_modules_are_found_from_the_directory_of_the_command(holdfast: Holdfast) -> None:
    holdfast.script("import beside", "job.py")
    (holdfast.directory / "site").mkdir()
    (holdfast.directory / "site" / "beside.py").write_text("print('both found')\n")
    ended = holdfast.run(
        "--expect-output=both found", "-m", "job", command=(COMMAND, "rehearse"), env={"PYTHONPATH": "site"},
        deadline_s=100,
    )  # fmt: skip
    assert "undisturbed" in ended.out
    assert "no fault was tried" not in ended.out, ended


def test_a_job_that_fails_undisturbed_shows_its_output(holdfast: Holdfast) -> None:
    ended = rehearse(holdfast, holdfast.script("raise SystemExit('no data')"))
    assert ended.code == 1
    assert "undisturbed: the run ended with exit code 1" in ended.lines
    assert ended.lines[-1].startswith("no fault was tried; compared: ")
    assert "no data" in ended.err
