"""The two launchers as a user starts them: commands in an environment of their own.

Both get the same environment: the caller's without anything that configures Python or a launcher, so that a
setting of the shell (no bytecode, unbuffered output) does not become part of the result.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

WORKERS = Path(__file__).parent / "workers"
NPROC = 4
RUN_LIMIT_S = 180.0

_SETTINGS = ("PYTHON", "PET_", "TORCHELASTIC_", "TORCH_ELASTIC_", "HOLDFAST_", "OMP_")
# Where bytecode is kept is not a setting of how anything runs.
_KEPT = {"PYTHONPYCACHEPREFIX"}


class BenchmarkError(Exception):
    """The measurement could not be made; the text says why."""


class Unexpected(Exception):  # noqa: N818  (not an error by itself: `started` makes one of it)
    """A command that was being watched did something else; `started` adds which command, and its last words."""


@dataclass(frozen=True, slots=True)
class Launcher:
    name: str
    command: tuple[str, ...]

    def argv(self, options: Sequence[str], script: str, args: Sequence[object] = ()) -> list[str]:
        chosen = ("--nproc-per-node", str(NPROC), *options)
        return [*self.command, *chosen, str(WORKERS / script), *map(str, args)]


def find_launchers() -> tuple[Launcher, Launcher]:
    """holdfast and torchrun of the Python that runs this."""
    scripts = Path(sys.executable).parent
    for name in ("holdfast", "torchrun"):
        if not os.access(scripts / name, os.X_OK):
            raise BenchmarkError(f"{scripts / name} is missing; run this with the Python of an environment that has it")
    return (
        Launcher("holdfast", (str(scripts / "holdfast"), "run")),
        Launcher("torchrun", (str(scripts / "torchrun"),)),
    )


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_SETTINGS)}
    # Given, so that neither launcher has to choose one and to say so.
    return {**kept, "OMP_NUM_THREADS": "1"}


def seconds_to_finish(argv: Sequence[str], *, stdout: IO[bytes] | int = subprocess.DEVNULL, expect: int = 0) -> float:
    """The wall time of a command from its start to its end."""
    began = time.perf_counter()
    with started(argv, stdout=stdout, expect=expect) as process:
        process.wait(RUN_LIMIT_S)
        return time.perf_counter() - began


@contextmanager
def started(
    argv: Sequence[str],
    *,
    stdout: IO[bytes] | int = subprocess.DEVNULL,
    expect: int | None = 0,
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs. It has ended when the block has: with the status that is expected, or it is an error.

    None expects the block to leave it running; it is then told to stop, and may end with any status.
    """
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=said, env=environment(), cwd="/"
        )
        try:
            yield process
            if process.poll() != expect:
                raise Unexpected(f"it ended with status {process.returncode}, not {expect}")
        except (subprocess.TimeoutExpired, Unexpected) as problem:
            raise BenchmarkError(f"{' '.join(argv)}: {problem}; its last words:\n{_end_of(said)}") from None
        finally:
            _stop(process)


def _end_of(said: IO[bytes]) -> str:
    said.seek(0)
    return said.read().decode(errors="replace")[-2000:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """In order, so that a launcher takes its workers with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
