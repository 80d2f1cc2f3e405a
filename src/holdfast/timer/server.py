"""The server's end of timers: which timers are armed, and the end of the workers that overrun them.

Deadlines. A request names its deadline in seconds since the epoch. A wall clock is set now and then, and a step of it
must neither fire a timer nor delay one. So a deadline is converted once, when its request arrives, and from then on
only the monotonic clock counts.

Processes. The kernel reuses pids. A pid together with its start time names one process for as long as the host is up,
so an armed timer keeps both. A process that reuses a pid is never signalled, nor is a group of processes, nor the
server's own process.

Stacks. They are taken before the signal: afterwards there are none. But a process gets its signal as soon as its own
stacks are there, and after `STACKS_TIMEOUT_S` in any case. They are logged after the signals, which therefore wait for
no reader of the log. A timer that expires while stacks are taken has to wait for them first, so the bound between a
deadline and the signal is twice that time.

The pipe. It is opened for reading and writing and without blocking. So opening never waits for a client, and the pipe
never ends because the last client has closed it. A path is only taken if nothing is there, or a pipe of the same user
that has no reader any more. Other programs may write anything to the pipe, so each line is checked alone, and an
unfinished one is kept only up to a bound.
"""

from __future__ import annotations

import abc
import errno
import fcntl
import io
import math
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from multiprocessing import connection, queues
from queue import Empty
from select import PIPE_BUF
from typing import Annotated, Any, Literal

import msgspec

from holdfast import escape, procfs
from holdfast.errors import HostError, UserError
from holdfast.frozen import frozen
from holdfast.hangs import compare, stacks
from holdfast.hangs.compare import Look
from holdfast.log import Logger
from holdfast.loop import Wakeup
from holdfast.signals import signal_name
from holdfast.timer import debug_info_logging
from holdfast.timer.client import FileTimerRequest, TimerRequest

logger = Logger(__name__)

# Turns begin at least this far apart: registering a timer is not urgent, and each turn costs CPU time.
_TURN_GAP_S = 0.005
# The pause before the next turn, after one that failed.
_RETRY_DELAY_S = 0.1
_STOP_MARGIN_S = 5.0  # `stop` may take this much longer than the longest wait for requests.
# How long the signal may wait for stacks. py-spy needs about 20 ms on a calm machine.
STACKS_TIMEOUT_S = 0.5
# A queue without a pipe to wait for (a manager's proxy) is looked at this often.
_PLAIN_LOOK_S = 0.1
# The largest buffer that the kernel gives to every user. Clients do not wait for room in a full one for long.
_BUFFER_BYTES = 1 << 20


class RequestQueue(abc.ABC):
    """Where a server takes requests from."""

    @abc.abstractmethod
    def size(self) -> int:
        """About how many requests are waiting."""

    @abc.abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests; waits `timeout` seconds at most for them to come."""


class TimerServer(abc.ABC):
    """A thread that takes turns until it is stopped: it waits for requests, for `max_interval` at most, and reaps the
    workers whose deadlines have passed. The subclass defines what a worker is and how to reap it."""

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        if not 0 < max_interval < threading.TIMEOUT_MAX:
            raise UserError(f"max_interval must be a positive number of seconds, not {max_interval!r}")
        self._request_queue, self._max_interval, self._daemon = request_queue, max_interval, daemon
        self._watchdog_thread: threading.Thread | None = None
        self._is_ending = threading.Event()
        self._wakeup = Wakeup()

    @abc.abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Arm and release timers as the requests say, in their order."""

    @abc.abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget every timer of these workers. Called once a turn, often with an empty set."""

    @abc.abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """By worker, the timers whose expiration time is not after `deadline`."""

    @abc.abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End a worker. If it returns False, the server tries again at its next turn."""

    def start(self) -> None:
        """A second call has no effect while the server runs."""
        if self._is_ending.is_set():
            raise UserError("this timer server has already been stopped; make a new one")
        if self._watchdog_thread is not None:
            return
        self._watchdog_thread = threading.Thread(target=self._watchdog_loop, name="holdfast-timer", daemon=self._daemon)
        try:
            self._watchdog_thread.start()
        except RuntimeError as error:  # A process at its limit.
            self._watchdog_thread = None
            self.stop()
            raise HostError(f"the timer server has no thread: {error}") from None

    def stop(self) -> None:
        """Let the thread finish its turn and wait for it; the server cannot be started again."""
        self._end_thread(self._max_interval + _STOP_MARGIN_S)

    def _end_thread(self, timeout_s: float | None) -> None:
        """Wait for the thread, unless this is that thread, and forget it if it has ended."""
        self._is_ending.set()
        self._wakeup.wake()
        thread = self._watchdog_thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout_s)
        if thread.is_alive():
            logger.warning("the timer server's thread has not ended in %s s and goes on in the background", timeout_s)
        else:
            self._watchdog_thread = None

    def _watchdog_loop(self) -> None:
        while not self._is_ending.is_set():
            begun_s = time.monotonic()
            try:
                self._run_watchdog()
                pause_s = min(_TURN_GAP_S, self._max_interval)
            except Exception:
                logger.exception("a turn of the timer server failed; it goes on")
                pause_s = _RETRY_DELAY_S
            self._is_ending.wait(max(0.0, begun_s + pause_s - time.monotonic()))

    def _run_watchdog(self) -> None:
        """One turn."""
        self.register_timers(self._request_queue.get(max(1, self._request_queue.size()), self._max_interval))
        expired = {} if self._is_ending.is_set() else self.get_expired_timers(time.time())
        self.clear_timers({worker_id for worker_id in expired if self._is_reaped(worker_id)})

    def _is_reaped(self, worker_id: Any) -> bool:
        """A reaper that raises would raise again at every turn, so its worker is not given to it twice."""
        logger.warning("worker %s has overrun its timers and is reaped", worker_id)
        try:
            if self._reap_worker(worker_id):
                return True
        except Exception:
            logger.exception("reaping worker %s failed", worker_id)
            return True
        logger.error("worker %s could not be reaped; it will be tried again at the next turn", worker_id)
        return False


