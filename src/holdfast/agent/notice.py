"""A notice on one node: where it comes from, and how the workers hear of it.

Sources are a signal, a file that appears, a request on the health port, and `holdfast notice`. Each becomes a
`NoticeRequest` for the agent's loop, which gives it to the run. The run tells all nodes (`GoingAway`), and what follows
on this one is in `notice_plan`: workers hear of it by a file and, on request, a signal; the node leaves in time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from holdfast import escape, notice_board, procfs, signals
from holdfast.agent.notice_plan import NoticePlan
from holdfast.errors import UserError
from holdfast.frozen import frozen
from holdfast.log import Logger
from holdfast.rendezvous.membership.model import GoingAway, NoticeRequest
from holdfast.rendezvous.membership.notice_records import LONGEST_NOTICE_S
from holdfast.signals import NodeWentAway, parse_signals
from holdfast.telemetry.status import NoticeStatus

if TYPE_CHECKING:
    from holdfast.agent.lifecycle import AgentPhase
    from holdfast.agent.sinks import Sink
    from holdfast.agent.workers import Workers
    from holdfast.rendezvous.coordination import Coordination

logger = Logger(__name__)

DEFAULT_SIGNAL = "SIGUSR1"
DEFAULT_TIME_S = 120.0
_LARGEST = 1e300


@frozen
class NoticeSettings:
    """`notice_signal` means that this node goes away, and so does `file` when it appears, in `time_s` unless the file
    says otherwise. `worker_signal` tells the workers. `passed` are signals that are passed on to them."""

    notice_signal: signal.Signals | None = None
    file: str = ""
    time_s: float = DEFAULT_TIME_S
    worker_signal: signal.Signals | None = None
    passed: frozenset[signal.Signals] = frozenset()


def settings_of(
    notice_signal: str | None, file: str, time_s: float, worker_signal: str, pass_signals: str, to_handle: str
) -> NoticeSettings:
    """From what the user gave. No signal can mean two things. `notice_signal` is None if the user gave none: then it is
    the usual one, unless that has another meaning."""
    stopping, passed = parse_signals(to_handle), parse_signals(pass_signals)
    noticed = signals.one_signal("--notice-signal", DEFAULT_SIGNAL if notice_signal is None else notice_signal)
    if notice_signal is None and noticed in stopping | passed:
        noticed = None
    if noticed is not None and noticed in stopping:
        raise UserError(f"--notice-signal {noticed.name}: it is in --signals-to-handle, too")
    if noticed is not None and noticed in passed:
        raise UserError(f"--pass-signals {noticed.name}: it is the --notice-signal, too")
    for number in sorted(passed & stopping):
        raise UserError(f"--pass-signals {number.name}: it is in --signals-to-handle, too")
    if signal.SIGCHLD in passed:
        raise UserError("--pass-signals SIGCHLD: holdfast needs it itself")
    return NoticeSettings(noticed, file, time_s, signals.one_signal("--notice-worker-signal", worker_signal), passed)


def request_in(said: Any, default_s: float, reason: str) -> NoticeRequest:
    """What a file or a request says: `in_s`, or `at` in seconds since the epoch; `reason`, `whole_run`, `withdraw`.
    ValueError says what is wrong."""
    if not isinstance(said, dict):
        raise ValueError(f"it is no JSON object but {type(said).__name__}")
    unknown = sorted(said.keys() - {"in_s", "at", "reason", "whole_run", "withdraw"})
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}")
    if "in_s" in said and "at" in said:
        raise ValueError("in_s and at say the same thing twice")
    left_s: Any = said.get("in_s", default_s)
    if (at := said.get("at")) is not None:
        left_s = max(0.0, at - time.time()) if _is_number(at) else at
    if not _is_number(left_s) or not left_s <= LONGEST_NOTICE_S:
        raise ValueError(f"{'at' if at is not None else 'in_s'} is no time within a day: {str(said)[:100]}")
    text = said.get("reason", "")
    reason = escape.reason(text if isinstance(text, str) else "", reason)
    is_withdrawn = said.get("withdraw") is True
    return NoticeRequest(None if is_withdrawn else max(0.0, float(left_s)), reason, said.get("whole_run") is True)


def _is_number(value: Any) -> bool:
    """Not one of JSON that no float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


