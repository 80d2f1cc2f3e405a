"""`holdfast submit --on ray` on real Ray clusters: several nodes on this machine, each with an address of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests import support
from tests.e2e.command import COMMAND, Ended, Holdfast, Running, clean_environment
from tests.support import DEADLINE_S, Mailbox, survivors, wait_until

DEADLINE_LONG_S = 4 * DEADLINE_S
_RAY = str(Path(sys.executable).with_name("ray"))
_DOCS = Path(__file__).parent.parent.parent / "docs" / "engines.md"

# A node that is killed is noticed within two seconds and not, as usual, within half a minute.
_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}

# Tells the pids of the worker and of those above it: spawner, agent, owned.py. Then it waits for the end.
WAITS = """
    import os, pathlib, signal, sys, time
    import psutil

    box, done = sys.argv[1:]

    def say(*words):
        fd = os.open(box, os.O_WRONLY)
        os.write(fd, (" ".join(map(str, words)) + "\\n").encode())
        os.close(fd)

    def stop(number, frame):
        say("signal", number)
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    above = psutil.Process().parents()[:3]
    say("world", os.environ["WORLD_SIZE"], os.getpid(), *(each.pid for each in above))
    while not os.path.exists(done):
        time.sleep(0.05)
"""


class Cluster:
    """Ray nodes, each a session of processes. Ray takes the address of the host for 127.0.0.1, so they have others."""

    def __init__(self, network: int) -> None:
        self._directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Its sockets allow for no long path.
        self._prefix, self._nodes = f"127.{network}.0.", dict[str, subprocess.Popen[bytes]]()
        self.address = f"{self._prefix}1:{support.free_port()}"
        self._count = 0
        try:
            port = self.address.rpartition(":")[2]
            self.head = self.add("--head", f"--port={port}", f"--temp-dir={self._directory}/t",
                                 "--include-dashboard=false", "--disable-usage-stats")  # fmt: skip
        except BaseException:
            self.close()
            raise

    def add(self, *options: str) -> str:
        """Start a node, and return its name."""
        self._count += 1
        name, log = f"{self._prefix}{self._count}", Path(self._directory, f"{self._count}.log")
        where = options if "--head" in options else (f"--address={self.address}", *options)
        command = [_RAY, "start", f"--node-ip-address={name}", "--num-cpus=2", "--object-store-memory=80000000",
                   "--min-worker-port=0", "--max-worker-port=0", "--block", *where]  # fmt: skip
        with log.open("wb") as file:
            environment = {**clean_environment(), **_HEALTH}
            environment.pop(support.TEST_MARK, None)
            node = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        self._nodes[name] = node
        wait_until(lambda: b"Ray runtime started" in log.read_bytes() or node.poll() is not None, "it starts", 120)
        assert node.poll() is None, log.read_text()
        return name

    def kill(self, name: str) -> None:
        node = self._nodes.pop(name)
        pids = [node.pid, *support.tree(node.pid)]
        # What raylets start has process groups of its own, and what owned.py runs a session. That must end by itself.
        for pid in [pid for pid in pids if _session_of(pid) == node.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()
        assert survivors(pids) == []

    def close(self) -> None:
        for name in reversed(list(self._nodes)):
            self.kill(name)
        shutil.rmtree(self._directory, ignore_errors=True)


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes without GPUs."""
    support.leave_to_test_all("a Ray cluster")
    support.need_module("ray")
    made = Cluster(77)
    try:
        made.add()
        yield made
    finally:
        made.close()


def submitted(holdfast: Holdfast, cluster: Cluster, *args: str, env: Mapping[str, str] | None = None) -> Running:
    return holdfast.start(*args, command=(COMMAND, "submit", "--on", "ray", "--address", cluster.address), env=env)


def ended(holdfast: Holdfast, cluster: Cluster, *args: str) -> Ended:
    return submitted(holdfast, cluster, *args).wait(DEADLINE_LONG_S)


def worlds(mailbox: Mailbox, size: int) -> list[int]:
    """Wait until all workers of a world of that size run; the pids of all that belong to them."""
    pids: list[list[int]] = []
    while len(pids) < size:
        kind, *numbers = mailbox.take(deadline_s=DEADLINE_LONG_S)[0].split()
        if kind == "world":
            pids = [*pids, [int(number) for number in numbers[1:]]] if int(numbers[0]) == size else []
    return [pid for each in pids for pid in each]