@frozen
class _Armed:
    """An armed timer. `started` is when its process had started, which tells it from a later one with the same pid."""

    pid: int
    started: int | None
    deadline_s: float
    signal: int
    request: Any


class ProcessTimerServer(TimerServer):
    """Signals the processes that overrun a timer, and logs their stacks. A turn ends at the earliest deadline. If
    `source` is not None, its descriptor can be read when there are requests."""

    def __init__(self, request_queue: RequestQueue, source: Any, max_interval: float, daemon: bool) -> None:
        super().__init__(request_queue, max_interval, daemon)
        self._source = source
        self._timers: dict[tuple[int, str], _Armed] = {}  # By pid and scope.
        self._fatal: dict[int, _Armed] = {}  # By pid, the timer whose signal to send at this turn.
        self._log_event: Callable[[str, Any], None] = lambda name, request: None
        self._request_count = 0
        self._turn_ended_s = time.monotonic()

    def register_timers(self, timer_requests: list[Any]) -> None:
        """Arm and release timers as the requests say, in their order."""
        wall_s = time.time()
        now_s = time.monotonic()  # Read later, so that a pause between the two delays a timer rather than fires it.
        started_of = cache(start_time)
        for request in timer_requests:
            if not _is_request(request):
                logger.warning("skipped %.80r, which is not a timer request", request)
                continue
            self._request_count += 1
            pid, scope = request.worker_id, request.scope_id
            if request.expiration_time < 0:
                self._timers.pop((pid, scope), None)
                continue
            deadline_s = now_s + (request.expiration_time - wall_s)
            sent = getattr(request, "signal", signal.SIGKILL)
            self._timers[pid, scope] = _Armed(pid, started_of(pid), deadline_s, sent, request)

    def clear_timers(self, worker_ids: set[int]) -> None:
        """Forget the timers of these processes and of all that have ended."""
        is_alive = cache(self._is_alive)
        kept = [timer for timer in self._timers.values() if timer.pid not in worker_ids]
        self._timers = {(each.pid, each.request.scope_id): each for each in kept if is_alive(each.pid, each.started)}

    def get_expired_timers(self, deadline: float) -> dict[int, list[Any]]:
        """By pid, the timers whose expiration time is not after `deadline`, earliest first."""
        by_pid = self._by_pid(lambda timer: timer.request.expiration_time <= deadline)
        return {pid: [timer.request for timer in timers] for pid, timers in by_pid.items()}

    def _by_pid(self, is_due: Callable[[_Armed], bool]) -> dict[int, list[_Armed]]:
        by_pid: dict[int, list[_Armed]] = {}
        for timer in sorted(filter(is_due, self._timers.values()), key=lambda timer: timer.deadline_s):
            by_pid.setdefault(timer.pid, []).append(timer)
        return by_pid

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether there is such a process. A zombie does not count."""
        return pid > 0 and start_time(pid) is not None

    def _is_alive(self, pid: int, started: int | None) -> bool:
        """Whether the process that started at that time still runs."""
        return self.is_process_running(pid) and start_time(pid) == started

    def _run_watchdog(self) -> None:
        """One turn: wait until there is something to do, then do it."""
        deadline_s = min((timer.deadline_s for timer in self._timers.values()), default=math.inf)
        timeout_s = min(self._max_interval, max(0.0, deadline_s - time.monotonic()))
        fds = [self._wakeup.fileno(), *([] if self._source is None else [self._source.fileno()])]
        connection.wait(fds, timeout_s if self._source is not None else min(timeout_s, _PLAIN_LOOK_S))
        self._wakeup.clear()
        self._take_requests()
        if not self._is_ending.is_set():
            self._reap_expired()

    def _take_requests(self) -> None:
        # The size of a queue may be too high for good: a client that dies before it has sent a request leaves it so.
        self.register_timers(self._request_queue.get(max(1, self._request_queue.size()), 0.0))

    def _reap_expired(self) -> None:
        now_s = time.monotonic()
        expired = self._by_pid(lambda timer: timer.deadline_s <= now_s and self._is_alive(timer.pid, timer.started))
        self._report(expired)
        found = {pid: self._examine(pid, timers) for pid, timers in expired.items()}
        self._fatal = {pid: timer for pid, timer in found.items() if timer is not None}
        looks, limit_s = [], STACKS_TIMEOUT_S
        for pid, look in stacks.dump_all(self._fatal, partial(stacks.look_at, timeout_s=limit_s), limit_s):
            self._reap_worker(pid)
            looks.append(look if isinstance(look, Look) else Look(pid, trouble=str(look)))
        for each in looks:
            logger.warning("%s", "\n".join(compare.process_lines(each)), extra=escape.HAS_LINES)
        self.clear_timers(set(expired))
        self._turn_ended_s = time.monotonic()

    def _report(self, expired: dict[int, list[_Armed]]) -> None:
        """For a subclass: what has run out at this turn."""

    def _examine(self, pid: int, timers: list[_Armed]) -> _Armed | None:
        """Report the timers of a process up to the first one that has a signal, and return that one."""
        scopes = ", ".join(timer.request.scope_id for timer in timers)
        for timer in timers:
            self._tell("timer expired", timer.request)
            if timer.signal > 0:
                break
        else:
            logger.info("process %d has overrun %s; no signal was asked for, so it is only reported", pid, scopes)
            return None
        if pid == os.getpid() or os.path.exists(f"/proc/self/task/{pid}"):  # The kernel accepts ids of threads, too.
            logger.error("process %d has overrun %s, but it is the watchdog's own and gets no signal", pid, scopes)
            return None
        logger.warning("process %d has overrun %s and will get %s", pid, scopes, signal_name(timer.signal))
        return timer

    def _reap_worker(self, worker_id: int) -> bool:
        """Signal a process, which may have ended while its stacks were taken."""
        timer = self._fatal[worker_id]
        if worker_id <= 0 or not self._is_alive(worker_id, timer.started):
            return True  # To the kernel, 0 and less are groups of processes.
        try:
            os.kill(worker_id, timer.signal)
        except ProcessLookupError:
            logger.info("process %d is already gone", worker_id)
        except OSError as error:
            logger.error("cannot signal process %d: %s", worker_id, error)
            return False
        self._tell("kill worker process", timer.request)
        return True

    def _tell(self, name: str, request: Any) -> None:
        """An error in the listener does not end the watch."""
        try:
            self._log_event(name, request)
        except Exception:
            logger.exception("the listener for timer events failed at %r", name)


def _is_request(candidate: Any) -> bool:
    """Whether it has the fields of a request; other libraries use the same three names."""
    pid, scope, end = (getattr(candidate, name, None) for name in ("worker_id", "scope_id", "expiration_time"))
    return type(pid) is int and isinstance(scope, str) and isinstance(end, int | float) and not math.isnan(end)


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it does not run."""
    status = procfs.process_status(pid)
    return None if status is None or status.state in "ZX" else status.start_time


