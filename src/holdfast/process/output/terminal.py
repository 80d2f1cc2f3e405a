"""The pipe or the terminal that a worker writes to, and whether the console stands in the middle of a line.

Workers and holdfast share the console. The pump and holdfast's own log note here what they have written to it, so that
a line of holdfast's does not continue a worker's unfinished one.
"""

from __future__ import annotations

import fcntl
import os
import termios

# An ordinary user may have 64 MiB in pipes; two hundred workers must fit.
PIPE_BYTES = 256 * 1024


def open_channel(console_fd: int | None) -> tuple[int, int]:
    """A read end for the pump and a write end for a worker, both closed on exec.

    On a terminal, programs show colours and progress bars and write line by line. So a worker whose output ends on a
    terminal gets a pty, whose size follows that of the terminal; or a pipe if there is no pty left.
    """
    if console_fd is not None and os.isatty(console_fd):
        try:
            master_fd, worker_fd = os.openpty()
        except OSError:
            pass
        else:
            import tty

            tty.setraw(worker_fd)  # The terminal at the end translates line ends, and must do so only once.
            copy_size(console_fd, worker_fd)
            return master_fd, worker_fd
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:
        pass  # The user's limit for pipe memory is reached; the default size works too, only slower.
    return read_fd, write_fd


def copy_size(from_fd: int, to_fd: int) -> bool:
    """Give a worker's terminal the size of the one on which its output ends. False if there is none any more.

    The pump does so whenever the worker writes. That costs less than a handler of SIGWINCH, which only the main thread
    of a program could have.
    """
    try:
        size = fcntl.ioctl(from_fd, termios.TIOCGWINSZ, bytes(8))
        if size != fcntl.ioctl(to_fd, termios.TIOCGWINSZ, bytes(8)):
            fcntl.ioctl(to_fd, termios.TIOCSWINSZ, size)
    except OSError:
        return False
    return True


_unfinished: set[tuple[int, int]] = set()
"""The files of consoles that stand in the middle of a line. stdout and stderr usually are the same file."""


def note_written(fd: int, data: bytes | memoryview) -> None:
    if not data:
        return
    if data[-1:] == b"\n":
        _unfinished.discard(_file_behind(fd))
    else:
        _unfinished.add(_file_behind(fd))


def is_in_line(fd: int) -> bool:
    return bool(_unfinished) and _file_behind(fd) in _unfinished


def _file_behind(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
