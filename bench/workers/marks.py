"""Marks: small files by which a worker tells the benchmark when something happened, and who it is.

Whoever sees a mark sees all of it: it is written under another name first. The workers of one launch share one
directory, their first argument.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

DIRECTORY = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
WAIT_LIMIT_S = 100.0


def leave(name: str, value: int) -> None:
    unfinished = DIRECTORY / f".{name}.{ATTEMPT}.{RANK}"
    unfinished.write_text(str(value))
    unfinished.rename(DIRECTORY / f"{name}.{ATTEMPT}.{RANK}")


def await_everybody(name: str) -> None:
    """Wait until every worker of this attempt has left the mark."""
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not all((DIRECTORY / f"{name}.{ATTEMPT}.{rank}").exists() for rank in range(WORLD_SIZE)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not every worker left the mark {name!r} within {WAIT_LIMIT_S:g} s")
        time.sleep(0.005)
