"""Runs on etcd whose coordinator is killed or frozen, and whose etcd loses members, its quorum, or its data."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.rendezvous.etcd.gateway import EtcdRefused
from holdfast.rendezvous.etcd_server import EtcdServer
from tests import nodes, support
from tests.etcd_cluster import EtcdCluster
from tests.guarded_etcd import leader_of
from tests.nodes import Life, Node, Scene
from tests.promises import promise, proves

LONG_S = 60
UNDISTURBED = ("start", "connected")

# Short leases, where a test waits for their end; long ones, where it says that nothing happens.
SHORT = {"leader_lease": 2, "lease": 3}
LONG = {"leader_lease": 10, "lease": 12, "reconnect_grace": 5, "drop_timeout": 8}


def at(endpoints: list[str], tmp_path: Path) -> Iterator[Scene]:
    mark = os.environ[support.TEST_MARK]
    with nodes.scene(tmp_path / uuid.uuid4().hex[:8], mark, etcd=",".join(endpoints)) as stage:
        yield stage


@pytest.fixture
def scene(etcd: EtcdServer, tmp_path: Path) -> Iterator[Scene]:
    """On an etcd that is always there."""
    yield from at([etcd.get_endpoint()], tmp_path)


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with support.unmarked():
        cluster = EtcdCluster()
    with cluster:
        yield cluster


@pytest.fixture
def clustered(cluster: EtcdCluster, tmp_path: Path) -> Iterator[Scene]:
    yield from at(cluster.endpoints, tmp_path)


def await_age(scene: Scene, lives: list[Life], seconds: float) -> None:
    """Until each of these workers has lived for so long."""
    pids = {life.pid for life in lives}

    def is_old() -> bool:
        found = [life for life in scene.lives() if life.pid in pids]
        return all(life.last_seen_at - life.started_at > seconds * 1e9 for life in found)

    support.wait_until(is_old, f"workers of {seconds:g} s")


def age(lives: list[Life]) -> float:
    return max(life.last_seen_at - life.started_at for life in lives) / 1e9


def fail_once_and_end(scene: Scene, after: int = 1) -> None:
    """The coordinator that is there now knows what it must: the restart is charged, and all end."""
    assert [life.events for life in scene.lives(round=after)] == [UNDISTURBED] * len(scene.lives(round=after))
    scene.order("exit 3", rank=0, round=after)
    assert {life.restarts for life in scene.await_world(2, after=after)} == {1}
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}


@promise("""etcd-runs.loss-once-costs-round: The loss of both at once costs a round and no restart, after at most two
    leader leases and one node lease.""")
def test_the_coordinator_and_its_agent_are_lost_at_once(scene: Scene) -> None:
    """The others wait for the leader's lease; the successor for a node's and a leader's. Nothing is charged."""
    for name in "abc":
        scene.start(name, "1:3", last_call=LONG_S, **SHORT)
    scene.await_world(3)
    coordinator, host = scene.await_coordinator(), scene.host()
    support.halt(host.pid)  # It must not see the coordinator die.
    began = time.monotonic()
    os.kill(coordinator, signal.SIGKILL)
    host.send(signal.SIGKILL)
    second = scene.await_world(2, after=1)
    took_s = time.monotonic() - began
    assert took_s < SHORT["leader_lease"] + SHORT["lease"] + SHORT["leader_lease"] + 5
    assert {life.restarts for life in second} == {0}
    scene.order("exit 0", round=second[0].round)
    codes = scene.ended()
    assert codes.pop(host.name) == -9
    assert set(codes.values()) == {0}


@promise("""etcd-runs.agent-elected-coordinator: One agent is elected. Its coordinator serves for 0.9 of its lease,
    writes only while the leader key is its own, and tells nodes only what it has written. A coordinator that was frozen
    past its lease resigns when it resumes, and sends nothing before that.""")
