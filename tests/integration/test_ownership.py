"""Every process has an owner, and no owner leaks one, whoever is killed or told to stop, and when."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import procfs
from holdfast.process import DefaultLogsSpecs, start_processes
from holdfast.process.spawner import client
from holdfast.process.spawner.client import SpawnerLink
from holdfast.process.workers import ladder
from holdfast.rendezvous.coordinator import launch as coordinator_launch
from holdfast.rendezvous.settings import NodeSettings
from tests import support
from tests.promises import promise, proves

PROGRAMS = Path(__file__).parent.parent / "programs"
WORKER = str(PROGRAMS / "worker.py")
# What a worker can leave below it; the last two are not its children any more.
KINDS = "child,session,daemon,daemon-session"
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
# The promise is a second; the deadline is for machines that are busy.
PROMPTLY_S = 10
# Of workers that run, or that were being started.
SPAWNER_KILLED = re.compile("the spawner (that owned it )?was killed by SIGKILL")


class Launch:
    """A launching program that runs, and what its workers said."""

    def __init__(self, process: subprocess.Popen[str], mailbox: support.Mailbox, gate: Path) -> None:
        self.process = process
        self.pid = process.pid
        self.directory = gate.parent
        self.mailbox = mailbox
        self._gate = gate

    def hear(self, what: str, count: int = 1) -> list[int]:
        """Wait for that many messages of a kind; their pids. Others that come before are an error."""
        said = [line.rsplit(" ", 2) for line in self.mailbox.take(count)]
        assert [words[0] for words in said] == [what] * count
        return [int(words[2]) for words in said]

    def hear_group(self, ranks: int, below_each: int, *, running: bool = False) -> dict[str, list[int]]:
        """Every worker of the group with what it has started: pids by kind. `running`: the agent knows them all."""
        said = [line.split() for line in self.mailbox.take(ranks * (1 + below_each) + running)]
        group: dict[str, list[int]] = {"worker": [], "grandchild": [], "running": []}
        for what, _, pid in said:
            group[what].append(int(pid))
        assert len(group["worker"]) == ranks
        return group

    def open_gate(self, rank: int = 0) -> None:
        """Let that worker go on to what it was told to do."""
        Path(f"{self._gate}{rank}").write_text("go")

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def outcome(self, deadline_s: float = support.DEADLINE_S) -> dict[str, Any]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(deadline_s)
        out, err = ((self.directory / name).read_text() for name in ("out", "err"))
        assert self.process.poll() is not None, f"it has not ended after {deadline_s:g} s\n{err}"
        assert out, err
        return {**json.loads(out.splitlines()[-1]), "stderr": err}


@pytest.fixture
def launch(tmp_path: Path, mailbox: support.Mailbox) -> Iterator[Any]:
    gate = tmp_path / "gate"
    for rank in range(2):
        os.mkfifo(f"{gate}{rank}")
    with contextlib.ExitStack() as running:

        def start(*worker_args: str, preexec_fn: Any = None, **order: Any) -> Launch:
            order = {"mailbox": str(mailbox), "entry": [sys.executable, WORKER, str(mailbox), *worker_args], **order}
            env = {**os.environ, "GATE": str(gate)}
            script = str(PROGRAMS / "launch.py")
            # Files, because a process that cannot be killed would keep a pipe open.
            out, err = (running.enter_context(open(tmp_path / name, "w")) for name in ("out", "err"))
            options = {"env": env, "preexec_fn": preexec_fn, "stdout": out, "stderr": err}
            process = support.python(script, json.dumps(order), **options)
            return Launch(running.enter_context(process), mailbox, gate)

        yield start


@promise("""ownership.agent-killed-workers: If the agent is killed, its workers and everything that they started are
    gone at once, with any start method, even if a child of the agent's program holds its descriptors.""")
def test_the_agent_is_killed(launch: Any) -> None:
    job = launch("--start", KINDS, nproc=2)
    group = job.hear_group(2, 4)
    spawner = support.spawner_of(group["worker"][0])
    job.send(signal.SIGKILL)
    assert support.survivors([*group["worker"], *group["grandchild"], spawner], PROMPTLY_S) == []


