"""Starting, watching and stopping one group of processes.

A `PContext` is one life of a worker group. Its parts: the spawner, which owns the processes; a black box for
each worker (memory that outlives it, in which the bootstrap leaves the return value, the traceback or the stack
at the moment of a fatal signal); and the pump, which carries what workers write to files and the console.

Events come from the spawner through `SpawnerLink` and are kept in one `_Slot` a worker. `wait` only looks and
waits; it stops nothing. `close` is the kill ladder (see `stop`). What a worker did by itself and what was done
to it are kept apart: an end that comes after the ladder began counts as ours unless the worker left evidence of
a failure of its own.

stderr always passes through the pump unless it is redirected to a file, so that the last lines of a worker that
fails are known; on a terminal the worker is given a terminal.
"""

from __future__ import annotations

import abc
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from holdfast.diagnosis import oom
from holdfast.diagnosis.report import Evidence
from holdfast.errors import UserError
from holdfast.process import entry, signals, stop
from holdfast.process.bootstrap import BlackBox, read_blackbox
from holdfast.process.errors import ProcessFailure
from holdfast.process.link import (
    Exited,
    Refused,
    Report,
    SpawnerLink,
    SpawnerLost,
    Started,
    StartOrder,
    Swept,
)
from holdfast.process.logs import LogsDest, LogsSpecs
from holdfast.process.outlets import Outlets, dup_or_null

logger = logging.getLogger(__name__)

DEFAULT_GRACE_S = 30.0
# A worker that ends so after it was told to stop still failed by itself.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS})


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
class _Slot:
    """What is known of one worker."""

    local_rank: int
    blackbox_fd: int
    pid: int | None = None
    pidfd: int | None = None
    exitcode: int | None = None
    order: int | None = None
    ended_during_stop: bool = False
    note: str = ""
    box: BlackBox | None = None

    @property
    def is_running(self) -> bool:
        return self.pid is not None and self.exitcode is None


