"""The rules of the house that a machine can check: which way imports point, what pure modules may use, and size."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "holdfast"
MODULES = sorted(SOURCE.rglob("*.py"))

# Who may import whom. A layer may import itself and what stands to its right of the arrow.
_BASE = {
    "errors",
    "escape",
    "frozen",
    "lazy",
    "log",
    "log_lines",
    "loop",
    "procfs",
    "progress_board",
    "signals",
    "stdio",
    "wire_types",
}
_BELOW_AGENT = {"failures", "hangs", "process", "rendezvous", "telemetry", "timer"} | _BASE
LAYERS = {
    "cli": {"observe", "hosts", "launcher", "agent"} | _BELOW_AGENT,
    "observe": {"agent"} | _BELOW_AGENT,
    "hosts": {"launcher", "agent"} | _BELOW_AGENT,
    "testing": {"hosts", "rendezvous"} | _BASE,
    "launcher": {"agent"} | _BELOW_AGENT,
    "agent": _BELOW_AGENT,
    "rendezvous": {"failures", "telemetry"} | _BASE,
    "process": {"failures", "telemetry"} | _BASE,
    "hangs": {"process", "failures", "telemetry"} | _BASE,
    "timer": {"hangs", "telemetry"} | _BASE,
    "failures": {"telemetry"} | _BASE,
    "telemetry": _BASE,
    "loop": {"signals"},
    "signals": {"errors"},
    "stdio": {"escape"},
    "log": {"log_lines"},
    "log_lines": {"escape", "stdio"},
    **{name: set() for name in ("errors", "escape", "frozen", "lazy", "procfs", "progress_board", "wire_types")},
    # The package itself resolves names for its users, and the entry point starts the command line.
    "__init__": {"lazy", "launcher", "process", "progress_board", "signals"},
    "__main__": {"cli", "process", "signals"},
}

# Modules that only re-export names which have moved may import them.
REEXPORTS = {"rendezvous/etcd_server.py": {"testing"}}

PURE = {
    "agent/lifecycle.py": {
        "holdfast.errors",
        "holdfast.failures.records",
        "holdfast.frozen",
        "holdfast.rendezvous.membership.model",
    },
    **{
        f"rendezvous/membership/{name}.py": {
            "holdfast.errors",
            "holdfast.escape",
            "holdfast.failures.records",
            "holdfast.frozen",
            "holdfast.rendezvous.membership",
        }
        for name in ("model", "nodes", "finished", "formation", "losses", "restart_policy", "node", "node_lease")
    },
    "rendezvous/membership/protocol.py": {
        "msgspec",
        "holdfast.escape",
        "holdfast.failures.records",
        "holdfast.frozen",
        "holdfast.rendezvous.membership",
        "holdfast.telemetry.stragglers",
        "holdfast.wire_types",
    },
    "rendezvous/membership/round.py": {
        "holdfast.failures",
        "holdfast.rendezvous.membership",
        "holdfast.telemetry.history",
    },
    "rendezvous/membership/run.py": {"holdfast.frozen", "holdfast.rendezvous.membership"},
    "rendezvous/membership/phases.py": {
        "holdfast.errors",
        "holdfast.escape",
        "holdfast.frozen",
        "holdfast.failures",
        "holdfast.rendezvous.membership",
        "holdfast.telemetry.history",
    },
    "telemetry/history.py": {"holdfast.frozen", "holdfast.wire_types"},
    "observe/log_tail.py": {"msgspec", "holdfast.frozen", "holdfast.process.output.log_files", "holdfast.wire_types"},
    "rendezvous/membership/status.py": {
        "holdfast.escape",
        "holdfast.rendezvous.membership",
        "holdfast.telemetry.history",
        "holdfast.telemetry.status",
    },
    "rendezvous/membership/keys.py": {"hashlib", "hmac"},
    "rendezvous/membership/frames.py": {"struct", "msgspec", "holdfast.escape", "holdfast.rendezvous.membership"},
    "rendezvous/etcd/election.py": {"holdfast.frozen", "holdfast.rendezvous.membership"},
    "rendezvous/coordinator/limits.py": {"holdfast.frozen"},
    "rendezvous/coordinator/turns.py": set(),
    "rendezvous/coordinator/kv_store.py": {"holdfast.rendezvous.membership", "holdfast.rendezvous.coordinator.limits"},
    "rendezvous/client/reachability.py": {"holdfast.frozen"},
    "agent/ranks.py": {"holdfast.agent.model"},
    "agent/environment.py": {"holdfast.agent.model", "holdfast.errors"},
    "failures/records.py": {"holdfast.frozen", "holdfast.telemetry.stragglers", "holdfast.wire_types"},
    "failures/cause.py": {"holdfast.failures.records"},
    "failures/report.py": {
        "holdfast.escape",
        "holdfast.failures",
        "holdfast.frozen",
        "holdfast.telemetry.stragglers",
    },
    "hangs/policy.py": {"holdfast.errors", "holdfast.frozen"},
    "hangs/compare.py": {"holdfast.escape", "holdfast.failures.report", "holdfast.frozen"},
    "telemetry/redaction.py": set(),
    "telemetry/stragglers.py": {"holdfast.frozen", "holdfast.wire_types"},
    "process/output/lines.py": set(),
    "process/output/folding.py": {"bisect", "operator"},
    "process/output/terminal.py": {"holdfast.failures.report", "holdfast.process.output.folding"},
    "process/workers/ladder.py": set(),
    "hosts/job.py": {"holdfast.frozen"},
    "hosts/environment.py": {"holdfast.frozen"},
    "hosts/ssh/host_list.py": {"holdfast.errors", "holdfast.frozen"},
    "hosts/ssh/command.py": {"holdfast.frozen"},
    "hosts/ssh/messages.py": {"holdfast.frozen"},
    "hosts/ssh/output.py": {"holdfast.hosts.ssh.messages", "holdfast.process.output"},
    "hosts/ssh/launch.py": {"holdfast.frozen", "holdfast.hosts.ssh", "holdfast.rendezvous.membership.model"},
    "hosts/kubernetes.py": {"holdfast.errors", "holdfast.frozen", "holdfast.hosts"},
    "hosts/placement.py": {"holdfast.errors", "holdfast.frozen"},
}
DATA_MODULES = {
    "__future__", "collections", "collections.abc", "dataclasses", "enum", "functools", "heapq", "itertools", "json",
    "math", "re", "signal", "string", "types", "typing", "zlib",
}  # fmt: skip
LINE_LIMIT = 500  # not counting the opening text and the imports


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> list[str]:
    """Every module that a file imports, wherever in the file; type-checking imports included."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module in ("holdfast",) or (SOURCE.parent / node.module.replace(".", "/")).is_dir():
                found.extend(f"{node.module}.{alias.name}" for alias in node.names)
            else:
                found.append(node.module)
        elif isinstance(node, ast.ImportFrom):
            found.append(f"relative import in {path}")
    return found


