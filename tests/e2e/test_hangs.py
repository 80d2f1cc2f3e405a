"""Jobs that hang are found, explained and restarted; jobs that do not hang are left alone."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.observe import ask
from tests import support
from tests.e2e.command import COMMAND, Ended, Holdfast
from tests.e2e.terminal import terminal
from tests.promises import promise, proves

EXAMPLE = str(Path(__file__).parent.parent.parent / "examples" / "hang.py")

# An agent that would wait for the default grace of 30 s has lost this test.
COMMON = ("--standalone", "--shutdown-timeout", "10")


def own_words(ended: Ended) -> str:
    return "\n".join(line.removeprefix("holdfast: ") for line in ended.own)


def stacks_file(holdfast: Holdfast, attempt: int = 0) -> str:
    [path] = holdfast.directory.glob(f"logs/*/attempt_{attempt}/stacks.txt")
    return path.read_text()


@proves("hangs.detects-job-names-worker")
def test_a_hung_job_is_explained_restarted_and_finishes(holdfast: Holdfast) -> None:
    """One that is stopped; docs/hangs.md shows a lock."""
    where = "it was stopped by a signal such as SIGSTOP, at hang.py:33 in go_wrong"
    ended = holdfast.run(
        *COMMON, "--nproc-per-node=4", "--hang-timeout=3s", "--max-restarts=1", "--log-dir=logs", EXAMPLE, "stop"
    )
    assert ended.code == 0, str(ended)
    words = own_words(ended)
    assert re.search(r"the workers hang: no output or I/O for \d+ s \(--hang-timeout 3 s\); taking their stacks", words)
    assert re.search(r"^rank 2 hung: no output or I/O for \d+ s; " + re.escape(where), words, re.MULTILINE), words
    assert re.search(r"while ranks 1, 3 were at hang.py:44 in barrier .*; restart 1 of 1$", words, re.MULTILINE), words
    assert words.index("rank 2 (pid") < words.index("ranks 1, 3 (2 workers)"), "the odd one is named first"
    assert words.endswith("all 4 workers finished after 1 restart")
    text = stacks_file(holdfast)
    assert [f"rank {rank}\n" in text or f"rank {rank}," in text for rank in range(4)] == [True] * 4
    assert f"({EXAMPLE}:44)" in text


GLOO = """
import os, sys, time
import torch
import torch.distributed as dist
import holdfast

torch.set_num_threads(1)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    holdfast.progress(step=1)  # Not in the life that ends well: what torch does at its end may take long as well.
    while dist.get_rank() == 1:  # Something that this rank does, and the other does not wait for in vain.
        time.sleep(60)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


@proves("hangs.detects-job-names-worker")
def test_a_collective_that_one_rank_never_enters(holdfast: Holdfast) -> None:
    """The import of torch takes its time; what it may take is the start timeout's business."""
    support.leave_to_test_all("a long job of torch")
    script = holdfast.script(GLOO)
    bounds = ("--hang-timeout=3s", "--start-timeout=100s", "--max-restarts=1")
    ended = holdfast.run(*COMMON, *bounds, "--nproc-per-node=2", "--log-dir=logs", script, deadline_s=100)
    assert ended.code == 0, str(ended)
    cause = next(line for line in ended.own if "rank 1 hung: " in line)
    assert "it was at job.py:12 in <module> `time.sleep(60)`, while rank 0 was at job.py:13" in cause
    assert "restart 1 of 1" in cause
    assert "rank 1 (pid" in own_words(ended).partition("rank 0 (pid")[0], "the odd one is named first"
    assert "step 1" in own_words(ended)
    assert "c10d::Work::wait" in stacks_file(holdfast), "native frames"


@promise("""hangs.detects-job-names-worker: holdfast detects a job that hangs, names the worker that stands out first
    and as the cause, restarts the job, and the job finishes: a lock, a worker stopped with SIGSTOP, a collective that
    one rank never enters, uninterruptible sleep.""")
def test_a_worker_in_uninterruptible_sleep(holdfast: Holdfast) -> None:
    """The parent of a vfork is in it until its child executes something, and this one never does."""
    script = holdfast.script("""
        import ctypes, os, time
        libc = ctypes.CDLL(None)
        print("here", flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "1" and libc.vfork() == 0:
                libc.sleep(600)
            time.sleep(600)
    """)
    ended = holdfast.run(*COMMON, "--nproc-per-node=3", "--hang-timeout=2s", "--max-restarts=1", script)
    assert ended.code == 0, str(ended)
    assert "rank 1 hung: " in own_words(ended)
    assert "it was in uninterruptible sleep in the kernel, " in own_words(ended)


