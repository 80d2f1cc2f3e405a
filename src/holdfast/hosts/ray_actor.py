"""What runs on each node of a Ray cluster: an actor that owns the agent of this node.

The actor starts the agent as a child, under `owned.py`, and keeps what it writes until the caller fetches it.
Each method may be called again after a broken connection:

    start   starts the agent; returns the version of holdfast on this node
    read    waits for output, and returns it with a number. Output is kept until the caller names its number.
    wait    waits for the end of the agent, and returns its exit code and its report
    renew   the caller is alive
    pass_on sends a signal to the agent

Only whole lines are handed out. The agent waits if the caller does not fetch them, as at a console that is not read.

An actor of a caller that was killed is killed by Ray, as a rule; `owned.py` notices. If Ray itself is gone, no call of
`renew` comes for `LEASE_S`, and the actor ends its agent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

import holdfast
from holdfast.frozen import frozen
from holdfast.hosts.node_output import Batch
from holdfast.process.output.lines import HeldLine
from holdfast.process.spawner.client import REPORT_FILE_VARIABLE

LEASE_S = 30.0
_READ_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 20
_BATCH_BYTES = 1 << 16
_LINE_BYTES = 1 << 20  # A longer line is handed out in parts.
_REPORT_BYTES = 1 << 20


@frozen
class Order:
    """The command without its interpreter, which is that of the actor. An empty directory is the actor's."""

    command: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    without: tuple[str, ...]  # Variables that the agent must not have.
    grace_s: float


class NodeAgent:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._batches: deque[Batch] = deque()
        self._bytes = 0
        self._first = 0  # The number of the first batch that is kept.
        self._open_streams = 0
        self._code: int | None = None
        self._report_fd = -1
        self._heard_at = time.monotonic()

    def start(self, order: Order) -> str:
        with self._changed:
            if self._process is None:
                self._process = self._started(order)
                for stream, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
                    self._open_streams += 1
                    threading.Thread(target=self._copy, args=(stream, pipe), daemon=True).start()
                threading.Thread(target=self._await_end, daemon=True).start()
                threading.Thread(target=self._await_caller, daemon=True).start()
        return holdfast.__version__

    def _started(self, order: Order) -> subprocess.Popen[bytes]:
        directory = order.directory or os.getcwd()
        if not os.path.isdir(directory):
            raise FileNotFoundError(f"there is no directory {directory!r} on this node")
        self._report_fd = os.memfd_create("report")
        # The options are those of the job and no others.
        kept = {name for name in os.environ if not name.startswith("PET_")}.difference(order.without)
        environment = {name: os.environ[name] for name in kept}
        environment |= {**order.environment, REPORT_FILE_VARIABLE: f"/proc/{os.getpid()}/fd/{self._report_fd}"}
        owned = [sys.executable, "-P", "-m", "holdfast.hosts.owned", str(order.grace_s), "", sys.executable]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*owned, *order.command], stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=directory,
            start_new_session=True,
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
        report = os.pread(self._report_fd, _REPORT_BYTES, 0).decode("utf-8", "replace")
        return self._code, report

    def renew(self) -> None:
        self._heard_at = time.monotonic()

    def pass_on(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

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
        if not lines:
            return
        with self._changed:
            while self._bytes >= _BUFFER_BYTES:
                self._changed.wait()
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

    def _await_caller(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with self._changed:
            while self._code is None and (left_s := self._heard_at + LEASE_S - time.monotonic()) > 0:
                self._changed.wait(left_s)
        self._process.stdin.close()
