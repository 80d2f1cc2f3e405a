"""`holdfast run --hosts` with hosts that have networks of their own: each is a namespace with an ssh server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import COMMAND, Holdfast
from tests.engines import Ssh, agent_of
from tests.network import HERE, Network
from tests.promises import promise, proves
from tests.sshd import hosts
from tests.support import Mailbox


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(("a", "b"))
    yield made
    made.close()


@pytest.fixture
def ssh(network: Network, holdfast: Holdfast, mailbox: Mailbox, tmp_path: Path) -> Iterator[Ssh]:
    made = Ssh(holdfast, mailbox, tmp_path)
    settings = {name: holdfast.environment()[name] for name in ("TMPDIR", support.TEST_MARK)}
    with hosts(tmp_path / "ssh", {**settings, "HOME": str(tmp_path)}, is_apart=True) as made.servers:
        for name, address in network.addresses.items():
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
