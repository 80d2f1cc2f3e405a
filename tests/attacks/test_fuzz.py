"""The stateful fuzzer for a while; `python -m tests.attacks.fuzz` runs it for as long as one likes."""

from __future__ import annotations

import os

import pytest

from tests.attacks import fuzz
from tests.coordinators import CoordinatorProcess

SECONDS = float(os.environ.get("HOLDFAST_FUZZ_SECONDS", "20"))
SEED = int(os.environ.get("HOLDFAST_FUZZ_SEED", "17"))


@pytest.mark.timeout(SECONDS + 180)
def test_an_honest_run_finishes_among_hostile_peers(server: CoordinatorProcess) -> None:
    figures = fuzz.attack(server, SECONDS, SEED)
    assert figures["newcomers"] > 3
    assert figures["hostile acts"] > 200
