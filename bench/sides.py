"""The sides that are compared, all started as a user starts them: one command line that runs N times one script.

    holdfast            holdfast run
    holdfast preload    holdfast run --preload torch: workers are forked from a process that has imported torch
    holdfast kept       holdfast run --preload torch --preload-keep 10m, after another such run
    torchrun            torchrun
    bare                a shell loop that starts the same processes, and nothing else (workers/bare.sh)

All get the same environment: the caller's without settings of Python or of a launcher. Every process that a measure
starts, however deep, is a descendant of this one, because this one adopts orphans; `end_descendants` ends them all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from tests.support import free_port, wait_until

WORKERS = Path(__file__).parent / "workers"
WAIT_LIMIT_S = 60.0
NS_PER_S = 1e9
NS_PER_MS = 1e6
_SCRIPTS = Path(sys.executable).parent
_SETTINGS = ("PYTHON", "PET_", "TORCHELASTIC_", "TORCH_ELASTIC_", "HOLDFAST_", "OMP_")
_KEPT = {"PYTHONPYCACHEPREFIX"}  # Where bytecode is kept changes nothing in how a program runs.
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    command: tuple[str, ...]
    backend: str = ""
    """Of the rendezvous that users get with it."""

    def argv(self, nproc: int, script: str, args: Sequence[object] = (), options: Sequence[str] = ()) -> list[str]:
        program = [str(WORKERS / script), *map(str, args)]
        if self.name == "bare":
            return [*self.command, str(nproc), str(free_port()), sys.executable, *program]
        return [*self.command, "--nproc-per-node", str(nproc), *options, *program]


HOLDFAST = Side("holdfast", (str(_SCRIPTS / "holdfast"), "run"), "tcp")
PRELOAD = Side("holdfast preload", (*HOLDFAST.command, "--preload", "torch"), "tcp")
KEPT = Side("holdfast kept", (*PRELOAD.command, "--preload-keep", "10m"), "tcp")
TORCHRUN = Side("torchrun", (str(_SCRIPTS / "torchrun"),), "c10d")
BARE = Side("bare", ("/bin/sh", str(WORKERS / "bare.sh")))


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_SETTINGS)}
    # Given, so that no launcher has to choose a number and to say so.
    return {**kept, "OMP_NUM_THREADS": "1", **more}


# --- a command that runs ------------------------------------------------------------------------------------------


class Run:
    """One command. `began_ns` is the monotonic clock just before it was started, `cpu_s` that of its whole tree."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], stdout: IO[bytes] | int, said: IO[bytes]) -> None:
        self._argv, self._said = argv, said
        self.began_ns = time.monotonic_ns()
        self.popen = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=said, env=env, cwd="/", start_new_session=True
        )
        self.pid = self.popen.pid
        self.ended_ns = 0
        self.cpu_s = 0.0

    def wait(self, limit_s: float = WAIT_LIMIT_S) -> int:
        """Until it has ended; the exit status."""
        if self.popen.returncode is None:
            self.ended_ns = max(gone_ns([self.pid], limit_s).values())
            _, status, usage = os.wait4(self.pid, 0)
            self.cpu_s = usage.ru_utime + usage.ru_stime
            self.popen.returncode = os.waitstatus_to_exitcode(status)
        return self.popen.returncode

    def succeed(self) -> Run:
        assert self.wait() == 0, f"{' '.join(self._argv)} ended with status {self.wait()}: {self.last_words()}"
        return self

    @property
    def took_s(self) -> float:
        return (self.ended_ns - self.began_ns) / NS_PER_S

    def has_ended(self) -> bool:
        """Looks only; `wait` collects the status."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.popen.returncode is not None or os.waitid(os.P_PID, self.pid, options) is not None

    def last_words(self, most: int = 4000) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")[-most:]

    def close(self) -> None:
        """In order first, so that a launcher takes its workers with it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.popen.returncode is None:
                with contextlib.suppress(AssertionError):
                    os.kill(self.pid, number)
                    os.kill(self.pid, signal.SIGCONT)
                    self.wait(10)


