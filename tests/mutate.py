"""Small changes to the pure modules and those that own processes, each of which a test must notice: `make mutate`.

    python -m tests.mutate --count 60 --seed 1 --jobs 2

A mutant is a module with one change: a comparison flipped, `and` for `or`, a number or truth value changed, an `if`
negated, a statement removed. Of all mutants of the modules in `TESTS` the seed draws `--count`. Each is put into a copy
of the source, never into the source itself, and the tests of its module run against it, until one fails. A mutant that
no test notices survives: either a test is missing, or the change makes no difference. Those of the second kind are
explained in docs/mutations.md; any other makes the exit status 1.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "holdfast"
EXPLAINED = ROOT / "docs" / "mutations.md"

# A mutant may loop for ever; that is noticed, too.
TIMEOUT_S = 120

TESTS = {
    "agent/lifecycle.py": ("tests/unit/test_lifecycle.py", "tests/properties/test_lifecycle.py"),
    "agent/ranks.py": ("tests/unit/test_ranks.py", "tests/properties/test_ranks_properties.py"),
    "failures/cause.py": ("tests/unit/test_cause.py", "tests/properties/test_report_properties.py"),
    "failures/report.py": ("tests/unit/test_report.py", "tests/properties/test_report_properties.py"),
    "hangs/policy.py": ("tests/unit/test_hang_policy.py", "tests/properties/test_hang_properties.py"),
    "hangs/compare.py": ("tests/unit/test_stack_compare.py",),
    "procfs.py": ("tests/unit/test_procfs.py", "tests/integration/test_ownership.py"),
    "process/spawner/wire.py": (
        "tests/unit/test_spawner_wire.py",
        "tests/unit/test_spawner.py",
        "tests/integration/test_ownership.py",
    ),
    "process/spawner/server.py": ("tests/unit/test_spawner.py", "tests/integration/test_ownership.py"),
    "rendezvous/coordinator/kv_store.py": ("tests/unit/test_kv_store.py", "tests/properties/test_kv_store.py"),
    "rendezvous/etcd/election.py": ("tests/unit/test_election.py", "tests/sim/test_election_rules.py"),
    "rendezvous/membership/formation.py": (
        "tests/unit/test_formation.py",
        "tests/unit/test_phases.py",
        "tests/sim/test_golden.py",
    ),
    "rendezvous/membership/node_lease.py": ("tests/unit/test_node_lease.py", "tests/unit/test_node.py"),
    "rendezvous/membership/restart_policy.py": ("tests/unit/test_restart_policy.py",),
    "telemetry/history.py": ("tests/unit/test_history.py",),
}

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    change: str  # `before` -> `after`
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.change}"


def changes_of(node: ast.AST) -> Iterator[Callable[[], None]]:
    """Each way to change this one node. A change is made in place."""
    match node:
        case ast.Compare():
            for index, op in enumerate(node.ops):
                yield lambda index=index, op=op: node.ops.__setitem__(index, FLIPPED[type(op)]())  # type: ignore[misc]
        case ast.BoolOp():
            yield lambda: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.Constant(value=bool() as value):
            yield lambda: setattr(node, "value", not value)
        case ast.Constant(value=int() | float() as value):
            yield lambda: setattr(node, "value", value + 1)
        case ast.If() | ast.IfExp():
            yield lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
        case ast.Expr(value=ast.Call(func=ast.Name("assert_never"))):
            pass  # Never reached, as the type checker proves.
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield lambda: setattr(node, "_is_removed", True)
        case ast.Return(value=ast.expr()):
            yield lambda: setattr(node, "value", None)


class _Removal(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> ast.AST:
        return ast.Pass() if hasattr(node, "_is_removed") else self.generic_visit(node)


def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """The nodes that may be changed, in an order that depends on the source alone: what functions do. Definitions of
    data and annotations are left alone."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            skipped.update(id(each) for decorator in node.decorator_list for each in ast.walk(decorator))
        if isinstance(node, ast.FunctionDef):
            skipped.update(id(each) for each in ast.walk(node.args))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = {id(each): each for function in functions for part in function.body for each in ast.walk(part)}
    return [node for key, node in found.items() if key not in skipped]


def places_of(module: str) -> list[tuple[str, int, int]]:
    """Every mutant of a module: which node is changed, and in which of the ways."""
    nodes = nodes_of(ast.parse((SOURCE / module).read_text()))
    return [(module, index, way) for index, node in enumerate(nodes) for way, _ in enumerate(changes_of(node))]


def mutant_at(module: str, index: int, way: int) -> Mutant:
    tree = ast.parse((SOURCE / module).read_text())
    node = nodes_of(tree)[index]
    parent_of = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    statement = node
    while not isinstance(statement, ast.stmt):
        statement = parent_of[statement]
    before = _first_line(statement)
    list(changes_of(node))[way]()
    after = "pass" if hasattr(node, "_is_removed") else _first_line(statement)
    source = ast.unparse(ast.fix_missing_locations(_Removal().visit(tree)))
    return Mutant(module, getattr(node, "lineno", 0), f"`{before}` -> `{after}`", source)


def _first_line(statement: ast.stmt) -> str:
    return ast.unparse(statement).splitlines()[0]


def survives(mutant: Mutant, copy: Path) -> bool:
    """Whether the tests of its module pass with this mutant in that copy of the source."""
    place = copy / "holdfast" / mutant.module
    place.write_text(mutant.source)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            [*command, *TESTS[mutant.module]],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    finally:
        shutil.copy(SOURCE / mutant.module, place)
    return ended.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Change the pure modules a little, and see whether a test notices.")
    parser.add_argument("--count", type=int, default=60, help="how many mutants to try")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--module", choices=TESTS, help="only of this module")
    args = parser.parse_args()
    every = [place for module in ([args.module] if args.module else TESTS) for place in places_of(module)]
    drawn = random.Random(args.seed).sample(every, min(args.count, len(every)))
    chosen = [mutant_at(*place) for place in drawn]
    with tempfile.TemporaryDirectory(prefix="holdfast_mutate_") as home:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(args.jobs):
            shutil.copytree(SOURCE, Path(home, str(number), "holdfast"), ignore=shutil.ignore_patterns("__pycache__"))
            copies.put(Path(home, str(number)))

        def attempt(mutant: Mutant) -> bool:
            copy = copies.get()
            try:
                return survives(mutant, copy)
            finally:
                copies.put(copy)

        survivors, unexplained = 0, 0
        with ThreadPoolExecutor(args.jobs) as pool:
            for mutant, has_survived in zip(chosen, pool.map(attempt, chosen), strict=True):
                is_explained = f"{mutant.module}: {mutant.change}" in EXPLAINED.read_text()
                survivors += has_survived
                unexplained += has_survived and not is_explained
                if has_survived:
                    print(mutant, "(explained)" if is_explained else "", flush=True)
    print(f"{survivors} of {len(chosen)} mutants ({len(every)} in all) survived, {unexplained} unexplained")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
