"""The last rank fails in the first attempt, once everybody runs; every worker of the second attempt succeeds."""

import time

BEGAN_NS = time.monotonic_ns()

import os  # noqa: E402  (the clock is read before anything else)
import signal  # noqa: E402

import marks  # noqa: E402

marks.leave("began", BEGAN_NS)
if marks.ATTEMPT == 0:
    # Whatever the launcher does to stop it, no worker outlives a benchmark that went wrong.
    signal.alarm(120)
    if marks.RANK < marks.WORLD_SIZE - 1:
        signal.pause()
    marks.await_everybody("began")
    # By now the launcher has settled down to watching. The odd part of the time spreads the failures evenly over
    # the intervals of one that polls.
    time.sleep(0.3 + time.monotonic_ns() % 100_000_000 / 1e9)
    marks.leave("failed", time.monotonic_ns())
    os._exit(1)
