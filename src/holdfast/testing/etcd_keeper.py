"""A small program that runs one etcd and ends it when the process that started it ends.

    python etcd_keeper.py OWNER_PID TEMPORARY COMMAND...

It starts the command, writes its pid to stdout, and waits. When stdin or the owner ends, it kills the command and
removes the directory TEMPORARY (nothing, if that is empty). Before that it does not reap the command, so the pid stays
its own. If the keeper itself is killed, the kernel kills the command: the keeper has one thread, so a parent-death
signal cannot misfire. This file stands alone and is run by its path.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def main(owner: str, temporary: str, *command: str) -> None:
    keeper, libc = os.getpid(), ctypes.CDLL(None)

    def die_with_keeper() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(127)

    etcd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=die_with_keeper)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    print(etcd.pid, flush=True)
    try:
        owner_ends = os.pidfd_open(int(owner))
        if os.getppid() == int(owner):
            select.select([0, owner_ends], [], [])
    except ProcessLookupError:
        pass  # The owner has ended already.
    etcd.kill()
    etcd.wait()
    shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
