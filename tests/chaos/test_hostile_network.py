"""A short campaign on each side, with a new seed each time, which a failure names. `make chaos` is the long form."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests import support
from tests.chaos.campaign import carry_out
from tests.chaos.sides import SIDES, Side
from tests.promises import promise

TROUBLE_S = 45.0


@pytest.mark.parametrize("side", SIDES, ids=str)
@promise("""nodes.hostile-network: Agents, workers, spawners and coordinators are killed and frozen, links cut both ways
    and one way, packets lost and late, disks filled, clocks set wrong and etcd's members killed: the job ends with
    exactly the result of an undisturbed run, with snapshots and without, workers of two worlds are never alive at once,
    a node that comes back after the end runs nothing again, and no process is left.""")
def test_a_job_survives_a_hostile_network(side: Side, tmp_path: Path) -> None:
    support.leave_to_test_all("a campaign of faults in namespaces")
    seed = random.SystemRandom().randrange(1 << 24)
    print(f"seed {seed}: python -m tests.chaos --side '{side}' --seed {seed} --seconds {TROUBLE_S:g}")
    run = carry_out(tmp_path / "run", side, seed, TROUBLE_S)
    assert run.counted["faults"] > 10
