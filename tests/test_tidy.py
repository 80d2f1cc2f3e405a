"""The rules of the house that a machine can check: which way imports point, what pure modules may use, and size."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from docs import make_behaviour
from tests.promises import promise, proves

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "holdfast"
MODULES = sorted(SOURCE.rglob("*.py"))

# Who may import whom. A layer may import itself and what stands to its right of the arrow.
_BASE = {
    "die_with_parent",
    "errors",
    "escape",
    "frozen",
    "lazy",
    "log",
    "log_lines",
    "loop",
    "notice_board",
    "option",
    "procfs",
    "progress_board",
    "signals",
    "stdio",
    "stop_hooks",
    "text",
    "tls",
    "wire_types",
}
_BELOW_AGENT = {"checks", "failures", "hangs", "process", "rendezvous", "snapshots", "telemetry", "timer"} | _BASE
LAYERS = {
    "cli": {"adopt", "observe", "hosts", "launcher", "agent", "rehearsal"} | _BELOW_AGENT,
    "adopt": {"cli", "launcher", "agent"} | _BELOW_AGENT,  # cli: what the names of torch's launcher stand for
    "observe": {"agent"} | _BELOW_AGENT,
    "rehearsal": {"observe", "hosts", "agent"} | _BELOW_AGENT,
    "hosts": {"launcher", "agent"} | _BELOW_AGENT,
    "launcher": {"agent"} | _BELOW_AGENT,
    "agent": _BELOW_AGENT,
    "rendezvous": {"failures", "telemetry"} | _BASE,
    "process": {"failures", "snapshots", "telemetry"} | _BASE,
    "snapshots": _BASE,
    "checks": {"process"} | _BASE,
    "hangs": {"process", "failures", "telemetry"} | _BASE,
    "timer": {"hangs", "telemetry"} | _BASE,
    "failures": {"telemetry"} | _BASE,
    "telemetry": _BASE,
    "loop": {"signals"},
    "signals": {"errors"},
    "stdio": {"escape", "text"},
    "stop_hooks": {"progress_board"},
    "log": {"log_lines"},
    "notice_board": {"frozen"},
    "option": {"frozen"},
    "log_lines": {"escape", "stdio"},
    "tls": {"errors"},
    **{
        name: set()
        for name in (
            *(
                "die_with_parent",
                "errors",
                "escape",
                "frozen",
                "lazy",
                "procfs",
                "progress_board",
                "text",
                "wire_types",
            ),
        )
    },
    # The package itself resolves names for its users, and the entry point starts the command line.
    "__init__": {"lazy", "launcher", "notice_board", "process", "progress_board", "signals", "snapshots", "stop_hooks"},
    "__main__": {"cli", "process", "signals"},
}

# Modules that decide and do nothing else: they import data modules and each other.
_PURE = {
    "": "errors escape frozen option text wire_types",
    "agent": "environment lifecycle notice_plan ranks",
    "checks": "gate plan",
    "failures": "cause peers records report verdict",
    "hangs": "compare policy",
    "hosts": "agent_fleet engine_detection host_lines job kubernetes_manifest own_lines",
    "hosts/ssh": "command host_list messages",
    "observe": "log_tail",
    "process": "torch_store",
    "process/output": "folding lines terminal",
    "process/workers": "ladder",
    "rehearsal": "plan",
    "rendezvous/client": "reachability",
    "rendezvous/coordinator": "kv_store limits",
    "rendezvous/etcd": "election",
    "rendezvous/membership": "agreed_steps finished formation frames invariants keys losses model node node_lease "
    "nodes notice_records notices phases protocol restart_policy round run run_status snapshot_records snapshots",
    "snapshots": "frames layout messages slots",
    "telemetry": "history redaction status stragglers",
}
PURE = [f"{folder}/{name}.py".lstrip("/") for folder, names in _PURE.items() for name in names.split()]
DATA_MODULES = {
    "__future__", "_collections", "bisect", "collections", "collections.abc", "dataclasses", "enum", "errno",
    "functools", "hashlib", "heapq",
    "hmac", "inspect", "itertools", "json", "math", "msgspec", "msgspec.msgpack", "operator", "re", "shlex",
    "signal", "string", "struct", "types", "typing", "zlib",
    # What pure modules take from these is data.
    "holdfast.agent.model", "holdfast.hosts.engines", "holdfast.process.output.log_files",
}  # fmt: skip
LINE_LIMIT = 500  # not counting the opening text and the imports


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> list[str]:
    """Every module that a file imports, wherever in the file; type-checking imports included."""
    found: list[str] = []
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


@promise("project.imports-point-way-pure: Imports point one way, and pure modules stay pure.")
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
    return LAYERS[layer] | {layer}


def test_the_page_has_the_table_of_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## Layers")[2]
    shown = {}
    for layer, cell in re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE):
        named, _, others = cell.partition(" and everything")
        shown[layer] = {*re.findall(r"`(\w+)`", named)} | (_BELOW_AGENT if others else _BASE)
    folders = LAYERS.keys() - _BASE - {"__init__", "__main__"}
    assert shown == {layer: LAYERS[layer] for layer in folders}


@proves("project.imports-point-way-pure")
def test_pure_modules_import_only_data() -> None:
    allowed = DATA_MODULES | {f"holdfast.{name.removesuffix('.py').replace('/', '.')}" for name in PURE}
    wrong = [f"{name} is pure but imports {each}" for name in PURE for each in {*imports_of(SOURCE / name)} - allowed]
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


@promise("project.bootstrap-worker-needs-standard: The bootstrap of a worker needs only the standard library.")
def test_the_worker_bootstrap_stands_alone() -> None:
    imported = imports_of(SOURCE / "process" / "spawner" / "bootstrap.py")
    assert not [name for name in imported if name.startswith("holdfast")]


@promise("project.framework-imported: No framework is imported, but by the one module for programs that use it.")
def test_no_framework_is_imported() -> None:
    for path in {*MODULES} - {SOURCE / "snapshots" / "torch.py"}:
        assert not [name for name in imports_of(path) if name.split(".")[0] in ("torch", "jax", "tensorflow")]


def test_the_page_of_promises_is_what_the_tests_promise() -> None:
    promises = make_behaviour.read()
    page = make_behaviour.PAGE.read_text()
    assert make_behaviour.filled(page, promises) == page, "make docs makes it anew"
    assert promises.problems == []
