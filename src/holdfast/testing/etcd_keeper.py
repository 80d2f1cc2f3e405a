"""A small program that runs one etcd and ends it when the process that started it ends.

    python etcd_keeper.py OWNER_PID TEMPORARY COMMAND...

It starts the command, writes its pid to stdout, and waits. When stdin or the owner ends, it kills the command and
removes the directory TEMPORARY (nothing, if that is empty); a `k` on stdin keeps the directory. If the keeper itself
is killed, the kernel kills the command: the keeper has one thread, so a parent-death signal cannot misfire.

The command is not reaped before it is to be killed, so its pid stays its own; the owner sees its end through a pidfd.
This file stands alone and is run by its path.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _start(command: list[str]) -> int:
    keeper = os.getpid()
    libc = ctypes.CDLL(None)
    pid = os.fork()
    if pid:
        return pid
    try:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == keeper:
            # Stdin and stdout of the keeper are not for the command.
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(2, 1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.execv(command[0], command)
    finally:
        os._exit(127)


def _wait(owner: int) -> bool:
    """Wait until the command has to end; returns whether the directory is kept."""
    try:
        owner_ends = os.pidfd_open(owner)
    except ProcessLookupError:
        return False
    ready = select.select([0, owner_ends], [], [])[0] if os.getppid() == owner else []
    return 0 in ready and os.read(0, 1) == b"k"


def main(owner: str, temporary: str, *command: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pid = _start(list(command))
    os.write(1, b"%d\n" % pid)
    try:
        is_kept = _wait(int(owner))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if temporary and not is_kept:
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            os.rmdir(os.path.dirname(temporary))
        except OSError:
            pass  # It holds the directories of other members.


if __name__ == "__main__":
    main(*sys.argv[1:])
