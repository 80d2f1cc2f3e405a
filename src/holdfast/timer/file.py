"""Timers over a named pipe: for any process of the host that is told the pipe's path.

The server is one thread with one `poll`: on the pipe, on a bell, and until the earliest deadline. A turn takes all
requests that have come, reaps the processes that have a timer run out, and forgets those that are gone. Before a
process is signalled its stacks are logged; while they are taken, which may last seconds, requests are still read,
so that no client meets a full pipe.

What is never done: signalling the server's own process, a process that merely inherited a pid, or a group of
processes. A process that could not be signalled keeps its timers and is tried again.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal as signals
import stat
import threading
import time
from collections.abc import Callable, Sequence

from holdfast.errors import UserError
from holdfast.hangs import stacks
from holdfast.loop import Wakeup
from holdfast.timer import debug_info_logging, liveness, wire
from holdfast.timer.api import RETRY_DELAY_S, TURN_GAP_S, TimerClient, check_interval, join_or_warn, wait_s
from holdfast.timer.clock import WallClock
from holdfast.timer.fifo import RequestPipe
from holdfast.timer.table import TimerTable
from holdfast.timer.wire import FileTimerRequest

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

logger = logging.getLogger(__name__)

# A server that is just being replaced is back at once; one that is gone is not worth holding up a worker for.
_CLIENT_PAUSES_S = (0.02, 0.04, 0.08, None)
_PASSING_ERRORS = (errno.ENOENT, errno.ENXIO, errno.EAGAIN, errno.EPIPE)
_STOP_TIMEOUT_S = 5.0
# A little more than a dump gives itself, so that its own explanation arrives if it takes too long.
_DUMPS_TIMEOUT_S = stacks.DUMP_TIMEOUT_S + 0.5


class FileTimerClient(TimerClient):
    """Sends requests in the name of the process that it is used in.

    `signal` is what the server shall send to this process if it overruns; zero or less: only report it.
    """

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        if signal >= signals.NSIG:
            raise UserError(f"there is no signal {signal}")
        self._file_path = os.fspath(file_path)
        self._signal = int(signal)
        self._is_unserved = False  # No server took the last request, so the next one does not wait for it again.

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        deadline = wire.checked_time(expiration_time)
        self._send(FileTimerRequest(os.getpid(), scope_id, deadline, self._signal))

    def release(self, scope_id: str) -> None:
        self._send(FileTimerRequest(os.getpid(), scope_id, -1))

    def _send(self, request: FileTimerRequest) -> None:
        line = wire.encode(request)
        for pause_s in _CLIENT_PAUSES_S[-1:] if self._is_unserved else _CLIENT_PAUSES_S:
            try:
                _write(self._file_path, line)
                self._is_unserved = False
                return
            except OSError as error:
                if pause_s is None or error.errno not in _PASSING_ERRORS:
                    self._is_unserved = True
                    text = f"no timer server takes requests ({_why(error)})"
                    raise BrokenPipeError(errno.EPIPE, text, self._file_path)
            time.sleep(pause_s)


def _write(path: str, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a named pipe")
        os.write(fd, line)
    finally:
        os.close(fd)


def _why(error: OSError) -> str:
    """The kernel's words for the usual cases are about devices and resources."""
    ours = {errno.ENXIO: "nobody reads from the pipe", errno.EAGAIN: "the pipe stays full"}
    return ours.get(error.errno or 0) or error.strerror or str(error)


def verdict(timers: Sequence[FileTimerRequest]) -> tuple[Sequence[FileTimerRequest], FileTimerRequest | None]:
    """Of one process's expired timers, earliest first: those to report, and the one whose signal it gets."""
    for position, timer in enumerate(timers):
        if timer.signal > 0:
            return timers[: position + 1], timer
    return timers, None


