"""What comes of each scenario, word for word. With HOLDFAST_REGENERATE=1 in the environment the files are made anew;
then read the difference: it is what has changed for users."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.promises import promise, proves
from tests.sim.scenarios import SCENARIOS

GOLDEN = Path(__file__).parent / "golden"
IS_REGENERATING = os.environ.get("HOLDFAST_REGENERATE") == "1"


def transcript_of(name: str) -> str:
    tell = SCENARIOS[name]
    about = " ".join((tell.__doc__ or "").split())
    return f"{about}\n\n{tell()}\n"


@promise("nodes.admit-restart-newcomer-waits: With `--admit on-restart` a newcomer waits for the next restart.")
@promise("simulation.named-scenarios-produce: Named scenarios produce exactly the recorded transcript.")
@proves(
    "restarts.coordinator-replaced-backoff",
    "nodes.newcomers-arrive-admit-delay",
    "nodes.host-lost-second-time",
    "coordinator.node-keeps-lease-come",
    "cli.progress-limit-restarts-row",
)
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_scenario(name: str) -> None:
    path = GOLDEN / f"{name}.txt"
    told = transcript_of(name)
    if IS_REGENERATING:
        path.write_text(told)
    assert told.splitlines() == path.read_text().splitlines()


def test_there_is_no_file_without_a_scenario() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == SCENARIOS.keys()
