"""A worker that is there until it is stopped, and notes when it began and when it was told to stop.

Its notes are files in its first argument: `began` and `stopped`, with the round and the rank, and in them the pid and
the time of the monotonic clock in nanoseconds.
"""

import os
import signal
import sys
import time

signal.alarm(300)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def note(what: str) -> None:
    name = f"{what}.{os.environ['HOLDFAST_ROUND']}.{os.environ['RANK']}"
    with open(f"{sys.argv[1]}/.{name}", "w") as file:
        file.write(f"{os.getpid()} {time.monotonic_ns()}")
    os.rename(f"{sys.argv[1]}/.{name}", f"{sys.argv[1]}/{name}")


note("began")
signal.sigwait({signal.SIGTERM})
note("stopped")
