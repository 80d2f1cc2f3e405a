"""Fit a line with JAX: each process has a part of every batch, and XLA averages the gradients.

`jax.distributed.initialize()` needs no arguments: under holdfast JAX learns from it how many processes there are, which
one this is, and where they meet. Rank 0 saves the parameters after every step, so a restarted job goes on where it was.
The result does not depend on the number of processes.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

BATCH = 24  # Of all processes together; it can be divided by 1, 2, 3, 4 and 6.


def loss(line, x, y):
    return jnp.mean((line[0] * x + line[1] - y) ** 2)


def batch_of(step):
    """The same numbers for whoever asks."""
    x = np.random.default_rng(step).uniform(-1, 1, BATCH).astype(np.float32)
    return x, 3 * x + 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = f"{tempfile.gettempdir()}/holdfast-jax-{os.environ['TORCHELASTIC_RUN_ID']}"
    parser.add_argument("--checkpoint", type=Path, default=usual, help="a file that all nodes can read")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fail-at", type=int, help="rank 1 fails at this step, once")
    parser.add_argument("--step-time", type=float, default=0.0, help="seconds to wait in each step")
    args = parser.parse_args()

    jax.distributed.initialize()
    rank, world_size = jax.process_index(), jax.process_count()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharded, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    @jax.jit
    def improve(line, x, y):
        value, gradient = jax.value_and_grad(loss)(line, x, y)
        return line - 0.1 * gradient, value

    def own_part(values):
        """Of this process. JAX sees one array that is spread over all of them."""
        part = values[rank * BATCH // world_size : (rank + 1) * BATCH // world_size]
        return jax.make_array_from_process_local_data(sharded, part)

    step, line = 0, np.zeros(2, np.float32)
    if args.checkpoint.exists():
        saved = np.load(args.checkpoint)
        step, line = int(saved["step"]), saved["line"]
    print(f"rank {rank} of {world_size} begins at step {step}", flush=True)
    line = jax.make_array_from_process_local_data(replicated, line)
    while step < args.steps:
        if rank == 1 and step == args.fail_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("this worker fails on purpose, once")
        line, value = improve(line, *map(own_part, batch_of(step)))
        step += 1
        if rank == 0:
            save(args.checkpoint, step, line)
            print(f"step {step}: loss {value:.6f}", flush=True)
        time.sleep(args.step_time)
    slope, offset = np.asarray(line)
    print(f"rank {rank}: y = {slope:.4f} x + {offset:.4f}", flush=True)


def save(path, step, line):
    """In one piece or not at all: the worker may be stopped at any moment."""
    with open(f"{path}.new", "wb") as file:
        np.savez(file, step=step, line=np.asarray(line))
    os.replace(f"{path}.new", path)


if __name__ == "__main__":
    main()
