"""Small changes to the source, each of which a test must notice: `make mutate`.

    python -m tests.mutate --count 60 --seed 1 --jobs 2          of the pure modules and those that own processes
    python -m tests.mutate --count 20 agent/ranks.py cli         of these modules and packages

A mutant is a module with one change: a comparison flipped, `and` for `or`, a number or truth value changed, an `if`
negated, a statement removed. Of all mutants the seed draws `--count`. Each is put into a copy of the source, never into
the source itself, and the tests that import its module run against it, until one fails. A mutant that no test notices
survives: either a test is missing, or the change makes no difference. Those of the second kind are explained in
docs/mutations.md; any other makes the exit status 1.
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

from tests.test_tidy import MODULES, PURE, ROOT, SOURCE, imports_of

EXPLAINED = ROOT / "docs" / "mutations.md"

# A mutant may loop for ever; that is noticed, too.
TIMEOUT_S = 120

# Modules whose code runs in processes of its own, or starts them, or is a part of a machine, and the tests of that.
OWNERS = {
    "rendezvous/membership/round.py": ("tests/unit/test_phases.py", "tests/unit/test_run.py"),
    "process/workers/group.py": ("tests/integration/test_processes.py", "tests/integration/test_start_stop_events.py"),
    "procfs.py": ("tests/integration/test_ownership.py",),
    "process/spawner/wire.py": ("tests/unit/test_spawner.py", "tests/integration/test_ownership.py"),
    "process/spawner/server.py": ("tests/unit/test_spawner.py", "tests/integration/test_ownership.py"),
}

_PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    change: str  # `before` -> `after`
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.change}"


def tests_of(module: str) -> list[str]:
    """The quick tests that import it, those named after it first; then those that start its processes."""
    name = f"holdfast.{module.removesuffix('.py').replace('/', '.')}"
    quick = [
        path for folder in ("unit", "properties", "sim") for path in sorted(ROOT.glob(f"tests/{folder}/test_*.py"))
    ]
    found = [path for path in quick if name in imports_of(path)]
    found.sort(key=lambda path: name.rpartition(".")[2] not in path.stem)
    return list(dict.fromkeys([*(str(path.relative_to(ROOT)) for path in found), *OWNERS.get(module, ())]))


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
    """What functions do, in an order that depends on the source alone. Definitions of data are left alone."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return list(dict.fromkeys(each for function in functions for part in function.body for each in ast.walk(part)))


def places_of(module: str) -> list[tuple[str, int, int]]:
    """Every mutant of a module: which node is changed, and in which of the ways."""
    nodes = nodes_of(ast.parse((SOURCE / module).read_text()))
    return [(module, index, way) for index, node in enumerate(nodes) for way, _ in enumerate(changes_of(node))]


def mutant_at(module: str, index: int, way: int) -> Mutant:
    tree = ast.parse((SOURCE / module).read_text())
    node = nodes_of(tree)[index]
    # Of the statements around the node, the innermost comes last.
    statement = [each for each in ast.walk(tree) if isinstance(each, ast.stmt) and node in ast.walk(each)][-1]
    before = _first_line(statement)
    list(changes_of(node))[way]()
    after = "pass" if hasattr(node, "_is_removed") else _first_line(statement)
    source = ast.unparse(ast.fix_missing_locations(_Removal().visit(tree)))
    return Mutant(module, getattr(node, "lineno", 0), f"`{before}` -> `{after}`", source)


def _first_line(statement: ast.stmt) -> str:
    return ast.unparse(statement).splitlines()[0]


def survives(mutant: Mutant) -> bool:
    """Whether the tests of its module pass with it."""
    with tempfile.TemporaryDirectory(prefix="holdfast_mutate_") as home:
        copy = shutil.copytree(SOURCE, Path(home, "holdfast"), ignore=shutil.ignore_patterns("__pycache__"))
        (copy / mutant.module).write_text(mutant.source)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        environ = {**os.environ, "PYTHONPATH": home, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ended = subprocess.run(
                [*command, *tests_of(mutant.module)], cwd=ROOT, env=environ, capture_output=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return False
        return ended.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Change the source a little, and see whether a test notices.")
    parser.add_argument("--count", type=int, default=60, help="how many mutants to try")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("modules", nargs="*", default=[*PURE, *OWNERS], help="only of these, below src/holdfast")
    args = parser.parse_args()
    names = [str(path.relative_to(SOURCE)) for path in MODULES]
    chosen = [name for name in names if any(name == each or name.startswith(f"{each}/") for each in args.modules)]
    every = [place for name in chosen if tests_of(name) for place in places_of(name)]
    mutants = [mutant_at(*place) for place in random.Random(args.seed).sample(every, min(args.count, len(every)))]
    explained, survivors, unexplained = EXPLAINED.read_text(), 0, 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutant, has_survived in zip(mutants, pool.map(survives, mutants), strict=True):
            if has_survived:
                is_explained = f"{mutant.module}: {mutant.change}" in explained
                survivors, unexplained = survivors + 1, unexplained + (not is_explained)
                print(mutant, "(explained)" if is_explained else "", flush=True)
    print(f"{survivors} of {len(mutants)} mutants ({len(every)} in all) survived, {unexplained} unexplained")
    if untested := [name for name in chosen if not tests_of(name)]:
        print(f"not changed, because no quick test imports them: {', '.join(untested)}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
