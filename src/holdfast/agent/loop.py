"""The agent's loop: one wait, one machine. It turns what happens into events, and carries out the machine's commands.

Events come from the workers (`Workers`) and from the run (`Coordination`), which says which round comes next and pushes
what it has decided. Every step of the machine is told to the sinks before its commands are carried out. The loop has no
policy: what follows from an event is in `lifecycle`, what a failure means for the run in the coordination.

A signal surfaces where nothing is half done: while the loop waits for the rendezvous, for the workers to start, to end
or to stop, or for the other nodes.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

from holdfast import signals
from holdfast.agent import causes, lifecycle, ranks, sinks
from holdfast.agent.lifecycle import AgentPhase, Lifecycle
from holdfast.agent.model import RunResult, Worker, WorkerGroup, WorkerState
from holdfast.agent.notice import NodeNotice
from holdfast.agent.sinks import RunEnd, Sink
from holdfast.agent.workers import Workers
from holdfast.errors import HoldfastError, HostError
from holdfast.failures import report
from holdfast.failures.records import HANG, Failure
from holdfast.frozen import changed
from holdfast.hangs import stop_margin_s
from holdfast.log import Logger
from holdfast.loop import call_interruptibly, in_hook, wait_readable
from holdfast.process.spawner.command import script_path
from holdfast.rendezvous.api import RendezvousGracefulExitError, RendezvousInfo, is_kind
from holdfast.rendezvous.coordination import AgentPush, Coordination, ExportRequested, JoinFailed
from holdfast.rendezvous.membership.model import (
    Agreed,
    CloseRequested,
    Complete,
    End,
    Ended,
    GoingAway,
    KeepFrom,
    NoticeRequest,
    Outcome,
    Place,
    Sealed,
    Stop,
)
from holdfast.signals import NodeWentAway, RunClosed, RunWentAway, SignalException

if TYPE_CHECKING:
    from holdfast.agent.node_checks import NodeChecks
    from holdfast.agent.snapshot_transfers import Listing

logger = Logger(__name__)

# For how long a node that has reported a hang keeps its workers, so that every node can take stacks.
_OTHERS_LOOK_S = 2.0


class AgentLoop:
    """One run of an agent. When its workers are stopped they have `grace_s`; when they have succeeded, it waits for the
    other nodes for `peers_timeout_s`."""

    def __init__(
        self,
        group: WorkerGroup,
        workers: Workers,
        run: Coordination,
        peers_timeout_s: float,
        grace_s: float,
        told: Sequence[Sink],
        checks: NodeChecks | None = None,
        notice: NodeNotice | None = None,
    ) -> None:
        self._group, self._workers, self._run, self._told = group, workers, run, told
        self._checks, self._notice = checks, notice or NodeNotice(None, workers, run, grace_s, told)
        self._grace_s = grace_s
        self._machine = Lifecycle(peers_timeout_s)
        self._place: Place | None = None
        self._outcome: Outcome | None = None
        self._result = RunResult(WorkerState.INIT)
        self._failed_round = self._hang_told_in = 0
        self._has_left = False
        self._listing: Listing | None = None  # Of the snapshots on disk. This node joins when it is over.

    def run(self) -> RunResult:
        """Run to the end of the run. No worker is left after it, whatever happens."""
        end, is_shut_down = RunEnd("error"), False
        try:
            with signals.inbox().stopped_together(self._stop_together), self._notice.heard():
                result = self._final_result(self._drive())
            unsaid = "this node has failed" if result.is_failed() else "timed out waiting for the other nodes to finish"
            reason = self._outcome.reason if self._outcome is not None else unsaid
            end = RunEnd("failed" if result.is_failed() else "succeeded", reason, result)
            return result
        except BaseException as error:
            end = sinks.end_by(error)
            if isinstance(error, SignalException):
                if not isinstance(error, RunClosed):
                    self._leave(error)
                    is_shut_down = True
                error.killed_ranks = self._workers.killed_ranks()
            if not is_kind(error, RendezvousGracefulExitError):
                raise
            logger.info("this node is not needed any more and leaves: %s", error)
            return RunResult(WorkerState.SUCCEEDED)
        finally:
            self._run.close()
            try:
                if not is_shut_down:
                    self._shut_down()
            finally:
                self._notice.close()
                for sink in self._told:
                    sink.end(end)

    def _drive(self) -> End:
        spec, run = self._group.spec, self._run
        script = script_path(spec.entrypoint, spec.args)
        margin_s = stop_margin_s(watches=spec.hang_policy is not None)
        serves_store = self._workers.serves_store
        run.introduce(spec.role, spec.local_world_size, spec.policy, self._grace_s, script, margin_s, serves_store)
        pending: deque[lifecycle.Event | AgentPush] = deque([lifecycle.RunRequested()])
        while self._machine.end is None:
            if pending:
                # Its results go before what was pushed meanwhile: a round that is stopped is not stopped twice.
                pending.extendleft(reversed(self._take(pending.popleft())))
            else:
                pending.extend(self._next_events())
        return self._machine.end

    def _stop_together(self, number: signal.Signals) -> None:
        """SIGSTOP: Ctrl-Z is about to stop this process, and the workers must not go on without it. SIGCONT: both go
        on. The lease of a node goes on meanwhile, and the spawner kills the workers when it ends."""
        if number == signal.SIGSTOP:
            lost = "; the other nodes go on without this one when its lease ends" if self._run.has_leases else ""
            logger.warning("this process and its workers are stopped until it is continued (fg)%s", lost)
        self._workers.send(number)

    def _leave(self, error: SignalException) -> None:
        """This node goes; the run goes on without it. The others hear of it before the workers are stopped."""
        number, why = error.sigval, f"got {error.sigval.name}"
        if isinstance(error, NodeWentAway):
            self._grace_s, why = self._notice.plan.grace_s, f"this node goes away, as was announced ({error})"
        stop = sinks.stop_words(self._machine.phase, number, self._grace_s) if not self._notice.has_agreed() else ""
        logger.warning("%s%s", why, stop)
        self._run.leaving()
        self._workers.when_gone(self._say_left)
        self._shut_down(number)
        self._say_left()

    def _say_left(self) -> None:
        """As soon as the workers are gone: the others wait for it."""
        if not self._has_left and not self._workers.unkillable():
            self._has_left = True
            self._run.left()

    def _shut_down(self, number: signal.Signals | None = None) -> None:
        for sink in self._told if self._machine.phase is not AgentPhase.ENDED else ():
            sink.leave()
        with in_hook():
            self._workers.shutdown(self._grace_s, number)

    # Events.

    def _next_events(self) -> Sequence[lifecycle.Event | AgentPush]:
        """Wait until something happens, and return it as events."""
        workers, run = (self._workers if self._is_watching() else None), self._run
        self._heed()
        ends_at = self._machine.next_deadline()
        fds, deadlines = [run.fileno()], [ends_at, self._notice.plan.stop_at]
        if workers is not None:
            fds += [fd for fd in [workers.fileno()] if fd is not None]
            deadlines.append(workers.deadline())
        if self._listing is not None:
            fds.append(self._listing.fileno())
            deadlines.append(self._listing.until)
        is_waiting = self._machine.phase is AgentPhase.JOINING and self._listing is None
        checks = self._checks if is_waiting else None
        if checks is not None:
            fds += checks.fds()
            deadlines.append(checks.deadline())
        snapshots = self._workers.snapshots if is_waiting else None
        if snapshots is not None:
            fds += snapshots.fds()
        deadline = min((each for each in deadlines if each is not None), default=None)
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        wait_readable(fds, timeout_s, writable=workers.unsent_fds() if workers is not None else ())
        self._heed()
        if self._listing is not None and self._listing.is_over:
            self._send_join()
        if ends_at is not None and time.monotonic() >= ends_at:
            return [lifecycle.PeersTimedOut(self._machine.round)]
        has_changed = snapshots is not None and snapshots.poll(run)
        if checks is not None and checks.poll():
            run.unready, has_changed = checks.unready, True
        if has_changed:
            run.tell_change()
        if not self._is_watching():
            return run.take()
        looks = {AgentPhase.STARTING: self._look_at_start, AgentPhase.STOPPING: self._look_at_stop}
        return looks.get(self._machine.phase, self._look_at_workers)() or run.take()

    def _heed(self) -> None:
        """The safe point: a signal surfaces here, and so does the time at which this node goes away."""
        signals.inbox().raise_pending()
        self._notice.take_signals()
        self._notice.leave_if_due(self._machine.phase)

    def _is_watching(self) -> bool:
        """Whether workers are there whose ends count. Those that die because the lease has run out have not failed; the
        `PlaceLost` push follows."""
        phase = self._machine.phase
        return phase is AgentPhase.STOPPING if self._run.has_lapsed else phase in lifecycle.WITH_WORKERS

    def _look_at_start(self) -> Sequence[lifecycle.Event]:
        found = self._workers.poll_start()
        if found is None:
            return []
        if isinstance(found, RunResult):
            return [lifecycle.WorkersFailed(self._machine.round, self._failure(found))]
        for local_rank, id_ in found.items():
            self._group.workers[local_rank].id = id_
        self._group.state = WorkerState.HEALTHY
        return [lifecycle.WorkersStarted(self._machine.round)]

    def _look_at_workers(self) -> Sequence[lifecycle.Event]:
        with in_hook():
            result = self._workers.look()
        self._group.state = result.state
        for sink in self._told:
            sink.look()
        match result.state:
            case WorkerState.HEALTHY:
                return []
            case WorkerState.SUCCEEDED:
                self._result, has_agreed = result, self._notice.has_agreed()
                if has_agreed and not self._run.shares_notices:
                    self._notice.leave()
                return [lifecycle.WorkersSucceeded(self._machine.round, has_agreed)]
            case WorkerState.FAILED | WorkerState.UNHEALTHY:
                return [lifecycle.WorkersFailed(self._machine.round, self._failure(result))]
        role, state = self._group.spec.role, result.state.name
        raise HoldfastError(f"[{role}] the worker group is in the unexpected state {state}")

    def _look_at_stop(self) -> Sequence[lifecycle.Event]:
        with in_hook():
            result = self._workers.poll_stop(self._result)
        if result is None:
            return []
        self._result, self._group.state = result, WorkerState.STOPPED
        unkillable, stopped = self._workers.unkillable(), report.by_how(result.stopped)
        return [lifecycle.WorkersStopped(self._machine.round, unkillable, stopped)]

    def _failure(self, result: RunResult) -> Failure:
        self._result, self._group.state, self._failed_round = result, result.state, self._machine.round
        return causes.failure_of(result, self._machine.round)

    # Commands.

    def _take(self, event: lifecycle.Event | AgentPush) -> Sequence[lifecycle.Event]:
        """Give the event to the machine and carry out its commands. Returns the events that follow at once."""
        match event:
            case CloseRequested(reason):
                self._run.close_run(reason)
                return []
            case NoticeRequest():
                self._run.give_notice(event)
                return []
            case GoingAway():
                self._notice.hear(event)
                return []
            case ExportRequested():
                if self._workers.snapshots is not None:
                    self._workers.snapshots.export(event.snapshot, event.directory, event.then)
                return []
            case KeepFrom(round) | Agreed(round) | Complete(round):
                if round == self._machine.round:
                    self._workers.snapshot_order(event)
                return []
            case JoinFailed(error):
                for sink in self._told:
                    sink.refused(error)
                raise error
        now = time.monotonic()
        if not self._machine.is_stale(event):
            event = self._prepared(event)
        if (step := self._machine.step(event, now)) is None:
            return []
        for sink in self._told:
            sink.take(step)
        return [result for command in step.commands for result in self._execute(command)]

    def _prepared(self, event: lifecycle.Event) -> lifecycle.Event:
        """Do what the machine's decision depends on. Returns the event to decide about."""
        match event:
            case Sealed():
                self._enter(event)
            case Ended(outcome):
                self._outcome = outcome
            case Stop(round, is_hang=True) if self._machine.phase is AgentPhase.RUNNING:
                # Before its workers are stopped this node looks where they are. If one of them is where no peer could
                # help it, that is this node's failure.
                self._hang_told_in = round
                with in_hook():
                    result = self._workers.examine()
                if result is not None:
                    return lifecycle.WorkersFailed(round, self._failure(result))
            case Stop(is_failure=True) if self._machine.phase is AgentPhase.RUNNING:
                with in_hook():
                    self._workers.look_at_peers(blames_peer=event.blames_peer)
        return event

    def _execute(self, command: lifecycle.Command) -> Sequence[lifecycle.Event]:
        match command:
            case lifecycle.JoinRound():
                self._join()
            case lifecycle.StartWorkers():
                assert self._place is not None
                self._workers.begin_start(self._place)
                return self._look_at_start()
            case lifecycle.StopWorkers(_, at_once):
                self._workers.begin_stop(at_once)
                return self._look_at_stop()
            case lifecycle.ReportFailure(round, failure):
                assert failure is not None
                self._report_failure(round, failure)
            case lifecycle.ReportSuccess(round, has_agreed):
                if has_agreed:
                    self._run.report_agreement(round)
                else:
                    self._run.report_success(round, self._machine.peers_timeout_s)
            case lifecycle.EndRun():
                pass
            case _:
                assert_never(command)
        return []

    def _join(self) -> None:
        signals.inbox().raise_pending()  # One that came while the workers were being stopped.
        self._group.state = WorkerState.INIT if self._place is None else WorkerState.STOPPED
        self._workers.prepare(self._run)
        self._run.advance, self._run.peers = self._workers.advance(), self._workers.peers()
        snapshots = self._workers.snapshots
        self._listing = snapshots.begin_listing() if snapshots is not None else None
        if self._listing is None:
            self._send_join()

    def _send_join(self) -> None:
        listing, self._listing = self._listing, None
        if self._workers.snapshots is not None:
            self._workers.snapshots.tell(self._run, listing)
        result, round = self._result, self._machine.round
        has_failed = self._failed_round == round > 0 and bool(result.failures)
        failure = causes.failure_of(result, round, with_evidence=True) if has_failed else None
        if self._checks is not None:
            self._run.unready = self._checks.want_place(failure)
        self._run.join(failure)

    def _enter(self, sealed: Sealed) -> None:
        self._place = sealed.place
        found = self._run.found(sealed)
        group, spec = self._group, self._group.spec
        group.store = found.store
        group.group_rank = found.rank
        group.group_world_size = found.world_size
        group.master_addr = spec.master_addr or found.bootstrap_store_info.master_addr
        group.master_port = spec.master_port or found.bootstrap_store_info.master_port
        group.workers = self._assigned(sealed.place, found)

    def _assigned(self, place: Place, found: RendezvousInfo) -> list[Worker]:
        """The workers of this node with their ranks."""
        if place.shapes:
            return ranks.assign_ranks([ranks.Member(*shape) for shape in place.shape_of_each()], found.rank)
        spec, size = self._group.spec, found.world_size
        is_said = os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1"
        if size == 1 or is_said or getattr(spec.rdzv_handler, "has_fixed_world", False):
            return ranks.assign_ranks([ranks.Member(spec.role, spec.local_world_size)] * size, found.rank)
        from holdfast.agent import exchange

        return call_interruptibly(exchange.exchange_ranks, found.store, found.rank, size, spec)

    def _report_failure(self, round: int, failure: Failure) -> None:
        run, is_hang = self._run, failure.exception == HANG
        run.advance = self._workers.advance()
        run.report_failure(round, failure)
        if run.verdict is None:
            logger.warning("%s", failure.text)
        elif run.outcome is None or self._group.spec.policy.max_restarts:
            # The final report, which has the cause, follows an outcome at once.
            logger.warning("%s", run.verdict if run.outcome else f"{failure.text}; {run.verdict}")
        if is_hang and run.has_leases and self._hang_told_in != round and (self._group.group_world_size or 1) > 1:
            # Once these workers are gone, the workers of the other nodes get an error and hang no more.
            wait_readable([], _OTHERS_LOOK_S)
        if not is_hang:  # The others know by now; these workers are stopped a second later at most.
            with in_hook():
                self._workers.look_at_peers(blames_peer=failure.blames_peer)

    # The end.

    def _final_result(self, end: End) -> RunResult:
        group, settled, outcome = self._group, self._result, self._outcome
        snapshots = self._workers.snapshots
        steps_lost = snapshots.steps_lost if snapshots is not None else None
        if end is End.SUCCEEDED:
            if snapshots is not None:
                snapshots.is_over = True
            # A node that stood by at the end has not finished, whatever became of the workers that it had before.
            if group.state is not WorkerState.SUCCEEDED:
                logger.info("the run has succeeded; this node was not needed")
                return RunResult(WorkerState.SUCCEEDED)
            assert self._place is not None
            logger.info("%s", sinks.finish_line(group, self._place.restarts_used, steps_lost))
            return settled
        if end is End.CLOSED and (outcome is None or outcome.is_notice):
            raise RunWentAway(outcome.reason if outcome is not None else "the other nodes did not answer in time")
        if end is End.CLOSED and outcome is not None:
            raise RunClosed(outcome.reason)
        group.state = WorkerState.FAILED
        if self._machine.unkillable:
            pids = ", ".join(map(str, self._machine.unkillable))
            trouble = f"processes that cannot be killed are left on this node: {pids}"
            if not settled.failures:
                raise HostError(trouble)
            logger.error(trouble)
        result = RunResult(WorkerState.FAILED, failures=dict(settled.failures), stopped=settled.stopped)
        known = (outcome, group, group.spec.policy, self._machine.round, self._place)
        if end is End.FAILED and (told := causes.report_of(result, *known)) is not None:
            checks = self._checks.failed() if self._checks is not None else ()
            result.report = changed(told, steps_lost=steps_lost, checks=checks)
        if outcome is not None:
            causes.add_agreed_cause(result, outcome, group.group_world_size or 1)
        return result
