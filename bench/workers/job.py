"""A job that fails once, with torch or without: python job.py DIRECTORY torch|plain.

Every worker notes its first line, with torch also the end of the import, and of the first all-reduce. In the first
attempt the last rank then waits for the file `go` and fails; the others wait for SIGTERM and note when it comes. In the
second attempt all are done. On the bare side, which restarts nothing, the failure ends the job.
"""

import time

BEGAN_NS = time.monotonic_ns()

import marks  # noqa: E402  (the clock is read before anything else)

marks.leave("began", BEGAN_NS, marks.created_ns(BEGAN_NS))

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402

signal.alarm(170)  # No worker outlives a benchmark that went wrong.
if marks.ATTEMPT == 0:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if sys.argv[2] == "torch":
    import torch
    import torch.distributed as dist

    marks.leave("imported")
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == marks.WORLD_SIZE
marks.leave("ready")
if marks.ATTEMPT == 0 and marks.RANK < marks.WORLD_SIZE - 1:
    signal.sigwait({signal.SIGTERM})
    marks.leave("stopped")
    os._exit(0)
if marks.ATTEMPT == 0:
    marks.await_file("go")
    # The odd part of the time spreads the failures evenly over the intervals of a launcher that polls.
    time.sleep(time.monotonic_ns() % 100_000_000 / 1e9)
    marks.leave("failed")
    os._exit(1)
if sys.argv[2] == "torch":
    dist.destroy_process_group()  # Without it, torch may abort the process on its way out.
