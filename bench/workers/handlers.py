"""Nodes without workers: for each line on stdin so many processes, each with one rendezvous handler, form a round.

    python handlers.py tcp|c10d

A line is `COUNT RUN_ID [ENDPOINT]`. The answer is the seconds from the moment when all could begin until the last one
knew its rank. The library is imported once and the nodes are forks, on both sides. The server is there before the clock
starts: of c10d, the first node hosts it; of tcp, a coordinator listens at the endpoint.
"""

import os
import select
import signal
import socket
import struct
import sys
import time

LIMIT_S = 60
RESULT = struct.Struct("iq")

backend = sys.argv[1]
if backend == "tcp":
    from holdfast.rendezvous.api import RendezvousParameters
    from holdfast.rendezvous.registry import get_rendezvous_handler
else:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler


def node(number: int, count: int, run_id: str, endpoint: str, pipes: dict[str, int]) -> None:
    is_host = backend == "c10d" and number == 0
    more = {"is_host": is_host, "join_timeout": LIMIT_S}
    parameters = RendezvousParameters(backend, endpoint, run_id, count, count, local_addr="127.0.0.1", **more)
    handler = get_rendezvous_handler(parameters)
    os.write(pipes["ready"], b".")
    os.read(pipes["go"], 1)
    rank = handler.next_rendezvous().rank
    os.write(pipes["result"], RESULT.pack(rank, time.monotonic_ns()))
    signal.pause()


def take(fd: int, size: int, ends: float) -> bytes:
    """So many bytes, or as many as come in time."""
    data = b""
    while len(data) < size and select.select([fd], [], [], max(0.0, ends - time.monotonic()))[0]:
        data += os.read(fd, size - len(data))
    return data


def form(count: int, run_id: str, endpoint: str) -> float:
    ready, go, result = os.pipe(), os.pipe(), os.pipe()

    def start(number: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(LIMIT_S + 60)
                os.close(go[1])
                node(number, count, run_id, endpoint, {"ready": ready[1], "go": go[0], "result": result[1]})
            finally:
                os._exit(1)
        return pid

    ends = time.monotonic() + LIMIT_S
    children = [start(0)]
    try:
        is_up = len(take(ready[0], 1, ends))  # The host of the store comes first.
        children += [start(number) for number in range(1, count)]
        is_up += len(take(ready[0], count - 1, ends))
        began_ns = time.monotonic_ns()
        os.close(go[1])
        found = list(RESULT.iter_unpack(take(result[0], RESULT.size * count, ends)))
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for fd in (*ready, go[0], *result):
            os.close(fd)
    if sorted(rank for rank, _ in found) != list(range(count)):
        sys.exit(f"{is_up} of {count} nodes were ready, and {len(found)} had a rank after {LIMIT_S} s")
    return (max(at_ns for _, at_ns in found) - began_ns) / 1e9


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


print("ready", flush=True)
for line in sys.stdin:
    size, name, *where = line.split()
    print(form(int(size), name, where[0] if where else free_endpoint()), flush=True)
