"""`make mutate` itself: its mutants are programs, each with one change, and the same for the same seed."""

from __future__ import annotations

import ast
import random

from tests import mutate


def test_mutants_are_programs_that_differ_from_the_source() -> None:
    for module, tests in mutate.TESTS.items():
        assert all((mutate.ROOT / test).is_file() for test in tests)
        places = mutate.places_of(module)
        assert places == mutate.places_of(module)
        original = ast.unparse(ast.parse((mutate.SOURCE / module).read_text()))
        for place in random.Random(0).sample(places, 5):
            mutant = mutate.mutant_at(*place)
            compile(mutant.source, module, "exec")
            assert mutant.source != original, str(mutant)
