"""A small training that saves after each step: with DDP, FSDP, numpy or JAX. For tests that kill its workers.

    snapshot_training.py DIRECTORY KIND STEPS KILLS

A worker of one of the first KILLS attempts waits after some steps, until it is killed. All wait before the step in the
file `pause`, if there is one.

Each rank writes what it does into a file of its own, a line at a time: `loads`, `begin STEP`, `sample STEP DIGEST`,
`saved STEP`, and at the end `weights DIGEST`.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast

DIRECTORY, KIND, STEPS, KILLS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
MOST_STEPS = 36  # Of an attempt that is killed.
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["HOLDFAST_ROUND"]) - 1  # Of restarts and of lost nodes.
LOG = os.open(DIRECTORY / f"rank{RANK}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

# State to keep, a step with a sample, and all weights as bytes.
Training = tuple[Callable[[], Any], Callable[[Any], None], Callable[[], bytes], Callable[[], bytes]]


def note(*words: object) -> None:
    os.write(LOG, (" ".join(map(str, (ATTEMPT, os.getpid(), *words))) + "\n").encode())


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def torch_training(is_sharded: bool) -> Training:
    import torch
    import torch.distributed as dist

    from holdfast.snapshots.torch import restore, state_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Dropout(0.1), torch.nn.Linear(50, 3))
    if is_sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(100 + RANK)

    def step() -> bytes:
        inputs = torch.randn(8, 30)
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return bytes(inputs.numpy().tobytes())

    def weights() -> bytes:
        parts = [each.to_local() if is_sharded else each for each in model.parameters()]
        return b"".join(each.detach().numpy().tobytes() for each in parts)

    return (lambda: state_of(model, optimizer)), (lambda saved: restore(saved, model, optimizer)), step, weights


def numpy_training() -> Training:
    import numpy as np

    state: dict[str, Any] = {"weights": np.zeros(1000), "rng": np.random.default_rng(RANK).bit_generator.state}

    def step() -> bytes:
        rng = np.random.default_rng()
        rng.bit_generator.state = state["rng"]
        sample = rng.normal(size=1000)
        state["weights"] = state["weights"] * 0.9 + sample
        state["rng"] = rng.bit_generator.state
        return sample.tobytes()

    return (lambda: state), state.update, step, lambda: state["weights"].tobytes()


def jax_training() -> Training:
    import jax
    import jax.numpy as jnp

    state: dict[str, Any] = {"weights": jnp.zeros(1000, jnp.bfloat16), "key": jax.random.PRNGKey(RANK)}

    def step() -> bytes:
        key, own = jax.random.split(jnp.asarray(state["key"]))
        sample = jax.random.normal(own, (1000,), jnp.bfloat16)
        state.update(weights=jnp.asarray(state["weights"]) * 0.9 + sample, key=key)
        return bytes(sample.tobytes())

    return (lambda: state), state.update, step, lambda: bytes(state["weights"].tobytes())


def meet() -> None:
    """Ranks without collectives begin together: a rank that is ahead of the others waits for 5 s only."""
    (DIRECTORY / f"there-{ATTEMPT}-{RANK}").touch()
    while any(not (DIRECTORY / f"there-{ATTEMPT}-{rank}").exists() for rank in range(WORLD)):
        time.sleep(0.01)


def pause() -> int:
    path = DIRECTORY / "pause"
    return int(path.read_text()) if path.exists() else STEPS


def main() -> None:
    kinds: dict[str, Callable[[], Training]] = {
        "ddp": lambda: torch_training(is_sharded=False),
        "fsdp": lambda: torch_training(is_sharded=True),
        "numpy": numpy_training,
        "jax": jax_training,
    }
    state, restore, step, weights = kinds[KIND]()
    meet()
    snapshots = holdfast.snapshots.open()
    note("loads")
    saved = snapshots.load()
    if saved is not None:
        restore(saved["training"])
    first = saved.step + 1 if saved is not None else 0
    for number in range(first, STEPS):
        if number == first + MOST_STEPS and ATTEMPT < KILLS:
            time.sleep(600)
        while number >= pause():
            time.sleep(0.01)
        note("begin", number)
        sample = step()
        note("sample", number, digest(sample))
        with snapshots.save(number) as out:
            out["training"] = state()
        note("saved", number)
        holdfast.progress(number)
        time.sleep(0.005)  # So that it is not over before it can be killed.
    note("weights", digest(weights()))


if __name__ == "__main__":
    main()
