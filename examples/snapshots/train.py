"""A training with DDP that loses nothing: workers are killed, and the others go on at the very next step.

Each worker saves its state after every step (`holdfast.snapshots`). Rank 1 kills itself at random, and the group
continues with the step that was not finished. At the end the weights are those of a training that nothing disturbed.
"""

import os
import random
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.snapshots.torch import restore, state_of

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
KILLS = int(sys.argv[2]) if len(sys.argv) > 2 else 3


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.Adam(model.parameters())

    snapshots = holdfast.snapshots.open()
    first = 0
    if (saved := snapshots.load()) is not None:
        restore(saved["training"], model, optimizer)
        first = saved.step + 1
        if rank == 0:
            print(f"goes on with step {first}", flush=True)

    # Not before the third step: by then every rank has saved the first one.
    kill_at = first + 2 + random.SystemRandom().randrange(max(1, STEPS // (KILLS + 1) - 1))
    may_kill = rank == 1 and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < KILLS
    for step in range(first, STEPS):
        inputs = torch.randn(16, 32)  # The random state is part of the snapshot, so the samples are the same, too.
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        if may_kill and step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with snapshots.save(step) as out:
            out["training"] = state_of(model, optimizer)
        holdfast.progress(step)
    if rank == 0:
        weights = torch.cat([each.detach().flatten() for each in model.parameters()])
        print(f"step {STEPS - 1}: the weights add up to {weights.double().sum().item():.12f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
