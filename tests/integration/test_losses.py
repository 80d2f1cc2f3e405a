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