class MultiprocessingRequestQueue(RequestQueue):
    """A multiprocessing queue as a source of requests."""

    def __init__(self, mp_queue: queues.Queue[TimerRequest]) -> None:
        self._mp_queue = mp_queue

    def size(self) -> int:
        return self._mp_queue.qsize()

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        until_s = time.monotonic() + timeout
        requests: list[TimerRequest] = []
        for _ in range(size):
            try:
                requests.append(self._mp_queue.get(timeout=max(0.0, until_s - time.monotonic())))
            except Empty:
                break
            except Exception as error:
                # An item that cannot be unpickled has left the queue; the others still count.
                logger.warning("skipped a timer request that cannot be read: %s", error)
        return requests


class LocalTimerServer(ProcessTimerServer):
    """Kills the processes that overrun a timer. For workers that have the queue from the process that watches them."""

    def __init__(self, mp_queue: queues.Queue[TimerRequest], max_interval: float = 60, daemon: bool = True) -> None:
        reader = getattr(mp_queue, "_reader", None)
        super().__init__(MultiprocessingRequestQueue(mp_queue), reader, max_interval, daemon)


class _Line(msgspec.Struct):
    """What a client writes to the pipe."""

    version: Literal[1]
    pid: Annotated[int, msgspec.Meta(gt=-(2**31), lt=2**31)]
    scope_id: str
    expiration_time: float
    signal: Annotated[int, msgspec.Meta(lt=signal.NSIG)]


