"""The documents tell the truth: what they name exists, and what they show happens.

The diagrams in docs/architecture.md are made from the machines' own tables:

    HOLDFAST_REGENERATE=1 pytest tests/test_docs.py
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent import WorkerGroup, WorkerSpec, lifecycle
from holdfast.agent.environment import worker_environments
from holdfast.cli import run as cli
from holdfast.errors import UserError
from holdfast.rendezvous.membership import model
from holdfast.rendezvous.membership import node as node_machine
from tests import support
from tests.promises import promise, proves

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
EXAMPLES = ROOT / "examples" / "README.md"
HANGS = ROOT / "docs" / "hangs.md"
STOPPING = ROOT / "docs" / "stopping.md"
SNAPSHOTS = ROOT / "docs" / "snapshots.md"
ETCD = ROOT / "docs" / "etcd.md"
MANY_NODES = ROOT / "docs" / "many-nodes.md"
COMPARISON = ROOT / "docs" / "comparison.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fences(path: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(path.read_text()) if kind == language]


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text())


def inline_code(path: Path) -> list[str]:
    return INLINE_CODE.findall(prose(path))


# --- diagrams -------------------------------------------------------------------------------------------------------

Change = tuple[StrEnum, str, StrEnum]


def _lifecycle_changes() -> list[Change]:
    phases = list(lifecycle.AgentPhase)
    return [
        (phase, event.__name__, target)
        for (phase, event), targets in lifecycle.TRANSITIONS.items()
        for target in sorted(targets, key=phases.index)
    ]


# The machine -> its changes, where it begins, and where it ends.
MACHINES: dict[str, tuple[Sequence[Change], StrEnum, StrEnum]] = {
    "lifecycle": (_lifecycle_changes(), lifecycle.AgentPhase.IDLE, lifecycle.AgentPhase.ENDED),
    "run": (model.PHASE_CHANGES, model.Phase.FORMING, model.Phase.ENDED),
    "node": (node_machine.STANDING_CHANGES, node_machine.Standing.OUTSIDE, node_machine.Standing.DONE),
}


def diagram(name: str) -> str:
    changes, first, last = MACHINES[name]
    lines = ["stateDiagram-v2", f"    [*] --> {first}"]
    for origin, label, target in changes:
        assert not set(label) & set(":;#\n"), f"{label!r} would break the diagram"
        lines.append(f"    {origin} --> {target}: {label}")
    return "\n".join([*lines, f"    {last} --> [*]"]) + "\n"


@promise("""project.diagrams-links-commands-tests: The diagrams, the links, the commands and the tests named in the
    documents are right.""")
@pytest.mark.parametrize("name", MACHINES)
def test_diagrams_are_the_tables(name: str) -> None:
    """A comment in front of each says which one it is."""
    place = re.compile(rf"(<!-- diagram: {name};[^>]*-->\n\n)```mermaid\n.*?```", re.DOTALL)
    wanted = f"```mermaid\n{diagram(name)}```"
    text = ARCHITECTURE.read_text()
    if os.environ.get("HOLDFAST_REGENERATE") == "1":
        text = place.sub(lambda found: found[1] + wanted, text)
        ARCHITECTURE.write_text(text)
    [shown] = [found[0] for found in place.finditer(text)]
    assert shown.endswith(wanted), "HOLDFAST_REGENERATE=1 pytest tests/test_docs.py makes it anew"


@pytest.mark.parametrize("name", MACHINES)
def test_diagrams_are_complete(name: str) -> None:
    """Every state can be reached, and from every state the end."""
    changes, first, last = MACHINES[name]
    onward = {(origin, target) for origin, _, target in changes}
    assert _reached(first, onward) == set(type(first))
    assert _reached(last, {(target, origin) for origin, target in onward}) == set(type(first))


def _reached(start: StrEnum, steps: set[tuple[StrEnum, StrEnum]]) -> set[StrEnum]:
    found, waiting = {start}, [start]
    while waiting:
        here = waiting.pop()
        fresh = {target for origin, target in steps if origin == here} - found
        found |= fresh
        waiting.extend(fresh)
    return found


def anchors(path: Path) -> set[str]:
    """The names by which a heading can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def target_of(document: Path, link: str) -> Path:
    place = link.partition("#")[0]
    return (document.parent / place).resolve() if place else document


def problem_of_link(document: Path, link: str) -> str:
    if link.startswith(("http://", "https://")):
        return ""
    target, anchor = target_of(document, link), link.partition("#")[2]
    if not target.is_relative_to(ROOT):
        return "leads out of the project"
    if not target.exists():
        return "leads nowhere"
    return "there is no such heading" if anchor and anchor not in anchors(target) else ""


