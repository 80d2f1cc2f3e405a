"""The benchmark of many nodes still runs, and its light clients are nodes like any other."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.coordinators import coordinator

BENCH = Path(__file__).parent.parent.parent / "bench"


@pytest.fixture
def crowds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("crowd")


def test_a_crowd_forms_one_world(crowds: ModuleType, tmp_path: Path) -> None:
    async def form(port: int) -> set[int]:
        async with crowds.crowd("127.0.0.1", port, "run", 50) as formed:
            assert formed.formed_s > 0
            return set(formed.ranks)

    with coordinator(tmp_path) as server:
        assert asyncio.run(form(server.port)) == set(range(50))
        server.await_line("round 1 begins with 50 nodes")


def test_the_script_measures_and_prints_a_table() -> None:
    command = [sys.executable, str(BENCH / "many_nodes.py"), "--quick", "--only", "push"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    *_, row = done.stdout.splitlines()
    assert row.startswith("| kill -9 of a worker on one node to SIGTERM at a worker on another | ")
    assert "| at most 50 ms |" in row