_decode = msgspec.json.Decoder(_Line).decode


class RequestPipe(RequestQueue):
    """The server's end of a named pipe."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = io.FileIO(_make_pipe(path))
        self._rest = b""
        self._has_met_junk = False

    def fileno(self) -> int:
        return self._file.fileno()

    def size(self) -> int:
        return 1  # A pipe does not tell.

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """All requests that are in the pipe now. Of a line that is too long, which is junk, only the end is kept."""
        *lines, rest = (self._rest + (self._file.read(_BUFFER_BYTES) or b"")).split(b"\n")
        self._rest = rest[-PIPE_BUF:]
        requests: list[TimerRequest] = []
        for line in filter(None, lines):
            try:
                found = _decode(line)
                requests.append(FileTimerRequest(found.pid, found.scope_id, found.expiration_time, found.signal))
            except (ValueError, RecursionError) as error:
                if not self._has_met_junk:
                    logger.warning("skipped a line in %s that is not a request: %r: %s", self.path, line[:80], error)
                self._has_met_junk = True
        return requests

    def remove(self) -> None:
        """Remove the pipe, unless the path leads to another one by now."""
        with suppress(OSError):
            if os.path.samestat(os.lstat(self.path), os.fstat(self.fileno())):
                os.unlink(self.path)

    def close(self) -> None:
        self._file.close()


def _make_pipe(path: str) -> int:
    try:
        if os.path.lexists(path):
            _check_is_stale(path)
            os.unlink(path)
        os.mkfifo(path, 0o600)
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise HostError(f"the timer pipe {path} cannot be made: {error.strerror}")
    with suppress(OSError):  # If the user's limit for pipe buffers is used up, the pipe keeps the default size.
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _BUFFER_BYTES)
    return fd


def _check_is_stale(path: str) -> None:
    """Only a pipe of this user that has no reader may be removed."""
    found = os.lstat(path)
    if not stat.S_ISFIFO(found.st_mode):
        raise UserError(f"the timer file {path} exists and is not a named pipe; it is left alone")
    if found.st_uid != os.geteuid():
        raise UserError(f"the timer pipe {path} belongs to user {found.st_uid}; it is left alone")
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ENXIO:  # It has no reader.
            return
        raise
    raise UserError(f"the timer pipe {path} is in use by another timer server")


class FileTimerServer(ProcessTimerServer):
    """Signals the processes that overrun a timer. For any process of the host that knows the pipe's path. Calls
    `log_event(name, request)` for "watchdog started", "watchdog stopped", "timer expired" and "kill worker process"."""

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        self._run_id = run_id
        self._is_closed = False
        self._pipe = RequestPipe(os.fspath(file_path))
        super().__init__(self._pipe, self._pipe, max_interval, daemon)
        self._log_event = log_event or self._log_event

    def start(self) -> None:
        super().start()
        self._tell("watchdog started", None)

    def stop(self) -> None:
        """End the thread at once and remove the pipe; the server cannot be started again."""
        super().stop()
        if not self._is_closed:
            self._is_closed = True
            self._pipe.remove()
            self._tell("watchdog stopped", None)
        if self._watchdog_thread is None:  # One that is stuck in a listener keeps the descriptors until it is done.
            self._pipe.close()
            self._wakeup.close()

    def clear_timers(self, worker_pids: set[int]) -> None:  # The argument has the name that users know.
        super().clear_timers(worker_pids)

    def run_once(self) -> None:
        """Let the thread finish its turn, if there is one, then take what is in the pipe, do one more, and stop."""
        self._end_thread(None)
        if not self._is_closed:
            self._take_requests()
            self._reap_expired()
        self.stop()

    def get_last_progress_time(self) -> int:
        """When the last turn ended, in whole seconds since the epoch; now, if there is no thread to take turns."""
        idle_s = 0.0 if self._watchdog_thread is None else time.monotonic() - self._turn_ended_s
        return int(time.time() - idle_s)

    def _report(self, expired: dict[int, list[_Armed]]) -> None:
        as_json = {pid: [timer.request.to_json() for timer in timers] for pid, timers in expired.items()}
        debug_info_logging.log_debug_info_for_expired_timers(self._run_id, as_json)