class PContext(abc.ABC):
    """A group of processes that start and stop together. Made by `start_processes`."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        *,
        numa_options: Any = None,
        link: SpawnerLink | None = None,
    ) -> None:
        _check_ranks("args", args, len(args))
        _check_ranks("envs", envs, len(args))
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        self.destinations: LogsDest = logs_specs.reify(envs)
        self.stdouts = self.destinations.stdouts
        self.stderrs = self.destinations.stderrs
        self.error_files = self.destinations.error_files
        self.filtered_stdout = self.destinations.filtered_stdout
        self.filtered_stderr = self.destinations.filtered_stderr
        self.survivors: tuple[tuple[int, str], ...] = ()
        self._outlets = Outlets(
            name,
            self.destinations,
            log_line_prefixes or {},
            {"stdout": duplicate_stdout_filters, "stderr": duplicate_stderr_filters},
        )
        self._numa_options = numa_options
        self._link = link
        self._owns_link = link is None
        self._slots: dict[int, _Slot] = {}
        self._resources = ExitStack()
        self._kills_before: oom.MemoryKills | None = None
        self._stop_signal: signal.Signals | None = None
        self._stop_grace_s = 0.0
        self._was_killed = False
        self._is_swept = False
        self._is_closed = False

    # Starting.

    def start(self) -> None:
        """Start every process, or none: if one cannot be started the others are ended and the reason is raised."""
        if self._slots:
            raise ValueError(f"the processes of {self.name!r} were started before")
        self._resources.enter_context(signals.deferred())
        try:
            self._start()
        except BaseException:
            self.close(signal.SIGKILL, 0)
            raise

    def _start(self) -> None:
        self._kills_before = oom.memory_killer_counter()
        if self._link is None or self._link.is_lost:
            self._link = self._make_link()
        self._link.prepare()
        for rank in range(self.nprocs):
            self._start_one(self._link, rank)
        self._outlets.start()
        while any(slot.pid is None and slot.exitcode is None for slot in self._slots.values()):
            self._take_reports(None, new_signals_only=True)

    def _start_one(self, link: SpawnerLink, rank: int) -> None:
        self._slots[rank] = _Slot(rank, os.memfd_create(f"holdfast-{rank}", os.MFD_CLOEXEC))
        with ExitStack() as unsent:
            fds = {
                "stdin": _keep(unsent, dup_or_null(0)),
                "stdout": _keep(unsent, self._outlets.open_stdout(rank)),
                "stderr": _keep(unsent, self._outlets.open_stderr(rank)),
            }
            kind, argv = self._describe(rank, fds, unsent)
            unsent.pop_all()
        link.start(StartOrder(rank, kind, argv, self.envs[rank], self._cpus(rank), fds))

    @abc.abstractmethod
    def _describe(self, rank: int, fds: dict[str, int], unsent: ExitStack) -> tuple[str, tuple[str, ...]]:
        """How the spawner starts this rank: the kind and the command line. May add descriptors."""

    def _make_link(self) -> SpawnerLink:
        return SpawnerLink.launch()

    def _blackbox_for(self, rank: int) -> int:
        return os.dup(self._slots[rank].blackbox_fd)

    def _cpus(self, rank: int) -> frozenset[int]:
        if self._numa_options is None:
            return frozenset()
        from holdfast.process import numa

        return numa.cpus_for(self._numa_options, rank, self.nprocs)

    # Watching.

    def pids(self) -> dict[int, int]:
        """Local rank -> pid, also after the end."""
        return {rank: slot.pid for rank, slot in self._slots.items() if slot.pid is not None}

    def fileno(self) -> int:
        """Readable when something happened to a process; for a loop that waits for other things too."""
        if self._link is None:
            raise ValueError(f"the processes of {self.name!r} have not been started")
        return self._link.fileno()

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """The result once every process succeeded or any failed; None while they run.

        Waits at most `timeout` seconds (0 only looks, a negative value has no limit) and stops nothing. A signal
        that came surfaces here as a `SignalException`. `period` is there for callers that pass it: nothing polls.
        """
        deadline = None if timeout < 0 else time.monotonic() + timeout
        while True:
            signals.inbox().raise_pending()
            self._take_reports(0.0)
            result = self._result()
            if result is not None:
                return result
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            self._take_reports(left_s)

    def _take_reports(self, timeout_s: float | None, *, new_signals_only: bool = False) -> None:
        if self._link is not None:
            for report in self._link.reports(timeout_s, new_signals_only=new_signals_only):
                self._note(report)

    def _note(self, report: Report) -> None:
        match report:
            case Started(rank, pid, pidfd):
                self._slots[rank].pid, self._slots[rank].pidfd = pid, pidfd
            case Refused(rank, number):
                raise OSError(number, os.strerror(number), self._display_name(rank))
            case Exited(rank, exitcode, order):
                self._end(self._slots[rank], exitcode, order)
            case Swept(survivors):
                self._is_swept = True
                self.survivors = survivors
            case SpawnerLost(how):
                self._lose_everything(how)

    def _end(self, slot: _Slot, exitcode: int, order: int | None) -> None:
        slot.exitcode = exitcode
        slot.order = order
        slot.ended_during_stop = self._stop_signal is not None

    def _lose_everything(self, how: str) -> None:
        self._is_swept = True
        for slot in self._slots.values():
            if slot.exitcode is None:
                slot.note = f"the spawner that owned it {how}"
                self._end(slot, -signal.SIGKILL, None)

    def _display_name(self, rank: int) -> str:
        return self.entrypoint if isinstance(self.entrypoint, str) else _name_of(self.entrypoint)

    # Results.

    def _result(self) -> RunProcsResult | None:
        failures = self.failures()
        if failures:
            return RunProcsResult(failures=failures, stdouts=self.stdouts, stderrs=self.stderrs)
        if any(slot.exitcode is None for slot in self._slots.values()):
            return None
        try:
            values = {rank: self._return_value(slot) for rank, slot in self._slots.items()}
        except _UnreadableValue:
            return self._result()  # The slot now carries the failure.
        return RunProcsResult(return_values=values, stdouts=self.stdouts, stderrs=self.stderrs)

    def failures(self) -> dict[int, ProcessFailure]:
        """What failed by itself so far, with the evidence there is at this moment."""
        return {rank: self._failure(slot) for rank, slot in self._slots.items() if self._failed_by_itself(slot)}

    def stopped(self) -> dict[int, str]:
        """Local rank -> how holdfast ended it, for those that did not end by themselves."""
        return {
            rank: self._how_stopped(slot)
            for rank, slot in self._slots.items()
            if slot.ended_during_stop and not self._failed_by_itself(slot)
        }

    def _failed_by_itself(self, slot: _Slot) -> bool:
        if slot.note and slot.exitcode is not None:
            return True
        if slot.exitcode is None or slot.exitcode == 0:
            return False
        if not slot.ended_during_stop:
            return True
        box = self._box(slot)
        return -slot.exitcode in _CRASHES or (slot.exitcode > 0 and box.error is not None)

    def _how_stopped(self, slot: _Slot) -> str:
        assert self._stop_signal is not None
        if slot.exitcode == -self._stop_signal or slot.exitcode == 0:
            return self._stop_signal.name
        if slot.exitcode == -signal.SIGKILL:
            return f"SIGKILL, {self._stop_grace_s:g} s after {self._stop_signal.name}"
        return f"{self._stop_signal.name}, exit code {slot.exitcode}"

    def _failure(self, slot: _Slot) -> ProcessFailure:
        assert slot.pid is not None and slot.exitcode is not None
        box = self._box(slot)
        evidence = Evidence(
            error=box.error,
            stack=box.text,
            stderr_tail=self._outlets.stderr_tail(slot.local_rank),
            memory=self._memory_evidence(slot),
            note=slot.note,
        )
        error_file = self.error_files.get(slot.local_rank, "")
        return ProcessFailure(slot.local_rank, slot.pid, slot.exitcode, error_file, evidence, slot.order)

    def _box(self, slot: _Slot) -> BlackBox:
        """Read once, after the worker's end: nothing is added to it then."""
        if slot.box is None:
            slot.box = read_blackbox(_read_all(slot.blackbox_fd))
        return slot.box

    def _return_value(self, slot: _Slot) -> Any:
        data = self._box(slot).value
        if data is None:
            return None
        try:
            return pickle.loads(data)
        except Exception as error:
            slot.note = f"its return value cannot be read back: {type(error).__name__}: {error}"
            raise _UnreadableValue from None

    def _memory_evidence(self, slot: _Slot) -> str:
        if slot.exitcode != -signal.SIGKILL or slot.ended_during_stop:
            return ""
        return oom.evidence(self._kills_before, oom.memory_killer_counter())

    # Stopping.

    def close(self, death_sig: signal.Signals | None = None, timeout: float = DEFAULT_GRACE_S) -> None:
        """The kill ladder, then everything this context holds is released. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._climb_ladder(signal.Signals(death_sig or signal.SIGTERM), max(0.0, timeout))
        finally:
            self._release()

    def _climb_ladder(self, number: signal.Signals, grace_s: float) -> None:
        if self._link is None:
            return
        self._take_reports(0.0)
        self._stop_signal, self._stop_grace_s = number, grace_s
        self._signal_leaders(number)
        deadline = time.monotonic() + grace_s
        while any(slot.is_running for slot in self._slots.values()):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or signals.inbox().wants_haste:
                break
            self._take_reports(left_s, new_signals_only=True)
        self._sweep()

    def _signal_leaders(self, number: signal.Signals) -> None:
        running = [slot for slot in self._slots.values() if slot.is_running]
        for slot in running:
            if slot.pidfd is None:
                stop.kill(slot.pid or 0, number)
                continue
            try:
                signal.pidfd_send_signal(slot.pidfd, number)
            except ProcessLookupError:
                pass

    def _sweep(self) -> None:
        """Kill what is left of every tree and make sure of it."""
        assert self._link is not None
        self._link.kill_all()
        deadline = time.monotonic() + stop.KILL_PATIENCE_S + 1.0
        while not self._is_swept and (left_s := deadline - time.monotonic()) > 0:
            self._take_reports(left_s, new_signals_only=True)
        if not self._is_swept:
            logger.error("the spawner of %s does not answer; it is given up with everything below it", self.name)
            self._link.close()
            self._lose_everything("did not answer")
        for pid, state in self.survivors:
            logger.error("process %d (state %s) of %s cannot be killed", pid, state, self.name)

    def _release(self) -> None:
        self._outlets.close()
        if self._owns_link and self._link is not None:
            self._link.close()
        for slot in self._slots.values():
            if slot.pid is not None and slot.exitcode is not None:
                self._box(slot)
            for fd in (slot.blackbox_fd, slot.pidfd):
                if fd is not None:
                    os.close(fd)
            slot.pidfd = None
        self._resources.close()


class SubprocessContext(PContext):
    """Processes that execute a program."""

    def _describe(self, rank: int, fds: dict[str, int], unsent: ExitStack) -> tuple[str, tuple[str, ...]]:
        assert isinstance(self.entrypoint, str)
        command = entry.command(self.entrypoint, [_text(each) for each in self.args[rank]])
        if command.is_python:
            fds["HOLDFAST_BLACKBOX"] = _keep(unsent, self._blackbox_for(rank))
        return "exec", command.argv


class MultiprocessContext(PContext):
    """Processes that call a function and hand back what it returns."""

    def __init__(self, *args: Any, start_method: str = "spawn", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if start_method not in ("spawn", "fork", "forkserver"):
            raise UserError(f"unknown start method {start_method!r}; there are spawn, fork and forkserver")
        self.start_method = start_method
        if start_method != "spawn":  # Neither a cold spawner nor one that is older than this call will do.
            self._link, self._owns_link = None, True
        self._payloads = {} if start_method == "fork" else {rank: self._payload(rank) for rank in range(self.nprocs)}

    def _payload(self, rank: int) -> bytes:
        import cloudpickle

        try:
            call = cloudpickle.dumps((self.entrypoint, self.args[rank]))
        except Exception as error:
            culprit = self._unpicklable_part(rank)
            raise UserError(f"{culprit} cannot be sent to a worker: {type(error).__name__}: {error}") from None
        return pickle.dumps((list(sys.path), list(sys.argv), call))

    def _unpicklable_part(self, rank: int) -> str:
        import cloudpickle

        for index, value in enumerate(self.args[rank]):
            try:
                cloudpickle.dumps(value)
            except Exception:
                return f"argument {index} of {self._display_name(rank)}"
        return f"the function {self._display_name(rank)}"

    def _make_link(self) -> SpawnerLink:
        if self.start_method == "fork":
            return SpawnerLink.fork({rank: self._call_in_memory(rank) for rank in range(self.nprocs)})
        return SpawnerLink.launch(with_site_packages=self.start_method == "forkserver")

    def _call_in_memory(self, rank: int) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
        assert callable(self.entrypoint)
        call = (self.entrypoint, tuple(self.args[rank]))
        return lambda: call

    def _describe(self, rank: int, fds: dict[str, int], unsent: ExitStack) -> tuple[str, tuple[str, ...]]:
        fds["HOLDFAST_BLACKBOX"] = _keep(unsent, self._blackbox_for(rank))
        if self.start_method == "fork":
            return "memory", ()
        fds["HOLDFAST_PAYLOAD"] = _keep(unsent, _memory_file(self._payloads[rank]))
        if self.start_method == "forkserver":
            return "payload", ()
        return "exec", entry.function_command().argv


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: Any = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
    *,
    link: SpawnerLink | None = None,
) -> PContext:
    """Start one process for each local rank: of a program (a text entry point) or of a function.

    `args` and `envs` map each local rank 0..n-1 to its arguments and its additional environment. A `link` to a
    spawner that is already there saves starting another one.
    """
    common: dict[str, Any] = {"numa_options": numa_options, "link": link}
    positional = (name, entrypoint, args, envs, logs_specs, log_line_prefixes)
    filters = (duplicate_stdout_filters, duplicate_stderr_filters)
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(*positional, *filters, **common)
    else:
        context = MultiprocessContext(*positional, *filters, start_method=start_method, **common)
    context.start()
    return context


class _UnreadableValue(Exception):  # noqa: N818
    """A return value came that this process cannot unpickle."""


def _check_ranks(what: str, mapping: Mapping[int, Any], count: int) -> None:
    expected = set(range(count))
    if set(mapping) != expected:
        raise RuntimeError(f"{what} must have the local ranks {sorted(expected)} as keys, not {sorted(mapping)}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else os.fsdecode(value) if isinstance(value, bytes) else str(value)


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _keep(stack: ExitStack, fd: int) -> int:
    """Closed with the stack, unless the stack is emptied first."""
    stack.callback(os.close, fd)
    return fd


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("holdfast-payload", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _read_all(fd: int) -> bytes:
    """The whole of a memory file, from its beginning; one read brings at most 2 GiB."""
    data = bytearray()
    while piece := os.pread(fd, 1 << 30, len(data)):
        data += piece
    return bytes(data)