@promise("hangs.restart-policy-name-fatal: In the restart policy hangs have the name `hang`, as fatal or uncounted.")
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--max-restarts=3", "--fatal-exceptions=hang"), 1, "no restart: hang is fatal"),
        (("--max-restarts=0", "--uncounted-exceptions=hang"), 0, "the worker finished"),
    ],
)
def test_the_restart_policy_knows_hangs_by_name(
    holdfast: Holdfast, options: tuple[str, ...], code: int, words: str
) -> None:
    script = holdfast.script("""
        import os, time
        if os.environ["HOLDFAST_ROUND"] == "1":
            time.sleep(600)
    """)
    ended = holdfast.run(*COMMON, *options, "--hang-timeout=1s", script)
    assert ended.code == code, str(ended)
    assert words in own_words(ended)


CADENCE = """
    import time
    for step in range(3):
        print("step", step, flush=True)
    while True:
        print("still waiting for the data", flush=True)
        time.sleep(0.1)
"""
LAST = """
    import os, time
    print("hello", flush=True)
    if os.environ["RANK"] == "1":
        time.sleep(600)
"""
HUNG = {
    "a cadence that is broken though output goes on": (
        CADENCE,
        (r"--progress-pattern=^step \d+", "--progress-every=1s"),
        r"rank 0 hung: no line has matched '\^step \\d\+' for \d+ s, and one was expected every 1 s",
    ),
    "a beginning without output": (
        "import time; time.sleep(600)",
        ("--start-timeout=3s", "--progress-signals=output"),
        r"rank 0 hung: no output since the start \d+ s ago; it was at job\.py:1 in <module>",
    ),
    "a worker that spins": ("while True: pass", ("--hang-timeout=1s",), "rank 0 hung: "),
    "the last worker": (LAST, ("--nproc-per-node=2", "--hang-timeout=2s"), "rank 1 hung: (?!.*rank 0)"),
}


@promise("hangs.worker-spins-hung-processor: A worker that spins is hung unless processor time counts.")
@promise("hangs.worker-finished-hung-remaining: A worker that has finished is not hung. The remaining ones may be.")
@proves("hangs.timeout-fires-time-silence")
@pytest.mark.parametrize(("source", "options", "cause"), HUNG.values(), ids=HUNG)
def test_which_jobs_hang(holdfast: Holdfast, source: str, options: tuple[str, ...], cause: str) -> None:
    ended = holdfast.run(*COMMON, *options, holdfast.script(source))
    assert ended.code == 1
    assert re.match(f"Cause: {cause}", ended.last), ended.last


@promise("""hangs.program-python-watched-well: A program that is not Python is watched as well. For a shell around
    Python, the stacks of the Python process are shown.""")
def test_a_shell_around_python_shows_the_python(holdfast: Holdfast) -> None:
    holdfast.script("import time\ntime.sleep(600)\n", "inner.py")
    script = holdfast.script('#!/bin/sh\n"$PYTHON" inner.py\ntrue\n', "job.sh", executable=True)

    ended = holdfast.run(*COMMON, "--hang-timeout=2s", "--no-python", f"./{script}", env={"PYTHON": sys.executable})
    assert "it was at inner.py:2 in <module> `time.sleep(600)`" in ended.last


# Jobs that do not hang.

HEALTHY = {
    "output": ("print(n, flush=True)", ("--progress-signals=output",)),
    "stderr": ("print(n, file=sys.stderr, flush=True)", ("--progress-signals=output",)),
    "redirected output": ("print(n, flush=True)", ("--progress-signals=output", "-r", "3")),
    "tee'd output": ("print(n, flush=True)", ("--progress-signals=output", "-t", "3")),
    "filtered output": ("print(n, flush=True)", ("--progress-signals=output", "--local-ranks-filter=1")),
    "pattern": ("print('step', n, flush=True)", ("--progress-signals=pattern", "--progress-pattern=step [0-9]+")),
    "pattern in a file": (
        "print('step', n, flush=True)",
        ("--progress-signals=pattern", "--progress-pattern=step [0-9]+", "-r", "3"),
    ),
    "progress": ("holdfast.progress(step=n)", ("--progress-signals=progress",)),
    "io": ("open('/dev/zero', 'rb').read(100_000)", ("--progress-signals=io",)),
    "cpu": ("sum(range(1_000_000))", ("--progress-signals=cpu",)),
    "defaults": ("open('/dev/zero', 'rb').read(100_000)", ()),
}


@promise("""hangs.movement-chosen-signal-keeps: Any movement of a chosen signal keeps a job alive: output on either
    stream, to the console, to files or to /dev/null, a matching line, I/O, processor time, `holdfast.progress()`.""")
