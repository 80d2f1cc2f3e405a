"""What is particular to Slurm, on a real cluster of two nodes: agents that `srun` starts, and jobs that are submitted.

test_engines_suite.py has what all engines do.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.hosts.job import JobSpec
from tests import slurm_cluster, support
from tests.e2e.command import COMMAND, Ended, Holdfast, Running
from tests.promises import promise, proves
from tests.slurm_cluster import Cluster
from tests.test_docs_torchrun import ON_SLURM

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "slurm" / "train.sbatch"
DOCUMENT = ROOT / "docs" / "engines.md"

# Says that it is there, and with which node and round; then does what it was started for.
WORKER = """
import os, sys, time
what, box = sys.argv[1], sys.argv[2]
rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(box, "w") as mailbox:
    mailbox.write(f"{rank} {os.uname().nodename} {restarts} {os.getpid()} {os.environ['TORCHELASTIC_RUN_ID']}\\n")
if what == "wait" or (what == "wait once" and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"):
    time.sleep(600)
if what == "save once" and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    while not os.path.exists(os.environ["HOLDFAST_NOTICE_FILE"]):
        time.sleep(0.05)
    os.write(1, f"saved {rank}\\n".encode())
    sys.exit(95)
if what == "fail":
    sys.exit(f"rank {rank} of {os.environ['WORLD_SIZE']} has had enough")
os.write(1, f"done {rank}\\n".encode())  # In one piece: srun and mpirun mix the pieces of several nodes.
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm_cluster.running() as running:
        yield running


@pytest.fixture
def slurm(cluster: Cluster, holdfast: Holdfast, mailbox: support.Mailbox) -> Iterator[Slurm]:
    holdfast.script(WORKER)
    yield Slurm(cluster, holdfast, mailbox)
    cluster.cancel_all()


class Slurm:
    """Commands on a host, as a rule the first node, in the test's directory."""

    def __init__(self, cluster: Cluster, holdfast: Holdfast, mailbox: support.Mailbox) -> None:
        self.cluster, self.holdfast, self.mailbox = cluster, holdfast, mailbox
        self.host = 0

    def start(self, *words: str, **variables: str) -> Running:
        path = f"{Path(COMMAND).parent}:{os.environ['PATH']}"
        env = {**self.cluster.variables, "PATH": path, **variables}
        return self.holdfast.start(*words, command=self.cluster.on(self.host, self.holdfast.directory), env=env)

    def run(self, *words: str, **variables: str) -> Ended:
        """What Slurm ends may take a moment longer than the command."""
        running = self.start(*words, **variables)
        running.process.wait(60)
        support.wait_until(lambda: not running.left(), "nothing is left")
        return running.wait()

    def submit(self, what: str, *options: str, nodes: str = "2") -> Running:
        return self.start("holdfast", "submit", "slurm", f"--nnodes={nodes}", *options, *self.job(what))

    def job(self, what: str) -> tuple[str, str, str]:
        return ("job.py", what, str(self.mailbox))

    def jobs(self) -> str:
        """Their ids, from the names of their output files."""
        names = [path.name for path in self.holdfast.directory.glob("slurm-*.out")]
        assert names
        return ",".join(name[len("slurm-") : -len(".out")] for name in names)

    def workers(self, count: int = 2, deadline_s: float = support.DEADLINE_S) -> dict[int, list[str]]:
        """What each rank has said: host, restarts, pid, run. Slurm starts a requeued job after a while only."""
        return {int(rank): rest for rank, *rest in (line.split() for line in self.mailbox.take(count, deadline_s))}

    def back(self, host: str) -> dict[str, list[str]]:
        """What the workers of both nodes have said, by host, once those of this one are there again."""
        said: dict[str, list[str]] = {}
        while host not in said or len(said) < 2:
            [(where, *rest)] = self.workers(1, 60).values()
            said |= {where: rest}
        return said

    def agents(self) -> dict[str, int]:
        """The pid of the agent on each node."""
        found = {}
        for pid in support.marked(self.holdfast.mark):
            with contextlib.suppress(psutil.Error):
                words, environ = psutil.Process(pid).cmdline(), psutil.Process(pid).environ()
                is_agent = words[1:4] == ["-P", "-m", "holdfast"] and "run" in words
                if is_agent and "SLURM_NODEID" in environ and "RANK" not in environ:
                    found[environ["SLURMD_NODENAME"]] = pid
        return found


def job_id_of(running: Running) -> str:
    """As `holdfast submit` says it."""

    def said() -> re.Match[str] | None:
        return re.search(r"submitted as Slurm job (\d+)", running.so_far().err)

    found = support.wait_until(said, "the job is submitted")
    assert found is not None
    return found[1]


@promise("""engines.real-slurm-two-nodes: On a real Slurm of two nodes, `srun holdfast run` needs no options: the nodes
    meet, GPUs become workers, a failed worker is restarted on all nodes, and exit codes arrive.""")
def test_srun_on_two_nodes_needs_no_options(slurm: Slurm) -> None:
    ended = slurm.run("srun", "-N2", "holdfast", "run", *slurm.job("work"))
    assert ended.code == 0, str(ended)
    assert sorted(ended.lines) == ["[node1:0] done 0", "[node2:1] done 1"]
    said = re.findall(r"Slurm job (\d+), step 0: node (\d) of 2, meeting at node1:(\d+)$", ended.err, re.MULTILINE)
    assert sorted(node for _, node, _ in said) == ["0", "1"]
    assert len({(job, port) for job, _, port in said}) == 1
    assert {rank: host for rank, (host, *_) in slurm.workers().items()} == {0: "node1", 1: "node2"}


@proves("engines.real-slurm-two-nodes")
def test_gpus_are_workers(slurm: Slurm) -> None:
    ended = slurm.run("srun", "-N2", "--gpus-per-node=2", "holdfast", "run", *slurm.job("work"))
    assert (ended.code, len(ended.lines)) == (0, 4), str(ended)
    assert "2 workers (SLURM_GPUS_ON_NODE)" in ended.err
    ended = slurm.run("srun", "-N2", "--gpus-per-node=2", "holdfast", "run", "--nproc-per-node=1", *slurm.job("work"))
    assert (ended.code, len(ended.lines)) == (0, 2), str(ended)


@promise("engines.two-steps-jobs-hosts: Two steps or jobs on the same hosts do not meet.")
def test_two_steps_of_one_job_do_not_meet(slurm: Slurm) -> None:
    script = f"""
        #!/bin/bash
        srun holdfast run {" ".join(slurm.job("work"))} &
        srun holdfast run {" ".join(slurm.job("work"))} &
        wait
    """
    slurm.holdfast.script(script, "two.sh", executable=True)
    ended = slurm.run("salloc", "-N2", "--overcommit", "--exclusive", "./two.sh")
    assert ended.code == 0, str(ended)
    assert sorted(ended.lines) == ["[node1:0] done 0"] * 2 + ["[node2:1] done 1"] * 2
    assert {"step 0", "step 1"} <= set(re.findall(r"step \d", ended.err))


@proves("engines.job-other-than-thought")
@pytest.mark.parametrize("options", [(), ("--nnodes=2",)])
def test_without_srun_a_job_of_two_nodes_says_what_to_type(slurm: Slurm, options: tuple[str, ...]) -> None:
    run = ("holdfast", "run", *options, *slurm.job("work"))
    remedy = "put `srun --ntasks-per-node=1` in front, or give --no-detect"
    ended = slurm.run("sbatch", "-N2", "--wait", "--output=out", "--wrap", " ".join(run))
    out = (slurm.holdfast.directory / "out").read_text()
    assert (ended.code, out.count(remedy)) == (2, 1), out
    ended = slurm.run("salloc", "-N2", *run)
    assert (ended.code, ended.err.count(remedy), ended.lines) == (2, 1, []), str(ended)


@proves("engines.job-other-than-thought", "engines.nothing-detected-batch-script")
def test_several_tasks_on_a_node_and_jobs_of_one_node(slurm: Slurm) -> None:
    ended = slurm.run("srun", "-N1", "-n2", "holdfast", "run", *slurm.job("work"))
    assert (ended.code, ended.lines) == (2, []), str(ended)
    assert ended.err.count("has 2 tasks on 1 node, and each would run by itself") == 1
    for words in (("salloc", "-N1"), ("srun", "-N1", "-n1")):
        ended = slurm.run(*words, "holdfast", "run", *slurm.job("work"))
        assert (ended.code, ended.lines) == (0, ["done 0"]), str(ended)


def test_the_components_of_a_heterogeneous_job(slurm: Slurm) -> None:
    """Slurm sorts the list of their nodes, and numbers the nodes by component."""
    words = ("salloc", "-N1", "-w", "node2", ":", "-N1", "-w", "node1", "srun", "--het-group=0,1")
    ended = slurm.run(*words, "holdfast", "run", *slurm.job("work"))
    assert ended.code == 0, str(ended)
    assert sorted(ended.lines) == ["[node1:1] done 1", "[node2:0] done 0"]


@promise("""engines.tasks-real-mpirun-slurm: Tasks of a real `mpirun` within a Slurm job meet at the first node of the
    job, also if `mpirun` runs elsewhere.""")
@pytest.mark.parametrize("host", [0, slurm_cluster.LOGIN])
def test_mpirun_within_a_job(slurm: Slurm, host: int) -> None:
    """Its daemons are a step of srun, whose variables its tasks see, too."""
    support.need_tool("mpirun.openmpi")
    mpirun = ("mpirun.openmpi", "--allow-run-as-root", "--map-by", "ppr:1:node", "-np", "2")
    slurm.host = host
    ended = slurm.run("salloc", "-N2", *mpirun, "holdfast", "run", *slurm.job("work"))
    assert ended.code == 0, str(ended)
    assert sorted(ended.lines) == ["[node1:0] done 0", "[node2:1] done 1"]
    assert len(re.findall(r"mpirun of 2 tasks: node \d of 2, meeting at node1:\d+", ended.err)) == 2


@proves("project.torchrun-lines-run")
@pytest.mark.parametrize("line", ON_SLURM)
def test_a_line_of_the_page_about_torchrun(line: str, slurm: Slurm) -> None:
    """`mpirun` refuses to run as root unless it is told to, as these tests do."""
    words = line.split()
    if words[0] == "mpirun":
        support.need_tool("mpirun.openmpi")
        words = ["salloc", "-N2", "mpirun.openmpi", "--allow-run-as-root", *words[1:]]
    slurm.holdfast.script("""
        import os
        os.write(1, f"worker {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n".encode())
    """, "train.py")  # fmt: skip
    ended = slurm.run(*words)
    assert (ended.code, len(ended.lines)) == (0, 4), str(ended)
    assert {each.partition("] ")[2] for each in ended.lines} == {f"worker {rank} of 4" for rank in range(4)}


@proves("workers.jax-initialize-arguments")
def test_jax_finds_its_place_in_a_job(slurm: Slurm) -> None:
    """Slurm's variables speak of two tasks; JAX has four processes."""
    support.need_module("jax")
    job = slurm.holdfast.script("""
        import os, jax
        jax.distributed.initialize()
        os.write(1, f"process {jax.process_index()} of {jax.process_count()}\\n".encode())
    """, "jax_job.py")  # fmt: skip
    ended = slurm.run("srun", "-N2", "holdfast", "run", "--nproc-per-node=2", job, JAX_PLATFORMS="cpu")
    places = [f"[node{1 + rank // 2}:{rank}]" for rank in range(4)]
    assert sorted(ended.lines) == [f"{place} process {rank} of 4" for rank, place in enumerate(places)], str(ended)


@promise("""engines.scancel-stops-job-grace: `scancel` stops a job with grace and 143, and leaves no process and no
    token. Ctrl-C cancels the job, also in the queue.""")
@proves("engines.token-slurm-job-private")
def test_the_agents_have_a_token_in_a_private_file_until_scancel_stops_them_with_grace(slurm: Slurm) -> None:
    running = slurm.submit("wait")
    slurm.workers()
    [token] = slurm.holdfast.directory.glob(".holdfast-*/token")
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.read_text().startswith("holdfast-")
    for pid in slurm.agents().values():
        assert psutil.Process(pid).environ()["PET_TOKEN_FILE"] == str(token)
    job_id = job_id_of(running)
    slurm.cluster.ask("scancel", job_id)
    ended = running.wait()
    assert ended.code == 143, str(ended)
    assert f"Slurm job {job_id} ended as CANCELLED" in ended.err
    assert ended.out.count("stopped by SIGTERM") == 2
    assert not token.exists()


@proves("engines.scancel-stops-job-grace")
def test_a_job_that_waits_in_the_queue_is_cancelled_too(slurm: Slurm) -> None:
    running = slurm.submit("work", "--sbatch=--hold")
    job_id = job_id_of(running)
    running.send(signal.SIGINT)
    assert running.wait().code == 130
    assert slurm.cluster.facts(job_id)["JobState"] == "CANCELLED"
    assert slurm.mailbox.rest() == []


@proves("engines.submit-slurm-shows-job")
def test_detach_prints_the_id_of_the_job(slurm: Slurm) -> None:
    ended = slurm.start("holdfast", "submit", "slurm", "--detach", "--nnodes=2", *slurm.job("wait"))
    code = ended.process.wait(60)
    [job_id] = ended.so_far().lines
    assert code == 0
    assert slurm.cluster.await_state(job_id, "RUNNING")["NumNodes"] == "2"
    slurm.workers()


@proves("engines.submit-slurm-shows-job")
def test_options_of_slurm_arrive(slurm: Slurm) -> None:
    options = ("--partition=main", "--time=7", "--gpus-per-node=2", "--cpus-per-node=2", "--output=my %x.out")
    ended = slurm.submit("work", *options, "--sbatch=--comment=two\\ words --qos=normal").wait()
    assert ended.code == 0, str(ended)
    assert ended.out.count("done") == 4
    assert (slurm.holdfast.directory / "my job.py.out").is_file()
    job_id = re.findall(r"Slurm job (\d+), run", ended.err)[0]
    assert slurm.cluster.facts(job_id)["TimeLimit"] == "00:07:00"


@promise("""engines.slurm-elastic-lost-node: An elastic run on Slurm survives a node that Slurm marks as down: neither
    the job nor its step is ended.""")
def test_an_elastic_job_survives_a_node_that_is_marked_down(slurm: Slurm) -> None:
    running = slurm.submit("wait", "--last-call=1s", nodes="1:2")
    pids = {host: int(pid) for host, _, pid, _ in slurm.workers().values()}
    agent = slurm.agents()["node2"]
    slurm.cluster.ask("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    try:
        with contextlib.suppress(ProcessLookupError):  # Slurm may have been faster.
            os.kill(agent, signal.SIGKILL)
        [(host, _, pid, _)] = slurm.workers(1).values()
        assert host == "node1"
        assert support.survivors([pids["node2"]]) == []
        assert support.survivors([int(pid)], 1.0) == [int(pid)]
        job_id = job_id_of(running)
        assert slurm.cluster.facts(job_id)["JobState"] == "RUNNING"
    finally:
        slurm.cluster.ask("scancel", "--full", "--user=root")
        running.wait()
        support.wait_until(slurm.cluster.is_idle, "the node is back", 60)


@promise("""engines.slurm-agent-comes-back: In a Slurm job of several nodes an agent that is killed is started again on
    its node, later each time and three times at most, and its node joins the run again; not when the run has ended, and
    not when the job is cancelled.""")
@pytest.mark.parametrize(("nodes", "host"), [("1:2", "node2"), ("2", "node1")])
def test_an_agent_that_is_killed_comes_back(slurm: Slurm, nodes: str, host: str) -> None:
    running = slurm.submit("wait", "--last-call=1s", "--admit-delay=0", nodes=nodes)
    first = slurm.workers()
    os.kill(slurm.agents()[host], signal.SIGKILL)
    again = slurm.back(host)
    assert support.survivors([int(each[2]) for each in first.values()]) == []
    assert again["node1"][2] == again["node2"][2] == first[0][3], "the same run"
    os.kill(slurm.agents()[host], signal.SIGKILL)
    line = f"holdfast: the agent on {host} was killed; it is started again in 10 s"
    support.wait_until(lambda: line in running.so_far().out, "it waits", 60, running.so_far)
    slurm.mailbox.rest()
    running.send(signal.SIGINT)
    ended = running.wait()
    assert ended.code == 130, str(ended)
    assert not [each for each in slurm.mailbox.rest() if host in each], "no other agent was started there"


@proves("engines.slurm-exclude")
def test_a_node_that_was_lost_repeatedly_is_left_out_of_the_requeued_job(slurm: Slurm) -> None:
    running = slurm.submit("wait once", "--last-call=1s", "--admit-delay=0", "--sbatch=--requeue", nodes="1:2")
    slurm.workers()
    for _ in range(2):
        os.kill(slurm.agents()["node2"], signal.SIGKILL)
        slurm.back("node2")
    job = job_id_of(running)
    slurm.cluster.ask("scontrol", "requeue", job)
    line = "holdfast: exclude: node2 (2 losses): the job does not start there again"
    support.wait_until(lambda: line in running.so_far().own, "it is excluded", 60, running.so_far)
    running.process.wait(180)
    ended = running.wait()
    assert (ended.code, [each for each in ended.lines if "done" in each]) == (0, ["[node1:0] done 0"]), str(ended)
    assert ended.own[-1] == "holdfast: exclude: node2 (2 losses)"
    facts = slurm.cluster.facts(job)
    assert (facts["ExcNodeList"], facts["NodeList"], facts["Restarts"]) == ("node2", "node1", "1")


@proves("engines.slurm-refuses-controller-down")
def test_a_job_that_cannot_start_says_why(slurm: Slurm) -> None:
    running = slurm.submit("work", nodes="3")
    line = "waits in the queue: PartitionNodeLimit"
    support.wait_until(lambda: line in running.so_far().err, "the reason")
    running.send(signal.SIGINT)
    assert running.wait().code == 130


@promise("""engines.slurm-refuses-controller-down: What Slurm refuses, a controller that is down, and a host without
    Slurm are one line. A job that cannot start says why.""")
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--partition=nowhere",), "Slurm refused the job: Batch job submission failed: Invalid partition name"),
        (("--time=soon",), "Slurm refused the job: Invalid --time specification"),
        (("--sbatch", "--bogus"), "Slurm refused the job: unrecognized option '--bogus'"),
        (("--sbatch", "--array=0-1"), "--sbatch --array: the tasks of an array have an output file each; give "),
        (("--detach", "--partition=nowhere"), "Slurm refused the job: Batch job submission failed: Invalid partition"),
        (("--sbatch=qos high",), "--sbatch: write options with an equals sign, as in --qos=high, not 'qos'"),
        (("--sbatch='x",), "--sbatch \"'x\" cannot be split into words: No closing quotation"),
        (("--rdzv-endpoint=h:1",), "--rdzv-endpoint: on Slurm it needs --rdzv-backend tcp or etcd"),
        (("--node-rank=1",), "--node-rank: slurm decides that itself; leave the option out"),
    ],
)  # fmt: skip
def test_what_slurm_or_we_refuse_is_one_line(slurm: Slurm, options: tuple[str, ...], line: str) -> None:
    ended = slurm.submit("work", *options).wait()
    assert ended.code == 2, str(ended)
    assert ended.err.startswith(f"holdfast submit: error: {line}")
    assert ended.err.count("\n") == 1
    assert ended.out == ""


