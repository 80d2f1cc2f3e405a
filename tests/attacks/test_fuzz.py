"""The stateful fuzzer for a while; `python -m tests.attacks.fuzz` runs it for as long as one likes."""

from __future__ import annotations

import os

import pytest

from tests import support
from tests.attacks import fuzz
from tests.coordinators import CoordinatorProcess
from tests.promises import promise

SECONDS = float(os.environ.get("HOLDFAST_FUZZ_SECONDS", "20" if support.is_test_all() else "8"))
SEED = int(os.environ.get("HOLDFAST_FUZZ_SEED", "17"))


@promise("""coordinator.honest-nodes-served-clients: Honest nodes are served while other clients send random, truncated,
    oversized and slow bytes.""")
@pytest.mark.timeout(SECONDS + 180)
def test_an_honest_run_finishes_among_hostile_peers(server: CoordinatorProcess) -> None:
    figures = fuzz.attack(server, SECONDS, SEED)
    assert figures["newcomers"] > 3
    assert figures["hostile acts"] > 200
