"""`holdfast run --hosts` with hosts that have networks of their own: each is a namespace with an ssh server.

here (10.77.0.254, a bridge) ---+--- a (10.77.0.1)
                                +--- b (10.77.0.2)
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import COMMAND, Holdfast
from tests.engines import Ssh, agent_of
from tests.promises import promise, proves
from tests.sshd import hosts
from tests.support import Mailbox

HERE = "10.77.0.254"
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}


class Network:
    """Namespaces of the test's own. The command runs in `here`."""

    def __init__(self) -> None:
        self._ip = support.need_tool("ip")
        self._mark = f"hf{os.getpid()}"
        self.here = f"{self._mark}here"
        made = subprocess.run([self._ip, "netns", "add", self.here], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
        self.ip("link", "set", "lo", "up")
        self.ip("link", "add", "bridge", "type", "bridge")
        self.ip("link", "set", "bridge", "up")
        self.ip("addr", "add", f"{HERE}/24", "dev", "bridge")
        for name, address in ADDRESSES.items():
            there = self.namespace(name)
            subprocess.run([self._ip, "netns", "add", there], check=True)
            self.ip("link", "add", f"to_{name}", "type", "veth", "peer", "name", "eth0", "netns", there)
            self.ip("link", "set", f"to_{name}", "master", "bridge", "up")
            for device in ("lo", "eth0"):
                self.ip("link", "set", device, "up", where=there)
            self.ip("addr", "add", f"{address}/24", "dev", "eth0", where=there)

    def namespace(self, name: str) -> str:
        return f"{self._mark}{name}"

    def ip(self, *words: str, where: str = "") -> None:
        subprocess.run([self._ip, "-n", where or self.here, *words], check=True)

    def within(self, name: str) -> tuple[str, ...]:
        """The words before a command that is to run in that namespace."""
        return (self._ip, "netns", "exec", name)

    def cut(self, name: str) -> None:
        self.ip("link", "set", f"to_{name}", "down")

    def close(self) -> None:
        for name in (self.here, *map(self.namespace, ADDRESSES)):
            subprocess.run([self._ip, "netns", "delete", name], check=False)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


@pytest.fixture
def ssh(network: Network, holdfast: Holdfast, mailbox: Mailbox, tmp_path: Path) -> Iterator[Ssh]:
    made = Ssh(holdfast, mailbox, tmp_path)
    settings = {name: holdfast.environment()[name] for name in ("TMPDIR", support.TEST_MARK)}
    with hosts(tmp_path / "ssh", {**settings, "HOME": str(tmp_path)}, is_apart=True) as made.servers:
        for name, address in ADDRESSES.items():
            made.servers.add(name, address, command=network.within(network.namespace(name)))
        made.command = (*network.within(network.here), COMMAND, "run", "--ssh", made.servers.ssh)
        yield made


def test_hosts_meet_at_an_address_that_all_can_reach(ssh: Ssh) -> None:
    ended = ssh.run("--hosts=b,a", ssh.holdfast.script("import os; print(os.environ['MASTER_ADDR'])"))
    assert (ended.code, sorted(ended.lines)) == (0, ["[a:1] 10.77.0.2", "[b:0] 10.77.0.2"]), ended


@proves("ssh.host-agent-killed-network")
def test_a_host_is_cut_off_in_the_middle_of_a_run(ssh: Ssh, network: Network) -> None:
    """It is lost to the run and to the command, and ends its workers and its agent by itself."""
    running = ssh.work("wait", options=("--hosts=a,b", "--nnodes=1:2", "--host-timeout=8s"))
    pids = ssh.pids(2)
    agent = agent_of(pids[1])
    network.cut("b")
    assert support.survivors([pids[1], agent]) == []
    lost = "holdfast: b is lost: it does not answer any more; the run goes on with 1 host"
    support.wait_until(lambda: lost in running.so_far().own, "the command has lost it, too")
    ssh.done.touch()
    ended = running.wait()
    assert ended.code == 0, ended
    assert ended.lines == ["[a:0] done 0"]


@proves("ssh.command-killed-stands-cut")
def test_the_command_is_cut_off_from_all_hosts(ssh: Ssh, network: Network) -> None:
    running = ssh.work("wait", options=("--hosts=a,b", "--host-timeout=8s"))
    pids = ssh.pids(2)
    network.ip("link", "set", "bridge", "down")
    network.ip("addr", "del", f"{HERE}/24", "dev", "bridge")
    network.ip("link", "set", "bridge", "up")  # The hosts still reach each other.
    assert ssh.mailbox.take(2) == ["signal SIGTERM"] * 2
    assert support.survivors(pids.values()) == []
    assert running.process.wait(support.DEADLINE_S) == 1
    assert "is lost: it does not answer any more" in running.so_far().last
    ssh.await_nothing(running)


@promise("ssh.loopback-address-hosts-refused: A loopback address between hosts is refused.")
def test_a_loopback_address_between_hosts_is_refused(ssh: Ssh, network: Network) -> None:
    ssh.servers.add("localhost", "127.0.0.1", command=network.within(network.here))
    script = ssh.holdfast.script("print('started')")
    ended = ssh.run("--hosts=localhost,b", script)
    assert (ended.code, ended.out) == (1, ""), ended
    assert ended.err.splitlines() == [
        "holdfast run: error: localhost was reached at 127.0.0.1, where b cannot reach it; give its name or address in "
        "the network, or say where the nodes meet, with --rdzv-endpoint HOST:PORT"
    ]
    # In another place it does no harm: the nodes meet at the first host.
    ended = ssh.run("--hosts=b,localhost", script)
    assert (ended.code, sorted(ended.lines)) == (0, ["[b:0] started", "[localhost:1] started"]), ended
    ended = ssh.run("--hosts=a,b", "--rdzv-endpoint=localhost:29400", script)
    problem = "the hosts cannot meet at localhost: on each of them that is the host itself"
    assert ended.last == f"holdfast run: error: {problem}"
