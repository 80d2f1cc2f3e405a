"""Train a small network with PyTorch's fully sharded data parallelism (FSDP2), on CPUs.

Each worker has a part of every parameter. So each writes its part of a checkpoint (torch.distributed.checkpoint), and a
checkpoint of four workers can be loaded by two: torch cuts it anew. A checkpoint is a directory; `newest` names the
last one that is complete. As in ../ddp, the loss does not depend on the number of workers or on interruptions.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH = 24  # Of all workers together; it can be divided by 1, 2, 3, 4 and 6.


def batch_of(step):
    """The same samples for whoever asks. Your job would read them from a data set."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 4, generator=generator, dtype=torch.float64)
    return x, x.prod(dim=1, keepdim=True).tanh()


def save(directory, step, model, optimizer):
    """All workers call this. The name of the checkpoint is written when all parts of it are."""
    parameters, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": optimizer_state}, checkpoint_id=directory / f"step{step}")
    if dist.get_rank() == 0:
        (directory / "newest.new").write_text(str(step))
        os.replace(directory / "newest.new", directory / "newest")
        shutil.rmtree(directory / f"step{step - 2}", ignore_errors=True)


def load(directory, model, optimizer):
    """Returns the step at which to begin."""
    if not (directory / "newest").exists():
        return 0
    step = int((directory / "newest").read_text())
    parameters, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": parameters, "optimizer": optimizer_state}, checkpoint_id=directory / f"step{step}")
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=optimizer_state)
    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = f"{tempfile.gettempdir()}/holdfast-fsdp-{os.environ['TORCHELASTIC_RUN_ID']}"
    parser.add_argument("--checkpoint", type=Path, default=usual, help="a directory that all nodes can read and write")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fail-at", type=int, help="rank 1 fails at this step, once")
    parser.add_argument("--step-time", type=float, default=0.0, help="seconds to wait in each step")
    args = parser.parse_args()
    args.checkpoint.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(1)  # All workers begin with the same parameters.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = load(args.checkpoint, model, optimizer)
    print(f"rank {rank} of {world_size} begins at step {step}", flush=True)

    while step < args.steps:
        if rank == 1 and step == args.fail_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("this worker fails on purpose, once")
        x, y = batch_of(step)
        own = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        loss = nn.functional.mse_loss(model(x[own]), y[own])
        optimizer.zero_grad()
        loss.backward()  # Each worker gets the averaged gradients of its own part.
        optimizer.step()
        step += 1
        save(args.checkpoint, step, model, optimizer)
        if rank == 0:
            print(f"step {step}", flush=True)
        time.sleep(args.step_time)

    x, y = batch_of(-1)
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x), y)  # All workers take part: each has a piece of the model.
    if rank == 0:
        print(f"loss {loss:.8f} after {step} steps", flush=True)
    dist.barrier()
    os._exit(0)  # gloo aborts now and then when the interpreter frees what FSDP still holds of it.


if __name__ == "__main__":
    main()
