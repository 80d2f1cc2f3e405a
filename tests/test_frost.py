"""What runs tests under frost runs them all, tells how they went, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import frost, support

TEST = """
import subprocess

def test_it():
    assert subprocess.run(["sleep", "0.5"]).returncode == {expected}
"""


@pytest.fixture(autouse=True)
def _can_freeze() -> None:
    try:
        with frost.groups():
            pass
    except OSError as error:
        pytest.skip(f"the control group freezer (version 1) cannot be used here: {error}")


@pytest.mark.parametrize("expected", [0, 1], ids=["passes", "fails"])
def test_tests_under_frost(tmp_path: Path, expected: int) -> None:
    path = support.write_script(tmp_path / "test_it.py", TEST.format(expected=expected))
    command = [sys.executable, "-m", "tests.frost", "--most-ms=50", "-q", "-p", "no:cacheprovider", path]
    root = str(Path(__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": root, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # Plug-ins start slowly.
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=support.DEADLINE_S)
    assert (process.returncode, f"1 {['passed', 'failed'][expected]}" in said) == (expected, True), said
    assert not list(frost.FREEZER.glob(f"holdfast-frost-{process.pid}-*"))


def test_who_is_struck_stands_still() -> None:
    with subprocess.Popen(["sleep", "600"]) as process, frost.groups() as made:
        try:
            frost.move(process.pid, made[0])
            assert frost.group_of(process.pid) == made[0].name
            (made[0] / "freezer.state").write_text("FROZEN")
            state = made[0] / "freezer.state"
            support.wait_until(lambda: state.read_text().strip() == "FROZEN", "it is frozen")
        finally:
            frost.disband(made[0])
            process.kill()
