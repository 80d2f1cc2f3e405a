"""The benchmark of runs on etcd still runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent.parent / "bench"


def test_the_script_measures_and_prints_a_table() -> None:
    command = [sys.executable, str(BENCH / "etcd.py"), "--quick", "--only", "cost"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    *_, head, _, took, held = done.stdout.splitlines()
    assert head.startswith("| measure | etcd | tcp | etcd / tcp |")
    assert took.startswith("| one node, one trivial worker, start to end | ")
    assert held.startswith("| agent's resident memory | ")
