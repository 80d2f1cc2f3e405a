"""Engines for tests, all alike: a real one that starts a job of two nodes on this machine.

The job is `WORKER`, which tells the mailbox of itself and then does what it was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests import ray_cluster, slurm_cluster, support
from tests.e2e.command import COMMAND, Ended, Holdfast, Running
from tests.sshd import Hosts, hosts
from tests.support import Mailbox

DEADLINE_S = 4 * support.DEADLINE_S

# It tells its world, rank and pid, and the signals that it gets, which it may ignore. It may print many lines or lines
# without end, fail in one rank, always or in the first round, wait until the file `done` is there, or until a notice.
WORKER = """
    import os, signal, sys, time

    box, done, *what = sys.argv[1:]
    rank, world, restarts = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))

    def tell(*words):
        fd = os.open(box, os.O_WRONLY)
        os.write(fd, (" ".join(map(str, words)) + "\\n").encode())
        os.close(fd)

    def stop(number, frame):
        tell("signal", signal.Signals(number).name)
        if "ignore" not in what:
            sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    tell("world", world, rank, os.getpid())
    if "lines" in what:
        for number in range(2000):
            os.write(1 + number % 2, f"{rank} {number} {'x' * (number % 400)} end\\n".encode())
        print("y" * 300_000)
    if rank == "1" and ("fail" in what or ("fail once" in what and restarts == "0")):
        raise RuntimeError("the disk is on fire")
    while "flood" in what:
        print("x" * 100)
    while "save" in what:
        time.sleep(0.05)
        if os.path.exists(os.environ["HOLDFAST_NOTICE_FILE"]):
            tell("saved", rank)
            sys.exit(95)
    while "wait" in what and not os.path.exists(done):
        time.sleep(0.05)
    print("done", rank)
"""


class Engine:
    """`outlives_caller`: the job goes on without the command that started it."""

    name = ""
    nodes: tuple[str, str] = ("node1", "node2")
    command: tuple[str, ...] = (COMMAND, "submit")
    outlives_caller = False
    keeps_lines_whole = True

    def __init__(self, holdfast: Holdfast, mailbox: Mailbox, tmp_path: Path) -> None:
        self.holdfast, self.mailbox, self.done = holdfast, mailbox, tmp_path / "done"
        self.env: dict[str, str] = {}
        holdfast.script(WORKER)

    def start(self, *args: str, **options: Any) -> Running:
        """A command that takes the options of `holdfast run`."""
        env = {**self.env, **options.pop("env", {})}
        return self.holdfast.start(*args, command=self.command, env=env, **options)

    def run(self, *args: str, **options: Any) -> Ended:
        return self.ended(self.start(*args, **options))

    def work(self, *what: str, options: tuple[str, ...] = ("--nnodes=2",), **others: Any) -> Running:
        return self.start(*options, "job.py", str(self.mailbox), str(self.done), *what, **others)

    def ended(self, running: Running) -> Ended:
        """What an engine ends may take a moment longer than the command."""
        running.process.wait(DEADLINE_S)
        support.wait_until(lambda: not running.left(), "nothing is left", DEADLINE_S)
        return running.wait()

    def pids(self, world: int) -> dict[int, int]:
        """The workers by rank, once all of a world of that size run."""
        found: dict[int, int] = {}
        while len(found) < world:
            kind, *words = self.mailbox.take(deadline_s=DEADLINE_S)[0].split()
            if kind == "world" and int(words[0]) == world:
                found[int(words[1])] = int(words[2])
        return found

    def files_left(self) -> list[Path]:
        """Temporary files of the job. Coordinators and agents share a directory of the user, which stays."""
        ours = (f"holdfast-{os.geteuid()}", f"holdfast-agents-{os.geteuid()}")
        return [path for path in self.holdfast.temporary.glob("holdfast-*") if path.name not in ours]

    def passed_on(self, signal_name: str) -> str:
        """The signal that workers get when the command gets this one."""
        return signal_name


class Ssh(Engine):
    name = "ssh"
    servers: Hosts

    def await_nothing(self, running: Running) -> None:
        """For a command that was killed: its agents end by themselves."""
        running.process.wait()
        support.wait_until(lambda: not running.left(), "nothing is left")


class Ray(Engine):
    name = "ray"
    nodes = ("127.77.0.1", "127.77.0.2")


class Slurm(Engine):
    """srun may tear the lines of nodes."""

    name = "slurm"
    outlives_caller = True
    keeps_lines_whole = False

    def passed_on(self, signal_name: str) -> str:
        return "SIGTERM"


class Engines:
    """Makes engines, and keeps the clusters that they need."""

    def __init__(self) -> None:
        self._stack, self._clusters = ExitStack(), dict[str, Any]()

    def _cluster(self, name: str, kind: Any) -> Any:
        if name not in self._clusters:
            self._clusters[name] = self._stack.enter_context(kind.running())
        return self._clusters[name]

    @contextmanager
    def engine(self, name: str, holdfast: Holdfast, mailbox: Mailbox, tmp_path: Path) -> Iterator[Engine]:
        about = (holdfast, mailbox, tmp_path)
        if name == "ssh":
            settings = {key: holdfast.environment()[key] for key in ("TMPDIR", support.TEST_MARK)}
            with hosts(tmp_path / "ssh", {**settings, "HOME": str(tmp_path)}) as servers:
                for number in (1, 2):
                    servers.add(f"node{number}", f"127.0.0.{number}")
                ssh = Ssh(*about)
                ssh.servers = servers
                ssh.command = (
                    COMMAND,
                    "run",
                    "--ssh",
                    servers.ssh,
                    "--hosts=node1,node2",
                    "--rdzv-conf=close_linger=1",
                )
                yield ssh
        elif name == "ray":
            ray = Ray(*about)
            ray.command = (COMMAND, "submit", "ray", "--address", self._cluster(name, ray_cluster).address)
            yield ray
        else:
            cluster: slurm_cluster.Cluster = self._cluster(name, slurm_cluster)
            slurm = Slurm(*about)
            slurm.command = (*cluster.on(0, holdfast.directory), COMMAND, "submit", "slurm")
            slurm.env = {**cluster.variables, "PATH": f"{Path(COMMAND).parent}:{os.environ['PATH']}"}
            yield slurm
            cluster.cancel_all()

    def close(self) -> None:
        self._stack.close()


def agent_of(worker_pid: int) -> int:
    return psutil.Process(support.spawner_of(worker_pid)).ppid()
