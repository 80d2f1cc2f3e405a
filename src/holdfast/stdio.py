"""holdfast's own text on stdout and stderr, written without waiting for its reader; and where the console stands.

A full pipe and a terminal after Ctrl-S take no more text. The thread that decides must not wait for them:
it has workers to stop. It cannot make them non-blocking, because workers share the open file. So

1. while no text waits, the caller opens the file behind the descriptor once more, without blocking, and writes what
   fits. That is all of it, as a rule, and there is no thread. The program's own text that is not flushed yet comes
   first, if the file has room for it.
2. The rest and every later text wait in a queue. A thread writes them in order, and ends when all are written.

The queue is bounded. Lines that come when it is full are dropped, and their number is written in their place. At the
end of the process `flush` waits for the thread for as long as text moves, and some seconds more. A stream that is
closed or broken costs the text and nothing else. An object in the place of a stream has its `write` called.

Workers and holdfast share the console. The pump and this module note what they have written to it, so that a line of
holdfast's does not continue a worker's unfinished one. The console may take a text of the pump's in parts
(`write_part`): holdfast's own text waits until the line is complete, and goes before the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import os
import select
import stat
import struct
import termios
import threading
import time
from collections import deque
from typing import TextIO

from holdfast.text import plural

_PIECE_BYTES = select.PIPE_BUF  # To this size the kernel writes a text to a pipe in one piece, or not at all.
_QUEUE_BYTES = 1 << 20  # How much text may wait, not counting texts that must not be dropped.
_OWN_TEXT_S = 1.0  # How long a text of workers waits at the start of a line for ours.
_PATIENCE_S = 5.0  # How long the end of the process waits for a reader that reads nothing.
_AGAIN = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # How the file behind a descriptor is opened again.

_unfinished: set[tuple[int, int]] = set()
"""The files behind consoles that stand in the middle of a line. stdout and stderr are one file as a rule."""


def note_written(fd: int, data: bytes | memoryview) -> None:
    if data[-1:] == b"\n":
        _unfinished.discard(file_behind(fd))
    elif data:
        _unfinished.add(file_behind(fd))


def is_in_line(fd: int) -> bool:
    """Whether the console stands in the middle of a line."""
    try:
        return bool(_unfinished) and file_behind(fd) in _unfinished
    except OSError:
        return False


def file_behind(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def write(stream: TextIO | None, text: str, *, may_drop: bool = True) -> OSError | None:
    """Write the text now if the stream takes it at once, else as soon as it does. `may_drop`: it is one of many.
    Returns an error that came at once, as that of a full disk."""
    if stream is None:
        return None
    if (fd := _descriptor_of(stream)) is None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
        return None
    return _queue.put(stream, fd, text.encode(stream.encoding or "utf-8", "backslashreplace"), may_drop)


def _descriptor_of(stream: TextIO) -> int | None:
    """None for an object in the place of a stream. A notebook's has a descriptor, but that is of the terminal in which
    the notebook was started."""
    try:
        return stream.fileno() if isinstance(stream, io.TextIOWrapper) else None
    except (OSError, ValueError):  # In memory, or closed.
        return None


class _Text:
    def __init__(self, fd: int, data: bytes) -> None:
        self.fd = fd
        self.size = len(data)
        self.left = data
        self.problem: OSError | None = None

    def write(self, *, may_wait: bool) -> bool:
        """Write some of it; False if that would have to wait. Text that cannot be written counts as written."""
        try:
            is_begun = len(self.left) < self.size
            continues_line = not is_begun and is_in_line(self.fd)
            data = b"\n" + self.left if continues_line else self.left
            written = write_some(self.fd, data[:_PIECE_BYTES]) if may_wait else write_now(self.fd, data)
            if written:
                note_written(self.fd, data[:written])
                self.left = data[written:]
            return written > 0
        except OSError as error:
            self.left, self.problem = b"", error
            return True


class _Queue:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Also in a forked child: what waits is its parent's to write, and the lock may be held by no thread of it."""
        self._lock = threading.RLock()  # A signal handler of the program may log.
        self._has_changed = threading.Condition(self._lock)
        self._torn: set[tuple[int, int]] = set()  # Files behind consoles that have a part of a line; the rest follows.
        self._texts: deque[_Text] = deque()
        self._bytes = 0
        self._dropped_at: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._moved_at = 0.0

    def put(self, stream: TextIO, fd: int, data: bytes, may_drop: bool) -> OSError | None:
        with self._lock:
            if may_drop and self._bytes + len(data) > _QUEUE_BYTES and self._texts:
                self._dropped_at = (fd, 1 + (self._dropped_at[1] if self._dropped_at else 0))
                return None
            self._tell_dropped()
            text = _Text(fd, data)
            if not self._texts and not self._is_torn(fd):
                # The beginning of a line that the program has printed comes before our text.
                with contextlib.suppress(OSError, ValueError):
                    if _takes_a_buffer(fd):
                        stream.flush()
                while text.left and text.write(may_wait=False):
                    pass
            if text.left:
                self._append(text)
            return text.problem

    def _append(self, text: _Text) -> None:
        self._texts.append(text)
        self._bytes += text.size
        if self._thread is None:
            thread = threading.Thread(target=self._write_texts, name="holdfast-stdio", daemon=True)
            # No thread is to be had in a process at its limit: the next text, or the end, tries again.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def _tell_dropped(self) -> None:
        if self._dropped_at is not None:
            fd, count = self._dropped_at
            self._dropped_at = None
            lines = plural(count, "line")
            self._append(_Text(fd, f"holdfast: {lines} dropped here, because this output was not read\n".encode()))

    def _write_texts(self) -> None:
        while (text := self._next()) is not None:
            _poll_writable(text.fd, None)
            with self._lock:
                if self._is_torn(text.fd):
                    continue
                has_moved = text.write(may_wait=False)
            if not has_moved:
                text.write(may_wait=True)
            self._moved_at = time.monotonic()

    def _next(self) -> _Text | None:
        with self._lock:
            while self._texts and not self._texts[0].left:
                self._bytes -= self._texts.popleft().size
            self._has_changed.notify_all()
            if not self._texts:
                self._tell_dropped()
            if self._texts:
                self._has_changed.wait_for(lambda: not self._is_torn(self._texts[0].fd))
                return self._texts[0]
            self._thread = None
            return None

    def _is_torn(self, fd: int) -> bool:
        try:
            return bool(self._torn) and file_behind(fd) in self._torn
        except OSError:  # Closed.
            return False

    def _has_text_for(self, file: tuple[int, int]) -> bool:
        with contextlib.suppress(OSError):  # One is closed.
            return any(file_behind(text.fd) == file for text in self._texts)
        return False

    def write_part(self, fd: int, data: bytes | memoryview, goes_on: bool) -> int:
        file = file_behind(fd)
        with self._lock:
            if file not in self._torn:  # Our text goes first, or it would wait for ever.
                self._has_changed.wait_for(lambda: not self._has_text_for(file), _OWN_TEXT_S)
            written = write_now(fd, data)
            if written:
                note_written(fd, data[:written])
            if written and (goes_on or written < len(data)) and is_in_line(fd):
                self._torn.add(file)
            elif written:
                self.end_parts(file)
            return written

    def end_parts(self, file: tuple[int, int]) -> None:
        with self._lock:
            self._torn.discard(file)
            self._has_changed.notify_all()

    def flush(self, patience_s: float = _PATIENCE_S) -> None:
        """Wait until all text is written, or until nothing could be written for that long."""
        began = time.monotonic()
        while (thread := self._thread) is not None:
            wait_s = max(began, self._moved_at) + patience_s - time.monotonic()
            if wait_s <= 0:
                return
            thread.join(wait_s)
        if self._texts:  # There was no thread for them.
            self._write_texts()


