"""Where this worker runs: see docs/placement.md."""

import os

cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
print(f"rank {os.environ['RANK']} runs on CPU {cpus} (OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']})", flush=True)
