"""Timers over a named pipe: for any process of the host that knows the pipe's path.

The server is one thread with one `poll`: on the pipe, on an event, and until the earliest deadline. A turn takes all
requests in the pipe, reaps the processes whose timers have run out, and forgets those that are gone. Before a process
is signalled its stacks are logged, which may take seconds; requests are read meanwhile, so that no client meets a full
pipe. The server's own process gets no signal. One that could not be signalled keeps its timers and is tried again.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal as signals
import stat
import time
from collections.abc import Callable, Sequence

from holdfast import escape
from holdfast.errors import UserError
from holdfast.hangs import stacks
from holdfast.loop import Wakeup
from holdfast.signals import signal_name
from holdfast.timer import api, debug_info_logging, pipe, processes
from holdfast.timer.pipe import FileTimerRequest

logger = logging.getLogger(__name__)

# Long enough for a server that is being replaced, short enough not to hold up a worker whose server is gone.
_CLIENT_PAUSES_S = (0.02, 0.04, 0.08, None)
_PASSING_ERRORS = (errno.ENOENT, errno.ENXIO, errno.EAGAIN, errno.EPIPE)
# The kernel's own texts for these are misleading here: "no such device", "resource temporarily unavailable".
_REASONS = {errno.ENXIO: "the pipe has no reader", errno.EAGAIN: "the pipe stays full"}
_STOP_TIMEOUT_S = 5.0
# A little more than a dump gives itself, so that its own explanation arrives if it takes too long.
_DUMPS_TIMEOUT_S = stacks.DUMP_TIMEOUT_S + 0.5


class FileTimerClient(api.TimerClient):
    """Sends requests for the calling process. `signal` is what the server sends to this process if it overruns; zero
    or less means: only report it."""

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        if signal >= signals.NSIG:
            raise UserError(f"there is no signal {signal}")
        self._file_path = os.fspath(file_path)
        self._signal = int(signal)

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, pipe.checked_time(expiration_time), self._signal))

    def release(self, scope_id: str) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, -1))

    def _send(self, request: FileTimerRequest) -> None:
        line = pipe.encode(request)
        # If no server took the last request, this one does not wait for a server again.
        for pause_s in (None,) if self.is_unserved else _CLIENT_PAUSES_S:
            try:
                _write(self._file_path, line)
                self.is_unserved = False
                return
            except OSError as error:
                if pause_s is None or error.errno not in _PASSING_ERRORS:
                    self.is_unserved = True
                    why = _REASONS.get(error.errno or 0) or error.strerror or str(error)
                    raise BrokenPipeError(errno.EPIPE, f"no timer server takes requests ({why})", self._file_path)
            time.sleep(pause_s)


def _write(path: str, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a named pipe")
        os.write(fd, line)
    finally:
        os.close(fd)


def verdict(timers: Sequence[FileTimerRequest]) -> tuple[Sequence[FileTimerRequest], FileTimerRequest | None]:
    """Of one process's expired timers, earliest first: those to report, and the one whose signal it gets."""
    for position, timer in enumerate(timers):
        if timer.signal > 0:
            return timers[: position + 1], timer
    return timers, None


