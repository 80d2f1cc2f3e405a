"""Agents: the contract, and the one that drives `lifecycle` through four hooks.

`SimpleElasticAgent` turns commands of the machine into calls of its hooks and what they return into events. A
subclass that implements `_start_workers`, `_stop_workers`, `_monitor_workers` and `_shutdown` is a whole agent:
it is asked for the state of its workers every `monitor_interval`. One that can do better overrides
`_wait_for_change` to return the moment something happened.

Signals are noted from the beginning of `run` to its end and surface where nothing is half done: while waiting
for the rendezvous, for the workers, or for the other nodes. The workers then get the same signal, the grace
period, and the exception goes on to the caller.
"""

from __future__ import annotations

import abc
import functools
import json
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, assert_never

from holdfast.agent import lifecycle, ranks, recording
from holdfast.agent.blocking import call_interruptibly
from holdfast.agent.lifecycle import Lifecycle
from holdfast.agent.model import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from holdfast.diagnosis import report
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.process import signals
from holdfast.process.signals import SignalException
from holdfast.rendezvous import store as stores
from holdfast.rendezvous.api import RendezvousGracefulExitError, RendezvousHandler
from holdfast.telemetry.events import Event, record
from holdfast.telemetry.metrics import prof, put_metric

__all__ = ["DEFAULT_ROLE", "ElasticAgent", "SimpleElasticAgent"]

logger = logging.getLogger(__name__)

