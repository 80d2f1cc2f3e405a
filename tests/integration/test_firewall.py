"""What a firewall between a node and its coordinator does, in a network namespace of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import support

ROOT = Path(__file__).parent.parent.parent
NAMESPACE = ["unshare", "--map-root-user", "--net"]


@pytest.fixture(autouse=True)
def _has_namespaces() -> None:
    support.need_tools("unshare", "ip", "nft")
    tried = subprocess.run(
        [*NAMESPACE, "nft", "add", "table", "ip", "test"], capture_output=True, text=True, timeout=30
    )
    if tried.returncode != 0:
        pytest.skip(f"no network namespace with a firewall can be made here: {tried.stderr.strip()}")


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        ("drop", "the workers are gone"),
        ("reject with icmp type port-unreachable", "the workers are gone"),
        # The documented limit: nothing tells such a firewall from a coordinator process that is down.
        ("reject with tcp reset", "the workers may live"),
    ],
)
def test_what_a_firewall_does_to_the_workers_behind_it(tmp_path: Path, verdict: str, expected: str) -> None:
    """The other node runs a round without the one behind the firewall, whose workers should be gone by then."""
    command = [*NAMESPACE, sys.executable, "-m", "tests.programs.firewall", str(tmp_path), verdict]
    ended = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.strip()) == (0, expected), ended.stderr