@proves("project.diagrams-links-commands-tests")
def test_links_lead_somewhere() -> None:
    links = ((document, link) for document in DOCUMENTS for link in LINK.findall(prose(document)))
    found = {(name_of(document), link): problem_of_link(document, link) for document, link in links}
    assert {place: problem for place, problem in found.items() if problem} == {}


def test_every_document_can_be_reached_from_the_readme() -> None:
    reached, waiting = {README}, [README]
    while waiting:
        document = waiting.pop()
        for link in LINK.findall(prose(document)):
            target = target_of(document, link)
            found = sorted(target.glob("*.md")) if target.is_dir() else [target]
            fresh = [path for path in found if path.suffix == ".md" and path.is_file() and path not in reached]
            reached.update(fresh)
            waiting.extend(fresh)
    assert [name_of(path) for path in DOCUMENTS if path not in reached] == []


def exists(test: str) -> bool:
    """Functions, classes and methods of a test module, and classes that it gets by assignment."""
    place, *names = test.split("::")
    source = (ROOT / place).read_text() if (ROOT / place).is_file() else ""
    return all(re.search(rf"^\s*(?:def|class) {name}\b|^{name} = ", source, re.MULTILINE) for name in names)


@proves("project.diagrams-links-commands-tests")
def test_tests_in_the_documents_exist() -> None:
    pattern = re.compile(r"tests/[\w/]+\.py::\w+(?:::\w+)?")
    named = {(name_of(path), test) for path in DOCUMENTS for test in pattern.findall(path.read_text())}
    assert sorted((page, test) for page, test in named if not exists(test)) == []


def test_modules_in_the_documents_exist() -> None:
    pages = [ARCHITECTURE, ROOT / "docs" / "glossary.md", *(ROOT / "docs" / "decisions").glob("*.md")]
    names = {(name_of(page), text) for page in pages for text in inline_code(page) if re.fullmatch(r"[\w/]+\.py", text)}
    sources = ROOT / "src"
    gone = [(page, text) for page, text in names if not (ROOT / text).is_file() and not any(sources.rglob(text))]
    assert sorted(gone) == []


def test_names_in_the_page_about_torchrun_can_be_imported() -> None:
    page = ROOT / "docs" / "torchrun.md"
    names = [text for text in inline_code(page) if re.fullmatch(r"holdfast(\.\w+)+", text)]
    assert "holdfast.launcher" in names
    for name in names:
        import_module(name)


def table_under(heading: str, page: Path) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    text = page.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 2
    return rows[2:]


def lines_explained(page: Path) -> list[str]:
    return [INLINE_CODE.findall(row[0])[0] for row in table_under("What the lines mean", page)]