def layer_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def test_imports_point_one_way() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in MODULES
        for name in imports_of(path)
        if name.startswith("holdfast.") and name.split(".")[1] not in allowed_in(path)
    ]
    assert wrong == []


def test_no_module_names_one_above_it_in_a_string() -> None:
    """Such a string is an import in disguise: a process that is started, or a module that is imported late."""
    wrong = [(str(path.relative_to(SOURCE)), layer) for path in MODULES for layer in named_in(path) - allowed_in(path)]
    assert wrong == []


def named_in(path: Path) -> set[str]:
    """The layers that strings of a file name, but for its documentation."""
    nodes = [*ast.walk(tree_of(path))]
    prose = {node.value for node in nodes if isinstance(node, ast.Expr)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in prose]
    names = [name for text in texts if isinstance(text, str) for name in re.findall(r"\bholdfast\.(\w+)", text)]
    return LAYERS.keys() & names


def allowed_in(path: Path) -> set[str]:
    layer = layer_of(path)
    return LAYERS[layer] | {layer} | REEXPORTS.get(str(path.relative_to(SOURCE)), set())


def test_pure_modules_import_only_data() -> None:
    wrong = [
        f"{name} is pure but imports {imported}"
        for name, allowed in PURE.items()
        for imported in imports_of(SOURCE / name)
        if not {imported.rsplit(".", depth)[0] for depth in range(3)} & (DATA_MODULES | allowed)
    ]
    assert wrong == []


def test_modules_stay_readable() -> None:
    """A module opens with what it is for. One that wants to be larger than the limit wants to be two."""
    trees = {str(path.relative_to(SOURCE)): tree_of(path) for path in MODULES}
    assert [name for name, tree in trees.items() if not ast.get_docstring(tree)] == []
    sizes = {str(path.relative_to(SOURCE)): size_of(path) for path in MODULES}
    assert {name: size for name, size in sizes.items() if size > LINE_LIMIT} == {}


def size_of(path: Path) -> int:
    opening = (ast.Import, ast.ImportFrom, ast.Expr)
    return len(path.read_text().splitlines()) - next(
        (node.lineno for node in tree_of(path).body if not isinstance(node, opening)), 0
    )


def test_the_worker_bootstrap_stands_alone() -> None:
    imported = imports_of(SOURCE / "process" / "spawner" / "bootstrap.py")
    assert not [name for name in imported if name.startswith("holdfast")]


def test_no_framework_is_imported() -> None:
    for path in MODULES:
        assert not [name for name in imports_of(path) if name.split(".")[0] in ("torch", "jax", "tensorflow")]
