"""A real Slurm of two nodes on this machine: munged, slurmctld, and two slurmd.

Each node has a network, a host name and an /etc/hosts of its own (namespaces), and so has a login host, which has no
slurmd; there the cables of the nodes meet. The controller runs on the first node. Everything is in one directory, found
by SLURM_CONF, and ends with the `with` block.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests import support

NODES = ("node1", "node2")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LOGIN = 2  # For `Cluster.on`.
TOOLS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scancel", "unshare", "nsenter", "ip")
_DEADLINE_S = 60.0

_CONFIGURATION = """
ClusterName=test
FirstJobId={first_job}
SlurmctldHost=node1({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket,cred_expire=15
CredType=cred/munge
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=20
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
NodeName=node1 NodeAddr={address} CPUs=8 Gres=gpu:2 State=UNKNOWN
NodeName=node2 NodeAddr={other} CPUs=8 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
"""

# A host: it has a name, a table of names, and waits for its end.
_HOST = """
set -e
hostname {name}
mount --bind {home}/hosts /etc/hosts
ip link set lo up
echo ready
exec sleep infinity
"""
# In the login host.
_SWITCH = "ip link add switch type bridge && ip addr add 10.77.0.3/24 dev switch && ip link set switch up"
_CABLE = """
set -e
ip link add {name} type veth peer name cable netns {pid}
ip link set {name} master switch up
nsenter -t {pid} --net sh -c 'ip addr add {address}/24 dev cable && ip link set cable up'
"""


class Cluster:
    """`home` is its directory. `on(node)` are the words before a command that is to run on one of its nodes."""

    def __init__(self, home: Path, proctrack: str) -> None:
        self.home, self._proctrack = home, proctrack
        self.variables = {"SLURM_CONF": str(home / "slurm.conf")}
        self._hosts: list[subprocess.Popen[str]] = []
        self._daemons: list[subprocess.Popen[bytes]] = []

    def on(self, node: int = 0, directory: Path | None = None) -> tuple[str, ...]:
        where = f"--wd={directory or self.home}"
        return ("nsenter", "-t", str(self._hosts[node].pid), "--net", "--mount", "--uts", where)

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        environ = {**os.environ, **self.variables}
        done = subprocess.run([*self.on(), *command], env=environ, capture_output=True, text=True, timeout=_DEADLINE_S)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def facts(self, job_id: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", job_id)))

    def await_state(self, job_id: str, *states: str) -> dict[str, str]:
        def reached() -> dict[str, str] | None:
            facts = self.facts(job_id)
            return facts if facts["JobState"] in states else None

        return support.wait_until(reached, f"job {job_id} is {' or '.join(states)}", _DEADLINE_S)  # type: ignore[return-value]

    def cancel_all(self) -> None:
        self.ask("scancel", "--user=root", "--full")
        support.wait_until(lambda: not self.ask("squeue", "--noheader"), "no job is left", _DEADLINE_S)

    def start(self) -> None:
        self._write_files()
        for name in (*NODES, "login"):
            self._start_host(name)
        cables = [
            _CABLE.format(name=name, pid=host.pid, address=address)
            for name, host, address in zip(NODES, self._hosts, ADDRESSES, strict=False)
        ]
        for script in (_SWITCH, *cables):
            subprocess.run([*self.on(LOGIN), "sh", "-c", script], check=True, timeout=_DEADLINE_S)
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log",
                 "seed-file": "munge.seed"}  # fmt: skip
        munge = [f"--{option}={self.home / file}" for option, file in files.items()]
        self._start_daemon(0, "munged", "--foreground", "--force", *munge)
        support.wait_until((self.home / "munge.socket").exists, "munged listens", _DEADLINE_S)
        self._start_daemon(0, "slurmctld", "-D")
        for number, name in enumerate(NODES):
            self._start_daemon(number, "slurmd", "-D", "-N", name)
        support.wait_until(self.is_idle, "both nodes are idle", _DEADLINE_S)

    def is_idle(self) -> bool:
        try:
            return self.ask("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle", "idle"]
        except AssertionError:
            return False  # The controller is not there yet.

    def _write_files(self) -> None:
        address, other = ADDRESSES
        (self.home / "state").mkdir()
        support.write_secret(self.home / "munge.key", os.urandom(32))
        # Control groups are named after jobs, and those of another cluster on this machine must have other names.
        first_job = random.randrange(1, 60_000) * 1000
        names = {"home": self.home, "address": address, "other": other, "first_job": first_job,
                 "proctrack": self._proctrack}  # fmt: skip
        (self.home / "slurm.conf").write_text(_CONFIGURATION.format(**names))
        (self.home / "gres.conf").write_text(f"NodeName=node[1-2] Name=gpu File={self.home}/gpu[0-1]\n")
        (self.home / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (self.home / "hosts").write_text(f"127.0.0.1 localhost\n{address} node1\n{other} node2\n10.77.0.3 login\n")
        for number in range(2):
            (self.home / f"gpu{number}").touch()

    def _start_host(self, name: str) -> None:
        script = _HOST.format(name=name, home=self.home)
        command = ["unshare", "--net", "--mount", "--uts", "setpriv", "--pdeathsig", "KILL", "sh", "-c", script]
        host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._hosts.append(host)
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"

    def _start_daemon(self, node: int, *command: str) -> None:
        with (self.home / f"{command[0]}.{node}.out").open("wb") as out:
            words = [*self.on(node), "setpriv", "--pdeathsig", "KILL", *command]
            environ = {**os.environ, **self.variables}
            self._daemons.append(subprocess.Popen(words, stdout=out, stderr=out, env=environ))

    def stop(self) -> None:
        """Jobs first: the daemons must be there to end them."""
        try:
            if len(self._daemons) > 3:
                self.cancel_all()
        finally:
            processes: list[subprocess.Popen[Any]] = [*reversed(self._daemons), *self._hosts]
            for process in processes:
                process.send_signal(signal.SIGTERM if process in self._daemons else signal.SIGKILL)
                try:
                    process.wait(_DEADLINE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def remove_control_groups(self) -> None:
        """Those of the nodes, which Slurm leaves, unless another cluster of the tests uses them."""
        if not any(process.name() == "slurmd" for process in psutil.process_iter()):
            for top in Path("/sys/fs/cgroup/freezer").glob("slurm_node?"):
                for place, _, _ in os.walk(top, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(place)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.home.glob("*.out")))


@contextlib.contextmanager
def running(proctrack: str = "cgroup") -> Iterator[Cluster]:
    support.leave_to_test_all("a Slurm cluster")
    support.need_tools(*TOOLS)
    if os.geteuid() != 0:
        support.cannot_test("only root can make the hosts of a Slurm cluster")
    home = Path(tempfile.mkdtemp(prefix="holdfast-slurm-"))
    cluster = Cluster(home, proctrack)
    try:
        try:
            cluster.start()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{cluster.logs()}") from None
        yield cluster
    finally:
        cluster.stop()
        cluster.remove_control_groups()
        shutil.rmtree(home)