def _takes_a_buffer(fd: int) -> bool:
    """Whether all that a stream of Python may hold back can be written without waiting for a reader. A pipe that can be
    written to promises a page, which may be less; one that is empty has room for more."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode):
        (unread,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
        room = 2 * io.DEFAULT_BUFFER_SIZE
        if not unread and fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) < room:  # A buffer of Python 3.14 is larger than a pipe.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, room)
        return not unread and fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) >= room
    return not stat.S_ISSOCK(mode) and _poll_writable(fd, 0)


def write_now(fd: int, data: bytes | memoryview) -> int:
    """How much of it could be written without waiting for a reader."""
    mode = os.fstat(fd).st_mode
    is_terminal = stat.S_ISCHR(mode) and os.isatty(fd)
    never_waits = not os.get_blocking(fd) or stat.S_ISREG(mode) or (stat.S_ISCHR(mode) and not is_terminal)
    if not never_waits and not is_terminal and not stat.S_ISFIFO(mode):
        return 0  # A socket.
    try:
        opened = fd if never_waits else os.open(f"/proc/self/fd/{fd}", _AGAIN)
    except OSError:  # Another user's, or without a reader.
        return 0
    try:
        return os.write(opened, data)
    except BlockingIOError:
        return 0
    finally:
        if opened != fd:
            os.close(opened)


def write_part(fd: int, data: bytes | memoryview, *, goes_on: bool = False, may_wait: bool = False) -> int:
    """Write some of a text of workers, and return how much; 0 if that would have to wait. The caller writes the rest,
    or calls `give_up`. `goes_on`: there is more of the text than `data`."""
    written = _queue.write_part(fd, data, goes_on)
    if not written and may_wait:
        _poll_writable(fd, None)
        written = _queue.write_part(fd, data, goes_on)
        if not written:  # The file cannot be opened anew. It takes at least so much, unless another process was faster.
            written = write_some(fd, data[:_PIECE_BYTES])
            note_written(fd, data[:written])
    return written


def give_up(fd: int) -> None:
    """The rest of the line that `write_part` has begun will not come."""
    with contextlib.suppress(OSError):
        _queue.end_parts(file_behind(fd))


def write_some(fd: int, data: bytes | memoryview) -> int:
    """One write, as soon as it is possible: another process may have made the descriptor non-blocking."""
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:
            _poll_writable(fd, None)


def _poll_writable(fd: int, timeout_ms: float | None) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(timeout_ms))


_queue = _Queue()
flush = _queue.flush
os.register_at_fork(after_in_child=_queue.reset)
atexit.register(flush)
