"""What a job of two nodes does on every engine: by ssh, on Ray and on Slurm, each of them real."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import Holdfast
from tests.engines import DEADLINE_S, Engine, Engines, agent_of
from tests.promises import promise, proves
from tests.support import Mailbox


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.close()


@pytest.fixture(params=["ssh", "ray", "slurm"])
def engine(
    request: pytest.FixtureRequest, engines: Engines, holdfast: Holdfast, mailbox: Mailbox, tmp_path: Path
) -> Iterator[Engine]:
    with engines.engine(request.param, holdfast, mailbox, tmp_path) as made:
        yield made


@promise("""ssh.line-host-lost-torn: No line of any host is lost or torn. A line that all hosts write, also one of the
    agents, is shown once on a terminal.""")
@promise("""engines.submit-slurm-shows-job: `holdfast submit slurm` shows the job's output and ends with its exit code.
    With `--detach` it prints the id.""")
@promise("""ray.submit-starts-agent-node: `holdfast submit ray` starts one agent on each node of a Ray cluster, up to
    the maximum. All output arrives whole at the command, with its node and rank, and the exit code is the job's.""")
def test_success(engine: Engine) -> None:
    """Every line arrives whole, with its node and rank, also one that is very long."""
    what = ("lines",) if engine.keeps_lines_whole else ()
    ended = engine.ended(engine.work(*what, options=("--nnodes=2", "--nproc-per-node=2")))
    assert ended.code == 0, str(ended)
    shown = [line for line in (ended.out + ended.err).splitlines() if not line.startswith("holdfast: ")]
    found = [re.fullmatch(r"\[(.*?):(\d)\] (.*)", line) for line in shown]
    lines = [(each[1], int(each[2]), each[3]) for each in found if each]
    others = [line for line, each in zip(shown, found, strict=True) if not each]
    assert others == [], "every line has its node and rank"
    assert [len({node for node, rank, _ in lines if rank in ranks}) for ranks in ((0, 1), (2, 3))] == [1, 1]
    assert {node for node, _, _ in lines} == {*engine.nodes}
    for own in range(4):
        many = [*(f"{own} {number} {'x' * (number % 400)} end" for number in range(2000)), "y" * 300_000]
        expected = [*(many if what else []), f"done {own}"]
        assert sorted(text for _, rank, text in lines if rank == own) == sorted(expected)
    assert "no token" not in ended.out + ended.err
    assert engine.files_left() == []


@promise("ssh.failed-run-prints-report: A failed run prints one report, and the exit code is the run's.")
@proves("engines.real-slurm-two-nodes", "engines.submit-slurm-shows-job", "ray.failure-followed-restart-failed")
def test_failure(engine: Engine) -> None:
    ended = engine.ended(engine.work("fail", "wait"))
    assert ended.code == 1, str(ended)
    said = ended.out + ended.err
    assert said.count("FAILED") == 1
    assert [line for line in said.splitlines() if line.endswith(":1] RuntimeError: the disk is on fire")]
    assert re.search(r"^Cause: rank 1 failed: RuntimeError: the disk is on fire \(exit code 1", said, re.MULTILINE)


@promise("""ray.failure-followed-restart-failed: A failure is followed by a restart, and a failed job prints one
    report.""")
@proves("engines.real-slurm-two-nodes")
def test_a_failure_is_followed_by_a_restart(engine: Engine) -> None:
    engine.done.touch()
    ended = engine.ended(engine.work("fail once", "wait", options=("--nnodes=2", "--max-restarts=1")))
    assert ended.code == 0, str(ended)
    assert "restart 1 of 1" in ended.out + ended.err
    assert len([line for line in ended.lines if line.endswith(":1] done 1")]) == 1


@proves("ssh.signals-reach-workers-hosts", "engines.scancel-stops-job-grace", "ray.sigterm-ctrl-command-end")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_command(engine: Engine, number: signal.Signals) -> None:
    """The workers are stopped with grace, and nothing is left."""
    running = engine.work("wait")
    pids = engine.pids(2)
    running.send(number)
    ended = engine.ended(running)
    assert ended.code == 128 + number, str(ended)
    assert engine.mailbox.take(2) == [f"signal {engine.passed_on(number.name)}"] * 2
    assert support.survivors(pids.values()) == []
    assert engine.files_left() == []


@promise("""notice.command-of-engine: SIGUSR1 to `holdfast run` with `--hosts`, to `holdfast submit ray` or to `holdfast
    submit slurm` gives notice to the whole run: all workers of all nodes are told, and the command ends with 95.""")
def test_a_notice_at_the_command(engine: Engine) -> None:
    running = engine.work("save")
    engine.pids(2)
    running.send(signal.SIGUSR1)
    ended = engine.ended(running)
    assert ended.code == 95, str(ended)
    assert sorted(engine.mailbox.take(2)) == ["saved 0", "saved 1"]
    assert "goes away in 120 s (SIGUSR1)" in ended.out + ended.err
    assert engine.files_left() == []


@promise("engines.agent-killed-leaves-elastic: An agent that is killed leaves an elastic run, which goes on.")
@proves("ssh.host-agent-killed-network")
def test_the_agent_of_a_node_is_killed(engine: Engine) -> None:
    """The run goes on without it, or with another one in its place."""
    running = engine.work("wait", options=("--nnodes=1:2", "--last-call=1s"))
    pids = engine.pids(2)
    os.kill(agent_of(pids[1]), signal.SIGKILL)
    assert support.survivors(pids.values(), DEADLINE_S) == []
    engine.pids(2 if engine.name == "ray" else 1)
    engine.done.touch()
    ended = engine.ended(running)
    assert ended.code == 0, str(ended)
    assert len([line for line in ended.lines if line.endswith(":0] done 0")]) == 1, "the job does not run again"


@promise("ssh.console-takes-more-holds: A console that takes no more holds up no signal and no connection.")
@promise("""ray.sigterm-ctrl-command-end: SIGTERM and Ctrl-C at the command end the job in order on all nodes, in
    bounded time, also if its output is not read.""")
@proves("engines.signal-job-being-submitted")
def test_a_console_that_is_not_read(engine: Engine) -> None:
    """The workers wait, as they do at a console of their own. The job can be stopped all the same."""
    reader, writer = os.pipe()
    try:
        support.fill(writer)
        running = engine.work("flood", stdout=writer)
        engine.pids(2)
        running.send(signal.SIGTERM)
        assert engine.ended(running).code == 128 + signal.SIGTERM
    finally:
        os.close(reader)
        os.close(writer)


@promise("""ssh.command-killed-stands-cut: When the command is killed, stands still, or is cut off from its hosts, the
    agents end their workers and themselves.""")
@promise("""ray.command-killed-agent-worker: If the command is killed, no agent, worker, coordinator or file of it is
    left.""")
def test_the_command_is_killed(engine: Engine) -> None:
    running = engine.work("wait")
    pids = engine.pids(2)
    below = [*pids.values(), *map(agent_of, pids.values()), *support.tree(running.pid)]
    running.send(signal.SIGKILL)
    running.process.wait()
    if engine.outlives_caller:
        assert support.survivors(pids.values(), 1.0) == [*pids.values()]
        engine.done.touch()
    assert support.survivors(below, DEADLINE_S) == []
    support.wait_until(lambda: not engine.files_left(), "no file is left")
    support.wait_until(lambda: not running.left(), "nothing is left", DEADLINE_S)