@promise("""ownership.agent-spawner-killed-instant: If agent and spawner are killed at the same instant, the kernel
    kills the workers.""")
def test_agent_and_spawner_are_killed_together(launch: Any) -> None:
    """The kernel kills the workers: they asked for that when they were started."""
    job = launch(nproc=2)
    workers = job.hear_group(2, 0)["worker"]
    spawner = support.spawner_of(workers[0])
    support.halt(spawner)  # It shall not notice the agent's death first.
    job.send(signal.SIGKILL)
    os.kill(spawner, signal.SIGKILL)
    assert support.survivors([*workers, spawner], PROMPTLY_S) == []


@proves("ownership.agent-killed-workers")
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize(("function", "ranks"), [("@wait_forever", 2), ("@leave_daemon", 1)])
def test_the_agent_of_functions_is_killed(
    launch: Any, mailbox: support.Mailbox, function: str, ranks: int, method: str
) -> None:
    """The workers go with it, and the orphans of one."""
    job = launch(nproc=ranks, start_method=method, entry=[function, str(mailbox)])
    pids = mailbox.numbers(2)
    job.send(signal.SIGKILL)
    assert support.survivors(pids, PROMPTLY_S) == []


@proves("ownership.agent-killed-workers")
def test_the_agent_is_killed_although_a_child_of_its_program_holds_its_descriptors(
    tmp_path: Path, mailbox: support.Mailbox
) -> None:
    """A fork of the agent's process keeps a copy of the socket to the spawner open."""
    source = f"""
        import os, signal, sys
        from holdfast.process import DefaultLogsSpecs, start_processes
        context = start_processes("t", sys.executable, {{0: ({WORKER!r}, {str(mailbox)!r})}}, {{0: {{}}}},
                                  DefaultLogsSpecs("/dev/null"))
        if os.fork() == 0:
            with open({str(mailbox)!r}, "w") as box:
                box.write(f"copy - {{os.getpid()}}\\n")
            signal.pause()
        context.wait()
    """
    with support.python(support.write_script(tmp_path / "main.py", source)) as process:
        said = {line.split()[0]: int(line.split()[2]) for line in mailbox.take(2)}
        os.kill(process.pid, signal.SIGKILL)
        assert support.survivors([said["worker"]], PROMPTLY_S) == []
        assert support.alive(said["copy"])
        os.kill(said["copy"], signal.SIGKILL)


@proves("ownership.spawner-killed-nothing-group")
@pytest.mark.parametrize("is_restarted", [True, False])
def test_the_spawner_is_killed(launch: Any, is_restarted: bool) -> None:
    life = ("--life", "0") if is_restarted else ()
    job = launch("--start", KINDS, *life, nproc=2, max_restarts=int(is_restarted), tell_running=True)
    group = job.hear_group(2, 4, running=True)
    os.kill(support.spawner_of(group["worker"][0]), signal.SIGKILL)
    if is_restarted:
        job.hear("replacement", 2)
    outcome = job.outcome()
    assert [pid for pid in [*group["worker"], *group["grandchild"]] if support.alive(pid)] == []
    assert outcome["how"] == ("success" if is_restarted else "ChildFailedError")
    assert is_restarted or SPAWNER_KILLED.search(outcome["text"])


@proves("ownership.spawner-killed-nothing-group")
@pytest.mark.parametrize(
    ("function", "ranks", "method"),
    [("@wait_forever", 2, "fork"), ("@wait_forever", 2, "forkserver"), ("@leave_daemon", 1, "forkserver")],
)
def test_the_spawner_of_functions_is_killed(
    launch: Any, mailbox: support.Mailbox, function: str, ranks: int, method: str
) -> None:
    """Also an orphan that executed nothing is found."""
    job = launch(nproc=ranks, start_method=method, tell_running=True, entry=[function, str(mailbox)])
    pids = [int(line) for line in mailbox.take(3) if not line.startswith("running")]
    os.kill(next(pid for pid in map(support.spawner_of, pids) if pid not in pids), signal.SIGKILL)
    assert SPAWNER_KILLED.search(job.outcome()["text"])
    assert not any(support.alive(pid) for pid in pids)


