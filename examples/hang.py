"""Workers that stop making progress, on purpose, in the first life only; see docs/hangs.md.

    holdfast run --standalone --nproc-per-node 4 --hang-timeout 3s --max-restarts 1 examples/hang.py lock

`lock`: rank 2 waits for a lock, and the others for rank 2. `timeout`: rank 1 only for 2 s. `stop`: rank 2 is stopped.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
IS_FIRST_LIFE = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

checkpoint_lock = threading.Lock()


def save_checkpoint() -> None:
    with checkpoint_lock:
        print(f"rank {RANK} saves a checkpoint", flush=True)


def go_wrong(how: str) -> None:
    """What a program should not do."""
    if how != "stop":
        checkpoint_lock.acquire()  # Somebody forgot to release it.
    else:
        os.kill(os.getpid(), signal.SIGSTOP)


def barrier(peers: list[socket.socket]) -> None:
    """Everybody tells rank 0, and rank 0 tells everybody."""
    if RANK == 0:
        for peer in peers:
            peer.recv(1)
    for peer in peers:
        peer.sendall(b".")
    if RANK != 0:
        peers[0].recv(1)


def meet() -> list[socket.socket]:
    address = (os.environ["MASTER_ADDR"], int(os.environ.get("HOLDFAST_FREE_PORT", 29555)))
    if RANK == 0:
        with socket.create_server(address, backlog=WORLD_SIZE) as server:
            return [server.accept()[0] for _ in range(WORLD_SIZE - 1)]
    while True:
        try:
            return [socket.create_connection(address)]
        except ConnectionRefusedError:
            time.sleep(0.05)


def train(how: str) -> None:
    peers = meet()
    if how == "timeout" and RANK == 1:
        peers[0].settimeout(2)
    for step in range(1, 5):
        if RANK == 0:
            print(f"step {step}", flush=True)
        if step == 3 and RANK == 2 and IS_FIRST_LIFE:
            go_wrong(how)
        if step % 3 == 0:
            save_checkpoint()
        barrier(peers)


if __name__ == "__main__":
    try:
        train(sys.argv[1] if len(sys.argv) > 1 else "lock")
    except TimeoutError:
        raise RuntimeError("timed out waiting for rank 0 for 2 s") from None
    except OSError:
        signal.pause()  # A peer was stopped, and this one will be.
