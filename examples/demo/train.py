"""A pretend training job: four workers count to 6 together, and rank 2 crashes once on the way.

It needs no framework. Each worker keeps its place in a checkpoint file, so that a restart goes on where the
group was, as a real training script would.
"""

import json
import os
import sys
import tempfile
import time

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
LIFE = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
STEPS = 6


def checkpoint_path() -> str:
    run = os.environ["TORCHELASTIC_RUN_ID"]
    return os.path.join(tempfile.gettempdir(), f"holdfast-demo-{run}-{RANK}.json")


def load() -> int:
    try:
        with open(checkpoint_path()) as file:
            return json.load(file)["step"]
    except FileNotFoundError:
        return 0


def save(step: int) -> None:
    """In one piece or not at all: the worker may be stopped at any moment."""
    with open(checkpoint_path() + ".tmp", "w") as file:
        json.dump({"step": step}, file)
    os.replace(checkpoint_path() + ".tmp", checkpoint_path())


def main() -> None:
    first = load()
    print(f"rank {RANK} of {WORLD_SIZE} begins at step {first} (life {LIFE})")
    for step in range(first, STEPS):
        time.sleep(0.2)
        if RANK == 2 and step == 3 and LIFE == 0:
            raise RuntimeError("the disk of this worker is on fire (on purpose, once)")
        save(step + 1)
        print(f"rank {RANK}: step {step + 1}/{STEPS}")
    os.remove(checkpoint_path())


if __name__ == "__main__":
    sys.exit(main())
