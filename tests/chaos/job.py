"""The job of a campaign: a loop with an all-reduce in each step and a checkpoint after it, on whole numbers.

What a step adds does not depend on the number of workers, so any run of it, however often it was disturbed, has exactly
the result of `result_of`. Rank 0 gathers, adds and sends back; a worker whose connection breaks exits with 7.

With `snapshots` each worker saves after every step (`holdfast.snapshots`), and the checkpoint is written now and then
only. Each rank keeps a number of its own, the sum of its parts: a part that is lost, or loaded twice, shows at the end.

Each worker notes its life in a file of its own: when it started, and every few milliseconds that it is alive, by the
clock that all processes of the machine share. Rank 0 notes every step. When there is a file `finish`, the job ends.
What must never be is written to `violations`.

    python job.py DIRECTORY [snapshots]
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
from typing import Any

PRIME = (1 << 61) - 1
SAMPLES = 60
STEP_S = 0.02
CHECKPOINT_EVERY = 50  # Steps, with snapshots.
MESSAGE = struct.Struct("=qqq")  # The step, a number, and whether it is the last step, or was loaded.
BEGIN = {"step": 0, "state": 0, "sum": 0, "round": 0}


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

    def spread(self, step: int, number: int, is_loaded: bool) -> tuple[int, int, bool]:
        """What rank 0 says."""
        if self._rank == 0:
            for sock in self._socks:
                sock.sendall(MESSAGE.pack(step, number, is_loaded))
            return step, number, is_loaded
        step, number, flag = MESSAGE.unpack(self._read(self._socks[0]))
        return step, number, bool(flag)

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
        return BEGIN
    return found


def write_checkpoint(home: Path, **values: int) -> None:
    fresh = home / f"checkpoint.{os.getpid()}"
    fresh.write_text(json.dumps(values))
    fresh.replace(home / "checkpoint.json")


class Kept:
    """Snapshots of this rank: the common state, the sum over all ranks, and what this rank has added to it."""

    def __init__(self) -> None:
        import holdfast

        self._snapshots = holdfast.snapshots.open()

    def load(self, rank: int, size: int) -> dict[str, int] | None:
        def merged(parts: list[Any]) -> dict[str, int]:
            """Each part goes to one rank, whatever the number of ranks."""
            first = parts[0]
            return {"state": first["state"], "sum": first["sum"], "own": sum(each["own"] for each in parts[rank::size])}

        saved = self._snapshots.load(reshard=merged)
        return None if saved is None else {**saved, "step": saved.step}

    def save(self, step: int, **values: int) -> None:
        with self._snapshots.save(step) as out:
            out.update(values)


def main() -> None:
    home, has_snapshots = Path(sys.argv[1]), sys.argv[2:] == ["snapshots"]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    round = int(os.environ.get("HOLDFAST_ROUND", "0"))  # torchrun's has no number, but a port of its own.
    world = f"{round:06}" if round else f"{address}_{port}"
    note_life(home / "lives" / f"{world}-{rank:03}-{os.getpid()}")
    try:
        peers = Peers(rank, size, (address, int(os.environ.get("HOLDFAST_FREE_PORT", port + 1))))
        kept = Kept() if has_snapshots else None
        train(home, peers, (rank, size, round), kept, begun(home, peers, (rank, size, round), kept))
    except AssertionError as error:
        with (home / "violations").open("a") as file:
            file.write(f"{world}-{rank}: {error}\n")
        raise
    except (OSError, RuntimeError) as error:  # As of a snapshot whose last holder has just gone.
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        os._exit(7)


def begun(home: Path, peers: Peers, me: tuple[int, int, int], kept: Kept | None) -> dict[str, int]:
    """The step, the state, the sum, and this rank's share of it. All ranks load the same step, or none does and rank 0
    reads the checkpoint."""
    rank, size, round = me
    loaded = kept.load(rank, size) if kept is not None else None
    start = loaded or (read_checkpoint(home) if rank == 0 else BEGIN)
    assert start.get("round", 0) <= round, f"the checkpoint is of round {start['round']}, this is {round}"
    step, state, is_loaded = peers.spread(start["step"], start["state"], loaded is not None)
    assert is_loaded == (loaded is not None), f"rank 0 {'has' if is_loaded else 'has not'} loaded a snapshot"
    if rank == 0:
        with (home / "begun.log").open("a") as file:
            file.write(f"{round} {step} {'snapshot' if is_loaded else 'checkpoint'}\n")
    if loaded is not None:
        assert (step, state) == (loaded["step"], loaded["state"]), f"rank 0 loaded step {step}, not {loaded['step']}"
        return loaded
    return {"step": step, "state": state, "sum": start["sum"], "own": start["sum"]}


def train(home: Path, peers: Peers, me: tuple[int, int, int], kept: Kept | None, start: dict[str, int]) -> None:
    rank, size, round = me
    step, state, own, total_sum = start["step"], start["state"], start["own"], start["sum"]
    steps = os.open(home / "steps.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    while True:
        is_last = rank == 0 and (home / "finish").exists()
        part = contribution(step, range(rank, SAMPLES, size))
        step, total, is_last = peers.reduce(step, part, is_last)
        state, step = advanced(state, total), step + 1
        own, total_sum = (own + part) % PRIME, (total_sum + total) % PRIME
        report_progress(step)
        if kept is not None:
            kept.save(step, state=state, sum=total_sum, own=own)
        if is_last:
            check_sum(peers, step, own, total_sum if rank == 0 else None)
        if rank == 0:
            if kept is None or is_last or step % CHECKPOINT_EVERY == 0:
                write_checkpoint(home, step=step, state=state, sum=total_sum, round=round)
            os.write(steps, b"%d %d %d\n" % (now_ns(), round, step))
        if is_last:
            return
        pause(STEP_S)


def check_sum(peers: Peers, step: int, own: int, expected: int | None) -> None:
    """What the ranks have kept of their own is together the sum. Only rank 0 knows the sum for certain."""
    _, together, _ = peers.reduce(step, own, True)
    assert expected in (None, together), f"the ranks' own parts add up to {together}, not {expected}"


def report_progress(step: int) -> None:
    if "HOLDFAST_ROUND" in os.environ:
        import holdfast

        holdfast.progress(step)


if __name__ == "__main__":
    main()
