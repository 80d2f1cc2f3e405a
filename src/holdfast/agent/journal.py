"""What happened on this node, one JSON line for each event, in the file that `--events-file` names.

This is the one place that turns the steps of the agent's machine into events: `step` gets what the machine took and
what it ordered. docs/events.md lists the events and their fields.

The agent never waits for the file: a thread writes the lines, each with one write, so several agents of a host may
share a file. Lines that a full or failing disk does not take, or not in time, are lost, with one warning.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.agent import causes, lifecycle
from holdfast.log import Logger
from holdfast.rendezvous.membership.model import Ended, PlaceLost, Sealed, Stop
from holdfast.rendezvous.membership.restart_policy import HANG

if TYPE_CHECKING:
    from holdfast.agent.agent import SimpleElasticAgent
    from holdfast.agent.model import RunResult
    from holdfast.hangs.progress import GroupProgress

VERSION = 1
_QUEUE_CHARS = 1 << 20
_PATIENCE_S = 2.0  # How long the end of a run waits for a disk that takes nothing.

Entry = tuple[str, dict[str, Any]]

logger = Logger(__name__)


class Journal:
    """Of one agent. Without a file nothing is done."""

    def __init__(self, agent: SimpleElasticAgent) -> None:
        self._agent = agent
        self._file: BackgroundFile | None = None
        self._restarts_used: int | None = None  # None before the first round.
        self._reason = ""
        self._has_ended = False
        self._calls: dict[int, tuple[float, int | None]] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """For one run of the agent. Whatever raises within it ended the run on this node."""
        path = self._agent.get_worker_group().spec.events_file
        if not path:
            yield
            return
        self._file, self._restarts_used, self._has_ended = BackgroundFile(path), None, False
        try:
            yield
        except BaseException as error:
            number = getattr(error, "sigval", None)
            state = "failed" if getattr(error, "run_report", None) is not None else "left" if number else "error"
            reason = number.name if number is not None else f"{type(error).__name__}: {error}"
            self._end(state, reason)
            raise
        else:
            self._end("succeeded", "this node was not needed any more")
        finally:
            self._file.close()
            self._file = None

    def step(self, event: lifecycle.Event, commands: Sequence[lifecycle.Command]) -> None:
        if self._file is None:
            return
        if isinstance(event, lifecycle.WorkersStopped) and self._agent._progress is not None:
            self._tell_progress(self._agent._progress)
        for name, fields in (*self._taken(event), *self._ordered(commands)):
            self._write(name, fields)

    def look(self) -> None:
        """While the workers run: how far they are, every few seconds, if they are further than before."""
        progress = self._agent._progress
        if progress is not None and progress.look(time.monotonic()) and self._file is not None:
            self._tell_progress(progress)

    def _tell_progress(self, progress: GroupProgress) -> None:
        calls, now = progress.calls(), time.monotonic()
        if calls == self._calls:
            return
        self._calls = calls
        ranks = {each.local_rank: each.global_rank for each in self._agent._worker_group.workers}
        shown = [{"rank": ranks[each], "step": step, "age_s": now - at} for each, (at, step) in calls.items()]
        self._write("progress", {"workers": shown})

    def refused(self, error: BaseException) -> None:
        self._write("refused", {"reason": str(error)})

    def ended(self, result: RunResult) -> None:
        outcome = self._agent._run_outcome
        reason = outcome.reason if outcome is not None else "timed out waiting for the other nodes to finish"
        self._end(
            "failed" if result.is_failed() else "succeeded", reason, result.report.cause if result.report else None
        )

    def _end(self, state: str, reason: str, cause: str | None = None) -> None:
        if not self._has_ended:
            self._has_ended = True
            used = self._agent._restarts_used
            self._write("ended", {"state": state, "reason": reason, "cause": cause, "restarts_used": used})

    def _taken(self, event: lifecycle.Event) -> Iterator[Entry]:
        agent = self._agent
        match event:
            case Sealed(_, place):
                master = f"{agent._worker_group.master_addr}:{agent._worker_group.master_port}"
                yield "sealed", {"nodes": place.node_count, "restarts_used": place.restarts_used, "master": master}
                if self._restarts_used is not None:
                    is_charged = place.restarts_used > self._restarts_used
                    yield "restarted", {"restarts_used": place.restarts_used, "is_charged": is_charged}
                self._restarts_used = place.restarts_used
            case lifecycle.WorkersStarted():
                workers = agent._worker_group.workers
                shown = [{"rank": each.global_rank, "local_rank": each.local_rank, "pid": each.id} for each in workers]
                logs = agent._context.logs_dir if agent._context is not None else ""
                self._calls = {}
                yield "started", {"workers": shown, "logs": logs or None}
            case lifecycle.WorkersSucceeded():
                yield "finished", {}
            case Stop(_, reason) | PlaceLost(_, reason):
                self._reason = reason
            case Ended(outcome):
                self._reason = outcome.reason
            case lifecycle.WorkersStopped(_, unkillable):
                ends = [{"ranks": list(ranks), "how": how} for how, ranks in causes.by_how(agent._result.stopped)]
                reason, self._reason = self._reason, ""
                yield "stopped", {"reason": reason, "stopped": ends, "unkillable": list(unkillable)}

    def _ordered(self, commands: Sequence[lifecycle.Command]) -> Iterator[Entry]:
        agent = self._agent
        for command in commands:
            match command:
                case lifecycle.Join():
                    yield "joined", {}
                case lifecycle.ReportFailure(round):
                    failure = causes.failure_of(agent._result, round)
                    self._reason = failure.text
                    name = "hung" if failure.exception == HANG else "failed"
                    exception = failure.exception if name == "failed" else ""
                    fields = {"rank": failure.rank, "exitcode": failure.exitcode, "exception": exception or None}
                    yield name, {**fields, "cause": failure.text, "is_consequence": failure.is_consequence}

    def _write(self, name: str, fields: dict[str, Any]) -> None:
        if self._file is None:
            return
        import json

        status, round = self._agent._publisher.status, self._agent._machine.round
        lead = {"version": VERSION, "event": name, "time": time.time(), "monotonic": time.monotonic()}
        who = {"run": status.run_id, "host": status.host, "agent_pid": os.getpid(), "node": status.node}
        self._file.put(json.dumps({**lead, **who, "round": round, **fields}))


class BackgroundFile:
    """Lines for a file, written by a thread that ends when none is left."""

    def __init__(self, path: str) -> None:
        from holdfast.telemetry.events import LineFile

        self._file = LineFile(path)
        self._lines: deque[str] = deque()
        self._chars = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_dropped = False

    def put(self, line: str) -> None:
        with self._lock:
            if self._chars + len(line) > _QUEUE_CHARS:
                if not self._has_dropped:
                    logger.warning("events are lost: %s does not take them in time", self._file.path)
                self._has_dropped = True
                return
            self._lines.append(line)
            self._chars += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="holdfast-events", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # A process at its limit; the next line tries again.
                    self._thread = None

    def _write(self) -> None:
        while True:
            with self._lock:
                if not self._lines:
                    self._thread = None
                    return
                line = self._lines[0]
            self._file.append(line)
            with self._lock:
                self._lines.popleft()
                self._chars -= len(line)

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Wait until all lines are written, but not for long."""
        thread = self._thread
        if thread is not None:
            thread.join(patience_s)
        if self._thread is None:
            self._file.close()
        if self._lines:
            logger.warning("events are lost: %s does not take them", self._file.path)
