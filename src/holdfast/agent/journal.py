"""The events file of this node (`--events-file`): one JSON line for each event.

docs/events.md lists the events and their fields. A thread writes the file (`EventsFile`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.agent import lifecycle
from holdfast.agent.lifecycle import Step
from holdfast.agent.sinks import RunEnd, Sink
from holdfast.failures.records import HANG
from holdfast.frozen import fields_of
from holdfast.rendezvous.membership.model import Ended, GoingAway, PlaceLost, Sealed, Stop
from holdfast.telemetry.events_file import EventsFile

if TYPE_CHECKING:
    from holdfast.agent.model import WorkerGroup
    from holdfast.agent.workers import Workers
    from holdfast.checks.gate import CheckResult

VERSION = 1

Entry = tuple[str, dict[str, Any]]


class Journal(Sink):
    """Of one run of an agent."""

    def __init__(self, group: WorkerGroup, workers: Workers) -> None:
        self._group, self._workers = group, workers
        self._who = {"run": group.spec.run_id, "host": os.uname().nodename, "agent_pid": os.getpid()}
        self._file = EventsFile(group.spec.events_file)
        self._round = 0
        self._restarts_used: int | None = None  # None before the first round.
        self._reason = ""
        self._told_at = 0.0
        self._calls: dict[int, tuple[float, int | None]] = {}

    def take(self, step: Step) -> None:
        self._round = step.round
        for name, fields in (*self._taken(step), *self._ordered(step)):
            self._write(name, fields)

    def look(self) -> None:
        if self._told_at != self._workers.sampled_at:
            self._told_at = self._workers.sampled_at
            for name, fields in self._progress():
                self._write(name, fields)

    def refused(self, error: BaseException) -> None:
        self._write("refused", {"reason": str(error)})

    def notice(self, going: GoingAway) -> None:
        self._write("notice", fields_of(going))

    def checked(self, results: tuple[CheckResult, ...], delay_s: float | None) -> None:
        for each in results:
            fields = {"check": each.name, "state": each.state, "text": each.text, "seconds": each.seconds}
            self._write("checked", fields)
        if delay_s is not None:
            failed = [each for each in results if each.state == "failed"]
            reason = "; ".join(f"check {each.name} failed: {each.text}" for each in failed)
            self._write("excluded", {"reason": reason, "retry_in_s": delay_s})

    def end(self, end: RunEnd) -> None:
        from holdfast.failures import verdict  # Costs a millisecond, and many runs need none.

        report, used = end.report, self._restarts_used or 0
        cause, first = (report.cause, report.first) if report is not None else (None, None)
        fields = {"state": end.state, "reason": end.reason, "cause": cause, "restarts_used": used}
        self._write("ended", {**fields, **verdict.fields(first)})
        self._file.close()

    def _taken(self, step: Step) -> Iterator[Entry]:
        match step.event:
            case Sealed(_, place):
                master, used = f"{self._group.master_addr}:{self._group.master_port}", place.restarts_used
                yield "sealed", {"nodes": place.node_count, "restarts_used": used, "master": master}
                if self._restarts_used is not None:
                    yield "restarted", {"restarts_used": used, "is_charged": used > self._restarts_used}
                self._restarts_used = used
            case lifecycle.WorkersStarted():
                workers, context = self._group.workers, self._workers.context
                shown = [{"rank": each.global_rank, "local_rank": each.local_rank, "pid": each.id} for each in workers]
                self._calls = {}
                yield "started", {"workers": shown, "logs": context.logs_dir or None if context is not None else None}
            case lifecycle.WorkersSucceeded(_, has_agreed):
                yield from self._progress()
                yield "saved" if has_agreed else "finished", {}
            case Stop(_, reason) | PlaceLost(_, reason):
                self._reason = reason
            case Ended(outcome):
                self._reason = outcome.reason
            case lifecycle.WorkersStopped(_, unkillable, stopped):
                yield from self._progress()
                ends = [{"ranks": list(ranks), "how": how} for how, ranks in stopped]
                reason, self._reason = self._reason, ""
                yield "stopped", {"reason": reason, "stopped": ends, "unkillable": list(unkillable)}

    def _ordered(self, step: Step) -> Iterator[Entry]:
        for command in step.commands:
            match command:
                case lifecycle.JoinRound():
                    yield "joined", {}
                case lifecycle.ReportFailure(_, failure) if failure is not None:
                    from holdfast.failures import verdict

                    self._reason = failure.text
                    name = "hung" if failure.exception == HANG else "failed"
                    exception = failure.exception if name == "failed" else ""
                    fields = {"rank": failure.rank, "exitcode": failure.exitcode, "exception": exception or None}
                    fields |= {"cause": failure.text, "is_consequence": failure.is_consequence}
                    yield name, {**fields, **verdict.fields(failure)}

    def _progress(self) -> Iterator[Entry]:
        """If workers have told of progress since the last time."""
        progress, now = self._workers.progress, time.monotonic()
        if progress is None or (calls := progress.calls()) == self._calls:
            return
        self._calls = calls
        ranks = {each.local_rank: each.global_rank for each in self._group.workers}
        shown = [{"rank": ranks[each], "step": step, "age_s": now - at} for each, (at, step) in calls.items()]
        yield "progress", {"workers": shown}

    def _write(self, name: str, fields: dict[str, Any]) -> None:
        lead = {"version": VERSION, "event": name, "time": time.time(), "monotonic": time.monotonic()}
        place = {"node": self._group.group_rank, "round": self._round}
        self._file.put(json.dumps({**lead, **self._who, **place, **fields}))
