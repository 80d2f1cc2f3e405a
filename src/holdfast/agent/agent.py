"""Agents: the contract, and the one that drives `lifecycle` through four hooks.

`SimpleElasticAgent` turns commands of the machine into calls of its hooks, and what they return into events. The other
source of events is the run's `Coordination`, which says which round comes next and pushes what the run has decided.

A subclass that implements `_start_workers`, `_stop_workers`, `_monitor_workers` and `_shutdown` is a whole agent: it is
asked for the state of its workers every `monitor_interval`. One that can do better overrides `_wait_for_change` to
return the moment something happened. Its `_begin_start` and `_begin_stop` return at once, and the loop, which acts on
signals and pushes meanwhile, asks `_poll_start` and `_poll_stop` after each `_wait_for_change`.

Agents of users were written against more than one contract: `_stop_workers` and `_shutdown` have had an argument
`is_restart`, and `_shutdown` has not always had `timeout`. A hook is given what it takes. A hook may block: meanwhile
the agent is not stuck, it does what its author wants, and the node keeps its place.

Signals are noted from the beginning of `run` to its end and surface where nothing is half done: while waiting
for the rendezvous, for the workers to start, to end or to stop, or for the other nodes. The workers then get the same
signal and the grace period, and the exception goes on to the caller.
"""

from __future__ import annotations

import abc
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, assert_never

from holdfast import loop, signals
from holdfast.agent import causes, lifecycle, ranks, recording
from holdfast.agent.journal import Journal
from holdfast.agent.lifecycle import Lifecycle
from holdfast.agent.model import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from holdfast.agent.publisher import Publisher
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.log import Logger
from holdfast.loop import BusyTime, call_interruptibly
from holdfast.process.spawner.command import script_path
from holdfast.rendezvous.api import RendezvousGracefulExitError, RendezvousHandler, is_kind
from holdfast.rendezvous.coordination import Coordination, JoinFailed, Push
from holdfast.rendezvous.membership.model import CloseRequested, End, Ended, Outcome, Place, PlaceLost, Sealed, Stop
from holdfast.rendezvous.membership.restart_policy import HANG, Advance, RestartPolicy
from holdfast.rendezvous.solo import SoloCoordination
from holdfast.signals import RunClosed, SignalException
from holdfast.telemetry.metrics import prof, put_call, put_metric

if TYPE_CHECKING:
    from holdfast.hangs.progress import GroupProgress
    from holdfast.hangs.watch import HangWatch
    from holdfast.process.workers.group import PContext
    from holdfast.telemetry.events import Event

__all__ = ["DEFAULT_ROLE", "ElasticAgent", "SimpleElasticAgent"]

logger = Logger(__name__)

T = TypeVar("T")

DEFAULT_ROLE = "default"
_IN_ROUND = (lifecycle.Phase.STARTING, lifecycle.Phase.RUNNING, lifecycle.Phase.WAITING)

# For how long a node that has reported a hang keeps its workers, so that every node can take stacks.
_OTHERS_LOOK_S = 2.0


class ElasticAgent(abc.ABC):
    """Owns the workers of one node."""

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to the end, through restarts and changes of membership."""

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The group of workers as it stands."""


