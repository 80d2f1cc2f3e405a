"""One worker process as its agent sees it: what the spawner reported of it, and what that means.

What a worker did by itself and what was done to it are kept apart: an end that comes after the kill ladder began
counts as ours, unless the worker left evidence of a failure of its own.

A worker whose exception has left the program may take long to end: exit handlers, libraries that take themselves down,
a large heap. Its peers notice that it is gone, and may be faster. So a worker that has raised counts as failed from
the moment that another one has.

The opening text of `bootstrap` has the format of a black box. A program may write anything into its box, and has other
rights than this process, perhaps. So of its box only the last part is read, a few records at most, and its values are
never touched: they are pickles. A function is trusted as its caller is. Its box is read whole, because a value may have
any size.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from holdfast import procfs
from holdfast.failures.records import Evidence
from holdfast.frozen import changed, dataclass, field
from holdfast.process.errors import ProcessFailure
from holdfast.process.spawner.bootstrap import ERROR, EVIDENCE_LIMIT, MAGIC, OWN_FILE, VALUE
from holdfast.process.workers.ladder import Ladder

# A worker that ends so after it was told to stop still failed by itself.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS})

# How faulthandler begins what it writes on a fatal signal.
_CRASH = "Fatal Python error"
_STACK_LIMIT_CHARS = 1 << 16  # The report shows 60 lines of it, the first of which say most.

_MOST_RECORDS = 64  # Of a program. Usually there is one.
_READ_BYTES = 1 << 20


@dataclass(slots=True)
class RunProcsResult:
    """How a group of processes ended; the keys are local ranks."""

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        return bool(self.failures)


@dataclass(slots=True)
class BlackBox:
    """The content of a black box."""

    value: bytes | None = None
    error: dict[str, Any] | None = None
    text: str = ""


def read_of(fd: int, *, is_function: bool) -> BlackBox:
    """Never raises. The worker can write to the box, and cut it, while it is read. That of a program costs
    milliseconds, whatever it has left."""
    if is_function:
        whole = bytearray()
        while piece := os.pread(fd, _READ_BYTES, len(whole)):
            whole += piece
        return read_blackbox(bytes(whole))
    data = os.pread(fd, EVIDENCE_LIMIT, max(0, os.fstat(fd).st_size - EVIDENCE_LIMIT))
    start = len(data)
    for _ in range(_MOST_RECORDS):
        start = max(0, data.rfind(MAGIC, 0, start))
    box = read_blackbox(data[start:])
    box.value = None
    return box


def read_blackbox(data: bytes) -> BlackBox:
    """Never raises. Of several records of a kind the last whole one counts."""
    box = BlackBox()
    texts = []
    unread = search = 0
    while (start := data.find(MAGIC, search)) >= 0:
        body = start + len(MAGIC) + 9
        kind = data[start + len(MAGIC) : body - 8]
        if kind not in (VALUE, ERROR, b""):
            search = start + 1
            continue
        texts.append(data[unread:start])
        unread = search = body + int.from_bytes(data[body - 8 : body], "big")
        if max(body, unread) > len(data):
            break
        if kind == VALUE:
            box.value = data[body:unread]
            continue
        import json

        with contextlib.suppress(ValueError, RecursionError):
            error = json.loads(data[body:unread])
            box.error = error if isinstance(error, dict) else box.error
    tail = data[unread:]
    tail = next((tail[:-size] for size in (3, 2, 1) if tail.endswith(MAGIC[:size])), tail)
    box.text, own = b"".join([*texts, tail]).decode("utf-8", "replace"), f'"{OWN_FILE}", line '
    if own in box.text:
        box.text = "\n".join(line for line in box.text.split("\n") if own not in line)
    return box


@dataclass(slots=True)
class Slot:
    """What is known of one worker."""

    local_rank: int
    blackbox_fd: int
    is_function: bool = False  # Otherwise it is a program, whose box is read with care.
    pid: int | None = None
    pidfd: int | None = None
    exitcode: int | None = None
    order: int | None = None
    ended_at: float | None = None  # As the spawner saw it; monotonic.
    refusal: int | None = None  # The number of the error for which it could not be started.
    stop: Ladder | None = None  # Set if it ended while the group was being stopped.
    # Why it counts as failed, whatever its exit code says: a note; or for how long the group had shown no progress, and
    # where this worker was then.
    blamed: Evidence = field(default_factory=Evidence)
    # It was asked to call its functions when its group was stopped, and will send itself the signal. An exception from
    # then on comes from what they have ended.
    is_hooked: bool = False
    is_excused: bool = False
    was_starting: bool = False  # When its group was stopped: it is killed, as it has nothing to end in order.
    _box: BlackBox | None = None
    _box_size: int = 0

    @property
    def is_underway(self) -> bool:
        """Whether it was ordered, and nothing was heard of it yet."""
        return self.pid is None and self.exitcode is None and self.refusal is None

    @property
    def is_running(self) -> bool:
        return self.pid is not None and self.exitcode is None

    def blame(self, **known: Any) -> None:
        self.blamed = changed(self.blamed, **known)

    def end(self, exitcode: int, order: int | None, stop: Ladder | None, at: float | None = None) -> None:
        self.exitcode, self.order, self.ended_at, self.stop = exitcode, order, at, stop

    def send(self, number: signal.Signals) -> None:
        """Signal it. One that is gone, or that has changed its user, must not keep others from their signal; what
        cannot be killed is named after the sweep."""
        assert self.pid is not None
        if self.pidfd is None:
            procfs.kill(self.pid, number)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, number)

    def continue_if_stopped(self) -> None:
        """SIGSTOP has stopped it, say: it would not hear of another signal, and would be killed after the grace."""
        if self.pid is not None and procfs.state(self.pid) == "T":
            self.send(signal.SIGCONT)

    def has_agreed(self, code: int | None) -> bool:
        """Whether it has ended with that code, which is no failure."""
        return self.exitcode is not None and self.exitcode == code and not self.blamed.note

    def failed_by_itself(self) -> bool:
        if self.pid is None or (self.exitcode is None and not self.blamed.hang):
            return False
        if self.blamed.hang or self.blamed.note:
            return True
        if not self.exitcode:
            return False
        if self.stop is None or -self.exitcode in _CRASHES:
            return True
        # The error was recorded before the end: a worker that raised, and was stopped during its cleanup, has failed.
        return not self.is_excused and self.box().error is not None

    def has_raised(self) -> bool:
        """An exception has left its program, and it has not ended yet."""
        return self.is_running and not self.is_excused and self.box().error is not None

    def signal_hooked(self, number: signal.Signals) -> None:
        if self.is_hooked and self.is_running:
            self.send(number)

    def how_stopped(self) -> str:
        """For a worker that did not end by itself."""
        if self.stop is None:
            return f"SIGKILL, but process {self.pid} cannot be killed"
        if self.was_starting:
            return "while it was being started"
        name = self.stop.signal.name
        if self.exitcode in (0, -self.stop.signal):
            return name
        if self.exitcode == -signal.SIGKILL:
            after_s = self.stop.grace_s  # Less after a second Ctrl-C, or if it was killed by another process.
            if self.ended_at is not None:
                after_s = min(after_s, max(0.0, round(self.ended_at - self.stop.began_at, 1)))
            return f"SIGKILL, {after_s:g} s after {name}"
        return f"{name}, exit code {self.exitcode}"

    def has_returned(self) -> bool:
        """Its function has returned, and it waits until the functions of the others have returned."""
        return self.is_running and self.box().value is not None

    def box(self) -> BlackBox:
        """What is in its black box. It is read again only if it has changed; after `close` it does not."""
        size = os.fstat(self.blackbox_fd).st_size if self.blackbox_fd >= 0 else self._box_size
        if self._box is None or size != self._box_size:
            self._box, self._box_size = read_of(self.blackbox_fd, is_function=self.is_function), size
        return self._box

    def stack(self) -> str:
        """Where it was when it crashed or was found hanging."""
        if self.blamed.hang:
            return self.blamed.stack
        # What stands before was asked for, while it was well.
        text = self.box().text
        return text[text.rindex(_CRASH) :][:_STACK_LIMIT_CHARS] if _CRASH in text else ""

    def return_value(self) -> Any:
        """None if there is none, or if the worker did not end well. A worker whose value this process cannot unpickle
        counts as failed."""
        data = self.box().value if self.exitcode == 0 else None
        if data is None:
            return None
        import pickle

        try:
            return pickle.loads(data)
        except Exception as error:
            self.blame(note=f"its return value cannot be read back: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Let go of the descriptors, and keep what was in the black box."""
        self.box()
        os.close(self.blackbox_fd)
        self.blackbox_fd = -1
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def global_rank(local_rank: int, env: dict[str, str]) -> int:
    """The rank in the run; a program that starts processes itself may have given none."""
    text = env.get("RANK", "")
    return int(text) if text.isdecimal() else local_rank
