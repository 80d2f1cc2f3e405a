"""The process that runs the checks of a node: their owner, between them and the agent.

    stdin    one line of JSON, the order (`agent.node_checks`); open for as long as the agent wants the results
    stdout   one line of JSON for each check when it has ended, and one if the output of checks cannot be kept

All checks run at the same time, each as the leader of a session of its own, with a time-out of its own. This process
has one thread and never waits for a check: a hung mount may hold a process that no signal ends, which is named and left
alone. It is the subreaper of the checks, so a process that a check leaves behind is found and killed. When the agent is
gone or has closed stdin, this process kills everything and ends; if it is killed itself, the kernel kills the checks.

Results are written before the output of the checks goes to the log directory, which may be full or hang.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from holdfast import procfs
from holdfast.checks import built_in, gate
from holdfast.process.spawner import forked
from holdfast.signals import signal_name
from holdfast.text import plural

_PR_SET_CHILD_SUBREAPER = 36
_FAILED_CODE, _UNKNOWN_CODE = 78, 77  # Exit codes of built-in checks.
_MOST_OUTPUT_BYTES, _KEPT_BYTES = 16 << 20, 256 << 10
_SHOWN_LINES, _SHOWN_CHARS, _TEXT_CHARS = 10, 2000, 300
_KILL_S = 0.5  # A process that is there so long after SIGKILL is said to be unkillable.


class _RunningCheck:
    def __init__(self, spec: Mapping[str, Any], order: Mapping[str, Any]) -> None:
        self.name, self._is_built_in = str(spec["name"]), bool(spec["kind"])
        self._mark = f"{order['mark']}.{os.urandom(4).hex()}".encode()
        self._began = time.monotonic()
        self.ends_at = self._began + float(order["timeout_s"])
        self.output, self._size, self._trouble = bytearray(), 0, ""
        self.is_done, self._is_read = False, True
        self._stuck: tuple[int, int] | None = None
        self._pipe, write_fd = os.pipe()
        owner = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _become_check(spec, order, write_fd, self._mark, owner)
        os.close(write_fd)
        os.set_blocking(self._pipe, False)
        self._pidfd = os.pidfd_open(self.pid)

    @property
    def watched(self) -> list[int]:
        return [self._pidfd, *([self._pipe] if self._is_read else [])]

    def look(self, now: float) -> None:
        has_ended = bool(select.select([self._pidfd], [], [], 0)[0])
        self._read()
        if has_ended:
            self._finish(*self._judged())
        elif now >= self.ends_at and not self._trouble:
            self._kill(f"no end within {now - self._began:.0f} s")
        elif now >= self.ends_at:
            status, sleep = procfs.process_status(self.pid), _sleep_of(self.pid)
            self._stuck = (self.pid, status.start_time) if status is not None else None
            self._finish(gate.FAILED, f"{self._trouble}; process {self.pid} cannot be killed ({sleep})")

    def _read(self) -> None:
        """What is there. The end of the stream says nothing: a process that the check has left may hold it open."""
        while self._is_read:
            try:
                piece = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                return
            self._is_read = bool(piece)
            self._size += len(piece)
            self.output += piece
            del self.output[:-_KEPT_BYTES]
            if self._size > _MOST_OUTPUT_BYTES:
                self._kill(f"its output has no end; stopped after {_MOST_OUTPUT_BYTES >> 20} MiB")

    def _kill(self, trouble: str) -> None:
        self._trouble, self._is_read, self.ends_at = trouble, False, time.monotonic() + _KILL_S
        for pid in (*procfs.descendants_of(self.pid), self.pid):
            procfs.kill(pid)

    def _judged(self) -> tuple[str, str]:
        left = [pid for pid in procfs.descendants_of(os.getpid()) if pid != self.pid and self._owns(pid)]
        for pid in left:
            procfs.kill(pid)
        if self._trouble:
            return gate.FAILED, self._trouble
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        lines = self.output[-_KEPT_BYTES:].decode("utf-8", "replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")[:_TEXT_CHARS]
        said += f" ({plural(len(left), 'process', 'processes')} left behind, killed)" if left else ""
        if code == 0 or (self._is_built_in and code == _UNKNOWN_CODE):
            return (gate.UNKNOWN if code else gate.PASSED), said
        if self._is_built_in and code == _FAILED_CODE:
            return gate.FAILED, said
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        return gate.FAILED, f"{how}: {said}" if said else how

    def _owns(self, pid: int) -> bool:
        status = procfs.process_status(pid)
        if status is None or status.state == "Z":
            return False
        return status.session == self.pid or procfs.mark_of(pid) == self._mark

    def _finish(self, state: str, text: str) -> None:
        self.is_done = True
        os.close(self._pipe)
        lines = self.output[-2 * _SHOWN_CHARS :].decode("utf-8", "replace").splitlines()
        shown = "\n".join(lines[-_SHOWN_LINES:])[-_SHOWN_CHARS:]
        seconds = round(time.monotonic() - self._began, 3)
        found = {"name": self.name, "state": state, "text": text, "seconds": seconds, "output": shown}
        _say({**found, "stuck": self._stuck})


def _sleep_of(pid: int) -> str:
    channel = procfs.wait_channel(pid)
    return f"state {procfs.state(pid)}" + (f", in {channel}" if channel else "")


def _say(message: Mapping[str, Any]) -> None:
    try:
        os.write(1, json.dumps(message).encode() + b"\n")  # Short enough for the pipe, which is read all the time.
    except BrokenPipeError:
        pass  # The agent is gone, which is noticed elsewhere.


# In the process of a check.


def _become_check(spec: Mapping[str, Any], order: Mapping[str, Any], output: int, mark: bytes, owner: int) -> NoReturn:
    kept = [int(order["fd"])] if "fd" in order else []
    try:
        forked.leave_home(owner, None)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, fd in enumerate((null, output, output)):
            os.dup2(fd, target)
        procfs.close_all_but([0, 1, 2, *kept])
        if spec["kind"]:
            os._exit(_run_built_in(spec, order))
        words = [os.fsencode(word) for word in spec["words"]]
        forked.execute(words, {**os.environb, procfs.MARK_VARIABLE.encode(): mark}, {}, ())
    except OSError as error:
        os.write(2, f"cannot start {spec['words'][0]!r}: {error.strerror}\n".encode())
    except BaseException as error:  # An error in holdfast says nothing about the node.
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"))
        os._exit(_UNKNOWN_CODE)
    os._exit(127)


def _run_built_in(spec: Mapping[str, Any], order: Mapping[str, Any]) -> int:
    sys.path[:] = order["path"]
    code = 0
    try:
        said = _built_in(spec["kind"])(order, *spec["words"])
    except built_in.NoEvidence as error:
        code, said = _UNKNOWN_CODE, str(error)
    except built_in.CheckFailed as error:
        code, said = _FAILED_CODE, str(error)
    except OSError as error:
        code, said = _FAILED_CODE, f"{error.filename or spec['name']}: {error.strerror or error}"
    print(said, flush=True)
    return code


def _built_in(kind: str) -> Callable[..., str]:
    module: Any = built_in
    if kind in ("link", "serve"):
        from holdfast.checks import link as module
    check: Callable[..., str] = getattr(module, kind)
    return check


# The loop.


def main() -> None:
    order = json.loads(_line(0))
    for number in forked.DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    forked.libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    agent = os.pidfd_open(os.getppid())  # A process that the agent has forked may hold the other end of stdin, too.
    checks = [_RunningCheck(spec, order) for spec in order["checks"]]
    try:
        while running := [each for each in checks if not each.is_done]:
            if not _wait(running, agent):
                return
            for each in running:
                each.look(time.monotonic())
        if order["log_dir"]:
            _keep(checks, order["log_dir"])
    finally:
        for pid in procfs.descendants_of(os.getpid()):
            procfs.kill(pid)


def _line(fd: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        if not (piece := os.read(fd, 1 << 16)):
            raise SystemExit(1)
        data += piece
    return data


def _wait(running: Sequence[_RunningCheck], agent: int) -> bool:
    """Until something happens. False if the results are not wanted any more."""
    poller = select.poll()
    for fd in (0, agent, *(fd for each in running for fd in each.watched)):
        poller.register(fd, select.POLLIN)
    timeout_s = min(each.ends_at for each in running) - time.monotonic()
    ready = [fd for fd, _ in poller.poll(1000 * max(0.0, timeout_s) + 1)]
    return 0 not in ready and agent not in ready


def _keep(checks: Sequence[_RunningCheck], directory: str) -> None:
    """The output of the last run of each check. A new file replaces the old one."""
    try:
        os.makedirs(directory, exist_ok=True)
        for number, each in enumerate(checks):
            name = f"{number}_{re.sub('[^0-9A-Za-z._-]+', '_', each.name)[:80].strip('_')}.log"
            path = os.path.join(directory, name)
            with open(f"{path}.new", "wb") as file:
                file.write(each.output)
            os.replace(f"{path}.new", path)
    except OSError as error:
        _say({"unkept": f"{error.filename or directory}: {error.strerror}"})


if __name__ == "__main__":
    main()
