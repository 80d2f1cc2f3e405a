"""`make mutate` itself: its mutants are programs, each with one change, and the same for the same seed."""

from __future__ import annotations

import ast
import random

from tests import mutate


def test_mutants_are_programs_that_differ_from_the_source() -> None:
    for module in ("agent/lifecycle.py", "process/spawner/server.py"):
        places = mutate.places_of(module)
        assert places == mutate.places_of(module)
        original = ast.unparse(ast.parse((mutate.SOURCE / module).read_text()))
        for place in random.Random(0).sample(places, 5):
            mutant = mutate.mutant_at(*place)
            compile(mutant.source, module, "exec")
            assert mutant.source != original, str(mutant)


def test_the_tests_of_a_module_are_those_that_import_it() -> None:
    found = mutate.tests_of("agent/ranks.py")
    assert {"tests/unit/test_ranks.py", "tests/properties/test_ranks_properties.py"} <= set(found)
    assert "tests/unit/test_procfs.py" not in found
    assert all((mutate.ROOT / test).is_file() for tests in mutate.OWNERS.values() for test in tests)
