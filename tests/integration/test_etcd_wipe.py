"""Runs on an etcd that loses all its data, and names that are used again."""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    """Kills all members and starts them again at the same ports, with nothing."""
    with support.unmarked():
        for number, member in enumerate(cluster._members):
            cluster.kill(number)
            shutil.rmtree(member.home)
        cluster.restart(*range(len(cluster.pids)))


@pytest.fixture
def scene(cluster: EtcdCluster, tmp_path: Path) -> Iterator[Scene]:
    mark, endpoints = os.environ[support.TEST_MARK], ",".join(cluster.endpoints)
    with nodes.scene(tmp_path / uuid.uuid4().hex[:8], mark, etcd=endpoints) as stage:
        yield stage


SHORT = {"leader_lease": 2, "lease": 3}


def test_a_run_outlives_the_loss_of_all_data(scene: Scene, cluster: EtcdCluster) -> None:
    """Rounds and restarts go on from what the nodes remember, whatever is stopped, and nothing is charged."""
    for name in "ab":
        scene.start(name, "2", "--max-restarts", "2", **SHORT)
    scene.await_world(2)
    scene.order("exit 3", rank=1, round=1)
    scene.await_world(2, after=1)
    before = scene.leader()
    lose_data(cluster)
    support.wait_until(lambda: (found := scene.leader()) and before and found.term > before.term, "a later term")
    scene.order("exit 3", rank=1, restarts=1)
    last = scene.await_world(2, after=max(life.round for life in scene.lives(restarts=1)))
    assert {life.restarts for life in last} == {2}
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}


def test_nodes_that_wait_for_others_go_on_waiting(scene: Scene, cluster: EtcdCluster) -> None:
    """Nobody had a place yet. Who comes afterwards is met by whoever was there before."""
    a = scene.start("a", "2", **SHORT)
    a.await_line("1 of 2 nodes joined, waiting for 1")
    lose_data(cluster)
    scene.start("b", "2", **SHORT)
    assert {life.round for life in scene.await_world(2)} == {1}
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}


def test_a_node_that_was_away_hears_how_its_run_ended(scene: Scene) -> None:
    """It was lost, so the run is remembered for `close_linger`. It ends as the others did, and starts nothing."""
    for name in "ab":
        scene.start(name, "1:2", last_call=60, close_linger=5, **SHORT)
    scene.await_world(2)
    host = scene.host()
    away, other = sorted(scene.nodes, key=lambda node: node is host)
    support.halt(away.pid)
    (alone,) = scene.await_world(1, after=1)
    scene.order("exit 0")
    assert other.wait() == 0
    away.send(signal.SIGCONT)
    assert scene.ended() == {"a": 0, "b": 0}
    assert {life.round for life in scene.lives()} == {1, alone.round}


def test_a_name_is_free_when_the_only_node_has_left(scene: Scene) -> None:
    """Before any round was formed. The next comes with other settings, and need not wait."""
    a = scene.start("a", "2", **SHORT)
    a.await_line("1 of 2 nodes joined, waiting for 1")
    a.send(signal.SIGTERM)
    a.wait()
    scene.nodes.clear()
    scene.start("b", "1", leader_lease=3, lease=4)
    scene.await_world(1)
    scene.order("exit 0")
    assert scene.ended() == {"b": 0}
