"""A job that fails once, with torch or without: python job.py DIRECTORY torch|ddp|plain|once.

Every worker notes its first line, with torch also the end of the import, and of the first all-reduce; `ddp` trains a
model, until the first step of the optimizer. `once` is `torch` without a failure. In the first attempt the last rank
then waits for the file `go` and fails; the others wait for SIGTERM and note when it comes. In the second attempt all
are done. On the bare side, which restarts nothing, the failure ends the job.
"""

import time

BEGAN_NS = time.monotonic_ns()

import marks  # noqa: E402  (the clock is read before anything else)

marks.leave("began", BEGAN_NS, marks.created_ns(BEGAN_NS))

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402

KIND = sys.argv[2]
FAILS = marks.ATTEMPT == 0 and KIND != "once"

signal.alarm(170)  # No worker outlives a benchmark that went wrong.
if FAILS:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if KIND != "plain":
    import torch
    import torch.distributed as dist

    marks.leave("imported")
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == marks.WORLD_SIZE
if KIND == "ddp":
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.set_num_threads(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.rand(256, 64), torch.rand(256, 64))
    for inputs, targets in DataLoader(data, batch_size=16, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        break
marks.leave("ready")
if FAILS and marks.RANK < marks.WORLD_SIZE - 1:
    signal.sigwait({signal.SIGTERM})
    marks.leave("stopped")
    os._exit(0)
if FAILS:
    marks.await_file("go")
    # The odd part of the time spreads the failures evenly over the intervals of a launcher that polls.
    time.sleep(time.monotonic_ns() % 100_000_000 / 1e9)
    marks.leave("failed")
    os._exit(1)
if KIND != "plain":
    dist.destroy_process_group()  # Without it, torch may abort the process on its way out.