@proves("hangs.worker-spins-hung-processor")
@pytest.mark.parametrize("names", [list(HEALTHY)[first::3] for first in range(3)], ids=", ".join)
def test_jobs_that_move_are_left_alone(holdfast: Holdfast, names: list[str]) -> None:
    """Each longer than the limit, and several side by side."""
    running = {}
    for number, name in enumerate(names):
        activity, options = HEALTHY[name]
        code = f"""
            import sys, time
            import holdfast
            holdfast.progress()  # The beginning is over, however long it took.
            ends, n = time.monotonic() + 3, 0
            while time.monotonic() < ends:
                n += 1
                {activity}
                time.sleep(0.02)
        """
        script = holdfast.script(code, f"job{number}.py")
        bounds = ("--hang-timeout=1.5s", "--start-timeout=60s", f"--log-dir=logs{number}")
        running[name] = holdfast.start(*COMMON, *bounds, *options, script)
    for each in running.values():
        each.process.wait(support.DEADLINE_S)
    for name, each in running.items():
        ended = each.wait()
        assert ended.code == 0, f"{name}: {ended}"
        assert "hang" not in own_words(ended), f"{name}: {ended}"


@proves("hangs.failure-watch-ends-healthy")
def test_an_agent_that_was_stopped_blames_nobody(holdfast: Holdfast) -> None:
    """Nobody passed the workers' output on meanwhile."""
    script = holdfast.script("""
        import os, signal, time
        import holdfast
        holdfast.progress()
        with open(f"/proc/{os.getppid()}/stat") as file:
            agent = int(file.read().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGSTOP)
        time.sleep(3)
        os.kill(agent, signal.SIGCONT)
        for _ in range(10):
            print("again", flush=True)
            time.sleep(0.05)
    """)
    ended = holdfast.run(*COMMON, "--hang-timeout=1s", "--start-timeout=60s", script)
    assert ended.code == 0, str(ended)
    assert "hang" not in own_words(ended)


@proves("hangs.failure-watch-ends-healthy")
def test_a_console_that_blocks_is_not_the_workers_fault(holdfast: Holdfast) -> None:
    """As after Ctrl-S: everybody who writes waits for the reader."""
    script = holdfast.script("""
        import holdfast
        holdfast.progress()
        for _ in range(20_000):
            print("x" * 100, flush=True)
    """)
    read_fd, write_fd = os.pipe()
    bounds = ("--hang-timeout=1s", "--start-timeout=60s", "--progress-signals=output")
    run = holdfast.start(*COMMON, *bounds, script, stdout=write_fd)
    os.close(write_fd)
    assert not select.select([], [], [], 3)[0], "for three times as long as the bound"
    with open(read_fd, "rb") as reader:
        assert len(reader.read()) == 20_000 * 101
    ended = run.wait()
    assert ended.code == 0, str(ended)
    assert "hang" not in own_words(ended)


@promise("""hangs.failure-watch-ends-healthy: No failure of the watch ends a healthy job: an error in it, unreadable
    counters, a pattern that never matches or takes too long, an agent that was frozen, a blocked console, a worker at a
    prompt of the terminal (`breakpoint()`), a group that moves while its stacks are taken.""")
def test_a_worker_at_a_prompt_is_not_hung(holdfast: Holdfast) -> None:
    script = holdfast.script("breakpoint()\nprint('worked')")
    bounds = ("--hang-timeout=1s", "--start-timeout=1s", "--progress-signals=output")
    with terminal() as (near, far):
        run = holdfast.start(*COMMON, *bounds, script, stdin=far, stdout=far)
        os.close(far)
        near.read_until("(Pdb) ")  # With its last character, which may come by itself.
        assert not select.select([near.fd], [], [], 4)[0], "for four times as long as the bounds"
        os.write(near.fd, b"c\n")
        near.read_until("worked")
        ended = run.wait()
    assert ended.code == 0, str(ended)
    assert "hang" not in own_words(ended)


@promise("""hangs.several-nodes-node-takes: On several nodes every node takes stacks, whether it watches or not, and the
    cause is the worker that stands out, on any node.""")
def test_on_two_nodes_each_takes_stacks_and_all_name_the_one(holdfast: Holdfast) -> None:
    """The second node does not watch; it hears of the hang, and has the worker that is to blame."""
    endpoint = f"127.0.0.1:{support.free_port()}"
    place = ("--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=tcp", f"--rdzv-endpoint={endpoint}", "--rdzv-id=two")
    common = (*place, "--shutdown-timeout=10", "--max-restarts=1")
    first = holdfast.start(*common, "--node-rank=0", "--hang-timeout=3s", EXAMPLE, "lock")
    second = holdfast.start(*common, "--node-rank=1", EXAMPLE, "lock")
    codes = [each.process.wait(60) for each in (first, second)]
    support.wait_until(lambda: not first.left(), "everything has ended")
    a, b = (each.wait() for each in (first, second))
    assert codes == [0, 0], f"{a}\n{b}"
    assert "all 2 workers of this node waited for peers" in own_words(a)
    assert "restart 1 of 1" in own_words(a)
    cause = "rank 2 hung: another node found the run hanging; it was at hang.py:24 in save_checkpoint"
    assert cause in own_words(b), f"{a}\n{b}"
    for ended in (a, b):
        assert "every thread of every worker: " in own_words(ended)


