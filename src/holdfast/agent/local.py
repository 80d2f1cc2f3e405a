"""`LocalElasticAgent`: an agent whose workers are processes of this host.

Between two decisions it sleeps until a worker was started or has ended, a signal comes, the run pushes something, or a
rendezvous handler that cannot push has to be asked again. One spawner serves all rounds, so a restart costs no
interpreter start of ours.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast import log, loop, procfs, signals
from holdfast.agent import lifecycle, watchdog
from holdfast.agent.agent import SimpleElasticAgent
from holdfast.agent.environment import log_line_prefixes, macros, worker_environments
from holdfast.agent.model import (
    TORCHELASTIC_ENABLE_FILE_TIMER,
    TORCHELASTIC_HEALTH_CHECK_PORT,
    TORCHELASTIC_TIMER_FILE,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from holdfast.errors import HostError
from holdfast.failures.report import Evidence
from holdfast.frozen import changed
from holdfast.hangs.progress import GroupProgress
from holdfast.log import Logger
from holdfast.process.errors import ProcessFailure
from holdfast.process.output.logs import DefaultLogsSpecs, LogsSpecs
from holdfast.process.spawner import command
from holdfast.process.spawner.client import SpawnerLink, launch_or_take_early
from holdfast.process.spawner.wire import Lease
from holdfast.process.workers.group import GroupSpec, PContext, new_group
from holdfast.rendezvous.membership.restart_policy import Advance
from holdfast.telemetry.metrics import prof, put_call, put_metric

if TYPE_CHECKING:
    from holdfast.hangs.compare import Picture
    from holdfast.process.output.watch import OutputWatch
    from holdfast.process.spawner.warm import Wanted
    from holdfast.process.workers.device_memory import DeviceWait
    from holdfast.process.workers.shared_memory import Cleaning
    from holdfast.rendezvous.coordination import Coordination
    from holdfast.telemetry.stragglers import Straggler
    from holdfast.timer import FileTimerRequest, FileTimerServer

__all__ = [
    "LocalElasticAgent", "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_HEALTH_CHECK_PORT", "TORCHELASTIC_TIMER_FILE"
]  # fmt: skip

logger = Logger(__name__)

# A worker may end before the last one is started. Usually that one follows at once, and the group fails as a whole.
_START_PATIENCE_S = 5.0

T = TypeVar("T")

_STUCK_VARIABLE = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


class LocalElasticAgent(SimpleElasticAgent):
    """Runs the workers of a `WorkerSpec` as processes, functions or programs, on this host.

    A `group` replaces what `spec` and the other arguments say about how processes are started.
    `uninterruptible_state_timeout` (seconds; also `TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`): a worker that
    stays in uninterruptible sleep for that long makes the group unhealthy.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = 30,
        health_check_server: Any = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        group: GroupSpec | None = None,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        log.prefix_warnings()
        self._group = group or _group_spec(spec, logs_specs, start_method, log_line_prefix_template)
        self._health_check_server = health_check_server
        self._stuck_timeout_s = _stuck_timeout_s(uninterruptible_state_timeout)
        self._stuck_since: dict[int, float] = {}
        self._began_at = 0.0
        self._output_watch: OutputWatch | None = None
        self._behind: tuple[Straggler, ...] | None = None  # None until the workers are stopped.
        self._start_error: OSError | HostError | None = None
        self._refusal: RunResult | None = None
        self._link: SpawnerLink | None = None
        self._held_lease: Lease | None = None
        self._cleaning: Cleaning | None = None
        self._device_wait: DeviceWait | None = None
        self._timer_server: FileTimerServer | None = None

    # Starting and stopping are events, unless a subclass has hooks of its own: those block.

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        context = self._begin_own_start(worker_group)
        while not context.poll_start():
            signals.inbox().raise_pending()
            loop.wait_readable([context.fileno()], None, writable=context.unsent_fds())
        return self._started_ids(context)

    @prof
    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        if self._context is not None:
            self._context.close(signal.SIGTERM, self._shutdown_timeout)

    def _has_own(self, name: str) -> bool:
        """Whether a subclass has replaced that hook."""
        return getattr(getattr(self, name), "__func__", None) is not getattr(LocalElasticAgent, name)

    def _begin_start(self, group: WorkerGroup) -> None:
        self._refusal = None
        self._start_error = HostError(self._group.refusal) if self._group.refusal else None
        if self._has_own("_start_workers") or self._start_error is not None:
            return
        if self._device_wait is not None and not self._device_wait.begin():
            self._context = None  # That of the last round is over.
            return
        self._try_own_start(group)

    def _try_own_start(self, group: WorkerGroup) -> None:
        self._device_wait = None
        try:
            self._begin_own_start(group)
        except (OSError, HostError) as error:
            self._start_error = error

    def _poll_start(self, group: WorkerGroup) -> dict[int, Any] | None:
        if self._has_own("_start_workers"):
            return super()._poll_start(group)
        if self._context is None and self._device_wait is not None:
            if self._device_wait.is_done:
                self._try_own_start(group)
            if self._start_error is not None:
                raise self._start_error
            return None
        assert self._context is not None
        return self._started_ids(self._context) if self._context.poll_start() else None

    def _put_start(self, *, has_failed: bool = False) -> None:
        if not self._has_own("_start_workers"):
            put_call("LocalElasticAgent._start_workers", self._start_began, has_failed=has_failed)
        super()._put_start(has_failed=has_failed)

    def _look_at_start(self, group: WorkerGroup) -> list[lifecycle.Event]:
        """A worker that fails counts, although others have not been started, if those take long."""
        try:
            if self._start_error is not None:
                raise self._start_error
            events = super()._look_at_start(group)
        except (OSError, HostError) as error:
            return self._refused(error)
        is_late = time.monotonic() >= self._start_began + _START_PATIENCE_S
        if events or self._context is None or not is_late or not (failures := self._context.failures()):
            return events
        self._result = self._failed_result(self._context, failures)
        return [lifecycle.WorkersFailed(self._machine.round)]

    def _begin_own_start(self, worker_group: WorkerGroup) -> PContext:
        spec, handler = worker_group.spec, self._handler
        args = {w.local_rank: tuple(macros.substitute(spec.args, w.local_rank)) for w in worker_group.workers}
        self._stop_watching()
        self._forget_progress()
        self._timer_server, timer_path = watchdog.start(handler.get_run_id(), self._record_watchdog)
        envs = worker_environments(
            worker_group,
            os.environ,
            run_id=handler.get_run_id(),
            round=self._machine.round,
            restart_count=self._restarts_used,
            max_restarts=self._policy.max_restarts,
            # A handler that was written for another launcher may not know the question.
            use_agent_store=getattr(handler, "use_agent_store", False),
            timer_path=timer_path,
        )
        self._output_watch = watch = self._prepare_watches(envs)
        prefixes = log_line_prefixes(self._group.log_line_prefix_template, spec.role, worker_group.workers)
        link, lease = self._spawner(), self._lease()
        self._began_at = time.time()
        seen = {"watch": watch, "copied": self._publisher.copied}
        self._context = context = new_group(self._group, args, envs, prefixes, link=link, lease=lease, **seen)
        context.begin_start()
        log.prepare()  # While they start: the line about it should come before what they write.
        return context

    def _started_ids(self, context: PContext) -> dict[int, Any]:
        if self._hangs is not None:
            self._hangs.begin()
        return dict(context.pids())

    def _begin_stop(self, group: WorkerGroup, at_once: bool) -> None:
        if self._behind is None:
            self._behind = self._workers_behind()
        self._stop_watching()
        if self._group.clean_shm and self._context is not None and self._cleaning is None:
            from holdfast.process.workers.shared_memory import Cleaning

            self._cleaning = Cleaning(self._context.running().values())
        if self._group.wait_for_gpu_memory_s and self._context is not None and self._device_wait is None:
            from holdfast.process.workers.device_memory import DeviceWait

            self._device_wait = DeviceWait(self._context.running().values(), self._group.wait_for_gpu_memory_s)
        if self._context is not None and at_once:
            self._context.begin_stop(signal.SIGKILL, 0)
        elif self._context is not None and not self._has_own("_stop_workers"):
            self._context.begin_stop(signal.SIGTERM, self._shutdown_timeout)
        else:
            super()._begin_stop(group, at_once)

    def _workers_behind(self) -> tuple[Straggler, ...]:
        """Before they are stopped. Those that have finished are not slow."""
        if self._progress is None or self._context is None:
            return ()
        finished = {rank for rank, (code, *_) in self._context.ends().items() if code == 0}
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        return tuple(self._progress.behind({rank: ranks[rank] for rank in ranks.keys() - finished}))

    def _poll_stop(self, group: WorkerGroup) -> bool:
        if self._context is not None and self._context.next_deadline() is not None and not self._context.poll_stop():
            return False
        if self._cleaning is not None and not self._cleaning.poll():
            return False
        self._cleaning = None
        if not self._has_own("_stop_workers"):
            put_call("LocalElasticAgent._stop_workers", self._stop_began)
        return True

    def _spawner(self) -> SpawnerLink | None:
        """The one spawner of this agent, or another one if that was killed. Forked functions bring their own."""
        if callable(self._group.entrypoint) and self._group.start_method == "fork":
            return None
        if self._link is not None and not self._link.is_idle():
            self._link.close()
            self._link = None
        if self._link is None:
            self._link = launch_or_take_early()
            self._warm_up(self._link)
        return self._link

    def _warm_up(self, link: SpawnerLink) -> None:
        """Have the modules that workers need imported, or see that those that were imported have not changed."""
        if (template := self._template()) is not None:
            link.preload(template, command.bytecode())

    def _template(self) -> Wanted | None:
        return command.template_for(self._group, macros.substitute(self._worker_group.spec.args, 0))

    def _join(self, group: WorkerGroup, run: Coordination) -> None:
        """While the nodes meet, or this one stands by, the modules are imported."""
        known = self._link
        if self._template() is not None and (link := self._spawner()) is not None and link is known:
            self._warm_up(link)
        super()._join(group, run)

    def _lease(self) -> Lease | None:
        """For a run that may give this node up: the spawner kills the workers when it does."""
        if self._held_lease is None and self._coordination is not None and self._coordination.has_leases:
            self._held_lease = Lease()
            self._coordination.set_lease_sink(self._held_lease.set)
        return self._held_lease

    def _get_watchdog_progress_time(self) -> float:
        """For subclasses whose `_get_alive_time` is to mean this: when the watchdog last completed a turn; now, if
        there is none. By default a watchdog that hangs must not make a scheduler end a healthy job."""
        server = self._timer_server
        return time.time() if server is None else server.get_last_progress_time()

    def _record_watchdog(self, name: str, request: FileTimerRequest | None) -> None:
        shown = ("worker_pid", "scope_id", "expiration_time", "signal") if request is not None else ()
        details = {"watchdog_event": name} | {each: str(getattr(request, each)) for each in shown}
        if request is not None and name == "kill worker process" and self._context is not None:
            self._context.blame(request.worker_pid, note=f"its timer {request.scope_id} had expired")
        self._record("RUNNING", details=details, watchdog_event=name)

    def _wait_for_change(self, worker_group: WorkerGroup, pushes_fd: int, timeout_s: float | None) -> None:
        context = self._context
        if context is None:
            assert self._device_wait is not None
            loop.wait_readable([self._device_wait.fileno(), pushes_fd], timeout_s)
            return
        if self._cleaning is not None and self._cleaning.is_underway:
            loop.wait_readable([self._cleaning.fileno(), pushes_fd], timeout_s)
            return
        watches = (self._hangs, self._progress if self._machine.phase is lifecycle.Phase.RUNNING else None)
        deadlines = [context.next_deadline(), *(each.next_deadline() for each in watches if each is not None)]
        if self._machine.phase is lifecycle.Phase.RUNNING and context.has_ended():
            return  # While the last workers were being started; nothing will come to wake us.
        if self._machine.phase is lifecycle.Phase.STARTING and context.has_ended():
            deadlines.append(self._start_began + _START_PATIENCE_S)
        if timeout_s is None and self._stuck_timeout_s:
            timeout_s = worker_group.spec.monitor_interval
        waits_s = [max(0.0, each - time.monotonic()) for each in deadlines if each is not None]
        timeout_s = min([*waits_s, *([] if timeout_s is None else [timeout_s])], default=None)
        loop.wait_readable([context.fileno(), pushes_fd], timeout_s, writable=context.unsent_fds())

    @prof
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context = self._context
        assert context is not None
        expected = {worker.id for worker in worker_group.workers}
        actual = set(context.pids().values())
        if expected != actual:
            pids = (sorted(expected, key=str), sorted(actual))
            logger.error("the workers of role %s should have the pids %s, but have %s", worker_group.spec.role, *pids)
            return RunResult(WorkerState.UNKNOWN)
        ended = context.wait(0)
        if ended is None:
            if (hung := self._result_of_hang(context)) is not None:
                return hung
            return RunResult(WorkerState.UNHEALTHY if self._is_stuck(context) else WorkerState.HEALTHY)
        if ended.is_failed():
            return self._failed_result(context, ended.failures)
        return RunResult(WorkerState.SUCCEEDED, return_values=self._by_global_rank(ended.return_values))

    def _by_global_rank(self, by_local_rank: Mapping[int, T]) -> dict[int, T]:
        to_global = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        return {to_global[rank]: value for rank, value in by_local_rank.items()}

    def _failed_result(self, context: PContext, failures: Mapping[int, ProcessFailure] | None = None) -> RunResult:
        failures = self._by_global_rank(context.failures() if failures is None else failures)
        return RunResult(WorkerState.FAILED, failures=failures, stopped=self._by_global_rank(context.stopped()))

    def _settle(self, result: RunResult) -> RunResult:
        """Once all workers are stopped, all that they wrote has arrived: the evidence is complete."""
        if self._context is None or self._refusal is not None:
            return result
        settled = self._failed_result(self._context)
        if settled.failures:
            from holdfast.failures import leftovers

            crashed = [failure.pid for failure in settled.failures.values() if failure.exitcode < 0]
            environments = self._by_global_rank(
                {rank: {**os.environ, **env} for rank, env in self._context.envs.items()}
            )
            left = "\n".join(leftovers.left_by(environments, crashed, self._began_at))
            for failure in settled.failures.values():
                failure.evidence = changed(
                    failure.evidence, logs=self._context.logs_dir, left=left, stragglers=self._behind or ()
                )
        return settled

    def _refused(self, error: Exception) -> list[lifecycle.Event]:
        """The workers of this node cannot be started. A run of one node ends with the error itself; the other nodes of
        a larger one must hear of it."""
        if (self._worker_group.group_world_size or 1) == 1:
            raise error
        why = f"{error.strerror}: {error.filename!r}" if isinstance(error, OSError) and error.strerror else str(error)
        ranks = range(self._worker_group.spec.local_world_size)
        refused = {rank: ProcessFailure(rank, 0, 1, "", Evidence(refusal=why), order=rank) for rank in ranks}
        self._result = self._refusal = RunResult(WorkerState.FAILED, failures=self._by_global_rank(refused))
        return [lifecycle.WorkersFailed(self._machine.round)]

    # Hangs.

    def _prepare_watches(self, envs: dict[int, dict[str, str]]) -> OutputWatch | None:
        """For each life of the group watches of its own: of progress, and of hangs if the user wants that."""
        policy = self._worker_group.spec.hang_policy
        self._progress = GroupProgress(envs, time.monotonic())
        if policy is None or not policy.is_on:
            return None
        from holdfast.hangs.watch import HangWatch

        self._hangs = HangWatch(policy, self._progress)
        self._progress.output = self._hangs.output
        return self._hangs.output

    def _result_of_hang(self, context: PContext) -> RunResult | None:
        """If the workers hang: where they are, and what becomes of it."""
        watch, limits = self._hangs, self._worker_group.spec.hang_policy
        verdict = watch.look(context.running()) if watch is not None else None
        if watch is None or limits is None or verdict is None:
            return None
        from holdfast.hangs import policy

        reason = policy.words(verdict, limits)
        logger.warning("the workers hang: %s (--%s %g s); taking their stacks", reason, verdict.bound, verdict.limit_s)
        picture, path = self._examine(context, reason)
        if context.wait(0) is not None or watch.look(context.running(), is_again=True) is None:
            logger.warning("the workers have moved while their stacks were taken, and go on")
            return None
        return self._blame(context, picture, reason, path)

    def _examine_workers(self, worker_group: WorkerGroup) -> RunResult | None:
        context = self._context
        if context is None or not context.running():
            return None
        reason = "another node found the run hanging"
        picture, path = self._examine(context, reason)
        return self._blame(context, picture, reason, path) if picture.is_cause_here else None

    def _examine(self, context: PContext, reason: str) -> tuple[Picture, str]:
        """Where the workers are, and the file that says it."""
        from holdfast.hangs import watch

        group = self._worker_group
        pids = context.running()
        workers = {w.local_rank: (w.global_rank, pids[w.local_rank]) for w in group.workers if w.local_rank in pids}
        picture = watch.examine(workers, self._hangs)
        run_id, round = self._handler.get_run_id(), self._machine.round
        heading = f"run {run_id}, round {round}, host {os.uname().nodename}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
        path = watch.tell(picture, context.destinations, f"{heading}\n{reason}")
        odd_ranks = ",".join(str(rank) for group in picture.odd for rank in group.ranks)
        self._record("HUNG", details={"reason": reason, "odd_ranks": odd_ranks, "stacks": path})
        put_metric(f"workers.{group.spec.role}.hung", 1)
        return picture, path

    def _blame(self, context: PContext, picture: Picture, reason: str, path: str) -> RunResult:
        note = f"every thread of every worker is in {path}" if path else ""
        for pid, words, stack in picture.blamed(reason):
            context.blame(pid, note=note, hang=words, stack=stack, is_waiting=not picture.is_cause_here)
        return self._failed_result(context)

    def _is_stuck(self, context: PContext) -> bool:
        """Whether a worker has been in uninterruptible sleep for too long, as far as the agent looked."""
        if not self._stuck_timeout_s:
            return False
        now, before = time.monotonic(), self._stuck_since
        pids = context.pids().values()
        stuck = [pid for pid in pids if (status := procfs.process_status(pid)) and status.state == "D"]
        self._stuck_since = {pid: before.get(pid, now) for pid in stuck}
        for pid, since in self._stuck_since.items():
            if pid not in before:
                logger.warning("worker %d is in uninterruptible sleep", pid)
            if now - since >= self._stuck_timeout_s:
                logger.error("worker %d has been in uninterruptible sleep for %g s", pid, self._stuck_timeout_s)
                context.blame(pid, note=f"it had been in uninterruptible sleep for {self._stuck_timeout_s:g} s")
                return True
        return False

    def _stop_watching(self) -> None:
        if self._hangs is not None:
            self._hangs.end()
            self._hangs = None
        if self._timer_server is not None:
            self._timer_server.stop()
            self._timer_server = None

    def _advance(self) -> Advance | None:
        calls = self._progress.calls() if self._progress is not None else {}
        steps = [step for _, step in calls.values() if step is not None]
        matched_at = self._output_watch.matched_at() if self._output_watch is not None else None
        progress_at = max([at for at, _ in calls.values()] + ([] if matched_at is None else [matched_at]), default=None)
        if progress_at is None:
            return None
        has_stopped = self._machine.phase is lifecycle.Phase.JOINING
        idle_s = max(0.0, (self._stop_began if has_stopped else time.monotonic()) - progress_at)
        return Advance(max(steps, default=None), matched_at is not None or len(steps) < len(calls), idle_s)

    def _forget_progress(self) -> None:
        self._output_watch = self._behind = None
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def _killed_ranks(self) -> tuple[int, ...]:
        stopped = self._context.stopped() if self._context is not None else {}
        return tuple(rank for rank, how in self._by_global_rank(stopped).items() if how.startswith("SIGKILL"))

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30, is_restart: bool = False
    ) -> None:
        self._stop_watching()
        if self._context is not None:
            self._context.close(death_sig, timeout)
        if is_restart:
            return
        self._forget_progress()
        if self._device_wait is not None:
            self._device_wait.cancel()
        if self._link is not None:
            self._link.close()
            self._link = None
        if isinstance(self._group.logs_specs, DefaultLogsSpecs):
            self._group.logs_specs.remove_if_unused()


def _group_spec(spec: WorkerSpec, logs_specs: LogsSpecs, start_method: str, template: str | None) -> GroupSpec:
    assert spec.entrypoint is not None
    filters = (spec.duplicate_stdout_filters, spec.duplicate_stderr_filters)
    return GroupSpec(spec.role, spec.entrypoint, logs_specs, start_method, template, spec.numa_options, *filters)


def _stuck_timeout_s(explicit: float | None) -> float:
    """For how long a worker may be in uninterruptible sleep; 0 is for ever."""
    text = os.environ.get(_STUCK_VARIABLE) or "0"
    try:
        return max(0.0, float(text) if explicit is None else explicit)
    except ValueError:
        logger.warning("%s=%r is not a number of seconds and is not used", _STUCK_VARIABLE, text)
        return 0.0