class FileTimerServer:
    """Signals the processes that overrun a timer.

    `log_event(name, request)` is told: "watchdog started", "watchdog stopped", "timer expired" and
    "kill worker process". `dump_stacks` is given a pid and answers with text for the log; by default py-spy is asked.
    """

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
        check_interval(max_interval)
        self._run_id = run_id
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event
        self._dump_stacks = dump_stacks or stacks.dump_with_py_spy
        self._clock = WallClock()
        self._timers: TimerTable[FileTimerRequest] = TimerTable()
        self._unkilled: set[int] = set()
        self._request_count = 0
        self._is_ending = False
        self._stop_signaled = False
        self._is_closed = False
        self._watchdog_thread: threading.Thread | None = None
        self._turn_ended_s = time.monotonic()
        self._pipe = RequestPipe(os.fspath(file_path))
        self._wakeup = Wakeup()
        self._bell_poll = _poll_for(self._wakeup.fileno())
        self._poll = _poll_for(self._wakeup.fileno(), self._pipe.fileno())

    def start(self) -> None:
        if self._is_ending:
            raise UserError("this timer server has been stopped; make a new one")
        if self._watchdog_thread is not None:
            raise UserError("this timer server has already been started")
        logger.debug(
            "starting %s on %s, max interval %s s, daemon %s",
            type(self).__name__, self._pipe.path, self._max_interval, self._daemon,
        )  # fmt: skip
        thread = threading.Thread(target=self._watchdog_loop, name="holdfast-file-timer", daemon=self._daemon)
        self._watchdog_thread = thread
        thread.start()
        self._tell("watchdog started", None)

    def stop(self) -> None:
        """End the thread at once and remove the pipe; the server cannot be started again."""
        self._stop_signaled = True
        has_ended = self._end_thread(_STOP_TIMEOUT_S)
        self._close(has_ended)

    def run_once(self) -> None:
        """Let the thread finish its turn, if there is one, then take what is in the pipe, do one more, and stop."""
        self._end_thread(None)
        if not self._is_closed:
            self._turn()
        self.stop()

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Arm and release timers as the requests say, in their order."""
        distance_s = self._clock.distance_s()
        started: dict[int, int | None] = {}
        for request in timer_requests:
            pid, scope = request.worker_pid, request.scope_id
            self._request_count += 1
            if request.expiration_time < 0:
                self._timers.release(pid, scope)
                continue
            if pid not in started:
                started[pid] = liveness.start_time(pid)
            self._timers.register(pid, scope, request.expiration_time - distance_s, request, started[pid])

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Forget the timers of these processes and of all that have gone away."""
        for pid in self._timers.pids():
            if pid in worker_pids or not self._is_same_process(pid):
                self._timers.forget(pid)
        self._unkilled.intersection_update(self._timers.pids())

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """By pid, the timers whose expiration time is not after `deadline`, earliest first."""
        return self._timers.expired(self._clock.to_monotonic(deadline))

    @staticmethod
    def is_process_running(pid: int) -> bool:
        return liveness.is_running(pid)

    def get_last_progress_time(self) -> int:
        """When the last turn ended, in whole seconds since the epoch; now, if there is no thread to take turns."""
        if self._watchdog_thread is None:
            return int(time.time())
        return int(time.time() - (time.monotonic() - self._turn_ended_s))

    def _watchdog_loop(self) -> None:
        while not self._is_ending:
            try:
                self._run_watchdog()
            except Exception:
                logger.exception("a turn of the timer server failed; it goes on")
                self._bell_poll.poll(RETRY_DELAY_S * 1000)

    def _run_watchdog(self) -> None:
        """Wait until there is something to do, then do it."""
        now_s = time.monotonic()
        floor_s = RETRY_DELAY_S if self._unkilled else 0.0
        self._wait_until(now_s + wait_s(self._timers.next_deadline(), now_s, self._max_interval, floor_s))
        if not self._is_ending:
            self._turn()

    def _turn(self) -> None:
        self.register_timers(self._pipe.read())
        expired = self._timers.expired(time.monotonic())
        debug_info_logging.log_debug_info_for_expired_timers(
            self._run_id, {pid: [timer.to_json() for timer in timers] for pid, timers in expired.items()}
        )
        self.clear_timers(self._reap_expired(expired))
        self._turn_ended_s = time.monotonic()

    def _wait_until(self, until_s: float) -> None:
        """Wait for a request, the bell or a time; but let requests gather for a moment after the last turn."""
        gathered_s = min(until_s, self._turn_ended_s + TURN_GAP_S)
        if not self._bell_poll.poll(_ms_until(gathered_s)):
            self._poll.poll(_ms_until(until_s))
        self._wakeup.hush()

    def _reap_expired(self, expired: dict[int, list[FileTimerRequest]]) -> set[int]:
        """Deal with every process that has overrun. Those whose timers have served their purpose."""
        condemned = {}
        for pid, timers in expired.items():
            fatal = self._examine(pid, timers)
            if fatal is not None:
                condemned[pid] = fatal
        self._log_stacks([pid for pid in condemned if pid not in self._unkilled])
        if self._stop_signaled:
            return expired.keys() - condemned.keys()
        self._unkilled = {pid for pid, timer in condemned.items() if not self._is_ended(pid, timer)}
        return expired.keys() - self._unkilled

    def _examine(self, pid: int, timers: list[FileTimerRequest]) -> FileTimerRequest | None:
        """Report what a process has overrun. The timer whose signal it shall get, if any."""
        reported, fatal = verdict(timers)
        if not self._is_same_process(pid):
            logger.debug("process %d is gone and with it its timers", pid)
            return None
        if pid in self._unkilled:
            return fatal
        scopes = ", ".join(timer.scope_id for timer in timers)
        for timer in reported:
            self._tell("timer expired", timer)
        if fatal is None:
            logger.info("process %d has overrun %s; no signal was asked for, so it is only reported", pid, scopes)
            return None
        if liveness.is_own(pid):
            logger.error("process %d has overrun %s, but it is the watchdog's own and gets no signal", pid, scopes)
            return None
        logger.warning("process %d has overrun %s and will get %s", pid, scopes, _signal_name(fatal.signal))
        return fatal

    def _log_stacks(self, pids: list[int]) -> None:
        """Log where these processes are. Requests are read meanwhile; a call to stop ends it."""
        if not pids:
            return
        dumps = stacks.Dumps(pids, lambda pid: stacks.text_for(pid, self._dump_stacks), self._wakeup.ring)
        until_s = time.monotonic() + _DUMPS_TIMEOUT_S
        while not dumps.are_complete() and not self._stop_signaled and time.monotonic() < until_s:
            self._wait_until(until_s)
            self.register_timers(self._pipe.read())
            self._turn_ended_s = time.monotonic()
        for text in filter(None, dumps.finish(stacks.late_text).values()):
            logger.warning("%s", text)

    def _is_ended(self, pid: int, timer: FileTimerRequest) -> bool:
        """Signal a process, which may have gone while its stacks were taken."""
        if not self._is_same_process(pid):
            return True
        if not self._reap_worker(pid, timer.signal):
            return False
        self._tell("kill worker process", timer)
        return True

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        """Send the signal. False means that it should be tried again."""
        try:
            liveness.send_signal(worker_pid, signal)
        except ProcessLookupError:
            logger.info("process %d is already gone", worker_pid)
        except OSError as error:
            level = logging.DEBUG if worker_pid in self._unkilled else logging.ERROR
            logger.log(level, "cannot send signal %d to process %d, will try again: %s", signal, worker_pid, error)
            return False
        return True

    def _is_same_process(self, pid: int) -> bool:
        return liveness.is_same_process(pid, self._timers.started(pid), self.is_process_running)

    def _tell(self, name: str, request: FileTimerRequest | None) -> None:
        """A listener's mistake is not allowed to end the watch."""
        if self._log_event is None:
            return
        try:
            self._log_event(name, request)
        except Exception:
            logger.exception("the listener for timer events failed at %r", name)

    def _end_thread(self, timeout_s: float | None) -> bool:
        self._is_ending = True
        self._wakeup.ring()
        thread, self._watchdog_thread = self._watchdog_thread, None
        return join_or_warn(thread, timeout_s)

    def _close(self, has_thread_ended: bool) -> None:
        """A thread that is stuck in a listener keeps its descriptors until it is done with them."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pipe.remove()
        if has_thread_ended:
            self._pipe.close()
            self._wakeup.close()
        logger.debug("stopped the timer server on %s", self._pipe.path)
        self._tell("watchdog stopped", None)


def _poll_for(*fds: int) -> select.poll:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll


def _ms_until(until_s: float) -> float:
    return max(0.0, until_s - time.monotonic()) * 1000


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
