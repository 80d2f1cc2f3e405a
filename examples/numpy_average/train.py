"""Train with numpy alone: each worker improves its own copy of the parameters, and now and then they take the average.

There is no framework here. The workers meet at the store that holdfast serves at MASTER_ADDR:MASTER_PORT. It is made
for torch, but its protocol is small: `Store` below is a whole client. It is fresh in every round, so a restarted job
never meets values of its last life.
"""

import os
import socket
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TRUTH = np.array([3.0, -2.0, 0.5])  # The parameters that the workers look for.


class Store:
    """Keys and values at rank 0's node. A number names the operation, and every text has its length before it."""

    def __init__(self):
        self.sock = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        self.sock.sendall(struct.pack("<BI", 0, 0x3C85F7CE))  # "I am a client of this store."

    def set(self, key, value):
        self.sock.sendall(b"\x01" + sized(key.encode()) + sized(value))

    def get(self, key):
        """Waits until another worker has set it."""
        name = sized(key.encode())
        self.sock.sendall(b"\x06" + struct.pack("<Q", 1) + name)  # Wait for one key,
        self.receive(1)
        self.sock.sendall(b"\x03" + name)  # and get it.
        return self.receive(*struct.unpack("<Q", self.receive(8)))

    def receive(self, size):
        return self.sock.recv(size, socket.MSG_WAITALL)


def sized(data):
    return struct.pack("<Q", len(data)) + data


def average(store, name, values):
    store.set(f"{name}/{RANK}", values.tobytes())
    others = [store.get(f"{name}/{rank}") for rank in range(WORLD_SIZE)]
    return np.mean([np.frombuffer(each) for each in others], axis=0)


def improve(parameters, random, steps=20):
    """Gradient descent on samples that only this worker has."""
    for _ in range(steps):
        x = random.normal(size=(16, 3))
        errors = x @ parameters - x @ TRUTH
        parameters = parameters - 0.02 * x.T @ errors / len(x)
    return parameters


def main():
    rounds = int(sys.argv[1])
    checkpoint = Path(tempfile.gettempdir(), f"holdfast-average-{os.environ['TORCHELASTIC_RUN_ID']}")
    store = Store()
    first, parameters = 0, np.zeros(3)
    if checkpoint.exists():
        first, *values = np.load(checkpoint)
        first, parameters = int(first), np.array(values)
    print(f"rank {RANK} of {WORLD_SIZE} begins at round {first}", flush=True)
    for number in range(first, rounds):
        random = np.random.default_rng([number, RANK])
        parameters = average(store, f"round {number}", improve(parameters, random))
        if RANK == 0:
            with open(f"{checkpoint}.new", "wb") as file:
                np.save(file, [number + 1, *parameters])
            os.replace(f"{checkpoint}.new", checkpoint)
        if number == 2 and RANK == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit("this worker fails on purpose, once")
    print(f"rank {RANK}: {np.round(parameters, 3)} after {rounds} rounds", flush=True)


if __name__ == "__main__":
    main()
