"""The tee pump: one thread that copies what workers write to log files and to the console.

Every worker stream that is teed, filtered or remembered comes through a pipe (or a pty, see `terminal`).
Each piece that arrives goes, in this order, to

    the log file       exactly the worker's bytes, at once
    the tail           the last few KiB, for the failure report
    the filtered file  those lines that contain a needle
    the console        with a prefix: whole lines only (see `lines`); without one: the bytes as they come

Who may touch the streams: whoever holds the turn (a lock). The thread holds it all the time, except while it
is inside something that others can block for ever: a write to the console (Ctrl-S, a pipe that nobody reads)
and the warning callback. `close` must not wait for those:

    1. the thread gives up the turn and blocks in a write to the console
    2. `close` waits, sees no progress, takes the turn, declares the console dead and a new thread the owner
    3. the new owner copies what is left to the files and closes everything
    4. the old thread, should its write ever return, finds that it is not the owner and ends

(tests/unit/test_pump.py, test_close_returns_though_the_console_is_blocked.) Until `close`, a blocked console
holds everything up, the workers included, as it would without a pump; else memory would grow without bound.

The thread is a daemon, and a forked child simply has no such thread; the child must not touch the pump.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TextIO, TypeVar

from holdfast import stdio
from holdfast.errors import HostError, InternalError
from holdfast.process.output import terminal
from holdfast.process.output.lines import HeldLine, LineFilter, LinePrefixer, Tail

if TYPE_CHECKING:
    from holdfast.process.output.watch import StreamWatch

__all__ = ["Pump", "Stream", "Tail"]

# With its prefixes such a piece still fits into memory that malloc has at hand. From 128 KiB on it asks the kernel for
# every piece anew, and the page faults cost more than the system calls that larger pieces save.
_READ_BYTES = 64 * 1024

# The unfinished lines of all streams together: a line is held until its end comes.
_HELD_MAX_BYTES = 16 << 20

# A console write is cut here, at a line's end, so that a slow console still shows progress to `drain`.
_CONSOLE_WRITE_BYTES = 256 * 1024

# When it is closed the pump reads at most this much more from a stream, which is more than a channel holds. A
# process that was left behind and keeps writing therefore cannot keep `close` busy.
_LAST_READ_BYTES = 2 * terminal.PIPE_BYTES

# `close` gives the thread this long without progress, and this long in all, before it replaces it.
_CLOSE_PATIENCE_S = 1.0
_CLOSE_LIMIT_S = 5.0

# A console that has not taken a piece for this long blocks.
_HELD_UP_S = 1.0

# The warning callback takes a place among the console descriptors: it too may block.
_WARNINGS = -1

# Console errors that only say that nobody is there: the reader is gone, the terminal hung up.
_NOBODY_THERE = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO}

T = TypeVar("T")


@dataclass(slots=True)
class Stream:
    """One stream of one worker, and where its bytes go."""

    read_fd: int  # The pump owns it and closes it.
    label: str  # Names the stream in warnings: "rank 3 stdout".
    file_fd: int | None  # Already open; the pump owns it and closes it.
    console_fd: int | TextIO | None  # Never closed. An object that has taken the place of sys.stdout has no descriptor.
    prefix: bytes | None  # None: the console gets the bytes as they come.
    tail: Tail | None
    filters: tuple[bytes, ...] = ()
    filtered_fd: int | None = None  # May be shared between streams; the caller owns it.
    watch: StreamWatch | None = None  # Who wants to know that something came.


class _Replaced(BaseException):
    """Unwinds a thread that is not the pump's owner any more."""


class _Lane:
    """A stream on its way through the pump: the stream, what is held of it, and which outlets still work."""

    def __init__(self, stream: Stream) -> None:
        self.read_fd = stream.read_fd
        self.label = stream.label
        self.file_fd = stream.file_fd
        self.console_fd = stream.console_fd
        self.filtered_fd = stream.filtered_fd
        self.tail = stream.tail
        self.watch = stream.watch
        has_lines = stream.console_fd is not None and stream.prefix is not None
        self.prefixer = LinePrefixer(stream.prefix or b"") if has_lines else None
        has_filter = stream.filters and stream.filtered_fd is not None
        self.filter = LineFilter(stream.filters, stream.prefix or b"") if has_filter else None
        self.held = HeldLine() if has_lines or has_filter else None
        self.held_bytes = 0  # As the pump has counted it.
        self.is_split = False
        console_fd = stream.console_fd if isinstance(stream.console_fd, int) else None
        self.terminal = terminal.Follower(stream.read_fd, console_fd)
        self._strikes = 0

    def give_up_something(self) -> bool:
        """After an unexpected error: drop all but the file, then the file too. False if nothing is left."""
        self._strikes += 1
        self.console_fd = self.filtered_fd = self.prefixer = self.filter = self.held = self.tail = None
        if self._strikes > 1 and self.file_fd is not None:
            _close_quietly(self.file_fd)
            self.file_fd = None
        return self._strikes <= 2


