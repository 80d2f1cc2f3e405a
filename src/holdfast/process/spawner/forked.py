"""In a process that was forked from the spawner: how it becomes a worker, and how a worker ends that is a fork of the
caller's program: its clean-up belongs to the parent."""

from __future__ import annotations

import ctypes
import os
import sys

from holdfast.process.spawner.wire import BYTECODE

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import.
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn

    Call = tuple[Callable[..., Any], tuple[Any, ...]]
else:
    import _signal as signal  # For the spawner, as in server.py.

_PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)

# What a person or a terminal might send to everything at once. The spawner ends when its agent does.
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Python ignores these for itself; a program that it starts expects the usual.
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)


def leave_home(spawner: int, directory: bytes | None, cpus: Iterable[int] = ()) -> None:
    os.setsid()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != spawner:
        os._exit(127)  # The spawner died before the kernel knew that we wanted to die with it.
    if directory is not None:
        try:
            os.chdir(directory)
        except PermissionError:
            pass  # The spawner was started in it, by a user who may not enter it: `cd /root; sudo -u user ...`
    if cpus:
        os.sched_setaffinity(0, cpus)


def take_streams(fds: dict[str, int]) -> None:
    for target, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(fds[name], target)
        os.close(fds.pop(name))


def execute(argv: list[bytes], environment: dict[bytes, bytes], fds: dict[str, int], ignored: tuple[int, ...]) -> None:
    if BYTECODE in fds:
        # Until the bootstrap is ready for it: an interrupt would show lines of ours in a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        fd = fds.pop(BYTECODE)
        os.set_inheritable(fd, True)
        argv[argv.index(BYTECODE.encode())] = b"/proc/self/fd/%d" % fd
    for name, fd in fds.items():
        os.set_inheritable(fd, True)
        environment[name.encode()] = b"%d" % fd
    _reset_signals(ignored, _PYTHON_IGNORES)
    os.execvpe(argv[0], argv, environment)


def call(
    call: Call, environment: dict[bytes, bytes], fds: dict[str, int], ignored: tuple[int, ...], handlers: dict[Any, Any]
) -> NoReturn:
    """Call a function that this process holds."""
    from holdfast.process.spawner import bootstrap

    def load() -> Call:
        if signal.SIGINT not in ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler if callable(handler) else int(handler))
        return call

    _reset_signals(ignored)
    os.environb.clear()
    os.environb.update(environment)
    peers = bootstrap.Peers(*(fds.get(name, -1) for name in ("HOLDFAST_PEERS_READ", "HOLDFAST_PEERS_WRITE")))
    finish(bootstrap.run_function(load, fds["HOLDFAST_BLACKBOX"], peers))


def _reset_signals(ignored: tuple[int, ...], also: tuple[int, ...] = ()) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (*DEAF_TO, *also):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)


def finish(code: int) -> NoReturn:
    """End a forked worker like multiprocessing does: exit handlers that it inherited belong to the parent."""
    from holdfast.process.spawner import bootstrap

    try:
        if "threading" in sys.modules:
            # A worker that was forked from a thread of a pool still counts as one of the pool's threads. Python joins
            # those at the end, and a thread cannot join itself.
            pool = sys.modules.get("concurrent.futures.thread")
            getattr(pool, "_threads_queues", {}).pop(sys.modules["threading"].current_thread(), None)
            sys.modules["threading"]._shutdown()
        if "multiprocessing.util" in sys.modules:
            # Wait for this process's own children, not for those that the parent had before the fork.
            process: Any = sys.modules["multiprocessing.process"]
            process._children = {each for each in process._children if each._parent_pid == os.getpid()}
            sys.modules["multiprocessing.util"]._exit_function()
    except BaseException as exc:
        bootstrap.report(exc)
    flush_streams()
    os._exit(code)


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            pass
