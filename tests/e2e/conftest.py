"""What every end-to-end test gets: the command, and a check that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
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
