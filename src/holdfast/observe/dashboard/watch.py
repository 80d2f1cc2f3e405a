"""What is known of the run, kept up to date while a page is open.

Threads ask, because an answer may take its time, and hand pictures on; none of them decides anything:

* `_poll` asks the coordinator and the agents of this host, once a second at most, and only while a page is open. Pages
  are given the same picture, so many of them cost the run what one costs.
* `_ask_agents` asks the agents of other hosts for their workers, a few a second: the node that was not asked for
  longest comes first. Between two answers the state of the node stands for its workers.
* `_await_end` waits until the agents of this host say how the run ended, or are gone. The one answer comes at the end.

  A run that is asked by its endpoint has no such agents: there `_await_outcome` waits for the word of the coordinator.

Agents and coordinator are gone a moment after the end, so what they say then is all that will be known. Logs are then
read from their files, as far as they are on this host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast import loop
from holdfast.agent import control
from holdfast.cli.runs import LocalRun, RemoteRun, dicts_of, name_of, number_of, text_of
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.frozen import changed
from holdfast.log import Logger
from holdfast.observe.dashboard import picture
from holdfast.observe.dashboard.picture import Known, Picture, Series, Told
from holdfast.process.output import log_files

if TYPE_CHECKING:
    from holdfast.rendezvous.membership.model import Outcome

logger = Logger(__name__)

T = TypeVar("T")
View = LocalRun | RemoteRun

_ASK_EVERY_S = 1.0
_AGENTS_A_SECOND = 16  # A coordinator passes on fifty, for all that ask.
_KEEP_ALIVE_S = 20.0  # A coordinator hangs up on a client that says nothing for a minute.
_CONNECT_AGAIN_S = 2.0
_UNREACHABLE_S = 120.0  # A coordinator that is replaced is back by then; else the run has probably ended.
_SILENT_FOR_S = 30.0  # An agent that does not answer is not asked again for that long.


class Asker:
    """A view of the run for one thread at a time. One that has broken is opened again for the next question."""

    def __init__(self, open_view: Callable[[], View], view: View | None = None) -> None:
        self._open, self._view = open_view, view
        self._lock = threading.Lock()

    def __call__(self, ask: Callable[[View], T]) -> T:
        with self._lock:
            view = self._view if self._view is not None else self._open()
            self._view = view
            try:
                return ask(view)
            except HostError:
                if not view.local_agents():
                    view.close()
                    self._view = None
                raise


class Watch:
    """`publish` gets each new picture and the point of the plots that goes with it, `on_end` is called once. Files that
    an agent of this host names may be read only if it is this user's: others might name any file."""

    def __init__(
        self,
        view: View,
        open_view: Callable[[], View],
        publish: Callable[[Picture, list[float | None] | None], None],
        on_end: Callable[[], None],
        *,
        may_read_files: bool,
    ) -> None:
        self._open, self._publish, self._on_end = open_view, publish, on_end
        self._may_read_files = may_read_files
        self.name = view.name
        self._of_status, self._of_agents = Asker(open_view, view), Asker(open_view)
        self._of_logs, self._of_actions = Asker(open_view), Asker(open_view)
        self._local_run = view if isinstance(view, LocalRun) else None
        self._lock = threading.Lock()
        self._known = Known(view.name, time.monotonic(), None, "", {}, {})
        self._asked_at: dict[str, float] = {}  # By node id, for those of other hosts.
        self._began = time.monotonic()
        self._is_watched, self._is_closed, self._wakeup = threading.Event(), threading.Event(), loop.Wakeup()
        self.series = Series()
        self.picture: Picture | None = None

    def start(self) -> None:
        await_end = self._await_end if self._local_run is not None else self._await_outcome
        for target in (self._poll, self._ask_agents, await_end):
            threading.Thread(target=target, name=f"holdfast{target.__name__}", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()
        self._is_watched.set()
        self._wakeup.wake()

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
        node, found = self._node_of(rank), picture.worker_of(self._known, rank)
        age_s = self._known.now - found[1].at if found is not None else float("inf")
        if age_s >= 2 * _ASK_EVERY_S:
            self._asked_at.pop(node, None)  # It is asked next.
        facts = picture.worker_facts(found[0], age_s) if found is not None else {}
        return {"rank": rank, "node": node, **facts}

    def read_log(self, rank: int, stream: str, attempt: int | None, offset: int) -> Mapping[str, Any]:
        if self.is_over:
            return self._read_file(rank, stream, attempt, offset)
        request = {"command": "logs", "rank": rank, "stream": stream, "attempt": attempt, "offset": offset}
        return self._of_logs(lambda view: view.ask_node(self._node_of(rank), request))

    def take_stacks(self, rank: int) -> str:
        node = self._node_of(rank)
        answer = self._of_actions(lambda view: view.ask_node(node, {"command": "stacks", "rank": rank}))
        return str(answer.get("text") or "there are none")

    def stop_run(self, reason: str) -> str:
        """How far that reaches: `run` or `host`."""
        if self.is_over:
            raise UserError("the run has ended already")
        return self._of_actions(lambda view: view.stop(reason))[0]

    def _node_of(self, rank: int) -> str:
        node = picture.node_of(self.picture, rank) if self.picture is not None else None
        if node is None:
            raise UserError(f"the present round of the run has no rank {rank}")
        return node

    def _read_file(self, rank: int, stream: str, attempt: int | None, offset: int) -> Mapping[str, Any]:
        found = picture.worker_of(self._known, rank)
        if found is None or not found[1].is_here or not self._may_read_files:
            raise HostError("the run has ended, and the log is not of this host")
        path = log_files.log_path(text_of(found[0], stream), attempt)
        return {"path": path, "attempt": log_files.attempt_of(path), **log_files.read_piece(path, offset)}

    # The threads.

    def _poll(self) -> None:
        while not self._is_closed.is_set() and not self.is_over:
            self._is_watched.wait()
            began = time.monotonic()
            try:
                self._look()
            except Exception as error:  # Of an answer that makes no sense. The page stays.
                logger.debug("the run cannot be shown", exc_info=True)
                self._learn(problem=f"{type(error).__name__}: {error}")
            self._is_closed.wait(max(0.05, began + _ASK_EVERY_S - time.monotonic()))

    def _look(self) -> None:
        status: Mapping[str, Any] | None = None
        problem = ""
        try:
            status = self._of_status(lambda view: view.run_status())
        except HoldfastError as error:
            problem = str(error)
        here: list[dict[str, Any]] = []
        if self._local_run is not None:
            try:
                here = self._of_status(lambda view: view.local_agents())
            except HoldfastError as error:
                problem = problem or str(error)
        if status is None and not here and self._known.status is not None:
            status, problem = self._known.status, f"no answer at the moment: {problem}"  # The last one stays in view.
        self._learn(status=status, problem=problem, here=here)

    def _learn(
        self,
        *,
        status: Mapping[str, Any] | None = None,
        problem: str = "",
        here: list[dict[str, Any]] | None = None,
    ) -> None:
        now = time.monotonic()
        with self._lock:
            if self.is_over:
                return
            agents = {**self._known.agents, **{name_of(each): Told(each, now, is_here=True) for each in here or ()}}
            if status is not None:
                present = {text_of(node, "node_id") for node in dicts_of(status, "nodes")}
                agents = {name: told for name, told in agents.items() if name in present}
            else:
                status = self._known.status if here is None else None
            self._known = changed(self._known, now=now, status=status, problem=problem, agents=agents)
            self._show(now)

    def _show(self, now: float) -> None:
        self.picture = picture.picture_of(self._known)
        point = self.series.add(self._known, self.picture["totals"], now - self._began)
        self._publish(self.picture, point)

    def _ask_agents(self) -> None:
        while not self._is_closed.is_set() and not self.is_over:
            self._is_watched.wait()
            for name in self._due()[:_AGENTS_A_SECOND]:
                self._asked_at[name] = time.monotonic()
                try:
                    self._note_agent(name, self._of_agents(_status_of(name)), "")
                except Exception as error:  # Also of an answer that makes no sense.
                    self._asked_at[name] = time.monotonic() + _SILENT_FOR_S
                    self._note_agent(name, None, str(error))
            self._is_closed.wait(_ASK_EVERY_S)

    def _due(self) -> list[str]:
        """Nodes whose agents are to be asked, in that order."""
        known, now = self._known, time.monotonic()
        nodes = [text_of(node, "node_id") for node in dicts_of(known.status, "nodes")] if known.status else []
        here = {name for name, told in known.agents.items() if told.is_here}
        self._asked_at = {name: at for name, at in [*self._asked_at.items()] if name in nodes}
        due = [name for name in nodes if name not in here and self._asked_at.get(name, 0.0) <= now]
        return sorted(due, key=lambda name: self._asked_at.get(name, 0.0))

    def _note_agent(self, name: str, status: dict[str, Any] | None, problem: str) -> None:
        with self._lock:
            if self.is_over:
                return
            agents, silent = {**self._known.agents}, {**self._known.silent, name: problem}
            agents.pop(name, None)
            if status is not None:
                agents[name] = Told(status, time.monotonic())
                del silent[name]
            self._known = changed(self._known, agents=agents, silent=silent)

    def _await_end(self) -> None:
        assert self._local_run is not None
        run: View = self._local_run
        word: Mapping[str, Any] = {"end": "gone"}
        while isinstance(run, LocalRun):
            questions = run.send_to_all({"command": "end"})
            while questions:
                loop.wait_readable([*(each.fileno() for each in questions), self._wakeup.fileno()], None)
                if self._is_closed.is_set():
                    return
                for question in [each for each in questions if loop.is_readable(each.fileno())]:
                    questions.remove(question)
                    word = _last_word(question) or word
                    if text_of(word, "end") in picture.OVER:
                        self._end(word)
                        return
            try:
                run = self._open()  # Others of the run may have come to this host meanwhile.
            except HoldfastError:
                break
            self._is_closed.wait(_CONNECT_AGAIN_S)  # Or it is the same one, on its way out.
        self._end(word)

    def _await_outcome(self) -> None:
        ask, seen_at = Asker(self._open), time.monotonic()
        while not self._is_closed.is_set():
            try:
                outcome = ask(lambda view: view.await_outcome(_KEEP_ALIVE_S) if isinstance(view, RemoteRun) else None)
            except HoldfastError:
                if time.monotonic() > seen_at + _UNREACHABLE_S:
                    self._end({"end": "unreachable"})
                    return
                self._is_closed.wait(_CONNECT_AGAIN_S)
                continue
            seen_at = time.monotonic()
            if outcome is not None:
                end = outcome.end.lower()
                report = report_text(self.name, outcome, self._known.status or {}) if end == "failed" else None
                self._end({"end": end, "reason": outcome.reason, "report": report})
                return

    def _end(self, word: Mapping[str, Any]) -> None:
        now = time.monotonic()
        with self._lock:
            if self.is_over:
                return
            status = word.get("status")
            agents = {**self._known.agents}
            if isinstance(status, dict):
                agents[name_of(status)] = Told(status, now, is_here=True)
            report = word.get("report") if isinstance(word.get("report"), str) else None
            self._known = changed(self._known, now=now, agents=agents, end=word, report=report, problem="")
            self._show(now)
        self._on_end()


def report_text(run_id: str, outcome: Outcome, status: Mapping[str, Any]) -> str | None:
    """The report that every node has printed, as far as the coordinator knows it."""
    from holdfast.agent import causes
    from holdfast.agent.model import RunResult, WorkerGroup, WorkerSpec, WorkerState
    from holdfast.failures.report import run_text
    from holdfast.rendezvous.membership.restart_policy import RestartPolicy

    group = WorkerGroup(WorkerSpec("", 1, None, entrypoint=f"run {run_id}"))
    group.group_world_size = max(2, int(number_of(status, "members") or 0))  # What it knows is of other nodes.
    allowed = sum(int(number_of(status, name) or 0) for name in ("restarts_used", "restarts_left"))
    round = int(number_of(status, "round") or 0)
    report = causes.report_of(RunResult(WorkerState.FAILED), outcome, group, RestartPolicy(allowed), round, None)
    return run_text(changed(report, run_id=run_id)).strip("\n") if report is not None else None


def _last_word(question: control.Question) -> Mapping[str, Any] | None:
    try:
        word = question.answer().get("result")
    except (OSError, ValueError, RecursionError):
        return None
    return word if isinstance(word, dict) and text_of(word, "end") else None


def _status_of(node_id: str) -> Callable[[View], dict[str, Any]]:
    return lambda view: view.ask_node(node_id, {"command": "status"})