def test_a_coordinator_that_is_frozen_past_its_lease_and_thawed(scene: Scene) -> None:
    """Another one is elected meanwhile. When it wakes up it finds that its time is over, says no word, and ends. The
    nodes' leases are the shorter ones, so that the workers are gone before another coordinator can be elected."""
    for name in "ab":
        scene.start(name, "2", leader_lease=3, lease=2)
    scene.await_world(2)
    frozen, before = scene.await_coordinator(), scene.leader()
    support.halt(frozen)
    second = scene.await_world(2, after=1)
    after = scene.leader()
    assert before
    assert after
    assert after.term > before.term
    os.kill(frozen, signal.SIGCONT)
    assert not support.survivors([frozen])
    await_age(scene, second, age(scene.lives(round=second[0].round)) + 1.0)
    assert scene.leader() == after
    assert {life.restarts for life in second} == {0}
    scene.order("exit 0", round=second[0].round)
    assert scene.ended() == {"a": 0, "b": 0}
    assert {life.round for life in scene.lives()} == {1, second[0].round}


@promise("""etcd-runs.workers-keep-running-etcd: Workers keep running when etcd loses members one after the other, or
    all of them or its quorum for less than 0.9 of the leader lease minus the time between two renewals.""")
def test_members_of_etcd_are_killed_and_frozen_one_after_the_other(clustered: Scene, cluster: EtcdCluster) -> None:
    for name in "ab":
        clustered.start(name, "2", "--max-restarts", "1", **LONG)
    first = clustered.await_world(2)
    leader = leader_of(cluster)
    for number in (leader, (leader + 1) % 3):
        cluster.kill(number)
        await_age(clustered, first, age(clustered.lives()) + 2.0)
        with support.unmarked():
            cluster.restart(number)
    frozen = leader_of(cluster)
    cluster.pause(frozen)
    await_age(clustered, first, age(clustered.lives()) + 2.0)
    cluster.resume(frozen)
    fail_once_and_end(clustered)


def freeze_leader(cluster: EtcdCluster, seconds: float) -> None:
    """Until there has been another one for so long."""
    frozen = leader_of(cluster)
    cluster.pause(frozen)
    support.wait_until(lambda: leader_of(cluster) != frozen, "another leader of etcd")
    until = time.monotonic() + seconds
    support.wait_until(lambda: time.monotonic() > until, "some time to pass")
    cluster.resume(frozen)


@promise("""etcd-runs.etcd-leader-frozen-ends: If an etcd leader was frozen and ends leases that were renewed (etcd
    issue 15247), that costs no more than such an outage.""")
def test_the_leader_of_etcd_is_frozen_past_the_leases(clustered: Scene, cluster: EtcdCluster) -> None:
    """When it wakes up it may end leases that were renewed at its successor (etcd #15247). The coordinator whose key
    vanishes so steps down; what runs by then is found by the next one, or is gone before that seals anything."""
    for name in "ab":
        clustered.start(name, "2", **SHORT)
    clustered.await_world(2)
    for _ in range(2):
        freeze_leader(cluster, 1.5 * SHORT["leader_lease"])
    clustered.await_coordinator()
    clustered.order("exit 0")
    assert clustered.ended() == {"a": 0, "b": 0}
    assert {life.restarts for life in clustered.lives()} == {0}


# All of etcd.


EVERYBODY = (0, 1, 2)


def kill_all(cluster: EtcdCluster) -> None:
    for number in EVERYBODY:
        cluster.kill(number)


def restart_all(cluster: EtcdCluster) -> None:
    with support.unmarked():
        cluster.restart(*EVERYBODY)


def cpu_s(node: Node) -> float:
    times = psutil.Process(node.pid).cpu_times()
    return times.user + times.system


@proves("etcd-runs.workers-keep-running-etcd")
def test_an_outage_within_the_leaders_lease_is_not_noticed(clustered: Scene, cluster: EtcdCluster) -> None:
    """Less than 0.9 of it, less the time between two renewals. The nodes do not talk to etcd at all."""
    for name in "ab":
        clustered.start(name, "2", "--max-restarts", "1", **{**LONG, "leader_lease": 20})
    first = clustered.await_world(2)
    kill_all(cluster)
    await_age(clustered, first, age(clustered.lives()) + 3.0)
    restart_all(cluster)
    await_age(clustered, first, age(clustered.lives()) + 1.0)
    fail_once_and_end(clustered)


@promise("""etcd-runs.longer-outage-longer-join: After a longer outage, even one longer than the join timeout, the run
    continues and nothing is charged. It is reported in two lines, after a minute and then once an hour, and etcd is not
    asked in a busy loop, until the outage timeout.""")