@proves("engines.slurm-refuses-controller-down")
def test_a_controller_that_is_down_is_one_line(slurm: Slurm) -> None:
    nowhere = slurm.holdfast.directory / "slurm.conf"
    text = Path(slurm.cluster.variables["SLURM_CONF"]).read_text()
    nowhere.write_text(f"{text}\nSlurmctldPort={support.free_port()}\nMessageTimeout=1\n")
    words = ("holdfast", "submit", "slurm", *slurm.job("work"))
    ended = slurm.run(*words, SLURM_CONF=str(nowhere))
    assert ended.code == 1, str(ended)
    assert "Slurm cannot be asked: Batch job submission failed: Unable to contact slurm controller" in ended.last


@proves("engines.slurm-refuses-controller-down")
def test_a_host_without_slurm_is_one_line(holdfast: Holdfast) -> None:
    holdfast.script("pass")
    ended = holdfast.run("slurm", "job.py", command=(COMMAND, "submit"), env={"PATH": "/nowhere"})
    assert ended.code == 1
    assert ended.err == (
        "holdfast submit: error: sbatch was not found: this host has no commands of Slurm, or they are not on PATH\n"
    )


def test_the_rendered_script_is_what_runs(slurm: Slurm) -> None:
    rendered = slurm.run("holdfast", "render", "slurm", "--nnodes=2", "--rdzv-id=it's job7", *slurm.job("work"))
    assert (rendered.code, rendered.err) == (0, "")
    script = slurm.holdfast.directory / "job.sbatch"
    script.write_text(rendered.out)
    subprocess.run(["bash", "-n", script], check=True)
    ended = slurm.run("sbatch", "--wait", script.name)
    [out] = slurm.holdfast.directory.glob("slurm-*.out")
    assert ended.code == 0, out.read_text()
    assert out.read_text().count("done") == 2


