"""What a worker writes into: a pipe, or a terminal of its own if its output ends on one."""

from __future__ import annotations

import fcntl
import os
import termios

# An ordinary user may have 64 MiB in pipes; two hundred workers must fit.
PIPE_BYTES = 256 * 1024


def open_channel(console_fd: int | None) -> tuple[int, int]:
    """A read end for the pump and a write end for a worker, both closed on exec.

    A worker whose output ends on a terminal should still find one, of the same size, because programs then
    show colours and progress bars and write line by line. It gets a pty, whose size follows that of the terminal,
    or a pipe if no pty is to be had.
    """
    if console_fd is not None and os.isatty(console_fd):
        try:
            return _open_pty(console_fd)
        except OSError:
            pass
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:
        pass  # The user's share of pipe memory is spent; the usual size works too, only slower.
    return read_fd, write_fd


def _open_pty(console_fd: int) -> tuple[int, int]:
    import tty

    master_fd, worker_fd = os.openpty()
    try:
        # Raw: the terminal at the end translates line ends, and must do so only once.
        tty.setraw(worker_fd)
        size = fcntl.ioctl(console_fd, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(worker_fd, termios.TIOCSWINSZ, size)
    except (OSError, termios.error) as error:
        os.close(master_fd)
        os.close(worker_fd)
        raise OSError(str(error)) from error
    return master_fd, worker_fd


class Follower:
    """Gives a worker's terminal the size of the one on which its output ends, when that has changed.

    To look whenever the worker writes costs less than a handler of SIGWINCH, which only the main thread of a program
    could have.
    """

    def __init__(self, read_fd: int, console_fd: int | None) -> None:
        self._read_fd = read_fd
        self._console_fd = console_fd if os.isatty(read_fd) else None

    def follow_size(self) -> None:
        if self._console_fd is None:
            return
        try:
            size = fcntl.ioctl(self._console_fd, termios.TIOCGWINSZ, bytes(8))
            if size != fcntl.ioctl(self._read_fd, termios.TIOCGWINSZ, bytes(8)):
                fcntl.ioctl(self._read_fd, termios.TIOCSWINSZ, size)
        except OSError:
            self._console_fd = None
