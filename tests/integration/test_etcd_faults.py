"""Runs on an etcd cluster that loses members, or its quorum, and runs that lose the agent that leads."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.testing.etcd_server import EtcdCluster
from tests import nodes, support
from tests.nodes import SHORT_S, Life, Node, Scene

LONG_S = 60
UNDISTURBED = ("start", "connected")


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with support.unmarked():
        cluster = EtcdCluster()
    with cluster:
        yield cluster


@pytest.fixture
def scene(cluster: EtcdCluster, tmp_path: Path) -> Iterator[Scene]:
    mark, endpoints = os.environ[support.TEST_MARK], ",".join(cluster.endpoints)
    with nodes.scene(tmp_path / uuid.uuid4().hex[:8], mark, etcd=endpoints) as stage:
        yield stage


def await_age(scene: Scene, lives: list[Life], seconds: float) -> None:
    """Until each of these workers has lived for so long."""
    pids = {life.pid for life in lives}

    def is_old() -> bool:
        found = [life for life in scene.lives() if life.pid in pids]
        return all(life.last_seen_at - life.started_at > seconds * 1e9 for life in found)

    support.wait_until(is_old, f"workers of {seconds:g} s")


def age(lives: list[Life]) -> float:
    return max(life.last_seen_at - life.started_at for life in lives) / 1e9


def test_the_leader_of_etcd_is_killed_while_a_round_runs(scene: Scene, cluster: EtcdCluster) -> None:
    for name in "ab":
        scene.start(name, "2", "--max-restarts", "1", lease=8)
    first = scene.await_world(2)
    cluster.kill(cluster.leader())
    await_age(scene, first, age(scene.lives()) + 4.0)
    assert [life.events for life in scene.lives()] == [UNDISTURBED] * 2
    scene.order("exit 3", rank=1, round=1)
    assert {life.restarts for life in scene.await_world(2, after=1)} == {1}
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}


def test_the_leader_of_etcd_is_killed_while_a_round_forms(scene: Scene, cluster: EtcdCluster) -> None:
    a = scene.start("a", "2", lease=8)
    a.await_line("1/2 joined, waiting for 1")
    cluster.kill(cluster.leader())
    scene.start("b", "2", lease=8)
    assert {life.round for life in scene.await_world(2)} == {1}
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}


def lose_quorum(cluster: EtcdCluster) -> None:
    for number in (0, 1):
        cluster.pause(number)


def regain_quorum(cluster: EtcdCluster) -> None:
    for number in (0, 1):
        cluster.resume(number)


def test_without_a_quorum_workers_end_with_their_lease(scene: Scene, cluster: EtcdCluster) -> None:
    """Nobody can tell that from being cut off. Nothing is decided meanwhile, and nothing is charged."""
    agents = [scene.start(name, "2", lease=3) for name in "ab"]
    first = scene.await_world(2)
    lose_quorum(cluster)
    assert not support.survivors(life.pid for life in first)
    for agent in agents:
        agent.await_line("lost its place")
        agent.await_line("no etcd can be reached at")
        assert agent.is_running
    assert len(scene.lives()) == 2
    regain_quorum(cluster)
    second = scene.await_world(2, after=1)
    assert {life.restarts for life in second} == {0}
    scene.order("exit 0", round=second[0].round)
    assert scene.ended() == {"a": 0, "b": 0}


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


Fault = Callable[[EtcdCluster], None]
OUTAGES = [(lose_quorum, regain_quorum), (kill_all, restart_all)]


@pytest.mark.parametrize(("lose", "regain"), OUTAGES)
def test_an_outage_of_many_leases_and_longer_than_the_join_timeout(
    scene: Scene, cluster: EtcdCluster, lose: Fault, regain: Fault
) -> None:
    """No run is lost with it. It is told in a few lines and borne in peace; nothing is decided meanwhile, and what
    comes after it is not charged."""
    agents = [scene.start(name, "2", join_timeout=8, lease=SHORT_S) for name in "ab"]
    first = scene.await_world(2)
    for agent in agents:
        agent.await_line("started 1 worker")
    said_before = {agent: agent.log for agent in agents}
    lose(cluster)
    assert not support.survivors(life.pid for life in first)
    for agent in agents:
        agent.await_line("no etcd can be reached at")
    began, busy_s = time.monotonic(), [cpu_s(agent) for agent in agents]
    support.wait_until(lambda: time.monotonic() - began > 9, "four leases and more")
    took_s = time.monotonic() - began
    assert [cpu_s(agent) - before < 0.2 * took_s for agent, before in zip(agents, busy_s, strict=True)] == [True, True]
    for agent in agents:
        lines = agent.log.removeprefix(said_before[agent]).splitlines()
        assert sorted(line.split(":")[1] for line in lines) == [
            " no etcd can be reached at 127.0.0.1",
            " this node has lost its place, its workers are killed",
        ], agent.log
    assert len(scene.lives()) == 2
    regain(cluster)
    second = scene.await_world(2, after=1)
    assert {life.restarts for life in second} == {0}
    for agent in agents:
        agent.await_line("the etcd at .* is reached")
    scene.order("exit 0", round=second[0].round)
    assert scene.ended() == {"a": 0, "b": 0}


def test_an_outage_that_outlasts_the_patience(scene: Scene, cluster: EtcdCluster) -> None:
    agent = scene.start("a", "1", outage_timeout=4, lease=SHORT_S)
    scene.await_world(1)
    kill_all(cluster)
    agent.await_line(r"no etcd could be reached at \S+ within 4 s; the last attempt: .*: connection refused")
    assert agent.wait() not in (0, None)
    restart_all(cluster)


@pytest.mark.parametrize(("lose", "regain"), OUTAGES)
def test_an_outage_within_the_lease_is_not_missed(
    scene: Scene, cluster: EtcdCluster, lose: Fault, regain: Fault
) -> None:
    for name in "ab":
        scene.start(name, "2", "--max-restarts", "1", lease=30)
    first = scene.await_world(2)
    lose(cluster)
    await_age(scene, first, age(scene.lives()) + 3.0)
    regain(cluster)
    await_age(scene, first, age(scene.lives()) + 2.0)
    assert [life.events for life in scene.lives()] == [UNDISTURBED] * 2
    scene.order("exit 3", rank=0, round=1)
    assert {life.restarts for life in scene.await_world(2, after=1)} == {1}
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}


def test_all_of_etcd_is_down_while_a_round_forms(scene: Scene, cluster: EtcdCluster) -> None:
    """For longer than the lease of the one who waits. Another one comes meanwhile."""
    a = scene.start("a", "2", lease=SHORT_S)
    a.await_line("1/2 joined, waiting for 1")
    kill_all(cluster)
    b = scene.start("b", "2", lease=SHORT_S)
    for agent in (a, b):
        agent.await_line("no etcd can be reached at")
    restart_all(cluster)
    assert {life.round for life in scene.await_world(2)} == {1}
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}


def test_the_agent_that_leads_is_killed(scene: Scene, cluster: EtcdCluster) -> None:
    agents = {name: scene.start(name, "1:3", last_call=LONG_S, lease=SHORT_S) for name in "abc"}
    scene.await_world(3)
    leader = scene.await_leader()
    leader.send(signal.SIGKILL)
    second = scene.await_world(2, after=1)
    assert {life.restarts for life in second} == {0}
    assert scene.await_leader(other_than=leader) is not leader
    scene.order("exit 0", round=second[0].round)
    codes = scene.ended()
    assert codes.pop(leader.name) == -9
    assert set(codes.values()) == {0}
    for name in codes:
        assert re.search(rf"-{leader.pid}-\S+ is lost", agents[name].log), agents[name].log


def test_the_agent_that_leads_is_killed_while_a_round_forms(scene: Scene, cluster: EtcdCluster) -> None:
    """What the others have said is still there; the next leader goes on with it."""
    a = scene.start("a", "3", lease=SHORT_S)
    a.await_line("1/3 joined")
    leader = scene.await_leader()
    assert leader is a
    b = scene.start("b", "3", lease=SHORT_S)
    b.await_line("2/3 joined")
    a.send(signal.SIGKILL)
    for name in "cd":
        scene.start(name, "3", lease=SHORT_S)
    assert {life.node for life in scene.await_world(3)} == {"b", "c", "d"}
    scene.order("exit 0")
    assert scene.ended() == {"a": -9, "b": 0, "c": 0, "d": 0}


def test_the_agent_that_leads_is_frozen_and_comes_back(scene: Scene, cluster: EtcdCluster) -> None:
    for name in "ab":
        scene.start(name, "1:2", last_call=LONG_S, lease=SHORT_S)
    first = scene.await_world(2)
    leader = scene.await_leader()
    leader.send(signal.SIGSTOP)
    second = scene.await_world(1, after=1)
    assert not support.alive(next(life.pid for life in first if life.node == leader.name))
    other = scene.await_leader(other_than=leader)
    leader.send(signal.SIGCONT)
    third = scene.await_world(2, after=second[0].round)
    assert scene.leader() is other
    assert "lost its place" in leader.log
    assert {life.restarts for life in third} == {0}
    scene.order("exit 0", round=third[0].round)
    assert scene.ended() == {"a": 0, "b": 0}
