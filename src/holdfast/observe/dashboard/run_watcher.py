"""What is known of the run, kept up to date while a page is open.

Threads ask, because an answer may take its time, and hand pictures on; none of them decides anything:

* `_poll` looks at the run (`run_view.look`), once a second at most, and only while a page is open. Pages are given the
  same picture, so many of them cost the run what one costs. Of the agents of other hosts a few are asked at a time: the
  node that was not asked for longest comes first. Between two answers the state of the node stands for its workers.
* `_await_end` waits until an agent of this host says how the run ended, or the coordinator if the run is asked by its
  endpoint. The one answer comes at the end.

Agents and coordinator are gone a moment after the end, so what they say then is all that will be known. Logs are then
read from their files, as far as they are on this host.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.frozen import changed
from holdfast.log import Logger
from holdfast.observe import run_view
from holdfast.observe.ask import OVER, AskedRun, LastWord, LocalRun, name_of
from holdfast.observe.dashboard import picture
from holdfast.observe.dashboard.picture import Picture, Series
from holdfast.observe.log_tail import LogPiece
from holdfast.observe.run_view import RunView, Told
from holdfast.observe.stacks import NodeStacks
from holdfast.process.output import log_files
from holdfast.rendezvous.membership.model import Outcome
from holdfast.telemetry.status import RunStatus

logger = Logger(__name__)

T = TypeVar("T")

_ASK_EVERY_S = 1.0
_AGENTS_A_SECOND = 16
_CONNECT_AGAIN_S = 2.0
_UNREACHABLE_S = 120.0  # A coordinator that is replaced is back by then; else the run has probably ended.
_SILENT_FOR_S = 30.0  # An agent that does not answer is not asked again for that long.


class Watch:
    """`publish` gets each new picture and the point of the plots that goes with it, `on_end` is called once. Files that
    an agent of this host names may be read only if it is this user's: others might name any file."""

    def __init__(
        self,
        view: AskedRun,
        open_view: Callable[[], AskedRun],
        publish: Callable[[Picture, list[float | None] | None], None],
        on_end: Callable[[], None],
        *,
        may_read_files: bool,
    ) -> None:
        self._open, self._publish, self._on_end = open_view, publish, on_end
        self._may_read_files = may_read_files
        self.name = view.name
        self._run, self._is_here = view, isinstance(view, LocalRun)
        self._lock = threading.Lock()
        self._known = RunView(view.name, time.monotonic())
        self._asked_at: dict[str, float] = {}  # By node id, for those of other hosts.
        self._began = time.monotonic()
        self._is_watched, self._is_closed = threading.Event(), threading.Event()
        self.series = Series()
        self.picture: Picture | None = None

    def start(self) -> None:
        for target in (self._poll, self._await_end):
            threading.Thread(target=target, name=f"holdfast{target.__name__}", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()
        self._is_watched.set()

    def set_watched(self, is_watched: bool) -> None:
        """Whether a page is open."""
        if is_watched:
            self._is_watched.set()
        elif not self._is_closed.is_set():
            self._is_watched.clear()

    @property
    def is_over(self) -> bool:
        """Whether the last word was said. A status may say earlier that the run has ended, and less of it."""
        return self._known.end is not None

    @property
    def ending(self) -> str:
        """The sentence about the end."""
        return str(self.picture["run"]["sentence"]) if self.picture is not None else ""

    # What pages ask for. Each of these may block.

    def worker(self, rank: int) -> Picture:
        """From memory."""
        node, now = self._node_of(rank), time.monotonic()
        found = changed(self._known, now=now).worker(rank)
        if found is None or now - found[1].at >= 2 * _ASK_EVERY_S:
            self._asked_at.pop(node, None)  # It is asked next.
        facts = picture.worker_facts(found[0]) if found is not None else {}
        return {"rank": rank, "node": node, **facts}

    def read_log(self, rank: int, stream: str, attempt: int | None, offset: int) -> LogPiece:
        if self.is_over:
            return self._read_file(rank, stream, attempt, offset)
        request = {"command": "logs", "rank": rank, "stream": stream, "attempt": attempt, "offset": offset}
        node = self._node_of(rank)
        return self._ask(lambda run: run.ask_node(node, request, LogPiece))

    def take_stacks(self, rank: int) -> str:
        node = self._node_of(rank)
        request = {"command": "stacks", "rank": rank}
        return self._ask(lambda run: run.ask_node(node, request, NodeStacks)).text or "there are none"

    def stop_run(self, reason: str) -> str:
        """How far that reaches: `run` or `host`."""
        if self.is_over:
            raise UserError("the run has ended already")
        return self._ask(lambda run: run.stop(reason))[0]

    def _ask(self, ask: Callable[[AskedRun], T]) -> T:
        """From any thread. If the agents of this host are gone, the next question is for those that are there then."""
        run = self._run
        try:
            return ask(run)
        except HostError:
            if self._is_here and not run.local_agents():
                with contextlib.suppress(HoldfastError):
                    self._run = self._open()
            raise

    def _node_of(self, rank: int) -> str:
        node = picture.node_of(self.picture, rank) if self.picture is not None else None
        if node is None:
            raise UserError(f"the present round of the run has no rank {rank}")
        return node

    def _read_file(self, rank: int, stream: str, attempt: int | None, offset: int) -> LogPiece:
        found = self._known.worker(rank)
        if found is None or not found[1].is_here or not self._may_read_files:
            raise HostError("the run has ended, and the log is not of this host")
        path = log_files.log_path(found[0].stdout if stream == "stdout" else found[0].stderr, attempt)
        read = log_files.read_piece(path, offset)
        return LogPiece(**read, path=path, attempt=log_files.attempt_of(path), is_over=True)

    # The threads.

    def _poll(self) -> None:
        while not self._is_closed.is_set() and not self.is_over:
            self._is_watched.wait()
            began = time.monotonic()
            try:
                self._look()
            except Exception as error:  # Of an answer that makes no sense. The page stays.
                logger.debug("the run cannot be shown", exc_info=True)
                self._learn(changed(self._known, problem=f"{type(error).__name__}: {error}"))
            self._is_closed.wait(max(0.05, began + _ASK_EVERY_S - time.monotonic()))

    def _look(self) -> None:
        known = self._known
        try:
            view = self._ask(lambda run: run_view.look(run, known, self._due))
            now = time.monotonic()
            late = [name for name in view.silent if self._asked_at.get(name, 0.0) <= now]
            self._asked_at |= dict.fromkeys(late, now + _SILENT_FOR_S)
            self._learn(view)
        except HoldfastError as error:  # What was known stays in view, with its age.
            seen = known.status is not None or known.agents
            self._learn(changed(known, problem=f"no answer at the moment: {error}" if seen else str(error)))

    def _learn(self, view: RunView) -> None:
        with self._lock:
            if not self.is_over:
                self._known = changed(view, now=time.monotonic())
                self._show(self._known.now)

    def _show(self, now: float) -> None:
        self.picture = picture.picture_of(self._known)
        point = self.series.add(self._known, self.picture["totals"]["goodput"], now - self._began)
        self._publish(self.picture, point)

    def _due(self, others: list[str]) -> list[str]:
        """Which nodes to ask now: the ones that were not asked for longest."""
        now = time.monotonic()
        self._asked_at = {name: at for name, at in [*self._asked_at.items()] if name in others}
        due = [name for name in others if self._asked_at.get(name, 0.0) <= now]
        due = sorted(due, key=lambda name: self._asked_at.get(name, 0.0))[:_AGENTS_A_SECOND]
        self._asked_at |= dict.fromkeys(due, now)
        return due

    def _await_end(self) -> None:
        """Until the run has ended, as its coordinator or an agent of this host says."""
        run, heard_at = self._run, time.monotonic()
        while not self._is_closed.is_set():
            try:
                word, heard_at = run.await_end(_ASK_EVERY_S), time.monotonic()
            except HoldfastError:
                self._is_closed.wait(_CONNECT_AGAIN_S)
                word = LastWord("unreachable") if time.monotonic() > heard_at + _UNREACHABLE_S else None
            if word is None:
                continue
            if self._is_here and word.end not in OVER and (others := self._come_meanwhile()) is not None:
                run = others
                continue
            self._end(word)
            return

    def _come_meanwhile(self) -> AskedRun | None:
        """The agents of this host are gone; others of the run may have come. Those on their way out do not count."""
        self._is_closed.wait(_CONNECT_AGAIN_S)
        try:
            return self._open()
        except HoldfastError:
            return None

    def _end(self, word: LastWord) -> None:
        now = time.monotonic()
        with self._lock:
            if self.is_over:
                return
            agents, report = {**self._known.agents}, word.report
            if word.status is not None:
                agents[name_of(word.status)] = Told(word.status, now, is_here=True)
            if word.outcome is not None and word.end == "failed":
                report = report_text(self.name, word.outcome, self._known.status or RunStatus())
            self._known = changed(self._known, now=now, agents=agents, end=word, report=report, problem="")
            self._show(now)
        self._on_end()


def report_text(run_id: str, outcome: Outcome, status: RunStatus) -> str | None:
    """The report that every node has printed, as far as the coordinator knows it."""
    from holdfast.agent import causes
    from holdfast.agent.model import RunResult, WorkerGroup, WorkerSpec, WorkerState
    from holdfast.failures.report import run_text
    from holdfast.rendezvous.membership.restart_policy import RestartPolicy

    group = WorkerGroup(WorkerSpec("", 1, None, entrypoint=f"run {run_id}"))
    group.group_world_size = max(2, status.members)  # What it knows is of other nodes.
    policy = RestartPolicy(status.restarts_used + status.restarts_left)
    report = causes.report_of(RunResult(WorkerState.FAILED), outcome, group, policy, status.round, None)
    return run_text(changed(report, run_id=run_id)).strip("\n") if report is not None else None
