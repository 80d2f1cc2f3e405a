"""What holds for every test that starts processes: none of them is left when the test is over."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.rendezvous.etcd_server import EtcdServer
from tests import nodes, support


def _own_descendants() -> set[int]:
    """Python's own resource tracker, which lives as long as this process, does not count."""
    found = set()
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(each.cmdline()):
                found.add(each.pid)
    return found


@pytest.fixture
def scene(request: pytest.FixtureRequest, etcd: EtcdServer, tmp_path: Path) -> Iterator[nodes.Scene]:
    """A run on tcp, or as the parameter says."""
    endpoint = etcd.get_endpoint() if getattr(request, "param", "tcp") == "etcd" else ""
    with nodes.scene(tmp_path / uuid.uuid4().hex[:8], os.environ[support.TEST_MARK], etcd=endpoint) as stage:
        yield stage


@pytest.fixture(autouse=True)
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Looks for descendants of this process, and for orphans by a mark in their environment."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(support.TEST_MARK, mark)
    before = _own_descendants()
    yield
    left = support.survivors((_own_descendants() - before) | support.marked(mark), deadline_s=15)
    left = [pid for pid in left if support.alive(pid)]
    names = {}
    for pid in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            names[pid] = " ".join(psutil.Process(pid).cmdline())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind: {names}"
