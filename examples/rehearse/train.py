"""A job that can be rehearsed: it keeps its place in a file, and its result does not depend on what happened meanwhile.

holdfast rehearse --nproc-per-node 2 --max-restarts 3 --expect-file result-0.json examples/rehearse/train.py
"""

import json
import os
import time

import holdfast

RANK = int(os.environ["RANK"])
STEPS = 40


def load() -> tuple[int, int]:
    try:
        with open(f"state-{RANK}.json") as file:
            step, state = json.load(file)
            return step, state
    except FileNotFoundError:
        return 0, 0


def save(name: str, value: object) -> None:
    """In one piece or not at all: the worker may be killed at any moment."""
    with open(f"{name}.tmp", "w") as file:
        json.dump(value, file)
    os.replace(f"{name}.tmp", name)


step, state = load()
while step < STEPS:
    time.sleep(0.05)
    step, state = step + 1, (state * 31 + step * 7 + RANK) % 1_000_003
    save(f"state-{RANK}.json", (step, state))
    holdfast.progress(step)
save(f"result-{RANK}.json", state)