class SimpleElasticAgent(ElasticAgent):
    """An agent for workers of one role."""

    def __init__(self, spec: WorkerSpec, exit_barrier_timeout: float = 300, shutdown_timeout: float = 30) -> None:
        self._worker_group = WorkerGroup(spec)
        self._machine = Lifecycle(exit_barrier_timeout)
        self._shutdown_timeout = shutdown_timeout
        self._coordination: Coordination | None = None
        self._place: Place | None = None
        self._failed_round = 0
        self._run_outcome: Outcome | None = None
        self._result = RunResult(WorkerState.INIT)
        self._total_execution_time = 0
        self._join_began = self._start_began = self._stop_began = 0.0
        self._restart_began: float | None = None
        self._health_check_server: Any = None
        self._busy_time = BusyTime()
        self._is_stopping = False
        self._publisher = Publisher(self)
        self._journal = Journal(self)
        self._was_told_of_hang = False
        # The workers as processes of this host, and what watches their progress; as far as an agent has them.
        self._context: PContext | None = None
        self._hangs: HangWatch | None = None
        self._progress: GroupProgress | None = None

    # The hooks. The four abstract ones make a whole agent.

    @abc.abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start one worker for each local rank; returns their ids."""

    @abc.abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop every worker of the group and everything they started."""

    @abc.abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """How the workers stand at this moment. Only looks."""

    @abc.abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30) -> None:
        """Stop the workers with that signal and release everything. Called once at the end, may find nothing."""

    def _wait_for_change(self, worker_group: WorkerGroup, pushes_fd: int, timeout_s: float | None) -> None:
        """Return when it may be worth asking for the state of the workers, when the descriptor of the pushes can
        be read, or when the time is up. A signal must cut it short."""
        interval_s = worker_group.spec.monitor_interval
        loop.wait_readable([pushes_fd], interval_s if timeout_s is None else min(interval_s, timeout_s))

    def _examine_workers(self, worker_group: WorkerGroup) -> RunResult | None:
        """The run hangs: see where these workers are. The result if the cause is among them."""
        return None

    def _unkillable(self) -> tuple[int, ...]:
        """After a stop: the pids that even SIGKILL did not end."""
        return tuple(pid for pid, _ in self._context.survivors) if self._context is not None else ()

    def _killed_ranks(self) -> tuple[int, ...]:
        """After a stop: the global ranks that did not end by themselves within the grace period."""
        return ()

    def _advance(self) -> Advance | None:
        """How far the workers of the last round came, for agents that know."""
        return None

    def _settle(self, result: RunResult) -> RunResult:
        """The result with what is known only after the workers were stopped."""
        return result

    def _begin_start(self, group: WorkerGroup) -> None:
        """Begin to start the workers. The hook does it all."""

    def _poll_start(self, group: WorkerGroup) -> dict[int, Any] | None:
        """The ids of the workers once all are started; None before."""
        return _call(self._start_workers, group)

    def _begin_stop(self, group: WorkerGroup, at_once: bool) -> None:
        """Begin to stop the workers, or end the grace of a stop that has begun. Hooks cannot do the latter.

        Whether a restart follows is not known yet. Hooks with an argument `is_restart` get True, so that they keep what
        the next round may need; the agent calls `_shutdown` at the end in any case."""
        _call(self._stop_workers, group, is_restart=True)

    def _poll_stop(self, group: WorkerGroup) -> bool:
        """Whether the workers are stopped."""
        return True

    def _get_alive_time(self) -> float:
        """For the health check: when this agent was last known to be alive, in seconds since the epoch. A loop that
        waits is alive now, whatever it waits for. A subclass may give it another meaning."""
        return time.time() - self._busy_time.busy_for_s()

    # What others see.

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    @property
    def _policy(self) -> RestartPolicy:
        spec = self._worker_group.spec
        return spec.restart_policy or RestartPolicy(spec.max_restarts)

    @property
    def _restarts_used(self) -> int:
        return self._place.restarts_used if self._place else 0

    @property
    def _remaining_restarts(self) -> int:
        return max(0, self._policy.max_restarts - self._restarts_used)

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        began = time.monotonic()
        is_shut_down = False
        self._is_stopping = False
        with self._busy_time.measured_here(), self._publisher.served(), self._journal.kept(), signals.deferred():
            try:
                result = self._invoke_run(role)
                self._journal.ended(result)
                self._total_execution_time = int(time.monotonic() - began)
                group = self._worker_group
                recording.put_run_metrics(group.spec.role, result, self._restarts_used, self._policy.max_restarts)
                self._record_worker_events(result)
                return result
            except RunClosed as closed:
                closed.killed_ranks = _call(self._killed_ranks)
                raise
            except SignalException as received:
                stop = recording.stop_words(self._machine.phase, received.sigval, self._shutdown_timeout)
                logger.warning("got %s%s", received.sigval.name, stop)
                self._leave(received.sigval)
                received.killed_ranks = _call(self._killed_ranks)
                is_shut_down = True
                raise
            except Exception as error:
                if self._machine.phase is lifecycle.Phase.STARTING:
                    self._put_start(has_failed=True)
                if not is_kind(error, RendezvousGracefulExitError):
                    raise
                logger.info("this node is not needed any more and leaves: %s", error)
                return RunResult(WorkerState.SUCCEEDED)
            finally:
                self._total_execution_time = int(time.monotonic() - began)
                self._is_stopping = True
                self._publisher.publish()
                if not is_shut_down:
                    _call(self._shutdown, timeout=self._shutdown_timeout)

    def _leave(self, death_sig: signal.Signals) -> None:
        """This node goes; the run goes on without it. The others hear of it before the workers are stopped."""
        self._is_stopping = True
        self._publisher.publish()
        if self._coordination is not None:
            self._coordination.leaving()
        _call(self._shutdown, death_sig, timeout=self._shutdown_timeout)
        if self._coordination is not None and not _call(self._unkillable):
            self._coordination.left()

    # The shell around the machine.

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        spec, handler = self._worker_group.spec, self._handler
        self._machine = Lifecycle(self._machine.peers_timeout_s)
        run = handler if isinstance(handler, Coordination) else SoloCoordination(handler, spec.monitor_interval)
        self._coordination = run
        script = script_path(spec.entrypoint, spec.args)
        run.introduce(spec.role, spec.local_world_size, self._policy, self._shutdown_timeout, script)
        run.watch_loop(self._busy_time.stuck_for_s)
        run.answer_with(self._publisher.answer)
        pending: deque[lifecycle.Event | Push] = deque([lifecycle.RunRequested()])
        while self._machine.end is None:
            if not pending:
                pending.extend(self._next_events(run))
                continue
            event = self._taken(pending.popleft(), run)
            if event is None:
                continue
            commands = self._machine.step(event, time.monotonic())
            self._publisher.step(event)
            self._journal.step(event, commands)
            results = [result for command in commands for result in self._execute(command, run)]
            # Its results go before what was pushed meanwhile: a round that is stopped is not stopped twice.
            pending.extendleft(reversed(results))
        return self._final_result(self._machine.end)

    def _execute(self, command: lifecycle.Command, run: Coordination) -> list[lifecycle.Event]:
        group = self._worker_group
        is_one_of_several = (group.group_world_size or 1) > 1
        match command:
            case lifecycle.Join():
                self._join(group, run)
            case lifecycle.StartWorkers(round):
                self._was_told_of_hang = False
                self._start_began = time.monotonic()
                self._begin_start(group)
                return self._look_at_start(group)
            case lifecycle.StopWorkers(round, at_once):
                self._stop_began = time.monotonic()
                self._restart_began = self._restart_began or self._stop_began
                self._begin_stop(group, at_once)
                return self._look_at_stop(group)
            case lifecycle.ReportFailure(round):
                run.advance = self._advance()
                self._failed_round, failure = round, causes.failure_of(self._result, round)
                run.report_failure(round, failure)
                self._publisher.failed(failure)
                cause = causes.cause_of(self._result)
                if run.verdict is None:
                    logger.warning("%s", cause)
                elif run.outcome is None or self._policy.max_restarts:  # Else the final report follows at once.
                    logger.warning("%s; %s", cause, run.verdict)
                if failure.exception == HANG and run.has_leases and not self._was_told_of_hang and is_one_of_several:
                    # Once these workers are gone, those of the other nodes get an error and hang no more.
                    loop.wait_readable([], _OTHERS_LOOK_S)
            case lifecycle.ReportSuccess(round):
                if is_one_of_several:
                    logger.info("the workers of this node have finished, waiting for the other nodes")
                run.report_success(round, self._machine.peers_timeout_s)
            case lifecycle.EndRun():
                pass
            case _:
                assert_never(command)
        return []

    def _next_events(self, run: Coordination) -> list[lifecycle.Event | Push]:
        """Wait until something happens; then say what."""
        group = self._worker_group
        signals.inbox().raise_pending()
        deadline = self._machine.next_deadline()
        if self._is_watching(run):
            is_running = self._machine.phase is lifecycle.Phase.RUNNING
            _call(self._wait_for_change, group, run.fileno(), run.ask_every_s if is_running else None)
        else:
            loop.wait_readable([run.fileno()], None if deadline is None else deadline - time.monotonic())
        signals.inbox().raise_pending()
        if deadline is not None and time.monotonic() >= deadline:
            logger.warning("timed out after %g s waiting for other nodes to finish", self._machine.peers_timeout_s)
            return [lifecycle.TimePassed(self._machine.round)]
        events = self._look(group) if self._is_watching(run) else []
        # Some handlers are asked whether nodes wait; that is for workers that run.
        is_changing = self._machine.phase in (lifecycle.Phase.STARTING, lifecycle.Phase.STOPPING)
        return [*events] if events or (is_changing and not loop.is_readable(run.fileno())) else [*run.take()]

    def _is_watching(self, run: Coordination) -> bool:
        """Whether workers are there whose ends count. Those that die because the lease has run out have not failed; the
        push that says so is on its way."""
        if run.has_lapsed:
            return self._machine.phase is lifecycle.Phase.STOPPING
        return self._machine.phase in lifecycle.WITH_WORKERS

    def _look(self, group: WorkerGroup) -> list[lifecycle.Event]:
        match self._machine.phase:
            case lifecycle.Phase.STARTING:
                return self._look_at_start(group)
            case lifecycle.Phase.STOPPING:
                return self._look_at_stop(group)
        return self._look_at_workers(group)

    def _look_at_start(self, group: WorkerGroup) -> list[lifecycle.Event]:
        ids = self._poll_start(group)
        if ids is None:
            return []
        for local_rank, id_ in ids.items():
            group.workers[local_rank].id = id_
            self._record("START", group.workers[local_rank])
        group.state = WorkerState.HEALTHY
        self._put_state(group)
        logger.info("%s", recording.start_line(group, self._context.logs_dir if self._context is not None else ""))
        where = f"master {group.master_addr}:{group.master_port}"
        logger.debug("round %d: %s, first worker %s", self._machine.round, where, group.workers[0])
        self._put_start()
        if self._restart_began is not None:
            put_call("SimpleElasticAgent._restart_workers", self._restart_began)
            self._restart_began = None
        return [lifecycle.WorkersStarted(self._machine.round)]

    def _put_start(self, *, has_failed: bool = False) -> None:
        """A start spans several turns of the loop, so its metrics are put together here."""
        put_call("SimpleElasticAgent._initialize_workers", self._start_began, has_failed=has_failed)

    def _look_at_stop(self, group: WorkerGroup) -> list[lifecycle.Event]:
        if not self._poll_stop(group):
            return []
        group.state = WorkerState.STOPPED
        self._result = _call(self._settle, self._result)
        return [lifecycle.WorkersStopped(self._machine.round, _call(self._unkillable))]

    def _look_at_workers(self, group: WorkerGroup) -> list[lifecycle.Event]:
        result = _call(self._monitor_workers, group)
        if group.state is not result.state:
            group.state = result.state
            self._put_state(group)
        self._publisher.publish()
        self._journal.look()
        if result.state is WorkerState.HEALTHY:
            return []
        self._result = result
        if result.state is WorkerState.SUCCEEDED:
            return [lifecycle.WorkersSucceeded(self._machine.round)]
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            return [lifecycle.WorkersFailed(self._machine.round)]
        raise HoldfastError(f"[{group.spec.role}] the worker group is in the unexpected state {result.state.name}")

    def _taken(self, event: lifecycle.Event | Push, run: Coordination) -> lifecycle.Event | None:
        """What an event means for this node, now that it is its turn."""
        match event:
            case Sealed() if event.place.round > self._machine.round:
                self._enter_round(event, run)
            case Stop(round, reason) if round == self._machine.round and self._machine.phase in _IN_ROUND:
                logger.warning("the round is stopped: %s", reason)
                if event.is_hang and self._machine.phase is lifecycle.Phase.RUNNING:
                    # Before its workers are stopped this node looks where they are. If one of them is where no peer
                    # could help it, that is this node's failure.
                    self._was_told_of_hang = True
                    if (result := _call(self._examine_workers, self._worker_group)) is not None:
                        self._result = result
                        return lifecycle.WorkersFailed(round)
            case PlaceLost(round, reason) if round == self._machine.round and self._machine.phase in _IN_ROUND:
                logger.warning("this node has lost its place, its workers are killed: %s", reason)
            case CloseRequested(reason):
                run.close_run(reason)
                return None
            case Ended(outcome):
                self._run_outcome = outcome
                if outcome.end is End.CLOSED and self._machine.phase in lifecycle.WITH_WORKERS:
                    logger.warning("the run is closed, stopping the workers: %s", outcome.reason)
                if outcome.cause is not None and self._policy.max_restarts and run.verdict is None:
                    logger.warning("no restart: %s", outcome.reason)
            case JoinFailed(error):
                self._journal.refused(error)
                self._record_join(f"{type(error).__name__}: {error}")
                raise error
        assert not isinstance(event, JoinFailed)
        return event

    @property
    def _handler(self) -> RendezvousHandler:
        handler = self._worker_group.spec.rdzv_handler
        if handler is None:
            raise UserError("the worker spec has no rendezvous handler")
        return handler

    def _final_result(self, end: End) -> RunResult:
        group, settled = self._worker_group, self._result
        if end is End.SUCCEEDED:
            # A node that stood by at the end has not finished, whatever became of the workers that it had before.
            if group.state is not WorkerState.SUCCEEDED:
                logger.info("the run has succeeded; this node was not needed")
                return RunResult(WorkerState.SUCCEEDED)
            logger.info("%s", recording.finish_line(group, self._restarts_used))
            return settled
        if end is End.CLOSED and self._run_outcome is not None:
            raise RunClosed(self._run_outcome.reason)
        group.state = WorkerState.FAILED
        if self._machine.unkillable:
            pids = ", ".join(map(str, self._machine.unkillable))
            trouble = f"processes that cannot be killed are left on this node: {pids}"
            if not settled.failures:
                raise HostError(trouble)
            logger.error(trouble)
        result = RunResult(WorkerState.FAILED, failures=dict(settled.failures), stopped=settled.stopped)
        known = (self._run_outcome, group, self._policy, self._machine.round, self._place)
        settled.report = result.report = causes.report_of(result, *known) if end is End.FAILED else None
        if self._run_outcome is not None:
            causes.add_agreed_cause(result, self._run_outcome, group.group_world_size or 1)
        return result

    # Start of a round.

    def _join(self, group: WorkerGroup, run: Coordination) -> None:
        signals.inbox().raise_pending()  # One that came while the workers were being stopped.
        group.state = WorkerState.INIT if self._place is None else WorkerState.STOPPED
        self._join_began = time.monotonic()
        has_failed = self._failed_round == self._machine.round > 0 and bool(self._result.failures)
        run.advance = self._advance()
        run.join(causes.failure_of(self._result, self._machine.round, with_evidence=True) if has_failed else None)

    def _enter_round(self, sealed: Sealed, run: Coordination) -> None:
        before, self._place = self._place, sealed.place
        if before is not None and self._restarts_used > before.restarts_used and run.verdict is None:
            logger.warning("restart %d of %d", self._restarts_used, self._policy.max_restarts)
        self._record_join()
        found = run.found(sealed)
        group, spec = self._worker_group, self._worker_group.spec
        group.store = found.store
        group.group_rank = found.rank
        group.group_world_size = found.world_size
        group.master_addr = spec.master_addr or found.bootstrap_store_info.master_addr
        group.master_port = spec.master_port or found.bootstrap_store_info.master_port
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            group.workers = self._assign_worker_ranks(found.store, found.rank, found.world_size, spec)

    def _record_join(self, raw_error: str | None = None) -> None:
        """A rendezvous spans several turns of the loop, so its time is put together here."""
        self._record("RENDEZVOUS", raw_error=raw_error, duration_ms=_elapsed_ms(self._join_began))
        put_call("SimpleElasticAgent._rendezvous", self._join_began, has_failed=raw_error is not None)

    @prof
    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        if self._place is not None and self._place.shapes:
            members = [ranks.Member(role, size) for role, size in self._place.shape_of_each()]
            return ranks.assign_ranks(members, group_rank)
        is_said = os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1"
        if group_world_size == 1 or is_said or getattr(self._handler, "has_fixed_world", False):
            return ranks.assign_ranks([ranks.Member(spec.role, spec.local_world_size)] * group_world_size, group_rank)
        from holdfast.agent import exchange

        return call_interruptibly(exchange.exchange_ranks, store, group_rank, group_world_size, spec)

    # What is told to others.

    def _put_state(self, group: WorkerGroup) -> None:
        put_metric(f"workers.{group.spec.role}.remaining_restarts", self._remaining_restarts)
        put_metric(f"workers.{group.spec.role}.{group.state.name.lower()}", 1)

    def get_event_succeeded(self) -> Event:
        return self._event("SUCCEEDED")

    def get_event_failed(self) -> Event:
        """Of the exception that is being handled, or of workers that failed."""
        import traceback

        is_raised = sys.exc_info()[0] is not None
        return self._event("FAILED", raw_error=traceback.format_exc() if is_raised else causes.cause_of(self._result))

    def _event(self, state: str, worker: Worker | None = None, **facts: Any) -> Event:
        so_far = (self._restarts_used, self._total_execution_time)
        return recording.status_event(self._worker_group, state, *so_far, worker, **facts)

    def _record(self, state: str, worker: Worker | None = None, **facts: Any) -> None:
        recording.record(lambda: self._event(state, worker, **facts), self._worker_group.spec.event_log_handler)

    def _record_worker_events(self, result: RunResult) -> None:
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            facts = {} if failure is None else recording.facts_of_failure(failure)
            self._record(recording.final_state(worker, result), worker, **facts)

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record an event of that name when the block ends, with how long it took and the error that it raised."""
        began = time.monotonic()
        raw_error = None
        try:
            yield
        except BaseException as error:
            raw_error = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._record(state, raw_error=raw_error, duration_ms=_elapsed_ms(began))


def _elapsed_ms(began: float) -> int:
    return int((time.monotonic() - began) * 1000)


def _call(hook: Callable[..., T], *args: Any, **offered: Any) -> T:
    """Call with `args`, and with those of the named arguments that the hook knows. Our own hooks know all of them."""
    if offered and not getattr(hook, "__module__", "").startswith("holdfast."):
        import inspect

        known = inspect.signature(hook).parameters
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values()):
            offered = {name: value for name, value in offered.items() if name in known}
    with loop.in_hook():
        return hook(*args, **offered)
