"""A small program that runs a command for no longer than the process that holds the other end of its stdin.

    python die_with_parent.py GRACE_S TEMPORARY [COMMAND...]

The process that starts a command may be killed at any moment, and may have threads, where a parent-death signal would
misfire. So this program stands in between, with one thread:

    stdin ends                  the owner is gone: the command gets SIGTERM, and after GRACE_S it is killed
    SIGTERM, SIGUSR1 and others are passed on; the owner decides when the time is up
    the command ends            this program ends with its exit code (128 + N for signal N)
    this program is killed      the kernel kills the command. (The workers of an agent are ended by its spawner.)

When the owner is gone, it removes the directory TEMPORARY (nothing, if that is empty). Without COMMAND it only waits
for that. The command inherits all descriptors but stdin. The file is run by its path and needs the standard library
alone; `words` gives its command line.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

_PASSED_ON = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
    signal.SIGCONT, signal.SIGWINCH,
)  # fmt: skip
_PR_SET_PDEATHSIG = 1


def words(*command: str, grace_s: float = 0.0, temporary: str = "") -> list[str]:
    """The command line for a child that must not outlive this process. Its stdin must be a pipe that is held here."""
    return [sys.executable, "-I", "-S", __file__, str(grace_s), temporary, *command]


def main(grace_s: float, temporary: str, *command: str) -> int:
    wakeups, end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(end)
    for number in _PASSED_ON:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # The owner may block some, as Ray's workers do with SIGINT.
    code, is_abandoned = 0, True
    if command:
        code, is_abandoned = _run(command, wakeups, grace_s)
    else:
        while os.read(0, 512):
            pass
    if temporary and is_abandoned:
        shutil.rmtree(temporary, ignore_errors=True)
    return code


def _run(command: tuple[str, ...], wakeups: int, grace_s: float) -> tuple[int, bool]:
    """The exit code, and whether the owner went first."""
    own_pid, libc = os.getpid(), ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != own_pid:
            os._exit(127)

    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, close_fds=False, start_new_session=True, preexec_fn=die_with_parent
        )
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
        return 127, False
    # What the command writes has its own readers. They must not wait for the end of this process.
    for fd in (1, 2):
        os.dup2(wakeups, fd)
    return _watch(child, wakeups, grace_s)


def _watch(child: subprocess.Popen[bytes], wakeups: int, grace_s: float) -> tuple[int, bool]:
    ended = os.pidfd_open(child.pid)
    watched, ends_at = [ended, wakeups, 0], float("inf")
    while True:
        left_s = max(0.0, ends_at - time.monotonic())
        ready, _, _ = select.select(watched, [], [], None if left_s == float("inf") else left_s)
        if ended in ready:
            code = child.wait()
            return 128 - code if code < 0 else code, 0 not in watched
        if wakeups in ready:
            for number in os.read(wakeups, 512):
                if number in _PASSED_ON:
                    child.send_signal(number)
        if 0 in ready and not os.read(0, 512):
            watched.remove(0)
            child.send_signal(signal.SIGTERM)
            ends_at = time.monotonic() + grace_s
        if time.monotonic() >= ends_at:
            child.kill()
            ends_at = float("inf")


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *sys.argv[2:]))