class FileTimerServer(processes.ProcessTimers[FileTimerRequest], api.Watchdog):
    """Signals the processes that overrun a timer. Calls `log_event(name, request)` for "watchdog started", "watchdog
    stopped", "timer expired" and "kill worker process". `dump_stacks(pid)` returns text for the log (from py-spy)."""

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
        *,
        dump_stacks: Callable[[int], str] | None = None,
    ) -> None:
        processes.ProcessTimers.__init__(self, dump_stacks)
        api.Watchdog.__init__(self, max_interval, daemon)
        self._run_id = run_id
        self._log_event = log_event or (lambda name, request: None)
        self._is_stopping = False  # Unlike `_is_ending`, this ends dumps of stacks, too.
        self._is_closed = False
        self._turn_ended_s = time.monotonic()
        self._pipe = pipe.RequestPipe(os.fspath(file_path))
        self._wakeup = Wakeup()
        self._poll = select.poll()
        for fd in (self._wakeup.fileno(), self._pipe.fileno()):
            self._poll.register(fd, select.POLLIN)

    def start(self) -> None:
        super().start()
        self._tell("watchdog started", None)

    def stop(self) -> None:
        """End the thread at once and remove the pipe; the server cannot be started again."""
        self._is_stopping = True
        has_ended = self._end_thread(_STOP_TIMEOUT_S)
        if self._is_closed:
            return
        self._is_closed = True
        self._pipe.remove()
        if has_ended:  # A thread that is stuck in a listener keeps its descriptors until it is done with them.
            self._pipe.close()
            self._wakeup.close()
        self._tell("watchdog stopped", None)

    def run_once(self) -> None:
        """Let the thread finish its turn, if there is one, then take what is in the pipe, do one more, and stop."""
        self._end_thread(None)
        if not self._is_closed:
            self._turn()
        self.stop()

    def get_last_progress_time(self) -> int:
        """When the last turn ended, in whole seconds since the epoch; now, if there is no thread to take turns."""
        idle_s = 0.0 if self._watchdog_thread is None else time.monotonic() - self._turn_ended_s
        return int(time.time() - idle_s)

    def _wake(self) -> None:
        self._wakeup.wake()

    def _run_watchdog(self) -> None:
        self._wait_until(time.monotonic() + self._wait_s())
        if not self._is_ending.is_set():
            self._turn()

    def _wait_until(self, until_s: float) -> None:
        self._poll.poll(max(0.0, until_s - time.monotonic()) * 1000)
        self._wakeup.clear()

    def _turn(self) -> None:
        self.register_timers(self._pipe.read())
        expired = self._timers.expired(time.monotonic())
        as_json = {pid: [timer.to_json() for timer in timers] for pid, timers in expired.items()}
        debug_info_logging.log_debug_info_for_expired_timers(self._run_id, as_json)
        self.clear_timers(self._reap_expired(expired))
        self._turn_ended_s = time.monotonic()

    def _reap_expired(self, expired: dict[int, list[FileTimerRequest]]) -> set[int]:
        """Handle every process that has overrun. Returns those whose timers can be forgotten."""
        condemned = {pid: fatal for pid, timers in expired.items() if (fatal := self._examine(pid, timers)) is not None}
        self._log_stacks([pid for pid in condemned if pid not in self._unreaped])
        if self._is_stopping:
            return expired.keys() - condemned.keys()
        self._unreaped = {pid for pid, timer in condemned.items() if not self._is_ended(pid, timer)}
        return expired.keys() - self._unreaped

    def _examine(self, pid: int, timers: list[FileTimerRequest]) -> FileTimerRequest | None:
        """Report the timers that a process has overrun. Returns the timer whose signal to send, if any."""
        reported, fatal = verdict(timers)
        if not self._is_same_process(pid):
            return None
        if pid in self._unreaped:
            return fatal
        scopes = ", ".join(timer.scope_id for timer in timers)
        for timer in reported:
            self._tell("timer expired", timer)
        if fatal is None:
            logger.info("process %d has overrun %s; no signal was asked for, so it is only reported", pid, scopes)
            return None
        if processes.is_own(pid):
            logger.error("process %d has overrun %s, but it is the watchdog's own and gets no signal", pid, scopes)
            return None
        logger.warning("process %d has overrun %s and will get %s", pid, scopes, signal_name(fatal.signal))
        return fatal

    def _log_stacks(self, pids: list[int]) -> None:
        """Log the stacks of these processes. Requests are read meanwhile; `stop` ends it."""
        if not pids:
            return
        dumps = stacks.Dumps(pids, self._stacks_of, self._wakeup.wake)
        until_s = time.monotonic() + _DUMPS_TIMEOUT_S
        while not dumps.are_complete() and not self._is_stopping and time.monotonic() < until_s:
            self._wait_until(until_s)
            self.register_timers(self._pipe.read())
            self._turn_ended_s = time.monotonic()
        for text in filter(None, dumps.finish(stacks.late_text).values()):
            logger.warning("%s", text, extra=escape.HAS_LINES)

    def _is_ended(self, pid: int, timer: FileTimerRequest) -> bool:
        """Signal a process, which may have ended while its stacks were taken."""
        if not self._is_same_process(pid):
            return True
        is_signalled = self._is_signalled(pid, timer.signal)
        if is_signalled:
            self._tell("kill worker process", timer)
        return is_signalled

    def _tell(self, name: str, request: FileTimerRequest | None) -> None:
        """An error in the listener does not end the watch."""
        try:
            self._log_event(name, request)
        except Exception:
            logger.exception("the listener for timer events failed at %r", name)
