"""What an agent shows of itself: its status with its history, on its control socket and to its health check.

A new record is assigned after each step of the machine and each look at the workers, and waits for no reader. What
serves readers runs in threads of its own and only reads.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from holdfast import escape
from holdfast.agent import control, lifecycle
from holdfast.agent.lifecycle import AgentPhase, Step
from holdfast.agent.model import TORCHELASTIC_HEALTH_CHECK_PORT, Worker, WorkerGroup
from holdfast.agent.sinks import RunEnd, Sink
from holdfast.agent.workers import Workers
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.failures.records import HANG
from holdfast.frozen import changed
from holdfast.rendezvous import endpoints
from holdfast.rendezvous.coordination import Coordination
from holdfast.rendezvous.membership.model import Ended, PlaceLost, Sealed, Stop
from holdfast.telemetry import history
from holdfast.telemetry.history import History
from holdfast.telemetry.status import AgentStatus, CheckStatus, NoticeStatus, Output, WorkerStatus, plain

if TYPE_CHECKING:
    from holdfast.checks.gate import CheckResult
    from holdfast.process.workers.group import PContext
    from holdfast.telemetry.spans import Tracing

_FAILED_KEPT = 16
_STEPS_KEPT = 8
_EXPORT_LIMIT_S = 590.0
_QUERY_LIMIT_BYTES = 4096  # That of the wire (`protocol`).
_REPORT_LIMIT_CHARS = 200_000
_COORDINATOR_LIMIT_S = 3.0
_NODE_LIMIT_S = 20.0  # Stacks take their time.
_MOST_ASKED_AT_ONCE = 64
_MOST_AWAIT_LAST_WORDS = 64


def health_address(given: int | str | None = None) -> tuple[str, int] | None:
    """Where the health check is served: at the given address, else at the one in the environment."""
    text = os.environ.get(TORCHELASTIC_HEALTH_CHECK_PORT, "") if given is None else str(given)
    try:
        return endpoints.parse_address(text) if text or given is not None else None
    except UserError as error:
        name = TORCHELASTIC_HEALTH_CHECK_PORT if given is None else "health_port"
        raise UserError(f"{name}: {error}") from None


def history_after(told: History, step: Step, group: WorkerGroup, workers: Workers, reason: str) -> History:
    """What a step makes of the history of this node. `reason` is why the run has ended, if it has."""
    now, advance, context = step.time, workers.advance(), workers.context
    idle_s = advance.idle_s if advance is not None else None
    if step.end is not None:
        return told.finish(step.end.lower(), reason, now)
    told = told.enter(step.phase.lower(), now)
    match step.event:
        case Sealed(_, place):
            return told.begin_round(place.round, place.node_count, group.workers[0].world_size, now)
        case lifecycle.WorkersStarted() if step.phase is AgentPhase.RUNNING:
            return told.run(now)
        case lifecycle.WorkersFailed(_, failure) if failure is not None:
            ends = context.ends().values() if context is not None else ()
            ages_s = [now - at for code, was_stopped, at in ends if code and not was_stopped and at]
            end = history.HUNG if failure.exception == HANG else history.FAILED
            return told.stop(end, failure.text, now, idle_s, max(ages_s, default=None))
        case Stop(_, reason, is_failure, is_hang, is_loss):
            planned = history.NODE_LOST if is_loss else history.MEMBERSHIP_CHANGED
            end = (history.HUNG if is_hang else history.FAILED) if is_failure else planned
            return told.stop(end, reason, now, idle_s)
        case PlaceLost(_, reason):
            return told.stop(history.NODE_LOST, reason, now, idle_s)
        case Ended(outcome):
            return told.stop(outcome.end.lower(), outcome.reason, now)
    return told


class Publisher(Sink):
    """Of one run of an agent. `alive_time` is what the health check asks."""

    def __init__(
        self, group: WorkerGroup, workers: Workers, run: Coordination, alive_time: Callable[[], float]
    ) -> None:
        self._group, self._workers, self._run, self._alive_time = group, workers, run, alive_time
        self._end = RunEnd("error")
        self._on_first_node = group.spec.on_first_node
        self._tracing: Tracing | None = None
        self._reason = ""
        now = time.time(), time.monotonic()
        who = (group.spec.run_id, group.spec.role, os.uname().nodename, os.getpid())
        self.notice_status: Callable[[], NoticeStatus | None] = lambda: None
        left = group.spec.policy.max_restarts
        self.status = AgentStatus(*who, *now, restarts_left=left, node_id=run.node_id, past=History(now[1]))
        self.control_path = ""
        self.unready_words: Callable[[], str] = lambda: ""
        # What others may ask through the coordinator, too: they only read.
        inspected = dict.fromkeys(("logs", "stacks", "config", "events"), self._inspect)
        self.readable: dict[str, control.Command] = {"status": self._describe, "snapshots": self._list_snapshots}
        self.readable |= inspected
        self._last_words: deque[tuple[dict[str, Any], Callable[[bytes], None]]] = deque(maxlen=_MOST_AWAIT_LAST_WORDS)

    @contextmanager
    def served(self, health_check_server: Any) -> Iterator[None]:
        """Within this block, a run of the agent, others can ask."""
        acting = {"stop": self._request_stop, "notice": self._give_notice, "export": self._export, "query": self._query}
        commands = {**self.readable, **acting}
        slow, logs = ("query", "stacks", "export"), self._workers.temporary_logs
        serve = control.served(self.status.run_id, commands, slow, logs)
        with self._traced() as self._tracing, self._health_served(health_check_server), serve as served:
            self.control_path = served.path if served is not None else ""
            try:
                yield
            finally:
                if served is not None:
                    served.tell_end(self._last_word)

    def take(self, step: Step) -> None:
        if isinstance(step.event, Ended):
            self._reason = step.event.outcome.reason
        told = history_after(self.status.past, step, self._group, self._workers, self._reason)
        known: dict[str, Any] = {"phase": step.phase.lower(), "round": step.round, "past": told}
        if isinstance(step.event, Sealed):
            used = step.event.place.restarts_used
            known |= {"restarts_used": used, "restarts_left": max(0, self._group.spec.policy.max_restarts - used)}
        self._publish(**known, story=(*self.status.story, step)[-_STEPS_KEPT:])
        if self._last_words:
            self._tell_last_words()
        if self._on_first_node is not None and self.status.node == 0:
            call, self._on_first_node = self._on_first_node, None
            call(self.status.run_id)

    def look(self) -> None:
        self._publish()

    def checked(self, results: tuple[CheckResult, ...], delay_s: float | None) -> None:
        now, before = time.monotonic(), {each.name: each.failures for each in self.status.checks}
        found = [
            CheckStatus(
                each.name, each.state, each.text, each.seconds, before.get(each.name, 0) + (each.state == "failed"),
                each.output, now,
            )
            for each in results
        ]  # fmt: skip
        self._publish(checks=tuple(found))

    def leave(self) -> None:
        now = time.monotonic()
        told = self.status.past.enter("stopping", now)
        told = told.stop(history.MEMBERSHIP_CHANGED, "this node leaves", now)
        self._publish(phase=AgentPhase.STOPPING.lower(), past=told)

    def end(self, end: RunEnd) -> None:
        self._end = end

    def _publish(self, **known: Any) -> None:
        before, context = self.status, self._workers.context
        old = {each.local_rank: each for each in before.workers}
        ends = context.ends() if context is not None else {}
        workers = [worker_status(old.get(each.local_rank), each, ends, context) for each in self._group.workers]
        fresh = [each for each in workers if each.state == "failed" and old.get(each.local_rank) is not each]
        failed = [changed(each, round=known.get("round", before.round)) for each in fresh]
        self.status = changed(
            before,
            node=self._group.group_rank,
            nodes=self._group.group_world_size,
            workers=tuple(workers),
            failed=(*before.failed, *failed)[-_FAILED_KEPT:] if failed else before.failed,
            **known,
        )
        if self._tracing is not None:
            self._tracing.follow(before.past, self.status.past)

    # Others ask, in threads.

    def answer(self, line: bytes, reply: Callable[[bytes], None]) -> None:
        """What others ask this node through the coordinator: they only read. `last_words` is a question for the end of
        a worker's log, from those that follow it. It is answered when the worker has ended and before the coordinator
        hears of that: it may be the end of the run, after which nothing can be asked."""
        request = control.parsed(line)
        if request.get("command") != "last_words":
            reply(control.answer_to(line, self.readable))
            return
        for each in self._awaiting(request.get("follower")):
            each["is_superseded"] = True  # It asks again if no answer came in time, or the coordinator was restarted.
        self._last_words.append((request, reply))
        self._tell_last_words()

    def _tell_last_words(self) -> None:
        from holdfast.agent import inspection

        for _ in range(len(self._last_words)):
            try:
                request, reply = self._last_words.popleft()
            except IndexError:  # Another thread has told them.
                return
            if request.get("is_superseded"):
                continue
            if inspection.has_last_words(self.status, request):
                reply(control.answer(self._inspect, {**request, "command": "logs"}))
            else:
                self._last_words.append((request, reply))

    def _last_word(self) -> dict[str, Any]:
        """For those that wait for the end."""
        report, reason, text = self._end.report, self._end.reason, None
        if report is not None:
            from holdfast.failures.report import run_text

            reason, text = report.cause, run_text(report).strip("\n")[:_REPORT_LIMIT_CHARS]
        return {"end": self._end.state, "reason": reason, "report": text, "status": self._describe({})}

    def _list_snapshots(self, request: Mapping[str, Any]) -> dict[str, Any]:
        found = self._workers.snapshots
        return plain(found.told()) if found is not None else {}

    def _export(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """For users of this host only: it names a directory. The loop orders it, and the spawner does it."""
        from queue import Empty, SimpleQueue

        from holdfast.rendezvous.coordination import ExportRequested

        problems: SimpleQueue[list[str]] = SimpleQueue()
        term, round, step, world_size, is_replicated = request["snapshot"]
        snapshot = (int(term), int(round), int(step), int(world_size), bool(is_replicated))
        self._run.request_export(ExportRequested(snapshot, str(request["directory"]), problems.put))
        try:
            found = problems.get(timeout=_EXPORT_LIMIT_S)
        except Empty:
            raise HostError(f"not written within {_EXPORT_LIMIT_S:g} s") from None
        if found:
            raise HostError(found[0])
        return {"step": step}

    def _inspect(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from holdfast.agent import inspection

        told = inspection.answer(request, self.status, self._group.spec, self._workers.context)
        if "follower" in request:
            awaiting = self._awaiting(request["follower"])
            told["is_awaited"] = any(each.get("question") == request.get("question") for each in awaiting)
            for each in awaiting:
                each["offset"] = told["offset"]  # This one has been given all before that.
        return told

    def _awaiting(self, follower: object) -> list[dict[str, Any]]:
        """The questions of this follower for last words."""
        return [each for each, _ in [*self._last_words] if each.get("follower") == follower]

    def _request_stop(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The loop does it, when it is its turn."""
        run = self._run
        scope = "run" if run.reaches_all_nodes else "node"
        run.request_close(escape.reason(request.get("reason"), "closed by the user"))
        return {"scope": scope, "pid": os.getpid()}

    def _give_notice(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """For this node, or for the whole run. The loop does it, when it is its turn."""
        from holdfast.agent import notice

        said = {name: each for name, each in request.items() if name != "command"}
        default_s = self._group.spec.notice.time_s if self._group.spec.notice is not None else notice.DEFAULT_TIME_S
        try:
            wanted = notice.request_in(said, default_s, "")
        except ValueError as error:
            raise UserError(str(error)) from None
        run = self._run
        run.request_notice(wanted)
        reaches = run.shares_notices and run.reaches_all_nodes
        return {"scope": "run" if reaches else "node", "pid": os.getpid(), "in_s": wanted.left_s}

    def _query(self, request: Mapping[str, Any]) -> Any:
        """Ask the coordinator, the agent of another node, or the agents of some `nodes` at the same time; then the
        result has the answer of each."""
        import json

        body = json.dumps(request["request"]).encode()
        if len(body) > _QUERY_LIMIT_BYTES:
            raise UserError(f"a request of {len(body)} bytes is too long")
        nodes, wish = request.get("nodes"), request.get("timeout_s")
        node_id = str(request.get("node", ""))
        limit_s = _NODE_LIMIT_S if nodes or node_id else _COORDINATOR_LIMIT_S
        limit_s = min(limit_s, wish) if isinstance(wish, float) and wish > 0 else limit_s
        if nodes is None:
            answer = json.loads(self._run.ask(body, node_id, limit_s))
            if "error" in answer:
                raise HostError(str(answer["error"]))
            return answer["result"]
        from concurrent.futures import ThreadPoolExecutor

        def ask(node_id: str) -> Any:
            try:
                return json.loads(self._run.ask(body, node_id, limit_s))
            except HoldfastError as error:
                return {"error": str(error)}

        names = [str(each) for each in nodes[:_MOST_ASKED_AT_ONCE]]
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            return dict(zip(names, pool.map(ask, names), strict=True))

    def _describe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        progress, copied = self._workers.progress, self._workers.copied
        readers = (progress.of, progress.rate_of) if progress is not None else ()
        told = self.status.told(time.monotonic(), self.unready_words() or self._run.joined, *readers)
        output = {name: Output(each.lines, each.size_bytes) for name, each in copied.items()}
        snapshots = self._workers.snapshots.status() if self._workers.snapshots is not None else None
        shown: dict[str, Any] = plain(changed(told, output=output, snapshots=snapshots, notice=self.notice_status()))
        return shown

    def _traced(self) -> AbstractContextManager[Tracing | None]:
        if "opentelemetry.sdk.trace" not in sys.modules and not any(each.startswith("OTEL_") for each in os.environ):
            return nullcontext()
        from holdfast.telemetry import spans

        told = self.status
        return spans.traced({"run_id": told.run_id, "role": told.role, "host": told.host, "node_id": told.node_id})

    def _health_served(self, server: Any) -> AbstractContextManager[None]:
        address = health_address() if server is None else None
        if server is None and address is None:
            return nullcontext()
        from holdfast.telemetry import health
        from holdfast.telemetry.notice_http import NoticeDoor

        server = server if address is None else health.server_at(*address)
        door = NoticeDoor(self._give_notice, self._run.notice_key)
        health.introduce(server, self._alive_time, lambda: self.status, lambda: self._describe({}), door)
        return health.served(server)


def worker_status(
    old: WorkerStatus | None,
    worker: Worker,
    ends: Mapping[int, tuple[int, bool, float | None]],
    context: PContext | None,
) -> WorkerStatus:
    """The record of a worker that has not changed stays."""
    rank, global_rank, has_started = worker.local_rank, worker.global_rank, worker.id is not None
    pid = worker.id if isinstance(worker.id, int) else None
    if old is None or (old.global_rank, old.pid, old.started is not None) != (global_rank, pid, has_started):
        if not has_started:
            return WorkerStatus(rank, global_rank)
        logs = (context.stdouts, context.stderrs, context.error_files) if context is not None else ({}, {}, {})
        stdout, stderr, error_file = (each.get(rank, "") for each in logs)
        now = time.time(), time.monotonic()
        old = WorkerStatus(rank, global_rank, pid, "running", *now, None, stdout, stderr, error_file)
    if not has_started or rank not in ends or old.exit_code is not None:
        return old
    code, was_stopped, _ = ends[rank]
    has_agreed = context is not None and code != 0 and code == context.agreed_code
    ended = "stopped" if was_stopped or has_agreed else "failed" if code else "succeeded"
    return changed(old, state=ended, exit_code=code)
