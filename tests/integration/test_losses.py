"""Runs that lose nodes again and again, with real agents: when they end, and who has to wait."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import nodes, support
from tests.nodes import Scene
from tests.promises import proves


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with nodes.scene(tmp_path / uuid.uuid4().hex[:8], os.environ[support.TEST_MARK]) as stage:
        yield stage


@proves("nodes.most-loss-limit-restarts")
def test_more_lost_nodes_than_allowed_end_the_run_for_good(scene: Scene) -> None:
    a = scene.start("a", "1:2", "--loss-limit", "0", "--max-restarts", "9")
    scene.await_world(1)
    b = scene.start("b", "1:2", "--loss-limit", "0", "--max-restarts", "9")
    scene.await_world(2)
    b.send(signal.SIGKILL)
    assert scene.ended() == {"a": 93, "b": -9}
    assert f"-{b.pid}-" in a.log
    assert "no restarts after lost nodes are allowed (--loss-limit 0)" in a.log


@proves("nodes.host-lost-second-time")
def test_a_host_that_is_lost_twice_waits_and_is_named(scene: Scene) -> None:
    scene.start("a", "1:2")
    last = scene.await_world(1)[0].round
    for name in ("b", "b-2"):
        lost = scene.start(name, "1:2")
        last = scene.await_world(2, after=last)[0].round
        lost.send(signal.SIGKILL)
        last = scene.await_world(1, after=last)[0].round
    again = scene.start("b-3", "1:2")
    again.await_line(r"this node stands by for \d+ s more, because host b was lost 2 times in the last hour")
    assert " s more, because host b was lost 2 times in the last hour" in scene.ask("status", scene.run_id)
    assert [life.node for life in scene.await_world(2, after=last)] == ["a", "b-3"]
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": -9, "b-2": -9, "b-3": 0}