@cache
def texts_in_the_code() -> frozenset[str]:
    """Every text in the source, cut where a value is put in."""
    constants = (
        node.value
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return frozenset(part for text in constants for part in re.split(r"%[drsg]", text))


@promise("""project.log-lines-docs-many: The log lines that docs/many-nodes.md and docs/etcd.md explain are those of the
    code.""")
@pytest.mark.parametrize("page", [ETCD, MANY_NODES, ROOT / "docs" / "ssh.md"], ids=name_of)
def test_lines_that_are_explained_are_in_the_code(page: Path) -> None:
    """What stands between `<` and `>` differs; that it is etcd which cannot be reached is put in, too."""
    parts = [re.split(r"<\w+>|\betcd\b|\b3\.4\b", line) for line in lines_explained(page)]
    wanted = [part.strip() for each in parts for part in each if len(part.strip()) > 2]
    assert len(wanted) >= len(parts) > 0
    assert [part for part in wanted if not any(part in text for text in texts_in_the_code())] == []


def command_lines(path: Path) -> Iterator[list[str]]:
    """Every command in a document, in a block or within a line, as words."""
    blocks = "".join(fences(path, "sh")).replace("\\\n", " ")
    for line in [*blocks.splitlines(), *inline_code(path)]:
        try:
            yield shlex.split(line, comments=True)
        except ValueError:
            continue  # Not a command: an apostrophe in a piece of code.


def run_commands(path: Path) -> Iterator[list[str]]:
    """What follows `holdfast run` in them; the mere name of the command and a request for help are none."""
    for words in command_lines(path):
        if words[:3] == ["python", "-m", "holdfast"]:
            words = words[2:]
        if words[:2] == ["holdfast", "run"] and words[2:] not in ([], ["--help"]):
            yield words[2:]


@promise("""failures.events-file-json-line: `--events-file` has one JSON line for each event of the node, with the
    fields that docs/events.md lists. Agents of a host may share the file. Its directory is made if it lies within
    `--log-dir`.""")
@proves("project.diagrams-links-commands-tests")
def test_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their values are right in an empty directory, too."""
    monkeypatch.chdir(tmp_path)
    wrong = []
    for place, words in [(name_of(each), words) for each in DOCUMENTS for words in run_commands(each)]:
        try:
            args = cli.parse_args(words)
            cli.check_values(args)
            script = args.training_script
        except (SystemExit, UserError):
            script = ""
        if not script or (script.startswith("examples/") and not (ROOT / script).is_file()):
            wrong.append((place, words))
    assert wrong == []


def test_the_readme_has_its_commands() -> None:
    assert len(README.read_text().splitlines()) < 150
    assert ["--standalone", "--nproc-per-node", "4", "--max-restarts", "3", "train.py"] in list(run_commands(README))
    assert ["make", "test"] in [words[:2] for words in command_lines(README)]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in command_lines(README):
        if words[:1] == ["make"]:
            assert words[1] in targets


def command_of(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    start = {"python": [sys.executable], "holdfast": [sys.executable, "-m", "holdfast"]}[words[0]]
    return [*start, *words[1:]]


def surroundings(directory: Path) -> dict[str, Any]:
    """Commands run from the project's directory; what they leave goes to `directory`."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"TMPDIR": str(directory), "PATH": path, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    return {"cwd": ROOT, "env": {**support.clean_environment(), **env}, "text": True}


def execute(line: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of a document."""
    return subprocess.run(command_of(line), capture_output=True, timeout=100, **surroundings(directory))


LARGE = re.compile(r"examples/(ddp|fsdp|jax|accelerate|lightning|transformers)/")
EXAMPLE_LINES = [line for block in fences(EXAMPLES, "sh") for line in block.splitlines()]


@promise("project.example-runs-line-says: Each example runs as its line says, and so do two nodes in two terminals.")
@proves("adopted-commands.accelerate-launch")
@pytest.mark.parametrize("line", EXAMPLE_LINES)
def test_examples_run(line: str, tmp_path: Path) -> None:
    noted = re.search(r"# exit status (\d+)", line)
    if large := LARGE.search(line):
        support.leave_to_test_all(large[1])
    ended = execute(line, tmp_path)
    assert ended.returncode == (int(noted[1]) if noted else 0), ended.stderr
    assert ended.returncode == 0 or ended.stderr.splitlines()[-1].startswith("Cause: rank 2 ")


def test_the_commands_about_frameworks_are_those_of_the_examples() -> None:
    lines = [line for block in fences(ROOT / "docs" / "frameworks.md", "sh") for line in block.splitlines()]
    assert lines
    assert set(lines) <= set(EXAMPLE_LINES)


def test_every_example_has_a_line() -> None:
    scripts = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".sh")]
    assert scripts
    assert [name_of(path) for path in scripts if not any(name_of(path) in line for line in EXAMPLE_LINES)] == []


def missing(shown: Iterable[str], printed: Iterable[str]) -> list[str]:
    """The lines of a document that were not printed in that order, whatever else was. `[...]` stands for others."""
    rest = iter(printed)  # Each line is looked for behind the one before.
    return [line for line in shown if line.strip() != "[...]" and line not in rest]


def neutral(text: str, root: str) -> list[str]:
    """Lines without what differs between machines: directories, pids, the time, the host, and how Python underlines."""
    text = text.replace(root, "")
    text = re.sub(r"\S*/torchelastic_\w+/\w+/", "", text)
    text = re.sub(r"^run \w{32},", "run", text, flags=re.MULTILINE)
    text = re.sub(r"(pids? |pid: )\d+(, \d+)*", r"\1", text)
    text = re.sub(r"^(  (?:time|host) *:).*$", r"\1", text, flags=re.MULTILINE)
    return [line for line in text.splitlines() if line.strip() and not re.fullmatch(r"[ ~^]+", line)]


def test_the_report_on_the_page_is_what_is_printed(tmp_path: Path) -> None:
    [shown] = [block for block in fences(COMPARISON, "") if "Cause: rank 2 failed: FileNotFoundError" in block]
    ended = execute("holdfast run --standalone --nproc-per-node 4 examples/crash.py exception", tmp_path)
    assert missing(neutral(shown, "/home/me/holdfast"), neutral(ended.stderr, str(ROOT))) == []


@pytest.mark.parametrize("block", fences(README, ""))
def test_the_readme_shows_parts_of_what_the_comparison_shows(block: str) -> None:
    shown = block.splitlines()
    assert any(missing(shown, whole.splitlines()) == [] for whole in fences(COMPARISON, ""))


@proves("project.example-runs-line-says")
def test_two_terminals_show_what_the_page_shows(tmp_path: Path) -> None:
    [shown] = [block for block in fences(MANY_NODES, "") if "is on fire" in block]
    [line] = [line for block in fences(MANY_NODES, "sh") for line in block.splitlines() if "examples/demo" in line]
    port = str(support.free_port())
    line, shown = line.replace("29400", port), shown.replace("29400", port)
    said = tmp_path / "first"
    with said.open("w") as file:
        first = subprocess.Popen(command_of(line), stdout=subprocess.DEVNULL, stderr=file, **surroundings(tmp_path))
    try:
        support.wait_until(lambda: "joined" in said.read_text(), "the first terminal waits for the second")
        second = execute(line, tmp_path)
        assert (second.returncode, first.wait(support.DEADLINE_S)) == (0, 0), second.stderr
    finally:
        first.kill()
    assert missing(neutral(shown, ""), neutral(said.read_text(), str(ROOT))) == []


# --- the hung job ---------------------------------------------------------------------------------------------------

HUNG_JOB = re.compile(r"(<!-- a real run;[^>]*-->\n\n)```\n(.*?)```", re.DOTALL)


def presentable(text: str) -> str:
    """What a run printed, as a document shows it: without this machine's directories, and with small pids."""
    pids: dict[str, str] = {}
    numbers = re.findall(r"\d+", " ".join(re.findall(r"pids? (\d+(?:, \d+)*)", text)))
    for number in numbers:
        pids.setdefault(number, str(4101 + len(pids)))
    text = re.sub(r"\b\d+\b", lambda found: pids.get(found[0], found[0]), text)
    text = re.sub(r"\S*/torchelastic_\w+/\w+/", "/tmp/torchelastic_b692ca71/job7_588110c8/", text)
    return text.replace(str(ROOT), "/home/me/holdfast")


def comparable(text: str) -> list[str]:
    """Without what differs from run to run and from one build of Python to another: seconds and native frames."""
    lines = neutral(re.sub(r"\b\d+ s\b", "some s", text), "")
    is_native = re.compile(r"holdfast:     \S.* \([^()]*\)")
    return [line for line in lines if ".py:" in line or not is_native.fullmatch(line)]


@promise("hangs.output-hung-job-docs: The output of the hung job in docs/hangs.md is real.")
def test_the_hung_job_in_the_document_is_what_is_printed(tmp_path: Path) -> None:
    line = next(text for text in inline_code(HANGS) if "examples/hang.py" in text)
    ended = execute(line, tmp_path)
    assert ended.returncode == 0, ended.stderr
    text = HANGS.read_text()
    if os.environ.get("HOLDFAST_REGENERATE") == "1":
        text = HUNG_JOB.sub(lambda found: f"{found[1]}```\n{presentable(ended.stderr)}```", text)
        HANGS.write_text(text)
    [(_, shown)] = HUNG_JOB.findall(text)
    assert comparable(shown) == comparable(presentable(ended.stderr))


@proves("failures.peers-places", "hangs.output-hung-job-docs")
def test_the_rank_that_fails_of_another_is_what_is_printed(tmp_path: Path) -> None:
    line = next(text for text in inline_code(HANGS) if "examples/hang.py timeout" in text)
    [shown] = [block for block in fences(HANGS, "") if "before they are stopped" in block]
    ended = execute(line, tmp_path)
    assert missing(shown.splitlines(), ended.stderr.splitlines()) == [], ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("Cause: rank 1 failed: RuntimeError: timed out waiting")


@proves("project.diagrams-links-commands-tests")
@pytest.mark.parametrize("name", ["placement", "stopping"])
def test_the_commands_about_the_places_and_the_ends_of_workers(name: str, tmp_path: Path) -> None:
    document = ROOT / "docs" / f"{name}.md"
    printed: list[str] = []
    for line in (line for block in fences(document, "sh") for line in block.splitlines()):
        ended = execute(line, tmp_path)
        assert ended.returncode == int("# exit status 1" in line), ended.stderr
        printed += [*neutral(ended.stderr, str(ROOT)), *sorted(ended.stdout.splitlines())]
    if name == "placement" and len(os.sched_getaffinity(0)) == 2:
        [shown] = fences(document, "")
        assert missing(neutral(shown, ""), printed) == [], printed
    assert name == "placement" or printed.count("communicators are closed") == 2


@pytest.mark.parametrize("source", fences(HANGS, "python") + fences(STOPPING, "python") + fences(README, "python"))
def test_the_python_in_the_documents_runs(source: str) -> None:
    names: dict[str, Any] = {"train": os.path.normpath}
    exec(source, names)
    assert "results" not in names or names["results"] == dict.fromkeys(range(4), "data")


@promise("snapshots.examples-run: The Python and the command in docs/snapshots.md run, and the weights are the same.")
@pytest.mark.parametrize("source", fences(SNAPSHOTS, "python"))
def test_the_python_about_snapshots_runs(source: str, tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist

    import holdfast

    model = torch.nn.Linear(2, 2)
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "step": 1, "state": {"weights": [1.0]}}
    names |= {"snapshots": holdfast.snapshots.open(), "directory": tmp_path}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        exec(source, names)
        assert "written" not in names or names["written"].result() is not None
    finally:
        dist.destroy_process_group()


@proves("snapshots.examples-run")
def test_the_training_that_is_killed_ends_with_the_weights_of_one_that_is_not(tmp_path: Path) -> None:
    lines = [line for block in fences(SNAPSHOTS, "sh") for line in block.splitlines()]
    [line] = [line for line in lines if line.endswith("examples/snapshots/train.py 100 3")]
    assert line in EXAMPLE_LINES
    killed, whole = (execute(each, tmp_path) for each in (line, line.removesuffix("3") + "0"))
    assert killed.stdout.count("goes on with step") == 3, killed.stderr
    assert killed.stderr.splitlines()[-1] == "holdfast: all 2 workers finished after 3 restarts; 0 steps computed again"
    assert whole.stdout.startswith("step 99: the weights add up to"), whole.stderr
    assert killed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


@promise(
    "snapshots.checkpoints: A training that writes checkpoints with a `Stager` goes on from its newest step after a "
    "kill, and its files have the weights of an undisturbed one (DDP, FSDP)."
)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_checkpoints_are_written_from_snapshots(kind: str, tmp_path: Path) -> None:
    if kind == "ddp":
        support.leave_to_test_all(kind)
    import torch
    import torch.distributed.checkpoint as dcp

    lines = [line for block in fences(SNAPSHOTS, "sh") for line in block.splitlines()]
    [line] = [line for line in lines if line.endswith("examples/snapshots/checkpoints.py fsdp 25")]
    line = line.replace("fsdp 25", kind)
    killed, whole = (execute(f"{line} {step} {tmp_path / step}", tmp_path) for step in ("25", "99"))
    begun, last = killed.stdout.splitlines()[1:]
    assert begun == "begins with step 25, from a snapshot", killed.stderr
    assert [last] == whole.stdout.splitlines()[1:], whole.stderr
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).state_dict()
    dcp.load({"training": {"model": model}}, checkpoint_id=tmp_path / "25" / "step-39")
    total = torch.cat([each.flatten() for each in model.values()]).double().sum().item()
    assert last == f"step 39: the weights add up to {total:.12f}"
    again = execute(f"{line} 99 {tmp_path / '25'}", tmp_path)
    assert again.stdout.splitlines() == ["begins with step 40, from a checkpoint", last], again.stderr


@proves("cli.help-docs-md-match")
def test_every_environment_variable_is_explained() -> None:
    pattern = re.compile(r'"((?:TORCH|HOLDFAST)[A-Z]*_[A-Z_]+)"')
    used = {name for path in (ROOT / "src").rglob("*.py") for name in pattern.findall(path.read_text())}
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert len(used) > 15
    assert not {name for name in used if f"`{name}" not in text}
    made = subprocess.run([sys.executable, "-m", "docs.make_environment"], capture_output=True, text=True, cwd=ROOT)
    assert (ROOT / "docs" / "environment.md").read_text() == made.stdout, "make docs makes it anew"


@proves("cli.help-docs-md-match")
def test_what_a_worker_finds_is_in_the_table() -> None:
    spec = WorkerSpec("r", 1, None, entrypoint="x", virtual_local_rank=True)
    group = WorkerGroup(spec)
    group.group_rank, group.group_world_size, group.master_addr, group.master_port = 0, 1, "h", 1
    place = model.Place(1, 1, 0, 1)
    [found] = worker_environments(group, {"OMP_NUM_THREADS": "1"}, place, timer_path="/pipe").values()
    table = (ROOT / "docs" / "cli.md").read_text().partition("## What a worker finds")[2].partition("\n## ")[0]
    assert set(found) <= set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
