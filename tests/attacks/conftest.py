"""What holds for every attack: a coordinator of its own with a ceiling for its memory, and no process is left."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks import harness
from tests.coordinators import CoordinatorProcess, coordinator
from tests.e2e.conftest import holdfast  # noqa: F401  # a fixture
from tests.integration.conftest import no_process_left  # noqa: F401  # a fixture


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator without a token. It stays alive, writes no traceback, and ends when it is told to."""
    with coordinator(tmp_path) as process:
        resource.prlimit(process.process.pid, resource.RLIMIT_AS, (harness.CEILING_BYTES, harness.CEILING_BYTES))
        yield process
    assert process.process.returncode == 0, f"it did not end on SIGTERM: {process.process.returncode}\n{process.log}"
