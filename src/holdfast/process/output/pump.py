"""The tee pump: one thread that copies the output of workers to log files and to the console.

Every worker stream that is teed, filtered or remembered comes through a pipe (or a pty, see `open_channel`).
Each piece that arrives goes, in this order, to

    the log file       exactly the worker's bytes, at once
    the tail           the last few KiB, for the failure report
    the filtered file  those lines that contain a needle
    the console        of one worker without a prefix the bytes as they come; else, on a terminal, what `terminal`
                       makes of them; else whole lines (see `lines`), and no stream continues another's unfinished line

A console may take no more text for as long as it likes (Ctrl-S, a pipe without a reader). The thread writes to it
without blocking, and waits until it can be written or `close` gives it up. Until then a blocked console blocks
everything, the workers included, as it would without a pump; else memory would grow without bound. A console that is
given up loses its text, and the log files get the rest. (tests/unit/test_pump.py,
test_close_returns_though_the_console_is_blocked.) Only an object in the place of a stream, or a file on a dead mount,
can hold the thread for ever; then `close` leaves it behind.

The thread is a daemon. A forked child has no such thread and must not touch the pump.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import select
import signal
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TextIO

from holdfast import stdio
from holdfast.errors import HostError, InternalError, remedy
from holdfast.frozen import dataclass, field
from holdfast.loop import Wakeup
from holdfast.process.output.lines import Copied, HeldLine, LineFilter, LinePrefixer, Tail

if TYPE_CHECKING:
    from holdfast.process.output.output_watch import StreamWatch
    from holdfast.process.output.terminal import Source, TerminalView

# An ordinary user may have 64 MiB in pipes; two hundred workers must fit.
_PIPE_BYTES = 256 * 1024

# With its prefixes such a piece still fits into memory that malloc has at hand. From 128 KiB on malloc asks the kernel
# for every piece anew, and the page faults cost more than the system calls that larger pieces save.
_READ_BYTES = 64 * 1024

# The limit for the unfinished lines of all streams together: a line is held until its end comes.
_HELD_MAX_BYTES = 16 << 20

# A console write is cut here, at a line's end, so that a slow console still shows progress to `drain`.
_CONSOLE_WRITE_BYTES = 256 * 1024

# When it is closed the pump reads at most this much more from a stream, which is more than a channel holds. A
# process that was left behind and keeps writing therefore cannot keep `close` busy.
_LAST_READ_BYTES = 2 * _PIPE_BYTES

# After `close` a console that takes nothing for this long is given up, and any console after this long in all. The
# thread, which may hang elsewhere, is left behind after twice that time.
_CLOSE_PATIENCE_S = 1.0
_CLOSE_LIMIT_S = 5.0

# A console that has not taken a piece for this long blocks.
_BLOCKED_AFTER_S = 1.0

# Console errors that only mean that the reader is gone or the terminal hung up.
_NO_READER = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO}


@dataclass(slots=True, eq=False)
class Stream:
    """One stream of one worker, where its bytes go, and which of these outlets still work."""

    read_fd: int  # The pump owns it and closes it.
    label: str  # Names the stream in warnings: "rank 3 stdout".
    file_fd: int | None  # Already open; the pump owns it and closes it.
    console_fd: int | TextIO | None  # Never closed. An object that has replaced sys.stdout has no descriptor.
    tail: Tail | None
    prefixer: LinePrefixer | None = None  # Neither this nor a source: the console gets the bytes as they come.
    filter: LineFilter | None = None
    filtered_fd: int | None = None  # May be shared between streams; the caller owns it.
    watch: StreamWatch | None = None
    copied: Copied | None = None
    source: Source | None = None  # Its place on a terminal.
    margin: int = 0  # The columns of the terminal that the worker does not get, because a prefix takes them.

    # The pump's own.
    held: HeldLine = field(default_factory=HeldLine, init=False)
    is_split: bool = field(default=False, init=False)
    followed_fd: int | None = field(default=None, init=False)  # The terminal whose size the worker's terminal follows.
    place: object = field(init=False)  # The console's file: stdout and stderr may be one.
    error_count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.place = self.console_fd
        if isinstance(self.console_fd, int):
            with suppress(OSError):  # It is closed.
                self.place = stdio.file_behind(self.console_fd)
            if os.isatty(self.read_fd):
                self.followed_fd = self.console_fd

    def drop_outlets(self) -> bool:
        """After an unexpected error: drop all but the file, then the file too. False if nothing is left."""
        self.error_count += 1
        self.console_fd = self.filtered_fd = self.prefixer = self.filter = self.tail = self.source = None
        self.held = HeldLine()
        if self.error_count > 1:
            self.close_file()
        return self.error_count <= 2

    def follow_size(self) -> None:
        if self.followed_fd is not None and not _copy_size(self.followed_fd, self.read_fd, self.margin):
            self.followed_fd = None

    def close_file(self) -> None:
        if self.file_fd is not None:
            with suppress(OSError):  # A late error of a network file system.
                os.close(self.file_fd)
            self.file_fd = None


class Pump:
    """Copies the streams given to it until they end. `warn` is called from the pump's thread."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._wakeup = Wakeup()
        self._poller = select.poll()
        self._poller.register(self._wakeup.fileno(), select.POLLIN)
        self.thread: threading.Thread | None = None
        self._moved_at = time.monotonic()

        # The thread's own.
        self._streams: dict[int, Stream] = {}
        self._dead_outlets: set[int | TextIO] = set()
        self._held_at_most = 0  # All that was taken since the held lines were counted.
        self.is_at_console = False
        self._last_warning = ""
        self._views: dict[TerminalView, int | TextIO] = {}
        self._in_line: dict[object, Stream] = {}  # By console: the stream that has left an unfinished line there.

        # Shared with callers, under the condition's lock.
        self._changed = threading.Condition()
        self._arriving: deque[Stream] = deque()
        self._unended: set[Stream] = set()
        self._closing_at = math.inf
        self._is_closed = False
        self._has_new_size = False

    def add(self, stream: Stream) -> None:
        """Take a stream over, descriptors included. If this raises, they are still the caller's."""
        with self._changed:
            if self._closing_at < math.inf:
                raise InternalError(f"{stream.label} was added to a pump that is closed")
            os.set_blocking(stream.read_fd, False)
            self._arriving.append(stream)
            self._unended.add(stream)
            self._wakeup.wake()

    @property
    def is_blocked(self) -> bool:
        """Whether the console blocks, and with it all streams. One that is only busy takes each piece at once."""
        return self.is_at_console and time.monotonic() - self._moved_at >= _BLOCKED_AFTER_S

    def pass_on_size(self) -> None:
        """The terminal has a new size."""
        self._has_new_size = True
        self._wakeup.wake()

    def start(self) -> None:
        if self.thread is None:
            thread = threading.Thread(target=self._run, name="holdfast-pump", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                why = f"cannot start a thread for the workers' output{remedy(errno.EAGAIN)}"
                raise HostError(why) from error
            self.thread = thread

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
        """Write out what is held and what can be read right now, close the streams, end the thread. Takes a bounded
        time."""
        with self._changed:
            if self._closing_at < math.inf:
                return
            self._closing_at = time.monotonic()
        self.start()
        assert self.thread is not None
        self._wakeup.wake()
        self.thread.join(2 * _CLOSE_LIMIT_S)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if not self.thread.is_alive():
            self._wakeup.close()

    # In the pump's thread.

    def _run(self) -> None:
        # Python ignores these two from the start, but a user's program may have changed that. While they are blocked,
        # writes fail with EPIPE and EFBIG instead.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE, signal.SIGXFSZ})
        self._copy_until_closed()

    def _copy_until_closed(self) -> None:
        while True:
            # Looked at first: once it is set no stream is added, so those that arrive below are the last.
            is_closing = self._closing_at < math.inf
            try:
                while self._arriving:
                    stream = self._arriving.popleft()
                    self._streams[stream.read_fd] = stream
                    if stream.source is not None and stream.console_fd is not None:
                        self._views.setdefault(stream.source.view, stream.console_fd)
                    self._poller.register(stream.read_fd, select.POLLIN)
                if is_closing:
                    for stream in list(self._streams.values()):
                        self._guarded(stream, self._read_rest)
                        self._end(stream)
                    for view in self._views:  # A stream that has lost its outlets has not ended there.
                        self._show(view, lambda _, view=view: view.pass_time(math.inf))  # type: ignore[misc]
                    return
                self._serve_ready()
            except Exception as error:
                # No single stream is the cause, so no outlet is dropped; perhaps memory was short.
                self._warn_once(f"copying the workers' output failed and is retried: {type(error).__name__}: {error}")
                if is_closing:
                    return
                time.sleep(0.1)

    def _serve_ready(self) -> None:
        for fd, _ in self._poller.poll(self._wait_ms()):
            if fd == self._wakeup.fileno():
                self._wakeup.clear()
            elif stream := self._streams.get(fd):
                self._guarded(stream, self._serve)
        if self._has_new_size:
            self._has_new_size = False
            for stream in self._streams.values():
                stream.follow_size()
        for view in self._views:
            self._show(view, view.pass_time)

    def _wait_ms(self) -> float | None:
        deadlines = [deadline for view in self._views if (deadline := view.next_deadline()) is not None]
        return max(0.0, min(deadlines) - time.monotonic()) * 1000 if deadlines else None

    def _guarded(self, stream: Stream, action: Callable[[Stream], object]) -> None:
        """Do something for one stream. An unexpected error costs that stream outlets and leaves the others alone."""
        try:
            action(stream)
        except Exception as error:
            goes_on = stream.drop_outlets()
            self._warn_once(f"{stream.label}: output is no longer complete: {type(error).__name__}: {error}")
            if not goes_on:
                self._release(stream)

    def _serve(self, stream: Stream) -> int:
        """Pass on the data of one read; returns the number of bytes."""
        try:
            data = os.read(stream.read_fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError as error:
            # A pty reports EIO when the last writer is gone.
            if error.errno != errno.EIO:
                self._warn_once(f"{stream.label}: cannot be read any more: {error.strerror}")
            data = b""
        if data:
            now = self._moved_at = time.monotonic()
            if stream.watch is not None:
                stream.watch.saw(data, now)
            if stream.copied is not None:
                stream.copied.add(data)
            stream.follow_size()
            self._pass_on(stream, data)
        else:
            self._end(stream)
            with self._changed:
                self._unended.discard(stream)
                self._changed.notify_all()
        return len(data)

    def _read_rest(self, stream: Stream) -> None:
        left = _LAST_READ_BYTES
        while left > 0 and (count := self._serve(stream)):
            left -= count

    def _pass_on(self, stream: Stream, data: bytes) -> None:
        if stream.file_fd is not None and self._ends(f"{stream.label}: the log file", stream.file_fd, data):
            stream.close_file()
        if stream.tail is not None:
            stream.tail.feed(data)
        if stream.source is not None:
            self._show(stream.source.view, partial(stream.source.view.add, stream.source, data))
        elif stream.console_fd is not None and stream.prefixer is None:
            self._write_console(stream.console_fd, data)
        if stream.prefixer or stream.filter:
            self._write_lines(stream, stream.held.take(data))
            self._held_at_most += len(data)
            if self._held_at_most > _HELD_MAX_BYTES:
                self._bound_held()

    def _write_lines(self, stream: Stream, text: bytes, *, is_last: bool = False) -> None:
        filtered_fd = stream.filtered_fd
        if stream.filter is not None and filtered_fd is not None and filtered_fd not in self._dead_outlets:
            lines = stream.filter.pick(text)
            if lines and self._ends("the filtered log file", filtered_fd, lines):
                self._dead_outlets.add(filtered_fd)  # For all streams.
        if stream.console_fd is not None and stream.prefixer is not None:
            lines = stream.prefixer.end(text) if is_last else stream.prefixer.add(text)
            self._write_console(stream.console_fd, self._apart(stream, lines))

    def _apart(self, stream: Stream, lines: bytes) -> bytes:
        """The lines, after a newline if another stream has left the console in the middle of a line."""
        if not lines:
            return b""
        console, last = stream.console_fd, self._in_line.pop(stream.place, None)
        if not lines.endswith(b"\n"):
            self._in_line[stream.place] = stream
        is_in_line = last not in (None, stream) and (not isinstance(console, int) or stdio.is_in_line(console))
        return b"\n" + lines if is_in_line else lines

    def _show(self, view: TerminalView, change: Callable[[float], bytes]) -> None:
        """Write what the change makes the terminal show."""
        console = self._views[view]
        if isinstance(console, int) and not stdio.is_in_line(console):
            view.lose_line()
        self._write_console(console, change(time.monotonic()))

    def _bound_held(self) -> None:
        """Above the limit, pass on the longest unfinished line though its end has not come."""
        while (held_bytes := sum(len(each.held) for each in self._streams.values())) > _HELD_MAX_BYTES:
            stream = max(self._streams.values(), key=lambda each: len(each.held))
            line = stream.held.release()
            self._write_lines(stream, line)
            if not stream.is_split:
                stream.is_split = True
                limit = f"unfinished lines of all workers may take {_HELD_MAX_BYTES >> 20} MiB"
                self._warn_once(f"{stream.label}: a line is split on the console after {len(line)} bytes; {limit}")
        self._held_at_most = held_bytes

    def _end(self, stream: Stream) -> None:
        self._guarded(stream, self._write_end)
        self._release(stream)

    def _write_end(self, stream: Stream) -> None:
        self._write_lines(stream, stream.held.flush(), is_last=True)
        if stream.source is not None:
            self._show(stream.source.view, partial(stream.source.view.end, stream.source))

    def _release(self, stream: Stream) -> None:
        if self._streams.pop(stream.read_fd, None) is not None:
            self._poller.unregister(stream.read_fd)
            with suppress(OSError):  # A program may have closed it.
                os.close(stream.read_fd)
            stream.close_file()

    def _ends(self, what: str, fd: int, data: bytes) -> bool:
        """Write to a file. True, after a warning, if it takes no more."""
        view = memoryview(data)
        try:
            while view:
                view = view[stdio.write_some(fd, view) :]
        except OSError as error:
            self._warn_once(f"{what} {_path_of(fd)} ends here: {error.strerror}")
            return True
        return False

    def _write_console(self, fd: int | TextIO, data: bytes) -> None:
        """Ends early if the console is given up."""
        view, start = memoryview(data), 0
        try:
            while start < len(data) and fd not in self._dead_outlets:
                end = start + _CONSOLE_WRITE_BYTES
                if end < len(data):
                    end = data.rfind(b"\n", start, end) + 1 or end
                self.is_at_console = True
                if written := self._write_some(fd, view[start:end], goes_on=end < len(data)):
                    start += written
                    self._moved_at = time.monotonic()
                if not written or self._moved_at > self._closing_at + _CLOSE_LIMIT_S:
                    self._dead_outlets.add(fd)
        except OSError as error:
            self._dead_outlets.add(fd)
            if error.errno not in _NO_READER:
                self._warn_once(f"nothing more is written to the console ({_path_of(fd)}): {error.strerror}")
        finally:
            self.is_at_console = False
            if fd in self._dead_outlets and isinstance(fd, int):
                stdio.give_up(fd)

    def _write_some(self, fd: int | TextIO, data: memoryview, *, goes_on: bool) -> int:
        """Wait until the console takes some of it. 0 if it is given up before."""
        if not isinstance(fd, int):
            fd.write(bytes(data).decode(errors="backslashreplace"))
            fd.flush()
            return len(data)
        written = stdio.write_part(fd, data, goes_on=goes_on)
        if not written and self._is_writable(fd):
            written = stdio.write_part(fd, data, goes_on=goes_on, may_wait=True)
        return written

    def _is_writable(self, fd: int) -> bool:
        """Wait for it. False if it is given up, because the pump is being closed."""
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        poller.register(self._wakeup.fileno(), select.POLLIN)
        while True:
            left_s = max(self._closing_at, self._moved_at) + _CLOSE_PATIENCE_S - time.monotonic()
            if left_s <= 0:
                return False
            ready = poller.poll(None if left_s == math.inf else left_s * 1000)
            if any(each == fd for each, _ in ready):
                return True
            self._wakeup.clear()

    def _warn_once(self, text: str) -> None:
        """Warn, unless the last warning had the same text. An error of the callback is ignored."""
        if text != self._last_warning:
            self._last_warning = text
            with suppress(BaseException):
                self._warn(text)


def _path_of(fd: int | TextIO) -> str:
    if not isinstance(fd, int):
        return repr(fd)
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"(descriptor {fd})"


def open_channel(console_fd: int | None, margin: int = 0) -> tuple[int, int]:
    """A read end for the pump and a write end for a worker, both closed on exec.

    On a terminal, programs show colours and progress bars and write line by line. So a worker whose output ends on a
    terminal gets a pty, whose size follows that of the terminal, less the columns of the margin; or a pipe if there is
    no pty left.
    """
    if console_fd is not None and os.isatty(console_fd):
        try:
            master_fd, worker_fd = os.openpty()
        except OSError:
            pass
        else:
            import tty

            tty.setraw(worker_fd)  # The terminal at the end translates line ends, and must do so only once.
            _copy_size(console_fd, worker_fd, margin)
            return master_fd, worker_fd
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    with suppress(OSError):  # The user's limit for pipe memory is reached; the default size works too, only slower.
        fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return read_fd, write_fd


def _copy_size(from_fd: int, to_fd: int, margin: int) -> bool:
    """Give a worker's terminal the size of the one on which its output ends. False if there is none any more.

    The pump does so after SIGWINCH, which only the main thread of a program can notice, and whenever the worker writes.
    """
    try:
        rows, columns, *pixels = struct.unpack("4H", fcntl.ioctl(from_fd, termios.TIOCGWINSZ, bytes(8)))
        narrower = columns - margin if columns > 2 * margin else columns
        size = struct.pack("4H", rows, narrower, *pixels)
        if size != fcntl.ioctl(to_fd, termios.TIOCGWINSZ, bytes(8)):
            fcntl.ioctl(to_fd, termios.TIOCSWINSZ, size)
    except OSError:
        return False
    return True
