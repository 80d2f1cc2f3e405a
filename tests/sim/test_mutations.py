"""Each way of breaking the machines is noticed, by the rule that is there for it, within a bounded number of seeds."""

from __future__ import annotations

import pytest

from tests.sim.engine import Violation
from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.tcp_world import simulate

SEEDS_AT_MOST = 1000


def checker_of(seed: int) -> str:
    try:
        simulate(seed)
    except Violation as violation:
        return violation.checker
    return ""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_mutation_is_noticed(mutation: Mutation) -> None:
    with mutation.apply():
        noticed = next((seed for seed in range(SEEDS_AT_MOST) if checker_of(seed) in mutation.rules), None)
    assert noticed is not None, f"none of {SEEDS_AT_MOST} seeds objects: {mutation.name}"
    assert checker_of(noticed) == "", "without the mutation the same seed is fine"
