"""What a worker writes into: a pipe, or a terminal of its own if its output ends on one."""

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
