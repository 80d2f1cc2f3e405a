"""One trial: the job's agents on this host, a fault at its moment, and what was seen. `remote` has trials on others.

Each node of the job is an agent of its own, started as `holdfast run` would be, with a run id that no other run has.
The trial looks at the statuses of its agents several times a second, and reads their events at the end (`on_host`). All
that it has started ends with it: agents end their workers, and the trial ends its agents.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast import signals
from holdfast.frozen import changed, frozen
from holdfast.hosts.job import JobSpec
from holdfast.rehearsal.on_host import MARK_VARIABLE, OnHost
from holdfast.rehearsal.plan import Fault, Seen
from holdfast.rendezvous import endpoints

_LOOK_AGAIN_S = 0.05
_REPLACED_AFTER_S = 1.0
_PATIENCE_S = 30.0
_DISK = "512k"
_EVENTS = "events"
_OVER = {"failed", "hung", "stopped"}


@frozen
class Expected:
    """What makes up the result: files, below the directory of the trial, and a pattern of which the last line in the
    output that matches counts."""

    files: tuple[str, ...] = ()
    output: str = ""

    def digest(self, found: Sequence[Sequence[str]], output: Path) -> tuple[str, str]:
        """Of the result, and words for a part of it that is not there. `found` has the digests of the files on each
        host. A file may be on one host only, or on each the same."""
        of_files = [{each for each in every if each} for every in zip(*found, strict=True)]
        parts = {f"there is no file {name}": each for name, each in zip(self.files, of_files, strict=True)}
        if self.output:
            lines = [line for line in output.read_text(errors="replace").splitlines() if re.search(self.output, line)]
            parts[f"no line of the output matches {self.output!r}"] = {*lines[-1:]}
        text = "\n".join(",".join(sorted(each)) for each in parts.values())
        missing = next((words for words, each in parts.items() if not each), "")
        return hashlib.sha256(text.encode()).hexdigest() if parts else "", missing


@frozen
class Side:
    """A host, the mark that the trial's processes have there, and the directory for the events of its agents."""

    host: OnHost
    mark: str
    events: str


