"""A training that writes checkpoints with torch.distributed.checkpoint: checkpoints.py ddp|fsdp KILLED_STEP [DIRECTORY]

After every step each worker saves its state in memory. After every tenth the same copy is written to DIRECTORY in the
background, and a world of any size can load it from there. Rank 1 kills itself once, in step KILLED_STEP of 40, and the
group continues with that step, whatever step the newest checkpoint is of.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.snapshots.torch import Stager, load_into

KIND, KILLED_STEP = sys.argv[1], int(sys.argv[2])
USUAL = Path(tempfile.gettempdir()) / f"holdfast-{os.environ.get('TORCHELASTIC_RUN_ID', 'alone')}"
DIRECTORY = Path(sys.argv[3]) if len(sys.argv) > 3 else USUAL
STEPS, CHECKPOINT_EVERY = 40, 10


class Training:
    """What torch.distributed.checkpoint saves and loads."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        is_sharded = KIND == "fsdp"
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = fully_shard(model, mesh=mesh) if is_sharded else DistributedDataParallel(model)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.step = 0

    def state_dict(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, object]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]

    def advance(self) -> None:
        generator = torch.Generator().manual_seed(self.step * dist.get_world_size() + dist.get_rank())
        inputs = torch.randn(16, 32, generator=generator)
        loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def newest_checkpoint() -> Path | None:
    """Without `.metadata` it was not finished."""
    found = [path.parent for path in DIRECTORY.glob("step-*/.metadata")]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def main() -> None:
    dist.init_process_group("gloo")
    in_background = dist.new_group()  # Its collectives must not mix with those of the training.
    training = Training()
    state, snapshots, writing = {"training": training}, holdfast.snapshots.open(), None
    if (saved := snapshots.load()) is not None:
        load_into(state, saved)
        first, source = saved.step + 1, "a snapshot"
    elif (path := newest_checkpoint()) is not None:
        dcp.load(state, checkpoint_id=path)
        first, source = training.step + 1, "a checkpoint"
    else:
        first, source = 0, "nothing"
    if dist.get_rank() == 0:
        print(f"begins with step {first}, from {source}", flush=True)
    for training.step in range(first, STEPS):
        training.advance()
        if training.step == KILLED_STEP and first == 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        stager = Stager(snapshots, training.step)
        if (training.step + 1) % CHECKPOINT_EVERY:
            stager.stage(state)
        else:
            if writing is not None:
                writing.result()
            writing = dcp.async_save(
                state, checkpoint_id=DIRECTORY / f"step-{training.step}", async_stager=stager,
                process_group=in_background,
            )  # fmt: skip
    if writing is not None:
        writing.result()
    parts = [param.full_tensor() if KIND == "fsdp" else param for param in training.model.parameters()]
    if dist.get_rank() == 0:
        weights = torch.cat([part.detach().flatten() for part in parts])
        print(f"step {STEPS - 1}: the weights add up to {weights.double().sum().item():.12f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