def test_two_nodes(holdfast: Holdfast, cluster: Cluster) -> None:
    script = holdfast.script("""
        import os, sys
        rank = os.environ["RANK"]
        for number in range(2000):
            print(f"rank {rank} line {number} " + "x" * 100)
        print("y" * 300_000)
        print(f"rank {rank} says {sys.argv[1:]} in {os.getcwd()}", file=sys.stderr)
        print("secret" if "HOLDFAST_TOKEN" in os.environ or "HOLDFAST_REPORT_FILE" in os.environ else "none")
    """)
    end = ended(holdfast, cluster, "--nnodes", "2", "--nproc-per-node", "2", script, "--lr", "1")
    assert end.code == 0, str(end)
    names = r"\[127\.77\.0\.[12]\]"
    numbered = [re.fullmatch(names + r" rank (\d) line (\d+) x{100}", line) for line in end.lines]
    found = [(int(match[1]), int(match[2])) for match in numbered if match]
    for rank in range(4):
        assert [number for each, number in found if each == rank] == list(range(2000))
    rest = sorted(line.partition("] ")[2] for line, match in zip(end.lines, numbered, strict=True) if not match)
    assert rest == ["none"] * 4 + ["y" * 300_000] * 4
    said = sorted(line.partition("] ")[2] for line in end.err.splitlines() if re.match(names, line))
    assert said == [f"rank {rank} says ['--lr', '1'] in {holdfast.directory}" for rank in range(4)]
    assert {line for line in end.own if "finished" in line} >= {
        f"holdfast: 127.77.0.{node}: all 2 workers finished" for node in (1, 2)
    }
    assert list(holdfast.temporary.glob("holdfast-*")) == []


def test_a_failure_is_followed_by_a_restart(holdfast: Holdfast, cluster: Cluster) -> None:
    script = holdfast.script("""
        import os, sys
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if (attempt, os.environ["RANK"]) == ("0", "1"):
            sys.exit(3)
        if attempt == "1":
            print("second attempt")
        else:
            import signal
            signal.pause()
    """)
    end = ended(holdfast, cluster, "--nnodes", "2", "--max-restarts", "1", script)
    assert end.code == 0, str(end)
    assert end.out.count("second attempt") == 2


def test_the_report_is_printed_once(holdfast: Holdfast, cluster: Cluster) -> None:
    script = holdfast.script("""
        import os, signal
        if os.environ["RANK"] == "1":
            raise ValueError("the cause of it all")
        signal.pause()
    """)
    end = ended(holdfast, cluster, "--nnodes", "2", script)
    assert end.code == 1, str(end)
    assert end.err.count("FAILED") == 1
    assert "the cause of it all" in end.last


