"""A test that fails once is rerun and named; one that fails twice fails the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import support

TESTS = """
import os, pathlib, pytest

def is_first(name):
    mark = pathlib.Path(name)
    if mark.exists():
        return False
    mark.touch()
    return True

def test_passes():
    pass

@pytest.mark.parametrize("which", ["plain", "a b::c[d]\\n"])
def test_fails_once(which):
    assert not is_first(f"once {ascii(which)}")

def test_crashes_once():
    if is_first("crash"):
        os._exit(3)

@pytest.fixture
def broken_once():
    yield
    assert not is_first("teardown")

def test_fails_once_at_its_end(broken_once):
    pass

def test_fails_always():
    assert False
"""

FLAKY = {
    "test_it.py::test_fails_once[plain]",
    "test_it.py::test_fails_once[a b::c[d]\\n]",
    "test_it.py::test_crashes_once",
    "test_it.py::test_fails_once_at_its_end",
}


def run(home: Path, *args: str) -> tuple[int, list[str]]:
    """Its exit code and what it printed, as CI runs it, but without plug-ins that are not named: they start slowly."""
    support.write_script(home / "test_it.py", TESTS)
    (home / "pytest.ini").write_text("[pytest]\n")
    env = {**os.environ, "CI": "true", "PYTHONPATH": str(Path(__file__).parent.parent)}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Each start would import plug-ins that these tests do not use.
    env.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "tests.rerun", "-p", "xdist", "-p", "no:cacheprovider", *args]
    ended = subprocess.run(
        command, cwd=home, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    return ended.returncode, ended.stdout.splitlines()


def named(said: list[str], word: str) -> set[str]:
    return {line.removeprefix(f"{word} ") for line in said if line.startswith(f"{word} test")}


def test_what_fails_once_is_flaky(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-n", "1", "-k", "not always")
    assert code == 0, said
    assert named(said, "FLAKY") == named(said, "RERUN") == FLAKY
    assert any("3 failed, 2 passed, 1 error" in line for line in said), said


def test_what_fails_again_fails_the_run(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-k", "passes or plain or always")
    assert code == 1, said
    assert named(said, "FLAKY") == {"test_it.py::test_fails_once[plain]"}
    assert named(said, "FAILED AGAIN") == {"test_it.py::test_fails_always"}
