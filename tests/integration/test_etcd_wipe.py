"""What is lost and what is left: an etcd that is empty all at once, nodes that come late, names that are used again."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from holdfast.rendezvous.elected_words import Write
from holdfast.rendezvous.etcd_leadership import Leadership, Office
from holdfast.rendezvous.keyspace import Keyspace

from holdfast.testing.etcd_server import EtcdCluster
from tests import nodes, support
from tests.nodes import Scene


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with support.unmarked():
        cluster = EtcdCluster(1)
    with cluster:
        yield cluster


def lose_data(cluster: EtcdCluster) -> None:
    with support.unmarked():
        cluster.lose_data()


@pytest.fixture
def scene(cluster: EtcdCluster, tmp_path: Path) -> Iterator[Scene]:
    mark, endpoints = os.environ[support.TEST_MARK], ",".join(cluster.endpoints)
    with nodes.scene(tmp_path / uuid.uuid4().hex[:8], mark, etcd=endpoints) as stage:
        yield stage


def test_a_run_outlives_the_loss_of_all_data(scene: Scene, cluster: EtcdCluster) -> None:
    """Rounds and restarts go on from what the nodes remember, and nothing is charged: no restart is left."""
    agents = [scene.start(name, "2", "--max-restarts", "1", lease=3) for name in "ab"]
    scene.await_world(2)
    scene.order("exit 3", rank=1, round=1)
    second = scene.await_world(2, after=1)
    lose_data(cluster)
    for agent in agents:
        agent.await_line("lost its place")
    third = scene.await_world(2, after=2)
    assert not support.survivors(life.pid for life in second)
    assert {(life.round, life.restarts) for life in third} == {(3, 1)}
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}


def test_nodes_that_wait_for_others_go_on_waiting(scene: Scene, cluster: EtcdCluster) -> None:
    """Nobody had a place yet. Who comes afterwards is met by whoever was there before."""
    a = scene.start("a", "2", lease=3)
    a.await_line("1/2 joined, waiting for 1")
    lose_data(cluster)
    scene.start("b", "2", lease=3)
    assert {life.round for life in scene.await_world(2)} == {1}
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}


def test_a_node_that_was_away_hears_how_its_run_ended(scene: Scene) -> None:
    """By then nothing else is left of the run. It ends as the others did, and starts nothing."""
    for name in "ab":
        scene.start(name, "1:2", lease=2, close_linger=1, last_call=60)
    scene.await_world(2)
    led = scene.await_leader()
    away, other = sorted(scene.nodes, key=lambda node: node is led)
    support.halt(away.pid)
    (alone,) = scene.await_world(1, after=1)
    scene.order("exit 0")
    assert other.wait() == 0
    support.wait_until(lambda: not scene.keys(), "the end of the run's keys")
    away.send(signal.SIGCONT)
    assert scene.ended() == {"a": 0, "b": 0}
    assert {life.round for life in scene.lives()} == {1, alone.round}


def test_a_name_is_free_when_the_only_node_has_left(scene: Scene) -> None:
    """Before any round was formed. The next comes with other settings, and need not wait."""
    a = scene.start("a", "2", lease=3)
    a.await_line("1/2 joined, waiting for 1")
    a.send(signal.SIGTERM)
    a.wait()
    scene.nodes.clear()
    scene.start("b", "1", lease=4)
    scene.await_world(1)
    scene.order("exit 0")
    assert scene.ended() == {"b": 0}


def test_what_was_told_to_a_lost_node_goes_with_it(scene: Scene) -> None:
    for name in "ab":
        scene.start(name, "1:2", lease=2)
    scene.await_world(2)
    lost = next(node for node in scene.nodes if node is not scene.await_leader())
    lost.process.kill()
    scene.await_world(1, after=1)

    def told() -> list[str]:
        keys = scene.keys()
        return [key for key in keys if key.startswith("told/") and f"-{lost.pid}-" in key]

    support.wait_until(lambda: not told(), "the end of what the lost node was told")
    lost.wait()
    scene.nodes.remove(lost)
    scene.order("exit 0")
    scene.ended()


def test_a_term_that_comes_again_is_not_that_of_the_leader_before(cluster: EtcdCluster) -> None:
    """An etcd that has lost its data counts from the beginning, so the next leader may get the same number."""
    keys = Keyspace("/holdfast", "again")
    with cluster.get_client() as client:
        lease, another = client.grant_lease(60), client.grant_lease(60)
        term = client.put(keys.leader, b"a", lease)
        for holder, has_held in ((another, False), (lease, True)):
            leadership = Leadership(client, keys, Office(term, holder), 5, 5)
            leadership.load()
            assert leadership.write(Write(1, term, b"run", ())) is has_held
            assert (client.get(keys.run) is not None) is has_held
