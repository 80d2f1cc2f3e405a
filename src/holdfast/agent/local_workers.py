"""Workers that are processes of this host.

Their spawner reports what becomes of them, so nothing is looked at without a cause. One spawner serves all rounds: a
restart costs no interpreter start of ours. Around the processes there are, if the user wants that: a watch for hangs, a
file timer server (the watchdog), and work that follows a stop (`--clean-shm`).

Workers find the pipe of the timer server in `TORCHELASTIC_TIMER_FILE` and arm timers with `holdfast.timer` or with
torch's own client. A worker whose timer expires is killed as soon as its stacks were taken, or could not be in time; to
the agent that is a worker that failed, and the restart policy decides.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast import log, procfs, signals, text
from holdfast.agent.environment import log_line_prefixes, macros, worker_environments
from holdfast.agent.examination import Examination
from holdfast.agent.model import (
    TORCHELASTIC_ENABLE_FILE_TIMER,
    TORCHELASTIC_TIMER_FILE,
    RunResult,
    WorkerGroup,
    WorkerState,
)
from holdfast.agent.snapshots import NodeSnapshots
from holdfast.agent.workers import Workers
from holdfast.errors import HoldfastError, HostError
from holdfast.failures.records import Evidence, Failure, Folded
from holdfast.frozen import changed
from holdfast.hangs.progress import GroupProgress
from holdfast.log import Logger
from holdfast.loop import call_interruptibly, wait_readable
from holdfast.process.errors import ProcessFailure, mention_finished
from holdfast.process.output.lines import Copied
from holdfast.process.output.logs import DefaultLogsSpecs
from holdfast.process.spawner import command
from holdfast.process.spawner.client import SpawnerLink, launch_or_take_early
from holdfast.process.spawner.wire import Lease
from holdfast.process.workers.group import GroupSpec, PContext, host_name, is_curable, why_refused
from holdfast.process.workers.start import new_group
from holdfast.rendezvous.membership.model import Place, SnapshotOrder
from holdfast.rendezvous.membership.restart_policy import Advance
from holdfast.stop_hooks import StopHooks
from holdfast.telemetry.metrics import put_call

if TYPE_CHECKING:
    from holdfast.hangs.compare import Picture
    from holdfast.hangs.watch import HangWatch
    from holdfast.process.learning import Learning
    from holdfast.process.spawner.warm import Wanted
    from holdfast.process.workers.shared_memory import Cleaning
    from holdfast.rendezvous.coordination import Coordination
    from holdfast.telemetry.stragglers import Straggler
    from holdfast.timer import FileTimerRequest, FileTimerServer

logger = Logger(__name__)

# A worker may end before the last one is started. Usually that one follows at once, and the group fails as a whole.
START_PATIENCE_S = 5.0
_TIMER_TURN_S = 0.1
_LEFTOVERS_LIMIT_S = 2.0  # To look for files may mean to look at a home directory whose server is gone.

T = TypeVar("T")


class LocalWorkers(Workers):
    """`spec` says what to start, `group` has the places of the workers. `record` is `Records.record`. A worker
    that stays in uninterruptible sleep for `stuck_timeout_s` makes the group unhealthy; 0 means no limit."""

    serves_store = True

    def __init__(
        self, spec: GroupSpec, group: WorkerGroup, grace_s: float, stuck_timeout_s: float, record: Callable[..., None]
    ) -> None:
        self._spec, self._group, self._grace_s, self._record = spec, group, grace_s, record
        self._stuck_timeout_s, self._stuck_since = stuck_timeout_s, dict[int, float]()
        self.copied = {"stdout": Copied(), "stderr": Copied()}
        known = (spec.snapshot_memory, spec.snapshot_dir, spec.snapshot_bandwidth, group.spec.run_id)
        self.snapshots: NodeSnapshots = NodeSnapshots(*known)
        self._tell_gone: Callable[[], None] = lambda: None
        self.timer_server: FileTimerServer | None = None
        self._run: Coordination | None = None
        self._place = Place(0, 0, 0, 1)
        self._is_running = False  # All are started, and no stop has begun.
        self._start_began = self._stop_began = self._began_at = 0.0
        self._has_been_refused = False
        self._hangs: HangWatch | None = None
        self._stop_hooks: StopHooks | None = None
        self.examination = Examination(group, spec.peer_stacks, record)
        self._behind: tuple[Straggler, ...] = ()  # When they were stopped.
        self._link: SpawnerLink | None = None
        self._learning: Learning | None = None
        self._taught: SpawnerLink | None = None  # It knows what an earlier run has learned.
        self._held_lease: Lease | None = None
        self._shm_before: frozenset[tuple[int, int]] = frozenset()
        self._cleaning: Cleaning | None = None

    # Starting.

    def prepare(self, run: Coordination) -> None:
        """While the nodes meet, or this one stands by, the modules are imported."""
        self._run, known = run, self._link
        if self._template() is not None and (link := self._spawner()) is not None and link is known:
            self._warm_up(link)

    def begin_start(self, place: Place) -> None:
        self._place, self.context, self._start_began = place, None, time.monotonic()
        self.examination.begin(place.round)
        self._is_running = self._has_been_refused = False

    def poll_start(self) -> Mapping[int, Any] | RunResult | None:
        """If the last workers take long to start, a worker that has failed meanwhile fails the group."""
        try:
            if self._poll_start():
                return self._started_ids()
        except (OSError, HostError) as error:
            put_call("LocalElasticAgent._start_workers", self._start_began, has_failed=True)
            return self.refused(error)
        is_late = time.monotonic() >= self._start_began + START_PATIENCE_S
        failures = self.context.failures() if self.context is not None and is_late else {}
        return self._failed_result(failures) if failures else None

    def _poll_start(self) -> bool:
        if self._spec.refusal:
            raise HostError(self._spec.refusal)
        if self.context is None:
            self._order_start()
        assert self.context is not None
        return self.context.poll_start()

    def _started_ids(self) -> dict[int, Any]:
        assert self.context is not None
        put_call("LocalElasticAgent._start_workers", self._start_began)
        self._is_running = True
        if self._hangs is not None:
            self._hangs.begin()
        return dict(self.context.pids())

    def start(self) -> dict[int, Any]:
        """Blocks until all are started. For hooks."""
        while not self._poll_start():
            signals.inbox().raise_pending()
            fd = self.fileno()
            wait_readable([] if fd is None else [fd], None, writable=self.unsent_fds())
        return self._started_ids()

    def refused(self, error: OSError | RuntimeError) -> RunResult:
        """The workers cannot be started. If a restart cannot cure that, a run of one node ends with the error itself.
        In a larger run, or if the error may pass, the round has failed, and the other nodes hear of it."""
        if not is_curable(error) and (self._group.group_world_size or 1) == 1:
            raise error
        ranks = range(self._group.spec.local_world_size)
        evidence = Evidence(refusal=why_refused(error), is_curable=is_curable(error))
        refused = {rank: ProcessFailure(rank, 0, 1, "", Failure(order=rank, evidence=evidence)) for rank in ranks}
        self._has_been_refused = True
        return RunResult(WorkerState.FAILED, failures=self._by_global_rank(refused))

    def _order_start(self) -> None:
        group = self._group
        args = {each.local_rank: tuple(macros.substitute(group.spec.args, each.local_rank)) for each in group.workers}
        self._stop_watching()
        calls = self.progress.calls().values() if self.progress is not None else ()
        reached = min((step for _, step in calls if step is not None), default=None)
        self._forget_progress()
        timer_path = self._start_timer_server()
        envs = worker_environments(group, os.environ, self._place, timer_path=timer_path, notice_path=self.notice_path)
        self._prepare_watches(envs)
        template = self._spec.log_line_prefix_template
        prefixes = log_line_prefixes(template, group.spec.role, group.workers, host_name())
        link, lease = self._spawner(), self._lease()
        self.snapshots.begin(link, self._place, group.workers, envs, reached)
        self._began_at = time.time()
        if self._spec.clean_shm:
            from holdfast.process.workers import shared_memory

            self._shm_before = shared_memory.present()
        seen = {"watch": self._hangs and self._hangs.output, "copied": self.copied, "agreed_code": self.agreed_code}
        store_fd = self._run.listen_at_master() if self._place.serves_store and self._run is not None else None
        told = {"store_fd": store_fd, "stop_hooks": self._stop_hooks}
        self.context = new_group(self._spec, args, envs, prefixes, link=link, lease=lease, **told, **seen)
        self.context.begin_start()
        log.prepare()  # While they start: the line about the start should come before their first output.

    def _start_timer_server(self) -> str | None:
        """A file timer server, if the environment asks for one; returns the path that workers are told. A path that
        cannot be used, such as one of a regular file, is replaced by a private one. A server that cannot be started at
        all is a warning: it must never end a healthy job."""
        path, wish = os.environ.get(TORCHELASTIC_TIMER_FILE), os.environ.get(TORCHELASTIC_ENABLE_FILE_TIMER, "")
        if wish != "1":
            if wish not in ("", "0"):
                logger.warning("%s=%s is not 1, so there is no watchdog", TORCHELASTIC_ENABLE_FILE_TIMER, wish)
            return path or None
        import tempfile

        from holdfast.timer import FileTimerServer

        private_path = os.path.join(tempfile.gettempdir(), f"watchdog_timer_{os.urandom(16).hex()}")
        attempts = {path: "a private pipe is used instead", private_path: "workers run without a watchdog"}
        for each, else_what in attempts.items():
            try:
                if each:
                    tell = self._record_timer
                    server = FileTimerServer(each, self._group.spec.run_id, _TIMER_TURN_S, daemon=True, log_event=tell)
                    server.start()
                    self.timer_server = server
                    return each
            except (HoldfastError, OSError) as error:
                logger.warning("%s; %s", error, else_what)
        return None

    def _record_timer(self, name: str, request: FileTimerRequest | None) -> None:
        """In the thread of the timer server."""
        shown = ("worker_pid", "scope_id", "expiration_time", "signal") if request is not None else ()
        details = {"watchdog_event": name} | {each: str(getattr(request, each)) for each in shown}
        if request is not None and name == "kill worker process" and self.context is not None:
            self.context.blame(request.worker_pid, note=f"its timer {request.scope_id} had expired")
        self._record("RUNNING", details=details, watchdog_event=name)

    def _spawner(self) -> SpawnerLink | None:
        """The one spawner of this agent, or another one if that was killed. Forked functions bring their own."""
        if callable(self._spec.entrypoint) and self._spec.start_method == "fork":
            return None
        if self._link is not None and not self._link.is_idle():
            self._link.close()
            self._link = None
        if self._link is None:
            self._link = launch_or_take_early(self._spec.preload)
            self._warm_up(self._link)
        return self._link

    def _warm_up(self, link: SpawnerLink) -> None:
        """Have the workers' modules imported, or imported again if one of them has changed."""
        if (template := self._template()) is None:
            return
        if self._learning is None and self._spec.preload_learns is not None:
            from holdfast.process import learning

            program = command.script_path(self._spec.entrypoint, self._group.spec.args)
            path = learning.cache_path(self._spec.preload, program)
            self._learning = learning.Learning(self._spec.preload_learns, path)
        link.preload(template, command.bytecode(), self._learning.imports_fd if self._learning is not None else None)
        if self._learning is not None and self._learning.known and link is not self._taught:
            link.learn(self._learning.known, is_slow=False)
            self._taught = link

    def _learn(self, *, is_last: bool) -> None:
        """Have what the workers import themselves imported for the next ones, while these run."""
        if self._learning is not None and self._link is not None and (names := self._learning.news(is_last=is_last)):
            self._link.learn(names, is_slow=True)

    def _template(self) -> Wanted | None:
        return command.template_for(self._spec, macros.substitute(self._group.spec.args, 0))

    def _lease(self) -> Lease | None:
        """The lease after which the spawner kills the workers, for a run that may give this node's place away."""
        if self._held_lease is None and self._run is not None and self._run.has_leases:
            self._held_lease = Lease()
            self._run.set_lease_sink(self._held_lease.set)
        return self._held_lease

    # Waiting.

    def fileno(self) -> int | None:
        if self._cleaning is not None and self._cleaning.is_underway:
            return self._cleaning.fileno()
        if self.context is not None:
            # -1 if the spawner is gone: then all have ended, and `deadline` has passed.
            return fd if (fd := self.context.fileno()) >= 0 else None
        return None

    def unsent_fds(self) -> list[int]:
        return self.context.unsent_fds() if self.context is not None else []

    def deadline(self) -> float | None:
        context = self.context
        if context is None or (self._cleaning is not None and self._cleaning.is_underway):
            return None
        deadlines = [context.next_deadline(), self._hangs.next_deadline() if self._hangs is not None else None]
        if self._is_running and self.progress is not None:
            deadlines.append(self.progress.next_deadline())
        if context.has_ended() and context.next_deadline() is None:
            # While the last workers were being started; nothing will come to wake the loop.
            deadlines.append(0.0 if self._is_running else self._start_began + START_PATIENCE_S)
        if self._stuck_timeout_s:
            deadlines.append(time.monotonic() + self._group.spec.monitor_interval)
        return min((each for each in deadlines if each is not None), default=None)

    # Watching.

    def look(self) -> RunResult:
        began = time.monotonic()
        try:
            result = self._look()
        except BaseException:
            put_call("LocalElasticAgent._monitor_workers", began, has_failed=True)
            raise
        put_call("LocalElasticAgent._monitor_workers", began)
        if self.progress is not None and self.progress.look(began):
            self.sampled_at = began
            self._learn(is_last=bool(self.progress.calls()))
        return result

    def _look(self) -> RunResult:
        context, group = self.context, self._group
        assert context is not None
        expected, actual = {worker.id for worker in group.workers}, set(context.pids().values())
        if expected != actual:
            pids = (sorted(expected, key=str), sorted(actual))
            logger.error("the workers of role %s should have the pids %s, but have %s", group.spec.role, *pids)
            return RunResult(WorkerState.UNKNOWN)
        ended = context.wait(0)
        if ended is None:
            if (hung := self._result_of_hang(context)) is not None:
                return hung
            return RunResult(WorkerState.UNHEALTHY if self._is_stuck(context) else WorkerState.HEALTHY)
        if ended.is_failed():
            return self._failed_result(ended.failures)
        self._stop_began, self._is_running = time.monotonic(), False
        return RunResult(WorkerState.SUCCEEDED, return_values=self._by_global_rank(ended.return_values))

    def _by_global_rank(self, by_local_rank: Mapping[int, T]) -> dict[int, T]:
        to_global = {worker.local_rank: worker.global_rank for worker in self._group.workers}
        return {to_global[rank]: value for rank, value in by_local_rank.items()}

    def _failed_result(self, failures: Mapping[int, ProcessFailure]) -> RunResult:
        stopped, ends = (self.context.stopped(), self.context.ends()) if self.context is not None else ({}, {})
        failed = self._by_global_rank(failures)
        mention_finished(failed, self._by_global_rank(ends))
        return RunResult(WorkerState.FAILED, failures=failed, stopped=self._by_global_rank(stopped))

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

    # Hangs.

    def _prepare_watches(self, envs: dict[int, dict[str, str]]) -> None:
        """For each life of the group watches of its own: of progress, and of hangs if the user wants that."""
        policy = self._group.spec.hang_policy
        self.progress, self._hangs = GroupProgress(envs, time.monotonic()), None
        self._stop_hooks = StopHooks(envs, self.progress.board)
        if policy is not None and policy.is_on:
            from holdfast.hangs.watch import HangWatch

            self._hangs = HangWatch(policy, self.progress)
            self.progress.output = self._hangs.output

    def _result_of_hang(self, context: PContext) -> RunResult | None:
        """If the workers hang: where they are, and what becomes of it."""
        watch, limits = self._hangs, self._group.spec.hang_policy
        verdict = watch.look(context.running()) if watch is not None else None
        if watch is None or limits is None or verdict is None:
            return None
        from holdfast.hangs import policy

        reason = policy.words(verdict, limits)
        logger.warning("the workers hang: %s (--%s %g s); taking their stacks", reason, verdict.bound, verdict.limit_s)
        picture, path = self.examination.hung(context, watch, reason)
        if context.wait(0) is not None or watch.look(context.running(), is_again=True) is None:
            logger.warning("the workers have moved while their stacks were taken, and go on")
            self.examination.begin(self._place.round)
            return None
        return self._blame(context, picture, reason, path)

    def examine(self) -> RunResult | None:
        context = self.context
        if context is None or not context.running():
            return None
        reason = "another node found the run hanging"
        picture, path = self.examination.hung(context, self._hangs, reason)
        return self._blame(context, picture, reason, path) if picture.is_cause_here else None

    def _blame(self, context: PContext, picture: Picture, reason: str, path: str) -> RunResult:
        note = f"every thread of every worker is in {path}" if path else ""
        for pid, words, stack in picture.blamed(reason):
            context.blame(pid, note=note, hang=words, stack=stack, is_waiting=not picture.is_cause_here)
        return self._failed_result(context.failures())

    def look_at_peers(self, *, blames_peer: bool) -> None:
        if self.context is not None:
            self.examination.failed(self.context, self.progress, blames_peer=blames_peer)

    def peers(self) -> tuple[Folded, ...]:
        return self.examination.peers

    def snapshot_order(self, order: SnapshotOrder) -> None:
        self.snapshots.transfers.obey(order)

    # Stopping.

    def begin_stop(self, at_once: bool) -> None:
        self._prepare_stop()
        if self.context is not None:
            self.context.begin_stop(signal.SIGKILL if at_once else signal.SIGTERM, 0 if at_once else self._grace_s)

    def stop(self) -> None:
        """Blocks until they are stopped. For hooks."""
        self._prepare_stop()
        if self.context is not None:
            self.context.close(signal.SIGTERM, self._grace_s)

    def _prepare_stop(self) -> None:
        """Once for each life: note facts that are gone after the stop."""
        if self._stop_began >= self._start_began:
            return
        self._stop_began, self._is_running, context = time.monotonic(), False, self.context
        self._stop_watching()
        if context is None:
            return
        self._learn(is_last=True)
        if self.progress is not None:
            finished = {rank for rank, (code, *_) in context.ends().items() if code == 0}  # They are not slow.
            others = [each for each in self._group.workers if each.local_rank not in finished]
            self._behind = tuple(self.progress.behind({each.local_rank: each.global_rank for each in others}))
        if self._spec.clean_shm:
            from holdfast.process.workers.shared_memory import Cleaning

            self._cleaning = Cleaning(context.running().values(), self._shm_before)

    def poll_stop(self, result: RunResult) -> RunResult | None:
        context = self.context
        if context is not None and context.next_deadline() is not None and not context.poll_stop():
            return None
        if self._cleaning is not None and not self._cleaning.poll():
            return None
        self._cleaning = None
        put_call("LocalElasticAgent._stop_workers", self._stop_began)
        return result if context is None or self._has_been_refused else self._settled(context)

    def _settled(self, context: PContext) -> RunResult:
        """Once all workers are stopped, all that they wrote has arrived: the evidence is complete."""
        settled, stacks = self._failed_result(context.failures()), self.examination.kept_file(context)
        if settled.failures:
            from holdfast.failures import leftovers

            crashed = [failure.pid for failure in settled.failures.values() if failure.exitcode < 0]
            environments = self._by_global_rank({rank: {**os.environ, **env} for rank, env in context.envs.items()})
            left = [stacks] if stacks else []
            with suppress(TimeoutError, RuntimeError):  # A mount that does not answer, a process at its limit.
                where = (environments, crashed, self._began_at)
                left += call_interruptibly(leftovers.left_by, *where, timeout_s=_LEFTOVERS_LIMIT_S)
            known = {"logs": context.logs_dir, "left": tuple(left), "stragglers": self._behind}
            for rank, failure in settled.failures.items():
                failure.evidence = changed(failure.evidence, **known, peers=self.examination.peers_of(rank))
        return settled

    def send(self, number: signal.Signals) -> None:
        for leader in self.context.running().values() if self.context is not None else ():
            for pid in (leader, *procfs.descendants_of(leader)):
                procfs.kill(pid, number)

    def unkillable(self) -> tuple[int, ...]:
        return tuple(pid for pid, _ in self.context.survivors) if self.context is not None else ()

    def killed_ranks(self) -> tuple[int, ...]:
        stopped = self.context.stopped() if self.context is not None else {}
        return tuple(rank for rank, how in self._by_global_rank(stopped).items() if how.startswith("SIGKILL"))

    def advance(self) -> Advance | None:
        calls = self.progress.calls() if self.progress is not None else {}
        steps = [step for _, step in calls.values() if step is not None]
        matched_at = self._hangs.output.matched_at() if self._hangs is not None else None
        progress_at = max([at for at, _ in calls.values()] + ([] if matched_at is None else [matched_at]), default=None)
        if progress_at is None:
            return None
        has_stopped = self._stop_began >= self._start_began
        idle_s = max(0.0, (self._stop_began if has_stopped else time.monotonic()) - progress_at)
        return Advance(max(steps, default=None), matched_at is not None or len(steps) < len(calls), idle_s)

    def shutdown(self, grace_s: float, number: signal.Signals | None = None, *, is_restart: bool = False) -> None:
        self._stop_watching()
        until = time.monotonic() + grace_s
        if not is_restart:
            self.snapshots.begin_last_files()
        if self.context is not None:
            self.context.close(number, grace_s)
        if is_restart:
            return
        self._forget_progress()
        self._tell_gone()
        self.snapshots.await_last_files(until)
        if self._link is not None:
            self._let_go(self._link, is_well=self._group.state is WorkerState.SUCCEEDED and number is None)
            self._link = None
        if isinstance(self._spec.logs_specs, DefaultLogsSpecs):
            self._spec.logs_specs.remove_if_unused(keep_errors=self._group.state is WorkerState.FAILED)

    def when_gone(self, tell: Callable[[], None]) -> None:
        self._tell_gone = tell

    def _let_go(self, link: SpawnerLink, *, is_well: bool) -> None:
        """Of the spawner: it ends, or stays for the next run, if the user wants that and this one has ended well."""
        keep_s, modules = self._spec.preload_keep_s, self._spec.preload
        will_stay = is_well and bool(modules) and (keep_s is not None or link.kept_for is not None)
        if self._learning is not None:
            link.reports()  # The last ones, on modules that were left out.
            learned = self._learning.news(is_last=True)
            if learned and will_stay:
                link.learn(learned, is_slow=True)
            self._learning.close(link.left_out)
            self._learning = None
        if not will_stay:
            link.close()
        elif why := link.keep(keep_s, modules):
            logger.warning("%s does not stay preloaded: %s", ", ".join(modules), why)
            link.close()
        elif keep_s is not None:
            names, time_text = ", ".join(modules), text.duration(keep_s)
            logger.info("%s stays preloaded for %s (process %d); see `holdfast warm`", names, time_text, link.pid)

    def _stop_watching(self) -> None:
        if self._hangs is not None:
            self._hangs.end()
        if self.timer_server is not None:
            self.timer_server.stop()
            self.timer_server = None

    def _forget_progress(self) -> None:
        self._behind = ()
        if self._stop_hooks is not None:
            self._stop_hooks.close()
        if self.progress is not None:
            self.progress.close()
            self.progress = None
