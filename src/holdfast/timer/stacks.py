"""Where a process is right now, asked from outside: for the log, before a process that overran is killed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from holdfast.errors import HostError

DUMP_TIMEOUT_S = 5.0
# Dumps of one turn that run side by side. Each is a short-lived process of its own.
_PARALLEL_DUMPS = 8


def dump_with_py_spy(pid: int, timeout_s: float = DUMP_TIMEOUT_S) -> str:
    """The Python stacks of a process, by py-spy.

    py-spy pauses a process to look at it and cannot do so with one that is stopped already, or that the kernel
    will not stop. Then it is asked once more to look without pausing.
    """
    if pid <= 0:
        raise HostError("there is no such process")
    program = find_py_spy()
    until_s = time.monotonic() + timeout_s
    try:
        return _run([program, "dump", "--pid", str(pid)], timeout_s / 2)
    except HostError:
        return _run([program, "dump", "--nonblocking", "--pid", str(pid)], until_s - time.monotonic())


def find_py_spy() -> str:
    """Beside the interpreter, which need not be on the PATH, or else on the PATH."""
    places = [os.path.dirname(sys.executable), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    for place in places:
        program = os.path.join(place, "py-spy")
        if place and os.path.isfile(program) and os.access(program, os.X_OK):
            return program
    raise HostError("py-spy is not installed")


def _run(command: list[str], timeout_s: float) -> str:
    import subprocess

    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise HostError(f"py-spy did not finish within {timeout_s:.1f} s")
    except OSError as error:
        raise HostError(f"py-spy cannot be run: {error}")
    if done.returncode != 0:
        raise HostError(f"py-spy: {_reason(done.stderr)}")
    return done.stdout.strip()


def _reason(complaint: str) -> str:
    """What py-spy says is wrong, on one line and without its own stack."""
    lines = complaint.partition("Stack backtrace:")[0].split("\n")
    return " ".join(line.strip() for line in lines if line.strip()) or "failed without a word"


def text_for(pid: int, dump: Callable[[int], str]) -> str:
    """The stacks of a process, or a line that says why there are none."""
    try:
        return dump(pid)
    except Exception as error:
        return f"no stacks of process {pid}: {error or type(error).__name__}"


class Dumps:
    """Dumps of several processes, side by side in threads that nobody has to wait for."""

    def __init__(self, pids: Iterable[int], dump: Callable[[int], str], on_each: Callable[[], None]) -> None:
        self._pids = list(pids)
        self._dump = dump
        self._on_each = on_each
        self._todo = deque(self._pids)
        self._texts: dict[int, str] = {}
        for _ in range(min(len(self._pids), _PARALLEL_DUMPS)):
            threading.Thread(target=self._work, name="holdfast-stacks", daemon=True).start()

    def are_complete(self) -> bool:
        return len(self._texts) == len(self._pids)

    def finish(self) -> dict[int, str]:
        """What there is by now. Dumps that have not begun never will."""
        self._todo.clear()
        missing = {pid: f"no stacks of process {pid}: the dump did not finish in time" for pid in self._pids}
        return missing | dict(self._texts)

    def _work(self) -> None:
        while self._todo:
            try:
                pid = self._todo.popleft()
            except IndexError:
                return
            self._texts[pid] = text_for(pid, self._dump)
            self._on_each()