@promise("""engines.example-goes-queue-time: The example goes on in the queue when its time is over, and not after a
    failure or a cancel. A requeued job is a new run.""")
def test_the_example_goes_on_in_the_queue_when_its_time_is_over(slurm: Slurm) -> None:
    words = ("sbatch", "--parsable", "--output=out", str(EXAMPLE), *slurm.job("save once"))
    job_id = slurm.start(*words)
    job_id.process.wait(60)
    [job] = job_id.so_far().lines
    slurm.workers()
    slurm.cluster.ask("scancel", "--signal=USR1", "--batch", job)
    slurm.workers(deadline_s=90)
    slurm.cluster.await_state(job, "COMPLETED")
    out = (slurm.holdfast.directory / "out").read_text()
    assert (len(re.findall(r"saved \d", out)), out.count("done")) == (2, 2)
    assert len(re.findall("(?:the run has ended|this node went away) after a notice: .*time limit", out)) == 2
    assert list(slurm.holdfast.directory.glob(".holdfast-*")) == []


@promise("""engines.slurm-notice: With `--notice 120` all workers of a submitted job are told two minutes before the
    time limit that the run goes away; the job then ends with exit code 95.""")
def test_a_submitted_job_hears_of_its_time_limit(slurm: Slurm) -> None:
    submitted = slurm.submit("save once", "--notice=600", "--time=10")  # Slurm looks about once a minute, at first now.
    submitted.process.wait(150)
    ended = submitted.wait()
    assert (ended.code, len(re.findall(r"saved \d", ended.out))) == (95, 2), str(ended)


