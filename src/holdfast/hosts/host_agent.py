"""What runs on a host that an engine has reached: it owns the agent of this host, for a caller elsewhere.

On Ray it is an actor, by ssh it is in the process that ssh starts (`ssh/remote_agent.py`). It starts the agent as a
child and keeps its output until the caller has it. Each method may be called again after a broken connection:

    start     starts the agent
    read      waits for output, and returns it with a number. Output is kept until the caller names its number.
    wait      waits for the end of the agent, and returns its exit code and its last words
    renew     the caller is alive
    pass_on   sends a signal to the agent
    abandon   the caller is gone

Only whole lines are handed out. The agent waits if the caller does not fetch them, as at a console that is not read.

The agent lives no longer than its caller: the caller has a lease, and `renew` extends it. When the lease ends, or after
`abandon`, the agent gets SIGTERM and the grace of its workers, and is killed then. The same follows if this process is
killed (`die_with_parent`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import IO, Any

import holdfast
from holdfast import die_with_parent
from holdfast.hosts.job import AgentOrder
from holdfast.process.output.lines import HeldLine
from holdfast.process.spawner.client import REPORT_FILE_VARIABLE

_READ_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 20
_BATCH_BYTES = 1 << 16
_LINE_BYTES = 1 << 20  # A longer line is handed out in parts.
_WORDS_BYTES = 1 << 20
_MARGIN_S = 15.0  # On top of the grace of the workers. An agent's own kill ladder takes less.

Batch = list[tuple[str, bytes]]  # "stdout" or "stderr", and whole lines.


class Lease:
    """Calls `end`, in a thread, when `renew` was not called for `timeout_s`."""

    def __init__(self, timeout_s: float, end: Callable[[], None]) -> None:
        self._timeout_s, self._end, self._was_renewed = timeout_s, end, threading.Event()
        threading.Thread(target=self._watch, name="holdfast-lease", daemon=True).start()

    def renew(self) -> None:
        self._was_renewed.set()

    def _watch(self) -> None:
        while self._was_renewed.wait(self._timeout_s):
            self._was_renewed.clear()
        self._end()


class HostAgent:
    def __init__(self, lease_s: float) -> None:
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._batches: deque[Batch] = deque()
        self._bytes = 0
        self._first = 0  # The number of the first batch that is kept.
        self._open_streams = 0
        self._code: int | None = None
        self._words_fd = -1
        self._is_abandoned = False
        self._lease = Lease(lease_s, self.abandon)

    def version(self) -> str:
        return holdfast.__version__

    def start(self, order: AgentOrder) -> None:
        with self._changed:
            if self._process is not None:
                return
            self._process = self._started(order)
            for stream, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
                self._open_streams += 1
                threading.Thread(target=self._copy, args=(stream, pipe), daemon=True).start()
            threading.Thread(target=self._await_end, daemon=True).start()

    def _started(self, order: AgentOrder) -> subprocess.Popen[bytes]:
        directory = order.directory or os.getcwd()
        if not os.path.isdir(directory):
            raise FileNotFoundError(f"there is no directory {directory!r} on this host")
        self._words_fd = os.memfd_create("last words")
        kept = {name for name in os.environ if not name.startswith("PET_")}.difference(order.without)
        environment = {name: os.environ[name] for name in kept}
        environment |= {**order.environment, REPORT_FILE_VARIABLE: f"/proc/{os.getpid()}/fd/{self._words_fd}"}
        agent = (sys.executable, "-P", "-m", "holdfast", *order.arguments)
        pipe = subprocess.PIPE
        return subprocess.Popen(
            die_with_parent.words(*agent, grace_s=order.grace_s + _MARGIN_S), stdin=pipe, stdout=pipe, stderr=pipe,
            env=environment, cwd=directory, start_new_session=True,
        )  # fmt: skip

    def read(self, fetched: int) -> tuple[int, Batch, bool]:
        """The number of the batch, its lines, and whether it is the last. `fetched`: how many the caller has."""
        with self._changed:
            while self._first < fetched and self._batches:
                self._bytes -= sum(len(lines) for _, lines in self._batches.popleft())
                self._first += 1
                self._changed.notify_all()
            while not self._batches and self._open_streams:
                self._changed.wait()
            batch = self._batches[0] if self._batches else []
            return self._first, batch, not self._open_streams and len(self._batches) <= 1

    def wait(self) -> tuple[int, str]:
        with self._changed:
            while self._code is None:
                self._changed.wait()
        return self._code, os.pread(self._words_fd, _WORDS_BYTES, 0).decode("utf-8", "replace")

    def renew(self) -> None:
        self._lease.renew()

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def pass_on(self, number: int) -> None:
        if self._process is None:
            os._exit(1)  # The agent must not start later.
        self._process.send_signal(number)

    def abandon(self) -> None:
        """What the agent still writes is dropped: it must not wait for a caller that is gone."""
        if self._process is None:
            os._exit(1)  # Nothing was started here.
        with self._changed:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._is_abandoned = True
            self._changed.notify_all()

    # In threads.

    def _copy(self, stream: str, pipe: IO[Any]) -> None:
        held = HeldLine()
        while piece := os.read(pipe.fileno(), _READ_BYTES):
            lines = held.take(piece)
            if len(held) > _LINE_BYTES:
                lines += held.release() + b"\n"
            self._keep(stream, lines)
        rest = held.flush()
        self._keep(stream, rest if not rest or rest.endswith(b"\n") else rest + b"\n")
        with self._changed:
            self._open_streams -= 1
            self._changed.notify_all()

    def _keep(self, stream: str, lines: bytes) -> None:
        with self._changed:
            while self._bytes >= _BUFFER_BYTES and not self._is_abandoned:
                self._changed.wait()
            if not lines or self._is_abandoned:
                return
            last = self._batches[-1] if len(self._batches) > 1 else None  # The first may be on its way.
            if last is not None and sum(len(each) for _, each in last) < _BATCH_BYTES:
                last.append((stream, lines))
            else:
                self._batches.append([(stream, lines)])
            self._bytes += len(lines)
            self._changed.notify_all()

    def _await_end(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        with self._changed:
            self._code = 128 - code if code < 0 else code
            self._changed.notify_all()