def test_the_spawner_gets_its_socket_at_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before glibc 2.29 a spawn action that dups a number onto itself leaves close-on-exec set."""
    seen: list[tuple[int, ...]] = []
    spawn = os.posix_spawn

    def spawn_and_note(*args: Any, file_actions: Any, **options: Any) -> int:
        seen.extend(file_actions)
        return spawn(*args, file_actions=file_actions, **options)

    monkeypatch.setattr(os, "posix_spawn", spawn_and_note)
    link = SpawnerLink.launch()
    link.close()
    assert len(seen) == 1
    assert seen[0][1] != seen[0][2]


START_FROM = """
import sys, __future__
sys.path.insert(0, sys.argv[1])
import holdfast
del sys.path[0]
import socket
from holdfast.process.spawner.client import SpawnerLink
from holdfast.process.workers import ladder
from holdfast.rendezvous.coordinator import launch
from holdfast.rendezvous.settings import NodeSettings
link = SpawnerLink.launch()
link.kill_all()
link.wait(None)
print(*map(str, link.reports()))
link.close()
with socket.socket() as guard:
    launch.start_coordinator(launch.bind("127.0.0.1", 0), guard, NodeSettings(), "trial")
print(holdfast.__file__)
"""


@promise("""workers.module-site-packages-working: A module in site-packages or in the working directory with the name of
    a standard module breaks neither the spawner nor the coordinator.""")
def test_no_stray_module_is_taken_for_one_of_the_standard_library(tmp_path: Path) -> None:
    """Neither one beside the holdfast package, as in site-packages, nor one in the working directory."""
    import holdfast

    (tmp_path / "holdfast").symlink_to(Path(holdfast.__file__).parent)
    for name in ("__future__", "asyncio", "ctypes", "enum", "errno", "json", "math", "select", "signal", "typing"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stray module')")
    command = [sys.executable, "-P", "-c", START_FROM, str(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    for coordinator in support.marked(os.environ[support.TEST_MARK]):
        os.kill(coordinator, signal.SIGKILL)
    assert ended.returncode == 0, ended.stderr
    report, used = ended.stdout.splitlines()
    assert "swept" in report, ended.stderr
    assert Path(used).parent == tmp_path / "holdfast"


START_WITHOUT_STANDARD_DESCRIPTORS = """
import os, socket, sys
from holdfast.rendezvous.coordinator import launch
from holdfast.rendezvous.settings import NodeSettings
for fd in range(int(sys.argv[1])):
    os.close(fd)
with launch.bind("127.0.0.1", 0) as sock, socket.socket() as guard:
    port = sock.getsockname()[1]
    launch.start_coordinator(sock, guard, NodeSettings(), "trial")
with socket.create_connection(("127.0.0.1", port)) as client:
    os._exit(0 if client.recv(1) else 1)