def test_nodes_come_and_go(holdfast: Holdfast, cluster: Cluster, mailbox: Mailbox, tmp_path: Path) -> None:
    """It waits for the first node with a GPU, and goes on with one that comes, without one that is lost, and with it
    again when it is back. Ray gives the agent the GPU."""
    done = tmp_path / "done"
    script = holdfast.script(WAITS + '    print("sees", os.environ["CUDA_VISIBLE_DEVICES"])\n')
    job = submitted(holdfast, cluster, "--gpus-per-node", "1", "--nnodes", "1:2", "--last-call", "1s",
                    script, str(mailbox), str(done))  # fmt: skip
    waiting = "holdfast: 0 of 1 nodes are there, waiting for 1 more (127.77.0.1 lacks 1 GPUs, 127.77.0.2 lacks 1 GPUs)"
    wait_until(lambda: waiting in job.so_far().own, "it waits", DEADLINE_LONG_S)
    first = cluster.add("--num-gpus=1")
    second = ""
    try:
        pids = worlds(mailbox, 1)
        second = cluster.add("--num-gpus=1")
        pids += worlds(mailbox, 2)
        cluster.kill(second)
        pids += worlds(mailbox, 1)
        second = cluster.add("--num-gpus=1")
        pids += worlds(mailbox, 2)
        done.touch()
        end = job.wait(DEADLINE_LONG_S)
        assert end.code == 0, str(end)
        assert sorted(end.lines) == [f"[{first}] sees 0", f"[{second}] sees 0"]
        assert survivors(pids) == []
    finally:
        for name in filter(None, (first, second)):
            cluster.kill(name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_caller(
    holdfast: Holdfast, cluster: Cluster, mailbox: Mailbox, tmp_path: Path, number: signal.Signals
) -> None:
    job = submitted(holdfast, cluster, "--nnodes", "2", holdfast.script(WAITS), str(mailbox), str(tmp_path / "never"))
    pids = worlds(mailbox, 2)
    job.send(number)
    end = job.wait(DEADLINE_LONG_S)
    assert end.code == 128 + number, str(end)
    assert mailbox.take(2) == [f"signal {number:d}"] * 2
    assert "***" not in end.err, f"Ray has handled the signal, too\n{end}"
    assert survivors(pids) == []
    assert list(holdfast.temporary.glob("holdfast-*")) == []


def test_a_console_that_is_not_read(holdfast: Holdfast, cluster: Cluster, tmp_path: Path) -> None:
    """The job can be stopped all the same."""
    script = holdfast.script("""
        import os, pathlib, sys, time
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.05)
        print("x" * 50_000)
        pathlib.Path(sys.argv[1] + os.environ["RANK"]).touch()
        while True:
            print("x" * 100)
    """)
    read, write = os.pipe()
    try:
        command = (COMMAND, "submit", "--on", "ray", "--address", cluster.address)
        job = holdfast.start("--nnodes", "2", script, str(tmp_path / "go"), command=command, stdout=write)
        support.fill(write)
        wait_until(lambda: job.so_far().err.count("started 1 worker") == 2, "it runs", DEADLINE_LONG_S)
        (tmp_path / "go").touch()
        wait_until(lambda: len(list(tmp_path.glob("go?"))) == 2, "both write", DEADLINE_LONG_S)
        job.send(signal.SIGTERM)
        assert job.wait(DEADLINE_LONG_S).code == 128 + signal.SIGTERM
    finally:
        os.close(read)
        os.close(write)


def test_a_caller_that_is_killed(holdfast: Holdfast, cluster: Cluster, mailbox: Mailbox, tmp_path: Path) -> None:
    job = submitted(holdfast, cluster, "--nnodes", "2", holdfast.script(WAITS), str(mailbox), str(tmp_path / "never"))
    pids = worlds(mailbox, 2) + support.tree(job.pid)
    job.send(signal.SIGKILL)
    assert survivors(pids, DEADLINE_LONG_S) == []
    job.process.wait()
    wait_until(lambda: not list(holdfast.temporary.glob("holdfast-*")), "the coordinator's memory is removed")


def test_a_coordinator_that_is_killed(holdfast: Holdfast, cluster: Cluster, mailbox: Mailbox, tmp_path: Path) -> None:
    """The workers do not notice, and the run ends as usual."""
    done = tmp_path / "done"
    job = submitted(holdfast, cluster, "--nnodes", "2", holdfast.script(WAITS), str(mailbox), str(done))
    worlds(mailbox, 2)
    coordinator = next(pid for pid in support.tree(job.pid) if "coordinator" in psutil.Process(pid).cmdline()[4:5])
    os.kill(coordinator, signal.SIGKILL)
    warning = "holdfast: the coordinator has died, and is started again"
    wait_until(lambda: warning in job.so_far().own, "it is started again", DEADLINE_LONG_S)
    done.touch()
    end = job.wait(DEADLINE_LONG_S)
    assert end.code == 0, str(end)
    assert mailbox.rest() == []


def test_an_agent_that_is_killed_is_started_again(
    holdfast: Holdfast, cluster: Cluster, mailbox: Mailbox, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    job = submitted(holdfast, cluster, "--nnodes", "2", holdfast.script(WAITS), str(mailbox), str(done))
    agent = worlds(mailbox, 2)[2]
    os.kill(agent, signal.SIGKILL)
    worlds(mailbox, 2)
    done.touch()
    end = job.wait(DEADLINE_LONG_S)
    assert end.code == 0, str(end)
    assert any(line.endswith(": the agent was killed") for line in end.own)


def test_nodes_that_cannot_run_the_job(holdfast: Holdfast, cluster: Cluster) -> None:
    """What is wrong is said with the name of the node, and the job ends."""
    end = ended(holdfast, cluster, "--nnodes", "2", "--log-dir", "/proc/nothing", holdfast.script(""))
    assert end.code in (1, 2), str(end)
    for node in (1, 2):
        assert any(line.startswith(f"holdfast run: error: 127.77.0.{node}: ") for line in end.own), str(end)
    end = ended(holdfast, cluster, "--gpus-per-node", "1", "--join-timeout", "1s", holdfast.script(""))
    assert end.code == 1, str(end)
    assert end.last.startswith("holdfast submit: error: no agent could be started within 1 s (--join-timeout): 0 of 1 ")


def test_the_runtime_environment(holdfast: Holdfast, cluster: Cluster) -> None:
    environment = '{"env_vars": {"GREETING": "hello"}}'
    script = holdfast.script("import os; print(os.environ['GREETING'])")
    end = ended(holdfast, cluster, "--nnodes", "2", "--runtime-env-json", environment, script)
    assert sorted(end.lines) == ["[127.77.0.1] hello", "[127.77.0.2] hello"], str(end)


def test_the_commands_of_the_docs(holdfast: Holdfast, cluster: Cluster) -> None:
    holdfast.script("import os; print(os.environ['WORLD_SIZE'])", "train.py")
    section = _DOCS.read_text().partition("\n## Ray\n")[2].partition("\n## ")[0]
    commands = [line.split() for line in section.splitlines() if line.startswith("holdfast submit --on ray")]
    assert len(commands) >= 2
    for _, *words in commands:
        end = holdfast.run(*words, command=(COMMAND,), env={"RAY_ADDRESS": cluster.address}, deadline_s=DEADLINE_LONG_S)
        assert end.code == 0, str(end)
        assert {line.partition("] ")[2] for line in end.lines} in ({"2"}, {"4"}, {"8"}), str(end)


def test_the_head_is_killed(holdfast: Holdfast, cluster: Cluster, mailbox: Mailbox, tmp_path: Path) -> None:
    """The last test of this file: no other has a cluster afterwards."""
    script = holdfast.script(WAITS)
    job = submitted(holdfast, cluster, "--nnodes", "2", script, str(mailbox), str(tmp_path / "never"))
    pids = worlds(mailbox, 2)
    cluster.kill(cluster.head)
    end = job.wait(DEADLINE_LONG_S)
    assert end.code == 1, str(end)
    assert "holdfast: the head of Ray has not answered for 15 s: stopping the job" in end.own, str(end)
    assert end.last == "holdfast submit: error: Ray was lost, and the job was stopped", str(end)
    assert survivors(pids, DEADLINE_LONG_S) == []
