"""What is particular to `holdfast submit ray`, on a real Ray cluster. test_engines_suite.py has what all engines do."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import ray_cluster, support
from tests.e2e.command import COMMAND, Ended, Holdfast
from tests.engines import DEADLINE_S, Ray, agent_of
from tests.promises import promise, proves
from tests.ray_cluster import Cluster
from tests.support import Mailbox, survivors, wait_until

_DOCS = Path(__file__).parent.parent.parent / "docs" / "engines.md"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster.running() as made:
        yield made


@pytest.fixture
def ray(cluster: Cluster, holdfast: Holdfast, mailbox: Mailbox, tmp_path: Path) -> Ray:
    made = Ray(holdfast, mailbox, tmp_path)
    made.command = (COMMAND, "submit", "ray", "--address", cluster.address)
    return made


def ended(ray: Ray, *args: str) -> Ended:
    return ray.start(*args).wait(DEADLINE_S)


@promise("""ray.nodes-adds-join-lost: Nodes that Ray adds join, lost ones leave, and those that come back join again.
    What is missing is said, and the wait is bounded.""")
def test_nodes_come_and_go(ray: Ray, cluster: Cluster) -> None:
    """It waits for the first node with a GPU, and goes on with one that comes, without one that is lost, and with it
    again when it is back. Ray gives the agent the GPU."""
    job = ray.work("wait", options=("--gpus-per-node=1", "--nnodes=1:2", "--last-call=1s"))
    lacking = "127.77.0.1 lacks 1 GPUs, 127.77.0.2 lacks 1 GPUs"
    waiting = f"holdfast: 0 of 1 hosts are ready, waiting for 1 more ({lacking})"
    wait_until(lambda: waiting in job.so_far().own, "it waits", DEADLINE_S)
    first = cluster.add("--num-gpus=1")
    second = ""
    try:
        ray.pids(1)
        second = cluster.add("--num-gpus=1")
        pids = ray.pids(2)
        environ = Path(f"/proc/{pids[1]}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=0" in environ
        cluster.kill(second)
        ray.pids(1)
        second = cluster.add("--num-gpus=1")
        last = ray.pids(2)
        ray.done.touch()
        end = job.wait(DEADLINE_S)
        assert end.code == 0, str(end)
        assert {line.split(":")[0] for line in end.lines} == {f"[{first}", f"[{second}"}
        assert survivors([*pids.values(), *last.values()]) == []
    finally:
        for name in filter(None, (first, second)):
            cluster.kill(name)


@promise("""ray.killed-coordinator-started-workers: A killed coordinator is started again, and the workers keep running.
    A killed agent is started again, a few times.""")
def test_a_coordinator_that_is_killed(ray: Ray) -> None:
    """The workers do not notice, and the run ends as usual."""
    job = ray.work("wait")
    ray.pids(2)
    coordinator = next(pid for pid in support.tree(job.pid) if "coordinator" in psutil.Process(pid).cmdline()[4:5])
    os.kill(coordinator, signal.SIGKILL)
    warning = "holdfast: the coordinator has died, and is started again"
    wait_until(lambda: warning in job.so_far().own, "it is started again", DEADLINE_S)
    ray.done.touch()
    end = job.wait(DEADLINE_S)
    assert end.code == 0, str(end)
    assert ray.mailbox.rest() == []


@proves("ssh.exclude", "ray.killed-coordinator-started-workers")
def test_a_node_that_loses_its_agent_again_and_again_is_named(ray: Ray) -> None:
    job = ray.work("wait", options=("--nnodes=2", "--last-call=1s"))
    for _ in range(2):
        os.kill(agent_of(ray.pids(2)[1]), signal.SIGKILL)
    ray.pids(2)
    ray.done.touch()
    end = job.wait(DEADLINE_S)
    assert end.code == 0, str(end)
    assert re.search(r"^holdfast: exclude: 127\.77\.0\.\d \(2 losses\)$", end.err, re.MULTILINE), str(end)


@proves("ray.wrong-input-missing-unreachable")
def test_nodes_that_cannot_run_the_job(ray: Ray) -> None:
    """What is wrong is said with the name of the node, and the job ends."""
    end = ended(ray, "--nnodes=2", "--log-dir=/proc/nothing", "job.py")
    assert end.code in (1, 2), str(end)
    assert end.last.startswith("holdfast run: error: 127.77.0."), str(end)
    end = ended(ray, "--gpus-per-node=1", "--join-timeout=1s", "job.py")
    assert end.code == 1, str(end)
    assert end.last.startswith("holdfast submit: error: no agent could be started within 1 s (--join-timeout): 0 of 1 ")


@proves("ssh.exclude")
def test_a_node_that_is_left_out(ray: Ray) -> None:
    script = ray.holdfast.script("import os; print(os.environ['WORLD_SIZE'])")
    end = ended(ray, "--nnodes=1:2", "--exclude=127.77.0.1", "--last-call=1s", script)
    assert (end.code, end.lines) == (0, ["[127.77.0.2:0] 1"]), str(end)


@proves("ray.commands-docs-work")
def test_the_runtime_environment(ray: Ray) -> None:
    script = ray.holdfast.script("""
        import os, sys
        secrets = {"HOLDFAST_TOKEN", "HOLDFAST_REPORT_FILE"} & {*os.environ}
        print(os.environ["GREETING"], secrets, os.getcwd(), sys.argv[1])
    """)
    end = ended(ray, "--nnodes=2", '--runtime-env-json={"env_vars": {"GREETING": "hello"}}', script, "--lr")
    line = f"hello set() {ray.holdfast.directory} --lr"
    assert [each.partition("] ")[2] for each in end.lines] == [line] * 2, str(end)


@promise("ray.commands-docs-work: The commands of the docs work.")
def test_the_commands_of_the_docs(ray: Ray, cluster: Cluster) -> None:
    ray.holdfast.script("import os; print(os.environ['WORLD_SIZE'])", "train.py")
    section = _DOCS.read_text().partition("\n## Ray\n")[2].partition("\n## ")[0]
    commands = [line.split() for line in section.splitlines() if line.startswith("holdfast submit ray")]
    assert len(commands) >= 2
    for _, *words in commands:
        env = {"RAY_ADDRESS": cluster.address}
        end = ray.holdfast.run(*words, command=(COMMAND,), env=env, deadline_s=DEADLINE_S)
        assert end.code == 0, str(end)
        assert {line.partition("] ")[2] for line in end.lines} in ({"2"}, {"4"}, {"8"}), str(end)


@promise("""ray.head-killed-job-stopped: If Ray's head is killed, the job is stopped, with a clear line and exit code 1,
    and nothing is left.""")
def test_the_head_is_killed(ray: Ray, cluster: Cluster) -> None:
    """The last test of this file: no other has a cluster afterwards."""
    job = ray.work("wait")
    pids = ray.pids(2)
    cluster.kill(cluster.head)
    end = job.wait(DEADLINE_S)
    assert end.code == 1, str(end)
    assert "holdfast: the head of Ray has not answered for 15 s: stopping the job" in end.own, str(end)
    assert end.last == "holdfast submit: error: Ray was lost, and the job was stopped", str(end)
    assert survivors(pids.values(), DEADLINE_S) == []
