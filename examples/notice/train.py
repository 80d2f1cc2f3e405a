"""A training loop that saves its state when a node is about to go away, and goes on from there.

    holdfast run --nproc-per-node 2 examples/notice/train.py /tmp/state.json --steps 200
    holdfast notice --in 1m

Ranks may hear of a notice in different steps, so they agree on a step first: rank 0 asks, and all others hear of its
answer with the numbers that they exchange anyway. Here they exchange them by torch's gloo; any collective will do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist

import holdfast


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.05)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    first, total = 0, 0.0
    if os.path.exists(args.path):
        with open(args.path) as file:
            first, total = json.load(file)
    print(f"rank {rank} of {size} begins at step {first}", flush=True)

    for step in range(first, args.steps):
        # The work of a step, and in the same collective whether rank 0 knows of a notice.
        shared = torch.tensor([1.0 / size, float(rank == 0 and holdfast.notice() is not None)])
        dist.all_reduce(shared)
        total += float(shared[0])
        holdfast.progress(step)
        if shared[1]:
            if rank == 0:
                with open(f"{args.path}.new", "w") as file:
                    json.dump((step + 1, total), file)
                os.replace(f"{args.path}.new", args.path)
                print(f"saved after step {step}", flush=True)
            dist.barrier()  # The state is saved: all ranks may go.
            dist.destroy_process_group()
            return 95
        time.sleep(args.step_s)
    print(f"rank {rank} is done: {total:.0f} steps", flush=True)
    dist.destroy_process_group()
    return 0


sys.exit(main())