class NodeNotice:
    """Of one run of an agent. `processes` are the workers of this host."""

    def __init__(
        self, settings: NoticeSettings | None, processes: Workers, run: Coordination, grace_s: float,
        told: Sequence[Sink],
    ) -> None:  # fmt: skip
        self._settings, self._processes, self._run, self._told = settings or NoticeSettings(), processes, run, told
        self.plan = NoticePlan(grace_s)
        directory = os.environ.get("TMPDIR") or "/tmp"
        self._path = f"{os.path.abspath(directory)}/holdfast-notice-{os.getpid()}-{os.urandom(8).hex()}.json"
        processes.notice_path = self._path

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Within this block, a run of the agent, its sources are heard. Its signals mean nothing after it, and harm
        nothing: the workers may still be in their grace."""
        settings, box = self._settings, signals.inbox()
        box.watch(settings.notice_signal, settings.passed)
        watch: Any = contextlib.nullcontext()
        if settings.file:
            from holdfast.agent.notice_file import NoticeFile

            watch = NoticeFile(settings.file, settings.time_s, self._run.request_notice)
        with watch:
            yield

    def take_signals(self) -> None:
        box = signals.inbox()
        if (number := box.take_notice()) is not None:
            self._run.give_notice(NoticeRequest(self._settings.time_s, number.name))
        for number in box.take_passed():
            if not self._send(number):
                logger.warning("got %s, and there is no worker to pass it on to", number.name)

    def hear(self, going: GoingAway) -> None:
        """All nodes have been told. The same may be told again."""
        was_standing = self.plan.is_standing
        if not self.plan.hear(going, time.monotonic()):
            return
        line = words(going, self.plan) if self.plan.is_standing else "notice: no node goes away any more"
        if self.plan.is_standing or was_standing:
            logger.warning("%s", line)
        self._await_agreement()
        self._write_file()
        if self._settings.worker_signal is not None and self.plan.is_standing:
            self._send(self._settings.worker_signal, is_optional=True)
        for sink in self._told:
            sink.notice(going)

    def leave_if_due(self, phase: AgentPhase) -> None:
        """Raises NodeWentAway when it is time."""
        if self.plan.must_leave(phase, time.monotonic()):
            raise NodeWentAway(self._reason)

    def leave(self) -> None:
        """The workers have ended, and no coordinator decides for all nodes what follows."""
        raise NodeWentAway(self._reason)

    def has_agreed(self) -> bool:
        """Whether a worker has ended because of a notice."""
        context = self._processes.context
        codes = [code for code, _, _ in context.ends().values()] if context is not None else []
        return context is not None and context.agreed_code in codes

    def _await_agreement(self) -> None:
        """What workers that run have done because of a notice stays right when it is withdrawn."""
        self._processes.agreed_code = notice_board.AGREED if self.plan.is_standing else None
        if self.plan.is_standing and self._processes.context is not None:
            self._processes.context.agreed_code = notice_board.AGREED

    def _send(self, number: signal.Signals, *, is_optional: bool = False) -> bool:
        """To the workers alone; `is_optional`: to those that it would not kill. False if there is no worker."""
        context = self._processes.context
        running = context.running().values() if context is not None else ()
        for pid in running:
            if is_optional and procfs.is_deadly(pid, number):
                logger.warning(
                    "worker %d has no handler for %s, which would kill it, and does not get it", pid, number.name
                )
            else:
                procfs.kill(pid, number)
        return bool(running)

    @property
    def _reason(self) -> str:
        return self.plan.going.reason or "a notice"

    def status(self) -> NoticeStatus | None:
        """Any thread may ask."""
        plan = self.plan
        left_s, own_left_s = plan.left_s(time.monotonic())
        if left_s is None:
            return None
        going = plan.going
        known = (round(left_s, 3), None if own_left_s is None else round(own_left_s, 3))
        return NoticeStatus(*known, going.is_whole_run, going.nodes, going.node_count, going.reason)

    def close(self) -> None:
        """The workers are gone. Until then the notice stands, also for those that are in their grace."""
        self._remove_file()

    def _write_file(self) -> None:
        going, (left_s, _) = self.plan.going, self.plan.left_s(time.monotonic())
        if left_s is None:
            self._remove_file()
            return
        who = (self.plan.is_own, going.is_whole_run, going.nodes, going.node_count, going.reason)
        try:
            notice_board.write(self._path, notice_board.Notice(time.time() + left_s, *who))
        except OSError as error:
            logger.warning("the workers cannot be told of the notice: %s: %s", self._path, error.strerror)

    def _remove_file(self) -> None:
        for path in (self._path, f"{self._path}.new"):  # The second is there if the disk was full.
            with contextlib.suppress(OSError):
                os.unlink(path)


def words(going: GoingAway, plan: NoticePlan) -> str:
    """One line about a notice that stands."""
    left_s, names = going.left_s or 0.0, ", ".join(going.nodes)
    more = f" and {going.node_count - len(going.nodes)} more" if going.node_count > len(going.nodes) else ""
    who, verb = (names + more, "goes" if going.node_count == 1 else "go")
    stop = ""
    if plan.is_own:
        left_s = going.own_left_s or 0.0
        who, verb = "the whole run" if going.is_whole_run else "this node", "goes"
        in_s = max(0.0, left_s - plan.grace_s) if left_s else 0.0
        stop = f"; workers that still run are stopped {'now' if not left_s else f'in {in_s:.0f} s'}"
    why = f" ({going.reason})" if going.reason else ""
    return f"notice: {who} {verb} away {f'in {left_s:.0f} s' if left_s else 'now'}{why}{stop}"
