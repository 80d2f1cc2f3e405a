"""Train a small network with PyTorch's DistributedDataParallel, on CPUs.

Nothing here is holdfast's. Two habits make the job survive the loss of workers and nodes: it saves its state to a place
that all nodes can read, and it begins with what is saved there. Each step works on the same samples however many
workers there are, so a job that was interrupted ends with the loss of one that was not.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

BATCH = 24  # Of all workers together; it can be divided by 1, 2, 3, 4 and 6.


def batch_of(step):
    """The same samples for whoever asks. Your job would read them from a data set."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 4, generator=generator, dtype=torch.float64)
    return x, x.prod(dim=1, keepdim=True).tanh()


def save(path, **state):
    """In one piece or not at all: the worker may be stopped at any moment."""
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = f"{tempfile.gettempdir()}/holdfast-ddp-{os.environ['TORCHELASTIC_RUN_ID']}"
    parser.add_argument("--checkpoint", type=Path, default=usual, help="a file that all nodes can read")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fail-at", type=int, help="rank 1 fails at this step, once")
    parser.add_argument("--step-time", type=float, default=0.0, help="seconds to wait in each step")
    args = parser.parse_args()

    torch.manual_seed(1)  # All workers begin with the same parameters.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    network = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step, loss = 0, None
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    print(f"rank {rank} of {world_size} begins at step {step}", flush=True)

    while step < args.steps:
        if rank == 1 and step == args.fail_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("this worker fails on purpose, once")
        x, y = batch_of(step)
        own = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        loss = nn.functional.mse_loss(model(x[own]), y[own])
        optimizer.zero_grad()
        loss.backward()  # DistributedDataParallel averages the gradients of all workers here.
        optimizer.step()
        step += 1
        if rank == 0:
            save(args.checkpoint, model=network.state_dict(), optimizer=optimizer.state_dict(), step=step)
            print(f"step {step}", flush=True)
        time.sleep(args.step_time)

    if rank == 0:
        x, y = batch_of(-1)
        with torch.no_grad():
            print(f"loss {nn.functional.mse_loss(network(x), y):.8f} after {step} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
