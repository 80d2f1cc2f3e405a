"""The `holdfast` command as a user has it: a process of its own, what it prints, how it ends, what it leaves.

Output goes to files and not through pipes, so that the end of the command is its own end and not that of whoever
else holds the pipe. Every run checks, without being asked, that nothing of it is left and that no traceback of
holdfast itself was printed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

import holdfast
from tests import support
from tests.support import clean_environment as clean_environment

COMMAND = str(Path(sys.executable).with_name("holdfast"))
PACKAGE = os.path.dirname(holdfast.__file__)
DEADLINE_S = 60.0

# Python ignores SIGPIPE and hands that on to what it executes; a shell does not.
_WRAPPER = """
import os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
{}
os.execv(sys.argv[1], sys.argv[1:])
"""

# For `before`: a directory that the user may not enter, as after `cd /root; sudo -u user ...`. Root gives up what lets
# it enter all the same.
ENTERS_LOCKED = """
import ctypes
os.makedirs("locked", exist_ok=True)
os.chdir("locked")
os.chmod(".", 0)
for capability in range(64):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
"""

# A line of ours is one write, so it is whole. It need not begin a line: a worker's traceback comes in many writes.
# What the report says of us ("Stopped by holdfast: rank 0") is no such line.
_OWN_WORDS = re.compile(r"(?<!Stopped by )holdfast(?: \w+)?: .*")


@dataclass(frozen=True)
class Ended:
    """A command that has ended. `own` are the lines of stderr that holdfast printed as its own words."""

    code: int
    raw_out: bytes
    raw_err: bytes

    @property
    def out(self) -> str:
        return self.raw_out.decode("utf-8", "replace")

    @property
    def err(self) -> str:
        return self.raw_err.decode("utf-8", "replace")

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def own(self) -> list[str]:
        return _OWN_WORDS.findall(self.err)

    @property
    def last(self) -> str:
        return (self.err.splitlines() or [""])[-1]

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out[-4000:]}\n--- stderr\n{self.err[-8000:]}"


class Running(support.LoggedProcess):
    """A command on its way. Its log is what it has said on stderr."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, err: Path, mark: str) -> None:
        super().__init__("the command", process, err)
        self._out, self._mark = out, mark

    def catches(self, number: signal.Signals) -> bool:
        """Whether it has installed a handler for that signal."""
        return bool(support.signals_of(self.pid, "SigCgt") >> (number - 1) & 1)

    def so_far(self) -> Ended:
        """What it has printed until now, whether it has ended or not."""
        return Ended(-1, self._out.read_bytes(), self._path.read_bytes())

    def wait(self, deadline_s: float = DEADLINE_S, *, may_own_traceback: bool = False) -> Ended:
        code = super().wait(deadline_s)
        ended = replace(self.so_far(), code=code)
        left = self.left()
        assert not left, f"processes left behind: {left}\n{ended}"
        assert may_own_traceback or f'File "{PACKAGE}' not in ended.err, f"a traceback of holdfast\n{ended}"
        assert "internal error; please report" not in ended.err, str(ended)
        return ended

    def left(self) -> dict[int, str]:
        """Every process of this test that is still there, with its command line. A coordinator that an agent has
        started may end a moment later; one without a command line is just ending."""
        found = {pid: _command_line(pid) for pid in support.marked(self._mark)}
        ending = {pid for pid, line in found.items() if not line or "holdfast.rendezvous.coordinator.process" in line}
        return {pid: line for pid, line in found.items() if pid not in ending or support.survivors([pid])}

    def workers(self) -> list[int]:
        """The processes below the spawner."""
        spawners = psutil.Process(self.pid).children()
        return [worker.pid for spawner in spawners for worker in spawner.children()]


class Holdfast:
    """Starts commands in a directory of their own. `mark` finds their processes, wherever they hang."""

    def __init__(self, directory: Path, mark: str) -> None:
        self.directory = directory
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.mark = mark
        self._count = 0

    def script(self, source: str, name: str = "job.py", *, executable: bool = False) -> str:
        """Writes a script into the directory that commands run in; returns its name there."""
        support.write_script(self.directory / name, source, executable=executable)
        return name

    def environment(self, env: Mapping[Any, Any] | None = None) -> dict[Any, Any]:
        cache = str(self.directory / "cache")
        settings = {"TMPDIR": str(self.temporary), "XDG_CACHE_HOME": cache, support.TEST_MARK: self.mark}
        return {**clean_environment(), **settings, **(env or {})}

    def start(
        self,
        *args: str | bytes,
        env: Mapping[Any, Any] | None = None,
        command: tuple[str, ...] = (COMMAND, "run"),
        before: str = "",
        **options: Any,
    ) -> Running:
        """`before` is Python code that the process executes before it becomes the command."""
        self._count += 1
        out, err = (self.directory / f"{self._count}.{name}" for name in ("out", "err"))
        wrapped = (sys.executable, "-S", "-c", _WRAPPER.format(before), *command) if before else command
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                [*wrapped, *args],
                env=self.environment(env),
                **{
                    "stdin": subprocess.DEVNULL,
                    "stdout": out_file,
                    "stderr": err_file,
                    "cwd": self.directory,
                    "start_new_session": True,
                    **options,
                },
            )
        return Running(process, out, err, self.mark)

    def run(self, *args: str | bytes, deadline_s: float = DEADLINE_S, **options: Any) -> Ended:
        return self.start(*args, **options).wait(deadline_s)

    def program(self, *command: str, **options: Any) -> Ended:
        """Another program, watched in the same way."""
        return self.run(*command[1:], command=command[:1], **options)


def ends_of(*nodes: Running) -> list[Ended]:
    """Once all have ended: each is asked whether processes of the test are left."""
    for node in nodes:
        node.process.wait(DEADLINE_S)
    return [node.wait() for node in nodes]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return "(gone)"
