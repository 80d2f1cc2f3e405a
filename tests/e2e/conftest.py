"""What every end-to-end test gets: the command, and a check that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import Holdfast


@pytest.fixture
def holdfast(tmp_path: Path) -> Iterator[Holdfast]:
    mark = uuid.uuid4().hex
    home = tmp_path / "home"
    home.mkdir()
    yield Holdfast(home, mark)
    left = support.marked(mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind when the test was over: {left}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    done = subprocess.run([mount or "mount", "-t", "tmpfs", "-o", "size=256k", "none", place], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)
