"""Starting, watching and stopping one group of processes.

A `PContext` is one life of a worker group. Its parts: the spawner, which owns the processes; a black box for
each worker (memory that outlives it, in which the bootstrap leaves the return value, the traceback or the stack
at the moment of a fatal signal); and the pump, which carries what workers write to files and the console.

Events come from the spawner through `SpawnerLink` and are kept in one `Slot` a worker (see `worker`). Nothing blocks:
`begin_start` and `begin_stop` give orders, and a loop that waits for `fileno()`, `unsent_fds()` and `next_deadline()`
asks `poll_start` and `poll_stop` whether that is done. Stopping is the kill ladder (see `ladder`). `start`, `wait` and
`close` are such loops for callers that have nothing else to wait for; `wait` only looks and stops nothing.
"""

from __future__ import annotations

import abc
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from holdfast import signals
from holdfast.errors import HostError, remedy
from holdfast.failures import oom
from holdfast.failures.records import Failure
from holdfast.frozen import changed, frozen
from holdfast.log import Logger
from holdfast.process.errors import ProcessFailure, read_error
from holdfast.process.output.logs import LogsDest, LogsSpecs, logs_dir
from holdfast.process.output.streams import Outlets, dup_or_null
from holdfast.process.spawner import command
from holdfast.process.spawner.client import SpawnerLink, allow_descriptors_for, starting
from holdfast.process.spawner.wire import BYTECODE, Lease, memory_file
from holdfast.process.workers.ladder import Action, Ladder
from holdfast.process.workers.worker import RunProcsResult, Slot, global_rank

if TYPE_CHECKING:
    from holdfast.process.output.lines import Copied
    from holdfast.process.output.output_watch import OutputWatch
    from holdfast.stop_hooks import StopHooks

logger = Logger(__name__)

DEFAULT_GRACE_S = 30.0
# Each order has about five descriptors in flight. More at once would not start anything sooner.
_MOST_UNDERWAY = 16
# Errors that come again at every start. Most lie with the program: it is missing, may not be executed, is not for this
# machine, or its arguments are too long. The last is this process's own limit of open files.
_LASTING_ERRORS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EISDIR}
    | {errno.ENOEXEC, errno.ELIBBAD, errno.EINVAL, errno.E2BIG, errno.EMFILE}
)


class SpawnerLostError(HostError):
    """The spawner died while it was starting the group."""


def is_curable(error: Exception) -> bool:
    """Whether a group that could not be started because of this error may start next time: the spawner died, or the
    host lacked something for a moment."""
    return isinstance(error, SpawnerLostError) or (isinstance(error, OSError) and error.errno not in _LASTING_ERRORS)


