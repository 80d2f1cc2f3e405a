"""`holdfast submit slurm` when Slurm's commands are slow or die: commands of the test's own stand in for them.

`sbatch` waits for the file `submit` before it prints the id of the job; the job goes on while its `state` says so.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import support
from tests.e2e.command import COMMAND, Holdfast, Running
from tests.promises import promise, proves

COMMANDS = {
    "sbatch": f"""
        #!{sys.executable}
        import pathlib, sys, time

        def wait_for(name):
            while not pathlib.Path(name).exists():
                time.sleep(0.05)

        sys.stdin.read()
        pathlib.Path("called").touch()
        wait_for("submit")
        print(pathlib.Path("submit").read_text() or 7)
    """,
    "scancel": """
        #!/bin/sh
        echo "$@" > cancelled
        echo CANCELLED > state
    """,
    "scontrol": """
        #!/bin/sh
        [ "$1" = update ] && { echo "$@" > updated; exit; }
        [ ! -e busy ] || { rm busy; echo "slurm_load_jobs error: Socket timed out" >&2; exit 1; }
        echo "$@" > asked
        echo "JobId=7 Reason=None JobState=$(cat state) ExitCode=$(cat code):0 Comment=\\377"
        echo "   StdOut=$PWD/out"
    """,
}

Submit = Callable[..., Running]


@pytest.fixture
def submit(holdfast: Holdfast, tmp_path: Path) -> Submit:
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, source in COMMANDS.items():
        support.write_script(commands / name, source, executable=True)
    holdfast.script("pass")
    (holdfast.directory / "state").write_text("RUNNING")
    (holdfast.directory / "code").write_text("0")
    path = f"{commands}:{os.environ['PATH']}"

    def start(**options: Any) -> Running:
        return holdfast.start("slurm", "job.py", command=(COMMAND, "submit"), env={"PATH": path}, **options)

    return start


def running(holdfast: Holdfast, submit: Submit, **options: Any) -> Running:
    (holdfast.directory / "submit").touch()
    job = submit(**options)
    support.wait_until(lambda: "submitted as Slurm job 7" in job.so_far().err, "the job runs")
    return job


@promise("""engines.signal-job-being-submitted: A signal while the job is being submitted cancels it. A console that
    takes nothing does not hold up a signal, nor end the wait for the job. A killed `sbatch` is one line.""")
def test_a_job_that_is_submitted_while_the_signal_comes_is_cancelled(holdfast: Holdfast, submit: Submit) -> None:
    job = submit()
    support.wait_until((holdfast.directory / "called").exists, "sbatch runs")
    job.send(signal.SIGINT)
    support.await_delivery(job.pid)
    (holdfast.directory / "submit").touch()
    assert job.wait().code == 130
    assert (holdfast.directory / "cancelled").read_text() == "7\n"


@promise("engines.job-slurm-gave-cluster: A job that Slurm gave to another cluster is asked for and cancelled there.")
def test_a_job_of_another_cluster_is_asked_for_and_cancelled_there(holdfast: Holdfast, submit: Submit) -> None:
    """The number alone may be that of another job."""
    (holdfast.directory / "submit").write_text("7;west")
    job = submit()
    support.wait_until(lambda: "submitted as Slurm job 7 of cluster west" in job.so_far().err, "the job runs")
    support.wait_until(lambda: "the output of the job" in job.so_far().err, "Slurm has answered")
    assert (holdfast.directory / "asked").read_text() == "--clusters=west show job 7\n"
    job.send(signal.SIGINT)
    assert job.wait().code == 130
    assert (holdfast.directory / "cancelled").read_text() == "--clusters=west 7\n"


def test_a_second_interrupt_does_not_wait_for_the_submission(holdfast: Holdfast, submit: Submit) -> None:
    job = submit()
    support.wait_until((holdfast.directory / "called").exists, "sbatch runs")
    for _ in range(2):
        job.send(signal.SIGINT)
        support.await_delivery(job.pid)
    ended = job.wait()
    assert (ended.code, ended.last) == (130, "holdfast: stopped by SIGINT")


@proves("engines.signal-job-being-submitted")
def test_an_sbatch_that_is_killed_is_one_line(holdfast: Holdfast, submit: Submit) -> None:
    job = submit()
    support.wait_until((holdfast.directory / "called").exists, "sbatch runs")
    [sbatch] = psutil.Process(job.pid).children()
    sbatch.kill()
    ended = job.wait()
    line = "holdfast submit: error: sbatch was killed by SIGKILL; `squeue --me` shows your jobs"
    assert (ended.code, ended.last) == (1, line)


@promise("""engines.submit-slurm-end-at-once: `holdfast submit slurm` returns when the job's script says that the agents
    have ended and Slurm knows it, and shows the output of a job that Slurm starts again.""")
def test_the_end_that_the_script_tells_is_noticed_at_once(holdfast: Holdfast, submit: Submit) -> None:
    """Otherwise Slurm is asked every few seconds only."""
    asked, out = holdfast.directory / "asked", holdfast.directory / "out"
    last = "holdfast: the agents of Slurm job 7 have ended with exit code"
    job = running(holdfast, submit)
    support.wait_until(asked.exists, "Slurm is asked")
    out.write_text(f"first\n{last} 143\n")
    (holdfast.directory / "state").write_text("PENDING Restarts=1 Reason=BeginTime")
    support.wait_until(lambda: "Slurm job 7 is back in the queue: BeginTime" in job.so_far().err, "it is said")
    (holdfast.directory / "state").write_text("COMPLETED")
    with out.open("a") as file:
        file.write(f"second\n{last} 0\n")
    ended = job.wait()
    assert (ended.code, ended.lines) == (0, ["first", "second"])


@proves("engines.submit-slurm-end-at-once")
def test_output_is_shown_if_slurm_says_later_where_it_is(holdfast: Holdfast, submit: Submit) -> None:
    (holdfast.directory / "busy").touch()
    (holdfast.directory / "out").write_text("first\n")
    job = running(holdfast, submit)
    support.wait_until(lambda: "first" in job.so_far().lines, "the output is shown", state=job.so_far)
    (holdfast.directory / "state").write_text("COMPLETED")
    ended = job.wait()
    assert (ended.code, ended.lines) == (0, ["first"])
    assert f"the output of the job goes to {holdfast.directory}/out" in ended.err


@promise("""engines.slurm-exclude: A node that the runs of a Slurm job have lost more than once is left out when Slurm
    starts the job again, and named at the end.""")
def test_a_node_that_was_lost_repeatedly_is_excluded_from_the_next_start(holdfast: Holdfast, submit: Submit) -> None:
    """Several agents tell of the same loss."""
    lost = "holdfast: the round is stopped: {}-{}-0123abcd is lost: its connection closed\n"
    losses = [("node2", 1), ("node2", 1), ("node3", 1), ("node2.domain", 7)]
    (holdfast.directory / "out").write_text("".join(lost.format(*each) for each in losses))
    job = running(holdfast, submit)
    support.wait_until(lambda: job.so_far().out.count("is lost") == 4, "the losses are shown")
    (holdfast.directory / "state").write_text("PENDING Restarts=1 Reason=BeginTime ExcNodeList=node9")
    updated = holdfast.directory / "updated"
    support.wait_until(updated.exists, "Slurm is told", state=job.so_far)
    (holdfast.directory / "state").write_text("COMPLETED")
    ended = job.wait()
    assert updated.read_text() == "update JobId=7 ExcNodeList=node9,node2\n"
    assert ended.own[-1] == "holdfast: exclude: node2 (2 losses)"
