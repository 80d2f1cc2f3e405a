"""Every seed is a run of its own, with faults that nobody has thought of. `make sim SEEDS=100000` for many more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.promises import promise, proves
from tests.sim.__main__ import failure_of
from tests.sim.engine import Violation
from tests.sim.etcd_world import simulate
from tests.sim.faults import SLOWEST
from tests.sim.mutations import MUTATIONS
from tests.sim.world import FakeWorld
from tests.support import is_test_all

CHUNKS = 20 if is_test_all() else 8
SEEDS_IN_A_CHUNK = 50


@promise("""simulation.ranks-dense-unique-agreed: Ranks are dense, unique and agreed. No two worlds have one round.
    Workers of two rounds or two worlds are never alive at once. Sizes are within bounds. Rounds only rise. Restarts
    stay within the budget, and membership changes are free, within the limit for lost nodes. An ended run stays ended.
    All nodes learn one outcome with one cause. This holds at one endpoint, and on etcd with a coordinator that
    moves.""")
@promise("""simulation.snapshot-is-the-newest: All ranks of a round load the same snapshot that was committed, and it is
    the newest that all of them could load of what their nodes held when they joined.""")
@promise("""simulation.etcd-holds-coordinators: On etcd the same holds when coordinators are killed, frozen past their
    leases, cut off from etcd or lost with their hosts, when etcd loses its quorum, has no space left, ends a lease
    early or loses all its data, and when requests are late or their outcome is unknown.""")
@proves("nodes.newcomers-arrive-admit-delay", "nodes.most-loss-limit-restarts", "etcd-runs.etcd-refuses-coordinator")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_seeds(chunk: int) -> None:
    for seed in range(chunk * SEEDS_IN_A_CHUNK, (chunk + 1) * SEEDS_IN_A_CHUNK):
        failure = failure_of(seed)
        if failure:
            pytest.fail(failure, pytrace=False)


def test_a_seed_says_all_that_there_is_to_say() -> None:
    """Chance, time and order: a seed that failed once fails again, and in the same way."""
    first, second = simulate(5), simulate(5)
    assert first.profile == second.profile
    assert first.engine.transcript.text(with_routine=True) == second.engine.transcript.text(with_routine=True)


def test_a_seed_that_fails_tells_its_story_and_how_to_see_it_again() -> None:
    mutation = next(each for each in MUTATIONS if each.name == "every node is its own master")
    with mutation.apply():
        text = next(filter(None, map(failure_of, range(20))))
    seed = int(text.split()[1])
    assert "ranks_agree:" in text
    assert f"python -m tests.sim {seed} --verbose" in text
    assert "Sealed(" in text


def test_a_seed_can_be_seen_from_the_command_line() -> None:
    command = [sys.executable, "-m", "tests.sim", "5", "--verbose"]
    root = Path(__file__).parent.parent.parent
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert "nothing went wrong" in shown.stdout
    assert simulate(5).engine.transcript.text() in shown.stdout


def test_newcomers_stay_away_until_a_coordinator_without_memory_has_waited() -> None:
    """The documented exception: nodes that know nothing of a run whose memory was lost. One that is started before a
    coordinator has waited for a lease may meet the next coordinator first, also if the one before it died meanwhile."""
    world = FakeWorld(0)
    wait_s = world.profile.settings.lease_s / SLOWEST
    world.lose_memory()
    for waited_s in (0.9 * wait_s, 1.1 * wait_s):
        world.start_coordinator()
        world.engine.run_until(world.engine.now + waited_s)
        assert world.coordinator is not None
        world.coordinator.crash()
        world.engine.run_until(world.engine.now + 0.2 * wait_s)
        world.start_agent(world.add_host())
        assert (world.hosts[-1].agent is None) == (waited_s < wait_s)


def test_a_violation_names_its_rule() -> None:
    assert Violation("rounds_rise", "round 2 after round 3").checker == "rounds_rise"