@proves("engines.example-goes-queue-time")
@pytest.mark.parametrize(("what", "state", "code"), [("fail", "FAILED", "93:0"), ("wait", "CANCELLED", "")])
def test_the_example_does_not_go_on_after_a_failure_or_a_cancel(slurm: Slurm, what: str, state: str, code: str) -> None:
    words = ("sbatch", "--parsable", "--output=out", str(EXAMPLE), *slurm.job(what))
    started = slurm.start(*words)
    started.process.wait(60)
    [job] = started.so_far().lines
    slurm.workers()
    if what == "wait":
        slurm.cluster.ask("scancel", job)
    facts = slurm.cluster.await_state(job, state)
    assert facts["Restarts"] == "0"
    assert facts["ExitCode"].startswith(code)


@proves("engines.example-goes-queue-time")
def test_a_requeued_job_is_a_new_run(slurm: Slurm) -> None:
    submitted = slurm.start(
        "holdfast", "submit", "slurm", "--detach", "--nnodes=2", "--rdzv-id=job7", "--sbatch=--requeue",
        "--output=out", *slurm.job("wait once"),
    )  # fmt: skip
    submitted.process.wait(60)
    [job] = submitted.so_far().lines
    assert {run_id for *_, run_id in slurm.workers().values()} == {f"job7-{job}"}
    slurm.cluster.ask("scontrol", "requeue", job)
    assert {run_id for *_, run_id in slurm.workers(deadline_s=90).values()} == {f"job7-{job}-requeue1"}
    slurm.cluster.await_state(job, "COMPLETED")
    out = (slurm.holdfast.directory / "out").read_text()
    assert ("stopped by SIGTERM" in out, out.count("] done")) == (True, 2), "the output of both lives is there"


