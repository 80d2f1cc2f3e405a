"""The checks of this node (`--check`): starts them, reads their results, and tells the run whether the node is ready.

`checks.gate` decides. The checks themselves belong to a process of their own (`checks.runner`), which the agent's loop
never waits for: it reads lines from a pipe. If that process does not answer in time, its checks have failed, and it is
killed and left.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast import procfs
from holdfast.agent.lifecycle import Step
from holdfast.agent.sinks import RunEnd, Sink
from holdfast.checks import gate
from holdfast.checks.gate import FAILED, UNKNOWN, CheckResult
from holdfast.checks.plan import CheckPlan
from holdfast.errors import HostError, UserError
from holdfast.failures import verdict
from holdfast.log import Logger
from holdfast.process.spawner import client
from holdfast.rendezvous.membership.model import PlaceLost, Sealed

if TYPE_CHECKING:
    from holdfast.checks.plan import Check
    from holdfast.failures.records import Failure
    from holdfast.rendezvous.coordination import Coordination

logger = Logger(__name__)

_MARGIN_S = 5.0  # For the process that runs the checks.
_SERVE_S = 20.0
_CLOSE_PATIENCE_S = 1.0
_MOST_SERVED = 4


def plan_of(checks: tuple[Check, ...], timeout_s: float, *, excludes: bool) -> CheckPlan:
    """Raises UserError if this host cannot run one of them."""
    if timeout_s == 0:
        raise UserError("--check-timeout 0: no check could pass")
    for check in checks:
        if problem := objection_to(check):
            raise UserError(f"--check {check.name}: {problem}")
    return CheckPlan(checks, timeout_s, excludes)


def objection_to(check: Check) -> str:
    """Why this host cannot run the check at all; or nothing. A command with a path is left to the check: its directory
    may be what is to be checked, and a look at it may hang."""
    if check.kind == "gpu" and importlib.util.find_spec("pynvml") is None:
        return "it asks the driver through nvidia-ml-py, which is not installed (pip install nvidia-ml-py)"
    word = check.words[0] if check.words and not check.kind else ""
    if word and "/" not in word and shutil.which(word) is None:
        return f"there is neither a built-in check nor a command {word!r}"
    return ""


def _still_hangs(result: CheckResult) -> bool:
    pid, start_time = result.stuck or (0, 0)
    status = procfs.process_status(pid) if pid else None
    return status is not None and status.start_time == start_time and status.state != "Z"


class CheckProcess:
    """One run of some checks."""

    def __init__(self, order: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        root = os.path.abspath(__file__).rsplit(os.sep, 3)[0]
        code = f"import sys; sys.path.insert(0, {root!r}); from holdfast.checks.runner import main; main()"
        words = [sys.executable, "-I", "-S", "-c", code]
        with client.starting:
            order_read, self._order = os.pipe()
            self._results, results_write = os.pipe()
            actions = [
                (os.POSIX_SPAWN_DUP2, order_read, 0),
                (os.POSIX_SPAWN_DUP2, results_write, 1),
            ]
            try:
                for fd in fds:
                    os.set_inheritable(fd, True)
                self.pid = os.posix_spawn(
                    sys.executable, words, client.inherited_environment(), file_actions=actions, setsid=True,
                    setsigmask=(), setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
                )  # fmt: skip
            except OSError:
                os.close(self._order)
                os.close(self._results)
                raise
            finally:
                os.close(order_read)
                os.close(results_write)
        os.set_blocking(self._results, False)
        self._unread, self._mark = b"", f"check.{os.urandom(8).hex()}"
        with contextlib.suppress(BrokenPipeError):  # It was killed, which `read` says.
            os.write(self._order, json.dumps({**order, "mark": self._mark}).encode() + b"\n")

    def fileno(self) -> int:
        return self._results

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """What it has said since the last call, and whether it has ended."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._results, 1 << 16):
                self._unread += piece
            return self._lines(), True
        return self._lines(), False

    def _lines(self) -> list[dict[str, Any]]:
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def has_ended(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return True

    def kill(self) -> None:
        """With what it runs: the checks would end with it, but not what they have started."""
        procfs.kill(self.pid)
        procfs.sweep_marked(self._mark.encode(), frozenset())

    def close(self) -> None:
        """It kills what it runs, and ends."""
        os.close(self._order)
        os.close(self._results)

    def await_end(self, until: float) -> None:
        while not self.has_ended() and time.monotonic() < until:
            time.sleep(0.005)


class NodeChecks(Sink):
    """Of one run of an agent. `told` are the sinks that hear of results."""

    def __init__(
        self,
        plan: CheckPlan,
        run: Coordination,
        told: Sequence[Sink],
        log_dir: Callable[[], str],
        control_path: Callable[[], str],
    ) -> None:
        self._plan, self._run, self._told = plan, run, told
        self._log_dir, self._control_path = log_dir, control_path
        self._gate = gate.Gate(plan, run.join_patience_s)
        self._process: CheckProcess | None = None
        self._ends_by = 0.0
        self._results: dict[str, CheckResult] = {}
        self._turn = 0
        self._run_knows: str | None = None  # What the run knows of `Gate.unready`.
        self._closed: list[CheckProcess] = []  # That may not have ended.
        self._served: list[CheckProcess] = []
        self._serving = threading.Lock()

    # What the loop calls.

    def want_place(self, failure: Failure | None) -> str | None:
        """Whether this node is ready for it. `failure` is that of its workers in the last round, if they failed."""
        if failure is not None and verdict.judged(failure).verdict == verdict.EXCLUDE_NODE:
            self._step(gate.Suspected())
        self._step(gate.PlaceWanted())
        return self.unready

    @property
    def unready(self) -> str | None:
        """What to tell the run."""
        self._run_knows = self._gate.unready
        return self._run_knows

    def waiting_for(self) -> str:
        """For the status; empty if this node is ready. Called in other threads."""
        unready, names = self._gate.unready, ", ".join(each.name for each in self._plan.checks)
        if unready is None:
            return ""
        return f"its checks to pass: {unready}" if unready else f"its checks to end: {names}"

    def failed(self) -> tuple[tuple[str, str, str], ...]:
        """For the report: the checks of this node that failed last, what they found, and their last lines."""
        return tuple((each.name, each.text, each.output) for each in self._results.values() if each.state == FAILED)

    def fds(self) -> list[int]:
        return [self._process.fileno()] if self._process is not None else []

    def deadline(self) -> float | None:
        times = [self._ends_by if self._process is not None else None, self._gate.next_deadline()]
        return min((each for each in times if each is not None), default=None)

    def poll(self) -> bool:
        """Whether the run is to be told that this node is ready, or not ready any more."""
        self.look()
        self._step(gate.TimePassed())
        return self._gate.unready != self._run_knows

    def look(self) -> None:
        if self._process is not None:
            self._read(self._process, time.monotonic())

    def take(self, step: Step) -> None:
        match step.event:
            case Sealed():
                self._step(gate.RoundBegun())
            case PlaceLost():
                self._step(gate.Suspected())

    def end(self, end: RunEnd) -> None:
        """Processes that do not end are left to the kernel."""
        self._stop()
        with self._serving:
            for each in self._served:
                each.close()
        until = time.monotonic() + _CLOSE_PATIENCE_S
        for each in (*self._closed, *self._served):
            each.await_end(until)

    @property
    def commands(self) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
        """What other nodes may ask this one, in threads."""
        return {"link": self._serve_link} if self._plan.has("link") else {}

    def _serve_link(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Another node wants to send and receive. A process does that, once."""
        with self._serving:
            for each in [each for each in self._served if each.has_ended()]:
                each.close()
                self._served.remove(each)
            if len(self._served) >= _MOST_SERVED:
                raise HostError(f"{_MOST_SERVED} other nodes are served already")
            fd, address, port = self._run.listen_for_peer()
            secret = os.urandom(16).hex()
            order = {"checks": [{"name": "serve", "kind": "serve", "words": [secret]}], "fd": fd}
            try:
                more = {"timeout_s": _SERVE_S, "log_dir": "", "path": sys.path}
                self._served.append(CheckProcess({**order, **more}, (fd,)))
            finally:
                os.close(fd)
        return {"address": address, "port": port, "secret": secret}

    # The machine's commands.

    def _step(self, event: gate.Event) -> None:
        for command in self._gate.step(event, time.monotonic()):
            match command:
                case gate.StartChecks():
                    self._start()
                case gate.StopChecks():
                    self._stop()
                case gate.Report(results, delay_s, left_s):
                    for sink in self._told:
                        sink.checked(results, delay_s)
                    if left_s is not None:
                        logger.warning(
                            "the run fails in %.0f s if the checks have not passed by then (--join-timeout)", left_s
                        )
                case gate.GiveUp(reason):
                    self._run.give_up(reason)

    def _start(self) -> None:
        self._stop()
        plan = self._plan
        # A process that hangs in the kernel is not joined by another one at each try.
        self._results = {name: each for name, each in self._results.items() if _still_hangs(each)}
        wanted = [each for each in plan.checks if each.name not in self._results]
        if not wanted:
            self._step(gate.ChecksEnded(self._found()))
            return
        checks = [{"name": each.name, "kind": each.kind, "words": each.words} for each in wanted]
        self._turn += 1
        self._ends_by = time.monotonic() + plan.timeout_s + _MARGIN_S
        about = {"control": self._control_path(), "node_id": self._run.node_id, "turn": self._turn - 1}
        about["has_coordinator"] = self._run.has_leases
        order = {"checks": checks, "timeout_s": plan.timeout_s, "log_dir": self._log_dir(), **about}
        try:
            self._process = CheckProcess({**order, "path": sys.path})
        except OSError as error:
            self._step(gate.ChecksEnded(self._found(FAILED, f"it cannot be started: {error.strerror}")))

    def _read(self, process: CheckProcess, now: float) -> None:
        said, is_over = process.read()
        for each in said:
            if "unkept" in each:
                logger.warning("the output of the checks is not kept: %s", each["unkept"])
            else:
                self._results[each["name"]] = CheckResult(**each)
        is_late, has_all = now >= self._ends_by, len(self._results) == len(self._plan.checks)
        if has_all:
            self._step(gate.ChecksEnded(self._found()))
        if is_late or (is_over and not has_all):
            process.kill()
        if is_late or is_over:
            self._stop()
            trouble = (FAILED, "no answer of its process") if is_late else (UNKNOWN, "its process was killed")
            self._step(gate.ChecksEnded(self._found(*trouble)))

    def _found(self, state: str = UNKNOWN, trouble: str = "") -> tuple[CheckResult, ...]:
        """In the order of the options. `state` and `trouble` are those of checks that have no result."""
        for name in (each.name for each in self._plan.checks):
            self._results.setdefault(name, CheckResult(name, state, trouble))
        return tuple(self._results[each.name] for each in self._plan.checks)

    def _stop(self) -> None:
        """The loop does not wait for the process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()
            self._closed = [each for each in (*self._closed, process) if not each.has_ended()]