class Pump:
    """Copies the streams given to it until they end. `warn` is called from the pump's thread."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._wake_fd, select.POLLIN)
        self._thread: threading.Thread | None = None
        self._moved_at = time.monotonic()

        # Touched only by whoever has the turn.
        self._turn = threading.Lock()
        self._lanes: dict[int, _Lane] = {}
        self._dead_outlets: set[int | TextIO] = set()
        self._held_bytes = 0
        self._busy_with: int | TextIO | None = None
        self._last_complaint = ""

        # Shared with callers, under the condition's lock.
        self._changed = threading.Condition()
        self._arriving: deque[_Lane] = deque()
        self._unended: set[_Lane] = set()
        self._is_closing = False
        self._is_closed = False

        self._closing = threading.Lock()

    def add(self, stream: Stream) -> None:
        """Take a stream over, descriptors included. If this raises, they are still the caller's."""
        with self._changed:
            if self._is_closing:
                raise InternalError(f"{stream.label} was added to a pump that is closed")
            os.set_blocking(stream.read_fd, False)
            lane = _Lane(stream)
            self._arriving.append(lane)
            self._unended.add(lane)
            self._wake()

    @property
    def is_held_up(self) -> bool:
        """Whether the console blocks, which holds all streams up. One that is merely busy takes each piece at once."""
        return self._busy_with is not None and time.monotonic() - self._moved_at >= _HELD_UP_S

    def start(self) -> None:
        if self._thread is None:
            self._start_thread()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all streams added so far have ended and are written out.

        False if nothing at all moved for `timeout_s`, or if the pump was closed before their end.
        """
        began = time.monotonic()
        with self._changed:
            awaited = set(self._unended)
            while awaited & self._unended:
                wait_s = max(began, self._moved_at) + timeout_s - time.monotonic()
                if wait_s <= 0 or self._is_closed:
                    return False
                self._changed.wait(wait_s)
        return True

    def close(self) -> None:
        """Write out what is held and what can be read right now, close the streams, end the thread.

        Takes a bounded time. A thread that hangs in a blocked console is left behind.
        """
        with self._closing:
            with self._changed:
                if self._is_closing:
                    return
                self._is_closing = True
            self.start()
            self._wake()
            thread_ended = self._await_thread()
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            if thread_ended:
                os.close(self._wake_fd)

    # What the callers' threads do.

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _start_thread(self) -> None:
        previous, thread = self._thread, threading.Thread(target=self._run, name="holdfast-pump", daemon=True)
        self._thread = thread
        try:
            thread.start()
        except RuntimeError as error:
            self._thread = previous
            raise HostError(f"no thread for the workers' output: {error}") from error

    def _await_thread(self) -> bool:
        """Wait for the thread to end, replacing it if it hangs: once for each outlet that may block."""
        for _ in range(4):
            if self._join_while_moving() or not self._replace_thread():
                break
        return self._thread is not None and not self._thread.is_alive()

    def _join_while_moving(self) -> bool:
        assert self._thread is not None
        began = time.monotonic()
        while self._thread.is_alive():
            patience_ends = max(began, self._moved_at) + _CLOSE_PATIENCE_S
            wait_s = min(patience_ends, began + _CLOSE_LIMIT_S) - time.monotonic()
            if wait_s <= 0:
                return False
            self._thread.join(wait_s)
        return True

    def _replace_thread(self) -> bool:
        """Give the hanging thread's place to a new one. False if it hangs in a file and keeps the turn."""
        if not self._turn.acquire(timeout=_CLOSE_PATIENCE_S):
            return False
        try:
            if self._busy_with is not None:
                self._dead_outlets.add(self._busy_with)
            self._start_thread()
        except HostError:
            return False
        finally:
            self._turn.release()
        return True

    # What the thread does, with the turn.

    def _run(self) -> None:
        # Python ignores these two from the start, but a user's program may have changed that. Blocked, they
        # leave the error codes EPIPE and EFBIG as they should.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE, signal.SIGXFSZ})
        try:
            with self._turn:
                self._copy_until_closed()
        except _Replaced:
            pass

    def _copy_until_closed(self) -> None:
        while True:
            # Looked at first: once it is set no stream is added, so those that arrive below are the last.
            is_closing = self._is_closing
            try:
                self._admit_arrivals()
                if is_closing:
                    self._finish()
                    return
                self._serve_ready_lanes()
            except Exception as error:
                # Not of one stream's making, so nothing can be dropped to cure it; perhaps memory was short.
                self._complain(f"copying the workers' output failed and is tried again: {_describe(error)}")
                if is_closing:
                    return
                time.sleep(0.1)

    def _admit_arrivals(self) -> None:
        while self._arriving:
            lane = self._arriving.popleft()
            self._lanes[lane.read_fd] = lane
            self._poller.register(lane.read_fd, select.POLLIN)

    def _serve_ready_lanes(self) -> None:
        for fd, _ in self._poller.poll():
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif lane := self._lanes.get(fd):
                self._guarded(lane, self._serve)

    def _finish(self) -> None:
        for lane in list(self._lanes.values()):
            self._guarded(lane, self._read_what_is_there)
            if lane.read_fd in self._lanes:
                self._guarded(lane, self._write_held)
                self._release(lane)

    def _guarded(self, lane: _Lane, action: Callable[[_Lane], object]) -> None:
        """Do something for one stream; an unexpected error costs that stream an outlet, and nobody else."""
        try:
            action(lane)
        except Exception as error:
            goes_on = lane.give_up_something()
            self._complain(f"{lane.label}: output is no longer complete: {_describe(error)}")
            if not goes_on:
                self._release(lane)

    def _serve(self, lane: _Lane) -> int:
        """Pass on what one read returns; the number of bytes."""
        try:
            data = os.read(lane.read_fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError as error:
            # A pty says EIO when the last writer is gone.
            if error.errno != errno.EIO:
                self._complain(f"{lane.label}: cannot be read any more: {error.strerror}")
            data = b""
        if data:
            now = self._moved_at = time.monotonic()
            if lane.watch is not None:
                lane.watch.saw(data, now)
            lane.terminal.follow_size()
            self._pass_on(lane, data)
        else:
            self._end(lane)
        return len(data)

    def _read_what_is_there(self, lane: _Lane) -> None:
        left = _LAST_READ_BYTES
        while left > 0 and (count := self._serve(lane)):
            left -= count

    def _pass_on(self, lane: _Lane, data: bytes) -> None:
        if lane.file_fd is not None:
            self._write_file(lane, data)
        if lane.tail is not None:
            lane.tail.feed(data)
        if lane.console_fd is not None and lane.prefixer is None:
            self._write_console(lane.console_fd, data)
        if lane.held is not None:
            self._write_lines(lane, lane.held.take(data))
            self._count_held(lane)
            self._bound_held()

    def _write_lines(self, lane: _Lane, text: bytes) -> None:
        if lane.filter is not None:
            self._write_filtered(lane, lane.filter.pick(text))
        if lane.console_fd is not None and lane.prefixer is not None:
            self._write_console(lane.console_fd, lane.prefixer.add(text))

    def _count_held(self, lane: _Lane) -> None:
        now_held = len(lane.held) if lane.held is not None else 0
        self._held_bytes += now_held - lane.held_bytes
        lane.held_bytes = now_held

    def _bound_held(self) -> None:
        """Of lines that are too long to be held, the longest is passed on though its end has not come."""
        while self._held_bytes > _HELD_MAX_BYTES:
            lane = max(self._lanes.values(), key=lambda each: each.held_bytes)
            size = lane.held_bytes
            if lane.held is not None:
                self._write_lines(lane, lane.held.release())
            self._count_held(lane)
            if not lane.is_split:
                lane.is_split = True
                self._complain(
                    f"{lane.label}: a line is split on the console after {size} bytes; unfinished lines of all workers "
                    f"may take {_HELD_MAX_BYTES >> 20} MiB"
                )

    def _write_held(self, lane: _Lane) -> None:
        rest = lane.held.flush() if lane.held is not None else b""
        if lane.filter is not None:
            self._write_filtered(lane, lane.filter.pick(rest))
        if lane.console_fd is not None and lane.prefixer is not None:
            self._write_console(lane.console_fd, lane.prefixer.end(rest))

    def _end(self, lane: _Lane) -> None:
        """The stream has ended and all of it is written."""
        self._guarded(lane, self._write_held)
        self._release(lane)
        with self._changed:
            self._unended.discard(lane)
            self._changed.notify_all()

    def _release(self, lane: _Lane) -> None:
        if self._lanes.pop(lane.read_fd, None) is None:
            return
        self._held_bytes -= lane.held_bytes
        self._poller.unregister(lane.read_fd)
        _close_quietly(lane.read_fd)
        if lane.file_fd is not None:
            _close_quietly(lane.file_fd)
            lane.file_fd = None

    def _write_file(self, lane: _Lane, data: bytes) -> None:
        assert lane.file_fd is not None
        try:
            _write_all(lane.file_fd, data)
        except OSError as error:
            path = _path_of(lane.file_fd)
            _close_quietly(lane.file_fd)
            lane.file_fd = None
            self._complain(f"{lane.label}: the log file {path} ends here: {error.strerror}")

    def _write_filtered(self, lane: _Lane, lines: bytes) -> None:
        if not lines or lane.filtered_fd is None or lane.filtered_fd in self._dead_outlets:
            return
        try:
            _write_all(lane.filtered_fd, lines)
        except OSError as error:
            # One file takes lines of many streams; it ends for all of them.
            self._dead_outlets.add(lane.filtered_fd)
            self._complain(f"the filtered log file {_path_of(lane.filtered_fd)} ends here: {error.strerror}")

    def _write_console(self, fd: int | TextIO, data: bytes) -> None:
        view, start = memoryview(data), 0
        try:
            while start < len(data) and fd not in self._dead_outlets:
                piece = view[start : _end_of_piece(data, start)]
                written = self._step_aside(fd, partial(_write_some, fd, piece))
                if isinstance(fd, int):
                    stdio.note_written(fd, piece[:written])
                start += written
                self._moved_at = time.monotonic()
        except OSError as error:
            self._dead_outlets.add(fd)
            if error.errno not in _NOBODY_THERE:
                self._complain(f"nothing more is written to the console ({_path_of(fd)}): {error.strerror}")

    def _complain(self, text: str) -> None:
        """Warn, once in a row for each text. A callback that fails is not called again."""
        if _WARNINGS in self._dead_outlets or text == self._last_complaint:
            return
        self._last_complaint = text
        try:
            self._step_aside(_WARNINGS, partial(self._warn, text))
        except _Replaced:
            raise
        except BaseException:
            self._dead_outlets.add(_WARNINGS)

    def _step_aside(self, outlet: int | TextIO, action: Callable[[], T]) -> T:
        """Do something that may block for ever, without the turn; see this module's opening."""
        self._busy_with = outlet
        self._turn.release()
        try:
            return action()
        finally:
            self._turn.acquire()
            if threading.current_thread() is not self._thread:
                raise _Replaced
            self._busy_with = None


def _end_of_piece(data: bytes, start: int) -> int:
    limit = start + _CONSOLE_WRITE_BYTES
    if limit >= len(data):
        return len(data)
    return data.rfind(b"\n", start, limit) + 1 or limit


def _write_some(fd: int | TextIO, data: memoryview) -> int:
    """One write, as soon as it is possible. Somebody else may have made the descriptor non-blocking."""
    if not isinstance(fd, int):
        fd.write(bytes(data).decode(errors="backslashreplace"))
        fd.flush()
        return len(data)
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:
            writable = select.poll()
            writable.register(fd, select.POLLOUT)
            writable.poll()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[_write_some(fd, view) :]


def _path_of(fd: int | TextIO) -> str:
    if not isinstance(fd, int):
        return repr(fd)
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"(descriptor {fd})"


def _close_quietly(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass  # A late error of a network file system, or closed by somebody else: nothing is to be done.


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
