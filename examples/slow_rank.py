"""A job that reports its steps, and whose last rank is slow: after 20 seconds `holdfast status` names it."""

import os
import sys
import time

import holdfast

steps = int(sys.argv[1])
is_slow = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
for step in range(1, steps + 1):
    time.sleep(0.4 if is_slow else 0.1)
    holdfast.progress(step=step)
    print(f"step {step} loss {1 / step:.3f}", flush=True)
