"""A training that fails once: python steps.py DIRECTORY snapshots|CHECKPOINTS MIB.

Each worker has a state of MIB mebibytes, which every step changes, and an all-reduce in every step. It saves a snapshot
after each step, or a checkpoint in the directory CHECKPOINTS after every tenth. In the first attempt the last rank
kills itself in step 15. In the second one all note when they have finished step 16, and how many steps they repeated.
"""

import marks  # noqa: I001
import os
import signal
import sys

import torch
import torch.distributed as dist

FAILED_STEP, CHECKPOINT_EVERY, TENSORS = 15, 10, 16

signal.alarm(170)  # No worker outlives a benchmark that went wrong.
torch.set_num_threads(1)
marks.leave("begun")
kind, mib = sys.argv[2], int(sys.argv[3])
state = {f"layer{number}": torch.full(((mib << 20) // 4 // TENSORS,), 0.0) for number in range(TENSORS)}
checkpoint = f"{kind}/{marks.RANK}"
step = 0
dist.init_process_group("gloo")
if kind == "snapshots":
    import holdfast

    snapshots = holdfast.snapshots.open()
    if (saved := snapshots.load()) is not None:
        loaded, step = saved["state"], saved.step + 1
elif os.path.exists(checkpoint):
    found = torch.load(checkpoint)
    loaded, step = found["state"], found["step"] + 1
first = step
for name in state if first else ():
    state[name].copy_(loaded[name])  # As load_state_dict does.
saved = loaded = found = None
marks.leave("loaded")
while step <= FAILED_STEP + 1:
    if marks.ATTEMPT == 0 and step == FAILED_STEP and marks.RANK == marks.WORLD_SIZE - 1:
        marks.leave("failed")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    for tensor in state.values():
        tensor.add_(1)
    if kind == "snapshots":
        with snapshots.save(step) as out:
            out["state"] = state
    elif step % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
        torch.save({"state": state, "step": step}, f"{checkpoint}.new")
        os.rename(f"{checkpoint}.new", checkpoint)
        dist.barrier()  # Else a rank could load an older one than the others.
    step += 1
assert {float(tensor[0]) for tensor in state.values()} == {FAILED_STEP + 2.0}
marks.leave("done", value=FAILED_STEP - first)
dist.destroy_process_group()