def test_an_outage_of_many_leases_and_longer_than_the_join_timeout(clustered: Scene, cluster: EtcdCluster) -> None:
    """No run is lost with it. It is told in a few lines and borne in peace; nothing is decided meanwhile, and what
    comes after it is not charged."""
    agents = [clustered.start(name, "2", join_timeout=8, **SHORT) for name in "ab"]
    first = clustered.await_world(2)
    for agent in agents:
        agent.await_line("started 1 worker")
    said_before = {agent: agent.log for agent in agents}
    lost_at = time.monotonic()
    for number in (0, 1):  # The quorum.
        cluster.pause(number)
    assert not support.survivors(life.pid for life in first)
    for agent in agents:
        agent.await_line("cannot reach etcd")
    began, busy_s = time.monotonic(), [cpu_s(agent) for agent in agents]
    until = max(lost_at + 9, began + 3)
    support.wait_until(lambda: time.monotonic() > until, "four leases of the leader, and the join timeout")
    took_s = time.monotonic() - began
    assert [cpu_s(agent) - before < 0.2 * took_s for agent, before in zip(agents, busy_s, strict=True)] == [True, True]
    for agent in agents:
        lines = agent.log.removeprefix(said_before[agent]).splitlines()
        assert sorted(line.split(":")[1] for line in lines) == [
            " cannot reach etcd 127.0.0.1",
            " this node has lost its place, its workers are killed",
        ], agent.log
    assert len(clustered.lives()) == 2
    for number in (0, 1):
        cluster.resume(number)
    second = clustered.await_world(2, after=1)
    assert {life.restarts for life in second} == {0}
    for agent in agents:
        agent.await_line("reached etcd")
    clustered.order("exit 0", round=second[0].round)
    assert clustered.ended() == {"a": 0, "b": 0}


@pytest.fixture
def small() -> Iterator[EtcdServer]:
    with support.unmarked():
        server = EtcdServer(options=["--quota-backend-bytes=8388608"])
        server.start()
    with server:
        yield server


def fill(server: EtcdServer) -> None:
    with server.get_client() as client, contextlib.suppress(EtcdRefused):
        for number in range(100):
            client.put(b"junk%d" % number, bytes(1 << 20))


@proves("etcd-runs.etcd-refuses-coordinator")
def test_an_etcd_that_has_no_space_left(small: EtcdServer, tmp_path: Path) -> None:
    """The next write of the coordinator is refused, for good: it steps down, and every node says once what etcd said.
    Nodes try to start another one, in no hurry, and the run ends with that reason."""
    for scene in at([small.get_endpoint()], tmp_path):
        agents = [scene.start(name, "2", "--max-restarts", "3", outage_timeout=8, **SHORT) for name in "ab"]
        scene.await_world(2)
        fill(small)
        scene.order("exit 3", rank=0, round=1)
        why = r"etcd refuses to store the run's memory: etcd at \S+: mvcc: database space exceeded"
        for agent in agents:
            agent.await_line(f"the coordinator steps down: {why}")
            agent.await_line(f"no coordinator could go on within 8 s: {why}")
            assert agent.wait() == 1
            assert len(re.findall("steps down", agent.log)) == 1
        assert len(scene.lives()) == 2


def lose_data(cluster: EtcdCluster) -> None:
    """Kills all members and starts them again at the same ports, with nothing."""
    kill_all(cluster)
    for member in cluster.members:
        shutil.rmtree(member._home)
    restart_all(cluster)


@promise("""etcd-runs.run-survives-etcd-loses: A run survives an etcd that loses all its data: rounds and restarts
    continue from what the nodes remember, uncharged. The same holds if only the memory is lost.""")
def test_a_run_outlives_the_loss_of_all_data(clustered: Scene, cluster: EtcdCluster) -> None:
    """Rounds and restarts go on from what the nodes remember, whatever is stopped, and nothing is charged."""
    for name in "ab":
        clustered.start(name, "2", "--max-restarts", "2", **SHORT)
    clustered.await_world(2)
    clustered.order("exit 3", rank=1, round=1)
    clustered.await_world(2, after=1)
    before = clustered.leader()
    lose_data(cluster)
    support.wait_until(lambda: (found := clustered.leader()) and before and found.term > before.term, "a later term")
    clustered.order("exit 3", rank=1, restarts=1)
    clustered.wait_for(lambda: len(clustered.lives(restarts=2)) >= 2, "the last restart, in whatever round it is")
    clustered.order("exit 0")
    assert clustered.ended() == {"a": 0, "b": 0}