"""


@pytest.mark.parametrize("closed", [0, 1, 3])
def test_a_coordinators_socket_may_be_in_the_place_of_a_standard_descriptor(closed: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", START_WITHOUT_STANDARD_DESCRIPTORS, str(closed)]
    subprocess.run(command, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, check=True)
    for coordinator in support.marked(os.environ[support.TEST_MARK]):
        os.kill(coordinator, signal.SIGKILL)


@proves("coordinator.ends-run-node-connected")
def test_a_coordinator_that_no_node_needs_ends_within_seconds() -> None:
    """Two agents of a host with different directories for temporary files each start one; the second coordinator may be
    so late that the run is over by then."""
    with coordinator_launch.bind("127.0.0.1", 0) as sock, socket.socket() as guard:
        coordinator_launch.start_coordinator(sock, guard, NodeSettings(), "trial")
    assert support.marked(os.environ[support.TEST_MARK])
    assert not support.survivors(support.marked(os.environ[support.TEST_MARK]), deadline_s=10)


@promise("""ownership.agent-kills-spawner-answer: The agent kills a spawner that does not answer, with all processes
    that it owns.""")
def test_a_spawner_that_does_not_answer_is_killed_with_everything_it_owns(
    mailbox: support.Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "ANSWER_PATIENCE_S", 1.0)
    monkeypatch.setattr(client, "_STANDSTILL_S", 600.0)
    args = {rank: (WORKER, str(mailbox), "--start", KINDS) for rank in range(2)}
    envs: dict[int, dict[str, str]] = {0: {}, 1: {}}
    context = start_processes("t", sys.executable, args, envs, DefaultLogsSpecs("/dev/null"))
    pids = [int(line.split()[2]) for line in mailbox.take(10)]
    spawner = support.spawner_of(context.pids()[0])
    support.halt(spawner)
    context.close(timeout=0)
    assert [pid for pid in [*pids, spawner] if support.alive(pid)] == []


@promise("ownership.worker-process-tree-gone: A worker's process tree is gone before the worker is replaced.")
def test_a_worker_is_killed_and_its_tree_is_gone_before_it_is_replaced(launch: Any, tmp_path: Path) -> None:
    script = support.write_script(tmp_path / "reborn.py", f"""
        import os, subprocess, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.execv(sys.executable, [sys.executable, {WORKER!r}, *sys.argv[1:]])
        left = [pid for pid in open({str(tmp_path / "pids")!r}).read().split() if os.path.exists(f"/proc/{{pid}}")]
        with open(sys.argv[1], "w") as box:
            box.write(f"left{{left}} - 0\\n")
    """)  # fmt: skip
    mailbox = tmp_path / "mailbox"
    entry = [sys.executable, script, str(mailbox), "--start", KINDS]
    job = launch(nproc=1, max_restarts=1, entry=entry)
    group = job.hear_group(1, 4)
    (tmp_path / "pids").write_text(" ".join(map(str, [*group["worker"], *group["grandchild"]])))
    os.kill(group["worker"][0], signal.SIGKILL)
    job.hear("left[]")
    assert job.outcome()["how"] == "success"


@promise("""ownership.processes-worker-leaves-behind: Processes that a worker leaves behind are killed when it ends,
    also while other workers run.""")
@pytest.mark.parametrize(("then", "how"), [("exit 0", "success"), ("exit 3", "ChildFailedError")])
def test_what_a_worker_leaves_behind_goes_with_it(launch: Any, then: str, how: str) -> None:
    job = launch("--start", KINDS, "--then", then)
    group = job.hear_group(1, 4)
    job.open_gate()
    assert job.outcome()["how"] == how
    assert [pid for pid in group["grandchild"] if support.alive(pid)] == []


@proves("ownership.processes-worker-leaves-behind")
def test_what_a_worker_leaves_behind_goes_while_others_still_run(launch: Any) -> None:
    job = launch("--start", KINDS, "--then", "exit 0", nproc=2)
    trees: dict[str, list[int]] = {"0": [], "1": []}
    for _, rank, pid in (line.split() for line in job.mailbox.take(10)):
        trees[rank].append(int(pid))
    job.open_gate(0)
    assert support.survivors(trees["0"], PROMPTLY_S) == []
    assert all(support.alive(pid) for pid in trees["1"])
    job.open_gate(1)
    assert job.outcome()["how"] == "success"


# The kill ladder, on every path to it.

# Enough for a worker to say that it was signalled, on a machine that is busy.
GRACE_S = 1.5


@promise("""stopping.workers-get-agent-signal: Workers get the agent's signal and the user's grace period on every path:
    a failure, a restart, a newcomer, a signal, the end.""")
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_stubborn_worker_when_a_peer_fails(launch: Any, is_restarted: bool) -> None:
    life = ("--life", "0") if is_restarted else ()
    order = {"nproc": 2, "shutdown_timeout": GRACE_S, "max_restarts": int(is_restarted)}
    job = launch("--on", "SIGTERM", "--then", "exit 3", "--rank", "1", *life, **order)
    pids = job.hear("worker", 2)
    job.open_gate(1)
    job.hear("worker-SIGTERM")
    if is_restarted:
        job.hear("replacement", 2)
        assert not any(support.alive(pid) for pid in pids)
    outcome = job.outcome()
    assert outcome["how"] == ("success" if is_restarted else "ChildFailedError")
    assert is_restarted or f"rank 0 (SIGKILL, {GRACE_S} s after SIGTERM)" in outcome["text"]
    assert not any(support.alive(pid) for pid in pids)


@proves("stopping.workers-get-agent-signal")
def test_a_stubborn_worker_when_a_node_wants_to_join(launch: Any, tmp_path: Path) -> None:
    job = launch("--on", "SIGTERM", shutdown_timeout=GRACE_S, newcomer=str(tmp_path / "newcomer"))
    (pid,) = job.hear("worker")
    (tmp_path / "newcomer").touch()
    job.hear("worker-SIGTERM")
    (successor,) = job.hear("worker")
    assert not support.alive(pid)
    job.send(signal.SIGTERM)
    job.hear("worker-SIGTERM")
    assert job.outcome()["how"] == "SignalException"
    assert not support.alive(successor)


@proves("stopping.workers-get-agent-signal")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stubborn_worker_when_the_agent_gets_a_signal(launch: Any, name: str) -> None:
    """The worker is sent what the agent got."""
    job = launch("--on", "SIGTERM,SIGINT", "--start", KINDS, shutdown_timeout=GRACE_S)
    group = job.hear_group(1, 4)
    job.send(signal.Signals[name])
    job.hear(f"worker-{name}")
    outcome = job.outcome()
    assert (outcome["how"], outcome["signal"]) == ("SignalException", name)
    assert not any(support.alive(pid) for pid in [*group["worker"], *group["grandchild"]])
    assert job.mailbox.rest() == [], "nobody but the leader got a signal before the last one"


@promise("""stopping.children-worker-get-signal: Children of a worker get no signal before SIGKILL, so that the worker
    can end them in order.""")
def test_grandchildren_may_finish_what_they_do_within_the_grace_of_their_leader(mailbox: support.Mailbox) -> None:
    """The leader waits for its child after SIGTERM; the child, which has no handler, must not have got one."""
    code = f"""
        import os, signal, subprocess, time
        child = subprocess.Popen(["sh", "-c", "read line; echo saved - $$ > {mailbox}"], stdin=subprocess.PIPE)
        def finish(number, frame):
            child.communicate(b"go\\n")
            os._exit(0)
        signal.signal(signal.SIGTERM, finish)
        with open("{mailbox}", "w") as box:
            box.write("there\\n")
        while True:
            time.sleep(0.1)  # Not for long: a signal just before it would not end it.
    """
    script = support.write_script(mailbox.path.parent / "leader.py", code)
    context = start_processes("t", sys.executable, {0: (script,)}, {0: {}}, DefaultLogsSpecs("/dev/null"))
    mailbox.take()
    context.close(timeout=60)
    assert context.stopped() == {0: "SIGTERM"}
    assert [line.split()[0] for line in mailbox.rest()] == ["saved"]


def while_joining(launch: Any, order: dict[str, Any]) -> tuple[Launch, list[int]]:
    job = launch(block_in_join=1, **order)
    assert job.mailbox.take() == ["joining"]
    return job, []


def while_starting(launch: Any, order: dict[str, Any]) -> tuple[Launch, list[int]]:
    """The first of many workers is there, the last is not, or at least has not been looked at. Python may swallow an
    interrupt while it starts; then that worker is killed when its grace is over."""
    job = launch(nproc=20, shutdown_timeout=5, **order)
    return job, job.hear("worker")


def while_running(launch: Any, order: dict[str, Any]) -> tuple[Launch, list[int]]:
    job = launch("--start", "daemon-session", nproc=2, **order)
    group = job.hear_group(2, 1)
    return job, [*group["worker"], *group["grandchild"]]


def while_stopping(launch: Any, order: dict[str, Any]) -> tuple[Launch, list[int]]:
    """Of one worker, which does not end before it is killed."""
    order = {**order, "max_restarts": 3, "shutdown_timeout": 600}
    job = launch("--on", "SIGTERM", "--then", "exit 3", "--rank", "1", nproc=2, **order)
    pids = job.hear("worker", 2)
    job.open_gate(1)
    job.hear("worker-SIGTERM")
    return job, pids


def while_rejoining(launch: Any, order: dict[str, Any]) -> tuple[Launch, list[int]]:
    job = launch("--then", "exit 3", "--rank", "1", nproc=2, max_restarts=3, block_in_join=2, **order)
    pids = job.hear("worker", 2)
    job.open_gate(1)
    assert job.mailbox.take() == ["joining"]
    return job, pids


def while_waiting_for_peers(launch: Any, order: dict[str, Any]) -> tuple[Launch, list[int]]:
    job = launch("--then", "exit 0", nodes=2, **order)
    pids = job.hear("worker")
    job.open_gate()
    assert job.mailbox.take() == ["at the barrier"]
    return job, pids


PHASES = {
    "joining": while_joining,
    "starting": while_starting,
    "running": while_running,
    "stopping": while_stopping,
    "rejoining": while_rejoining,
    "waiting for peers": while_waiting_for_peers,
}


@promise("""stopping.signal-phase-makes-node: Each signal that stops a node, in any phase, makes the node leave, does
    not close the run, and leaves no process behind.""")
@pytest.mark.parametrize(
    ("phase", "name"), [*zip(PHASES, itertools.cycle(SIGNALS), strict=False), *(("running", name) for name in SIGNALS)]
)
def test_a_signal_takes_the_node_away_and_closes_nothing(launch: Any, phase: str, name: str) -> None:
    order = {"signals_to_handle": ",".join(SIGNALS), "handled": list(SIGNALS)}
    job, pids = PHASES[phase](launch, order)
    job.send(signal.Signals[name])
    if phase == "stopping":
        support.await_delivery(job.pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    outcome = job.outcome()
    assert (outcome["how"], outcome["signal"]) == ("SignalException", name)
    assert outcome["shutdowns"] == 0, "a leave is never a close"
    assert outcome["joins"] == (2 if phase == "rejoining" else 1), "nothing new is begun"
    assert sorted(outcome["restored"]) == sorted(SIGNALS)
    assert not any(support.alive(pid) for pid in pids)


@promise("""stopping.second-ctrl-kills-once: A second Ctrl-C kills at once. Further SIGTERMs do not shorten the grace
    period.""")
def test_a_second_interrupt_ends_all_patience(launch: Any) -> None:
    job = launch("--on", "SIGINT", nproc=2, shutdown_timeout=600)
    pids = job.hear("worker", 2)
    job.send(signal.SIGINT)
    job.hear("worker-SIGINT", 2)
    job.send(signal.SIGINT)
    assert job.outcome()["signal"] == "SIGINT"
    assert not any(support.alive(pid) for pid in pids)


@proves("stopping.second-ctrl-kills-once")
def test_a_second_interrupt_ends_the_grace_of_a_restart(launch: Any) -> None:
    """The first one surfaces while the workers are being stopped: the node leaves at once, and keeps their grace."""
    order = {"nproc": 2, "max_restarts": 3, "shutdown_timeout": 600}
    job = launch("--on", "SIGTERM,SIGINT", "--then", "exit 3", "--rank", "1", **order)
    pids = job.hear("worker", 2)
    job.open_gate(1)
    job.hear("worker-SIGTERM")
    job.send(signal.SIGINT)
    support.wait_until(lambda: "got SIGINT" in (job.directory / "err").read_text(), "the agent leaves")
    assert support.alive(pids[0]) or support.alive(pids[1])
    job.send(signal.SIGINT)
    outcome = job.outcome(PROMPTLY_S)
    assert outcome["signal"] == "SIGINT"
    assert "got SIGINT, the workers are being stopped; Ctrl-C again kills them" in outcome["stderr"]
    assert not any(support.alive(pid) for pid in pids)


@proves("stopping.second-ctrl-kills-once")
def test_a_second_sigterm_does_not_shorten_the_grace(launch: Any) -> None:
    job = launch("--on", "SIGTERM", shutdown_timeout=3)
    (pid,) = job.hear("worker")
    began = time.monotonic()
    job.send(signal.SIGTERM)
    job.hear("worker-SIGTERM")
    job.send(signal.SIGTERM)
    job.send(signal.SIGTERM)
    assert support.survivors([pid]) == []
    assert time.monotonic() - began >= 3
    assert job.outcome()["signal"] == "SIGTERM"


def test_a_signal_in_the_main_thread_does_not_concern_a_launch_in_another(
    mailbox: support.Mailbox, tmp_path: Path
) -> None:
    source = f"""
        import signal, sys, threading
        from holdfast import LaunchConfig, elastic_launch
        from holdfast.process import DefaultLogsSpecs
        config = LaunchConfig(1, 1, 1, rdzv_backend="standalone", logs_specs=DefaultLogsSpecs("/dev/null"))
        got = []
        signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
        launch = lambda: print(elastic_launch(config, sys.executable)({WORKER!r}, {str(mailbox)!r}, "--then", "exit 0"))
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
        print(got)
    """
    gate = tmp_path / "gate"
    os.mkfifo(f"{gate}0")
    path = support.write_script(tmp_path / "main.py", source)
    with support.python(path, env={**os.environ, "GATE": str(gate)}) as process:
        mailbox.take()
        os.kill(process.pid, signal.SIGTERM)
        Path(f"{gate}0").write_text("go")
        out, err = process.communicate(timeout=support.DEADLINE_S)
    assert (process.returncode, out) == (0, "{0: None}\n[15]\n"), err


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A control group (version 1) that freezes what is put into it: not even SIGKILL ends a frozen process."""
    group = Path("/sys/fs/cgroup/freezer") / f"holdfast-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"the control group freezer (version 1) cannot be used here: {error}")
    yield group
    (group / "freezer.state").write_text("THAWED")
    pids = [int(text) for text in (group / "cgroup.procs").read_text().split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    support.survivors(pids)
    support.wait_until(lambda: not (group / "cgroup.procs").read_text().strip(), "the frozen processes are gone")
    group.rmdir()


def freeze(group: Path, pid: int) -> None:
    (group / "cgroup.procs").write_text(str(pid))
    (group / "freezer.state").write_text("FROZEN")
    support.wait_until(lambda: (group / "freezer.state").read_text().strip() == "FROZEN", "it is frozen")


@promise("""ownership.process-killed-named-fails: A process that cannot be killed is named, fails the node and delays
    nothing.""")
def test_an_unkillable_process_is_named_when_a_peer_fails(launch: Any, freezer: Path) -> None:
    job = launch("--then", "exit 3", "--rank", "1", nproc=2, shutdown_timeout=1, max_restarts=3)
    said = {rank: int(pid) for _, rank, pid in (line.split() for line in job.mailbox.take(2))}
    freeze(freezer, said["0"])
    job.open_gate(1)
    outcome = job.outcome(60)
    assert outcome["how"] == "ChildFailedError"
    assert outcome["joins"] == 1, "its successor could not own what it holds"
    assert f"process {said['0']} cannot be killed" in outcome["text"]
    assert "rank 1 exited with code 3" in outcome["text"]
    assert str(said["0"]) in outcome["stderr"]


@proves("ownership.process-killed-named-fails")
def test_an_unkillable_process_does_not_hold_up_a_signal(launch: Any, freezer: Path) -> None:
    job = launch(nproc=1, shutdown_timeout=1)
    (pid,) = job.hear("worker")
    freeze(freezer, pid)
    job.send(signal.SIGTERM)
    outcome = job.outcome(60)
    assert (outcome["how"], outcome["shutdowns"]) == ("SignalException", 0)
    assert f"process {pid} (state D)" in outcome["stderr"]


@proves("ownership.process-killed-named-fails")
def test_an_unkillable_process_when_nobody_failed(launch: Any, freezer: Path, tmp_path: Path) -> None:
    job = launch(nproc=1, shutdown_timeout=1, newcomer=str(tmp_path / "newcomer"))
    (pid,) = job.hear("worker")
    freeze(freezer, pid)
    (tmp_path / "newcomer").touch()
    outcome = job.outcome(60)
    assert outcome["how"] == "HostError"
    assert f"processes that cannot be killed are left on this node: {pid}" in outcome["text"]
    assert "lost" not in outcome["stderr"], "nobody waits for what it might yet write"


@proves("ownership.process-killed-named-fails")
def test_an_unkillable_process_whose_spawner_does_not_answer(
    mailbox: support.Mailbox, freezer: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a busy machine the spawner may be late. The agent looks for what is left itself."""
    monkeypatch.setattr(ladder, "ANSWER_PATIENCE_S", 0.2)
    monkeypatch.setattr(client, "_STANDSTILL_S", 600.0)
    monkeypatch.setattr(procfs, "KILL_PATIENCE_S", 3.0)
    args = {rank: (WORKER, str(mailbox)) for rank in range(2)}
    context = start_processes("t", sys.executable, args, {0: {}, 1: {}}, DefaultLogsSpecs("/dev/null"))
    mailbox.take(2)
    frozen, other = context.pids()[0], context.pids()[1]
    freeze(freezer, frozen)
    support.halt(support.spawner_of(other))
    context.close(timeout=0)
    assert context.survivors == ((frozen, "D"),)
    assert context.stopped() == {0: f"SIGKILL, but process {frozen} cannot be killed"}
    assert f"process {frozen} (state D) of t cannot be killed" in caplog.messages
    assert not support.alive(other)


@promise("""ownership.set-limit-worker-stays: If you set a limit, a worker that stays in uninterruptible sleep for
    longer makes its group fail.""")
def test_a_worker_in_uninterruptible_sleep_makes_the_group_unhealthy(
    launch: Any, freezer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "1")
    job = launch(nproc=2, shutdown_timeout=1, max_restarts=3)
    pids = job.hear("worker", 2)
    freeze(freezer, pids[0])
    outcome = job.outcome(60)
    assert outcome["how"] == "HostError", "it is stuck so deeply that it cannot be killed"
    assert str(pids[0]) in outcome["text"]
    assert f"worker {pids[0]} has been in uninterruptible sleep for 1 s" in outcome["stderr"]
    assert outcome["joins"] == 1
    assert not support.alive(pids[1])


@proves("ownership.set-limit-worker-stays")
def test_a_worker_that_was_stuck_and_can_be_killed_is_a_failure(
    launch: Any, freezer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "1")
    job = launch("--on", "SIGTERM", nproc=2, shutdown_timeout=60)
    said = {rank: int(pid) for _, rank, pid in (line.split() for line in job.mailbox.take(2))}
    freeze(freezer, said["0"])
    assert job.mailbox.take()[0].startswith("worker-SIGTERM 1"), "the group is being stopped"
    (freezer / "freezer.state").write_text("THAWED")
    for pid in said.values():
        os.kill(pid, signal.SIGKILL)
    outcome = job.outcome()
    assert outcome["how"] == "ChildFailedError"
    assert "it had been in uninterruptible sleep for 1 s" in outcome["text"]


@promise("""failures.report-names-kernel-memory: The report names the kernel's out-of-memory killer, also if it killed a
    process below a shell.""")
@pytest.mark.parametrize("through_a_shell", [False, True])
def test_the_kernels_memory_killer_is_named(
    launch: Any, small_memory: Path, mailbox: support.Mailbox, through_a_shell: bool
) -> None:
    def enter() -> None:
        (small_memory / "cgroup.procs").write_text(str(os.getpid()))

    order = {}
    if through_a_shell:
        order["entry"] = ["sh", "-c", f"{sys.executable} {WORKER} {mailbox} --then eat; exit $?"]
    job = launch("--then", "eat", preexec_fn=enter, **order)
    job.hear("worker")
    job.open_gate()
    outcome = job.outcome()
    assert outcome["how"] == "ChildFailedError"
    assert "the kernel's memory killer ended 1 process of cgroup" in outcome["text"]
    assert small_memory.name in outcome["text"]