@contextmanager
def started(
    argv: Sequence[str], stdout: IO[bytes] | int = subprocess.DEVNULL, env: Mapping[str, str] | None = None
) -> Iterator[Run]:
    """A command that runs; it has ended when the block has."""
    with tempfile.TemporaryFile() as said:
        run = Run(argv, environment(**(env or {})), stdout, said)
        try:
            yield run
        except AssertionError as error:
            if not run.has_ended():
                raise
            raise AssertionError(f"{error} (status {run.wait()}): {run.last_words()}") from None
        finally:
            run.close()


def finish(argv: Sequence[str], **env: str) -> Run:
    with started(argv, env=env) as run:
        return run.succeed()


def gone_ns(pids: Sequence[int], limit_s: float = WAIT_LIMIT_S) -> dict[int, int]:
    """When each process ended, by the monotonic clock. Its parent may not have collected it yet."""
    ends, found = time.monotonic() + limit_s, dict[int, int]()
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for pid in pids:
            selector.register(stack.enter_context(open(os.pidfd_open(pid))), selectors.EVENT_READ, pid)
        while len(found) < len(pids):
            ready = selector.select(max(0.0, ends - time.monotonic()))
            now_ns = time.monotonic_ns()
            assert ready, f"a process still runs after {limit_s:g} s"
            for key, _ in ready:
                selector.unregister(key.fileobj)
                found[key.data] = now_ns
    return found


# --- what workers say ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mark:
    """See workers/marks.py."""

    pid: int
    at_ns: int
    value: int


class Marks:
    """What the workers of one run leave in a directory of theirs, which is their first argument."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def __str__(self) -> str:
        return str(self.directory)

    def found(self, name: str, attempt: int = 0) -> dict[int, Mark]:
        """By rank."""
        paths = self.directory.glob(f"{name}.{attempt}.*")
        return {int(path.suffix[1:]): Mark(*map(int, path.read_text().split())) for path in paths}

    def of_all(self, name: str, attempt: int, count: int) -> list[Mark]:
        found = self.found(name, attempt)
        assert len(found) == count, f"{len(found)} workers left the mark {name}.{attempt}, not {count}"
        return list(found.values())

    def last_ns(self, name: str, attempt: int, count: int) -> int:
        return max(mark.at_ns for mark in self.of_all(name, attempt, count))

    def wait(
        self, name: str, attempt: int, count: int, run: Run | None = None, limit_s: float = WAIT_LIMIT_S
    ) -> list[Mark]:
        def are_there() -> bool:
            has_ended = run is not None and run.has_ended()  # Asked first: it may leave the last mark and end.
            found = len(list(self.directory.glob(f"{name}.{attempt}.*"))) >= count
            assert found or not has_ended, f"the run ended before {count} workers left the mark {name}.{attempt}"
            return found

        wait_until(are_there, f"{count} marks {name}.{attempt}", limit_s)
        return self.of_all(name, attempt, count)


@contextmanager
def marks_of_workers() -> Iterator[Marks]:
    with tempfile.TemporaryDirectory() as directory:
        yield Marks(directory)


# --- all processes ------------------------------------------------------------------------------------------------


def own_all_processes() -> None:
    """Adopt orphans, so that nothing that was started escapes; and allow as many descriptors as the system does."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_descendants() -> None:
    """Kill what is left, by pid, until nothing is."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)


# --- what processes use -------------------------------------------------------------------------------------------


def memory_mb(pids: Sequence[int], kind: str = "Pss") -> float:
    """By /proc/PID/smaps_rollup: `Pss` shares pages among the processes that have them, `Rss` counts them for each."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(int(kib) for text in texts for kib in re.findall(rf"^{kind}: +(\d+)", text, re.MULTILINE)) * 1024 / 1e6


def cpu_ns(pids: Sequence[int]) -> int:
    """Of all their threads that live, to the nanosecond."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def helpers_of(run: Run, workers: Sequence[Mark]) -> list[int]:
    """The processes below a launcher that are not workers: for holdfast the spawner."""
    not_helpers = {mark.pid for mark in workers}
    below = psutil.Process(run.pid).children(recursive=True)
    owned = {process.pid for pid in not_helpers for process in psutil.Process(pid).children(recursive=True)}
    return [process.pid for process in below if process.pid not in not_helpers | owned]
