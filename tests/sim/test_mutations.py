"""Each way of breaking the machines is noticed, by the rule that is there for it, within a bounded number of seeds."""

from __future__ import annotations

import pytest

from tests.promises import promise, proves
from tests.sim.engine import Violation
from tests.sim.etcd_world import simulate
from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.scenarios import SCENARIOS

SEEDS_AT_MOST = 1000


def checker_of(seed: int) -> str:
    try:
        simulate(seed)
    except Violation as violation:
        return violation.checker
    return ""


@promise("simulation.seeds-scenario-detect: Seeds or a scenario detect each documented way of breaking the machines.")
@pytest.mark.parametrize("mutation", [each for each in MUTATIONS if each.rules], ids=lambda mutation: mutation.name)
def test_the_mutation_is_noticed(mutation: Mutation) -> None:
    first = mutation.first_seed + mutation.is_on_etcd  # Every other seed is on etcd.
    seeds = range(first, first + 2 * SEEDS_AT_MOST, 2)
    with mutation.apply():
        noticed = next((seed for seed in seeds if checker_of(seed) in mutation.rules), None)
    assert noticed is not None, f"none of {SEEDS_AT_MOST} seeds objects: {mutation.name}"
    assert checker_of(noticed) == "", "without the mutation the same seed is fine"


@proves("simulation.seeds-scenario-detect")
@pytest.mark.parametrize("mutation", [each for each in MUTATIONS if each.scenario], ids=lambda mutation: mutation.name)
def test_the_mutation_is_noticed_in_a_scenario(mutation: Mutation) -> None:
    told = SCENARIOS[mutation.scenario]()
    with mutation.apply():
        try:
            assert SCENARIOS[mutation.scenario]() != told
        except Violation:
            pass
