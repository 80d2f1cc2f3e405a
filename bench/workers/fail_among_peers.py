"""The last rank fails once everybody runs; its peers note when they are told to stop."""

import os
import signal
import time

import marks

signal.alarm(120)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
marks.leave("began", time.monotonic_ns())
if marks.RANK < marks.WORLD_SIZE - 1:
    signal.sigwait({signal.SIGTERM})
    marks.leave("stopped", time.monotonic_ns())
else:
    marks.await_everybody("began")
    time.sleep(0.3 + time.monotonic_ns() % 100_000_000 / 1e9)
    marks.leave("failed", time.monotonic_ns())
    os._exit(1)
