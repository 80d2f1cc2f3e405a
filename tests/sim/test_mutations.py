"""Each way of breaking the machines is noticed, by the rule that is there for it, within a bounded number of seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.engine import Violation
from tests.sim.etcd_mutations import ETCD_MUTATIONS
from tests.sim.etcd_world import simulate as simulate_etcd
from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.tcp_world import simulate as simulate_tcp

SEEDS_AT_MOST = 1000


def checker_of(seed: int, simulate: Callable[[int], object]) -> str:
    try:
        simulate(seed)
    except Violation as violation:
        return violation.checker
    return ""


def must_be_noticed(mutation: Mutation, simulate: Callable[[int], object]) -> None:
    seeds = range(mutation.first_seed, mutation.first_seed + SEEDS_AT_MOST)
    with mutation.apply():
        noticed = next((seed for seed in seeds if checker_of(seed, simulate) in mutation.rules), None)
    assert noticed is not None, f"none of {SEEDS_AT_MOST} seeds objects: {mutation.name}"
    assert checker_of(noticed, simulate) == "", "without the mutation the same seed is fine"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_mutation_is_noticed(mutation: Mutation) -> None:
    must_be_noticed(mutation, simulate_tcp)


@pytest.mark.parametrize("mutation", ETCD_MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_mutation_is_noticed_with_etcd(mutation: Mutation) -> None:
    must_be_noticed(mutation, simulate_etcd)
