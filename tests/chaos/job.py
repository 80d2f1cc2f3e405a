"""The job of a campaign: a loop with an all-reduce in each step and a checkpoint after it, on whole numbers.

What a step adds does not depend on the number of workers, so any run of it, however often it was disturbed, has exactly
the result of `result_of`. Rank 0 gathers, adds and sends back; a worker whose connection breaks exits with 7.

Each worker notes its life in a file of its own: when it started, and every few milliseconds that it is alive, by the
clock that all processes of the machine share. Rank 0 notes every step. When there is a file `finish`, the job ends.

    python job.py DIRECTORY
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
import threading
import time
from pathlib import Path

PRIME = (1 << 61) - 1
SAMPLES = 60
STEP_S = 0.02
MESSAGE = struct.Struct("=qqq")  # The step, a number, and whether it is the last step.


def contribution(step: int, samples: range) -> int:
    return sum(pow(step * 1_000_003 + sample * 7919 + 17, 3, PRIME) for sample in samples) % PRIME


def advanced(state: int, total: int) -> int:
    return (state * 31 + total) % PRIME


def result_of(steps: int) -> int:
    state = 0
    for step in range(steps):
        state = advanced(state, contribution(step, range(SAMPLES)))
    return state


def now_ns() -> int:
    return time.monotonic_ns()


def pause(seconds: float) -> None:
    """As `time.sleep`, which fails where libfaketime shows another time."""
    select.select([], [], [], seconds)


def note_life(path: Path) -> None:
    """From now on, in a thread."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.pwrite(fd, b"%020d " % now_ns(), 0)

    def tick() -> None:
        while True:
            os.pwrite(fd, b"%020d\n" % now_ns(), 21)
            pause(0.005)

    threading.Thread(target=tick, daemon=True).start()


class Peers:
    """The connections of an all-reduce."""

    def __init__(self, rank: int, size: int, address: tuple[str, int]) -> None:
        self._rank, self._size = rank, size
        if rank == 0:
            with socket.create_server(address) as server:
                self._socks = [server.accept()[0] for _ in range(size - 1)]
        else:
            self._socks = [self._connected(address)] if size > 1 else []
        for sock in self._socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @staticmethod
    def _connected(address: tuple[str, int]) -> socket.socket:
        while True:
            try:
                return socket.create_connection(address)
            except ConnectionRefusedError:
                pause(0.01)

    def reduce(self, step: int, number: int, is_last: bool) -> tuple[int, int, bool]:
        """The step and the last word of rank 0, and the sum over all ranks."""
        if self._rank == 0:
            for sock in self._socks:
                of_peer, part, _ = MESSAGE.unpack(self._read(sock))
                assert of_peer == step, f"a peer is at step {of_peer}, rank 0 at {step}"
                number = (number + part) % PRIME
            for sock in self._socks:
                sock.sendall(MESSAGE.pack(step, number, is_last))
            return step, number, is_last
        for sock in self._socks:
            sock.sendall(MESSAGE.pack(step, number, 0))
        step, number, last = MESSAGE.unpack(self._read(self._socks[0]))
        return step, number, bool(last)

    def spread(self, step: int, number: int) -> tuple[int, int]:
        """What rank 0 says."""
        if self._rank == 0:
            for sock in self._socks:
                sock.sendall(MESSAGE.pack(step, number, 0))
            return step, number
        return MESSAGE.unpack(self._read(self._socks[0]))[:2]

    @staticmethod
    def _read(sock: socket.socket) -> bytes:
        data = b""
        while len(data) < MESSAGE.size:
            piece = sock.recv(MESSAGE.size - len(data))
            if not piece:
                raise ConnectionResetError("a peer has closed the connection")
            data += piece
        return data


def read_checkpoint(home: Path) -> dict[str, int]:
    try:
        found: dict[str, int] = json.loads((home / "checkpoint.json").read_text())
    except FileNotFoundError:
        return {"step": 0, "state": 0, "round": 0}
    return found


def write_checkpoint(home: Path, **values: int) -> None:
    fresh = home / f"checkpoint.{os.getpid()}"
    fresh.write_text(json.dumps(values))
    fresh.replace(home / "checkpoint.json")


def main() -> None:
    home = Path(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    round = int(os.environ.get("HOLDFAST_ROUND") or os.environ["TORCHELASTIC_RESTART_COUNT"])
    note_life(home / "lives" / f"{round:06}-{rank:03}-{os.getpid()}")
    port = int(os.environ.get("HOLDFAST_FREE_PORT") or int(os.environ["MASTER_PORT"]) + 1)
    try:
        peers = Peers(rank, size, (os.environ["MASTER_ADDR"], port))
        checkpoint = read_checkpoint(home) if rank == 0 else {"step": 0, "state": 0, "round": 0}
        assert checkpoint["round"] <= round, f"the checkpoint is of round {checkpoint['round']}, this is {round}"
        step, state = peers.spread(checkpoint["step"], checkpoint["state"])
        train(home, peers, (rank, size, round), step, state)
    except OSError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        os._exit(7)


def train(home: Path, peers: Peers, me: tuple[int, int, int], step: int, state: int) -> None:
    rank, size, round = me
    steps = os.open(home / "steps.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    while True:
        is_last = rank == 0 and (home / "finish").exists()
        part = contribution(step, range(rank, SAMPLES, size))
        step, total, is_last = peers.reduce(step, part, is_last)
        state, step = advanced(state, total), step + 1
        report_progress(step)
        if rank == 0:
            write_checkpoint(home, step=step, state=state, round=round)
            os.write(steps, b"%d %d %d\n" % (now_ns(), round, step))
        if is_last:
            return
        pause(STEP_S)


def report_progress(step: int) -> None:
    try:
        import holdfast
    except ImportError:
        return
    holdfast.progress(step)


if __name__ == "__main__":
    main()