def stacks(holdfast: Holdfast, *args: str) -> Ended:
    running = holdfast.start(*args, command=(COMMAND, "stacks"))
    code = running.process.wait(60)
    return replace(running.so_far(), code=code)


@promise("""hangs.stacks-prints-stacks-demand: `holdfast stacks` prints the same stacks on demand, of all nodes of a run
    or of one rank, by run or by agent, and stops nothing. If it finds no run, it says so in one clear line.""")
@pytest.mark.parametrize("start_method", ["script", "fork"])
def test_stacks_on_demand_and_nothing_is_stopped(holdfast: Holdfast, start_method: str) -> None:
    script = holdfast.script("""
        import os, time
        print("here", flush=True)
        time.sleep(600)
    """)
    name = f"job-{uuid.uuid4().hex}"
    how = () if start_method == "script" else ("--run-path", "--start-method=fork")
    run = holdfast.start(*COMMON, "--nproc-per-node=2", f"--rdzv-id={name}", *how, script)
    support.wait_until(lambda: run.so_far().out.count("here") == 2, "both run")
    for pid in run.workers():
        support.await_sleep(pid)
    for choice in ((name,), ("--rdzv-id", name), (str(run.pid), "--native", "--all")):
        ended = stacks(holdfast, *choice)
        assert ended.code == 0, str(ended)
        assert ended.lines[0].startswith(f"run {name}, round 1, agent {run.pid} on ")
        assert "all 2 workers (ranks 0, 1) are at the same place:" in ended.out
        assert "<module> (job.py:3)   time.sleep(600)" in ended.out
    worker = run.workers()[0]
    wrong = {
        (str(worker),): (1, f"run '{worker}' is not found on this host"),
        ("other",): (1, "'other' is not found on this host"),
        (name, "--rdzv-id", "other"): (2, "give one of them"),
        (name, "--rank", "7"): (2, "--rank 7: the nodes that answer have ranks 0, 1"),
        (name, "--rank", "x"): (2, "invalid int value"),
    }
    for args, (code, complaint) in wrong.items():
        ended = stacks(holdfast, *args)
        assert (ended.code, ended.out) == (code, ""), str(ended)
        assert complaint in ended.last
    assert run.process.poll() is None
    run.send(signal.SIGTERM)
    assert run.wait().code == 143


@promise("""hangs.stacks-shows-agents-run: `holdfast stacks` shows the agents of one run side by side, and names an
    agent that does not answer.""")
@proves("status.agent-phase-round-place")
def test_the_agents_of_one_run_are_shown_side_by_side(holdfast: Holdfast) -> None:
    script = holdfast.script("print('here', flush=True); import time; time.sleep(600)")
    name = f"two-{uuid.uuid4().hex}"
    place = (
        "--nnodes=2",
        "--rdzv-backend=tcp",
        f"--rdzv-endpoint=127.0.0.1:{support.free_port()}",
        f"--rdzv-id={name}",
    )
    runs = [holdfast.start(*place, "--node-rank=0", script)]

    def waits_for() -> list[str]:
        return [agent.status.waiting_for for agent in ask.find()[0] if agent.status.run_id == name]

    support.wait_until(lambda: waits_for() == ["1 of 2 nodes joined, waiting for 1"], "it waits for the other node")
    ended = stacks(holdfast, name)
    assert ended.code == 1
    assert "no workers are running at the moment" in ended.last
    runs.append(holdfast.start(*place, "--node-rank=1", script))
    for run in runs:
        support.wait_until(lambda run=run: "here" in run.so_far().out, "it runs")
        support.await_sleep(run.workers()[0])
    ended = stacks(holdfast, name)
    assert ended.code == 0, str(ended)
    assert [line.split(", agent")[0] for line in ended.lines[:2]] == [
        f"run {name}, round 1, node {node} of 2" for node in range(2)
    ]
    assert "all 2 workers (ranks 0, 1) are at the same place:" in ended.out
    os.kill(runs[0].workers()[0], signal.SIGKILL)
    assert [run.process.wait(30) for run in runs] == [1, 1]
    support.wait_until(lambda: not runs[0].left(), "the coordinator has ended, too")