DEFAULT_ROLE = "default"
_TERMINAL_STATE_SYNC = "torchelastic/agent/terminal_state"


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
        self._machine = Lifecycle(spec.max_restarts, exit_barrier_timeout)
        self._shutdown_timeout = shutdown_timeout
        self._result = RunResult(WorkerState.INIT)
        self._total_execution_time = 0
        self._restart_began: float | None = None
        self._complaint = ""

    # Hooks.

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

    def _wait_for_change(self, worker_group: WorkerGroup) -> None:
        """Return when it may be worth asking for the state of the workers. A signal must cut it short."""
        signals.wait_readable([], worker_group.spec.monitor_interval)

    def _unkillable(self) -> tuple[int, ...]:
        """After a stop: the pids that even SIGKILL did not end."""
        return ()

    def _settle(self, result: RunResult) -> RunResult:
        """The result with what is known only after the workers were stopped."""
        return result

    # What others see.

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    @property
    def _remaining_restarts(self) -> int:
        return self._machine.remaining_restarts

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        began = time.monotonic()
        is_shut_down = False
        with signals.deferred():
            try:
                result = self._invoke_run(role)
                self._total_execution_time = int(time.monotonic() - began)
                recording.put_run_metrics(self._worker_group.spec.role, result, self._machine)
                self._record_worker_events(result)
                return result
            except RendezvousGracefulExitError as reason:
                logger.info("this node is not needed any more and leaves: %s", reason)
                return RunResult(WorkerState.SUCCEEDED)
            except SignalException as received:
                logger.warning("got %s, stopping the workers", received.sigval.name)
                self._shutdown(received.sigval, timeout=self._shutdown_timeout)
                is_shut_down = True
                raise
            finally:
                self._total_execution_time = int(time.monotonic() - began)
                if not is_shut_down:
                    self._shutdown(timeout=self._shutdown_timeout)

    # The shell around the machine.

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        if self._machine.phase is not lifecycle.Phase.IDLE:
            spec = self._worker_group.spec
            self._machine = Lifecycle(spec.max_restarts, self._machine.peers_timeout_s)
        pending: deque[lifecycle.Event] = deque([lifecycle.RunRequested()])
        while self._machine.outcome is None:
            event = pending.popleft() if pending else self._next_event()
            if event is not None:
                for command in self._machine.step(event, time.monotonic()):
                    pending.extend(self._execute(command))
        return self._final_result(self._machine.outcome)

    def _execute(self, command: lifecycle.Command) -> list[lifecycle.Event]:
        group = self._worker_group
        match command:
            case lifecycle.Join(round):
                signals.inbox().raise_pending()  # One that came while the workers were being stopped.
                self._rendezvous(group)
                # Nodes that share nothing cannot wait for each other either.
                node_count = 1 if self._has_fixed_world() else group.group_world_size or 1
                return [lifecycle.WorldSealed(round, node_count)]
            case lifecycle.StartWorkers(round):
                self._initialize_workers(group)
                return [lifecycle.WorkersStarted(round)]
            case lifecycle.StopWorkers(round, will_restart):
                self._tell_why(will_restart)
                self._restart_began = time.monotonic() if will_restart else None
                self._stop_workers(group)
                group.state = WorkerState.STOPPED
                return [lifecycle.WorkersStopped(round, self._unkillable())]
            case lifecycle.AwaitPeers(round):
                self._exit_barrier()
                return [lifecycle.PeersFinished(round)]
            case lifecycle.EndRun():
                return []
        assert_never(command)

    def _next_event(self) -> lifecycle.Event | None:
        group = self._worker_group
        signals.inbox().raise_pending()
        self._wait_for_change(group)
        signals.inbox().raise_pending()
        result = self._monitor_workers(group)
        group.state = result.state
        self._publish_state(group)
        return self._as_event(result)

    def _as_event(self, result: RunResult) -> lifecycle.Event | None:
        current = self._machine.round
        match result.state:
            case WorkerState.SUCCEEDED:
                self._result = result
                return lifecycle.WorkersSucceeded(current)
            case WorkerState.FAILED | WorkerState.UNHEALTHY:
                self._result = result
                return lifecycle.WorkersFailed(current)
            case WorkerState.HEALTHY:
                return lifecycle.NodesWaiting(current) if self._nodes_wait() else None
        role = self._worker_group.spec.role
        raise HoldfastError(f"[{role}] the worker group is in state {result.state.name}, which should not be")

    def _nodes_wait(self) -> bool:
        """Workers that are well are not stopped because nobody can be asked."""
        self._result = RunResult(WorkerState.HEALTHY)
        try:
            return self._handler.num_nodes_waiting() > 0
        except Exception as error:
            complaint = f"{type(error).__name__}: {error}"
            if complaint != self._complaint:
                logger.warning("cannot ask whether other nodes are waiting; the workers go on: %s", complaint)
            self._complaint = complaint
            return False

    @property
    def _handler(self) -> RendezvousHandler:
        handler = self._worker_group.spec.rdzv_handler
        if handler is None:
            raise UserError("the worker spec has no rendezvous handler")
        return handler

    def _final_result(self, outcome: lifecycle.Outcome) -> RunResult:
        if outcome is lifecycle.Outcome.SUCCEEDED:
            self._tell_success()
            return self._result
        self._worker_group.state = WorkerState.FAILED
        settled = self._settle(self._result)
        if self._machine.unkillable:
            pids = ", ".join(map(str, self._machine.unkillable))
            trouble = f"processes that cannot be killed are left on this node: {pids}"
            if not settled.failures:
                raise HostError(trouble)
            logger.error(trouble)
        return RunResult(WorkerState.FAILED, failures=settled.failures, stopped=settled.stopped)

    def _tell_success(self) -> None:
        count, restarts = len(self._worker_group.workers), self._machine.restarts_used
        who = f"all {count} workers" if count > 1 else "the worker"
        after = {0: "", 1: " after 1 restart"}.get(restarts, f" after {restarts} restarts")
        logger.info("%s finished%s", who, after)

    def _tell_why(self, will_restart: bool) -> None:
        machine, result = self._machine, self._result
        if result.state is WorkerState.HEALTHY:
            logger.warning("other nodes are waiting to join: stopping the workers to form a new round")
            return
        then = f"restart {machine.restarts_used} of {machine.max_restarts}" if will_restart else "no restarts left"
        if will_restart or machine.max_restarts:
            logger.warning("%s; %s", _cause(result), then)

    # Start of a round.

    @prof
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        handler = self._handler
        with self._timed_event("RENDEZVOUS"):
            found = call_interruptibly(handler.next_rendezvous)
        worker_group.store = found.store
        worker_group.group_rank = found.rank
        worker_group.group_world_size = found.world_size
        worker_group.master_addr = spec.master_addr or found.bootstrap_store_info.master_addr
        worker_group.master_port = spec.master_port or found.bootstrap_store_info.master_port
        with self._timed_event("ASSIGN_WORKER_RANKS"):
            worker_group.workers = self._assign_worker_ranks(found.store, found.rank, found.world_size, spec)

    @prof
    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        if group_world_size == 1 or self._are_nodes_alike():
            world = ranks.identical_world(spec.role, spec.local_world_size, group_world_size)
            return ranks.assign_ranks(world, group_rank)
        exchange = functools.partial(_exchange_ranks, store, group_rank, group_world_size, spec)
        return call_interruptibly(exchange)

    def _are_nodes_alike(self) -> bool:
        return os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1" or self._has_fixed_world()

    def _has_fixed_world(self) -> bool:
        """A handler that was written for another launcher does not know the question."""
        return getattr(self._handler, "has_fixed_world", False)

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        ids = self._start_workers(worker_group)
        for local_rank, id_ in ids.items():
            worker = worker_group.workers[local_rank]
            worker.id = id_
            self._record(self._event("START", worker))
        worker_group.state = WorkerState.HEALTHY
        self._tell_start(worker_group)
        if self._restart_began is not None:
            # A restart spans two commands of the machine, so its time is put together here.
            put_metric("SimpleElasticAgent._restart_workers.success", 1)
            put_metric("SimpleElasticAgent._restart_workers.duration.ms", _elapsed_ms(self._restart_began))
            self._restart_began = None

    def _tell_start(self, group: WorkerGroup) -> None:
        first = group.workers[0]
        count = len(group.workers)
        who = f"{count} workers" if count > 1 else "1 worker"
        ids = ", ".join(str(worker.id) for worker in group.workers[:8]) + (", ..." if count > 8 else "")
        place = f", node {group.group_rank} of {group.group_world_size}" if (group.group_world_size or 1) > 1 else ""
        logger.info("started %s of %s (pids %s)%s", who, recording.entry_name(group.spec), ids, place)
        logger.debug(
            "round %d: global ranks %d..%d of %d, master %s:%s, restarts used %d",
            self._machine.round,
            first.global_rank,
            group.workers[-1].global_rank,
            first.world_size,
            group.master_addr,
            group.master_port,
            self._machine.restarts_used,
        )

    # End of a run.

    def _exit_barrier(self) -> None:
        """Wait until the workers of every node have ended. A barrier that fails is no reason to fail a run."""
        group = self._worker_group
        deadline = self._machine.next_deadline()
        timeout_s = max(0.0, (deadline or 0.0) - time.monotonic())
        logger.info("this node's workers are done, waiting for the other nodes (at most %.0f s)", timeout_s)
        wait = functools.partial(
            stores.barrier, group.store, group.group_world_size or 1, _TERMINAL_STATE_SYNC, timeout_s
        )
        try:
            call_interruptibly(wait, timeout_s=timeout_s)
        except SignalException:
            raise
        except Exception as error:
            logger.warning("did not hear of the end of every other node: %s: %s", type(error).__name__, error)

    def _publish_state(self, group: WorkerGroup) -> None:
        put_metric(f"workers.{group.spec.role}.remaining_restarts", self._machine.remaining_restarts)
        put_metric(f"workers.{group.spec.role}.{group.state.name.lower()}", 1)

    # Events.

    def get_event_succeeded(self) -> Event:
        return self._event("SUCCEEDED")

    def get_event_failed(self) -> Event:
        import traceback

        return self._event("FAILED", raw_error=traceback.format_exc())

    def _event(self, state: str, worker: Worker | None = None, **facts: Any) -> Event:
        restarts, run_time_s = self._machine.restarts_used, self._total_execution_time
        return recording.status_event(self._worker_group, state, restarts, run_time_s, worker, **facts)

    def _record(self, event: Event) -> None:
        record(event, self._worker_group.spec.event_log_handler)

    def _record_worker_events(self, result: RunResult) -> None:
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            facts: dict[str, Any] = {}
            if failure is not None:
                facts = {"raw_error": json.dumps(failure.error_file_data), "exit_code": failure.exitcode}
            self._record(self._event(recording.final_state(worker, result), worker, **facts))

    @contextmanager
    def _timed_event(self, state: str) -> Iterator[None]:
        began = time.monotonic()
        raw_error = None
        try:
            yield
        except BaseException as error:
            raw_error = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._record(self._event(state, raw_error=raw_error, duration_ms=_elapsed_ms(began)))


def _elapsed_ms(began: float) -> int:
    return int((time.monotonic() - began) * 1000)


def _exchange_ranks(store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Worker]:
    """For agents that share nothing but a store: everybody says what it has, rank 0 gives everybody a place."""
    mine = ranks.Member(spec.role, spec.local_world_size)
    store.set(ranks.role_info_key(group_rank), ranks.encode_member(mine, group_rank))
    if group_rank == 0:
        said = store.multi_get([ranks.role_info_key(i) for i in range(group_world_size)])
        places = ranks.assign_nodes([ranks.decode_member(data, i) for i, data in enumerate(said)])
        keys = [ranks.assigned_ranks_key(i) for i in range(group_world_size)]
        store.multi_set(keys, [ranks.encode_assignment(place) for place in places])
    place = ranks.decode_assignment(store.get(ranks.assigned_ranks_key(group_rank)), group_rank)
    return ranks.place_workers(place, spec.local_world_size)


def _cause(result: RunResult) -> str:
    if not result.failures:
        return f"the worker group is {result.state.name.lower()}"
    rank = report.root_cause({rank: failure.facts() for rank, failure in result.failures.items()})
    return report.cause_line(rank, result.failures[rank].facts())