def why_refused(error: Exception) -> str:
    """Why a group could not be started, for the report."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    about = f": {error.filename!r}" if error.filename else ""
    return f"{error.strerror}{about}{remedy(error.errno)}"


@frozen
class GroupSpec:
    """The settings of a group that stay the same in every life of it.

    `entrypoint` is a function or the program to execute; `start_method` is for functions. In
    `log_line_prefix_template`, `${hostname}`, `${role_name}`, `${rank}` and `${local_rank}` are filled in. `prefix`
    says when lines on the console have one: auto, always or never. Workers are forked from a process that has imported
    the modules of `preload`, unless that takes longer than `preload_timeout_s`. That process stays for `preload_keep_s`
    after a run that ends well. `preload_learns` are the packages whose imports are learned; empty for all, None for
    none. The launcher fills these fields from those of `LaunchConfig` that have the same names. `refusal` says why the
    group cannot be started on this node, if that is known before the rendezvous, so that all nodes hear of it.
    `clean_shm`: see `shared_memory`. `snapshot_memory` is how many bytes the snapshots of this node may have (0: none,
    None: a quarter of its memory), `snapshot_bandwidth` how many a second are sent to other nodes (0: no limit).
    `peer_stacks`: see `agent.examination`. With `cpus_per_worker` each worker has so many cores of its own.
    """

    role: str
    entrypoint: Callable[..., Any] | str
    logs_specs: LogsSpecs
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    numa_options: Any = None
    duplicate_stdout_filters: Sequence[str] | None = None
    duplicate_stderr_filters: Sequence[str] | None = None
    prefix: str = "auto"
    refusal: str = ""
    preload: tuple[str, ...] = ()
    preload_timeout_s: float = 300.0
    preload_keep_s: float | None = None
    preload_learns: tuple[str, ...] | None = None
    clean_shm: bool = False
    snapshot_memory: int | None = None
    snapshot_dir: str = ""
    snapshot_bandwidth: int = 0
    peer_stacks: str = "auto"
    cpus_per_worker: int = 0


class PContext(abc.ABC):
    """A group of processes that start and stop together. `new_group` makes one of a `GroupSpec`, which is the `spec`
    then; a caller that has none gives what users of torchelastic know.

    A `link` to a spawner that is already there saves starting another one. When the `lease` expires the spawner kills
    the processes. A `watch` notes when they write something, and `copied` counts what passes the pump. At the listening
    socket `store_fd` the spawner serves torch's store while they live. `stop_hooks` tells workers of the stop first.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: Sequence[str] | None = None,
        duplicate_stderr_filters: Sequence[str] | None = None,
        *,
        start_method: str = "spawn",
        spec: GroupSpec | None = None,
        link: SpawnerLink | None = None,
        lease: Lease | None = None,
        watch: OutputWatch | None = None,
        copied: Mapping[str, Copied] | None = None,
        agreed_code: int | None = None,
        store_fd: int | None = None,
        stop_hooks: StopHooks | None = None,
    ) -> None:
        if spec is None:
            filters = (duplicate_stdout_filters, duplicate_stderr_filters)
            spec = GroupSpec(name, entrypoint, logs_specs, start_method, None, numa_options, *filters)
        for what, mapping in (("args", args), ("envs", envs)):
            if set(mapping) != set(range(len(args))):
                expected = list(range(len(args)))
                raise RuntimeError(f"{what} must have the local ranks {expected} as keys, not {sorted(mapping)}")
        self._spec = spec
        self.name = spec.role
        self.entrypoint = spec.entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        self.destinations: LogsDest = spec.logs_specs.reify(envs)
        self.stdouts = self.destinations.stdouts
        self.stderrs = self.destinations.stderrs
        self.error_files = self.destinations.error_files
        self.filtered_stdout = self.destinations.filtered_stdout
        self.filtered_stderr = self.destinations.filtered_stderr
        self.logs_dir = logs_dir(self.destinations)
        self.survivors: tuple[tuple[int, str], ...] = ()
        ranks = {rank: global_rank(rank, env) for rank, env in envs.items()}
        has_peers = any(env.get("GROUP_WORLD_SIZE", "1") != "1" for env in envs.values())
        labels = (log_line_prefixes or {}, host_name() if has_peers else "")
        self._outlets = Outlets(spec, self.destinations, ranks, *labels, watch, copied or {})
        self._template = command.template_for(spec, next(iter(args.values()), ()))
        self._link = link
        self._owns_link = link is None
        self._lease = lease
        self._store_fd, self._stop_hooks = store_fd, stop_hooks
        self._slots: dict[int, Slot] = {}
        self._resources = ExitStack()
        self._cpus: dict[int, frozenset[int]] = {}
        self._kills_before: oom.MemoryKills | None = None
        self._ladder: Ladder | None = None
        self._lost_how = ""
        self._is_swept = False
        self._is_closed = False
        self.agreed_code = agreed_code  # An exit code that is no failure.

    # Starting.

    def start(self) -> None:
        """Start every process, or none: if one cannot be started the others are ended and the reason is raised. A
        signal that comes meanwhile is passed on to those that were started, and raised."""
        self.begin_start()
        try:
            while not self.poll_start():
                signals.inbox().raise_pending()
                self._spawner.wait(None)
        except signals.SignalException as received:
            self.close(received.sigval)
            raise

    def begin_start(self) -> None:
        """Send the first orders to the spawner."""
        if self._slots:
            raise ValueError(f"the processes of {self.name!r} were started before")
        self._resources.enter_context(signals.deferred())
        with self._all_or_none(), starting:
            self._place()
            self._kills_before = oom.memory_killer_counter()
            if self._link is None:
                self._link = self._make_link()
                if self._template is not None:
                    self._link.preload(self._template, command.bytecode())
            allow_descriptors_for(self.nprocs)
            self._link.prepare(self._lease)
            if self._store_fd is not None:
                self._link.serve_store(self._store_fd)
            self._outlets.start()
            self._order_more()

    def poll_start(self) -> bool:
        """Whether every process runs; sends more orders if not. If one cannot be started this raises the reason.
        While the template is being prepared there is nothing to order."""
        with self._all_or_none():
            self._take_reports()
            for slot in self._slots.values():
                if slot.refusal is not None:
                    name = self.entrypoint if isinstance(self.entrypoint, str) else command.name_of(self.entrypoint)
                    raise OSError(slot.refusal, os.strerror(slot.refusal), name)
            if self._lost_how and (len(self._slots) < self.nprocs or any(s.pid is None for s in self._slots.values())):
                raise SpawnerLostError(f"the spawner {self._lost_how}")
            with starting:
                self._order_more()
        return len(self._slots) == self.nprocs and not any(slot.is_underway for slot in self._slots.values())

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close(signal.SIGKILL, 0)
            raise

    def _order_more(self) -> None:
        if self._spawner.is_preloading:
            return
        underway = sum(slot.is_underway for slot in self._slots.values())
        try:
            for rank in range(len(self._slots), min(self.nprocs, len(self._slots) + _MOST_UNDERWAY - underway)):
                self._order(rank)
        finally:
            self._spawner.send_starts()

    def _order(self, rank: int) -> None:
        box = os.memfd_create(f"holdfast-{rank}", os.MFD_CLOEXEC)
        self._slots[rank] = Slot(rank, box, is_function=callable(self.entrypoint))
        fds: dict[str, int] = {}
        try:
            fds["stdin"] = dup_or_null(0)
            fds["stdout"] = self._outlets.open("stdout", rank)
            fds["stderr"] = self._outlets.open("stderr", rank)
            kind, argv = self._describe(rank, fds)
            if BYTECODE in argv:
                fds[BYTECODE] = memory_file(command.bytecode())
            self._spawner.start(rank, kind, argv, self.envs[rank], self._cpus.get(rank, frozenset()), fds)
        except BaseException:
            for fd in fds.values():
                os.close(fd)
            raise

    @abc.abstractmethod
    def _describe(self, rank: int, fds: dict[str, int]) -> tuple[str, tuple[str, ...]]:
        """How the spawner starts this rank: the kind and the command line. May add descriptors."""

    def _make_link(self) -> SpawnerLink:
        return SpawnerLink.launch()

    def _place(self) -> None:
        """Choose the CPUs of each worker, if the user wants that, and unless a variable says it, how many threads."""
        spec, variable = self._spec, "OMP_NUM_THREADS"
        if spec.numa_options is None and not spec.cpus_per_worker:
            return
        from holdfast.process.workers import cpus

        placement = cpus.place(spec.numa_options, spec.cpus_per_worker, self.nprocs)
        self._cpus = dict(enumerate(placement.cpus))
        sets_threads = variable not in os.environ
        for rank, env in self.envs.items() if sets_threads else ():
            env.setdefault(variable, str(placement.threads[rank]))
        cpus.tell(placement, sets_threads=sets_threads)

    # Watching.

    def pids(self) -> dict[int, int]:
        """Local rank -> pid, also after the end."""
        return {rank: slot.pid for rank, slot in self._slots.items() if slot.pid is not None}

    def fileno(self) -> int:
        """Readable when something happened to a process; for a loop that waits for other things too."""
        return self._spawner.fileno()

    def unsent_fds(self) -> list[int]:
        """`fileno()`, if a loop must wait until it can be written as well."""
        return self._spawner.unsent_fds()

    @property
    def _spawner(self) -> SpawnerLink:
        if self._link is None:
            raise ValueError(f"the processes of {self.name!r} have not been started")
        return self._link

    def has_ended(self) -> bool:
        """Whether `wait` would return a result at once, judged by the reports so far."""
        codes = [slot.exitcode for slot in self._slots.values()]
        return bool(codes) and (None not in codes or any(code for code in codes if code != self.agreed_code))

    def blame(self, pid: int, **known: Any) -> None:
        """Whatever its end, this process counts as failed. `known` are fields of `Evidence`: a `note` that says why; or
        `hang`, for how long the group has shown no progress and where this process was found, with its `stack`, and
        `is_waiting` if it waits for the one that hangs."""
        for slot in self._slots.values():
            if slot.pid == pid:
                slot.blame(**known)

    def running(self) -> dict[int, int]:
        """Local rank -> pid of the processes that have neither ended, by the reports so far, nor returned."""
        working = {rank for rank, slot in self._slots.items() if slot.is_running and not slot.has_returned()}
        return {rank: pid for rank, pid in self.pids().items() if rank in working}

    def ends(self) -> dict[int, tuple[int, bool, float | None]]:
        """Local rank -> exit code, whether holdfast stopped it, and when it ended, by the reports so far."""
        ended = [(rank, slot) for rank, slot in self._slots.items() if slot.exitcode is not None]
        return {rank: (slot.exitcode or 0, slot.stop is not None, slot.ended_at) for rank, slot in ended}

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """The result once every process succeeded or any failed; None while they run.

        Waits at most `timeout` seconds (0 only looks, a negative value has no limit) and stops nothing. A signal
        that came surfaces here as a `SignalException`. `period` is there for callers that pass it: nothing polls.
        """
        deadline = None if timeout < 0 else time.monotonic() + timeout
        while True:
            signals.inbox().raise_pending()
            self._take_reports()
            result = self._result()
            if result is not None:
                return result
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            self._spawner.wait(left_s)

    def _take_reports(self) -> None:
        for report in self._link.reports() if self._link is not None else ():
            match report:
                case ("started", rank, pid, pidfd):
                    self._slots[rank].pid, self._slots[rank].pidfd = pid, pidfd
                    # It was on its way when the others got their signal. Without a pidfd its pid may be reused.
                    if self._ladder is not None and pidfd is not None:
                        self._slots[rank].send(self._ladder.signal)
                case ("refused", rank, number):
                    self._slots[rank].refusal = number
                case ("exited", rank, exitcode, order, at):
                    self._slots[rank].end(exitcode, order, self._ladder, at)
                case ("swept", survivors):
                    self._is_swept = True
                    self.survivors = tuple(survivors)
                case ("lost", how, survivors):
                    self._lose_everything(how, survivors)

    def _lose_everything(self, how: str, survivors: Sequence[tuple[int, str]]) -> None:
        self._is_swept = True
        self._lost_how, self.survivors = how, tuple(survivors)
        left = {pid for pid, _ in survivors} if self._ladder is not None else set()
        for slot in self._slots.values():
            if slot.exitcode is None and slot.pid not in left:
                slot.blame(note=f"the spawner that owned it {how}")
                slot.end(-signal.SIGKILL, None, self._ladder)

    # Results.

    def _result(self) -> RunProcsResult | None:
        failures, values = self.failures(), {}
        if not failures:
            if any(slot.exitcode is None for slot in self._slots.values()):
                return None
            values = {rank: slot.return_value() for rank, slot in self._slots.items()}
            # A value may be unreadable. Asked for after `close`: a worker that was stopped has not succeeded.
            badly = {rank: slot for rank, slot in self._slots.items() if slot.exitcode not in (0, self.agreed_code)}
            stopped = {rank: self._failure(slot) for rank, slot in badly.items()}
            failures = stopped or self.failures()
        return RunProcsResult({} if failures else values, failures, self.stdouts, self.stderrs)

    def failures(self) -> dict[int, ProcessFailure]:
        """The processes that have failed by themselves so far, with the present evidence."""
        return {rank: self._failure(slot) for rank, slot in self._failed().items()}

    def stopped(self) -> dict[int, str]:
        """Local rank -> how holdfast ended it, of the processes that did not end by themselves."""
        failed = self._failed()
        return {
            rank: slot.how_stopped()
            for rank, slot in self._slots.items()
            if rank not in failed and (slot.stop or (slot.is_running and self._is_closed))
        }

    def _failed(self) -> dict[int, Slot]:
        slots = {rank: slot for rank, slot in self._slots.items() if not slot.has_agreed(self.agreed_code)}
        if not any(slot.failed_by_itself() for slot in slots.values()):
            return {}
        return {rank: slot for rank, slot in slots.items() if slot.failed_by_itself() or slot.has_raised()}

    def _failure(self, slot: Slot) -> ProcessFailure:
        assert slot.pid is not None
        rank, (message, traceback, timestamp) = slot.local_rank, read_error(slot.box().error or {})
        evidence = changed(
            slot.blamed,
            message=message,
            traceback=traceback,
            stack=slot.stack(),
            stderr_tail=self._outlets.stderr_tail(rank),
            memory=self._memory_evidence(slot),
        )
        # One that hangs has no exit status yet, or never will; the one that it has got says how it was stopped. One
        # that has raised is about to end with 1.
        exitcode = int(slot.has_raised()) if slot.exitcode is None else slot.exitcode
        known = Failure(
            rank=global_rank(rank, self.envs[rank]), timestamp=timestamp or 0, order=slot.order, evidence=evidence
        )
        return ProcessFailure(rank, slot.pid, exitcode, self.error_files.get(rank, ""), known)

    def _memory_evidence(self, slot: Slot) -> str:
        # A shell whose child was killed says so with its own exit code.
        if slot.exitcode not in (-signal.SIGKILL, 128 + signal.SIGKILL) or slot.stop is not None:
            return ""
        return oom.evidence(self._kills_before, oom.memory_killer_counter())

    # Stopping.

    def close(self, death_sig: signal.Signals | None = None, timeout: float = DEFAULT_GRACE_S) -> None:
        """The kill ladder, then everything this context holds is released. May be called again."""
        try:
            self.begin_stop(signal.Signals(death_sig or signal.SIGTERM), timeout)
            while not self.poll_stop():
                deadline = self.next_deadline()
                left_s = None if deadline is None else deadline - time.monotonic()
                self._spawner.wait(left_s, new_signals_only=True)
        finally:
            self._release()

    def begin_stop(self, number: signal.Signals, grace_s: float) -> None:
        """Send every process the signal. If a stop has begun, this only limits the grace that is left."""
        grace_s = max(0.0, grace_s)
        if self._ladder is not None:
            self._ladder.hurry(grace_s, time.monotonic())
        elif not self._slots:
            self._release()
        elif not self._is_closed:
            self._take_reports()
            running = {rank for rank, slot in self._slots.items() if slot.is_running} if grace_s > 0 else set()
            hooked = self._stop_hooks.begin(number, running) if self._stop_hooks is not None else ()
            self._ladder = Ladder(number, grace_s, time.monotonic(), has_hooked=bool(hooked))
            for slot in self._slots.values():
                slot.was_starting = slot.is_underway
            self._dismiss_returned()
            for rank, slot in self._slots.items():
                if slot.is_running:
                    slot.is_hooked = rank in hooked
                    slot.is_excused = slot.is_hooked and not slot.has_raised()
                    if not slot.is_hooked:
                        slot.send(number)
                    slot.continue_if_stopped()

    def poll_stop(self) -> bool:
        """Whether nothing is left but `survivors`, which cannot be killed; then everything is released."""
        if self._ladder is None or self._is_closed:
            return self._is_closed
        self._take_reports()
        now = time.monotonic()
        if signals.inbox().wants_haste:
            self._ladder.hurry(0.0, now)
        has_leaders = any(slot.is_running for slot in self._slots.values())
        match self._ladder.climb(now, has_leaders=has_leaders, is_swept=self._is_swept):
            case Action.SIGNAL_HOOKED:
                for slot in self._slots.values():
                    slot.signal_hooked(self._ladder.signal)
            case Action.KILL_TREES:
                self._spawner.kill_all()
            case Action.KILL_SPAWNER:
                logger.error("the spawner of %s does not answer and is killed with everything below it", self.name)
                self._lose_everything("did not answer and was killed", self._spawner.kill_spawner())
        if self._ladder.deadline is None:
            self._release()
        return self._is_closed

    def next_deadline(self) -> float | None:
        """When `poll_stop` must be asked although nothing was reported."""
        return self._ladder.deadline if self._ladder is not None else None

    def _dismiss_returned(self) -> None:  # noqa: B027  (only function workers wait)
        """Workers that have returned and wait for others wait no longer."""

    def _release(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for pid, state in self.survivors:
            logger.error("process %d (state %s) of %s cannot be killed", pid, state, self.name)
        self._outlets.close(will_end=not self.survivors)
        if self._owns_link and self._link is not None:
            self._link.close()
        for slot in self._slots.values():
            slot.close()
        self._resources.close()


class SubprocessContext(PContext):
    """Processes that execute a program."""

    def _describe(self, rank: int, fds: dict[str, int]) -> tuple[str, tuple[str, ...]]:
        assert isinstance(self.entrypoint, str)
        argv, needs_box = command.command_for(self.entrypoint, command.texts(self.args[rank]))
        if needs_box:
            fds["HOLDFAST_BLACKBOX"] = os.dup(self._slots[rank].blackbox_fd)
        return "exec" if self._template is None else "warm", argv


def host_name() -> str:
    """Of this host, as a label. In a container the machine has another name than the container."""
    return os.environ.get("HOLDFAST_HOST_NAME") or os.uname().nodename.partition(".")[0]
