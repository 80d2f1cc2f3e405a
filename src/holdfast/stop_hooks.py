"""`holdfast.on_stop(function)`: a worker's last work, before it is told to end.

The agent has a pipe, which workers find through `HOLDFAST_STOP` in their environment and open for themselves; nothing
is inherited. In a worker that has called `on_stop`, a thread waits for a byte from it. To stop the workers:

1. The agent looks on the progress board which workers wait for that byte, and writes a byte for each: the number of the
   signal. The other workers get the signal at once.
2. The thread calls the functions, the last one first, and then sends the signal to the leader of the worker, which is
   usually its own process. So a handler of the program, or the default, comes after them.
3. Workers whose functions take longer than half of the grace period get the signal from the agent; what is left of the
   grace period is for the signal. SIGKILL comes when it always does (`process/workers/ladder.py`).

One process of a worker waits, the first that calls `on_stop`. Its children may call it again when they import the main
module, as those of multiprocessing do; their ends and their functions do not count.

The functions run beside the main thread, which may be in a collective that never ends: that is what they are for. While
a thread holds the interpreter's lock in native code no function can run; then step 3 applies.

Workers import this module, so it imports next to nothing.
"""

from __future__ import annotations

import os
import sys

from holdfast import progress_board

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any, TypeVar

    Function = TypeVar("Function", bound=Callable[[], Any])

VARIABLE = "HOLDFAST_STOP"
_MOST_READERS = 4096  # A pipe takes that many bytes at once.
_SIGTERM = 15

_functions: list[Callable[[], Any]] = []
_is_watching = False


def on_stop(function: Function) -> Function:
    """Call the function when holdfast is about to stop this worker; also as a decorator. Without holdfast it is never
    called."""
    _functions.append(function)
    if not _is_watching:
        _watch()
    return function


def _watch() -> None:
    global _is_watching
    _is_watching = True
    try:
        path, inode = os.environ[VARIABLE].rsplit(":", 1)
    except (KeyError, ValueError):
        return  # Another launcher.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        owner = progress_board.stop_hook_owner() if os.fstat(fd).st_ino == int(inode) else None
        if owner != os.getpid():
            os.close(fd)
        if owner is None:
            raise OSError("the agent cannot be reached")
    except (OSError, ValueError) as error:
        import warnings

        warnings.warn(f"functions of holdfast.on_stop will not be called: {error}", stacklevel=3)
        return
    if owner != os.getpid():
        return
    import atexit
    import threading

    os.set_blocking(fd, True)
    threading.Thread(target=_wait, args=(fd,), name="holdfast-on-stop", daemon=True).start()
    atexit.register(_end, os.getpid())  # What is at its end needs no other.


def _end(pid: int) -> None:
    if os.getpid() == pid:
        progress_board.disown_stop_hook()


def _wait(fd: int) -> None:
    number = os.read(fd, 1)  # Nothing if the agent is gone.
    os.close(fd)
    for function in reversed(_functions):
        try:
            function()
        except BaseException as error:
            import traceback

            tb = error.__traceback__.tb_next if error.__traceback__ is not None else None  # From its own frame on.
            traceback.print_exception(type(error), error, tb)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    os.kill(os.getsid(0), number[0] if number else _SIGTERM)


def _forget() -> None:
    """A forked child has no such thread, and the functions are its parent's."""
    global _is_watching
    _is_watching = False
    _functions.clear()


os.register_at_fork(after_in_child=_forget)


class StopHooks:
    """The agent's side, for one life of a group. `board` is that of its progress; without one no worker is asked."""

    def __init__(self, envs: Mapping[int, dict[str, str]], board: progress_board.Board | None) -> None:
        self._board = board
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        inode = os.fstat(self._read).st_ino
        for env in envs.values() if board is not None else ():
            env[VARIABLE] = f"/proc/{os.getpid()}/fd/{self._read}:{inode}"

    def begin(self, number: int, running: Collection[int]) -> frozenset[int]:
        """Of these local ranks those whose functions are being called now. They send themselves the signal."""
        board = self._board
        asked = frozenset(rank for rank in running if board is not None and board.has_stop_hook(rank))
        if asked and self._write >= 0:
            os.write(self._write, bytes([number]) * _MOST_READERS)
        return asked

    def close(self) -> None:
        if self._write >= 0:
            os.close(self._read)
            os.close(self._write)
            self._write = -1