@proves("engines.slurm-run-id")
def test_the_tasks_of_an_array_are_runs_of_their_own(slurm: Slurm) -> None:
    """With a common token they would meet."""
    words = ("holdfast", "submit", "slurm", "--detach", "--nnodes=2", "--sbatch", "--array=0-1", *slurm.job("work"))
    submitted = slurm.start(*words, HOLDFAST_TOKEN="a token of more than thirty-two bytes, for tests")
    submitted.process.wait(60)
    [job] = submitted.so_far().lines
    runs = [line.split()[-1] for line in slurm.mailbox.take(4, 60)]
    assert sorted(runs) == [f"slurm-{job}_0"] * 2 + [f"slurm-{job}_1"] * 2
    support.wait_until(lambda: not slurm.cluster.ask("squeue", "--noheader"), "both have ended", 60)


@promise("""engines.coordinator-ends-with-job: The coordinator of a job ends with the job, also where Slurm does not
    find it (`proctrack/linuxproc`), so that a requeued job meets at the same port.""")
def test_a_requeued_job_meets_no_coordinator_of_its_first_life(holdfast: Holdfast, mailbox: support.Mailbox) -> None:
    holdfast.script(WORKER)
    with slurm_cluster.running("linuxproc") as cluster:
        slurm = Slurm(cluster, holdfast, mailbox)
        running = slurm.submit("wait once", "--sbatch", "--requeue")
        slurm.workers()
        job = job_id_of(running)
        slurm.cluster.ask("scontrol", "requeue", job)
        slurm.workers(deadline_s=180)
        running.process.wait(60)
        support.wait_until(lambda: not running.left(), "the coordinator ends, too")
        ended = running.wait()
        assert ended.code == 0, str(ended)
        assert "is back in the queue: " in ended.err
        assert ended.out.count("] done") == 2


def fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


def engine_of(block: str) -> str:
    """The engine on whose tests the commands run: those of Kubernetes and Ray have their names in them."""
    return next((name for name in ("kubernetes", "ray") if f" {name} " in block), "slurm")


@proves("engines.commands-docs-md-run")
def test_the_commands_of_the_document_are_those_that_are_run() -> None:
    """The tests of each engine run all commands of these blocks."""
    known = {
        "slurm": ("holdfast submit slurm", "holdfast render slurm", "sbatch", "srun", "salloc"),
        "ray": ("holdfast submit ray",),
        "kubernetes": (
            "holdfast submit kubernetes",
            "holdfast render kubernetes",
            "kubectl",
            "holdfast token | kubectl",
        ),
    }
    for block in fences("sh"):
        for line in block.splitlines():
            assert line.startswith(known[engine_of(block)]), line


@promise("engines.commands-docs-md-run: The commands in docs/engines.md run.")
def test_the_commands_of_the_document_run(slurm: Slurm) -> None:
    """Those that only submit a job have succeeded when the job has."""
    commands = [line for block in fences("sh") if engine_of(block) == "slurm" for line in block.splitlines()]
    assert len(commands) == 12
    slurm.holdfast.script("print('trained')", "train.py")
    (slurm.holdfast.directory / "examples").symlink_to(EXAMPLE.parents[1])
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for command in commands:
        ended = slurm.run("bash", "-c", command, **root)
        assert ended.code == 0, f"{command}\n{ended}"
    support.wait_until(lambda: not slurm.cluster.ask("squeue", "--noheader"), "all jobs have ended", 60)
    states = slurm.cluster.ask("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={slurm.jobs()}").split()
    assert set(states) == {"COMPLETED"}


@proves("engines.commands-docs-md-run")
def test_the_python_of_the_document_runs() -> None:
    [source] = fences("python")
    names: dict[str, Any] = {}
    exec(source, names)
    text = names["MyCluster"]().render(JobSpec((), ("x.py",), "job7", 2, 2), names["MyOptions"](queue="night"))
    assert text.startswith("#QUEUE night 2\npython3 -P -m holdfast run --nnodes=2 ")