def can_fill_disk() -> bool:
    """Whether this user can give a process a small disk of its own."""
    try:
        done = subprocess.run([*_apart(), "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def _apart() -> list[str]:
    return ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


class Rehearsal:
    """One trial of the job, in `directory`, which must be empty. `is_here`: the job runs in its own directory."""

    def __init__(self, job: JobSpec, directory: Path, fault: Fault, seed: int, *, is_here: bool = False) -> None:
        self._job, self._directory, self._fault = job, directory, fault
        self._random = random.Random(f"{seed} {fault}")
        self._share = self._random.uniform(0.34, 0.66)  # How much of the job is done when the fault comes.
        self._work = Path(job.directory) if is_here else directory / "work"
        self._mark = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._agents: list[subprocess.Popen[bytes]] = []
        self._replaced: set[int] = set()
        self._struck_at: float | None = None
        self._again_at: float | None = None
        self._workers: list[tuple[Side, int]] = []  # With their pids.
        self._steps: dict[tuple[str, int], int] = {}  # By mark and pid, the last step of each worker.
        self._before: set[tuple[str, int]] = set()  # The workers that had steps before the fault.
        self._step_before: int | None = None
        self._first_again: int | None = None
        self._further_at: dict[bool, float] = {}  # Workers of after the fault, and those that it did not stop.
        self._starts = 0
        self._place: tuple[str, ...] = ("--standalone",)
        self._sides = self._made_sides()
        self._struck_there = [0.0 for _ in self._sides]  # When, by the clock of each host.
        OnHost().make(str(directory), _EVENTS)
        for side in self._sides:
            side.host.make(str(directory), side.events)

    def _made_sides(self) -> list[Side]:
        return [Side(OnHost(), self._mark, _EVENTS)]

    @property
    def output(self) -> Path:
        return self._directory / "output"

    def carry_out(self, expected: Expected, limit_s: float, undisturbed: Seen | None = None) -> Seen:
        began = time.monotonic()
        try:
            self._start_all()
            while (code := self._exit_code()) is None and time.monotonic() < began + limit_s:
                signals.inbox().raise_pending()
                self._look()
                if self._is_time(began, undisturbed):
                    self._strike()
                if self._again_at is not None and time.monotonic() >= self._again_at:
                    self._again_at = None
                    self._replace()
                time.sleep(_LOOK_AGAIN_S)
        finally:
            self._end_all()
        seconds = time.monotonic() - began
        clocks = zip(self._sides, self._struck_there, strict=True)
        told = [side.host.told(f"{self._directory}/{side.events}", at) for side, at in clocks]
        steps = [step for events in told for _, event, step in events if event == "step"]
        last_step = max((*self._steps.values(), *steps), default=None)
        files = [side.host.digests(str(self._work), expected.files) for side in self._sides]
        noticed_s, running_s = _phases(sorted((at, event) for events in told for at, event, _ in events))
        if self._struck_at is None:
            noticed_s = running_s = None
        return Seen(
            code, seconds, last_step, *expected.digest(files, self.output),
            self._struck_at is not None or self._fault is Fault.NONE, noticed_s, running_s,
            self._since_fault(self._further_at.get(self._first_again is not None)), self._steps_again(),
        )  # fmt: skip

    # Agents.

    def _start_all(self) -> None:
        self._starts += 1
        if self._job.max_nodes > 1:
            port = endpoints.HeldPort()
            port.renew("127.0.0.1")
            self._place = ("--rdzv-backend=tcp", f"--rdzv-endpoint=127.0.0.1:{port.number}")
            port.release()
        for _ in range(self._job.max_nodes):
            self._start()

    def _start(self) -> None:
        number = len(self._agents)
        own = {MARK_VARIABLE: self._mark, "HOLDFAST_HOST_NAME": f"node{number}"}
        events = f"--events-file={self._directory}/{_EVENTS}/{number}.jsonl"
        self._launch([*self._place, events], {"TMPDIR": f"{self._directory}/tmp", **own})

    def _launch(self, place: Sequence[str], environment: dict[str, str]) -> None:
        own = (*place, f"--log-dir={self._directory}/logs", "--tee=3", "--prefix=never")
        command = changed(self._job, run_id=self._run_id).agent_command(*own)
        if self._fault is Fault.DISK_FULL:
            mount = f'mount -t tmpfs -o size={_DISK} tmpfs "$0" && exec "$@"'
            command = [*_apart(), "sh", "-c", mount, f"{self._directory}/logs", *command]
        with self.output.open("ab") as output:
            self._agents.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self._work,
                    env={**os.environ, **environment}, start_new_session=True, preexec_fn=_end_with_parent,
                )
            )  # fmt: skip

    @property
    def _run_id(self) -> str:
        return f"rehearsal-{self._mark}-{self._starts}"

    def _exit_code(self) -> int | None:
        """Of the run, once all agents have ended but for those that were lost on purpose."""
        if self._again_at is not None:
            return None
        codes = [agent.poll() for agent in self._agents if agent.pid not in self._replaced]
        if None in codes:
            return None
        return next((128 - code if code < 0 else code for code in codes if code), 0)

    def _end_all(self) -> None:
        for agent in self._agents:
            if agent.poll() is None:
                agent.terminate()
        deadline = time.monotonic() + _PATIENCE_S
        for agent in self._agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, deadline - time.monotonic()))
            if agent.poll() is None:
                agent.kill()
                agent.wait()
        for side in self._sides:  # A coordinator waits for nodes that may come back.
            while (coordinators := side.host.coordinators(side.mark)) and time.monotonic() < deadline + _PATIENCE_S:
                side.host.signal(coordinators, signal.SIGKILL)
                time.sleep(_LOOK_AGAIN_S)

    # The fault.

    def _is_time(self, began: float, undisturbed: Seen | None) -> bool:
        """By steps if the job reports them, else by time: somewhere in the middle third of the job."""
        if undisturbed is None or self._struck_at is not None or not self._workers:
            return False
        if undisturbed.last_step:
            return max(self._steps.values(), default=0) >= self._share * undisturbed.last_step
        return time.monotonic() - began >= self._share * undisturbed.seconds

    def _strike(self) -> None:
        self._struck_at, self._struck_there = time.monotonic(), [side.host.now() for side in self._sides]
        self._step_before = max(self._steps.values(), default=None)
        side, pid = self._random.choice(self._workers)
        match self._fault:
            case Fault.WORKER_KILLED:
                side.host.signal([pid], signal.SIGKILL)
            case Fault.WORKER_FROZEN:
                side.host.signal([pid], signal.SIGSTOP)
            case Fault.NODE_LOST:
                self._lose_node()
            case Fault.COORDINATOR_LOST:
                for side in self._sides:
                    side.host.signal(side.host.coordinators(side.mark), signal.SIGKILL)
            case Fault.DISK_FULL:
                for agent in self._agents:
                    _fill(Path(f"/proc/{agent.pid}/root{self._directory}/logs/filling"))
            case Fault.NEW_START:
                for agent in self._agents:
                    agent.terminate()
                    self._replaced.add(agent.pid)
                self._again_at = self._struck_at

    def _lose_node(self) -> None:
        agent = self._agents[-1]
        agent.kill()
        self._replaced.add(agent.pid)
        self._again_at = time.monotonic() + _REPLACED_AFTER_S

    def _replace(self) -> None:
        if self._fault is Fault.NODE_LOST:
            self._start()
        elif any(agent.poll() is None for agent in self._agents):
            self._again_at = time.monotonic() + _LOOK_AGAIN_S  # They are still stopping.
        else:
            self._start_all()

    # What is seen.

    def _look(self) -> None:
        self._workers = []
        for side in self._sides:
            for pid, step in side.host.workers(self._run_id, side.mark):
                if pid is not None:
                    self._workers.append((side, pid))
                if pid is not None and step is not None:
                    self._see(side.mark, pid, step)

    def _see(self, mark: str, pid: int, step: int) -> None:
        self._steps[mark, pid] = step
        if self._struck_at is None:
            self._before.add((mark, pid))
            return
        is_new = (mark, pid) not in self._before
        if is_new and self._first_again is None:
            self._first_again = step
        if step > (self._step_before or 0):
            self._further_at.setdefault(is_new, time.monotonic())

    def _steps_again(self) -> int | None:
        if self._struck_at is None or self._first_again is None or self._step_before is None:
            return None
        return max(0, self._step_before - self._first_again + 1)

    def _since_fault(self, at: float | None) -> float | None:
        return None if at is None or self._struck_at is None else at - self._struck_at


def _phases(after: Sequence[tuple[float, str]]) -> tuple[float | None, float | None]:
    """When a node has noticed the fault, and when workers ran again, in seconds after it."""
    noticed = next((at for at, event in after if at > 0 and event in _OVER), None)
    began = next((at for at, event in after if at > (noticed or 0) and event == "started"), None)
    return noticed, began


_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """In the agent, before it is executed: it gets SIGTERM when this process is killed."""
    _libc.prctl(1, signal.SIGTERM, 0, 0, 0)


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.write_bytes(bytes(1 << 20))


def words_of(expected: Expected, undisturbed: Seen) -> str:
    """What of a trial is compared with the undisturbed run."""
    named: Sequence[str] = [*expected.files, *([f"the last line with {expected.output!r}"] if expected.output else [])]
    steps = ["the last step"] if undisturbed.last_step is not None else []
    return ", ".join([*named, *steps]) or "the exit code alone (see --expect-file and --expect-output)"
